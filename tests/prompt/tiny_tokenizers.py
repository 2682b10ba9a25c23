"""Small tokenizers built like the well-known families: what differs between those decides whether laws hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The cache keeps the keys and the values of every chunk of the documents.",
    "A question about the documents is asked by the user, and the assistant answers it.",
    "system user assistant model start end header id turn im begin of text sep INST SYS tool call think",
    "Tokens are read in order; numbers such as 0 1 2 3 4 5 6 7 8 9 and marks ( ) [ ] { } < > | / _ - . , : ; ! ?",
    "<| |> <| |>",
    "the quick brown fox jumps over the lazy dog THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG",
    "def main():\n    return 'value'\n\n\nclass Thing:\n    pass\n",
] * 4

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if tools %}{{ '<tool_call></tool_call>' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# Three ways to render tools: in the system turn, in the first user's, in the last user's.
CHATML_TOOLS = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = 'Be helpful.' %}{% set turns = messages %}{% endif %}"
    "{{ '<|im_start|>system\n' + system }}"
    "{% if tools %}{{ '\n\n# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    '{{ \'\n</tools>\nAnswer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>\' }}{% endif %}'
    "{{ '<|im_end|>\n' }}"
    "{% for message in turns %}{% if message.role == 'tool' %}"
    "{% if loop.first or turns[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or turns[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message.tool_calls %}{{ '<|im_start|>assistant' }}"
    "{% if message.content %}{{ '\n' + message.content }}{% endif %}"
    "{% for call in message.tool_calls %}{% set call = call.function %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}{{ call.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_TOOLS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% if 'tool_calls' in message %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
    "{% elif message.role == 'tool' %}{{ message.content | tojson }}"
    "{% else %}{% if tools and message.role == 'user' and loop.index0 == 0 %}"
    "{{ 'Answer with a call of a function:\n\n' }}"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{% endif %}"
    "{{ message.content | trim }}{% endif %}{{ '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL_TOOLS = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools and message == users[-1] %}{{ '[AVAILABLE_TOOLS] [' }}{% for tool in tools %}"
    '{{ \'{"type": "function", "function": {\' }}{% for key, value in tool.function.items() %}'
    "{% if value is string %}{{ '\"' + key + '\": \"' + value + '\"' }}"
    "{% else %}{{ '\"' + key + '\": ' + value | tojson }}{% endif %}{% if not loop.last %}{{ ', ' }}{% endif %}"
    "{% endfor %}{{ '}}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    "{{ '][/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}"
    "{% elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}"
    "{{ (call.function | tojson)[:-1] }}"
    "{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs have length 9!') }}{% endif %}"
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    "{{ ']' + eos_token }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}"
    "{% elif message.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + message.content | string }}"
    "{{ ', \"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set loop_messages = messages[1:] %}"
    "{% else %}{% set system = false %}{% set loop_messages = messages %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA_MERGING = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set prefix = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') + message['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def _with_bos(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def _byte_level(specials: list[str], *, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # add_prefix_space is what GPT-2 style files of old carry; content must come out without the space all the same.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if ignore_merges:
        document = json.loads(tokenizer.to_str())
        document["model"]["ignore_merges"] = True
        tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _sentencepiece_bpe(*, legacy: bool) -> Tokenizer:
    """Llama-2 and Mistral v0.1: specials and bytes in the vocabulary, a space put in front of every text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    specials = ["<unk>", "<s>", "</s>", *BYTE_TOKENS]
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=specials, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    _with_bos(tokenizer, "<s>")
    return tokenizer


def _unigram(specials: list[str], *, byte_fallback: bool) -> Tokenizer:
    """Specials are ordinary pieces with the best score there is: a literal always matches them."""
    letters = sorted({char for text in CORPUS for char in text if char not in " \n"} | {"▁"})
    words = sorted({"▁" + word for text in CORPUS for word in text.split()})
    pieces = [(special, 0.0) for special in specials]
    if byte_fallback:
        pieces += [(token, -20.0) for token in BYTE_TOKENS]
    pieces += [(letter, -8.0) for letter in letters] + [(word, -9.0) for word in words if word not in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=specials.index("<unk>"), byte_fallback=byte_fallback))
    return tokenizer


@cache
def chatml() -> PreTrainedTokenizerFast:
    """Qwen style: no BOS; tool and thinking tokens are added tokens that are not flagged special."""
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    for literal in ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|fim_prefix|>"):
        tokenizer.add_tokens([AddedToken(literal, special=False, normalized=False)])
    # Neither steers the model: they must stay single tokens, with the ids they have.
    tokenizer.add_tokens([AddedToken("keepword", normalized=False), AddedToken("\n\n\n", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


@cache
def llama3() -> PreTrainedTokenizerFast:
    """BOS both in the template and from the post-processor; merges ignored for whole words; content trimmed."""
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = _byte_level(specials, ignore_merges=True)
    _with_bos(tokenizer, "<|begin_of_text|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        chat_template=LLAMA3,
    )


@cache
def mistral() -> PreTrainedTokenizerFast:
    """Metaspace with a prefix on the first word only, byte fallback."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_sentencepiece_bpe(legacy=False),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
        chat_template=MISTRAL,
    )


@cache
def llama2() -> PreTrainedTokenizerFast:
    """A Prepend normaliser, as in tokenizer files made from GGUF."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_sentencepiece_bpe(legacy=True),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=LLAMA2,
    )


@cache
def gemma() -> PreTrainedTokenizerFast:
    """Unigram with the specials and all bytes as pieces; no system role; content trimmed."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = _unigram(specials, byte_fallback=True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(specials)
    _with_bos(tokenizer, "<bos>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=GEMMA,
    )


@cache
def t5() -> PreTrainedTokenizerFast:
    """Unigram without byte fallback (unknown characters are <unk>), a prefix on every word, no chat template."""
    specials = ["<pad>", "</s>", "<unk>"]
    tokenizer = _unigram(specials, byte_fallback=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


@cache
def base_with_bos() -> PreTrainedTokenizerFast:
    """A base model: BOS from the post-processor, no chat template."""
    tokenizer = _byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    _with_bos(tokenizer, "<|begin_of_text|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )


def with_template(
    tokenizer: PreTrainedTokenizerFast, template: object, specials: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """The same tokenizer with another chat template, and more special tokens."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(list(specials))
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name.endswith("_token")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


def with_tools(family: str) -> PreTrainedTokenizerFast:
    """chatml, llama3 or mistral, with a template that renders tools."""
    if family == "mistral":
        marks = ("AVAILABLE_TOOLS", "TOOL_RESULTS")
        specials = ["[TOOL_CALLS]", *(f"[{slash}{mark}]" for mark in marks for slash in ("", "/"))]
        return with_template(mistral(), MISTRAL_TOOLS, specials)
    return with_template(
        {"chatml": chatml, "llama3": llama3}[family](), {"chatml": CHATML_TOOLS, "llama3": LLAMA3_TOOLS}[family]
    )


BUILDERS = {builder.__name__: builder for builder in (chatml, llama3, mistral, llama2, gemma, t5, base_with_bos)}
