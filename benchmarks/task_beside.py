"""By how much does the scoring of checkpoints on tasks delay the steps of a training beside it?

    python -m benchmarks.task_beside DATA [--tasks T,…] [--steps N] [--one-core] [--unpaced]

DATA is the folder of the tasks. A model of about half a million parameters trains on one core, on random words. A
second process, which runs what `tokenmill train eval --follow` runs, scores its checkpoints on another core; with
--one-core, on the same one.

The steps of the training are divided into blocks. In every second block, the scoring process is paused. In the others,
the trainer's pace decides when it runs; with --unpaced, it always runs. The delay of a block is the median of its steps
over that of the paused block beside it. Other load on the machine usually lasts longer than a block, so it changes both
blocks alike.

Prints the median delay over all pairs of blocks, with the quartiles. `cpu_delay` is the same for the CPU time of the
steps. It shows the delay by shared caches and memory, even on a machine on which other programs compute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.trainer.evaluation import word_run  # noqa: E402
from trainer.loop import task_watcher  # noqa: E402
from trainer.loop.pace import LEAST, Pace  # noqa: E402
from trainer.loop.run import open_run  # noqa: E402
from trainer.loop.train import train  # noqa: E402
from trainer.parallel.world import world  # noqa: E402

#: steps of a block
BLOCK = 20
#: fewest steps: two blocks without a checkpoint, three blocks that make two pairs, and a last one, which may be partial
LEAST_STEPS = 6 * BLOCK
MODEL = {"layers": 3, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 384}
#: (number of the block, did the process run?, seconds, CPU seconds since the step before) of every step
STEPS: list[tuple[int, bool, float, float]] = []


class Blocks(Pace):
    """Decides after each step whether the scoring process runs. In every second block of steps, the trainer's pace
    decides, or the process always runs if `paced` is False. In the other blocks, it is paused."""

    paced, cpu = True, 0.0

    def add(self, shape: Any, seconds: float, steps: int) -> bool:
        block = len(STEPS) // BLOCK
        before, self.cpu = self.cpu, time.process_time()
        STEPS.append((block, self.runs, seconds / steps, self.cpu - before))
        if block % 2 and self.paced:
            super().add(shape, seconds, steps)
        following = len(STEPS) // BLOCK % 2 == 1
        if not following or not self.paced:
            self.runs = following
        elif not block % 2:                                         # the pace goes on where it was
            self.runs = self.measured >= LEAST and self.budget >= 0
        return self.runs


class Pinned(task_watcher.TaskWatcher):
    core = 0

    def start(self) -> None:
        super().start()
        assert self.process is not None
        os.sched_setaffinity(self.process.pid, {self.core})        # it is paused, so it has no threads yet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", type=Path)
    parser.add_argument("--tasks", default="piqa,sciq,openbookqa")
    parser.add_argument("--steps", type=int, default=200, help=f"at least {LEAST_STEPS} (default: 200)")
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--unpaced", action="store_true")
    options = parser.parse_args()
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps {options.steps}: needs at least {LEAST_STEPS}, for two pairs of blocks")
    first, *others = sorted(os.sched_getaffinity(0))
    if not others and not options.one_core:
        sys.exit("needs two cores; give --one-core on a machine with one")
    import torch

    import trainer.loop.train as loop

    torch.set_num_threads(1)
    Blocks.paced = not options.unpaced
    task_watcher.Pace = Blocks  # type: ignore[misc]
    Pinned.core = first if options.one_core else others[0]
    loop.TaskWatcher = Pinned  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), options.steps, options.tasks.split(","), options.data)
        os.sched_setaffinity(0, {first})
        with world("cpu") as here:
            train(open_run(str(run), None, None, []), here, options.steps - 1, lambda _text: None)
        scored = len({row["step"] for row in task_watcher.score_rows.read_rows(run / "train")})
    print(json.dumps({**report(), "checkpoints_scored": scored}))


def make_run(folder: Path, steps: int, tasks: list[str], data: Path) -> Path:
    """Make the run that is trained in the folder `folder`, and return its folder. A model that cannot learn from its
    data has sudden jumps of gradient norms, so the run's `stability` check is turned off: it would end the training."""
    scoring = {"every": 10, "tasks": tasks, "data": str(data.absolute())}
    return word_run(folder, model=MODEL, total=1024 * steps, sequence=256, batch=1024, stability={"sigma": None},
                    evaluate={"every": 10 ** 6, "tasks": scoring}, checkpoint={"every": 10, "keep": 3})


def report() -> dict[str, Any]:
    """Return the figures that are printed. The first two blocks are left out, because there is no checkpoint to score
    yet."""
    blocks: dict[int, list[tuple[bool, float, float]]] = {}
    for block, *step in STEPS[2 * BLOCK:]:
        blocks.setdefault(block, []).append(tuple(step))
    blocks = {block: steps for block, steps in blocks.items() if len(steps) == BLOCK}
    pairs = [(block, other) for block in blocks if block % 2 for other in (block - 1, block + 1) if other in blocks]
    out: dict[str, Any] = {"pairs": len(pairs), "ran_in": round(fmean(
        ran for block in blocks if block % 2 for ran, *_ in blocks[block]), 3)}
    for name, column in (("", 1), ("cpu_", 2)):
        times = {block: median(step[column] for step in steps) for block, steps in blocks.items()}
        low, middle, high = (round(ratio - 1, 4) for ratio in quantiles([times[a] / times[b] for a, b in pairs], n=4))
        out |= {f"{name}step_s": round(median(times[b] for _, b in pairs), 4), f"{name}delay": middle,
                f"{name}quartiles": [low, high]}
    return out


if __name__ == "__main__":
    main()
