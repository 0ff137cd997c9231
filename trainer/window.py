"""What steps measured, read back from the device together, and told: metrics lines and printed lines."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from trainer import checkpoint as ckpt
from trainer import metrics as log
from trainer import mfu
from trainer.parallel import World
from trainer.run import Run, Step, TrainingError


class Window:
    """Steps whose numbers are still on the device: they are read back together, so that a step never waits for one."""

    def __init__(self, run: Run, streams: list[str], metrics: log.Metrics, world: World,
                 say: Callable[[str], None]) -> None:
        self.run, self.streams, self.metrics, self.world, self.say = run, streams, metrics, world, say
        self.rows: list[tuple[Step, int, float, torch.Tensor, torch.Tensor]] = []
        self.peak = mfu.peak(world.device)
        self.steps = run.curriculum.steps
        self.busy, self.trained = 0.0, 0
        self.restart()

    def restart(self) -> None:
        self.since = time.perf_counter()

    def add(self, step: Step, tokens: int, rate: float, sums: torch.Tensor, norm: torch.Tensor) -> None:
        self.rows.append((step, tokens, rate, sums, norm))

    def speed(self) -> float | None:
        """Tokens per second of all steps so far, without evaluation and checkpoints."""
        return self.trained / self.busy if self.busy else None

    def flush(self, interrupted: int) -> int:
        """Write a metrics line for each waiting step. Returns the largest `interrupted` (a signal) of all ranks."""
        sums = self.world.sum(torch.stack([sums for _, _, _, sums, _ in self.rows])).tolist()
        signalled = int(self.world.max(torch.tensor(interrupted, device=self.world.device)))
        norms = torch.stack([norm.detach().float() for *_, norm in self.rows]).tolist()
        seconds = time.perf_counter() - self.since
        s = len(self.streams)
        flushed = sum(tokens - step.tokens for step, tokens, *_ in self.rows)
        self.busy, self.trained = self.busy + seconds, self.trained + flushed
        flops = sum(mfu.step_flops(self.run.config.model, self.run.vocab, tokens - step.tokens, int(row[1]))
                    for (step, tokens, *_), row in zip(self.rows, sums))
        utilisation = flops / seconds / (self.peak * self.world.size) if self.peak else None
        for (step, tokens, rate, *_), row, norm in zip(self.rows, sums, norms):
            nll, counted = row[2:2 + s], row[2 + s:2 + 2 * s]
            phase = self.run.curriculum.phases[step.phase].name
            targets = max(1.0, sum(counted))
            loss = sum(nll) / targets if sum(counted) else None         # None: it read prompts alone
            self.metrics.write(
                "step", step.number + 1, phase=phase, samples=step.stop, tokens=tokens,
                targets=int(sum(counted)), loss=loss, z=row[0] / targets, lr=rate, grad_norm=norm,
                tokens_per_s=round(flushed / seconds, 1), mfu=utilisation,
                streams={name: n / c for name, n, c in zip(self.streams, nll, counted) if c})
            if loss != loss or norm != norm or abs(norm) == float("inf"):
                self.metrics.flush()
                raise TrainingError(diverged(self.run, step.number + 1, f"loss {loss}, gradient norm {norm}"))
            if (step.number + 1) % self.run.config.log_every == 0 or step.number + 1 == self.steps:
                left = (self.run.curriculum.tokens - tokens) * self.busy / self.trained
                said = "none" if loss is None else f"{loss:.4f}"
                self.say(f"step {step.number + 1:>6}/{self.steps}  {phase:<8} loss {said}  lr {rate:.2e}  "
                         f"norm {norm:.2f}  {flushed / seconds / 1e3:.1f}k tok/s  mfu "
                         f"{'unknown' if utilisation is None else f'{utilisation:.1%}'}  left {clock(left)}")
        self.rows = []
        self.metrics.flush()
        return signalled


def diverged(run: Run, step: int, seen: str) -> str:
    """What to say when numbers are no longer numbers."""
    last = ckpt.latest(run.out / "checkpoints")
    return (f"step {step}: {seen}: training has diverged. "
            + (f"{last.folder.parent} is sound; " if last else "There is no checkpoint yet; ")
            + "lower train.optimizer.lr, or lengthen the warm-up, and start with another --out")


def clock(seconds: float) -> str:
    """93 → '1:33', 7260 → '2:01:00'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
