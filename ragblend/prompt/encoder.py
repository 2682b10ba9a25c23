"""Text to ids with the model's own vocabulary, by `tokenizers` pipelines that are built from the model's tokenizer.

Which of its added tokens are live is chosen (see template.py), and nothing is put before or behind what is read: no BOS
or EOS, and no space in front ("dummy prefix").
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ragblend.errors import UnsupportedModelError

_MODEL_STUB = {"type": "BPE", "vocab": {}, "merges": []}
# <|name|>, also with full-width bars: control tokens by convention even where a tokenizer does not flag them special,
# and where a template spells them in pieces ('<|' + role + '|>').
_CONTROL_SHAPE = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)


class Encoder:
    """A `tokenizers` pipeline on the model's own vocabulary, with these added tokens and no dummy prefix."""

    def __init__(self, backend: Tokenizer, document: dict[str, Any], added: list[dict[str, Any]]) -> None:
        model = document["model"]
        pipeline = {
            **document,
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": _without_prefix(document["normalizer"]),
            "pre_tokenizer": _without_prefix(document["pre_tokenizer"]),
            "decoder": _without_prefix(document["decoder"]),
            "post_processor": None,
            "model": {**model, "dropout": None} if model.get("dropout") else _MODEL_STUB,
        }
        self._tokenizer = Tokenizer.from_str(json.dumps(pipeline))
        if not model.get("dropout"):
            self._tokenizer.model = backend.model  # shared, not copied: vocabularies are large
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        ordered = sorted(added, key=lambda token: int(token["id"]))
        self._tokenizer.add_tokens(
            [AddedToken(token["content"], **{flag: token[flag] for flag in flags}) for token in ordered]
        )
        # Ids of added tokens are handed out in the order of adding; where one is left out, later ones move up.
        self._true_id = {
            given: token["id"]
            for token in added
            if (given := self._tokenizer.token_to_id(token["content"])) not in (None, token["id"])
        }
        self._given_id = {true: given for given, true in self._true_id.items()}

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """[tokens] ids and their half-open character ranges in the text."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if self._true_id:
            ids = [self._true_id.get(token, token) for token in ids]
        return ids, encoding.offsets

    def token(self, token_id: int) -> str | None:
        """How the vocabulary writes a token; None for an id that it does not have."""
        return self._tokenizer.id_to_token(self._given_id.get(token_id, token_id))

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, every one of them, control tokens included."""
        return self._tokenizer.decode([self._given_id.get(token, token) for token in ids], skip_special_tokens=False)


def is_control(token: dict[str, Any], named: set[str], sources: dict[str, str]) -> bool:
    """Whether an added token steers the model, so that content must not be able to write it."""
    literal = token["content"]
    if not literal.replace("▁", "").strip():
        return False  # runs of white space: some vocabularies add them, and every template source has them
    if token["special"] or literal in named or _CONTROL_SHAPE.fullmatch(literal):
        return True
    # A plain word that a template happens to use ("user") is no control token; one with brackets or the like is.
    spelled = any(not (char.isalnum() or char.isspace() or char in "▁_") for char in literal)
    return spelled and any(literal in source for source in sources.values())


def _without_prefix(part: Any) -> Any:
    """A normaliser, pre-tokeniser or decoder description without anything that adds or eats a leading space."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Prepend" or (kind == "Strip" and part.get("content") in (" ", "▁") and part.get("start")):
        return None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**part, "add_prefix_space": False}
    if kind == "Sequence":
        name = next(name for name in ("normalizers", "pretokenizers", "decoders") if name in part)
        inner = [kept for item in part[name] if (kept := _without_prefix(item)) is not None]
        return {**part, name: inner} if inner else None
    return part


def unknown_id(backend: Tokenizer, model: dict[str, Any]) -> int | None:
    """What a character outside the vocabulary becomes, as the description of the tokenizer's model has it."""
    if model["type"] == "Unigram":
        return model.get("unk_id")
    unknown = model.get("unk_token")
    return None if unknown is None else backend.token_to_id(unknown)


def automatic_head(document: dict[str, Any]) -> tuple[int, ...]:
    """What the tokenizer of this description puts before a text by itself; () for many.

    Asked of a copy: calling the shared one changes its state.

    Raises:
        UnsupportedModelError: it changes the text itself.
    """
    if document["post_processor"] is None:
        return ()
    model = {**document["model"], "dropout": None} if "dropout" in document["model"] else document["model"]
    copy = Tokenizer.from_str(json.dumps({**document, "model": model, "truncation": None, "padding": None}))
    body = copy.encode("a", add_special_tokens=False).ids
    whole = copy.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(body) + 1):
        if whole[start : start + len(body)] == body:
            return tuple(whole[:start])
    raise UnsupportedModelError("the tokenizer's post-processor changes the text it is given")


def readable(text: str) -> str:
    """The text with paired surrogates joined and lone ones replaced; nearly always the text itself."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
