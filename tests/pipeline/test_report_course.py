"""The losses that a report reads from the trainer's metrics (fewer points, and no lines that a rewind made void), and
the chart of the mixture over tokens."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.course import POINTS, losses, mixture_course
from pipeline.report.course_chart import STREAMS, draw, keys, lines
from pipeline.store.fs import Store


def line(event: str, step: int, **values: Any) -> str:
    return json.dumps({"v": 1, "event": event, "step": step, **values}) + "\n"


def step(number: int, loss: float, **more: Any) -> str:
    return line("step", number, tokens=100 * number, loss=loss, lr=1e-3, **more)


def written(folder: Path, text: str) -> dict[str, Any] | None:
    store = Store(str(folder))
    store.write("runs/r/train/metrics.jsonl", text.encode())
    return losses(store, "r")


def test_lines_that_count(tmp_path: Path):
    assert losses(Store(str(tmp_path)), "r") is None
    found = written(tmp_path, "".join([
        line("start", 0), step(1, 9.0), line("start", 0), step(1, 8.0), step(2, 7.5), step(3, 99.0),
        line("eval", 3, tokens=300, loss=88.0), line("resume", 2), step(3, 7.0, streams={"web": 6.5, "rest": None}),
        step(4, math.nan), line("step", 5, tokens=500, loss=6.5), step(6, 90.0), line("rewind", 5), step(6, 6.0),
        line("eval", 6, tokens=600, loss=5.5, streams={"web": {"loss": 5.25, "targets": 3}}),
        '{"v": 1, "event": "step", "step": 7, "tokens": 700, "lo']))
    assert found is not None
    steps = [(p["tokens"], p["loss"]) for p in found["steps"]]
    assert steps == [(100, 8.0), (200, 7.5), (300, 7.0), (500, 6.5), (600, 6.0)]
    assert found["steps"][2]["streams"] == {"web": 6.5} and "lr" not in found["steps"][3]
    assert found["evals"] == [{"tokens": 600, "loss": 5.5, "streams": {"web": 5.25}}]


@pytest.mark.parametrize("steps", [1, POINTS, 2 * POINTS + 1, 20_000])
def test_long_trainings_are_thinned_evenly(tmp_path: Path, steps: int):
    found = written(tmp_path, "".join(step(i, 5.0) for i in range(steps)))
    assert found is not None
    tokens = [p["tokens"] for p in found["steps"]]
    assert tokens[0] == 0 and len(tokens) <= 2 * POINTS and len(tokens) >= min(steps, POINTS // 2)
    assert len({b - a for a, b in pairwise(tokens)}) <= 1
    assert steps == 1 or tokens[-1] >= 100 * (steps - 1) * 0.98


@pytest.mark.parametrize("text", ["", "\n", "no json\n", '{"v": 1, "event": "step", "step": 1}\n',
                                  '{"v": 1, "event": "step", "step": 1, "loss": "<b>", "tokens": 3}\n',
                                  '{"v": 1, "event": "eval", "step": 1, "loss": 2, "tokens": 3, "streams": [1]}\n'])
def test_files_that_say_little_make_no_trouble(tmp_path: Path, text: str):
    found = written(tmp_path, text)
    assert found is None or all(p["streams"] == {} for p in (*found["steps"], *found["evals"]))


def course(streams: int) -> dict[str, Any]:
    each = [64.0 * (i + 1) for i in range(streams)]
    return {"at": [0, 1000, 2000, 3000], "phases": [{"name": "<one>", "from": 0, "to": 2000},
                                                    {"name": "two", "from": 2000, "to": 3000}],
            "streams": {f"s<{i}": {"planned": [each[i]] * 3, "realised": [each[i], each[i] + 1, 0]}
                        for i in range(streams)}}


@pytest.mark.parametrize("streams", [1, 3, 40])
def test_the_chart_has_all_streams_and_phases(streams: int):
    steps = [{"tokens": 500.0 * i, "loss": 9.0 - i, "lr": 0.1, "streams": {"s<0": 8.0 - i}} for i in range(4)]
    points = {"steps": steps,
              "evals": [{"tokens": 3000, "loss": 5.0, "streams": {}}]}
    for losses_ in (None, points, {"steps": [], "evals": points["evals"]}):
        drawn = ET.fromstring(draw(course(streams), losses_, {"s<0": 3}))
        areas = [p for p in drawn.findall("path") if re.fullmatch(r"c\d", p.get("class") or "")]
        assert len(areas) == min(streams, STREAMS + 1) == len(keys(course(streams), {}))
        assert len([p for p in drawn.findall("path") if p.get("class") == "course-plan"]) == len(areas) - 1
        assert {t.text for t in drawn.iter("text")} >= {"<one>", "two", "tokens"}
        high = float((drawn.get("viewBox") or "").split()[3])
        for area in areas:
            corners = [tuple(map(float, corner.split())) for corner in (area.get("d") or "")[1:-1].split("L")]
            assert all(0 <= x <= 880 and 0 <= y <= high for x, y in corners)


def test_losses_are_drawn_of_the_streams_with_the_most_tokens():
    measured = {f"s<{i}": 5.0 for i in (0, 1, *range(30, 40))}
    steps = [{"tokens": 500.0 * i, "loss": 5.0, "streams": measured} for i in range(4)]
    names, all_ = lines(course(40), {"steps": steps, "evals": []})
    assert (names, all_) == ([f"s<{i}" for i in range(39, 30, -1)], 12)
    drawn = ET.fromstring(draw(course(40), {"steps": steps, "evals": []}, {}))
    titles = [title.text or "" for title in drawn.iter("title")]
    assert [title for title in titles if title.startswith("loss of")] == [f"loss of {name}" for name in names]
    assert lines(course(1), {"steps": [], "evals": []}) == ([], 0)


def test_a_run_without_a_curriculum_has_no_course():
    assert mixture_course(None) is None
