"""Reports the mixture of streams: what a run will read, known before it starts, and what it has read after a number of
samples, compared with the weights."""

from __future__ import annotations

from typing import Any

from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order, counts, sample_of


def plan(curriculum: Curriculum) -> list[dict[str, Any]]:
    """Return what a run will read: one row for each pair of phase and stream with a weight, in order.

    The keys of a row: phase, stream, weight, share, windows (samples of the stream in the phase), tokens (targets),
    epochs (readings of the stream from the start of the run to the end of the phase), reserved (blocks of `longest`
    tokens that the phase reserves in the stream), unread (windows in these blocks that no phase reads), repeats_from
    (number of the first sample of the phase that reads data of the stream a second time, or None).
    """
    order = Order(curriculum)
    unread = _unread(order)
    rows = []
    for p, phase in enumerate(curriculum.phases):
        got = counts(phase.samples, order.weights[p])
        for s, name in enumerate(order.names):
            weight = phase.weights.get(name, 0)
            if not weight:
                continue
            before = order.used[p - 1][s] if p else 0
            again = [sample_of(s, e.start, order.weights[p])[0] for e in order.extents[p][s] if e.piece.epoch > 0]
            rows.append({
                "phase": phase.name, "stream": name, "weight": weight, "share": weight / sum(order.weights[p]),
                "windows": got[s], "tokens": got[s] * phase.sequence,
                "epochs": order.used[p][s] / order.supers[s] if order.supers[s] else 0.0,
                "reserved": order.used[p][s] - before, "unread": unread.get((p, s), 0),
                "repeats_from": phase.start + int(min(again)) if again else None})
    return rows


def _unread(order: Order) -> dict[tuple[int, int], int]:
    """Return {(phase, stream): number of windows that the phase has reserved in the stream and that no phase reads}.
    Phases and streams are given by index."""
    drawn: dict[Any, int] = {}
    for row in order.extents:
        for extents in row:
            for e in extents:
                drawn[e.piece] = drawn.get(e.piece, 0) + e.stop - e.start
    out: dict[tuple[int, int], int] = {}
    for piece, n in drawn.items():
        key = (piece.reservation, piece.stream)
        out[key] = out.get(key, 0) + piece.windows - n
    return out


def plan_text(curriculum: Curriculum) -> str:
    """Format the result of `plan` as a table for a terminal."""
    rows = [("phase", "stream", "share", "tokens", "windows", "epochs", "note")]
    for row in plan(curriculum):
        note = "" if row["repeats_from"] is None else f"second reading from sample {row['repeats_from']:,}"
        rows.append((row["phase"], row["stream"], f"{row['share']:.2%}", f"{row['tokens']:,}", f"{row['windows']:,}",
                     f"{row['epochs']:.2f}", note))
    width = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) if i in (0, 1, 6) else c.rjust(w)
                       for i, (c, w) in enumerate(zip(r, width))).rstrip() for r in rows]
    return "\n".join(lines) + "\n"


def realised(curriculum: Curriculum, samples: int) -> list[dict[str, Any]]:
    """Return how many samples of each stream have been read after `samples` samples: one row for each pair of phase and
    stream with a weight.

    `planned` is the stream's share of the phase's samples so far, and may be fractional. `realised` is the number of
    samples that the order takes from the stream. With up to three streams the two differ by less than one, because
    Webster apportionment then keeps the quota. With more streams they differ by little more.
    """
    rows = []
    for phase in curriculum.phases:
        weights = [phase.weights.get(s.name, 0) for s in curriculum.streams]
        done = max(0, min(samples, phase.stop) - phase.start)
        got = counts(done, weights)
        for s, stream in enumerate(curriculum.streams):
            if weights[s]:
                rows.append({"phase": phase.name, "stream": stream.name,
                             "planned": done * weights[s] / sum(weights), "realised": got[s],
                             "tokens": got[s] * phase.sequence})
    return rows
