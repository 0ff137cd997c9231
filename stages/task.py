"""Protocols of what a barrier's task may use: the arguments, the crash cursor and the outputs that the engine passes to
its `run`.

Tasks live in `stages/`, which knows nothing of the engine. The classes in `pipeline.engine.task` satisfy these
protocols and document what their methods raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: nested dicts of numbers, added up over the tasks of a dataset; for outermost keys `max_…` the largest value counts
#: instead
Counters = dict[str, Any]


class Inputs(Protocol):
    """The inputs of a task: its arguments and the files they name."""

    args: dict[str, Any]

    def fetch(self, ref: Mapping[str, Any]) -> str:
        """Path of a file on local disk, which must not be written to."""

    def open(self, ref: Mapping[str, Any]) -> BinaryIO:
        """A file open for seeking and reading. Its bytes are not checked; the task compares them with its own
        checksums."""

    def damaged(self, ref: Mapping[str, Any]) -> Exception:
        """The error to raise for a file whose bytes do not match their checksum."""

    def segment(self, ref: Mapping[str, Any], bucket: int) -> NDArray[Any]:
        """Records of one bucket of an exchange file, read-only."""

    def segments(self, refs: Sequence[Mapping[str, Any]], bucket: int, *, whole: Sequence[str] = (),
                 numbered: bool = False) -> Iterator[NDArray[Any]]:
        """Records of one bucket of several exchange files, merged by their key, in blocks. Equal values of the fields
        `whole` are never split between blocks. With `numbered`, records have a field `source`, the number of their
        file."""


class Cursor(Protocol):
    """A task reports here which rows it works on, so that a crash is charged to them."""

    @property
    def set(self) -> Callable[[int, int, int], None]:
        """A function `set(first row, last row, stage)` that reports the rows being worked on."""

    def clear(self) -> None:
        """Report that no row is being worked on."""


class Segments(Protocol):
    """An exchange file being written."""

    buckets: int

    def write(self, buckets: NDArray[Any], records: NDArray[Any]) -> None:
        """Add record i to bucket buckets[i], an integer below `self.buckets`. Both arrays have shape [n]."""


class Out(Protocol):
    """The outputs of a task: named files."""

    def path(self, name: str) -> str:
        """Local path of the output file `name`, for writing."""

    def note(self, name: str, *, rows: int = 0, content: str | None = None, meta: dict[str, Any] | None = None) -> None:
        """Describe an output: its rows, its content hash (default: sha256 of the bytes) and small JSON facts."""

    def segments(self, name: str, dtype: np.dtype[Any], buckets: int, *,
                 key: Sequence[str] | None = ()) -> AbstractContextManager[Segments]:
        """Open the exchange file `name` for writing. Within a bucket records are sorted by the fields `key` (None: by
        all), or stay in the order of writing."""
