"""A package that adds a step and a reader by entry points: one file is enough, and both are known wherever our own
are."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.app import run_command
from pipeline.engine.backends.fingerprint import declared_libraries, differences, fingerprint
from pipeline.plan.lint import lint
from pipeline.recipe import RecipeError, load_recipe
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages import catalog

CODE = '''
from stages.document import Document, document_id
from stages.read.reader import Reader, locator
from stages.stage import Stage, StageConfig, decision


class Shouting(Stage):
    """Drops texts in capitals. It looks at letters alone."""

    name = "shouting"
    cost_ms = 0.001
    drops = True
    made_for = ("en",)
    signals = ("shouting_share",)

    class Config(StageConfig):
        most: float = decision(0.5, "largest share of capitals kept", ge=0, le=1)

    def process(self, doc):
        doc.signals["shouting_share"] = sum(map(str.isupper, doc.text)) / max(len(doc.text), 1)
        return self.verdict(doc)

    def verdict(self, doc):
        return "shouting" if doc.signals["shouting_share"] > self.config.most else None


class Lines(Reader):
    """Every line is a document."""

    name = "lines"
    suffixes = (".lines",)

    def read(self, local, slice):
        for i, line in enumerate(open(local, encoding="utf-8")):
            yield Document(document_id(slice.source, slice.path, "", i), line.strip(), source=slice.source,
                           locator=locator(slice.path, 0, i))
'''
RECIPE = """version: 1
sources: {s: {read: lines, path: texts}}
datasets: {d: {from: s, steps: [gopher_quality, {shouting: {most: 0.6}}]}}
"""


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """The folder of an installed package, as pip leaves it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "loud_package.py").write_text(CODE)
    info = tmp_path / "site" / "loud-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tokenmill.stages]\nshouting = loud_package:Shouting\npii = loud_package:Shouting\n"
        "[tokenmill.readers]\nlines = loud_package:Lines\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    catalog._installed.cache_clear()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.lines").write_text("ALL OF THIS IS SHOUTED\nand this is not\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    yield tmp_path
    catalog._installed.cache_clear()


def test_it_is_listed_with_its_settings(package, capsys):
    assert run_command(["steps"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("shouting"))
    assert line.split(None, 2)[1:] == ["filters", "Drops texts in capitals"]
    assert run_command(["steps", "shouting"]) == 0
    shown = capsys.readouterr().out
    assert "loud_package:Shouting" in shown and "0.5" in shown and "largest share of capitals kept (decision)" in shown
    assert run_command(["readers", "lines", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["suffixes"] == [".lines"]
    assert run_command(["steps", "shoutin"]) == 2
    assert "did you mean 'shouting'?" in capsys.readouterr().err


def test_its_vectors_are_checked(package, capsys):
    """What makes a plug-in complete: its Python file and one of vectors."""
    vectors = package / "vectors" / "shouting.jsonl"
    vectors.parent.mkdir()
    vectors.write_text('{"text": "ABcd", "reason": null, "signals": {"shouting_share": 0.5}}\n'
                       '{"text": "ABCd", "reason": "shouting"}\n'
                       '{"text": "ABCd", "config": {"most": 0.8}, "reason": null}\n')
    assert run_command(["steps", "shouting", "--check", str(vectors)]) == 0
    assert "3 cases" in capsys.readouterr().out
    vectors.write_text('{"name": "loud", "text": "ABCd", "reason": null}\n')
    assert run_command(["steps", "shouting", "--check", str(vectors)]) == 1
    assert "loud: reason: 'shouting' instead of None" in capsys.readouterr().out
    for line in (["steps", "--check", str(vectors)], ["steps", "shoutin", "--check", str(vectors)],
                 ["steps", "shouting", "--check", str(package / "none.jsonl")]):
        assert run_command(line) == 2


def test_steps_that_make_texts_are_listed_as_extractors(capsys):
    assert run_command(["steps", "--json"]) == 0
    kinds = {d["name"]: d["kind"] for d in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {kinds[name] for name in ("html", "pdf", "latex", "book")} == {"extracts"}
    assert kinds["datatrove"] == "runs a block" and kinds["dclm_links"] == "edits"


def test_every_step_and_reader_of_ours_is_listed(capsys):
    for command, known in (("steps", catalog.STAGES), ("readers", catalog.READERS)):
        assert run_command([command, "--json"]) == 0
        listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {d["name"] for d in listed} >= set(known)
        assert all(d["about"] and all(s["help"] for s in d["settings"].values()) for d in listed), "says what it is"
        assert run_command([command]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(listed) and all(line[49] == " " != line[50] for line in lines), "aligned"


def test_it_runs_and_counts_by_its_source(package, capsys):
    run = ["run", str(package / "recipe.yaml"), "--store", str(package / "store"), "--quiet",
           "--set", "datasets.d.steps=[{shouting: {most: 0.6}}]", "--backend", "inline"]
    assert run_command([*run[:-1], "process", "--workers", "1"]) == 0
    [dataset] = json.loads((package / "store" / "report.json").read_text())["datasets"].values()
    assert {row["reason"]: row["docs"] for row in dataset["reasons"]} == {"shouting": 1}
    keys = {r.key for r in Log.read(Store(package / "store")).records()}
    assert run_command(run) == 0
    assert {r.key for r in Log.read(Store(package / "store")).records()} == keys
    (package / "site" / "loud_package.py").write_text(CODE + "\n\nCHANGED = True\n")
    sys.modules.pop("loud_package")
    assert run_command(run) == 0
    assert {r.key for r in Log.read(Store(package / "store")).records()} > keys, "its source is part of the key"
    assert run_command(["plan", *run[1:4], "--json"]) == 0
    assert "shouting" in capsys.readouterr().out


def test_lint_judges_it_by_what_it_says_of_itself(package):
    recipe = load_recipe(package / "recipe.yaml")
    found = "\n".join(lint(recipe))
    assert "'shouting' is cheaper than 'gopher_quality' before it" in found
    assert "made for English" in found


def test_lint_says_nothing_of_what_it_does_not_know(package):
    (package / "recipe.yaml").write_text("""version: 1
sources: {s: {read: warc, path: texts}}
datasets: {d: {from: s, steps: [url, shouting]}}
""")
    assert not any("no step makes text" in s or "addresses" in s for s in lint(load_recipe(package / "recipe.yaml")))


def test_what_cannot_be_loaded_is_named(package, capsys):
    (package / "site" / "loud-1.0.dist-info" / "entry_points.txt").write_text(
        "[tokenmill.stages]\ngone = loud_package:Gone\nshouting = loud_package:Shouting [extra]\n")
    catalog._installed.cache_clear()
    assert run_command(["steps"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "cannot be loaded" in lines["gone"] and "filters" in lines["shouting"]
    for name in ("gone", "nowhere:Class", "stages.read.warc:Warc"):
        assert run_command(["steps", name]) == 2
        assert f"'{name}' cannot be loaded" in capsys.readouterr().err


def test_one_name_from_two_packages_is_refused(package, capsys):
    other = package / "site" / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[tokenmill.stages]\nshouting = other:Loud\n")
    catalog._installed.cache_clear()
    assert run_command(["steps"]) == 2
    assert "added by two packages" in capsys.readouterr().err


def test_nodes_compare_its_version(package):
    ours = fingerprint(declared_libraries())
    assert ours.libraries["loud"] == "1.0"
    theirs = replace(ours, libraries={**ours.libraries, "loud": "0.9"})
    assert differences(ours, theirs) == ["loud 0.9 instead of 1.0"]


def test_a_name_of_ours_is_not_taken(package):
    assert catalog.stage_class("pii").__module__ == "stages.scrub.pii"


def test_one_that_is_not_there_is_named(package):
    (package / "recipe.yaml").write_text(RECIPE.replace("read: lines", "read: line"))
    with pytest.raises(RecipeError, match="unknown reader 'line': did you mean 'lines'"):
        load_recipe(package / "recipe.yaml")
