"""The exchange of records between tasks equals a numpy sort, takes little memory, and works with very large, empty and
single buckets."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import fsspec
import numpy as np
import pytest

from pipeline.engine.shuffle.exchange import (
    MAGIC,
    SegmentFile,
    content_hash,
    merge_segments,
    read_segment,
)
from pipeline.engine.shuffle.merge import MergeLimits, merge, sort_keys
from pipeline.engine.shuffle.segment_writer import SegmentWriter
from pipeline.engine.task import TaskInputs, TaskOutputs, TaskSpec
from pipeline.store.content_keys import ref_contents
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from stages.catalog import load

RECORD = np.dtype([("key", "<u8"), ("place", "<u4"), ("score", "<f4"), ("n", "<i2"), ("bands", "<u2", (2,))])
ROOT = Path(__file__).parents[2]


def records(n: int, seed: int = 0, keys: int = 1 << 63) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = np.empty(n, RECORD)
    out["key"], out["place"] = rng.integers(0, keys, n, np.uint64), np.arange(n)
    out["score"], out["n"] = rng.standard_normal(n), rng.integers(-300, 300, n)
    out["bands"] = rng.integers(0, 1 << 16, (n, 2))
    return out


def write(path, rows, ids, buckets, step=997, **kw) -> SegmentWriter:
    with SegmentWriter(str(path), rows.dtype, buckets, **kw) as to:
        for a in range(0, len(rows), step):
            to.write(ids[a:a + step], rows[a:a + step])
    return to


def ref(path) -> dict:
    with open(path, "rb") as f:
        header = json.loads(f.read(16 + int.from_bytes(f.read(16)[8:], "little") - 16))
    return {"$ref": Path(path).name, "content": content_hash(header), "bytes": os.path.getsize(path),
            "rows": header["rows"]}


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path):
    """(a local folder to write to, a function that returns the store with these files)"""
    if request.param == "disk":
        yield tmp_path, lambda: Store(tmp_path)
        return
    root = f"memory://x{tmp_path.name}-{os.getpid()}"

    def store() -> Store:
        fsspec.filesystem("memory").put(f"{tmp_path}/", root + "/", recursive=True)
        return Store(root)
    yield tmp_path, store
    if fsspec.filesystem("memory").exists(root):
        fsspec.filesystem("memory").rm(root, recursive=True)


@pytest.mark.parametrize("memory", [1 << 26, 20_000, 2_000], ids=["at once", "spilled", "many runs"])
@pytest.mark.parametrize("key", [(), ("key",), ("n", "key"), None], ids=str)
def test_segments_equal_a_numpy_sort(place, memory, key):
    folder, store = place
    rows, ids = records(5000, keys=50), np.random.default_rng(1).integers(0, 7, 5000)
    ids[ids == 3] = 4                                           # an empty bucket
    to = write(folder / "a.seg", rows, ids, 7, key=key, memory=memory)
    assert to.rows == 5000
    order = np.lexsort([np.arange(5000), *{(): [], ("key",): [rows["key"]], ("n", "key"): [rows["key"], rows["n"]],
                                           None: [rows["place"], rows["key"]]}[key], ids])
    wanted = rows[order]
    for bucket in range(7):
        found = read_segment(store(), ref(folder / "a.seg"), bucket)
        assert found.tobytes() == wanted[ids[order] == bucket].tobytes()
        assert found.dtype == RECORD
        assert not found.flags.writeable
    assert os.listdir(folder) == ["a.seg"]


def test_memory_changes_no_byte(tmp_path):
    rows, ids = records(3000, keys=9), np.random.default_rng(1).integers(0, 5, 3000)
    for key in ((), ("key",), None):
        files = [write(tmp_path / f"{i}", rows, ids, 5, key=key, memory=m, step=s)
                 for i, (m, s) in enumerate([(1 << 26, 3000), (1000, 7), (9999, 1001)])]
        assert len({f.content for f in files}) == 1
        assert len({(tmp_path / str(i)).read_bytes() for i in range(3)}) == 1
        assert files[0].largest == np.bincount(ids).max() * RECORD.itemsize


def test_content_knows_records_but_not_what_they_cover(tmp_path):
    rows, ids = records(100), np.arange(100) % 3
    a = write(tmp_path / "a", rows, ids, 3, covers=["c1", "c2"])
    b = write(tmp_path / "b", rows, ids, 3, covers=["c3"])
    assert a.content == b.content
    assert SegmentFile.open(Store(tmp_path), ref(tmp_path / "a")).covers == ("c1", "c2")
    other = rows.copy()
    other["n"][50] += 1
    contents = {a.content, write(tmp_path / "c", other, ids, 3).content, write(tmp_path / "d", rows, ids, 4).content,
                write(tmp_path / "e", rows, ids[::-1].copy(), 3).content,
                write(tmp_path / "f", rows, ids, 3, key=("place",)).content}
    assert len(contents) == 5


@pytest.mark.parametrize("memory", [1 << 26, 40_000])
def test_merging_many_files(place, memory):
    """Ties in the order of the files, also where one key fills many blocks of several files (a hot key)."""
    folder, store = place
    parts, refs = [], []
    for n in range(6):
        rows = records([4000, 0, 1, 900, 4000, 3000][n], seed=n, keys=[30, 1, 1, 1 << 40, 2, 1][n])
        ids = (rows["key"] % 3).astype(np.int64) if n != 5 else np.zeros(3000, np.int64)      # 5: one key, one bucket
        write(folder / f"{n}.seg", rows, ids, 3, key=("key",), memory=9000)
        parts.append((rows, ids))
        refs.append(ref(folder / f"{n}.seg"))
    at = store()
    for bucket in range(3):
        every = np.concatenate([r[i == bucket][np.argsort(r["key"][i == bucket], kind="stable")] for r, i in parts])
        wanted = every[np.argsort(every["key"], kind="stable")]
        blocks = list(merge_segments(at, refs, bucket, MergeLimits(memory, block=1000)))
        assert np.concatenate(blocks).tobytes() == wanted.tobytes()
        assert len(blocks) > 1 or memory > 1 << 20
    assert list(merge_segments(at, [], 0)) == []
    assert list(merge_segments(at, refs[1:2], 0)) == []


def test_merge_without_key_concatenates(tmp_path):
    refs, parts = [], []
    for n in range(3):
        rows = records(500, seed=n)
        write(tmp_path / f"{n}", rows, np.zeros(500, int), 1)
        refs.append(ref(tmp_path / f"{n}"))
        parts.append(rows)
    found = np.concatenate(list(merge_segments(Store(tmp_path), refs, 0, MergeLimits(3000))))
    assert found.tobytes() == np.concatenate(parts).tobytes()


@pytest.mark.parametrize("seed", range(10))
def test_merge_of_random_runs(seed):
    rng = np.random.default_rng(seed)
    runs = []
    for r in range(rng.integers(1, 8)):
        size, own, keys = rng.integers(0, 400), rng.integers(1 << 30), rng.choice([1, 3, 1 << 50])
        rows = records(int(size), int(own), int(keys))
        rows["place"] = r
        runs.append(np.sort(rows, order="key", kind="stable"))
    limits = MergeLimits(block=int(rng.integers(1, 2000)), memory=int(rng.integers(1, 5000)))
    blocks = list(merge([(lambda a, b, x=x: x[a:b], len(x)) for x in runs], ("key",), RECORD.itemsize, limits))
    every = np.concatenate(runs)
    wanted = every[np.argsort(every["key"], kind="stable")]
    assert np.concatenate([*blocks, every[:0]]).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8", "<i1", "<i2", "<i4", "<i8", "<f4", "<f8", "?", "S5"])
def test_sort_keys_order_every_type(dtype):
    rng = np.random.default_rng(2)
    dtype = np.dtype(dtype)
    raw = rng.integers(0, 256, (4000, dtype.itemsize), np.uint8)
    if dtype.kind == "b":
        raw &= 1
    values = raw.view(dtype).ravel()
    if dtype.kind == "f":
        values = np.concatenate([values[np.isfinite(values)], np.array([0, np.inf, -np.inf, 1e-45, -1e-45], dtype)])
    pair = np.zeros(len(values), [("v", dtype), ("zero", "<u8")])
    pair["v"] = values
    order = np.argsort(sort_keys(pair, ("v", "zero")), kind="stable")
    assert pair["v"][order].tobytes() == np.sort(values, kind="stable").tobytes()
    order = np.argsort(sort_keys(pair, ("v",)), kind="stable")
    assert pair["v"][order].tobytes() == np.sort(values, kind="stable").tobytes()


def test_sort_keys_of_the_whole_record():
    rows = records(3000, keys=3)
    rows["bands"] = rows["bands"] % 2
    rows["place"] = rows["place"] % 2
    wanted = sorted(rows.tolist(), key=lambda r: (r[0], r[1], r[2], r[3], tuple(r[4])))
    found = rows[np.argsort(sort_keys(rows, None), kind="stable")].tolist()
    assert [(*r[:4], *r[4]) for r in found] == [(*r[:4], *r[4]) for r in wanted]
    zeros = np.array([0.0, -0.0, np.nan, -1.0], "<f8")
    assert np.argsort(sort_keys(zeros, None)).tolist() == [3, 1, 0, 2]


def test_plain_dtypes_and_nothing_at_all(place):
    folder, store = place
    values = np.array([5, 3, 9, 3], "<u4")
    write(folder / "u", values, np.array([1, 0, 1, 1]), 2, key=None)
    write(folder / "none", values[:0], np.zeros(0, int), 3)
    at = store()
    assert [read_segment(at, ref(folder / "u"), b).tolist() for b in (0, 1)] == [[3], [3, 5, 9]]
    assert [read_segment(at, ref(folder / "none"), b).tolist() for b in range(3)] == [[], [], []]


def test_more_buckets_than_the_first_read_holds(place):
    folder, store = place
    rows = records(20_000)
    write(folder / "a", rows, np.arange(20_000) * 4, 80_000, step=20_000)
    at = store()
    for n in (0, 1, 11_111, 19_999):
        assert read_segment(at, ref(folder / "a"), 4 * n)["place"].tolist() == [n]
        assert len(read_segment(at, ref(folder / "a"), 4 * n + 1)) == 0


@pytest.mark.slow
def test_memory_stays_far_under_the_data(tmp_path):
    """66 MB of records with a hot bucket through a writer that may hold 4 MB, then merged with another file."""
    code = f"""
        import numpy as np
        from pipeline.engine.worker.attempt import peak_rss_mb
        from pipeline.engine.shuffle.exchange import merge_segments
        from pipeline.engine.shuffle.segment_writer import SegmentWriter
        from pipeline.engine.shuffle.merge import MergeLimits
        from pipeline.store.fs import Store
        from tests.pipeline.test_exchange import RECORD, ref, records
        np.argsort(records(10)["key"])
        before = peak_rss_mb()
        refs = []
        for file in "ab":
            with SegmentWriter({str(tmp_path)!r} + "/" + file, RECORD, 64, key=("key", "n"), memory=4 << 20) as to:
                for i in range(30):
                    rows = records(50_000, seed=i + ord(file), keys=1 << 20)
                    ids = (rows["key"] % 64).astype(np.int64)
                    ids[rows["n"] > -200] = 5
                    to.write(ids, rows)
            refs.append(ref({str(tmp_path)!r} + "/" + file))
        assert refs[0]["bytes"] > 32e6, refs
        n, last = 0, (-1, -301)
        for block in merge_segments(Store({str(tmp_path)!r}), refs, 5, MergeLimits(4 << 20)):
            key, k = block["key"].astype(np.int64), block["n"].astype(np.int64)
            assert last <= (key[0], k[0])
            assert ((key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & (k[1:] >= k[:-1]))).all()
            last = (key[-1], k[-1])
            n += len(block)
        assert n > 2_200_000, n
        print(peak_rss_mb() - before)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                         check=True)
    assert float(out.stdout) < 24                  # MB


def test_errors_name_the_file(tmp_path):
    rows = records(10)
    with pytest.raises(ValueError, match="buckets 0 to 9, the file has 0 to 8"):
        write(tmp_path / "a", rows, np.arange(10), 9)
    with pytest.raises(ValueError, match="buckets -1 to"):
        write(tmp_path / "a", rows, np.arange(10) - 1, 20)
    with pytest.raises(TypeError, match="buckets for records"):
        write(tmp_path / "a", rows, np.arange(9), 20)
    with pytest.raises(TypeError, match="packed, little-endian"):
        SegmentWriter(str(tmp_path / "a"), np.dtype([("a", "u1"), ("b", "u4")], align=True), 3)
    with pytest.raises(TypeError, match="packed, little-endian"):
        SegmentWriter(str(tmp_path / "a"), np.dtype([("a", ">u4")]), 3)
    with pytest.raises(TypeError, match="packed, little-endian"):
        SegmentWriter(str(tmp_path / "a"), object, 3)
    with pytest.raises(ValueError, match="at least one bucket"):
        SegmentWriter(str(tmp_path / "a"), "<u4", 0)
    assert list(tmp_path.iterdir()) == []
    store = Store(tmp_path)
    write(tmp_path / "a", rows, np.arange(10), 10)
    write(tmp_path / "b", rows, np.arange(10), 10, key=("n",))
    with pytest.raises(IndexError, match="a has buckets 0 to 9, not 10"):
        read_segment(store, ref(tmp_path / "a"), 10)
    with pytest.raises(ValueError, match=r"b holds .* cannot be merged"):
        list(merge_segments(store, [ref(tmp_path / "a"), ref(tmp_path / "b")], 0))
    (tmp_path / "c").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(DamagedFile, match="c is cut short"):
        read_segment(store, ref(tmp_path / "c"), 0)
    (tmp_path / "d").write_bytes(b"PAR1 and so on")
    with pytest.raises(DamagedFile, match="d does not begin as an exchange file"):
        read_segment(store, {"$ref": "d", "content": "", "bytes": 14}, 0)


def test_records_of_objects_are_refused(tmp_path):
    """numpy would map them into memory, and take the bytes of the file for addresses of objects."""
    header = {"dtype": [["a", "O"]], "buckets": 1, "rows": 1, "key": [], "covers": [], "index": ""}
    body = json.dumps(header).encode()
    data = b"TMSEG002" + len(body).to_bytes(8, "little") + body + bytes(32 + 8)
    (tmp_path / "a").write_bytes(data)
    del header["covers"]
    content = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    with pytest.raises(DamagedFile, match="a has records of Python objects"):
        read_segment(Store(tmp_path), {"$ref": "a", "content": content, "bytes": len(data)}, 0)


def test_a_failed_task_leaves_no_runs(tmp_path):
    rows = records(1000)

    def fail(to):
        to.write(np.zeros(1000, int), rows)
        assert (tmp_path / "a.runs").exists()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), SegmentWriter(str(tmp_path / "a"), RECORD, 2, memory=1000) as to:
        fail(to)
    assert list(tmp_path.iterdir()) == []


def test_through_the_task_interface(tmp_path):
    args = {"sides": [{"$ref": "x", "content": "c1"}, {"$ref": "y", "content": "c2"}],
            "text": {"$ref": "z", "content": "c3"}}
    assert ref_contents(args) == ["c1", "c2", "c3"]
    out = TaskOutputs(str(tmp_path), ref_contents(args))
    rows = records(300, keys=9)
    with out.segments("bands.seg", RECORD, 4, key=("key",)) as to:
        to.write((rows["key"] % 4).astype(np.int64), rows)
    note = out.names["bands.seg"]
    assert (note["rows"], note["content"], note["meta"]) == (300, to.content, {"buckets": 4, "largest": to.largest})
    inputs = TaskInputs(TaskSpec("k", "m:C", "n", {}), Store(tmp_path), str(tmp_path))
    at = ref(tmp_path / "out.bands.seg")
    assert at["content"] == to.content
    assert SegmentFile.open(inputs.store, at).covers == ("c1", "c2", "c3")
    for bucket in range(4):
        mine = rows[rows["key"] % 4 == bucket]
        wanted = mine[np.argsort(mine["key"], kind="stable")]
        assert inputs.segment(at, bucket).tobytes() == wanted.tobytes()
        merged = np.concatenate(list(itertools.chain(inputs.segments([at, at], bucket))))
        assert merged["key"].tolist() == sorted(wanted["key"].tolist() * 2)


@pytest.mark.parametrize("key", [("key",), ("n", "key"), None], ids=str)
def test_any_number_of_files(tmp_path, key):
    """Far more files than are merged at a time: three levels of merging, numbered files, a key in one block."""
    refs, parts = [], []
    for n in range(29):
        rows = records(60 if n % 5 else 0, seed=n, keys=[40, 3, 1 << 60][n % 3])
        write(tmp_path / f"{n}", rows, np.zeros(len(rows), int), 1, key=key)
        refs.append(ref(tmp_path / f"{n}"))
        parts.append(rows)
    order = {("key",): ["key"], ("n", "key"): ["n", "key"], None: ["key", "place", "score", "n"]}[key]
    every = np.concatenate([p[np.lexsort([p[f] for f in reversed(order)])] for p in parts])
    number = np.repeat(np.arange(29), [len(p) for p in parts])
    sort = np.lexsort([np.arange(len(every)), *[every[f] for f in reversed(order)]])
    (tmp_path / "scratch").mkdir()
    whole = ("key",) if key is None else key[:1]
    blocks = list(merge_segments(Store(tmp_path), refs, 0, MergeLimits(2000, block=300, fan_in=3), whole=whole,
                                 numbered=True, scratch=str(tmp_path / "scratch")))
    found = np.concatenate(blocks)
    assert found["source"].tolist() == number[sort].tolist() or key is None
    for field in RECORD.names:
        assert found[field].tobytes() == every[field][sort].tobytes()
    assert len(blocks) > 1
    ends = [tuple(b[list(whole)][i].tolist() for i in (0, -1)) for b in blocks]
    assert all(a[1] != b[0] for a, b in itertools.pairwise(ends))
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_bucket_ten_times_the_limit_takes_the_memory_of_one(tmp_path):
    """400 files, one bucket of 128 MB in them (12 MB are the limit), a key in a third of its records, at most 32 files
    open: memory stays that of a few blocks. In a process of its own."""
    code = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        import numpy as np
        from pathlib import Path
        from pipeline.engine.worker.attempt import peak_rss_mb
        from pipeline.engine.shuffle.exchange import merge_segments
        from pipeline.engine.shuffle.segment_writer import SegmentWriter
        from pipeline.engine.shuffle.merge import MergeLimits
        from pipeline.store.fs import Store
        from tests.pipeline.test_exchange import ref
        DTYPE = np.dtype([("key", "<u8"), ("payload", "V56")])
        root, n, files = Path({str(tmp_path)!r}), 5000, 400
        refs = []
        for i in range(files):
            rows = np.zeros(n, DTYPE)
            rows["key"] = np.random.default_rng(i % 7).integers(0, 2**63, n)
            rows["key"][::3] = 5
            with SegmentWriter(str(root / f"{{i}}"), DTYPE, 1, key=("key",), memory=8 << 20) as to:
                to.write(np.zeros(n, int), rows)
            refs.append(ref(root / f"{{i}}"))
        before = peak_rss_mb()
        rows, last = 0, -1
        for block in merge_segments(Store(root), refs, 0, MergeLimits(12 << 20, block=16 << 10), numbered=True,
                                    scratch={str(tmp_path)!r}):
            rows += len(block)
            assert int(block["key"][0]) >= last
            last = int(block["key"][-1])
        assert rows == n * files
        print(peak_rss_mb() - before)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=ROOT, capture_output=True,
                         text=True)
    assert float(out.stdout) < 50                        # MB, for 128 MB of records


def test_a_large_index_is_not_read_for_one_bucket(tmp_path, monkeypatch):
    rows = records(3000)
    write(tmp_path / "a", rows, np.arange(3000) * 33, 100_000)
    asked: list[int] = []
    real = Store.read_range
    monkeypatch.setattr(Store, "read_range", lambda self, p, a, b: asked.append(b - a) or real(self, p, a, b))
    for n in (0, 1, 2999):
        asked.clear()
        [found] = merge_segments(Store(tmp_path), [ref(tmp_path / "a")], n * 33)
        assert found.tobytes() == rows[n:n + 1].tobytes()
        assert sum(asked) < 100_000                       # its index has 2.4 MB


def test_a_file_that_was_cut_after_its_commit_is_an_error_not_fewer_records(place):
    """What a power cut or a bad disk may leave: the log's size and the header agree, the bytes are not there."""
    folder, store = place
    rows = records(4000, keys=50)
    for n in range(2):
        write(folder / f"{n}.seg", rows, np.zeros(4000, np.int64), 1, key=("key",))
    refs = [ref(folder / f"{n}.seg") for n in range(2)]
    os.truncate(folder / "1.seg", refs[1]["bytes"] - 100 * RECORD.itemsize)           # on the border of a record
    with pytest.raises(DamagedFile, match=r"1\.seg is (cut short|gone or has another size)"):
        list(merge_segments(store(), refs, 0, MergeLimits(20_000)))
    with pytest.raises(DamagedFile):
        read_segment(store(), refs[1], 0)


@pytest.mark.parametrize("buckets", [1, 7, 3000])
def test_no_flipped_bit_is_read(tmp_path, buckets):
    """A sample of the bits of head, index and records, one after the other: reading all buckets raises DamagedFile, or
    gives the very records (padding, `covers`)."""
    rows = records(200, keys=50)
    to = write(tmp_path / "a", rows, np.arange(200) * 5 % buckets, buckets, key=("key",), covers=["part"])
    at, store = ref(tmp_path / "a"), Store(tmp_path)
    assert at["content"] == to.content
    used = sorted({n * 5 % buckets for n in range(200)})
    wanted = [read_segment(store, at, b).tobytes() for b in used]
    whole = (tmp_path / "a").read_bytes()
    head = 16 + int.from_bytes(whole[8:16], "little")
    some = np.random.default_rng(1).integers(head * 8, len(whole) * 8, 60).tolist()
    seen = 0
    for bit in [*range(0, head * 8, 11), *some]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / "a").write_bytes(data)
        try:
            assert [read_segment(store, at, b).tobytes() for b in used] == wanted
            for b in used[:2]:
                np.concatenate(list(merge_segments(store, [at, at], b, MergeLimits(4000))))
        except DamagedFile:
            seen += 1
    assert seen > 0.5 * len(some)


@pytest.mark.parametrize(("task", "version"), [
    ("stages.dedup.stars:Spread", 1),
    ("stages.dedup.stars:Star", 1),
    ("stages.dedup.stars:Members", 1),
    ("stages.dedup.lsh:BandMap", 2),
    ("stages.dedup.lsh:BandReduce", 2),
    ("stages.dedup.cluster:Clusters", 2),
    ("stages.dedup.exact:ExactMap", 2),
    ("stages.dedup.exact:ExactReduce", 2),
    ("pipeline.passes.sample_text:RankTexts", 2),
    ("pipeline.passes.materialize:ScatterWindows", 1),
])
def test_a_task_that_wrote_the_format_before_has_another_key(task, version):
    """Under the same key a file of that format would be taken for damaged, and its rebuilt one for other content."""
    assert MAGIC == b"TMSEG002" and load(task).version > version
