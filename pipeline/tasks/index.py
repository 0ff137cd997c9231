"""Index of a big input file: where it can be split at record boundaries, found by reading it once (contracts §2)."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

from pipeline.engine.task import Counters, Cursor, Inputs, Out
from pipeline.recipe.code import planned_reader


class Index:
    """args: reader {name, key, config}, file ($file), target (uncompressed bytes a split should hold).

    Writes `splits.json`: a list of {start, stop, ordinal, records, bytes}, or null when the file cannot be split.
    """

    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        reader = planned_reader(inputs.store, args["reader"])
        local = inputs.fetch(args["file"], partial(reader.needs, None))
        splits = reader.splits(local, args["file"]["$file"], args["target"])
        doc = None if splits is None else [dataclasses.asdict(s) for s in splits]
        Path(out.path("splits.json")).write_text(json.dumps(doc, sort_keys=True), encoding="utf-8")
        out.note("splits.json", rows=len(splits or ()))
        return {"files": 1, "unsplittable": int(splits is None), "records": sum(s.records for s in splits or ())}
