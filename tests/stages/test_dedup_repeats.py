"""Passages that several documents share: compared with brute force, for every unit and every division into parts."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.store.fs import Store
from stages.cut import CutPassages
from stages.dedup.fragment import Sizes
from stages.dedup.repeats import PassageHash, RepeatedPassages
from stages.dedup.units import pieces, same_text
from stages.document import Document, DuplicateId
from tests.corpus import sentences
from tests.stages.dedup_fragment import Doc, Outcome, run_fragment, write_parts

RANKS = {"wiki": 0, "web": 1}
UNITS = ("paragraph", "line", "sentence")


def passages(text: str, unit: str, span: int, shortest: int, normalise: bool) -> list[tuple[str, set[int]]]:
    """Return for each passage (the text by which it is compared, the numbers of its characters). It does not use
    `stages.dedup.units`."""
    if unit == "line":
        found = [m.span() for m in re.finditer(r"[^\n]*(?:\n|\Z)", text)]
    elif unit == "paragraph":
        found, at = [], 0
        for blank in re.finditer(r"\n\s*\n\s*", text):
            found.append((at, blank.end()))
            at = blank.end()
        found.append((at, len(text)))
    else:
        found, at = [], 0
        for i, c in enumerate(text):              # the texts of these tests have no other end marks
            end = i + 1
            while c in ".!?。" and text[end:end + 1] in (*'"\'”’)]', "’"):
                end += 1
            if (c in ".!?" and text[end:end + 1].isspace()) or (c == "。" and text[end:end + 1] != "。") or (
                    c == "\n" and re.match(r"\n[^\S\n]*\n", text[i:])):
                while end < len(text) and text[end].isspace():
                    end += 1
                if end > at:
                    found.append((at, end))
                at = max(at, end)
        found.append((at, len(text)))
    simple = (lambda t: re.sub(r"\s+", " ", t.lower()).strip()) if normalise else str.strip
    units = [(simple(text[a:b]), a, b) for a, b in found if text[a:b].strip()]
    runs = [units[i:i + span] for i in range(len(units) - span + 1)]
    return [(key, set(range(run[0][1], run[-1][2]))) for run in runs
            if len(key := (" " if normalise else "\n").join(unit for unit, _, _ in run)) >= shortest]


def brute_force(docs: list[Doc], config: RepeatedPassages.Config) -> dict[str, str]:
    """Return {id: text after the cuts}."""
    seen: set[str] = set()
    out = {}
    for doc in sorted(docs, key=lambda d: (RANKS[d.dataset], d.name)):
        gone: set[int] = set()
        for key, characters in passages(doc.text, config.unit, config.span, config.min_unit_chars, config.normalise):
            if key in seen:
                gone |= characters
            seen.add(key)
        out[doc.name] = "".join(c for i, c in enumerate(doc.text) if i not in gone)
    return out


def cuts(got: Outcome, parts: list[Any], store: Store) -> dict[str, list[dict[str, Any]]]:
    out = {}
    for part, ref in zip(parts, got.slices, strict=True):
        if ref is not None:
            with store.open(part.text["$ref"]) as text, store.open(ref["$ref"]) as file:
                ids = pq.read_table(text, columns=["id"])["id"].to_pylist()
                out |= {ids[row["row"]]: row["cuts"] for row in pq.read_table(file).to_pylist()}
    return out


def result(barrier: RepeatedPassages, docs: list[Doc], store: Store, **how: Any) -> tuple[dict[str, str], Outcome]:
    """Run the barrier. Returns ({id: text after the cuts}, outcome of the tasks)."""
    shuffle = how.pop("shuffle", None)
    parts = write_parts(barrier, docs, store, ranks=RANKS, **how)
    got = run_fragment(barrier, parts, store, shuffle=shuffle)
    named = cuts(got, parts, store)
    out = {}
    for doc in docs:
        document = Document(doc.name, doc.text)
        document.cuts = named.get(doc.name)
        CutPassages(step="repeats", min_chars=0).process(document)
        out[doc.name] = document.text
    return out, got


def barrier(sizes: Sizes | None = None, **config: Any) -> RepeatedPassages:
    made = RepeatedPassages(**config)
    if sizes is not None:
        made.sizes = sizes
    return made


WORDS = st.sampled_from(["Eins. ", "zwei", "Drei! ", "漢字。", "é ", "\n", "\n\n", " \n ", "😀 ", "x ", "3.14 "])
TEXT = st.lists(WORDS, min_size=1, max_size=14).map("".join)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, st.sampled_from(list(RANKS))), min_size=1, max_size=8), st.sampled_from(UNITS),
       st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_texts_after_the_cuts_equal_brute_force(tmp_path_factory, texts, unit, span, shortest, normalise):
    docs = [Doc(text, dataset, f"{hash_of(i):032x}") for i, (text, dataset) in enumerate(texts)]
    step = barrier(unit=unit, span=span, min_unit_chars=shortest, normalise=normalise)
    got, _ = result(step, docs, Store(tmp_path_factory.mktemp("store")), part_rows=3)
    assert got == brute_force(docs, step.config)


def hash_of(number: int) -> int:
    return random.Random(number).getrandbits(128)


@pytest.fixture(scope="module")
def books() -> list[Doc]:
    """Books that share chapters, paragraphs and sentences; some of these are slightly changed, and some are repeated
    within a book."""
    rng, prose = random.Random(5), [*sentences(), *(f"Ein Sätzchen Nummer {i}, völlig für sich. " for i in range(60))]
    shelf = [["".join(rng.sample(prose, rng.randint(1, 6))) for _ in range(20)] for _ in range(6)]
    out = []
    for _ in range(32):
        book = [paragraph for _ in range(rng.randint(1, 4)) for paragraph in
                rng.choice(shelf)[rng.randint(0, 8):rng.randint(8, 20)]]
        for _ in range(rng.randint(0, 6)):        # mutations: a word more, upper case, other white space, a copy
            if not book:
                break
            at = rng.randrange(len(book))
            paragraph = book[at]
            book[at] = rng.choice([paragraph + " Ja.", paragraph.upper(), paragraph.replace(" ", "  "),
                                   paragraph.replace(" ", "\n", 1), paragraph[:len(paragraph) // 2]])
            book.insert(rng.randrange(len(book)), rng.choice(book))
        out.append(Doc("\n\n".join(book), rng.choice(list(RANKS)), f"{rng.getrandbits(128):032x}"))
    return out


LAYOUTS = [{"part_rows": 60}, {"part_rows": 7, "shuffle": 1},
           {"part_rows": 1, "shuffle": 2, "sizes": Sizes(group_rows=1, bucket_bytes=3000, segment_bytes=1)},
           {"part_rows": 4, "shuffle": 3, "sizes": Sizes(group_rows=9, bucket_bytes=700, segment_bytes=1)}]


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"unit": "line"}, {"unit": "sentence"}, {"unit": "sentence", "span": 3},
                                    {"normalise": False, "min_unit_chars": 1}])
def test_mutated_books_are_cut_equally_under_every_layout(tmp_path, books, config):
    expected = brute_force(books, RepeatedPassages(**config).config)
    assert sum(map(len, expected.values())) < 0.7 * sum(len(b.text) for b in books)
    for number, layout in enumerate(LAYOUTS):
        layout = dict(layout)
        step = barrier(layout.pop("sizes", None), **config)
        got, said = result(step, books, Store(tmp_path / str(number)), **layout)
        assert got == expected
        assert said.counters["reduce"]["max_repeats"] > 2


@pytest.mark.parametrize("span", [1, 3])
def test_lines_are_cut_as_datatrove_cuts_them(tmp_path, books, span):
    """datatrove 0.10.1, which keeps the first passage in the order of its input; its lines end at further characters,
    and blank lines count."""
    dedup = pytest.importorskip("datatrove.pipeline.dedup.sentence_dedup")
    from datatrove.data import Document as TheirDocument
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.text import TextNormConfig

    docs = [Doc("\n".join(filter(str.strip, book.text.splitlines())), "web", book.name) for book in books]
    docs = sorted((doc for doc in docs if doc.text), key=lambda doc: doc.name)
    settings = dedup.SentDedupConfig(
        n_sentences=span, split_sentences=False, only_dedup_in_index=False, min_doc_words=0, min_num_sentences=0,
        norm_config=TextNormConfig(True, True, False, False, False), hash_config=HashConfig(64, "sha1"))

    def read() -> Any:
        return (TheirDocument(text=doc.text, id=doc.name) for doc in docs)

    dedup.SentenceDedupSignature(str(tmp_path / "sig"), config=settings).run(read(), 0, 1)
    dedup.SentenceFindDedups(str(tmp_path / "sig"), str(tmp_path / "dups"), config=settings).run(None, 0, 1)
    theirs = {doc.id: doc.text for doc in dedup.SentenceDedupFilter(str(tmp_path / "dups"), config=settings).run(
        read(), 0, 1)}
    got, _ = result(barrier(unit="line", span=span, min_unit_chars=1), docs, Store(tmp_path / "store"))
    assert {id: text.strip() for id, text in got.items()} == {id: theirs.get(id, "").strip() for id in got}
    assert any(got[doc.name] != doc.text for doc in docs)


def test_a_cut_names_the_document_that_keeps_the_passage_and_neighbours_from_one_document_are_one_cut(tmp_path):
    shared = "The first shared paragraph of this.\n\nAnd the second shared one of this.\n\n"
    docs = [Doc(shared + "Only here, in the first document.", "wiki", "f" * 32),
            Doc("Something else stands before all.\n\n" + shared, "web", "0" * 32)]
    step, store = barrier(), Store(tmp_path)
    parts = write_parts(step, docs, store, ranks=RANKS)
    named = cuts(run_fragment(step, parts, store), parts, store)
    start = len("Something else stands before all.\n\n")
    assert named == {"0" * 32: [{"start": start, "end": start + len(shared), "reason": "repeated_paragraph",
                                 "match": "f" * 32}]}


def test_a_footer_of_every_page_costs_one_record_a_group(tmp_path):
    footer = "\nAll rights reserved by the owners of this."
    docs = [Doc(f"Page {i} has a text of its own, which is long." + footer, "web", f"{hash_of(i):032x}")
            for i in range(400)]
    step = barrier(Sizes(group_rows=40, bucket_bytes=4000, segment_bytes=1), unit="line")
    got, said = result(step, docs, Store(tmp_path), part_rows=20)
    assert sum(text.endswith(footer) for text in got.values()) == 1
    groups = len(said.results["map"])
    assert groups > 5 and said.counters["reduce"]["max_repeats"] == 400
    records = sum(task.files["passages.seg"]["rows"] for task in said.results["map"])
    assert records == 400 + groups
    assert sum(task.files["survivors.seg"]["rows"] for task in said.results["reduce"]) == groups


def test_parts_without_repeated_passages_have_no_slice_and_run_no_task(tmp_path):
    docs = [Doc(f"Paragraph number {i} stands once in all texts.") for i in range(20)]
    step, store = barrier(), Store(tmp_path)
    got = run_fragment(step, write_parts(step, docs, store, part_rows=5), store)
    assert got.slices == [None] * 4 and not got.results["slices"]
    assert run_fragment(step, [], store).slices == []


def test_one_document_twice_is_an_error(tmp_path):
    docs = [Doc("One paragraph that is long enough here.", name, "a" * 32) for name in RANKS]
    step, store = barrier(), Store(tmp_path)
    with pytest.raises(DuplicateId, match="a" * 32):
        run_fragment(step, write_parts(step, docs, store, ranks=RANKS), store)


def test_places_are_those_of_the_text_that_is_stored():
    """A pair of surrogates has six bytes, and is stored as one character of four."""
    text = "\ud83d\ude00 first line, long enough to be compared\nsecond line, long enough to be compared"
    doc = Document("0" * 32, text)
    PassageHash(unit="line").process(doc)
    stored = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le").encode()
    assert doc.side["passage_hash"]["starts"] == bytes([0, 0, 0, 0, stored.index(b"second"), 0, 0, 0])


@given(st.text(st.sampled_from("ab. \n\t!?。…\"”)3é😀\u2028\u00a0"), max_size=80), st.sampled_from(UNITS))
def test_pieces_together_are_the_text(text, unit):
    assert "".join(pieces(text, unit)) == text


@pytest.mark.parametrize(("text", "parts"), [
    ("It is 3.14. Yes! “No.” He\nwent.", ["It is 3.14. ", "Yes! ", "“No.” ", "He\nwent."]),
    ("Wait... what?! (So.) End", ["Wait... ", "what?! ", "(So.) ", "End"]),
    ("今日は。「明日は。」また", ["今日は。", "「明日は。」", "また"]),
    ("Title\n\nText of it", ["Title\n\n", "Text of it"])])
def test_sentences(text, parts):
    assert pieces(text, "sentence") == parts


@pytest.mark.parametrize("text", ["." * 300_000 + "x", ".)" * 200_000, "\n" + " " * 300_000, "\n \t" * 150_000 + "x",
                                  "。" * 300_000, ".。" * 150_000, "!\"" * 150_000 + "x"])
@pytest.mark.parametrize("unit", UNITS)
def test_hostile_texts_take_time_in_proportion_to_their_length(text, unit):
    began = time.process_time()
    pieces(text, unit)
    assert time.process_time() - began < 2


def test_same_text_treats_all_white_space_alike():
    space = "".join(map(chr, range(0x3001)))
    spaces = [c for c in space if c.isspace()]
    assert len(spaces) > 20
    assert same_text("A".join(spaces)) == " ".join("a" * (len(spaces) - 1))
