"""Columns of a source that no setting names: they are stored in meta with their types, or as signals, or counted as
lost."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.document import Document
from stages.read.code_table import CodeTable
from stages.read.columns import MAX_NAMES, MAX_VALUE, OTHERS
from stages.read.jsonl import Jsonl
from stages.read.parquet import Parquet
from stages.read.reader import Reader, Slice
from stages.read.records import Preference, Sft

#: a record of FineWeb-Edu
ROW = {"text": "A page about tides.", "id": "<urn:uuid:1>", "dump": "CC-MAIN-2013-20", "url": "http://a.example/",
       "file_path": "s3://commoncrawl/x.warc.gz", "language": "en", "language_score": 0.9626, "token_count": 5,
       "score": 2.53, "int_score": 3}


def read(reader: Reader, local: Path) -> list[Document]:
    found = list(reader.read(str(local), Slice("web", local.name)))
    assert all(isinstance(doc, Document) for doc in found), found
    return found


def written(folder: Path, rows: list[dict], kind: str) -> Path:
    local = folder / f"a.{kind}"
    if kind == "jsonl":
        local.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(rows), local)
    return local


def reader(kind: str, **settings: object) -> Reader:
    return (Jsonl if kind == "jsonl" else Parquet)(**settings)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_column_survives(tmp_path, kind):
    local = written(tmp_path, [ROW, {**ROW, "dump": None, "score": None}], kind)
    made = reader(kind, signals=("score", "int_score"))
    one, two = read(made, local)
    rest = {k: ROW[k] for k in ("id", "dump", "file_path", "language", "language_score", "token_count")}
    assert (one.text, one.url, one.meta) == (ROW["text"], ROW["url"], rest)
    assert one.signals == {"score": 2.53, "int_score": 3.0} and type(one.meta["token_count"]) is int
    assert two.signals == {"int_score": 3.0} and two.meta == {k: v for k, v in rest.items() if k != "dump"}
    assert made.signals == ("score", "int_score") and made.lost == {}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_list_keeps_those_alone(tmp_path, kind):
    local = written(tmp_path, [ROW], kind)
    for keep, kept in (((), {}), (("dump",), {"dump": ROW["dump"]})):
        made = reader(kind, keep=keep)
        assert read(made, local)[0].meta == {"id": ROW["id"], **kept}
        assert made.lost == {}, "what was not asked for is not lost"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_names_that_mean_something_here(tmp_path, kind):
    local = written(tmp_path, [{"text": "A text.", "id": "theirs", "uid": 7, "cluster": 3}], kind)
    assert read(reader(kind, id="uid"), local)[0].meta == {"id": 7, "their_id": "theirs", "their_cluster": 3}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("order", [1, -1])
def test_of_two_columns_of_one_name_the_second_is_counted(tmp_path, kind, order):
    """Whichever comes first in the record: `their_cluster` beside a `cluster` that is kept by that name."""
    rows = [{"text": "one", "their_cluster": 8, "cluster": 3, "n": 1},
            {"text": "two", "their_cluster": 9, "cluster": 4}, {"text": "three", "their_cluster": None, "cluster": 5}]
    made = reader(kind)
    docs = read(made, written(tmp_path, [dict(list(row.items())[::order]) for row in rows], kind))
    assert [d.meta.get("their_cluster") for d in docs] == [3, 4, 5] and docs[0].meta["n"] == 1
    assert made.lost == {"their_cluster": {"name_taken": 2}}
    made = reader(kind, keep=("their_cluster", "n"))
    assert [d.meta.get("their_cluster") for d in read(made, tmp_path / f"a.{kind}")] == [8, 9, None]
    assert made.lost == {}, "named alone, it keeps its name"
    made = reader(kind, keep=("n", "n"))
    assert read(made, tmp_path / f"a.{kind}")[0].meta == {"n": 1} and made.lost == {}


def test_a_signal_that_is_text_takes_a_name_too(tmp_path):
    made = Jsonl(signals=("cluster",))
    rows = [{"text": "one", "their_cluster": 8, "cluster": "x"}, {"text": "two", "their_cluster": 9, "cluster": 4}]
    one, two = read(made, written(tmp_path, rows, "jsonl"))
    assert one.meta == {"their_cluster": "x"} and made.lost == {"their_cluster": {"name_taken": 1}}
    assert two.meta == {"their_cluster": 9} and two.signals == {"cluster": 4.0}


@pytest.mark.parametrize("order", [1, -1])
def test_the_path_of_a_source_file_is_not_that_of_another_column(tmp_path, order):
    row = {"content": "def f():\n    return 1\n" * 9, "path": "a/f.py", "their_path": "b/g.rs"}
    made = CodeTable(file_path="path", repository_name="")
    [doc] = read(made, written(tmp_path, [dict(list(row.items())[::order])], "parquet"))
    assert doc.meta["path"] == "a/f.py" and made.lost == {"their_path": {"name_taken": 1}}


def test_values_of_every_type(tmp_path):
    local = tmp_path / "a.parquet"
    day = dt.datetime(2026, 11, 22, 1, 2, 3)
    pq.write_table(pa.table({
        "text": ["one", "two"], "flag": [True, None], "share": pa.array([0.5, float("nan")]),
        "day": pa.array([day, None], pa.timestamp("us")), "price": pa.array([decimal.Decimal("1.50"), None]),
        "at": pa.array([1, 1_000_000_001], pa.timestamp("ns")),
        "tags": [["a", "b"], []], "facts": [{"n": 1, "who": None}, None],
        "kind": pa.array(["x", "y"]).dictionary_encode()}), local)
    one, two = read(Parquet(), local)
    assert one.meta == {"flag": True, "share": 0.5, "day": "2026-11-22 01:02:03", "price": "1.50", "tags": ["a", "b"],
                        "at": "1970-01-01 00:00:00.000000001", "facts": {"n": 1, "who": None}, "kind": "x"}
    assert two.meta == {"share": None, "tags": [], "at": "1970-01-01 00:00:01.000000001", "kind": "y"}
    json.dumps([one.meta, two.meta], allow_nan=False)


def test_what_cannot_be_kept_is_counted_by_name(tmp_path):
    local = tmp_path / "a.parquet"
    pq.write_table(pa.table({
        "text": ["one", "two", "three"], "image": [b"\xff\xd8", None, b"\x00"],
        "pages": [[{"jpg": b"\xff"}], None, None], "page": ["x" * (MAX_VALUE + 1), "y", None],
        "embedding": [[0.123456789] * 8192, None, None],
        "when": pa.array([0, 2**60, 0], pa.timestamp("ms"))}), local, row_group_size=2)
    made = Parquet()
    docs = read(made, local)
    assert [sorted(d.meta) for d in docs] == [["when"], ["page"], ["when"]]
    assert made.lost == {"image": {"binary": 3}, "pages": {"binary": 3}, "page": {"too_long": 1},
                         "embedding": {"too_long": 1}, "when": {"bad_value": 1}}
    rows = [{"text": "one", "n": "y" * (MAX_VALUE + 1)}, {"text": "two", "n": "y" * MAX_VALUE}]
    made = Jsonl()
    one, two = read(made, written(tmp_path, rows, "jsonl"))
    assert one.meta == {} and len(two.meta["n"]) == MAX_VALUE and made.lost == {"n": {"too_long": 1}}


def test_a_column_of_bytes_that_is_text_is_kept_when_it_is_named(tmp_path):
    local = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two"], "title": ["é".encode(), b"\xff"]}), local)
    made = Parquet(keep=("title",))
    assert [d.meta for d in read(made, local)] == [{"title": "é"}, {}] and made.lost == {"title": {"binary": 1}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_signals_of_what_is_no_number(tmp_path, kind):
    many = 2**60 + 1                                     # a float has not so many digits
    local = written(tmp_path, [{"text": "one", "n": many, "b": True}, {"text": "two", "n": 1, "b": None}], kind)
    one, two = read(reader(kind, signals=("n", "b")), local)
    assert one.signals == {"n": float(many), "b": 1.0} and one.meta == {"n": many}
    assert two.signals == {"n": 1.0} and two.meta == {}
    local = written(tmp_path, [{"text": "one", "n": "high"}], kind)
    assert [(d.signals, d.meta) for d in read(reader(kind, signals=("n",)), local)] == [({}, {"n": "high"})]
    for wrong in (("bytes",), ("n", "n"), ("",)):
        with pytest.raises(ValueError, match="name each column once"):
            reader(kind, signals=wrong)


def test_the_text_is_not_kept_beside_itself(tmp_path):
    rows = [{"page": {"body": {"text": "The text."}, "lang": "en"}, "metadata": {"url": "http://x/"}}]
    [doc] = read(Jsonl(text="page.body.text", url="metadata.url"), written(tmp_path, rows, "jsonl"))
    assert doc.url == "http://x/"
    assert doc.meta == {"page": {"body": {}, "lang": "en"}, "metadata": {"url": "http://x/"}}


def test_hostile_keys_take_no_memory(tmp_path):
    long = "x" * (MAX_VALUE + 1)
    made = Jsonl()
    read(made, written(tmp_path, [{"text": "t", **{f"{i}-{j}": long for j in range(20)}} for i in range(10)], "jsonl"))
    assert len(made.lost) == MAX_NAMES + 1 and made.lost[OTHERS] == {"too_long": 200 - MAX_NAMES}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversations_keep_what_else_they_have(tmp_path, kind):
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    row = {"messages": turns, "source": "forum", "score": 4, "turns": "few", "images": None, "raw": "x" * (1 << 17)}
    made = Sft(signals=("score",))
    [doc] = read(made, written(tmp_path, [row], kind))
    assert doc.meta == {"source": "forum", "their_turns": "few", "turns": 2} and doc.signals == {"score": 4.0}
    assert made.lost == {"raw": {"too_long": 1}}
    row = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "margin": 0.5}
    [doc] = read(Preference(), written(tmp_path, [row], kind))
    assert doc.meta == {"margin": 0.5, "turns": 2, "answer": "chosen"}


def test_an_odd_value_costs_no_conversation(tmp_path):
    local = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["Why?"], "completion": ["So."], "photo": [b"\xff"],
                             "when": pa.array([2**60], pa.timestamp("ms"))}), local)
    made = Sft()
    [doc] = read(made, local)
    assert doc.meta == {"turns": 2} and made.lost == {"photo": {"binary": 1}, "when": {"bad_value": 1}}


def test_source_files_keep_what_else_their_row_says(tmp_path):
    row = {"content": "def f():\n    return 1\n" * 9, "max_stars_repo_path": "a/f.py", "max_stars_repo_name": "o/r",
           "stars": 12, "path": "elsewhere", "lang": "Python"}
    local = written(tmp_path, [row], "parquet")
    [doc] = read(CodeTable(signals=("stars",)), local)
    assert doc.meta == {"path": "a/f.py", "repository": "o/r", "code_language": "python", "their_path": "elsewhere",
                        "lang": "Python"}
    assert doc.signals == {"stars": 12.0}
    [doc] = read(CodeTable(repository=True), local)
    assert doc.meta == {"repository": "o/r", "files": 1, "code_language": "python"}
    with pytest.raises(ValueError, match="take out one of the two"):
        CodeTable(repository=True, signals=("stars",))
