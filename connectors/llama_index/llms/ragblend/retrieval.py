"""Retrieved chunks, before the prompt that holds them comes: their KV is read ahead, and those never ingested become
known.

One handler on core's root dispatcher hears every retrieval: query and chat engines, fusion, tools, async. It tells all
LLMs that are alive, since an event does not say whose question it was: prompts are linked to chunks by their text. An
LLM that is gone is not told, and is not kept alive by this.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import MetadataMode
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import BaseEventHandler

from ragblend.errors import RagBlendError

_log = logging.getLogger(__name__)

_UNHEARD = "a retrieval was not taken notice of; chunks that were never ingested are computed like any other text"


class Listener(Protocol):
    """Something that wants to know texts before they come in a prompt."""

    def retrieved(self, texts: Sequence[str]) -> None: ...


_listening: WeakValueDictionary[int, Listener] = WeakValueDictionary()
_changing = threading.Lock()


class RetrievalHandler(BaseEventHandler):
    """Passes retrieved texts on. Nothing that goes wrong here may stop a retrieval."""

    @classmethod
    def class_name(cls) -> str:
        return "RagBlendRetrievalHandler"

    def handle(self, event: Any, **kwargs: Any) -> None:
        if not isinstance(event, RetrievalEndEvent):
            return
        with _changing:
            listeners = list(_listening.values())
        for listener in listeners:
            try:
                texts = [found.node.get_content(metadata_mode=MetadataMode.NONE) for found in event.nodes]
                listener.retrieved(texts)
            except RagBlendError as error:  # core would swallow it without a word
                _log.warning("%s: %s", _UNHEARD, error)
            except Exception:
                _log.exception(_UNHEARD)


def listen(listener: Listener) -> None:
    """Tell this one what is retrieved from now on, for as long as it is alive."""
    root = get_dispatcher()
    with _changing:
        _listening[id(listener)] = listener
        if not any(isinstance(handler, RetrievalHandler) for handler in root.event_handlers):
            root.add_event_handler(RetrievalHandler())


def stop_listening(listener: Listener) -> None:
    """Tell this one no more."""
    with _changing:
        if _listening.get(id(listener)) is listener:
            del _listening[id(listener)]
