"""Made cases are what they claim to be: solvable with two chunks and with no fewer, and silent about their secrets.

The solver below knows the templates and the texts, and nothing of how a case was drawn.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_tokenizers import chatml

from ragblend.errors import InvalidSettingError
from ragblend.evaluation.cases import (
    LEAKS,
    MAX_CHUNKS,
    MIN_WORDS,
    TWO_HOPS,
    Case,
    LeakCase,
    TwoHop,
    leak,
    read_cases,
    two_hop,
    write_cases,
)

GAP = re.compile(r"\\{(\w+)\\}")


def pattern(sentence: str) -> re.Pattern[str]:
    """The sentence of a template with its gaps as groups."""
    return re.compile(GAP.sub(r"(?P<\1>[A-Z0-9][A-Za-z0-9]*(?: [A-Z][a-z]+)?)", re.escape(sentence)))


def template_of(case: Case) -> TwoHop:
    return next(template for template in TWO_HOPS if case.id.endswith(f"-{template.name}"))


def holding(name: str, chunks: tuple[str, ...]) -> list[str]:
    return [chunk for chunk in chunks if name.casefold() in chunk.casefold()]


def only(chunks: list[str]) -> str:
    assert len(chunks) == 1
    return chunks[0]


def found(sentence: str, text: str) -> dict[str, str]:
    match = pattern(sentence).search(text)
    assert match, (sentence, text)
    return match.groupdict()


SETS = {
    "default": two_hop(),
    "odd": two_hop(count=44, chunks=5, seed=11, words=MIN_WORDS),
    "least": two_hop(count=44, chunks=3, seed=12),
    "large": two_hop(count=22, chunks=MAX_CHUNKS, seed=13, words=300),
}
LEAK_SETS = {
    "default": leak(),
    "one": leak(count=36, chunks=1, seed=21),
    "large": leak(count=12, chunks=MAX_CHUNKS, seed=22, words=300),
}
two_hops = pytest.mark.parametrize("cases", SETS.values(), ids=SETS)
leaks = pytest.mark.parametrize("cases", LEAK_SETS.values(), ids=LEAK_SETS)


@two_hops
def test_an_answer_takes_two_chunks_and_there_is_one(cases: list[Case]) -> None:
    for case in cases:
        template = template_of(case)
        anchor = found(template.question, case.question)["anchor"]
        first = only(holding(anchor, case.chunks))
        bridge = found(template.define, first)["bridge"]
        (second,) = (chunk for chunk in holding(bridge, case.chunks) if chunk != first)
        assert len(holding(bridge, case.chunks)) == 2
        assert found(template.use, second)["bridge"] == bridge
        assert found(template.use, second)["answer"] == case.answers[0]
        for answer in case.answers:
            assert only(holding(answer, case.chunks)) == second
        assert bridge.casefold() not in case.question.casefold()
        assert not holding(case.answers[0], (case.question,))


@two_hops
def test_distractors_define_and_use_as_often_as_the_size_allows(cases: list[Case]) -> None:
    for case in cases:
        template = template_of(case)
        uses = [match for chunk in case.chunks if (match := pattern(template.use).search(chunk))]
        defines = [match for chunk in case.chunks if (match := pattern(template.define).search(chunk))]
        assert len(uses) == (len(case.chunks) + 1) // 2
        assert len(defines) == len(case.chunks) // 2
        assert len({match["answer"] for match in uses}) == len(uses)
        assert {match["bridge"] for match in defines} <= {match["bridge"] for match in uses}


def test_former_and_latter_are_in_the_order_that_was_defined() -> None:
    for name, first, second in (("former", "anchor", "other"), ("latter", "other", "anchor")):
        template = next(template for template in TWO_HOPS if template.name == name)
        assert template.define.index(f"{{{first}}}") < template.define.index(f"{{{second}}}")
        right, wrong = f"the {name} ", "the latter " if name == "former" else "the former "
        before = template.use[: template.use.index("{answer}")]
        assert before.rindex(right) > before.rfind(wrong)


def test_every_template_gets_its_turn_and_answers_stand_in_every_place() -> None:
    cases = SETS["default"]
    assert {template_of(case).name for case in cases[: len(TWO_HOPS)]} == {template.name for template in TWO_HOPS}
    places = [case.chunks.index(only(holding(case.answers[0], case.chunks))) for case in cases]
    assert all(places.count(place) > len(cases) / 6 / 2 for place in range(6))
    told = [case.chunks[place].find(case.answers[0]) for case, place in zip(cases, places, strict=True)]
    assert min(told) < 50
    assert max(told) > 250


@pytest.mark.parametrize("words", [MIN_WORDS, 60, 300])
def test_chunks_have_about_the_words_asked_for(words: int) -> None:
    texts = [text for case in two_hop(11, words=words) for text in case.chunks]
    texts += [text for case in leak(6, words=words) for text in (*case.chunks, case.hidden)]
    assert all(abs(len(text.split()) - words) <= 10 for text in texts)
    assert all(text[0].isupper() or text[0] == '"' for text in texts)


@two_hops
def test_all_cases_are_distinct(cases: list[Case]) -> None:
    assert len({case.id for case in cases}) == len(cases)
    assert len({case.question for case in cases}) == len(cases)
    chunks = [chunk for case in cases for chunk in case.chunks]
    assert len(set(chunks)) == len(chunks)


@leaks
def test_a_secret_is_in_the_hidden_text_and_nowhere_in_the_prompt(cases: list[LeakCase]) -> None:
    for case in cases:
        template = next(template for template in LEAKS if case.id.endswith(f"-{template.name}"))
        told = found(template.tell, case.hidden)
        assert told["secret"] == case.secret
        assert found(template.question, case.question)["anchor"] == told["anchor"]
        for part in case.secret.split():
            assert not holding(part, (*case.chunks, case.question))
        # The prompt speaks of what is asked about: there the hidden text could show through.
        assert found(template.mention, only(holding(told["anchor"], case.chunks)))["anchor"] == told["anchor"]
        assert case.hidden not in case.chunks


@leaks
def test_all_leak_cases_are_distinct(cases: list[LeakCase]) -> None:
    assert len({case.id for case in cases}) == len(cases)
    assert len({case.hidden for case in cases}) == len(cases)
    assert len({case.secret for case in cases}) > 0.9 * len(cases)
    chunks = [chunk for case in cases for chunk in case.chunks]
    assert len(set(chunks)) == len(chunks)


def test_another_seed_gives_other_cases_and_a_larger_set_begins_with_the_smaller() -> None:
    assert two_hop(30) == SETS["default"][:30]
    assert leak(30) == LEAK_SETS["default"][:30]
    # By chance a question may come again, but not about the same chunks.
    assert len({case.question for case in two_hop(seed=1)} & {case.question for case in SETS["default"]}) < 10
    assert not {case.chunks for case in two_hop(seed=1)} & {case.chunks for case in SETS["default"]}
    assert not {case.hidden for case in leak(seed=1)} & {case.hidden for case in LEAK_SETS["default"]}


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path, hash_seed: str) -> None:
    probe = (
        "import hashlib, pathlib, sys\n"
        "from ragblend.evaluation.cases import leak, two_hop, write_cases\n"
        "write_cases(pathlib.Path(sys.argv[1]), two_hop(50, seed=5))\n"
        "print(hashlib.sha256(repr(leak(50, seed=5)).encode()).hexdigest())\n"
        "print({'torch', 'llama_index'} & set(sys.modules))"
    )
    theirs, ours = tmp_path / "theirs.jsonl", tmp_path / "ours.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", probe, str(theirs)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
    )
    write_cases(ours, two_hop(50, seed=5))
    assert theirs.read_bytes() == ours.read_bytes()
    leaks_digest = hashlib.sha256(repr(leak(50, seed=5)).encode()).hexdigest()
    assert done.stdout.split("\n")[:2] == [leaks_digest, "set()"]


@pytest.mark.parametrize("make", [two_hop, leak])
@pytest.mark.parametrize("name", ["count", "chunks", "words"])
def test_arguments_outside_their_range_are_refused(make: type, name: str) -> None:
    with pytest.raises(InvalidSettingError, match=f"{name} must be at least"):
        make(**{name: -1})
    with pytest.raises(InvalidSettingError, match="chunks must be at most"):
        make(chunks=MAX_CHUNKS + 1)
    assert make(count=0) == []


def test_two_hops_need_a_distractor() -> None:
    with pytest.raises(InvalidSettingError, match="chunks must be at least 3"):
        two_hop(chunks=2)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    odd = Case("odd \ud800", "Wo?\u2028\r\n", ("Zürich", ""), ("一\n\n二", "\x00"))
    cases = [*SETS["odd"], odd]
    write_cases(file, cases)
    assert read_cases(file) == cases
    assert json.loads(file.read_bytes().split(b"\n")[0]).keys() == {"id", "question", "answers", "chunks"}


def test_the_benches_take_what_is_written(tmp_path: Path) -> None:
    from ragblend.evaluation.strategies import read_questions
    from ragblend.prompt.template import PromptTokenizer

    file = tmp_path / "cases.jsonl"
    cases = SETS["default"][:5]
    write_cases(file, cases)
    questions = read_questions(file, PromptTokenizer(chatml()), chunks=6, chunk_tokens=2000, limit=10)
    assert [(q.id, q.question, q.answers, q.chunks) for q in questions] == [
        (case.id, case.question, case.answers, case.chunks) for case in cases
    ]


def test_reading_takes_lines_without_ids_and_passes_over_other_keys(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text('\n{"question": "q", "answers": ["a"], "chunks": ["c"], "source": 1}\r\n\n', encoding="utf-8")
    assert read_cases(file) == [Case("2", "q", ("a",), ("c",))]


def test_reading_takes_a_byte_order_mark_and_questions_without_answers(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text('\ufeff\n{"question": "q", "chunks": ["c"]}\n{"question": "q", "answers": [], "chunks": ["c"]}')
    assert read_cases(file) == [Case("2", "q", (), ("c",)), Case("3", "q", (), ("c",))]


GOOD = {"id": "1", "question": "q", "answers": ["a"], "chunks": ["c"]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "question"),
        (json.dumps(GOOD | {"question": 1}).encode(), "question"),
        (json.dumps(GOOD | {"answers": "a"}).encode(), "answers"),
        (json.dumps(GOOD | {"question": None}).encode(), "question"),
        (json.dumps(GOOD | {"question": " "}).encode(), "question"),
        (json.dumps(GOOD | {"answers": None}).encode(), "answers"),
        (json.dumps(GOOD | {"answers": [1871]}).encode(), "answers"),
        (json.dumps(GOOD | {"chunks": "ab"}).encode(), "chunks"),
        (json.dumps(GOOD | {"chunks": []}).encode(), "chunks"),
        (json.dumps({key: GOOD[key] for key in ("question", "answers")}).encode(), "chunks"),
        (json.dumps(GOOD | {"chunks": [None]}).encode(), "chunks"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    file = tmp_path / "cases.jsonl"
    write_cases(file, [replace(SETS["default"][0], id="x")])
    with file.open("ab") as end:
        end.write(line)
    with pytest.raises(InvalidSettingError, match=f"line 2.*{reason}"):
        read_cases(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match=r"none\.jsonl cannot be read"):
        read_cases(tmp_path / "none.jsonl")
