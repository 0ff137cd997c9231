"""Explains a step of a training: its rows (samples) and their documents, and its loss beside the losses of nearby
steps. The module does not import torch, because the service, which has no torch, uses it, too.

No log of the documents is needed. The curriculum determines which tokens a step reads, and the shards' document table
says which documents these tokens belong to. Only the losses of single rows have to be recorded in training
(`trainer.observe.worst_rows`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.steps import TrainingStep, rows_of, step_at
from trainer.base.config import ConfigError
from trainer.checkpoint.ledger import Ledger
from trainer.observe.metrics import TURNS, scan, standing
from trainer.observe.worst_rows import NAME as WORST
from trainer.observe.worst_rows import read_high_loss

#: steps shown before and after the requested one
AROUND = 5
#: smallest number of steps for which a standard deviation is meaningful
TELLING = 5
#: fields of a phase that determine which samples its steps read
DECIDE = ("name", "sequence", "batch", "ramp", "weights", "groups")


def explain(curriculum: Curriculum, out: Path, window: int, number: int,
            add_documents: Callable[[list[dict[str, Any]]], str | None], row: int | None = None,
            worst: int | None = None, check: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Return everything that the command `explain` shows about step `number` (from 1) of the training in the folder
    `out`. The rows (samples) with a recorded loss come first, highest loss first, then the others in order. With `row`,
    only that row is included. With `worst`, only the `worst` rows with the highest recorded loss are included; if no
    loss of the step is recorded, the first rows are taken instead, and `unranked` says so.

    `window` is the number of earlier steps with which the step's loss is compared. `add_documents` is called with the
    rows. It adds the key `documents` to each, and returns a message if something is missing. `check` is called
    repeatedly, and may raise an error to end the work. Raises ConfigError for a step or row that does not exist.
    """
    step = step_at(curriculum, number)
    if step is None:
        raise ConfigError(f"explain: there is no step {number}; the curriculum has {curriculum.steps}")
    if row is not None and row > step.batch:
        raise ConfigError(f"--row {row}: step {number} has {step.batch} rows")
    ledger = Ledger.read(out)
    metrics, stale = beside(curriculum, out, window, step, ledger, check)
    losses = {line["sample"]: math.inf if line["loss"] is None else line["loss"]
              for line in (() if stale else read_high_loss(out, number, ledger.why(number) is not None))}
    rows = [{**r, "loss": losses.get(r["sample"])} for r in rows_of(curriculum, step)]
    rows.sort(key=lambda r: (-math.inf if r["loss"] is None else r["loss"], -r["row"]), reverse=True)
    unranked = None
    if worst is not None and not losses:
        unranked = f"none of its rows is among the worst of its interval ({WORST}): these are the first, not the worst"
    if row is not None:
        rows = [r for r in rows if r["row"] == row]
    elif worst is not None:
        rows = [r for r in rows if r["loss"] is not None][:worst] or rows[:worst]
    absent = add_documents(rows)
    for r in rows:
        r["loss"] = r["loss"] if r["loss"] is not None and math.isfinite(r["loss"]) else None
    return {"step": number, "steps": curriculum.steps, "phase": curriculum.phases[step.phase].name,
            "samples": [step.first, step.stop], "skip_reason": ledger.why(number),
            "stale": stale, **metrics, "unranked": unranked, "rows": rows, "not_at_hand": absent}


def beside(curriculum: Curriculum, out: Path, window: int, step: TrainingStep, ledger: Ledger,
           check: Callable[[], object]) -> tuple[dict[str, Any], str | None]:
    """Return the metrics of a step beside those of other steps, as (metrics, None). If the curriculum was edited after
    the step was performed, the present curriculum may give other samples to the step. The result is then (metrics
    without values, text that says so).

    `around` has the neighbouring steps. `loss` and `norm` have the step's value and the mean and standard deviation of
    up to `window` earlier steps whose update was not skipped. They also have the step's distance from the mean, in
    standard deviations; it is None if there are fewer than TELLING such steps, or if the deviation is 0. If training
    went back to a checkpoint in order to skip this step, the metrics are from the last time that it was performed.
    """
    number = step.number + 1
    near = range(number - 8 * window, number + AROUND + 1)       # enough to contain `window` accepted steps

    def wanted(event: str, at: int, _: str) -> bool:
        check()
        return event in TURNS or (event == "step" and at in near)

    lines = list(scan(out / "metrics.jsonl", wanted))
    back = max((i for i, line in enumerate(lines)
                if line["event"] == "rewind" and line["steps"][0] <= number < line["steps"][1]), default=len(lines))
    lines = standing(lines[:back])
    stale = edited(curriculum, number, lines, ledger)
    lines = [line for line in lines if line["event"] == "step" and not stale]
    own = next((line for line in lines if line["step"] == number), None)
    before = [line for line in lines if line["step"] < number and not line.get("skipped")]
    result: dict[str, Any] = {"skipped": own.get("why") if own and own.get("skipped") else None, "around": [
        {key: line.get(key) for key in ("step", "loss", "grad_norm", "why")} for line in lines
        if abs(line["step"] - number) <= AROUND]}
    for name, key in (("loss", "loss"), ("norm", "grad_norm")):
        values = [line[key] for line in before if line[key] is not None][-window:]
        value = own[key] if own else None
        comparison: dict[str, Any] = {"value": value, "mean": None, "sigma": None, "distance": None,
                                      "steps": len(values)}
        if value is not None and len(values) > 1:
            mean, sigma = statistics.fmean(values), statistics.stdev(values)
            comparison |= {"mean": mean, "sigma": sigma,
                           "distance": (value - mean) / sigma if sigma and len(values) >= TELLING else None}
        result[name] = comparison
    return result, stale


def edited(curriculum: Curriculum, number: int, lines: list[dict[str, Any]], ledger: Ledger) -> str | None:
    """Return None if the metrics `lines` apply to step `number`. They do not if the curriculum was edited after the
    step was performed, so that the step now has other samples; then a text that says so is returned."""
    begun = next((line for line in reversed(lines) if line["event"] in ("start", "resume")), None)
    first = None
    if begun is not None and "phases" in begun:
        steps = 0
        for old, phase in zip_longest(begun["phases"], curriculum.phases):
            now = phase and {key: getattr(phase, key) for key in DECIDE}
            then = now and old and {key: old.get(key, value) for key, value in now.items()}
            if not now or then != now or old["steps"] != phase.steps:      # a cut phase is the same up to the cut
                first = steps + (min(old["steps"], phase.steps) if now and then == now else 0)
                break
            steps += phase.steps
    if first is None:                           # training resumed after the edit, so the ledger has it
        rewinds = [i for i, line in enumerate(ledger.lines) if line["event"] == "rewind"
                   and line["steps"][0] <= number < line["steps"][1]]
        first = min((line["step"] for line in ledger.lines[rewinds[-1]:] if line["event"] == "edit"), default=None) \
            if rewinds else None
    if first is None or number <= first or not any(line["step"] == number for line in lines):
        return None
    return f"it was performed before the curriculum was edited from step {first:,} on, with other samples than these"
