"""Indexes a big input file: one task reads it and records the boundaries at which it can be split."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.reading import fetch, to_blame_file
from pipeline.recipe.code import planned_reader
from pipeline.store.records import Counters


class Index:
    """Finds the splits of a big input file: pieces that different tasks can read. args: reader {name, key, config},
    file ($file), target (uncompressed bytes per split).

    Writes `splits.json`: a list of {start, stop, ordinal, records, bytes}, or null if the file cannot be split. A file
    that its reader cannot read is not split either, and is counted as `unreadable`. The pass that reads the file later
    reports what is wrong with it.
    """

    name = "index"
    version = 1
    sets_up = True

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        args = inputs.args
        reader = planned_reader(inputs.store, args["reader"])
        inputs.confine(())
        splits, unreadable = None, bool(inputs.skip)         # skip: the file has killed a process before
        if not unreadable:
            cursor.reading(0, 0)
            local = fetch(inputs, reader, args["file"], None)
            try:
                splits = reader.splits(local, args["file"]["$file"], args["target"])
            except Exception as e:
                if not to_blame_file(e):
                    raise
                unreadable = True
        cursor.clear()
        doc = None if splits is None else [dataclasses.asdict(s) for s in splits]
        Path(out.path("splits.json")).write_text(json.dumps(doc, sort_keys=True), encoding="utf-8")
        out.note("splits.json", rows=len(splits or ()))
        return {"files": 1, "unsplittable": int(splits is None), "unreadable": int(unreadable),
                "records": sum(s.records for s in splits or ())}
