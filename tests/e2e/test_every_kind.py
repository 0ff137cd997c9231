"""All readers and extractors in one recipe, up to a curriculum that anneals on post-training records, and to its
materialised rows."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import duckdb
import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from stages.extract.pdf.step import ROUTES
from tests import commands
from tests.e2e.every_kind import write
from tests.e2e.test_same_bytes import command, result
from tests.frozen import hold_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("every_kind")]
OCR = shutil.which("tesseract") is not None
NO_OCR = () if OCR else ("datasets.scan.steps.pdf.ocr=none",)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("every"))


def args(recipe: Path, store: Path, *extra: str) -> list[str]:
    settings = [word for one in NO_OCR for word in ("--set", one)]
    return ["run", str(recipe), "--store", str(store), "--quiet", *settings, *extra]


@pytest.fixture(scope="module")
def store(recipe, tmp_path_factory) -> Path:
    at = tmp_path_factory.mktemp("store")
    run_recipe(load_recipe(recipe, list(NO_OCR)), str(at), make_backend=make_backend("inline", 1, None))
    return at


@pytest.fixture(scope="module")
def expected(store) -> dict[str, str]:
    return result(store)


@pytest.fixture(scope="module")
def report(store) -> dict:
    return json.loads((store / "report.json").read_text())


def rows(store: Path, folder: str, columns: str = "*", where: str = "true") -> list[dict]:
    found = duckdb.sql(f"select {columns} from '{store}/{folder}/part-*.parquet' where {where} order by id")
    return [dict(zip(found.columns, row)) for row in found.fetchall()]


@pytest.mark.skipif(not OCR, reason="no tesseract: the scans are dropped")
def test_what_comes_out_is_what_came_out(store):
    tesseract = subprocess.run(["tesseract", "--version"], capture_output=True, text=True, check=True)
    hold_run("every kind", store, tesseract=tesseract.stdout.split("\n")[0])


# -- what comes out ----------------------------------------------------------------------------------------------------
def test_every_source_comes_through(store, report):
    """Each kind of text as one would train on it, and each that is none under a reason. Without an OCR engine the scan
    is dropped, and the PDF beside it that has a text layer is not."""
    texts: dict[str, list[str]] = {}
    for dataset in ("unique", "post"):
        for row in rows(store, f"datasets/{dataset}", "id, source, text"):
            texts.setdefault(row["source"], []).append(row["text"])
    sources = set(report["names"]["sources"])
    assert set(texts) == sources and report["names"]["final"] == ["unique", "post"]
    assert any("committee" in row["text"] for row in rows(store, "datasets/scan", "id, text")) == OCR
    assert all("\\section" not in t and "secret remark" not in t and "\\frac{1}{2}" in t for t in texts["papers"])
    assert all("Gutenberg" not in t for t in texts["books"]) and all("''" not in t for t in texts["wiki"])
    assert all("```python\nprint(40 + 2)\n```\n\nOutput:\n\n```\n42\n```" in t for t in texts["notebooks"])
    assert [t.count("<file_sep>") for t in texts["repos"]] == [2] and all("def f" in t for t in texts["code"])
    assert all("Home" not in t and "All rights" not in t for t in texts["web"] + texts["saved"])
    reasons = {d: {(r["stage"], r["reason"]) for r in section["reasons"]} for d, section in report["datasets"].items()}
    assert reasons["pages"] == {("html", "no_text"), ("html", "not_html")}
    assert reasons["scan"] >= {("pdf", "pdf_damaged")} | (set() if OCR else {("pdf", "pdf_no_text")})
    assert reasons["pdfs"] == {("pdf", "not_pdf")}
    assert report["sources"]["wiki"]["skipped"] == {"redirect": 1}
    assert report["sources"]["code"]["skipped"] == {"vendored": 1}
    assert report["sources"]["chats"]["bad"] == {"unknown_role": 1}
    [broken] = next(r for r in report["datasets"]["scan"]["reasons"] if r["reason"] == "pdf_damaged")["samples"]
    assert broken["file"] == "broken.pdf" and broken["url"] == ""


def test_pages_of_pdfs_in_the_report(store, report):
    for dataset in ("scan", "pdfs"):
        found = [json.loads(row["meta"]) for folder in ("datasets", "dropped")
                 for row in rows(store, f"{folder}/{dataset}", "id, meta")]
        found = [meta for meta in found if "pdf_routes" in meta]
        routes = Counter("".join(meta["pdf_routes"] for meta in found))
        said = report["datasets"][dataset]["pdf"]
        assert said["pages"] == {name: routes[letter] for letter, name in ROUTES.items()}
        assert said["docs"] == len(found) and said["unread"] == sum("s" in meta["pdf_routes"] for meta in found)
        sure = Counter(c for meta in found for c, r in zip(meta["pdf_confidence"], meta["pdf_routes"]) if r in "to")
        assert said["confidence"] == dict(sorted(sure.items()))
    assert report["datasets"]["scan"]["pdf"]["pages"]["ocr" if OCR else "no_text"] == 2
    assert report["datasets"]["pages"]["pdf"] is None
    [html] = (store / "runs").glob("*/report.html")
    assert "read by OCR 2" in html.read_text() or not OCR


def test_only_answers_are_learned_and_only_while_annealing(store, report):
    pytest.importorskip("torch")
    from tokenizer.load import load_tokenizer
    from tokenizer.mixture.curriculum import Curriculum
    from trainer.data.batches import Data

    assert 0 < report["tokens"]["post"]["targets"] < report["tokens"]["post"]["tokens"]
    [path] = (store / "runs").glob("*/curriculum.json")
    curriculum = Curriculum.load(path)
    data, tokenizer = Data(curriculum, store), load_tokenizer(store / curriculum.tokenizer.path)
    post, first = data.streams.index("post"), None
    for n in range(curriculum.samples):
        batch = data.samples([n])
        if int(batch.stream[0]) == post:
            first = n if first is None else first
            learned = tokenizer.decode([int(t) for t in batch.targets[0] if t >= 0])
            assert "ASKED" not in learned and "Worse" not in learned and "mail.example" not in learned
    assert first is not None and first >= 0.69 * curriculum.samples


def test_rows_are_what_the_trainer_reads(store, tokenmill):
    pytest.importorskip("torch")
    from tokenizer.mixture.curriculum import Curriculum
    from tokenizer.shards.rows import RowSet
    from trainer.data.batches import Data

    [run] = (store / "runs").iterdir()
    done = tokenmill("materialize", run.name, "--store", store, "--backend", "inline")
    assert done.code == 0, done.err
    curriculum = Curriculum.load(run / "curriculum.json")
    data, written = Data(curriculum, store), RowSet(run / "rows-bytes")
    assert len(written) == curriculum.samples
    for n in range(0, curriculum.samples, 7):
        row, batch = written.row(n), data.samples([n])
        assert row.stream == data.streams[int(batch.stream[0])]
        assert row.tokens[:-1].tolist() == batch.tokens[0].tolist()
        learned = [bool(t >= 0) for t in batch.targets[0]]
        starts = {int(b) - 1 for b in row.bounds}                     # the target after an EOS is another document's
        said = [True] * len(learned) if row.counts is None else row.counts.tolist()
        assert [c and i not in starts for i, c in enumerate(said)] == learned


def test_a_sample_leads_back_to_its_page(store):
    """From a number of the order to the document, its address and the file it came from."""
    from tokenizer.mixture.curriculum import Curriculum
    from tokenizer.mixture.order import Order
    from tokenizer.shards.reader import ShardSet

    [path] = (store / "runs").glob("*/curriculum.json")
    curriculum = Curriculum.load(path)
    documents = {row["id"]: row for dataset in ("unique", "post")
                 for row in rows(store, f"datasets/{dataset}", "id, source, locator")}
    seen = set()
    for n in range(curriculum.samples):
        at = Order(curriculum).locate(n, n + 1)
        stream, length = curriculum.streams[int(at.stream[0])], int(at.sequence[0])
        shards = ShardSet(store / stream.train, stream.sha256)
        start = int(at.window[0]) * length
        for span in shards.documents(start, start + length):
            assert documents[span.id]["locator"]["file"]
            seen.add(documents[span.id]["source"])
    assert {"web", "code", "chats", "liked"} <= seen


# -- however it runs ---------------------------------------------------------------------------------------------------
def test_same_bytes_on_ray(recipe, expected, tmp_path):
    done = command("-m", "pipeline.cli", *args(recipe, tmp_path, "--backend", "ray", "--workers", "2",
                                               "--dispatch-seed", "3"), PYTHONHASHSEED="7")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path) == expected


def test_same_bytes_in_other_partitions_after_kills(recipe, expected, tmp_path):
    cut = ("--set", "run.partition=25KB")
    for point, nth in (("partition", 5), ("map", 1), ("commit", 2)):
        died = commands.command("tests.e2e.kill", point, str(nth), *args(recipe, tmp_path, "--backend", "inline", *cut))
        assert died.returncode == -signal.SIGKILL, f"{point}: was not killed: {died.stdout}{died.stderr}"
    done = commands.command("pipeline.cli", *args(recipe, tmp_path, "--backend", "process", "--workers", "2",
                                                  "--dispatch-seed", "2", *cut))
    assert done.returncode == 0, done.stderr
    assert result(tmp_path) == expected


@pytest.mark.parametrize(("setting", "first", "kept"), [
    ("datasets.paper.steps.latex.captions=false", "paper", {"pages", "scan", "pdfs", "book", "made", "post"}),
    ("datasets.pages.steps.html.format=markdown", "pages", {"paper", "scan", "pdfs", "book", "made", "post"}),
    ("sources.liked.template=chatml", "post", {"pages", "paper", "scan", "pdfs", "book", "made", "clean", "unique"}),
])
def test_a_setting_reruns_what_follows_from_it(recipe, store, tokenmill, setting, first, kept):
    settings = [word for one in (*NO_OCR, setting) for word in ("--set", one)]
    done = tokenmill("plan", recipe, "--store", store, "--json", *settings)
    assert done.code == 0, done.err
    states = {node["name"]: node for node in json.loads(done.out)["nodes"]}
    assert states[first]["status"] != "fresh" and all(states[name]["status"] == "fresh" for name in kept), states
    why = tokenmill("plan", recipe, "--store", store, "--why", first, *settings)
    assert why.code == 0 and setting.rpartition(".")[2].partition("=")[0] in why.out, why.out + why.err
