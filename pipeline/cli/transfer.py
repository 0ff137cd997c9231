"""Copies folders between object storage and this machine, for commands that work on local folders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipeline.base.clock import SYSTEM
from pipeline.base.errors import TokenmillError
from pipeline.base.files import file_sha256
from pipeline.base.scratch import Scratch
from pipeline.cli.errors import BadUsage
from pipeline.cli.options import check_root
from pipeline.store.fs import Store

#: name of the object that marks a folder as incomplete while its objects are uploaded
MARK = "INCOMPLETE"


def is_url(place: str | Path) -> bool:
    return "://" in str(place)


@contextlib.contextmanager
def local_copy(url: str, option: str, names: Callable[[Store], Sequence[str]] | None = None) -> Iterator[Path]:
    """A context manager for reading a folder of object storage. It yields a folder of this machine with a copy of the
    objects below `url`, or of those that `names` returns. `option` is the command-line option that has given `url`, for
    messages. The messages of TokenmillErrors that are raised in the `with` block name the URL, not the copy."""
    check_root(url, option)
    store = Store(url)
    with Scratch() as scratch:
        folder = Path(scratch.path, "copy")
        paths = list(store.list("")) if names is None else names(store)
        if not paths:
            raise BadUsage(f"{option} {url}: there is no folder with files")
        if MARK in paths:
            raise BadUsage(f"{option} {url}: has {MARK}: a command still writes there, or was killed; wait for it, or "
                           f"write the folder again")
        for path in paths:
            if ".." in path.split("/") or path.startswith("/"):
                raise BadUsage(f"{option} {store.at(path)}: cannot be copied to a folder; rename it")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with open(folder / path, "wb") as file, store.open(path) as source:
                while block := source.read(1 << 24):
                    file.write(block)
        with naming(str(folder), store.root):
            yield folder


@contextlib.contextmanager
def uploaded(url: str, option: str) -> Iterator[Path]:
    """A context manager for writing a folder of object storage. It yields a path of this machine at which the `with`
    block creates a folder. At the end of the block, the folder's files are uploaded to `url`, below which there must be
    no objects. `option` is the command-line option that has given `url`, for messages. The messages of TokenmillErrors
    that are raised in the block name the URL, not the folder.

    In object storage, a folder cannot appear all at once: its objects appear one by one. So the object MARK is created
    first and removed last, and `local_copy` refuses a folder that has MARK. Only one of two writers can create MARK. An
    index is uploaded after the files that it names.

    If an upload fails, the objects are removed, unless another command uploads the same folder. If the process is
    killed, they stay, and so does MARK, which holds a sha256 of the whole folder. The same command, given again, has
    the same sha256 and uploads the missing objects. A command whose folder has other contents is refused."""
    store = unused_store(url, option)
    with Scratch() as scratch:
        folder = Path(scratch.path, "folder")
        with naming(str(folder), store.root):
            yield folder
        paths = sorted((path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()),
                       key=index_last)
        own = f"{file_sha256(folder)} {SYSTEM.new_id()}".encode()
        if not claim(store, option, own) <= {*paths}:
            raise claimed(store, option)
        try:
            for path in paths:
                if store.size(path) != (folder / path).stat().st_size:         # objects of the same sha256 are whole
                    store.upload(str(folder / path), path)
        except BaseException:
            if store.exists(MARK) and store.read(MARK) == own:                 # no other process completes the folder
                for path in reversed(paths):          # indices first
                    store.remove(path)
                store.remove(MARK)
            raise
        store.remove(MARK)


def unused_store(url: str, option: str) -> Store:
    """Return the store of a new folder. Raises BadUsage if the folder has objects, but no MARK."""
    check_root(url, option)
    store = Store(url)
    here = list(store.list(""))
    if here and MARK not in here:
        raise BadUsage(f"{option} {url}: has {here[0]}: the folder is not empty; name a new folder, or remove it first")
    return store


def claim(store: Store, option: str, own: bytes) -> set[str]:
    """Create MARK with the contents `own`, whose first word identifies the contents of the folder. Returns the objects
    that are there. There are none, unless a command that writes the same contents was killed, or runs at this moment;
    its MARK is replaced. Raises BadUsage when the folder has a MARK with another first word, or objects without a
    MARK."""
    if store.put_absent(MARK, own):
        if all(path == MARK for path in store.list("")):
            return set()
        store.remove(MARK)
        raise BadUsage(f"{option} {store.root}: another command has written there; name a new folder")
    if store.read(MARK).split(b" ")[0] != own.split(b" ")[0]:
        raise claimed(store, option)
    store.write(MARK, own)
    return {*store.list("")} - {MARK}


def claimed(store: Store, option: str) -> BadUsage:
    return BadUsage(f"{option} {store.root}: has {MARK}: another command writes there, or was killed; name a new "
                    f"folder, or remove it first")


def index_last(path: str) -> tuple[bool, bool, str]:
    """Return a key that sorts the paths of a folder in the order of their upload: first all other files, then the
    indices, which name them. Among files of the same kind, those of the training set (split=train) come last."""
    name = path.rpartition("/")[2]
    return name in ("index.json", "shards.json"), "split=train" in path, path


@contextlib.contextmanager
def naming(folder: str, url: str) -> Iterator[None]:
    """A context manager that replaces `folder` by `url` in the messages of TokenmillErrors that are raised in the
    `with` block."""
    try:
        yield
    except TokenmillError as e:
        e.args = tuple(arg.replace(folder, url) if isinstance(arg, str) else arg for arg in e.args)
        raise
