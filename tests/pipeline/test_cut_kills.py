"""The steps `repeats` and `substring` give the same bytes when a worker is killed in each of their waves."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.engine.backends.local import ProcessBackend
from pipeline.engine.messages import Work
from pipeline.engine.worker.job import Job
from pipeline.engine.worker.process import ChildProcess
from pipeline.recipe import load_recipe
from pipeline.run import run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store

STEPS = {"repeats": "{unit: sentence, min_unit_chars: 20, min_chars: 20}", "substring": "{length: 40, min_chars: 20}"}
WAVES = {"repeats": ("map", "reduce", "slices"),
         "substring": ("seeds", "shared", "windows", "first", "runs", "check", "slices")}
RECIPE = """
version: 1
sources: {{web: {{read: text, path: web/*.txt}}}}
datasets: {{cut: {{from: [web], steps: [{{{step}: {settings}}}]}}}}
run: {{partition: 2KB}}
"""


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    top, draw = tmp_path_factory.mktemp("kills"), random.Random(8)
    words = [f"wörd{n}" for n in range(300)]
    shared = [" ".join(draw.choices(words, k=9)) + "." for _ in range(6)]
    (top / "web").mkdir()
    for n in range(12):
        sentences = [draw.choice(shared) if draw.random() < 0.5 else " ".join(draw.choices(words, k=8)) + "."
                     for _ in range(12)]
        (top / "web" / f"{n}.txt").write_text(" ".join(sentences))
    return top


@pytest.mark.slow
@pytest.mark.parametrize("step", ["repeats", "substring"])
def test_a_worker_killed_within_each_wave_changes_no_byte(top, tmp_path, step, monkeypatch):
    (top / f"{step}.yaml").write_text(RECIPE.format(step=step, settings=STEPS[step]))

    def run(store: str, make) -> str:
        run_recipe(load_recipe(top / f"{step}.yaml"), str(tmp_path / store), make_backend=make)
        return dataset_hash(Store(tmp_path / store), "cut")

    expected = run("whole", InlineBackend)
    killed: dict[str, str] = {}                      # node of the plan → key of the task whose worker was killed
    given: Counter[str] = Counter()
    give, draw = ChildProcess.give, random.Random(step)

    def give_and_kill(child: ChildProcess, job: Job, order: Work) -> None:
        give(child, job, order)
        spec = job.assignment.spec
        given[spec.key] += 1
        if spec.node not in killed:                  # once in each node, at a moment that the seed draws
            killed[spec.node] = spec.key
            time.sleep(draw.random() * 0.002)
            os.kill(child.pid, signal.SIGKILL)

    monkeypatch.setattr(ChildProcess, "give", give_and_kill)
    assert run("killed", lambda store: ProcessBackend(store, 2, scratch=str(tmp_path))) == expected
    assert {name.rpartition("/")[2].rpartition(":")[2] for name in killed} >= set(WAVES[step]), killed
    assert sum(given[key] > 1 for key in killed.values()) > len(WAVES[step]) / 2      # few had finished before the kill
    rows = list(iter_rows(Store(tmp_path / "killed"), "datasets/cut"))
    assert sum(f"{step}_cut" in row["meta"] for row in rows) > 5
