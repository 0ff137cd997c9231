"""Functions of the report: numbers for people, charts, excerpts, the embedded plot, the choice of samples, and a
crowded page."""

from __future__ import annotations

import copy
import json
import random
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pipeline.report.html
from pipeline.base import humanize
from pipeline.recipe import load_recipe
from pipeline.report import charts, samples
from pipeline.report.html import marked, render
from pipeline.report.nodes import take
from pipeline.report.schema import TrainingFigures
from pipeline.report.totals import totals
from pipeline.report.training import sanitised, training
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from pipeline.store.parts import PartWriter, document_schema
from pipeline.store.records import FileInfo
from stages.document import Document
from tests.corpus import sentences
from trainer.observe.plot import svg
from trainer.observe.task_plot import draw


@pytest.mark.parametrize(("value", "said"), [
    (0, "0"), (7, "7"), (999, "999"), (1234, "1,234"), (9999, "9,999"), (12345, "12.3k"), (99_960, "100k"),
    (999_600, "1M"), (1_234_567, "1.23M"), (45.678, "45.7"), (0.0123, "0.0123"), (123.4, "123"), (2.5e9, "2.5B"),
    (1.5e13, "15T"), (5e15, "5,000T")])
def test_numbers(value, said):
    assert humanize.count(value) == said


@pytest.mark.parametrize(("value", "said"), [
    (0, "0"), (0.0001, "0.0001"), (0.00009999, "0.0001"), (0.0000999, "9.99e-5"), (1e-5, "1e-5"),
    (-1.234e-12, "-1.23e-12"),
    (99.94, "99.9"), (99.95, "100"), (-1234, "-1,234"), (999_499_999_999_999, "999,499,999,999,999"), (1e15, "1e15"),
    (9.999e14, "1e15"), (-1.5e20, "-1.5e20"), (1e300, "1e300"), (float("inf"), "inf"), (float("nan"), "nan")])
def test_digits(value, said):
    assert humanize.digits(value) == said


@pytest.mark.parametrize(("value", "said"), [
    (0, "0 B"), (999, "999 B"), (999.7, "1 kB"), (1500, "1.5 kB"), (999_600, "1 MB"), (64_402, "64.4 kB"),
    (43.9e6, "43.9 MB"), (2e15, "2,000 TB")])
def test_sizes(value, said):
    assert humanize.size(value) == said


@pytest.mark.parametrize(("value", "said"), [
    (0, "0 s"), (0.0001, "<1 ms"), (0.0123, "12 ms"), (3.44, "3.4 s"), (9.96, "10 s"), (56, "56 s"), (468, "7.8 min"),
    (32_760, "9.1 h"), (3.6e6, "1,000.0 h")])
def test_seconds(value, said):
    assert humanize.duration(value) == said


@pytest.mark.parametrize(("value", "said"), [
    (0, "0%"), (1, "100%"), (0.00001, "<0.01%"), (0.0004, "0.04%"), (0.123, "12.3%"), (0.9998, "99.98%"),
    (0.99999, ">99.99%"), (0.9994, "99.9%")])
def test_shares(value, said):
    assert humanize.percent(value) == said


def test_plurals():
    assert [humanize.plural(n, "document") for n in (0, 1, 2, 1234)] == ["0 documents", "1 document", "2 documents",
                                                                       "1,234 documents"]
    assert humanize.plural(2, "copy", "copies") == "2 copies"


def test_charts_are_well_formed_and_say_their_numbers():
    evil = "<b>&\"'"
    for drawn in (charts.stacked([(evil, 3, 0), ("b", 0, 1), ("c", 97, 2)], label=evil), charts.meter(1.7, 3),
                  charts.meter(0), charts.stacked([], label="none"), charts.bars([], 0, label="none"),
                  charts.lengths({"3": 5, "20": 1}, 11, low=3, high=20, label=evil),
                  charts.similarities({"15": 4, "19": 2}, 0, of=20, label=evil)):
        root = ET.fromstring(drawn)
        assert root.get("aria-label") or root.get("aria-hidden") == "true"
    shares = ET.fromstring(charts.stacked([("a", 1, 0), ("b", 3, 1)], label="x")).findall("rect")
    assert [r.get("width") for r in shares] == ["25.000%", "75.000%"]
    assert ET.fromstring(charts.meter(0)).findall("rect")[1:] == [], "nothing is no bar"
    tallest = max(float(r.get("height")) for r in ET.fromstring(charts.bars([("a", 1, ""), ("b", 9, "")], 0,
                                                                           label="x")).findall("rect"))
    assert tallest == 84


# -- excerpts --------------------------------------------------------------------------------------------------------
def test_excerpts_are_scrubbed_whatever_is_cut():
    assert samples.excerpt("  a\n b ") == "a b" and samples.excerpt("") == ""
    address = "someone.somewhere@mail.example.org"
    for lead in range(samples.EXCERPT - 40, samples.EXCERPT + 5):
        assert "someone" not in samples.excerpt("x" * lead + " " + address + " y" * 50)
    for lead in range(samples._SEARCHED_CHARS - 60, samples._SEARCHED_CHARS + 5):  # white space, then a cut address
        assert "someone" not in samples.excerpt(" " * lead + address)
    long = samples.excerpt("word " * 200)
    assert len(long) <= samples.EXCERPT + 2 and long.endswith(" …")
    assert samples.excerpt("x" * 10_000) == "x" * samples.EXCERPT + " …"
    assert "someone" not in samples.masked_address("https://x.example/?u=someone%40mail.example.org")


def test_pairs_begin_where_the_texts_part():
    rng = random.Random(1)
    words = [f"w{rng.randrange(500)}" for _ in range(300)]
    first, second = samples.parting(" ".join(words), " ".join([*words[:200], "new", *words[201:]]))
    assert first.startswith("… ") and second.split()[1:9] == words[192:200] and second.split()[9] == "new"
    assert samples.parting("same text", "same text") == ("same text", "same text")
    assert samples.parting("one two", "three four") == ("one two", "three four")
    number = "+49 (0) 176 1234 5678 90"
    for gap in range(12):                              # excerpts start before, within and after the number
        start = [*words[:100], *number.split(), *words[100:100 + gap]]
        excerpts = samples.parting(" ".join([*start, *words[150:]]), " ".join([*start, "new", *words[150:]]))
        assert not any(part in excerpt for excerpt in excerpts for part in ("1234", "5678")), gap
    assert str(marked("a b c d", "a x c d")) == "a <mark>b</mark> c d"
    assert str(marked("<i> b", "x b")) == "<mark>&lt;i&gt;</mark> b"


def part(store: Store, name: str, docs: list[Document]) -> FileInfo:
    path = str(store.local / name)
    writer = PartWriter(path, document_schema((), dropped=True))
    for doc in docs:
        writer.write(doc, stage="s", reason=doc.language)
    writer.close()
    return FileInfo(name, 1, "", "", writer.rows)


def test_samples_are_the_smallest_ids_however_documents_are_cut_into_parts(tmp_path):
    rng = random.Random(3)
    docs = [Document(id=f"{rng.getrandbits(128):032x}", text=f"t{i} " * rng.randrange(1, 9), source="x",
                     language=rng.choice("abc")) for i in range(400)]
    expected = {(k,): sorted(d.id for d in docs if d.language == k)[:3] for k in "abc"}
    for cut in (1, 2, 7):
        store = Store(str(tmp_path / str(cut)))
        store.local.mkdir(exist_ok=True)
        files = [part(store, f"{i}.parquet", docs[i::cut]) for i in range(cut)]
        chosen = samples.smallest(store, files, ["reason"], 3)
        assert {k: [p[0] for p in places] for k, places in chosen.items()} == expected
        rows = samples.rows_at(store, files, [p for places in chosen.values() for p in places], ["id", "text"])
        texts = {d.id: d.text for d in docs}
        assert len(rows) == 9 and all(row["text"] == texts[place[0]] == texts[row["id"]] for place, row in rows.items())


def test_only_the_row_groups_asked_for_are_read(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    store = Store(str(tmp_path))
    info = part(store, "big.parquet", [Document(id=f"{i:032x}", text=chr(97 + i) * (6 << 20), source="x", language="")
                                       for i in range(6)])
    groups = pq.ParquetFile(tmp_path / "big.parquet").metadata.num_row_groups
    read: list[int] = []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group",
                        lambda self, i, **kw: (read.append(i), original(self, i, **kw))[1])
    assert take(store, info, [5, 0], ["text"])[5]["text"][0] == "f"
    assert groups > 2 and sorted(read) == [0, groups - 1]


def label_boxes(drawn: str) -> list[tuple[float, float, str]]:
    """Return (left, right, text) of the labels under a chart. In the font of the page a digit is 7 px wide at a size of
    11 px."""
    boxes = []
    for e in ET.fromstring(drawn).iter("text"):
        wide, x = 7.0 * len(e.text), float(e.get("x"))
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[e.get("text-anchor")]
        boxes.append((left, left + wide, e.text))
    return boxes


@pytest.mark.parametrize("drawn", [
    *(charts.scores([(2.0 ** (i - low), 2.0 ** (i + 1 - low), i) for i in range(bars)], 0, label="x")
      for bars in (1, 2, 9, 11, 17, 40) for low in (0, 9, 14)),
    charts.scores([(i / 8 - 1, (i + 1) / 8 - 1, 3) for i in range(13)], 0, label="x"),
    *(charts.similarities({str(low): 4, "19": 2}, 0, of=20, label="x") for low in (0, 7, 15, 19)),
    *(charts.lengths({str(low): 4, "30": 2}, 0, low=low, high=30, label="x") for low in (0, 12, 29))])
def test_labels_of_charts_stand_side_by_side(drawn):
    boxes = label_boxes(drawn)
    assert boxes[0][0] >= -0.5 and boxes[-1][1] <= 360.5, "within the picture"
    assert all(right + 4 <= left for (_, right, _), (left, _, _) in pairwise(boxes)), boxes
    bars = len(ET.fromstring(drawn).findall("rect"))
    assert len(boxes) >= min(bars, 4), "enough of them to read the axis"


# -- training --------------------------------------------------------------------------------------------------------
def lines() -> list[dict[str, Any]]:
    phases = [{"name": "stable<&", "tokens": 800, "steps": 8, "lr": "stable"},
              {"name": "anneal", "tokens": 200, "steps": 2, "lr": "decay"}]
    steps = [{"event": "step", "step": i, "tokens": 100 * i, "loss": 9 - i / 2, "lr": 1e-3} for i in range(1, 11)]
    return [{"event": "start", "step": 0, "phases": phases}, *steps,
            {"event": "eval", "step": 10, "tokens": 1000, "loss": 4.2, "unigram_entropy": 6.0}]


def test_our_plot_is_embedded_whole():
    drawn = svg(lines())
    shown = sanitised(drawn.encode())
    assert shown is not None
    before, after = ET.fromstring(drawn), ET.fromstring(shown)
    local = lambda e: e.tag.rpartition("}")[2]  # noqa: E731
    marks = [e for e in before.iter() if local(e) not in ("svg", "style")]
    kept = [e for e in after.iter() if local(e) != "svg"]
    assert [local(e) for e in marks] == [local(e) for e in kept] and len(marks) > 20
    assert [e.text or "" for e in marks] == [e.text or "" for e in kept]
    assert [f"t-{e.get('class')}" for e in marks] == [e.get("class") for e in kept]
    assert [e.get("points") for e in marks] == [e.get("points") for e in kept]
    assert "<style" not in shown and after.get("viewBox") == before.get("viewBox") and after.get("aria-label")


@pytest.mark.parametrize("bad", [
    "<script>alert(1)</script>", "<g onload='alert(1)'/>", "<a href='javascript:alert(1)'><text>x</text></a>",
    "<image href='http://x.example/a.png'/>", "<rect style='fill:url(http://x.example)'/>",
    "<foreignObject>x</foreignObject>", "<style>*{color:red}</style>",
    "<rect class='loss\" onload=\"x'/>", "<rect width='1\" onload=\"x'/>", "<use href='#a'/>",
    "<text>&lt;script&gt;alert(1)&lt;/script&gt;</text>", "<animate attributeName='href' values='javascript:x'/>"])
def test_a_replaced_plot_brings_nothing_along(bad):
    shown = sanitised(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9">{bad}</svg>'.encode())
    assert shown is not None
    for word in ("<script", "onload", "href", "http", "style", "foreign", "<a", "<use", "<image"):
        assert word not in shown.replace(' aria-label="Loss and learning rate', ""), shown


@pytest.mark.parametrize("data", [
    b"", b"no xml", b"<html></html>", b"<svg/>", b'<svg viewBox="0 0 1 1"',
    b'<!DOCTYPE svg [<!ENTITY a "aaaa">]><svg viewBox="0 0 1 1"><text>&a;</text></svg>',
    b'<svg viewBox="0 0 1 1">' + b" " * (1 << 20) + b"</svg>"])
def test_what_is_no_plot_of_ours_is_left_out(data):
    assert sanitised(data) is None


def test_training_section(tmp_path):
    store = Store(str(tmp_path))
    assert training(store, "r") is None
    summary = {"parameters": 10, "steps": 3, "tokens": 90, "seconds": 1.5, "heldout_loss": 4.0,
               "sample": "write to someone@mail.example.org now", "streams": {}}
    store.write("runs/r/train/summary.json", json.dumps(summary).encode())
    said = training(store, "r")
    assert said["curve"] is None and said["ratio"] is None and said["tokens"] == 90
    assert said["sample"] == "write to email@example.com now"


def test_the_last_scores_on_tasks_and_their_curves_are_shown(tmp_path):
    store = Store(str(tmp_path))
    rows = [{"step": step, "tokens": 10 * step, "task": task, "form": measure.partition(".")[0], "measure": measure,
             "value": 0.1 * step, "stderr": 0.01, **({} if measure == "bpb" else {"chance": 0.25})}
            for step in (1, 2, 3) for task in ("arc<b>", "piqa") for measure in ("bpb", "cf.raw", "mcf")
            if (step, task) != (3, "piqa")]
    store.write("runs/r/train/summary.json", b"{}")
    store.write("runs/r/train/tasks.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows)
                + b'{"step": 9, "task": "torn')
    store.write("runs/r/train/tasks.svg", draw(rows).encode())
    section = training(store, "r")
    assert [(s["task"], s["step"], s["measure"]) for s in section["tasks"]] == [
        (task, step, measure) for task, step in (("arc<b>", 3), ("piqa", 2)) for measure in ("bpb", "cf.raw", "mcf")]
    assert section["tasks"][0] == {"task": "arc<b>", "measure": "bpb", "step": 3, "value": pytest.approx(0.3),
                                   "stderr": 0.01, "chance": None}
    drawn, shown = ET.fromstring(draw(rows)), ET.fromstring(section["task_curves"])
    local = lambda e: e.tag.rpartition("}")[2]  # noqa: E731
    assert [local(e) for e in drawn.iter() if local(e) != "style"] == [local(e) for e in shown.iter()]
    titles = [e.text for e in shown.iter() if local(e) == "text" and e.get("class") == "t-title"]
    assert [t.partition(":")[0] for t in titles] == ["arc<b>"] * 3 + ["piqa"] * 3
    TrainingFigures(**section)                                                   # the schema knows the fields
    curves = [e for e in drawn.iter() if local(e) == "polyline"]
    assert [len(e.get("points").split()) for e in curves] == [3, 3, 3, 2, 2, 2]


# -- a page with much on it ------------------------------------------------------------------------------------------
def test_many_sources_streams_and_stages():
    """More of everything than there are colours; nothing breaks, every name is there."""
    sources = [f"source-{i}" for i in range(14)]
    by = {s: 10 + i for i, s in enumerate(sources)}
    dataset = {"docs": 300, "bytes": 1 << 30, "parts": 3, "kept": {s: {"docs": n, "bytes": n} for s, n in by.items()},
               "reasons": [{"stage": f"stage{i}", "reason": f"a_very_long_reason_number_{i}", "docs": 40 - i,
                            "sources": by, "samples": []} for i in range(30)],
               "quarantined": {}, "quarantine_samples": [],
               "languages": {s: {f"l{j}": j + 1 for j in range(20)} | {"": 2} for s in sources},
               "lengths": {s: {str(j): j for j in range(3, 20)} for s in sources}, "pii": {}, "pdf": None,
               "dropped_languages": {"stage0": {f"l{j}": 3 for j in range(20)}, "stage1": {"": 5, "l1": 1}},
               "scores": {"score": {str(j): j for j in range(1, 300)}, "other": {"-5": 3, "0": 1, "104": 7}}}
    document = {
        "version": 1, "run": "crowded", "recipe": "0" * 32, "about": None, "missing_records": 0, "order": None,
        "training": None,
        "names": {"sources": sources, "datasets": ["d", "e"], "final": ["d", "e"], "streams": [*sources, "mixed"]},
        "sources": {s: {"files": 1, "bytes": 10, "records": 1, "skipped": {}, "bad": {},
                        "bad_files": {"files": 1, "bytes": 5, "listed": [{"file": "f", "reasons": {"memory": 5}}]}}
                    for s in sources},
        "funnel": {s: [{"step": "read", "docs": n, "bytes": n}] if n % 2 else [] for s, n in by.items()},
        "datasets": {"d": dataset, "e": copy.deepcopy(dataset)}, "duplicates": [],
        "tokens": {s: {"docs": 1, "tokens": 5, "targets": i % 2 * 5, "near_held_out": i, "val_docs": 0, "val_tokens": 0,
                       "val_targets": 0, "sources": {}, "quarantined": {}, "quarantine_samples": []}
                   for i, s in enumerate([*sources, "mixed"])},
        "mixture": [{"phase": "p", "stream": s, "planned": 1.0, "realised": 3, "tokens": 3, "epochs": 5.0,
                     "repeats_from": 7} for s in sources],
        "passes": [], "tasks": [], "lineage": [], "warnings": ["one"],
        "stages": [{"pass": "d", "stage": f"stage{i}", "in": 1, "dropped": 0, "cpu_s": 1.0 + i, "share": 0.1,
                    "docs_per_cpu_s": None} for i in range(25)]}
    unknown = dict.fromkeys(("at", "host", "author", "version", "python", "name", "recipe"))
    document |= {"made": {**unknown, "store": "s"}, "samples": {}, "licences": {}}
    document["totals"] = totals(document)
    html = render(document)
    assert all(s in html for s in sources) and "1 thing to know" in html and "1 source<" not in html
    assert html.count("0 learned") == 8, "tokens that are no targets are told"
    assert "all others" in html and "others" in html and 'class="c10"' not in html
    assert render(json.loads(json.dumps(document, sort_keys=True))) == html


def test_colours_can_be_read():
    """WCAG 2.1 contrast of text on its background, light and dark: 4.5 and more."""
    css = Path(pipeline.report.html.__file__).with_name("templates").joinpath("style.css.j2").read_text()
    light = dict(re.findall(r"--([a-z0-9]+):(#[0-9a-f]{3,6})", css.partition("@media")[0]))
    after = css.partition("@media")[2].partition("} }")[0]
    dark = {**light, **dict(re.findall(r"--([a-z0-9]+):(#[0-9a-f]{3,6})", after))}
    assert light["bg"] != dark["bg"]

    def luminance(value: str) -> float:
        digits = value[1:] if len(value) == 7 else "".join(c * 2 for c in value[1:])
        parts = [int(digits[i:i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for palette in (light, dark):
        on_colour = [("on", f"c{i}") for i in range(charts.COLORS)]
        for front, back in [("ink", "bg"), ("ink", "card"), ("soft", "bg"), ("soft", "card"), ("accent", "bg"),
                            ("accent", "card"), ("ink", "mark"), ("ink", "warn"), *on_colour]:
            a, b = sorted((luminance(palette[front]), luminance(palette[back])), reverse=True)
            assert (a + 0.05) / (b + 0.05) >= 4.5, f"{front} on {back}: {palette[front]} on {palette[back]}"


def test_a_deduplication_that_verifies_nothing_has_a_report(tmp_path):
    """`verify: 0` removes candidates unseen: there is no similarity to show."""
    rng, prose = random.Random(3), sentences()
    (tmp_path / "docs").mkdir()
    for i in range(6):
        text = " ".join(rng.sample(prose, 40))
        (tmp_path / "docs" / f"{i}.txt").write_text(text)
        (tmp_path / "docs" / f"{i}b.txt").write_text(text + " And a little more.")
    (tmp_path / "r.yaml").write_text("version: 1\nsources: {docs: {read: text, path: docs}}\n"
                                     "datasets: {unique: {from: docs, steps: [{minhash: {verify: 0}}]}}\n")
    summary = run_recipe(load_recipe(tmp_path / "r.yaml"), str(tmp_path / "store"),
                         make_backend=make_backend("inline", 1, None))
    assert summary.datasets == {"unique": 6}
    document = json.loads((tmp_path / "store" / "report.json").read_text())
    [duplicates] = document["duplicates"]
    assert [p["similarity"] for p in duplicates["pairs"]] == [None] * samples.PAIRS and not duplicates["similarity"]
    page = (tmp_path / "store/runs" / summary.run / "report.html").read_text()
    assert page.count("similarity not verified") == samples.PAIRS
