"""How an engine blends: its settings, and what a recompute ratio may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ragblend.audit import Audit
from ragblend.blend.prefill import RatioChooser, Selector
from ragblend.blend.variants import Policy, check_policy
from ragblend.errors import InvalidSettingError, whole_number
from ragblend.prompt.chunk import Message
from ragblend.quality import QUALITIES, MaxKL

DEFAULT_RATIO = 0.15
DEFAULT_PREFIX_CACHE_BYTES = 512 * 1024 * 1024

Ratio: TypeAlias = float | str | MaxKL | RatioChooser
"""How much is recomputed: a share 0..1 of the reused tokens; or chosen for each request, so that the answer stays as
close to a full prefill's as a quality ("strict", "balanced", "fast") or MaxKL(nats) says, which takes a calibrated
store; or by a function of one's own. "auto": as much as hides behind loading, and never less than "balanced" takes, or
where nothing is calibrated, the default."""


@dataclass(frozen=True)
class EngineSettings:
    """How an engine blends.

    preamble: the head of the prompts to come, which stands before the first chunk: the text that begins the user's
        message, or the messages up to there. Chunks are prefilled behind it.
    policy: what else chunks are prefilled behind, see blend.variants. "none": alone, without the preamble too.
    namespace: part of the name under which KV is stored that was prefilled behind other texts of the corpus, so that
        engines that share a store never meet each other's texts.
    ratio: share of the reused tokens that is recomputed, or what chooses it; see Ratio.
    selector: which tokens those are; None: what calibration found best, before it QuestionAttention().
    prefix_cache_bytes: memory, of the model's device, for in-context KV that is reused bit for bit; 0 turns it off.
    reuse_blended: also keep blended KV, for prompts that go on from the whole of an earlier one (chat turns).
    learn: store the KV of chunks that were missed, after the answer.
    template_settings: variables for the model's chat template, such as {"enable_thinking": False} for Qwen 3.
    correct_drift: add to reused KV what it lacks on average for standing deeper than it was prefilled, see blend.drift.
        The first ingest measures it.
    audit: which answers are held against a full prefill afterwards, and what is tolerated; None: none are.

    Raises:
        InvalidSettingError: a value out of range.
    """

    preamble: str | Sequence[Message] = ""
    policy: Policy = "neighbours"
    namespace: str = ""
    ratio: Ratio = DEFAULT_RATIO
    selector: Selector | None = None
    prefix_cache_bytes: int = DEFAULT_PREFIX_CACHE_BYTES
    reuse_blended: bool = True
    learn: bool = True
    template_settings: Mapping[str, Any] = field(default_factory=dict)
    correct_drift: bool = True
    audit: Audit | None = None

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.selector is not None:
            check_selector(self.selector)
        if not isinstance(self.preamble, str) and not (
            isinstance(self.preamble, Sequence) and all(isinstance(m, Message) for m in self.preamble)
        ):
            raise InvalidSettingError(f"the preamble is a string or a sequence of Messages; got {self.preamble!r}")
        check_policy(self.policy)
        if not isinstance(self.namespace, str):
            raise InvalidSettingError(f"the namespace is a string; got {self.namespace!r}")
        if self.audit is not None and not isinstance(self.audit, Audit):
            raise InvalidSettingError(f"audit is an Audit, such as Audit(share=0.02), or None; got {self.audit!r}")
        whole_number("prefix_cache_bytes", self.prefix_cache_bytes, least=0)

    @property
    def head(self) -> list[Message]:
        """The preamble as messages, of which the last one goes on with the first chunk."""
        return [Message("user", self.preamble)] if isinstance(self.preamble, str) else list(self.preamble)


def check_ratio(ratio: Ratio) -> None:
    """Raises InvalidSettingError unless it is a Ratio."""
    if ratio == "auto" or isinstance(ratio, MaxKL) or callable(ratio):
        return
    if isinstance(ratio, str) and ratio in QUALITIES:
        return
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0.0 <= ratio <= 1.0:
        raise InvalidSettingError(
            f"the recompute ratio is a number from 0 to 1, 'auto', one of {', '.join(QUALITIES)}, or a MaxKL; got "
            f"{ratio!r}"
        )


def check_selector(selector: object) -> None:
    """Raises InvalidSettingError unless it is an instance of a selector."""
    if isinstance(selector, type) or not callable(getattr(selector, "scores", None)):
        raise InvalidSettingError(f"the selector is an object such as QuestionAttention() or HKVD(); got {selector!r}")
