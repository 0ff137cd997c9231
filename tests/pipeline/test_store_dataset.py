"""Publishing: a glob over the files of a dataset finds what the manifest says, whatever is killed. The hash of a
dataset depends on its rows, not on how they are divided into parts."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import duckdb
import fsspec
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from pipeline.plan.inputs import list_source
from pipeline.store import dataset
from pipeline.store.dataset import PassParts, iter_rows, manifest
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store, StoreError, swap_folders
from pipeline.store.log import Fenced
from pipeline.store.parts import PartWriter, document_schema
from pipeline.store.records import FileInfo, PartRecord
from stages.catalog import reader_class
from stages.document import Document, DuplicateId

ROOT = Path(__file__).parents[2]


def document(i: int) -> Document:
    return Document(hashlib.md5(str(i).encode()).hexdigest(), f"text {i} " * (i % 5), source="web", url=f"u/{i}",
                    locator={"file": "f", "offset": i, "record": i, "sub": ""}, signals={"a": i / 3})


def part(store: Store, scratch: Path, key: str, ids, dropped=(), signals=("a",)) -> PartRecord:
    """Do what a pass does: write kept and dropped documents, upload them, and return the record."""
    files = {}
    for name, numbers in (("kept", ids), ("dropped", dropped)):
        local = scratch / f"{key}.{name}"
        writer = PartWriter(str(local), document_schema(signals, dropped=name == "dropped"))
        for i in numbers:
            writer.write(document(i), **({"reason": "short", "stage": "c4"} if name == "dropped" else {}))
        writer.close()
        data = local.read_bytes()
        path = f"objects/{key}/00000001-00000000.{name}.parquet"
        store.upload(str(local), path)
        files[f"{name}.parquet"] = FileInfo(path, len(data), hashlib.sha256(data).hexdigest(), writer.content,
                                            writer.rows, {"text_bytes": writer.text_bytes})
    return PartRecord(key, "m:C", "clean", "00000001-00000000", files,
                      {"in": {"web": {"docs": writer.rows, "bytes": 1}, "abc": {"docs": 0, "bytes": 0}}})


def key(i: int) -> str:
    return hashlib.md5(f"key{i}".encode()).hexdigest()


def publish(store: Store, name: str, passes, **options) -> None:
    """Publish a dataset from the records of each of its passes."""
    dataset.publish(store, name, [PassParts(records) for records in passes], **options)


def glob_count(root: Path, kind: str = "datasets", name: str = "clean") -> int:
    return sum(pq.read_metadata(path).num_rows for path in (root / kind / name).glob("part-*.parquet"))


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    if request.param == "disk":
        yield Store(tmp_path / "store")
    else:
        root = f"memory://d{tmp_path.name}-{os.getpid()}"
        yield Store(root)
        fsspec.filesystem("memory").rm(root, recursive=True)


def test_publish_manifest_and_rows(store, tmp_path):
    records = [part(store, tmp_path, key(n), range(n * 10, n * 10 + size),
                    dropped=range(1000 + n, 1003 + n) if n < 2 else ()) for n, size in enumerate((10, 0, 7))]
    publish(store, "clean", [records])
    table = manifest(store, "clean")
    assert table["rows"].to_pylist() == [10, 0, 7]
    assert table["part"].to_pylist() == [f"part-{n:06d}-{key(n)[:12]}.parquet" for n in range(3)]
    assert table["key"].to_pylist() == [key(n) for n in range(3)]
    assert table["sources"].to_pylist() == [["abc", "web"]] * 3
    for row in table.to_pylist():
        data = store.read(f"datasets/clean/{row['part']}")
        assert (len(data), hashlib.sha256(data).hexdigest()) == (row["bytes"], row["sha256"])
    assert [r["id"] for r in iter_rows(store, "datasets/clean", ["id"])] == \
        [document(i).id for i in [*range(10), *range(20, 27)]]
    assert [r["reason"] for r in iter_rows(store, "dropped/clean")] == ["short"] * 6
    assert manifest(store, "clean", "quarantine").num_rows == 0       # these passes wrote no such file
    if store.local:
        assert glob_count(store.local) == 17
        assert glob_count(store.local, "dropped") == 6
        shared = store.local / "datasets/clean" / table["part"][0].as_py()
        assert shared.stat().st_ino == (store.local / records[0].files["kept.parquet"].path).stat().st_ino
    publish(store, "clean", [[*records[1:], part(store, tmp_path, key(9), [77])]])
    assert [r["id"] for r in iter_rows(store, "datasets/clean")] == [document(i).id for i in [*range(20, 27), 77]]
    assert sorted(p.split("/")[-1] for p in store.list("datasets/clean")) == \
        [".manifest", *manifest(store, "clean")["part"].to_pylist()]
    assert len(list(iter_rows(store, "dropped/clean"))) == 3


# -- what other libraries find in the folder ---------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path) -> Path:
    """A published dataset of 17 rows in three parts, the second of them empty."""
    store = Store(tmp_path / "test_store")               # `test` is a word that Hugging Face datasets makes a split of
    publish(store, "clean", [[part(store, tmp_path, key(n), range(n * 10, n * 10 + size))
                             for n, size in enumerate((10, 0, 7))]])
    return store.local / "datasets" / "clean"


def test_a_folder_shows_nothing_but_its_parts(folder):
    """By the rules of the libraries themselves: Hugging Face datasets takes every file but those with a name or a
    folder that begins with a dot, and `__` folders; pyarrow, and with it pandas, those without a dot or `_`."""
    shown = [p.relative_to(folder) for p in folder.rglob("*")
             if not any(name.startswith((".", "__")) for name in p.relative_to(folder).parts)]
    assert sorted(map(str, shown)) == [f"part-{n:06d}-{key(n)[:12]}.parquet" for n in range(3)]
    assert ds.dataset(folder).count_rows() == 17
    [every] = duckdb.connect().execute(f"select count(*) from '{folder}/**/*.parquet'").fetchall()[0]
    assert every == 17
    # Hugging Face datasets reads by the rows of the first row group, which must not be zero
    assert [pq.read_metadata(folder / p).num_row_groups for p in sorted(shown)] == [1, 0, 1]
    listed = list_source("again", [str(folder)], suffixes=reader_class("parquet").suffixes)
    assert [f.path for f in listed] == sorted(map(str, shown)), "a folder of ours is a source like any other"


def test_pandas_reads_the_folder(folder):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    table = pandas.read_parquet(folder)
    assert sorted(table["id"]) == sorted(document(i).id for i in [*range(10), *range(20, 27)])


def test_hugging_face_datasets_reads_the_folder(folder, tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    found = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert list(found) == ["train"]
    ids = [document(i).id for i in [*range(10), *range(20, 27)]]
    assert found["train"]["id"][:] == ids
    assert [row["id"] for row in datasets.load_dataset(str(folder), split="train", streaming=True)] == ids


def test_equal_data_have_equal_manifests(store, tmp_path):
    records = [part(store, tmp_path, key(n), range(n * 10, n * 10 + 5)) for n in range(3)]
    publish(store, "clean", [records])
    first = store.read("datasets/clean/.manifest")
    for n, record in enumerate(records):
        record.attempt, record.cpu_s = f"00000007-{n:08d}", 1.5
    publish(store, "clean", [records])
    assert store.read("datasets/clean/.manifest") == first


def test_errors(store, tmp_path):
    with pytest.raises(StoreError, match=r"there is no dataset 'clean' in .*datasets; nothing is published"):
        manifest(store, "clean")
    record = part(store, tmp_path, key(0), [1, 2])
    publish(store, "other", [[record]])
    with pytest.raises(StoreError, match="it has: other"):
        list(iter_rows(store, "datasets/clean"))
    before = dataset_hash(store, "other")
    store.remove(record.files["kept.parquet"].path)
    with pytest.raises(StoreError, match=r"kept\.parquet is missing, although the log names it"):
        publish(store, "new", [[record]])
    assert dataset_hash(store, "other") == before


def test_hash_does_not_know_partitions(store, tmp_path):
    numbers = list(range(3000))
    hashes = {}
    for run, (cuts, rows) in enumerate([((), 1 << 20), ((1000, 1001, 2500), 1 << 20), ((5, 5, 1200), 700), ((), 1)]):
        random.Random(run).shuffle(numbers)
        bounds = [0, *cuts, 3000]
        records = [part(store, tmp_path, key(100 * run + n), numbers[a:b])
                   for n, (a, b) in enumerate(itertools.pairwise(bounds))]
        publish(store, f"d{run}", [records])
        hashes[run] = dataset_hash(store, f"d{run}", str(tmp_path), max_rows=rows)
        if run == 0:                          # one part: its content is the hash
            assert hashes[0] == records[0].files["kept.parquet"].content
    assert len(set(hashes.values())) == 1
    publish(store, "less", [[part(store, tmp_path, key(777), numbers[1:])]])
    publish(store, "more", [[part(store, tmp_path, key(778), [*numbers, 3000])]])
    publish(store, "wider", [[part(store, tmp_path, key(779), numbers, signals=("a", "b"))]])
    assert len({hashes[0], *(dataset_hash(store, n) for n in ("less", "more", "wider"))}) == 4
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp")]


@pytest.mark.parametrize("rows", [1 << 20, 10])
def test_hash_finds_duplicates_across_parts(store, tmp_path, rows):
    publish(store, "clean", [[part(store, tmp_path, key(n), range(n * 30, n * 30 + 31)) for n in range(2)]])
    with pytest.raises(DuplicateId, match=document(30).id):
        dataset_hash(store, "clean", max_rows=rows)


def test_hash_of_nothing(store, tmp_path):
    publish(store, "clean", [[part(store, tmp_path, key(0), [])]])
    assert dataset_hash(store, "clean") == hashlib.sha256().hexdigest()


def versions(root: Path, scratch: Path) -> tuple[list[PartRecord], list[PartRecord]]:
    """Return two contents of one dataset that share a part: 37 and 61 rows are kept, 4 and 9 dropped."""
    store = Store(root)
    a = [part(store, scratch, key(n), range(n * 100, n * 100 + rows), range(5000 + 10 * n, 5002 + 10 * n))
         for n, rows in enumerate((20, 17))]
    b = [part(store, scratch, key(10 + n), range(1000 + n * 100, 1000 + n * 100 + rows), [7000 + n])
         for n, rows in enumerate((1, 2, 3, 18, 0))]
    return a, [a[1], a[0], *b]


KILLER = """
    import os, shutil, signal, sys
    from pathlib import Path
    from pipeline.store.fs import Store
    from tests.pipeline.test_store_dataset import publish, versions

    def publication(root, records):
        publish(Store(root), "clean", [records])

    top, n = Path(sys.argv[1]), 0
    a, b = versions(top / "start", top)
    if int(sys.argv[2]):
        publication(top / "start", a)
    while True:
        root = top / f"{n:04d}"
        shutil.copytree(top / "start", root, copy_function=os.link)
        pid = os.fork()
        if pid == 0:
            left = n
            def count(event, args):                   # every call that touches the file system, and ctypes for the swap
                global left
                if event.split(".")[0] in ("os", "open", "shutil", "ctypes"):
                    left -= 1
                    if left == -1:
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(count)
            publication(root, b)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        n += 1
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    print(n)
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 1], ids=["first", "replacement"])
def test_sigkill_at_every_point_of_a_publication(tmp_path, again):
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLER), str(tmp_path), str(again)], cwd=ROOT,
                         check=True, stdout=subprocess.PIPE, text=True)
    points = int(out.stdout)
    _, b = versions(tmp_path / "rerun", tmp_path)        # the same records: their objects are in every store
    assert points > 35                               # killed before each of so many system calls
    seen = set()
    for n in range(points):
        root = tmp_path / f"{n:04d}"
        for kind, possible in (("datasets", {37, 61}), ("dropped", {4, 9})):
            if not again and not (root / kind / "clean").exists():
                seen.add((kind, None))
                continue
            rows = sum(manifest(Store(root), "clean", kind)["rows"].to_pylist())
            assert rows in possible
            assert glob_count(root, kind) == rows
            seen.add((kind, rows))
        if n % 5 == 0 or n > points - 5:             # a rerun puts everything right
            publish(Store(root), "clean", [b])
            assert glob_count(root) == 61
            assert glob_count(root, "dropped") == 9
            assert sorted(os.listdir(root / "datasets")) == ["clean"]
    before = {("datasets", 37), ("dropped", 4)} if again else {("datasets", None), ("dropped", None)}
    assert seen == before | {("datasets", 61), ("dropped", 9)}


def test_a_reader_never_sees_a_mixture(tmp_path):
    store = Store(tmp_path / "store")
    a, b = versions(tmp_path / "store", tmp_path)
    publish(store, "clean", [a])
    stop, read, errors, begun, reads = threading.Event(), threading.Event(), [], 0, 0

    def write() -> None:
        nonlocal begun
        try:
            while not stop.is_set():
                for records in (b, a):
                    begun += 1
                    publish(store, "clean", [records])
                    read.clear()
                    if not stop.is_set():
                        read.wait(300)               # without pauses, few reads would end before the next exchange
        except BaseException as e:
            errors.append(e)

    writer = threading.Thread(target=write)
    writer.start()
    began = time.monotonic()
    counts = set()
    while (reads <= 200 or len(counts) < 2) and not errors and time.monotonic() < began + 600:
        before = begun
        files = sorted((store.local / "datasets/clean").glob("part-*.parquet"))
        if begun != before:                          # it took so long that the folder it listed may be going already
            continue
        try:
            counts.add(sum(pq.read_metadata(f).num_rows for f in files))
            reads += 1
            read.set()
        except FileNotFoundError:                    # listed before the exchange, opened after it: no wrong count
            continue
    stop.set()
    read.set()
    writer.join()
    assert not errors
    assert reads > 200
    assert counts == {37, 61}


def test_where_folders_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.store.disk.ctypes", SimpleNamespace(CDLL=lambda *_, **__: object()))
    store = Store(tmp_path / "store")
    a, b = versions(tmp_path / "store", tmp_path)
    for records, rows in ((a, 37), (b, 61), (a, 37)):
        publish(store, "clean", [records])
        assert glob_count(store.local) == rows
    assert os.listdir(store.local / "datasets") == ["clean"]


# -- two drivers -------------------------------------------------------------------------------------------------------
class TakenOver:
    """Stands in for `Log.check_lease`. It raises Fenced once `gone` is true."""

    def __init__(self) -> None:
        self.gone = False

    def __call__(self) -> None:
        if self.gone:
            raise Fenced("another driver has the store")


@pytest.mark.parametrize("shows", [True, False], ids=["publishes", "has yet to publish"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "replacement"])
@pytest.mark.parametrize("moment", ["links", "manifest", "exchange"])
def test_a_driver_that_was_taken_over_publishes_nothing(tmp_path, monkeypatch, moment, first, shows):
    """It stands still while it links, when all is linked, or just before it shows its folder; meanwhile the other one
    publishes. When it goes on, nothing changes, and nothing of it stays."""
    store = Store(tmp_path / "store")
    old, theirs = versions(tmp_path / "store", tmp_path)
    ours = [part(store, tmp_path, key(50 + n), range(9000 + n * 10, 9010 + n * 10)) for n in range(3)]
    if not first:
        publish(store, "clean", [old])
    verify = TakenOver()

    def take_over() -> None:
        if not verify.gone:
            verify.gone = True
            if shows:
                publish(store, "clean", [theirs])

    def late(real):
        def call(*paths):
            if "datasets" in str(paths[-1]):
                take_over()
            return real(*paths)
        return call

    if moment == "links":
        monkeypatch.setattr(dataset, "link_committed", late(dataset.link_committed))
    elif moment == "manifest":
        monkeypatch.setattr(dataset, "sync", late(dataset.sync))
    elif moment == "exchange":
        monkeypatch.setattr(dataset, "swap_folders", late(dataset.swap_folders))
        monkeypatch.setattr(dataset.os, "rename", late(os.rename))
    with pytest.raises(Fenced):
        publish(store, "clean", [ours], check_lease=verify)
    monkeypatch.undo()
    if shows:
        assert glob_count(store.local) == sum(manifest(store, "clean")["rows"].to_pylist()) == 61
    elif first:
        assert not (store.local / "datasets/clean").exists()
    else:
        assert glob_count(store.local) == sum(manifest(store, "clean")["rows"].to_pylist()) == 37
    publish(store, "clean", [theirs])
    assert glob_count(store.local) == 61
    assert all(p.name.startswith("clean~") for p in (store.local / ".publish/datasets").iterdir())
    assert len(list((store.local / ".publish/datasets").iterdir())) <= 1, "what was replaced, and nothing else"


def test_copying_stops_where_the_store_is_anothers(tmp_path, monkeypatch):
    """On object storage, too: it does not go on copying for hours, and the manifest stays."""
    store, verify = Store(f"memory://v{tmp_path.name}-{os.getpid()}"), TakenOver()
    publish(store, "clean", [[part(store, tmp_path, key(0), [1])]])
    before = store.read("datasets/clean/.manifest")
    ours, copy = part(store, tmp_path, key(1), [1]), store.fs.cp_file

    def taken_over(*args, **kw):
        verify.gone = True
        return copy(*args, **kw)

    monkeypatch.setattr(store.fs, "cp_file", taken_over)
    with pytest.raises(Fenced):
        publish(store, "clean", [[replace(ours, key=key(n)) for n in range(1, 3000)]], check_lease=verify)
    assert verify.gone, "it had begun to copy"
    assert store.read("datasets/clean/.manifest") == before
    assert len(list(store.list("datasets/clean"))) <= dataset.VERIFY_PARTS + 2
    fsspec.filesystem("memory").rm(store.root, recursive=True)


def test_a_folder_that_is_gone_is_never_exchanged(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").touch()
    with pytest.raises(FileNotFoundError):
        swap_folders(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"] and os.listdir(tmp_path / "b") == ["x"]


def test_object_store_manifest_is_right_wherever_a_publication_stops(tmp_path, monkeypatch):
    """Stop before each operation: what the manifest names is all there, and a rerun ends with exactly that."""
    fs = fsspec.filesystem("memory")
    for n in range(200):
        root = f"memory://p{tmp_path.name}-{os.getpid()}/{n}"
        store = Store(root)
        a = [part(store, tmp_path, key(i), range(i * 100, i * 100 + 7)) for i in range(2)]
        b = [a[1], part(store, tmp_path, key(5), range(500, 505))]
        publish(store, "clean", [a])
        left = [n]

        def stop(real, left=left):
            def call(*args, **kw):
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                return real(*args, **kw)
            return call

        with monkeypatch.context() as m:
            for name in ("cp_file", "put_file", "rm_file"):
                m.setattr(store.fs, name, stop(getattr(store.fs, name)))
            try:
                publish(store, "clean", [b])
                finished = True
            except KeyboardInterrupt:
                finished = False
        ids = [r["id"] for r in iter_rows(store, "datasets/clean", ["id"])]
        assert len(ids) == sum(manifest(store, "clean")["rows"].to_pylist())
        assert len(ids) in (14, 12)
        publish(store, "clean", [b])
        assert len(list(store.list("datasets/clean"))) == 3
        fs.rm(root, recursive=True)
        if finished:
            break
    assert 4 < n < 199


def test_a_path_beside_the_store_is_not_below_it(tmp_path):
    store = Store(str(tmp_path / "store"))
    assert store.relative(f"{tmp_path}/store/log/1") == "log/1"
    assert store.relative(f"{tmp_path}/store2/log/1") == f"{tmp_path}/store2/log/1"


def test_a_link_that_replaces_leaves_no_name_beside_it(tmp_path):
    store = Store(str(tmp_path))
    for name in ("old", "new"):
        store.write(name, name.encode())
    assert store.link("old", "published") and not store.link("new", "published")
    assert store.link("new", "published", anew=True) and store.read("published") == b"new"
    assert not store.link("new", "published", anew=True), "the same file"
    assert sorted(os.listdir(tmp_path)) == ["new", "old", "published"]
