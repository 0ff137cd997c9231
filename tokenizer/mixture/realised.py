"""Reports the mixture of streams (data sources) in a training: what the run will read (`plan`), and how far what it has
read so far agrees with the weights (`realised`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order, apportioned


def plan(curriculum: Curriculum) -> list[dict[str, Any]]:
    """Return what a run will read, in the order of the curriculum. There is a row, a mapping, for each phase (stretch
    of the training) and each stream (data source) that has a weight in it:

        phase, stream  their names
        weight, share  the stream's weight, as an integer and as a share of the phase's samples
        windows        number of samples that the phase reads from the stream
        tokens         number of their targets
        epochs         how often the stream is read up to the end of the phase, counted by reserved blocks
        reserved       number of blocks of `longest` tokens that the phase reserves in the stream
        unread         number of windows in these blocks that no phase reads
        padding        expected number of targets that are padding, if the stream is packed; exact over whole epochs
        repeats_from   number of the first sample of the phase that reads data of the stream for at least the second
                       time, or None"""
    order = Order(curriculum)
    unread = _unread(order)
    rows = []
    for p, phase in enumerate(curriculum.phases):
        streams_of = order.apportioned[p]
        windows = streams_of.counts(phase.samples)
        for s, name in enumerate(order.names):
            weight = phase.weights.get(name, 0)
            if not weight:
                continue
            reserved_before = order.used[p - 1][s] if p else 0
            # later draws are later samples, so the first extent of a second epoch has the earliest sample that repeats
            repeated = next((extent.start for extent in order.extents[p][s] if extent.piece.epoch > 0), None)
            rows.append({
                "phase": phase.name, "stream": name, "weight": weight, "share": weight / sum(streams_of.weights),
                "windows": windows[s], "tokens": windows[s] * phase.sequence,
                "epochs": order.used[p][s] / order.supers[s] if order.supers[s] else 0.0,
                "reserved": order.used[p][s] - reserved_before, "unread": unread.get((p, s), 0),
                "padding": round(windows[s] * phase.sequence * curriculum.streams[s].padding(phase.sequence)),
                "repeats_from": None if repeated is None else phase.start + int(streams_of.sample_of(s, repeated)[0])})
    return rows


def _unread(order: Order) -> dict[tuple[int, int], int]:
    """Return the number of windows (samples) that are reserved and never read, as {(phase, stream): number}. A phase
    (stretch of the training) reserves whole blocks of a stream (data source), so it may reserve more windows than it
    reads. A window that a later phase reads is not counted. Phases and streams are given by index."""
    drawn: dict[Any, int] = {}
    for row in order.extents:
        for extents in row:
            for extent in extents:
                drawn[extent.piece] = drawn.get(extent.piece, 0) + extent.stop - extent.start
    unread: dict[tuple[int, int], int] = {}
    for piece, count in drawn.items():
        key = (piece.reservation, piece.stream)
        unread[key] = unread.get(key, 0) + piece.windows - count
    return unread


def plan_text(curriculum: Curriculum) -> str:
    """Format the result of `plan` as a table for a terminal."""
    rows = [("phase", "stream", "share", "tokens", "windows", "epochs", "note")]
    for row in plan(curriculum):
        notes = [f"{row['padding'] / row['tokens']:.2%} padding"] if row["padding"] else []
        notes += [f"second reading from sample {row['repeats_from']:,}"] if row["repeats_from"] is not None else []
        rows.append((row["phase"], row["stream"], f"{row['share']:.2%}", f"{row['tokens']:,}", f"{row['windows']:,}",
                     f"{row['epochs']:.2f}", ", ".join(notes)))
    width = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(size) if column in (0, 1, 6) else cell.rjust(size)
                       for column, (cell, size) in enumerate(zip(cells, width))).rstrip() for cells in rows]
    return "\n".join(lines) + "\n"


def realised(curriculum: Curriculum, samples: int) -> list[dict[str, Any]]:
    """Compare the planned mixture of streams (data sources) with what the first `samples` samples of a run have read.
    Returns the rows of `realised_in`.

    In each row, `planned` and `realised` differ by less than 1 if the phase (stretch of the training) has at most three
    streams, otherwise by at most 2. If some of its streams are in groups, they differ by at most 4
    (`tokenizer.mixture.apportion`)."""
    return realised_in(curriculum, [(0, samples)])


def realised_in(curriculum: Curriculum, ranges: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Compare the planned mixture with what the samples in `ranges` have read. `ranges` are disjoint: [(first, stop),
    …]. Returns one row, a mapping, for each pair of phase (stretch of the training) and stream (data source) in which
    the stream has a weight.

    `planned` is the number of samples that the stream should get by its weight: its share of the samples in `ranges`
    that belong to the phase. It may be fractional. `realised` is the number of samples that are read from the stream,
    and `tokens` is the number of their targets. The counts are exact. Computing them takes the same time for any number
    of samples."""
    rows = []
    for phase in curriculum.phases:
        streams_of = apportioned(phase, [stream.name for stream in curriculum.streams])
        weights, windows, samples_read = streams_of.weights, [0] * len(curriculum.streams), 0
        for first, stop in ranges:
            first, stop = (max(0, min(sample, phase.stop) - phase.start) for sample in (first, stop))
            if first < stop:
                samples_read += stop - first
                windows = [count + after - before for count, after, before in zip(
                    windows, streams_of.counts(stop), streams_of.counts(first))]
        for number, stream in enumerate(curriculum.streams):
            if weights[number]:
                rows.append({"phase": phase.name, "stream": stream.name,
                             "planned": samples_read * weights[number] / sum(weights), "realised": windows[number],
                             "tokens": windows[number] * phase.sequence})
    return rows
