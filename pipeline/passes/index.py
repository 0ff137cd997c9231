"""Finds out how the files of a source can be divided among tasks: which pieces of a big file can be read separately,
and which files must be read together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from pipeline.base.errors import TokenmillError
from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs
from pipeline.passes.reading import fetch, to_blame_file
from pipeline.recipe.code import planned_reader
from pipeline.store.records import Counters


class Index:
    """Finds the splits of a big input file: pieces that different tasks can read. args: reader {name, key, config},
    file ($file), target (uncompressed bytes per split).

    Writes `splits.json`: a list of {start, stop, ordinal (number of the first record in the file), records, bytes}, or
    null if the file cannot be split. A file that its reader cannot read is not split either, and is counted as
    `unreadable`. The pass that reads the file later reports what is wrong with it.
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


class ListUnits:
    """Finds which files of a source must be read together. args: reader {name, key, config}, files [$file].

    Writes `units.json`: a list of lists of paths (`Reader.units`). If the reader refuses the files, for example because
    one lacks a file that belongs to it, the run ends with the reader's error.
    """

    name = "list_units"
    version = 1
    sets_up = True

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> Counters:
        reader = planned_reader(inputs.store, inputs.args["reader"])
        inputs.confine(())
        files = {arg["$file"]: arg for arg in inputs.args["files"]}
        root = inputs.args["files"][0]["root"]
        try:
            units = reader.units(root, list(files), lambda path: inputs.fetch(files[path]))
        except TokenmillError as e:
            e.args = tuple(str(arg).replace(str(Path(root)), root) for arg in e.args)        # s3:/ is s3://
            raise
        Path(out.path("units.json")).write_text(json.dumps(units), encoding="utf-8")
        out.note("units.json", rows=len(units))
        return {"files": len(files), "unsplittable": 0, "unreadable": 0, "records": 0}
