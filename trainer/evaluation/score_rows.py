"""Writes and reads tasks.jsonl, the scores of a training's checkpoints on benchmark tasks: a line for each checkpoint,
task and measure, sorted by step and task. tasks.svg shows the scores.

The file repeats what is in the results evaluation/step_N/TASK.json, and can be made again from them (`rebuild`). It is
always replaced as a whole, so that a kill leaves no line twice or half written. When a training goes back to a
checkpoint, the results of later steps are of models that it has given up; they are deleted (`forget`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.base.files import replace
from trainer.observe.task_plot import write_task_plot

if TYPE_CHECKING:
    from trainer.checkpoint.checkpoints import Checkpoint

NAME = "tasks.jsonl"
FOLDER = "evaluation"
#: measures by which a fall of a task's score is judged: the first of them that the task has. bpb has the least noise
MAIN = ("bpb", "pairs", "word", "mcf", "fg", "code")


class ScoreOrigin(NamedTuple):
    """Identifies how a score was computed. Two scores can be compared only if they have the same origin.

        task    name of the task
        sha256  of the task's file
        shots   number of examples before a question
        seed    determines which examples are chosen (0 if there are none)
        data    hash of the contents of the data
    """

    task: str
    sha256: str
    shots: int
    seed: int
    data: str


def origin_of(scores: Mapping[str, Any]) -> ScoreOrigin:
    """Return the origin of `scores`, which is a result (the content of TASK.json) or a line of tasks.jsonl. A result
    has the sha256 of each file of data, by path. Raises KeyError, TypeError or AttributeError when a field is missing
    or has another type."""
    data, shots = scores["data"], scores["shots"]
    if isinstance(data, Mapping):
        data = hashlib.sha256("\n".join(sorted(data.values())).encode()).hexdigest()
    origin = ScoreOrigin(scores["task"], scores["sha256"], shots, scores["seed"] if shots else 0, data)
    hash(origin)                     # raises TypeError if a field is a list or an object
    return origin


def step_folder(out: Path, step: int) -> Path:
    """Return the folder for the results of the checkpoint of step `step`. `out` is the folder of the training."""
    return out / FOLDER / f"step_{step:08d}"


def rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of tasks.jsonl for `result`, the content of a checkpoint's TASK.json: one for each measure."""
    about, of = result["model"], origin_of(result)
    return [{"step": about["step"], "tokens": about["tokens"], "task": of.task, "form": name.partition(".")[0],
             "measure": name, "value": measure["value"], "stderr": measure["stderr"],
             **{key: measure[key] for key in ("chance", "constant") if key in measure}, "items": result["items"],
             "shots": of.shots, "seed": of.seed, "parameters": about["parameters"], "version": result["version"],
             "sha256": of.sha256, "data": of.data} for name, measure in result["measures"].items()]


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of tasks.jsonl, in the training's folder `out`; [] if the file is missing or cannot be read.
    Damaged lines are left out."""
    try:
        lines = (out / NAME).read_bytes().split(b"\n")
    except OSError:
        return []
    return [row for row in map(_row, lines) if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the row that a line of tasks.jsonl holds, or None if it holds none."""
    try:
        row: dict[str, Any] = json.loads(line.decode("utf-8", "replace"))
        row["measure"], row["value"], origin_of(row)
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class RowReader:
    """Reads the rows of tasks.jsonl that have one of the origins `wanted`, as the file grows. The first call of `read`
    reads the whole file. A later one reads only the end of it, so its time does not depend on how many rows there are.

    The end begins at the first row that may still change: a row of the last step, to which rows may be added, or a row
    of a wanted task with another origin, which a wanted row may replace. If rows are added before the end, the line
    just before the end moves, because the file is sorted. `read` notices this, and reads the whole file.
    """

    def __init__(self, out: Path, wanted: Iterable[ScoreOrigin]) -> None:
        self.path, self.wanted = out / NAME, frozenset(wanted)
        self.tasks = {one.task for one in self.wanted}
        self.restart()

    def restart(self) -> None:
        """Let the next `read` read the whole file. Called when a training goes back to a checkpoint, after which the
        same steps get new scores."""
        #: where the end of the file begins, and the line before it
        self.begin, self.before = 0, b""

    def read(self) -> list[dict[str, Any]]:
        """Return the wanted rows at the end of the file; [] if the file is missing. They include all wanted rows that
        no earlier call has returned, and may include others."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.begin - len(self.before))
                if file.read(len(self.before)) != self.before:
                    self.restart()
                    file.seek(0)
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return []
        rows = [_row(line) for line in lines]
        last = next((row["step"] for row in reversed(rows) if row is not None), None)
        for line, row in zip(lines, rows):
            if (row is not None and (row["step"] == last or self.is_replaceable(row))) or not line.endswith(b"\n"):
                break
            self.begin, self.before = self.begin + len(line), line
        return [row for row in rows if row is not None and origin_of(row) in self.wanted]

    def is_replaceable(self, row: Mapping[str, Any]) -> bool:
        return row["task"] in self.tasks and origin_of(row) not in self.wanted


def write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace tasks.jsonl and its plot tasks.svg, in the training's folder `out`. Rows are sorted by step and task.
    Rows of the same step and task stay in the given order. If the file already has these rows, it is not written, so
    that its time of change tells a training about new scores (`TaskWatcher.look`)."""
    ordered = sorted(rows, key=lambda row: (row["step"], row["task"]))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered)
    if not (out / NAME).exists() or (out / NAME).read_bytes() != text.encode():
        replace(out / NAME, text)
        write_task_plot(out, ordered)


def add(out: Path, result: Mapping[str, Any]) -> None:
    """Put the rows of a result into tasks.jsonl, in place of earlier rows of the same step and task. Write the result's
    own file before this call. If two processes replace tasks.jsonl at the same time, rows of one of them can be lost.
    The process that writes last notices this, and makes the file again from the files of all results."""
    rows = rows_of(result)
    key = (rows[0]["step"], rows[0]["task"])
    write_rows(out, [*(row for row in read_rows(out) if (row["step"], row["task"]) != key), *rows])
    while incomplete(out):
        rebuild(out)


def incomplete(out: Path) -> bool:
    """Return whether a result in the training's folder `out` has no rows in tasks.jsonl. A step's results are read only
    if it has a file named after a task for which tasks.jsonl has no row of this step."""
    known = {(row["step"], row["task"]) for row in read_rows(out)}
    names = {(step_folder(out, step).name, f"{task}.json") for step, task in known}
    folders = {path.parent for path in (out / FOLDER).glob("step_*/*.json") if path.parts[-2:] not in names}
    return any((result["model"]["step"], result["task"]) not in known
               for folder in folders for result in results_of(folder))


def results_of(folder: Path) -> list[dict[str, Any]]:
    """Return the results in `folder`, the folder of a step. Files `*.json` that are no results are left out."""
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            rows_of(result)
            step_folder(folder, result["model"]["step"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        results.append(result)
    return results


def results_by_origin(out: Path, checkpoint: Checkpoint) -> dict[ScoreOrigin, dict[str, Any]]:
    """Return the results of a checkpoint of the training in the folder `out`, by their origins. (Results of the same
    origin can be compared.) Results of an earlier attempt to write the checkpoint are left out."""
    return {origin_of(result): result for result in results_of(step_folder(out, checkpoint.step))
            if result["model"].get("checkpoint") == checkpoint.folder.name}


def rebuild(out: Path) -> None:
    """Make tasks.jsonl again from all results in the training's folder `out`."""
    folders = sorted((out / FOLDER).glob("step_*/"))
    write_rows(out, [row for folder in folders for result in results_of(folder) for row in rows_of(result)])


def forget(out: Path, step: int) -> None:
    """Delete the results of all steps after `step` from the training's folder `out`, and their rows from
    tasks.jsonl."""
    for folder in (out / FOLDER).glob("step_*/"):
        if folder.name.removeprefix("step_").isdecimal() and int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    rows = read_rows(out)
    if any(row["step"] > step for row in rows):
        write_rows(out, [row for row in rows if row["step"] <= step])


def main_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the row of a task's most important measure: the first of MAIN that the task has, else the first row.
    `rows` are the rows of one task at one step, at least one. Alerts about a falling score look at this measure."""
    by_measure = {row["measure"]: row for row in rows}
    return next((by_measure[name] for name in MAIN if name in by_measure), rows[0])
