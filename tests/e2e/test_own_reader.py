"""The example reader of docs/texts.md and the datatrove blocks of docs/filters.md, taken from the pages: they run. A
user's own readers are refused, keyed, split and checked in the same way as filters."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from pipeline.cli.app import run_command
from pipeline.recipe import RecipeError, load_recipe
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.e2e.test_same_bytes import ROOT

TABLE = "answer\tasker\tvotes\nIt is so.\tann\t3\n\tbob\t5\nNobody knows.\tcyd\t1\nBecause of the tides.\tdan\t2\n"


def blocks(page: str, title: str) -> dict[str, str]:
    """Return the code blocks of a section of a page, as {language: block}."""
    text = (Path(ROOT) / "docs" / page).read_text(encoding="utf-8")
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    return dict(re.findall(r"^```(\w+)\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL))


def arguments(site: Path, line: str) -> list[str]:
    """Split a command line of the page into arguments. Names of files become paths below `site`."""
    words = shlex.split(line)
    assert words[0] == "tokenmill"
    return [str(site / word) if word in ("recipe.yaml", "store") else word for word in words[1:]]


def rows(site: Path, kind: str = "datasets") -> list[dict]:
    parts = sorted(map(str, (site / "store" / kind / "kept").glob("part-*.parquet")))
    return sorted(ds.dataset(parts).to_table().to_pylist(), key=lambda row: row.get("text") or row["reason"])


@pytest.fixture
def site(tmp_path) -> Path:
    code = blocks("texts.md", "Your own reader")
    (tmp_path / "my_readers.py").write_text(code["python"], encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(code["yaml"], encoding="utf-8")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.tsv").write_text(TABLE, encoding="utf-8")
    (tmp_path / "tables" / "a.txt").write_text("no table", encoding="utf-8")
    return tmp_path


def test_the_reader_of_the_page_runs(site, capfd):
    run, inspect = blocks("texts.md", "Your own reader")["sh"].splitlines()
    assert run_command(arguments(site, run.replace(" --allow-custom-stages", ""))) == 2
    assert "--allow-custom-stages" in capfd.readouterr().err
    assert run_command([*arguments(site, run), "--quiet", "--backend", "process", "--workers", "1"]) == 0
    assert [(r["text"], json.loads(r["meta"]), r["signals"]["votes"]) for r in rows(site)] == [
        ("Because of the tides.", {"asker": "dan"}, 2.0), ("It is so.", {"asker": "ann"}, 3.0)]
    assert [r["text"] for r in rows(site, "dropped")] == ["Nobody knows."]
    assert [r["reason"] for r in rows(site, "quarantine")] == ["missing_text"]
    assert run_command([*arguments(site, inspect), "--json", "-n", "0"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 2


@pytest.fixture(autouse=True)
def fresh_modules():
    """Forget the module with the reader after each test, because every test writes its own file of the same name."""
    yield
    sys.modules.pop("my_lines", None)


def run(site: Path, *more: str) -> int:
    return run_command(["run", str(site / "recipe.yaml"), "--store", str(site / "store"), "--backend", "inline",
                        "--quiet", "--allow-custom-stages", *more])


def keys(site: Path) -> set[str]:
    return {record.key for record in Log.read(Store(site / "store")).records()}


SPLITTING = '''
import os

from stages.document import Document, document_id
from stages.read.reader import Reader, Split, locator


class Lines(Reader):
    """One document a line; cut after every line."""

    name = "lines"
    suffixes = (".lines",)

    def read(self, local, slice):
        with open(local, "rb") as file:
            file.seek(slice.start)
            data = file.read(None if slice.stop is None else slice.stop - slice.start)
        for n, line in enumerate(data.splitlines(), slice.ordinal):
            yield {given}

    def splits(self, local, path, target):
        with open(local, "rb") as file:
            ends = [0]
            for line in file:
                ends.append(ends[-1] + len(line))
        return [Split(a, b, n, 1, b - a) for n, (a, b) in enumerate(zip(ends, ends[1:]))]
'''
GIVEN = 'Document(document_id(slice.source, slice.path, "", n), line.decode(), source=slice.source, meta={"n": n})'
RECIPE = """
version: 1
code: [./my_lines.py]
sources: {lines: {read: "my_lines:Lines", path: "."}}
datasets: {kept: {from: lines}}
run: {partition: 64, max_error_rate: 100%}
"""


def lines(site: Path, given: str) -> None:
    (site / "my_lines.py").write_text(SPLITTING.replace("{given}", given))
    (site / "recipe.yaml").write_text(RECIPE)
    (site / "a.lines").write_text("".join(f"line {i} {'x' * 60}\n" for i in range(6)))


def test_big_files_are_cut_and_a_changed_reader_reads_again(tmp_path):
    lines(tmp_path, GIVEN)
    assert run(tmp_path) == 0
    assert [json.loads(r["meta"])["n"] for r in rows(tmp_path)] == list(range(6))
    assert len(list((tmp_path / "store" / "datasets" / "kept").glob("*.parquet"))) == 6
    before = keys(tmp_path)
    assert run(tmp_path) == 0 and keys(tmp_path) == before, "an unchanged reader was run again"
    lines(tmp_path, GIVEN.replace('"n": n', '"n": -n'))
    sys.modules.pop("my_lines")                          # a command of its own would import the file as it is now
    assert run(tmp_path) == 0
    assert sorted(json.loads(r["meta"])["n"] for r in rows(tmp_path)) == list(range(-5, 1))
    assert len(keys(tmp_path) - before) == 7, "its index and its six parts are new"


#: what a reader gives in place of a document, and what its quarantine then says
WRONG = [("line", "the reader gave a bytes"),
         ('Document("x", "t")', "32 hexadecimal characters"),
         (GIVEN.replace("line.decode()", "line"), "set text to a bytes"),
         (GIVEN.replace('{"n": n}', '{"n": line}'), "not JSON serializable"),
         (GIVEN[:-1] + ', signals={"new": 1.0})', "a signal 'new' that its `signals` do not name")]


def test_what_a_reader_gives_is_checked(tmp_path):
    gives = ", ".join(f"{n}: lambda: {wrong}" for n, (wrong, _) in enumerate(WRONG))
    lines(tmp_path, f"{{{gives}}}.get(n, lambda: {GIVEN})()")
    assert run(tmp_path) == 0
    assert [json.loads(r["meta"])["n"] for r in rows(tmp_path)] == [5]
    bad = rows(tmp_path, "quarantine")
    assert len(bad) == len(WRONG) and all(r["reason"].startswith("error:") for r in bad)
    for _, said in WRONG:
        assert sum(said in r["detail"] for r in bad) == 1, said


@pytest.mark.parametrize(("named", "said"), [
    ("my_lines:Nothing", "names no reader; write 'module:Class'"), ("my_lines:os", "names no reader"),
    ("nobody_has_this:Lines", "name the file under `code:`")])
def test_what_is_no_reader_is_refused(tmp_path, named, said):
    lines(tmp_path, GIVEN)
    (tmp_path / "my_lines.py").rename(tmp_path / "my_other_lines.py")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("my_lines.py", "my_other_lines.py").replace("my_lines:Lines",
                                                                                named.replace("my_l", "my_other_l")))
    with pytest.raises(RecipeError, match=re.escape(said)):
        load_recipe(recipe, allow_custom=True)


def test_the_blocks_of_datatrove_on_the_page_run(tmp_path, capfd):
    code = blocks("filters.md", "Blocks of datatrove")
    (tmp_path / "recipe.yaml").write_text(code["yaml"], encoding="utf-8")
    good = "The tide is what the moon does to the sea, and that is why it has to come and go with her."
    (tmp_path / "answers.csv").write_text(
        f'id,answer\n1,"{good}"\n2,"Lorem ipsum dolor sit amet, and so on, as the printers have it."\n3,Too short.\n'
        f'4,"{good.replace("what", "whatâ€™s")}"\n', encoding="utf-8")
    line, inspect = code["sh"].splitlines()
    assert run_command([*arguments(tmp_path, line), "--backend", "inline", "--quiet"]) == 0
    assert [r["text"] for r in rows(tmp_path)] == [good, good.replace("what", "what’s")]
    assert [r["reason"] for r in rows(tmp_path, "dropped")] == ["regex_filter", "gopher_short_doc"]
    capfd.readouterr()
    assert run_command([*arguments(tmp_path, inspect), "--json", "-n", "0"]) == 0
    assert [json.loads(json.loads(row)["meta"])["id"] for row in capfd.readouterr().out.splitlines()] == ["2"]
