"""Chunks that are retrieved but were never ingested: they become known before the prompt that holds them comes.

One handler on core's root dispatcher hears every retrieval: query and chat engines, fusion, tools, async. It tells all
LLMs that are alive, since an event does not say whose question it was: prompts are linked to chunks by their text. An
LLM that is gone is not told, and is not kept alive by this.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakValueDictionary

from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import MetadataMode
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import BaseEventHandler

from ragblend.errors import RagBlendError

_log = logging.getLogger(__name__)

_UNKNOWN = "retrieved chunks were not made known; they are computed like any other text"


class Expecting(Protocol):
    """Something that wants to know texts before they come in a prompt."""

    def expect(self, texts: Iterable[str]) -> int: ...


_listening: WeakValueDictionary[int, Expecting] = WeakValueDictionary()
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
                listener.expect(found.node.get_content(metadata_mode=MetadataMode.NONE) for found in event.nodes)
            except RagBlendError as error:  # core would swallow it without a word
                _log.warning("%s: %s", _UNKNOWN, error)
            except Exception:
                _log.exception(_UNKNOWN)


def listen(listener: Expecting) -> None:
    """Tell this one what is retrieved from now on, for as long as it is alive."""
    root = get_dispatcher()
    with _changing:
        _listening[id(listener)] = listener
        if not any(isinstance(handler, RetrievalHandler) for handler in root.event_handlers):
            root.add_event_handler(RetrievalHandler())


def stop_listening(listener: Expecting) -> None:
    """Tell this one no more."""
    with _changing:
        if _listening.get(id(listener)) is listener:
            del _listening[id(listener)]
