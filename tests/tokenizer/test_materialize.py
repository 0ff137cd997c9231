"""Materialised rows equal the samples read from the shards in tokens, ends of documents, mask and origin. Memory stays
bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.base.files import sha256
from pipeline.cli.app import run_command
from pipeline.engine.task import TaskSpec
from pipeline.passes.materialize import map_drafts, publish_rows, reduce_drafts
from pipeline.store.records import PartRecord
from stages.barrier import TaskDraft, TaskResult
from tests.tokenizer.test_encode_tasks import Runner
from tests.tokenizer.test_shards import EOS, write_set
from tokenizer.mixture.curriculum import Curriculum, CurriculumError, Order, Phase, Stream, TokenizerRef
from tokenizer.shards.layout import MANIFEST, Manifest, Shard, ShardError, file_name
from tokenizer.shards.reader import ShardSet, loss_mask
from tokenizer.shards.rows import RowSet, pack_bits, read_manifest, unpack_bounds, unpack_loss
from tokenizer.shards.writer import ShardWriter


def published(root, name: str, lengths: list[list[int]], vocab: int, masked: tuple[int, ...] = ()) -> Stream:
    """Write and publish a stream of random documents. `lengths` has the lengths of the documents of each shard. In the
    shards `masked`, half of the tokens count in the loss."""
    rng = np.random.default_rng(sum(map(sum, lengths)))
    folder = root / "shards" / name / "split=train"
    made = write_set(folder, [[rng.integers(4, vocab, n) for n in shard] for shard in lengths], vocab,
                     masked=masked)
    (folder / f"shards-{made.sha256[:16]}.json").write_text((folder / MANIFEST).read_text())
    return Stream(name, f"shards/{name}/split=train", None, made.sha256, None, made.tokens, 0, made.dtype)


def curriculum(streams: list[Stream], vocab: int) -> Curriculum:
    """Return a curriculum of three phases with two sequence lengths. It reads the small stream more than twice."""
    def phase(name, start, samples, sequence, batch, weights):
        return Phase(name, start, samples, samples, sequence, batch, weights, "stable", {}, "repeat")

    made = Curriculum(7, TokenizerRef("t" * 64, vocab, EOS, "t.json"), 32, tuple(streams), (
        phase("a", 0, 60, 16, 4, {"big": 3, "small": 1}), phase("b", 60, 25, 32, 5, {"big": 1, "small": 1}),
        phase("c", 85, 51, 16, 3, {"big": 1, "small": 2})), "")
    made.validate()
    return replace(made, order=Order(made).hash())


@pytest.fixture(params=[300, 70_000], ids=["u16, masks", "u32"])
def setup(request, tmp_path):
    """Two streams. If tokens have two bytes, the small stream has a loss mask in its second shard; every file of rows
    then has samples of both streams, and so a mask."""
    run, rng, masked = Runner(tmp_path), np.random.default_rng(3), (1,) if request.param == 300 else ()
    streams = [published(run.store.local, "big", [[int(x) for x in rng.integers(0, 60, n)] for n in (30, 1, 21)],
                         request.param),
               published(run.store.local, "small", [[5, 90, 0, 0, 31], [7, 9, 12, 40, 1]], request.param, masked)]
    return run, curriculum(streams, request.param)


def materialise(run: Runner, c: Curriculum, format: str, map_bytes: int, file_bytes: int, reverse: bool = False):
    mapping = map_drafts(run.store, c, map_bytes, file_bytes)
    mapped = run(mapping, range(len(mapping))[::-1] if reverse else None)
    drafts = reduce_drafts(c, mapped, format, file_bytes)
    folder = f"runs/r/{format}-{map_bytes}-{file_bytes}"
    made = publish_rows(run.store, folder, c, drafts, run(drafts, range(len(drafts))[::-1] if reverse else None))
    return made, run.store.local / folder


def test_a_driver_that_was_taken_over_shows_no_rows(setup):
    run, c = setup
    mapped = run(map_drafts(run.store, c, 4000, 2000))
    drafts = reduce_drafts(c, mapped, "bytes", 2000)

    def fenced():
        raise ShardError("another driver")

    with pytest.raises(ShardError, match="another driver"):
        publish_rows(run.store, "rows", c, drafts, run(drafts), fenced)
    assert not run.store.exists("rows/rows.json")


def virtual(run: Runner, c: Curriculum):
    sets = [ShardSet(run.store.local / s.train, s.sha256) for s in c.streams]
    at = Order(c).locate(0, c.samples)
    for n in range(c.samples):
        s, w, length = int(at.stream[n]), int(at.window[n]), int(at.sequence[n])
        yield (c.streams[s].name, int(at.epoch[n]), w, length, sets[s].window(w, length), sets[s].bounds(w, length))


def virtual_masks(run: Runner, c: Curriculum) -> list[np.ndarray | None]:
    """Return for each sample which of its targets count, read from the shards. None means that all do."""
    sets = [ShardSet(run.store.local / s.train, s.sha256) for s in c.streams]
    at, found = Order(c).locate(0, c.samples), []
    for s, w, length in zip(at.stream.tolist(), at.window.tolist(), at.sequence.tolist()):
        counts = sets[s].counts(w * length + 1, w * length + length + 1)
        found.append(None if counts is None or counts.all() else counts)
    return found


@pytest.mark.parametrize("format", ["bytes", "parquet"])
def test_row_n_equals_the_virtual_read(setup, format):
    run, c = setup
    made, folder = materialise(run, c, format, 600, 700)
    rows = RowSet(folder)
    assert len(rows) == c.samples == 136
    assert len(made.files) > 6
    crossing, masks = 0, virtual_masks(run, c)
    some = sum(m is not None for m in masks)
    assert some > 10 if c.streams[0].dtype == "uint16" else some == 0
    for n, (stream, epoch, window, length, tokens, bounds) in enumerate(virtual(run, c)):
        row = rows.row(n)
        assert (row.stream, row.epoch, row.window) == (stream, epoch, window)
        assert row.tokens.dtype.name == c.streams[0].dtype
        assert np.array_equal(row.tokens, tokens)
        assert np.array_equal(row.bounds, bounds)
        assert np.array_equal(loss_mask(row.bounds, length), loss_mask(bounds, length))
        assert (row.counts is None) == (masks[n] is None)
        assert masks[n] is None or np.array_equal(row.counts, masks[n])
        crossing += len(bounds) > 1
    assert crossing > 10
    assert Order(c).locate(0, 136).epoch.max() >= 2              # the exchange sends one window to several epochs
    with pytest.raises(IndexError):
        rows.row(136)


def test_files_do_not_follow_the_map_ranges_or_who_was_first(setup):
    run, c = setup
    format = "parquet" if c.streams[0].dtype == "uint16" else "bytes"       # the narrow tokens have a mask
    first, folder = materialise(run, c, format, 600, 700)
    for map_bytes, reverse in ((64, True), (1 << 20, False)):
        again, other = materialise(run, c, format, map_bytes, 700, reverse)
        assert again == first
        for file in first.files:
            for name in file.files.values():
                assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_bytes_are_the_rows_back_to_back(setup):
    run, c = setup
    made, folder = materialise(run, c, "bytes", 600, 700)
    flat = [tokens for *_, tokens, _ in virtual(run, c)]
    for file in made.files:
        got = np.fromfile(folder / file.files["tokens"], np.dtype(made.dtype))
        assert np.array_equal(got, np.concatenate(flat[file.first:file.first + file.rows]))
    masks = virtual_masks(run, c)
    whole = [file for file in made.files if all(m is None for m in masks[file.first:file.first + file.rows])]
    assert whole and [file for file in made.files if "loss" not in file.files] == whole, "no mask, no file"


def test_parquet_is_for_everybody(setup):
    run, c = setup
    made, folder = materialise(run, c, "parquet", 600, 700)
    tables = [pq.read_table(folder / f.files["parquet"]) for f in made.files]
    masked = ["loss"] if c.streams[0].dtype == "uint16" else []
    assert all(t.schema.names == ["sample", "stream", "epoch", "window", "input_ids", "ends", *masked] for t in tables)
    masks = virtual_masks(run, c)
    assert [row.get("loss") for t in tables for row in t.to_pylist()] == [m if m is None else m.tolist() for m in masks]
    assert str(tables[0].schema.field("input_ids").type.value_type) == c.streams[0].dtype
    assert [n for t in tables for n in t["sample"].to_pylist()] == list(range(c.samples))
    for (stream, *_, tokens, bounds), row in zip(virtual(run, c), (r for t in tables for r in t.to_pylist())):
        assert row["stream"] == stream
        assert row["input_ids"] == tokens.tolist()
        assert row["ends"] == bounds.tolist()


def test_another_order_published_into_the_same_folder_replaces_the_rows(setup):
    run, c = setup
    for seed in (7, 8):
        c = replace(c, seed=seed)
        c = replace(c, order=Order(c).hash())
        _, folder = materialise(run, c, "bytes", 600, 700)
        rows = RowSet(folder)
        for n, (*_, tokens, _) in enumerate(virtual(run, c)):
            assert np.array_equal(rows.row(n).tokens, tokens)


def test_a_lost_or_doubled_segment_is_noticed(setup):
    run, c = setup
    mapped = run(map_drafts(run.store, c, 600, 700))
    with pytest.raises(ShardError, match="delivered 0 times instead of once"):
        run(reduce_drafts(c, mapped[1:], "bytes", 700))
    with pytest.raises(ShardError, match="delivered 2 times instead of once"):
        run(reduce_drafts(c, [*mapped, mapped[0]], "bytes", 700))


def test_what_does_not_fit_together_is_refused(setup):
    run, c = setup
    with pytest.raises(CurriculumError, match="would order the samples in another way"):
        map_drafts(run.store, replace(c, order="0" * 32))
    with pytest.raises(ShardError, match="curriculum names is not in the store"):
        map_drafts(run.store, replace(c, streams=(replace(c.streams[0], sha256="e" * 64), c.streams[1])))
    with pytest.raises(ValueError, match="neither bytes nor parquet"):
        reduce_drafts(c, [], "csv")


def test_the_command_writes_a_run_and_the_second_format_reuses_the_exchange(setup, capsys):
    run, c = setup
    store = run.store.local
    (store / "runs" / "r").mkdir(parents=True)
    c.save(store / "runs" / "r" / "curriculum.json")
    shared = ["--store", str(store), "--backend", "inline"]
    for format, tasks in (("bytes", ["scatter", "write"]), ("parquet", ["write"])):
        before = {p.name for p in (store / "objects").glob("*")}
        assert run_command(["materialize", "r", *shared, "--format", format, "--json"]) == 0
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (said["rows"], said["folder"]) == (c.samples, f"runs/r/rows-{format}")
        rows = RowSet(store / said["folder"])
        for n, (stream, _, window, _, tokens, bounds) in enumerate(virtual(run, c)):
            row = rows.row(n)
            assert (row.stream, row.window, row.bounds.tolist()) == (stream, window, bounds.tolist())
            assert np.array_equal(row.tokens, tokens)
        fresh = {p.name for p in (store / "objects").glob("*")} - before
        files = {f.name.split(".", 1)[1].split(".")[0] for k in fresh for f in (store / "objects" / k).glob("*")}
        assert any(f.startswith("phase") for f in files) == ("scatter" in tasks)
    assert run_command(["materialize", "nosuch", *shared]) == 2
    assert "no run 'nosuch'" in capsys.readouterr().err


def test_boundary_bits():
    rng = np.random.default_rng(0)
    for length in (1, 7, 8, 9, 33):
        flags = rng.integers(0, 2, (5, length)).astype(np.uint8)
        bits = pack_bits(flags)
        assert bits.shape == (5, -(-length // 8))
        for f, b in zip(flags, bits):
            assert unpack_bounds(b, length).tolist() == (np.flatnonzero(f) + 1).tolist()
            assert unpack_loss(b, length).tolist() == f.astype(bool).tolist()
    assert loss_mask(np.array([1, 4]), 4).tolist() == [False, True, True, False]


MEMORY = textwrap.dedent("""
    import json, resource, sys
    from pipeline.engine.worker.attempt import run_attempt
    from pipeline.engine.task import CrashCursor, TaskSpec
    from pipeline.store.fs import Store
    import pipeline.passes.materialize, numpy, pyarrow.parquet
    pyarrow.array(numpy.zeros(1))                # imports pandas where it is installed
    pyarrow.set_cpu_count(1)                     # as a worker has it: the stack of a thread counts, and how many there
    pyarrow.set_io_thread_count(1)               # are would follow from cores and from how fast they happen to work
    doc = json.loads(sys.stdin.read())
    used = next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + doc["limit"], used + doc["limit"]))
    print(used + doc["limit"], file=sys.stderr)
    records = [run_attempt(TaskSpec.from_json(s), Store(doc["store"]), "1", CrashCursor(), doc["scratch"])
               for s in doc["specs"]]
    print(json.dumps([r.to_json() for r in records]))
""")


def limited(run: Runner, drafts: list[TaskDraft], limit: int) -> tuple[list[TaskResult], int]:
    """Run tasks in a process that may allocate at most `limit` bytes more than its imports took. Returns (results, the
    limit of all its memory in bytes)."""
    specs = [TaskSpec(f"{d.task[-8:]}{i:032x}", d.task, "t", json.loads(json.dumps(d.args))).to_json()
             for i, d in enumerate(drafts)]
    doc = {"specs": specs, "store": str(run.store.local), "scratch": str(run.root), "limit": limit}
    done = subprocess.run([sys.executable, "-c", MEMORY], input=json.dumps(doc), capture_output=True, text=True,
                          timeout=1200, check=False, env={**os.environ, "OPENBLAS_NUM_THREADS": "1",
                                                              "ARROW_DEFAULT_MEMORY_POOL": "system"})
    assert done.returncode == 0, done.stderr[-3000:]
    records = [PartRecord.from_json(r) for r in json.loads(done.stdout)]
    return ([TaskResult({n: f.ref() for n, f in r.files.items()}, r.counters) for r in records],
            int(done.stderr.split()[0]))


def big_stream(root, tokens: int) -> Stream:
    """Publish a stream of `tokens` two-byte tokens in documents of about 1,000 tokens, without holding it in memory."""
    step = 1 << 20
    rng = np.random.default_rng(0)
    folder = root / "shards" / "big" / "split=train"
    folder.mkdir(parents=True)
    writer = ShardWriter(*(str(folder / n) for n in ("b", "e", "t", "s")), 60_000, EOS)
    drawn = rng.integers(4, 60_000, step, dtype=np.uint16)
    for a in range(0, tokens, step):
        block = np.roll(drawn, a // step)                        # no two windows are alike
        block[1023::1024] = EOS
        docs = step // 1024
        writer.add(block, np.full(docs, 1024), [f"{a + i:032x}" for i in range(docs)], 0, np.arange(docs),
                   np.full(docs, 4096))
    facts = writer.close()
    names, sums = {}, {}
    for kind, name in (("body", "b"), ("ends", "e"), ("table", "t"), ("blocks", "s")):
        sums[kind] = sha256(folder / name)
        names[kind] = file_name(0, kind, sums[kind])
        (folder / name).rename(folder / names[kind])
    made = Manifest("big", "train", "uint16", "t" * 64, 60_000, EOS, facts["tokens"], facts["documents"],
                    facts["text_bytes"], (Shard(index=0, **facts, **names, table_sha256=sums["table"]),))
    made = replace(made, sha256=made.identity())
    (folder / f"shards-{made.sha256[:16]}.json").write_text(made.dumps())
    return Stream("big", "shards/big/split=train", None, made.sha256, None, made.tokens, 0, "uint16")


def out_of_core(tmp_path, allowance: int, size: int, format: str) -> int:
    """Materialise `size` bytes of tokens in processes that may allocate `allowance` bytes more than their imports took.
    Returns the limit of all their memory in bytes."""
    run = Runner(tmp_path)
    stream = big_stream(run.store.local, size // 2)
    samples = (stream.tokens - 1) // 2048
    c = Curriculum(1, TokenizerRef("t" * 64, 60_000, EOS, "t.json"), 2048, (stream,), (
        Phase("p", 0, samples, samples, 2048, 1, {"big": 1}, "stable", {}, "error"),), "")
    c = replace(c, order=Order(c).hash())
    file_bytes = allowance // 4

    mapped, limit = limited(run, map_drafts(run.store, c, size // 2, file_bytes), allowance)
    assert len(mapped) == 2                                      # each reads half of everything
    drafts = reduce_drafts(c, mapped, format, file_bytes)
    written, _ = limited(run, drafts, allowance)
    publish_rows(run.store, "rows", c, drafts, written)
    rows, shards = RowSet(tmp_path / "store" / "rows"), ShardSet(tmp_path / "store" / stream.train, stream.sha256)
    at = Order(c).locate(0, samples)
    for n in [0, 1, samples - 1, *np.random.default_rng(1).integers(0, samples, 200).tolist()]:
        assert np.array_equal(rows.row(n).tokens, shards.window(int(at.window[n]), 2048))
        assert np.array_equal(rows.row(n).bounds, shards.bounds(int(at.window[n]), 2048))
    return limit


@pytest.mark.slow
def test_input_of_ten_times_the_memory_beyond_imports(tmp_path):
    out_of_core(tmp_path, 25 << 20, 256 << 20, "bytes")


@pytest.mark.slow
def test_input_of_ten_times_all_memory_imports_included(tmp_path):
    # interpreter, numpy, pyarrow and pandas take some 120 MB of data; 44 MiB more are allowed
    assert out_of_core(tmp_path, 44 << 20, 1750 << 20, "parquet") * 10 <= 1750 << 20


@pytest.mark.parametrize("rest", [{}, {"streams": [], "files": [{}]}, {"streams": 1, "files": []}, {"else": 1},
                                  {"dtype": "float64"}, {"rows": -1}, {"files": [5]}, {"files": [{"phase": "x"}]},
                                  *({"files": [{"phase": 0, "first": 0, "rows": 1, "sequence": 8, "sha256": {},
                                                "files": {"tokens": name}}]}
                                    for name in ("/etc/passwd", "../a", "a/b", "rows.json", "", ".", "..", "a\\b"))])
def test_a_damaged_list_of_rows_is_an_error_that_names_the_file(rest):
    doc = {"magic": "tokenmill-rows", "version": 1, "format": "bytes", "dtype": "uint16", "order": "", "rows": 0,
           "streams": [], "files": []}
    read_manifest(json.dumps(doc).encode(), "here/rows.json")
    doc |= rest
    if not rest:
        del doc["streams"]
    with pytest.raises(ShardError, match=r"^here/rows\.json: damaged"):
        read_manifest(json.dumps(doc).encode(), "here/rows.json")
