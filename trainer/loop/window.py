"""What steps measured, read back from the device together, and told: metrics lines and printed lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trainer.checkpoint import checkpoints as ckpt
from trainer.data.step import Step
from trainer.loop.meters import Meters
from trainer.loop.policy import Seen
from trainer.loop.run import Run
from trainer.loop.worst import WorstRows
from trainer.observe import metrics as log
from trainer.observe import mfu
from trainer.observe.goodput import clock
from trainer.parallel.world import World

#: sums over a step that stand before those of each stream: Σ log²Z, Σ length² of documents, targets left out as
#: repetition
HEAD = 3


class Row(NamedTuple):
    """A step whose numbers are still on the device."""

    step: Step
    tokens: int               # targets after it
    rate: float               # learning rate
    sums: torch.Tensor        # [HEAD + 2 · streams] float64, over all ranks; of each stream nll and counted targets
    norm: torch.Tensor        # of the gradient, 0-d
    verdict: torch.Tensor     # [4] float64, of `Guard.judge`


class Window:
    """Steps whose numbers are still on the device: they are read back together, so that a step never waits for one."""

    def __init__(self, run: Run, streams: list[str], metrics: log.Metrics, meters: Meters, worst: WorstRows,
                 world: World, say: Callable[[str], None]) -> None:
        self.run, self.streams, self.metrics, self.world, self.say = run, streams, metrics, world, say
        self.meters, self.worst, self.rows = meters, worst, list[Row]()
        self.steps = run.curriculum.steps
        self.busy, self.trained = 0.0, 0
        self.restart()

    def restart(self) -> None:
        self.since = time.perf_counter()

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def passed_over(self, step: Step, tokens: int, why: str) -> None:
        """A step that is not performed."""
        self.metrics.write("step", step.number + 1, phase=self.run.curriculum.phases[step.phase].name,
                           samples=step.stop, tokens=tokens, targets=0, loss=None, grad_norm=None, streams={},
                           skipped=True, why=why)
        if (step.number + 1) % self.run.config.log_every == 0:
            self.say(f"step {step.number + 1:>6}/{self.steps}  passed over: {why}")

    def speed(self) -> float | None:
        """Tokens per second of all steps so far, without evaluation and checkpoints."""
        return self.trained / self.busy if self.busy else None

    def flush(self, interrupted: int) -> tuple[int, list[Seen]]:
        """Write a metrics line for each waiting step. Returns the largest `interrupted` (a signal) of all ranks, and
        what the steps were like."""
        waiting, self.rows = self.rows, []
        signalled = int(self.world.max(torch.tensor(interrupted, device=self.world.device)))
        if not waiting:
            self.metrics.flush()                     # lines of steps passed over: a checkpoint may follow
            return signalled, []
        worst = self.world.sum(self.worst.packed())
        steps = torch.stack([torch.cat((r.sums, r.norm.detach().double()[None], r.verdict)) for r in waiting])
        values = torch.cat((steps.flatten(), worst)).tolist()            # here, and nowhere else, the host waits
        seconds = time.perf_counter() - self.since
        self.worst.unpack(values[steps.numel():])
        rows = [values[i:i + steps.shape[1]] for i in range(0, steps.numel(), steps.shape[1])]
        flushed = sum(r.tokens - r.step.tokens for r in waiting)
        flops = sum(mfu.step_flops(self.run.config.model, self.run.vocab, r.tokens - r.step.tokens, int(row[1]))
                    for r, row in zip(waiting, rows))
        skips = sum(row[HEAD + 2 * len(self.streams) + 1] != 0 for row in rows)
        if self.meters.flushed(seconds, len(rows), skips, flushed, flops):
            self.busy, self.trained = self.busy + seconds, self.trained + flushed
        utilisation = self.meters.utilisation(flops, seconds)
        seen = []
        s = len(self.streams)
        for (step, tokens, rate, *_), row in zip(waiting, rows):
            (z, _, repeats), nll, counted, (norm, *verdict) = \
                row[:HEAD], row[HEAD:HEAD + s], row[HEAD + s:HEAD + 2 * s], row[HEAD + 2 * s:]
            targets = sum(counted)
            loss = sum(nll) / targets if targets else None              # None: it read prompts alone
            seen.append(Seen(step.number + 1, loss, norm, verdict[0] != 0, *verdict[1:]))
            line: dict[str, Any] = {
                      "phase": self.run.curriculum.phases[step.phase].name, "samples": step.stop, "tokens": tokens,
                      "targets": int(targets), "loss": finite(loss), "z": finite(z / max(1.0, targets)), "lr": rate,
                      "grad_norm": finite(norm), "tokens_per_s": round(flushed / seconds, 1), "mfu": utilisation,
                      "streams": {name: finite(n / c) for name, n, c in zip(self.streams, nll, counted) if c}}
            if self.run.config.loss.repeats is not None:
                line["repeats"] = int(repeats)
            self.tell(seen[-1], line)
        self.metrics.flush()
        return signalled, seen

    def tell(self, seen: Seen, values: dict[str, Any]) -> None:
        """Write the metrics line of a step, and print one where it is due."""
        head, due = f"step {seen.step:>6}/{self.steps}", self.meters.due(seen.step)
        if seen.bad:
            values |= {"skipped": True, "why": seen.why}
            self.say(f"{head}  left out: {seen.why}")
        if due:
            values |= self.meters.interval(seen.step, values)
        self.metrics.write("step", seen.step, **values)
        self.meters.stepped(seen.step, seen.bad)
        if due:
            said = "none" if seen.loss is None else f"{seen.loss:.4f}"
            left = (self.run.curriculum.tokens - values["tokens"]) * self.busy / max(1, self.trained)
            self.say(f"{head}  {values['phase']:<8} loss {said}  lr {values['lr']:.2e}  norm {seen.norm:.2f}  "
                     f"{self.meters.tell(seen.step, values)}" + (f"  left {clock(left)}" if left else ""))
            self.worst.write()


def finite(x: float | None) -> float | None:
    """JSON has no infinities."""
    return x if x is not None and math.isfinite(x) else None


def diverged(run: Run, step: int, seen: str) -> str:
    """What to say when numbers are no longer numbers."""
    last = ckpt.latest(run.out / "checkpoints")
    return (f"step {step}: {seen}: training has diverged. "
            + (f"{last.folder.parent} is sound; " if last else "There is no checkpoint yet; ")
            + "give the phases from there on a lower rate (tokenmill train edit, lr: {peak: …}); or lower "
            "train.optimizer.lr or lengthen the warm-up, and start with another --out")
