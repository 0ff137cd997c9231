"""loss.svg stays readable when updates or steps are skipped and when steps are repeated. It does not read the whole
file of metrics again each time."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from trainer.observe.plot import STREAMS, stretches, svg, write_plot
from trainer.observe.story import Story, StoryFile

SVG = "{http://www.w3.org/2000/svg}"
PHASES = [{"name": "all", "tokens": 1000, "lr": "stable"}]


def step(number: int, **more) -> dict:
    return {"event": "step", "step": number, "tokens": 10 * number, "loss": 4 - number / 50, "lr": 0.01, **more}


def evaluation(number: int, streams: int = 2) -> dict:
    each = {f"s{i}": {"loss": 3.0 + i / 10, "targets": 100 - i} for i in range(streams)}
    return {"event": "eval", "step": number, "tokens": 10 * number, "loss": 3.2, "unigram_entropy": 3.9,
            "streams": each}


def story() -> list[dict]:
    """Return the lines of a training of 100 steps. The updates of steps 20 and 21 are skipped because of an enormous
    loss. At step 50 it goes back to step 40, in order to skip steps 45 to 48."""
    lines = [{"event": "start", "step": 0, "phases": PHASES}, evaluation(0)]
    lines += [step(n, skipped=True, loss=1e6) if n in (20, 21) else step(n) for n in range(1, 51)]
    lines += [evaluation(50), {"event": "rewind", "step": 40}]
    for n in range(41, 101):
        if 45 <= n < 49:
            passed = step(n, skipped=True, loss=None)
            del passed["lr"]
            lines.append(passed)
        else:
            lines.append(step(n))
    return [*lines, evaluation(100)]


def elements(text: str, tag: str) -> dict[str, list[ET.Element]]:
    found: dict[str, list[ET.Element]] = {}
    for element in ET.fromstring(text).iter(SVG + tag):
        found.setdefault(element.get("class", "").split(" ")[0], []).append(element)
    return found


def points(element: ET.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, point.split(","))) for point in element.get("points").split()]


def test_what_changed_nothing_is_marked_and_no_part_of_the_curve():
    text = svg(story())
    curves, marks, bands = (elements(text, tag) for tag in ("polyline", "line", "rect"))
    raw = points(curves["raw"][0])
    assert len(raw) == 100 - 2 - 4
    heights = [y for _, y in raw]
    assert max(heights) - min(heights) > 100                         # the monstrous loss does not flatten the others
    assert len([m for m in marks["skip"] if m.find(SVG + "title") is not None]) == 2
    band, = bands["passed"]
    assert band.find(SVG + "title").text == "steps 45 to 48 skipped"
    assert float(band.get("width")) == pytest.approx(4 / 100 * (860 - 64 - 20), abs=0.2)
    back = [m for m in marks["rewind"] if m.find(SVG + "title") is not None]
    assert len(back) == 1 and float(back[0].get("x1")) == pytest.approx(64 + 0.4 * (860 - 84), abs=0.1)
    assert len(points(curves["rate"][0])) == 96
    assert len(points(curves["held"][0])) == 2                       # the one of step 50 was made void
    said = "".join(e.text or "" for e in ET.fromstring(text).iter(SVG + "text"))
    assert all(word in said for word in ("update skipped", "steps skipped", "went back", "s0", "s1"))


def test_streams_have_curves_of_their_own_the_largest_first():
    lines = [{"event": "start", "step": 0, "phases": PHASES}, evaluation(0, 9), evaluation(50, 9)]
    assert len(elements(svg(lines), "polyline")["stream"]) == STREAMS
    assert "stream" not in elements(svg([evaluation(0, 1)]), "polyline")         # one stream is the whole
    plain = svg([{"event": "start", "step": 0, "phases": PHASES}, step(1)])
    assert "skipped" not in plain and "went back" not in plain


def test_the_file_is_read_on_from_where_it_was_read_last(tmp_path):
    path, lines = tmp_path / "metrics.jsonl", story()
    texts = [json.dumps(line) + "\n" for line in lines]
    file = StoryFile(path)
    for cut in (3, 30, 60, 61, len(texts)):
        # the last line is not whole yet
        path.write_text("".join(texts[:cut]) + '{"event": "st')
        write_plot(tmp_path)
        assert (tmp_path / "loss.svg").read_text() == svg(lines[:cut])
        file.read()
    assert file.offset == sum(len(text.encode()) for text in texts)
    path.write_text(texts[0] + texts[2])                             # another file in its place
    write_plot(tmp_path)
    assert (tmp_path / "loss.svg").read_text() == svg([lines[0], lines[2]])


def test_a_start_begins_anew():
    made = Story()
    for line in [*story(), {"event": "start", "step": 0, "phases": []}, step(1)]:
        made.add(line)
    assert list(made.number) == [1] and not (made.skips or made.passed or made.rewinds or made.evals)
    assert stretches([(1, 10), (2, 20), (5, 50)]) == [((1, 10), (2, 20)), ((5, 50), (5, 50))]
