"""Opens files with tokens of another project for an import, and checks the tokens in them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

import numpy as np

from pipeline.base.files import state
from tokenizer.shards.layout import ShardError, token_dtype

#: remedies, for error messages
AGAIN = "copy the file again, or write it anew"
OTHER = "give the tokenizer with which the files were written, as --tokenizer or in the recipe"
SEQUENCE = "give their sequence length: `shards import --sequence`, or `sequence:` of a source in the recipe"
#: the tokenizer is wrong if more than this share of the tokens, and more than this number of them, are outside the
#: vocabulary. Fewer may come from a damaged page of a file
MOST_OUTSIDE, FEWEST_OUTSIDE = 0.05, 50
#: fewest documents of which a majority without EOS shows that the tokenizer is wrong
FEWEST_ENDS = 4
#: parts of file names that say that documents are held out from training
HELD_OUT = {"val", "valid", "validation", "eval", "test", "heldout"}


class TokenFileError(ShardError):
    """Raised if an import cannot read files of another project. The message names the file, the place in it (if the
    error has one) and the remedy."""

    permanent = True


class WrongTokenizer(TokenFileError):
    """Raised if the tokens were made by another tokenizer than the given one. A damaged file can be skipped, but a
    wrong tokenizer spoils all files of a source."""


class Coding(NamedTuple):
    """What an import needs to know about the tokenizer with which the tokens were made."""

    sha256: str
    vocab_size: int
    eos: int


@dataclass(frozen=True)
class ImportLimits:
    """How much an import reads at a time, and what it refuses to read. With these limits, memory does not grow with the
    size of a file.

    Documents are read whole, about `block_tokens` tokens at a time. An index is read `index_entries` entries at a time.
    A document of more than `longest` tokens is refused: most likely, the ends of documents were not found. At most
    `rows` rows of a Parquet file are read at a time, and decoding them may take at most `memory` bytes. This limit is
    needed because a row of 611 bytes may decode to 200 million tokens."""

    block_tokens: int = 1 << 22
    longest: int = 1 << 28
    index_entries: int = 1 << 18
    rows: int = 1 << 4
    memory: int = 3 << 30


LIMITS = ImportLimits()


class StoredFile(Protocol):
    """A file in object storage, open for reading. It can also be used as a binary file, as readers of gzip and Parquet
    need it."""

    size: int

    def read_at(self, start: int, size: int) -> bytes:
        """Read up to `size` bytes from byte `start` on. Raises OSError when the object has become shorter."""

    def is_unchanged(self) -> bool:
        """Whether the object is still the one that was opened."""

    def close(self) -> None: ...


class StoredFiles(Protocol):
    """The files below a folder of object storage. `sizes` are their sizes in bytes, by name, and `states` are values
    that change when an object is written again."""

    sizes: Mapping[str, int]
    states: Mapping[str, str]

    def open(self, name: str) -> StoredFile: ...


class TokenFile:
    """A file of another project, open for reading at any position. `path` is its name in messages. `place` is where it
    is on this machine, or the open file of object storage; the default is `path`.

    Every read is compared with the size of the file before memory is allocated. So a damaged header with an absurd
    count leads to an error, not to a lack of memory.
    """

    def __init__(self, path: Path, place: Path | StoredFile | None = None) -> None:
        self.path, self._stored = path, None if place is None or isinstance(place, Path) else place
        if self._stored is not None:
            self.file, self.size = cast(BinaryIO, self._stored), self._stored.size
            return
        self._local = place if isinstance(place, Path) else path
        try:
            if not stat.S_ISREG(self._local.stat().st_mode):      # opening a pipe would wait for its writer
                raise TokenFileError(f"{path}: is no file; name a file, or a folder of files")
            self.file = cast(BinaryIO, open(self._local, "rb", buffering=0))  # noqa: SIM115  closed by `close`
        except OSError as e:
            raise TokenFileError(f"{path}: cannot be read ({e.strerror})") from e
        info = os.fstat(self.file.fileno())
        self.size, self._state = info.st_size, state(info)

    def read(self, start: int, size: int) -> bytes:
        """Read `size` bytes from byte `start`. Raises TokenFileError when the file is shorter."""
        if start + size > self.size:
            raise TokenFileError(f"{self.path}: ends at byte {self.size:,}, but needs {start + size:,}: truncated: "
                                 f"{AGAIN}")
        pieces = []
        while size:
            try:
                piece = os.pread(self.file.fileno(), size, start) if self._stored is None else \
                    self._stored.read_at(start, size)
            except OSError as e:
                raise TokenFileError(f"{self.path}: cannot be read at byte {start:,} ({e.strerror})") from e
            if not piece:
                raise self._changed()
            pieces.append(piece)
            start, size = start + len(piece), size - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def array(self, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Read `count` numbers of type `dtype` from byte `start` on."""
        return np.frombuffer(self.read(start, count * dtype.itemsize), dtype)

    def place(self, byte: int, width: int) -> Callable[[int], str]:
        """Return a function that formats the place of token i as "FILE: byte N", for error messages. Token 0 begins at
        byte `byte`, and each token has `width` bytes."""
        return lambda token: f"{self.path}: byte {byte + token * width:,}"

    def count(self, dtype: np.dtype, start: int = 0) -> int:
        """Return how many numbers of type `dtype` the file has from byte `start` on. Raises TokenFileError when this is
        no whole number."""
        size = self.size - start
        if size < 0 or size % dtype.itemsize:
            raise TokenFileError(f"{self.path}: {size:,} bytes from byte {start:,} are no whole number of {dtype.name}"
                                 f": truncated, or of another type: {AGAIN}")
        return size // dtype.itemsize

    def close(self) -> None:
        self.file.close()

    def check_unchanged(self) -> None:
        """Raise TokenFileError when the file was written or replaced since it was opened."""
        if self._stored is not None:
            if not self._stored.is_unchanged():
                raise self._changed()
            return
        try:
            infos = os.fstat(self.file.fileno()), self._local.stat()
        except OSError:
            raise self._changed() from None
        if any(state(info) != self._state for info in infos):
            raise self._changed()

    def _changed(self) -> TokenFileError:
        return TokenFileError(f"{self.path}: changed while it was read; import it when nothing writes to it any more")


class ImportSource:
    """The files of another project that are imported: the folder or file `path`. `coding` describes the tokenizer that
    made the tokens. `progress` is called after each read, with the number of bytes that were read.

    By default the source has all files below `path`. With `names`, it has only these files below the folder `path`, and
    `find` maps such a name to the path of the file on this machine. With `stored`, it has the files of this folder of
    object storage, and `path` is used only in messages.

    With `sequence` = L, the files have rows (training samples) instead of documents. A row has L + 1 tokens, or the
    first L of them if `ImportFormat.keeps_rows` is false. Each document that is read is then a piece of a document in a
    row, and need not end in EOS (`tokenizer.imports.rows`)."""

    def __init__(self, path: Path, coding: Coding, progress: Callable[[int], None] = lambda size: None,
                 names: Collection[str] | None = None, find: Callable[[str], str] | None = None,
                 sequence: int = 0, limits: ImportLimits = LIMITS, stored: StoredFiles | None = None) -> None:
        self.path, self.coding, self.progress, self.sequence, self.limits = path, coding, progress, sequence, limits
        self._stored, self._find = stored, find
        names = names if stored is None else stored.sizes
        self._names = None if names is None else frozenset(names)
        self.is_folder = names is not None or path.is_dir()
        self.folder = path if self.is_folder else path.parent
        #: type of tokens in the shard set
        self.dtype = token_dtype(coding.vocab_size)

    def files(self, suffix: str) -> list[str]:
        """Return the files whose names end in `suffix`, relative to the folder and sorted. Hidden files and files below
        hidden folders are left out.

        Raises TokenFileError when there is no such file, or when a folder below the source is a symbolic link. Also
        raises it when some but not all names say that a file is held out from training, such as `val_…`."""
        if self._names is not None:
            names = visible(name for name in self._names if name.endswith(suffix))
        elif not self.path.exists():
            raise TokenFileError(f"{self.path}: does not exist; name a file, or a folder of files")
        elif not self.is_folder:
            names = [self.path.name]
        else:
            if linked := next((path for path in self.path.rglob("*") if path.is_symlink() and path.is_dir()), None):
                raise TokenFileError(f"{linked}: is a symbolic link to a folder, which an import does not follow; name "
                                     f"the folder itself, or put the files there")
            names = visible(path.relative_to(self.path).as_posix() for path in self.path.rglob(f"*{suffix}")
                            if not path.is_dir())
        if not names or not names[0].endswith(suffix):
            raise TokenFileError(f"{self.path}: no file *{suffix}; see that the format is that of the files")
        held_out = [name for name in names if HELD_OUT & set(re.split(r"[-_./]", name.lower()))]
        if held_out and len(held_out) < len(names):
            raise TokenFileError(f"{self.folder / held_out[0]}: seems to be held out from training, unlike "
                                 f"{next(name for name in names if name not in held_out)}; import a folder without it")
        return names

    def size(self, names: Sequence[str]) -> int:
        """Return the size of files in bytes, for reports of progress. Files that cannot be read count as empty."""
        if self._stored is not None:
            return sum(self._stored.sizes.get(name, 0) for name in names)
        size = 0
        for name in names:
            with contextlib.suppress(OSError):
                size += (self.folder / name).stat().st_size
        return size

    def state(self, name: str) -> str:
        """Return a value that changes when a file is written or replaced; "" if it cannot be read."""
        if self._stored is not None:
            return self._stored.states.get(name, "")
        with contextlib.suppress(OSError):
            return state((self.folder / name).stat())
        return ""

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file() if self._names is None else name in self._names

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[TokenFile]:
        """A context manager for reading a file. Raises TokenFileError if the file is missing or cannot be read.

        Raises TokenFileError at the end of the context if another program has changed the file meanwhile. If the body
        has raised a TokenFileError, this error replaces it, because the change is probably the cause."""
        try:
            name.encode()
        except UnicodeError:
            raise TokenFileError(f"{self.folder / name}: its name is no UTF-8; rename it") from None
        if self._names is not None and name not in self._names:
            raise TokenFileError(f"{self.folder / name}: is missing; add it, or see that the path of the source has it")
        file = TokenFile(self.folder / name, self._stored.open(name) if self._stored is not None else
                         None if self._find is None else Path(self._find(name)))
        try:
            yield file
        except TokenFileError:
            file.check_unchanged()
            raise
        else:
            file.check_unchanged()
        finally:
            file.close()

    def checked(self, tokens: np.ndarray, place: Callable[[int], str]) -> np.ndarray:
        """Return tokens in the dtype of the shard set. Raises TokenFileError when a token is outside the vocabulary,
        and WrongTokenizer when many tokens are outside it. `place` returns the file and byte of a token, for the
        message."""
        if len(tokens) and (int(tokens.max()) >= self.coding.vocab_size or int(tokens.min()) < 0):
            outside = np.flatnonzero((tokens < 0) | (tokens >= self.coding.vocab_size))
            wrong = int(outside[0])
            if len(outside) > max(MOST_OUTSIDE * len(tokens), FEWEST_OUTSIDE):
                raise WrongTokenizer(f"{place(wrong)}: {len(outside):,} of {len(tokens):,} tokens are outside the "
                                     f"vocabulary of {self.coding.vocab_size:,} tokens, such as {int(tokens[wrong])}; "
                                     f"{OTHER}, or see that the files are undamaged")
            raise TokenFileError(f"{place(wrong)}: token id {int(tokens[wrong])} is outside the vocabulary of "
                                 f"{self.coding.vocab_size:,} tokens; {OTHER}, or see that the files are undamaged")
        return tokens.astype(self.dtype, copy=False)

    def check_ends(self, tokens: np.ndarray, ends: np.ndarray, place: Callable[[int], str]) -> None:
        """Raise TokenFileError when a document does not end in EOS. If there are several documents, and more than half
        of them do not, raise WrongTokenizer instead. `ends` are the exclusive ends of the documents in `tokens`.
        `place` returns the file and byte of a token, for the message. Nothing is checked if the files have rows
        (`sequence`), whose pieces need no EOS."""
        wrong = np.flatnonzero(tokens[ends - 1] != self.coding.eos)
        if len(wrong) and not self.sequence:
            last = int(ends[wrong[0]]) - 1
            if len(ends) >= FEWEST_ENDS and 2 * len(wrong) > len(ends):
                raise WrongTokenizer(f"{place(last)}: {len(wrong):,} of {len(ends):,} documents do not end in EOS "
                                     f"({self.coding.eos}), but the first of them in token id {int(tokens[last])}; "
                                     f"{OTHER}, or encode the texts again with EOS at their ends; if these are rows of "
                                     f"a training, {SEQUENCE}")
            raise TokenFileError(f"{place(last)}: a document ends in token id {int(tokens[last])}, not in EOS "
                                 f"({self.coding.eos}); {OTHER}, or encode the texts again with EOS at their ends; if "
                                 f"these are rows of a training, {SEQUENCE}")


def visible(names: Iterable[str]) -> list[str]:
    """Return names of files, sorted, without hidden files and files below hidden folders."""
    return sorted(name for name in names if not any(part.startswith(".") for part in name.split("/")))
