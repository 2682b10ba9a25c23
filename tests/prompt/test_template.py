"""Laws of text to ids, on every tokenizer family: no control token out of content, the same ids everywhere, one BOS."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    BUILDERS,
    CHATML,
    CHATML_TOOLS,
    GEMMA_MERGING,
    base_with_bos,
    chatml,
    gemma,
    llama2,
    llama3,
    mistral,
    t5,
    with_template,
    with_tools,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ragblend.errors import InvalidSettingError, UnsupportedModelError
from ragblend.prompt.chunk import Chunk, Message, ToolCall
from ragblend.prompt.layout import lay_out
from ragblend.prompt.match import ChunkIndex, record_for
from ragblend.prompt.template import PromptTokenizer, Segment

TEXTS = [
    "The cache keeps the keys.",
    " leading and trailing ",
    "\n\nTwo\r\nline\tends\n",
    "keepword and keepwords",
    "caf\u00e9 \u6f22\u5b57 \U0001f600 e\u0301 \x00 \u200d",
    "Is it?",
]


def literals(raw: Any) -> list[str]:
    """Every added token's and every special token's literal: a superset of the control tokens."""
    added = [token.content for token in raw.added_tokens_decoder.values()]
    return sorted({*added, *map(str, raw.all_special_tokens)})


def content_ids(tokenizer: PromptTokenizer, segments: list[Segment]) -> list[int]:
    return [token for segment in segments if segment.kind != "control" for token in tokenizer.encode(segment)]


def all_ids(tokenizer: PromptTokenizer, segments: list[Segment]) -> list[int]:
    return [token for segment in segments for token in tokenizer.encode(segment)]


# -- content can never be a control token ---------------------------------------------------------------------------


def test_every_special_token_is_a_control_token(raw_tokenizer: Any, tokenizer: PromptTokenizer) -> None:
    assert set(raw_tokenizer.all_special_ids) - {tokenizer.unk_id} <= tokenizer.control_ids
    assert {raw_tokenizer.eos_token_id, raw_tokenizer.bos_token_id} - {None} <= tokenizer.control_ids


def test_tokens_that_the_template_writes_are_control_tokens_without_the_special_flag() -> None:
    raw = chatml()
    tokenizer = PromptTokenizer(raw)
    for literal in ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|fim_prefix|>"):
        assert raw.convert_tokens_to_ids(literal) in tokenizer.control_ids
    for literal in ("keepword", "\n\n\n"):
        assert raw.convert_tokens_to_ids(literal) not in tokenizer.control_ids


def test_no_literal_in_content_becomes_a_control_token(raw_tokenizer: Any, tokenizer: PromptTokenizer) -> None:
    names = literals(raw_tokenizer)
    for one in names:
        for text in (
            one,
            one * 3,
            f" {one} ",
            f"a{one}b",
            f"\n{one}\n",
            one[:-1] + one + one[-1:],
            one[: len(one) // 2] + one,
        ):
            ids = tokenizer.encode_text(text)
            assert tokenizer.control_ids.isdisjoint(ids), text
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode_text("".join(names)))
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode_text(" ".join(names)))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_mixture_of_literals_and_text_becomes_a_control_token(
    raw_tokenizer: Any, tokenizer: PromptTokenizer, data: st.DataObject
) -> None:
    names = literals(raw_tokenizer)
    halves = [piece for name in names for piece in (name[: len(name) // 2], name[len(name) // 2 :])]
    pieces = st.one_of(st.sampled_from(names), st.sampled_from(halves), st.text(max_size=4))
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    ids = tokenizer.encode_text(text)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert ids == tokenizer.encode_text(text)


def test_a_literal_split_over_segments_stays_text(raw_tokenizer: Any, tokenizer: PromptTokenizer) -> None:
    for name in literals(raw_tokenizer):
        for cut in range(1, len(name)):
            left, right = name[:cut], name[cut:]
            for parts in ((left, Chunk(right)), (Chunk(left), right), (Chunk(left), Chunk(right)), (left, right)):
                segments = tokenizer.render([Message("user", parts)])
                assert tokenizer.control_ids.isdisjoint(content_ids(tokenizer, segments)), parts


def test_control_tokens_of_a_prompt_are_those_of_the_template(raw_tokenizer: Any, tokenizer: PromptTokenizer) -> None:
    hostile = "".join(literals(raw_tokenizer))

    def control_sequence(content: str) -> list[int]:
        segments = tokenizer.render([Message("user", ["Use: ", Chunk(content), content])])
        return [token for token in all_ids(tokenizer, segments) if token in tokenizer.control_ids]

    assert control_sequence(hostile) == control_sequence("harmless")


def test_the_unknown_token_stands_for_unknown_characters_only() -> None:
    raw = t5()
    tokenizer = PromptTokenizer(raw)
    unknown = raw.unk_token_id
    assert tokenizer.encode_text("\u6f22") == [unknown]
    assert unknown not in tokenizer.encode_text("a<unk>b")
    assert tokenizer.decode(tokenizer.encode_text("a<unk>b")) == "a<unk>b"
    assert tokenizer.encode_text("a\u6f22<unk>b").count(unknown) == 1


def test_a_byte_tokens_literal_is_not_the_byte() -> None:
    for builder in (gemma, mistral, llama2):
        raw = builder()
        tokenizer = PromptTokenizer(raw)
        byte = raw.convert_tokens_to_ids("<0x01>")
        assert tokenizer.encode_text("\x01") == [byte]
        assert byte not in tokenizer.encode_text("a <0x01> b")
        assert tokenizer.decode(tokenizer.encode_text("a <0x01>\x01 b")) == "a <0x01>\x01 b"


def test_a_control_token_of_one_character_is_replaced() -> None:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u00a7", 0.0), ("a", -1.0), ("\ufffd", -1.0)], unk_id=0))
    raw = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="\u00a7", unk_token="<unk>")
    assert PromptTokenizer(raw).encode_text("a\u00a7a") == [2, 3, 2]


def test_where_unknown_and_end_are_one_token_unknown_characters_do_not_end_the_prompt() -> None:
    backend = Tokenizer(models.BPE(vocab={"<end>": 0, "a": 1, "b": 2}, merges=[], unk_token="<end>"))
    raw = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<end>")
    tokenizer = PromptTokenizer(raw)
    assert tokenizer.unk_id is None
    assert tokenizer.encode_text("a\u6f22b<end>") == [1, 2]


# -- the same text, the same ids -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(text=st.text(min_size=1, max_size=30), before=st.text(max_size=10), after=st.text(max_size=10))
def test_a_chunk_has_the_same_ids_in_every_place_and_role(
    tokenizer: PromptTokenizer, text: str, before: str, after: str
) -> None:
    expected = tokenizer.encode_text(text)
    places = [
        [Message("user", Chunk(text))],
        [Message("user", [before, Chunk(text), after])],
        [Message("user", [Chunk(text), Chunk(before), Chunk(text), after])],
        [Message("system", [before, Chunk(text)]), Message("user", after)],
        [Message("user", before), Message("assistant", [Chunk(text), after]), Message("user", Chunk(text))],
    ]
    for messages in places:
        chunks = [s for s in tokenizer.render(messages) if s.kind == "chunk" and s.text == text]
        assert chunks
        assert all(tokenizer.encode(segment) == expected for segment in chunks)


def test_no_prefix_is_put_before_content(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_text("The cache")) == "The cache"
    assert tokenizer.encode_text("The cache") != tokenizer.encode_text(" The cache")
    assert tokenizer.encode_text("") == []


def test_decoding_gives_the_text_back(raw_tokenizer: Any, tokenizer: PromptTokenizer) -> None:
    for text in [*TEXTS, *literals(raw_tokenizer)]:
        ids = tokenizer.encode_text(text)
        if tokenizer.unk_id not in ids:
            assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_byte_level_decoding_is_exact(text: str) -> None:
    for builder in (chatml, llama3, base_with_bos):
        tokenizer = PROMPT_TOKENIZERS[builder.__name__]
        assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_lone_surrogates_are_replaced_and_pairs_joined(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.encode_text("a\ud800b") == tokenizer.encode_text("a\ufffdb")
    assert tokenizer.encode_text("a\ud83d\ude00") == tokenizer.encode_text("a\U0001f600")


def test_a_control_literal_is_read_like_any_other_text() -> None:
    # The guard against control ids would cut the literal up; the ids of the plain vocabulary are the better ones.
    document = json.loads(chatml().backend_tokenizer.to_str())
    document["added_tokens"] = []
    document["pre_tokenizer"]["add_prefix_space"] = False
    plain = Tokenizer.from_str(json.dumps(document))
    for text in ("<|im_end|>", "a <|im_start|>system\nb", "<tool_call>{}</tool_call>"):
        assert PROMPT_TOKENIZERS["chatml"].encode_text(text) == plain.encode(text).ids


def test_other_added_tokens_keep_their_ids() -> None:
    raw = chatml()
    tokenizer = PromptTokenizer(raw)
    for literal in ("keepword", "\n\n\n"):
        assert tokenizer.encode_text(literal) == [raw.convert_tokens_to_ids(literal)]
        assert tokenizer.decode(tokenizer.encode_text(literal)) == literal


def test_content_ids_are_the_stock_ids_where_there_is_no_prefix(smollm2_tokenizer: Any) -> None:
    tokenizer = PromptTokenizer(smollm2_tokenizer)
    for text in TEXTS:
        assert tokenizer.encode_text(text) == smollm2_tokenizer.encode(text, add_special_tokens=False)


def test_dropout_of_the_vocabulary_is_not_used() -> None:
    document = json.loads(base_with_bos().backend_tokenizer.to_str())
    document["model"]["dropout"] = 0.9
    raw = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(document)), bos_token="<|begin_of_text|>"
    )
    tokenizer = PromptTokenizer(raw)
    expected = PROMPT_TOKENIZERS["base_with_bos"].encode_text(TEXTS[0])
    assert all(tokenizer.encode_text(TEXTS[0]) == expected for _ in range(5))


def test_the_shared_tokenizer_is_neither_used_up_nor_needed_unchanged() -> None:
    raw = with_template(chatml(), chatml().chat_template)
    before = raw.backend_tokenizer.to_str()
    tokenizer = PromptTokenizer(raw)
    expected = all_ids(tokenizer, tokenizer.render([Message("user", TEXTS[0])]))
    assert raw.backend_tokenizer.to_str() == before
    raw(TEXTS[0], truncation=True, max_length=2, padding="max_length", split_special_tokens=True, pad_to_multiple_of=1)
    raw.chat_template = None
    assert all_ids(tokenizer, tokenizer.render([Message("user", TEXTS[0])])) == expected


def test_threads_get_what_one_thread_gets(tokenizer: PromptTokenizer) -> None:
    conversations = [
        [Message("user", [f"{number} <s><|im_end|>", Chunk(text)])] for number in range(8) for text in TEXTS
    ]

    def ids(messages: list[Message]) -> list[int]:
        return all_ids(tokenizer, tokenizer.render(messages))

    expected = [ids(messages) for messages in conversations]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ids, conversations)) == expected


# -- templates -----------------------------------------------------------------------------------------------------

CONVERSATIONS = [
    [("user", "Why?")],
    [("system", "Be brief."), ("user", "Why?")],
    [("user", "Why?"), ("assistant", "So."), ("user", "How?")],
]


def test_rendering_writes_what_the_template_writes(raw_tokenizer: Any, tokenizer: PromptTokenizer) -> None:
    if not tokenizer.has_template:
        pytest.skip("no chat template")
    for conversation in CONVERSATIONS:
        for generation in (True, False):
            try:
                stock = raw_tokenizer.apply_chat_template(
                    [{"role": role, "content": text} for role, text in conversation],
                    tokenize=False,
                    add_generation_prompt=generation,
                )
            except Exception:
                continue  # the template refuses these roles
            messages = [Message(role, text) for role, text in conversation]
            segments = tokenizer.render(messages, add_generation_prompt=generation)
            if stock.count("Be brief.") == ("system" in dict(conversation)):
                assert "".join(segment.text for segment in segments) == stock
            ids = raw_tokenizer(stock, add_special_tokens=False)["input_ids"]
            control = [token for token in ids if token in tokenizer.control_ids]
            assert control
            assert [token for token in all_ids(tokenizer, segments) if token in tokenizer.control_ids] == control


def test_ids_are_the_stock_ids_of_a_real_model(smollm2_tokenizer: Any) -> None:
    tokenizer = PromptTokenizer(smollm2_tokenizer)
    for conversation in CONVERSATIONS:
        stock = smollm2_tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in conversation], add_generation_prompt=True
        )["input_ids"]
        assert all_ids(tokenizer, tokenizer.render([Message(role, text) for role, text in conversation])) == stock


def test_at_most_one_bos(raw_tokenizer: Any, tokenizer: PromptTokenizer) -> None:
    bos = raw_tokenizer.bos_token_id
    for text in ("Why?", raw_tokenizer.bos_token or "<s>"):
        ids = all_ids(tokenizer, tokenizer.render([Message("user", [text, Chunk(text)])]))
        if tokenizer.bos_ids:
            assert ids[0] == bos
            assert ids.count(bos) == 1
        else:
            assert ids[:2] != [bos, bos]


def test_a_template_that_writes_bos_twice_gets_one() -> None:
    raw = with_template(llama3(), "{{ bos_token }}" + llama3().chat_template)
    tokenizer = PromptTokenizer(raw)
    assert all_ids(tokenizer, tokenizer.render([Message("user", "Why?")])).count(raw.bos_token_id) == 1


def test_a_template_without_bos_gets_none() -> None:
    raw = with_template(llama3(), llama3().chat_template.replace("{{ bos_token }}", ""))
    tokenizer = PromptTokenizer(raw)
    assert raw.bos_token_id not in all_ids(tokenizer, tokenizer.render([Message("user", "Why?")]))


def test_without_a_template_contents_are_joined_behind_bos() -> None:
    tokenizer = PROMPT_TOKENIZERS["base_with_bos"]
    messages = [Message("system", "Read."), Message("user", ""), Message("user", [Chunk("The cache"), " is?"])]
    assert [(segment.kind, segment.text) for segment in tokenizer.render(messages)] == [
        ("control", "<|begin_of_text|>"),
        ("text", "Read."),
        ("control", "\n\n"),
        ("chunk", "The cache"),
        ("text", " is?"),
    ]
    assert not tokenizer.has_template
    assert tokenizer.bos_ids == (base_with_bos().bos_token_id,)


def test_an_appended_eos_is_not_a_beginning() -> None:
    tokenizer = PROMPT_TOKENIZERS["t5"]
    assert tokenizer.bos_ids == ()
    assert t5().eos_token_id not in all_ids(tokenizer, tokenizer.render([Message("user", "Why?")]))


@pytest.mark.parametrize("name", ["llama3", "gemma", "llama2"])
def test_where_the_template_trims_plain_text_is_trimmed_and_chunks_are_not(name: str) -> None:
    tokenizer = PROMPT_TOKENIZERS[name]
    chunk = Chunk("  The cache \n")

    def content(*parts: str | Chunk) -> list[str]:
        return [s.text for s in tokenizer.render([Message("user", parts)]) if s.kind != "control"]

    assert content("\n  Why? \n") == ["Why?"]
    assert content("\n Read: ", chunk, " and answer. ") == ["Read: ", chunk.text, " and answer."]
    assert content(" \n", chunk, " \n") == [chunk.text]
    assert content(chunk) == [chunk.text]


def test_where_the_template_does_not_trim_nothing_is_trimmed() -> None:
    for name in ("chatml", "mistral"):
        segments = PROMPT_TOKENIZERS[name].render([Message("user", "\n  Why? \n")])
        assert [segment.text for segment in segments if segment.kind == "text"] == ["\n  Why? \n"]


def test_one_sided_trimming_is_followed_side_by_side() -> None:
    template = "{% for message in messages %}{{ message['content'].rstrip() }}{% endfor %}"
    tokenizer = PromptTokenizer(with_template(chatml(), template))
    segments = tokenizer.render([Message("user", " a "), Message("assistant", " b "), Message("user", " c ")])
    assert [segment.text for segment in segments] == [" a", " b", " c"]
    template = "{% for m in messages %}{{ m['content'].rstrip() if loop.first else m['content'] }}{% endfor %}"
    tokenizer = PromptTokenizer(with_template(chatml(), template))
    assert [s.text for s in tokenizer.render([Message("user", " a "), Message("user", " b ")])] == [" a", " b "]


def test_a_default_system_prompt_comes_and_goes_with_the_system_message() -> None:
    tokenizer = PROMPT_TOKENIZERS["chatml"]
    with_default = "".join(segment.text for segment in tokenizer.render([Message("user", "Why?")]))
    without = "".join(s.text for s in tokenizer.render([Message("system", "X."), Message("user", "Why?")]))
    assert "Be helpful." in with_default
    assert "Be helpful." not in without


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_refused_system_message_goes_before_the_first_user_text(name: str) -> None:
    tokenizer = PROMPT_TOKENIZERS[name]
    messages = [Message("system", ["Read ", Chunk("The cache")]), Message("user", "Why?")]
    content = [(s.kind, s.text) for s in tokenizer.render(messages) if s.kind != "control"]
    assert content == [("text", "Read "), ("chunk", "The cache"), ("text", "\n\nWhy?")]


def test_a_template_that_merges_the_system_message_does_so() -> None:
    tokenizer = PromptTokenizer(with_template(gemma(), GEMMA_MERGING))
    segments = tokenizer.render([Message("system", Chunk("Read.")), Message("user", " Why? ")])
    assert "".join(segment.text for segment in segments) == (
        "<bos><start_of_turn>user\nRead.\n\nWhy?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_system_message_that_the_template_forgets_is_kept() -> None:
    template = "{% for m in messages if m['role'] != 'system' %}{{ '<|im_start|>' + m['content'] }}{% endfor %}"
    tokenizer = PromptTokenizer(with_template(chatml(), template))
    segments = tokenizer.render([Message("system", "Read."), Message("user", "Why?")])
    assert "".join(segment.text for segment in segments) == "<|im_start|>Read.\n\nWhy?"


def test_a_repeated_content_is_repeated() -> None:
    template = "{% for m in messages %}{{ m['content'] + '|' + m['content'] }}{% endfor %}"
    tokenizer = PromptTokenizer(with_template(chatml(), template))
    kinds = [segment.kind for segment in tokenizer.render([Message("user", Chunk("Why?"))])]
    assert kinds == ["chunk", "control", "chunk"]


def test_a_template_that_refuses_is_quoted() -> None:
    for name in ("gemma", "mistral", "llama2"):
        with pytest.raises(InvalidSettingError, match="Conversation roles must alternate"):
            PROMPT_TOKENIZERS[name].render([Message("user", "a"), Message("user", "b")])


def test_a_message_that_the_template_leaves_out_is_an_error_unless_empty() -> None:
    template = "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}{% endfor %}"
    tokenizer = PromptTokenizer(with_template(chatml(), template))
    with pytest.raises(InvalidSettingError, match=r"leaves out message 1 \(role 'tool'\)"):
        tokenizer.render([Message("user", "a"), Message("tool", "b")])
    assert tokenizer.render([Message("user", "a"), Message("tool", ["", Chunk("")])]) == [Segment("text", "a")]


@pytest.mark.parametrize(
    "template", ["{% for m in %}", "{{ messages.nothing.more }}", "{{ messages[0]['content'] + 1 }}", "{{ 1 // 0 }}"]
)
def test_a_broken_template_is_the_models_fault(template: str) -> None:
    tokenizer = PromptTokenizer(with_template(chatml(), template))
    assert tokenizer.stop_ids == {chatml().eos_token_id}
    with pytest.raises(UnsupportedModelError, match="chat template"):
        tokenizer.render([Message("user", "a")])


def test_nothing_to_render_is_an_error() -> None:
    with pytest.raises(InvalidSettingError, match="no messages"):
        PROMPT_TOKENIZERS["chatml"].render([])
    with pytest.raises(InvalidSettingError, match="takes Messages"):
        PROMPT_TOKENIZERS["chatml"].render(["text"])  # type: ignore[list-item]


def test_several_templates_need_a_default() -> None:
    chosen = PromptTokenizer(with_template(chatml(), {"default": chatml().chat_template, "tool_use": "{{ 1 }}"}))
    assert chosen.render([Message("user", "a")]) == PROMPT_TOKENIZERS["chatml"].render([Message("user", "a")])
    with pytest.raises(UnsupportedModelError, match="none is called 'default'"):
        PromptTokenizer(with_template(chatml(), {"rag": "{{ 1 }}", "tool_use": "{{ 1 }}"}))


def test_template_settings_reach_the_template() -> None:
    raw = chatml()
    segments = PromptTokenizer(raw, template_settings={"enable_thinking": False}).render([Message("user", "a")])
    assert segments[-1].text.endswith("<think>\n\n</think>\n\n")
    for name in ("chat_template", "add_generation_prompt"):
        with pytest.raises(InvalidSettingError, match=name):
            PromptTokenizer(raw, template_settings={name: "x"})
    with pytest.raises(InvalidSettingError, match="reads no enable_thinkin,"):
        PromptTokenizer(raw, template_settings={"enable_thinkin": False, "thinking": 1, "enable_thinking": True})
    with pytest.raises(InvalidSettingError, match="name: value"):
        PromptTokenizer(raw, template_settings=["enable_thinking"])  # type: ignore[arg-type]


def test_a_tokenizer_without_backend_is_refused() -> None:
    class SlowTokenizer:
        chat_template = None

    with pytest.raises(UnsupportedModelError, match="SlowTokenizer has no `tokenizers` backend"):
        PromptTokenizer(SlowTokenizer())  # type: ignore[arg-type]


def test_private_use_and_typographic_characters_in_content_are_content() -> None:
    text = "\ue0000\ue001\u2003\u2002"
    for name in ("chatml", "base_with_bos"):
        segments = PROMPT_TOKENIZERS[name].render([Message("user", [text, Chunk(text)]), Message("assistant", text)])
        assert [segment.text for segment in segments if segment.kind != "control"] == [text, text, text]


def test_a_template_may_use_private_use_characters_itself() -> None:
    tokenizer = PromptTokenizer(with_template(chatml(), "\ue0000\ue001\u2003{{ messages[0]['content'] }}"))
    assert [s.text for s in tokenizer.render([Message("user", " a ")])] == ["\ue0000\ue001\u2003", " a "]


# -- ends and heads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("chatml", {"<|im_end|>"}),
        ("llama3", {"<|end_of_text|>", "<|eot_id|>"}),
        ("mistral", {"</s>"}),
        ("llama2", {"</s>"}),
        ("gemma", {"<eos>", "<end_of_turn>"}),
        ("t5", {"</s>"}),
        ("base_with_bos", {"<|end_of_text|>"}),
    ],
)
def test_stop_ids_are_eos_and_the_end_of_an_assistant_turn(name: str, ends: set[str]) -> None:
    raw = BUILDERS[name]()
    assert PROMPT_TOKENIZERS[name].stop_ids == {raw.convert_tokens_to_ids(end) for end in ends}


def test_stop_ids_of_a_real_model(smollm2_tokenizer: Any) -> None:
    assert PromptTokenizer(smollm2_tokenizer).stop_ids == {2}


HEADS = [
    [Message("user", "")],
    [Message("user", "Context:\n")],
    [Message("user", " Context: \n\n")],
    [Message("system", "Read the context. "), Message("user", "Context:\n")],
    [Message("system", "Read the context: ")],
    [Message("user", "Why?"), Message("assistant", "So."), Message("user", "Context: ")],
]


@pytest.mark.parametrize("head", HEADS)
def test_head_ids_are_what_stands_before_the_first_chunk(tokenizer: PromptTokenizer, head: list[Message]) -> None:
    expected = tokenizer.head_ids(head)
    last = Message(head[-1].role, (*head[-1].content, Chunk("The cache."), " glue ", Chunk("The keys."), " Why? "))
    prompt = [*head[:-1], last] + ([Message("user", "Well?")] if last.role == "system" else [])
    before: list[int] = []
    for segment in tokenizer.render(prompt):
        if segment.kind == "chunk":
            break
        before += tokenizer.encode(segment)
    assert tuple(before) == expected


def test_head_ids_stop_at_the_first_chunk_and_may_be_asked_without_messages(tokenizer: PromptTokenizer) -> None:
    head = [Message("user", ["Context: ", Chunk("The cache."), " glue "])]
    assert tokenizer.head_ids(head) == tokenizer.head_ids([Message("user", "Context: ")])
    assert tokenizer.head_ids([]) == tokenizer.head_ids([Message("user", "")])


PROMPT_TOKENIZERS = {name: PromptTokenizer(builder()) for name, builder in BUILDERS.items()}


# -- tools ------------------------------------------------------------------------------------------------------------

WITH_TOOLS = ["chatml", "llama3", "mistral"]
TOOL = {
    "type": "function",
    "function": {
        "name": "height",
        "description": "Height of a building, in metres; 'unknown' if it isn't known.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
CALL = ToolCall("height", {"name": "lighthouse"}, "abcdefghi")
CALLED = [
    Message("user", "How high is it?"),
    Message("assistant", (), [CALL]),
    Message("tool", "38 metres", (), CALL.id),
]


def _described(text: str) -> dict[str, Any]:
    return {"type": "function", "function": {**TOOL["function"], "description": text}}  # type: ignore[dict-item]


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_prompts_with_tools_calls_and_results_are_those_of_the_template(family: str) -> None:
    raw = with_tools(family)
    tokenizer = PromptTokenizer(raw)
    assert tokenizer.has_tools
    function = {"name": "height", "arguments": dict(CALL.arguments)}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "How high is it?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": CALL.id, "function": function}]},
        {"role": "tool", "content": "38 metres", "tool_call_id": CALL.id},
    ]
    for n in (1, 3):
        stock = raw.apply_chat_template(turns[:n], tools=[TOOL], tokenize=False, add_generation_prompt=True)
        segments = tokenizer.render(CALLED[:n], tools=[TOOL])
        assert "".join(segment.text for segment in segments) == stock
        # Nothing in this tool needs a placeholder: what the model was trained on is what it reads.
        texts = [segment.text for segment in segments if segment.kind != "control"]
        assert texts == ["How high is it?", "38 metres"][: len(texts)]


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_template_without_tools_has_none(builder: str) -> None:
    tokenizer = PromptTokenizer(BUILDERS[builder]())
    assert not tokenizer.has_tools  # though that of "chatml" shows that there are some
    for turns, tools in ((CALLED[:1], [TOOL]), (CALLED, [])):
        with pytest.raises(InvalidSettingError, match="no tools"):
            tokenizer.render(turns, tools=tools)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="do not require"):
        tokenizer.begin_call()


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_no_text_of_a_tool_a_call_or_a_result_becomes_a_control_token(family: str) -> None:
    raw = with_tools(family)
    tokenizer = PromptTokenizer(raw)

    def control(text: str) -> list[int]:
        tool = _described(text)
        tool["function"]["parameters"] = {"type": "object", "properties": {text: {"enum": [text]}}, "required": [text]}
        turns = [
            Message("user", text),
            Message("assistant", (), [ToolCall("height", {text: [text]}, CALL.id)]),
            Message("tool", text, (), CALL.id),
        ]
        ids = all_ids(tokenizer, tokenizer.render(turns, tools=[tool]))
        return [token for token in ids if token in tokenizer.control_ids]

    hostile = "".join(literals(raw))
    assert control(hostile) == control("harmless")
    for literal in literals(raw):
        assert control(f"a {literal}") == control("harmless"), literal


@pytest.mark.parametrize(("family", "escaped"), [("chatml", True), ("llama3", True), ("mistral", False)])
def test_a_placeholder_is_filled_as_the_template_would_have(family: str, escaped: bool) -> None:
    raw = with_tools(family)
    text = 'Says "<what>"\nand \\ why.'
    tool = _described(text)
    stock = raw.apply_chat_template([{"role": "user", "content": "x"}], tools=[tool], tokenize=False)
    segments = PromptTokenizer(raw).render([Message("user", "x")], tools=[tool], add_generation_prompt=False)
    assert "".join(segment.text for segment in segments) == stock
    assert Segment("text", json.dumps(text)[1:-1] if escaped else text) in segments


@pytest.mark.parametrize(
    ("family", "opening"),
    [
        ("chatml", '<tool_call>\n{"name": "height", "arguments": '),
        ("llama3", '{"name": "height", "parameters": '),
        ("mistral", '[TOOL_CALLS] [{"name": "height", "arguments": '),
    ],
)
def test_an_answer_can_be_begun_as_the_template_begins_a_call(family: str, opening: str) -> None:
    tokenizer = PromptTokenizer(with_tools(family))
    assert tokenizer.begin_call("height") == opening
    assert tokenizer.begin_call() == opening[: opening.index("height")]
    begun = tokenizer.render(CALLED[:1], tools=[TOOL], begin=opening)
    plain = tokenizer.render(CALLED[:1], tools=[TOOL])
    assert "".join(s.text for s in begun) == "".join(s.text for s in plain) + opening
    # It goes on as the template goes on.
    called = tokenizer.render(CALLED[:2], tools=[TOOL], add_generation_prompt=False)
    assert "".join(s.text for s in called).startswith("".join(s.text for s in begun) + '{"name": "lighthouse"}')


def test_a_template_of_its_own_for_tools_is_used_for_them_only() -> None:
    raw = with_template(chatml(), {"default": CHATML, "tool_use": CHATML_TOOLS})
    tokenizer = PromptTokenizer(raw)
    assert tokenizer.has_tools
    assert "# Tools" in tokenizer.render(CALLED[:1], tools=[TOOL])[0].text
    assert tokenizer.render(CALLED[:1]) == PromptTokenizer(chatml()).render(CALLED[:1])


def test_marks_of_calls_can_be_left_in_the_text() -> None:
    tokenizer = PromptTokenizer(with_tools("chatml"))
    text = '<tool_call>\n{"name": "height"}\n</tool_call>'
    ids = tokenizer.encode_control(f"{text}<|im_end|>")
    assert tokenizer.decode(ids) == '\n{"name": "height"}\n'
    assert tokenizer.decode(ids, marks=True) == text


def test_a_tools_text_that_is_known_is_a_chunk() -> None:
    tokenizer = PromptTokenizer(with_tools("chatml"))
    text = "Height of a building: metres, as the archive has them."
    index = ChunkIndex([record_for(text)])
    layout = lay_out(tokenizer, "How high?", index, tools=[_described(f"{text} Or nothing.")])
    assert [span.text for span in layout.chunks] == [text]


def test_a_tools_result_may_end_in_a_chunk() -> None:
    tokenizer = PromptTokenizer(with_tools("chatml"))
    known = "The lighthouse on Gull Island is 38 metres high."
    index = ChunkIndex([record_for(known)])
    turns = [*CALLED[:2], Message("tool", f"See: {known}\n\n", (), CALL.id)]
    layout = lay_out(tokenizer, turns, index, tools=[TOOL])
    assert [span.text for span in layout.chunks] == [known]
    start, stop = layout.question
    assert stop > start  # the generation prompt stays fresh
