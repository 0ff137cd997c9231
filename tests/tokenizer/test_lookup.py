"""The lookup index of a shard set, compared with a search of all documents."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.domain import domain_of
from pipeline.base.parquet import open_parquet, write_table
from tokenizer.imports.assemble import Assembly
from tokenizer.imports.documents import ImportedDocuments
from tokenizer.shards.find import places
from tokenizer.shards.index_writer import EntrySorter, hex_keys, write_index
from tokenizer.shards.layout import MANIFEST, Manifest, ShardError
from tokenizer.shards.lookup import (
    HEADER,
    PAGE,
    U64,
    Lookup,
    by_id,
    by_text,
    checksum,
    key_of,
    key_of_id,
    name_of,
    sealed,
)
from tokenizer.shards.reader import ShardSet

#: documents: more than a row group of a document table, and more than a page of the index
COUNT = 90_000


def url_of(number: int) -> str | None:
    """Return the URL of a document. A few domains have nearly all documents; some documents have no URL, and some share
    one."""
    if number % 17 == 0:
        return None
    host = "www.Big.example" if number % 3 else f"h{number % 5000}.example.org"
    return f"https://{host}/{number - number % 2}"


def make_set(top: Path, ids: list[str], urls: list[str | None], part_rows: int = 9000) -> tuple[ShardSet, Any]:
    """Write a shard set of documents with one to four tokens, and the parts that hold their URLs. Returns the set, and
    the list [(dataset, {key of a part: its path})]."""
    folder = top / "set"
    folder.mkdir(parents=True)
    assembly = Assembly(folder, 300, 0, 400_000)
    paths = {}
    for part, first in enumerate(range(0, len(ids), part_rows)):
        here = ids[first:first + part_rows]
        lengths = np.array([1 + (first + i) % 4 for i in range(len(here))], np.int64)
        tokens = np.ones(int(lengths.sum()), np.uint16)
        tokens[np.cumsum(lengths) - 1] = 0
        assembly.add(ImportedDocuments("", 0, tokens, lengths, None, None), here, part, np.ones(len(here), bool))
        paths[f"{part:032x}"] = str(top / f"part-{part}.parquet")
        write_table(pa.table({"id": here, "url": pa.array(urls[first:first + part_rows], pa.string())}),
                    paths[f"{part:032x}"], row_group_size=1000)
    manifest = Manifest.of("web", "train", "0" * 64, 300, 0, assembly.close(), tuple(paths))
    (folder / MANIFEST).write_text(manifest.dumps())
    return ShardSet(folder), [("data", paths)]


@contextlib.contextmanager
def open_part(path: str) -> Iterator[pq.ParquetFile]:
    with open_parquet(path) as file:
        yield file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardSet, Path, list[str], list[str | None]]:
    ids = [hashlib.sha256(str(i).encode()).hexdigest()[:32] for i in range(COUNT)]
    urls = [url_of(i) for i in range(COUNT)]
    shards, datasets = make_set(tmp_path_factory.mktemp("lookup"), ids, urls)
    return shards, write_index(shards, shards.folder, datasets, open_part), ids, urls


@contextlib.contextmanager
def opened(shards: ShardSet, path: Path) -> Iterator[Lookup]:
    with open(path, "rb") as file:
        yield Lookup(file, shards.manifest, str(path))


def test_every_id_url_and_domain_is_found_and_nothing_else(made):
    shards, path, ids, urls = made
    expected: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in ("id", "url", "domain")}
    for number, (id, url) in enumerate(zip(ids, urls, strict=True)):
        expected["id"][id].append(number)
        if url:
            expected["url"][url].append(number)
            expected["domain"][domain_of(url)].append(number)
    rng = random.Random(1)
    with opened(shards, path) as lookup:
        for column, numbers in expected.items():
            key = key_of_id if column == "id" else key_of
            chosen = list(numbers) if column == "domain" else rng.sample(sorted(numbers), 400)
            assert all(list(lookup.numbers(column, key(text), key(text))) == numbers[text] for text in chosen)
            assert sorted(lookup.numbers(column, 0, 2**64 - 1)) == sorted(n for of in numbers.values() for n in of)
            for absent in ("https://example.org/nosuch", "big.example.", "0" * 32, "0" * 31, ""):
                assert not list(lookup.numbers(column, key(absent), key(absent)))


def test_places_are_those_of_the_scan(made):
    shards, path, ids, _ = made
    assert [info.documents > 65_536 for info in shards.manifest.shards] == [True, False]
    with opened(shards, path) as lookup:
        for id in (ids[0], ids[-1], ids[65_535], ids[65_536], ids[40_000], ids[7][:6], ids[9][:3], "ffffffffffff", "zz",
                   ids[0] + "0"):
            hits = by_id(shards, lookup, id)
            assert hits is not None
            assert sorted(hits, key=lambda p: p["start"]) == list(places(shards, id)), id
        hits = list(by_text(shards, lookup, "url", "https://www.Big.example/40"))
        assert [hit["id"] for hit in hits] == [ids[40], ids[41]]
        [place] = places(shards, ids[41])
        assert hits[1] == place
        assert next(by_text(shards, lookup, "domain", "big.example"))["id"] == ids[1]


@pytest.mark.parametrize("run", [1000, 4096, 1 << 20])
def test_the_bytes_do_not_depend_on_the_memory_or_the_size_of_parts(made, tmp_path, run):
    shards, path, ids, urls = made
    other, datasets = make_set(tmp_path, ids, urls, part_rows=23_456)
    assert other.manifest.sha256 == shards.manifest.sha256
    again = write_index(other, other.folder, datasets, open_part, run)
    assert again.name == path.name == name_of(shards.sha256) and again.read_bytes() == path.read_bytes()
    assert sorted(p.name for p in other.folder.iterdir() if p.name.startswith((".", "tmp"))) == []


class CountedFile(io.FileIO):
    """A file that counts how often it is read."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        CountedFile.reads += 1
        return super().read(-1 if size is None else size) or b""

    def readinto(self, buffer: Any, /) -> int:
        CountedFile.reads += 1
        return super().readinto(buffer) or 0


class CountedSet(ShardSet):
    @contextlib.contextmanager
    def table(self, shard: int) -> Iterator[pq.ParquetFile]:
        with CountedFile(self.folder / self.manifest.shards[shard].table) as file, open_parquet(file) as table:
            yield table


def test_a_lookup_takes_at_most_eight_reads(made):
    shards, path, ids, _ = made
    most = 0
    for number in (1, 16_384, 40_000, 65_536, COUNT - 1):
        for column in ("id", "url"):
            CountedFile.reads = 0
            with CountedFile(path) as file:
                lookup = Lookup(file, shards.manifest, str(path))
                counted = CountedSet(shards.folder)
                hits = by_id(counted, lookup, ids[number]) if column == "id" else \
                    by_text(counted, lookup, column, url_of(number) or "")
                assert ids[number] in [hit["id"] for hit in hits or ()] or url_of(number) is None
            most = max(most, CountedFile.reads)
    assert 4 <= most <= 8


def read_everything(shards: ShardSet, path: Path) -> None:
    with opened(shards, path) as lookup:
        for column in ("id", "url", "domain"):
            list(lookup.numbers(column, 0, 2**64 - 1))


def test_damage_anywhere_that_is_read_is_an_error(made, tmp_path):
    shards, path, _, _ = made
    data = bytearray(path.read_bytes())
    rng = random.Random(2)
    copy = tmp_path / path.name
    for place in (5, 70, HEADER - 1, HEADER, HEADER + 16 * PAGE, len(data) - 1, *rng.sample(range(len(data)), 20)):
        data[place] ^= 1
        copy.write_bytes(data)
        with pytest.raises(ShardError, match="damaged"):
            read_everything(shards, copy)
        data[place] ^= 1
    for size in (0, 100, HEADER, HEADER + 1000, len(data) - 1):
        copy.write_bytes(data[:size])
        with pytest.raises(ShardError, match="damaged"):
            read_everything(shards, copy)


@pytest.mark.parametrize(("change", "problem"), [
    (lambda header: header.update(page=10**15), "damaged"), (lambda header: header.update(page=1), "damaged"),
    (lambda header: header["columns"]["id"]["levels"][0].__setitem__(1, 10**15), "damaged"),
    (lambda header: header["columns"]["id"]["levels"][0].__setitem__(0, -16), "damaged"),
    (lambda header: header.update(columns=[]), "damaged"), (lambda header: header.pop("page"), "damaged"),
    (lambda header: header["columns"]["id"]["levels"].append(header["columns"]["id"]["levels"][-1]), "damaged")])
def test_an_index_with_impossible_levels_is_refused_before_it_is_searched(made, tmp_path, change, problem):
    shards, path, _, _ = made
    data = path.read_bytes()
    header = json.loads(data[65:HEADER])
    change(header)
    copy = tmp_path / path.name
    copy.write_bytes(sealed(header) + data[HEADER:])
    with pytest.raises(ShardError, match=problem):
        opened(shards, copy).__enter__()


def test_an_index_that_names_documents_beyond_the_set_is_refused(tmp_path):
    shards, datasets = make_set(tmp_path, [f"{i:032x}" for i in range(50)], [None] * 50)
    path = write_index(shards, shards.folder, datasets, open_part)
    header = json.loads(path.read_bytes()[65:HEADER])
    page = np.array([[0, 50]], U64).tobytes()
    header["columns"]["id"] = {"levels": [[HEADER, 1]], "root": checksum(page)}
    path.write_bytes(sealed(header) + page)
    with opened(shards, path) as lookup, pytest.raises(ShardError, match="does not have"):
        list(by_id(shards, lookup, "0" * 32) or ())


def test_an_index_of_another_set_is_refused(made, tmp_path):
    _, path, ids, urls = made
    other, _ = make_set(tmp_path, ids[:10], urls[:10])
    with pytest.raises(ShardError, match="another shard set"), opened(other, path):
        pass


def test_a_part_that_is_missing_or_was_changed_is_named(made, tmp_path):
    _, _, ids, urls = made
    shards, [(name, paths)] = make_set(tmp_path, ids[:3000], urls[:3000], part_rows=1000)
    key = f"{1:032x}"
    with pytest.raises(ShardError, match=key):
        write_index(shards, shards.folder, [(name, {k: p for k, p in paths.items() if k != key})], open_part)
    write_table(pa.table({"id": ids[:1000], "url": urls[:1000]}), paths[key])
    with pytest.raises(ShardError, match=key):
        write_index(shards, shards.folder, [(name, paths)], open_part)
    assert not list(shards.folder.glob("*lookup*"))


def test_ids_that_are_no_hex_digits(tmp_path):
    ids = [f"doc-{i}" for i in range(50)] + ["ä" * 20, "A" * 32]
    shards, datasets = make_set(tmp_path, ids, [None] * len(ids))
    path = write_index(shards, shards.folder, datasets, open_part)
    with opened(shards, path) as lookup:
        for id in ids:
            assert [place["id"] for place in by_id(shards, lookup, id) or ()] == [id]
        assert by_id(shards, lookup, "doc-") is None             # a beginning: the caller has to scan
        assert not list(lookup.numbers("url", 0, 2**64 - 1))


@given(st.lists(st.text("0123456789abcdefG ", min_size=30, max_size=33)))
def test_keys_of_many_ids_are_those_of_single_ids(ids):
    keys = hex_keys(ids)
    assert (keys is None) == any(len(id) != 32 or set(id) - set("0123456789abcdef") for id in ids)
    assert keys is None or keys.tolist() == [key_of_id(id) for id in ids]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 6) | st.integers(0, 2**64 - 1), max_size=40)), st.integers(1, 30))
def test_entries_are_sorted_stably_in_any_memory(tmp_path_factory, blocks, run):
    with EntrySorter(tmp_path_factory.getbasetemp(), run) as sorter:
        first = 0
        for block in blocks:
            sorter.add(np.array(block, U64), np.arange(first, first + len(block), dtype=U64))
            first += len(block)
        out = list(sorter.sorted())
    keys = [key for block in blocks for key in block]
    assert [tuple(entry) for block in out for entry in block.tolist()] == sorted(
        (key, number) for number, key in enumerate(keys))
    assert all(len(block) <= 2 * max(run, *map(len, blocks)) for block in out)


@pytest.mark.parametrize("page", [2, 7, 16])
def test_trees_of_many_levels_whose_pages_are_full_of_one_key(tmp_path, page):
    ids = [f"{i // 50:032x}"[-8:] * 4 for i in range(900)]         # fifty documents with the same first digits
    urls = [f"https://{'a' if i % 9 else i % 4}.example/" for i in range(900)]
    shards, datasets = make_set(tmp_path, ids, urls, part_rows=100)
    path = write_index(shards, shards.folder, datasets, open_part, 64, page)
    with opened(shards, path) as lookup:
        for url in {*urls, "https://b.example/"}:
            assert list(lookup.numbers("url", key_of(url), key_of(url))) == [i for i in range(900) if urls[i] == url]
        for id in {*ids, "f" * 32}:
            hits = by_id(shards, lookup, id)
            assert list(hits or ()) == list(places(shards, id)), id
