"""Damage in a store is noticed when the damaged file is read, and never changes a result. What can be computed again is
restored to the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.heal import until_sound
from pipeline.materialize import copy_rows, materialize
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.errors import DamagedFile, StoreError
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from pipeline.store.segment import CorruptLog
from pipeline.store.verify import repair, verify_store
from tests.corpus import sentences, write_warcs
from tests.e2e.test_same_bytes import RECIPE
from tokenizer.shards.layout import ShardError
from tokenizer.shards.reader import ShardSet


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path, dict[str, str]]:
    """(a site with its recipe, the store of a finished run, the hashes of what the run made)"""
    top = tmp_path_factory.mktemp("damage")
    write_warcs(top / "crawl", 80, 2)
    (top / "docs").mkdir()
    rng, prose = random.Random(5), sentences()
    texts: list[str] = []
    for i in range(24):
        texts.append(texts[-1] + " One more sentence." if i % 4 == 3 else " ".join(rng.sample(prose, 25)))
        (top / "docs" / f"d{i:02d}.txt").write_text(texts[-1])
    (top / "recipe.yaml").write_text(RECIPE.replace("total: 60k", "total: 20k"))
    return top, top / "store", run(top, top / "store")


def run(site: Path, store: Path, *overrides: str) -> dict[str, str]:
    """Run the recipe, and return the hashes of everything that must be the same in every run."""
    at = Store(store)
    name = run_recipe(load_recipe(site / "recipe.yaml", list(overrides)), str(store),
                      make_backend=make_backend("inline", 1, None)).run
    curriculum = json.loads(at.read(f"runs/{name}/curriculum.json"))
    return {**{d: dataset_hash(at, d) for d in ("extracted", "clean", "deduped")},
            **{s["name"]: f"{s['sha256']}/{s['val_sha256']}" for s in curriculum["streams"]},
            "order": curriculum["order"], "tokenizer": curriculum["tokenizer"]["sha256"]}


def copy(store: Path, to: Path) -> Path:
    """Copy a store. No file of the copy is a hard link to a file of the original, so damage to the copy does not reach
    the original."""
    shutil.copytree(store, to, copy_function=os.link)
    for path in to.rglob("*"):                       # files of the other store must not be touched through links
        if path.is_file() and path.stat().st_nlink > 1:
            aside = path.with_name(path.name + "~")
            shutil.copyfile(path, aside)
            os.replace(aside, path)
    return to


def flip(path: Path, seed: int = 0) -> None:
    data = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def outputs(store: Path, task: str, name: str) -> list[PartRecord]:
    """Return the records of a task that wrote a non-empty file `name`. There must be at least one."""
    records = [r for r in Log.read(Store(store)).records() if r.task == task and name in r.files
               and r.files[name].rows]
    assert records
    return records


#: a step that reads parts of a finished store
CHANGED = "datasets.clean.steps=[gopher_quality, pii]"


@pytest.fixture(scope="module")
def wanted(finished, tmp_path_factory) -> dict[str, str]:
    """The hashes that a run with the setting CHANGED gives on an undamaged store."""
    top, store, _ = finished
    return run(top, copy(store, tmp_path_factory.mktemp("wanted") / "store"), CHANGED)


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_damaged_part_is_made_anew_while_a_new_step_reads_it(finished, wanted, tmp_path, harm):
    """The store is finished; a changed step reads a part that has been damaged since."""
    top, store, _ = finished
    harmed = copy(store, tmp_path / "harmed")
    record = outputs(harmed, "documents", "kept.parquet")[0]
    path = harmed / record.files["kept.parquet"].path
    if harm == "flip":
        flip(path)
    elif harm == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    assert run(top, harmed, CHANGED) == wanted
    again = Log.read(Store(harmed)).get(record.key)
    assert again.attempt != record.attempt and again.files["kept.parquet"].content == record.files[
        "kept.parquet"].content


def test_published_files_are_links_to_what_was_made_anew(finished, tmp_path):
    top, store, expected = finished
    harmed = copy(store, tmp_path / "harmed")
    body = min((harmed / "shards").rglob("*.tokens"))
    [record] = [r for r in outputs(harmed, "assemble_shard", "body") if r.files["body"].sha256[:12] in body.name]
    (harmed / record.files["body"].path).unlink()
    flip(body)
    assert run(top, harmed) == expected
    made = Log.read(Store(harmed)).get(record.key).files["body"]
    assert os.path.samefile(harmed / made.path, body)


def test_a_flipped_bit_in_a_published_part_is_told_where_it_is_read(finished, tmp_path):
    _, store, _ = finished
    harmed = copy(store, tmp_path / "harmed")
    part = min((harmed / "datasets" / "deduped").glob("part-*.parquet"))
    flip(part)
    for read in (lambda: dataset_hash(Store(harmed), "deduped"), lambda: list(iter_rows(Store(harmed),
                                                                                         "datasets/deduped"))):
        with pytest.raises(DamagedFile, match=rf"datasets/deduped/{part.name} is damaged"):
            read()


def test_samples_are_written_from_exchange_files_that_were_made_anew(finished, tmp_path):
    _, store, _ = finished
    harmed = copy(store, tmp_path / "harmed")
    name = next((harmed / "runs").iterdir()).name

    def rows() -> str:
        return materialize(str(harmed), name, "parquet", make_backend=make_backend("inline", 1, None))[0].dumps()
    expected = rows()
    for record in outputs(harmed, "scatter_windows", "phase0.seg"):
        path = harmed / record.files["phase0.seg"].path
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for record in outputs(harmed, "write_rows", "rows.parquet"):
        (harmed / record.files["rows.parquet"].path).unlink()
    shutil.rmtree(harmed / f"runs/{name}/rows-parquet")
    assert rows() == expected
    path = min((harmed / f"runs/{name}/rows-parquet").glob("p*.parquet"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedFile, match=f"{path.name} is damaged"):
        copy_rows(Store(harmed), f"runs/{name}/rows-parquet", str(tmp_path / "out"))


def test_what_helps_is_said_of_a_shard_that_materialize_reads(finished, tmp_path):
    _, store, _ = finished
    harmed = copy(store, tmp_path / "harmed")
    name = next((harmed / "runs").iterdir()).name
    for body in (harmed / "shards").rglob("*.tokens"):
        flip(body)
    with pytest.raises(StoreError, match="run `tokenmill store verify --repair`, then the recipe again"):
        materialize(str(harmed), name, "parquet", make_backend=make_backend("inline", 1, None))


def test_what_a_run_wrote_about_itself_is_written_anew(finished, tmp_path):
    """Each file damaged alone in one way, and all at once in the two others."""
    top, store, expected = finished
    harmed = copy(store, tmp_path / "harmed")
    at, folder = Store(harmed), f"runs/{next((harmed / 'runs').iterdir()).name}"
    whole = {path: (harmed / path).read_bytes() for path in (
        f"{folder}/tasks.parquet", f"{folder}/inputs.parquet", f"{folder}/curriculum.json", "datasets/clean/.manifest",
        "dropped/clean/.manifest")}
    cut, emptied, altered = (lambda data: data[:len(data) // 2], lambda data: bytes(len(data)),
                             lambda data: data[:len(data) // 3] + b"\xff" + data[len(data) // 3 + 1:])
    for paths, harm in (*(([path], cut) for path in whole), (whole, emptied), (whole, altered)):
        for path in paths:
            (harmed / path).write_bytes(harm(whole[path]))
        assert run(top, harmed) == expected
        for path in paths:
            assert path.endswith(".manifest") or (harmed / path).read_bytes() == whole[path]
        assert not verify_store(at, Log.read(at)).damaged


def test_a_damaged_list_of_tasks_is_one_line(finished, tmp_path, tokenmill):
    _, store, _ = finished
    harmed = copy(store, tmp_path / "harmed")
    path = next((harmed / "runs").iterdir()) / "tasks.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    done = tokenmill("store", "gc", "--store", harmed)
    assert done.code != 0
    assert re.fullmatch(rf"error: runs/{path.parent.name}/tasks.parquet cannot be read .*run the recipe again.*\n",
                        done.err)


@pytest.mark.parametrize(("mended", "said"), [
    ([f"objects/{i:032x}/1.parquet" for i in range(10_000)], "10001 files of .* were damaged or missing: its disk"),
    ([f"objects/0/{i}.parquet" for i in range(12)], "objects/0/x.parquet was damaged each time it was written")])
def test_a_store_that_keeps_losing_files_is_given_up(tmp_path, mended, said):
    """A failing disk must not keep a driver busy for ever: in all, and of one task."""
    def fails() -> None:
        raise DamagedFile("objects/0/x.parquet", "is gone")

    log = SimpleNamespace(check_lease=lambda: None, retire_files=lambda paths: pytest.fail("made once more"))
    with pytest.raises(StoreError, match=f"{said}.*or somebody who writes there, is at fault"):
        until_sound(Store(tmp_path), log, SimpleNamespace(), fails, dict.fromkeys(mended, "gone"))


def harm(path: Path, how: str, rng: random.Random) -> None:
    if how == "flip":
        flip(path, rng.randrange(1 << 30))
    elif how == "cut":
        os.truncate(path, rng.randrange(path.stat().st_size))
    else:
        path.unlink()


def nothing_silent(store: Path, expected: dict[str, str]) -> None:
    """Check that reading the datasets and shards of a damaged store gives either the `expected` hashes, or an error
    that names a file."""
    for name in ("extracted", "clean", "deduped"):
        got = or_its_error(lambda name=name: dataset_hash(Store(store), name), (StoreError,))
        assert got == expected[name] or "datasets/" in got or "no dataset" in got
    for name in ("web", "docs"):
        for split, pinned in zip(("train", "val"), expected[name].split("/")):
            folder = store / "shards" / name / f"split={split}"
            got = or_its_error(lambda folder=folder, pinned=pinned: read_whole(ShardSet(folder, pinned)), (ShardError,))
            assert got == expected[f"{name}/{split}"] or str(store) in got


def read_whole(shards: ShardSet) -> str:
    return "/".join(hashlib.sha256(a.tobytes()).hexdigest() for a in (shards.read(0, len(shards)),
                                                                      shards.ends(0, len(shards) + 1)))


def or_its_error(read: Callable[[], str], kinds: tuple[type[Exception], ...]) -> str:
    """Return what `read` returns, or the message of an error of `kinds`. Other errors would be a traceback for the
    user, so they are not caught."""
    try:
        return read()
    except kinds as e:
        return str(e)


def wreck(site: Path, store: Path, expected: dict[str, str], seed: int) -> None:
    """Damage some random files of the store. Check that this is noticed, that a run and a repair work, and that after
    the next run all bytes are as `expected` and the store is sound."""
    rng, whole = random.Random(seed), store.with_name("whole")
    copy(store, whole)
    files = sorted(p for top in ("objects", "datasets", "dropped", "shards", "log") for p in (store / top).rglob("*")
                   if p.is_file() and p.stat().st_size and "heartbeat" not in str(p) and "objects/lists" not in str(p))
    segments = []
    for path in rng.sample(files, rng.randint(1, 4)):
        harm(path, rng.choice(("flip", "flip", "cut", "gone")), rng)
        segments += [path] if path.parent.name == "log" else []
    last = max((whole / "log").glob("*.json"))
    if segments and (store / last.relative_to(whole) not in segments or (store / last.relative_to(whole)).exists()):
        with pytest.raises(CorruptLog, match="|".join(re.escape(p.name) for p in segments)):
            Log.read(Store(store))
    for path in segments:                                        # it cannot be had again but from a copy
        shutil.copyfile(whole / path.relative_to(store), path)
    nothing_silent(store, expected)
    with contextlib.suppress(DamagedFile):                       # of a published part, when `run` hashes the datasets
        run(site, store)
    nothing_silent(store, expected)
    at = Store(store)
    with Log.open(at) as log:
        repair(at, log, verify_store(at, log).damaged)
    made = run(site, store)
    assert made == {name: expected[name] for name in made}
    assert verify_store(at, Log.read(at)).damaged == {}
    nothing_silent(store, expected)


@pytest.fixture(scope="module")
def facts(finished) -> dict[str, str]:
    """What `nothing_silent` compares with: the hashes of the run, and those of the tokens and ends of its shards."""
    _, store, expected = finished
    more = {}
    for name in ("web", "docs"):
        for split in ("train", "val"):
            more[f"{name}/{split}"] = read_whole(ShardSet(store / "shards" / name / f"split={split}"))
    return expected | more


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6)),
                                  *(pytest.param(n, marks=pytest.mark.chaos) for n in range(6, 200))])
def test_a_wrecked_store_comes_back_to_the_same_bytes(finished, facts, tmp_path, seed):
    top, store, _ = finished
    wreck(top, copy(store, tmp_path / "harmed"), facts, seed)


def test_the_command_names_what_is_damaged_and_mends_it(finished, tmp_path, tokenmill):
    top, store, expected = finished
    harmed = copy(store, tmp_path / "harmed")
    part = outputs(harmed, "documents", "kept.parquet")[0].files["kept.parquet"].path
    gone = outputs(harmed, "assemble_shard", "body")[0].files["ends"].path
    token = sorted((harmed / "shards").rglob("*.tokens"))[0]
    flip(harmed / part)
    (harmed / gone).unlink()
    flip(token)
    before = (harmed / "log").stat().st_mtime_ns
    said = tokenmill("store", "verify", "--store", harmed)
    assert said.code == 1 and "3 files are damaged or gone; run `tokenmill store verify --repair" in said.err
    assert [line.split()[0] for line in said.out.splitlines()[:-1]] == sorted(
        [part, gone, str(token.relative_to(harmed))])
    assert (harmed / "log").stat().st_mtime_ns == before         # only looked at
    assert tokenmill("store", "verify", "--repair", "--quiet", "--store", harmed).code == 0
    assert run(top, harmed) == expected
    sound = tokenmill("store", "verify", "--json", "--store", harmed)
    assert sound.code == 0 and json.loads(sound.out)["damaged"] == {}


def test_what_no_run_names_is_removed_and_made_again(finished, wanted, tmp_path, tokenmill):
    top, store, expected = finished
    kept = copy(store, tmp_path / "kept")
    before = {r.key for r in Log.read(Store(kept)).records()}
    assert run(top, kept, CHANGED) == wanted
    assert tokenmill("store", "gc", "--json", "--store", kept).json()[0]["records"] == 0
    [gone] = [p for p in (kept / "runs").iterdir() if p.name not in {q.name for q in (store / "runs").iterdir()}]
    shutil.rmtree(gone)
    there = {r.key for r in Log.read(Store(kept)).records()}
    [would] = tokenmill("store", "gc", "--dry-run", "--json", "--store", kept).json()
    assert would["records"] == len(there - before) > 0 and would["bytes"] > 0 and not would["removed"]
    assert {r.key for r in Log.read(Store(kept)).records()} == there
    tokenmill("store", "gc", "--store", kept)
    view = Log.read(Store(kept))
    assert {r.key for r in view.records()} == before
    assert {p.parent.name for p in (kept / "objects").rglob("*") if p.is_file()} - {"lists"} <= before
    assert run(top, kept) == expected and run(top, kept, CHANGED) == wanted
