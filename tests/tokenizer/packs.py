"""Packed rows for tests: writes a packing beside a shard set, and builds the same rows in plain, slow Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tokenizer.shards.layout import ENDS
from tokenizer.shards.packed import MANIFEST, PackedShard, Packing, file_name
from tokenizer.shards.packing import pack
from tokenizer.shards.reader import ShardSet


def write_packing(folder: Path, longest: int) -> dict[str, Any]:
    """Pack the shard set in `folder` into rows of `longest` targets. Returns what a curriculum needs to know about the
    rows."""
    manifest, files = ShardSet(folder).manifest, []
    for info in manifest.shards:
        facts = pack(str(folder / "rows.tmp"), np.fromfile(folder / info.ends, ENDS), longest)
        files.append(PackedShard(info.index, **facts, file=file_name(info.index, facts["sha256"])))
        (folder / "rows.tmp").rename(folder / files[-1].file)
    packing = Packing(manifest.sha256, longest, tuple(files))
    for name in (packing.name, MANIFEST):
        (folder / name).write_text(packing.dumps())
    return packing.facts()


def slow_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Return the bin of each piece, by best-fit decreasing, one piece at a time."""
    room: list[int] = []
    latest: list[int] = []                                 # when each bin got its last piece
    bins = [-1] * len(sizes)
    for time, piece in enumerate(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))):
        fitting = [b for b in range(len(room)) if room[b] >= sizes[piece]]
        if not fitting:
            room.append(capacity)
            latest.append(0)
            fitting = [len(room) - 1]
        best = min(fitting, key=lambda b: (room[b], -latest[b]))
        room[best] -= sizes[piece]
        latest[best] = time
        bins[piece] = best
    return bins


def slow_rows(documents: list[int], longest: int) -> list[list[tuple[int, int]]]:
    """Return the rows of one block of documents, each as a list of pieces (ranges of tokens). `documents` are their
    numbers of tokens."""
    pieces, begin = [], 0
    for tokens in documents:
        end = begin + tokens
        while end - begin > longest + 1:
            pieces.append((begin, begin + longest + 1))
            begin += longest                               # the next piece repeats the last token, as its first input
        if end - begin > 1:
            pieces.append((begin, end))
        begin = end
    rows: dict[int, list[tuple[int, int]]] = {}
    for piece, row in zip(pieces, slow_best_fit([stop - start for start, stop in pieces], longest + 1)):
        rows.setdefault(row, []).append(piece)
    return sorted(rows.values())


def slow_sample(shards: ShardSet, pieces: list[tuple[int, int]], longest: int) -> dict[str, list[Any]]:
    """Return one packed row as the trainer must see it, built token by token: `inputs`, `targets` (None where nothing
    counts) and `positions`."""
    tokens: list[int] = []
    targets: list[int | None] = []
    positions: list[int] = []
    for start, stop in pieces:
        of_piece, counts = shards.read(start, stop).tolist(), shards.counts(start, stop)
        tokens += of_piece
        positions += range(stop - start)
        targets += [of_piece[i + 1] if counts is None or counts[i + 1] else None for i in range(stop - start - 1)]
        targets.append(None)                               # behind the piece, another document or padding begins
    missing = longest + 1 - len(tokens)
    return {"inputs": (tokens + [shards.eos] * missing)[:longest], "targets": (targets + [None] * missing)[:longest],
            "positions": [*positions, *range(missing)][:longest]}
