"""Changed thresholds: verdicts are derived again from stored signals, and the result cannot be told from that of a new
run."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import sys
import tempfile
import textwrap
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.engine.backends.local import ProcessBackend
from pipeline.engine.worker.limits import ProcessLimits
from pipeline.passes.replay import without_zeros
from pipeline.plan.estimate import survey_recipe
from pipeline.plan.show import lines
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.view import LogView
from tests.corpus import sentences

#: a user's stage in front (fails on some texts, counts its calls) and one with a threshold but without `verdict`
STAGES = """
    from pathlib import Path
    from stages.stage import Stage, StageConfig, decision

    class Moody(Stage):
        '''Fails on what it does not like.'''
        name = "moody"
        version = 1
        signals = ("moody_length",)

        def process(self, doc):
            with open(Path(__file__).with_suffix(".seen"), "a") as f:
                f.write(doc.id + "\\n")
            if "MOODY" in doc.text:
                raise ValueError("no")
            doc.signals["moody_length"] = len(doc.text)

    class Blunt(Stage):
        '''Drops long texts, and says nothing of replaying.'''
        name = "blunt"
        signals = ("blunt_length",)

        class Config(StageConfig):
            most: int = decision(9000, "longest text, characters")

        def process(self, doc):
            doc.signals["blunt_length"] = len(doc.text)
            return "too_long" if len(doc.text) > self.config.most else None
"""
RECIPE = """
version: 1
code: [{module}.py]
sources: {{web: {{read: jsonl, path: in}}}}
datasets:
  texts: {{from: web, steps: []}}
  clean: {{from: texts, steps: ['{module}:Moody', gopher_repetition, gopher_quality, c4, fineweb, pii]}}
  deduped: {{from: clean, steps: [{{minhash: {{verify: 0.75}}}}, '{module}:Blunt']}}
run: {{partition: 70KB, signals: {mode}, max_error_rate: 20%}}
"""
STEPS = {"gopher_repetition": 1, "gopher_quality": 2, "c4": 3, "fineweb": 4}


def texts() -> list[str]:
    """Return texts of many lengths. A third of them have faults that the rules look for."""
    rng, prose = random.Random(5), sentences()
    made = []
    for i in range(110):
        picked = rng.sample(prose, rng.randint(2, 30))
        match rng.randrange(12):
            case 0:
                picked += [picked[0]] * rng.randint(1, 12)
            case 1:
                picked = [s.rstrip(".") + "..." if rng.random() < 0.4 else s for s in picked]
            case 2:
                picked = ["- " + s if rng.random() < 0.8 else s for s in picked]
            case 3:
                picked = [" ".join(s.split()[:4]) if rng.random() < 0.7 else s for s in picked]
            case 4:
                picked[0] += " { lorem ipsum"
            case 5:
                picked[0] += f" Ask someone{i}@mail.example.org or 8.8.4.{i % 250}."
            case 6:
                picked = made[-1].split("\n")
            case 7:
                picked = [f"{s} [{i}]" for s in picked[:11]] + [picked[0]] * (i % 9)      # c4 cuts them off
        if i % 37 == 5:
            picked[0] += " MOODY"
        made.append("\n".join(picked))
    return [*made, "", "\n", "+ + +"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return make_site(tmp_path_factory.mktemp("replay"), "until-drop")


@pytest.fixture(scope="module")
def with_all_signals(tmp_path_factory) -> Path:
    return make_site(tmp_path_factory.mktemp("replay"), "all")


def make_site(top: Path, mode: str) -> Path:
    module = f"replayed_{mode.replace('-', '_')}"
    (top / f"{module}.py").write_text(textwrap.dedent(STAGES))
    (top / "in").mkdir()
    for i, text in enumerate(texts()):
        with open(top / "in" / f"{i // 18}.jsonl", "a") as f:
            f.write(json.dumps({"text": text, "url": f"https://a.example/{i}"}) + "\n")
    (top / "r.yaml").write_text(RECIPE.format(module=module, mode=mode))
    execute(top, top / "store")
    return top


def overrides(changed: dict[str, Any]) -> list[str]:
    out = []
    for name, value in changed.items():
        step, _, field = name.partition(".")
        place = f"datasets.clean.steps.{STEPS[step]}" if step in STEPS else "datasets.deduped.steps.1"
        out.append(f"{place}={{{step if step in STEPS else '@' + step}: {{{field}: {json.dumps(value)}}}}}")
    return out


def recipe_of(site: Path, changed: dict[str, Any]):
    module = next(site.glob("*.py")).stem
    said = [o.replace("@blunt", f"'{module}:Blunt'") for o in overrides(changed)]
    return load_recipe(site / "r.yaml", said, allow_custom=True)


def execute(site: Path, store: Path, changed: dict[str, Any] | None = None) -> int:
    """Run the recipe. Returns how many documents the first stage of `clean` saw in this run."""
    seen = next(site.glob("*.py")).with_suffix(".seen")
    seen.write_text("")
    run_recipe(recipe_of(site, changed or {}), str(store), make_backend=make_backend("inline", 1, None), report=False)
    return len(seen.read_text().split())


def records(store: Path) -> dict[str, Any]:
    return {r.key: r for r in Log.read(Store(str(store))).records()}


@functools.cache
def anew(site: Path, *changed: tuple[str, Any]) -> tuple[dict[str, Any], int]:
    """Run with the changes over an empty store. Returns (records, number of documents that the first stage saw)."""
    with tempfile.TemporaryDirectory() as store:
        seen = execute(site, Path(store), dict(changed))
        return records(Path(store)), seen


def without_clocks(counters: dict[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in counters.items() if k != "replayed"},
            "stages": {k: {n: v for n, v in s.items() if n != "cpu_s"} for k, s in counters.get("stages", {}).items()}}


def same_as_anew(site: Path, tmp_path: Path, changed: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """Run with `changed` over a copy of the store and over an empty one, and check that all files and counters are
    equal. Returns the new records of the first run, and how many documents the first stage saw in each."""
    if not (tmp_path / "copy").exists():
        shutil.copytree(site / "store", tmp_path / "copy")
    before = records(tmp_path / "copy")
    few = execute(site, tmp_path / "copy", changed)
    mine, (whole, every) = records(tmp_path / "copy"), anew(site, *changed.items())
    check_same(mine, whole)
    return {k: r for k, r in mine.items() if k not in before}, few, every


def check_same(mine: dict[str, Any], whole: dict[str, Any]) -> None:
    assert whole and whole.keys() <= mine.keys()
    for key, record in whole.items():
        assert {n: (i.sha256, i.content, i.rows, i.meta) for n, i in mine[key].files.items()} == \
               {n: (i.sha256, i.content, i.rows, i.meta) for n, i in record.files.items()}, record.node
        assert without_clocks(mine[key].counters) == without_clocks(record.counters), record.node


CHANGES = [
    {"gopher_quality.min_doc_words": 90},                                        # fewer kept
    {"gopher_repetition.dup_line_frac": 0.05, "fineweb.short_line_thr": 0.2},    # in front, and at the end
    {"gopher_repetition.dup_line_char_frac": None, "gopher_repetition.dup_line_frac": 0.9},
    {"c4.min_num_sentences": None, "fineweb.line_punct_thr": 0.0},
    {"c4.min_num_sentences": 12, "gopher_quality.min_stop_words": 5, "fineweb.char_duplicates_ratio": 0.5},
]


@pytest.mark.parametrize("changed", CHANGES, ids=lambda c: " ".join(c))
def test_the_outcome_is_that_of_a_run_anew_to_the_byte(site, tmp_path, changed):
    new, few, every = same_as_anew(site, tmp_path, changed)
    clean = [r for r in new.values() if r.node == "clean"]
    assert len(clean) > 3 and all("replayed" in r.counters for r in clean)
    taken = sum(r.counters["replayed"]["docs"] for r in clean)
    assert 0 < taken < every, "some change, or the test says nothing; most do not"
    # what changes goes through the chain twice: as it was then, to take it out of the counters, and as it is now
    assert few == 2 * (every - taken), "no other document was looked at"


def test_the_same_where_dropped_documents_have_all_signals(with_all_signals, tmp_path):
    _, few, every = same_as_anew(with_all_signals, tmp_path, CHANGES[2])
    assert 0 < few < every


@pytest.mark.parametrize("changed", CHANGES[3:], ids=lambda c: " ".join(c))
def test_dropped_documents_are_edited_by_stages_behind_and_thresholds_decide_that(with_all_signals, tmp_path, changed):
    new, _, every = same_as_anew(with_all_signals, tmp_path, changed)
    assert 0 < sum(r.counters["replayed"]["docs"] for r in new.values() if r.node == "clean") < every


#: a user's stage that makes something of its threshold when it is set up, and may take long over a document
OWN = """
    import time
    from stages.stage import Stage, StageConfig, decision, signal

    class Long(Stage):
        '''Drops long texts.'''
        name = "long"
        signals = ("long_length",)

        class Config(StageConfig):
            most: int = decision(9000, "longest text, characters")
            cpu_s: float = signal(0.0, "CPU seconds it takes")
            blank: bool = signal(False, "whether it takes the text away")

        def setup(self):
            self.most = self.config.most

        def process(self, doc):
            doc.signals["long_length"] = len(doc.text)
            until = time.process_time() + self.config.cpu_s
            while time.process_time() < until:
                pass
            doc.text = "" if self.config.blank else doc.text
            doc.meta["sizes"] = {2: len(doc.text), 10: {True: None}}
            return self.verdict(doc)

        def verdict(self, doc):
            return "too_long" if doc.signals["long_length"] > self.most else None
"""


@pytest.fixture
def own(tmp_path):
    """A function that runs a recipe with the stage OWN over documents of the given lengths. Returns the records of the
    pass."""
    module = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(OWN))

    def run(store: str, sizes: list[int], make=InlineBackend, **config) -> dict[str, Any]:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in sizes))
        os.utime(tmp_path / "in.jsonl", (1, 1))
        (tmp_path / "r.yaml").write_text(
            f"version: 1\ncode: [{module}.py]\nsources: {{web: {{read: jsonl, path: in.jsonl}}}}\ndatasets:\n"
            f"  clean: {{from: web, steps: [{{'{module}:Long': {json.dumps(config)}}}]}}\n"
            f"run: {{max_error_rate: 100%}}\n")
        run_recipe(load_recipe(tmp_path / "r.yaml", [], allow_custom=True), str(tmp_path / store), make_backend=make,
                   report=False)
        return {k: r for k, r in records(tmp_path / store).items() if r.node == "clean"}

    return run


def test_a_stage_that_keeps_what_it_made_of_its_thresholds_is_seen_through(own):
    sizes = [10, 20, 30, 40, 50]
    own("store", sizes, most=35)
    for most in (15, 45):
        check_same(own("store", sizes, most=most), own(f"anew{most}", sizes, most=most))


def test_counters_of_nothing_that_would_be_there_are_there(own):
    """What is dropped has no text left: 0 bytes of it were dropped."""
    own("store", [10, 20], most=15, blank=True)
    whole = own("anew", [10, 20], most=16, blank=True)
    check_same(own("store", [10, 20], most=16, blank=True), whole)
    assert [r.counters["dropped_bytes"] for r in whole.values()] == [{"web": 0}]


@pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")
@pytest.mark.slow
def test_a_document_is_not_quarantined_for_what_both_thresholds_take_together(own):
    """A little more than half of what it may take, and twice that while verdicts are replayed."""
    def make(store: Store) -> ProcessBackend:
        return ProcessBackend(store, 1, limits=ProcessLimits(cpu_s=2.0))

    own("store", [40], make, most=50, cpu_s=1.2)
    found = own("store", [40], make, most=35, cpu_s=1.2)
    whole = own("anew", [40], most=35, cpu_s=1.2)
    [record] = whole.values()
    assert record.files["dropped.parquet"].rows == 1
    assert found[record.key].quarantine == [] and found[record.key].counters["quarantined"] == {}
    check_same(found, whole)


def test_documents_that_were_quarantined_meanwhile_are_in_no_counter(own, tmp_path, monkeypatch):
    sizes = [10, 20, 30, 40, 50]
    [first] = own("store", sizes, most=35).values()
    kept = pq.read_table(tmp_path / "store" / first.files["kept.parquet"].path)["id"].to_pylist()
    monkeypatch.setattr(LogView, "quarantined", lambda self, keys: {kept[1]: {
        "id": kept[1], "stage": "long", "stage_key": keys[0], "reason": "crash:SIGSEGV", "row": 1}} if keys else {})
    whole = own("anew", sizes, most=25)
    check_same(own("store", sizes, most=25), whole)
    [record] = whole.values()
    assert record.counters["quarantined"] == {"crash:SIGSEGV": 1}


def test_replays_of_replays_and_back_again(site, tmp_path):
    for changed in CHANGES[1:3]:
        same_as_anew(site, tmp_path, changed)
    assert execute(site, tmp_path / "copy") == 0, "the first thresholds are still there, nothing runs"


def test_a_stage_without_a_verdict_of_its_own_is_run_again(site, tmp_path):
    new, _, _ = same_as_anew(site, tmp_path, {"blunt.most": 3000})
    last = [r for r in new.values() if r.node == "deduped"]
    assert last and sum(r.counters["replayed"]["docs"] for r in last) == 0
    assert any("too_long" in s["dropped"] for r in last for s in r.counters["stages"].values())


def test_thresholds_that_decide_alike_take_everything_over_but_what_had_failed(site, tmp_path):
    new, few, every = same_as_anew(site, tmp_path, {"gopher_quality.max_doc_words": 99_999})
    assert {r.node for r in new.values()} == {"clean"}, "equal parts: nothing behind them runs"
    failed = sum(sum(r.counters["quarantined"].values()) for r in new.values())
    assert few == 2 * failed > 0
    assert sum(r.counters["replayed"]["docs"] for r in new.values()) == every - failed


def test_a_signal_setting_is_no_threshold(site, tmp_path):
    new, few, every = same_as_anew(site, tmp_path, {"fineweb.short_line_length": 20})
    assert few == every and not any("replayed" in r.counters for r in new.values())


def test_parts_that_are_gone_are_made_anew(site, tmp_path):
    shutil.copytree(site / "store", tmp_path / "copy")
    for record in records(tmp_path / "copy").values():
        if record.node == "clean":
            (tmp_path / "copy" / record.files["dropped.parquet"].path).unlink()
    assert execute(site, tmp_path / "copy", CHANGES[0]) == anew(site, *CHANGES[0].items())[1]


def test_parts_that_are_damaged_are_made_anew(site, tmp_path):
    """One of what is kept and one of what was dropped, each in its text and in its footer."""
    shutil.copytree(site / "store", tmp_path / "copy")
    parts = sorted((r for r in records(tmp_path / "copy").values() if r.node == "clean"
                    and all(r.files[name].rows for name in ("kept.parquet", "dropped.parquet"))), key=lambda r: r.key)
    for record, (name, place) in zip(parts[:4], product(("kept.parquet", "dropped.parquet"), ("text", "footer")),
                                     strict=True):
        path = tmp_path / "copy" / record.files[name].path
        column = pq.read_metadata(path).row_group(0).column(1)
        data = bytearray(path.read_bytes())
        at = column.data_page_offset + column.total_compressed_size // 2 if place == "text" else len(data) - 40
        data[at:at + 8] = b"\xff" * 8
        path.unlink()                                       # its links are other files then
        path.write_bytes(data)
    execute(site, tmp_path / "copy", CHANGES[1])
    whole, _ = anew(site, *CHANGES[1].items())
    check_same(records(tmp_path / "copy"), {k: r for k, r in whole.items() if r.node == "clean"})


def test_the_plan_says_that_verdicts_are_replayed(site):
    document = survey_recipe(recipe_of(site, CHANGES[0]), str(site / "store"))
    [clean] = [r for r in document["nodes"] if r["name"] == "clean"]
    assert clean["replayed"] == clean["stale"] > 3
    assert "verdicts replayed from stored signals" in "\n".join(lines(document))
    document = survey_recipe(recipe_of(site, {"fineweb.short_line_length": 20}), str(site / "store"))
    [clean] = [r for r in document["nodes"] if r["name"] == "clean"]
    assert clean["replayed"] == 0 < clean["stale"]


def test_thresholds_are_written_into_the_parts(site):
    part = sorted((site / "store/datasets/clean").glob("part-*.parquet"))[0]
    said = json.loads(pq.read_schema(part).metadata[b"tokenmill.thresholds"])
    assert {"min_num_sentences": 5} in said and str(site) not in json.dumps(said)


def test_counters_that_have_come_to_nothing_vanish():
    assert without_zeros({"a": 0, "b": {"c": 0}, "d": {"e": 1, "f": 0}}) == {"d": {"e": 1}}
