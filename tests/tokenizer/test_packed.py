"""Packed rows: every way to read them gives what a slow reference gives, and damaged files are reported."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from tests.tokenizer.packs import slow_best_fit, slow_rows, slow_sample, write_packing
from tests.tokenizer.test_shards import EOS, write_set
from tests.trainer.synthetic import language, write_shards
from tokenizer.shards import packing as packing_module
from tokenizer.shards.find import window_documents
from tokenizer.shards.layout import ENDS, ShardError
from tokenizer.shards.packed import Packing, file_name
from tokenizer.shards.packing import best_fit, pack, rows_of_block
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify

SIZES = st.lists(st.integers(2, 17), max_size=120)


def split(pieces: np.ndarray, counts: np.ndarray) -> list[list[tuple[int, int]]]:
    rows = np.split(pieces, np.cumsum(counts)[:-1]) if len(counts) else []
    return [[(int(a), int(b)) for a, b in row] for row in rows]


@given(SIZES)
@settings(max_examples=300, deadline=None)
def test_best_fit_decreasing_equals_the_slow_one(sizes):
    assert best_fit(np.array(sizes, np.int64), 17).tolist() == slow_best_fit(sizes, 17)


@given(st.lists(st.integers(1, 60), max_size=80))
@settings(max_examples=300, deadline=None)
def test_rows_equal_the_slow_ones(documents):
    ends = np.cumsum(np.array(documents, np.int64))
    pieces, counts = rows_of_block(np.concatenate(([0], ends[:-1])).astype(np.int64)[:len(ends)], ends, 16)
    assert split(pieces, counts) == slow_rows(documents, 16)


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(20, 200))
@settings(max_examples=100, deadline=None)
def test_every_token_but_the_first_of_a_document_is_a_target_once_and_no_document_that_fits_is_cut(documents, block):
    ends = np.cumsum(documents).astype(ENDS)
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as second:
        patch.setattr(packing_module, "BLOCK_TOKENS", block)
        second.setattr(packing_module, "BLOCK_ROWS", 1)
        rows = packed_file(ends, 16)
    targets = sorted(t for row in rows for start, stop in row for t in range(start + 1, stop))
    begins = {0, *ends.tolist()}
    assert targets == [t for t in range(sum(documents)) if t not in begins]
    pieces = {piece for row in rows for piece in row}
    assert all((end - n, end) in pieces for n, end in zip(documents, ends.tolist()) if 2 <= n <= 17)
    assert all(sum(stop - start for start, stop in row) <= 17 for row in rows)


def packed_file(ends: np.ndarray, longest: int) -> list[list[tuple[int, int]]]:
    """Pack documents into a file of packed rows, and read the file by its description. Returns the pieces of each
    row."""
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        facts = pack(file.name, ends, longest)
        numbers = np.fromfile(file.name, "<u8").astype(np.int64)
    pieces, begins = numbers[:2 * facts["pieces"]].reshape(-1, 2), numbers[2 * facts["pieces"]:]
    assert len(begins) == facts["rows"] + 1 and begins[0] == 0 and begins[-1] == facts["pieces"]
    assert facts["tokens"] == (pieces[:, 1] - pieces[:, 0]).sum() and facts["documents"] == len(ends)
    assert facts["longer"] == int((np.diff(ends.astype(np.int64), prepend=0) > longest + 1).sum())
    return split(pieces, np.diff(begins))


def test_a_hundred_thousand_documents_leave_less_than_a_percent_of_padding(tmp_path):
    rng = np.random.default_rng(0)
    lengths = np.maximum(2, rng.lognormal(6, 1.1, 100_000)).astype(np.int64)
    facts = pack(str(tmp_path / "rows"), np.cumsum(lengths).astype(ENDS), 2048)
    assert 1 - facts["tokens"] / (facts["rows"] * 2049) < 0.01
    assert facts["documents"] == 100_000 and 0 < facts["longer"] == int((lengths > 2049).sum())


@pytest.fixture
def folder(tmp_path):
    """A set of three shards with packed rows. In the last shard, some tokens are no targets."""
    rng = np.random.default_rng(5)
    docs = [rng.integers(4, 300, n) for n in rng.integers(0, 50, 120)]
    write_set(tmp_path, [docs[:60], docs[60:61], docs[61:]], 300, masked=(2,))
    write_packing(tmp_path, 16)
    return tmp_path


def opened(folder) -> ShardSet:
    return ShardSet(folder, packing=Packing.loads((folder / "packed.json").read_bytes(), "packed.json").sha256)


def test_a_row_holds_tokens_boundaries_and_mask_of_its_pieces(folder):
    shards = opened(folder)
    masked = padded = 0
    expected = []
    for number, info in enumerate(shards.manifest.shards):
        ends = np.fromfile(folder / info.ends, ENDS).astype(np.int64)
        offset = shards.offsets[number]
        expected += [[(a + offset, b + offset) for a, b in row]
                     for row in slow_rows(np.diff(ends, prepend=0).tolist(), 16)]
    assert len(shards.packed) == len(expected)
    for row, pieces in enumerate(expected):
        tokens, bounds, counts = shards.packed_row(shards.packed.row(row))
        slow = slow_sample(shards, pieces, 16)
        assert tokens.dtype == shards.dtype and tokens[:-1].tolist() == slow["inputs"]
        counts = np.ones(16, bool) if counts is None else counts
        begins = {int(b) for b in bounds}
        assert begins == {p for p in range(1, 16) if slow["positions"][p] == 0} | (begins & {16})
        assert [int(tokens[i + 1]) if counts[i] and i + 1 not in begins else None for i in range(16)] == slow["targets"]
        masked += bool(not counts.all())
        padded += sum(b - a for a, b in pieces) < 17
    assert masked > padded > 0


def test_documents_of_a_row_are_named_with_their_places_in_it(folder):
    shards = opened(folder)
    shards.manifest = replace(shards.manifest, parts=("a", "b", "c"))
    for row in range(len(shards.packed)):
        tokens, _, _ = shards.packed_row(shards.packed.row(row))
        found = window_documents(shards, row, 16)
        sizes = [d["tokens"][1] - d["tokens"][0] for d in found]
        assert sizes == sorted(sizes, reverse=True) and sum(sizes) <= 17
        for d in found:
            [span] = [s for s in shards.documents(0, shards.tokens) if s.id == d["id"]]
            first, stop = d["tokens"]
            assert d["of"] == span.stop - span.start
            assert tokens[first:stop].tolist() == \
                shards.read(span.start + d["begins"], span.start + d["begins"] + stop - first).tolist()


def test_rows_with_a_token_are_found_from_the_token(folder):
    shards = opened(folder)
    pieces = {row: shards.packed.pieces(row, row + 1)[0].tolist() for row in range(len(shards.packed))}
    rng = np.random.default_rng(1)
    for start in rng.integers(0, shards.tokens, 200).tolist():
        stop = start + int(rng.integers(1, 40))
        slow = [row for row, some in pieces.items() if any(a < stop and b > start for a, b in some)]
        assert shards.packed.rows_with(start, stop).tolist() == slow


def test_verify_reads_the_packed_rows(folder):
    assert verify(folder) == []
    path = next(p for p in folder.iterdir() if p.suffix == ".packed")
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)
    assert any(path.name in line for line in verify(folder))


@pytest.mark.parametrize("damage", ["cut", "longest", "other set"])
def test_verify_names_a_damaged_manifest_of_rows_and_goes_on(folder, damage):
    """The folder has a sound packing, too, of which a file of rows is damaged: this is found as well."""
    packing = Packing.loads((folder / "packed.json").read_bytes(), "packed.json")
    text = packing.dumps()
    damaged = folder / f"packed-{'0' * 16}.json"                              # checked first
    damaged.write_text({"cut": text[:-9], "longest": text.replace(f'"longest": {packing.longest}', '"longest": 15'),
                        "other set": replace(packing, shards="0" * 64).dumps()}[damage])
    [line] = verify(folder)
    assert line.startswith(damaged.name) and "damaged" in line and "\n" not in line
    rows = next(p for p in folder.iterdir() if p.suffix == ".packed")
    rows.write_bytes(rows.read_bytes()[:-8])
    assert [path.name in line for path, line in zip((damaged, rows), verify(folder), strict=True)] == [True, True]


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_file_of_rows_is_named(folder, damage):
    path = sorted(p for p in folder.iterdir() if p.suffix == ".packed")[0]
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-8] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ShardError, match=path.name):
        opened(folder).packed.row(0)


def test_rows_of_another_set_and_manifests_that_were_changed_are_refused(folder):
    packing = Packing.loads((folder / "packed.json").read_bytes(), "packed.json")
    other = replace(packing, shards="0" * 64)
    (folder / other.name).write_text(other.dumps())
    with pytest.raises(ShardError, match="another shard set"):
        ShardSet(folder, packing=other.sha256)
    (folder / packing.name).write_text(packing.dumps().replace(f'"longest": {packing.longest}', '"longest": 15'))
    with pytest.raises(ShardError, match="pinned are"):
        ShardSet(folder, packing=packing.sha256)


@pytest.mark.parametrize("change", [
    lambda doc: doc.update(magic="x"), lambda doc: doc.update(longest="16"), lambda doc: doc.update(more=1),
    lambda doc: doc["files"][0].update(file="../../x.packed"), lambda doc: doc["files"][0].update(rows=-1),
    lambda doc: doc.update(files=3)])
def test_a_manifest_that_is_none_is_refused(folder, change):
    doc = json.loads((folder / "packed.json").read_bytes())
    change(doc)
    with pytest.raises(ShardError, match="there: damaged"):
        Packing.loads(json.dumps(doc).encode(), "there")


def test_impossible_pieces_are_refused(folder):
    shards = opened(folder)
    file = shards.packed.packing.files[0]
    numbers = np.fromfile(folder / file.file, "<u8")
    for place, value in ((1, 10**9), (0, numbers[1]), (2 * file.pieces, 5), (2 * file.pieces + 1, 10**9)):
        wrong = numbers.copy()
        wrong[place] = value
        made = write_numbers(folder, shards, wrong)
        with pytest.raises(ShardError, match="damaged"):
            ShardSet(folder, packing=made.sha256).packed.row(0)
        with pytest.raises(ShardError, match="damaged"):
            ShardSet(folder, packing=made.sha256).packed.pieces(0, 1)


def write_numbers(folder, shards: ShardSet, numbers: np.ndarray) -> Packing:
    """Write other `numbers` as the packed rows of the first shard, with correct checksums. Returns the new packing."""
    import hashlib

    first, *others = shards.packed.packing.files
    digest = hashlib.sha256(numbers.tobytes()).hexdigest()
    made = replace(shards.packed.packing, files=(
        replace(first, file=file_name(first.index, digest), sha256=digest), *others))
    (folder / made.files[0].file).write_bytes(numbers.tobytes())
    (folder / made.name).write_text(made.dumps())
    return made


def test_a_set_of_empty_documents_has_no_rows(tmp_path):
    write_set(tmp_path, [[np.array([], np.int64)] * 5], 300)
    facts = write_packing(tmp_path, 16)
    assert (facts["rows"], facts["filled"]) == (0, 0)
    assert len(opened(tmp_path).packed) == 0
    assert ShardSet(tmp_path).eos == EOS


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:12])])
def test_rows_in_object_storage_that_are_missing_or_cut_are_named(tmp_path, change):
    folder = tmp_path / "shards" / "web" / "split=train"
    write_shards(folder, "web", "train", language(1, 40), 1)
    packing = write_packing(folder, 64)
    shards = ShardSet(folder.relative_to(tmp_path), filesystem=SubTreeFileSystem(str(tmp_path), LocalFileSystem()),
                      packing=packing["sha256"])
    assert shards.packed.row(packing["rows"] - 1)
    [file] = folder.glob("*.packed")
    change(file)
    with pytest.raises(ShardError, match=file.name):
        shards.packed.row(packing["rows"] - 1)
