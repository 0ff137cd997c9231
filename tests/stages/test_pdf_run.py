"""PDFs in a real run with real child processes: a crash in OCR costs one document, and a run over files of every kind
ends well."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.conftest import shared_data
from tests.stages.test_extract_pdf import lines, pdf
from tests.stages.test_pdf_ocr import PROSE, scanned, tesseract

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]

#: dies by the width of the picture, and counts its deaths at NOTES, where its confined worker may write; of programs it
#: has the shell alone
ENGINE = """#!/bin/sh
[ "$1" = --list-langs ] && { printf 'List of available languages in "%s/" (1):\\neng\\n' "${0%/*}"; exit; }
read magic width height most
case $width in
  1500) echo cpu >>NOTES/deaths; while :; do :; done;;
  1400) echo crash >>NOTES/deaths; kill -SEGV $$;;
  1300) [ -e NOTES/killed ] || { : >NOTES/killed; kill -KILL $$; };;
esac
printf '5\\t1\\t1\\t1\\t1\\t1\\t9\\t9\\t50\\t20\\t90\\tseen\\n'
"""


def rows(folder: Path) -> list[dict]:
    parts = sorted(map(str, folder.glob("part-*.parquet")))
    return ds.dataset(parts).to_table().to_pylist() if parts else []


def run(folder: Path, store: str, step: str, workers: int = 1) -> Path:
    recipe = folder / "r.yaml"
    recipe.write_text(f"version: 1\nsources: {{files: {{read: pdf, path: in}}}}\n"
                      f"datasets: {{papers: {{from: files, steps: [{{pdf: {step}}}]}}}}\n")
    run_recipe(load_recipe(str(recipe)), str(folder / store), make_backend=make_backend("process", workers, None))
    return folder / store


def test_what_ocr_dies_of_costs_its_document_and_is_in_the_log(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    engine = tmp_path / "bin" / "tesseract"
    notes = tmp_path / "store" / "objects"
    notes.mkdir(parents=True)
    engine.write_text(ENGINE.replace("NOTES", str(notes)), encoding="utf-8")
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "bin" / "eng.traineddata").touch()
    monkeypatch.setenv("PATH", f"{engine.parent}:{os.environ['PATH']}")
    (tmp_path / "in").mkdir()
    scan = scanned(pdf(lines(*PROSE)))
    for name, width in {"busy": 540, "crash": 504, "killed": 468, "fine": 432, "well": 432}.items():
        data = scan.replace(b"600 800", b"%d 800" % width)
        assert data != scan
        (tmp_path / "in" / f"{name}.pdf").write_bytes(data)
    store = run(tmp_path, "store", "{ocr: tesseract, ocr_cpu_s: 2}")
    kept = {row["locator"]["file"]: row["text"] for row in rows(store / "datasets/papers")}
    assert kept == {f"{name}.pdf": "seen" for name in ("killed", "fine", "well")}
    assert {row["file"]: row["reason"] for row in rows(store / "quarantine/papers")} == {
        "busy.pdf": "cpu_limit", "crash.pdf": "crash:SIGSEGV"}
    deaths = Counter((notes / "deaths").read_text().split())
    assert deaths == {"cpu": 2, "crash": 2}                       # in the partition, and alone
    [record] = [r for r in Log.read(Store(store)).records() if r.node == "papers"]
    assert sorted(q["reason"] for q in record.quarantine) == ["cpu_limit", "crash:SIGSEGV"]


@tesseract
def test_hard_files_end_as_text_or_reason(tmp_path):
    (tmp_path / "in").symlink_to(shared_data("pdf", "hard"))
    store = run(tmp_path, "store", "{ocr: tesseract, ocr_pages: 1}", workers=2)
    kept = rows(store / "datasets/papers")
    ends = Counter(row["reason"] for folder in ("dropped", "quarantine") for row in rows(store / folder / "papers"))
    assert len(kept) + sum(ends.values()) >= 130 and all(row["text"] for row in kept)
    assert set(ends) <= {"not_pdf", "pdf_no_text", "pdf_encrypted", "pdf_damaged", "pdf_too_large"}, ends
    assert sum("o" in json.loads(row["meta"])["pdf_routes"] for row in kept) >= 3


def test_any_number_of_workers_gives_the_same(tmp_path):
    """Files of many kinds, in other partitions, after other files, beside others."""
    (tmp_path / "in").symlink_to(shared_data("pdf", "docling"))
    one, two = (run(tmp_path, f"store{workers}", "{}", workers) for workers in (1, 2))
    assert dataset_hash(Store(one), "papers") == dataset_hash(Store(two), "papers")
