r"""Makes and reads snapshots of the commit log, so that a driver (the process that schedules a run) starts quickly. A
snapshot consists of packs, and each pack compacts a range of segments (the files of the log) into one file.

A pack is named `log/packs/FIRST-LAST.pack`. It holds the segments FIRST to LAST, byte for byte and compressed in
blocks, an index of their records, and a hash of the whole pack. So a pack can be replayed without parsing its records.
A single record can be read from it, and a damaged segment can be restored from it.

Packs are written by put-if-absent (created only if the name is free). Only a damaged pack is replaced; otherwise a
snapshot only adds packs.

Segments are committed before they are packed, and never change. So every sound pack (one whose hash matches) is
correct. It may even have been written by two drivers at once, or by a driver that had lost the log.

Packs may overlap. For the next segment, a reader takes the sound pack that holds the segment and reaches furthest.
Where no sound pack holds the segment, the reader takes the segment itself. After the last pack it reads the segments
that follow. A damaged or missing pack therefore costs only time, as long as its segments exist.

`store gc` removes the segments that a pack holds after it has read and verified the pack (`pipeline.store.garbage`).
These segments can then be read only from packs. Readers raise CorruptLog for a gap: segments that the name of a pack
covers, but that can be read neither from a pack nor from a segment file. Otherwise the gap would be mistaken for the
end of the log.

The layout resembles a checkpoint in Delta Lake or the manifests of Iceberg. But these hold only the state at their end,
and a pack keeps the history, including retired (withdrawn) records. So no pack depends on later segments. Retired
records are few, so they cost little space.

A pack consists of:

1. ``{"sha256":"…"}\n``, the hash of all that follows
2. one line of JSON: `format` (FORMAT), `first`, `last`, `raw` (bytes of all segments), `blocks` (compressed bytes of
   each block), `index` (bytes of the index before and after compression)
3. the compressed blocks
4. the compressed index: one line of JSON, then arrays with one item for each record (`_COLUMNS`). The JSON has
   `segments`, which is [bytes, number of records] of each segment, and `events`, which is [number, body without
   records] of each segment that holds anything besides records
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.store.errors import OTHER_BYTES
from pipeline.store.fs import Store
from pipeline.store.quick_json import dumps, loads
from pipeline.store.segment import RECORDS, SEGMENT, CorruptLog, decode_segment, facts, segment_name

FORMAT = 1
PACK_SEGMENTS = 1000         # segments after which a snapshot is due, and which a pack holds at most
PACK_BYTES = 32 << 20        # a pack ends with the segment that reaches this size; compression leaves about a sixth
BLOCK = 1 << 16              # bytes that are decompressed to read one record
READ_AHEAD = 8               # segments or packs fetched at a time, a few MB each; twice as many may wait
FOLDER = "log/packs"

_PACK = re.compile(FOLDER + r"/(\d{8})-(\d{8})\.pack")
_HEAD = b'{"sha256":"%s"}\n'
_ZSTD = pa.Codec("zstd", 3)
#: numpy types of the columns of the index, which have one item for each record: hash of its key, hash of its replay key
#: (empty if it has none), its first byte among the bytes of all segments, its length in bytes, and whether it
#: quarantines documents
_COLUMNS = ("S16", "S16", "<u8", "<u4", "u1")


class Pack(NamedTuple):
    """A pack: a file of the store that compacts a range of segments (files) of the commit log. `first` and `last` are
    the numbers of the first and the last segment, and identify the pack."""

    first: int
    last: int

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.first:08d}-{self.last:08d}.pack"


def listed(store: Store) -> list[Pack]:
    """Return the packs (compacted segments of the log) that the store has, including damaged ones."""
    return [Pack(int(m[1]), int(m[2])) for path in store.list(FOLDER) if (m := _PACK.fullmatch(path))]


def pack_at(path: str) -> Pack | None:
    """Return the pack (file of compacted log segments) whose path in the store is `path`; None when it is no path of a
    pack."""
    match = _PACK.fullmatch(path)
    return None if match is None else Pack(int(match[1]), int(match[2]))


def covering(packs: Iterable[Pack], number: int, damaged: Collection[Pack] = ()) -> Pack | None:
    """Of the packs (files of compacted log segments) that hold segment `number`, return the one that extends furthest;
    None when no pack holds the segment. Packs in `damaged` are not considered."""
    candidates = [pack for pack in packs if pack.first <= number <= pack.last and pack not in damaged]
    return max(candidates, key=lambda pack: pack.last, default=None)


def digest(key: str) -> bytes:
    """Return the 16 bytes that stand for a task's key in the index of a pack (file of compacted log segments). The last
    byte is never zero, because numpy would strip a zero at the end."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=15).digest() + b"."


# -- writing ----------------------------------------------------------------------------------------------------------
class _PackBuilder:
    """Builds one pack, a file of compacted log segments. Call `add` for each segment, in order, and then `finish`,
    which returns the bytes of the pack."""

    def __init__(self, first: int) -> None:
        self.first, self.last = first, first - 1
        self.raw = 0
        self._open = bytearray()                              # bytes of the block that is not full yet
        self._blocks: list[bytes] = []
        self._segments: list[tuple[int, int]] = []
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._keys, self._replay_keys = bytearray(), bytearray()
        self._places, self._lengths, self._quarantines = array("Q"), array("I"), bytearray()

    def add(self, data: bytes, where: str) -> None:
        """Add the next segment (file of the commit log) to the pack (file of compacted segments). Raises CorruptLog
        when the segment is damaged."""
        body = decode_segment(data, where)
        records: list[bytes] = body.pop("records", [])
        self.last += 1
        self._segments.append((len(data), len(records)))
        if body["kind"] == "epoch" or any(body.get(name) for name in ("quarantined", "released", "retired")):
            self._events.append((self.last, body))
        place = self.raw + data.find(RECORDS) + len(RECORDS)
        for record in records:
            fact = facts(record)
            self._keys += digest(fact.key)
            self._replay_keys += digest(fact.replay_key) if fact.replay_key else bytes(16)
            self._places.append(place)
            self._lengths.append(len(record))
            self._quarantines.append(fact.quarantines)
            place += len(record) + 2
        self.raw += len(data)
        self._open += data
        while len(self._open) >= BLOCK:
            self._blocks.append(_ZSTD.compress(bytes(self._open[:BLOCK]), asbytes=True))
            del self._open[:BLOCK]

    def finish(self) -> bytes:
        blocks = [*self._blocks, *([_ZSTD.compress(bytes(self._open), asbytes=True)] if self._open else ())]
        columns = (self._keys, self._replay_keys, self._places.tobytes(), self._lengths.tobytes(), self._quarantines)
        index = dumps({"segments": self._segments, "events": self._events}) + b"\n" + b"".join(columns)
        packed = _ZSTD.compress(index, asbytes=True)
        head = {"format": FORMAT, "first": self.first, "last": self.last, "raw": self.raw,
                "blocks": [len(block) for block in blocks], "index": [len(index), len(packed)]}
        data = b"".join((dumps(head), b"\n", *blocks, packed))
        return _HEAD % hashlib.sha256(data).hexdigest().encode() + data


def build(first: int, segments: Iterable[bytes], store: Store, most: int = PACK_SEGMENTS,
          full: bool = False) -> Iterator[tuple[Pack, bytes]]:
    """Compact consecutive segments (files) of the commit log into packs, and yield (pack, bytes of the pack) for each.
    `first` is the number of the first segment. A pack is full when it holds `most` segments or PACK_BYTES. With `full`,
    the last segments are left out if they do not fill a pack. Raises CorruptLog, with the segment's path in `store`,
    for a damaged segment."""
    builder = _PackBuilder(first)
    for data in segments:
        builder.add(data, store.at(segment_name(builder.last + 1)))
        if builder.raw >= PACK_BYTES or builder.last - builder.first + 1 >= most:
            yield Pack(builder.first, builder.last), builder.finish()
            builder = _PackBuilder(builder.last + 1)
    if builder.raw and not full:
        yield Pack(builder.first, builder.last), builder.finish()


def take(store: Store, first: int, last: int, damaged: Collection[Pack] = (), most: int = PACK_SEGMENTS,
         full: bool = False, stopped: Callable[[], bool] = lambda: False) -> Iterator[Pack]:
    """Compact the committed log segments (files) `first` to `last` into packs, files of the store, as `build` does.
    Each pack is yielded once it is written. An existing pack of the same name is kept, unless it is in `damaged`; then
    it is replaced.

    Once `stopped` returns True, no further segments are read. Raises CorruptLog for a damaged segment, and
    FileNotFoundError for a segment that `store gc` has removed.
    """
    names = itertools.takewhile(lambda name: not stopped(), map(segment_name, range(first, last + 1)))
    for pack, data in build(first, store.map(store.read, names, READ_AHEAD), store, most, full):
        if pack in damaged:                # in one step: another driver may have written a sound pack, and rely on it
            store.write(pack.path, data, durable=True)
        else:
            store.put_absent(pack.path, data)
        yield pack


# -- reading ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PackData:
    """The content of a pack (file of compacted log segments), read and verified. The arrays from `keys` to
    `quarantines` have one item for each record, in the order of commits; `_COLUMNS` says what the items mean."""

    pack: Pack
    raw: int
    block_sizes: Sequence[int]
    blocks: bytes
    sizes: np.ndarray              # bytes of each segment
    counts: np.ndarray             # records of each segment
    events: list[tuple[int, dict[str, Any]]]
    keys: np.ndarray
    replay_keys: np.ndarray
    places: np.ndarray
    lengths: np.ndarray
    quarantines: np.ndarray

    def segments(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, bytes) of each log segment that this pack (file of compacted segments) holds."""
        blocks, offset, remaining = [], 0, self.raw
        for size in self.block_sizes:
            blocks.append(inflate(self.blocks[offset:offset + size], min(BLOCK, remaining)))
            offset, remaining = offset + size, remaining - BLOCK
        data, offset = b"".join(blocks), 0
        for number, size in enumerate(self.sizes.tolist(), self.pack.first):
            yield number, data[offset:offset + size]
            offset += size


def inflate(block: bytes, size: int) -> bytes:
    data: bytes = _ZSTD.decompress(block, decompressed_size=size, asbytes=True)
    return data


def decode(pack: Pack, data: bytes, where: str) -> PackData:
    """Decode `data`, the bytes of a pack (file of compacted log segments). Raises CorruptLog when the bytes are damaged
    or belong to another pack. `where` is the path of the pack, for the message."""
    offset = len(_HEAD) - 2 + 64
    if data[:offset] != _HEAD % hashlib.sha256(memoryview(data)[offset:]).hexdigest().encode():
        raise CorruptLog(f"{where} is damaged ({len(data)} bytes, its checksum does not match); "
                         f"`tokenmill store verify --repair` writes it again, if its segments are there")
    end = data.index(b"\n", offset)
    head = loads(data[offset:end])
    if (head["format"], head["first"], head["last"]) != (FORMAT, *pack):
        raise CorruptLog(f"{where} is another pack than its name says (format {head['format']}, segments "
                         f"{head['first']} to {head['last']}); remove it")
    begin = end + 1 + sum(head["blocks"])
    size, packed = head["index"]
    line, _, arrays = inflate(data[begin:begin + packed], size).partition(b"\n")
    index = loads(line)
    sizes, counts = np.array(index["segments"], np.int64).reshape(-1, 2).T
    columns, offset, records = [], 0, int(counts.sum())
    for dtype in _COLUMNS:
        columns.append(np.frombuffer(arrays, dtype, records, offset))
        offset += columns[-1].nbytes
    return PackData(pack, head["raw"], head["blocks"], data[end + 1:begin], sizes, counts, index["events"], *columns)


def read(store: Store, pack: Pack) -> PackData:
    """Read and verify a pack (file of compacted log segments). Raises CorruptLog when the pack is damaged or
    missing."""
    try:
        return decode(pack, store.read(pack.path), store.at(pack.path))
    except FileNotFoundError as e:
        raise CorruptLog(f"{store.at(pack.path)} is gone") from e
    except OSError as e:
        if e.errno != errno.EIO:                              # EIO (a bad sector) counts as damage
            raise
        raise CorruptLog(f"{store.at(pack.path)} cannot be read ({e.strerror})") from e


# -- verification -----------------------------------------------------------------------------------------------------
def damage(store: Store) -> dict[str, str]:
    """Read all files of the commit log: its segments, and the packs that compact them. Returns the path of each damaged
    file with a description of the damage."""
    def problem(path: str) -> tuple[str, str]:
        try:
            data, pack = store.read(path), pack_at(path)
            if pack is None:
                decode_segment(data, path)
            else:
                decode(pack, data, path)
        except FileNotFoundError:
            return path, "is gone"
        except CorruptLog:
            return path, OTHER_BYTES
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            return path, f"cannot be read ({e.strerror})"
        return path, ""

    paths = (path for path in store.list("log") if SEGMENT.fullmatch(path) or pack_at(path))
    return {path: wrong for path, wrong in store.map(problem, paths, READ_AHEAD) if wrong}


def restore(store: Store, path: str) -> bool:
    """Repair the damaged log file at `path`:

    - a segment is written again from an undamaged pack (file of compacted segments) that holds it
    - a pack is written again from the files of its segments
    - a pack that cannot be written again is removed, if other undamaged packs hold all its segments

    Returns False when none of this is possible. The damaged file is then kept, since an intact copy of it may be found
    elsewhere.
    """
    pack = pack_at(path)
    if pack is not None:
        with contextlib.suppress(CorruptLog, FileNotFoundError):
            list(take(store, *pack, damaged=[pack], most=pack.last))
        if _sound(store, pack):
            return True
        readable = {n for other in listed(store) if other != pack and _sound(store, other)
                    for n in range(other.first, other.last + 1)}
        if not readable.issuperset(range(pack.first, pack.last + 1)):
            return False
        store.remove(path)
        return True
    data = _from_packs(store, int(path[4:12]))
    if data is None:
        return False
    store.write(path, data, durable=True)        # in one step: a driver that lost the log must not find the name free
    return True


def _sound(store: Store, pack: Pack) -> bool:
    try:
        read(store, pack)
    except CorruptLog:
        return False
    return True


def segment_head(store: Store, number: int) -> bytes:
    """Return the first 128 bytes of a segment (file of the commit log), which include its checksum. A segment that was
    removed is read from a pack (file of compacted segments). Raises FileNotFoundError when neither the segment nor an
    undamaged pack that holds it exists."""
    try:
        return store.read_range(segment_name(number), 0, 128)
    except FileNotFoundError:
        data = _from_packs(store, number)
        if data is None:
            raise
        return data[:128]


def _from_packs(store: Store, number: int) -> bytes | None:
    """Return the bytes of segment `number`, read from an undamaged pack (file of compacted log segments). None when no
    such pack holds the segment."""
    for pack in listed(store):
        if pack.first <= number <= pack.last:
            with contextlib.suppress(CorruptLog):
                return dict(read(store, pack).segments())[number]
    return None
