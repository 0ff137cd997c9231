"""Scores of the arms of a study (the trainings that it compares) on benchmark tasks. With `--by tasks`, these scores
decide about the arms.

If the settings have `evaluate.tasks`, every arm scores its checkpoints while it is trained. Scores that the last
checkpoint lacks are computed at the end of the study. `trainer.evaluation.task_signal` judges the tasks by all arms of
the study together; only tasks that pass count.

The arms are compared by their mean bits per byte over the tasks that count, each with the same weight (as in OLMo 3's
Base Easy suite). Bits per byte move smoothly and have one unit, while accuracies of small models stay at chance. A task
without bits per byte, such as BLiMP, is shown but not in the mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainer.tools.arm import Arm, label
from trainer.tools.arm_table import ALL, BITS, TASKS, cell, table, verdicts

if TYPE_CHECKING:
    from tokenizer.mixture.phases import Phase
    from trainer.evaluation.task_signal import ScoredRun, TaskSignal
    from trainer.loop.config import TaskScoringConfig

#: the measure whose mean over tasks is taken
MEASURE = "bpb"


def check_config(config: TaskScoringConfig | None, by: str) -> None:
    """Check the settings `evaluate.tasks` of a study. `config` are these settings (None: not given). Raises ConfigError
    when a task does not exist, has no data, or has only the form `code` (which runs programs that the model writes).
    Also raises it when tasks are to decide about the arms (`by`) but `config` is None."""
    from trainer.base.config import ConfigError
    from trainer.loop.task_watcher import scorable_tasks

    if config is not None:
        scorable_tasks(config)
    elif by == TASKS:
        raise ConfigError("--by tasks: the settings have no evaluate.tasks; add it to train: in the recipe, or with"
                          " --set evaluate.tasks='{every: N, tasks: [arc_easy], data: FOLDER}'")


def check_scoring(arms: Sequence[Arm], by: str, announce: Callable[[str], None]) -> bool:
    """Return whether the arms of a study score their checkpoints on tasks. Raises ConfigError as `check_config` does,
    and when the settings of the tasks differ between arms. If too few checkpoints are scored to judge a task,
    `announce` gets a message; if tasks decide about the arms (`by`), ConfigError is raised instead."""
    from trainer.base.config import ConfigError

    settings = {arm.run.config.evaluate.tasks for arm in arms}
    if len(settings) > 1:
        raise ConfigError("evaluate.tasks: differs between the arms, so their scores do not compare; give all arms the "
                          "same")
    [config] = settings
    check_config(config, by)
    if config is None:
        return False
    messages = [too_few(config, arm.run.curriculum.phases, arm.step) for arm in arms]
    if message := next(filter(None, messages), ""):
        if by == TASKS:
            raise ConfigError(f"--by tasks: {message}")
        announce(message)
    return True


def too_few(config: TaskScoringConfig, phases: Sequence[Phase], begin: int = 0) -> str:
    """Return a message if an arm of a study scores too few of its checkpoints to judge a task, else "". The message
    says which settings to change. `phases` are those of the arm, and `begin` is the step at which it begins."""
    from trainer.evaluation.task_signal import LEAST_STEPS

    scored, new = len(scored_steps(config.every, phases, begin)), sum(phase.steps for phase in phases) - begin
    return "" if scored >= LEAST_STEPS else (
        f"each arm scores {scored} of its checkpoints on tasks, and {LEAST_STEPS} are needed to judge whether a task "
        f"is to be trusted; let evaluate.tasks.every and checkpoint.every be at most {max(1, new // LEAST_STEPS)}")


def check_data(arms: Sequence[Arm]) -> None:
    """Raise ConfigError when the benchmark tasks of a study cannot be scored. The tokenizers of the arms must have been
    fetched before."""
    from trainer.loop.task_watcher import check_tasks

    for run in {(arm.run.curriculum.tokenizer.sha256, arm.run.curriculum.phases[0].sequence): arm.run
                for arm in arms}.values():
        check_tasks(run)


def scored_steps(every: int, phases: Sequence[Phase], begin: int) -> list[int]:
    """Return the steps of an arm (a training of a study) whose checkpoints are scored. The arm begins with the
    checkpoint of step `begin`. The steps are the multiples of `every` from `begin` on, and the ends of phases
    (stretches of the training) after it."""
    ends = list(accumulate(phase.steps for phase in phases))
    multiples = range(every, ends[-1], every)                     # `begin` itself may be one of them
    return sorted({step for step in ends if step > begin} | {step for step in multiples if step >= begin})


def score_last(arms: Sequence[Arm], announce: Callable[[str], None]) -> None:
    """Score the last checkpoint of each arm of a study on those tasks for which it has no score. This is needed if the
    process that scores beside a training has failed, or if `evaluate.tasks` was added after the training."""
    from trainer.checkpoint.checkpoints import complete
    from trainer.evaluation import score_rows
    from trainer.evaluation.models import of_checkpoint
    from trainer.evaluation.task_file import tasks_named, without_code
    from trainer.tools.evaluation_progress import EvaluationProgress
    from trainer.tools.task_eval import evaluate_model, prepare_all, reader_of
    from trainer.tools.task_follow import unscored

    config = arms[0].run.config.evaluate.tasks
    assert config is not None
    options = argparse.Namespace(device=config.device, shots=config.shots, seed=0, batch=None, contaminated=None,
                                 out=None, tasks=config.tasks)
    tasks, prepared = [without_code(task) for task in tasks_named(config.tasks)], dict[Any, Any]()
    with EvaluationProgress() as progress:
        for arm in arms:
            checkpoint = complete(arm.run.out / "checkpoints")[-1]
            model = of_checkpoint(checkpoint, arm.run.store)
            known = (model.tokenizer, model.context)
            if known not in prepared:
                reader = reader_of(model, options)
                prepared = {known: (reader, prepare_all(tasks, Path(config.data), options, reader, progress))}
            reader, ready = prepared[known]
            if missing := unscored(ready, checkpoint, arm.run.out):
                announce(f"scoring {label(arm)}, seed {arm.seed}, on {len(missing)} tasks")
                evaluate_model(model, reader, missing, arm.run.out / score_rows.FOLDER, arm.run.out, options, progress)


def read_scores(arms: Sequence[Arm]) -> list[ScoredRun]:
    """Return the scores of each arm of a study on the tasks of its settings `evaluate.tasks`. Scores from another
    version of a task's file, with other examples before the questions, or on other data are left out."""
    from trainer.evaluation.score_rows import origin_of, read_rows
    from trainer.evaluation.task_signal import ScoredRun
    from trainer.loop.task_watcher import wanted_scores

    config = arms[0].run.config.evaluate.tasks
    assert config is not None
    wanted = wanted_scores(config)
    return [ScoredRun(arm.name, arm.run.config.model.parameters(arm.run.vocab), arm.seed,
                      [row for row in read_rows(arm.run.out) if origin_of(row) in wanted]) for arm in arms]


def task_results(arms: Sequence[Arm]) -> dict[int | None, dict[str, Any]]:
    """Return how the arms of a study compare on benchmark tasks, as {width of the models: comparison}. Tasks on which
    the last checkpoint of any arm has no score are left out. A comparison has three keys:

        counted  names of the tasks that count
        mean     result for the mean over these tasks; None if there are none
        scores   {task: a result with the further keys "measure", "verdict", "reason" and "checkpoints"}

    A result has the keys that `arm_table.table` gives to a source, with "score" for "loss". "verdict" and "reason" are
    those of `trainer.evaluation.task_signal`; "checkpoints" is the number of checkpoints of an arm that have scores.
    """
    from trainer.evaluation.score_rows import main_row
    from trainer.evaluation.task_signal import signals

    runs = read_scores(arms)
    verdict_of = {(s.task, s.measure): s for s in signals(runs)}
    last: list[dict[str, Mapping[str, Any]]] = []                 # by arm: the main row of each task at its last step
    for arm, run in zip(arms, runs):
        by_task: dict[str, list[Mapping[str, Any]]] = {}
        for row in run.rows:
            if row["step"] == arm.run.curriculum.steps:
                by_task.setdefault(row["task"], []).append(row)
        last.append({task: main_row(rows) for task, rows in by_task.items()})
    shared = [task for task in last[0] if all(task in of for of in last)]
    judged: dict[str, TaskSignal] = {task: verdict_of[task, last[0][task]["measure"]] for task in shared}
    counted = [task for task, signal in judged.items() if signal.verdict == "use" and signal.measure == MEASURE]
    out = {}
    for width in dict.fromkeys(arm.width for arm in arms):
        values: dict[str, list[dict[str, float]]] = {}
        means: dict[str, list[dict[str, float]]] = {}
        for arm, rows_by_task in ((arm, rows) for arm, rows in zip(arms, last) if arm.width == width):
            values.setdefault(arm.name, []).append({task: rows_by_task[task]["value"] for task in shared})
            means.setdefault(arm.name, []).append(
                {ALL: fmean(rows_by_task[task]["value"] for task in counted)} if counted else {})
        of = table(values)["sources"]
        mean = scores(table(means)["sources"][ALL]) if counted else None
        out[width] = {"counted": counted, "mean": mean, "scores": {
            task: {"measure": signal.measure, "verdict": signal.verdict, "reason": signal.reason,
                   "checkpoints": signal.steps, **scores(of[task])}
            for task, signal in judged.items()}}
    return out


def scores(source: Mapping[str, Any]) -> dict[str, Any]:
    arms = {name: {"score": arm["loss"], **{key: arm[key] for key in arm if key != "loss"}}
            for name, arm in source["arms"].items()}
    return {**source, "arms": arms}


def task_lines(result: Mapping[str, Any]) -> list[str]:
    """Format how the arms of a study compare on benchmark tasks as lines of text. `result` is a table of the arms, with
    the key "tasks" (see `task_results`). If tasks decide about the arms, verdicts in words follow."""
    tasks, seeds = result["tasks"], result["seeds"]
    number = len(tasks["counted"])
    first, *others = result["arms"]
    name_width = max(16, *(len(task) + 2 for task in tasks["scores"]), 0)
    width = max(12, *(len(n) + 2 for n in result["arms"]))
    out = [f"scores on tasks at the last step, means of {seeds} seed{'s' * (seeds > 1)}; differences to {first}: of "
           f"bpb, negative is better, else positive", "",
           f"{'task':<{name_width}}{'measure':<9}{first:>{width}}" + "".join(f"{n:>{width}}" for n in others)
           + f"{'noise':>12}  counts"]
    rows = [(task, of["measure"], of, counts(task, of, tasks["counted"])) for task, of in tasks["scores"].items()]
    if tasks["mean"]:
        rows.append((f"mean of {number}", MEASURE, tasks["mean"], ""))
    for name, measure, of, counted in rows:
        cells = [cell(of["arms"][n]) for n in others]
        noise = "unknown" if of["noise"] is None else f"±{of['noise']:.4f}"
        out.append(f"{name:<{name_width}}{measure:<9}{of['arms'][first]['score']:>{width}.4f}"
                   + "".join(f"{c:>{width}}" for c in cells) + f"{noise:>12}  {counted}".rstrip())
    if not tasks["mean"]:
        out += ["", f"no task counts for a mean; {remedy(tasks['scores'])}"]
    elif result["by"] == TASKS and seeds > 1:
        out += verdicts(result["arms"], tasks["mean"], f"the mean of {number} task{'s' * (number > 1)}", BITS)
    return out


def counts(task: str, of: Mapping[str, Any], counted: Sequence[str]) -> str:
    """Return text that says whether a benchmark task counts for the mean over tasks, and if not, why. `of` is the
    task's entry in the result of `task_results`, and `counted` are the tasks that count."""
    if task in counted:
        return "yes"
    if of["verdict"] == "use":
        return f"no: has no {MEASURE}; it passes as {of['measure']}"
    return f"no: {of['reason']}"


def remedy(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return advice for a study in which no benchmark task counts: what to change so that tasks count. `tasks` are the
    entries of all tasks in the result of `task_results`."""
    from trainer.evaluation.task_signal import LEAST_STEPS

    checkpoints = max((of["checkpoints"] for of in tasks.values()), default=0)
    if checkpoints < LEAST_STEPS:
        return (f"arms have scores of {checkpoints} checkpoints, and {LEAST_STEPS} are needed: train them again in "
                f"another folder (--out) with a smaller evaluate.tasks.every")
    return "train longer or larger models, or choose other tasks"
