"""What a task of a barrier may use: the arguments, the crash cursor and the outputs that the engine hands to its `run`.

A barrier's tasks live in `stages/`, which knows nothing of the engine. `pipeline.engine.task` has the classes that
satisfy these protocols, and says there what their methods raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: nested dicts of numbers, which are added up over the tasks of a dataset; of outermost keys `max_…` the largest counts
Counters = dict[str, Any]


class Inputs(Protocol):
    """What a task may read: its arguments and the files they name."""

    args: dict[str, Any]

    def fetch(self, ref: Mapping[str, Any]) -> str:
        """Path on local disk of a file, not to be written to."""

    def open(self, ref: Mapping[str, Any]) -> BinaryIO:
        """A file to seek and read in. Its bytes are unchecked: the task compares them with sums of its own."""

    def damaged(self, ref: Mapping[str, Any]) -> Exception:
        """The error to raise over a file whose bytes do not have their sum."""

    def segment(self, ref: Mapping[str, Any], bucket: int) -> NDArray[Any]:
        """Records of one bucket of an exchange file, read-only."""

    def segments(self, refs: Sequence[Mapping[str, Any]], bucket: int, *, whole: Sequence[str] = (),
                 numbered: bool = False) -> Iterator[NDArray[Any]]:
        """Records of one bucket of many exchange files, merged by their key, in blocks. `whole`: fields whose equal
        values are never cut by the end of a block; `numbered`: with a field `source`, the number of the file."""


class Cursor(Protocol):
    """Where a task says which rows it works on, so that a crash is charged to them."""

    @property
    def set(self) -> Callable[[int, int, int], None]:
        """set(first row, last row, stage)"""

    def clear(self) -> None:
        """From here on no row is worked on."""


class Segments(Protocol):
    """An exchange file that is being written."""

    buckets: int

    def write(self, buckets: NDArray[Any], records: NDArray[Any]) -> None:
        """Add records [n] to buckets [n] (integers below `self.buckets`)."""


class Out(Protocol):
    """Where a task writes: named files."""

    def path(self, name: str) -> str:
        """Local path to write the output file `name` to."""

    def note(self, name: str, *, rows: int = 0, content: str | None = None, meta: dict[str, Any] | None = None) -> None:
        """Say what an output holds: its rows, its content hash (default: sha256 of the bytes) and small JSON facts."""

    def segments(self, name: str, dtype: np.dtype[Any], buckets: int, *,
                 key: Sequence[str] | None = ()) -> AbstractContextManager[Segments]:
        """Write the exchange file `name`; inside a bucket records are sorted by the fields `key`."""
