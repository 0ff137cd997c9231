"""Studies that compare their arms by scores on benchmark tasks: which tasks count, and what is decided by them."""

from __future__ import annotations

import json
import random
import shutil
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from tests.trainer import synthetic
from tests.trainer.evaluation import word_run, write_task
from trainer.__main__ import main
from trainer.loop.run import open_run
from trainer.loop.task_watcher import wanted_scores
from trainer.tools.arm import Arm, arm_of
from trainer.tools.arm_table import LOSS, TASKS, lines, table
from trainer.tools.arm_tasks import scored_steps, task_lines, task_results

pytest.importorskip("tokenizers")


def study_run(folder: Path, *names: str) -> Path:
    """A run whose recipe asks for scores of every sixth step. The answers of the task `next` are the words that follow
    in the language that the run is trained on."""
    settings = {"every": 6, "tasks": [str(folder / f"{name}.yaml") for name in names or ("next", "quiz")],
                "data": str(folder / "data"), "share": 10.0}
    run = word_run(folder, total=5760, sequence=32, batch=160, checkpoint={"every": 6, "keep": 9}, seed=3,
                   evaluate={"every": 1000, "windows": 8, "tasks": settings})
    documents = [d for d in synthetic.language(99, 200) if len(d) > 8 and d[:8].max() < synthetic.VOCAB - 4]
    rows = [{"q": " ".join(f"w{w}" for w in d[:7]), "answers": [f"w{d[7]}", "w1"]} for d in documents]
    for name in names or ("next",):
        write_task(folder, rows, name, forms=["bpb"], context="{q}", lettered=None, prior=None, norm=None, gold="0")
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return study_run(tmp_path, "a", "b", "c")


def arm(run: Path, name: str, seed: int, scores: dict[str, list[float]], width: int | None = None,
        measure: str = "bpb", **row: Any) -> Arm:
    """An arm with scores of its checkpoints of steps 6, 12, … on tasks, without its trainings."""
    base = open_run(str(run), None, None, [])
    settings = yaml.safe_load((run / "recipe.yaml").read_text())["train"]
    if width is not None:
        settings["model"] = {**settings["model"], "width": width}
    made = arm_of(base, name, seed, settings, base.curriculum, run.parent / "arms", width)
    made.run.out.mkdir(parents=True, exist_ok=True)
    config = made.run.config.evaluate.tasks
    assert config is not None
    origins = {one.task: one for one in wanted_scores(config)}
    rows = [{"step": 6 * i, "tokens": 960 * i, "measure": measure, "value": value, "stderr": 0.01,
             **origins[task]._asdict(), **row}
            for task, values in scores.items() for i, value in enumerate(values, 1)]
    (made.run.out / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def falling(end: float, steps: int = 6) -> list[float]:
    return [end + 0.5 * (steps - i) for i in range(1, steps + 1)]


def compared(arms: list[Arm], by: str = TASKS) -> dict[str, Any]:
    losses = {a.name: [{"web": 1.0}] * sum(b.name == a.name for b in arms) for a in arms}
    return {**table(losses), "by": by, "tasks": task_results(arms)[arms[0].width]}


def test_only_tasks_that_pass_are_in_the_mean_and_each_weighs_the_same(run: Path):
    rng, arms, last = random.Random(1), [], {}
    for name, better in (("base", 0.0), ("good", 0.3)):
        for seed in range(3):
            scores = {task: falling(end - better + rng.gauss(0, 0.01)) for task, end in (("a", 2.0), ("b", 5.0))}
            arms.append(arm(run, name, seed, {**scores, "c": [3.0 + rng.gauss(0, 0.3) for _ in range(6)]}))
            last[name, seed] = fmean(scores[task][-1] for task in ("a", "b"))
    found = task_results(arms)[None]
    assert found["counted"] == ["a", "b"] and set(found["scores"]) == {"a", "b", "c"}
    mean = found["mean"]["arms"]
    by_arm = {name: [last[name, seed] for seed in range(3)] for name in ("base", "good")}
    assert mean["base"]["score"] == pytest.approx(fmean(by_arm["base"]))
    assert mean["good"]["delta"] == pytest.approx(fmean(by_arm["good"]) - fmean(by_arm["base"]))
    reference = table({name: [{"x": v} for v in values] for name, values in by_arm.items()})["sources"]["x"]
    assert found["mean"]["noise"] == pytest.approx(reference["noise"]) and mean["good"]["beyond_noise"]
    said = "\n".join(task_lines(compared(arms)))
    assert "good is better than base on the mean of 2 tasks" in said and "no: " in said.partition("\nc ")[2]
    assert "is better than" not in "\n".join(task_lines(compared(arms, LOSS)))


def test_what_decides_gives_the_verdict_and_the_other_table_has_none(run: Path):
    arms = [arm(run, name, seed, {"a": falling(2.0 + seed / 100)}) for name in ("base", "other") for seed in range(2)]
    for by, decides, other in ((LOSS, lines, task_lines), (TASKS, task_lines, lines)):
        found = compared(arms, by)
        assert any("they are equal" in line for line in decides(found))
        assert not any("they are equal" in line for line in other(found))


def test_accuracies_are_shown_with_their_own_verdict_but_not_averaged(run: Path):
    arms = [arm(run, name, seed, {"a": [0.5 + 0.05 * i + seed / 1000 for i in range(6)]}, measure="pairs", chance=0.5)
            for name in ("base", "other") for seed in range(2)]
    found = task_results(arms)[None]
    assert found["counted"] == [] and found["mean"] is None and found["scores"]["a"]["verdict"] == "use"
    assert "passes as pairs" in "\n".join(task_lines(compared(arms)))


@pytest.mark.parametrize("row", [{"sha256": "other"}, {"shots": 5}, {"data": "other"}])
def test_scores_of_another_task_file_other_examples_or_other_data_do_not_count(run: Path, row: dict[str, Any]):
    arms = [arm(run, name, 0, {"a": falling(2.0)}) for name in ("base", "other")]
    assert task_results(arms)[None]["scores"].keys() == {"a"}
    path = arms[1].run.out / "tasks.jsonl"
    path.write_text("".join(json.dumps({**json.loads(line), **row}) + "\n" for line in path.read_text().splitlines()))
    assert task_results(arms)[None]["scores"] == {}


def test_too_few_checkpoints_are_said_with_the_remedy(run: Path):
    arms = [arm(run, name, seed, {"a": [3.0 if i == 5 else 0.0 for i in range(6)]}) for name in ("base", "other")
            for seed in range(2)]
    for one in arms:
        path = one.run.out / "tasks.jsonl"
        path.write_text("".join(line for line in path.read_text().splitlines(True) if '"step": 36' in line))
    found = compared(arms)
    assert found["tasks"]["scores"]["a"]["verdict"] == "ignore" and found["tasks"]["mean"] is None
    assert any("scores of 1 checkpoints" in line and "--out" in line for line in task_lines(found))


def test_widths_have_tables_of_their_own_and_tasks_are_judged_by_all_of_them(run: Path):
    """At the second width the candidates are in the other order, so the task is not to be trusted at either."""
    arms = [arm(run, name, 0, {"a": falling(2.0 + (name == "other") * sign), "b": falling(2.0 + (name == "other"))},
                width) for width, sign in ((36, 1), (72, -1)) for name in ("base", "other")]
    found = task_results(arms)
    assert [of["counted"] for of in found.values()] == [["b"], ["b"]] and list(found) == [36, 72]
    assert "sizes order candidates otherwise" in found[36]["scores"]["a"]["reason"]
    assert found[72]["scores"]["a"]["arms"]["other"]["delta"] == pytest.approx(-1)


def test_the_steps_that_an_arm_scores_are_its_multiples_and_ends_of_phases(run: Path):
    phases = arm(run, "base", 0, {}).run.curriculum.phases
    assert scored_steps(6, phases, 0) == [6, 12, 18, 24, 30, 36]
    assert scored_steps(6, phases, 18) == [18, 24, 30, 36]
    assert scored_steps(100, phases, 0) == list(accumulate(phase.steps for phase in phases))


@pytest.mark.parametrize(("words", "said"), [
    (["--by", "tasks", "--set", "evaluate.tasks=null"], "evaluate.tasks"),
    (["--by", "tasks", "--tokens", "1000"], "evaluate.tasks.every"),
    (["--by", "tasks", "--halving"], "--halving"),
    (["--arm", "more", "evaluate.tasks.shots=1"], "evaluate.tasks"),
    (["--set", "evaluate.tasks.tasks=[nothing]"], "nothing")])
def test_a_study_that_cannot_compare_tasks_is_refused_before_it_trains(run: Path, capsys, words: list[str], said: str):
    assert main(["ablate", str(run), "--arm", "slow", "optimizer.lr=0.001", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list((run / "train").rglob("metrics.jsonl"))


def test_a_study_decides_by_tasks_and_scores_what_has_no_score(tmp_path: Path, capsys, forked_arms):
    run = study_run(tmp_path, "next")
    command = ["ablate", str(run), "--arm", "slow", "optimizer.lr=0.0005", "--seeds", "2", "--device", "cpu", "--by",
               "tasks"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tasks = found["tasks"]
    assert found["by"] == "tasks" and tasks["counted"] == ["next"]
    assert tasks["mean"]["arms"]["slow"]["delta"] > 0.1 and tasks["scores"]["next"]["checkpoints"] == 6
    out = run / "train" / "ablate"
    assert "slow is worse than base on the mean of 1 task" in (out / "table.txt").read_text()
    row = json.loads((out / "slow-seed1" / "tasks.jsonl").read_text().splitlines()[-1])
    shutil.rmtree(out / "slow-seed1" / "evaluation" / f"step_{row['step']:08d}")
    path = out / "slow-seed1" / "tasks.jsonl"
    path.write_text("".join(path.read_text().splitlines(True)[:-1]))
    assert main([*command, "--json"]) == 0                           # the arms are trained, and one score is missing
    assert json.loads(capsys.readouterr().out) == found
