"""The cost forecast from a sample, compared with what a whole run then takes and leaves."""

from __future__ import annotations

import contextlib
import json
import random
import re
import zlib
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.forecast.cost import Extrapolation, forecast, line
from pipeline.forecast.mixture import mixture
from pipeline.forecast.range import Range
from pipeline.forecast.sample import (
    DRAW,
    SampleError,
    SampleLimits,
    SampleRun,
    SourceSample,
    choose_files,
    run_sample,
    unit_of,
)
from pipeline.forecast.show import lines
from pipeline.plan.planner import Planner
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages.catalog import reader_class
from stages.document import BadRecord
from stages.read.reader import Slice
from stages.read.sample import SampleReader
from tests.conftest import shared_data
from tests.corpus import sentences, write_warcs

RECIPE = """
version: 1
sources:
  web: {read: warc, path: crawl/*.warc.gz}
  docs: {read: text, path: docs}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: [gopher_quality, pii]}
  deduped: {from: [clean, docs], steps: [{minhash: {verify: 0.75}}], priority: [docs, clean]}
tokenizer: {train: {kind: bpe, vocab: 600, from: deduped, sample: 50KB}}
shards:
  web: {from: deduped, where: {source: web}, longest: 128, val: 5%}
  docs: {from: deduped, where: {source: docs}, longest: 128, val: 5%}
curriculum:
  total: 1M
  phases: [{name: all, until: 100%, sequence: 64, batch: 512, mix: {web: 80, docs: 20}}]
run: {partition: 100KB}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("forecast")
    write_warcs(top / "crawl", 600, 6)
    (top / "docs").mkdir()
    rng, prose = random.Random(7), sentences()
    for i in range(12):
        (top / "docs" / f"d{i}.txt").write_text(" ".join(rng.sample(prose, 20)))
    (top / "recipe.yaml").write_text(RECIPE)
    return top


#: small sources need no 200 records of each
FEW = SampleLimits(least=60)


def inline_sample(site: Path, share: float, limits: SampleLimits = FEW) -> SampleRun:
    """Run a sample in this process."""
    return run_sample(load_recipe(site / "recipe.yaml"), share, workers=1, limits=limits,
                      backend=make_backend("inline", 1, None))


def counted(store: Path) -> dict[str, Any]:
    """Return what a whole run left: documents and text by dataset, tokens by stream, CPU seconds, bytes of parts."""
    found: dict[str, Any] = {"docs": defaultdict(int), "tokens": defaultdict(int), "cpu_s": 0.0}
    for record in Log.read(Store(store)).records():
        found["cpu_s"] += record.cpu_s
        if record.node.endswith("/encode"):
            found["tokens"][record.node.split("/")[0].removeprefix("shards:")] += record.counters["train"]["tokens"]
        elif "kept.parquet" in record.files:
            found["docs"][record.node] += record.files["kept.parquet"].rows
    return found


def near(estimate: Range, really: float, factor: float) -> None:
    assert really / factor <= estimate.value <= really * factor, (estimate, really)
    assert estimate.low <= estimate.value <= estimate.high


@pytest.fixture(scope="module")
def sampled(site):
    return inline_sample(site, 0.25)


@pytest.fixture(scope="module")
def whole(site, tmp_path_factory) -> Path:
    """The store of a run over the whole input."""
    store = tmp_path_factory.mktemp("whole") / "store"
    run_recipe(load_recipe(site / "recipe.yaml", ["curriculum=null"]), str(store),
               make_backend=make_backend("inline", 1, None), report=False)
    return store


@pytest.mark.slow
def test_the_forecast_of_a_quarter_is_near_the_truth(sampled, whole):
    result = forecast(sampled, cores=4, price=0.04)
    really = counted(whole)
    of = {d.dataset: d for d in result.datasets}
    near(of["extracted"].documents, really["docs"]["extracted"], 1.2)
    near(of["clean"].documents, really["docs"]["clean"], 1.25)
    near(of["deduped"].documents, really["docs"]["deduped"], 1.5)
    for name in ("extracted", "clean", "deduped"):
        assert of[name].documents.low <= really["docs"][name] <= of[name].documents.high, name
    web = next(s for s in result.streams if s.stream == "web")
    assert web.tokens.low * 0.8 <= really["tokens"]["web"] <= web.tokens.high * 1.25
    assert result.sample["docs"].scale == 1 and result.sample["docs"].records_drawn == 12, "all of it"
    assert result.total.cost.value == pytest.approx(result.total.cpu_hours.value * 0.04)
    assert result.total.memory_mb_per_worker > 0 and result.total.exchange_bytes.value > 0
    assert any("do not grow evenly" in n for n in result.notes)
    [web_dups] = [d for d in result.duplicates if d.source == "web"]
    gone = really["docs"]["clean"] + 12 - really["docs"]["deduped"]
    assert web_dups.removed.low <= gone <= web_dups.removed.high, "the bound holds"
    document = json.loads(json.dumps(result.to_json()))
    assert document["total"]["wall_s"] == asdict(result.total.wall_s) and document["sample"]["docs"]["scale"] == 1
    text = "\n".join(lines(result))
    assert "per core-hour" in text and "duplicates" in text and "on 4 cores" in text


def test_the_forecast_of_each_node_is_what_a_run_leaves(sampled, whole):
    """Tasks and bytes on disk, node by node. Of `docs` everything is in the sample, of `web` a quarter."""
    # the clock of CPU time has ticks of 10 ms, of which a task on a fast machine may see none
    slower = {name: [replace(r, cpu_s=r.cpu_s + 0.02) for r in records] for name, records in sampled.records.items()}
    result = forecast(replace(sampled, records=slower), cores=4)
    tasks, disk = defaultdict(int), defaultdict(int)
    for record in Log.read(Store(whole)).records():
        name = record.node.rpartition("/")[0] or record.node
        tasks[name] += 1
        disk[name] += sum(i.bytes for i in record.files.values())
    nodes = {n.name: n for n in result.nodes}
    assert nodes["tokenizer:"].disk_bytes.high < 2 * disk["tokenizer:"], "there is one, however much text there is"
    for name in ("extracted", "clean", "deduped:docs", "shards:web", "shards:docs"):
        near(nodes[name].disk_bytes, disk[name], 2.0)
        if "docs" not in name:                         # of which all is in the sample
            for what in (nodes[name].disk_bytes, nodes[name].cpu_s):
                assert what.low < what.value < what.high, (name, what, "a quarter is no certainty")
        assert nodes[name].tasks <= tasks[name] * 1.5 + 1, (name, nodes[name].tasks, tasks[name])
    near(nodes["deduped"].disk_bytes, disk["deduped"], 2.5)
    published = sum(f.stat().st_size for top in ("datasets", "dropped", "quarantine", "shards")
                    for f in (whole / top).rglob("*") if f.suffix != ".json" and f.name[0] != "_")
    near(result.total.published_bytes, published, 2.0)
    assert nodes["deduped:docs"].tasks == 1 and nodes["shards:docs"].tasks == 1
    assert nodes["deduped/minhash.1"].tasks == tasks["deduped/minhash.1"], "groups of parts, not parts"


def test_a_balanced_sample_of_the_tokenizer_costs_what_its_bytes_cost(site, sampled):
    balanced = load_recipe(site / "recipe.yaml", ["tokenizer.train.sample={bytes: 50KB, by: source}"])
    costs = [{n.name: n.cpu_s for n in forecast(run, cores=4).nodes}
             for run in (sampled, replace(sampled, recipe=balanced))]
    assert costs[0]["tokenizer:"] == costs[1]["tokenizer:"]


def test_models_that_the_first_tasks_load_are_not_taken_for_what_texts_cost(sampled):
    """Tasks go out by size, so the first ones, which load models or compile, are the largest. Sizes and seconds are
    those that 1,554 real pages had on two workers."""
    sizes = [425_000, 387_000, 349_000, 248_000, 211_000, 195_000, 185_000, 171_000, 118_000, 110_000, 102_000, 101_000,
             100_000, 100_000, 99_000, 91_000]
    records = [replace(sampled.records["clean"][0], attempt=f"{2:08d}-{serial:08d}-0", counters={"in": {"web": {
        "docs": 1, "bytes": size}}}, cpu_s=0.02 + 4e-7 * size + (3.0 if serial < 2 else 0.0))
        for serial, size in enumerate(sizes)]
    whole = Extrapolation(replace(sampled, workers=2), 4)
    really = 0.02 * whole.partitions({"web"}) + 4e-7 * sum(sizes) * sampled.sources["web"].scale
    cpu = whole.over_tasks(records, lambda r: r.cpu_s, first_loads=True)
    near(cpu, really, 1.2)
    assert cpu.high >= really + 4 * 2.9, "each of four cores will load them once"


def test_epochs_of_the_mixture(sampled):
    """800,000 of 1 M tokens from a stream of about 100,000: said before anything runs."""
    result = forecast(sampled, cores=1)
    of = {m.stream: m for m in result.mixture}
    total = 1_000_000 // 512 * 512                                      # whole steps
    assert of["web"].needed == 0.8 * total and of["docs"].needed == pytest.approx(0.2 * total)
    assert of["web"].epochs.value == pytest.approx(0.8 * total / of["web"].available.value)
    assert any("stream 'docs' has too few tokens" in n and "1 epoch allowed" in n for n in result.notes)
    assert "epochs" in "\n".join(lines(result))
    enough = {"web": Range(9e5, 8.5e5, 1e6), "docs": Range(3e5, 2.5e5, 4e5)}
    assert mixture(sampled.recipe, enough)[1] == []
    close = {**enough, "web": Range(8.2e5, 7e5, 1e6)}
    assert "may have too few" in mixture(sampled.recipe, close)[1][0]


def test_the_sample_is_decided_by_ids_alone(site, sampled):
    """The same records whatever the order of files; a larger share holds the smaller one's."""
    again = inline_sample(site, 0.25)
    kept = [{s: (x.records_drawn, x.bytes_drawn) for s, x in run.sources.items()} for run in (sampled, again)]
    assert kept[0] == kept[1]
    contents = [sorted(r.files["kept.parquet"].content for r in run.records["clean"]) for run in (sampled, again)]
    assert contents[0] == contents[1]


def test_every_source_gives_some_and_a_larger_price_costs_more(site):
    run = inline_sample(site, 0.0001)
    assert run.sources["docs"].records_drawn == 12 and 40 <= run.sources["web"].records_drawn <= 60
    one, two = (forecast(run, cores=1, price=p).total.cost.value for p in (1.0, 2.0))
    assert two == pytest.approx(2 * one)


def test_too_much_to_read(site):
    """Some of the files, and of one too big the beginning: both are said, and the scale is still about right."""
    planner = Planner(load_recipe(site / "recipe.yaml"), lambda path, sha256: b"")
    planner.nodes()
    files = planner.source_files("web")
    total = sum(f.size for f in files)
    few = choose_files(files, total // 2)
    assert 1 <= len(few) < 6 and few == choose_files(files, total // 2)
    assert set(few) <= set(choose_files(files, total // 2 + few[0].size)), "a larger budget holds the smaller one's"
    draws = [draw([f.arg() for f in chosen], planner, read_most=most)
             for chosen, most in ((few, 1 << 40), (few[:1], 100_000))]
    assert draws[0]["covered"] == sum(f.size for f in few) and draws[1]["covered"] < few[0].size
    whole = draw([few[0].arg()], planner, read_most=1 << 40)
    share = draws[1]["records"] / whole["records"]
    assert draws[1]["covered"] / few[0].size == pytest.approx(share, abs=0.05)
    half = SourceSample(bytes=total, bytes_read=total // 2, records_read=450, records_drawn=45)
    assert half.scale == pytest.approx(20, rel=0.01), "ten times the records of a half"


def draw(files: list[dict[str, Any]], planner: Planner, read_most: int) -> dict[str, Any]:
    """Run a DrawSample task, and return its counters."""
    import tempfile

    from pipeline.engine.task import CrashCursor, TaskInputs, TaskOutputs, TaskSpec
    from pipeline.passes.sample import DrawSample

    with tempfile.TemporaryDirectory() as folder:
        args = {"source": "web", "reader": planner.reader_arg("web"), "files": files, "seed": 1, "share": 0.1,
                "least": 5, "most": 1 << 30, "read_most": read_most}
        spec = TaskSpec("0" * 32, DRAW, "sample", args)
        return DrawSample.run(TaskInputs(spec, Store(folder), folder), CrashCursor(), TaskOutputs(folder))


def test_a_draw_holds_everything_below_its_mark():
    from pipeline.passes.sample import Draw
    from stages.document import Document

    rng = random.Random(3)
    ranks = [rng.getrandbits(64) for _ in range(500)]
    for limit, least, most in ((2**62, 20, 1 << 30), (2**62, 300, 1 << 30), (2**63, 20, 400), (0, 0, 1 << 30)):
        drawn = Draw(limit, least, most)
        for i, rank in enumerate(ranks):
            drawn.add(Document(str(i), "x" * 10), rank, 10)
        held = {row["rank"] for _, row in drawn.rows()}
        assert {r for r in ranks if r < drawn.below} <= held and drawn.bytes == 10 * len(held)
        assert drawn.bytes <= max(most, 10)
        if most == 1 << 30:
            assert len(held) == max(least, sum(r < limit for r in ranks), 1)


def test_nothing_is_left_behind_and_limits_are_kept(site, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(SampleError, match="takes more than 0 minutes on this machine; take a smaller --sample"):
        inline_sample(site, 0.2, SampleLimits(seconds=0.0))
    assert not list(tmp_path.rglob("*.parquet"))


def test_the_command(site, tmp_path, tokenmill):
    recipe = tmp_path / "small.yaml"
    recipe.write_text(f"version: 1\nsources: {{docs: {{read: text, path: {site}/docs}}}}\n"
                      "datasets: {clean: {from: docs, steps: [pii, gopher_quality]}}\n")
    printed = tokenmill("plan", recipe, "--sample", "10%", "--cores", "64", "--price", "0.04", "--json", "--workers",
                        "1")
    assert printed.code == 0, printed.err
    [document] = printed.json()
    assert document["total"]["cores"] == 64 and document["datasets"] and document["warnings"]
    for wrong, why in ((("--sample", "0.1"), "write it with a percent sign"), (("--cores", "4"), "add --sample 1%"),
                       (("--sample", "0%"), "a cost forecast needs a sample"),
                       (("--why", "claen"), "did you mean 'clean'?")):
        failed = tokenmill("plan", recipe, *wrong)
        assert failed.code == 2 and why in failed.err, failed.err


def test_records_come_back_as_their_reader_gave_them(site, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from stages.read.sample import SCHEMA, to_row

    reader = reader_class("warc")({})
    records = list(reader.read(str(site / "crawl" / "crawl-00.warc.gz"), Slice("web", "crawl-00.warc.gz")))
    path = tmp_path / "x.sample.parquet"
    pq.write_table(pa.Table.from_pylist([to_row(r, i) for i, r in enumerate(records)], schema=SCHEMA), path)
    back = list(SampleReader({}).read(str(path), Slice("web", "x.sample.parquet")))
    assert len(back) == len(records) > 100
    for a, b in zip(records, back):
        assert type(a) is type(b) and a.id == b.id and a.locator == b.locator
        if not isinstance(a, BadRecord):
            assert (a.raw, a.text, a.url, a.date, a.mime, a.charset, a.meta) \
                == (b.raw, b.text, b.url, b.date, b.mime, b.charset, b.meta)


def test_units_differ_in_size_and_a_line_is_found_through_them():
    sizes = np.bincount([unit_of(str(i)) for i in range(24_000)], minlength=16)
    assert (sizes > 800).all() and 2.5 < sizes[3] / sizes[0] < 3.5
    rng = np.random.default_rng(1)
    size = sizes * 1000.0
    cost = 0.5 + size * 2e-6 * rng.uniform(0.9, 1.1, 16)
    cost[:2] += 7.0                                             # the first task of each worker loads models
    fixed, slope = line(size, cost)
    assert slope == pytest.approx(2e-6, rel=0.25) and fixed == pytest.approx(0.5, abs=0.5)
    assert line(size[:3], cost[:3])[0] == 0.0, "too few for a line"


def first_half(warc: Path) -> bytes:
    """Return the records of the first half of a WARC file, each of which is compressed on its own."""
    data = warc.read_bytes()
    for start in re.finditer(rb"\x1f\x8b\x08", data[len(data) // 2:]):
        end = len(data) // 2 + start.start()
        with contextlib.suppress(zlib.error):                # these bytes may also stand within a record
            if zlib.decompressobj(31).decompress(data[end:end + 1000]).startswith(b"WARC/"):
                return data[:end]
    raise AssertionError("no record begins in the second half")


@pytest.mark.slow
def test_the_forecast_of_real_pages(tmp_path):
    """A tenth of 631 real pages, in child processes: documents within 25 %, CPU time and disk within a factor of 2
    (what two workers of one machine differ by when it is busy)."""
    (tmp_path / "pages.warc.gz").write_bytes(first_half(shared_data("bench", "realweb.warc.gz")))
    recipe = load_recipe("fineweb", inputs=[str(tmp_path / "pages.warc.gz")])
    result = forecast(run_sample(recipe, 0.1, workers=2, limits=SampleLimits(least=60)), cores=2, price=0.04)
    run_recipe(recipe, str(tmp_path / "store"), make_backend=make_backend("process", 2, None), report=False)
    really = counted(tmp_path / "store")
    for dataset in result.datasets:
        near(dataset.documents, really["docs"][dataset.dataset], 1.25)
    near(result.total.cpu_hours * 3600.0, really["cpu_s"], 2.0)
    disk = sum(i.bytes for r in Log.read(Store(tmp_path / "store")).records() if "kept.parquet" in r.files
               for i in r.files.values())
    near(result.total.disk_bytes, disk, 2.0)
