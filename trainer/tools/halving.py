"""Successive halving (`--halving`): ends the arms of a study early that are far behind, so that a study with many arms
costs less.

After a quarter and after half of the steps, all arms are compared by their mean held-out loss over the seeds. Only the
better half goes on (rounded up, but at least two arms; the first arm always does). An arm that is slow at the beginning
may be ended although it would have won, and the p-values of the table do not account for the selection. The results
therefore say which arms were ended, when and why.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from trainer.base.config import ConfigError
from trainer.observe.metrics import read
from trainer.tools.arm import Arm, label
from trainer.tools.arm_processes import train_arms
from trainer.tools.arm_table import loss_of

#: shares of the steps after which half of the arms ends
RUNGS = (0.25, 0.5)


def halved(arms: Sequence[Arm], options: argparse.Namespace, announce: Callable[[str], None], streams: Sequence[str],
           unit: str) -> tuple[list[Arm], list[dict[str, Any]]]:
    """Train the arms of a study to each of the shares RUNGS of their steps, and each time end the worse half (never the
    first arm). Worse is a higher loss on the held-out data of `streams` (data sources), as a mean over the seeds. A
    repeated call decides as before, because the losses at these steps are in the metrics of the arms.

    Returns the arms that go on, and for each ended arm {"arm", "share": share of its steps that it did, "loss",
    "delta": difference to the first arm}. The last two are None if the difference is not finite.
    """
    going, ended = list(arms), list[dict[str, Any]]()
    for share in RUNGS:
        train_arms(going, options, announce, share)
        losses: dict[str, list[float]] = {}
        for arm, loss in zip(going, losses_at(going, share, streams, unit)):
            losses.setdefault(label(arm), []).append(loss)
        means = {name: math.fsum(of) / len(of) for name, of in losses.items()}
        first = label(going[0])
        # a loss of NaN compares with nothing, so it would leave the order to chance
        ranked = sorted(means, key=lambda name: (name != first, math.isnan(means[name]), means[name]))
        for name in ranked[max(2, -(-len(ranked) // 2)):]:
            delta = means[name] - means[first]
            is_finite = math.isfinite(delta)                         # JSON has no number for NaN
            ended.append({"arm": name, "share": share, "loss": means[name] if is_finite else None,
                          "delta": delta if is_finite else None})
            announce(f"{name} ends after {share:.0%} of its steps: " + (
                f"{delta:+.4f} {unit} behind {first}" if is_finite else f"its loss is {means[name]}"))
        going = [arm for arm in going if label(arm) not in {one["arm"] for one in ended}]
    return going, ended


def losses_at(arms: Sequence[Arm], share: float, streams: Sequence[str], unit: str) -> list[float]:
    """Return the loss of each arm of a study on the held-out data of `streams` (data sources), after the share `share`
    of its steps. An arm that was trained without --halving may have no evaluation there. All arms are then compared at
    the last earlier step at which all were evaluated. Raises ConfigError when there is no such step."""
    evaluations: list[dict[int, dict[str, Any]]] = []
    for arm in arms:
        lines = [e for e in read(arm.run.out / "metrics.jsonl") if e["event"] == "eval"]
        evaluations.append({e["step"]: e for e in lines if arm.step < e["step"] <= arm.rung(share)})
    steps = [arm.rung(share) for arm in arms]
    if not all(step in of for step, of in zip(steps, evaluations)):
        # with other tokenizers, arms have other numbers of steps, and equal steps are no equal shares
        common = set.intersection(*map(set, evaluations)) if len(set(steps)) == 1 else set[int]()
        if not common:
            raise ConfigError(f"--halving: {arms[0].run.out.parent} holds arms that were trained without it, with no "
                              f"evaluation at a common step of the first {share:.0%}; leave out --halving, or "
                              f"delete that folder")
        steps = [max(common)] * len(arms)
    lines = [of[step] for step, of in zip(steps, evaluations)]
    return [loss_of([line["streams"][name] for name in streams], unit) for line in lines]
