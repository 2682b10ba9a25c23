"""BlendSynthesizer: answers from retrieved nodes without cutting or joining them.

Core's synthesizers make one text of all nodes and, where it is too long, split that text anew: some chunks then reach
the LLM cut. Here each node's content stays a chunk of its own, marked as one, so that it is reused whole however short
it is and whether or not it was ingested; what does not fit the window is left out, lowest score first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ChatResponseAsyncGen, ChatResponseGen
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index.llms.ragblend import RagBlendLLM
from llama_index.llms.ragblend.conversation import CHUNKS, conversation
from llama_index.llms.ragblend.preamble import selected

from ragblend.errors import ContextWindowError, InvalidSettingError
from ragblend.prompt.layout import lay_out

_log = logging.getLogger(__name__)

REPORT = "ragblend"
"""Key of a response's metadata: the LLM's report, with the node of each chunk and the nodes that were left out."""

_BETWEEN = "\n\n"  # as core's `compact` joins


class _Passage(NamedTuple):
    """What an LLM is shown of a node, and the half-open range of characters in it that is the chunk."""

    text: str
    start: int
    stop: int
    node_id: str | None


class BlendSynthesizer(BaseSynthesizer):
    """A response synthesizer for RagBlendLLM that keeps nodes apart.

    One prompt: the nodes, best score first, then the question. If it is longer than the window allows, nodes are left
    out, lowest score first, with a warning.

    The response's metadata has the report of the call under "ragblend": what `BlendReport.as_dict` gives, with a
    "node_id" for each chunk, and "dropped" with the ids of the nodes that were left out. That of a stream is complete
    when the stream has ended. `source_nodes` are the nodes that the answer was made from.

    Args:
        llm: a RagBlendLLM; None: `Settings.llm`.
        text_qa_template: a prompt with {context_str} and {query_str}. If it is not that of core's query engines, give
            it to the LLM as `preamble`, too.
        streaming: whether responses are streams.
        callback_manager: for the LLM and for this; None: that of Settings.

    Raises:
        InvalidSettingError: the LLM is another kind of LLM.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(llm=llm, callback_manager=callback_manager, streaming=streaming)
        if not isinstance(self._llm, RagBlendLLM):
            raise InvalidSettingError(
                f"BlendSynthesizer asks a RagBlendLLM, not {type(self._llm).__name__}: give llm=RagBlendLLM(...)"
            )
        self._model: RagBlendLLM = self._llm
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from these nodes.

        Args:
            **response_kwargs: further variables of the template.

        Raises:
            ContextWindowError: not even one node fits, beside the question.
            InvalidSettingError: the template has no {context_str}.
        """
        kept, dropped = self._fitting(query, nodes, response_kwargs)
        report: dict[str, Any] = {}
        call = {**response_kwargs, "passages": [_passage(node) for node in kept], "report": report}
        response = super().synthesize(query, kept, additional_source_nodes, **call)
        return _reported(response, report, dropped)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Like `synthesize`; nothing is computed on the event loop."""
        kept, dropped = await asyncio.to_thread(self._fitting, query, nodes, response_kwargs)
        report: dict[str, Any] = {}
        call = {**response_kwargs, "passages": [_passage(node) for node in kept], "report": report}
        response = await super().asynthesize(query, kept, additional_source_nodes, **call)
        return _reported(response, report, dropped)

    def _fitting(
        self, query: QueryType, nodes: Sequence[NodeWithScore], variables: dict[str, Any]
    ) -> tuple[list[NodeWithScore], list[NodeWithScore]]:
        """(nodes that fit the window, best first; nodes that do not). Nodes without text are left out silently."""
        kept = sorted((node for node in nodes if _passage(node).text), key=_score, reverse=True)
        dropped: list[NodeWithScore] = []
        question = query.query_str if isinstance(query, QueryBundle) else query
        metadata = self._model.metadata
        while kept:
            messages = self._messages(question, [_passage(node) for node in kept], variables)
            tokens = len(lay_out(self._model.engine.prompts, conversation(messages)).ids)
            if tokens + metadata.num_output <= metadata.context_window:
                break
            if len(kept) == 1:
                raise ContextWindowError(tokens, metadata.num_output, metadata.context_window)
            dropped.insert(0, kept.pop())
        if dropped:
            _log.warning(
                "%d of %d retrieved nodes do not fit the context window of %d tokens and were left out, lowest score "
                "first: retrieve fewer or shorter ones",
                len(dropped),
                len(dropped) + len(kept),
                metadata.context_window,
            )
        return kept, dropped

    # -- texts ------------------------------------------------------------------------------------------------------

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        passages: Sequence[_Passage] | None = None,
        report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from these texts, each a chunk, in this order.

        Args:
            passages: what is shown of nodes, instead of the texts. report: is filled with the report of the call.
        """
        shown = _passages(text_chunks) if passages is None else passages
        messages = self._messages(query_str, shown, response_kwargs)
        told = {} if report is None else report
        if self._streaming:
            return self._stream(self._model.stream_chat(messages), shown, told)
        return self._text(self._model.chat(messages), shown, told)

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        passages: Sequence[_Passage] | None = None,
        report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Like `get_response`."""
        shown = _passages(text_chunks) if passages is None else passages
        messages = self._messages(query_str, shown, response_kwargs)
        told = {} if report is None else report
        if self._streaming:
            return self._astream(await self._model.astream_chat(messages), shown, told)
        return self._text(await self._model.achat(messages), shown, told)

    def _text(self, response: ChatResponse, shown: Sequence[_Passage], report: dict[str, Any]) -> str:
        self._tell(report, response, shown)
        text, parser = response.message.content or "", self._model.output_parser
        return text if parser is None else str(parser.parse(text))

    def _stream(
        self, pieces: ChatResponseGen, shown: Sequence[_Passage], report: dict[str, Any]
    ) -> Generator[str, None, None]:
        with contextlib.closing(pieces):
            for response in pieces:
                self._tell(report, response, shown)
                yield response.delta or ""

    async def _astream(
        self, pieces: ChatResponseAsyncGen, shown: Sequence[_Passage], report: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(pieces):
            async for response in pieces:
                self._tell(report, response, shown)
                yield response.delta or ""

    def _tell(self, report: dict[str, Any], response: ChatResponse, shown: Sequence[_Passage]) -> None:
        """Fill the report of a call from its last response, with the node of each chunk."""
        if response.raw is None:
            return
        report.update(response.raw["ragblend"])
        keys_of = self._model.engine.variant_keys
        expected = [
            (keys_of(passage.text[passage.start : passage.stop]).values(), passage.node_id) for passage in shown
        ]
        chunks = []
        for use in report["chunks"]:
            # Others may stand among them: chunks of the template or the question, and what was made of a node's text.
            n = next((n for n, (keys, _) in enumerate(expected) if use["key"] in keys), None)
            chunks.append({**use, "node_id": None if n is None else expected.pop(n)[1]})
        report["chunks"] = chunks

    def _messages(self, question: str, shown: Sequence[_Passage], variables: dict[str, Any]) -> list[ChatMessage]:
        """The prompt as messages. The passages are marked where they stand, all of them in one place, as they are.

        Functions of the template get them like any other LLM's, and may have rewritten them. What is not marked is
        found by its text, as far as it is unchanged.
        """
        template = selected(self._text_qa_template, self._model)
        name = (template.template_var_mappings or {}).get("context_str", "context_str")
        if name not in template.template_vars and not template.function_mappings:
            raise InvalidSettingError("the text_qa_template needs a {context_str}: that is where the nodes go")
        joined = _BETWEEN.join(passage.text for passage in shown)
        messages = self._model.messages_for(template, **{**variables, "query_str": question, "context_str": joined})
        counts = [(message.content or "").count(joined) for message in messages]
        n = max(range(len(messages)), key=counts.__getitem__)
        at = (messages[n].content or "").find(joined)
        ranges = []
        # Where the question says the same, say, nothing tells which of the two are the passages.
        for passage in shown if sum(counts) == 1 else ():
            ranges.append((at + passage.start, at + passage.stop))
            at += len(passage.text) + len(_BETWEEN)
        marks = {**messages[n].additional_kwargs, CHUNKS: ranges}
        return [*messages[:n], messages[n].model_copy(update={"additional_kwargs": marks}), *messages[n + 1 :]]


def _passage(found: NodeWithScore) -> _Passage:
    """A node as core shows it to LLMs; its content is the chunk, its metadata is not."""
    text = found.node.get_content(metadata_mode=MetadataMode.LLM).strip()
    content = found.node.get_content(metadata_mode=MetadataMode.NONE).strip()
    start = text.rfind(content)
    return _Passage(text, max(start, 0), start + len(content) if start >= 0 else len(text), found.node.node_id)


def _passages(texts: Sequence[str]) -> list[_Passage]:
    return [_Passage(text.strip(), 0, len(text.strip()), None) for text in texts if text.strip()]


def _score(found: NodeWithScore) -> float:
    return float("-inf") if found.score is None else found.score


def _reported(response: RESPONSE_TYPE, report: dict[str, Any], dropped: Sequence[NodeWithScore]) -> RESPONSE_TYPE:
    report["dropped"] = [found.node.node_id for found in dropped]
    response.metadata = {**(response.metadata or {}), REPORT: report}
    return response
