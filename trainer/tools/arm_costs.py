"""Computes and formats what the arms of a study have cost, including those that `--halving` has ended early."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.base.humanize import count
from trainer.observe.goodput import CAUSES, latest
from trainer.observe.metrics import read
from trainer.tools.arm import Arm, label


def costs(arms: Sequence[Arm], ended: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return what the trainings of each arm have cost, as {arm: {"tokens", "flops", "wall_s", "parameters", "epochs",
    "ended"}}. The first three are sums over the seeds. "ended" is the share of the steps after which the arm was ended
    early, from `ended`; None for other arms."""
    out: dict[str, dict[str, Any]] = {}
    for arm in arms:
        model, vocab = arm.run.config.model, arm.run.vocab
        samples, read_tokens, seconds = performed(arm)
        cost = out.setdefault(label(arm), {
            "tokens": 0, "parameters": model.parameters(vocab), "flops": 0.0, "wall_s": 0.0,
            "epochs": epochs(arm, samples), "ended": ended.get(label(arm))})
        cost["tokens"] += read_tokens - arm.before
        cost["flops"] += 6.0 * model.matmul_parameters(vocab) * (read_tokens - arm.before)
        cost["wall_s"] += seconds
    return out


def performed(arm: Arm) -> tuple[int, int, float]:
    """Return (samples, tokens, seconds) of a training: what it has read, and its wall time. If it was ended early,
    samples and tokens are those of its last checkpoint."""
    from trainer.checkpoint.checkpoints import complete

    summary = arm.run.out / "summary.json"
    if summary.is_file():
        content = json.loads(summary.read_text(encoding="utf-8"))
        return arm.run.curriculum.samples, content["tokens"], content["wall_time"]["wall_s"]
    meta = complete(arm.run.out / "checkpoints")[-1].meta
    last = latest(list(read(arm.run.out / "metrics.jsonl")))
    return meta["samples"], meta["tokens"], sum(last["goodput"].get(cause, 0.0) for cause in CAUSES) if last else 0.0


def epochs(arm: Arm, samples: int) -> float:
    """Return how often a training has read its data with its first `samples` samples: the largest number over its
    streams. `Order.used` is not taken, because the phases of a shortened curriculum reserve more than is read."""
    from tokenizer.mixture.curriculum import cut
    from tokenizer.mixture.order import Order

    order = Order(replace(arm.run.curriculum, phases=tuple(cut(arm.run.curriculum, samples))))
    tokens = [0] * len(order.supers)
    for phase, apportioned in zip(order.curriculum.phases, order.apportioned):
        for stream, windows in enumerate(apportioned.counts(phase.samples)):
            tokens[stream] += int(windows) * phase.sequence
    return max((n / (supers * order.longest) for n, supers in zip(tokens, order.supers) if supers), default=0.0)


def cost_lines(costs_by_arm: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Format what the arms have cost, all seeds together, and how often a training of each has read its data."""
    width = max(len(name) for name in costs_by_arm) + 2
    out = [f"{'arm':<{width}}{'tokens':>10}{'parameters':>12}{'PFLOP':>10}{'wall time':>12}{'epochs':>8}"]
    for name, cost in costs_by_arm.items():
        early = f"  ended after {cost['ended']:.0%}" if cost["ended"] else ""
        out.append(f"{name:<{width}}{count(cost['tokens']):>10}{count(cost['parameters']):>12}"
                   f"{cost['flops'] / 1e15:>10.3g}{cost['wall_s']:>10,.0f} s{cost['epochs']:>8.2f}{early}")
    return out
