"""Compares the results of two models on the items (questions) of a benchmark task: which items did the second model win
or lose?

The results are files of an evaluation, TASK.json and TASK.items.jsonl. These do not contain the texts of items, which
are read again from the data of the task. The data must be the same as in both evaluations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.config import ConfigError
from trainer.evaluation.evaluate import sizes_of
from trainer.evaluation.items import Item, make_items
from trainer.evaluation.measures import ItemResult
from trainer.evaluation.rows import find_files, read_rows, sums
from trainer.evaluation.score_rows import origin_of
from trainer.evaluation.scoring import Likelihood
from trainer.evaluation.task_file import EvalTask


@dataclass(frozen=True)
class ItemOutcome:
    """How a model did on an item of a benchmark.

        right   whether it was right by the main measure; None if that is bpb, which has no right or wrong
        score   larger is better. In the form pairs, the log-likelihood of the right sentence minus that of the other
                one; else minus the bits per byte of the right answer. If these are not computed, the log-likelihood of
                the right letter, or 1 for a right and 0 for a wrong generated text
        answer  the answer that it chose or generated, if the main measure has one
    """

    right: bool | None
    score: float
    answer: str | None


@dataclass(frozen=True)
class ItemChange:
    """An item of a benchmark with the outcomes of two models, `before` and `after`. `gain` is by how much the second
    model's score is better. `won` says that only the second model is right, `lost` that only the first one is. If the
    main measure is bpb, `won` says that the score has risen, `lost` that it has fallen."""

    item: Item
    before: ItemOutcome
    after: ItemOutcome

    @property
    def gain(self) -> float:
        return self.after.score - self.before.score

    @property
    def won(self) -> bool:
        return self.gain > 0 if self.after.right is None else bool(self.after.right and not self.before.right)

    @property
    def lost(self) -> bool:
        return self.gain < 0 if self.after.right is None else bool(self.before.right and not self.after.right)


def read_result(folder: Path, task: EvalTask) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the result of a task from `folder`, the results of a checkpoint. Returns (content of TASK.json, lines of
    TASK.items.jsonl). Raises ConfigError when a file is missing or damaged, or when the result is of another version of
    the task."""
    path = folder / f"{task.name}.json"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        text = (folder / f"{task.name}.items.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        sha256, items = origin_of(result).sha256, result["items"]
        result["main"], result["measures"], result["model"]["step"]
    except FileNotFoundError:
        scored = sorted(int(other.parent.name.removeprefix("step_"))
                        for other in folder.parent.glob(f"step_*/{task.name}.json"))
        there = f" (steps that have one: {', '.join(map(str, scored))})" if scored else ""
        raise ConfigError(f"{path}: no such result{there}; score the checkpoint first with `tokenmill train eval RUN "
                          f"--tasks {task.name} --steps N`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error!r}); score the checkpoint again with `tokenmill train "
                          f"eval`") from None
    if sha256 != task.sha256:
        raise ConfigError(f"{path}: is of another version of the task {task.name}; score the checkpoint again")
    if len(lines) != items:
        raise ConfigError(f"{path}: has {items} items, but {task.name}.items.jsonl has {len(lines)}; score the "
                          f"checkpoint again")
    return result, lines


def read_items(task: EvalTask, data: Path, results: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Read the items of a task from the folder `data`, to compare two `results` on them. Raises ConfigError when there
    is no data, when a result is of other data, or when the results cannot be compared: their main measures or their
    examples before questions differ."""
    paths = find_files(data, task.name, task.file.files)
    if not paths:
        raise ConfigError(f"{data}: no data of the task {task.name}; give the folder of the evaluation as --data")
    here = sums(data, task, 0)
    for result in results:
        if any(result["data"].get(name) != sha256 for name, sha256 in here.items()):
            raise ConfigError(f"{data}: the data of the task {task.name} is not what step {result['model']['step']} "
                              f"was scored on; give the folder of then as --data, or score it again")
    if len(set(map(origin_of, results))) > 1:
        raise ConfigError(f"{task.name}: the two results have different examples before the questions (--shots, "
                          f"--seed, or other data); score one of them again")
    if len({result["main"] for result in results}) > 1:
        raise ConfigError(f"{task.name}: programs were run for one of the two results only; score the other one with "
                          f"--allow-code, too")
    return make_items(task, read_rows(paths))


def changes(task: EvalTask, main: str, items: Sequence[Item], before: Sequence[Mapping[str, Any]],
            after: Sequence[Mapping[str, Any]]) -> list[ItemChange]:
    """Return how each item (question) of a task changed between two results. `main` is the name of their main measure;
    `before` and `after` are their lines of TASK.items.jsonl, one for each item. Raises ConfigError when a line does not
    fit its item."""
    sizes = sizes_of(task, items)
    changed = []
    for number, item in enumerate(items):
        try:
            outcomes = [outcome_of(task, main, item, sizes[number], lines[number]) for lines in (before, after)]
        except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"{task.name}.items.jsonl: line {number + 1} does not fit the task ({error!r}); score "
                              f"the checkpoint again") from None
        changed.append(ItemChange(item, *outcomes))
    return changed


def outcome_of(task: EvalTask, main: str, item: Item, sizes: Sequence[tuple[int, int]],
               line: Mapping[str, Any]) -> ItemOutcome:
    if line["row"] != item.row or line["gold"] != item.gold:
        raise ValueError("another row")
    answers = [Likelihood(*values) for values in zip(line.get("cloze", ()), line.get("tokens", ()),
                                                     line.get("greedy", ()), strict=True)]
    prior, letters = ([Likelihood(nats, 1, False) for nats in line.get(kind, ())] for kind in ("prior", "letters"))
    result = ItemResult(item, answers, sizes, prior, letters)
    right: bool | None = None
    answer = None
    if main.startswith("cf.") or main in ("pairs", "mcf"):
        scores = [letter.nats for letter in result.letters] if main == "mcf" else \
            result.scores("raw" if main == "pairs" else task.file.norm)
        chosen = scores.index(max(scores))
        right, answer = chosen == item.gold, item.choices[chosen]
    elif main == "word":
        right = bool(result.cloze[result.gold].greedy)
    elif main in ("fg", "code"):
        right, answer = bool(line["right"]), str(line["generated"])
    if main == "pairs":
        gold, other = scores[item.gold], max(s for i, s in enumerate(scores) if i != item.gold)
        return ItemOutcome(right, gold - other, answer)
    if result.cloze:
        return ItemOutcome(right, result.cloze[result.gold].nats / math.log(2) / sizes[result.gold][0], answer)
    return ItemOutcome(right, result.letters[item.gold].nats if result.letters else float(bool(right)), answer)
