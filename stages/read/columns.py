"""Copies columns (or keys) of a record to the document's `meta`: the columns that the settings of the reader do not
name as text, id, url …

The setting `keep: all`, the default, puts each of these columns into `meta` with its JSON type. If `keep` is a list,
only the columns in it are kept. The numbers in the columns that the setting `signals` lists become signals of the
document, by which the step `where` can filter. Some names in `meta` are reserved for the pipeline and the reader. A
column NAME whose name is reserved is kept as `their_NAME`.

Values that cannot be kept are counted in `lost` by column and reason, and a run reports them once. The reasons are:

- `binary`: bytes that are no UTF-8 text; with `keep: all`, every value of a table's binary column
- `too_long`: more than MAX_VALUE characters, such as an embedding, or a page beside its text
- `invalid_utf8`: a string that is not valid UTF-8
- `bad_value`: a value that Python or JSON cannot hold, such as a timestamp beyond the year 9999
- `name_taken`: `meta` already has another value of this name
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

#: most characters of a kept value: of a string itself, of any other value as JSON
MAX_VALUE = 1 << 16
#: most columns named in `lost`; the losses of others are counted together, so that hostile keys take no memory
MAX_NAMES = 100
OTHERS = "(others)"
#: Keys of `meta` that the pipeline sets. A column must not forge them, since the cluster of near-duplicates decides
#: which documents are held out for evaluation.
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
    """Decides which columns of a source's records are kept in the documents' `meta`, and copies their values. `used`
    are columns that the reader uses for another purpose, for instance as text. `reserved` are names in `meta` that the
    reader sets itself. A column NAME whose name is reserved is kept as `their_NAME`."""

    def __init__(self, config: ColumnsConfig, used: Iterable[str], reserved: Iterable[str] = ()) -> None:
        self.signals = config.signals
        self.all = config.keep == "all"
        self.named = () if config.keep == "all" else tuple(
            dict.fromkeys(k for k in config.keep if k and k not in config.signals))
        self._used = {*used, *config.signals} - {""}
        self._reserved = RESERVED | set(reserved)
        self.lost: dict[str, dict[str, int]] = {}

    def of(self, names: Iterable[str]) -> list[str]:
        """Return the columns that are kept in `meta` from a record that has the columns `names`."""
        return [name for name in names if name not in self._used] if self.all else list(self.named)

    def name(self, column: str) -> str:
        """Return the key in `meta` under which a column is kept."""
        return f"their_{column}" if column in self._reserved else column

    def name_conflicts(self, keys: Collection[str]) -> set[str]:
        """Return the columns among `keys` that cannot be kept in `meta`, because another column takes their name. If
        NAME is reserved, the column NAME is kept as `their_NAME`, and a column `their_NAME` of the same record is
        lost."""
        return {self.name(key) for key in keys if key in self._reserved}.intersection(keys)

    def fill(self, doc: Document, get: Callable[[str], Any], keys: Collection[str]) -> None:
        """Copy the values of the columns `keys` into `doc.meta`. `get(key)` returns the value of a column.

        The columns that the setting `signals` lists are read, too. Their finite numbers go into `doc.signals`. Text,
        and a number that a float cannot hold exactly, go into `meta`.

        If two columns would have the same name in `meta`, the column that was renamed (`their_NAME`) is kept. The other
        is lost, whatever the order of the two.
        """
        conflicts = self.name_conflicts(keys)
        for key in self.signals:
            value = self._value(key, get)
            number = as_number(value)
            if number is not None:
                doc.signals[key] = number
            if value is not None and (number is None or number != value):      # text, or more digits than a float has
                self._keep(doc, key, value)
        for key in keys:
            value = self._value(key, get)
            if value is not None and key in conflicts:
                self.lose(key, "name_taken")
            elif value is not None:
                self._keep(doc, key, value)

    def lose(self, column: str, reason: str, count: int = 1) -> None:
        """Count `count` values of a column that are not kept in `meta`."""
        name = column if column in self.lost or len(self.lost) < MAX_NAMES else OTHERS
        reasons = self.lost.setdefault(name, {})
        reasons[reason] = reasons.get(reason, 0) + count

    def _value(self, key: str, get: Callable[[str], Any]) -> Any:
        try:
            return get(key)
        except MemoryError:
            raise
        except Exception as e:                  # Arrow cannot convert it to Python, for whatever reason
            self.lose(key, "invalid_utf8" if isinstance(e, UnicodeDecodeError) else "bad_value")
            return None

    def _keep(self, doc: Document, key: str, value: Any) -> None:
        name = clean(self.name(key))
        if name in doc.meta:
            self.lose(key, "name_taken")
            return
        try:
            doc.meta[name] = json_value(value)
        except NotKept as e:
            self.lose(key, str(e))


class NotKept(Exception):
    """Raised for a value that a document's `meta` cannot hold. The text of the exception is the reason."""


def as_number(value: Any) -> float | None:
    """Return a value as a float for a signal; None if it is not a finite number."""
    if not isinstance(value, (bool, int, float, Decimal)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def json_value(value: Any) -> Any:
    """Return a value in the form that it has after it was written as JSON and read again. NaN and infinity become None.
    Raises NotKept if a document's `meta` cannot hold the value."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = _text(value)
    if type(value) is str:
        if len(value) > MAX_VALUE:
            raise NotKept("too_long")
        return clean(value)
    if type(value) is bool or type(value) is int or (type(value) is float and math.isfinite(value)):
        return value
    try:
        plain = clean(json.dumps(value, default=_plain, ensure_ascii=False))
        if len(plain) > MAX_VALUE:
            raise NotKept("too_long")
        return json.loads(plain, parse_constant=lambda _: None)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as e:
        raise NotKept("bad_value") from e


def _plain(value: Any) -> str:
    """Return the text of a value whose type JSON lacks, such as a date, a decimal or a UUID."""
    return _text(value) if isinstance(value, (bytes, bytearray, memoryview)) else str(value)


def _text(value: bytes | bytearray | memoryview) -> str:
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        raise NotKept("binary") from None


def clean(text: str) -> str:
    """Return the text with lone surrogates replaced by U+FFFD, and surrogate pairs by the characters that they
    encode."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
