"""KnowledgeBase: keeps index and KV store in step, asks and answers.

    ingest   new documents -> parts -> chunks -> vectors; then each: neighbours -> KV -> one commit to the index
    query    question -> vector -> closest chunks -> LlamaIndex's query engine over RagBlendLLM -> answer, report
    session  message -> closest chunks -> behind what was said, known from turn to turn -> answer, report

Models are loaded when they are first needed: statistics, and an ingest in which nothing changed, need none.
"""

from __future__ import annotations

import inspect
import json
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args
from weakref import WeakValueDictionary

from ragblend.blend.variants import POLICIES, Policy, check_policy
from ragblend.errors import ContextWindowError, EmptyPromptError, IngestError, InvalidSettingError, whole_number
from ragblend.kb.conversation import DEFAULT_MAX_TURNS, Conversation
from ragblend.kb.embedder import DEFAULT_EMBEDDING_MODEL
from ragblend.kb.files import Paths, Skipped, absolute, find_files, printable, readable, within
from ragblend.kb.index import DocumentIndex
from ragblend.kb.ingestion import KNOWLEDGE, Document, Ingestion, Progress, file_document, remember, text_document
from ragblend.kb.models import DEFAULT_POLICY, Models
from ragblend.kb.reports import IngestSummary, KnowledgeBaseStats, Reply, Verification
from ragblend.quality import CALIBRATION
from ragblend.store.kvstore import KVStore

if TYPE_CHECKING:
    import numpy as np
    from llama_index.core.chat_engine.types import BaseChatEngine
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.llms.ragblend import RagBlendLLM

    from ragblend.audit import Audit
    from ragblend.engine import RagBlend
    from ragblend.kb.session import ChatSession

DEFAULT_CHUNK_TOKENS = 300
_LEAST_CHUNK_TOKENS = 16  # less says nothing
DEFAULT_TOP_K = 4

ChatMode = Literal["condense_plus_context", "context"]

# Settings of RagBlendLLM that make an engine. A knowledge base has one.
_OF_ENGINES = ("model", "store", "dtype", "device", "size_limit_bytes", "preamble", "lazy", "engine")


class KnowledgeBase:
    """Documents in a store folder, and a model that answers from them.

    with KnowledgeBase("store") as kb:
        kb.ingest(["docs"])
        print(kb.query("How is the cache cleared?").text)
    """

    def __init__(
        self,
        store: str | Path,
        *,
        model: str | Path | None = None,
        embedding_model: str | None = None,
        chunk_tokens: int | None = None,
        policy: Policy | None = None,
        size_limit_bytes: int | None = None,
        dtype: str = "auto",
        template_settings: Mapping[str, Any] | None = None,
        audit: Audit | None = None,
        create: bool = True,
    ) -> None:
        """Open a knowledge base, or make one.

        Args:
            store: its folder, which is a KVStore's folder too.
            model: who answers: a folder, a GGUF file or a hub id; None: the engine's default.
            embedding_model: who makes the vectors; None: what the index was made with, and for a new one
                all-MiniLM-L6-v2.
            chunk_tokens: tokens of a chunk at most, counted as the model counts them; None: as before, 300 at first. An
                ingest with another number splits its documents anew.
            policy: what chunks are prefilled behind, see blend.variants; None: as before, "neighbours" at first. Each
                has KV of its own: an ingest with another one makes it.
            size_limit_bytes: KV bytes kept at most; None: as before, see KVStore.
            dtype: of the model; "auto" takes what is fastest here. Each has KV of its own.
            template_settings: variables for the model's chat template, such as {"enable_thinking": False} for Qwen 3;
                None: as at the last ingest, none at first.
            audit: which answers are held against a full prefill afterwards, those of sessions included, and what is
                tolerated; None: none are. What was found: `engine.audits()`.
            create: whether to make one where there is none.

        Raises:
            StoreError, InvalidSettingError, IngestError.
        """
        if policy is not None:
            check_policy(policy)
        if chunk_tokens is not None:
            chunk_tokens = whole_number("chunk_tokens", chunk_tokens, least=_LEAST_CHUNK_TOKENS)
        if template_settings is not None:
            template_settings = _as_json(template_settings)
        self.store = KVStore(store, size_limit_bytes=size_limit_bytes, create=create)
        try:
            # Beside the KV, and only now: the KV store refuses to be made in a folder that is not empty.
            folder = self.store.directory / "index"
            self.index = DocumentIndex(folder, in_memory=not create and not DocumentIndex.is_in(folder))
            known = self.index.embedding_model
            if known is not None and embedding_model not in (None, known):
                self.index.close()
                raise IngestError(
                    f"the store in {self.store.directory} was made with the embedding model {known!r}, not "
                    f"{embedding_model!r}: use that one, or another store"
                )
        except BaseException:
            self.store.close()
            raise
        before = self.store.document(KNOWLEDGE)
        self.policy: Policy = policy or (before["policy"] if before.get("policy") in POLICIES else DEFAULT_POLICY)
        kept: Any = before.get("chunk_tokens")
        usable = type(kept) is int and kept >= _LEAST_CHUNK_TOKENS
        self.chunk_tokens: int = chunk_tokens or (kept if usable else DEFAULT_CHUNK_TOKENS)
        noted = before.get("template_settings")
        self._template_settings: Mapping[str, Any] = (
            template_settings if template_settings is not None else noted if isinstance(noted, dict) else {}
        )
        self._conversations: WeakValueDictionary[str, Conversation] = WeakValueDictionary()
        self._opening_sessions = threading.Lock()
        self.models = Models(
            self.store,
            model,
            embedding_model or known or DEFAULT_EMBEDDING_MODEL,
            self.policy,
            dtype,
            auto_dtype=str(before.get("auto_dtype") or ""),
            template_settings=self._template_settings,
            audit=audit,
        )

    # ---- ingest

    def ingest(self, paths: Paths, *, prune: bool = False, progress: Progress | None = None) -> IngestSummary:
        """Read the files under the paths. Only what is new or changed is worked on.

        Args:
            paths: a file or folder, or several.
            prune: also forget documents at or under these paths whose files are gone, or no files any more. A path
                may then be gone altogether, if there are such documents.

        Raises:
            IngestError: something is not a path, a path does not exist, or there is no file at all.
            ModelError, MissingDependencyError: a model is needed and not to be had.
            StoreFullError: the disk is full; what was committed before stays.
            StoreError: the store cannot be written.
        """
        roots = absolute(paths)
        known = list(self.index.digests()) if prune else None
        files, skipped = find_files(roots, exclude=self.store.directory, known=known)
        documents = [file_document(path) for path in files]
        vanished: list[str] = []
        if known:
            # A name that is no UTF-8 is not that of its file, and of a folder that cannot be listed nothing is known.
            present = {document.name for path, document in zip(files, documents, strict=True) if not _gone(path)}
            named = {Path(printable(str(root))) for root in roots}
            unlisted = {Path(skip.path) for skip in skipped}
            vanished = [
                name
                for name in known
                if name not in present and within(name, named) and not within(name, unlisted) and _gone(Path(name))
            ]
        return self._ingest(documents, skipped, vanished, progress)

    def ingest_texts(self, texts: Mapping[str, str], *, progress: Progress | None = None) -> IngestSummary:
        """The same for texts that are no files: {name: text}.

        Raises:
            As `ingest`; IngestError where they are something else.
        """
        if not isinstance(texts, Mapping) or not all(isinstance(part, str) for pair in texts.items() for part in pair):
            raise IngestError(f"texts are given as {{name: text}}, both strings, not as {texts!r:.80}")
        return self._ingest([text_document(name, text) for name, text in texts.items()], [], [], progress)

    def _ingest(
        self,
        documents: Sequence[Document],
        skipped: list[Skipped],
        vanished: Sequence[str],
        progress: Progress | None,
    ) -> IngestSummary:
        self.store.check_writable()
        if self.index.in_memory:
            self.index.close()
            self.index = DocumentIndex(self.index.directory)
        remember(self.store, policy=self.policy)
        if self._template_settings != self.store.document(KNOWLEDGE).get("template_settings", {}):
            _ = self.engine  # it refuses what its template does not read, and that is not for the next ones
            remember(self.store, template_settings=dict(self._template_settings))
        return Ingestion(self.index, self.store, self.models, self.chunk_tokens).run(
            documents, skipped, vanished, progress
        )

    # ---- ask

    def query(
        self,
        question: str,
        *,
        top_k: int = DEFAULT_TOP_K,
        on_text: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> Reply:
        """Answer a question from the closest chunks.

        Args:
            on_text: called with each piece of the answer as soon as there is one.
            **settings: of RagBlendLLM: ratio, selector, max_tokens, temperature, ...

        Raises:
            EmptyPromptError, InvalidSettingError, IngestError (there are no documents): before a model is loaded.
            ContextWindowError: the question leaves no room in the model's window.
            NotCalibratedError: a bound on the divergence is asked for, and nothing says what keeps it.
        """
        question = readable(question)
        if not question.strip():
            raise EmptyPromptError("the question is empty: ask something")
        if "streaming" in settings:
            raise InvalidSettingError(
                "query gives a whole Reply, and its pieces to on_text: take as_query_engine(streaming=True) for a "
                "response that streams"
            )
        if "ratio" in settings and settings["ratio"] is not None:
            from ragblend.settings import check_ratio

            check_ratio(settings["ratio"])
        if settings.keys() & {"max_tokens", "temperature", "top_p", "repetition_penalty", "seed"}:
            from ragblend.model.generate import DecodeSettings

            names = DecodeSettings.__annotations__.keys() - {"stop"}  # the LLM takes stop strings in more ways
            DecodeSettings(**{name: value for name, value in settings.items() if name in names})
        engine, llm = self._query_engine(top_k, streaming=on_text is not None, **settings)
        self._check_room(question, llm)
        try:
            response: Any = engine.query(question)
        except ValueError as error:
            if not _of_prompt_helper(error):
                raise
            # Core counts with a tokenizer of its own, which may see more tokens than the model does.
            raise self._no_room(question, llm) from error
        if on_text is None:
            text = str(response)
        else:
            pieces: list[str] = []
            for piece in response.response_gen:
                pieces.append(piece)
                on_text(piece)
            text = "".join(pieces)
        return Reply(text, tuple(response.source_nodes), llm.last_report)

    def _check_room(self, question: str, llm: RagBlendLLM) -> None:
        error = self._no_room(question, llm)
        if error.prompt_tokens >= error.context_window_tokens:
            raise error

    def _no_room(self, question: str, llm: RagBlendLLM) -> ContextWindowError:
        tokens = len(self.engine.preamble_ids) + len(self.engine.prompts.encode_text(question))
        return ContextWindowError(tokens, llm.max_tokens, llm.metadata.context_window)

    def as_retriever(self, top_k: int = DEFAULT_TOP_K) -> BaseRetriever:
        """LlamaIndex's retriever over the index.

        Raises:
            InvalidSettingError, IngestError: there are no documents.
        """
        from ragblend.kb.retriever import IndexRetriever

        top_k = whole_number("top_k", top_k, least=1)
        if not self.index.count_chunks():
            raise IngestError(f"there are no documents in {self.store.directory} yet: ingest some first")
        return IndexRetriever(self.index, self._embed_question, top_k)

    def as_query_engine(self, top_k: int = DEFAULT_TOP_K, **kwargs: Any) -> RetrieverQueryEngine:
        """LlamaIndex's query engine over the retriever and the model.

        Args:
            **kwargs: settings of RagBlendLLM (ratio, max_tokens, ...), and of RetrieverQueryEngine.from_args
                (streaming, response_mode, node_postprocessors, ...).

        Raises:
            InvalidSettingError, IngestError: there are no documents.
        """
        return self._query_engine(top_k, **kwargs)[0]

    def _query_engine(self, top_k: int, **kwargs: Any) -> tuple[RetrieverQueryEngine, RagBlendLLM]:
        from llama_index.core.query_engine import RetrieverQueryEngine

        retriever = self.as_retriever(top_k)
        llm = self._bound_llm(kwargs, RetrieverQueryEngine.from_args)
        return RetrieverQueryEngine.from_args(retriever, llm=llm, **kwargs), llm

    def as_chat_engine(
        self, mode: ChatMode = "condense_plus_context", top_k: int = DEFAULT_TOP_K, **kwargs: Any
    ) -> BaseChatEngine:
        """LlamaIndex's chat engine over the retriever and the model; `session` is the one that knows our prefix cache.

        Args:
            mode: "context" retrieves with the message as it is, "condense_plus_context" first has the model make one
                question of it and of what was said before.
            **kwargs: settings of RagBlendLLM, and of the chat engine's from_defaults (memory, system_prompt,
                node_postprocessors, ...).

        Raises:
            InvalidSettingError, IngestError: there are no documents.
        """
        if mode not in get_args(ChatMode):
            raise InvalidSettingError(f"mode is one of {', '.join(get_args(ChatMode))}; got {mode!r}")
        retriever = self.as_retriever(top_k)
        from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine

        makes: dict[str, Callable[..., Any]] = {
            "condense_plus_context": CondensePlusContextChatEngine.from_defaults,
            "context": ContextChatEngine.from_defaults,
        }
        system_prompt = kwargs.pop("system_prompt", None)  # there it is the engine's, not the LLM's
        # What is for the other mode only does nothing: an app may choose the mode by one word.
        llm = self._bound_llm(kwargs, *makes.values())
        made: BaseChatEngine = makes[mode](retriever=retriever, llm=llm, system_prompt=system_prompt, **kwargs)
        return made

    def session(
        self, name: str = "default", *, top_k: int = DEFAULT_TOP_K, max_turns: int = DEFAULT_MAX_TURNS, **settings: Any
    ) -> ChatSession:
        """A chat in which what was said costs nothing any more. It is kept beside the index, and goes on where it was.

        Sessions of one name share their turns, in other processes, too.

        Args:
            name: letters, digits, ".", "_" and "-": whose chat it is.
            max_turns: older ones are forgotten.
            **settings: for all turns: ratio (0), selector, max_tokens (256), temperature, stop, ...

        Raises:
            InvalidSettingError: a name that is none; a setting out of range.
            IngestError: there are no documents.
            StoreError: what was said before cannot be read, or what is said cannot be written.
        """
        self.store.check_writable()
        with self._opening_sessions:
            conversation = self._conversations.get(name) if isinstance(name, str) else None
            if conversation is None:
                conversation = Conversation(self.store.directory / "sessions", name)
                self._conversations[name] = conversation
        retriever = self.as_retriever(top_k)
        from ragblend.kb.session import ChatSession

        return ChatSession(self.engine, retriever.retrieve, conversation, max_turns=max_turns, **settings)

    def _bound_llm(self, kwargs: dict[str, Any], *makes: Callable[..., Any]) -> RagBlendLLM:
        """An LLM over this knowledge base's engine; what is its own of the arguments is taken from them.

        Args:
            makes: functions of core's that may take the others. They ignore what they do not know.

        Raises:
            InvalidSettingError: an argument is for none of them.
        """
        from llama_index.llms.ragblend import RagBlendLLM

        own = inspect.signature(RagBlendLLM.__init__).parameters.keys() - {"self", "others", *_OF_ENGINES}
        theirs = {name for make in makes for name in inspect.signature(make).parameters}
        theirs -= {"retriever", "llm", "kwargs"}
        if unknown := sorted(kwargs.keys() - own - theirs):
            known = sorted({"top_k", *own, *theirs})
            raise InvalidSettingError(f"there is no setting {', '.join(unknown)} here: known are {', '.join(known)}")
        return RagBlendLLM.from_engine(self.engine, **{name: kwargs.pop(name) for name in own & kwargs.keys()})

    def _embed_question(self, question: str) -> np.ndarray:
        vector: np.ndarray = self.models.embedder.embed([question])[0]
        return vector

    # ---- look after it

    def stats(self) -> KnowledgeBaseStats:
        """Counts. Imports neither torch nor LlamaIndex."""
        return KnowledgeBaseStats(
            documents=self.index.count_documents(),
            indexed_chunks=self.index.count_chunks(),
            embedding_model=self.index.embedding_model,
            policy=self.policy,
            chunk_tokens=self.chunk_tokens,
            calibrations=[
                {name: value for name, value in found.items() if name != "samples"}
                for found in self.store.documents(CALIBRATION).values()
            ],
            **asdict(self.store.stats()),
        )

    def verify(self, *, repair: bool = False, progress: Callable[[int, int], None] | None = None) -> Verification:
        """Read every KV payload to its last byte and check the index.

        Args:
            repair: delete payloads that are bad, forget those that are missing, and make the FAISS file again; the
                next ingest prefills what is missing.
            progress: called with (payloads done, payloads in all).
        """
        kv = self.store.verify(delete_bad=repair, progress=progress)
        problems = tuple(self.index.verify(repair=repair))
        gone: set[str] = set()
        if not self.store.stats().evictions:
            gone = set(self.index.kv_keys(self.models.signature)).difference(self.store.keys())
            if repair and gone:
                self.index.forget_kv(sorted(gone))
        return Verification(kv, problems, tuple(sorted(gone.difference(key for key, _ in kv.bad))))

    @property
    def engine(self) -> RagBlend:
        """The engine, behind the preamble that LlamaIndex's prompts really have; the model is loaded on first use."""
        return self.models.engine

    def close(self) -> None:
        """Close everything. Closing twice is fine."""
        self.models.close()
        self.index.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be when it is read again; raises InvalidSettingError where it cannot be written."""
    try:
        read: dict[str, Any] = json.loads(json.dumps(dict(settings)))
    except (TypeError, ValueError) as error:
        raise InvalidSettingError(
            f"template_settings are {{name: value}}, and kept with the store as JSON ({error}); got {settings!r:.80}"
        ) from error
    return read


def _gone(path: Path) -> bool:
    """Whether there is no file, or something else in its place. One that cannot be looked at is not gone."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _of_prompt_helper(error: BaseException) -> bool:
    """Whether it comes from where core packs prompts: it says there is no room, in a plain ValueError."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "llama_index.core.indices.prompt_helper":
            return True
        trace = trace.tb_next
    return False
