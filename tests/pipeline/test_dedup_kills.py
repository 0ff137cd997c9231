"""Steps against duplicates give the same bytes when a worker is killed in each of their waves."""

from __future__ import annotations

import random
import textwrap
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
from stages.dedup.fragment import Sizes
from stages.dedup.minhash import MinHash

STEPS = {"repeats": "{repeats: {unit: sentence, min_unit_chars: 20, min_chars: 20}}",
         "substring": "{substring: {length: 40, min_chars: 20}}",
         "minhash": "{minhash: {recall: 0.99}}, rehydrate"}
WAVES = {"repeats": ("map", "reduce", "slices"),
         "substring": ("seeds", "shared", "windows", "first", "runs", "check", "slices"),
         "minhash": ("bands", "links", "spread", "star", "clusters", "shingles", "verify", "slices",
                     "documents", "sums_0", "counts")}
RECIPE = """
version: 1
sources: {{web: {{read: text, path: web/*.txt}}}}
datasets: {{cut: {{from: [web], steps: [{steps}]}}}}
run: {{partition: 2KB}}
"""
#: imported by every worker before anything else. A worker whose task has a file in the folder `orders` kills itself at
#: the moment that the file names: before the task, when it names an output, after it, or with its files in the store
HOOK = """
    import os
    import signal
    from pathlib import Path

    from pipeline.engine.worker import attempt

    run, deliver = attempt._run, attempt._deliver

    def die(key, *moments):
        order = Path({orders!r}, key)
        if order.exists() and order.read_text() in moments:
            os.kill(os.getpid(), signal.SIGKILL)

    def run_or_die(task, inputs, cursor, out):
        die(inputs.key, "before")
        path = out.path
        out.path = lambda name: die(inputs.key, "writing") or path(name)
        counters = run(task, inputs, cursor, out)
        die(inputs.key, "writing", "after")
        return counters

    def deliver_or_die(spec, *rest):
        files = deliver(spec, *rest)
        die(spec.key, "delivered")
        return files

    attempt._run, attempt._deliver = run_or_die, deliver_or_die
"""
MOMENTS = ("before", "writing", "after", "delivered")


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    top, draw = tmp_path_factory.mktemp("kills"), random.Random(8)
    words = ["".join(draw.choices("abcdefghijklmnoprstuö", k=5)) for _ in range(300)]
    shared = [" ".join(draw.choices(words, k=9)) + "." for _ in range(6)]
    (top / "web").mkdir()
    for n in range(12):
        sentences = [draw.choice(shared) if draw.random() < 0.5 else " ".join(draw.choices(words, k=8)) + "."
                     for _ in range(12)]
        (top / "web" / f"{n}.txt").write_text(" ".join(sentences))
    for n in range(8):                               # near-duplicates, two of each of four texts
        (top / "web" / f"near{n}.txt").write_text((top / "web" / f"{n % 4}.txt").read_text() + f" Ende {'x' * n}.")
    return top


@pytest.mark.slow
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("step", STEPS)
def test_a_worker_killed_within_each_wave_changes_no_byte(top, tmp_path, step, monkeypatch):
    (top / f"{step}.yaml").write_text(RECIPE.format(steps=STEPS[step]))

    def run(store: str, make) -> str:
        run_recipe(load_recipe(top / f"{step}.yaml"), str(tmp_path / store), make_backend=make)
        return dataset_hash(Store(tmp_path / store), "cut")

    expected = run("whole", InlineBackend)
    monkeypatch.setattr(MinHash, "sizes", Sizes(one_task_edges=0, spread_bytes=300))          # clusters by rounds
    for folder in ("hook", "orders"):
        (tmp_path / folder).mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(textwrap.dedent(HOOK.format(orders=str(tmp_path / "orders"))))
    monkeypatch.syspath_prepend(str(tmp_path / "hook"))
    killed: dict[str, str] = {}                      # node of the plan → key of the task whose worker was killed
    given: Counter[str] = Counter()
    give, draw = ChildProcess.give, random.Random(step)

    def give_with_orders(child: ChildProcess, job: Job, order: Work) -> None:
        spec = job.assignment.spec
        given[spec.key] += 1
        if spec.node not in killed:                  # once in each node, at a moment that the seed draws
            killed[spec.node] = spec.key
            (tmp_path / "orders" / spec.key).write_text(draw.choice(MOMENTS))
        elif killed[spec.node] == spec.key:
            (tmp_path / "orders" / spec.key).unlink(missing_ok=True)
        give(child, job, order)

    monkeypatch.setattr(ChildProcess, "give", give_with_orders)
    assert run("killed", lambda store: ProcessBackend(store, 2, scratch=str(tmp_path))) == expected
    assert {name.rpartition("/")[2].rpartition(":")[2] for name in killed} >= set(WAVES[step]), killed
    assert all(given[key] > 1 for key in killed.values()), "each was killed and run again"
    rows = list(iter_rows(Store(tmp_path / "killed"), "datasets/cut"))
    if step == "minhash":
        assert sum(row["signals"]["dup_count"] > 1 for row in rows) == 4
    else:
        assert sum(f"{step}_cut" in row["meta"] for row in rows) > 5
