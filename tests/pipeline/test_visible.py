"""Hostile text cannot control a terminal or reverse the direction of a line, wherever it is: in documents, URLs, names
of files or errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeline.base.visible import json_text, visible, visible_json
from pipeline.engine.driver.progress import Progress
from tests.commands import command
from tests.corpus import sentences

#: what must not get through, beside tab and line feed
ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
EVIL = "\x1b]0;owned\x07 \x9b2J\x7f \u202egnp.exe\u2066\u2069 \u200f \x85 \u2028"
ESCAPES = ("\\x1b", "\\x07", "\\x9b", "\\x7f", "\\u202e", "\\u2066", "\\u200f", "\\x85", "\\u2028")
#: a name of a file has neither NUL nor '/'
NAME = f"..\\{EVIL}"


def test_every_such_character_has_an_escape_and_nothing_else_changes():
    assert visible("a\tb\nc\r\nGrüße, 世界, שלום, 👩‍👩‍👧") == "a\tb\nc\nGrüße, 世界, שלום, 👩‍👩‍👧"
    odd = "\x00\x1b\r\x7f\x9f\u061c\u202e\u2069\udcff"
    assert visible(odd) == "\\x00\\x1b\\x0d\\x7f\\x9f\\u061c\\u202e\\u2069\\udcff"
    everything = "".join(map(chr, [*range(0x3000), *range(0xD800, 0xE000)]))
    assert not ODD.search(visible(everything)) and visible(everything).encode()
    assert visible(visible(everything)) == visible(everything)
    value = {EVIL: [EVIL, {"a": EVIL}, 1, None], "b": "Grüße"}
    assert visible_json(value) == {visible(EVIL): [visible(EVIL), {"a": visible(EVIL)}, 1, None], "b": "Grüße"}
    assert json.loads(json_text(value)) == value and "Grüße" in json_text(value)
    assert not ODD.search(json_text(value)) and "\n" not in json_text(value)


@pytest.fixture(scope="module")
def evil(tmp_path_factory) -> Path:
    """A folder with `in/`, which has hostile texts, URLs and names, and with `store/`, where a run kept, dropped and
    quarantined some of them."""
    from pipeline.recipe import load_recipe
    from pipeline.run import make_backend, run_recipe

    top = tmp_path_factory.mktemp("evil")
    (top / "in").mkdir()
    prose = " ".join(sentences()[:14])
    rows = [{"text": f"{EVIL} \x00 {prose}", "url": f"https://e.example/{EVIL}", "id": EVIL, "date": EVIL},
            {"text": f"{prose} {EVIL} \x00 and little more", "url": f"https://f.example/{EVIL}"},
            {"text": f"too short {EVIL}", "url": f"https://g.example/{EVIL}"}, {"text": 5}]
    (top / "in" / f"a{NAME}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (top / "in" / f"b{NAME}.jsonl.gz").write_bytes(b"\x1f\x8b\x08 no gzip")
    (top / "in" / f"c{NAME}.jsonl").symlink_to("/etc/passwd")
    (top / "r.yaml").write_text(
        "version: 1\nsources: {s: {read: jsonl, path: in}}\ndatasets:\n  d: {from: s, steps: [gopher_quality]}\n"
        "  u: {from: d, steps: [minhash]}\n")
    run_recipe(load_recipe(str(top / "r.yaml")), str(top / "store"), make_backend=make_backend("inline", 1, None),
               run="r")
    return top


@pytest.mark.parametrize("command", [
    ["inspect", "d"], ["inspect", "d", "--dropped"], ["inspect", "d", "--quarantined"], ["inspect", "u", "--dropped"],
    ["extract", "IN/a"], ["extract", "IN/b"], ["plan", "r.yaml"], ["plan", "r.yaml", "--why", "d"],
    ["run", "r.yaml", "--backend", "inline"], ["run", "r.yaml", "--backend", "inline", "--quiet"], ["list"],
    ["report", "r"], ["status", "r"], ["tokenizer", "eval", "nothing.json", "IN/a"]], ids=" ".join)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_commands(evil, command, as_json, tokenmill, monkeypatch):
    names = {f"IN/{p.name[0]}": str(p) for p in (evil / "in").iterdir()}
    store = ["--store", str(evil / "store")] if command[0] not in ("extract", "tokenizer") else []
    monkeypatch.setattr("typer._click.utils.should_strip_ansi", lambda *_: False, raising=False)
    monkeypatch.chdir(evil)
    said = tokenmill(*(names.get(c, c) for c in command), *store, *["--json"] * as_json)
    assert not ODD.search(said.out + said.err), (command, said)
    if command[0] in ("inspect", "extract") and command[-1] != "IN/b" and not as_json:
        assert all(e in said.out for e in ESCAPES)
    if as_json and command[0] == "inspect":
        [row, *_] = [json.loads(line) for line in said.out.splitlines()]
        assert "\u202e" in (row.get("file") or row["text"]), "who parses it gets it back"


def test_a_run_tells_of_links_and_files_without_obeying_their_names(evil, tmp_path):
    done = command("pipeline.cli", "run", evil / "r.yaml", "--store", tmp_path, "--backend", "inline")
    assert done.returncode == 0 and not ODD.search(done.stdout + done.stderr)
    links, files = (next(line for line in done.stderr.splitlines() if what in line)
                    for what in ("links that lead out", "could not be read, whole"))
    assert "'c..\\\\\\x1b]0;owned" in links and "\\u202egnp.exe" in links
    assert "b..\\\\x1b]0;owned" in files and "\\u202egnp.exe" in files


def test_pages_and_reports(evil):
    page = (evil / "store/runs/r/report.html").read_text()
    assert not ODD.search(page) and all(e in page for e in ESCAPES)
    data = (evil / "store/runs/r/report.json").read_text()
    assert not ODD.search(data) and "\u202e" in json.dumps(json.loads(data), ensure_ascii=False)


def test_progress_and_logs(capsys):
    import io
    import logging

    from pipeline.base.redact import mask_record
    from tests.pipeline import engine_tasks as t

    stream = io.StringIO()
    [spec] = t.row_specs(parts=1)
    with Progress("rich", stream=stream) as progress:
        progress.planned([spec], {})
        progress.failed(spec, "exception", f"ValueError: {EVIL}", True)
        progress.quarantined(spec, 1, EVIL)
    assert "owned" in stream.getvalue() and not ODD.search(stream.getvalue())
    record = logging.LogRecord("tokenmill", logging.WARNING, "", 1, "cannot read %s", (EVIL,), None)
    assert mask_record(record) and not ODD.search(record.getMessage()) and "\\u202e" in record.getMessage()


def test_the_trainers_commands(tmp_path, capsys):
    from trainer.__main__ import main

    assert main(["explain", f"{tmp_path}/{EVIL}", "1"]) == 2
    said = capsys.readouterr()
    assert "owned" in said.err and not ODD.search(said.out + said.err)


def test_what_explain_shows_of_documents(capsys, monkeypatch):
    import argparse
    import contextlib

    from trainer.tools import explain

    found = {"samples": [1, 2], "step": 1, "steps": 2, "phase": "p", "stale": "", "skip_reason": "", "skipped": "",
             "loss": {"mean": None}, "norm": {"mean": None}, "around": [], "unranked": "", "not_at_hand": "",
             "rows": [{"row": 1, "sample": 1, "loss": None, "stream": "s", "epoch": 0, "window": 1, "tokens": 5,
                       "documents": [{"tokens": [0, 5], "of": 5, "begins": 0, "id": "i", "url": EVIL, "source": "s",
                                      "language": "en", "dataset": "d", "text": EVIL, "signals": {}}]}]}
    monkeypatch.setattr(explain, "explain", lambda *_: found)
    monkeypatch.setattr("trainer.loop.run.open_run", lambda *_: None)
    monkeypatch.setattr("trainer.data.remote.reading", lambda _: contextlib.nullcontext())
    for as_json in (False, True):
        explain.run(argparse.Namespace(run="", store="", out=None, overrides=[], step=1, row=None, worst=None,
                                       task=None, against=None, data=None, items=None, json=as_json))
        said = capsys.readouterr().out
        assert "owned" in said and not ODD.search(said)
