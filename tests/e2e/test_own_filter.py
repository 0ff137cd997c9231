"""The example filter of docs/filters.md, taken from the page: it runs, and the report and the dropped documents say
what it did."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from pipeline.cli.app import run_command
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.e2e.test_same_bytes import ROOT

TEXTS = {
    "answers": "It is so.\nAnd this is why.\nNothing else is known.",
    "half": "Is it?\nIt is.",
    "questions": "Who was it?\nWhen was it?\nNobody knows.",
    "all": "Where?",
}


def blocks() -> dict[str, list[str]]:
    """Return the code blocks of the section, as {language: blocks}."""
    page = (Path(ROOT) / "docs" / "filters.md").read_text(encoding="utf-8")
    section = re.search(r"^## Your own filter\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    found: dict[str, list[str]] = {}
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL):
        found.setdefault(language, []).append(code)
    return found


@pytest.fixture
def site(tmp_path):
    """A folder with the files that the page shows, and some documents."""
    code = blocks()
    (tmp_path / "my_filters.py").write_text(code["python"][0], encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(code["yaml"][0], encoding="utf-8")
    (tmp_path / "docs.jsonl").write_text("".join(
        json.dumps({"id": name, "text": text}) + "\n" for name, text in TEXTS.items()), encoding="utf-8")
    return tmp_path


def arguments(site: Path, line: str) -> list[str]:
    """Split a command line of the page into arguments. Names of files become paths below `site`."""
    words = shlex.split(line)
    assert words[0] == "tokenmill"
    return [str(site / word) if word in ("recipe.yaml", "store") else word for word in words[1:]]


def run(site: Path, *backend: str) -> set[str]:
    """Run the command of the page, by default with the inline backend. Returns the keys of all records in the log."""
    sys.modules.pop("my_filters", None)                  # each test has its own file of this name
    line = blocks()["sh"][0].splitlines()[0]
    assert run_command([*arguments(site, line), "--quiet", "--backend", *(backend or ["inline"])]) == 0
    return {record.key for record in Log.read(Store(site / "store")).records()}


def rows(folder: Path) -> list[dict]:
    parts = sorted(map(str, folder.glob("part-*.parquet")))
    return sorted(ds.dataset(parts).to_table().to_pylist(), key=lambda row: row["text"])


def ratio(text: str) -> float:
    lines = text.splitlines()
    return sum(line.endswith("?") for line in lines) / max(len(lines), 1)


def limit() -> float:
    found = re.search(r"most: ([\d.]+)", blocks()["yaml"][0])
    assert found is not None
    return float(found[1])


def test_it_is_fifteen_lines():
    [code] = blocks()["python"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    assert not (Path(ROOT) / "my_filters.py").exists()


def test_the_filter_of_the_page_runs_and_says_why(site, capfd):
    line, inspect = blocks()["sh"][0].splitlines()
    assert run_command(arguments(site, line.replace(" --allow-custom-stages", ""))) == 2
    assert "--allow-custom-stages" in capfd.readouterr().err and not (site / "store").exists()
    run(site, "process", "--workers", "1")
    store = site / "store"
    dropped, kept = rows(store / "dropped" / "kept"), rows(store / "datasets" / "kept")
    bad = sorted(text for text in TEXTS.values() if ratio(text) > limit())
    assert len(bad) == 3 and [row["text"] for row in dropped] == bad
    assert {(row["reason"], row["stage"]) for row in dropped} == {("too_many_questions", "Questions")}
    assert [row["text"] for row in kept] == sorted(set(TEXTS.values()) - set(bad))
    for row in dropped + kept:
        assert row["signals"]["questions_ratio"] == ratio(row["text"])

    [said] = json.loads((store / "report.json").read_text(encoding="utf-8"))["datasets"]["kept"]["reasons"]
    assert (said["reason"], said["stage"], said["docs"]) == ("too_many_questions", "Questions", len(bad))
    assert sorted(sample["excerpt"] for sample in said["samples"]) == [" ".join(text.split()) for text in bad]
    [page] = [path.read_text(encoding="utf-8") for path in store.glob("runs/*/report.html")]
    assert "too_many_questions" in page and "Nobody knows." in page
    assert run_command([*arguments(site, inspect), "--json", "-n", "0"]) == 0
    found = [json.loads(row) for row in capfd.readouterr().out.splitlines()]
    assert sorted(row["text"] for row in found) == bad and {row["reason"] for row in found} == {"too_many_questions"}


def test_its_source_is_part_of_what_results_are_known_by(site):
    before = run(site)
    assert run(site) == before, "an unchanged filter was run again"
    with open(site / "my_filters.py", "a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    assert run(site) > before


def test_another_threshold_is_drawn_from_the_stored_signals(site):
    run(site)
    recipe = site / "recipe.yaml"
    recipe.write_text(re.sub(r"most: [\d.]+", "most: 0.7", recipe.read_text()))
    run(site)
    assert [row["text"] for row in rows(site / "store" / "dropped" / "kept")] == ["Where?"]
    [record] = [r for r in Log.read(Store(site / "store")).records() if r.counters.get("replayed")]
    # two documents are read again, about which the two thresholds do not say the same
    assert record.counters["replayed"]["docs"] == len(TEXTS) - 2
