"""Writes and reads the documents of an index of `minhash` (`stages.dedup.index`): the task that writes them, and the
reader of their texts.

A file `texts.bin` holds the kept texts of one group of files, in the order of the documents. Of each text, it holds the
first `max_chars` characters, as they were compared. Texts are compressed (zstd) in blocks of about BLOCK bytes, so that
one text can be read without most others. A DOCUMENT record names the offset, the size and the xxh3-64 of a block, and
the number of the text within the block. A block has the following layout, in which all numbers are u4:

    size of the content before its compression
    content, compressed:
        number of texts
        for each text, the bytes of its language and the bytes of the text
        for each text, its language and the text in UTF-8; languages are empty without `words: language`
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pipeline.base.parquet import read_table, write_table
from stages.dedup.fragment import bucket_of, fixed_bytes, id_texts, ids_to_ints, read_side, write_segments
from stages.dedup.index import KEY, ROWS, document_dtype
from stages.dedup.part_texts import utf8_at
from stages.dedup.sets import SET_BYTES, distinct
from stages.dedup.signature import MinHashSignature, beginning
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: bytes of texts in a block, from which it is compressed
BLOCK = 32 << 10
#: bytes before a compressed block, which say how many bytes it has uncompressed
_HEAD = 4
#: most bytes of languages and numbers in a block
_NAMES = 1 << 22


class IndexDocuments:
    """Task that writes the kept documents of one group of parts (files of documents) into files of an index.

    Arguments: `parts` (for each part references to its side table, its documents and its removal slice, or null),
    `bands` (number of bands of a signature), `prefer` and `max_chars` (as in the settings of the step), `languages`
    (whether the words of a text depend on its language), and `ranges` (number of ranges of keys).

    The task writes `documents.seg` (DOCUMENT records, ROWS in a bucket), `texts.bin`, `ids.parquet`, and the exchange
    file `bands.seg` (KEY records without the number of the group, in buckets by range). Documents without band keys are
    left out, because no other document can be similar to them.
    """

    name = "index_documents"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        dtype = document_dtype(args["prefer"])
        blocks, keys, total = [np.zeros(0, dtype)], [np.zeros(0, KEY)], 0
        with open(out.path("texts.bin"), "wb") as file:
            writer = _TextWriter(file)
            for part in args["parts"]:
                records, bands, languages = _kept(inputs, part, dtype, args)
                rows = records["number"].astype(np.int64)             # here the row of the document in its part
                for n, text in enumerate(utf8_at(inputs.fetch(part["text"]), rows)):
                    writer.add(records[n:n + 1], languages[n], beginning(text, args["max_chars"]).tobytes())
                own = np.empty(bands.size, KEY)
                own["key"] = bands.ravel()
                own["document"] = np.repeat(np.arange(total, total + len(records), dtype=np.uint64), args["bands"])
                blocks.append(records)
                keys.append(own)
                total += len(records)
            writer.flush()
        documents, owned = np.concatenate(blocks), np.concatenate(keys)
        write_segments(out, "documents.seg", documents, np.arange(total) // ROWS, max(1, -(-total // ROWS)))
        write_segments(out, "bands.seg", owned, bucket_of(owned["key"], args["ranges"]), args["ranges"],
                       ("key", "document"))
        ids = pa.table({"id": pa.array(id_texts(documents["id_hi"], documents["id_lo"]), pa.string())})
        write_table(ids, out.path("ids.parquet"), write_statistics=False)
        out.note("ids.parquet", rows=total)
        return {"documents": total, "keys": len(owned)}


class IndexKeys:
    """Task that writes the band keys of one range, from all groups of documents, into one file of an index.

    Arguments: `files` (references to the files `bands.seg`, one per group), `bucket` (number of the range), `ranges`
    (number of ranges), `buckets` (number of buckets of the file that is written). The task writes the exchange file
    `keys.seg` (KEY records, which also hold the number of the document's group).
    """

    name = "index_keys"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        rows = 0
        with out.segments("keys.seg", KEY, args["buckets"], key=("key", "document")) as writer:
            for block in inputs.segments(args["files"], args["bucket"], numbered=True):
                records = np.empty(len(block), KEY)
                records["key"] = block["key"]
                records["document"] = block["document"] | block["source"].astype(np.uint64) << np.uint64(32)
                place = bucket_of(records["key"], args["ranges"] * args["buckets"])
                writer.write(place - args["bucket"] * args["buckets"], records)
                rows += len(records)
        return {"keys": rows}


def _kept(inputs: Inputs, part: Mapping[str, Any], dtype: np.dtype[Any],
          args: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[np.uint64], list[str]]:
    """Return three lists with an entry for each document of a part that was kept and has band keys: (its DOCUMENT
    record, its band keys [documents, bands], its language). The field `number` of a record is the row of the document
    in its part."""
    columns = ["id", "bands", "chars", *(["language"] if args["languages"] else []),
               *(["order"] if "order" in (dtype.names or ()) else [])]
    side = read_side(inputs.fetch(part["side"]), columns)
    rows = side["row"].to_numpy()
    stay, _ = fixed_bytes(side["bands"])
    clusters = None
    if part["removed"] is not None:
        removed = read_table(inputs.fetch(part["removed"]), columns=["row", "reason", "cluster"])
        gone = pc.not_equal(removed["reason"], "")
        stay &= ~np.isin(rows, removed.filter(gone)["row"].to_numpy())
        clusters = removed.filter(pc.invert(gone))
    side = side.filter(pa.array(stay))
    records = np.zeros(len(side), dtype)
    if not len(records):
        return records, np.zeros((0, args["bands"]), np.uint64), []
    records["id_hi"], records["id_lo"] = ids_to_ints(side["id"])
    records["chars"], records["number"] = side["chars"].to_numpy(), side["row"].to_numpy()
    records["cluster_hi"], records["cluster_lo"] = records["id_hi"], records["id_lo"]
    if clusters is not None and len(clusters):
        places = np.searchsorted(side["row"].to_numpy(), clusters["row"].to_numpy())
        records["cluster_hi"][places], records["cluster_lo"][places] = ids_to_ints(clusters["cluster"])
    if "order" in columns:
        records["order"] = fixed_bytes(side["order"])[1].view("<u8").reshape(len(side), -1)
    bands = fixed_bytes(side["bands"])[1].view("<u8").reshape(len(side), args["bands"])
    languages = side["language"].to_pylist() if "language" in columns else [""] * len(side)
    return records, bands, languages


def packed(strings: Sequence[bytes]) -> bytes:
    """Return a compressed block of texts. `strings` holds, for one document after another, its language and its text,
    in UTF-8."""
    raw = b"".join([np.array([len(strings) // 2, *map(len, strings)], "<u4").tobytes(), *strings])
    return len(raw).to_bytes(_HEAD, "little") + pa.Codec("zstd", compression_level=1).compress(raw, asbytes=True)


def unpacked(block: bytes, max_chars: int) -> list[bytes]:
    """Return the list of strings that were given to `packed` for this block: the language and text of one document
    after another. `max_chars` is the setting of the index, and limits the memory that a damaged block can ask for.
    Raises ValueError if `block` is no block of texts."""
    size = int.from_bytes(block[:_HEAD], "little")
    if size > BLOCK + 4 * max_chars + _NAMES:
        raise ValueError(f"a block of texts has at most {BLOCK + 4 * max_chars + _NAMES} bytes, not {size}")
    try:
        raw = pa.Codec("zstd").decompress(block[_HEAD:], size, asbytes=True)
    except OSError as e:
        raise ValueError(str(e)) from e
    count = int.from_bytes(raw[:4], "little")
    ends = np.cumsum(np.frombuffer(raw, "<u4", 2 * count, 4), dtype=np.int64) + 4 + 8 * count
    if count and ends[-1] != len(raw):
        raise ValueError(f"a block of texts has {len(raw)} bytes instead of {ends[-1]}")
    return [raw[start:end] for start, end in zip([4 + 8 * count, *ends.tolist()], ends.tolist())]


class _TextWriter:
    """Writes the texts of an index to a file, in compressed blocks."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pending: list[tuple[NDArray[Any], bytes, bytes]] = []
        self._bytes = self._offset = 0

    def add(self, record: NDArray[Any], language: str, text: bytes) -> None:
        """Append a text (UTF-8) to the current block. `record` is a view of the DOCUMENT record of the text's document.
        When the block is written, the place of the text is filled in there."""
        self._pending.append((record, language.encode(), text))
        self._bytes += len(self._pending[-1][2])
        if self._bytes >= BLOCK:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        block = packed([s for _, language, text in self._pending for s in (language, text)])
        check = xxhash.xxh3_64_intdigest(block)
        for number, (record, _, _) in enumerate(self._pending):
            record["number"], record["offset"], record["size"], record["sum"] = number, self._offset, len(block), check
        self._file.write(block)
        self._offset += len(block)
        self._pending, self._bytes = [], 0


class OldSets:
    """Returns the shingle sets (hashes of word n-grams) of old documents of an index. A text is read, and its set
    computed, when the set is asked for. The sets that were used most recently stay in memory, up to `cache_bytes`
    bytes."""

    def __init__(self, inputs: Inputs, stage: MinHashSignature, cache_bytes: int) -> None:
        self._inputs, self._stage, self._cache_bytes = inputs, stage, cache_bytes
        self._sets: OrderedDict[tuple[str, int, int], NDArray[np.uint64]] = OrderedDict()
        self._bytes = 0
        self.read = 0                              # number of texts read

    def get(self, ref: Mapping[str, Any], document: Any) -> NDArray[np.uint64]:
        """Return the shingle set of an old document. `ref` is the file with its text, and the DOCUMENT record
        `document` says where in the file the text is. Raises an error about a damaged file if the block with the text
        does not fit its checksum, or is no block of texts."""
        place = ref["content"], int(document["offset"]), int(document["number"])
        if place in self._sets:
            self._sets.move_to_end(place)
            return self._sets[place]
        text, language = self._text(ref, document)
        values = self._sets[place] = distinct(self._stage.shingles_of(text, language)[0])
        self.read += 1
        self._bytes += values.nbytes + SET_BYTES
        while self._bytes > self._cache_bytes and len(self._sets) > 1:
            self._bytes -= self._sets.popitem(last=False)[1].nbytes + SET_BYTES
        return values

    def _text(self, ref: Mapping[str, Any], document: Any) -> tuple[NDArray[np.uint8], str]:
        """Return (the text of a document in UTF-8, its language), read from the file `ref`."""
        offset, size = int(document["offset"]), int(document["size"])
        if offset + size > ref["bytes"]:
            raise self._inputs.damaged(ref, "lacks a text that another file of its index places there")
        block = self._inputs.read_range(ref, offset, offset + size)
        if xxhash.xxh3_64_intdigest(block) != int(document["sum"]):
            raise self._inputs.damaged(ref)
        try:
            strings, number = unpacked(block, self._stage.config.max_chars), 2 * int(document["number"])
            language, text = strings[number].decode(), strings[number + 1]
            text.decode()                              # the kernels read beyond the end of a text that is no UTF-8
        except (ValueError, IndexError) as e:
            raise self._inputs.damaged(ref) from e
        return np.frombuffer(text, np.uint8), language
