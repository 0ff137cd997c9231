"""The step `decontaminate`: equal to a slow search, finds what is planted, cuts at borders of characters, and refuses
invalid evaluation sets."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.cut import moved, whole_passages, without
from stages.decontaminate.index import COMMON, LENGTHS, SHORT, index_file
from stages.decontaminate.scan import BORDERED, words_of
from stages.decontaminate.sets import SetError, read_set
from stages.decontaminate.step import Decontaminate, Hit, needed
from stages.document import Document
from tests.conftest import shared_data
from tests.stages.texts import assert_linear

EVALS = {
    "ai2_arc_ARC-Challenge": {"question": "question"}, "ai2_arc_ARC-Easy": {"question": "question"},
    "boolq_none": {"question": "question", "passage": "passage"},
    "gsm8k": {"question": "context", "answer": "chain_of_thought"},
    "hellaswag_none": {"question": "ctx", "answer": "endings"},
    "human_eval": {"question": "prompt", "answer": "canonical_solution"}, "lambada_openai": {"question": "context"},
    "openbookqa_main": {"question": "question_stem"}, "piqa_plain_text": {"question": "goal", "answer": "sol1"},
    "sciq_none": {"question": "question", "passage": "support"}, "svamp": {"question": "context"},
    "tau_commonsense_qa_none": {"question": "question"}, "winogrande_winogrande_xl": {"question": "sentence"}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))


def write_set(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def ready(sets: dict[str, str], **settings: Any) -> Decontaminate:
    stage = Decontaminate(sets=sets, **settings)
    assert stage.problems() == {}
    stage.setup()
    return stage


# -- a slow reference, from the description alone --------------------------------------------------------------------
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def slow_words(text: str) -> list[tuple[str, int, int, bool]]:
    """Return (word, first character, exclusive end, whether a border is before it) for each word. The last entry is the
    end of the text, without a word."""
    out, at, border = [], 0, True
    while at < len(text):
        if not is_word(text[at]):
            border |= text[at] in "\n\r\v\f\u0085\u2028\u2029.!?:;。！？：；…"
            at += 1
            continue
        end = at + 1
        if not is_alone(text[at]):
            while end < len(text) and ((is_word(text[end]) and not is_alone(text[end])) or (
                    text[end] in ",." and text[end + 1:end + 2] in list("0123456789")
                    and all(c.isdecimal() or c in ",." for c in text[at:end]))):
                end += 1
        word = text[at:end]
        number = all(c.isdecimal() or c in ",." for c in word)
        plain = re.sub(r"\d+", "0", "".join(lower(c) for c in word if c not in ",."))
        out.append(("0" if number else plain, at, end, border))
        at, border = end, False
    return [*out, ("", len(text), len(text), True)]


def is_word(char: str) -> bool:
    return ord(char) < 65536 and (char.isalnum() or unicodedata.category(char)[0] == "M")


def is_alone(char: str) -> bool:
    return any(a <= ord(char) < b for a, b in ((0x3040, 0x3100), (0x3400, 0xA000), (0xF900, 0xFB00))) and is_word(char)


def lower(char: str) -> str:
    return char.lower() if len(char.lower()) == 1 else char


class SlowIndex:
    """The entries of evaluation sets, as tuples of words in plain dicts."""

    def __init__(self, questions: list[str], dialect: str) -> None:
        self.n, self.dialect = LENGTHS[dialect], dialect
        shortest = self.n if dialect == "ngram" else SHORT
        self.entries: dict[Any, set[tuple[str, ...]]] = {}
        self.size: dict[Any, int] = {}
        self.sequence: dict[Any, list[tuple[str, ...] | None]] = {}
        for question in questions:
            words = tuple(w for w, *_ in slow_words(question)[:-1])
            if len(words) < shortest:
                sequence, key = [words], ("whole", words)
            else:
                sequence = [words[i:i + self.n] for i in range(len(words) - self.n + 1)]
                sequence = [g if 2 * sum(w != "0" for w in g) >= self.n else None for g in sequence]
                key = ("long", tuple(g for g in sequence if g))
            self.size.setdefault(key, len(words))
            self.sequence.setdefault(key, sequence)
            self.entries.setdefault(key, {g for g in sequence if g})
        df = Counter(gram for grams in self.entries.values() for gram in grams)
        self.weight = {gram: round(1000 * math.log(1 + len(self.entries) / n)) for gram, n in df.items()}
        self.where: dict[tuple[str, ...], list[Any]] = defaultdict(list)
        for key in self.entries:
            self.entries[key] = {gram for gram in self.entries[key] if df[gram] <= COMMON}
            for gram in self.entries[key]:
                self.where[gram].append(key)

    def stretch(self, key: Any) -> int:
        """Return the largest distance, in words, between neighbouring n-grams of an entry that count."""
        places = [i for i, gram in enumerate(self.sequence[key]) if gram in self.entries[key]]
        return max((b - a for a, b in pairwise(places)), default=1)

    def find(self, text: str) -> list[tuple[int, int, float, Any]]:
        words = slow_words(text)
        size, places = len(words) - 1, defaultdict(list)
        for length in {len(gram) for gram in self.where}:
            for i in range(size - length + 1):
                gram = tuple(w for w, *_ in words[i:i + length])
                for key in self.where.get(gram, ()):
                    if key[0] == "whole" and length < BORDERED and not (words[i][3] and words[i + length][3]):
                        continue
                    places[key].append((i, gram))
        out = []
        for key, found in places.items():
            runs: list[list[tuple[int, tuple[str, ...]]]] = []
            for i, gram in sorted(found):
                if runs and i - runs[-1][-1][0] <= max(len(gram) if self.dialect == "ngram" else 12, self.stretch(key)):
                    runs[-1].append((i, gram))
                else:
                    runs.append([(i, gram)])
            for run in runs:
                matched, entry = {gram for _, gram in run}, self.entries[key]
                share = len(matched) / len(entry)
                if self.dialect == "idf":
                    share = sum(self.weight[g] for g in matched) / sum(self.weight[g] for g in entry)
                    if share < needed(self.size[key]):
                        continue
                end = run[-1][0] + len(run[-1][1])
                start_byte, end_byte = (len(text[:c].encode()) for c in (words[run[0][0]][1], words[end - 1][2]))
                out.append((start_byte, end_byte, round(share, 3), key))
        return out


def random_text(draw: random.Random, words: int) -> str:
    vocabulary = ["der", "Über", "the", "I", "a", "3", "12,5", "x1", "x27b", "1.5k", "日本", "é", "Straße", "naïve",
                  "no", "ok", "К", "я"]
    marks = [" ", " ", " ", "  ", "\n", ". ", ", ", "?", " – ", "… ", "。", "😀", "."]
    return "".join(draw.choice(vocabulary) + draw.choice(marks) for _ in range(words))


@pytest.mark.parametrize("dialect", ["ngram", "idf"])
def test_hits_equal_those_of_a_slow_search(tmp_path, dialect):
    draw = random.Random(3)
    questions = [random_text(draw, draw.choice([1, 2, 4, 6, 7, 8, 9, 12, 13, 14, 20, 40, 60])) for _ in range(150)]
    questions += [f"{questions[i]} {questions[i + 1]}" for i in range(20)]             # n-grams of several entries
    questions = [q for q in questions if any(c.isalpha() for c in q)]
    stage = ready({"set": write_set(tmp_path / "set.jsonl", [{"question": q} for q in questions])}, dialect=dialect)
    slow, total = SlowIndex(questions, dialect), 0
    for _ in range(120):
        pieces = []
        for _ in range(draw.randint(0, 6)):
            piece = draw.choice(questions)
            if draw.random() < 0.5:                                                     # a part of a question
                piece = piece[draw.randint(0, len(piece) // 2):]
            if draw.random() < 0.3:
                piece = piece.upper() if draw.random() < 0.5 else piece.replace(" ", "\n ")
            pieces += [piece, random_text(draw, draw.randint(0, 5)), draw.choice(["\n", " ", ". "])]
        text = "".join(pieces)
        hits = stage.find(text.encode())
        assert sorted((h.start, h.end, h.share) for h in hits) == sorted(h[:3] for h in slow.find(text)), text
        total += len(hits)
    assert total > 100


@pytest.mark.parametrize("dialect", ["ngram", "idf"])
def test_a_question_of_five_words_is_found_inside_a_sentence_a_shorter_one_between_borders(tmp_path, dialect):
    questions = [{"question": question} for question in ("Storms lead to rain?", "Which plant part absorbs minerals?")]
    stage = ready({"set": write_set(tmp_path / "set.jsonl", questions)}, dialect=dialect)
    for text, items in (("We know that storms lead to rain in spring.", 0), ("So it is. Storms lead to rain!", 1),
                        ("She asked which plant part absorbs minerals in a desert.", 1),
                        ("She asked which plant absorbs minerals in a desert.", 0)):
        doc = Document("", text)
        stage.process(doc)
        assert doc.signals["contaminated_items"] == items, text


def test_words_of_any_bytes_lie_inside_the_text():
    draw = random.Random(1)
    for size in [*range(8), *(draw.randint(8, 300) for _ in range(300))]:
        data = bytes(draw.choices(b"\xff\xe3\x80\xc3\xf0\x9f  aB1.,\n\xed\xa0", k=size))
        words = words_of(data)
        places = [x for pair in zip(words.starts.tolist(), words.ends.tolist()) for x in pair]
        assert places == sorted(places) and all(0 <= p <= size for p in places)


# -- planted items ---------------------------------------------------------------------------------------------------
def other_case(text: str, draw: random.Random) -> str:
    return "".join(c.upper() if draw.random() < 0.5 else c.lower() for c in text)


def other_spaces(text: str, draw: random.Random) -> str:
    return re.sub(r"\s+", lambda _: draw.choice(["  ", "\n", "\t", " \n\n ", "\u00a0"]), text.strip())


def other_number(text: str, draw: random.Random) -> str:
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return text
    number = draw.choice(numbers)
    return text[:number.start()] + str(draw.randint(0, 99999)) + text[number.end():]


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["ngram", "idf"])
def test_planted_questions_are_found_in_books(dialect):
    """200 rows over 13 benchmarks, planted as a paragraph."""
    sets = {name: str(shared_data("evals", f"{name}_500.jsonl.gz")) for name in EVALS}
    stage = ready(sets, fields=EVALS, dialect=dialect)
    books = [gzip.decompress(p.read_bytes()).decode() for p in sorted(shared_data("text", "books").glob("*.gz"))]
    draw = random.Random(17)
    recall: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, name in enumerate(EVALS):
        texts = [text for row in read_set(Path(sets[name]), {"question": EVALS[name]["question"]}) for text in row]
        for item in draw.sample(texts, 16 if number < 5 else 15):
            for kind, change in {"verbatim": lambda t, _: t, "case": other_case, "spaces": other_spaces,
                                 "number": other_number}.items():
                book = draw.choice(books)
                at = draw.choice([m.start() for m in re.finditer("\n", book)])
                text = f"{book[:at]}\n\n{change(item.text, draw)}\n\n{book[at:at + 20000]}"
                doc = Document("0" * 32, text)
                assert stage.process(doc) in (None, "contaminated")
                rows = {(e["set"], e["row"]) for e in doc.meta.get("contamination", ())}
                same = {(name, t.row) for t in texts if t.text == item.text}
                recall[kind][name].append(bool(rows & same))
    for kind, by_set in recall.items():
        for name, found in by_set.items():
            print(f"{dialect:6} {kind:9} {name:25} {sum(found)} of {len(found)}")
            assert sum(found) / len(found) >= (0.95 if kind == "number" else 0.99), (kind, name)
    assert sum(len(found) for found in recall["verbatim"].values()) == 200


@pytest.mark.slow
def test_no_hit_in_wikitext():
    sets = {name: str(shared_data("evals", f"{name}_500.jsonl.gz")) for name in EVALS}
    stage = ready(sets, fields=EVALS)
    for path in sorted(shared_data("text", "wikitext-2").glob("*.gz")):
        assert stage.find(gzip.decompress(path.read_bytes())) == []


# -- cutting ---------------------------------------------------------------------------------------------------------
def test_cutting_keeps_characters_whole_and_moves_loss_spans(tmp_path):
    draw = random.Random(5)
    questions = [random_text(draw, draw.choice([1, 4, 9, 13, 20])).strip() for _ in range(30)]
    questions = [q for q in questions if any(c.isalpha() for c in q)]
    stage = ready({"set": write_set(tmp_path / "set.jsonl", [{"question": q} for q in questions])}, action="cut")
    cut = 0
    for _ in range(200):
        text = "".join(draw.choice([draw.choice(questions), random_text(draw, 6)]) + draw.choice(["\n", " ", ". "])
                       for _ in range(6)) + "Ende."
        borders = [len(text[:i].encode()) for i in sorted(draw.sample(range(len(text) + 1), 4))]
        spans = [{"start": borders[0], "end": borders[1]}, {"start": borders[2], "end": borders[3]}]
        data = text.encode()
        counted = set(range(borders[0], borders[1])) | set(range(borders[2], borders[3]))
        gone = {i for hit in stage.find(data) if hit.words >= 3 for i in range(hit.start, hit.end)}
        doc = Document("0" * 32, text, loss_spans=[dict(s) for s in spans])
        assert stage.process(doc) is None
        assert doc.text.encode() == bytes(b for i, b in enumerate(data) if i not in gone)
        counts = bytes(b for i, b in enumerate(data) if i in counted and i not in gone)
        assert doc.loss_spans is not None
        assert b"".join(doc.text.encode()[s["start"]:s["end"]] for s in doc.loss_spans) == counts
        cut += bool(gone)
    assert cut > 50


def test_the_places_that_pii_has_noted_move_with_the_text(tmp_path):
    question = "What did the miller of Aldham paint green on a Sunday in the spring of that year?"
    stage = ready({"set": write_set(tmp_path / "set.jsonl", [{"question": question}])}, action="cut")
    text = f"Grüße. {question}\nWrite to email@example.com now."
    at = len(text[:text.index("email")].encode())
    doc = Document("0" * 32, text, meta={"pii": [{"start": at, "end": at + 17}]})
    assert stage.process(doc) is None and question not in doc.text
    [place] = doc.meta["pii"]
    assert doc.text.encode()[place["start"]:place["end"]] == b"email@example.com"


def test_spans_that_touch_or_overlap_are_one():
    spans = [{"start": a, "end": b} for a, b in [(5, 9), (0, 2), (2, 3), (6, 7)]]
    passages = whole_passages(b"0123456789", spans)
    assert without(b"0123456789", passages) == b"349"
    assert moved([{"start": 1, "end": 2}, {"start": 2, "end": 10}], passages) == [{"start": 0, "end": 3}]


# -- sets ------------------------------------------------------------------------------------------------------------
ROW = {"q": "What did the miller of Aldham paint green on a Sunday in the spring of that year?",
       "more": {"choices": ["his oven", "In the long summer the miller and his wife painted all old doors of it blue"]}}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", "folder"])
def test_sets_are_read_from_every_form(tmp_path, suffix):
    path = tmp_path / f"set{suffix}"
    rows = [{"q": "Is this the first row?", "more": {"choices": ["no"]}}, ROW]
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "folder":
        (path / "data").mkdir(parents=True)
        (path / "README.md").write_text("A data set.")
        for number, row in enumerate(rows):
            pq.write_table(pa.Table.from_pylist([row]), path / "data" / f"test-{number:05}-of-00002.parquet")
    else:
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    stage = ready({"mills": str(path)}, fields={"mills": {"question": "q", "answer": "more.choices"}})
    doc = Document("0" * 32, f"He wrote: {ROW['more']['choices'][1]}.")
    assert stage.process(doc) == "contaminated"
    assert [(e["set"], e["row"], e["part"]) for e in doc.meta["contamination"]] == [("mills", 1, "answer")]
    assert stage.counts(doc) == {"mills": {"dropped": 1, "cut": 0, "noted": 0, "items": {"answer": {"1": 1}}}}


@pytest.mark.parametrize(("content", "field", "names"), [
    (b'{"question": "Who is it?"}\n{"query": "Where is it?"}\n', "fields", "question"),
    (b'{"question": "Who is it?"}\n{"question": 3}\n', "fields", "row 1"),
    (b'{"question": "Who is it?"}\n{"question": " ?! 12 "}\n', "fields", "row 1"),
    (b'{"question": "Who is it?"}\nWho is it?\n', "sets", "row 1"),
    (b"", "sets", "no row"),
    (b'{"question": null}\n', "sets", "no question"),
])
def test_bad_sets_are_refused_by_setting(tmp_path, content, field, names):
    (tmp_path / "set.jsonl").write_bytes(content)
    problems = Decontaminate(sets={"mine": str(tmp_path / "set.jsonl")}).problems()
    assert list(problems) == [field] and names in problems[field] and "Who is it" not in problems[field]
    assert not list((tmp_path / "cache").rglob("*.npy")), "no part of an index is left"


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl.gz", b"no gzip"), ("a.parquet", b"no parquet"),
    ("a.jsonl.gz", gzip.compress(b'{"question": "Who is it?"}\n' * 999)[:-9])])
def test_unreadable_sets_are_refused_by_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    problems = Decontaminate(sets={"mine": str(tmp_path / name)}).problems()
    assert list(problems) == ["sets"] and name in problems["sets"]


def test_fields_of_an_unknown_set_or_part_are_refused(tmp_path):
    path = write_set(tmp_path / "set.jsonl", [{"question": "Who is it, then?"}])
    for fields in ({"other": {"question": "q"}}, {"mine": {"title": "q"}}, {"mine": {}}):
        with pytest.raises(ValueError, match="fields"):
            Decontaminate(sets={"mine": path}, fields=fields)


def test_a_changed_set_has_another_key_and_another_index(tmp_path):
    path = tmp_path / "set.jsonl"
    write_set(path, [{"question": "Who paints the oven green?"}])
    first = ready({"mine": str(path)})
    key = first.key()
    write_set(path, [{"question": "Who paints the doors blue?"}])
    again = ready({"mine": str(path)})
    assert again.key() != key
    assert first.find(b"Who paints the oven green?") and not again.find(b"Who paints the oven green?")


def test_an_index_has_the_same_bytes_in_whatever_order_sets_are_named(tmp_path, monkeypatch):
    sets = {name: write_set(tmp_path / f"{name}.jsonl", [{"question": f"{name} paints the {x} oven green"}
                                                         for x in ("old", "new")]) for name in ("Ann", "Bea")}
    fields = {name: {"question": "question"} for name in sets}
    contents = []
    for order in (sets, dict(reversed(sets.items()))):
        monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / f"cache{len(contents)}"))
        contents.append(index_file(order, fields, "ngram", None).read_bytes())
    assert contents[0] == contents[1]


def test_ngrams_common_in_the_sample_of_the_corpus_do_not_count(tmp_path):
    phrase = "all rights are reserved by the owner of this page and its many friends"
    path = write_set(tmp_path / "set.jsonl", [{"question": f"{phrase} who wonder why the moon turns around the sun"}])
    (tmp_path / "sample.jsonl").write_text(f'{{"text": "x. {phrase}"}}\n' * COMMON)
    page = f"Welcome. {phrase}.".encode()
    assert ready({"mine": path}).find(page)
    stage = ready({"mine": path}, common=str(tmp_path / "sample.jsonl"))
    assert not stage.find(page)
    assert stage.find(f"{phrase} who wonder why".encode()), "n-grams that go on after the phrase are not common"


def test_template_phrases_of_many_items_do_not_count(tmp_path):
    phrase = "which of the following words best completes the sentence that you have just read"
    rows = [{"question": f"{phrase} {word} is what he then said to her on that very same morning in May"}
            for word in "abcdefghijkl"]
    stage = ready({"mine": write_set(tmp_path / "set.jsonl", rows)})
    assert not stage.find(phrase.encode())
    assert [hit.share > 0.5 for hit in stage.find(rows[3]["question"].encode())].count(True) == 1
    assert ready({"mine": write_set(tmp_path / "few.jsonl", rows[:3])}).find(phrase.encode())


def test_old_evidence_is_removed(tmp_path):
    stage = ready({"mine": write_set(tmp_path / "set.jsonl", [{"question": "Who paints the oven green?"}])})
    doc = Document("0" * 32, "Nobody.", meta={"contamination": [{"set": "x", "row": 1}]})
    assert stage.process(doc) is None and doc.meta == {} and stage.counts(doc) is None


@pytest.fixture
def short_and_long(tmp_path) -> dict[str, str]:
    return {"mine": write_set(tmp_path / "set.jsonl", [
        {"question": "gun"}, {"question": "Who paints the oven green?"}, {"question": "gun"}])}


def test_warnings_count_questions_that_drop_nothing(short_and_long):
    assert "mine 2 of 3" in Decontaminate(sets=short_and_long).warnings()[0]
    assert Decontaminate(sets=short_and_long, min_words=1).warnings() == []


@pytest.mark.parametrize("dialect", ["ngram", "idf"])
@pytest.mark.parametrize("action", ["drop", "cut"])
def test_a_question_of_few_words_is_noted_and_leaves_the_document_whole(short_and_long, dialect, action):
    stage = ready(short_and_long, dialect=dialect, action=action)
    doc = Document("", "A list.\nGun\nThe end.")
    assert stage.process(doc) is None and doc.text == "A list.\nGun\nThe end."
    assert [(hit["row"], hit["words"], hit["start"], hit["end"]) for hit in doc.meta["contamination"]] == [
        (0, 1, 8, 11), (2, 1, 8, 11)]
    assert (doc.signals["contaminated_items"], doc.signals["contaminated_words"]) == (1, 1)
    assert stage.counts(doc) == {"mine": {"dropped": 0, "cut": 0, "noted": 1, "items": {}}}
    doc = Document("", "Gun")
    assert stage.process(doc) is None and doc.text == "Gun"


def test_a_cut_leaves_questions_of_few_words_and_notes_them(short_and_long):
    stage = ready(short_and_long, action="cut")
    doc = Document("", "Gun\nWho paints the oven green? A baker.")
    assert stage.process(doc) is None and doc.text == "Gun\n? A baker."
    assert [hit["words"] for hit in doc.meta["contamination"]] == [1, 1, 5]
    assert doc.signals["contaminated_share"] == 25 / 39
    assert stage.counts(doc) == {"mine": {"dropped": 0, "cut": 1, "noted": 0, "items": {"question": {"1": 1}}}}
    doc = Document("", "Who paints the oven green?!")
    stage = ready(short_and_long, action="cut", min_words=6)
    assert stage.process(doc) is None and doc.text == "Who paints the oven green?!"
    doc = Document("", "Who paints the oven green")
    stage = ready(short_and_long, action="cut")
    assert stage.process(doc) == "contaminated_all" and stage.counts(doc)["mine"]["dropped"] == 1


def test_verdicts_under_another_min_words_follow_from_stored_signals(short_and_long):
    for text in ("Gun", "So: who paints the oven green? Gun.", "Nothing"):
        stored = Document("", text)
        ready(short_and_long).process(stored)
        for least in (1, 2, 5, 6):
            stage, doc = ready(short_and_long, min_words=least), Document("", text)
            assert stage.process(doc) == stage.verdict(stored)
            assert (doc.signals, doc.meta) == (stored.signals, stored.meta)
            assert all((stage.process(doc) is None) == bound.holds(doc.signals[bound.signal])
                       for bound in stage.bounds())
    cutting = ready(short_and_long, action="cut")
    cutting.process(doc := Document("", "Nothing"))
    assert cutting.verdict(doc) is None and cutting.bounds() == []
    cutting.process(doc := Document("", "Gun"))
    with pytest.raises(NotImplementedError):
        cutting.verdict(doc)


def test_a_set_whose_items_are_all_short_has_neither_cut_nor_dropped(tmp_path, short_and_long):
    other = write_set(tmp_path / "other.jsonl", [{"question": "fire"}])
    for action, outcome in (("cut", "cut"), ("drop", "dropped")):
        stage = ready({**short_and_long, "other": other}, action=action)
        stage.process(doc := Document("", "Fire\nWho paints the oven green? A baker."))
        none = {"dropped": 0, "cut": 0, "noted": 0}
        assert stage.counts(doc) == {"mine": {**none, outcome: 1, "items": {"question": {"1": 1}}},
                                     "other": {**none, "noted": 1, "items": {}}}


def test_hits_of_the_longest_items_are_noted_first(short_and_long):
    doc = Document("", "Gun\nAnd so on.\n" * 60 + "Who paints the oven green?\n" + "Gun\n")
    assert ready(short_and_long).process(doc) == "contaminated"
    assert [hit["row"] for hit in doc.meta["contamination"]] == [0, 2] * 24 + [0, 1]


def test_errors_of_a_set_name_the_setting(tmp_path):
    with pytest.raises(SetError) as error:
        list(read_set(tmp_path, {"question": "q"}))
    assert error.value.field == "sets"
    assert Hit(1, 2, 0, 1, 1.0).end == 2


# -- hostile input ---------------------------------------------------------------------------------------------------
def test_all_items_of_a_document_are_counted_not_only_those_noted(tmp_path):
    words = "abcdefghij"
    rows = [{"question": f"Who paints the {a}{b} oven green?"} for a in words for b in words]
    stage = ready({"mine": write_set(tmp_path / "set.jsonl", rows)})
    doc = Document("0" * 32, "\n".join(row["question"] for row in rows))
    assert stage.process(doc) == "contaminated"
    assert len(doc.meta["contamination"]) == 50 and doc.signals["contaminated_items"] == 100
    assert stage.counts(doc) == {"mine": {"dropped": 1, "cut": 0, "noted": 0,
                                          "items": {"question": {str(row): 1 for row in range(100)}}}}
    few = Document("0" * 32, rows[7]["question"], meta={"contaminated_rows": {"old": {"question": {"5": [1]}}}})
    assert stage.process(few) and "contaminated_rows" not in few.meta
    assert stage.counts(few) == {"mine": {"dropped": 1, "cut": 0, "noted": 0, "items": {"question": {"7": 1}}}}


def test_a_short_item_beyond_the_list_is_noted_and_causes_nothing(tmp_path):
    long = [{"question": f"Who paints the {a}{b} oven green?"} for a in "abcdefgh" for b in "abcdefgh"]
    stage = ready({"long": write_set(tmp_path / "long.jsonl", long),
                   "short": write_set(tmp_path / "short.jsonl", [{"question": "Fire"}])})
    doc = Document("0" * 32, "\n".join(row["question"] for row in long) + "\nFire\n")
    assert stage.process(doc) == "contaminated" and {hit["set"] for hit in doc.meta["contamination"]} == {"long"}
    assert stage.counts(doc)["short"] == {"dropped": 0, "cut": 0, "noted": 1, "items": {}}
    assert len(stage.counts(doc)["long"]["items"]["question"]) == 64


def test_all_rows_of_a_set_count_also_the_last_without_a_text(tmp_path):
    path = write_set(tmp_path / "set.jsonl", [{"question": "Who paints the oven green?"}, {"question": None}])
    assert ready({"mine": path})._index().sets["mine"]["rows"] == 2


def test_a_question_of_many_rows_is_listed_with_each_of_them(tmp_path):
    path = write_set(tmp_path / "set.jsonl", [{"question": "Who paints the oven green?"}] * 60)
    stage = ready({"mine": path})
    stage.process(doc := Document("0" * 32, "Who paints the oven green?"))
    assert doc.meta["contaminated_rows"] == {"mine": {"question": {"5": list(range(60))}}}


@pytest.mark.parametrize("question", [
    "Who \0 paints the oven green?", "Who paints \ud800 the oven green?", "Qui a mange\u0301 le pe\u0301re noe\u0308l?",
    "Wer mu\u0308sste die Gro\u0308\u00dfe o\u0308fter messen?"])
def test_questions_with_odd_characters_are_found_as_written_and_composed(tmp_path, question):
    stage = ready({"mine": write_set(tmp_path / "set.jsonl", [{"question": question}])})
    text = unicodedata.normalize("NFC", question)
    assert stage.find(f"So: {text}\nEnd.".encode("utf-8", "surrogatepass"))
    if text == question:
        assert stage.process(Document("0" * 32, question)) == "contaminated"


def test_empty_questions_are_refused_and_missing_ones_left_out(tmp_path):
    path = write_set(tmp_path / "set.jsonl", [{"question": "Who paints the oven green?"}, {"question": ""}])
    assert "row 1" in Decontaminate(sets={"mine": path}).problems()["fields"]
    write_set(tmp_path / "set.jsonl", [{"question": None}, {"question": []},
                                       {"question": "Who paints the oven green?"}])
    stage = ready({"mine": path})
    stage.process(doc := Document("0" * 32, "Who paints the oven green?"))
    assert [hit["row"] for hit in doc.meta["contamination"]] == [2]


def test_time_is_linear_in_the_hits_of_a_document(tmp_path):
    stage = ready({"mine": write_set(tmp_path / "set.jsonl", [{"question": "Who paints the oven green?"}])})
    hit = b"Who paints the oven green?\n" + b"and then? " * 10
    assert len(stage.find(hit * 2_000)) == 2_000                       # it also compiles
    assert_linear(stage.find, lambda times: hit * times, 2_000)
