"""What becomes of the columns (or keys) of a record that the settings of its reader do not name as text, id, url …

`keep: all`, the default, puts each of them into `meta` with the type it has in JSON; a list keeps those and leaves the
others where they are. Numbers of the columns under `signals` become signals of the document, for the step `where`.
What neither can hold is counted in `lost` by column and reason, and a run says so once: `binary`; `too_long` (more than
MAX_VALUE characters: an embedding, a page beside its text); `invalid_utf8`; `bad_value` (a timestamp beyond the year
9999); `name_taken` (`their_NAME`, beside a column NAME that is kept by that name).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable
from decimal import Decimal
from typing import Any, Literal

from pydantic import field_validator

from stages.document import Document
from stages.stage import StageConfig, signal

#: characters of the longest value kept, of a string itself, of any other value as JSON
MAX_VALUE = 1 << 16
#: columns named in `lost`; what others lose is counted together, so that hostile keys take no memory
MAX_NAMES = 100
OTHERS = "(others)"
#: what `meta` says itself: the cluster of near-duplicates decides which documents are held out
RESERVED = frozenset({"cluster", "near_duplicates"})


class ColumnsConfig(StageConfig):
    keep: Literal["all"] | tuple[str, ...] = signal("all", "further columns to keep in meta: all, or a list")
    signals: tuple[str, ...] = signal((), "columns whose numbers become signals, for `where`")

    @field_validator("signals")
    @classmethod
    def _signals(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if "" in names or "bytes" in names or len(set(names)) < len(names):
            raise ValueError("name each column once; 'bytes' is the length of the text, which every document has")
        return names


class Columns:
    """Columns of one source. `used`: those the reader takes for something else; `reserved`: names in `meta` that the
    reader sets itself. A column of such a name is kept as `their_NAME`."""

    def __init__(self, config: ColumnsConfig, used: Iterable[str], reserved: Iterable[str] = ()) -> None:
        self.signals = config.signals
        self.all = config.keep == "all"
        self.named = () if config.keep == "all" else tuple(
            dict.fromkeys(k for k in config.keep if k and k not in config.signals))
        self._used = {*used, *config.signals} - {""}
        self._reserved = RESERVED | set(reserved)
        self.lost: dict[str, dict[str, int]] = {}

    def of(self, names: Iterable[str]) -> list[str]:
        """Those kept in `meta` of the columns `names` of a record."""
        return [name for name in names if name not in self._used] if self.all else list(self.named)

    def name(self, column: str) -> str:
        """Its key in `meta`."""
        return f"their_{column}" if column in self._reserved else column

    def taken(self, keys: Collection[str]) -> set[str]:
        """Columns among `keys` whose names in `meta` other columns have."""
        return {self.name(key) for key in keys if key in self._reserved}.intersection(keys)

    def fill(self, doc: Document, get: Callable[[str], Any], keys: Collection[str]) -> None:
        """Take the values `get(key)` of a record over into its document. Those of a column whose name is taken are lost
        wherever it stands: which of two columns `meta` holds must not depend on their order."""
        taken = self.taken(keys)
        for key in self.signals:
            value = self._value(key, get)
            number = as_number(value)
            if number is not None:
                doc.signals[key] = number
            if value is not None and (number is None or number != value):      # text, or more digits than a float has
                self._keep(doc, key, value)
        for key in keys:
            value = self._value(key, get)
            if value is not None and key in taken:
                self.lose(key, "name_taken")
            elif value is not None:
                self._keep(doc, key, value)

    def lose(self, column: str, reason: str, count: int = 1) -> None:
        """Count values that are not kept."""
        name = column if column in self.lost or len(self.lost) < MAX_NAMES else OTHERS
        reasons = self.lost.setdefault(name, {})
        reasons[reason] = reasons.get(reason, 0) + count

    def _value(self, key: str, get: Callable[[str], Any]) -> Any:
        try:
            return get(key)
        except MemoryError:
            raise
        except Exception as e:                  # Arrow makes no Python value of it, for whatever reason
            self.lose(key, "invalid_utf8" if isinstance(e, UnicodeDecodeError) else "bad_value")
            return None

    def _keep(self, doc: Document, key: str, value: Any) -> None:
        name = clean(self.name(key))
        if name in doc.meta:
            self.lose(key, "name_taken")
            return
        try:
            doc.meta[name] = json_value(value)
        except Lost as e:
            self.lose(key, str(e))


class Lost(Exception):
    """A value that `meta` cannot hold; its text is the reason."""


def as_number(value: Any) -> float | None:
    """A signal of a value; None for what is no finite number."""
    if not isinstance(value, (bool, int, float, Decimal)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def json_value(value: Any) -> Any:
    """A value as it is read back from JSON. NaN and infinity are null there. Raises Lost."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = _text(value)
    if type(value) is str:
        if len(value) > MAX_VALUE:
            raise Lost("too_long")
        return clean(value)
    if type(value) is bool or type(value) is int or (type(value) is float and math.isfinite(value)):
        return value
    try:
        plain = clean(json.dumps(value, default=_plain, ensure_ascii=False))
        if len(plain) > MAX_VALUE:
            raise Lost("too_long")
        return json.loads(plain, parse_constant=lambda _: None)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as e:
        raise Lost("bad_value") from e


def _plain(value: Any) -> str:
    """What JSON has no type for: dates, decimals, ids."""
    return _text(value) if isinstance(value, (bytes, bytearray, memoryview)) else str(value)


def _text(value: bytes | bytearray | memoryview) -> str:
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        raise Lost("binary") from None


def clean(text: str) -> str:
    """Without lone surrogates."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
