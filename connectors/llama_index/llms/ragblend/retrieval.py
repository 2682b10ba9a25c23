"""Retrieved chunks, before the prompt that holds them comes: their KV is read ahead, and those never ingested become
known.

One handler on core's root dispatcher hears every retrieval: query and chat engines, fusion, tools, async. It tells all
LLMs that are alive, since an event does not say whose question it was: prompts are linked to chunks by their text. An
LLM that is gone is not told, and is not kept alive by this.

The event comes before postprocessors. MetadataReplacementPostProcessor puts another text in a node's place, the window
around its sentence; so of a node with a window both texts are expected, and the prompt shows which one it was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.node_parser.text.sentence_window import DEFAULT_WINDOW_METADATA_KEY
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import BaseEventHandler

from ragblend.errors import RagBlendError

_log = logging.getLogger(__name__)

_UNHEARD = "a retrieval was not taken notice of; chunks that were never ingested are computed like any other text"


def window_of(node: BaseNode, key: str = DEFAULT_WINDOW_METADATA_KEY) -> str | None:
    """The text that a node carries in its metadata to be replaced by; None where there is none.

    What the LLM is shown as metadata is none: it stands beside the node's content.
    """
    window = node.metadata.get(key)
    return window if isinstance(window, str) and key in node.excluded_llm_metadata_keys else None


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
                nodes = [found.node for found in event.nodes]
                texts = [(window_of(node), node.get_content(metadata_mode=MetadataMode.NONE)) for node in nodes]
                listener.retrieved([text for both in texts for text in both if text])
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
