"""Hostile and broken input, through the command: a clear message, or a counted quarantine, and nothing else is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from tests.corpus import sentences, warc, write_warcs
from tests.pipeline.cli_site import Said

WEB = """
version: 1
sources: {web: {read: warc, path: crawl/*.warc.gz}}
datasets: {extracted: {from: web, steps: [{html: {engine: resiliparse}}]}}
"""


@pytest.fixture
def run(tokenmill, tmp_path) -> Callable[..., Said]:
    """A function that writes a recipe and runs it in this process, with a store in the folder of the test."""
    def call(recipe: str, *extra: str) -> Said:
        (tmp_path / "recipe.yaml").write_text(recipe)
        return tokenmill("run", tmp_path / "recipe.yaml", "--store", tmp_path / "store", "--backend", "inline",
                         "--json", *extra)

    return call


def report(site: Path) -> dict:
    return json.loads((site / "store" / "report.json").read_text())


def test_corrupt_gzip_keeps_what_came_before_and_counts_the_rest(run, tmp_path):
    pages = write_warcs(tmp_path / "crawl", 30, 1)
    file = tmp_path / "crawl" / "crawl-00.warc.gz"
    data = bytearray(file.read_bytes())
    middle = len(warc(pages[:15]))
    data[middle + 30:middle + 60] = b"\xff" * 30
    file.write_bytes(data)
    done = run(WEB)
    assert done.code == 0, done.err
    said = report(tmp_path)
    kept, bad = said["funnel"]["web"][0]["docs"], said["sources"]["web"]["bad"]
    assert kept >= 14 and sum(bad.values()) >= 1
    assert sum(said["datasets"]["extracted"]["quarantined"].values()) == sum(bad.values())


@pytest.mark.parametrize("cut", [0, 10, 3001])
def test_truncated_and_empty_files(run, tmp_path, cut):
    pages = write_warcs(tmp_path / "crawl", 20, 2)
    file = tmp_path / "crawl" / "crawl-01.warc.gz"
    file.write_bytes(file.read_bytes()[:cut])
    done = run(WEB)
    assert done.code == 0, done.err
    said = report(tmp_path)
    assert 10 <= said["funnel"]["web"][0]["docs"] < len(pages)
    assert sum(said["sources"]["web"]["bad"].values()) == 1, "what was lost must be counted"


def test_a_huge_single_line_page_is_cut_by_a_byte_rule(run, tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "huge.html").write_text("<html><body><p>" + "word " * 10_000_000 + "</p></body></html>")
    (tmp_path / "pages" / "fine.html").write_text(
        "<html><body><article><p>" + " ".join(sentences()[:12]) + "</p></article></body></html>")
    done = run(WEB.replace("read: warc, path: crawl/*.warc.gz", "read: html, path: pages"))
    assert done.code == 0, done.err
    found = ds.dataset(tmp_path / "store" / "datasets" / "extracted", partitioning="hive").to_table()
    whole, cut = sorted(found.to_pylist(), key=lambda row: row["signals"]["html_cut_bytes"])
    assert [row["signals"]["html_cut_bytes"] for row in (whole, cut)] == [0, 50_000_033 - 2_000_000]
    assert len(whole["text"]) < 5000 and 1_999_000 < len(cut["text"]) <= 2_000_000


def test_invalid_utf8_text_is_counted_or_kept_but_never_fatal(run, tmp_path):
    (tmp_path / "docs").mkdir()
    rng = random.Random(1)
    (tmp_path / "docs" / "a.txt").write_bytes(bytes(rng.randrange(256) for _ in range(4000)))
    (tmp_path / "docs" / "b.txt").write_text(" ".join(sentences()[:12]))
    done = run("""
version: 1
sources: {docs: {read: text, path: docs}}
datasets: {all: {from: docs, steps: []}}
""")
    assert done.code == 0, done.err
    said = report(tmp_path)
    source = said["sources"]["docs"]
    assert said["datasets"]["all"]["docs"] + sum(source["bad"].values()) + sum(source["skipped"].values()) == 2


@pytest.mark.parametrize(("change", "said", "code"), [
    (("crawl/*.warc.gz", "crawl/nothing-*.warc.gz"), "no file matches 'crawl/nothing-*.warc.gz'", 2),
    (("engine: resiliparse", "engin: resiliparse"), "did you mean 'engine'?", 2),
    (("html", "htlm"), "did you mean 'html'?", 2),
    (("datasets", "dataset"), "did you mean 'datasets'?", 2),
])
def test_a_recipe_with_a_typo_names_place_and_remedy(run, tmp_path, change, said, code):
    write_warcs(tmp_path / "crawl", 2, 1)
    done = run(WEB.replace(*change))
    assert done.code == code
    assert said in done.err
    if "nothing" not in change[1]:
        assert "recipe.yaml:" in done.err
    assert not (tmp_path / "store" / "datasets").exists()


def test_a_store_that_cannot_be_written(run, tmp_path):
    write_warcs(tmp_path / "crawl", 2, 1)
    (tmp_path / "store").write_text("a file stands where the store should be")
    done = run(WEB)
    assert done.code == 1
    assert str(tmp_path / "store") in done.err


@pytest.mark.parametrize(("read", "said"), [
    ("read: jsonl, path: in.json, text: txet", "gave no document, 30 records were read (missing_text × 30)"),
    ("read: warc, path: in.json", "gave no document")])
def test_a_source_that_gives_nothing_is_not_passed_over_in_silence(run, tmp_path, read, said):
    (tmp_path / "in.json").write_text("".join(json.dumps({"text": f"Number {i}"}) + "\n" for i in range(30)))
    done = run(f"version: 1\nsources: {{web: {{{read}}}}}\ndatasets: {{all: {{from: web, steps: []}}}}\n")
    assert done.code == 0, done.err
    [warning] = json.loads(done.out.splitlines()[-1])["warnings"]
    assert "source 'web'" in warning and said in warning and "inspect all --quarantined" in warning


FAILS = """
from stages.stage import Stage


class Fails(Stage):
    name = "fails"

    def process(self, doc):
        raise LookupError("nothing there")
"""


def test_the_command_an_error_names_shows_what_failed(run, tokenmill, tmp_path):
    (tmp_path / "own_failing.py").write_text(FAILS)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"Number {i}"}) + "\n" for i in range(30)))
    done = run("""
version: 1
code: [own_failing.py]
sources: {web: {read: jsonl, path: in.jsonl}}
datasets: {all: {from: web, steps: ["own_failing:Fails"]}}
""", "--allow-custom-stages")
    assert done.code == 1
    assert "30 of 30 documents failed" in done.err and "error:LookupError × 30" in done.err
    assert "`tokenmill inspect all --quarantined`" in done.err
    lost = ds.dataset(sorted(map(str, (tmp_path / "store/quarantine/all").glob("part-*.parquet")))).to_table()
    assert lost["reason"].to_pylist() == ["error:LookupError"] * 30
    assert not (tmp_path / "store/datasets").exists()
    shown = tokenmill("inspect", "all", "--quarantined", "--store", tmp_path / "store", "--limit", "0", "--json")
    assert shown.out.count('"reason": "error:LookupError"') == 30, shown.err
