"""`tokenmill train eval`: scores checkpoints, or an exported model, on benchmark tasks.

The data of the tasks is read from a folder, `--data`. Tasks, data and prompts are checked before the model is loaded.
The results of a task are written to RUN/train/evaluation/step_N/TASK.json (of an exported model:
EXPORT/evaluation/TASK.json), with a line for each item in TASK.items.jsonl beside it. RUN/train/tasks.jsonl has the
scores of all checkpoints, except those that were scored with `--out`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.visible import json_text, visible
from trainer.base.arguments import positive, say
from trainer.tools.evaluation_progress import EvaluationProgress

if TYPE_CHECKING:
    from trainer.evaluation.evaluate import PreparedTask, PromptReader, TaskScores
    from trainer.evaluation.models import StoredModel
    from trainer.evaluation.task_file import EvalTask

#: default of --batch, by device
BATCH = {"cpu": 2048, "cuda": 32768}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    evaluate = commands.add_parser(
        "eval", description="Score checkpoints, or an exported model, on benchmark tasks: bits per byte of the right "
                            "answer, cloze and multiple choice, minimal pairs, last word, short generation.",
        epilog="example: tokenmill train eval store/runs/first --data evals --tasks hellaswag,arc_easy --steps all")
    evaluate.add_argument("model", metavar="RUN|EXPORT", nargs="?",
                          help="folder of a run (STORE/runs/RUN) or of a study's arm, a run's name with --store, or "
                               "what `train export` wrote")
    evaluate.add_argument("--data", metavar="FOLDER", help="folder with the data of the tasks")
    evaluate.add_argument("--tasks", metavar="T,…", help="names of tasks, or task files (.yaml), with commas between "
                                                         "(default: all tasks whose data is in --data)")
    evaluate.add_argument("--list", action="store_true", help="only list the tasks, and with --data where their "
                                                                 "data is")
    evaluate.add_argument("--steps", type=steps_named, metavar="all|N,…",
                          help="which checkpoints of RUN (default: the latest)")
    evaluate.add_argument("--store", help="the store of RUN and its tokenizer (default: two folders above RUN)")
    evaluate.add_argument("--trained", metavar="FOLDER", help="the --out of the training (default: RUN/train)")
    evaluate.add_argument("--out", metavar="FOLDER",
                          help="where the results go (default: RUN/train/evaluation, or EXPORT/evaluation)")
    evaluate.add_argument("--shots", type=lambda t: positive(t, 0), metavar="N",
                          help="number of examples before each question (default: as the task's file says)")
    evaluate.add_argument("--seed", type=lambda t: positive(t, 0), default=0, metavar="N",
                          help="seed for the choice of examples (default: 0)")
    evaluate.add_argument("--contaminated", metavar="FILE",
                          help="score the items that this file names apart (default: RUN/contamination.jsonl, which "
                               "the step decontaminate writes)")
    evaluate.add_argument("--allow-code", action="store_true",
                          help="also run the programs that the model writes (humaneval), in processes that can only "
                               "compute; needs Linux with seccomp and Landlock")
    evaluate.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                          help="auto: a GPU if there is one (bfloat16; on a CPU float32)")
    evaluate.add_argument("--batch", type=positive, metavar="TOKENS",
                          help=f"largest batch in tokens (default: {BATCH['cpu']:,} on a CPU, {BATCH['cuda']:,} on a "
                               f"GPU)")
    evaluate.add_argument("--json", action="store_true", help="JSON instead of a table")
    return evaluate


def steps_named(text: str) -> list[int] | str:
    """Parse the value of --steps: the word all, or numbers of steps with commas between them."""
    return text if text == "all" else [positive(part) for part in text.split(",")]


def run(options: argparse.Namespace) -> int:
    from trainer.evaluation.task_file import built_in, tasks_named

    if options.list:
        return list_tasks(tasks_named(options.tasks.split(",") if options.tasks else list(built_in())), options)
    tasks, data = checked(options)
    folder, models = open_models(options)
    out = writable(Path(options.out) if options.out else folder / "evaluation")
    refuse_loss_of_programs(tasks, models, out)
    steps = [folder / "checkpoints" / f"step_{model.step:08d}" for model in models if model.step is not None]
    results = []
    with EvaluationProgress() as progress, progress.using(steps):
        prepared: dict[Any, tuple[PromptReader, list[PreparedTask]]] = {}
        for model in models:
            reader = reader_of(model, options)
            known = (model.tokenizer, model.context)         # checkpoints that read alike share the prepared tasks
            if known not in prepared:
                prepared = {known: (reader, prepare_all(tasks, data, options, reader, progress))}
            results += evaluate_model(model, *prepared[known], out, run_folder(options), options, progress)
    print(json_text(results, indent=1) if options.json else visible("\n".join(table(results))))
    return 0


def checked(options: argparse.Namespace) -> tuple[list[EvalTask], Path]:
    """Return the tasks that the options name (without --tasks, all built-in ones whose data is there), and the folder
    with their data. Raises ConfigError when the options do not fit together, or when no task is left."""
    from trainer.base.config import ConfigError
    from trainer.evaluation.task_file import built_in, tasks_named
    from trainer.parallel.world import check_device

    tasks = tasks_named(options.tasks.split(",") if options.tasks else list(built_in()))
    if options.model is None or options.data is None:
        raise ConfigError("give a RUN or an exported model, and the folder with the tasks' data: --data FOLDER")
    check_device(options.device)
    data = Path(options.data)
    if not data.is_dir():
        raise ConfigError(f"--data {data}: is no folder; give the folder with the tasks' data")
    return runnable(tasks if options.tasks else present(tasks, data), options), data


def runnable(tasks: Sequence[EvalTask], options: argparse.Namespace) -> list[EvalTask]:
    """Return the tasks as they can be run. The form `code` runs programs that the model writes. Without --allow-code,
    it is removed from tasks that have it, and a line is printed about each; ConfigError is raised when such a task has
    no other form. With --allow-code, ConfigError is raised when programs cannot be isolated on this machine."""
    from trainer.base.config import ConfigError
    from trainer.evaluation.programs import check_isolation
    from trainer.evaluation.task_file import without_code

    coded = [task for task in tasks if "code" in task.file.forms]
    if coded and options.allow_code:
        check_isolation()
    if not coded or options.allow_code:
        return list(tasks)
    for task in coded:
        others = [form for form in task.file.forms if form != "code"]
        if not others:
            raise ConfigError(f"{task.name}: runs programs that the model writes; allow it with --allow-code, or leave "
                              f"the task out")
        say(f"{task.name}: only {', '.join(others)}; --allow-code also runs the programs that the model writes",
            sys.stderr)
    return [without_code(task) if task in coded else task for task in tasks]


def list_tasks(tasks: Sequence[EvalTask], options: argparse.Namespace) -> int:
    """Print the tasks with their forms. With --data, also print the first data file that each would read, and how many
    more it would read. Returns the exit code 0."""
    from trainer.evaluation.rows import find_files

    for task in tasks:
        say(f"{task.name:<15}{','.join(task.file.forms):<16}{task.file.description}")
        if options.data:
            files = find_files(Path(options.data), task.name, task.file.files)
            say(f"{'':<31}{f'{files[0]}' if files else 'no data'}"
                + (f" and {len(files) - 1} more" if len(files) > 1 else ""))
    return 0


def present(tasks: Sequence[EvalTask], data: Path) -> list[EvalTask]:
    """Return the tasks whose data is in the folder `data`. Raises ConfigError when there are none."""
    from trainer.base.config import ConfigError
    from trainer.evaluation.rows import find_files

    scorable = [task for task in tasks if find_files(data, task.name, task.file.files)]
    if not scorable:
        raise ConfigError(f"--data {data}: has the data of no task; `tokenmill train eval --list` names the files that "
                          f"the tasks read")
    return scorable


def open_models(options: argparse.Namespace) -> tuple[Path, list[StoredModel]]:
    """Find the checkpoints, or the exported model, that the options name. Returns (the folder of the training or of the
    exported model, the models). Raises ConfigError when there is none, or when a step of --steps has no checkpoint."""
    from trainer.base.config import ConfigError
    from trainer.checkpoint.checkpoints import complete
    from trainer.evaluation.models import of_checkpoint, of_export

    folder = run_folder(options)
    if (folder / "config.json").is_file():
        if options.steps:
            raise ConfigError(f"--steps: {folder} is an exported model, which has no steps; give the run")
        return folder, [of_export(folder)]
    out = Path(options.trained) if options.trained else folder / "train"
    checkpoints = out / "checkpoints"
    by_step = {c.step: c for c in complete(checkpoints)}
    if not by_step:
        raise ConfigError(f"{checkpoints}: no checkpoint there, and {folder} is no exported model; where the training "
                          f"had another --out, give it as --trained")
    steps = [max(by_step)]
    if options.steps == "all":
        steps = sorted(by_step)
    elif options.steps:
        steps = options.steps
    if missing := [step for step in steps if step not in by_step]:
        raise ConfigError(f"--steps {missing[0]}: {checkpoints} has steps {', '.join(map(str, sorted(by_step)))}")
    store = Path(options.store) if options.store else folder.absolute().parent.parent
    return out, [of_checkpoint(by_step[step], store) for step in steps]


def run_folder(options: argparse.Namespace) -> Path:
    """Return the folder of the run, or of the exported model, that the options name."""
    folder = Path(options.model)
    return Path(options.store) / "runs" / options.model if options.store and not folder.is_dir() else folder


def writable(folder: Path) -> Path:
    """Make `folder` if it is missing, and return it. Raises ConfigError when no file can be written to it. Called
    before the scoring, so that such a mistake does not show only hours later."""
    from trainer.base.config import ConfigError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); name another folder with --out") from None


def folder_of(model: StoredModel, out: Path) -> Path:
    """Return the folder for a model's results: for a checkpoint, the folder of its step in `out`; for an exported
    model, `out`."""
    return out if model.step is None else out / f"step_{model.step:08d}"


def refuse_loss_of_programs(tasks: Sequence[EvalTask], models: Sequence[StoredModel], out: Path) -> None:
    """Raise ConfigError when an earlier result in `out` has scores of programs that the model wrote (form `code`), and
    would be replaced by a result without them."""
    from trainer.base.config import ConfigError

    for path in (folder_of(model, out) / f"{task.name}.json" for model in models for task in tasks
                 if "code" not in task.file.forms):
        try:
            measures = json.loads(path.read_text(encoding="utf-8"))["measures"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if "code" in measures:
            raise ConfigError(f"{path}: has scores of programs, which would be lost; give --allow-code, or another "
                              f"folder with --out")


def device_of(options: argparse.Namespace) -> str:
    import torch

    if options.device != "auto":
        return str(options.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def reader_of(model: StoredModel, options: argparse.Namespace) -> PromptReader:
    from trainer.evaluation.evaluate import PromptReader

    return PromptReader(model.coder(), model.eos, model.start, model.vocab, model.context,
                        options.batch or BATCH[device_of(options)])


def prepare_all(tasks: Sequence[EvalTask], data: Path, options: argparse.Namespace, reader: PromptReader,
                progress: EvaluationProgress) -> list[PreparedTask]:
    """Read the data of all tasks and tokenise their prompts. Without --tasks, a task that does not fit into the model's
    context is left out, and a line is printed. Raises ContextTooShort when a task given with --tasks does not fit, or
    when no task is left."""
    from trainer.evaluation.evaluate import ContextTooShort, prepare

    prepared = []
    for task in tasks:
        progress.show(f"reading {task.name}")
        try:
            prepared.append(prepare(task, data, options.shots, options.seed, reader))
        except ContextTooShort as error:
            if options.tasks or (task is tasks[-1] and not prepared):
                raise
            say(f"left out: {error}", sys.stderr)
    return prepared


def evaluate_model(model: StoredModel, reader: PromptReader, prepared: Sequence[PreparedTask], out: Path, folder: Path,
                   options: argparse.Namespace, progress: EvaluationProgress) -> list[dict[str, Any]]:
    """Score one model on all prepared tasks, and return the results. The results of a task are written below `out` as
    soon as it is done. Those of a checkpoint are also added to the training's tasks.jsonl, unless --out is given.
    `folder` is the run or exported model; a list of contaminated items is looked for there."""
    import torch

    from trainer.evaluation import score_rows
    from trainer.evaluation.evaluate import score
    from trainer.parallel.world import compute_dtype

    device = torch.device(device_of(options))
    dtype = compute_dtype("auto", device)
    contaminated = {task.task.name: contaminated_rows(options, folder, task) for task in prepared}
    network = model.load().to(device, dtype)
    where = folder_of(model, out)
    results = []
    for task in prepared:
        name = task.task.name + (f", step {model.step:,}" if model.step is not None else "")
        scores = score(network, task, reader, contaminated[task.task.name], progress.of(name, task.work))
        result = {"format": 1, "model": model.about, "context": model.context,
                  "dtype": str(dtype).removeprefix("torch."), "device": device.type,
                  **scores.to_json()}
        write_results(where, result, scores)
        if model.step is not None and not options.out:
            score_rows.add(out.parent, result)
        results.append(result)
    return results


def contaminated_rows(options: argparse.Namespace, folder: Path, task: PreparedTask) -> frozenset[int]:
    """Return the numbers of those rows of a task that are contaminated (found in the training data). They are read from
    the file given by --contaminated, else from contamination.jsonl in `folder`; without either, the result is empty.
    Raises ConfigError when the list cannot be read.

    A list that names rows beyond those of the task was made from other files than the task's. If it was given by
    --contaminated, ConfigError is raised. Otherwise a line is printed, and the result is empty.
    """
    from trainer.base.config import ConfigError

    path = Path(options.contaminated) if options.contaminated else folder / "contamination.jsonl"
    if not options.contaminated and not path.is_file():
        return frozenset()
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = frozenset(int(line["row"]) for line in lines if line["set"] == task.task.name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read as a list of contaminated items ({error}); give the file "
                          f"contamination.jsonl of a run") from None
    if wrong := rows - set(range(len(task.items))):
        message = (f"{path}: names row {max(wrong)} of {task.task.name}, which has {len(task.items):,} rows here; let "
                   f"the step decontaminate read the same files as the task")
        if options.contaminated:
            raise ConfigError(message)
        say(f"not scored apart: {message}", sys.stderr)
        return frozenset()
    return rows


def write_results(folder: Path, result: dict[str, Any], scores: TaskScores) -> None:
    """Write the results of a task into `folder`: TASK.items.jsonl (a line for each question), then TASK.json. Earlier
    results are replaced."""
    from trainer.base.files import replace

    lines = []
    for r in scores.items:
        line: dict[str, Any] = {"id": r.item.id, "row": r.item.row, "gold": r.item.gold}
        for kind, values in (("cloze", r.cloze), ("prior", r.prior), ("letters", r.letters)):
            if values:
                line[kind] = [v.nats for v in values]
        if r.cloze:
            line |= {"tokens": [v.tokens for v in r.cloze], "bytes": [size for size, _ in r.sizes],
                     "greedy": [v.greedy for v in r.cloze]}
        if r.generated is not None:
            line |= {"generated": r.generated, "right": r.right}
        if r.outcome is not None:
            line["outcome"] = r.outcome
        lines.append(json.dumps(line, ensure_ascii=False))
    replace(folder / f"{result['task']}.items.jsonl", "".join(f"{line}\n" for line in lines))
    replace(folder / f"{result['task']}.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Format results as lines of text: a line for each measure of a task, and another line if prompts of the task were
    cut. A star marks the main measure of a task."""
    out = [f"{'task':<15}{'step':>9}{'shots':>7}{'items':>8}  {'measure':<20}{'value':>9}{'± s.e.':>9}{'chance':>9}"
           f"{'constant':>10}{'permuted':>10}"]
    for result in results:
        step = result["model"].get("step")
        head = f"{result['task']:<15}{'–' if step is None else step:>9}{result['shots']:>7}{result['items']:>8,}  "
        parts = [("", result["items"], result["measures"])]
        parts += [(f" ({name})", result[name]["items"], result[name]["measures"])
                  for name in ("contaminated", "clean") if name in result]
        for suffix, items, named in parts:
            for name, measure in named.items():
                cells = "".join(f"{'–' if measure.get(key) is None else format(measure[key], '.4f'):>{width}}"
                                for key, width in (("value", 9), ("stderr", 9), ("chance", 9), ("constant", 10),
                                                   ("permuted", 10)))
                label = f"{name} *" if name == result["main"] else name
                out.append(f"{head}{label:<20}{cells}{suffix and f'{suffix}, {items:,} items'}")
                head = " " * len(head)
        if result["truncated"]:
            out.append(f"{'':<15}{result['truncated']:,} items were longer than the model's context of "
                       f"{result['context']:,} tokens; the beginning of their prompts was cut")
    return out
