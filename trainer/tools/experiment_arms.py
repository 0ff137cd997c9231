"""Runs the arms of a study: short trainings that are compared, each with several seeds. Prints a table of their
held-out losses with confidence intervals. The commands `anneal` and `ablate` use this module.

Each pair of arm and seed is a training in a folder of its own, OUT/NAME-seedN (with `--widths`: OUT/NAME-widthW-seedN).
The folder has everything that `tokenmill train run` needs: a curriculum.json and a recipe.yaml with the section
`train:`. The trainings run as processes, `--jobs` at a time (`trainer.tools.arm_processes`). A study that is started
again continues where it was stopped, and does not repeat finished trainings. Of a finished training, only the last
checkpoint is kept. The results are also in the folder OUT: table.json, table.txt, and the plots intervals.svg and
curves.svg.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.visible import json_text, visible
from trainer.base.arguments import positive, say
from trainer.tools.arm import Arm, check, label, write
from trainer.tools.arm_costs import cost_lines, costs
from trainer.tools.arm_table import ALL, BITS, LOSS, NATS, TASKS, Sources, lines, measured, table
from trainer.tools.arm_tasks import check_data, check_scoring, score_last, task_lines, task_results

NEEDS_PIPELINE = ("--data and --vary make data, which needs the pipeline: pip install 'tokenmill[pipeline]', and call "
                  "`tokenmill train`")

if TYPE_CHECKING:
    from tokenizer.mixture.curriculum import Curriculum


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=positive, default=2, metavar="S",
                        help="repeat every arm with S seeds, because one seed does not show the noise (default: 2)")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="train N arms at a time (default: 1)")
    parser.add_argument("--halving", action="store_true",
                        help="end the worse half of the arms after a quarter and after half of the steps")
    parser.add_argument("--by", choices=(LOSS, TASKS), default=LOSS,
                        help="what decides: the loss on held-out data, or the mean score on the benchmark tasks of "
                             "evaluate.tasks that can be trusted (default: loss)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--ranks", type=positive, metavar="N", help="N processes for each arm")
    parser.add_argument("--address", help="train the arms on this Ray cluster (host:port, or auto on one of "
                                          "its machines)")
    parser.add_argument("--gpus", type=positive, metavar="N", help="with --address: N GPUs for each arm")
    parser.add_argument("--ship-code", action="store_true", help="with --address: send this machine's code to the "
                                                                 "nodes")
    parser.add_argument("--insecure-local", action="store_true", help="with --address: accept a cluster without token "
                                                                      "authentication on this machine's loopback")
    parser.add_argument("--json", action="store_true", help="the table as JSON")


def add_data_arguments(parser: argparse.ArgumentParser, purpose: str) -> Any:
    """Add the options by which `pipeline.study` makes the data of a study from recipes and variants of them. `purpose`
    is the help text of `--data`. Returns the group of these options."""
    data = parser.add_argument_group("data (with the pipeline installed)")
    data.add_argument("--data", nargs="+", metavar="[NAME=]RECIPE", help=purpose)
    data.add_argument("--vary", nargs="+", action="append", default=[], metavar=("NAME", "KEY=VALUE"),
                      help="a variant of the first recipe: its name, and the keys in which it differs; repeatable")
    data.add_argument("--name", metavar="STUDY", help="name of the study (default: from the recipes)")
    data.add_argument("--workers", type=positive, metavar="N", help="processes that make the data (default: one for "
                                                                    "each core)")
    data.add_argument("--allow-custom-stages", action="store_true", help="let the recipes run their own code")
    return data


def perform(options: argparse.Namespace, arms: Sequence[Arm], prepare: Callable[[Arm], None] = lambda _arm: None,
            sources: Sources | None = None, unit: str = NATS) -> int:
    """Train all arms of a study (the trainings that it compares), and print the table of losses in `unit`. The results
    are also written to the folder that holds the arms' folders. Returns the exit code.

    `prepare` is called for every arm before any arm is trained. `sources` are named groups of streams (data sources) on
    whose held-out data the arms are compared; the first group decides which arms are better. By default, the first
    group is all held-out data that the arms have in common.
    """
    from trainer.base.files import alone, replace
    from trainer.data.remote import fetch_shards
    from trainer.tools.arm_plot import write_plots
    from trainer.tools.arm_processes import train_arms
    from trainer.tools.halving import halved

    refuse_contradictions(options)
    sources = sources or common_sources(arms)
    for arm in arms:                             # all at the start, before hours are spent on the first arms
        check(arm)
    announce = (lambda _text: None) if options.json else say
    scored = check_scoring(arms, options.by, announce)
    for run in (arm.run for arm in arms if arm.run.source and not arm.seed):
        fetch_shards(str(run.source), run.curriculum, announce, "all")
    if scored:
        check_data(arms)
    if unit == BITS:
        refuse_masked(arms, sources)
    folder = arms[0].run.out.parent
    with alone(folder):
        for arm in arms:
            prepare(arm)
            write(arm)
        every, ended = arms, list[dict[str, Any]]()
        if options.halving:
            arms, ended = halved(arms, options, announce, next(iter(sources.values())), unit)
        train_arms(arms, options, announce)
        if scored:
            score_last(arms, announce)
        result = {**results(arms, sources, unit, options.by, scored),
                  "costs": costs(every, {one["arm"]: one["share"] for one in ended}),
                  **({"ended": ended} if options.halving else {})}
        text = report(result)
        replace(folder / "table.json", json_text(result, indent=1) + "\n")
        replace(folder / "table.txt", text + "\n")
        outs: dict[str, list[Path]] = {}
        for arm in arms:
            outs.setdefault(label(arm), []).append(arm.run.out)
        write_plots(folder, result, outs, sources, unit)
    print(json_text(result) if options.json else visible(text))
    return 0


def refuse_contradictions(options: argparse.Namespace) -> None:
    """Raise ConfigError when options exclude each other or lack one that they need, and when this process is a rank of
    torchrun."""
    from trainer.base.config import ConfigError

    if "RANK" in os.environ:
        raise ConfigError("a study starts the processes of its arms itself; start it without torchrun, as one process, "
                          "with --ranks N or --jobs N")
    if (options.gpus or options.ship_code or options.insecure_local) and not options.address:
        raise ConfigError("--gpus, --ship-code and --insecure-local need --address; on this machine use --jobs N")
    if options.halving and getattr(options, "widths", None):
        raise ConfigError("--halving compares all arms with each other, and losses of models of different --widths do "
                          "not compare; leave out one of the two options")
    if options.halving and options.by == TASKS:
        raise ConfigError("--halving ends arms by their held-out loss, but --by tasks decides by scores on tasks; leave"
                          " out one of the two options")
    if options.gpus and options.ranks:
        raise ConfigError("give --gpus N (one rank a GPU) or --ranks N (CPU), not both")


def held_out(curriculum: Curriculum) -> dict[str, str | None]:
    """Return {name of a stream (data source): sha256 of its held-out data} for those streams of a curriculum that have
    held-out data."""
    return {s.name: s.val_sha256 for s in curriculum.streams if s.val and s.val_tokens > 1}


def common_sources(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """Return the sources (rows of the table that compares the arms of a study), each with its streams. There is one for
    each stream whose held-out data is the same in all arms; losses on different data could not be compared. If there
    are several such streams, a source ALL with all of them comes first. Raises ConfigError when there is none."""
    from trainer.base.config import ConfigError

    first, *others = [held_out(arm.run.curriculum) for arm in arms]
    common = [name for name, sha256 in first.items() if all(sets.get(name) == sha256 for sets in others)]
    if not first and not any(others):
        raise ConfigError(f"{arms[0].run.folder}: its streams have no held-out data, by which arms are compared; give "
                          f"shards.*.val")
    if not common:
        raise ConfigError("no stream has the same held-out data in all arms, so their losses say nothing about each "
                          "other; let all hold out the same text: make the data with --held-out, or name a stream "
                          "with --on if its texts are the same")
    return {**({ALL: common} if len(common) > 1 else {}), **{name: [name] for name in common}}


def refuse_masked(arms: Sequence[Arm], sources: Sources) -> None:
    """Raise ConfigError if the held-out data of a stream in `sources` has loss masks, so that only spans of documents
    count in the loss. The bits per byte of such data are not known, because the bytes of single spans are not
    recorded."""
    from tokenizer.shards.reader import ShardSet
    from trainer.base.config import ConfigError

    names = {name for streams in sources.values() for name in streams}
    for arm in (arm for arm in arms if not arm.seed):
        for stream in (s for s in arm.run.curriculum.streams if s.name in names):
            if ShardSet(arm.run.store / str(stream.val), stream.val_sha256).counts(0, 0) is not None:
                raise ConfigError(f"{arm.run.store / str(stream.val)}: this held-out data has loss masks, so its bits "
                                  f"per byte are not known; judge by another stream with --on")


def results(arms: Sequence[Arm], sources: Sources, unit: str, by: str, scored: bool) -> dict[str, Any]:
    """Read the results of the trained arms of a study. Returns the content of table.json without the costs. It is the
    result of `arm_table.table`, for models of several widths that of the widest; "widths" then has a table for each
    width. If the arms are `scored` on benchmark tasks, each table also has "tasks" (see `task_results`) and "by" (what
    decides about the arms)."""
    losses: dict[int | None, dict[str, list[dict[str, float]]]] = {}
    for arm in arms:
        summary = json.loads((arm.run.out / "summary.json").read_text(encoding="utf-8"))
        values = measured(summary["streams"], sources, unit)
        by_arm = losses.setdefault(arm.width, {})
        by_arm.setdefault(arm.name, []).append(values)
    tables = {width: table(by_arm, unit) for width, by_arm in losses.items()}
    if scored:
        tasks = task_results(arms)
        tables = {width: {**one, "by": by, "tasks": tasks[width]} for width, one in tables.items()}
    result = tables[list(tables)[-1]]
    return result if len(tables) == 1 else {**result, "widths": {str(width): one for width, one in tables.items()}}


def report(result: Mapping[str, Any]) -> str:
    """Format the content of table.json, the result of a study, as text."""
    tables = {f"models of width {width}": one for width, one in result.get("widths", {}).items()} or {"": result}
    out: list[str] = []
    for title, one in tables.items():
        out += [*([title, ""] if title else []), *lines(one), "", *([*task_lines(one), ""] if "tasks" in one else [])]
    if len(tables) > 1:
        out += [*agreement(list(tables.values())), ""]
    early = [f"{one['arm']} was ended after {one['share']:.0%} of its steps (--halving), " + (
        "with a loss that is not finite" if one["delta"] is None else
        f"{one['delta']:+.4f} {result['unit']} from the first arm") for one in result.get("ended", ())]
    return "\n".join([*out, *early, *([""] if early else []), *cost_lines(result["costs"])])


def agreement(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that say whether models of different widths agree about the arms (trainings of a study). There is a
    line for each arm after the first: is its difference to the first arm on the same side at all widths? `tables` has a
    table of arms for each width."""
    decisive = [one["tasks"]["mean"] if one.get("by") == TASKS else next(iter(one["sources"].values()))
                for one in tables]
    out = []
    for name in tables[0]["arms"][1:] if all(decisive) else ():
        deltas = [of["arms"][name]["delta"] for of in decisive]
        same = len({delta < 0 for delta in deltas}) == 1
        out.append(f"{name}: {'the same side of' if same else 'NOT on one side of'} {tables[0]['arms'][0]} at all "
                   f"widths ({', '.join(f'{delta:+.4f}' for delta in deltas)})")
    return out
