"""Evaluates a model on benchmark tasks, in two steps. `prepare` reads the data of a task, tokenises its prompts, and
checks everything that can be checked without the model; it needs only the tokenizer. `score` computes the task's scores
with the model, which may be one that is being trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.base.config import ConfigError
from trainer.data.tokenizer import TextCoder
from trainer.evaluation.generation import OpenPrompt, continuations
from trainer.evaluation.items import ExamplePool, Item, Prompt, cloze, lettered, make_items, unconditional
from trainer.evaluation.measures import ItemResult, Measure, measures, normalised
from trainer.evaluation.programs import Outcome, WrittenProgram, outcome
from trainer.evaluation.queries import MergedBoundary, Query, SharedRow, encode_prompts, shared_rows
from trainer.evaluation.rows import example_files, find_files, read_rows, sums
from trainer.evaluation.scoring import Likelihood, likelihoods
from trainer.evaluation.task_file import EvalTask
from trainer.model.transformer import Transformer

#: the owner of a query: number of its item, its kind (cloze, letters or prior), and number of the answer in this kind
Owner = tuple[int, str, int]
#: number of queries among which common beginnings are looked for
_TOGETHER = 1024


class ContextTooShort(ConfigError):
    """Raised if an answer of a task, or the number of tokens that the task generates, does not fit into the model's
    context."""


@dataclass(frozen=True)
class PromptReader:
    """The tokenizer of a model, with the limits that its prompts must respect.

        start    the token that stands for an empty context
        vocab    number of tokens that the model knows
        context  longest sequence of the model, in tokens
        batch    largest number of tokens in a batch
    """

    coder: TextCoder
    eos: int
    start: int
    vocab: int
    context: int
    batch: int

    @property
    def row(self) -> int:
        """The largest number of tokens in a row that combines the queries (question with an answer) of an item. It is
        at least 1.25 times the model's context. So even a question as long as the context is read only once, if its
        answers have at most a quarter of the context's tokens together."""
        return max(self.batch, self.context + self.context // 4)


@dataclass(frozen=True)
class PreparedTask:
    """A task whose prompts are tokenised, so that a model can be scored on it.

        files      {path of a file of the task's data: its sha256}
        sizes      for each item, (bytes, characters) of each answer whose likelihood in the cloze form is computed
        rows       the rows of tokens to read; each combines queries (a context with an answer) that begin alike
        owners     for each query: (number of its item, kind of prompt: cloze, letters or prior, number of the answer)
        prompts    the prompts for which the model generates text; empty if the task needs no generated text. A prompt
                   also has the item's right answer, if only the likelihood of this answer is computed
        programs   the beginnings of the programs that the model completes, with tests; empty without the form code
        truncated  how many items have a prompt whose beginning was cut off to fit into the model's context
    """

    task: EvalTask
    files: Mapping[str, str]
    shots: int
    seed: int
    items: Sequence[Item]
    sizes: Sequence[Sequence[tuple[int, int]]]
    rows: Sequence[SharedRow]
    owners: Sequence[Owner]
    prompts: Sequence[OpenPrompt]
    programs: Sequence[WrittenProgram]
    truncated: int

    @property
    def identity(self) -> dict[str, Any]:
        """What a result says about the task. `score_rows.origin_of` makes the origin of scores from it."""
        return {"task": self.task.name, "version": self.task.file.version, "sha256": self.task.sha256,
                "data": dict(self.files), "shots": self.shots, "seed": self.seed}

    @property
    def work(self) -> int:
        """The total number of rows to read, prompts to continue and programs to run. Progress is shown as a share of
        this number."""
        return len(self.rows) + len(self.prompts) + len(self.programs)


@dataclass(frozen=True)
class TaskScores:
    """The result of a task: its measures, the measures of its groups of items, and the result of every item.

    If some items are known to be in the training data, `apart` has the measures of these items under `contaminated`,
    and those of the other items under `clean`; a kind without items is left out. `counts` has the number of items of
    both kinds. Otherwise `apart` and `counts` are empty.
    """

    prepared: PreparedTask
    measures: Mapping[str, Measure]
    groups: Mapping[str, Mapping[str, Measure]]
    apart: Mapping[str, Mapping[str, Measure]]
    counts: Mapping[str, int]
    items: Sequence[ItemResult]

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            **self.prepared.identity, "items": len(self.items), "truncated": self.prepared.truncated,
            "main": self.prepared.task.file.main, "measures": _plain(self.measures)}
        if self.groups:
            result["groups"] = {name: _plain(group) for name, group in self.groups.items()}
        if self.apart:
            result |= {name: {"items": self.counts[name], "measures": _plain(part)}
                       for name, part in self.apart.items()}
        return result


def _plain(named: Mapping[str, Measure]) -> dict[str, Any]:
    return {name: measure.to_json() for name, measure in named.items()}


def prepare(task: EvalTask, data: Path, shots: int | None, seed: int, reader: PromptReader) -> PreparedTask:
    """Read the data of a task from the folder `data`, and tokenise its prompts with `shots` examples each (None: the
    number in the task file). `seed` determines which examples are chosen.

    Raises ConfigError in these cases:

    * The data is missing or does not fit the task.
    * There are too few rows for the examples.
    * An answer is empty.
    * The tokenizer makes one token of the end of a context and the beginning of its answer.
    * The tokenizer gives an id that the model does not know.

    Raises ContextTooShort when an answer, or the number of tokens to generate, does not fit into the model's context.
    """
    file = task.file
    shots = file.shots if shots is None else shots
    paths = find_files(data, task.name, file.files)
    if not paths:
        raise ConfigError(f"{data}: no data of the task {task.name}; put {task.name}.jsonl there, or one of "
                          f"{', '.join(file.files)}")
    items = make_items(task, read_rows(paths))
    if not items:
        raise ConfigError(f"{paths[0]}: no rows, so the task {task.name} cannot be scored; fetch the file again")
    pool = items
    if shots and file.examples:
        example_paths = example_files(data, task, shots)
        if not example_paths:
            raise ConfigError(f"{data}: no examples for the task {task.name}; put {task.name}_examples.jsonl there, or "
                              f"give --shots 0")
        pool = make_items(task, read_rows(example_paths))
    chooser = ExamplePool(task, pool, seed)
    examples = [chooser.examples(item, shots) for item in items]
    prompts, cut = _prompts(task, items, examples, reader)
    rows, owners, also_cut = _rows(task, items, examples, reader, prompts)
    programs = [_program(task, item) for item in items] if "code" in file.forms else []
    highest = max([*(int(max(row.tokens.max(initial=0), row.asked[:, 1].max())) for row in rows),
                   *(max(*p.tokens, *p.answer) for p in prompts)])
    if highest >= reader.vocab:
        raise ConfigError(f"the tokenizer gives the id {highest:,}, but the model knows {reader.vocab:,} tokens; give "
                          f"it the tokenizer with which it was trained")
    return PreparedTask(task, sums(data, task, shots), shots, seed, items, sizes_of(task, items), rows, owners, prompts,
                        programs, len(cut | also_cut))


def sizes_of(task: EvalTask, items: Sequence[Item]) -> list[list[tuple[int, int]]]:
    """Return, for each item, the (bytes, characters) of each answer whose likelihood in the cloze form is computed."""
    return [[_size(p.continuation) for p in _asked_cloze(task, item, [])] for item in items]


def _asked_cloze(task: EvalTask, item: Item, examples: Sequence[Item]) -> list[Prompt]:
    """Return the cloze prompts (question, then answer) of an item whose likelihoods are to be computed: those of all
    answers if a form of the task compares answers, otherwise only that of the right answer."""
    prompts = cloze(task, item, examples)
    return prompts if {"cf", "pairs"} & set(task.file.forms) else [prompts[item.gold]]


def _prompts(task: EvalTask, items: Sequence[Item], examples: Sequence[Sequence[Item]],
             reader: PromptReader) -> tuple[list[OpenPrompt], set[int]]:
    """Tokenise the prompts for which the task generates text. Returns (a prompt for each item, the numbers of the items
    whose prompt was cut to fit into the model's context). Both are empty if the task generates no text."""
    config = task.file.generate
    if config is None or not {"fg", "code"} & set(task.file.forms):
        return [], set()
    room = reader.context - config.tokens
    if room < 1:
        raise ContextTooShort(f"{task.name}: generates {config.tokens} tokens, but the model's context has "
                              f"{reader.context}; leave the task out, or give a task file with fewer")
    texts = [cloze(task, item, shown)[item.gold].context for item, shown in zip(items, examples)]
    coded = [ids or [reader.start] for ids in reader.coder.encode_batch([text.rstrip() for text in texts])]
    return [OpenPrompt(ids[-room:]) for ids in coded], {i for i, ids in enumerate(coded) if len(ids) > room}


def _program(task: EvalTask, item: Item) -> WrittenProgram:
    config = task.file.code
    assert config is not None
    return WrittenProgram(cloze(task, item, [])[item.gold].context.rstrip(),
                          task.render(config.function, item.values, item.where),
                          task.render(config.tests, item.values, item.where))


def _size(text: str) -> tuple[int, int]:
    text = text.strip() or text
    return len(text.encode("utf-8", "surrogatepass")), len(text)


def _rows(task: EvalTask, items: Sequence[Item], examples: Sequence[Sequence[Item]],
          reader: PromptReader, prompts: list[OpenPrompt]) -> tuple[list[SharedRow], list[Owner], set[int]]:
    """Tokenise the queries of all items, that is, the contexts with answers whose likelihood is computed. Returns (rows
    of tokens, the owner of each query, the numbers of the items whose context was cut to fit).

    If a task needs the likelihood of the right answer alone, and the model also continues the prompt of this answer,
    the answer is put into that prompt in `prompts`. It is then in no row, so that the model reads the prompt only once.
    """
    forms = set(task.file.forms)
    kinds: dict[str, Iterable[list[Prompt]]] = {}
    if forms - {"mcf", "fg", "code"}:
        kinds["cloze"] = (_asked_cloze(task, item, shown) for item, shown in zip(items, examples))
    if "mcf" in forms:
        kinds["letters"] = (lettered(task, item, shown) for item, shown in zip(items, examples))
    if "cf" in forms and task.file.prior is not None:
        kinds["prior"] = (unconditional(task, item) for item in items)
    rows: list[SharedRow] = []
    owners: list[Owner] = []
    cut: set[int] = set()
    merged: set[int] = set()
    moved = bool(prompts) and not {"cf", "pairs"} & forms
    for kind, groups in kinds.items():
        waiting: list[Query] = []
        for number, queries in enumerate(encode_prompts(groups, reader.coder, reader.start)):
            if isinstance(queries, MergedBoundary):
                merged.add(number)
                continue
            fitting = [_fitting(query, task, items[number], reader) for query in queries]
            if any(a is not b for a, b in zip(fitting, queries)):
                cut.add(number)
            if moved and kind == "cloze" and fitting[0].context == list(prompts[number].tokens):
                prompts[number] = replace(prompts[number], answer=fitting[0].continuation)
                continue
            owners += [(number, kind, choice) for choice in range(len(fitting))]
            waiting += fitting
            if len(waiting) >= _TOGETHER:
                rows += shared_rows(waiting, range(len(owners) - len(waiting), len(owners)), reader.row)
                waiting = []
        rows += shared_rows(waiting, range(len(owners) - len(waiting), len(owners)), reader.row)
    if merged:
        raise ConfigError(f"{items[min(merged)].where}: the tokenizer makes one token of the end of the question and "
                          f"the beginning of the answer, so the answer's likelihood cannot be told apart (task "
                          f"{task.name}, {len(merged):,} of {len(items):,} rows); give --tasks a task file whose "
                          f"answers begin with a space or a line feed, or leave the task out")
    return rows, owners, cut


def _fitting(query: Query, task: EvalTask, item: Item, reader: PromptReader) -> Query:
    """Cut the beginning of a query's context, if context and answer together are longer than the model can read.
    lm-evaluation-harness cuts in the same way. Raises ConfigError for an empty answer, and ContextTooShort for an
    answer that alone is longer than the model can read."""
    if query.start == len(query.tokens):
        raise ConfigError(f"{item.where}: an answer is empty (task {task.name}); mend the row, or the template of its "
                          f"answers")
    spare = len(query.tokens) - 1 - reader.context
    if spare <= 0:
        return query
    if spare >= query.start:
        raise ContextTooShort(f"{item.where}: an answer has {len(query.tokens) - query.start} tokens, but the model's "
                              f"context only {reader.context} (task {task.name}); leave the task out")
    return Query(query.tokens[spare:], query.start - spare)


def score(model: Transformer, prepared: PreparedTask, reader: PromptReader, contaminated: frozenset[int] = frozenset(),
          progress: Callable[[int], None] = lambda _rows: None) -> TaskScores:
    """Score a model on a prepared task. If the task has the form code, the programs that the model writes are run.
    `contaminated` are the numbers of the benchmark's rows that are known to be in the training data. `progress` is
    called after every batch with the number of rows or prompts in it, and with 1 after every program. Raises NotFinite
    when a log-likelihood is NaN or infinite."""
    task = prepared.task
    likelihoods_of: list[dict[str, dict[int, Likelihood]]] = [{} for _ in prepared.items]
    scored = likelihoods(model, prepared.rows, reader.batch, progress)
    for query, (number, kind, choice) in enumerate(prepared.owners):
        likelihoods_of[number].setdefault(kind, {})[choice] = scored[query]
    results = []
    generated_of = _generated(model, prepared, reader, likelihoods_of, progress)
    for item, sizes, parts, generated in zip(prepared.items, prepared.sizes, likelihoods_of, generated_of):
        lists = {kind: [part[i] for i in range(len(part))] for kind, part in parts.items()}
        results.append(ItemResult(item, lists.get("cloze", ()), sizes, lists.get("prior", ()), lists.get("letters", ()),
                                  *generated))
    groups: dict[str, list[ItemResult]] = {}
    for result in results:
        if result.item.group:
            groups.setdefault(result.item.group, []).append(result)
    apart = {"contaminated": [r for r in results if r.item.row in contaminated],
             "clean": [r for r in results if r.item.row not in contaminated]} if contaminated else {}
    return TaskScores(prepared, measures(task, results),
                      {name: measures(task, part) for name, part in sorted(groups.items())},
                      {name: measures(task, part) for name, part in apart.items() if part},
                      {name: len(part) for name, part in apart.items()}, results)


def _generated(model: Transformer, prepared: PreparedTask, reader: PromptReader,
               likelihoods_of: Sequence[dict[str, dict[int, Likelihood]]],
               progress: Callable[[int], None]) -> list[tuple[str | None, str | None, Outcome | None]]:
    """Generate the texts that the task asks for. Returns for each item (generated text, right answer, result of the
    program's tests); a value is None if the task does not ask for it. If the likelihood of a prompt's answer was
    computed, it is put into the item's entry of `likelihoods_of`."""
    config = prepared.task.file.generate
    if not prepared.prompts or config is None:
        return [(None, None, None)] * len(prepared.items)
    results = continuations(model, prepared.prompts, config, reader.coder, reader.eos, reader.batch, progress)
    for own, result in zip(likelihoods_of, results):
        if result.answer is not None:
            own["cloze"] = {0: result.answer}
    texts = [result.text for result in results]
    if not prepared.programs:
        return [(normalised(text, config), normalised(item.choices[item.gold], config), None)
                for text, item in zip(texts, prepared.items)]
    tested: list[tuple[str | None, str | None, Outcome | None]] = []
    for program, text in zip(prepared.programs, texts):
        tested.append((text, None, outcome(replace(program, text=program.text + text))))
        progress(1)
    return tested
