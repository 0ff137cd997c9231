"""Runs several short trainings (arms), each with several seeds, and prints a table of their held-out losses with
confidence intervals. The commands `anneal` and `ablate` use this module. The trainings run one after the other on this
machine.

Each pair of arm and seed is a separate training in a folder below OUT. A command that is run again continues where it
was stopped, and does not repeat finished trainings. Only the last checkpoint of each training is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.base.visible import json_text, visible
from trainer.base.arguments import positive, say

if TYPE_CHECKING:
    from trainer.loop.run import Run
    from trainer.parallel.world import World

#: Student's t, 97.5 % quantile, for 1 to 30 degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
           2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
#: the name for the held-out data of all sources together
ALL = "all"


@dataclass(frozen=True)
class Arm:
    name: str
    seed: int                     # from 0
    run: Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=positive, default=2, metavar="S",
                        help="repeat every arm with S seeds: without that nobody knows what is noise (default: 2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--ranks", type=positive, metavar="N", help="N processes on this machine")
    parser.add_argument("--json", action="store_true", help="the table as JSON")


def perform(options: argparse.Namespace, arms: Sequence[Arm],
            prepare: Callable[[Arm], None] = lambda _arm: None) -> int:
    """Train all arms (short trainings that are compared), on as many ranks as `--ranks` says, and print the table of
    results. Returns the exit code. `prepare` is called on rank 0 for each arm before it is trained."""
    from trainer.data.remote import fetch_shards
    from trainer.parallel.world import world

    for arm in arms:                             # all at the start, before hours are spent on the first arms
        check(arm)
    if options.ranks and options.ranks > 1 and "RANK" not in os.environ:
        from trainer.launch.local import launch

        return launch(options.arguments, options.ranks, options.device)
    announce = (lambda _text: None) if options.json else say
    if arms[0].run.source:
        fetch_shards(arms[0].run.source, arms[0].run.curriculum, announce, arms[0].run.config.fetch)
    with world(options.device) as here:
        results = train_all(arms, here, prepare, announce)
        if here.first:
            result = table(results)
            print(json_text(result) if options.json else visible("\n".join(lines(result))))
    return 0


def check(arm: Arm) -> None:
    """Raise ConfigError when `arm` (one of the trainings to compare) has no held-out data, by which it is compared with
    others, or when its folder already holds a different training with the same name."""
    from trainer.base.config import ConfigError
    from trainer.checkpoint import checkpoints as ckpt
    from trainer.loop.run import differences

    if not any(stream.val and stream.val_tokens > 1 for stream in arm.run.curriculum.streams):
        raise ConfigError(f"{arm.run.folder}: its streams have no held-out data, by which arms are compared; give "
                          f"shards.*.val")
    checkpoint = ckpt.latest(arm.run.out / "checkpoints")
    if checkpoint and (wrong := differences(checkpoint.meta, arm.run)):
        raise ConfigError(f"{arm.run.out} holds an arm {arm.name} that is another than this one:\n  "
                          + "\n  ".join(wrong) + "\nGive this one another name, or delete that folder")


def train_all(arms: Sequence[Arm], here: World, prepare: Callable[[Arm], None],
              announce: Callable[[str], None]) -> dict[str, list[dict[str, float]]]:
    """Train all arms (short trainings that are compared), each with every seed. Returns their held-out losses on rank
    0: {arm: [{source: loss in nats per token} for each seed]}; {} on other ranks. The source ALL stands for all sources
    together."""
    from trainer.checkpoint import checkpoints as ckpt
    from trainer.loop.train import train

    results: dict[str, list[dict[str, float]]] = {}
    for arm in arms:
        if here.first:
            prepare(arm)
        here.broadcast(b"\0")                    # no rank reads the checkpoint before it exists
        if here.first:
            announce(f"== {arm.name}, seed {arm.seed}")
        train(arm.run, here, None, say=announce)
        if here.first:
            for old in ckpt.complete(arm.run.out / "checkpoints")[:-1]:
                (old.folder.parent / "COMPLETE").unlink()
                shutil.rmtree(old.folder.parent)
            summary = json.loads((arm.run.out / "summary.json").read_text(encoding="utf-8"))
            results.setdefault(arm.name, []).append(
                {ALL: summary["heldout_loss"], **{name: v["loss"] for name, v in summary["streams"].items()}})
    return results


def contrasts(values: Sequence[Sequence[float]]) -> tuple[list[float], float | None]:
    """Compare the losses `values`[arm][seed] of several trainings (arms). Returns (mean difference of each arm to the
    first arm, half the width of the 95 % interval of such a difference). The second value is None with one seed or one
    arm, because the width is then unknown.

    Arms with the same seed have the same initial values and order of data, so differences are taken within a seed. This
    is a randomised block design, with the residual variance pooled over all arms; for two arms it is the paired t-test.
    """
    import numpy as np

    losses = np.asarray(values, dtype=np.float64)
    arms, seeds = losses.shape
    means, free = losses.mean(1), (arms - 1) * (seeds - 1)
    half = None
    if free:
        residuals = losses - means[:, None] - losses.mean(0) + losses.mean()
        quantile = STUDENT[free - 1] if free <= len(STUDENT) else 1.96
        half = quantile * math.sqrt(2 * (residuals ** 2).sum() / free / seeds)
    return (means - means[0]).tolist(), half


def table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Compute the table in which arms (short trainings) are compared: {"arms": [names], "seeds": number of seeds,
    "sources": {source: {"noise": …, "arms": {name: {"loss", "delta", "beyond_noise"}}}}}. Only sources that all arms
    have are included. `delta` is the difference to the first arm; negative is better. `noise` is half the width of the
    95 % interval of a difference, or None."""
    first = next(iter(results))
    seeds, sources = len(results[first]), {}
    for source in results[first][0]:
        if not all(source in one for r in results.values() for one in r):
            continue
        values = [[one[source] for one in r] for r in results.values()]
        deltas, noise = contrasts(values)
        sources[source] = {"noise": noise, "arms": {
            name: {"loss": math.fsum(losses) / seeds, "delta": delta,
                   "beyond_noise": None if noise is None or name == first else abs(delta) > noise}
            for name, losses, delta in zip(results, values, deltas)}}
    return {"arms": list(results), "seeds": seeds, "sources": sources}


def lines(result: Mapping[str, Any]) -> list[str]:
    """Format the result of `table` as lines of text: for each source the loss of the first arm (short training), and
    the differences of the other arms to it. A star marks differences that are larger than the noise."""
    width = max(12, *(len(n) + 2 for n in result["arms"]))
    first, *others = result["arms"]
    out = [f"held-out loss in nats/token, means of {result['seeds']} seed{'s' * (result['seeds'] > 1)}; differences to "
           f"{first}, negative is better", "",
           f"{'source':<20}{first:>{width}}" + "".join(f"{n:>{width}}" for n in others) + f"{'noise':>12}"]
    for source, of in result["sources"].items():
        noise = "unknown" if of["noise"] is None else f"±{of['noise']:.4f}"
        cells = [f"{of['arms'][n]['delta']:+.4f}" + ("*" if of["arms"][n]["beyond_noise"] else " ") for n in others]
        out.append(f"{source:<20}{of['arms'][first]['loss']:>{width}.4f}" + "".join(f"{c:>{width}}" for c in cells)
                   + f"{noise:>12}")
    return [*out, "", "* beyond the 95 % interval of differences within a seed" if result["seeds"] > 1 else
            "one seed: what is noise is not known; repeat with --seeds 3"]
