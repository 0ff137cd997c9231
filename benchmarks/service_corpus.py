"""Makes a store with published datasets of any size in a short time, for `benchmarks/service.py`.

The parts have the columns, the writer's options and the manifest of real ones. The texts are random words, so they
compress worse than prose does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.files import file_sha256
from pipeline.base.parquet import parquet_writer
from pipeline.store.dataset import MANIFEST, ManifestWriter, PartToPublish, part_name
from pipeline.store.parts import document_schema

SOURCES = ("web", "books", "code", "wiki", "forum", "news", "papers", "law")
LANGUAGES = ("en", "de", "fr", "es", "zh", "ja", "ru", "it")
REASONS = ("too_short", "repetition", "boilerplate", "language")
SIGNALS = ("fineweb_list_ratio", "gopher_mean_word_length", "language_score", "quality")
#: every text of one document in this many holds RARE
EVERY, RARE = 100_000, "zyzzogeton"
#: rows of a row group, which a part of the pipeline ends after 16 MiB
ROW_GROUP_BYTES = 16 << 20


def words(rng: np.random.Generator, n: int = 20_000) -> pa.Array:
    """`n` made-up words of 2 to 9 letters."""
    letters = rng.integers(97, 123, (n, 9), dtype=np.uint8)
    return pa.array([bytes(row[:size]).decode() for row, size in zip(letters, rng.integers(2, 10, n))])


def documents(rng: np.random.Generator, pool: pa.Array, first: int, n: int, text_words: int, dropped: bool,
              ) -> pa.Table:
    """Return a table of `n` documents, numbered from `first` on, with texts of about `text_words` words. With
    `dropped`, the table also has the columns of dropped documents."""
    sizes = rng.integers(text_words // 2, text_words * 3 // 2 + 1, n)
    ends = np.concatenate(([0], np.cumsum(sizes)))
    chosen = (rng.random(int(ends[-1])) ** 3 * len(pool)).astype(np.int32)           # some words are frequent
    text = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pool.take(pa.array(chosen))), " ")
    numbers = np.arange(first, first + n)
    rare = pa.array(numbers % EVERY == EVERY // 2)
    text = pc.if_else(rare, pc.binary_join_element_wise(text, pa.scalar(RARE), " "), text)
    ids = np.frombuffer(rng.bytes(16 * n), np.uint8).reshape(n, 16)
    kinds = rng.integers(0, 2**31, (4, n))
    sites = pc.binary_join_element_wise("https://site", pa.array(kinds[0] % 50_000).cast(pa.string()), ".example/page/",
                                        pa.array(numbers).cast(pa.string()), "")
    length = pc.binary_length(text).cast(pa.float64())
    values = [length, *(pa.array(np.round(rng.random(n) * scale, 4)) for scale in (1, 10, 1, 5))]
    schema = document_schema(SIGNALS, dropped)
    columns = {
        "id": pa.array([row.tobytes().hex() for row in ids]), "text": text.cast(pa.large_string()), "url": sites,
        "source": pa.array(SOURCES).take(pa.array(kinds[1] % len(SOURCES))),
        "language": pa.array(LANGUAGES).take(pa.array((kinds[2] % 2**16) ** 2 // 2**29)),
        "date": pa.nulls(n, pa.string()),
        "locator": pa.array([{"file": "a.jsonl", "offset": None, "record": 0, "sub": None}],
                            schema.field("locator").type).take(pa.array(np.zeros(n, np.int32))),
        "signals": pa.StructArray.from_arrays(values, fields=list(schema.field("signals").type)),
        "meta": pa.array(["{}"]).take(pa.array(np.zeros(n, np.int32))), "loss_spans": pa.nulls(n, schema.field(
            "loss_spans").type)}
    if dropped:
        columns |= {"reason": pa.array(REASONS).take(pa.array(kinds[3] % len(REASONS))),
                    "stage": pa.array(["gopher"]).take(pa.array(np.zeros(n, np.int32)))}
    return pa.table(columns, schema=schema)


def write_dataset(store: Path, name: str, rows: int, parts: int, text_words: int, *, kind: str = "datasets",
                  seed: int = 0) -> int:
    """Write KIND/NAME of a store: `rows` documents in `parts` parts. Returns the bytes on disk."""
    folder = store / kind / name
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    pool, total = words(rng), 0
    with ManifestWriter(folder / MANIFEST) as manifest:
        for i in range(parts):
            first, stop = rows * i // parts, rows * (i + 1) // parts
            table = documents(rng, pool, first, stop - first, text_words, kind == "dropped")
            key = f"{rng.integers(2**60):032x}"[::-1]
            path = folder / part_name(i, key)
            group = max(1, int(len(table) * ROW_GROUP_BYTES / max(table.nbytes, 1)))
            with parquet_writer(path, table.schema, compression_level=3, version="2.6", data_page_version="1.0",
                                use_dictionary=["source", "language", "locator.file", "reason", "stage"],
                                write_statistics=["id", "source", "language", "date", "reason", "stage",
                                                  *(f"signals.{s}" for s in ("bytes", *SIGNALS))]) as writer:
                writer.write_table(table, row_group_size=group)
            size = path.stat().st_size
            total += size
            text_bytes = int(pc.sum(pc.struct_field(table["signals"], "bytes")).as_py() or 0)
            manifest.add(PartToPublish(str(path), key, "pass:0", len(table), size, text_bytes, file_sha256(path),
                                       key, ["web"]))
    return total
