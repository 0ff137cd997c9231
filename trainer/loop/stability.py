"""Handles loss spikes. The update of an outlier step is skipped. If that does not help, training goes back to a
checkpoint (a rewind) and skips the data around the spike.

`SpikeDetector` works on the device, so the host does not wait for it. It skips the update of a step whose loss or
gradient norm is not finite or an outlier, i.e. more than `sigma` standard deviations above the mean over the last
`window` accepted steps of the phase (SkipStep of OLMo-core; OLMo 2, arXiv 2501.00656). An accepted step is one whose
update was not skipped. Loss and norm are those of the step over all ranks, so all ranks decide alike.

`StabilityMonitor` works on the host, once the numbers have been copied there. It ends the training with an error after
too many skipped updates. With the setting `rewind`, it can instead request a rewind to a checkpoint before the spike.
The steps around the spike's beginning are then skipped (PaLM, arXiv 2204.02311 §5.1: back to about 100 steps before the
spike, 200 to 500 batches skipped).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.base.config import TrainingError
from trainer.checkpoint.checkpoints import Checkpoint
from trainer.checkpoint.damage import choose
from trainer.checkpoint.ledger import Ledger
from trainer.loop.config import StabilityConfig
from trainer.parallel.world import World


class SpikeDetector:
    """Finds steps whose loss or gradient norm is an outlier. The update of such a step is then skipped. A step is
    compared with the steps before it that were accepted (not skipped). All of this happens on the device."""

    def __init__(self, config: StabilityConfig, device: torch.device) -> None:
        self.config, self.phase = config, -1
        #: [2, window] float64: losses and norms of the last accepted steps, as a ring buffer; `count` is the number of
        #: accepted steps of the phase
        self.ring = torch.zeros(2, config.window, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.slots = torch.arange(config.window, device=device)

    def judge(self, phase: int, sums: Tensor, norm: Tensor) -> Tensor:
        """Decide whether to skip the update of a step: its loss or gradient norm is not finite, or above its limit.
        `phase` is the index of the step's phase (stretch of the training). `sums` [2 · streams], over all ranks, holds
        the summed loss of each stream (data source), then the number of counted targets of each stream. `norm` is the
        gradient norm, 0-d.

        Returns four numbers, float64 [4]: 1 to skip the update, else 0; the mean loss of the last `window` accepted
        steps of the phase; the limit of the loss; the limit of the norm. An accepted step is one whose update was not
        skipped. Until the phase has `warm` accepted steps, the mean is NaN and the limits are infinity. Without
        `sigma`, the limits are always infinity. Never waits for the device.
        """
        if phase != self.phase:
            self.phase = phase
            self.count.zero_()
        nll, targets = sums.view(2, -1).sum(1)
        now = torch.stack((nll / targets.clamp(min=1), norm.double()))
        filled = (self.slots < self.count).double()
        n = filled.sum()
        mean = (self.ring * filled).sum(1) / n
        spread = (((self.ring - mean[:, None]) * filled).square().sum(1) / (n - 1)).sqrt()
        ready = self.count >= self.config.warm
        limit = mean + (self.config.sigma or math.inf) * spread
        limit = torch.where(ready & ~limit.isnan(), limit, math.inf)
        bad = ~now.isfinite().all() | (now > limit).any()
        take = ~bad & (targets > 0)                          # a step of prompts only has no loss to judge
        at = self.count % self.config.window
        self.ring.copy_(torch.where(take & (self.slots == at), now[:, None], self.ring))
        self.count += take
        return torch.cat((bad.double()[None], torch.where(ready, mean[:1], math.nan), limit))

    def state(self) -> dict[str, Any]:
        """Return the detector's state, to be stored in a checkpoint's metadata. Waits for the device."""
        return {"phase": self.phase, "count": int(self.count), "ring": self.ring.tolist()}

    def load(self, state: dict[str, Any] | None) -> None:
        """Restore the state that the method `state` returned when a checkpoint was written. If `state` is None, or if
        the setting `window` has changed since then, the detector begins without earlier steps to compare with."""
        if state is None or len(state["ring"][0]) != self.config.window:
            state = {"phase": -1, "count": 0, "ring": [[0.0] * self.config.window] * 2}
        self.phase = state["phase"]
        self.count.fill_(state["count"])
        self.ring.copy_(torch.tensor(state["ring"], dtype=torch.float64))


class StepRecord(NamedTuple):
    """The numbers of one step, such as its loss and its gradient norm, after they were copied to the host."""

    step: int                     # number, from 1
    loss: float | None            # None: the step had no target
    norm: float
    bad: bool                     # its update was skipped
    mean: float                   # mean loss of the accepted steps before it; NaN: too few
    loss_limit: float
    norm_limit: float

    @property
    def why(self) -> str:
        """The reason, as text, why the update of this step was skipped."""
        result = [f"{name} {value:.4g}" + (f" > {limit:.4g}" if value > limit and value < math.inf else "")
                 for name, value, limit in (("loss", self.loss, self.loss_limit), ("norm", self.norm, self.norm_limit))
                 if value is not None and (not value <= limit or value == math.inf)]
        return ", ".join(result)


@dataclass(frozen=True)
class Rewind:
    """A decision, made after step `step`, to go back to a checkpoint, because the steps from `first` on are suspect.
    Training then skips the steps [start, stop), as far as they come after the checkpoint. `why` is the reason as
    text."""

    first: int
    step: int
    start: int
    stop: int
    why: str
    budget: int                   # most rewinds that a run may have


class StabilityMonitor:
    """Reviews the steps of a training in order, and decides when skipping the updates of single steps is not enough:
    training must then go back to a checkpoint or end. The decisions depend only on losses, norms and skipped updates,
    which are equal on all ranks, so all ranks decide alike."""

    def __init__(self, config: StabilityConfig) -> None:
        self.config = config
        #: numbers of the recent steps whose update was skipped; `above` counts steps in a row with too high a loss
        self.skipped_updates: list[int] = []
        self.above = 0

    def review(self, steps: Iterable[StepRecord], reports: str) -> Rewind | None:
        """Review the steps performed since the last call. Returns the first rewind (decision to go back to a
        checkpoint) that they trigger, or None; steps after the one that triggers it are not reviewed. Raises
        TrainingError when training cannot continue. `reports` is the command that inspects a step ('tokenmill train
        explain RUN'), for the error message."""
        for record in steps:
            if rewind := self._rewind(record):
                return rewind
            self._stop_if_diverged(record, reports)
        return None

    def _rewind(self, record: StepRecord) -> Rewind | None:
        """Review the numbers of one step. Returns the decision to go back to a checkpoint if this step triggers it,
        else None."""
        keep = max(self.config.window, self.config.rewind.trigger.within if self.config.rewind else 0)
        self.skipped_updates = [s for s in self.skipped_updates if s > record.step - keep] + [record.step] * record.bad
        if self.config.rewind is None:
            return None
        trigger, half = self.config.rewind.trigger, self.config.rewind.skip // 2
        if record.loss is not None and trigger.loss_above is not None:
            high = not record.loss <= record.mean + trigger.loss_above and not math.isnan(record.mean)
            self.above = self.above + 1 if high else 0
        recent = [s for s in self.skipped_updates if s > record.step - trigger.within]
        first, why = 0, ""
        if trigger.skips is not None and len(recent) >= trigger.skips:
            first, why = recent[0], f"{len(recent)} updates skipped within {trigger.within}"
        elif trigger.loss_above is not None and self.above >= trigger.for_:
            first = record.step - self.above + 1
            why = (f"loss more than {trigger.loss_above:g} above the mean {record.mean:.3f} for {self.above} "
                   f"step{'s' * (self.above > 1)}")
        if not first:
            return None
        start = max(1, first - half)
        return Rewind(first, record.step, start, first + self.config.rewind.skip - half, why,
                      self.config.rewind.budget)

    def _stop_if_diverged(self, record: StepRecord, reports: str) -> None:
        skipped = self.skipped_updates
        row = next((i for i in range(len(skipped)) if skipped[-1 - i] != record.step - i), len(skipped))
        many = len([s for s in self.skipped_updates if s > record.step - self.config.window])
        if record.bad and (row >= self.config.in_a_row or many >= self.config.most):
            count = f"{row} steps on end" if row >= self.config.in_a_row else \
                f"{many} of the last {self.config.window} steps"
            raise TrainingError(
                f"step {record.step}: {record.why}: training has diverged: {count} skipped (train.stability). Look at "
                f"`{reports} {self.skipped_updates[-row]}`; skip the steps (train.skip), let it do so itself "
                f"(train.stability.rewind), give the phases ahead a lower rate (tokenmill train edit, lr: {{peak: …}}) "
                f"or lower train.optimizer.lr or lengthen the warm-up and start with another --out")

    def state(self) -> dict[str, Any]:
        return {"skipped": self.skipped_updates, "above": self.above}

    def load(self, state: dict[str, Any] | None) -> None:
        self.skipped_updates, self.above = (list(state["skipped"]), state["above"]) if state else ([], 0)


def rewind_to_checkpoint(rewind: Rewind, ledger: Ledger, checkpoints: Path, world: World,
            say: Callable[[str], None] = lambda _text: None) -> Checkpoint | None:
    """Choose the undamaged checkpoint to which training goes back, and record the decision in the ledger (the list of
    skipped steps). All later checkpoints are deleted, or set aside if they are damaged (see `choose`). Every rank must
    call this. Returns the checkpoint, or None for the start of the training.

    Raises TrainingError when there is no suitable checkpoint, or when the run has already gone back as often as
    `rewind.budget` allows. Raises CheckpointError when all checkpoints are damaged.
    """
    if len(ledger.rewinds) >= rewind.budget:
        past = ", ".join(f"{line['steps'][0]} to {line['steps'][1] - 1}" for line in ledger.rewinds)
        raise TrainingError(f"step {rewind.step}: {rewind.why}, since step {rewind.first}; the steps {past} "
                            f"have been skipped already and train.stability.rewind.budget is used up: give "
                            f"the phases ahead a lower rate (tokenmill train edit, lr: {{peak: …}}) or raise the "
                            f"budget, and give the same command again")
    checkpoint = choose(checkpoints, world, say, lambda sound: rewind_target(sound, rewind)[0])
    _, start = rewind_target([checkpoint] if checkpoint else [], rewind)
    ledger.rewind(rewind.step, (start, rewind.stop), checkpoint.step if checkpoint else 0,
                  checkpoint.folder.parent.name if checkpoint else "start", rewind.why)
    ledger.clear(checkpoints, world)
    return checkpoint


def rewind_target(checkpoints: Sequence[Checkpoint], rewind: Rewind) -> tuple[Checkpoint | None, int]:
    """Choose from `checkpoints` (oldest first) the one to which training goes back. Returns (checkpoint, or None for
    the start of the training; the first step to skip).

    It is the latest checkpoint before all steps that `rewind` skips. If none is that early, it is the earliest
    checkpoint, and only steps after it are skipped. Without checkpoints, training goes back to the start. Raises
    TrainingError when there are checkpoints, but none before the first suspect step.
    """
    before = [c for c in checkpoints if c.step < rewind.start]
    if before:
        return before[-1], rewind.start
    if not checkpoints:
        return None, rewind.start
    if checkpoints[0].step < rewind.first:
        return checkpoints[0], checkpoints[0].step + 1
    raise TrainingError(f"step {rewind.step}: {rewind.why}, since step {rewind.first}, but no checkpoint "
                        f"before that is left to go back to: raise train.checkpoint.keep, or lower its every")
