"""Verdicts about tasks, on score curves whose truth is known."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.__main__ import main
from trainer.evaluation.task_signal import ScoredRun, TaskSignal, kendall, signals, spearman

STEPS = range(100, 1100, 100)
#: candidates → how much better they are than the first one at the end
CANDIDATES = {"raw": 0.0, "filtered": 0.04, "mixed": 0.08}


def runs(score: Callable[[str, int, float, random.Random], float], measure: str = "mcf", chance: float | None = 0.25,
         seeds: int = 3, sizes: tuple[int, ...] = (10, 30), stderr: float = 0.01,
         candidates: tuple[str, ...] = tuple(CANDIDATES)) -> list[ScoredRun]:
    """Trainings whose score is score(candidate, size, share of the training that is done, rng)."""
    made = []
    for name, size, seed in itertools.product(candidates, sizes, range(seeds)):
        rng = random.Random(f"{name}/{size}/{seed}")
        rows = [{"step": step, "tokens": step, "task": "quiz", "measure": measure, "stderr": stderr,
                 "value": score(name, size, step / STEPS[-1], rng), "parameters": size,
                 "sha256": "a", "shots": 2, "seed": 0, "data": "b",
                 **({} if chance is None else {"chance": chance, "constant": chance + 0.01})} for step in STEPS]
        made.append(ScoredRun(name, size, seed, rows))
    return made


def judged(*arguments: Any, **settings: Any) -> TaskSignal:
    (only,) = signals(runs(*arguments, **settings))
    return only


def good(name: str, size: int, done: float, rng: random.Random) -> float:
    return 0.25 + done * (0.2 + 0.001 * size + CANDIDATES[name]) + rng.gauss(0, 0.005)


def test_a_task_that_rises_and_orders_candidates_alike_is_used():
    found = judged(good)
    assert (found.verdict, found.reason) == ("use", "passes")
    assert found.monotonicity > 0.95 and found.gain > 20 and found.distance > 20
    assert found.early > 0.9 and found.sizes == 1.0
    assert found.noise == pytest.approx(0.005, rel=0.35)


def test_bits_per_byte_count_as_better_when_they_fall():
    found = judged(lambda *a: 3 - good(*a), measure="bpb", chance=None)
    assert found.verdict == "use" and found.monotonicity > 0.95 and found.early > 0.9
    found = judged(lambda *a: 3 + good(*a), measure="bpb", chance=None)
    assert found.verdict == "ignore" and found.monotonicity < -0.95 and found.distance < 0


def test_a_task_at_chance_is_ignored():
    found = judged(lambda _n, _s, _d, rng: 0.25 + rng.gauss(0, 0.01))
    assert found.verdict == "ignore" and "chance" in found.reason and abs(found.monotonicity) < 0.4
    found = judged(lambda _n, _s, done, rng: 0.255 + 0.003 * done)         # no better than one constant answer
    assert found.distance < 1 and found.verdict == "ignore"


def test_a_task_whose_seeds_differ_more_than_training_gains_is_ignored():
    def noisy(name: str, size: int, done: float, rng: random.Random) -> float:
        return 0.4 + 0.1 * done + rng.gauss(0, 0.05)

    found = judged(noisy)
    assert found.verdict == "ignore" and "noisy" in found.reason and found.gain < 5


def test_a_task_that_orders_candidates_otherwise_early_or_at_another_size_is_ignored():
    def late(name: str, size: int, done: float, rng: random.Random) -> float:
        sign = 1 if done == 1 else -1                                      # the order turns round at the last step
        return 0.4 + 0.3 * done + sign * CANDIDATES[name] + rng.gauss(0, 0.001)

    def turned(name: str, size: int, done: float, rng: random.Random) -> float:
        return 0.4 + 0.3 * done + (1 if size == 10 else -1) * CANDIDATES[name] + rng.gauss(0, 0.001)

    found = judged(late)
    assert found.early == -1 and found.sizes == 1 and "early" in found.reason and found.verdict == "ignore"
    found = judged(turned)
    assert found.early == 1 and found.sizes == -1 and "sizes" in found.reason and found.verdict == "ignore"


def test_what_the_trainings_cannot_tell_is_unknown_and_said():
    found = judged(good, seeds=1, sizes=(10,), candidates=("raw",))
    assert found.noise is None and found.gain is None and found.early is None and found.sizes is None
    assert found.verdict == "use" and "unknown: noise, rank consistency" in found.reason
    few = runs(good)
    found, = signals([ScoredRun(r.candidate, r.size, r.seed, r.rows[-1:]) for r in few])
    assert found.verdict == "ignore" and "monotonicity" in found.reason


def test_a_task_that_nobody_solves_is_ignored():
    found = judged(lambda *_: 0.0, measure="fg", chance=None, stderr=0.0)
    assert found.verdict == "ignore" and found.distance == 0 and found.monotonicity == 0
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["gain"] == 0


@pytest.mark.parametrize("seed", range(20))
def test_correlations_equal_those_of_their_definitions(seed):
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, 6, 8).astype(float).tolist() for _ in range(2))
    ranks = [[np.mean([i for i, w in enumerate(sorted(x)) if w == v]) for v in x] for x in (a, b)]
    assert spearman(a, b) == pytest.approx(np.corrcoef(ranks)[0, 1])
    signs = [(np.sign(a[i] - a[j]), np.sign(b[i] - b[j])) for i in range(8) for j in range(i)]
    untied = [sum(pair[k] != 0 for pair in signs) for k in (0, 1)]
    assert kendall(a, b) == pytest.approx(sum(x * y for x, y in signs) / math.sqrt(untied[0] * untied[1]))
    assert kendall([1.0, 1.0], [1.0, 2.0]) is None and spearman([1, 2, 3], [5, 5, 5]) == 0


def write(folder: Path, made: list[ScoredRun]) -> None:
    for run in made:
        out = folder / f"{run.candidate}-width{run.size}-seed{run.seed}"
        out.mkdir(parents=True)
        (out / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.rows))


def test_the_command_reads_a_study_and_prints_what_the_functions_say(tmp_path: Path, capsys):
    write(tmp_path, runs(good))
    assert main(["signal", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found == judged(good).to_json()
    assert main(["signal", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "use: passes" in out[1] and out[-1].endswith("quiz")
    one = tmp_path / "raw-width10-seed0"
    assert main(["signal", str(one)]) == 0 and "unknown: noise" in capsys.readouterr().out


def test_a_folder_without_scores_is_one_line(tmp_path: Path, capsys):
    assert main(["signal", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "tasks.jsonl" in error[0]
    (tmp_path / "tasks.jsonl").write_text("torn")
    assert main(["signal", str(tmp_path)]) == 2


def test_a_training_named_twice_or_a_folder_that_is_missing_is_one_line(tmp_path: Path, capsys):
    write(tmp_path, runs(good))
    one = tmp_path / "raw-width10-seed0"
    for names, said in (([str(one), str(one)], "named twice"), ([str(tmp_path), str(one)], "named twice"),
                        ([str(tmp_path / "typo")], "typo: no such folder")):
        assert main(["signal", *names]) == 2
        (error,) = capsys.readouterr().err.strip().splitlines()
        assert said in error


@pytest.mark.parametrize(("key", "said"), [("shots", "number of examples"), ("sha256", "version of the task"),
                                           ("seed", "other examples"), ("data", "other data")])
def test_scores_of_a_task_that_were_made_differently_are_refused(tmp_path: Path, capsys, key: str, said: str):
    made = runs(good)
    write(tmp_path, made)
    assert main(["signal", str(tmp_path)]) == 0
    made[-1].rows[3][key] = "other"
    write_one = tmp_path / f"{made[-1].candidate}-width{made[-1].size}-seed{made[-1].seed}" / "tasks.jsonl"
    write_one.write_text("".join(json.dumps(row) + "\n" for row in made[-1].rows))
    capsys.readouterr()
    assert main(["signal", str(tmp_path)]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert said in error and str(write_one) in error and "step 400" in error


def test_data_that_makes_a_model_worse_does_not_speak_against_the_task():
    def bpb(name: str, size: int, done: float, rng: random.Random) -> float:
        return 3 + (done if name == "raw" else -done) + rng.gauss(0, 0.01)

    found = judged(bpb, measure="bpb", chance=None, candidates=("filtered", "raw"))
    assert found.verdict == "use" and found.monotonicity > 0.95 and found.gain > 20
    assert judged(bpb, measure="bpb", chance=None, candidates=("raw",)).verdict == "ignore"


def test_random_scores_seldom_pass_although_the_best_candidate_counts():
    def noise(name: str, size: int, done: float, rng: random.Random) -> float:
        return 3 + random_numbers.gauss(0, 0.1)

    random_numbers = random.Random(4)
    passed = [judged(noise, measure="bpb", chance=None, stderr=0.05, sizes=(10,)).verdict == "use" for _ in range(200)]
    assert sum(passed) <= 2
