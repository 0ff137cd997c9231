"""Supports runs in object storage: copies the files that a training reads to this machine's disk, once.

The trainer reads shards (files of tokens) at random positions through memory maps, so they are copied to local files.
If the disk is too small, or with `train.fetch: ahead`, the tokens to train on stay in object storage and are read
shortly before they are needed (`trainer.data.read_ahead`).

Shard files are immutable and named by their content, so files already copied are reused. Fetched shard files are
compared with their sha256 in the manifest of the set, which the curriculum names by its sha256. The copy has the same
folders as the store. All ranks of a machine share the copy: the first rank fetches, the others wait. Tools that look up
a few documents read them directly from object storage (`place`).

Access is by pyarrow's own filesystems (S3 and Google Cloud Storage), with credentials from the environment, so a GPU
node needs no further package. The copy is in `TOKENMILL_SHARDS`, by default `tokenmill-UID/shards` below the system's
folder for temporary files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from pyarrow import fs

from pipeline.base.files import replacing
from tokenizer.mixture.curriculum import Curriculum, Stream
from tokenizer.shards.layout import ENDS, MANIFEST, Manifest
from tokenizer.shards.packed import NUMBERS, Packing
from tokenizer.shards.reader import ShardSet
from trainer.base.config import ConfigError
from trainer.data.read_ahead import RemoteShardSet, request_threads

#: number of bytes per read, and number of files fetched in parallel
BLOCK, FILES = 8 << 20, 8
#: files of a run that a training reads besides its shards
SMALL = ("curriculum.json", "recipe.yaml")


class Stored(Protocol):
    """An object that says where a run is stored. `store` is the local folder of the store. `source` is the URL of the
    store if it was fetched from object storage, else None."""

    @property
    def store(self) -> Path: ...

    @property
    def source(self) -> str | None: ...


def is_url(place: str | None) -> bool:
    return place is not None and "://" in place and not place.startswith("file://")


def split_run(run: str, store: str | None) -> tuple[str, str]:
    """Split the address of a run in object storage into (URL of the store, name of the run). The address is
    STORE/runs/RUN, or the name of the run with the URL `store`. Raises ConfigError for another form, and if the URL has
    a user name or password."""
    for address in (run, store):
        scheme, _, location = (address or "").partition("://")
        # the message does not show the URL, because messages end up in logs
        if is_url(address) and {"@", ":"} & set(location.partition("/")[0]):
            raise ConfigError(f"{scheme}://…: leave name and password out of the URL; credentials come from the "
                              f"environment (docs/storage.md)")
    if not is_url(run):
        return str(store).rstrip("/"), run
    root, slash, name = run.rstrip("/").rpartition("/runs/")
    if not slash or "/" in name or (store and store.rstrip("/") != root):
        raise ConfigError(f"{run}: give STORE/runs/RUN, or the name of the run with --store")
    return root, name


def fetch_run(root: str, name: str) -> Path:
    """Fetch the small files of a run, curriculum.json and recipe.yaml, from the store at the URL `root`. They are
    fetched again even if there are local copies. Returns the folder of the run in the local copy of the store."""
    remote, top = _open(root)
    store = _local(root)
    folder = store / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in SMALL:
        try:
            _fetch(remote, f"{top}/runs/{name}/{file}", folder / file, None)
        except FileNotFoundError:
            raise ConfigError(f"{root}/runs/{name}/{file}: no such file; give a run that has shards and a curriculum "
                              f"(STORE/runs/RUN), or its name with --store") from None
        except OSError as error:
            raise _unreachable(root, error) from None
    return folder


def fetch_shards(root: str, curriculum: Curriculum, say: Callable[[str], None], fetch: str = "auto") -> Path:
    """Fetch the shards that a training reads, i.e. those of all shard sets for which the curriculum has a sha256, and
    the tokenizer if there is one. Returns the folder of the local copy of the store.

    `fetch` is `train.fetch` of the recipe: with `ahead`, the tokens to train on stay in object storage; with `auto`,
    they stay there if the disk is too small. Raises ConfigError when shards are missing, damaged, or too large for the
    disk, and when the storage cannot be read.
    """
    remote, top = _open(root)
    store = _local(root)
    try:
        with _alone(store):
            missing = [file for file in _pinned(remote, top, store, curriculum)
                       if not _complete(store / file.path, file.size)]
            free = shutil.disk_usage(store).free
            if fetch == "ahead" or (fetch == "auto" and _size(missing) > free):
                staying = [file for file in missing if file.may_stay]
                missing = [file for file in missing if not file.may_stay]
                if staying:
                    say(f"{_size(staying) / 1e9:.2f} GB of tokens stay in {root} and are read while the training runs")
            if _size(missing) > free:
                remedy = ", or train.fetch to ahead" if fetch == "all" else ""
                raise ConfigError(f"{root}: its shards are {_size(missing) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
                                  f"free in {store}; set TOKENMILL_SHARDS to a folder on a larger disk{remedy}")
            if missing:
                say(f"fetching {len(missing)} files of shards ({_size(missing) / 1e9:.2f} GB) to {store}")
            with ThreadPoolExecutor(FILES) as pool:
                list(pool.map(lambda file: _fetch(remote, f"{top}/{file.path}", store / file.path, file.sha256),
                              missing))
            with contextlib.suppress(FileNotFoundError):        # the tokenizer is needed only to print samples
                path = curriculum.tokenizer.path
                _fetch(remote, f"{top}/{path}", _inside(store, path), None)
    except FileNotFoundError as error:
        raise ConfigError(f"{root}: a shard set the curriculum pins is not there ({error}); restore it, or resolve the "
                          f"curriculum again by running its recipe") from None
    except OSError as error:
        raise _unreachable(root, error) from None
    return store


def training_sets(store: Path, source: str | None, streams: Sequence[Stream]) -> list[ShardSet]:
    """Open the training shards of the streams (data sources) in the folder `store`. If it is a copy of the store at the
    URL `source`, the tokens of sets that have not been copied whole are read from there."""
    sets, pool = [ShardSet(store / stream.train, stream.sha256, packing=stream.packing) for stream in streams], None
    for number, (shards, stream) in enumerate(zip(sets, streams) if source is not None else ()):
        if all(_complete(shards.folder / info.body, info.tokens * shards.dtype.itemsize)
               and (not info.loss or _complete(shards.folder / info.loss, info.tokens))
               for info in shards.manifest.shards):
            continue
        pool = pool or request_threads()
        remote, top = _open(str(source))
        folder = shards.folder.relative_to(store).as_posix()
        sets[number] = RemoteShardSet(store / stream.train, stream.sha256, remote, f"{top}/{folder}", pool,
                                      stream.packing)
    return sets


def place(run: Stored) -> tuple[fs.FileSystem, str]:
    """Return where the store of a run is, as (filesystem, path in it). For a run in object storage, this is the store
    there, not its local copy."""
    return _open(run.source) if run.source else (fs.LocalFileSystem(), str(run.store))


def shard_set(run: Stored, stream: Stream) -> ShardSet:
    """Open the training shards of a stream (data source) in the run's store itself, not in the local copy. If the store
    is in object storage, only the manifest and the document tables can be read."""
    remote, top = place(run)
    return ShardSet(_inside(Path(top), stream.train), stream.sha256, remote, stream.packing)


@contextlib.contextmanager
def reading(run: Stored) -> Iterator[None]:
    """Turn an OSError within this context into a ConfigError that names the remedy, if the run is in object storage.
    For a local run, the OSError is raised unchanged."""
    try:
        yield
    except OSError as error:
        if not run.source:
            raise
        raise _unreachable(run.source, error) from None


def sha256(remote: fs.FileSystem, path: str) -> str:
    """Return the sha256 of a file in object storage, which is read in blocks. Raises FileNotFoundError when it is
    missing."""
    digest = hashlib.sha256()
    with remote.open_input_stream(path, buffer_size=0) as source:
        while block := source.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def damaged(shards: ShardSet) -> list[str]:
    """Read the files of a shard set in object storage, and return a line for each file that is missing or whose hash
    differs from the manifest's."""
    def problem(file: tuple[str, str]) -> str | None:
        name, expected = file
        try:
            same = sha256(shards.filesystem, str(shards.folder / name)) == expected
        except FileNotFoundError:
            return f"{name}: missing"
        return None if same else f"{name}: sha256 differs from the manifest: damaged or replaced"

    files = [(getattr(info, kind), digest) for info in shards.manifest.shards for kind, digest in info.sums().items()]
    files += [(file.file, file.sha256) for file in shards.packed.packing.files] if shards.packed is not None else []
    with ThreadPoolExecutor(FILES) as pool:
        return [line for line in pool.map(problem, files) if line]


class ShardFile(NamedTuple):
    """A file of a shard set: its path in the store, its sha256, its size in bytes (None: unknown), and whether it may
    stay in object storage, because it can be read in pieces during the training."""

    path: str
    sha256: str
    size: int | None
    may_stay: bool = False


def _size(files: Sequence[ShardFile]) -> int:
    return sum(file.size or 0 for file in files)


def _pinned(remote: fs.FileSystem, top: str, store: Path, curriculum: Curriculum) -> Iterator[ShardFile]:
    """Yield the files that a training reads from the shard sets of `curriculum`: tokens, document ends, block
    checksums, loss masks and packed rows. Held-out sets also have document tables, from which bits per byte are
    computed. The manifests list the files of the sets; manifests that the local copy `store` lacks are fetched."""
    for stream in curriculum.streams:
        for split, folder, sha256 in (("train", stream.train, stream.sha256), ("val", stream.val, stream.val_sha256)):
            if not folder or not sha256:
                continue
            path = f"{folder}/shards-{sha256[:16]}.json"
            if folder.endswith(".json"):                        # the path of a manifest
                path, folder = folder, folder.rpartition("/")[0]
            if not _inside(store, path).exists():
                try:
                    _fetch(remote, f"{top}/{path}", store / path, None)
                except FileNotFoundError:
                    path = f"{folder}/{MANIFEST}"
                    _fetch(remote, f"{top}/{path}", store / path, None)
            manifest = Manifest.loads((store / path).read_bytes(), path)
            for shard in manifest.shards:
                stays = split == "train"
                yield ShardFile(f"{folder}/{shard.body}", shard.sha256,
                                shard.tokens * np.dtype(manifest.dtype).itemsize, stays)
                yield ShardFile(f"{folder}/{shard.ends}", shard.ends_sha256, shard.documents * ENDS.itemsize)
                yield ShardFile(f"{folder}/{shard.blocks}", shard.blocks_sha256, None)
                if shard.loss:
                    yield ShardFile(f"{folder}/{shard.loss}", str(shard.loss_sha256), shard.tokens, stays)
                if split == "val":
                    yield ShardFile(f"{folder}/{shard.table}", shard.table_sha256, None)
        if stream.packing is not None:
            yield from _packed(remote, top, store, stream.train, stream.packing)


def _packed(remote: fs.FileSystem, top: str, store: Path, folder: str, sha256: str) -> Iterator[ShardFile]:
    """Yield the files of the packed rows (training samples of whole documents) with the given sha256 of the shard set
    in `folder`. Their manifest is fetched if it is not in the local copy `store`."""
    folder = folder.rpartition("/")[0] if folder.endswith(".json") else folder
    path = f"{folder}/packed-{sha256[:16]}.json"
    if not _inside(store, path).exists():
        _fetch(remote, f"{top}/{path}", store / path, sha256)
    for file in Packing.loads((store / path).read_bytes(), path).files:
        yield ShardFile(f"{folder}/{file.file}", file.sha256, file.numbers * NUMBERS.itemsize)


def _inside(store: Path, path: str) -> Path:
    """Return the path of a file in the local copy `store`. Raises ConfigError if the path would be outside `store`, so
    that a curriculum from object storage cannot make the trainer write elsewhere."""
    if path.startswith("/") or ".." in path.split("/"):
        raise ConfigError(f"{path}: the curriculum names a file outside its store; resolve it again by running its "
                          f"recipe, or do not trust whoever wrote it")
    return store / path


def _complete(file: Path, size: int | None) -> bool:
    """Return whether a local copy of a file exists and has the size `size`. With None, the size is unknown, and any
    size is accepted. The hash is not computed, because it was checked when the file was fetched. Later damage is
    noticed only if it changes the size."""
    try:
        return file.stat().st_size == size or size is None
    except FileNotFoundError:
        return False


def _fetch(remote: fs.FileSystem, path: str, to: Path, sha256: str | None) -> None:
    """Copy one file from object storage to the path `to`, whole or not at all. Raises ConfigError if the file has
    another sha256 than `sha256` (None: not checked)."""
    digest = hashlib.sha256()
    to.parent.mkdir(parents=True, exist_ok=True)
    with replacing(to) as part:
        with remote.open_input_stream(path, buffer_size=0) as source, open(part, "wb") as f:
            while block := source.read(BLOCK):
                digest.update(block)
                f.write(block)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise ConfigError(f"{path}: damaged, its sha256 is not the one its manifest names; publish the shards "
                              f"again by running the recipe")


def _open(root: str) -> tuple[fs.FileSystem, str]:
    """Open the store at the URL `root`. Returns (filesystem, path of the store in it)."""
    scheme, _, place = root.partition("://")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    try:
        if scheme in ("s3", "s3a") and endpoint:
            kind, _, host = endpoint.rpartition("://")
            options: dict[str, Any] = {"endpoint_override": host.rstrip("/"), "scheme": kind or "https"}
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            retry = fs.AwsStandardS3RetryStrategy(max_attempts=10)
            return fs.S3FileSystem(region=region, retry_strategy=retry, **options), place.rstrip("/")
        return fs.FileSystem.from_uri(root.replace("s3a://", "s3://", 1))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{root}: {error}; a run to train on lies in a folder, or at s3://… or gs://…; copy others "
                          f"to a folder") from None


def _unreachable(root: str, error: OSError) -> ConfigError:
    reason = " ".join(str(error).split())[:300]
    return ConfigError(f"{root}: {reason}; see that the address is right, credentials stand in the environment and the "
                       f"disk is not full")


def _local(root: str) -> Path:
    base = os.environ.get("TOKENMILL_SHARDS")
    own = Path(tempfile.gettempdir(), f"tokenmill-{os.getuid()}")
    top = Path(base) if base else own / "shards"
    folder = top / hashlib.blake2b(root.encode(), digest_size=8).hexdigest()
    try:
        if not base:  # mode 0700 whatever the umask: the folder also holds the pipeline's scratch files
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
            if own.is_symlink() or own.stat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it is somebody else's")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; set TOKENMILL_SHARDS to a folder that can be written") from None
    return folder


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
