"""`tokenmill train eval RUN --follow`: scores the checkpoints of a training on benchmark tasks as they appear, and ends
when the training is at its end and everything is scored.

A training with `evaluate.tasks` starts this command as a process beside it. The command can also run as a job of its
own, on another machine that shares the folder. It does not repeat scores that exist, so it may be killed and started at
any time.

While a checkpoint is scored, the training does not delete it. A training with `evaluate.tasks` also keeps the latest
checkpoints that are still to be scored (`checkpoints.retain`). If a checkpoint is deleted before it is scored, a line
says so.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.clock import SYSTEM, Clock
from trainer.base.arguments import positive, say
from trainer.tools import task_eval
from trainer.tools.arm import place_of
from trainer.tools.evaluation_progress import EvaluationProgress
from trainer.tools.task_eval import checked, evaluate_model, prepare_all, reader_of, run_folder

if TYPE_CHECKING:
    from trainer.checkpoint.checkpoints import Checkpoint, DamagedCheckpoint
    from trainer.evaluation.evaluate import PreparedTask, PromptReader
    from trainer.evaluation.task_file import EvalTask

#: seconds between two looks for new checkpoints
POLL_S = 1.0


def add_parser(commands: Any) -> None:
    evaluate = task_eval.add_parser(commands)
    evaluate.add_argument("--follow", action="store_true",
                          help="score checkpoints as a training writes them, until the training ends; what has scores "
                               "is left out (default of --data, --tasks and --shots: the recipe's evaluate.tasks)")
    evaluate.add_argument("--every", type=positive, metavar="N",
                          help="with --follow: only checkpoints of every Nth step, and those at the ends of phases")
    evaluate.add_argument("--end-with", type=positive, help=argparse.SUPPRESS)   # pid of the training that starts this


def run(options: argparse.Namespace) -> int:
    from trainer.base.config import ConfigError

    if options.every and not options.follow:
        raise ConfigError("--every is for --follow; name the checkpoints with --steps")
    if options.steps and options.follow:
        raise ConfigError("--follow scores all checkpoints; leave out --steps, or choose some with --every")
    if options.out and options.follow:
        raise ConfigError("--follow writes its results to the folder of the training; leave out --out")
    if options.model is not None:
        options.store, options.trained = place_of(run_folder(options), options.store, options.trained)
    if not options.follow or options.list:
        return task_eval.run(options)
    if options.model is not None and options.data is None:
        settings(options)
    return follow(options, *checked(options))


def settings(options: argparse.Namespace) -> None:
    """Complete the options from the recipe's section `evaluate.tasks`, if --data is not given: the data, and those of
    --tasks, --every and --shots that are not given. Raises ConfigError if the recipe has no such section."""
    from trainer.base.config import ConfigError
    from trainer.loop.run import open_run

    config = open_run(str(run_folder(options)), options.store, options.trained, []).config.evaluate.tasks
    if config is None:
        raise ConfigError(f"{run_folder(options) / 'recipe.yaml'}: train.evaluate.tasks is missing; add it, or give "
                          f"the folder with the tasks' data: --data FOLDER")
    options.data, options.tasks = config.data, options.tasks or ",".join(config.tasks)
    options.every = options.every or config.every
    options.shots = config.shots if options.shots is None else options.shots


def follow(options: argparse.Namespace, tasks: Sequence[EvalTask], data: Path, clock: Clock = SYSTEM) -> int:
    """Score checkpoints as they appear, until the training is at the end of its curriculum and everything is scored.
    Returns the exit code 0."""
    from trainer.base.config import CheckpointError, ConfigError, TrainingError
    from trainer.checkpoint.checkpoints import survey
    from trainer.evaluation import score_rows
    from trainer.evaluation.models import of_checkpoint

    run = run_folder(options)
    out = Path(options.trained) if options.trained else run / "train"
    store = Path(options.store) if options.store else run.absolute().parent.parent
    if not (run / "curriculum.json").is_file():
        raise ConfigError(f"{run / 'curriculum.json'}: no such file; --follow needs the folder of a run")
    score_rows.rebuild(out)
    done: set[Path] = set()                                      # nothing is left to do with these checkpoints
    seen = 0                                                     # the latest step that had a checkpoint
    prepared: dict[Any, tuple[PromptReader, list[PreparedTask]]] = {}
    heartbeat = Heartbeat(options.end_with)
    with heartbeat:
        while True:
            heartbeat.show("")
            checkpoints, damaged = survey(out / "checkpoints")
            if missing_steps := absent(checkpoints, damaged, options.every, seen, out, tasks):
                say(f"there is no checkpoint of step {missing_steps}: it was deleted before it was scored, or never "
                    f"written; keep more with checkpoint.keep or keep_every", sys.stderr)
            seen = max([seen, *(c.step for c in checkpoints)])
            ended = any(c.meta["samples"] >= samples(run) for c in checkpoints)
            checkpoint = next((c for c in checkpoints if due(c, options.every) and c.folder not in done), None)
            if checkpoint is None:
                if ended:
                    return 0
                clock.sleep(POLL_S)
                continue
            done.add(checkpoint.folder)
            model = of_checkpoint(checkpoint, store)
            known = (model.tokenizer, model.context)
            if known not in prepared:
                reader = reader_of(model, options)
                prepared = {known: (reader, prepare_all(tasks, data, options, reader, heartbeat))}
            reader, ready = prepared[known]
            missing = unscored(ready, checkpoint, out)
            if not missing:
                continue
            try:
                with heartbeat.using([checkpoint.folder.parent]):
                    results = evaluate_model(model, reader, missing, out / score_rows.FOLDER, run, options, heartbeat)
            except (CheckpointError, TrainingError, FileNotFoundError) as error:
                say(f"step {checkpoint.step:,} is left out: {error}", sys.stderr)
                continue
            for result in results:
                say(f"step {checkpoint.step:>6}  {result['task']}: " + ", ".join(
                    f"{name} {measure['value']:.4f}" for name, measure in result["measures"].items()))


class Heartbeat(EvaluationProgress):
    """Renews the mark by which the checkpoint that is being scored is protected from deletion, instead of showing
    progress. Each call of `show` also ends this process if the process `pid` (the training) has ended."""

    def __init__(self, pid: int | None) -> None:
        super().__init__()
        self.pid, self.terminal = pid, False

    def show(self, text: str) -> None:
        if self.pid is not None and not alive(self.pid):
            raise SystemExit(1)
        self.refresh()


def due(checkpoint: Checkpoint, every: int | None) -> bool:
    return not every or checkpoint.step % every == 0 or bool(checkpoint.meta.get("pinned"))


def absent(checkpoints: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpoint], every: int | None, after: int,
           out: Path, tasks: Sequence[EvalTask]) -> str:
    """Return, as text, the steps whose checkpoints should be scored but do not exist. They are multiples of `every`
    after step `after` and before the latest checkpoint. They have no checkpoint, and lack results of some tasks. At
    most ten steps are named; the others are counted. Returns "" if there are none, or if `every` is None."""
    from trainer.evaluation.score_rows import step_folder

    there = {c.step for c in checkpoints} | {c.step for c in damaged}
    latest = max((c.step for c in checkpoints), default=0)
    due_steps = range(every * (after // every + 1), latest, every) if every else ()
    steps = [step for step in due_steps if step not in there and not all(
        (step_folder(out, step) / f"{task.name}.json").is_file() for task in tasks)]
    more = f" and {len(steps) - 10:,} more" if len(steps) > 10 else ""
    return ", ".join(map(str, steps[:10])) + more


def samples(run: Path) -> int:
    """Return how many samples the curriculum of the run has. The file is read at each call, because a curriculum may be
    prolonged while the training goes on."""
    from tokenizer.mixture.curriculum import Curriculum

    return Curriculum.load(run / "curriculum.json").samples


def unscored(prepared: Sequence[PreparedTask], checkpoint: Checkpoint, out: Path) -> list[PreparedTask]:
    """Return those prepared tasks that have no result for this checkpoint of the training in the folder `out`. A result
    counts only if it is from the same attempt to write the checkpoint, and from the same version, data, examples and
    seed of the task. If the task is to run programs (--allow-code), the result must also have scores of programs."""
    from trainer.evaluation.score_rows import origin_of, results_by_origin

    results = results_by_origin(out, checkpoint)
    return [task for task in prepared if (result := results.get(origin_of(task.identity))) is None
            or ("code" in task.task.file.forms and "code" not in result["measures"])]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
