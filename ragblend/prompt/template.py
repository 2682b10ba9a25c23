"""Messages to segments to token ids, so that content can never become a control token.

Two tokenizers are built from the model's own, which is never touched:

- the *control* tokenizer reads the chat template's own text: every added token is live;
- the *content* tokenizer reads everything people or documents wrote: control tokens do not exist in it, so a literal
  `<|im_end|>` is a handful of ordinary tokens.

Neither puts anything around what it reads (see encoder.py): a chunk has the same ids at every place of every prompt.

A chat template is rendered with a placeholder in place of each message's content and cut there. What a template
decides by looking *into* content (dropping the reasoning part of an earlier answer, say) is therefore not done; whether
it trims white space is seen and followed.

Definitions of tools and earlier calls are rendered by the template, too. Their strings stay in its text where they are
plain words and sentences, so that the model reads what it was trained on; one that could spell a control token, or that
holds a known chunk, gets a placeholder as well, and is put back in the way the template wrote that (as it is, or with
JSON's escapes).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError

from ragblend.errors import InvalidSettingError, MissingDependencyError, UnsupportedModelError
from ragblend.prompt.calls import MARKS, checked, replaced
from ragblend.prompt.chunk import (
    ChatTokenizer,
    Chunk,
    CutChunk,
    Message,
    ToolCall,
    backend_of,
    joined_parts,
    template_sources,
)
from ragblend.prompt.encoder import Encoder, automatic_head, is_control, readable, unknown_id

SegmentKind = Literal["control", "text", "chunk"]

MESSAGE_SEPARATOR = "\n\n"
"""What stands between messages when the model has no chat template."""

_REMEMBERED_CHUNKS = 1024
_BYTE_LITERAL = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# White space that str.strip() removes and no template writes: it shows on which sides a template trims content.
_PADS = "\u2003\u2002\u2004\u2005\u2007\u2008"
# Strings of tools and calls that need no placeholder if they hold no control token: none is spelled with these alone.
_HARMLESS = re.compile(r"""[\w\s.,:;!?'"()/$#*+=%&@-]*""")
_RESERVED_SETTINGS = {
    "conversation",
    "messages",
    "tools",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}
_PRIVATE_USE = range(0xE000, 0xF8FF, 2)


@dataclass(frozen=True)
class Segment:
    """A run of prompt text that is tokenised on its own. control: the template's; text and chunk: content.

    whole: of a cut chunk, the text that it is the beginning of.
    """

    kind: SegmentKind
    text: str
    whole: str | None = None


class _CallFormat(NamedTuple):
    """What the template writes before the name of a tool that is called, and between name and arguments."""

    opening: str
    between: str


_PROBE = ToolCall("ragblend_probe", {"x": "y"}, "probe0000")  # some templates want ids of nine characters
_PROBE_TEXT = "Says what <it> is."
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": _PROBE_TEXT,
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


class PromptTokenizer:
    """Makes prompts of one model: renders messages and turns each segment into ids. Immutable; any thread may use it.

    Args:
        tokenizer: the model's tokenizer as transformers loads it. Read when this object is made; afterwards only its
            `apply_chat_template(tokenize=False)` is called.
        template_settings: variables for the chat template, such as {"enable_thinking": False}.

    Attributes:
        control_ids: ids that content can never produce. The model's unknown token is not among them where it stands for
            characters outside the vocabulary; its literal in content still does not produce it.
        unk_id: what such a character becomes; None if the vocabulary covers every text.
        bos_ids: what the tokenizer puts before a text by itself; () for many.
        stop_ids: ids that end an answer: EOS, and the token with which the template ends an assistant's turn.
        mark_ids: those of `control_ids` that calls of tools are recognised by in an answer.
        has_tools: whether the template renders definitions of tools, calls and their results.

    Raises:
        UnsupportedModelError: the tokenizer has no `tokenizers` backend, several templates and no default, or something
            before its texts that is read otherwise within a prompt.
        InvalidSettingError: a template setting that the template does not read, or that is set per prompt.
        MissingDependencyError: jinja2 is absent or too old for chat templates.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, template_settings: Mapping[str, Any] | None = None) -> None:
        backend = backend_of(tokenizer)
        document = json.loads(backend.to_str())
        sources = template_sources(tokenizer)
        if sources and "default" not in sources:
            raise UnsupportedModelError(
                f"the tokenizer has chat templates {sorted(sources)} and none is called 'default': "
                "set tokenizer.chat_template to the one to use"
            )
        self._tokenizer = tokenizer
        self._chunk_ids = lru_cache(_REMEMBERED_CHUNKS)(lambda text: tuple(self.encode_text(text)))
        self._template = sources.get("default")
        self._tool_template = sources.get("tool_use", self._template)
        if not isinstance(template_settings or {}, Mapping):
            raise InvalidSettingError(
                f'template_settings are given as {{name: value}}, such as {{"enable_thinking": False}}; got '
                f"{template_settings!r:.80}"
            )
        self._settings = dict(template_settings or {})
        if reserved := _RESERVED_SETTINGS & self._settings.keys():
            raise InvalidSettingError(f"template_settings must leave {sorted(reserved)} alone: they are set per prompt")
        template = f"{self._template or ''}{self._tool_template or ''}"
        if unread := sorted(name for name in self._settings if not re.search(rf"\b{re.escape(str(name))}\b", template)):
            raise InvalidSettingError(f"the model's chat template reads no {', '.join(unread)}: see template_settings")
        pads = [pad for pad in _PADS if pad not in template]
        if len(pads) < 2:
            raise UnsupportedModelError("the chat template uses typographic spaces that no known template uses")
        self._left_pad, self._right_pad = pads[:2]  # two kinds, so that neighbours do not claim each other's
        self._open = next(chr(code) for code in _PRIVATE_USE if chr(code) not in template)
        self._close = chr(ord(self._open) + 1)
        # A quotation mark tells a string of a tool from a message, and by its escapes how the template wrote it.
        self._placeholder = re.compile(
            rf'({self._left_pad}?){self._open}(\\*"?)([0-9]+){self._close}({self._right_pad}?)'
        )

        added = document["added_tokens"]
        named = {str(token) for token in tokenizer.all_special_tokens if str(token).strip()}
        control = [token for token in added if is_control(token, named, sources)]
        self._control = Encoder(backend, document, added)
        self._content = Encoder(backend, document, [token for token in added if token not in control])

        named_ids = {token_id for token in named if (token_id := backend.token_to_id(token)) is not None}
        self.unk_id = unknown_id(backend, document["model"])
        if self.unk_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            self.unk_id = None  # it can only be one thing: characters it would stand for are replaced instead
        self.control_ids: frozenset[int] = frozenset({int(token["id"]) for token in control} | named_ids).difference(
            [] if self.unk_id is None else [self.unk_id]
        )
        self._unknown_literal = "" if self.unk_id is None else backend.id_to_token(self.unk_id) or ""
        self._byte_literals = bool(document["model"].get("byte_fallback"))
        self.bos_ids = automatic_head(document)
        self._bos_text = "".join(backend.id_to_token(token) or "" for token in self.bos_ids)
        if tuple(self.encode_control(self._bos_text)) != self.bos_ids:
            raise UnsupportedModelError(
                f"the tokenizer starts every text with ids {list(self.bos_ids)}, but reads their text "
                f"{self._bos_text!r} as other ids: add its BOS token to the tokenizer's special tokens"
            )
        self._bos_token = str(tokenizer.special_tokens_map.get("bos_token") or "")
        self.mark_ids = frozenset(int(token["id"]) for token in control if token["content"] in MARKS)
        self.stop_ids: frozenset[int] = self._find_stop_ids()
        self.has_tools = self._finds_tools()
        self._call_format = self._find_call_format() if self.has_tools else None

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template. Without one, contents are joined by a blank line behind BOS."""
        return self._template is not None

    def encode_text(self, text: str) -> list[int]:
        """Content to ids; none of them is in `control_ids`, whatever the text says.

        The same text gives the same ids always, and decoding them gives the text back as far as the tokenizer's own
        normaliser allows. Lone surrogates, which no tokenizer can read, become U+FFFD.
        """
        text = readable(text)
        ids, _ = self._content.encode(text)
        if self.control_ids.isdisjoint(ids) and not self._may_hold_literal(text):
            return ids
        return self._encode_guarded(text)

    def encode_control(self, text: str) -> list[int]:
        """The template's own text to ids: control tokens are live. Never give it anything a user or document wrote."""
        return self._control.encode(readable(text))[0]

    def encode(self, segment: Segment) -> list[int]:
        """The ids of one segment, by its kind. Those of recent chunks are remembered: they come again and again."""
        if segment.kind == "control":
            return self.encode_control(segment.text)
        return list(self._chunk_ids(segment.text)) if segment.kind == "chunk" else self.encode_text(segment.text)

    def decode(self, ids: Sequence[int], *, marks: bool = False) -> str:
        """Ids to text without control tokens. A leading space stays, so `decode(encode_text(t)) == t` where `t` is
        unchanged by the tokenizer's normaliser.

        Args:
            marks: leave the tokens that mark calls of tools in the text.
        """
        if marks and not self.mark_ids.isdisjoint(ids):
            kept = [token for token in ids if token in self.mark_ids or token not in self.control_ids]
            return self._control.decode(kept)
        return self._content.decode([token for token in ids if token not in self.control_ids])

    def begin_call(self, name: str = "") -> str:
        """How the template begins an answer that is a call of a tool: of this one, or up to where its name goes.

        Raises:
            InvalidSettingError: that cannot be told from the template.
        """
        if self._call_format is None:
            raise InvalidSettingError(
                "the model's chat template does not show how an answer begins that calls a tool: do not require one "
                "(for structured answers, core asks in text where the LLM says is_function_calling_model=False)"
            )
        return self._call_format.opening + (name and name + self._call_format.between)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        begin: str = "",
        split: Callable[[str], list[str | Chunk]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """The prompt as segments, in order. Their ids, put together, are the prompt's.

        Where the template trims content, the outer ends of a message's plain text are trimmed. A Chunk is never
        trimmed, not even at the outer end: its ids would depend on where it stands.

        BOS is written by the template or not at all, as in transformers; a template that starts with it twice gets one.
        Without a template: BOS if the tokenizer adds one by itself, then all contents with a blank line between.

        If the template refuses or leaves out a system message, the system text goes in front of the first user's, with
        a blank line between.

        Args:
            tools: definitions, {"type": "function", "function": {"name": ...}}.
            begin: what the answer begins with, from `begin_call`.
            split: finds chunks in a text of a tool or call.

        Raises:
            InvalidSettingError: there are no messages; the template refuses these roles (its words are quoted), leaves
                a message out or does not know of tools.
            UnsupportedModelError: the model's template is broken.
        """
        for message in messages:
            if not isinstance(message, Message):
                raise InvalidSettingError(f"render takes Messages, not {type(message).__name__}")
        if not messages:
            raise InvalidSettingError("there are no messages to render")
        if (tools or any(message.tool_calls for message in messages)) and not self.has_tools:
            raise InvalidSettingError("the model's chat template renders no tools: ask without, as a ReAct agent does")
        if self._template is None:
            return self._render_plain(messages)
        defined = checked(tools)
        try:
            segments = self._render_template(messages, defined, split, add_generation_prompt)
        except InvalidSettingError:
            merged = _system_into_user(messages)
            if merged is None:
                raise
            try:
                segments = self._render_template(merged, defined, split, add_generation_prompt)
            except InvalidSettingError as error:
                raise error from None
        if begin:
            before = segments.pop().text if segments[-1].kind == "control" else ""
            segments.append(Segment("control", before + begin))
        return segments

    def head_ids(self, messages_before_chunk: Sequence[Message], *, today: bool = False) -> tuple[int, ...]:
        """[preamble tokens]: what stands before a Chunk that comes right after these messages' last part.

        If they hold a Chunk themselves, what stands before the first one. Equal to the ids before the first chunk of
        any real prompt that begins with these messages, goes on with a chunk in the last of them and has no messages
        after it that the template would move in front. No messages at all stand for one empty user message.

        Some templates, Llama 3's among them, write the date into it. That of a fixed day stands there then, for what is
        stored behind a head is to be found tomorrow, too.

        Args:
            today: with today's date, as in the prompts of today.

        Raises:
            InvalidSettingError: as for `render`.
        """
        renderer = self
        if not today:
            renderer = copy.copy(self)
            renderer._template = _on_any_day(self._template)
            renderer._tool_template = _on_any_day(self._tool_template)
        head = list(messages_before_chunk) or [Message("user")]
        head[-1] = Message(head[-1].role, (*head[-1].content, Chunk("x")))
        if head[-1].role == "system":
            head.append(Message("user", "x"))  # many templates place a system text only where a user turn follows
        ids: list[int] = []
        for segment in renderer.render(head):
            if segment.kind == "chunk":
                break
            ids += self.encode(segment)
        return tuple(ids)

    # -- encoding -------------------------------------------------------------------------------------------------

    def _may_hold_literal(self, text: str) -> bool:
        """Whether the text spells the unknown token or a byte token. Their ids are fine, but not as a literal's."""
        if self._unknown_literal and self._unknown_literal in text:
            return True
        return self._byte_literals and _BYTE_LITERAL.search(text) is not None

    def _encode_guarded(self, text: str) -> list[int]:
        """Cut inside whatever became a token it must not become, until nothing does. Pieces only get shorter: it ends.

        Needed for vocabularies that hold control tokens as ordinary pieces, such as Unigram ones with "<s>" in them.
        """
        done: list[int] = []
        pieces = [text]
        while pieces:
            piece = pieces.pop()
            ids, offsets = self._content.encode(piece)
            cuts = sorted(
                {
                    min(max(start + 1, 1), len(piece) - 1)
                    for token, (start, stop) in zip(ids, offsets, strict=True)
                    if self._is_forbidden(token, piece[start:stop])
                }
            )
            if not cuts:
                done += ids
            elif len(piece) > 1:
                pieces += [piece[start:stop] for start, stop in reversed(list(pairwise([0, *cuts, len(piece)])))]
            else:
                # A single character that is itself a control token, or that the model knows only as BOS or EOS.
                ids, _ = self._content.encode(_REPLACEMENT)
                done += [token for token in ids if token not in self.control_ids]
        return done

    def _is_forbidden(self, token: int, source: str) -> bool:
        if token in self.control_ids:
            return True
        if token == self.unk_id:
            return self._unknown_literal in source
        # A byte token that came from a byte has that one character as its source; from a literal, six.
        return (
            self._byte_literals
            and bool(_BYTE_LITERAL.fullmatch(self._content.token(token) or ""))
            and (_BYTE_LITERAL.search(source) is not None)
        )

    # -- rendering ------------------------------------------------------------------------------------------------

    def _render_plain(self, messages: Sequence[Message]) -> list[Segment]:
        segments = [Segment("control", self._bos_text)] if self._bos_text else []
        for message in messages:
            parts = _content_segments(message, trim_left=False, trim_right=False)
            if parts and segments and segments[-1].kind != "control":
                segments.append(Segment("control", MESSAGE_SEPARATOR))
            segments += parts
        return segments

    def _render_template(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
        split: Callable[[str], list[str | Chunk]] | None,
        add_generation_prompt: bool,
    ) -> list[Segment]:
        strings: list[str] = []  # that got a placeholder

        def placed(text: str) -> str:
            known = split is not None and any(isinstance(part, Chunk) for part in split(text))
            if not known and _HARMLESS.fullmatch(text) and self.control_ids.isdisjoint(self.encode_control(text)):
                return text
            strings.append(text)
            return f'{self._open}"{len(strings) - 1}{self._close}'

        called = {call.id: call.name for message in messages for call in message.tool_calls}
        conversation: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            content = f"{self._left_pad}{self._open}{index}{self._close}{self._right_pad}"
            turn: dict[str, Any] = {"role": message.role, "content": content}
            if message.tool_calls:
                if not joined_parts(message.content):
                    turn["content"] = ""  # templates leave out what is empty, and the white space around it
                turn["tool_calls"] = [
                    {
                        "type": "function",
                        "id": placed(call.id),
                        "function": {"name": placed(call.name), "arguments": replaced(call.arguments, placed)},
                    }
                    for call in message.tool_calls
                ]
            if message.tool_call_id:
                turn["tool_call_id"] = placed(message.tool_call_id)
                turn["name"] = placed(called.get(message.tool_call_id, ""))
            conversation.append(turn)
        skeleton = self._apply_template(conversation, replaced(tools, placed), add_generation_prompt)
        while self._bos_token and skeleton.startswith(self._bos_token * 2):
            skeleton = skeleton[len(self._bos_token) :]
        segments: list[Segment] = []
        seen: set[int] = set()
        done = 0
        for found in self._placeholder.finditer(skeleton):
            left, quoted, number, right = found[1], found[2], int(found[3]), found[4]
            if found.start() > done:
                segments.append(Segment("control", skeleton[done : found.start()]))
            if quoted:
                text = _escaped(strings[number], quoted)
                segments += _segments_of(joined_parts([text] if split is None else split(text)))
            else:
                segments += _content_segments(messages[number], trim_left=not left, trim_right=not right)
                seen.add(number)
            done = found.end()
        if done < len(skeleton):
            segments.append(Segment("control", skeleton[done:]))
        for index, message in enumerate(messages):
            if index not in seen and joined_parts(message.content):
                raise InvalidSettingError(
                    f"the model's chat template leaves out message {index} (role {message.role!r}): "
                    "use the roles that the template knows"
                )
        return segments

    def _apply_template(
        self, conversation: list[dict[str, Any]], tools: list[dict[str, Any]], add_generation_prompt: bool
    ) -> str:
        with_tools = tools or any("tool_calls" in turn for turn in conversation)
        try:
            rendered = self._tokenizer.apply_chat_template(
                conversation,
                tools=tools or None,
                chat_template=self._tool_template if with_tools else self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._settings,
            )
        except ImportError as error:
            raise MissingDependencyError(f"{error}; run: pip install -U jinja2") from error
        except TemplateError as error:
            if type(error) is TemplateError:  # raised by the template itself, through raise_exception
                raise InvalidSettingError(
                    f"the model's chat template refuses these messages: {error.message or 'it gives no reason'}"
                ) from error
            raise UnsupportedModelError(f"the model's chat template does not work: {error}") from error
        except Exception as error:
            # The template is a program from outside: whatever it trips over is the model's fault, not the prompt's.
            raise UnsupportedModelError(
                f"the model's chat template fails on plain text messages ({type(error).__name__}: {error}): "
                "set tokenizer.chat_template to one that takes them"
            ) from error
        return str(rendered)

    def _finds_tools(self) -> bool:
        """Whether a tool's name and description, a call of it and the call's result come out of the template."""
        if self._tool_template is None:
            return False
        turns = [Message("user", "x"), Message("assistant", (), (_PROBE,)), Message("tool", Chunk("x"), (), _PROBE.id)]
        try:
            defined = self._render_template(turns[:1], [_PROBE_TOOL], None, True)
            called = self._render_template(turns, [_PROBE_TOOL], None, True)
        except (InvalidSettingError, UnsupportedModelError):
            return False
        names = ["".join(s.text for s in segments).count(_PROBE.name) for segments in (defined, called)]
        return Segment("text", _PROBE_TEXT) in defined and 0 < names[0] < names[1]

    def _find_call_format(self) -> _CallFormat | None:
        """What stands between the generation prompt and the name in a call, and between name and arguments."""
        turns = [Message("user", "x"), Message("assistant", (), (_PROBE,))]
        try:
            asked, called = (
                "".join(segment.text for segment in self._render_template(shown, [_PROBE_TOOL], None, generation))
                for shown, generation in ((turns[:1], True), (turns, False))
            )
        except (InvalidSettingError, UnsupportedModelError):
            return None
        opening, named, rest = called.removeprefix(asked).partition(_PROBE.name)
        between, has_arguments, _ = rest.partition(json.dumps(_PROBE.arguments))
        if not (called.startswith(asked) and named and has_arguments):
            return None
        return _CallFormat(opening, between)

    def _find_stop_ids(self) -> frozenset[int]:
        eos = self._tokenizer.eos_token_id
        stop = set() if eos is None else set(eos if isinstance(eos, (list, tuple)) else [eos])
        if self._template is None:
            return frozenset(stop)
        begins = {self._tokenizer.bos_token_id, *self.bos_ids}
        turns = [Message("user", "x"), Message("assistant", Chunk("x"))]
        try:
            segments = self.render(turns, add_generation_prompt=False)
        except (InvalidSettingError, UnsupportedModelError):
            return frozenset(stop)  # a template of another kind; a prompt it cannot take is refused when it comes
        answer = max(
            (index for index, segment in enumerate(segments) if segment.kind == "chunk"), default=len(segments)
        )
        for segment in segments[answer + 1 :]:
            for token in self.encode(segment):
                if token in self.control_ids:
                    # A template that leaves the turn open would show the next turn's BOS here: no sign of an end.
                    return frozenset(stop if token in begins else stop | {token})
        return frozenset(stop)


def _content_segments(message: Message, *, trim_left: bool, trim_right: bool) -> list[Segment]:
    parts = joined_parts(message.content)
    if trim_left and parts and isinstance(parts[0], str):
        parts[0] = parts[0].lstrip()
    if trim_right and parts and isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    return list(_segments_of(parts))


def _escaped(text: str, quoted: str) -> str:
    """The text as a template wrote it that made `quoted` of a quotation mark: once or more through JSON, or not."""
    for _ in range((len(quoted) - 1).bit_length()):  # a mark is one character, then two, four, ...
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text


def _segments_of(parts: Sequence[str | Chunk]) -> Iterator[Segment]:
    for part in parts:
        if isinstance(part, Chunk):
            yield Segment("chunk", part.text, part.whole if isinstance(part, CutChunk) else None)
        elif part:
            yield Segment("text", part)


def _system_into_user(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with a leading system message put into the first user's; None if there are no such two."""
    if messages[0].role != "system":
        return None
    rest = list(messages[1:])
    for index, message in enumerate(rest):
        if message.role == "user":
            rest[index] = Message("user", (*messages[0].content, MESSAGE_SEPARATOR, *message.content))
            return rest
    return None


# What directives become on 1 January 2025, in English whatever the process's locale is. Others stay as they are.
_THEN = {
    **{"%a": "Wed", "%A": "Wednesday", "%b": "Jan", "%B": "January", "%h": "Jan", "%c": "Wed Jan  1 00:00:00 2025"},
    **{"%d": "01", "%e": " 1", "%j": "001", "%m": "01", "%u": "3", "%w": "3", "%y": "25", "%Y": "2025", "%G": "2025"},
    **{"%-d": "1", "%-j": "1", "%-m": "1", "%U": "00", "%V": "01", "%W": "00"},
    **{"%H": "00", "%I": "12", "%M": "00", "%p": "AM", "%S": "00", "%f": "000000", "%Z": "", "%z": ""},
    **{"%-H": "0", "%-I": "12", "%-M": "0", "%-S": "0", "%s": "1735689600"},
    **{"%x": "01/01/25", "%D": "01/01/25", "%F": "2025-01-01", "%X": "00:00:00", "%T": "00:00:00", "%R": "00:00"},
}


def _on_any_day(template: str | None) -> str | None:
    """The template with a clock that stands still in the place of transformers' `strftime_now`."""
    if template is None or "strftime_now" not in template:
        return template
    fixed = "".join(f" | replace({directive!r}, {value!r})" for directive, value in _THEN.items())
    # Templates are read so that a line's end behind a block is none: theirs still begins at the beginning of a line.
    return f"{{% macro strftime_now(format) %}}{{{{ format{fixed} }}}}{{% endmacro %}}\n{template}"
