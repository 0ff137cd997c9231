"""`explain --task`: items won and lost between two results, and the nearest documents of those that were read."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from tests.trainer.evaluation import word_run, write_task
from tests.trainer.synthetic import make_run, quiet
from tokenizer.mixture.steps import rows_of, step_at
from tokenizer.shards.reader import ShardSet
from trainer.__main__ import main
from trainer.base.config import ConfigError
from trainer.data.nearest import LENGTH, distinctive, hashes, nearest
from trainer.data.remote import training_sets
from trainer.data.rows import windows
from trainer.evaluation import evaluate, programs
from trainer.evaluation.item_changes import changes, read_items, read_result
from trainer.evaluation.task_file import read_task
from trainer.loop.run import Run, open_run
from trainer.loop.train import train
from trainer.parallel.world import world
from trainer.tools.explain_task import SCORES, common_samples
from trainer.tools.explain_task import text as as_text

pytest.importorskip("tokenizers")


# -- the search --------------------------------------------------------------------------------------------------------
def brute(run: Run, sets: list[ShardSet], span: tuple[int, int], skipped: set[int], texts: list[np.ndarray],
          keep: int) -> list[list[tuple[float, int, int, int]]]:
    """The definition, word by word: (score, shared, sample, first) of the best passages."""
    names = [s.name for s in run.curriculum.streams]
    count: dict[int, int] = defaultdict(int)
    held: list[tuple[int, list[tuple[int, int]]]] = []               # by passage: sample, [(place, hash)]
    total = 0
    for number in range(1, run.curriculum.steps + 1):
        step = step_at(run.curriculum, number)
        for row in rows_of(run.curriculum, step):
            if number in skipped or row["epoch"] or not span[0] <= row["sample"] < span[1]:
                continue
            [read] = windows(sets, [(names.index(row["stream"]), row["window"])], row["tokens"])
            total += len(read[0]) + 1
            edges = [0, *read[1].tolist(), len(read[0])]
            for first, stop in itertools.pairwise(edges):
                own = [(first + i, int(h)) for i, h in enumerate(hashes(read[0][first:stop].astype(np.int64)))]
                held.append((row["sample"], own))
                for _, h in own:
                    count[h] += 1
    best = []
    for text in texts:
        wanted, scored = set(text.tolist()), []
        for sample, own in held:
            hits = [(place, h) for place, h in own if h in wanted]
            if hits:
                shared = {h for _, h in hits}
                score = sum(math.log1p(total / count[h]) for h in shared)
                scored.append((round(score, 6), len(shared), sample, hits[0][0]))
        best.append(sorted(scored, key=lambda s: (-s[0], s[2], s[3]))[:keep])
    return best


@pytest.mark.parametrize(("packed", "span", "skipped", "tokens"), [
    ((), (0, 10 ** 9), set(), 1 << 20), ((), (40, 120), {9, 10, 30}, 64), (("web",), (0, 200), {1}, 500)])
def test_the_nearest_passages_are_those_of_the_definition(tmp_path: Path, packed, span, skipped, tokens):
    phases = [{"name": "all", "until": "100%", "sequence": 64, "batch": 192, "mix": {"web": 50, "code": 50}}]
    run = open_run(str(make_run(tmp_path, packed=packed, phases=phases if packed else None)), None, None, [])
    sets = training_sets(run.store, None, run.curriculum.streams)
    span = (span[0], min(span[1], run.curriculum.samples))
    rng = np.random.default_rng(3)
    texts = []
    for n in range(6):                                            # passages of the shards, with some words replaced
        start = int(rng.integers(0, sets[n % 2].tokens - 40))
        text = sets[n % 2].read(start, start + 40).astype(np.int64)
        text[::11] = rng.integers(1, 97, len(text[::11]))
        texts.append(text[text != 0])
    grams = [np.unique(hashes(text)) for text in texts]
    explanation = nearest(sets, run.curriculum, span, skipped.__contains__, grams, 5,
                          most_tokens=tokens, most_samples=max(8, tokens // 64))      # the result depends on neither
    expected = brute(run, sets, span, skipped, grams, 5)
    assert [[(round(p.score, 6), p.shared, p.sample, p.first) for p in of] for of in explanation] == expected
    assert sum(map(len, expected)) >= 10
    for p in (p for of in explanation for p in of):
        step = step_at(run.curriculum, p.step)
        assert step.first <= p.sample < step.stop and p.step not in skipped


def test_hashes_tell_the_order_of_tokens_and_do_not_reach_beyond_the_text():
    assert len(hashes(np.arange(LENGTH - 1))) == 0 and len(hashes(np.arange(LENGTH))) == 1
    rng = np.random.default_rng(0)
    grams = {tuple(g) for g in rng.integers(0, 50, (20000, LENGTH)).tolist()}
    assert len({int(hashes(np.array(g))[0]) for g in grams}) == len(grams)


def test_n_grams_of_a_template_do_not_count():
    texts = [[1, 2, 3, 4, 5, 6, 100 + i, 200 + i, 300 + i, 400 + i, 500 + i] for i in range(40)]
    own = distinctive(texts)
    template = set(hashes(np.arange(1, 7)).tolist())
    assert all(len(grams) == 5 and not template & set(grams.tolist()) for grams in own)


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with checkpoints of steps 12 and 24, scored on two tasks. Row 0 of `next` stands in the window of
    step 20."""
    folder = tmp_path_factory.mktemp("explain")
    settings = {"every": 12, "tasks": [str(folder / "next.yaml"), str(folder / "quiz.yaml")],
                "data": str(folder / "data")}
    run = word_run(folder, total=3840, sequence=32, batch=160, checkpoint={"every": 12, "keep": 9}, seed=3,
                   evaluate={"every": 1000, "tasks": settings})
    opened = open_run(str(run), None, None, [])
    sets = training_sets(opened.store, None, opened.curriculum.streams)
    rows: list[dict[str, Any]] = []
    for number in (20, *range(1, 24)):
        at = rows_of(opened.curriculum, step_at(opened.curriculum, number))[0]
        stream = [s.name for s in opened.curriculum.streams].index(at["stream"])
        [(tokens, bounds, *_)] = windows(sets, [(stream, at["window"])], at["tokens"])
        edges = [0, *bounds.tolist(), len(tokens)]
        first, stop = max(itertools.pairwise(edges), key=lambda e: e[1] - e[0])
        words = [f"w{t}" for t in tokens[first:stop].tolist() if t and t < 93][:14]
        rows.append({"q": " ".join(words[:-1]) + " \x1b[31m", "answers": [words[-1], "w1"]})
    write_task(folder, rows, "next", forms=["bpb", "cf"], context="{q}", lettered=None, prior=None, gold="0")
    with world("cpu") as here:
        train(open_run(str(run), None, None, ["evaluate.tasks=null"]), here, None, quiet)
    assert main(["eval", str(run), "--steps", "all", "--data", str(folder / "data"), "--tasks",
                 ",".join(settings["tasks"]), "--device", "cpu"]) == 0
    return run


def explained(capsys, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["explain", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["next", "quiz"])
def test_outcomes_of_items_add_up_to_the_measures_of_the_task(trained: Path, name: str):
    folder = trained.parents[2]
    task = read_task(folder / f"{name}.yaml")
    results = [read_result(trained / "train" / "evaluation" / f"step_{step:08d}", task) for step in (12, 24)]
    items = read_items(task, folder / "data", [result for result, _ in results])
    explanation = changes(task, task.file.main, items, results[0][1], results[1][1])
    for (result, _), outcomes in zip(results, ([c.before for c in explanation], [c.after for c in explanation])):
        assert fmean(o.right for o in outcomes) == pytest.approx(result["measures"][task.file.main]["value"])
        assert -fmean(o.score for o in outcomes) == pytest.approx(result["measures"]["bpb"]["value"])
    assert all(c.won == (c.after.right and not c.before.right) for c in explanation)


def test_items_without_a_question_have_no_line_for_it():
    item = {"change": "won", "row": 3, "right_answer": "a b", "documents": [], "before": {"score": 1.0, "answer": "c"},
            "after": {"score": 2.0, "answer": "a b"}}
    result = {"task": "pairs", "step": 2, "against": {"step": 1, "training": "t"}, "won": 2, "lost": 0, "items": 9,
              "measure": "pairs", "measures": {}, "shown": [{**item, "question": ""}, {**item, "question": "who?"}]}
    lines = as_text(result).splitlines()
    assert [line for line in lines if "question" in line] == ["  question  who?"]


def test_results_are_compared_if_they_have_the_same_examples(trained: Path):
    folder = trained.parents[2]
    task = read_task(folder / "quiz.yaml")
    result, lines = read_result(trained / "train" / "evaluation" / "step_00000012", task)
    none = {**result, "shots": 0}
    assert len(read_items(task, folder / "data", [none, {**none, "seed": 7}])) == len(lines)    # no examples at all
    for other in ({**result, "seed": 7}, none):
        with pytest.raises(ConfigError, match="different examples"):
            read_items(task, folder / "data", [result, other])


def test_the_document_in_which_an_item_stands_is_the_nearest(trained: Path, capsys):
    explanation = explained(capsys, str(trained), "24", "--task", "next", "--items", "99")
    assert explanation["against"]["step"] == 12 and explanation["samples_from"] == step_at(
        open_run(str(trained), None, None, []).curriculum, 12).stop
    assert explanation["won"] + explanation["lost"] == len(explanation["shown"]) > 0
    documents = [d for item in explanation["shown"] for d in item["documents"]]
    assert documents and all(13 <= d["step"] <= 24 for d in documents)
    late = {item["row"] or 20: item["documents"][0] for item in explanation["shown"]
            if item["row"] > 12 or not item["row"]}
    assert late and {number: d["step"] for number, d in late.items()} == {number: number for number in late}


def test_programs_that_pass_only_at_one_step_are_won_and_lost(trained: Path, capsys, monkeypatch):
    folder = trained.parents[2]
    rows = [{"prompt": f"w1 w2 w{n} w4 w5 w6", "solution": f" w{n + 10} w7", "test": "def check(f): pass"}
            for n in range(20, 24)]
    write_task(folder, rows, "coded", forms=["bpb", "code"], context="{prompt}", answer="{solution}", lettered="",
               prior=None, choices_from="", choices=["{solution}"], gold="0",
               generate={"tokens": 2, "stop": ["\n"]}, code={"function": "f", "tests": "{test}"})
    monkeypatch.setattr(programs, "check_isolation", lambda: None)
    for step, passing in ((12, {0, 1}), (24, {1, 2, 3})):
        numbers = itertools.count()
        monkeypatch.setattr(evaluate, "outcome", lambda _program, numbers=numbers, passing=passing: (
            "passed" if next(numbers) in passing else "wrong"))
        assert main(["eval", str(trained), "--steps", str(step), "--data", str(folder / "data"), "--tasks",
                     str(folder / "coded.yaml"), "--allow-code", "--device", "cpu"]) == 0
    words = [str(trained), "24", "--task", str(folder / "coded.yaml")]
    explanation = explained(capsys, *words)
    assert explanation["measure"] == "code" and explanation["measures"]["code"] == [0.5, 0.75]
    assert {(item["row"], item["change"]) for item in explanation["shown"]} == {(0, "lost"), (2, "won"), (3, "won")}
    assert (explanation["won"], explanation["lost"]) == (2, 1)
    results = trained / "train" / "evaluation" / "step_00000024"
    lines = [json.loads(line) for line in (results / "coded.items.jsonl").read_text().splitlines()]
    for item in explanation["shown"]:
        line = lines[item["row"]]
        assert item["after"]["answer"] == line["generated"] and item["right_answer"] == rows[item["row"]]["solution"]
        assert item["after"]["score"] == pytest.approx(line["cloze"][0] / math.log(2) / line["bytes"][0])
    assert main(["explain", *words]) == 0
    assert SCORES["code"] in capsys.readouterr().out
    assert main(["eval", str(trained), "--steps", "12", "--data", str(folder / "data"), "--tasks",
                 str(folder / "coded.yaml"), "--out", str(folder / "without"), "--device", "cpu"]) == 0
    (folder / "without" / "step_00000012" / "coded.json").replace(results.parent / "step_00000012" / "coded.json")
    (folder / "without" / "step_00000012" / "coded.items.jsonl").replace(
        results.parent / "step_00000012" / "coded.items.jsonl")
    capsys.readouterr()
    assert main(["explain", *words, "--against", "12"]) == 2
    assert "programs were run for one of the two results only" in capsys.readouterr().err


def test_texts_are_shown_without_control_characters(trained: Path, capsys):
    assert main(["explain", str(trained), "24", "--task", "next", "--items", "99"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\\x1b" in said and "shared n-grams" in said


def test_arms_are_compared_by_what_each_has_read_since_they_differ(trained: Path, tmp_path: Path, capsys, forked_arms):
    folder = trained.parents[2]
    command = ["ablate", str(trained), "--out", str(tmp_path), "--arm", "slow", "optimizer.lr=0.0001", "--seeds", "1",
               "--device", "cpu", "--set", f"evaluate.tasks.tasks=[{folder / 'next.yaml'}]"]
    assert main(command) == 0
    base, slow = (str(tmp_path / "ablate" / f"{name}-seed0") for name in ("base", "slow"))
    explanation = explained(capsys, slow, "24", "--task", "next", "--against", base, "--store", str(trained.parents[1]))
    assert explanation["against"] == {"training": base, "step": 24} and explanation["samples_from"] == 0
    last = [json.loads((Path(arm) / "evaluation" / "step_00000024" / "next.json").read_text()) for arm in (base, slow)]
    assert explanation["measures"]["bpb"] == [result["measures"]["bpb"]["value"] for result in last]


def test_trainings_with_a_common_beginning_are_searched_from_where_they_differ(tmp_path: Path):
    curriculum = open_run(str(make_run(tmp_path)), None, None, []).curriculum
    *common, last = curriculum.phases
    other = replace(curriculum, phases=(*common, replace(last, weights={"web": 1})))
    assert common_samples(curriculum, other) == common[-1].stop == last.start > 0
    assert common_samples(curriculum, curriculum) == 0                # the same data: all of it
    assert common_samples(curriculum, replace(other, seed=curriculum.seed + 1)) == 0


@pytest.mark.parametrize(("words", "said"), [
    (["24", "--task", "nothing"], "--task nothing: unknown"),
    (["24", "--task", "next", "--against", "23"], "step_00000023"),
    (["12", "--task", "next", "--against", "24"], "--against 24: name a step before step 12"),
    (["24", "--task", "next", "--against", "24"], "--against 24: name a step before step 24"),
    (["12", "--task", "next"], "--against"), (["24", "--data", "x"], "--task"),
    (["7", "--task", "next"], "next.json: no such result (steps that have one: 12, 24)"),
    (["24", "--task", "next", "--data", "store"], "--data")])
def test_what_cannot_be_explained_is_said(trained: Path, capsys, monkeypatch, words: list[str], said: str):
    monkeypatch.chdir(trained.parents[2])
    assert main(["explain", str(trained), *words]) == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1


def test_a_training_is_not_compared_with_itself(trained: Path, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    for folder in (trained, "."):
        assert main(["explain", str(trained), "24", "--task", "next", "--against", str(folder)]) == 2
        assert f"--against {folder}: is the training that is explained" in capsys.readouterr().err


def test_results_of_other_data_or_a_damaged_file_are_refused(trained: Path, capsys):
    path = trained.parents[2] / "data" / "next.jsonl"
    text = path.read_text()
    try:
        path.write_text(text + text.splitlines(True)[0])
        assert main(["explain", str(trained), "24", "--task", "next"]) == 2
        assert "--data" in capsys.readouterr().err
    finally:
        path.write_text(text)
    items = trained / "train" / "evaluation" / "step_00000024" / "next.items.jsonl"
    whole = items.read_text()
    try:
        items.write_text(whole.replace('"gold": 0', '"gold": 1', 1))
        assert main(["explain", str(trained), "24", "--task", "next"]) == 2
        assert "line 1" in capsys.readouterr().err
    finally:
        items.write_text(whole)
