"""Recipes that mix token files of another project (`read: tokens`) with streams of their own, from the files to a
training."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.base.prf import below
from pipeline.cli.app import run_command
from pipeline.engine.driver.endings import TaskFailed
from pipeline.forecast.sample import SampleError, SampleLimits, run_sample
from pipeline.plan.inputs import InputError
from pipeline.plan.lint import lint
from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.service.asset_figures import documents_of, read_figures
from pipeline.store.fs import Store
from stages.document import document_id
from stages.read.tokens import Tokens
from tests import commands
from tests.corpus import sentences
from tokenizer.byte_level import byte_level_json
from tokenizer.export.export import export
from tokenizer.imports.assemble import Assembly
from tokenizer.imports.documents import ImportedDocuments
from tokenizer.imports.imports import FORMATS
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from tokenizer.shards.layout import MANIFEST, Manifest
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify

OLD = """version: 1
sources: {texts: {read: text, path: "TEXTS/*.txt"}}
datasets: {all: {from: texts}}
tokenizer: {train: {kind: bpe, vocab: 400, from: all, sample: 50KB}}
shards: {old: {from: all, longest: 64, val: 0%}}
"""
RECIPE = """version: 1
sources:
  fresh: {read: text, path: "fresh/*.txt"}
  old: {read: tokens, path: old-FORMAT, format: FORMAT, tokenizer: tokenizer.json}
datasets: {clean: {from: fresh}}
tokenizer: {load: tokenizer.json}
shards:
  old: {from: old, longest: 64, val: 0%}
  web: {from: clean, longest: 64, val: 0%}
curriculum:
  seed: 1
  total: 5120
  phases:
    - {name: all, until: 100%, sequence: 64, batch: 256, mix: {old: 50, web: 50}, max_epochs: {old: 99, web: 99}}
train:
  model: {layers: 1, width: 16, heads: 2, kv_heads: 1, ffn: 24}
  optimizer: {lr: 0.02}
  log_every: 1
  evaluate: {every: 1000}
  checkpoint: {every: 1000}
"""


def run(path: Path, store: Path, backend: str = "inline", workers: int = 1) -> Store:
    run_recipe(load_recipe(path), str(store), make_backend=make_backend(backend, workers, None))
    return Store(str(store))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with texts, with the tokens of another run in every format, and with the tokenizer of that run."""
    folder, rng, prose = tmp_path_factory.mktemp("tokens"), random.Random(3), sentences()
    for name, count in (("texts", 80), ("fresh", 30)):
        (folder / name).mkdir()
        for i in range(count):
            (folder / name / f"{i:02}.txt").write_text(" ".join(rng.sample(prose, rng.randint(1, 12))))
    (folder / "old.yaml").write_text(OLD.replace("TEXTS", "texts"))
    run(folder / "old.yaml", folder / "old-store")
    [tokenizer] = (folder / "old-store/shards").glob("tokenizer-*.json")
    shutil.copy(tokenizer, folder / "tokenizer.json")
    for format in FORMATS:
        export(ShardSet(folder / "old-store/shards/old/split=train"), format, folder / f"old-{format}", False)
    return folder


def recipe(site: Path, format: str = "megatron", name: str = "recipe", **changes: str) -> Path:
    """Write the recipe for a format. Each of `changes` (old=new) replaces a text of the recipe. Returns its path."""
    text = RECIPE.replace("FORMAT", format)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (site / f"{name}.yaml").write_text(text)
    return site / f"{name}.yaml"


@pytest.fixture(scope="module")
def mixed(site) -> Store:
    return run(recipe(site), site / "store")


@pytest.fixture(scope="module")
def parted(site) -> Path:
    """Like `site`, but the tokens of each format are in several files."""
    folder = site / "parted"
    folder.mkdir()
    for name in ("fresh", "tokenizer.json"):
        (folder / name).symlink_to(site / name)
    ids = [id for id, _ in documents(site / "old-store", "old")]
    for format in FORMATS:
        (folder / "exports" / format).mkdir(parents=True)
        for part in range(3):                      # three folders, in three orders of their documents
            source = folder / "sets" / str(part)
            if not source.exists():
                write_set(site / "old-store/shards/old/split=train", source, ids[part * 30:part * 30 + 30])
            export(ShardSet(source), format, folder / f"exports/{format}/{part}", False)
        merge(folder / f"exports/{format}", folder / f"old-{format}", format)
    return folder


def write_set(whole: Path, out: Path, ids: list[str]) -> None:
    """Write the documents with these ids as a shard set."""
    shards = ShardSet(whole)
    out.mkdir(parents=True)
    assembly = Assembly(out, shards.vocab_size, shards.eos, 1 << 30)
    chosen = [d for d in shards.documents(0, shards.tokens) if d.id in set(ids)]
    tokens = np.concatenate([shards.read(d.start, d.stop) for d in chosen])
    assembly.add(ImportedDocuments("", 0, tokens, np.array([d.stop - d.start for d in chosen]), None, None),
                 [d.id for d in chosen], 0)
    manifest = Manifest.of("old", "train", shards.manifest.tokenizer, shards.vocab_size, shards.eos, assembly.close())
    (out / MANIFEST).write_text(manifest.dumps())


def merge(exports: Path, out: Path, format: str) -> None:
    """Put several exports into one folder. The files get numbers such that the order of names differs from the order in
    the index."""
    out.mkdir()
    entries, key = [], {"mds": "shards", "litdata": "chunks"}.get(format)
    for part, number in enumerate((7, 10, 9) if key else (1, 2, 3)):
        for file in sorted((exports / str(part)).iterdir()):
            if file.name != "index.json":
                shutil.copy(file, out / re.sub(r"\d+(?=\D*$)", str(number), file.name, count=1))
        if key:
            index = json.loads((exports / str(part) / "index.json").read_text())
            for entry in index[key]:
                names = entry if format == "litdata" else entry["raw_data"]
                field = "filename" if format == "litdata" else "basename"
                names[field] = re.sub(r"\d+(?=\D*$)", str(number), names[field], count=1)
                entries.append(entry)
            (out / "index.json").write_text(json.dumps({**index, key: entries}))


def documents(store: Path, stream: str, split: str = "train") -> list[tuple[str, list[int]]]:
    shards = ShardSet(store / "shards" / stream / f"split={split}")
    assert verify(shards.folder) == []
    return [(d.id, shards.read(d.start, d.stop).tolist()) for d in shards.documents(0, shards.tokens)]


def bytes_of(store: Store) -> dict[str, bytes]:
    """Return the contents of all files of the shards, and the curriculum, by path."""
    [path] = [p for p in store.list("runs") if p.endswith("/curriculum.json")]
    return {p: store.read(p) for p in store.list("shards")} | {"curriculum": store.read(path)}


def report_of(store: Store) -> dict:
    [path] = [p for p in store.list("runs") if p.endswith("/report.json")]
    return json.loads(store.read(path))


def test_formats_are_those_that_can_be_imported():
    assert set(get_args(Tokens.Config.model_fields["format"].annotation)) == set(FORMATS)


@pytest.mark.parametrize("format", FORMATS)
def test_a_stream_of_token_files_has_their_documents_beside_a_stream_of_texts(site, format, tmp_path):
    store = run(recipe(site, format, format), tmp_path / "store")
    old, new = documents(site / "old-store", "old"), documents(store.local, "old")
    assert [tokens for _, tokens in new] == [tokens for _, tokens in old] and len(new) == 80
    assert len(documents(store.local, "web")) == 30
    if format in ("olmo", "parquet", "mds"):                                       # have the ids of documents
        assert [id for id, _ in new] == [id for id, _ in old]
    else:
        [source] = read_manifest(store, "old").source["tokens"]
        assert source["format"] == format
        places = [(file, number - first) for (file, first), (_, stop) in
                  zip(source["files"], [*source["files"][1:], ("", 80)]) for number in range(first, stop)]
        assert [id for id, _ in new] == [document_id("old", file, "", number) for file, number in places]


def read_manifest(store: Store, stream: str, split: str = "train") -> Manifest:
    path = f"shards/{stream}/split={split}/{MANIFEST}"
    return Manifest.from_json(json.loads(store.read(path)), path)


@pytest.mark.parametrize("format", FORMATS)
def test_several_tasks_import_what_one_import_of_the_command_does(parted, format, tmp_path, tokenmill):
    stores = [run(recipe(parted, format, f"{format}-{size}", **{
        "train:": f"run: {{partition: {size}}}\ntrain:"}), tmp_path / size) for size in ("1KB", "3GB")]
    one, other = ({p: data for p, data in bytes_of(store).items() if p.startswith("shards/old/")} for store in stores)
    assert one == other and one
    counted = [len(list((store.local / "objects").glob("*/*files.json"))) for store in stores]
    assert counted == ([1, 1] if format == "nanogpt" else [3, 1])                # tasks that import
    done = tokenmill("shards", "import", str(parted / f"old-{format}"), "--format", format, "--tokenizer",
                     str(parted / "tokenizer.json"), "--store", str(tmp_path / "command"), "--name", "old")
    assert done.code == 0, done.err
    assert documents(stores[0].local, "old") == documents(tmp_path / "command", "old")
    table = [row for shard in ShardSet(stores[0].local / "shards/old/split=train").manifest.shards
             for row in pq.read_table(stores[0].local / "shards/old/split=train" / shard.table).to_pylist()]
    assert [(row["part"], row["row"]) for row in table] == [(0, i) for i in range(80)]
    starts = read_manifest(stores[0], "old").source["tokens"][0]["files"]
    if format != "nanogpt":
        assert [start for _, start in starts] == [0, 30, 60]


def test_one_id_in_two_files_of_different_tasks_ends_the_run(parted, tmp_path):
    shutil.copytree(parted, tmp_path / "site", symlinks=True, ignore=shutil.ignore_patterns("exports", "sets"))
    files = tmp_path / "site/old-parquet"
    names = sorted(path.name for path in files.iterdir())
    shutil.copy(files / names[0], files / names[2])
    path = recipe(tmp_path / "site", "parquet", **{"train:": "run: {partition: 1KB}\ntrain:"})
    with pytest.raises(TaskFailed, match=rf"{names[2]}, document 0: has the id .* of .*{names[0]}, document 0"):
        run(path, tmp_path / "store")
    assert not (tmp_path / "store/shards").exists()


def test_files_that_do_not_belong_together_end_the_run(parted, tmp_path):
    shutil.copytree(parted, tmp_path / "site", symlinks=True, ignore=shutil.ignore_patterns("exports", "sets"))
    files = tmp_path / "site/old-ds"
    shutil.copy(files / "1.ds", files / "val.ds")
    with pytest.raises(TaskFailed, match=r"val\.ds: seems to be held out"):
        run(recipe(tmp_path / "site", "ds"), tmp_path / "store")


DECODED = """version: 1
sources: {old: {read: tokens, path: old-FORMAT, format: FORMAT, tokenizer: tokenizer.json, decode: true}}
datasets: {clean: {from: old, steps: [{exact: {}}]}}
tokenizer: {load: tokenizer.json}
shards: {old: {from: clean, longest: 64, val: 0%}}
run: {partition: SIZE}
"""


def decoded(folder: Path, format: str, size: str, store: Path, backend: str = "inline") -> Store:
    (folder / f"decoded-{format}.yaml").write_text(DECODED.replace("FORMAT", format).replace("SIZE", size))
    return run(folder / f"decoded-{format}.yaml", store, backend)


@pytest.mark.parametrize("format", FORMATS)
def test_decoded_tokens_are_documents_whose_tokens_are_the_same_again(site, parted, format, tmp_path):
    stores = [decoded(parted, format, size, tmp_path / size) for size in ("1KB", "3GB")]
    old = documents(site / "old-store", "old")
    for store in stores:
        new = documents(store.local, "old")
        assert [tokens for _, tokens in new] == [tokens for _, tokens in old]
    texts = rows_of(stores[0], "clean")
    assert {row["text"] for row in texts} == {path.read_text() for path in (site / "texts").iterdir()}
    assert {row["source"] for row in texts} == {"old"}
    if format in ("olmo", "parquet", "mds"):
        assert {json.loads(row["meta"])["id"] for row in texts} == {id for id, _ in old}
    places = {(row["locator"]["file"], row["locator"]["record"]) for row in texts}
    assert len(places) == 80 and all(row["id"] == document_id("old", row["locator"]["file"], "",
                                                              row["locator"]["record"]) for row in texts)


def rows_of(store: Store, dataset: str) -> list[dict]:
    return [row for path in sorted((store.local / "datasets" / dataset).glob("*.parquet"))
            for row in pq.read_table(path).to_pylist()]


def test_a_damaged_token_file_is_quarantined_and_the_others_are_decoded(parted, tmp_path):
    shutil.copytree(parted, tmp_path / "site", symlinks=True, ignore=shutil.ignore_patterns("exports", "sets"))
    files = tmp_path / "site/old-ds"
    data = bytearray((files / "2.ds").read_bytes())
    data[-2:] = b"\1\0"                                                      # no EOS at the end of the last document
    (files / "2.ds").write_bytes(data)
    store = decoded(tmp_path / "site", "ds", "3GB", tmp_path / "store", "process")
    assert len(rows_of(store, "clean")) == 50
    bad = report_of(store)
    assert "2.ds" in json.dumps(bad) and "corrupt_tokens" in json.dumps(bad)


def test_a_loss_mask_is_not_lost_by_decoding(parted, tmp_path):
    shutil.copytree(parted, tmp_path / "site", symlinks=True, ignore=shutil.ignore_patterns("exports", "sets"))
    for body in (tmp_path / "site/old-ds").glob("*.ds"):
        body.with_name(f"{body.name}.loss").write_bytes(bytes(body.stat().st_size // 2))
    store = decoded(tmp_path / "site", "ds", "1KB", tmp_path / "store")
    assert not rows_of(store, "clean") and "corrupt_tokens" in json.dumps(report_of(store))


def test_files_that_name_another_tokenizer_end_the_run(parted, tmp_path):
    shutil.copytree(parted, tmp_path / "site", symlinks=True, ignore=shutil.ignore_patterns("exports", "sets"))
    (tmp_path / "site/tokenizer.json").unlink()
    document = json.loads((parted / "tokenizer.json").read_text())
    (tmp_path / "site/tokenizer.json").write_text(json.dumps(document, indent=1))
    with pytest.raises(TaskFailed, match=r"source 'old'.*\.ds\.metadata") as error:
        decoded(tmp_path / "site", "ds", "3GB", tmp_path / "store")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["another end of text", "bytes"])
def test_decoding_with_a_wrong_tokenizer_ends_the_run(parted, format, kind, tmp_path):
    """No files are quarantined, so that a run that tolerates bad files cannot end without documents."""
    shutil.copytree(parted, tmp_path / "site", symlinks=True, ignore=shutil.ignore_patterns("exports", "sets"))
    for path in (tmp_path / f"site/old-{format}").rglob("*.metadata"):
        path.unlink()
    text = DECODED.replace("FORMAT", format).replace("SIZE", "3GB")
    if kind == "bytes":
        (tmp_path / "site/tokenizer.json").unlink()
        (tmp_path / "site/tokenizer.json").write_text(byte_level_json())
    else:
        text = text.replace("decode: true", "decode: true, eos: e")
    (tmp_path / "site/wrong.yaml").write_text(text)
    with pytest.raises(TaskFailed, match="source 'old'") as error:
        run(tmp_path / "site/wrong.yaml", tmp_path / "store")
    assert "tokenizer" in str(error.value) and "\n" not in str(error.value)


def test_another_tokenizer_file_computes_decoded_documents_anew(parted, tmp_path):
    shutil.copytree(parted, tmp_path / "site", symlinks=True, ignore=shutil.ignore_patterns("exports", "sets"))
    (tmp_path / "site/tokenizer.json").unlink()
    for path in (tmp_path / "site/old-ds").glob("*.metadata"):              # they name the hash of the file
        path.unlink()
    document = json.loads((parted / "tokenizer.json").read_text())
    (tmp_path / "site/tokenizer.json").write_text(json.dumps(document))
    store = decoded(tmp_path / "site", "ds", "3GB", tmp_path / "store")
    before = {path.name for path in (store.local / "objects").iterdir()}
    (tmp_path / "site/tokenizer.json").write_text(json.dumps(document, indent=1))
    decoded(tmp_path / "site", "ds", "3GB", tmp_path / "store")
    assert {path.name for path in (store.local / "objects").iterdir()} - before


def test_the_order_reads_windows_of_both_streams(mixed):
    [path] = (mixed.local / "runs").glob("*/curriculum.json")
    curriculum = Curriculum.loads(path.read_text(), str(path))
    places = Order(curriculum).locate(0, curriculum.samples)
    names = [stream.name for stream in curriculum.streams]
    assert np.bincount(np.ravel(places.stream), minlength=2).tolist() == [40, 40] and sorted(names) == ["old", "web"]


def test_a_training_reads_the_stream(site, mixed, tmp_path):
    pytest.importorskip("torch")
    from trainer.__main__ import main

    [name] = (mixed.local / "runs").iterdir()
    assert not main(["run", str(name), "--out", str(tmp_path / "out"), "--quiet", "--device", "cpu"])
    events = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 20 and losses[-1] < losses[0]


def test_report_and_plan_count_the_documents_and_tokens_of_the_files(site, mixed, tokenmill):
    old = documents(mixed.local, "old")
    figures, tokens = report_of(mixed), sum(len(tokens) for _, tokens in old)
    stream = figures["tokens"]["old"]
    assert (stream["docs"], stream["tokens"], stream["targets"]) == (80, tokens, tokens)
    assert stream["sources"] == {"old": {"docs": 80, "tokens": tokens}}
    [edge] = [e for e in figures["graph"]["edges"] if e["to"] == "shards:old" and e["from"] == "index:old"]
    assert edge["docs"] == 80
    planned = tokenmill("plan", str(recipe(site)), "--store", str(site / "new-store"), "--json")
    assert planned.code == 0, planned.err
    plan = json.loads(planned.out)
    size = sum(path.stat().st_size for path in (site / "old-megatron").iterdir())
    assert plan["inputs"]["old"]["bytes"] == size
    [row] = [row for row in plan["nodes"] if row["name"] == "shards:old"]
    assert row["bytes_in"] == size and row["steps"] == ["import", "assemble"]
    again = json.loads(tokenmill("plan", str(recipe(site)), "--store", str(mixed.local), "--json").out)
    assert not again["reruns"] and not again["waits"]


def test_held_out_documents_and_packed_rows_are_those_of_other_streams(site, tmp_path):
    path = recipe(site, "parquet", "held", **{"old: {from: old, longest: 64, val: 0%}":
                                              "old: {from: old, longest: 64, val: 20%, packing: best-fit}"})
    store = run(path, tmp_path / "store")
    old = documents(site / "old-store", "old")
    parts = {split: documents(store.local, "old", split) for split in ("train", "val")}
    assert parts["val"] == [d for d in old if below(0, "val", d[0], 0.2)] and len(parts["val"]) > 5
    assert parts["train"] == [d for d in old if not below(0, "val", d[0], 0.2)]
    assert report_of(store)["tokens"]["old"]["packing"]


def test_a_stream_may_have_several_sources(site, tmp_path):
    path = recipe(site, "ds", "several", **{
        "datasets:": "  more: {read: tokens, path: old-litdata, format: litdata}\ndatasets:",
        "old: {from: old,": "old: {from: [more, old],"})
    store = run(path, tmp_path / "store")
    old, new = documents(site / "old-store", "old"), documents(store.local, "old")
    assert [tokens for _, tokens in new] == 2 * [tokens for _, tokens in old]
    assert len({id for id, _ in new}) == 160
    assert [source["source"] for source in read_manifest(store, "old").source["tokens"]] == ["more", "old"]
    tokens = sum(len(tokens) for _, tokens in old)
    assert report_of(store)["tokens"]["old"]["sources"] == {s: {"docs": 80, "tokens": tokens} for s in ("more", "old")}
    [name] = (store.local / "runs").iterdir()
    counts = documents_of(read_figures(store, name.name))["shards:old"]
    assert counts == {"in": 160, "kept": 160, "dropped": 0}


def test_shards_are_equal_to_the_byte_with_workers_and_after_kills(site, mixed, tmp_path):
    run(recipe(site), tmp_path / "workers", "process", 2)
    assert bytes_of(Store(str(tmp_path / "workers"))) == bytes_of(mixed)
    args = ("run", str(recipe(site)), "--store", str(tmp_path / "killed"), "--backend", "inline", "--quiet")
    for point, nth in (("tokens", 1), ("tokens", 2), ("commit", 1), ("commit", 2)):
        died = commands.command("tests.e2e.kill", point, str(nth), *args)
        assert died.returncode == -signal.SIGKILL, f"was not killed: {died.stdout}{died.stderr}"
    done = commands.command("pipeline.cli", *args)
    assert done.returncode == 0, done.stderr
    assert bytes_of(Store(str(tmp_path / "killed"))) == bytes_of(mixed)


def test_a_second_run_replaces_the_shards_when_the_files_have_changed(site, tmp_path):
    files = tmp_path / "site"
    shutil.copytree(site, files, ignore=shutil.ignore_patterns("*store"))
    store = run(recipe(files, "parquet"), tmp_path / "store")
    first = bytes_of(store)
    (files / "old-parquet" / "train-00001-of-00001.parquet").write_bytes(
        (files / "old-parquet" / "train-00000-of-00001.parquet").read_bytes())
    with pytest.raises(TaskFailed, match="has the id"):                     # the same documents in two files
        run(recipe(files, "parquet"), tmp_path / "store")
    assert bytes_of(store) == first
    path = recipe(files, "olmo", "recipe")
    run(path, tmp_path / "store")
    assert read_manifest(store, "old").source["tokens"][0]["format"] == "olmo"


def test_commands_read_the_stream(site, mixed, tokenmill):
    folder = str(mixed.local / "shards/old/split=train")
    id, _ = documents(mixed.local, "old")[7]
    assert id in tokenmill("shards", "find", folder, "--id", id).out
    assert tokenmill("shards", "index", folder).code == 0
    url = tokenmill("shards", "find", folder, "--url", "https://a.example")
    assert url.code != 0 and "--id" in url.err and "Traceback" not in url.err
    assert tokenmill("store", "verify", "--store", str(mixed.local)).code == 0
    [run] = (mixed.local / "runs").iterdir()
    explained = tokenmill("shards", "explain", run.name, "--sample", "3", "--store", str(mixed.local))
    assert explained.code == 0, explained.err


@pytest.mark.parametrize(("old", "new", "key"), [
    ("format: megatron, ", "", "sources.old.format"),
    ("format: megatron", "format: webdataset", "sources.old.format"),
    ("tokenizer: tokenizer.json}", "decode: true}", "sources.old"),
    ("tokenizer: tokenizer.json}", "eos: </s>}", "sources.old"),
    ("tokenizer: tokenizer.json}", "tokenizer: tokenizer.json, decode: true}", "shards.old.from"),
    ("tokenizer: tokenizer.json}", "tokenizer: gone.json}", "sources.old.tokenizer"),
    ("clean: {from: fresh}", "clean: {from: [fresh, old]}", "datasets.clean.from[1]"),
    ("old: {from: old,", "old: {from: [old, clean],", "shards.old.from[1]"),
    ("old: {from: old,", "old: {from: [old, fresh],", "shards.old.from[1]"),
    ("old: {from: old,", "old: {from: [old, gone],", "shards.old.from[1]"),
    ("old: {from: old,", "old: {from: [old, old],", "shards.old.from[1]"),
    ("old: {from: old,", "old: {from: old, where: {source: old},", "shards.old.where"),
    ("old: {from: old,", "old: {from: old, by: source,", "shards.old.by"),
    ("{load: tokenizer.json}", "{train: {vocab: 400, from: old}}", "tokenizer.train.from"),
])
def test_an_error_names_its_key(site, old, new, key):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe(site, name="bad", **{old: new}))
    assert key in str(error.value), error.value


def test_another_tokenizer_than_that_of_the_recipe_is_refused(site, tmp_path):
    document = json.loads((site / "tokenizer.json").read_text())
    (site / "other.json").write_text(json.dumps(document, indent=2))
    path = recipe(site, name="other", **{"tokenizer: tokenizer.json}": "tokenizer: other.json}"})
    with pytest.raises(InputError, match=r"sources\.old\.tokenizer.*other\.json") as error:
        run(path, tmp_path / "store")
    assert hashlib.sha256((site / "other.json").read_bytes()).hexdigest()[:12] in str(error.value)


def test_damaged_files_end_the_run_with_the_name_of_the_file_and_leave_no_shards(site, tmp_path):
    files = tmp_path / "site"
    shutil.copytree(site, files, ignore=shutil.ignore_patterns("*store"))
    [body] = (files / "old-megatron").glob("*.bin")
    data = bytearray(body.read_bytes())
    data[1000:1002] = b"\xff\xff"                                            # outside the vocabulary
    body.write_bytes(data)
    done = commands.command("pipeline.cli", "run", str(recipe(files)), "--store", str(tmp_path / "store"),
                            "--backend", "process", "--workers", "1", "--quiet")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert f"{body}: byte 1,000: token id 65535" in done.stderr
    assert not (tmp_path / "store/shards").exists()


@pytest.mark.slow
def test_a_forecast_leaves_out_token_files_that_are_taken_as_they_are(site, tokenmill):
    sampled = run_sample(load_recipe(recipe(site)), 1.0, workers=1)
    assert set(sampled.sources) == {"fresh"} and "shards.old" in " ".join(sampled.notes)
    done = tokenmill("plan", str(recipe(site)), "--sample", "100%", "--store", str(site / "none"), "--json")
    assert done.code == 0, done.err
    assert "shards.old" in done.out


@pytest.mark.parametrize("format", ["ds", "litdata"])
def test_a_forecast_decodes_token_files(parted, format):
    (parted / "sampled.yaml").write_text(DECODED.replace("FORMAT", format).replace("SIZE", "1KB"))
    sampled = run_sample(load_recipe(parted / "sampled.yaml"), 1.0, workers=1)
    assert sampled.sources["old"].records_drawn == 80
    sizes = sum(path.stat().st_size for path in (parted / f"old-{format}").iterdir())
    assert sampled.sources["old"].bytes_read == sizes
    with pytest.raises(SampleError, match="source 'old'"):
        run_sample(load_recipe(parted / "sampled.yaml"), 0.5, workers=1, limits=SampleLimits(read_bytes=1000))


def test_a_source_that_no_shards_take_is_pointed_out(site):
    found = lint(load_recipe(recipe(site, name="unused", **{"  old: {from: old, longest: 64, val: 0%}\n": "",
                                                           "{old: 50, web: 50}": "{web: 50}", "{old: 99, ": "{"})))
    assert any("sources.old" in line and "shards" in line for line in found)


@pytest.mark.parametrize("format", ["megatron", "parquet"])
def test_a_document_of_token_files_is_overwritten_and_left_out_of_later_runs(site, format, tmp_path, capsys):
    store = run(recipe(site, format, f"gone-{format}"), tmp_path / "store")
    before, others = documents(store.local, "old"), documents(store.local, "web")
    (tmp_path / "ids.txt").write_text(f"{before[3][0]}\n{before[40][0]}\n")
    assert run_command(["takedown", "--ids", str(tmp_path / "ids.txt"), "--reason", "r", "--store", store.root]) == 0
    after = documents(store.local, "old")
    eos = ShardSet(store.local / "shards/old/split=train").eos
    assert [id for id, _ in after] == [id for id, _ in before]
    assert [n for n in range(80) if before[n] != after[n]] == [3, 40]
    assert all(set(after[n][1]) == {eos} and len(after[n][1]) == len(before[n][1]) for n in (3, 40))
    run(recipe(site, format, f"gone-{format}"), tmp_path / "store")
    assert documents(store.local, "old") == [row for n, row in enumerate(before) if n not in (3, 40)]
    assert documents(store.local, "web") == others
    assert report_of(store)["tokens"]["old"]
