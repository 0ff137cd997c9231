"""Defines protocols (interfaces) for the objects that the engine passes to the `run` method of a barrier's task: its
inputs, its outputs, and its cursor, by which the task reports the rows that it is working on. A barrier is a step that
needs all documents at once.

The tasks are defined in `stages/`, which does not import the engine. The classes in `pipeline.engine.task` satisfy
these protocols; their docstrings say which exceptions the methods raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: nested dicts of numbers, which are summed over the tasks of a dataset. Under an outermost key that begins with
#: `max_`, the largest value is taken instead of the sum
Counters = dict[str, Any]


class Inputs(Protocol):
    """The inputs of a task: its arguments, and the files that the arguments name."""

    args: dict[str, Any]

    def fetch(self, ref: Mapping[str, Any]) -> str:
        """Return the path of a local copy of the file to which `ref` refers. The task must not write to this copy."""

    def open(self, ref: Mapping[str, Any]) -> BinaryIO:
        """Return the file to which `ref` refers, opened for seeking and reading. The engine does not verify the bytes
        of the file: the task must check them against checksums that it knows."""

    def read_range(self, ref: Mapping[str, Any], start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of the file to which `ref` refers. The engine does not verify them: the task
        must check them against checksums that it knows."""

    def damaged(self, ref: Mapping[str, Any], why: str = "is damaged: its checksum is wrong") -> Exception:
        """Return the exception that the task must raise for a damaged file: one whose bytes do not match their
        checksum, or whose contents are impossible. `ref` refers to the file. `why` is the text that follows the file's
        name in the message."""

    def segment(self, ref: Mapping[str, Any], bucket: int) -> NDArray[Any]:
        """Return the records of one bucket of an exchange file as a read-only array. An exchange file passes records,
        in numbered buckets, from a task to later tasks. `ref` refers to the file."""

    def segments(self, refs: Sequence[Mapping[str, Any]], bucket: int, *, whole: Sequence[str] = (),
                 numbered: bool = False) -> Iterator[NDArray[Any]]:
        """Yield the records of one bucket of several exchange files (files by which a task passes records to later
        tasks), in blocks. The files are all sorted by the same fields, and the records of all files are merged in this
        order. Records with equal values in the fields `whole` come in one block. With `numbered`, each record gets a
        field `source`: the index of its file in `refs`."""


class Cursor(Protocol):
    """An object by which a task reports the rows that it is working on. If the task crashes, the engine can then tell
    which rows may be to blame."""

    @property
    def set(self) -> Callable[[int, int, int], None]:
        """Return a function `set(first row, last row, stage)`. The task calls it to report which rows it is working on,
        and in which stage (by the stage's number)."""

    def clear(self) -> None:
        """Report that no row is being worked on."""


class Segments(Protocol):
    """Writes an exchange file. Such a file passes records, in numbered buckets, from a task to later tasks."""

    buckets: int

    def write(self, buckets: NDArray[Any], records: NDArray[Any]) -> None:
        """Add records to the exchange file (by which a task passes records to later tasks): record i goes to the bucket
        with the number buckets[i], an integer below `self.buckets`. Both arrays have shape [n]."""


class Out(Protocol):
    """The outputs of a task, which are named files."""

    def path(self, name: str) -> str:
        """Return the local path to which the task must write the output file called `name`."""

    def note(self, name: str, *, rows: int = 0, content: str | None = None, meta: dict[str, Any] | None = None) -> None:
        """Register facts about the output file `name`: its number of rows, its content hash (default: the sha256 of its
        bytes), and further small facts `meta`, which must be JSON values."""

    def segments(self, name: str, dtype: np.dtype[Any], buckets: int, *,
                 key: Sequence[str] | None = ()) -> AbstractContextManager[Segments]:
        """Open the exchange file `name` for writing. Such a file passes records, in numbered buckets, from a task to
        later tasks. Within a bucket, records are sorted by the fields `key`. If `key` is None, they are sorted by all
        fields; if it is (), they keep the order in which they were written."""
