"""`tokenmill train signal`: which benchmark tasks can be trusted for trainings of this kind? Every task is judged by
the scores that `evaluate.tasks` or `tokenmill train eval` has written (`trainer.evaluation.task_signal`).

Several trainings may be given, of several candidates (what is compared, such as data sets) and with several seeds. The
name of a folder says which: CANDIDATE-seedN or CANDIDATE-widthW-seedN, as `tokenmill train ablate` names folders. Any
other name is a candidate with one seed. The width in the name is ignored, because the size of a model is its number of
parameters.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.visible import json_text, visible

if TYPE_CHECKING:
    from trainer.evaluation.task_signal import ScoredRun, TaskSignal

ARM = re.compile(r"(?P<candidate>.+?)(-width\d+)?-seed(?P<seed>\d+)")


#: by field of a ScoreOrigin, what it means if the field differs
DIFFERENCES = {"sha256": "another version of the task", "shots": "another number of examples",
               "seed": "other examples (--seed)", "data": "other data"}


def add_parser(commands: Any) -> None:
    signal = commands.add_parser(
        "signal", description="Judge which benchmark tasks can be trusted for trainings of this kind: whether scores "
                              "rise with training, stand out from seeds and chance, and order candidates alike at all "
                              "steps and sizes.",
        epilog="example: tokenmill train signal store/runs/first/train/ablate")
    signal.add_argument("runs", metavar="RUN", nargs="+",
                        help="folder of a run or a training with scores (tasks.jsonl), or a folder with several of "
                             "them, such as that of a study; folders NAME-seed0, NAME-seed1, … are seeds of the same "
                             "candidate")
    signal.add_argument("--store", help="the store in which RUN is the name of a run")
    signal.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    from trainer.evaluation.task_signal import signals

    result = signals(read_runs(options.runs, options.store))
    print(json_text([s.to_json() for s in result], indent=1) if options.json else visible("\n".join(table(result))))
    return 0


def read_runs(names: Sequence[str], store: str | None) -> list[ScoredRun]:
    """Return the trainings that the arguments name, with their scores on benchmark tasks. Raises ConfigError if a
    training has no scores or is named twice, or if scores of a task cannot be compared (see `check_alike`)."""
    from trainer.base.config import ConfigError

    runs: dict[Path, ScoredRun] = {}
    for named, place in (folders for name in names for folders in scored_folders(name, store)):
        if place.resolve() in runs:
            raise ConfigError(f"{place}: is named twice, and would count as two seeds; name each training once")
        runs[place.resolve()] = read(named, place)
    check_alike(runs)
    return list(runs.values())


def check_alike(runs: Mapping[Path, ScoredRun]) -> None:
    """Raise ConfigError if scores of the same task cannot be compared. They must have the same task file, data, and
    number and seed of the examples before a question. `runs` has the trainings by the folder with their scores."""
    from trainer.base.config import ConfigError
    from trainer.evaluation.score_rows import NAME, ScoreOrigin, origin_of

    first: dict[str, ScoreOrigin] = {}
    for place, run in runs.items():
        for row in run.rows:
            own = origin_of(row)
            other = first.setdefault(row["task"], own)
            for key, what in DIFFERENCES.items():
                if getattr(own, key) != getattr(other, key):
                    raise ConfigError(f"{place / NAME}: {row['task']} at step {row['step']} was scored with {what} "
                                      f"than other steps or trainings; score all alike: `tokenmill train eval RUN "
                                      f"--steps all` with the same --data, --shots and --seed")


def scored_folders(name: str, store: str | None) -> list[tuple[Path, Path]]:
    """Return the trainings that the argument `name` names, each as (folder whose name says candidate and seed, folder
    with the scores). The argument is a run, a training's folder, or a folder of trainings. Raises ConfigError if there
    is no such folder, or if no training in it has scores."""
    from trainer.base.config import ConfigError
    from trainer.evaluation.score_rows import NAME

    folder = Path(name)
    if store and not folder.is_dir():
        folder = Path(store) / "runs" / name
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give that of a run or a training, or --store STORE and the name "
                          f"of a run")
    own = [(folder, place) for place in (folder / "train", folder) if (place / NAME).is_file()][:1]
    folders = own or [(place, place) for place in sorted(folder.glob("*/")) if (place / NAME).is_file()]
    if not folders:
        raise ConfigError(f"{folder}: no {NAME} there; score checkpoints with train.evaluate.tasks, or with `tokenmill "
                          f"train eval RUN --steps all`")
    return folders


def read(named: Path, place: Path) -> ScoredRun:
    from trainer.base.config import ConfigError
    from trainer.evaluation.score_rows import NAME, read_rows
    from trainer.evaluation.task_signal import ScoredRun

    rows = read_rows(place)
    if not rows:
        raise ConfigError(f"{place / NAME}: no scores in it yet; wait until a checkpoint is scored")
    arm = ARM.fullmatch(named.absolute().name)
    candidate, seed = (arm["candidate"], int(arm["seed"])) if arm else (named.absolute().name, 0)
    return ScoredRun(candidate, rows[0].get("parameters", 0), seed, rows)


def table(result: Sequence[TaskSignal]) -> list[str]:
    """Format the verdicts on benchmark tasks as the lines of a table."""
    width = max((len(s.task) for s in result), default=4) + 2
    out = [f"{'task':<{width}}{'measure':<21}{'monotonic':>9}{'gain/noise':>12}{'from chance':>13}{'early':>7}"
           f"{'sizes':>7}  verdict"]
    for s in result:
        cells = "".join(f"{'–' if value is None else format(value, form):>{size}}" for value, form, size in (
            (s.monotonicity, ".2f", 9), (s.gain, ".1f", 12), (s.distance, ".1f", 13), (s.early, ".2f", 7),
            (s.sizes, ".2f", 7)))
        out.append(f"{s.task:<{width}}{s.measure:<21}{cells}  {s.verdict}: {s.reason}")
    used = sorted({s.task for s in result if s.verdict == "use"})
    return [*out, "", f"to be trusted by at least one measure: {', '.join(used) or 'no task'}"]
