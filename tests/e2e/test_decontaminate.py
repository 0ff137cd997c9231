"""A run with the step `decontaminate`: which documents it finds, the evidence, the counters, and which tasks become
stale when an evaluation set changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from pipeline.cli.app import run_command
from pipeline.report.schema import Report

RECIPE = """
version: 1
sources:
  pages: {read: jsonl, path: pages/*.jsonl}
datasets:
  clean:
    from: pages
    steps:
      - decontaminate: {sets: {mills: evals}, action: ACTION}
"""
QUESTION = "What did the miller of Aldham paint green on a Sunday in the spring of 1893?"


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "evals").mkdir()
    (tmp_path / "pages").mkdir()
    (tmp_path / "evals" / "test.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    for part in range(3):
        rows = [{"text": f"Page {part} {i}. " + (f"They ask: {QUESTION.upper()} – Größe." if i % 4 == 1 else "Calm."),
                 "url": f"https://example.org/{part}/{i}"} for i in range(8)]
        (tmp_path / "pages" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(site: Path, action: str, store: str, *options: str) -> dict[str, list[dict[str, Any]]]:
    (site / "recipe.yaml").write_text(RECIPE.replace("ACTION", action))
    assert run_command(["run", str(site / "recipe.yaml"), "--store", str(site / store), "--quiet", *options]) == 0
    return {kind: sorted(ds.dataset(site / store / kind / "clean").to_table().to_pylist(), key=lambda row: row["id"])
            for kind in ("datasets", "dropped") if (site / store / kind / "clean").is_dir()}


def test_documents_with_items_are_dropped_with_evidence(site):
    rows = run(site, "drop", "store", "--backend", "inline")
    assert len(rows["datasets"]) == 18 and not any("miller" in row["text"].lower() for row in rows["datasets"])
    assert {(row["reason"], row["stage"]) for row in rows["dropped"]} == {("contaminated", "decontaminate")}
    for row in rows["dropped"]:
        (evidence,) = json.loads(row["meta"])["contamination"]
        assert (evidence["set"], evidence["row"], evidence["part"], evidence["share"]) == ("mills", 0, "question", 1)
        span = row["text"].encode()[evidence["start"]:evidence["end"]].decode()
        assert span == QUESTION.upper().rstrip("?") and row["url"].startswith("https://example.org/")
    document = json.loads((site / "store" / "report.json").read_text())
    assert document["datasets"]["clean"]["contamination"] == {
        "mills": {"dropped": 6, "cut": 0, "noted": 0, "items": {"question": {"0": 6}}}}
    (list_of_items,) = site.joinpath("store", "runs").rglob("contamination.jsonl")
    assert [json.loads(line) for line in list_of_items.read_text().splitlines()] == [
        {"dataset": "clean", "set": "mills", "row": 0, "part": "question", "documents": 6}]
    Report.model_validate(document)
    html, card = ("".join(path.read_text() for path in site.joinpath("store", "runs").rglob(f"*.{kind}"))
                  for kind in ("html", "md"))
    assert "mills 1 (6 documents dropped, 0 cut, 0 with items that are too short to count)" in html
    assert "held 1 item of mills: 6 documents dropped, 0 cut, 0 with items that are too short to count" in card
    assert "miller of aldham" not in card.lower()


@pytest.mark.parametrize("action", ["drop", "cut"])
def test_inspect_gives_the_ids_for_train_verify(site, capfd, action):
    from trainer.tools.verify import read_ids

    run(site, action, "store", "--backend", "inline")
    capfd.readouterr()
    what = ["--reason", "contaminated"] if action == "drop" else []
    assert run_command(["inspect", "clean", *what, "-n", "0", "--json", "--store", str(site / "store")]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    contaminated = [row for row in rows if row["signals"]["contaminated_words"] >= 3]
    assert len(contaminated) == 6 and len(rows) == (6 if action == "drop" else 24)
    (site / "LIST").write_text("".join(f"{row['id']}\n" for row in contaminated))
    assert read_ids(site / "LIST") == sorted(row["id"] for row in contaminated)


def test_a_run_without_hits_writes_no_list_of_items(site):
    (site / "evals" / "test.jsonl").write_text(json.dumps({"question": "What does nobody on these pages ask?"}) + "\n")
    run(site, "drop", "store", "--backend", "inline")
    assert not list((site / "store").rglob("contamination.jsonl"))


def test_items_are_cut_and_a_changed_set_is_applied(site):
    rows = run(site, "cut", "store", "--backend", "inline")["datasets"]
    assert len(rows) == 24
    assert sorted(row["text"] for row in rows if "contamination" in row["meta"])[0] == \
        "Page 0 1. They ask: ? – Größe."
    (site / "evals" / "test.jsonl").write_text(json.dumps({"question": "What does nobody on these pages ask?"}) + "\n")
    rows = run(site, "cut", "store", "--backend", "inline")["datasets"]
    assert sum(QUESTION.upper() in row["text"] for row in rows) == 6 and not any(
        "contamination" in row["meta"] for row in rows)


@pytest.mark.parametrize("action", ["drop", "cut"])
def test_another_min_words_gives_the_result_of_a_fresh_run(site, action):
    run(site, action, "store", "--backend", "inline")
    fewest = "datasets.clean.steps.0.decontaminate.min_words=20"
    again = run(site, action, "store", "--backend", "inline", "--set", fewest)
    assert again == run(site, action, "fresh", "--backend", "inline", "--set", fewest)
    report, fresh = (json.loads((site / store / "report.json").read_text()) for store in ("store", "fresh"))
    assert report["datasets"] == fresh["datasets"] and len(again["datasets"]) == 24
    assert report["datasets"]["clean"]["contamination"]["mills"] == {
        "dropped": 0, "cut": 0, "noted": 6, "items": {}}


@pytest.mark.slow
def test_partitions_and_processes_change_no_document(site):
    runs = [run(site, "cut", f"store{number}", *options) for number, options in enumerate((
        ("--backend", "inline"), ("--backend", "process", "--workers", "2", "--set", "run.partition=500"),
        ("--backend", "inline", "--set", "run.partition=2KB")))]
    assert runs[0] == runs[1] == runs[2]


def test_a_set_without_the_field_is_refused_before_anything_runs(site, capfd):
    (site / "evals" / "test.jsonl").write_text('{"query": "A secret answer?"}\n')
    (site / "recipe.yaml").write_text(RECIPE.replace("ACTION", "drop"))
    assert run_command(["run", str(site / "recipe.yaml"), "--store", str(site / "store"), "--backend", "inline"]) == 2
    message = " ".join("".join(capfd.readouterr()).split())
    assert "decontaminate.fields" in message and "test.jsonl" in message and "query" in message
    assert "secret" not in message and "Traceback" not in message
