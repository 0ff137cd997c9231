"""`tokenmill train compare`: trainings at equal numbers of tokens, losses by source, speed, and differing settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.__main__ import main
from trainer.observe import metrics
from trainer.tools.compare import compare


def training(folder: Path, steps: int, batch: int, loss: float, evals: dict[int, float], **config: Any) -> Path:
    """Write a metrics.jsonl as the trainer does. The loss of step i is `loss` - i / 1000."""
    lines = [{"event": "start", "step": 0, "world": 2, "device": "cpu", "config": {"optimizer": {"lr": 0.1}, **config},
              "streams": ["web"], "phases": [{"name": "all", "batch": batch}]}]
    for i in range(1, steps + 1):
        lines.append({"event": "step", "step": i, "tokens": i * batch, "loss": loss - i / 1000,
                      "streams": {"web": loss - i / 1000 + 0.5}, "tokens_per_s": 100.0 * i, "mfu": None})
        if i * batch in evals:
            lines.append({"event": "eval", "step": i, "tokens": i * batch, "loss": evals[i * batch],
                          "streams": {"web": {"loss": evals[i * batch] + 1}}})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"v": 1, **line}) + "\n" for line in lines))
    return folder


def test_trainings_are_compared_where_all_have_been(tmp_path):
    a = training(tmp_path / "a" / "train", 100, 10, 5.0, {500: 4.0, 1000: 3.0}).parent
    b = training(tmp_path / "b", 20, 40, 4.0, {400: 2.5}, clip=0.5)
    found = compare([a, b])
    assert found["tokens"] == 800
    one, two = found["trainings"]
    assert (one["name"], two["name"]) == ("a", "b")
    assert (one["steps"], two["steps"]) == (80, 20)
    # the last twentieth: tokens 761 to 800
    assert one["loss"] == pytest.approx(5 - (77 + 78 + 79 + 80) / 4000) and two["loss"] == pytest.approx(4 - 0.02)
    assert one["streams"]["web"] == pytest.approx(one["loss"] + 0.5)
    assert (one["heldout"], one["heldout_tokens"], one["heldout_streams"]) == (4.0, 500, {"web": 5.0})   # not 3.0
    assert (two["heldout"], two["heldout_tokens"]) == (2.5, 400)
    assert one["tokens_per_s"] == 4050 and one["mfu"] is None
    assert found["differences"] == {"train.clip": [None, 0.5], "phase all.batch": [10, 40]}


def test_held_out_losses_are_compared_at_equal_tokens(tmp_path, capsys):
    """Not one training's last evaluation with the other's, which has read more."""
    a = training(tmp_path / "a", 100, 10, 5.0, {400: 4.5, 800: 4.0, 1000: 3.9})
    b = training(tmp_path / "b", 100, 10, 5.0, {400: 4.4})
    found = compare([a, b])
    assert [(t["heldout_tokens"], t["heldout"]) for t in found["trainings"]] == [(400, 4.5), (400, 4.4)]
    assert main(["compare", str(a), str(b)]) == 0
    assert "4.4000 (-0.1000)" in (said := capsys.readouterr().out) and "evaluated at" in said
    start = training(tmp_path / "c", 100, 10, 5.0, {})                   # judged at the start alone
    with (start / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"v": 1, "event": "eval", "step": 100, "tokens": 0, "loss": 9.0, "streams": {}}) + "\n")
    assert [t["heldout"] for t in compare([a, start])["trainings"]] == [3.9, 9.0]


def test_it_is_shown_with_differences_to_the_first(tmp_path, capsys):
    a, b = (training(tmp_path / n, 100, 10, loss, {1000: loss}) for n, loss in (("a", 5.0), ("b", 4.0)))
    assert main(["compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "at 1,000 tokens" in said and "held-out loss" in said and "4.0000 (-1.0000)" in said
    assert "differs" not in said and "evaluated at" not in said
    assert main(["compare", str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compare([a, b])


def test_folders_of_one_name_are_told_apart(tmp_path):
    a, b = (training(tmp_path / n / "out", 10, 10, 5.0, {}) for n in ("a", "b"))
    assert [t["name"] for t in compare([a, b])["trainings"]] == ["a/out", "b/out"]
    assert [t["name"] for t in compare([a, a])["trainings"]] == [str(a), str(a)]


def test_of_a_step_only_what_is_compared_is_held(tmp_path, monkeypatch):
    """A line of a printed step has kilobytes, a run a million lines."""
    kept = []
    standing = metrics.standing
    monkeypatch.setattr(metrics, "standing", lambda lines: kept.extend(standing(lines)) or kept)
    a = training(tmp_path / "a", 3, 10, 5.0, {})
    line = {"event": "step", "step": 4, "tokens": 40, "loss": 4.0, "streams": {}, "updates": {"matrices": [1] * 1000}}
    with (a / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"v": 1, **line}) + "\n")
    assert compare([a])["tokens"] == 40 and kept[-1] == {k: v for k, v in line.items() if k != "updates"}


def test_what_is_no_training_is_said(tmp_path, capsys):
    assert main(["compare", str(tmp_path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err
    training(tmp_path / "x", 0, 10, 5.0, {})
    assert main(["compare", str(tmp_path / "x")]) == 2
    assert "no step" in capsys.readouterr().err
