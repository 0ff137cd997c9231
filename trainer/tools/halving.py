"""Successive halving (`--halving`): ends the arms of a study early that are far behind.

After a quarter and after half of the steps, all arms are compared by their mean held-out loss over the seeds, and only
the better half goes on (rounded up, but at least two arms; the first arm always does). So a study with many arms costs
less. An arm that is slow at the beginning may be ended although it would have won, and the p-values of the table do not
account for the selection. What was ended, when and why is therefore part of the results.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from trainer.observe.metrics import read
from trainer.tools.arm import Arm, label
from trainer.tools.arm_processes import train_arms
from trainer.tools.arm_table import loss_of

#: shares of the steps after which half of the arms ends
RUNGS = (0.25, 0.5)


def halved(arms: Sequence[Arm], options: argparse.Namespace, announce: Callable[[str], None], streams: Sequence[str],
           unit: str) -> tuple[list[Arm], list[dict[str, Any]]]:
    """Train arms to each of the RUNGS, and end the worse half by their loss on the held-out data of `streams`. Returns
    the arms that go on, and for each that has been ended {"arm", "share" of its steps, "loss", "delta" to the first
    arm}. A repeated call decides as before, because the losses at the rungs are in the metrics of the arms."""
    going, ended = list(arms), list[dict[str, Any]]()
    for share in RUNGS:
        train_arms(going, options, announce, share)
        losses: dict[str, list[float]] = {}
        for arm in going:
            losses.setdefault(label(arm), []).append(loss_at(arm, arm.rung(share), streams, unit))
        means = {name: math.fsum(of) / len(of) for name, of in losses.items()}
        first = label(going[0])
        ranked = sorted(means, key=lambda name: (name != first, means[name]))
        for name in ranked[max(2, -(-len(ranked) // 2)):]:
            ended.append({"arm": name, "share": share, "loss": means[name], "delta": means[name] - means[first]})
            announce(f"{name} ends after {share:.0%} of its steps: {means[name] - means[first]:+.4f} {unit} behind "
                     f"{first}")
        going = [arm for arm in going if label(arm) not in {one["arm"] for one in ended}]
    return going, ended


def loss_at(arm: Arm, step: int, streams: Sequence[str], unit: str) -> float:
    """Return the loss of an arm on the held-out data of `streams` in its latest evaluation up to a step."""
    lines = [e for e in read(arm.run.out / "metrics.jsonl") if e["event"] == "eval" and e["step"] <= step]
    return loss_of([lines[-1]["streams"][name] for name in streams], unit)

