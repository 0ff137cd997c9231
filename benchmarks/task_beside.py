"""By how much does the scoring of checkpoints on tasks delay the steps of a training beside it?

    python -m benchmarks.task_beside DATA [--tasks T,…] [--steps N] [--one-core] [--no-pace]

DATA is the folder of the tasks. A model of about half a million parameters trains on one core, and `tokenmill train
eval --follow` scores its checkpoints on another; with --one-core both have the same one. The texts of the training are
random words.

Without --one-core, the process is paused and continued every five steps, whatever it costs: each pair of neighbouring
blocks gives a ratio of the medians of their steps, and the median of these ratios is the delay. So a load of the
machine by others, which lasts longer than a few steps, changes both sides alike. With --one-core, the trainer's own
pace decides when the process runs (--no-pace: it always runs), and the delay is the mean time of all steps beside that
of the steps during which it was paused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.trainer.evaluation import word_run  # noqa: E402
from trainer.loop import task_watcher  # noqa: E402
from trainer.loop.pace import Pace  # noqa: E402
from trainer.loop.run import open_run  # noqa: E402
from trainer.loop.train import train  # noqa: E402
from trainer.parallel.world import world  # noqa: E402

BLOCK = 5
MODEL = {"layers": 3, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 384}
#: (did the process run?, seconds) of every step that was measured
STEPS: list[tuple[bool, float]] = []


class Recorded(Pace):
    """The trainer's pace, which notes the steps."""

    def add(self, shape: Any, seconds: float, steps: int) -> bool:
        STEPS.append((self.runs, seconds / steps))
        return super().add(shape, seconds, steps)


class Alternating(Recorded):
    def add(self, shape: Any, seconds: float, steps: int) -> bool:
        super().add(shape, seconds, steps)
        self.runs = len(STEPS) // BLOCK % 2 == 1
        return self.runs


class Running(Recorded):
    def add(self, shape: Any, seconds: float, steps: int) -> bool:
        super().add(shape, seconds, steps)
        self.runs = len(STEPS) % 50 >= 10
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
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--no-pace", action="store_true")
    options = parser.parse_args()
    first, *others = sorted(os.sched_getaffinity(0))
    if not others and not options.one_core:
        sys.exit("needs two cores; give --one-core on a machine with one")
    import torch

    import trainer.loop.train as loop

    torch.set_num_threads(1)
    pace: type[Recorded] = Alternating
    if options.one_core:
        pace = Running if options.no_pace else Recorded
    task_watcher.Pace = pace  # type: ignore[misc]
    Pinned.core = first if options.one_core else others[0]
    loop.TaskWatcher = Pinned  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        tasks = {"every": 10, "tasks": options.tasks.split(","), "data": str(options.data.absolute())}
        run = word_run(Path(folder), model=MODEL, total=1024 * options.steps, sequence=256, batch=1024,
                       evaluate={"every": 10 ** 6, "tasks": tasks}, checkpoint={"every": 10, "keep": 3})
        os.sched_setaffinity(0, {first})
        with world("cpu") as here:
            train(open_run(str(run), None, None, []), here, options.steps - 1, lambda _text: None)
        scored = len({row["step"] for row in task_watcher.score_rows.read_rows(run / "train")})
    print(json.dumps({**(report_blocks() if not options.one_core else report_means()), "checkpoints_scored": scored}))


def report_blocks() -> dict[str, Any]:
    steps = STEPS[20:]                                               # until the first checkpoint nothing is scored
    blocks = [[seconds for _, seconds in steps[i:i + BLOCK]] for i in range(0, len(steps) - BLOCK + 1, BLOCK)]
    runs = [steps[i * BLOCK + BLOCK // 2][0] for i in range(len(blocks))]
    ratios = [median(b) / median(a) if after else median(a) / median(b)
              for (a, b), (_, after) in zip(pairwise(blocks), pairwise(runs))]
    low, _, high = quantiles(ratios, n=4)
    return {"pairs": len(ratios), "step_s": round(median(s for ran, s in steps if not ran), 4),
            "delay": round(median(ratios) - 1, 4), "quartiles": [round(low - 1, 4), round(high - 1, 4)]}


def report_means() -> dict[str, Any]:
    steps = STEPS[20:]
    paused = [seconds for ran, seconds in steps if not ran]
    running = [seconds for ran, seconds in steps if ran]
    return {"steps": len(steps), "ran_in": round(len(running) / len(steps), 3), "paused_s": round(fmean(paused), 4),
            "running_s": round(fmean(running), 4) if running else None,
            "delay": round(fmean(s for _, s in steps) / fmean(paused) - 1, 4)}


if __name__ == "__main__":
    main()
