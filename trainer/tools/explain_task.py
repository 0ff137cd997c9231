"""`tokenmill train explain RUN STEP --task NAME`: which items (questions) of a benchmark task has a training won or
lost, and which of the documents that it read are nearest to them?

Two results of `tokenmill train eval` are compared: that of the step, and another one. The other result is from an
earlier step of the same training, or from another training, such as another arm of a study.

The nearest documents are those that share n-grams of tokens with an item (`trainer.data.nearest`). If both results are
of one training, the documents that it read between the two steps are searched. If they are of two trainings, the
documents from the point on at which their curricula differ are searched. Shared n-grams are a hint, not a proof, that a
document taught the answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizer.mixture.curriculum import Curriculum
    from trainer.data.nearest import SharedPassage
    from trainer.data.tokenizer import TextCoder
    from trainer.evaluation.item_changes import ItemChange
    from trainer.evaluation.items import Item
    from trainer.evaluation.task_file import EvalTask
    from trainer.loop.run import Run
    from trainer.tools.evaluation_progress import EvaluationProgress

#: default of --items, and number of documents that are shown for each item
ITEMS, DOCUMENTS = 3, 3
#: number of passages that are ranked for each shown document, because several may be of the same document
PASSAGES = 4
#: tokens that are shown before and after the first shared n-gram, and characters of a question and an answer
BEFORE, AFTER, QUESTION = 12, 48, 300
#: by the main measure of a task, what `ItemOutcome.score` is
SCORES = {"pairs": "log-likelihood of the right sentence minus that of the other, in nats",
          "mcf": "minus the bits per byte of the right answer, or the log-likelihood of its letter if not known",
          "fg": "minus the bits per byte of the worked answer, or 1 for a right one if not known",
          "code": "minus the bits per byte of the right program, or 1 for one that passes if not known",
          "bpb": "minus the bits per byte of the right answer"}


@dataclass(frozen=True)
class ScoredStep:
    """A step of a training with its result on a benchmark task. `result` is the content of TASK.json, and `lines` are
    the lines of TASK.items.jsonl, one for each item."""

    run: Run
    step: int
    result: dict[str, Any]
    lines: list[dict[str, Any]]


def explain_task(options: argparse.Namespace) -> dict[str, Any]:
    """Compare two results on a benchmark task, and return everything that `tokenmill train explain --task` prints, as
    JSON values. Raises ConfigError when a result or the data of the task is missing or does not fit, and when the
    training's tokenizer cannot be loaded."""
    from trainer.base.config import ConfigError
    from trainer.evaluation.item_changes import changes, read_items, read_result
    from trainer.evaluation.score_rows import step_folder
    from trainer.tools.evaluation_progress import EvaluationProgress

    run = opened(options.run, options.store, options.out, options.overrides)
    task = task_of(options.task, run)
    after = ScoredStep(run, options.step, *read_result(step_folder(run.out, options.step), task))
    other, step = against(options, run, task)
    before = ScoredStep(other, step, *read_result(step_folder(other.out, step), task))
    data = options.data or (run.config.evaluate.tasks and run.config.evaluate.tasks.data)
    if not data:
        raise ConfigError("give the folder with the data of the task: --data FOLDER")
    items = read_items(task, Path(data), [before.result, after.result])
    if not len(items) == len(before.lines) == len(after.lines):
        raise ConfigError(f"{data}: has {len(items)} items of {task.name}, and the results another number; score the "
                          f"checkpoints again")
    changed = changes(task, after.result["main"], items, before.lines, after.lines)
    most = options.items or ITEMS
    won = sorted((c for c in changed if c.won), key=lambda c: (-c.gain, c.item.row))
    lost = sorted((c for c in changed if c.lost), key=lambda c: (c.gain, c.item.row))
    same = other.out == run.out
    start = steps_samples(run.curriculum, step) if same else common_samples(run.curriculum, other.curriculum)
    with EvaluationProgress() as progress:
        shown = []
        for kind, of, source in (("won", won[:most], after), ("lost", lost[:most], after if same else before)):
            documents = nearest_documents(source, start, task, items, of, progress)
            shown += [{"change": kind, **described(task, c), "documents": d} for c, d in zip(of, documents)]
    measures = {name: (before.result["measures"][name]["value"], measure["value"])
                for name, measure in after.result["measures"].items() if name in before.result["measures"]}
    return {"task": task.name, "step": options.step, "against": {"training": str(other.out), "step": step},
            "measure": after.result["main"], "measures": measures, "items": len(items), "won": len(won),
            "lost": len(lost), "samples_from": start, "shown": shown}


def opened(folder: str, store: str | None, out: str | None, overrides: Sequence[str]) -> Run:
    """Open a run, or a training of a study. `folder` is the folder of the run, or of the training, which is then also
    its output folder (`--out`). The store of such a training is the nearest folder above it that has shards, unless
    `store` is given."""
    from trainer.loop.run import open_run
    from trainer.tools.arm import place_of

    return open_run(folder, *place_of(Path(folder), store, out), overrides)


def task_of(name: str, run: Run) -> EvalTask:
    """Return the task that is called `name`: one of `evaluate.tasks`, a built-in one, or the path of a task file."""
    from trainer.evaluation.task_file import tasks_named

    config = run.config.evaluate.tasks
    named = [own for own in (config.tasks if config else ()) if Path(own).stem == name]
    return tasks_named([named[0] if named else name], "--task")[0]


def against(options: argparse.Namespace, run: Run, task: EvalTask) -> tuple[Run, int]:
    """Return (training, step) of the result with which that of step `options.step` of `run` is compared. --against
    names a step of `run`, or another training. Of another training, the same step is taken if it has a result of
    `task`, else the last step that has one. Without --against, the first step of `run` that has a result is taken, if
    it is before `options.step`. Raises ConfigError when there is no result to compare with."""
    from trainer.base.config import ConfigError
    from trainer.evaluation.score_rows import FOLDER

    word = options.against
    other = run if word is None or word.isdecimal() else opened(word, options.store, None, [])
    if word is not None and word.isdecimal():
        if int(word) >= options.step:
            raise ConfigError(f"--against {word}: name a step before step {options.step}, whose result is explained")
        return run, int(word)
    if word is not None and other.out.resolve() == run.out.resolve():
        raise ConfigError(f"--against {word}: is the training that is explained; name another one, or a step of it")
    scored = sorted(int(path.parent.name.removeprefix("step_"))
                    for path in (other.out / FOLDER).glob(f"step_*/{task.name}.json"))
    if other is not run and scored:
        return other, options.step if options.step in scored else scored[-1]
    earlier = [step for step in scored if step < options.step]
    if other is not run or not earlier:
        raise ConfigError(f"{other.out / FOLDER}: no other result of {task.name} to compare with; score another "
                          f"checkpoint with `tokenmill train eval`, or name another training with --against")
    return run, earlier[0]


def steps_samples(curriculum: Curriculum, step: int) -> int:
    """Return how many samples the first `step` steps of a curriculum read."""
    from tokenizer.mixture.steps import step_at

    last = step_at(curriculum, step)
    return curriculum.samples if last is None else last.stop


def common_samples(first: Curriculum, second: Curriculum) -> int:
    """Return how many samples two curricula have in common at their beginning, counted in whole phases (stretches of
    the training). Returns 0 if seeds, streams or first phases differ. Equal curricula also give 0: nothing in the data
    tells the trainings apart, so the caller then searches all documents."""
    start = 0
    if (first.seed, first.streams) == (second.seed, second.streams):
        for phase, other in zip(first.phases, second.phases):
            if phase != other:
                return start
            start = phase.stop
    return 0 if start == first.samples else start


def nearest_documents(scored: ScoredStep, start: int, task: EvalTask, items: Sequence[Item],
                      of: Sequence[ItemChange], progress: EvaluationProgress) -> list[list[dict[str, Any]]]:
    """Return the documents nearest to benchmark items, a list for each item in `of`. A document is near if it shares
    n-grams with the item. n-grams that many of the task's `items` have in common do not count. The documents are those
    that the training of `scored` read from sample number `start` up to its step."""
    from trainer.checkpoint.ledger import Ledger
    from trainer.data.nearest import distinctive, nearest
    from trainer.data.remote import reading, training_sets
    from trainer.evaluation.models import load_coder

    if not of:
        return []
    run, tokenizer = scored.run, scored.run.curriculum.tokenizer
    coder = load_coder(run.store / tokenizer.path, tokenizer.sha256)
    number = {item.row: i for i, item in enumerate(items)}
    grams = distinctive(coder.encode_batch([text_of(task, item) for item in items]))
    with reading(run):
        sets = training_sets(run.store, run.source, run.curriculum.streams)
        passages = nearest(sets, run.curriculum, (start, steps_samples(run.curriculum, scored.step)),
                           Ledger.read(run.out).why, [grams[number[c.item.row]] for c in of], PASSAGES * DOCUMENTS,
                           progress.show)
        return [documents_of(run, sets, of_item, coder) for of_item in passages]


def text_of(task: EvalTask, item: Item) -> str:
    """Return an item's question with the right answer."""
    from trainer.evaluation.items import cloze

    prompt = cloze(task, item, [])[item.gold]
    return prompt.context + prompt.continuation


def documents_of(run: Run, sets: Sequence[Any], passages: Sequence[SharedPassage],
                 coder: TextCoder) -> list[dict[str, Any]]:
    """Return the documents that hold the given passages, best passage first, at most DOCUMENTS and each once. A
    document has its origin, and an excerpt around the first n-gram that it shares with the benchmark item."""
    from tokenizer.shards.find import window_documents
    from tokenizer.shards.origin import LIGHT, add_origins
    from trainer.data.remote import place
    from trainer.data.rows import windows
    from trainer.tools.published import datasets, part

    by_id: dict[str, dict[str, Any]] = {}
    for p in passages:
        document = next((d for d in window_documents(sets[p.stream], p.window, p.length)
                         if d["tokens"][0] <= p.first < d["tokens"][1]), None)
        if document is None or document["id"] in by_id:
            continue
        [row] = windows(sets, [(p.stream, p.window)], p.length)
        first, stop = document["tokens"]
        tokens = row[0][max(first, p.first - BEFORE):min(stop, p.first + AFTER)].tolist()
        by_id[document["id"]] = {**document, "stream": run.curriculum.streams[p.stream].name, "step": p.step,
                                 "sample": p.sample, "shared": p.shared, "score": p.score,
                                 "excerpt": coder.decode([t for t in tokens if t != sets[p.stream].eos])}
        if len(by_id) == DOCUMENTS:
            break
    documents = list(by_id.values())
    store, top = place(run)
    with ThreadPoolExecutor(DOCUMENTS) as pool:
        add_origins(documents, datasets(store, top), lambda path: part(store, path), LIGHT, 0, pool)
    for d in documents:
        del d["key"], d["at"]
    return documents


def described(task: EvalTask, change: ItemChange) -> dict[str, Any]:
    from trainer.evaluation.items import cloze

    item = change.item
    return {"row": item.row, "id": item.id, "question": cloze(task, item, [])[item.gold].context,
            "right_answer": item.choices[item.gold],
            "before": {"score": change.before.score, "answer": change.before.answer},
            "after": {"score": change.after.score, "answer": change.after.answer}}


# -- as text ---------------------------------------------------------------------------------------------------------
def text(result: dict[str, Any]) -> str:
    """Format the result of `explain_task` as text for a terminal."""
    other = result["against"]
    out = [f"{result['task']} at step {result['step']:,} against step {other['step']:,} of {other['training']}: "
           f"{result['won']:,} won and {result['lost']:,} lost of {result['items']:,} items by {result['measure']}"]
    out += [f"  {name:<20}{now:.4f}, before {was:.4f}" for name, (was, now) in result["measures"].items()]
    out.append(f"  score of an item: {SCORES.get(result['measure'], SCORES['bpb'])}")
    for item in result["shown"]:
        was, now = item["before"], item["after"]
        out += ["", f"{item['change']}: row {item['row']:,}  score {now['score']:.4f}, before {was['score']:.4f}",
                *([f"  question  {one_line(item['question'], QUESTION, end=True)}"] if item["question"] else []),
                f"  answer    {one_line(item['right_answer'], QUESTION)}"]
        if now["answer"] is not None:
            out.append(f"  chosen    {one_line(now['answer'], QUESTION)}; before: {one_line(was['answer'], QUESTION)}")
        for d in item["documents"]:
            origin = [d["stream"], d.get("source"), d.get("url") or (d.get("locator") or {}).get("file")]
            out += [f"  {d['shared']:>4} shared n-grams  {d['id']}  {'  '.join(str(x) for x in origin if x)}  "
                    f"(step {d['step']:,})", f"       {one_line(d['excerpt'], 10 * QUESTION)}"]
        if not item["documents"]:
            out.append("  no document that was read shares an n-gram with it")
    return "\n".join(out)


def one_line(value: str, most: int, end: bool = False) -> str:
    """Return a text as one line, of which at most `most` characters are shown: the first, or with `end` the last."""
    words = " ".join(value.split())
    if len(words) <= most:
        return words
    return f"… {words[-most:]}" if end else f"{words[:most]} …"


def show(options: argparse.Namespace) -> int:
    from pipeline.base.visible import json_text, visible

    result = explain_task(options)
    print(json_text(result) if options.json else visible(text(result)))
    return 0
