"""The tasks of barriers are written against the protocols in `stages.task`. The engine's classes satisfy these
protocols."""

from __future__ import annotations

import inspect

import pytest

from pipeline.engine import task as engine
from pipeline.engine.shuffle.segment_writer import SegmentWriter
from stages import task
from stages.catalog import load

TASKS = ("cluster:Clusters", "exact:ExactMap", "exact:ExactReduce", "exact:ExactSlices", "lsh:BandMap",
         "lsh:BandReduce", "minhash:MinHashSlices", "stars:Members", "stars:Spread", "stars:Star", "verify:Shingles",
         "verify:Verify")


@pytest.mark.parametrize(("protocol", "built"), [(task.Inputs, engine.TaskInputs), (task.Out, engine.TaskOutputs),
                                                 (task.Segments, SegmentWriter)])
def test_methods_of_the_engine_take_what_the_protocol_says(protocol, built):
    methods = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"]
    assert methods
    for name in methods:
        promised = inspect.signature(getattr(protocol, name)).parameters
        there = inspect.signature(getattr(built, name)).parameters
        for p in promised:
            assert (there[p].kind, there[p].default) == (promised[p].kind, promised[p].default), (name, p)
        assert all(there[p].default is not inspect.Parameter.empty for p in there.keys() - promised.keys()), name


@pytest.mark.parametrize("name", TASKS)
def test_tasks_of_barriers_say_what_they_use(name):
    run = load(f"stages.dedup.{name}").run
    assert inspect.get_annotations(run) == {"inputs": "Inputs", "cursor": "Cursor", "out": "Out", "return": "Counters"}
    assert inspect.get_annotations(run, eval_str=True)["inputs"] is task.Inputs
