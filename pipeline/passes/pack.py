"""Packs the documents of training shards into rows (training samples of one length), as `tokenizer.shards.packing`
describes. `PackShard` packs those of one shard; the shard itself stays as it is. `pipeline.plan.tokens` calls
`pack_drafts`, and at the end of a run `pipeline.run` calls `publish_packed`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.store.dataset import link_committed
from pipeline.store.fs import Store
from pipeline.store.records import Counters
from stages.barrier import TaskDraft, TaskResult
from tokenizer.shards.layout import ENDS
from tokenizer.shards.packed import MANIFEST, PackedShard, Packing, file_name
from tokenizer.shards.packing import pack

PACK = "pipeline.passes.pack:PackShard"


class PackShard:
    """Packs the documents of one training shard into rows (training samples of one length). args: ends ($ref), index
    (of the shard), longest (targets per row). Writes the file rows and the file pack.json, which holds the manifest's
    entry about the rows (numbers of documents, rows and tokens). Memory: the documents of one block."""

    name = "pack_shard"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        facts = pack(out.path("rows"), np.memmap(inputs.fetch(args["ends"]), ENDS, "r"), args["longest"])
        with open(out.path("pack.json"), "w", encoding="utf-8") as f:
            json.dump({"index": args["index"], **facts}, f, sort_keys=True)
        out.note("rows", rows=facts["rows"])
        return {**{name: facts[name] for name in ("documents", "longer", "pieces", "rows", "tokens")},
                "padding": facts["rows"] * (args["longest"] + 1) - facts["tokens"]}


#: the split of a shard (train or val) and its number in the split
ShardPlace = tuple[str, int]


def pack_drafts(places: Sequence[ShardPlace], assembled: Sequence[TaskResult], longest: int) -> list[TaskDraft]:
    """Returns the PackShard tasks, one for each shard of the split train that has documents. `places` are the splits
    and numbers of a stream's shards, and `assembled` the results of the tasks that wrote them, in the same order.
    `longest` is the number of targets in a row."""
    return [TaskDraft(PACK, {"ends": result.files["ends"], "index": index, "longest": longest},
                      result.files["ends"]["bytes"], f"pack shard {index}", memory_mb=700)
            for (split, index), result in zip(places, assembled, strict=True)
            if split == "train" and result.counters["docs"]]


def publish_packed(store: Store, train: Mapping[str, Any], longest: int, packed: Sequence[TaskResult],
                   check_lease: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Link the packed rows of a published shard set beside its shards. Their manifest is written to two files: to one
    whose name contains its hash, and to the current manifest, `packed.json`. `train` describes the set, as
    `publish_shards` returns it. `check_lease` (`Log.check_lease`) raises if another driver has taken over the store.

    If `packed` is empty, `packed.json` of rows published earlier is removed. The rows themselves stay, because older
    curricula may name them.

    Returns what is to be added to `train`: {} or {"packing": {sha256 (of the packed rows), longest, rows, filled
    (targets that are not padding)}}.
    """
    folder = train["path"]
    check_lease()
    if not packed:
        if store.exists(f"{folder}/{MANIFEST}"):
            store.remove(f"{folder}/{MANIFEST}")
        return {}
    files = []
    for result in packed:
        ref = result.files["pack.json"]
        facts = json.loads(store.read_checked(ref["$ref"], ref["sha256"]))
        files.append(PackedShard(**facts, file=file_name(facts["index"], facts["sha256"])))
        link_committed(store, result.files["rows"]["$ref"], f"{folder}/{files[-1].file}")
    packing = Packing(train["sha256"], longest, tuple(sorted(files, key=lambda file: file.index)))
    for name in (packing.name, MANIFEST):
        store.write(f"{folder}/{name}", packing.dumps().encode())
    return {"packing": packing.facts()}
