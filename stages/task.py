"""Protocols of the objects that the engine passes to the `run` method of a barrier's task: its inputs, its crash cursor
and its outputs. (A barrier is a step that needs all documents at once.)

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
    """The inputs of a task: its arguments and the files they name."""

    args: dict[str, Any]

    def fetch(self, ref: Mapping[str, Any]) -> str:
        """Return the path of a copy of the file on local disk. Do not write to it."""

    def open(self, ref: Mapping[str, Any]) -> BinaryIO:
        """Open a file for seeking and reading. Its bytes are not verified: the task must check them against checksums
        that it keeps itself."""

    def damaged(self, ref: Mapping[str, Any]) -> Exception:
        """The error to raise for a file whose bytes do not match their checksum."""

    def segment(self, ref: Mapping[str, Any], bucket: int) -> NDArray[Any]:
        """Return the records of one bucket as a read-only array. `ref` is an exchange file: records in numbered
        buckets, by which a task passes data to later tasks."""

    def segments(self, refs: Sequence[Mapping[str, Any]], bucket: int, *, whole: Sequence[str] = (),
                 numbered: bool = False) -> Iterator[NDArray[Any]]:
        """Yield the records of one bucket from several exchange files, in blocks. They are merged in the order of the
        key that the files are sorted by. Records with equal values in the fields `whole` come in the same block. With
        `numbered`, each record gets a field `source`: the index of its file in `refs`."""


class Cursor(Protocol):
    """A task reports through this object which rows it is working on, so that a crash can be attributed to them."""

    @property
    def set(self) -> Callable[[int, int, int], None]:
        """A function `set(first row, last row, stage)` that reports the rows being worked on."""

    def clear(self) -> None:
        """Report that no row is being worked on."""


class Segments(Protocol):
    """Writer of an exchange file: records in numbered buckets, by which a task passes data to later tasks."""

    buckets: int

    def write(self, buckets: NDArray[Any], records: NDArray[Any]) -> None:
        """Add record i to bucket buckets[i], an integer below `self.buckets`. Both arrays have shape [n]."""


class Out(Protocol):
    """The outputs of a task: named files."""

    def path(self, name: str) -> str:
        """Local path of the output file `name`, for writing."""

    def note(self, name: str, *, rows: int = 0, content: str | None = None, meta: dict[str, Any] | None = None) -> None:
        """Describe an output file: its number of rows, its content hash (default: the sha256 of its bytes), and further
        small facts as JSON."""

    def segments(self, name: str, dtype: np.dtype[Any], buckets: int, *,
                 key: Sequence[str] | None = ()) -> AbstractContextManager[Segments]:
        """Open the exchange file `name` for writing. Within a bucket, records are sorted by the fields `key`. None
        sorts by all fields; () keeps the order in which the records were written."""
