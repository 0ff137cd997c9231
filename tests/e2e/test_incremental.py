"""Crawls that are added to a store one after another: what is kept is what one run over all keeps, whatever runs it,
cuts it or kills it; old datasets stay as they are."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline import index_folders
from pipeline.engine.shuffle.exchange import SegmentFile, read_segment
from pipeline.engine.shuffle.segment_writer import SegmentWriter
from pipeline.index_folders import forget
from pipeline.plan.lint import lint
from pipeline.recipe import load_recipe
from pipeline.recipe.errors import RecipeError
from pipeline.run import RunSummary, make_backend, run_recipe
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.index_folder import NoIndex, read_index, refs_of
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from pipeline.store.tombstones import Tombstones, takedowns, text_hash
from stages.dedup.fragment import id_text
from stages.dedup.index_texts import unpacked
from tests import commands
from tests.processes import descendants, named, signal_all
from tests.stages.dedup_corpus import corpus

CRAWLS = ("one", "two", "three")
SHARDS = """
tokenizer: {kind: bytes}
shards: {web: {from: [FROM], longest: 64, val: 10%}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("site")
    for name in CRAWLS:
        texts = [doc.text for doc in corpus(3, 120, CRAWLS) if doc.dataset == name]
        (top / name).mkdir()
        for file in range(3):
            (top / name / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n"
                                                              for text in texts[file::3]))
    for number in (1, 2, 3):
        (top / f"{number}.yaml").write_text(added(number))
    (top / "all.yaml").write_text(recipe({"all": "{from: [one, two, three], priority: [one, two, three], "
                                                 "steps: [{exact: {by: both}}, minhash]}"}))
    return top


def recipe(datasets: dict[str, str], crawls=CRAWLS) -> str:
    lines = ["version: 1", "sources:", *(f"  {name}: {{read: jsonl, path: {name}}}" for name in crawls), "datasets:",
             *(f"  {name}: {text}" for name, text in datasets.items())]
    return "\n".join(lines) + SHARDS.replace("FROM", ", ".join(datasets))


def added(number: int) -> str:
    """The recipe after so many crawls."""
    datasets = {}
    for name in CRAWLS[:number]:
        old = f"against: [{', '.join(datasets)}]" if datasets else ""
        steps = f"[{{exact: {{by: both{', ' if old else ''}{old}}}}}, {{minhash: {{{old}}}}}]"
        datasets[f"new_{name}"] = f"{{from: {name}, steps: {steps}}}"
    return recipe(datasets, CRAWLS[:number])


def run(path: Path, store: Path | str, backend: str = "inline", workers: int = 1, *settings: str) -> RunSummary:
    return run_recipe(load_recipe(path, list(settings)), str(store), make_backend=make_backend(backend, workers, None))


def ids(store: Path, folder: str) -> list[str]:
    listed = []
    for path in sorted(store.glob(f"{folder}/part-*.parquet")):
        listed += pq.read_table(path, columns=["id"])["id"].to_pylist()
    return listed


def files(store: Path, *datasets: str) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_ino, path.read_bytes()) for name in datasets
            for path in sorted(store.glob(f"*/{name}/part-*.parquet"))}


@pytest.fixture(scope="module")
def whole(site, tmp_path_factory) -> Path:
    """The store of one run over all."""
    store = tmp_path_factory.mktemp("whole")
    run(site / "all.yaml", store)
    return store


@pytest.fixture(scope="module")
def grown(site, tmp_path_factory) -> Path:
    store = tmp_path_factory.mktemp("grown")
    for number in (1, 2, 3):
        run(site / f"{number}.yaml", store)
    return store


@pytest.fixture(scope="module")
def hashes(grown) -> list[str]:
    return [dataset_hash(Store(str(grown)), f"new_{name}") for name in CRAWLS]


def test_crawls_added_one_after_another_are_kept_as_by_one_run(site, whole, tmp_path):
    before: dict = {}
    for number in (1, 2, 3):
        run(site / f"{number}.yaml", tmp_path)
        now = files(tmp_path, *(f"new_{name}" for name in CRAWLS[:number]))
        assert before.items() <= now.items(), "an old dataset changed"
        before = now
    kept = [id for name in CRAWLS for id in ids(tmp_path, f"datasets/new_{name}")]
    assert len(kept) == len(set(kept))
    assert sorted(kept) == sorted(ids(whole, "datasets/all"))
    assert len(ids(tmp_path, "dropped/new_three")) > 20


def test_only_the_new_crawl_and_the_index_of_the_last_one_are_computed(site, tmp_path):
    run(site / "2.yaml", tmp_path)
    records = {path.name for path in (tmp_path / "objects").iterdir()}
    run(site / "3.yaml", tmp_path)
    nodes = {record.node.split("/")[-1] for record in Log.read(Store(str(tmp_path))).records()
             if record.key not in records and record.node.startswith(("new_one", "new_two"))}
    assert nodes == {"url_index", "text_index", "index_documents", "index_keys"}


def test_no_document_changes_its_split(grown, whole):
    def split(store: Path, which: str) -> set[str]:
        return {id for path in store.glob(f"shards/web/split={which}/*.parquet")
                for id in pq.read_table(path, columns=["id"])["id"].to_pylist()}

    assert split(grown, "val") == split(whole, "val") != set()
    assert split(grown, "train") == split(whole, "train")


@pytest.mark.parametrize(("workers", "partition"), [(2, "3KB"), pytest.param(1, "1MB", marks=pytest.mark.slow)])
def test_workers_and_partitions_change_nothing(site, hashes, tmp_path, workers, partition):
    run(site / "3.yaml", tmp_path, "process", workers, f"run.partition={partition}")
    assert [dataset_hash(Store(str(tmp_path)), f"new_{name}") for name in CRAWLS] == hashes


def test_workers_that_are_killed_change_nothing(site, hashes, tmp_path, monkeypatch):
    """Whenever another twentieth task is done, one of the workers is killed."""
    append, done, killed = Log.append, itertools.count(1), []

    def kill(log: Log, record: PartRecord) -> PartRecord:
        if next(done) % 20 == 0:
            children = [pid for pid in descendants(os.getpid()) if named(pid, "engine.worker.child")]
            killed.extend(signal_all(children[:1], signal.SIGKILL))
        return append(log, record)

    monkeypatch.setattr(Log, "append", kill)
    run(site / "3.yaml", tmp_path, "process", 2, "run.partition=8KB")
    assert len(killed) > 2
    assert [dataset_hash(Store(str(tmp_path)), f"new_{name}") for name in CRAWLS] == hashes


def test_a_run_that_is_killed_in_each_new_wave_goes_on(site, hashes, tmp_path):
    arguments = ["run", str(site / "3.yaml"), "--store", str(tmp_path), "--quiet", "--backend", "inline"]
    for point in ("index", "hashes", "lookup", "routes", "old"):
        died = commands.command("tests.e2e.kill", point, "2", *arguments)
        assert died.returncode == -signal.SIGKILL, f"{point}: was not killed: {died.stdout}{died.stderr}"
    again = commands.command("pipeline.cli", *arguments)
    assert again.returncode == 0, again.stderr
    assert [dataset_hash(Store(str(tmp_path)), f"new_{name}") for name in CRAWLS] == hashes


@pytest.fixture(scope="module")
def folders(grown, tmp_path_factory) -> Path:
    """The folders with the indexes of the first two crawls, and with both merged."""
    top = tmp_path_factory.mktemp("folders")
    [name] = [path.name for path in (grown / "runs").iterdir() if path.name.startswith("3-")]
    for crawl in ("one", "two"):
        done = commands.command("pipeline.cli", "dedup", "index", name, f"new_{crawl}", "--out", str(top / crawl),
                                "--store", str(grown), "--backend", "inline")
        assert done.returncode == 0, done.stderr
    done = commands.command("pipeline.cli", "dedup", "merge", str(top / "one"), str(top / "two"), "--out",
                            str(top / "both"))
    assert done.returncode == 0, done.stderr
    return top


@pytest.mark.parametrize("names", [["one", "two"], ["both"]])
def test_an_index_outlives_its_store(site, hashes, folders, tmp_path, names):
    against = f"against: [{', '.join(str(folders / name) for name in names)}]"
    steps = f"[{{exact: {{by: both, {against}}}}}, {{minhash: {{{against}}}}}]"
    (site / "later.yaml").write_text(recipe({"new_three": f"{{from: three, steps: {steps}}}"}))
    run(site / "later.yaml", tmp_path, "process", 2)
    assert dataset_hash(Store(str(tmp_path)), "new_three") == hashes[2]


@pytest.mark.parametrize(("steps", "key", "words"), [
    ("[{exact: {against: new_on}}]", "against", ["new_on", "did you mean"]),
    ("[{exact: {against: one}}]", "against", ["source"]),
    ("[{exact: {against: old}}]", "exact", ["by", "same settings"]),
    ("[{minhash: {against: old, verify: 0.8}}]", "against", ["verify", "same settings"]),
    ("[{minhash: {against: old, verify: null}}]", "minhash", ["verify: 0.75"]),
    ("[{minhash: {against: old, verify: record}}]", "minhash", ["verify: 0.75"]),
    ("[{minhash: {against: old, prefer: [longest, priority]}}]", "minhash", ["begin prefer with priority"]),
    ("[{exact: {against: bare}}]", "against", ["no step 'exact'"]),
    ("[{exact: {by: both, against: [old, old]}}]", "against[1]", ["twice"]),
    ("[{exact: {by: both, against: new}}]", "from", ["itself"]),
    ("[{exact: {by: both, against: two}}]", "against", ["source"]),
    ("[{exact: {by: both, against: twin}}]", "against", ["source of its own"]),
    ("[{exact: {by: both, against: FOLDERS/one}}]", None, []),
    ("[{exact: {by: text, against: FOLDERS/one}}]", "against", ["by", "dedup index"]),
    ("[{exact: {by: both, against: FOLDERS}}]", "against", ["no index", "dedup index"])])
def test_what_cannot_be_compared_is_refused(site, folders, tmp_path, steps, key, words):
    both = "steps: [{exact: {by: both}}, minhash]"
    text = recipe({"old": f"{{from: one, {both}}}", "bare": "{from: one}", "twin": f"{{from: two, {both}}}",
                   "new": f"{{from: two, steps: {steps.replace('FOLDERS', str(folders))}}}"})
    path = site / "refused.yaml"
    path.write_text(text.partition("tokenizer")[0])
    if key is None:
        load_recipe(path)
        return
    with pytest.raises(RecipeError) as e:
        load_recipe(path)
    assert key in str(e.value)
    assert all(word in str(e.value) for word in words), e.value


def test_a_crawl_that_is_not_compared_with_all_before_it_is_warned_of(site):
    path = site / "gap.yaml"
    path.write_text((site / "3.yaml").read_text().replace("minhash: {against: [new_one, new_two]}",
                                                          "minhash: {against: new_two}"))
    [warning] = lint(load_recipe(path))
    assert "minhash.against" in warning
    assert "name 'new_one', too" in warning
    assert not lint(load_recipe(site / "3.yaml"))


def test_a_damaged_index_is_refused(site, folders, tmp_path):
    shutil.copytree(folders / "both", tmp_path / "both")
    against = f"against: {tmp_path / 'both'}"
    (site / "damaged.yaml").write_text(recipe({"new_three": f"{{from: three, steps: [{{minhash: {{{against}}}}}]}}"}))
    text = min((tmp_path / "both" / "minhash").glob("*.texts.bin"))
    text.write_bytes(b"\0" * text.stat().st_size)
    done = commands.command("pipeline.cli", "run", str(site / "damaged.yaml"), "--store", str(tmp_path / "store"),
                            "--quiet", "--backend", "inline")
    assert done.returncode == 1
    assert "texts.bin" in done.stderr and "dedup index" in done.stderr and "Traceback" not in done.stderr
    manifest = tmp_path / "both" / "minhash" / "index.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"rank": 0', b'"rank": 7'))
    with pytest.raises(RecipeError, match="damaged"):
        load_recipe(site / "damaged.yaml")


@pytest.mark.parametrize("body", [
    b"[]", b"{", b'{"format": 1, "x": 1}',
    b'{"format": 1, "step": "minhash", "settings": {}, "ranks": 0, "keys": {"a": 1}, "groups": [], "documents": 1}',
    b'{"format": 1, "step": "minhash", "settings": {}, "ranks": 1, "keys": {"a": {"files": [], "buckets": 0}}, '
    b'"groups": [], "documents": 1}',
    b'{"format": 1, "step": "minhash", "settings": {}, "ranks": "1", "keys": {}, "groups": [], "documents": 1}'])
def test_a_manifest_of_another_shape_is_refused_although_its_checksum_is_right(tmp_path, body):
    (tmp_path / "minhash").mkdir()
    (tmp_path / "minhash" / "index.json").write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    with pytest.raises(NoIndex, match=r"index\.json does not describe an index; make .* again"):
        read_index(str(tmp_path), "minhash")


def test_an_index_is_not_merged_with_one_that_holds_its_documents(folders, tmp_path):
    one = str(folders / "one")
    for again in (one, f"{folders}/./one", str(folders / "both")):
        done = commands.command("pipeline.cli", "dedup", "merge", one, again, "--out", str(tmp_path / "both"))
        assert (done.returncode, again in done.stderr, "Traceback" in done.stderr) == (2, True, False)
        assert "name one of the two" in done.stderr and not (tmp_path / "both").exists()


def test_a_folder_that_is_named_in_two_ways_is_refused(site, folders):
    text = recipe({"new_three": f"{{from: three, steps: [{{exact: {{by: both, against: [{folders}/one, "
                                f"{folders}/./one]}}}}]}}"}, ("three",))
    (site / "twice.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"holds documents that .* holds, too; name one of the two"):
        load_recipe(site / "twice.yaml")


def test_a_copy_of_a_document_that_a_takedown_removed_alone_is_kept_as_by_one_run(tmp_path):
    """The index of `exact` holds no ids, and still forgets the document."""
    for name, texts in (("one", range(8)), ("two", range(5, 12))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jsonl").write_text("".join(json.dumps({"text": f"text {number} of ours"}) + "\n"
                                                         for number in texts))
    store, gone = tmp_path / "store", tmp_path / "ids.txt"
    (tmp_path / "r.yaml").write_text(recipe({"old": "{from: one, steps: [exact]}", "new": "{from: two, steps: "
                                             "[{exact: {against: old}}]}"}, ("one", "two")).split("tokenizer:")[0])
    run(tmp_path / "r.yaml", store)
    dropped = next(row for part in sorted(store.glob("dropped/new/part-*.parquet"))
                   for row in pq.read_table(part).to_pylist())
    gone.write_text(json.loads(dropped["meta"])["exact"]["kept"])
    done = commands.command("pipeline.cli", "takedown", "--ids", str(gone), "--only", "--reason", "test",
                            "--store", str(store))
    assert done.returncode == 0, done.stderr
    run(tmp_path / "r.yaml", store)
    assert gone.read_text() not in ids(store, "datasets/old")
    assert dropped["id"] in ids(store, "datasets/new")


def test_explain_and_stats_find_kept_documents_in_old_datasets(grown):
    old = {id for name in ("one", "two") for id in ids(grown, f"datasets/new_{name}")}
    dropped = [row for path in sorted(grown.glob("dropped/new_three/part-*.parquet"))
               for row in pq.read_table(path, columns=["id", "meta", "stage"]).to_pylist()]
    twins = {row["id"]: json.loads(row["meta"])[row["stage"]]["kept"] for row in dropped if row["stage"] == "minhash"}
    id, kept = next((id, kept) for id, kept in twins.items() if kept in old)
    done = commands.command("pipeline.cli", "dedup", "explain", id, "--dataset", "new_three", "--store", str(grown))
    assert done.returncode == 0, done.stderr
    assert f"kept in new_{'one' if kept in ids(grown, 'datasets/new_one') else 'two'} {kept}" in done.stdout
    done = commands.command("pipeline.cli", "dedup", "stats", "new_three", "--store", str(grown), "--json")
    stats = json.loads(done.stdout)
    assert {pair["kept"] for pair in stats["pairs"]} == set(CRAWLS)
    assert stats["unknown"] < 10                      # documents that `exact` kept and `minhash` removed
    [run] = (path for path in (grown / "runs").iterdir() if path.name.startswith("3-"))
    section = next(s for s in json.loads((run / "report.json").read_text())["clusters"]
                   if s["barrier"].startswith("new_three/minhash"))
    assert {pair["kept"] for pair in section["pairs"]} == set(CRAWLS)
    assert section["unknown"] == 0


def test_a_takedown_reaches_an_index(site, grown, tmp_path):
    """The index that holds the text goes; the next run makes another, and new copies of the text stay out."""
    store = tmp_path / "store"
    shutil.copytree(grown, store)
    gone = ids(store, "datasets/new_one")[0]
    (tmp_path / "ids.txt").write_text(gone + "\n")

    def indexed() -> set[str]:
        return {id for path in store.glob("objects/*/*.ids.parquet") for id in pq.read_table(path)["id"].to_pylist()}

    assert gone in indexed()
    done = commands.command("pipeline.cli", "takedown", "--ids", str(tmp_path / "ids.txt"), "--reason", "test",
                            "--store", str(store))
    assert done.returncode == 0, done.stderr
    assert gone not in indexed()
    run(site / "3.yaml", store)
    assert gone not in indexed() != set()
    assert gone not in {id for name in CRAWLS for id in ids(store, f"datasets/new_{name}")}


def indexed_texts(folder: Path) -> dict[str, str]:
    """The texts of the index of `minhash` in a folder, by id, also those that no record names."""
    index = read_index(str(folder), "minhash")
    texts = {}
    for group in index.groups:
        data = (folder / group["texts"]["$file"]).read_bytes()
        for bucket in range(-(-group["documents"]["rows"] // 4096)):
            for record in read_segment(Store(str(folder)), {**group["documents"], "$ref": group["documents"]["$file"]},
                                       bucket):
                if record["size"]:
                    strings = unpacked(data[record["offset"]:record["offset"] + record["size"]], 500_000)
                    texts[id_text(record["id_hi"], record["id_lo"])] = strings[2 * record["number"] + 1].decode()
                    texts |= {f"{record['offset']} {n}": text.decode() for n, text in enumerate(strings) if text}
    return texts


def key_records(folder: Path, step: str) -> np.ndarray:
    index = read_index(str(folder), step)
    return np.concatenate([read_segment(Store(str(folder)), {**ref, "$ref": ref["$file"]}, bucket)
                           for keys in index.keys.values() for ref in keys["files"]
                           for bucket in range(keys["buckets"])])


def texts_in(store: Path, *folders: str) -> dict[str, str]:
    """{id: text} of published folders."""
    return {row["id"]: row["text"] for folder in folders for path in sorted(store.glob(f"{folder}/part-*.parquet"))
            for row in pq.read_table(path, columns=["id", "text"]).to_pylist()}


@pytest.fixture(scope="module")
def taken(grown, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A store after a takedown, and the texts of the documents that it removed, by id."""
    store = tmp_path_factory.mktemp("taken") / "store"
    shutil.copytree(grown, store)
    listed = ids(store, "datasets/new_one")[:15]
    (store.parent / "ids.txt").write_text("\n".join(listed))
    before = texts_in(store, *(f"{kind}/new_{name}" for kind in ("datasets", "dropped") for name in CRAWLS))
    done = commands.command("pipeline.cli", "takedown", "--ids", str(store.parent / "ids.txt"), "--reason", "test",
                            "--store", str(store))
    assert done.returncode == 0, done.stderr
    [one] = takedowns(Store(str(store)))
    assert set(listed) < set(one.documents), "twins are removed, too"
    return store, {id: before[id] for id in one.documents}


@pytest.mark.parametrize("name", ["one", "both"])
def test_folders_of_indexes_forget_what_a_takedown_removed(folders, taken, tmp_path, name):
    store, gone = taken
    folder = tmp_path / name
    shutil.copytree(folders / name, folder)
    before = indexed_texts(folder)
    assert before.keys() & gone.keys() and set(before.values()) & set(gone.values())
    for words in (r": \d+ hashes of exact and \d+ documents of minhash removed", ": 0 hashes of exact and 0 documents"):
        done = commands.command("pipeline.cli", "dedup", "forget", str(folder), "--store", str(store))
        assert done.returncode == 0, done.stderr
        assert re.search(words, done.stdout)
        after = {id: text for id, text in indexed_texts(folder).items() if " " not in id}
        assert after == {id: text for id, text in before.items() if id not in gone and " " not in id}
        assert not set(indexed_texts(folder).values()) & set(gone.values())
        assert len(key_records(folder, "minhash")) == 14 * len(after)
        hashed = key_records(folder, "exact")
        assert not gone.keys() & {id_text(*id) for id in hashed[["id_hi", "id_lo"]].tolist()}
        listed = {id for path in (folder / "minhash").glob("*.ids.parquet")
                  for id in pq.read_table(path)["id"].to_pylist()}
        assert listed == set(after)
        index = read_index(str(folder), "minhash")
        assert index.documents == len(after)
        assert {path.name for path in (folder / "minhash").iterdir()} == {
            "index.json", *(ref["$file"].split("/")[1] for ref in refs_of(index))}, "the old files are gone"


def test_a_crawl_is_compared_with_what_a_forgetful_folder_still_holds(site, folders, taken, tmp_path):
    """As if the removed documents had never been in the first two crawls."""
    store, gone = taken
    folder = tmp_path / "both"
    shutil.copytree(folders / "both", folder)
    assert min(forget(str(folder), takedowns(Store(str(store)))[0].tombstones()).values()) > 0
    steps = f"[{{exact: {{by: both, against: {folder}}}}}, {{minhash: {{against: {folder}}}}}]"
    (site / "forgetful.yaml").write_text(recipe({"new_three": f"{{from: three, steps: {steps}}}"}))
    run(site / "forgetful.yaml", tmp_path / "a")
    shutil.copytree(site, tmp_path / "site")
    texts = set(gone.values())
    for path in [path for name in ("one", "two") for path in (tmp_path / "site" / name).iterdir()]:
        lines = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        lines = [f"nothing {path} {n} like it" if text in texts else text for n, text in enumerate(lines)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    run(tmp_path / "site" / "3.yaml", tmp_path / "b")
    kept, expected = (set(texts_in(path, "datasets/new_three").values()) for path in (tmp_path / "a", tmp_path / "b"))
    assert kept == expected
    assert kept > set(texts_in(store, "datasets/new_three").values())


def test_a_folder_is_whole_when_forgetting_is_interrupted(folders, taken, tmp_path, monkeypatch):
    store, gone = taken
    folder, tombstones = tmp_path / "both", takedowns(Store(str(store)))[0].tombstones()
    shutil.copytree(folders / "both", folder)
    before = indexed_texts(folder)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(index_folders, "write_index", die)
        with pytest.raises(KeyboardInterrupt):
            forget(str(folder), tombstones)
    assert indexed_texts(folder) == before
    with monkeypatch.context() as patch:
        patch.setattr(Store, "remove_all", die)
        with pytest.raises(KeyboardInterrupt):
            forget(str(folder), tombstones)
    forget(str(folder), tombstones)
    for step in ("exact", "minhash"):
        assert {path.name for path in (folder / step).iterdir()} == {
            "index.json", *(ref["$file"].split("/")[1] for ref in refs_of(read_index(str(folder), step)))}
    assert not set(indexed_texts(folder).values()) & set(gone.values())


def test_a_text_is_forgotten_under_any_id(folders, tmp_path):
    shutil.copytree(folders / "one", tmp_path / "one")
    id, text = next((id, text) for id, text in indexed_texts(tmp_path / "one").items() if " " not in id)
    forget(str(tmp_path / "one"), Tombstones(frozenset(["f" * 32, "no id"]), texts=frozenset([text_hash(text)])))
    after = indexed_texts(tmp_path / "one")
    assert id not in after and text not in after.values()


def test_forgetting_needs_an_index_and_a_takedown(folders, taken, grown, tmp_path):
    for folder, store, code, words in ((tmp_path, taken[0], 2, "holds no index; name a folder"),
                                       (folders / "one", grown, 1, "no takedown has removed .* --store")):
        done = commands.command("pipeline.cli", "dedup", "forget", str(folder), "--store", str(store))
        assert done.returncode == code
        assert re.search(words, done.stderr) and "Traceback" not in done.stderr
    shutil.copytree(folders / "one", tmp_path / "one")
    before = {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()}
    done = commands.command("pipeline.cli", "dedup", "forget", str(tmp_path / "one"), str(tmp_path / "typo"), "--store",
                            str(taken[0]))
    assert done.returncode == 2 and "typo holds no index" in done.stderr and not done.stdout
    assert {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()} == before
    _crafted(tmp_path / "one", "documents", _put("size", 2**62))
    done = commands.command("pipeline.cli", "dedup", "forget", str(tmp_path / "one"), "--store", str(taken[0]))
    assert done.returncode == 2
    assert re.search("one/minhash is damaged .*make the index again", done.stderr), done.stderr


def _crafted(path: Path, kind: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the records of the first file of a kind in the index of `minhash` at `path`, and all checksums and sizes,
    as somebody could who makes an index that is to break a run."""
    manifest = path / "minhash" / "index.json"
    about = json.loads(manifest.read_bytes().partition(b"\n")[2])
    ref = about["keys"]["bands"]["files"][0] if kind == "keys" else about["groups"][0][kind]
    file = SegmentFile.open(Store(str(path)), {**ref, "$ref": ref["$file"]})
    parts = [read_segment(Store(str(path)), {**ref, "$ref": ref["$file"]}, number) for number in range(file.buckets)]
    changed = [change(part.copy()) for part in parts]
    with SegmentWriter(str(path / ref["$file"]), changed[0].dtype, file.buckets, key=()) as out:
        for number, records in enumerate(changed):
            out.write(np.full(len(records), number), records)
    data = (path / ref["$file"]).read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    ref |= {"size": len(data), "bytes": len(data), "content": out.content, "sha256": sha256, "etag": f"sha256:{sha256}"}
    body = json.dumps(about, sort_keys=True, indent=1).encode()
    manifest.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def _put(field: str, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(records: np.ndarray) -> np.ndarray:
        records[field] = value
        return records

    return change


@pytest.mark.parametrize(("kind", "change", "words"), [
    ("keys", _put("document", 77 << 32), r"names group 77 of the index, which has only \d+"),
    ("keys", _put("document", 4000), "documents.seg .* lacks a document that the files of keys name"),
    ("keys", _put("document", 2**32 - 1), "documents.seg .* is no file of this index"),
    ("keys", lambda records: records["key"].copy(), "keys.seg .* holds other records"),
    ("documents", lambda records: records["chars"].copy(), "documents.seg .* holds other records"),
    ("documents", lambda records: records[:0], "documents.seg .* lacks a document"),
    ("documents", _put("offset", 2**64 - 1), "texts.bin .* lacks a text"),
    ("documents", _put("size", 2**62), "texts.bin .* lacks a text"),
    ("documents", _put("number", 2**32 - 1), "texts.bin .* is damaged")])
def test_a_crafted_record_of_an_index_ends_the_run_with_a_line(site, folders, tmp_path, kind, change, words):
    """All checksums are right, but the records name what does not exist."""
    shutil.copytree(folders / "both", tmp_path / "both")
    _crafted(tmp_path / "both", kind, change)
    against = f"against: {tmp_path / 'both'}"
    (site / "crafted.yaml").write_text(recipe({"new_three": f"{{from: three, steps: [{{minhash: {{{against}}}}}]}}"}))
    done = commands.command("pipeline.cli", "run", str(site / "crafted.yaml"), "--store", str(tmp_path / "store"),
                            "--quiet", "--backend", "inline")
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if re.search(words, line)]
    assert str(tmp_path / "both") in line
    assert "make the index again with `tokenmill dedup index`" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("change", [_put("document", 77 << 32), lambda records: records["key"].copy()])
def test_an_index_with_crafted_keys_is_not_merged(folders, tmp_path, change):
    shutil.copytree(folders / "one", tmp_path / "one")
    _crafted(tmp_path / "one", "keys", change)
    done = commands.command("pipeline.cli", "dedup", "merge", str(tmp_path / "one"), str(folders / "two"), "--out",
                            str(tmp_path / "merged"))
    assert done.returncode == 2
    assert re.search(r"keys\.seg .* is no file of this index: .*make the index again", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
