"""Makes items from the rows of a benchmark, and prompts from items.

With the same data, seed and number of examples, an item has the same prompt in every evaluation, whatever other tasks
are scored. The order of shuffled answers is a pseudo-random function of task and item. The examples before a question
depend on task, item, seed and the rows from which they are chosen, but not on the order of these rows.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.base.prf import prf
from trainer.base.config import ConfigError
from trainer.evaluation.rows import DataRow
from trainer.evaluation.task_file import EvalTask
from trainer.evaluation.template import lookup

#: letters of the answers in the multiple-choice form
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Item:
    """A question of a benchmark with its answers. `row` is the number of its row, and `where` says for error messages
    where the row is. `group` is the name of its group, or "" if the task has no groups. `values` are the fields of the
    row. `choices` are the answers in the order in which they are shown, and `choices[gold]` is the right one."""

    id: str
    row: int
    where: str
    group: str
    values: Mapping[str, Any]
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Prompt:
    """A text, `context`, with a possible continuation, `continuation`, whose likelihood is to be computed."""

    context: str
    continuation: str


def make_items(task: EvalTask, rows: Iterable[DataRow]) -> list[Item]:
    """Return an item for each row. Raises ConfigError for a row that does not fit the task file, for instance because
    its right answer is missing."""
    return [_item(task, row) for row in rows]


def _item(task: EvalTask, row: DataRow) -> Item:
    file = task.file
    values = dict(row.values)
    for name, template in file.fields.items():
        values[name] = task.render(template, values, row.where)
    if file.choices_from:
        choices = _list(task, row, values, file.choices_from)
    else:
        choices = [task.render(template, values, row.where) for template in file.choices]
    choices = [task.render(file.choice, {**values, "choice": choice}, row.where) for choice in choices]
    labels = list(file.labels) or [str(i) for i in range(len(choices))]
    if file.labels_from:
        labels = _list(task, row, values, file.labels_from)
    try:
        label = task.render(file.gold, values, row.where)
    except ConfigError:
        label = ""
    if label not in labels or labels.index(label) >= len(choices):
        raise ConfigError(f"{row.where}: the answer key {file.gold} is missing or none of the labels "
                          f"{', '.join(labels)} (task {task.name}); test sets are often published without answers: "
                          f"give the validation set")
    if "mcf" in file.forms and len(choices) > len(LETTERS):
        raise ConfigError(f"{row.where}: has {len(choices)} answers, but there are {len(LETTERS)} letters (task "
                          f"{task.name}); leave mcf out of the task's forms")
    id = task.render(file.id, values, row.where) if file.id else str(row.number)
    order = list(range(len(choices)))
    if file.shuffle:
        order.sort(key=lambda i: prf(0, f"choices/{task.name}", f"{id}/{i}"))
    return Item(id, row.number, row.where, task.render(file.group, values, row.where) if file.group else "", values,
                tuple(choices[i] for i in order), order.index(labels.index(label)))


def _list(task: EvalTask, row: DataRow, values: Mapping[str, Any], path: str) -> list[str]:
    try:
        value = lookup(values, path)
    except KeyError:
        value = None
    if not isinstance(value, list) or not value or not all(isinstance(v, (str, int)) for v in value):
        raise ConfigError(f"{row.where}: the field {path!r} holds no list of texts (task {task.name}); mend the row, "
                          f"or give a task file that fits it to --tasks")
    return [str(v) for v in value]


def question_key(task: EvalTask, item: Item) -> str:
    """Return a hash of an item's question and right answer. Copies of an item in other rows have the same hash."""
    right = item.choices[item.gold]
    question = task.render(task.file.context, {**item.values, "choice": right}, item.where)
    return hashlib.blake2b(json.dumps([question.strip(), right.strip()]).encode(), digest_size=16).hexdigest()


class ExamplePool:
    """The items among which the examples before a question are chosen. An item never becomes an example before itself,
    or before a copy of it (an item with the same question and right answer)."""

    def __init__(self, task: EvalTask, items: Sequence[Item], seed: int) -> None:
        self.task, self.seed = task, seed
        self.groups: dict[str, list[tuple[str, Item]]] = {}
        for item in items:
            self.groups.setdefault(item.group, []).append((question_key(task, item), item))
        for pool in self.groups.values():
            pool.sort(key=lambda entry: (entry[0], entry[1].choices))
        self.copies = Counter((group, key) for group, pool in self.groups.items() for key, _ in pool)

    def examples(self, item: Item, shots: int) -> list[Item]:
        """Return `shots` items of the same group to show as examples before `item`. The choice depends on the task, the
        item, the seed and the items of the pool, but not on the order of rows. Raises ConfigError when there are not
        enough items."""
        if not shots:
            return []
        pool, key = self.groups.get(item.group, []), question_key(self.task, item)
        others = len(pool) - self.copies[item.group, key]
        if others < shots:
            group = f" of {item.group}" if item.group else ""
            raise ConfigError(f"{self.task.name}: only {others} rows{group} to take {shots} examples from, without the "
                              f"question itself and its copies; give more rows, or a smaller --shots")
        chosen: dict[int, Item] = {}
        draw = 0
        while len(chosen) < shots:
            at = prf(self.seed, f"examples/{self.task.name}", f"{key}/{draw}") % len(pool)
            draw += 1
            if pool[at][0] != key:
                chosen.setdefault(at, pool[at][1])
        return list(chosen.values())


def cloze(task: EvalTask, item: Item, examples: Sequence[Item]) -> list[Prompt]:
    """Return the prompts of an item in the cloze form, one for each answer. The context is the question after the
    examples, and the continuation is the text of the answer."""
    def part(template: str, of: Item, choice: int) -> str:
        return task.render(template, {**of.values, "choice": of.choices[choice]}, of.where)

    file = task.file
    before = "".join(part(file.context, e, e.gold) + part(file.answer, e, e.gold) + file.separator for e in examples)
    return [Prompt(before + part(file.context, item, i), part(file.answer, item, i)) for i in range(len(item.choices))]


def lettered(task: EvalTask, item: Item, examples: Sequence[Item]) -> list[Prompt]:
    """Return the prompts of an item in the multiple-choice form, one for each answer. The context shows all answers
    with letters, after the examples, and the continuation is the letter of the answer."""
    def question(of: Item) -> str:
        options = "\n".join(f" {letter}. {choice}" for letter, choice in zip(LETTERS, of.choices))
        return task.render(task.file.lettered, {**of.values, "options": options}, of.where)

    before = "".join(f"{question(e)} {LETTERS[e.gold]}{task.file.separator}" for e in examples)
    return [Prompt(before + question(item), f" {LETTERS[i]}") for i in range(len(item.choices))]


def unconditional(task: EvalTask, item: Item) -> list[Prompt]:
    """Return prompts by which the likelihoods of an item's answers without the question are computed, one for each
    answer. The context is only the task's text `prior`."""
    prompts = cloze(task, item, [])
    return [Prompt(task.file.prior or "", prompt.continuation) for prompt in prompts]
