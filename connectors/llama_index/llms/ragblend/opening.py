"""What it takes to open an engine for an LLM, kept so that it can be done later or in another process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as core_messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.llms.ragblend.preamble import default_preamble

from ragblend.engine import RagBlend
from ragblend.errors import InvalidSettingError
from ragblend.model.sources import Model, cache_folder, load_model
from ragblend.prompt.chunk import Message, template_sources
from ragblend.settings import EngineSettings
from ragblend.store.kvstore import KVStore

FORMATTING = ("system_prompt", "messages_to_prompt", "completion_to_prompt", "query_wrapper_prompt", "output_parser")
"""Fields of LlamaIndex's LLM that decide what its prompts begin with."""


def default_store() -> Path:
    """The folder of the KV store where none is named: $RAGBLEND_CACHE/kv, or `kv` in the user's cache folder."""
    return cache_folder() / "kv"


ENGINE_SETTINGS = frozenset(EngineSettings.__annotations__) - {"preamble", "ratio", "selector"}
"""What else an engine can be told. Those three an LLM has of its own."""


@dataclass(frozen=True, eq=False)
class Opening:
    """The settings that make an engine; see RagBlendLLM for what they mean.

    tokenizer: instead of the one that comes with `model`, when that is a name.
    others: settings named in ENGINE_SETTINGS.
    """

    model: Model
    tokenizer: Any
    store: KVStore | str | Path | None
    dtype: str
    device: str
    size_limit_bytes: int | None
    preamble: BasePromptTemplate | str | Sequence[Message] | None
    others: Mapping[str, Any]

    def settings(self) -> dict[str, Any]:
        """Arguments that make the same opening in another process on this machine.

        Raises:
            InvalidSettingError: it was made from objects that cannot be sent to one.
        """
        if isinstance(self.model, tuple) or self.tokenizer is not None or isinstance(self.store, KVStore):
            raise InvalidSettingError(
                "only an LLM made from a model's name or path and a store folder can be pickled, since the other "
                "process opens both again; this one holds a loaded model, tokenizer or store: make one in each process"
            )
        where = Path(self.model).expanduser()
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "others"}
        return {**own, **self.others} | {
            # A relative path would mean another place in a process that runs elsewhere, as would its default folder.
            "model": str(where.absolute()) if os.path.exists(where) else self.model,
            "store": default_store().absolute() if self.store is None else self.store,
        }

    def open(self, *, is_chat_model: bool | None, **formatting: Any) -> RagBlend:
        """Load the model and open the store.

        Args:
            is_chat_model: whether core formats chat prompts; None: if the model has a chat template.
            **formatting: fields of LlamaIndex's LLM that decide what its prompts begin with.

        Raises:
            ModelNotFoundError, UnsupportedModelError, StoreError, InvalidSettingError.
        """
        # The model comes first: which prompt core will format depends on whether its tokenizer has a chat template.
        model, tokenizer = load_model(self.model, dtype=self.dtype, device=self.device)
        tokenizer = self.tokenizer or tokenizer
        preamble, others = self.preamble, dict(self.others)
        if preamble is None:
            preamble, others = "", {"policy": "none"} | others
        elif isinstance(preamble, BasePromptTemplate):
            chat = bool(template_sources(tokenizer)) if is_chat_model is None else is_chat_model
            given = {name: formatting[name] for name in FORMATTING if formatting.get(name)}
            preamble = default_preamble(preamble, is_chat_model=chat, **given)
        engine = RagBlend.from_pretrained(
            (model, tokenizer),
            store=default_store() if self.store is None else self.store,  # an empty store is false
            size_limit_bytes=self.size_limit_bytes,
            pack=not isinstance(self.model, tuple),
            preamble=preamble,
            **others,
        )
        try:
            if len(tokenizer) > engine.decoder.vocab_size:
                raise InvalidSettingError(
                    f"the tokenizer has {len(tokenizer)} tokens and the model {engine.decoder.vocab_size}: "
                    "use the model's own tokenizer"
                )
        except BaseException:
            engine.close()
            raise
        return engine


def check_formatting(engine: RagBlend, is_chat_model: bool, **formatting: Any) -> None:
    """Refuse ways to format prompts that this engine cannot honour.

    What prompts say can never become a control token, so a template written by hand would reach the model as text.

    Raises:
        InvalidSettingError: a function writes control tokens of the model, or a query wrapper would not be used.
    """
    prompts = engine.prompts
    if is_chat_model and not prompts.has_template:
        raise InvalidSettingError("is_chat_model=True needs a model with a chat template: set tokenizer.chat_template")
    wrapper = formatting.get("query_wrapper_prompt")
    if wrapper is not None and is_chat_model:
        raise InvalidSettingError(
            "query_wrapper_prompt is for completion prompts, and core asks a chat model with messages: leave it out, "
            "since the model's own chat template is put around them, or say is_chat_model=False"
        )
    written = {
        "query_wrapper_prompt": "" if wrapper is None else wrapper.format(query_str="x"),
        "completion_to_prompt": "",
        "messages_to_prompt": "",
    }
    if (to_prompt := formatting.get("completion_to_prompt")) not in (None, default_completion_to_prompt):
        written["completion_to_prompt"] = to_prompt("x")
    if (of_messages := formatting.get("messages_to_prompt")) not in (None, core_messages_to_prompt):
        written["messages_to_prompt"] = of_messages([ChatMessage(role=MessageRole.USER, content="x")])
    for name, text in written.items():
        if not prompts.control_ids.isdisjoint(prompts.encode_control(text)):
            raise InvalidSettingError(
                f"{name} writes the model's control tokens ({text!r:.80}), and text can never become one here: leave "
                "it out, the model's own chat template is used; for another one set tokenizer.chat_template"
            )
