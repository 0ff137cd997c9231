"""Collects the metrics of several steps on the device and copies them to the host together. Then writes them to
metrics.jsonl, a line for each step, and prints a line for some of the steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tokenizer.mixture.steps import TrainingStep
from trainer.checkpoint import checkpoints as ckpt
from trainer.loop.high_loss import HighLossRows
from trainer.loop.meters import Meters
from trainer.loop.run import Run
from trainer.loop.stability import StepRecord
from trainer.observe import metrics as log
from trainer.observe import mfu
from trainer.observe.goodput import clock
from trainer.parallel.world import World

#: number of sums at the beginning of `StepNumbers.sums`, before the sums of each stream: Σ log²Z, Σ length² of
#: documents, and the number of targets left out as repetitions
HEAD = 3


class StepNumbers(NamedTuple):
    """The numbers of one step, such as its losses and its gradient norm, while they are still on the device."""

    step: TrainingStep
    tokens: int               # targets read by the end of the step
    rate: float               # learning rate
    sums: torch.Tensor  # [HEAD + 2 · streams] float64, over all ranks; after HEAD each stream's nll, then its targets
    norm: torch.Tensor        # gradient norm, 0-d
    verdict: torch.Tensor     # [4] float64, from `SpikeDetector.judge`


class MetricsBuffer:
    """Collects steps whose numbers (loss, gradient norm, …) are still on the device. The numbers of several steps are
    copied to the host together, so that training does not wait for the device at every step."""

    def __init__(self, run: Run, streams: list[str], metrics: log.Metrics, meters: Meters, high_loss: HighLossRows,
                 world: World, say: Callable[[str], None]) -> None:
        self.run, self.streams, self.metrics, self.world, self.say = run, streams, metrics, world, say
        self.meters, self.high_loss, self.rows = meters, high_loss, list[StepNumbers]()
        self.steps = run.curriculum.steps
        self.busy, self.trained = 0.0, 0
        #: (seconds, steps) of the last flush; None if a step of it compiled
        self.took: tuple[float, int] | None = None
        self.restart()

    def restart(self) -> None:
        self.since = time.perf_counter()

    def add(self, row: StepNumbers) -> None:
        self.rows.append(row)

    def skipped(self, step: TrainingStep, tokens: int, why: str) -> None:
        """Write the metrics line of a step that is skipped without being computed, and print it if the step's number is
        a multiple of `log_every`. `why` is the reason."""
        self.metrics.write("step", step.number + 1, phase=self.run.curriculum.phases[step.phase].name,
                           samples=step.stop, tokens=tokens, targets=0, loss=None, grad_norm=None, streams={},
                           skipped=True, why=why)
        if (step.number + 1) % self.run.config.log_every == 0:
            self.say(f"step {step.number + 1:>6}/{self.steps}  skipped: {why}")

    def speed(self) -> float | None:
        """Return the speed of the training since this process started, in tokens of all ranks per second. If a step
        compiles, all steps that were flushed together with it are left out. None if no step has been measured yet."""
        return self.trained / self.busy if self.busy else None

    def flush(self, interrupted: int) -> tuple[int, list[StepRecord]]:
        """Copy the numbers of all steps in the buffer to the host, write a metrics line for each step (`write` also
        prints some), and empty the buffer. `interrupted` is the number of a signal that this rank has received, or 0.
        Returns the largest `interrupted` of all ranks, and the records of the steps in the buffer. Every rank must call
        this."""
        waiting, self.rows, self.took = self.rows, [], None
        signalled = int(self.world.max(torch.tensor(interrupted, device=self.world.device)))
        if not waiting:
            self.metrics.flush()                     # writes the lines of skipped steps: a checkpoint may follow
            return signalled, []
        high_loss = self.world.sum(self.high_loss.packed())
        steps = torch.stack([torch.cat((r.sums, r.norm.detach().double()[None], r.verdict)) for r in waiting])
        values = torch.cat((steps.flatten(), high_loss)).tolist()            # the only place where the host waits
        seconds = time.perf_counter() - self.since
        self.high_loss.unpack(values[steps.numel():])
        rows = [values[i:i + steps.shape[1]] for i in range(0, steps.numel(), steps.shape[1])]
        flushed = sum(r.tokens - r.step.tokens for r in waiting)
        flops = sum(mfu.step_flops(self.run.config.model, self.run.vocab, r.tokens - r.step.tokens, int(row[1]))
                    for r, row in zip(waiting, rows))
        skips = sum(row[HEAD + 2 * len(self.streams) + 1] != 0 for row in rows)
        if self.meters.flushed(seconds, len(rows), skips, flushed, flops):
            self.busy, self.trained = self.busy + seconds, self.trained + flushed
            self.took = seconds, len(rows)
        utilisation = self.meters.utilisation(flops, seconds)
        records = []
        for pending, row in zip(waiting, rows):
            record, line = self.describe(pending, row, round(flushed / seconds, 1), utilisation)
            self.write(record, line)
            records.append(record)
        self.metrics.flush()
        return signalled, records

    def describe(self, pending: StepNumbers, row: list[float], speed: float,
                 utilisation: float | None) -> tuple[StepRecord, dict[str, Any]]:
        """Turn the numbers of the step `pending` into (record for the stability monitor, metrics line). `row` holds the
        step's numbers after they were copied to the host. `speed` is in tokens per second; `utilisation` is the MFU."""
        step, count = pending.step, len(self.streams)
        z, _, repeats = row[:HEAD]
        nll, counted = row[HEAD:HEAD + count], row[HEAD + count:HEAD + 2 * count]
        norm, *verdict = row[HEAD + 2 * count:]
        targets = sum(counted)
        loss = sum(nll) / targets if targets else None              # None: the step read prompts only
        line: dict[str, Any] = {
            "phase": self.run.curriculum.phases[step.phase].name, "samples": step.stop, "tokens": pending.tokens,
            "targets": int(targets), "loss": finite(loss), "z": finite(z / max(1.0, targets)), "lr": pending.rate,
            "grad_norm": finite(norm), "tokens_per_s": speed, "mfu": utilisation,
            "streams": {name: finite(n / c) for name, n, c in zip(self.streams, nll, counted) if c}}
        if self.run.config.loss.repeats is not None:
            line["repeats"] = int(repeats)
        return StepRecord(step.number + 1, loss, norm, verdict[0] != 0, *verdict[1:]), line

    def write(self, record: StepRecord, values: dict[str, Any]) -> None:
        """Write the metrics line of a step. If a line is also to be printed for the step (see `Meters.due`), the
        measurements since the last printed line are added to the metrics line first."""
        head, due = f"step {record.step:>6}/{self.steps}", self.meters.due(record.step)
        if record.bad:
            values |= {"skipped": True, "why": record.why}
            self.say(f"{head}  update skipped: {record.why}")
        if due:
            values |= self.meters.interval(record.step, values)
        self.metrics.write("step", record.step, **values)
        self.meters.stepped(record.step, record.bad)
        if due:
            loss = "none" if record.loss is None else f"{record.loss:.4f}"
            remaining_s = (self.run.curriculum.tokens - values["tokens"]) * self.busy / max(1, self.trained)
            self.say(f"{head}  {values['phase']:<8} loss {loss}  lr {values['lr']:.2e}  norm {record.norm:.2f}  "
                     f"{self.meters.progress_text(record.step, values)}"
                     + (f"  left {clock(remaining_s)}" if remaining_s else ""))
            self.high_loss.write()


def finite(x: float | None) -> float | None:
    """Return `x`, or None if it is infinite or NaN, because JSON has neither."""
    return x if x is not None and math.isfinite(x) else None


def diverged(run: Run, step: int, observation: str) -> str:
    """Return the error message for a loss that is NaN or infinite after step `step` of the training `run`.
    `observation` says what was seen, for instance the value."""
    last = ckpt.latest(run.out / "checkpoints")
    return (f"step {step}: {observation}: training has diverged. "
            + (f"{last.folder.parent} is sound; " if last else "There is no checkpoint yet; ")
            + "give the phases from there on a lower rate (tokenmill train edit, lr: {peak: …}); or lower "
            "train.optimizer.lr or lengthen the warm-up, and start with another --out")
