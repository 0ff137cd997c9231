"""A recipe that reads token files from a bucket, and whose store is in a bucket, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.engine.driver.endings import TaskFailed
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from tests.tokenizer.exports import tree
from tokenizer.byte_level import byte_level_json
from tokenizer.export.export import export
from tokenizer.shards.reader import ShardSet

OLD = """version: 1
sources: {texts: {read: text, path: "texts/*.txt"}}
datasets: {all: {from: texts}}
tokenizer: {kind: bytes}
shards: {old: {from: all, longest: 16, val: 0%}}
"""
RECIPE = """version: 1
sources:
  texts: {read: text, path: "texts/*.txt"}
  old: {read: tokens, path: PATH, format: megatron, tokenizer: bytes.json}
datasets: {all: {from: texts}}
tokenizer: {kind: bytes}
shards: {old: {from: old, longest: 16, val: 20%}}
"""


def run(folder: Path, recipe: str, store: str) -> Store:
    (folder / "recipe.yaml").write_text(recipe)
    run_recipe(load_recipe(folder / "recipe.yaml"), store, make_backend=make_backend("process", 1, None), report=False)
    return Store(store)


@pytest.mark.slow
def test_token_files_in_a_bucket_give_the_shards_that_those_on_a_disk_give(bucket, tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(f"text {i} " * (i + 1))
    (tmp_path / "bytes.json").write_text(byte_level_json())
    run(tmp_path, OLD, str(tmp_path / "old"))
    export(ShardSet(tmp_path / "old/shards/old/split=train"), "megatron", tmp_path / "files", False)
    there = Store(f"{bucket}/files")
    for path, data in tree(tmp_path / "files").items():
        there.write(path, data)
    local = run(tmp_path, RECIPE.replace("PATH", "files"), str(tmp_path / "store"))
    remote = run(tmp_path, RECIPE.replace("PATH", f"{bucket}/files"), f"{bucket}/store")
    names = sorted(local.list("shards"))
    assert sorted(remote.list("shards")) == names and len(names) > 10
    assert [remote.read(name) for name in names] == [local.read(name) for name in names]
    [index] = [path for path in there.list("") if path.endswith(".idx")]
    there.write(index, there.read(index)[:-8])
    with pytest.raises(TaskFailed, match=f"{bucket}/files/{index}"):
        run(tmp_path, RECIPE.replace("PATH", f"{bucket}/files"), f"{bucket}/store")
