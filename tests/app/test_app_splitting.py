"""Chunk borders: chunks are pieces of their text in order, short enough, and cut where a reader would cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from ragblend.kb import KnowledgeBase
from ragblend.kb.files import Part, read_file
from ragblend.kb.splitting import Splitter

ROOT = Path(__file__).parents[2]


def encode(text: str) -> list[int]:
    """Words and signs: about as many as a model's tokenizer makes."""
    return [len(word) for word in re.findall(r"\w{1,8}|[^\w\s]", text)]


def split(text: str, tokens: int = 100, suffix: str = "") -> list[str]:
    return [chunk.text for chunk in Splitter(encode, tokens).split([Part(text, {})], suffix)]


def words(count: int, start: int = 0) -> str:
    return " ".join(f"word{n}" for n in range(start, start + count))


def readmes() -> list[str]:
    found = {d.name: str(d.metadata.json.get("description", "")) for d in distributions()}
    return [text[:30_000] for _, text in sorted(found.items()) if len(text) > 2000]


def assert_pieces(text: str, chunks: list[str], tokens: int) -> None:
    at = 0
    for chunk in chunks:
        assert chunk == chunk.strip() != ""
        assert len(encode(chunk)) <= tokens
        found = text.index(chunk, at)
        assert not text[at:found].strip(), "something was left out"
        at = found + len(chunk)
    assert not text[at:].strip()


@pytest.mark.parametrize("tokens", [20, 100, 300])
def test_real_texts_are_cut_into_pieces_that_follow_on_each_other(tokens: int) -> None:
    texts = readmes()[:: 2 if tokens > 20 else 9]
    assert len(texts) >= 5
    total = small = ideal = 0
    for text in texts:
        chunks = split(text, tokens)
        assert_pieces(text, chunks, tokens)
        total += len(chunks)
        small += sum(len(encode(chunk)) < tokens / 4 for chunk in chunks[:-1])
        ideal += len(encode(text)) / tokens
    assert total < 2 * ideal + len(texts)
    assert small < total / 8
    assert split(texts[3], tokens) == split(texts[3], tokens)


def test_in_real_texts_headings_stay_with_what_follows() -> None:
    headings = 0
    for text in readmes():
        chunks = split(text, 200)
        headings += sum(chunk.startswith("#") for chunk in chunks)
        for chunk in chunks[:-1]:
            last = chunk.splitlines()[-1]
            fenced = chunk.count("```") % 2 or "~~~" in chunk
            assert fenced or len(chunk.splitlines()) == 1 or not re.match(r"#{1,6} \w", last), chunk
    assert headings > 50


def test_real_code_is_cut_between_functions() -> None:
    for path in sorted((ROOT / "ragblend").rglob("*.py"))[::3]:
        text = path.read_text()
        chunks = split(text, 200, ".py")
        assert_pieces(text, chunks, 200)
    text = "\n\n\n".join(f"def f{n}(x):\n    if x:\n\n        return {words(12)}\n\n    return x" for n in range(9))
    assert all(re.fullmatch(r"(def f\d\(x\):.*?return x\s*)+", chunk, re.DOTALL) for chunk in split(text, 60, ".py"))
    assert any("\ndef" in chunk for chunk in split(text, 80, ".py"))


def test_small_sections_share_a_chunk_and_large_ones_do_not() -> None:
    small = "\n\n".join(f"## Section {n}\n\n{words(4, n)}" for n in range(30))
    chunks = split(small, 100)
    assert 2 <= len(chunks) <= 4
    assert all(chunk.startswith("## Section") for chunk in chunks)
    large = "\n\n".join(f"## Section {n}\n\n{words(60, 60 * n)}." for n in range(4))
    assert [chunk.splitlines()[0] for chunk in split(large, 100)] == [f"## Section {n}" for n in range(4)]


@pytest.mark.parametrize("heading", ["# Title", "Title\n=====", "Title\n-----", "Title\n~~~~~"])
def test_every_kind_of_heading_begins_a_chunk(heading: str) -> None:
    text = f"{words(95)}\n\n{heading}\n\n{words(60)}\n\n{words(60)}"
    assert [chunk.startswith("Title") or chunk.startswith("#") for chunk in split(text)] == [False, True, False]
    before, long, rest = split(f"{words(95)}\n\n{heading}\n\n{words(150)}", 100)
    assert (before, rest.startswith("word")) == (words(95), True)
    assert long.startswith(heading)
    assert "word0" in long


def test_coarse_borders_come_first() -> None:
    text = "# A\n\n## a\n\n" + words(80) + "\n\n## b\n\n" + words(80) + "\n\n# B\n\n" + words(60) + "\n\n" + words(50)
    whole, long = split(text, 200)[0], split(text, 100)
    assert whole.startswith("# A")
    assert [chunk.splitlines()[0] for chunk in long] == ["# A", "## b", "# B", words(50)]


def test_what_looks_like_a_heading_in_code_is_none() -> None:
    for fence in ("```", "~~~~"):
        code = f"{fence}sh\n# no heading\n{words(40)}\n\n# none either\n{words(10)}\n{fence}"
        assert split(f"# H\n\n{words(50)}\n\n{code}\n\nafter", 110) == [f"# H\n\n{words(50)}", f"{code}\n\nafter"]


def test_text_without_any_border_is_cut_between_sentences_then_anywhere() -> None:
    sentences = [f"{words(60, 60 * n)}.".capitalize() for n in range(5)]
    assert split(" ".join(sentences)) == [" ".join(sentences[:1]), *sentences[1:]]
    for text in ("x" * 5000, "\u4e2d" * 700, "a b " * 900, "\n".join(["y" * 400] * 9), "- " * 400, "#" * 500):
        assert_pieces(text, split(text, 40), 40)
    assert split(" \n\n ") == []


@pytest.mark.parametrize("size", [0, 1, 7, 300])
def test_headings_of_html(tmp_path: Path, size: int) -> None:
    sections = "".join(f"<h2> <i>Part {n}</i> </h2><p>{words(size)} end.</p><div>{words(9)}</div>" for n in range(6))
    (tmp_path / "a.html").write_text(f"<h1><img src=x></h1><h1>All</h1>{sections}")
    (part,) = read_file(tmp_path / "a.html")
    assert "\ufdd0" not in part.text
    assert [part.text[at:].split("\n")[0] for at, _ in part.headings] == ["All", *(f"Part {n}" for n in range(6))]
    assert [level for _, level in part.headings] == [1] + [2] * 6
    chunks = [chunk.text for chunk in Splitter(encode, 100).split([part])]
    assert_pieces(part.text, chunks, 100)
    if size == 300:
        starts = [chunk.split("\n")[0] for chunk in chunks if not chunk.startswith("word")]
        assert starts == ["All", *(f"Part {n}" for n in range(1, 6))]


def test_no_text_is_taken_for_the_mark_of_a_heading(tmp_path: Path) -> None:
    text = "\ufdd01 is what this line begins with.\n\n\ufdd02 this one."
    for name in ("a.txt", "a.md"):
        (tmp_path / name).write_text(text)
        assert read_file(tmp_path / name) == [Part(text, {})]
    html = (
        f"<meta charset=utf-8><p>{text}<h2>\ufdd03</h2><p>&#xFDD0;4 <b>\ufdd0</b>5<!-- \ufdd0 --><pre>\ufdd16\n\ufdd17"
    )
    (tmp_path / "a.html").write_text(html)
    (part,) = read_file(tmp_path / "a.html")
    mark = "\ufffd"
    assert part.text.split() == f"{text}\n\ufdd03\n\ufdd04 \ufdd05 \ufdd06 \ufdd07".replace("\ufdd0", mark).split()
    assert [(part.text[at:].split("\n")[0], level) for at, level in part.headings] == [(f"{mark}3", 2)]


@pytest.mark.parametrize("between", ["\n\n", " ", "\n"])
def test_no_long_text_is_encoded_as_a_whole(between: str) -> None:
    longest = 0

    def noted(text: str) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(text)

    text = between.join(f"{words(30, n)}." for n in range(300))
    chunks = Splitter(noted, 100).split([Part(text, {})])
    assert longest < len(text) / 8
    assert_pieces(text, [chunk.text for chunk in chunks], 100)


def test_white_space_does_not_make_a_text_too_long() -> None:
    text = f"One{' ' * 50_000}two{' ' * 50_000}three."
    assert split(text) == [text]
    assert len(split(f"{text} {words(300)}")) > 1


def test_pages_are_kept_apart() -> None:
    parts = [Part(f"page {n}", {"page": str(n)}) for n in range(3)]
    assert Splitter(encode, 100).split(parts) == parts


@pytest.fixture
def kb(tmp_path: Path, tiny_model: Path, embedding_model: None) -> Iterator[KnowledgeBase]:
    with KnowledgeBase(tmp_path / "store", model=str(tiny_model), chunk_tokens=120) as opened:
        yield opened


def test_documents_split_in_another_way_are_split_anew(kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: "\n\n".join(f"# {name} {n}\n\nIt is {n} metres long." for n in range(8)) for name in ("One", "Two")}
    with monkeypatch.context() as patch:
        patch.setattr("ragblend.kb.ingestion.SPLITTING_VERSION", 1)
        patch.setattr(
            Splitter, "split", lambda self, parts, suffix: [Part(text, {}) for text in parts[0].text.split("\n\n# ")]
        )
        assert kb.ingest_texts(texts).chunks == 16
        assert kb.ingest_texts(texts).unchanged == 2
    done = kb.ingest_texts(texts)
    assert (done.documents, done.unchanged) == (2, 0)
    assert done.chunks == kb.index.count_chunks() < 16
    assert kb.store.keys() == kb.index.kv_keys(kb.models.signature), "what the old chunks had is freed"
    assert kb.verify().ok
    assert kb.ingest_texts(texts).unchanged == 2
    found = kb.as_retriever(50).retrieve("How long?")
    assert "".join(sorted(n.node.get_content() for n in found)).count("metres") == 16


def test_a_text_without_a_character_has_no_chunks() -> None:
    assert split("") == split(" \n") == split("", suffix=".py") == []


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<html><head><title>T</title><body><h1>Bridges</h1><p>It is 42 m long.</p>", "Bridges\n\nIt is 42 m long."),
        ("<head><meta charset=utf-8><title>T</title></head><p>Text", "Text"),
        (
            "<table><tr><th>Built</th><th>Height</th></tr><tr><td>1931</td><td>42</td></tr></table>",
            "Built Height\n\n1931 42",
        ),
        ("<table><caption>Fares</caption><tr><th>From<th>To<tr><td>1<td>2</table>", "Fares\n\nFrom To\n1 2"),
        ("<details><summary>More</summary>Details</details>", "More\nDetails"),
        (
            "<fieldset><legend>Mail</legend>us</fieldset><address>Mill Street 4</address>Daily",
            "Mail\nus\n\nMill Street 4\nDaily",
        ),
        (
            "<figure><figcaption>Bridge</figcaption>seen</figure><form>A</form>B<menu>C</menu>D",
            "Bridge\nseen\n\nA\nB\nC\nD",
        ),
        (
            "<p>So:</p><pre>\n<code><span>def</span> f():\n    if x:\n\n\n        return 1 \n</code>\n</pre><p> Then.",
            "So:\n\ndef f():\n    if x:\n\n\n        return 1\n\nThen.",
        ),
        ("<div><p>Type<textarea>\n  a:\r\n    - b\n</textarea>here</div>", "Type\n  a:\n    - b\nhere"),
        ("<table><tr><td><pre>a\n  b</pre></td><td>  c</td></tr></table>", "a\n  b\nc"),
        ("<p>None:<pre> \n </pre><pre></pre>of it", "None:\n\nof it"),
        ("<pre>a\n  <h2>b</h2>\n  c</pre>", "a\n\nb\n\n  c"),
    ],
)
def test_text_of_html_is_kept_and_does_not_run_together(tmp_path: Path, html: str, text: str) -> None:
    (tmp_path / "a.html").write_text(html)
    (part,) = read_file(tmp_path / "a.html")
    assert part.text == text


CSV = 'name,phone,price\r\nAnn,0471234,1\r\nBob,,2.50\r\n"Eve, the second",007,3e5\r\n'


def test_csv_is_read_as_it_is(tmp_path: Path) -> None:
    """Names of columns, leading zeros and empty fields stay, and rows of different lengths are no reason to skip it."""
    for text in (CSV, "only,names", "one,two\n1,2,3"):
        (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
        (part,) = read_file(tmp_path / "a.csv")
        assert part.text == text.strip()


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".LOG"])
def test_records_are_cut_between_lines(suffix: str) -> None:
    rows = [f"{n},Name {n},It is number {n}. It has two sentences. {words(n % 7)}" for n in range(50)]
    chunks = split("\n".join(rows), suffix=suffix)
    assert len(chunks) > 5
    assert [row.strip() for chunk in chunks for row in chunk.splitlines()] == [row.strip() for row in rows]
