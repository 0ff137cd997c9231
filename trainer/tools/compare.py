"""`tokenmill train compare A B …`: shows trainings side by side, at the number of tokens that all of them have reached.

Each argument is the folder of a run (STORE/runs/RUN) or the folder that was given to the training as `--out`. All
numbers come from metrics.jsonl. Training losses are means over the last twentieth of the tokens. Held-out losses are
compared at equal numbers of tokens: if the last evaluation of one training was earlier than those of the others,
earlier evaluations of the others are used.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.visible import json_text, visible

#: training losses are means over the last TAIL (a share) of the tokens up to the point of comparison
TAIL = 0.05
#: keys of metrics.jsonl that are kept in memory; the whole lines of a million steps would not fit
KEPT = ("event", "step", "tokens", "loss", "streams", "tokens_per_s", "mfu", "config", "phases", "world", "device")


def add_parser(commands: Any) -> None:
    compare = commands.add_parser("compare", description="Show trainings side by side at equal tokens: losses per "
                                                         "source, speed, and in what their settings and data differ.")
    compare.add_argument("trainings", nargs="+", metavar="A", help="folders of runs, or folders given as --out")
    compare.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    comparison = compare([Path(t) for t in options.trainings])
    print(json_text(comparison) if options.json else visible("\n".join(lines(comparison))))
    return 0


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Compare the trainings in `folders` at the number of tokens that all of them have reached. Returns {"tokens",
    "trainings": [{"name", "steps", "loss", "streams", "heldout", "heldout_streams", "heldout_tokens", "tokens_per_s",
    "mfu", "world", "device"}], "differences": {key of a setting: [a value for each training]}}. Raises ConfigError when
    a folder has no training that has performed a step."""
    from trainer.base.config import ConfigError
    from trainer.observe.metrics import scan, standing

    histories = []
    for folder in folders:
        path = next((p for p in (folder / "metrics.jsonl", folder / "train" / "metrics.jsonl") if p.is_file()), None)
        if path is None:
            raise ConfigError(f"{folder}: no metrics.jsonl there nor in train/; give the folder of a run that has been "
                              f"trained, or the --out of a training")
        history = standing({k: line[k] for k in KEPT if k in line} for line in scan(path))
        if not any(line["event"] == "step" for line in history):
            raise ConfigError(f"{path}: no step has been performed yet")
        histories.append(history)
    tokens = min(max(line["tokens"] for line in h if line["event"] == "step") for h in histories)
    # held-out losses are compared at equal tokens too: at the earliest of the trainings' last evaluations
    evaluated = [[e["tokens"] for e in h if e["event"] == "eval" and e["tokens"] <= tokens] for h in histories]
    judged = min((max(at) for at in evaluated if any(at)), default=0)
    first = [[line for line in h if line["event"] in ("start", "resume")][-1] for h in histories]
    facts = [{**flat(line.get("config", {}), "train."), "streams": line.get("streams"),
              **{f"phase {p['name']}.{k}": v for p in line.get("phases", ()) for k, v in p.items() if k != "name"}}
             for line in first]
    keys = list(dict.fromkeys(k for settings in facts for k in settings))
    return {"tokens": tokens,
            "trainings": [{"name": name, **at(h, tokens, judged), "world": f.get("world"), "device": f.get("device")}
                          for name, h, f in zip(short_names(folders), histories, first)],
            "differences": {k: [settings.get(k) for settings in facts] for k in keys
                            if any(settings.get(k) != facts[0].get(k) for settings in facts)}}


def at(history: Sequence[Mapping[str, Any]], tokens: int, judged_at: int) -> dict[str, Any]:
    """Return the numbers of one training after `tokens` tokens: losses, speed, MFU. `history` has the lines of the
    training's metrics.jsonl. The held-out losses are from the last evaluation within the first `judged_at` tokens, or
    from the first evaluation if all are later. A number that the lines do not have is None."""
    steps = [line for line in history if line["event"] == "step" and line["tokens"] <= tokens]
    tail = [line for line in steps if line["tokens"] > (1 - TAIL) * tokens] or steps[-1:]
    losses = [line["loss"] for line in tail if line.get("loss") is not None]
    names = dict.fromkeys(name for line in tail for name in line.get("streams") or ())
    by_stream = {name: [line["streams"][name] for line in tail if (line.get("streams") or {}).get(name) is not None]
          for name in names}
    evals = [line for line in history if line["event"] == "eval" and line["tokens"] <= tokens]
    judged = next((line for line in reversed(evals) if line["tokens"] <= judged_at), evals[0] if evals else {})
    speeds = [line["tokens_per_s"] for line in steps if line.get("tokens_per_s")]
    mfus = [line["mfu"] for line in steps if line.get("mfu") is not None]
    return {"steps": steps[-1]["step"] if steps else 0, "loss": statistics.fmean(losses) if losses else None,
            "streams": {name: statistics.fmean(v) for name, v in by_stream.items() if v},
            "heldout": judged.get("loss"), "heldout_tokens": judged.get("tokens"),
            "heldout_streams": {name: v["loss"] for name, v in judged.get("streams", {}).items()},
            "tokens_per_s": statistics.median(speeds) if speeds else None,
            "mfu": statistics.median(mfus) if mfus else None}


def lines(comparison: Mapping[str, Any]) -> list[str]:
    """Format the result of `compare` as lines of text: a table with a column for each training. Behind each loss, its
    difference from the first training's loss is given in brackets."""
    trainings = comparison["trainings"]
    width = max(20, *(len(t["name"]) + 2 for t in trainings))

    def row(label: str, values: Sequence[Any], form: str = "", delta: bool = False) -> str:
        cells = []
        for i, value in enumerate(values):
            cell = "–" if value is None else format(value, form)
            if delta and i and value is not None and values[0] is not None:
                cell += f" ({value - values[0]:+.4f})"
            cells.append(f"{cell:>{width}}")
        return f"{label:<24}" + "".join(cells)

    out = [f"at {comparison['tokens']:,} tokens", "", row("", [t["name"] for t in trainings]),
           row("steps", [t["steps"] for t in trainings], ","),
           row("training loss", [t["loss"] for t in trainings], ".4f", True)]
    for kind, label in (("streams", ""), ("heldout_streams", "held-out ")):
        if kind == "heldout_streams":
            out.append(row("held-out loss", [t["heldout"] for t in trainings], ".4f", True))
        out += [row(f"  {label}{name}", [t[kind].get(name) for t in trainings], ".4f", True)
                for name in dict.fromkeys(n for t in trainings for n in t[kind])]
    if {t["heldout_tokens"] for t in trainings} - {None, comparison["tokens"]}:
        out.append(row("  evaluated at", [t["heldout_tokens"] for t in trainings], ","))
    out += [row("tokens/s", [t["tokens_per_s"] for t in trainings], ",.0f"),
            row("MFU", [t["mfu"] for t in trainings], ".1%"),
            row("ranks", [t["world"] for t in trainings]), row("device", [t["device"] for t in trainings])]
    if comparison["differences"]:
        out += ["", "differs:", *(row(f"  {key}", [json.dumps(v, ensure_ascii=False) for v in values])
                                  for key, values in comparison["differences"].items())]
    return out


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each of `folders`: the last part of its path, or as many last parts as are needed to tell
    the folders apart."""
    parts = [f.absolute().parts for f in folders]
    for n in range(1, max(map(len, parts))):
        names = ["/".join(p[-n:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(f) for f in folders]


def flat(mapping: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in mapping.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
