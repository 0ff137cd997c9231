"""Measures everything besides the loss: speed, waits for data, hardware, update norms, the gradient noise scale, and
how wall time is spent.

These values are read only at steps for which a line is printed. Other steps compute only the numbers that
`MetricsBuffer` collects. The speed excludes evaluation, checkpoints, and every step that compiles: the first of a
process, and the first with another sequence length or batch size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.base.humanize import count
from tokenizer.mixture.steps import TrainingStep
from trainer.evaluation.score_rows import main_row
from trainer.loop.run import Run
from trainer.observe import hardware, mfu, norms
from trainer.observe import metrics as log
from trainer.observe.alerts import RULES, Alert, Alerts
from trainer.observe.goodput import CAUSES, Goodput
from trainer.observe.noise import MicroNorms, NoiseScale
from trainer.parallel.world import World

#: keys of the lines of metrics.jsonl that are needed after a restart or a rewind (a return to a checkpoint)
SEEN = ("event", "step", "time", "goodput", "noise", "streams", "seconds", "main")
#: number of the last step lines with a goodput record that are kept in memory. A rewind further back does not need
#: older ones, because it takes the record from the checkpoint's line
RECENT = 1000


class Meters:
    """Takes and records the measurements of a training. Its methods are called at certain points of the training loop:
    `begin`, `before` and `after` around a step; `flushed` and `interval` when the numbers of steps are copied from the
    device; `evaluated`, `saving` and `saved` at evaluations and checkpoints. The argument `step` is the step after
    which this process continues (0: a new training)."""

    def __init__(self, run: Run, metrics: log.Metrics, world: World, goodput: Goodput, model: nn.Module,
                 optimizer: torch.optim.Optimizer, step: int, say: Callable[[str], None]) -> None:
        self.run, self.metrics, self.world, self.goodput, self.say = run, metrics, world, goodput, say
        self.optimizer, self.steps = optimizer, run.curriculum.steps
        fp8 = run.config.parallel.fp8
        self.peak = mfu.peak(world.device, fp8)
        if self.peak is None:
            say(mfu.why_unknown(world.device, fp8))
        goodput.peak = self.peak and self.peak * world.size
        lines = self.lines() if step else []
        goodput.resume(lines, step)
        self.micro = MicroNorms(model, world.device, world.size // world.data_size)
        before = [line for line in log.standing(lines) if line["step"] <= step]
        self.noise, self.alerts = NoiseScale(before), Alerts(run.config.alerts, before)
        #: (step, task) of the scores that metrics.jsonl has
        self.reported = {(line["step"], task) for line in before if line["event"] == "tasks" for task in line["main"]}
        self.hardware = hardware.Hardware(world, say)
        self.updates: norms.Updates | None = None
        self.moved = torch.zeros(0, 3)
        #: shapes (sequence, batch) of the steps so far
        self.shapes: set[tuple[int, int]] = set()
        self.cold = True
        self.skips = 0
        #: `span`: seconds, tokens and FLOPs of the steps since the last printed line, without steps that compile.
        #: `waits`: seconds of waiting for the batch, for each step since then
        self.span, self.waits = [0.0, 0.0, 0.0], list[float]()
        self.saved_at = time.perf_counter()
        self.records: dict[int, dict[str, Any]] = {}
        self.measured: dict[str, Any] = {}
        metrics.export(planned=run.curriculum.tokens, world=world.size, alerts=self.standing())

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl that are needed after a restart or a rewind (a return to a checkpoint), in
        the order of the file. Each line has only the keys SEEN. Of the lines about steps, the last RECENT that record
        how wall time was spent (goodput) are returned. Returns [] on all ranks except the first."""
        self.metrics.flush()
        events: list[tuple[int, dict[str, Any]]] = []
        recent = deque[tuple[int, dict[str, Any]]](maxlen=RECENT)
        path = self.run.out / "metrics.jsonl"
        for i, line in enumerate(log.scan(path, lambda event, _, text: event != "step" or '"goodput"' in text)
                                 if self.world.first else ()):
            (recent if line["event"] == "step" else events).append((i, {k: line[k] for k in SEEN if k in line}))
        return [line for _, line in sorted([*events, *recent], key=lambda at: at[0])]

    def due(self, number: int) -> bool:
        """Return whether a line of progress is printed after step `number` (from 1)."""
        return number % self.run.config.log_every == 0 or number == self.steps

    # -- around a step -----------------------------------------------------------------------------------------------
    def begin(self, step: TrainingStep, waited: float) -> None:
        """Start the measurements of a step. Called before every step that is not skipped. `waited` is how long the
        training waited for the step's batch, in seconds."""
        phase = self.run.curriculum.phases[step.phase]
        self.goodput.move(waited, self.goodput.cause, "data")
        self.waits.append(waited)
        self.cold = (phase.sequence, step.batch) not in self.shapes
        self.shapes.add((phase.sequence, step.batch))
        self.goodput.enter("warmup" if self.cold else "training")
        if self.due(step.number + 1):
            self.micro.start()

    def before(self, step: TrainingStep) -> None:
        """Prepare to measure how much the optimiser changes the parameters in a step. Called when the gradients are
        computed, before the optimiser steps."""
        if self.due(step.number + 1):
            self.updates = norms.Updates(self.optimizer)

    def after(self) -> None:
        """Measure how much the optimiser has changed the parameters in a step, if `before` has prepared for it. Called
        after the optimiser has stepped."""
        if self.updates is not None:
            self.moved, self.updates = self.updates.sums(), None

    # -- reading -----------------------------------------------------------------------------------------------------
    def flushed(self, seconds: float, steps: int, skips: int, tokens: int, flops: float) -> bool:
        """Record that the last `steps` steps took `seconds`, with `tokens` tokens and `flops` FLOPs. The updates of
        `skips` of these steps were skipped. Returns whether the steps count towards the measured speed."""
        self.goodput.flops += flops * (steps - skips) / steps
        self.goodput.enter(self.goodput.cause)
        self.goodput.move(seconds * skips / steps, self.goodput.cause, "lost")
        self.skips += skips
        if self.cold:
            self.goodput.enter("training")
            return False
        self.span = [a + b for a, b in zip(self.span, (seconds, tokens, flops))]
        return True

    def utilisation(self, flops: float, seconds: float) -> float | None:
        """Return the model FLOPs utilisation (MFU) of steps that computed `flops` FLOPs in `seconds`. None if the peak
        of the device is unknown."""
        return flops / seconds / (self.peak * self.world.size) if self.peak else None

    def interval(self, number: int, line: Mapping[str, Any]) -> dict[str, Any]:
        """Return measurements of the steps since the last printed line, such as their speed. Called when a line is
        printed for step `number`; the measurements are added to `line`, the step's metrics line. Every rank must call
        this."""
        seconds, tokens, flops = self.span
        marks = quantiles(self.waits, n=100, method="inclusive") if len(self.waits) > 1 else self.waits * 99
        ranks = hardware.gather({**self.hardware.read(), "data_wait_p50_ms": 1e3 * marks[49],
                                 "data_wait_p99_ms": 1e3 * marks[98], "data_wait_s": sum(self.waits)}, self.world)
        sums = torch.cat((self.micro.take(), self.moved.flatten().to(self.world.device)))
        dist.all_reduce(sums)                        # over all ranks, including those that share every layer
        small, *moved = (sums[:3].tolist(), *sums[3:].view(-1, 3).tolist())
        result = {**norms.metrics_fields(self.optimizer.param_groups, moved), **hardware.summary(ranks)}
        # skipped steps are left out: an outlier gradient would outweigh all others for hundreds of steps
        result["noise"] = None if line.get("skipped") else self.noise.measure(small, line["grad_norm"], line["targets"])
        slow = max(ranks, key=lambda rank: rank["data_wait_s"])
        waiting = {"p50": round(slow["data_wait_p50_ms"], 3), "p99": round(slow["data_wait_p99_ms"], 3)}
        if seconds:
            waiting["share"] = round(min(1.0, slow["data_wait_s"] / seconds), 4)
            result |= {"tokens_per_s": round(tokens / seconds, 1), "mfu": self.utilisation(flops, seconds),
                      "flops_per_s": flops / seconds}
        result |= {"data_wait_ms": waiting, "goodput": self.goodput.record(), "goodput_share": self.goodput.share,
                  "wall_mfu": self.goodput.mfu(), "skips": self.skips, "spike_score": self.alerts.spike_score}
        self.span, self.waits = [0.0, 0.0, 0.0], []
        return {key: value for key, value in result.items() if value is not None}

    def progress_text(self, number: int, line: Mapping[str, Any]) -> str:
        """Return the last part of the line to print for step `number`: speed, MFU and notable waits. Also updates the
        file trainer.prom and, if the speed was measured, checks the alert rules about speed, waits for data and
        checkpoints. `line` is the step's metrics line."""
        wait = line["data_wait_ms"]
        self.metrics.export(step=number, **line, wall={cause: line["goodput"][cause] for cause in CAUSES},
                            data_wait_s={"0.5": wait["p50"] / 1e3, "0.99": wait["p99"] / 1e3})
        if "share" in wait:
            self.alarm(number, self.alerts.interval(line["phase"], line["tokens_per_s"], wait["share"],
                                                    time.perf_counter() - self.saved_at))
        parts = [f"{count(line['tokens_per_s']):>6} tok/s"]
        if line["mfu"] is not None:
            parts.append(f"mfu {line['mfu']:.1%}")
        if wait.get("share", 0.0) >= 0.005:
            parts.append(f"data wait {wait['share']:.0%}")
        straggler = line.get("straggler", {"ratio": 1.0})
        if straggler["ratio"] >= 1.1 and self.world.device.type == "cuda":
            parts.append(f"rank {straggler['rank']} is {straggler['ratio']:.2f}× slower")
        if self.noise.tokens is not None:
            parts.append(f"critical batch {count(self.noise.tokens)}")
        return "  ".join(parts)

    # -- between steps -----------------------------------------------------------------------------------------------
    def stepped(self, number: int, bad: bool) -> None:
        """Update the alert about loss spikes after step `number`. Called for every step that was computed, even if its
        update was skipped. `bad` is whether the step's loss or gradient norm was an outlier."""
        self.alarm(number, self.alerts.step(bad))

    def evaluated(self, number: int, tokens: int, values: Mapping[str, Any]) -> None:
        """Record and print an evaluation that was made after step `number` and `tokens` tokens. `values` is the result
        of `Heldout.evaluate`."""
        self.metrics.write("eval", number, tokens=tokens, **values)
        self.metrics.export(heldout=values["loss"], heldout_streams=values["streams"])
        self.metrics.flush()  # a checkpoint may follow; a resume from it does not evaluate this step again
        self.say(f"step {number:>6}  held-out {values['loss']:.3f} nats/token, unigram entropy "
                 f"{values['unigram_entropy']:.3f}    {each(values['streams'])}")
        for length, result in values.get("lengths", {}).items():
            self.say(f"{'':>13}windows of {int(length):,}: {result['loss']:.3f}    {each(result['streams'])}")
        self.alarm(number, self.alerts.evaluation(values["streams"]))

    def scored(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record and print the scores of checkpoints on tasks that are not recorded yet. `rows` are those of
        tasks.jsonl; the checkpoints may be of earlier steps."""
        new: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
        for row in rows:
            if (row["step"], row["task"]) not in self.reported:
                new.setdefault(row["step"], {}).setdefault(row["task"], []).append(row)
        for step, tasks in sorted(new.items()):
            self.reported |= {(step, task) for task in tasks}
            main = {task: {key: row[key] for key in ("measure", "value", "stderr")}
                    for task, row in ((task, main_row(rows)) for task, rows in tasks.items())}
            self.metrics.write("tasks", step, tokens=next(iter(tasks.values()))[0]["tokens"], main=main, scores={
                task: {row["measure"]: row["value"] for row in rows} for task, rows in tasks.items()})
            self.metrics.export(tasks=main)
            self.metrics.flush()
            self.say(f"step {step:>6}  " + "   ".join(f"{task} {row['measure']} {row['value']:.4f}"
                                                      for task, row in main.items()))
            self.alarm(step, self.alerts.tasks(step, main))

    def saving(self, number: int) -> None:
        """Keep a record of how wall time was spent so far, for the metrics line of a checkpoint. Called before the
        checkpoint of step `number` is written; the method `saved` writes the line when the checkpoint is complete."""
        self.records[number] = self.goodput.record()

    def saved(self, number: int, seconds: float, **values: Any) -> None:
        """Write the metrics line of a checkpoint. Called when the checkpoint of step `number` is complete; `seconds` is
        how long training has waited for it."""
        self.saved_at = time.perf_counter()
        self.metrics.write("checkpoint", number, seconds=round(seconds, 3), **values,
                           goodput=self.records.pop(number))
        self.metrics.export(checkpoint_s=seconds, checkpoint_step=number)

    def rewound(self, number: int) -> None:
        """Count the time spent on steps after `number` as lost. Called when training goes back to the checkpoint of
        step `number`."""
        self.goodput.rewind(self.lines(), number)
        self.reported = {(step, task) for step, task in self.reported if step <= number}

    def alarm(self, number: int, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self.metrics.write("alert", number, rule=alert.rule, on=alert.on, text=alert.text)
            self.say(f"step {number:>6}  {'ALERT' if alert.on else 'alert over,'} {alert.rule}: {alert.text}")
        if alerts:
            self.metrics.export(alerts=self.standing())

    def standing(self) -> dict[str, int]:
        return {rule: int(rule in self.alerts.standing) for rule in RULES}


def each(streams: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the losses of streams (data sources) as text: 'web 3.412 (1.021 bits/byte) code 2.900'."""
    return "   ".join(f"{name} {v['loss']:.3f}" + ("" if v.get("bits_per_byte") is None else
                                                   f" ({v['bits_per_byte']:.3f} bits/byte)")
                      for name, v in streams.items())
