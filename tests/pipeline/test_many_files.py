"""A source of very many files, or of one huge file: how much memory listing, grouping into partitions, and provenance
take."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.plan.file_list import FileList, SourceFile
from pipeline.plan.inputs import list_source
from pipeline.plan.planner import Planner
from pipeline.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "version: 1\nsources: {s: {read: READER, path: in}}\ndatasets: {d: {from: s, steps: [gopher_quality]}}\n"
#: the peak of Python's memory while folders of files are listed, packed into tasks and noted in inputs.parquet
MEASURED = """
import json, sys, tracemalloc
from pipeline.plan.planner import Planner
from pipeline.plan.provenance import node_ingredients, write_provenance
from pipeline.recipe import load_recipe
from pipeline.store.fs import Store

peaks = []
for site in sys.argv[1:]:                                # the first time, what is imported and cached counts as well
    recipe = load_recipe(f"{site}/r.yaml", [])
    tracemalloc.start()
    planner = Planner(recipe, lambda path, sha256: b"")
    nodes = planner.nodes()
    index = nodes[0].work({})
    assert not list(next(index))
    try:
        index.send([])
    except StopIteration as end:
        splits = end.value
    files = sum(len(spec.args["slices"]) for spec in next(nodes[1].work({"index:s": splits})))
    write_provenance(Store(f"{site}/store"), "run", planner, node_ingredients(planner, nodes), 1)
    peaks.append((files, tracemalloc.get_traced_memory()[1]))
    tracemalloc.stop()
    del planner, nodes, index, splits
print(json.dumps(peaks[1:]))
"""


def write_site(site: Path, reader: str, files: int) -> Path:
    """Write a recipe over `files` empty files, all in one folder."""
    (site / "in").mkdir(parents=True)
    (site / "r.yaml").write_text(RECIPE.replace("READER", reader))
    for i in range(files):
        os.close(os.open(site / "in" / f"{i:06d}.txt", os.O_CREAT))
    return site


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_files(tmp_path):
    sites = [write_site(tmp_path / str(n), "text", n) for n in (1_000, 20_000, 40_000)]
    done = subprocess.run([sys.executable, "-c", MEASURED, *map(str, sites)], cwd=ROOT, check=True, text=True,
                          capture_output=True)
    (few, small), (many, large) = json.loads(done.stdout)
    assert (few, many) == (20_000, 40_000)
    assert (large - small) / (many - few) < 30, "bytes a file: as a Python object it takes more than 300"


def test_a_huge_file_is_indexed_by_one_task_and_planned_without_being_read(tmp_path):
    site = write_site(tmp_path, "jsonl", 0)
    with open(site / "in" / "huge.jsonl", "wb") as f:
        f.truncate(1 << 40)
    planner = Planner(load_recipe(site / "r.yaml", []), lambda path, sha256: b"")
    index, _ = planner.nodes()
    [spec] = next(index.work({}))
    assert spec.weight == planner.source_files("s").bytes == 1 << 40
    assert spec.args["file"]["$file"] == "huge.jsonl"


# -- the list --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(5))
def test_files_are_in_the_order_in_which_python_sorts_their_paths(seed):
    rng = random.Random(seed)
    letters = ["a", "b/", "/", ".", "0", "é", "\uffff", "\U0001f600", "\udcff", "\udc80", " ", "z"]
    paths = ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(3000)]
    files = FileList("/r", ((p, len(p), "1", "", "") for p in paths))
    expected = sorted(SourceFile(p, "/r", len(p), "1") for p in set(paths))
    assert list(files) == expected and len(files) == len(expected)
    assert files.bytes == sum(f.size for f in expected)
    assert files[7] == expected[7] and files[-1] == expected[-1] and files[250:260] == expected[250:260]


def test_a_path_that_two_patterns_name_is_one_file(tmp_path):
    """Also when it changed between two listings of a bucket: its documents would have one id twice."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    assert [f.path for f in list_source("s", ["a", "a/*.txt", "a/x.txt"], base=str(tmp_path))] == ["x.txt"]
    assert list(FileList("/r", [("x", 1, "1", "", ""), ("x", 2, "2", "", "")])) == [SourceFile("x", "/r", 2, "2")]


def test_a_source_without_bytes_or_files_has_a_size():
    assert (len(FileList("/r", [])), FileList("/r", []).bytes) == (0, 0)
