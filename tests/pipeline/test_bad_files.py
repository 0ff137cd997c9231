"""A bad input file costs only itself: it is quarantined, whole or in part, up to `run.max_bad_files`, and no other file
is.

Readers crash in real child processes. Before it crashes, a reader writes a line to the file `deaths`, by which crashes
are counted. In the test's own process readers do not crash, so there a run would read files that the log says must not
be read.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from pipeline.engine.driver.bad_files import BadFiles, TooManyBadFiles
from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import RunSummary, make_backend, run_recipe
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from stages.read.jsonl import Jsonl
from stages.read.parquet import Parquet
from stages.read.reader import Slice

pytestmark = [pytest.mark.usefixtures("room"),
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]

#: imported by every child before anything else: readers that die of what a record says
HOOK = """
    import ctypes
    from stages.read import jsonl, parquet

    notes = open({deaths!r}, "a")           # before the worker is confined

    def die(what):
        print(what, file=notes, flush=True)
        ctypes.string_at(0)

    row, batch, splits = jsonl.Jsonl._row, parquet.Parquet._batch, jsonl.Jsonl.splits

    def read_row(self, line, slice, *place):
        if b"segfault" in line:
            die(slice.path)
        return row(self, line, slice, *place)

    def read_batch(self, rows, slice, *place):
        for record in batch(self, rows, slice, *place):
            if "segfault" in getattr(record, "text", ""):
                die(slice.path)
            yield record

    def index(self, local, path, target):
        if "index" in path:
            die("splits of " + path)
        return splits(self, local, path, target)

    jsonl.Jsonl._row, parquet.Parquet._batch, jsonl.Jsonl.splits = read_row, read_batch, index
"""
TEXT = "Record {} is well and says what it has to say, twice over."


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site whose method `run(store, *overrides)` runs the folder in/ as source `s` into dataset `d`."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(textwrap.dedent(HOOK.format(deaths=str(tmp_path / "deaths"))))
    (tmp_path / "in").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "hook"))
    return Site(tmp_path)


class Site:
    def __init__(self, top: Path) -> None:
        self.top, self.folder = top, top / "in"

    def lines(self, name: str, texts: list[str]) -> None:
        (self.folder / name).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))

    def table(self, name: str, texts: list[str], group: int = 4) -> None:
        pq.write_table(pa.table({"text": texts}), self.folder / name, row_group_size=group)

    def run(self, reader: str, *overrides: str, store: str = "store", steps: str = "[]",
            backend: str = "inline", report: bool = False) -> RunSummary:
        (self.top / "r.yaml").write_text(f"version: 1\nsources: {{s: {{read: {reader}, path: in}}}}\n"
                                         f"datasets: {{d: {{from: s, steps: {steps}}}}}\n")
        recipe = load_recipe(str(self.top / "r.yaml"), list(overrides))
        return run_recipe(recipe, str(self.top / store), make_backend=make_backend(backend, 1, None), report=report)

    def deaths(self) -> list[str]:
        path = self.top / "deaths"
        return path.read_text().splitlines() if path.exists() else []

    def rows(self, kind: str, store: str = "store") -> list[dict]:
        parts = sorted(map(str, (self.top / store / kind / "d").glob("part-*.parquet")))
        return ds.dataset(parts).to_table().to_pylist() if parts else []

    def texts(self, store: str = "store") -> list[str]:
        return sorted(row["text"] for row in self.rows("datasets", store))

    def lost(self, store: str = "store") -> list[tuple]:
        return sorted((r["file"], r["record"], r["stage"], r["reason"]) for r in self.rows("quarantine", store))

    def report(self, store: str = "store") -> dict:
        return json.loads((self.top / store / "report.json").read_text())


def texts(name: str, n: int = 10, **odd: str) -> list[str]:
    return [f"{name} " + odd.get(f"at{i}", TEXT.format(i)) for i in range(n)]


# -- a reader dies ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_record_that_kills_its_reader_costs_the_rest_of_its_file_and_two_deaths(site):
    good, bad = texts("a"), texts("m", at5="segfault")
    site.lines("a.jsonl", good)
    site.lines("m.jsonl", bad)
    site.lines("z.jsonl", texts("z"))
    site.run("jsonl", backend="process", report=True)
    assert site.deaths() == ["m.jsonl"] * 2                      # in the partition, and alone
    kept = sorted(good + bad[:5] + texts("z"))
    assert site.texts() == kept
    assert site.lost() == [("m.jsonl", 5, "read", "crash:SIGSEGV")]
    size = (site.folder / "m.jsonl").stat().st_size
    [row] = site.rows("quarantine")
    section = site.report()["sources"]["s"]["bad_files"]
    assert 0 < row["bytes"] < size and section == {
        "files": 1, "bytes": row["bytes"], "listed": [{"file": "m.jsonl", "reasons": {"crash:SIGSEGV": row["bytes"]}}]}
    assert "m.jsonl" in (site.top / "store" / "runs" / site.report()["run"] / "report.html").read_text()

    # the log names the file and where reading ends
    log = Log.read(Store(site.top / "store"))
    [record] = [r for r in log.records() if r.node == "d"]
    [entry] = record.quarantine
    info = (site.folder / "m.jsonl").stat()
    assert entry["file"] == {"path": "m.jsonl", "size": size, "etag": str(info.st_mtime_ns), "start": 0, "stop": None,
                             "records": 5}
    assert (entry["row"], entry["stage"], entry["reason"]) == (len(good) + 5, "read", "crash:SIGSEGV")
    assert log.quarantined([entry["stage_key"]]) == {entry["id"]: entry}

    # other tasks that read the file replay the decision, as does the same run in a store that knows it
    site.run("jsonl", steps="[{gopher_quality: {min_doc_words: 1}}]")
    assert site.lost() == [("m.jsonl", 5, "read", "crash:SIGSEGV")]
    assert site.run("jsonl").executed == 0 and site.texts() == kept

    # a fresh store comes to the same decision, in another order of work
    site.run("jsonl", store="other", backend="process")
    assert (site.texts("other"), site.lost("other")) == (kept, site.lost())
    # and a file that has changed is read as any other
    site.lines("m.jsonl", texts("m"))
    site.run("jsonl")
    assert (site.lost(), len(site.texts())) == ([], 30)


@pytest.mark.slow
def test_of_a_table_a_row_group_is_lost_and_the_rest_after_four_deaths(site):
    rows = texts("m", 12, at5="segfault")
    site.table("a.parquet", texts("a", 4))
    site.table("full.parquet", [f"{t} segfault" if i % 4 == 1 else t for i, t in enumerate(texts("f", 40))])
    site.table("m.parquet", rows)
    site.run("parquet", backend="process")
    assert Counter(site.deaths()) == {"m.parquet": 2, "full.parquet": 4}
    assert site.texts() == sorted(texts("a", 4) + texts("f", 40)[:1] + texts("f", 40)[4:5] + rows[:5] + rows[8:])
    assert [lost[:2] for lost in site.lost()] == [("full.parquet", 1), ("full.parquet", 5), ("m.parquet", 5)]
    assert {lost[2:] for lost in site.lost()} == {("read", "crash:SIGSEGV")}
    [row] = [r for r in site.rows("quarantine") if r["file"] == "m.parquet"]
    assert 0 < row["bytes"] < (site.folder / "m.parquet").stat().st_size / 2


def test_a_file_whose_index_kills_its_maker_is_read_in_one_piece(site):
    rows = texts("index", 20)
    site.lines("index.jsonl", rows)
    site.run("jsonl", "run.partition=200B", backend="process")
    assert site.deaths() == ["splits of index.jsonl"] * 2
    assert (site.texts(), site.lost()) == (sorted(rows), [])


@pytest.fixture
def raises(monkeypatch):
    """Makes the reader of JSON lines fail on every record that contains "raises"."""
    def read_row(self, line, slice, *place, read=Jsonl._row):
        if b"raises" in line:
            raise KeyError("an odd record")
        return read(self, line, slice, *place)

    monkeypatch.setattr(Jsonl, "_row", read_row)


def test_a_reader_that_raises_costs_the_rest_of_its_file(site, raises):
    bad = texts("m", at3="raises")
    site.lines("a.jsonl", texts("a"))
    site.lines("m.jsonl", bad)
    site.run("jsonl")
    assert (site.texts(), site.deaths()) == (sorted(texts("a") + bad[:3]), [])
    [row] = site.rows("quarantine")
    assert (row["file"], row["record"], row["reason"], row["detail"]) == (
        "m.jsonl", 3, "error:KeyError", "'an odd record'")


# -- files that are bad to begin with --------------------------------------------------------------------------------
def test_files_that_are_bad_to_begin_with(site):
    """Another schema, damage of every kind, a folder with the name of a file: each costs itself."""
    site.table("a.parquet", texts("a"))
    whole = (site.folder / "a.parquet").read_bytes()
    pq.write_table(pa.table({"content": ["x"]}), site.folder / "schema.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), site.folder / "number.parquet")
    (site.folder / "zero.parquet").write_bytes(b"")
    (site.folder / "junk.parquet").write_bytes(b"PAR1" + bytes(range(200)) + b"PAR1")
    (site.folder / "cut.parquet").write_bytes(whole[:-100])
    (site.folder / "folder.parquet").mkdir()
    summary = site.run("parquet", report=True)
    assert site.texts() == sorted(texts("a"))
    assert [(file, reason) for file, _, _, reason in site.lost()] == [
        ("cut.parquet", "corrupt_parquet"), ("junk.parquet", "corrupt_parquet"), ("number.parquet", "wrong_schema"),
        ("schema.parquet", "wrong_schema"), ("zero.parquet", "corrupt_parquet")]
    assert any("5 input files could not be read" in w for w in summary.warnings)
    assert site.report()["sources"]["s"]["bad_files"]["files"] == 5


def test_a_bomb_of_1_kb_is_told_by_counting(tmp_path):
    """Two hundred gigabytes of text in one row group: 20,000 rows that name one entry of a dictionary."""
    named = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), pa.array(["x" * (10 << 20)]))
    pq.write_table(pa.table({"text": named}), tmp_path / "b.parquet", compression="zstd", store_schema=False,
                   write_statistics=False, dictionary_pagesize_limit=1 << 30)
    assert (tmp_path / "b.parquet").stat().st_size < 5000
    [record] = Parquet().read(str(tmp_path / "b.parquet"), Slice("s", "b.parquet"))
    assert (record.reason, record.detail) == ("too_large", "20000 rows of a row group of 209715200000 bytes or more")
    assert 0 < record.bytes < 5000


def test_odd_names_are_names(site):
    names = ["a.jsonl", "..\\..\\x.jsonl", "..x.jsonl", "\x1b[31m\u202e.jsonl", "new\nline.jsonl"]
    for name in names:
        site.lines(name, texts(name))
    site.run("jsonl")
    assert site.texts() == sorted(text for name in names for text in texts(name))
    assert {row["locator"]["file"] for row in site.rows("datasets")} == set(names)


def test_a_name_that_is_no_utf8(site):
    site.table("a.parquet", texts("a"))
    site.lines("a.jsonl", texts("a"))
    for suffix in ("jsonl", "parquet"):
        os.rename(site.folder / f"a.{suffix}", os.fsencode(site.folder) + b"/\xff." + suffix.encode())
    site.lines("b.jsonl", texts("b"))
    site.table("b.parquet", texts("b"))
    site.run("jsonl")
    assert site.texts() == sorted(texts("a") + texts("b"))
    site.run("parquet", store="tables")        # Arrow opens no such file
    assert site.texts("tables") == sorted(texts("b"))
    assert site.lost("tables") == [("\ufffd.parquet", 0, "read", "error:UnicodeEncodeError")]


def test_a_file_without_permission_is_read_once_it_has_it(site, monkeypatch):
    site.lines("a.jsonl", texts("a"))
    site.lines("m.jsonl", texts("m"))
    real = os.access
    with monkeypatch.context() as patch:                         # root may read everything
        patch.setattr(os, "access", lambda p, mode, **kw: not str(p).endswith("m.jsonl") and real(p, mode, **kw))
        site.run("jsonl")
    assert (site.texts(), site.lost()) == (sorted(texts("a")), [("m.jsonl", 0, "read", "no_permission")])
    site.run("jsonl")
    assert (len(site.texts()), site.lost()) == (20, [])


# -- the budget ------------------------------------------------------------------------------------------------------
def test_beyond_the_budget_the_run_ends_with_the_first_files_and_the_key(site, raises):
    for name in "abcdef":
        site.lines(f"{name}.jsonl", texts(name, at1="raises" if name < "e" else TEXT))
    with pytest.raises(TooManyBadFiles) as e:
        site.run("jsonl", "run.max_bad_files=3")
    message = str(e.value)
    assert message.startswith("4 input files could not be read, whole or in part: s: a.jsonl (error:KeyError), s: b.")
    assert "and 1 more" in message and "raise run.max_bad_files" in message and "\n" not in message
    assert site.run("jsonl", "run.max_bad_files=4").datasets == {"d": 24}


def test_a_crash_counts_at_once_and_the_decision_outlives_the_run(site):
    """Two files kill their reader, one is allowed: the run ends while the task is still at work, and what it has found
    out need not be found out again."""
    for name in "abc":
        site.lines(f"{name}.jsonl", texts(name, at1="segfault" if name < "c" else TEXT))
    with pytest.raises(TooManyBadFiles, match=r"2 input files .*crash:SIGSEGV.*`run.max_bad_files` allows 1"):
        site.run("jsonl", "run.max_bad_files=1", backend="process")
    assert site.deaths() == ["a.jsonl", "a.jsonl", "b.jsonl", "b.jsonl"]
    site.run("jsonl", "run.max_bad_files=2")
    assert (len(site.deaths()), len(site.texts())) == (4, 12)


def test_a_source_whose_reader_fails_in_every_file_is_a_mistake_of_the_recipe(site):
    site.table("a.parquet", texts("a"))
    site.table("b.parquet", texts("b"))
    with pytest.raises(TooManyBadFiles, match=r"'s': its reader failed in every file: .*no column 'content'"):
        site.run("parquet", "sources.s.text=content")


def test_the_readers_message_is_given_even_after_many_bad_records(site, raises):
    """A quarantine file has a row group of 8,192 rows, and only a later row has a message."""
    lines = ["{}\n"] * 8192 + ['{"text": "raises"}\n']
    (site.folder / "a.jsonl").write_text("".join(lines))
    with pytest.raises(TooManyBadFiles, match=r"in every file: s: a.jsonl \(error:KeyError\): .*an odd record"):
        site.run("jsonl")


def test_damage_in_the_only_file_is_said_and_no_mistake_of_the_recipe(site):
    (site.folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n')[:12])
    assert any("gave no document" in w for w in site.run("jsonl").warnings)


@pytest.mark.parametrize(("written", "files", "allowed"), [(0, 1000, 0), (7, 3, 7), (0.01, 5, 10), (0.01, 5000, 50)])
def test_the_budget_is_a_number_or_a_share_that_always_allows_ten(written, files, allowed):
    budget = BadFiles(written, files)

    def fail(n):
        counters = {"bad_files": {"s": {f"f{i}": {"truncated": 1} for i in range(n)}}}
        budget.done(PartRecord("k", "t", "n", "a", {}, counters))
        budget.check()

    fail(allowed)
    with pytest.raises(TooManyBadFiles, match=f"allows {allowed}"):
        fail(allowed + 1)


def test_the_key_in_a_recipe(site):
    site.lines("a.jsonl", texts("a"))
    (site.top / "r.yaml").write_text("version: 1\nsources: {s: {read: jsonl, path: in}}\ndatasets: {d: {from: s}}\n")
    for written, value in (("20", 20), ("0", 0), ("2%", 0.02), ("1k", 1000)):
        recipe = load_recipe(str(site.top / "r.yaml"), [f"run.max_bad_files={written}"])
        assert recipe.run.max_bad_files == value
        (site.top / "kept.yaml").write_text(recipe.canonical_yaml())
        assert load_recipe(str(site.top / "kept.yaml")).run.max_bad_files == value
    for written in ("-1", "0.5", "many", "101%"):
        with pytest.raises(RecipeError, match="max_bad_files"):
            load_recipe(str(site.top / "r.yaml"), [f"run.max_bad_files={written}"])
