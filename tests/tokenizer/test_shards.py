"""The shard format: what is written is read back, across shards, and every kind of damage is reported."""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.compiled import has_numba
from pipeline.base.files import sha256
from tokenizer.shards.layout import MANIFEST, TABLE_ROWS, Manifest, Shard, ShardError, file_name, token_dtype
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.sums import BLOCK, SUMS, BlockSummer, damaged_block
from tokenizer.shards.verify import verify
from tokenizer.shards.writer import ShardWriter

EOS = 3
#: without numba and, where it is installed, with it
COMPILED = [False, pytest.param(True, marks=pytest.mark.skipif(not has_numba(), reason="numba is not installed"))]


def write_set(folder: Path, shards: list[list[np.ndarray]], vocab: int, split: str = "train",
              block: int = 7, masked: tuple[int, ...] = ()) -> Manifest:
    """Write a shard set of the given documents (without EOS), a list for each shard. In the shards `masked`, a random
    half of the tokens counts in the loss."""
    folder.mkdir(parents=True, exist_ok=True)
    made, n = [], 0
    for s, docs in enumerate(shards):
        paths = {kind: folder / f"{kind}.{s}" for kind in ("body", "ends", "table", "blocks")}
        if s in masked:
            paths["loss"] = folder / f"loss.{s}"
        writer = ShardWriter(*(str(paths[kind]) for kind in ("body", "ends", "table", "blocks")), vocab, EOS,
                             lambda paths=paths: str(paths["loss"]))
        for a in range(0, len(docs), block):
            some = [np.append(d, EOS).astype(token_dtype(vocab)) for d in docs[a:a + block]]
            counts = np.random.default_rng(a).integers(0, 2, sum(map(len, some))) if s in masked else None
            writer.add(np.concatenate(some), np.array([len(d) for d in some]),
                       [f"{n + i:032x}" for i in range(len(some))], s, np.arange(a, a + len(some)),
                       np.array([4 * len(d) for d in some]), counts)
            n += len(some)
        facts = writer.close()
        sums = {kind: sha256(path) for kind, path in paths.items()}
        names = {kind: file_name(s, kind, sums[kind]) for kind in paths}
        for kind, path in paths.items():
            path.rename(folder / names[kind])
        made.append(Shard(index=s, **facts, **names, table_sha256=sums["table"]))
    found = Manifest("web", split, token_dtype(vocab).name, "t" * 64, vocab, EOS, sum(s.tokens for s in made),
                     sum(s.documents for s in made), sum(s.text_bytes for s in made), tuple(made), ("k1",))
    found = replace(found, sha256=found.identity())
    (folder / MANIFEST).write_text(found.dumps())
    return found


def some_documents(rng: np.random.Generator, n: int, vocab: int, longest: int = 40) -> list[np.ndarray]:
    docs = [rng.integers(4, vocab, rng.integers(0, longest)) for _ in range(n)]
    docs[0] = np.array([vocab - 1, 4, vocab - 1])               # the largest id is written and read
    return docs


@pytest.mark.parametrize("vocab", [300, 65536, 65537, 200_000])
def test_round_trip_of_tokens_windows_bounds_and_documents(tmp_path, vocab):
    rng = np.random.default_rng(vocab)
    docs = some_documents(rng, 90, vocab)
    write_set(tmp_path, [docs[:40], docs[40:41], docs[41:]], vocab)
    shards = ShardSet(tmp_path)
    flat = np.concatenate([np.append(d, EOS) for d in docs])
    ends = np.cumsum([len(d) + 1 for d in docs])
    assert shards.dtype == (np.uint16 if vocab <= 65536 else np.uint32)
    assert shards.tokens == len(shards) == len(flat)
    assert np.array_equal(shards.read(0, len(flat)), flat)
    for length in (1, 8, 13, 64, len(flat) - 1):
        assert shards.windows(length) == (len(flat) - 1) // length
        for w in range(shards.windows(length)):
            got = shards.window(w, length)
            assert got.dtype == shards.dtype
            assert np.array_equal(got, flat[w * length:w * length + length + 1])
            inside = ends[(ends > w * length) & (ends <= w * length + length)] - w * length
            assert np.array_equal(shards.bounds(w, length), inside)
            if w:                                               # one token is shared, so that each is a target once
                assert got[0] == shards.window(w - 1, length)[-1]
    for a, b in ((0, 1), (0, len(flat)), (int(ends[39]) - 1, int(ends[39]) + 1), (int(ends[40]), int(ends[40]) + 3)):
        spans = shards.documents(a, b)
        first, last = np.searchsorted(ends, a, "right"), np.searchsorted(ends, b - 1, "right")
        assert [s.id for s in spans] == [f"{i:032x}" for i in range(first, last + 1)]
        for i, s in zip(range(first, last + 1), spans):
            assert (s.start, s.stop) == (int(ends[i]) - len(docs[i]) - 1, int(ends[i]))
            assert s.n_bytes == 4 * (len(docs[i]) + 1)
    assert verify(tmp_path) == []


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 20))
def test_bytes_do_not_follow_the_block_size(tmp_path_factory, lengths, block, other):
    rng = np.random.default_rng(1)
    docs = [rng.integers(4, 99, n) for n in lengths]
    a = write_set(tmp_path_factory.mktemp("a"), [docs], 99, block=block)
    b = write_set(tmp_path_factory.mktemp("b"), [docs], 99, block=other)
    assert asdict(a) == asdict(b)


def test_table_has_fixed_row_groups_and_the_columns_of_the_contract(tmp_path):
    docs = [np.array([5])] * (TABLE_ROWS + 10)
    made = write_set(tmp_path, [docs], 99, block=1000)
    table = pq.ParquetFile(tmp_path / made.shards[0].table)
    assert [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)] == [TABLE_ROWS, 10]
    assert table.schema_arrow.names == ["end", "id", "part", "row", "n_bytes"]
    spans = ShardSet(tmp_path).documents(2 * TABLE_ROWS - 3, 2 * TABLE_ROWS + 3)
    assert [s.row for s in spans] == list(range(TABLE_ROWS - 2, TABLE_ROWS + 2))
    assert np.array_equal(np.fromfile(tmp_path / made.shards[0].ends, "<u8"), table.read(["end"])["end"].to_numpy())


def test_an_empty_set_is_readable(tmp_path):
    write_set(tmp_path, [], 99, "val")
    shards = ShardSet(tmp_path)
    assert (shards.tokens, shards.windows(8), shards.documents(0, 5)) == (0, 0, [])
    assert shards.ends(0, 10).tolist() == []
    assert verify(tmp_path) == []
    with pytest.raises(IndexError):
        shards.window(0, 8)


def test_the_pinned_set_is_the_one_that_is_read(tmp_path):
    old = write_set(tmp_path, [[np.array([5, 6])]], 99)
    (tmp_path / MANIFEST).rename(tmp_path / f"shards-{old.sha256[:16]}.json")
    new = write_set(tmp_path, [[np.array([7, 8, 9])]], 99)
    assert ShardSet(tmp_path).sha256 == new.sha256 != old.sha256
    assert ShardSet(tmp_path, new.sha256).read(0, 2).tolist() == [7, 8]
    assert ShardSet(tmp_path, old.sha256).read(0, 2).tolist() == [5, 6]
    assert verify(tmp_path, old.sha256) == []
    with pytest.raises(ShardError, match="pinned is ffff"):
        ShardSet(tmp_path, "f" * 64)


def test_a_set_may_have_more_shards_than_a_process_may_open_files(tmp_path):
    """A corpus of 1 TB is a thousand shards with three files each; 1,024 open files is what most systems begin with.
    Where the shards just fit, a checkpoint and its connections have to, too."""
    docs = [np.array([4, 5, 6, 7])] * 2
    write_set(tmp_path / "s", [docs] * 60, 100)
    code = f"""
import resource, sys
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.layout import ShardError
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for soft, hard in ((140, hard), (50, hard), (50, 50)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    shards = ShardSet({str(tmp_path / "s")!r})
    try:
        shards.prefetch([(0, len(shards))])
    except ShardError as error:
        sys.exit(f"{{soft, hard}}: {{error}}")
    tokens, ends = shards.read(0, len(shards)), shards.ends(0, len(shards) + 1)
    assert tokens.tolist() == [4, 5, 6, 7, 3] * 120 and len(ends) == 120
    others = [open({__file__!r}) for _ in range(20)]
    del shards, others
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    if sys.version_info < (3, 13):
        assert done.returncode == 1 and done.stderr.startswith("(50, 50): "), done.stderr
        assert "raise the limit (ulimit -n)" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOMEM, "raise the limit (vm.max_map_count)"),
                                                (errno.EACCES, "missing (Permission denied)")])
def test_a_file_that_cannot_be_mapped_says_why(tmp_path, monkeypatch, number, remedy):
    def refused(*_, **__):
        raise OSError(number, os.strerror(number))

    write_set(tmp_path / "s", [[np.array([4, 5])]], 100)
    monkeypatch.setattr("tokenizer.shards.mapped.mmap.mmap", refused)
    with pytest.raises(ShardError, match=re.escape(remedy)):
        ShardSet(tmp_path / "s").read(0, 2)


def test_what_is_read_ahead_is_what_was_named_and_no_more(tmp_path, monkeypatch):
    asked = []

    class Map(mmap.mmap):
        def madvise(self, option, start, length):
            asked.append((option, start, length))

    monkeypatch.setattr("tokenizer.shards.mapped.mmap.mmap", Map)
    rng = np.random.default_rng(0)
    write_set(tmp_path / "s", [[rng.integers(4, 99, 3999)], [rng.integers(4, 99, 5999)]], 1000)
    shards, page = ShardSet(tmp_path / "s"), mmap.PAGESIZE
    shards.prefetch([(3000, 4001)])
    first = 6000 // page * page
    assert asked == [(mmap.MADV_WILLNEED, first, 8000 - first), (mmap.MADV_WILLNEED, 0, 2)]


def test_identity_covers_tokens_boundaries_and_ids_but_not_places(tmp_path):
    made = write_set(tmp_path, [[np.array([5, 6])]], 99)
    shard = made.shards[0]
    for change in ({"sha256": "0" * 64}, {"ends_sha256": "0" * 64}, {"ids_sha256": "0" * 64}, {"index": 9}):
        assert replace(made, shards=(replace(shard, **change),)).identity() != made.sha256
    assert replace(made, shards=(replace(shard, table_sha256="0" * 64),), parts=("k7",)).identity() == made.sha256


def _damage(folder: Path, name: str, how) -> None:
    data = bytearray((folder / name).read_bytes())
    (folder / name).write_bytes(how(data))


def _flip(data: bytearray) -> bytes:
    data[len(data) // 2] ^= 1
    return bytes(data)


def test_verify_names_every_kind_of_damage(tmp_path):
    docs = some_documents(np.random.default_rng(0), 30, 99)

    def fresh(name):
        folder = tmp_path / name
        return folder, write_set(folder, [docs], 999).shards[0]

    folder, shard = fresh("flip")
    _damage(folder, shard.body, _flip)
    assert f"{shard.body}: sha256 differs" in verify(folder)[0]
    folder, shard = fresh("cut")
    _damage(folder, shard.body, lambda d: bytes(d[:-2]))
    assert any("bytes, the manifest says" in line for line in verify(folder))
    with pytest.raises(ShardError, match="damaged"):
        ShardSet(folder).window(0, 4)
    folder, shard = fresh("gone")
    (folder / shard.table).unlink()
    assert any("cannot be read" in line for line in verify(folder))
    folder, shard = fresh("eos")
    tokens = np.fromfile(folder / shard.body, "<u2")
    tokens[np.fromfile(folder / shard.ends, "<u8").astype(int)[4] - 1] = 9
    tokens.tofile(folder / shard.body)
    assert any("document 4 does not end in EOS" in line for line in verify(folder))
    folder, shard = fresh("ends")
    ends = np.fromfile(folder / shard.ends, "<u8")
    ends[3] = ends[4]
    ends.tofile(folder / shard.ends)
    assert any("ends do not increase" in line for line in verify(folder))
    folder, shard = fresh("vocab")
    tokens = np.fromfile(folder / shard.body, "<u2")
    tokens[0] = 4000
    tokens.tofile(folder / shard.body)
    assert any("token id 4000 is outside the vocabulary" in line for line in verify(folder))
    folder, shard = fresh("manifest")
    doc = json.loads((folder / MANIFEST).read_text())
    doc["eos"] = 4
    (folder / MANIFEST).write_text(json.dumps(doc))
    with pytest.raises(ShardError, match="edited by hand"):
        verify(folder)
    for key, value, message in (("documents", 31, "do not add up to 31 documents"),
                                ("text_bytes", 1, "do not add up to 1 text_bytes")):
        folder, _ = fresh(key)
        doc = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**doc, key: value}))
        with pytest.raises(ShardError, match=message):
            verify(folder)
    folder, shard = fresh("name")                                # a manifest from elsewhere opens no other file
    doc = json.loads((folder / MANIFEST).read_text())
    doc["shards"][0]["table"] = "../../secret.parquet"
    (folder / MANIFEST).write_text(json.dumps(doc))
    with pytest.raises(ShardError, match="is no name of shard 0's table"):
        verify(folder)
    with pytest.raises(ShardError, match="no shard set there"):
        ShardSet(tmp_path / "nowhere")


def test_a_manifest_of_another_version_names_itself_and_the_remedy(tmp_path):
    write_set(tmp_path, [[np.array([5, 6])]], 99)
    path = tmp_path / MANIFEST
    doc = json.loads(path.read_text())
    sums = ("blocks", "blocks_sha256")
    older = {**doc, "shards": [{k: v for k, v in s.items() if k not in sums} for s in doc["shards"]]}
    for other, difference in ((older, "lacks 'blocks', lacks 'blocks_sha256' of a shard"),
                              ({**doc, "shards": [{**doc["shards"][0], "sketch": 1}]}, "has 'sketch' of a shard"),
                              ({**doc, "codec": "zstd"}, "has 'codec'"),
                              ({k: v for k, v in doc.items() if k != "eos"}, "lacks 'eos'")):
        path.write_text(json.dumps(other))
        with pytest.raises(ShardError) as error:
            ShardSet(tmp_path)
        assert str(error.value) == (f"{path}: written by another version of Tokenmill ({difference}); run the recipe "
                                    f"again")
    for damaged in ({**doc, "shards": 3}, {**doc, "shards": [4]}, {**doc, "parts": None}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(ShardError, match=rf"^{path}: damaged \(.*\): run `tokenmill store verify --repair`"):
            ShardSet(tmp_path)


@pytest.mark.parametrize(("key", "value"), [
    ("vocab_size", "99"), ("vocab_size", 0), ("eos", True), ("eos", -1), ("eos", 99), ("source", []), ("split", None),
    ("tokens", 10**30), ("parts", "ab"), ("parts", [5]), ("shards", {}), ("shards", ["x"]), ("shards[0].index", "0"),
    ("shards[0].tokens", 3.0), ("shards[0].documents", -1), ("shards[0].loss", None)])
def test_a_wrong_value_in_a_manifest_is_refused_although_its_sha256_is_right(tmp_path, key, value):
    manifest = write_set(tmp_path, [[np.array([5, 6])]], 99)
    doc = json.loads(manifest.dumps())
    if key.startswith("shards["):
        doc["shards"][0][key.split(".")[1]] = value
        manifest = replace(manifest, shards=(Shard(**doc["shards"][0]),))
    else:
        doc[key] = value
        manifest = manifest if key == "shards" else replace(manifest, **{key: value})
    text = json.dumps({**doc, "sha256": manifest.identity()})
    with pytest.raises(ShardError, match=rf"^here/shards\.json: .*({re.escape(key)} |of a vocabulary of 0)"):
        Manifest.loads(text, "here/shards.json")


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_no_json_is_refused(data):
    with pytest.raises(ShardError, match=r"^here/shards.json: not JSON"):
        Manifest.loads(data, "here/shards.json")


@pytest.mark.parametrize("kind", ["body", "table"])
def test_a_file_that_is_gone_has_one_remedy(tmp_path, kind):
    shard = write_set(tmp_path, [[np.array([5, 6])]], 99).shards[0]
    (tmp_path / getattr(shard, kind)).unlink()
    shards = ShardSet(tmp_path)
    with pytest.raises(ShardError, match=r"missing.*: run `tokenmill store verify --repair` on its store, then the "):
        shards.body(0) if kind == "body" else shards.documents(0, 3)


def test_the_writer_refuses_documents_without_eos(tmp_path):
    writer = ShardWriter(*(str(tmp_path / n) for n in "bets"), 99, EOS)
    with pytest.raises(ShardError, match="does not end in EOS"):
        writer.add(np.array([5, 6]), np.array([2]), ["x"], 0, np.array([0]), np.array([4]))
    with pytest.raises(ShardError, match="do not make documents"):
        writer.add(np.array([5, EOS]), np.array([3]), ["x"], 0, np.array([0]), np.array([4]))


def test_no_damaged_block_of_a_shard_is_read(tmp_path):
    """One bit of a file that is read by range, or of the sums, is flipped: no window, with its bounds and its mask, is
    other than it was written, and one of them is an error that names the file."""
    rng = np.random.default_rng(7)
    shards = [some_documents(rng, 400, 60_000) for _ in range(2)]
    found = write_set(tmp_path / "s", shards, 60_000, masked=(1,))
    length = 64

    def read():
        got = ShardSet(tmp_path / "s")
        for w in range(got.windows(length)):
            yield got.window(w, length), got.bounds(w, length), got.counts(w * length, w * length + length + 1)

    def compare():
        for got, want in zip(read(), wanted, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(got, want))

    wanted = list(read())
    files = [getattr(s, kind) for s in found.shards for kind in ("body", "ends", "blocks", "loss") if getattr(s, kind)]
    assert len(files) == 7
    for name in files:
        path = tmp_path / "s" / name
        whole = path.read_bytes()
        for bit in rng.integers(0, len(whole) * 8, 12).tolist():
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            with pytest.raises(ShardError, match=re.escape(str(path))):
                compare()
        path.write_bytes(whole)
    compare()


@pytest.mark.parametrize("step", [1, 1000, 4096, 100_000])
def test_block_sums_do_not_depend_on_how_a_file_is_written(step):
    data = np.random.default_rng(0).bytes(3 * BLOCK + 17)
    summer = BlockSummer()
    for a in range(0, len(data), step):
        summer.update(data[a:a + step])
    sums = np.frombuffer(summer.finish(), SUMS).tolist()
    assert sums == [zlib.crc32(data[a:a + BLOCK]) for a in range(0, len(data), BLOCK)]
    assert damaged_block(memoryview(data), 0, sums) is None
    assert damaged_block(memoryview(data)[BLOCK:], 1, [*sums[1:3], 0]) == 3


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_block_of_document_ends_is_checked_once_and_a_block_of_tokens_whenever_it_is_read(tmp_path, monkeypatch,
                                                                                            compiled):
    write_set(tmp_path / "s", [some_documents(np.random.default_rng(7), 1200, 60_000)], 60_000)
    shards, sums = ShardSet(tmp_path / "s"), []
    monkeypatch.setattr("tokenizer.shards.sums.zlib.crc32", lambda data: sums.append(bytes(data)) or crc32(data))
    info = shards.manifest.shards[0]
    ends, body = ((tmp_path / "s" / name).read_bytes() for name in (info.ends, info.body))
    for _ in range(3):
        count = shards.windows(64)
        shards.samples(range(count), 64, np.empty((count, 65), shards.dtype), np.arange(count), compiled)
    read = Counter(sums)
    assert all(read[ends[i:i + BLOCK]] == 1 for i in range(0, len(ends), BLOCK)) and len(ends) > 2 * BLOCK
    assert all(read[body[i:i + BLOCK]] >= 3 for i in range(0, 128 * shards.windows(64), BLOCK))


@pytest.mark.parametrize("compiled", COMPILED)
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_many_windows_equal_those_that_are_read_one_by_one(tmp_path_factory, compiled, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    folder = tmp_path_factory.mktemp("set")
    docs = some_documents(rng, 60, 300)
    cuts = sorted({0, 60, *data.draw(st.sets(st.integers(1, 59), max_size=3))})
    write_set(folder, [docs[a:b] for a, b in itertools.pairwise(cuts)], 300)
    shards, length = ShardSet(folder), data.draw(st.integers(1, 70))
    windows = data.draw(st.lists(st.integers(0, shards.windows(length) - 1), max_size=60))
    tokens, rows = np.zeros((100, length + 1), shards.dtype), rng.permutation(100)[:len(windows)]
    seen = []
    for bounds in shards.samples(windows, length, tokens, rows, compiled):
        pieces = np.split(bounds.positions, np.cumsum(bounds.counts)[:-1]) if len(bounds.counts) else []
        for row, positions in zip(bounds.rows.tolist(), pieces, strict=True):
            seen.append(row)
            w = windows[rows.tolist().index(row)]
            assert np.array_equal(tokens[row], shards.window(w, length))
            assert positions.tolist() == shards.bounds(w, length).tolist()
    assert sorted(seen) == sorted(rows.tolist()) and not tokens[[r for r in range(100) if r not in seen]].any()


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("kind", ["body", "ends"])
def test_damage_is_found_when_many_windows_are_read(tmp_path, kind, compiled):
    write_set(tmp_path / "s", [some_documents(np.random.default_rng(7), 1200, 60_000)], 60_000)
    info = ShardSet(tmp_path / "s").manifest.shards[0]
    path = tmp_path / "s" / getattr(info, kind)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    shards = ShardSet(tmp_path / "s")
    count = shards.windows(64)
    with pytest.raises(ShardError, match=f"{path.name}: damaged at byte"):
        shards.samples(range(count), 64, np.empty((count, 65), shards.dtype), np.arange(count), compiled)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("wrong", [-1, "last", 10**6])
def test_a_window_that_is_none_is_refused_among_many(tmp_path, wrong, compiled):
    write_set(tmp_path / "s", [some_documents(np.random.default_rng(7), 60, 300)], 300)
    shards = ShardSet(tmp_path / "s")
    windows = [*range(9), shards.windows(16) if wrong == "last" else wrong]
    with pytest.raises(IndexError):
        shards.samples(windows, 16, np.empty((10, 17), shards.dtype), np.arange(10), compiled)
