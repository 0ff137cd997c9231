"""Looks up the shard sets of a store (the token shards of one stream and split), the order in which a run's curriculum
reads them, and the documents in them. The routes of `pipeline.service.shards` and the page of a document use it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from pipeline.base.parquet import open_parquet
from pipeline.base.visible import visible
from pipeline.cluster.attempts import bad_name
from pipeline.plan.changes import latest_run
from pipeline.service.duck import QueryError, Stop
from pipeline.service.parts import PublishedPart, published
from pipeline.service.query import Queries
from pipeline.service.stores import inside, read_file
from pipeline.store.dataset import MANIFEST as DATASET_MANIFEST
from pipeline.store.fs import Store
from pipeline.store.shard_set import NoSet, StoredSet
from pipeline.store.shard_set import manifest_of as stored_manifest
from stages.scrub.pii import scrub_value
from stages.scrub.rows import MARGIN, mask
from tokenizer.mixture.curriculum import Curriculum, Stream
from tokenizer.mixture.steps import readers_of
from tokenizer.shards.find import places, window_documents
from tokenizer.shards.index import ShardIndex
from tokenizer.shards.layout import MANIFEST, STREAM_CHARS, Manifest
from tokenizer.shards.lookup import Lookup, by_id, name_of
from tokenizer.shards.origin import EXCERPT, LIGHT, WHOLE, add_origins
from tokenizer.shards.packed import MANIFEST as PACKED
from tokenizer.shards.packed import NUMBERS, PackedShard, Packing

SPLITS = ("train", "val")
#: most bytes of a manifest or curriculum that is read
LARGEST = 256 << 20
#: most places of documents in an answer, steps that read a document, and documents of a window
MOST_PLACES, MOST_STEPS, MOST_DOCUMENTS = 200, 100, 200
_STREAM = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.=@-]{{0,{STREAM_CHARS - 1}}}")
_SET = re.compile(r"shards/([^/]+)/split=(train|val)/" + re.escape(MANIFEST))


class NoShards(QueryError):
    """Raised when the store has no such shards or no such curriculum, or when these have no such window (training
    sample) or step."""

    status = 404
    title = "No such shards"


class SetName(NamedTuple):
    """Names a shard set of a store: the shards of one stream (such as those of a source or language) and one split."""

    stream: str
    split: str

    @property
    def folder(self) -> str:
        return f"shards/{self.stream}/split={self.split}"


class CheckedSet(StoredSet):
    """A shard set of a store. Its files are compared with their hashes in the manifests before they are read. A file
    that is a link to a place outside the store is refused."""

    def __init__(self, store: Store, folder: str, manifest: Manifest, packing: str | None, scratch: str,
                 stop: Stop) -> None:
        self._scratch, self._stop = scratch, stop
        try:
            super().__init__(store, folder, manifest, packing)
        except NoSet:
            raise NoShards(f"the packed rows of '{visible(manifest.stream)[:80]}' that the curriculum names are not in "
                           f"the store any more", "run", "choose a later run, or restore them") from None

    def read(self, path: str) -> bytes:
        return read_file(self.store, path, LARGEST)

    def numbers(self, file: PackedShard, first: int, stop: int) -> np.ndarray:
        return np.memmap(self._checked(file.file, file.sha256), NUMBERS, "r")[first:stop]

    @contextlib.contextmanager
    def table(self, shard: int) -> Iterator[pq.ParquetFile]:
        info = self.manifest.shards[shard]
        with open_parquet(self._checked(info.table, info.table_sha256)) as table:
            yield table

    def _checked(self, name: str, sha256: str) -> str:
        """Compare a file of the shard set with its hash `sha256`, and return the path of the file on this machine."""
        self._stop.check()
        inside(self.store, f"{self.folder}/{name}")
        return self.store.checked(f"{self.folder}/{name}", sha256, self._scratch)


# -- what there is ---------------------------------------------------------------------------------------------------
def set_names(store: Store) -> list[SetName]:
    """Return the names of the shard sets that are published in a store at present."""
    return [SetName(m[1], m[2]) for path in store.list("shards") if (m := _SET.fullmatch(path))
            and _STREAM.fullmatch(m[1])]


def manifest_of(store: Store, name: SetName, sha256: str = "") -> Manifest:
    """Return the manifest (list of files) of a shard set: the manifest with the hash `sha256` or, without a hash, the
    one that was published last. Raises NoShards when the store does not have it."""
    if not _STREAM.fullmatch(name.stream):
        raise NoShards(f"'{visible(name.stream)[:80]}' is not the name of a stream", "stream", "see the list of shards")
    try:
        return stored_manifest(store, name.folder, sha256, lambda store, path: read_file(store, path, LARGEST))
    except NoSet:
        if sha256:
            raise NoShards(f"the shards '{name.stream}' that the curriculum names are not in the store any more", "run",
                           "choose a later run, or restore the set") from None
        raise NoShards(f"there are no shards '{name.stream}' with the split '{name.split}' here", "stream",
                       "see the list of shards") from None


def facts(store: Store, name: SetName) -> dict[str, Any]:
    """Return the facts in the manifest of a shard set (documents, tokens, tokenizer …) as JSON, without the list of its
    shards."""
    m = manifest_of(store, name)
    return {"stream": m.stream, "split": m.split, "documents": m.documents, "tokens": m.tokens,
            "text_bytes": m.text_bytes, "shards": len(m.shards), "dtype": m.dtype, "sha256": m.sha256,
            "source": scrub_value(m.source), "tokenizer": {"sha256": m.tokenizer, "vocab_size": m.vocab_size,
                                                           "eos": m.eos}}


def curriculum_of(store: Store, run: str = "") -> tuple[str, Curriculum] | None:
    """Return (name of a run, its curriculum) for `run` or, if `run` is empty, for the latest run. If the run has made
    no curriculum, the result is None for the latest run, and NoShards is raised for a given one."""
    name = run or latest_run(store)
    path = f"runs/{name}/curriculum.json"
    try:
        if run and bad_name(run) is not None:
            raise FileNotFoundError
        return (name, Curriculum.loads(read_file(store, path, LARGEST), path)) if name else None
    except FileNotFoundError:
        if run:
            raise NoShards(f"the run '{visible(run)[:80]}' has made no curriculum", "run",
                           "choose a run that makes shards") from None
        return None


# -- where a document is ---------------------------------------------------------------------------------------------
def find(queries: Queries, store: Store, id: str, stop: Stop, exact: bool = False, stream: str = "", split: str = "",
         run: str = "") -> dict[str, Any]:
    """Find documents by the beginning of their ids (with `exact`: by the whole id), and return the places in the shards
    where they are. A place is the range of a document's tokens in one stream. It has, too:

    - `windows`: the first and the last window (training sample) with one of these tokens, for each sequence length in
      the run's curriculum
    - `rows` in place of windows, for a stream that is packed into rows: the numbers of the packed rows with one of
      these tokens
    - the steps that read these windows or rows, if the curriculum reads the shards

    `more` is true if some places were left out.
    """
    planned = curriculum_of(store, run)
    lengths = sorted({phase.sequence for phase in planned[1].phases}) if planned else []
    spans: list[dict[str, Any]] = []
    with queries.checked.folder() as scratch:
        for name in set_names(store):
            if (stream and name.stream != stream) or (split and name.split != split):
                continue
            manifest = manifest_of(store, name)
            reader = _reader(planned[1] if planned and name.split == "train" else None, name.stream, manifest.sha256)
            shards = CheckedSet(store, name.folder, manifest, reader.packing if reader else None, scratch, stop)
            for place in islice((p for p in _places(shards, id) if not exact or p["id"] == id),
                                MOST_PLACES + 1 - len(spans)):
                spans.append({"stream": name.stream, "split": name.split, **place,
                              "tokens": place["stop"] - place["start"], "windows": {}})
                if shards.packed is not None:
                    spans[-1]["rows"] = shards.packed.rows_with(place["start"], place["stop"])[:MOST_STEPS + 1].tolist()
                else:
                    spans[-1]["windows"] = _windows(place["start"], place["stop"], manifest.tokens, lengths)
                if planned and reader is not None:
                    spans[-1] |= _read_by(planned[1], name.stream, spans[-1])
    return {"run": planned[0] if planned else None, "places": spans[:MOST_PLACES], "more": len(spans) > MOST_PLACES}


def _places(shards: CheckedSet, id: str) -> Iterator[dict[str, Any]]:
    """Yield the places (ranges of tokens) of the documents whose ids begin with `id`. Uses the lookup index of the set
    if there is one (`tokenmill shards index`), and else reads all document tables."""
    path = f"{shards.folder}/{name_of(shards.manifest.sha256)}"
    inside(shards.store, path)
    try:
        with shards.store.open(path) as file:
            hits = by_id(shards, Lookup(file, shards.manifest, path), id)
            if hits is not None:
                yield from hits
                return
    except FileNotFoundError:
        pass
    yield from places(shards, id)


def _windows(start: int, stop: int, tokens: int, lengths: list[int]) -> dict[str, list[int]]:
    """Return which windows (training samples) of a stream contain one of its tokens `start` to `stop` - 1. The result
    is {length: [first, last]}: the numbers of the first and the last such window for each sequence length (as a
    string). The stream has `tokens` tokens, and window w of length L has the tokens wL to wL + L, both included.

    A length without such a window is left out: the tokens after the last whole window are in none.
    """
    result: dict[str, list[int]] = {}
    for length in lengths:
        last_window = max(0, tokens - 1) // length - 1
        first, last = max(0, (start - 1) // length), min((stop - 1) // length, last_window)
        if first <= last:
            result[str(length)] = [first, last]
    return result


def _reader(curriculum: Curriculum | None, stream: str, sha256: str) -> Stream | None:
    """Return the entry of the curriculum for a stream, if the curriculum reads the shards whose manifest has the hash
    `sha256`. Returns None otherwise."""
    streams = curriculum.streams if curriculum is not None else ()
    return next((s for s in streams if s.name == stream and s.sha256 == sha256), None)


def _read_by(curriculum: Curriculum, stream: str, place: dict[str, Any]) -> dict[str, Any]:
    """Return {steps, more_steps}: the training steps that read a document, and whether there are more steps than the
    returned ones. `place` has the numbers of the windows or packed rows (training samples) of the stream that contain
    tokens of the document."""
    steps: list[dict[str, Any]] = []
    more = len(place.get("rows", ())) > MOST_STEPS
    for row in place.get("rows", ())[:MOST_STEPS]:
        steps += readers_of(curriculum, stream, row, row, curriculum.longest)
    for length, (first, last) in place["windows"].items():
        stop = min(last, first + MOST_STEPS - 1)      # a book may have thousands of windows
        steps += readers_of(curriculum, stream, first, stop, int(length))
        more = more or stop < last
    steps.sort(key=lambda r: r["sample"])
    return {"steps": steps[:MOST_STEPS], "more_steps": more or len(steps) > MOST_STEPS}


# -- what a window holds ---------------------------------------------------------------------------------------------
def add_documents(queries: Queries, store: Store, curriculum: Curriculum, rows: list[dict[str, Any]], detailed: bool,
                  masked: bool, stop: Stop) -> str | None:
    """Add to each row of a training step's batch the documents in it, those with the most tokens first. `rows` come
    from `rows_of`; each is one window (training sample). In a row, `more` is the number of documents that are left out.

    A document gets its URL and other columns of the published datasets and, with `detailed`, also signals, metadata and
    an excerpt. Returns a message when documents are not in the datasets any more, otherwise None.
    """
    folders = {s.name: s for s in curriculum.streams}
    with queries.checked.folder() as scratch:
        sets: dict[str, CheckedSet] = {}
        for row in rows:
            stream = row["stream"]
            if stream not in sets:
                name = SetName(stream, "train")
                sets[stream] = CheckedSet(store, name.folder, manifest_of(store, name, folders[stream].sha256),
                                          folders[stream].packing, scratch, stop)
            row |= _documents(sets[stream], row["window"], row["tokens"])
    return add_facts(queries, store, rows, detailed, masked, stop)


def window(queries: Queries, store: Store, name: SetName, number: int, length: int, detailed: bool, masked: bool,
           stop: Stop) -> dict[str, Any]:
    """Return the documents in one training sample of a shard set. The sample is packed row `number` if the documents of
    the set are packed into rows, and otherwise the window `number` of `length` tokens."""
    manifest = manifest_of(store, name)
    packing = packing_of(store, name, manifest)
    windows, kind = max(0, manifest.tokens - 1) // length, "window"
    if packing is not None:
        windows, kind = packing.rows, "packed row"
        if length != packing.longest:
            raise NoShards(f"the stream is packed into rows of {packing.longest:,} tokens, and has no windows of "
                           f"{length:,}", "length", f"give {packing.longest}")
    if not 0 <= number < windows:
        raise NoShards(f"there is no {kind} {number:,}; the stream has {windows:,} of {length:,} tokens", "window",
                       "give a smaller number")
    with queries.checked.folder() as scratch:
        shards = CheckedSet(store, name.folder, manifest, packing.sha256 if packing else None, scratch, stop)
        row = {"stream": name.stream, "split": name.split, "window": number, "tokens": length,
               "packed": packing is not None, **_documents(shards, number, length)}
    absent = add_facts(queries, store, [row], detailed, masked, stop)
    return {**row, "not_at_hand": absent}


def packing_of(store: Store, name: SetName, manifest: Manifest) -> Packing | None:
    """Return the packing of a shard set: which documents are in each packed row (training sample). Returns None if the
    set is not packed into rows."""
    path = f"{name.folder}/{PACKED}"
    if not store.exists(path):
        return None
    packing = Packing.loads(read_file(store, path, LARGEST), store.at(path))
    return packing if packing.shards == manifest.sha256 else None


def _documents(shards: ShardIndex, window: int, length: int) -> dict[str, Any]:
    documents = window_documents(shards, window, length)
    return {"documents": documents[:MOST_DOCUMENTS], "more": max(0, len(documents) - MOST_DOCUMENTS)}


def add_facts(queries: Queries, store: Store, rows: list[dict[str, Any]], detailed: bool, masked: bool,
              stop: Stop) -> str | None:
    """Add to the documents in each of `rows` (training samples) their URLs and other columns of the published datasets.
    With `masked`, personal data is masked. Returns a message when documents are not in the datasets any more, otherwise
    None."""
    documents = [d for row in rows for d in row["documents"]]
    parts: dict[str, PublishedPart] = {}

    def datasets() -> Iterator[tuple[str, dict[str, str]]]:
        for name in dataset_names(store):
            stop.check()
            here = published(store, "kept", name)
            parts.update((part.path, part) for part in here)
            yield name, {part.key: part.path for part in here}

    @contextlib.contextmanager
    def open_part(path: str) -> Iterator[pq.ParquetFile]:
        with queries.checked.files(store, [parts[path]], stop) as [local], open_parquet(local) as file:
            yield file

    with ThreadPoolExecutor(queries.limits.threads) as pool:
        missing = add_origins(documents, datasets(), open_part, WHOLE if detailed else LIGHT, EXCERPT + MARGIN,
                              pool)
    for d in documents:
        del d["key"], d["at"]
        if masked:
            _mask(d)
        if "text" in d:
            d["text"] = d["text"][:EXCERPT]
    return (f"{missing} of {len(documents)} documents are not in the datasets of the store any more; only their places "
            f"in the shards are shown") if missing else None


def _mask(document: dict[str, Any]) -> None:
    try:
        mask(document)
    except (ValueError, RecursionError):                  # metadata that is no JSON, or nests too deep to be scrubbed
        document["meta"] = None
        mask(document)


def dataset_names(store: Store) -> list[str]:
    """Return the names of the published datasets of a store."""
    if store.local is not None:
        return sorted(path.parent.name for path in store.local.glob(f"datasets/*/{DATASET_MANIFEST}"))
    return sorted({path.split("/")[1] for path in store.list("datasets") if path.endswith(f"/{DATASET_MANIFEST}")})
