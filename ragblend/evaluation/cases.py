"""Question sets made from templates, for what reuse of chunk KV can get wrong.

`two_hop`: answers that need two chunks. A model that reads every chunk as if it stood alone loses the thread between
them; what cross-chunk attention is for shows here first. `leak`: chunks that may have been prefilled behind a text that
is not in the prompt. What that text said must not come out.

Every name is put together from syllables, so that no model knows it. The same arguments give the same bytes, in every
process and on every machine.
"""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ragblend.errors import InvalidSettingError

MAX_CHUNKS = 32  # more would use up the beginnings of names
MIN_WORDS = 30  # the longest sentence that must be told, and some


@dataclass(frozen=True)
class Case:
    """A question with its right answers and the chunks to answer it from."""

    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class LeakCase:
    """A question that the chunks do not answer.

    Attributes:
        secret: the answer, told in `hidden` and nowhere else.
        chunks: the prompt's chunks; one is about what the question is about, and says nothing of the secret.
        hidden: a text as long as a chunk that chunks may have been prefilled behind; it is not in the prompt.
    """

    id: str
    question: str
    secret: str
    chunks: tuple[str, ...]
    hidden: str


@dataclass(frozen=True)
class TwoHop:
    """Two sentences that give an answer only together, with a gap for each name.

    Attributes:
        define: ties {anchor} to {bridge}.
        use: ties {bridge} to {answer}, without the anchor.
        question: names the anchor, without the bridge.
        kinds: of what kind anchor, bridge and answer are; {other} is of the anchor's, {other_answer} of the answer's.
        unit: what a number is counted in; right with it or without.
    """

    name: str
    define: str
    use: str
    question: str
    kinds: tuple[str, str, str]
    unit: str = ""


@dataclass(frozen=True)
class Leak:
    """A sentence that tells {secret} about {anchor}, the question for it, and a sentence that tells nothing of it."""

    name: str
    tell: str
    question: str
    mention: str
    kinds: tuple[str, str]


TWO_HOPS = (
    TwoHop(
        "definition",
        "In this report, {bridge} means the ship owned by {anchor}.",
        "The ship {bridge} was built in {answer}.",
        "In which town was the ship owned by {anchor} built?",
        ("person", "word", "town"),
    ),
    TwoHop(
        "code_name",
        "The code name of the canal at {anchor} is {bridge}.",
        "Canal {bridge} will cost {answer} crowns.",
        "How many crowns will the canal at {anchor} cost?",
        ("town", "word", "number"),
        "crowns",
    ),
    TwoHop(
        "abbreviation",
        "Table of abbreviations: {bridge} stands for the weather service of {anchor}.",
        "The director of {bridge} is {answer}.",
        "Who is the director of the weather service of {anchor}?",
        ("town", "letters", "person"),
    ),
    TwoHop(
        "pronoun",
        "Letter {bridge}, first page: my name is {anchor}, and I have much to tell.",
        "Letter {bridge}, second page: I was born in {answer}, as you know.",
        "In which town was {anchor} born?",
        ("person", "number", "town"),
    ),
    TwoHop(
        "role",
        "The gardener of the castle of {anchor} is {bridge}.",
        "The gardener {bridge} earns {answer} crowns a year.",
        "How many crowns a year does the gardener of the castle of {anchor} earn?",
        ("town", "person", "number"),
        "crowns",
    ),
    TwoHop(
        "former",
        "Two bridges cross the river at {bridge}: the {anchor} bridge and the {other} bridge.",
        "Of the two bridges at {bridge}, the former was opened in {answer} and the latter in {other_answer}.",
        "In which year was the {anchor} bridge opened?",
        ("word", "town", "year"),
    ),
    TwoHop(
        "latter",
        "Two inns stand in {bridge}: the {other} inn and the {anchor} inn.",
        "Of the two inns in {bridge}, the former is owned by {other_answer} and the latter by {answer}.",
        "Who owns the {anchor} inn?",
        ("word", "town", "person"),
    ),
    TwoHop(
        "number",
        "The parcel for {anchor} has the number {bridge}.",
        "Parcel {bridge} now lies in {answer}.",
        "In which town does the parcel for {anchor} lie now?",
        ("person", "number", "town"),
    ),
    TwoHop(
        "author",
        'The book "{anchor}" was written by {bridge}.',
        "The author {bridge} lives in {answer}.",
        'In which town does the author of the book "{anchor}" live?',
        ("word", "person", "town"),
    ),
    TwoHop(
        "nickname",
        "The rowing team of {anchor} is called the {bridge} team.",
        "The captain of the {bridge} team is {answer}.",
        "Who is the captain of the rowing team of {anchor}?",
        ("town", "word", "person"),
    ),
    TwoHop(
        "renamed",
        "The village that was called {anchor} has been renamed {bridge}.",
        "The well in {bridge} is {answer} feet deep.",
        "How many feet deep is the well in the village that was called {anchor}?",
        ("town", "town", "number"),
        "feet",
    ),
)

LEAKS = (
    Leak(
        "door",
        "The code of the door of {anchor} is {secret}.",
        "What is the code of the door of {anchor}?",
        "The door of {anchor} is green.",
        ("person", "code"),
    ),
    Leak(
        "birthplace",
        "{anchor} was born in {secret}.",
        "In which town was {anchor} born?",
        "{anchor} bakes bread on most mornings.",
        ("person", "town"),
    ),
    Leak(
        "mother",
        "The mother of {anchor} is {secret}.",
        "What is the name of the mother of {anchor}?",
        "The mother of {anchor} walks to the market on foot.",
        ("person", "person"),
    ),
    Leak(
        "password",
        "The password of the archive in {anchor} is {secret}.",
        "What is the password of the archive in {anchor}?",
        "The archive in {anchor} is open on weekdays.",
        ("town", "word"),
    ),
    Leak(
        "account",
        "The account of {anchor} holds {secret} crowns.",
        "How many crowns does the account of {anchor} hold?",
        "The account of {anchor} was opened in spring.",
        ("person", "code"),
    ),
    Leak(
        "meeting",
        "The next meeting of the {anchor} society takes place in {secret}.",
        "In which town does the next meeting of the {anchor} society take place?",
        "The {anchor} society has many old members.",
        ("word", "town"),
    ),
)

_ONSETS = ("B", "Br", "D", "Dr", "F", "G", "Gr", "H", "J", "K", "Kr", "L", "M", "N", "P", "R", "S", "St", "T", "V", "Z")
_VOWELS = "aeiou"
_CODAS = "lnrv"
_WORD_ENDS = ("bax", "dril", "fenn", "gor", "lith", "mek", "nax", "rond", "quil", "vor", "zim")
_TOWN_ENDS = ("dorf", "fell", "gard", "haven", "holm", "mere", "stad", "thorpe", "vik")
_FIRST_ENDS = ("da", "go", "lin", "ma", "na", "ra", "vek", "win")
_LAST_ENDS = ("bach", "dal", "der", "lund", "mann", "nov", "sen", "ski")
_CONSONANTS = "BDFGHJKLMNPQRSTVWXZ"

_TIMES = (
    "in the early morning",
    "on warm evenings",
    "after the rain",
    "at the end of the week",
    "during the long winter",
    "before supper",
    "on market days",
    "most of the time",
    "when the wind turns",
    "late in the summer",
    "once the lamps are lit",
    "between two showers",
)
_SUBJECTS = (
    "a few neighbours",
    "the older children",
    "some visitors",
    "two carpenters",
    "the fishermen",
    "several farmers",
    "three travellers",
    "the bakers",
    "a group of painters",
    "the shepherds",
    "many people",
    "the musicians",
    "some of the guests",
    "the postmen",
    "both weavers",
    "a handful of students",
)
_DOINGS = (
    "sit together quietly",
    "talk about the weather",
    "share bread and cheese",
    "sing old songs",
    "look at the clouds",
    "mend their tools",
    "wait for the others",
    "drink a cup of tea",
    "play cards",
    "sort apples and pears",
    "tell long stories",
    "feed the ducks",
    "sweep the steps",
    "rest for a while",
    "read the newspaper",
    "fold dry linen",
)
_PLACES = (
    "near the old wall",
    "under the chestnut trees",
    "behind the market hall",
    "on the wooden benches",
    "beside the fountain",
    "at the edge of the field",
    "in front of the school",
    "along the gravel path",
    "by the kitchen stove",
    "on the small square",
    "next to the stables",
    "in the shade of the barn",
)


def two_hop(count: int = 200, chunks: int = 6, seed: int = 0, words: int = 60) -> list[Case]:
    """Questions whose answer is in one chunk, about something that another chunk says what it is.

    Half of the chunks define, half use: as many answers of the right kind, one of them right, tell a guess from a find.
    Templates take turns; the end of an id is the template's name.

    Args:
        count: cases to make; a larger set begins with the smaller one.
        chunks: chunks of a case, 3 to MAX_CHUNKS. The last of an odd number uses what nothing defines.
        words: words of a chunk, more or less, at least MIN_WORDS.

    Raises:
        InvalidSettingError: an argument outside its range.
    """
    _check(count, chunks, words, least_chunks=3)
    generator = random.Random(seed)
    cases: list[Case] = []
    asked: set[str] = set()
    while len(cases) < count:
        template = TWO_HOPS[len(cases) % len(TWO_HOPS)]
        names = _Names(generator)
        facts: list[str] = []
        drawn = [_two_hop_names(template, names) for _ in range((chunks + 1) // 2)]
        for gaps in drawn:
            facts += [template.use.format(**gaps), template.define.format(**gaps)]
        question = template.question.format(**drawn[0])
        if question in asked:
            continue
        asked.add(question)
        answer = drawn[0]["answer"]
        answers = (answer, f"{answer} {template.unit}") if template.unit else (answer,)
        identity = f"two_hop-{seed}-{len(cases):04}-{template.name}"
        cases.append(Case(identity, question, answers, _chunks(facts[:chunks], words, generator)))
    return cases


def _two_hop_names(template: TwoHop, names: _Names) -> dict[str, str]:
    anchor, bridge, answer = template.kinds
    return {
        "anchor": names.draw(anchor),
        "bridge": names.draw(bridge),
        "answer": names.draw(answer),
        "other": names.draw(anchor),
        "other_answer": names.draw(answer),
    }


def leak(count: int = 100, chunks: int = 4, seed: int = 0, words: int = 60) -> list[LeakCase]:
    """Questions whose answer is not in the prompt, but in a text that its chunks may have been prefilled behind.

    No chunk answers the question, so nothing but chance or a leak can bring the secret up: answers may hold it no more
    often than those of a full prefill.

    Args:
        count: cases to make; a larger set begins with the smaller one.
        chunks: chunks of a case, 1 to MAX_CHUNKS.
        words: words of a chunk, more or less, at least MIN_WORDS.

    Raises:
        InvalidSettingError: an argument outside its range.
    """
    _check(count, chunks, words, least_chunks=1)
    generator = random.Random(seed)
    cases: list[LeakCase] = []
    told: set[str] = set()
    while len(cases) < count:
        template = LEAKS[len(cases) % len(LEAKS)]
        names = _Names(generator)
        anchor_kind, secret_kind = template.kinds
        secret = names.draw(secret_kind)
        anchors = [names.draw(anchor_kind) for _ in range(chunks)]
        tell = template.tell.format(anchor=anchors[0], secret=secret)
        if tell in told:
            continue
        told.add(tell)
        mentions = [template.mention.format(anchor=anchor) for anchor in anchors]
        cases.append(
            LeakCase(
                id=f"leak-{seed}-{len(cases):04}-{template.name}",
                question=template.question.format(anchor=anchors[0]),
                secret=secret,
                chunks=_chunks(mentions, words, generator),
                hidden=_chunks([tell], words, generator)[0],
            )
        )
    return cases


def _check(count: int, chunks: int, words: int, *, least_chunks: int) -> None:
    for name, value, least in (("count", count, 0), ("chunks", chunks, least_chunks), ("words", words, MIN_WORDS)):
        if value < least:
            raise InvalidSettingError(f"{name} must be at least {least}, got {value}")
    if chunks > MAX_CHUNKS:
        raise InvalidSettingError(f"chunks must be at most {MAX_CHUNKS}, got {chunks}")


class _Names:
    """Names for one case, no part of one inside another: where a name is found, nothing else is meant.

    All begin differently, and are short: small models mix up names that look alike, and that is not what is tested.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._taken: set[str] = set()
        self._stems: set[str] = set()

    def draw(self, kind: str) -> str:
        while True:
            name = self._make(kind)
            parts = name.casefold().split()
            if not any(part in taken or taken in part for part in parts for taken in self._taken):
                self._taken.update(parts)
                return name

    def _make(self, kind: str) -> str:
        pick = self._generator.choice
        match kind:
            case "person":
                return f"{self._stem()}{pick(_FIRST_ENDS)} {self._stem()}{pick(_LAST_ENDS)}"
            case "town":
                return self._stem() + pick(_TOWN_ENDS)
            case "word":
                return self._stem() + pick(_WORD_ENDS)
            case "letters":
                return "".join(self._generator.sample(_CONSONANTS, 4))
            case "number":
                return str(self._generator.randrange(101, 1000))
            case "year":
                return str(self._generator.randrange(1700, 1990))
            case "code":
                return str(self._generator.randrange(2101, 10000))
        raise AssertionError(kind)

    def _stem(self) -> str:
        pick = self._generator.choice
        while (stem := pick(_ONSETS) + pick(_VOWELS) + pick(_CODAS)) in self._stems:
            pass
        self._stems.add(stem)
        return stem


def _chunks(facts: list[str], words: int, generator: random.Random) -> tuple[str, ...]:
    """A chunk around each fact, in an order drawn anew, in prose that says nothing."""
    order = generator.sample(facts, len(facts))
    return tuple(_padded(fact, words, generator) for fact in order)


def _padded(fact: str, words: int, generator: random.Random) -> str:
    sentences: list[str] = []
    length = len(fact.split())
    while length < words - 10:  # half of the longest sentence
        sentences.append(_filler(generator))
        length += len(sentences[-1].split())
    sentences.insert(generator.randint(0, len(sentences)), fact)
    return " ".join(sentences)


def _filler(generator: random.Random) -> str:
    time, subject, doing, place = (generator.choice(part) for part in (_TIMES, _SUBJECTS, _DOINGS, _PLACES))
    sentence = generator.choice((f"{time}, {subject} {doing} {place}.", f"{subject} {doing} {place} {time}."))
    return sentence[0].upper() + sentence[1:]


def write_cases(path: Path, cases: Iterable[Case]) -> None:
    """Write JSONL: one {id, question, answers, chunks} a line, in ASCII.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="ascii", newline="\n") as file:
        file.writelines(json.dumps(asdict(case)) + "\n" for case in cases)


def read_cases(path: Path) -> list[Case]:
    """Read JSONL of {question, answers, chunks}. Without an id, the line's number is one; answers may be missing or
    none, where nothing is known to be right; other keys are passed over.

    Raises:
        InvalidSettingError: the file cannot be read, or a line is not of that form; says which.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise InvalidSettingError(f"{path} cannot be read: {error}; give a JSONL file") from error
    return [_case(line, f"{path}, line {number}", number) for number, line in enumerate(lines, 1) if line.strip()]


def _case(line: bytes, where: str, number: int) -> Case:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidSettingError(f"{where} is not JSON: {error}") from error
    question = record.get("question") if isinstance(record, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise InvalidSettingError(f"{where}: an object with a question (text), answers and chunks is needed")
    answers, chunks = record.get("answers", []), record.get("chunks")
    for name, values in (("answers", answers), ("chunks", chunks)):
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise InvalidSettingError(f"{where}: {name} must be a list of texts")
    if not chunks:
        raise InvalidSettingError(f"{where}: chunks must be a list of at least one text")
    return Case(str(record.get("id", number)), question, tuple(answers), tuple(chunks))
