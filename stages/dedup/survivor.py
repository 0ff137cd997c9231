"""Decides which of several duplicates is kept: the setting `prefer` of the steps `exact` and `minhash`. This module
computes numbers for documents. The modules `exact` and `verify` sort duplicates by these numbers, and keep the first
document.

    prefer: [priority, longest]                         # the default
    prefer: [priority, newest, signal:edu_score, longest]

The first preference decides. If documents are equal by it, the next preference decides. If they are equal by all, the
document with the smallest id is kept. `priority` is the position of the document's dataset in `priority:`. `longest`
prefers the text with the most characters, `newest` the latest date, and `signal:NAME` the largest value of a signal (a
number that an earlier step stores for each document). A document whose date is missing or not in ISO 8601, or whose
signal is missing or NaN, comes after documents with a value.

The column `order` of the side table (a file beside the documents) holds the dates and signals of each document. Each of
these values takes 8 bytes, and is stored as a number of which the smallest is preferred.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.document import Document

DEFAULT = ("priority", "longest")
_SIGNAL = "signal:"
#: the number of a document that has no date or no such signal
_LAST = 2**64 - 1
#: column of a side table
COLUMN = pa.field("order", pa.binary())


def checked(prefer: tuple[str, ...]) -> tuple[str, ...]:
    """Return the preferences `prefer` unchanged. Raises ValueError if one of them is unknown or occurs twice."""
    for item in prefer:
        if item not in ("priority", "newest", "longest") and not (item.startswith(_SIGNAL) and item != _SIGNAL):
            raise ValueError(f"{item!r} is no preference: name priority, newest, longest or signal:NAME")
        if prefer.count(item) > 1:
            raise ValueError(f"{item!r} is listed twice: remove one")
    return prefer


def stored(prefer: Sequence[str]) -> list[str]:
    """Return those preferences whose numbers stand in the column `order` of side tables: `newest` and the signals."""
    return [item for item in prefer if item not in DEFAULT]


def signals(prefer: Sequence[str]) -> list[str]:
    """Return the names of the signals that the preferences `prefer` compare."""
    return [item.removeprefix(_SIGNAL) for item in prefer if item.startswith(_SIGNAL)]


def order_field(prefer: Sequence[str]) -> list[Any]:
    """Return the numpy field in which a record of a document stores its dates and signals for the preferences `prefer`:
    [(name, type, shape)], or [] if no preference needs one."""
    return [("order", "<u8", (len(stored(prefer)),))] if stored(prefer) else []


def order_bytes(doc: Document, prefer: Sequence[str]) -> bytes:
    """Return the value of a document for the column `order` of the side table. The value has a little-endian u64 for
    each preference of `prefer` that compares dates or signals, in the order of `prefer`. A smaller number is
    preferred."""
    numbers = [_age(doc.date) if item == "newest" else _rank(doc.signals.get(item.removeprefix(_SIGNAL)))
               for item in stored(prefer)]
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _age(date: str | None) -> int:
    """Return a number for a date in ISO 8601: the newer the date, the smaller the number. A date without a time zone is
    in UTC. A missing or malformed date gets the largest number."""
    try:
        moment = datetime.fromisoformat((date or "").strip())
    except ValueError:
        return _LAST
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    since = moment - datetime(1, 1, 1, tzinfo=UTC)
    return _LAST // 2 - ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


def _rank(value: float | None) -> int:
    """Return a number for the value of a signal: the larger the value, the smaller the number. A missing value or NaN
    gets the largest number."""
    if value is None or value != value:
        return _LAST
    bits, = struct.unpack("<Q", struct.pack("<d", value + 0.0))        # -0.0 + 0.0 is 0.0
    return bits if bits >> 63 else 2**63 - 1 - bits


def preference(records: NDArray[Any], rank: Any, prefer: Sequence[str]) -> list[NDArray[Any]]:
    """Return the arrays by which documents are ordered, the most important array first. In each array, the smallest
    value is preferred. `rank` is the priority of each document. The records, one for each document, have the fields
    `chars`, `id_hi`, `id_lo` and, where the preferences need it, `order`."""
    keys, column = [], 0
    for item in prefer:
        if item == "priority":
            keys.append(np.broadcast_to(np.asarray(rank, np.int64), len(records)))
        elif item == "longest":
            keys.append(-records["chars"].astype(np.int64))
        else:
            keys.append(records["order"][:, column])
            column += 1
    return [*keys, records["id_hi"], records["id_lo"]]


def in_order(groups: Sequence[NDArray[Any]], keys: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Return the permutation that sorts records by the arrays `groups` (the most important first), and records that are
    equal by these by the arrays `keys`."""
    return np.lexsort((*reversed(keys), *reversed(groups)))
