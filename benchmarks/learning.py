"""Check that the trainer learns as the literature says: small models on real text, three seeds, paired by seed.

    python benchmarks/learning.py OUT [--tokens 491520] [--seeds 3] [--prepare]

The text (`learning.yaml`: unfiltered web pages, Wikipedia, Django's documentation, from `make demo`'s input) is made
into shards under OUT once. Every arm of the experiment is a run of its own with a curriculum and a `train:` section. It
is trained by `trainer.loop.train` on one thread. All arms are evaluated on the same held-out windows. Arms that already
exist are not trained again. Under the same seed, two arms have the same initial values, and the same samples if the
mixture is the same.

There are three comparisons. (a) and (b) need the best learning rate of AdamW, which (c) finds.

(a) A decaying against a constant learning rate, both with AdamW at its best rate. A constant rate is higher on average,
so the decaying rate is also compared with a constant rate of a third of the best one.

(b) Is high-quality data better at the end than spread evenly? AdamW as in (c), with the same tokens of every source. In
one arm, two thirds of Wikipedia's tokens come in the last third of the run, which has 60 % Wikipedia instead of 30 %.

(c) AdamW against Muon (with Moonlight's scaling). Three learning rates of each are tried with the first seed and a
quarter of the tokens. The best rate of each is then trained with all seeds and the schedule WSD, whose last 30 % decay
to 0.

Prints a table and writes OUT/learning.json. Intervals are Student's, 95 %, over the paired differences of the seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml

from pipeline.base.quantities import parse_count
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from tokenizer.mixture.resolve import resolve_phases
from trainer.loop.run import open_run
from trainer.loop.train import train
from trainer.observe.metrics import read
from trainer.parallel.world import world
from trainer.tools.arm_statistics import quantile

#: 0.39 M parameters without the embedding
MODEL = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "qk_norm": True}
SEQUENCE, BATCH = 256, 1024
EVENLY = {"web": 50, "docs": 20, "wiki": 30}
#: two thirds of FIRST and one third of LAST make EVENLY
FIRST, LAST = {"web": 60, "docs": 25, "wiki": 15}, {"web": 30, "docs": 10, "wiki": 60}
RATES = {"adamw": (0.0003, 0.001, 0.003), "muon": (0.001, 0.003, 0.009)}
#: the embedding's rate is this many times the other rate, in every arm
EMBEDDING = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=parse_count, default=491_520,
                        help="of an arm; with multiples of 122,880 the arms of (b) read exactly as much of each source")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prepare", action="store_true", help="make the shards and stop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = prepare(options.out)
    if options.prepare:
        return
    seeds = range(1, options.seeds + 1)

    def arm(name: str, optimizer: dict[str, Any], schedule: str = "wsd", last: bool = False,
            tokens: int = options.tokens, seeds: Sequence[int] = seeds) -> list[dict[str, float]]:
        phases = [{"name": "first", "until": "66.6667%", "sequence": SEQUENCE, "batch": BATCH,
                   "mix": FIRST if last else EVENLY},
                  {"name": "last", "until": "100%", "mix": LAST if last else EVENLY}]
        rate = {"kind": schedule, "warmup": "5%", **({"decay": "30%"} if schedule == "wsd" else {})}
        section = {"model": MODEL, "optimizer": optimizer, "schedule": rate, "log_every": 10**6,
                   "evaluate": {"every": 10**6, "windows": 32}, "checkpoint": {"every": 10**6}, "sample": {"tokens": 0}}
        return [trained(options.out, base, f"{name}-{seed}", phases, tokens, section, seed) for seed in seeds]

    arms: dict[str, list[dict[str, float]]] = {}
    searched: dict[str, float] = {}

    def search(kind: str) -> tuple[str, float]:
        for lr in RATES[kind]:
            searched[f"{kind} {lr:g}"] = arm(f"{kind}-{lr:g}", rates(kind, lr), tokens=options.tokens // 4,
                                             seeds=seeds[:1])[0]["all"]
        lr = min(RATES[kind], key=lambda lr: searched[f"{kind} {lr:g}"])
        arms[f"{kind} {lr:g}"] = arm(f"{kind}-{lr:g}", rates(kind, lr))
        return f"{kind} {lr:g}", lr

    adamw, lr = search("adamw")
    for name, rate, schedule, last in (("constant", lr, "constant", False), ("last", lr, "wsd", True)):
        arms[name] = arm(f"{name}-{lr:g}", rates("adamw", rate), schedule, last)
    muon, _ = search("muon")
    arms["constant third"] = arm(f"third-{lr:g}", rates("adamw", lr / 3), "constant")
    comparisons = {"a: decay − constant": (adamw, "constant"),
                   "a: decay − constant at a third": (adamw, "constant third"),
                   "b: high quality last − spread": ("last", adamw),
                   "c: best Muon − best AdamW": (muon, adamw)}
    result = {"tokens": options.tokens, "model": MODEL, "torch": torch.__version__, "search": searched, "arms": arms,
              "differences": {
        name: {key: difference(arms[x], arms[y], key) for key in arms[x][0] if key != "seconds"}
        for name, (x, y) in comparisons.items()}}
    (options.out / "learning.json").write_text(json.dumps(result, indent=1, ensure_ascii=False))
    report(result, comparisons)


def rates(kind: str, lr: float) -> dict[str, Any]:
    return {"kind": kind, "lr": lr, "embedding_lr": EMBEDDING * lr}


def prepare(out: Path) -> Curriculum:
    """Return the curriculum that names the streams of all arms. If it does not exist yet, the recipe is run first."""
    done = out / "runs" / "base" / "curriculum.json"
    if not done.is_file():
        from pipeline.recipe import load_recipe
        from pipeline.run import make_backend, run_recipe

        recipe = load_recipe(Path(__file__).with_suffix(".yaml"), [])
        made = run_recipe(recipe, str(out), make_backend=make_backend("process", 1, None), run="base")
        print(f"tokens: {made.shards}", flush=True)
    return Curriculum.load(done)


def trained(out: Path, base: Curriculum, name: str, phases: list[dict[str, Any]], tokens: int, section: dict[str, Any],
            seed: int) -> dict[str, float]:
    """Train an arm, unless this has been done before. Returns its held-out losses in nats per token, by stream and for
    "all", and the "seconds" of the training."""
    said = json.dumps([phases, tokens, section, seed], sort_keys=True).encode()
    folder = out / "runs" / f"{name}-{hashlib.blake2b(said, digest_size=4).hexdigest()}"
    if not (folder / "train" / "summary.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        placed = resolve_phases(phases, tokens, {s.name: s.tokens for s in base.streams}, [])
        made = replace(base, seed=seed, phases=tuple(placed), order="")
        made.validate()
        replace(made, order=Order(made).hash()).save(folder / "curriculum.json")
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"train": {**section, "seed": seed}}))
        with world("cpu") as here:
            train(open_run(str(folder), str(out), None, []), here, say=lambda text: None)
    last = [line for line in read(folder / "train" / "metrics.jsonl") if line["event"] == "eval"][-1]
    seconds = json.loads((folder / "train" / "summary.json").read_text())["seconds"]
    found = {"all": last["loss"], **{stream: v["loss"] for stream, v in last["streams"].items()}, "seconds": seconds}
    print(f"{name:<28}" + "".join(f"{key} {value:<10.4f}" for key, value in found.items()), flush=True)
    return found


def difference(a: list[dict[str, float]], b: list[dict[str, float]], key: str) -> dict[str, float]:
    """The mean of a − b over the seeds, its standard deviation, and the half width of its 95 % interval. `key` names
    the loss that is compared: "all" or a stream."""
    each = [x[key] - y[key] for x, y in zip(a, b)]
    if len(each) < 2:
        return {"mean": each[0], "sd": math.nan, "half": math.nan}
    sd = statistics.stdev(each)
    return {"mean": statistics.mean(each), "sd": sd, "half": quantile(0.975, len(each) - 1) * sd / math.sqrt(len(each))}


def report(result: dict[str, Any], comparisons: dict[str, tuple[str, str]]) -> None:
    print("\nrates on a quarter of the tokens: " + ", ".join(f"{k}: {v:.4f}" for k, v in result["search"].items()))
    keys = [k for k in next(iter(result["arms"].values()))[0] if k != "seconds"]
    rule = "|---|" + "---|" * len(keys)
    print("\n| held-out loss, nats a token: mean ± σ of the seeds | " + " | ".join(keys) + f" |\n{rule}")
    for name, runs in result["arms"].items():
        columns = [[run[key] for run in runs] for key in keys]
        print(f"| {name} | " + " | ".join(f"{statistics.mean(c):.4f} ± {statistics.stdev(c) if c[1:] else math.nan:.4f}"
                                        for c in columns) + " |")
    print("\n| difference, paired by seed, 95 % interval | " + " | ".join(keys) + f" |\n{rule}")
    for name, found in result["differences"].items():
        x, y = comparisons[name]
        print(f"| {name} ({x} − {y}) | " + " | ".join(f"{found[k]['mean']:+.4f} ± {found[k]['half']:.4f}" for k in keys)
              + " |")


if __name__ == "__main__":
    main()
