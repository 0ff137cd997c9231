"""Overwrites documents in shard sets, so that sizes, boundaries and the order of samples stay as they are.

A shard with a document to remove is written again: the document's tokens become EOS, and none of them is a target. The
document keeps its length. So every other token keeps its place, and every sample reads the same places.

The document table keeps the id of the document. Files of packed rows name only places, so they stay; a new manifest
connects them to the new shard set.

The manifest of the new set says under `source.takedowns` which set it replaces. A curriculum that names the old set is
changed: it then names the new set, and lists the old one under `replaces`. This entry lets a training continue from a
checkpoint that was made with the old set (`trainer.loop.run.differences`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.files import file_sha256
from pipeline.base.scratch import Scratch
from pipeline.store.fs import Store
from pipeline.store.shard_set import StoredSet
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from tokenizer.mixture.phases import Stream
from tokenizer.shards.layout import MANIFEST, Manifest, Shard, file_name
from tokenizer.shards.packed import MANIFEST as PACKED
from tokenizer.shards.packed import Packing
from tokenizer.shards.sums import BLOCK, BlockSummer

_SET = re.compile(r"shards/[^/]+/split=(train|val)/shards(-[0-9a-f]{16})?\.json")
_CURRICULUM = re.compile(r"runs/[^/]+/curriculum(\.\d+)?\.json")
#: bytes that are copied or hashed at a time; a multiple of a block
COPY = BLOCK << 10


@dataclass(frozen=True)
class ReplacedSet:
    """A shard set that was written again. Holds its folder, the sha256 of the old and of the new set, and the numbers
    of overwritten documents and tokens. `packings` maps the sha256 of the old set's packed rows to that of the new
    set's."""

    folder: str
    old: str
    new: str
    documents: int
    tokens: int
    packings: dict[str, str]


def stored_sets(store: Store) -> Iterator[tuple[str, Manifest]]:
    """Yield (folder, manifest) for all shard sets of a store, also for those that a later set has replaced."""
    seen: set[tuple[str, str]] = set()
    for path in store.list("shards"):
        if _SET.fullmatch(path):
            folder = path.rpartition("/")[0]
            manifest = Manifest.loads(store.read(path), store.at(path))
            if (folder, manifest.sha256) not in seen:
                seen.add((folder, manifest.sha256))
                yield folder, manifest


def curricula(store: Store) -> Iterator[tuple[str, Curriculum]]:
    """Yield (path, curriculum) for the curricula of all runs of a store, and for the earlier versions that `train edit`
    has kept."""
    for path in store.list("runs"):
        if _CURRICULUM.fullmatch(path):
            yield path, Curriculum.loads(store.read(path), store.at(path))


def overwrite(store: Store, ids: frozenset[str], number: int, check_lease: Callable[[], None]) -> list[ReplacedSet]:
    """Overwrite the tokens of the documents `ids` with EOS in all shard sets of a store, for takedown number `number`.
    Returns the sets that were replaced, including those whose replacement an interrupted attempt had begun."""
    wanted = pa.array(sorted(ids), pa.string())
    replaced = []
    for folder, manifest in list(stored_sets(store)):
        check_lease()
        if (done := _replacement(store, folder, manifest, number)) is not None:
            new, documents, tokens = done
        else:
            with Scratch() as scratch:
                rewritten, documents, tokens = _rewritten(store, folder, manifest, wanted, Path(scratch.path))
                if not rewritten:
                    continue
                new = _publish(store, folder, manifest, rewritten, number, documents, tokens, check_lease)
        _make_current(store, folder, manifest, new)
        packings = _repack(store, folder, manifest, new)
        result = ReplacedSet(folder, manifest.sha256, new.sha256, documents, tokens, packings)
        check_lease()
        _point_curricula(store, result)
        _remove_old(store, folder, manifest, new)
        replaced.append(result)
    return replaced


def documents_in(store: Store, folder: str, manifest: Manifest,
                 wanted: pa.Array) -> dict[int, list[tuple[int, int, str]]]:
    """Find the documents with one of the ids `wanted` in the shard set that `manifest` describes. Returns {position of
    a shard in the set: [(first token, exclusive end, id), …]}; tokens are counted from the beginning of the shard."""
    result: dict[int, list[tuple[int, int, str]]] = {}
    for place, shard in enumerate(manifest.shards):
        begin = 0
        with store.parquet(f"{folder}/{shard.table}") as table:
            for batch in table.iter_batches(columns=["id", "end"], use_threads=False):
                ends = batch.column("end").to_numpy()
                for row in np.flatnonzero(pc.is_in(batch.column("id"), wanted).to_numpy(zero_copy_only=False)).tolist():
                    start = int(ends[row - 1]) if row else begin
                    result.setdefault(place, []).append((start, int(ends[row]), batch.column("id")[row].as_py()))
                begin = int(ends[-1]) if len(ends) else begin
    return result


# -- writing ----------------------------------------------------------------------------------------------------------
def _rewritten(store: Store, folder: str, manifest: Manifest, wanted: pa.Array,
               scratch: Path) -> tuple[dict[int, Shard], int, int]:
    """Write new versions of the shards of a set that hold documents with one of the ids `wanted`. In them, the tokens
    of these documents are replaced by EOS. Returns ({position of the shard in the set: its new entry in the manifest},
    number of documents, number of tokens). A document whose tokens are all EOS was overwritten before, and is neither
    written nor counted."""
    rewritten: dict[int, Shard] = {}
    documents = tokens = 0
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    for place, spans in documents_in(store, folder, manifest, wanted).items():
        shard = manifest.shards[place]
        with open(store.fetch(f"{folder}/{shard.body}", str(scratch)), "rb") as file:
            body = np.memmap(file, dtype, "r")
            spans = [span for span in spans if (body[span[0]:span[1]] != manifest.eos).any()]
            if not spans:
                continue
            target = scratch / f"{place}.body"
            body.tofile(target)
        loss = _loss(store, folder, shard, scratch / f"{place}.loss", str(scratch))
        changed = np.memmap(target, dtype, "r+")
        for start, stop, _ in spans:
            changed[start:stop] = manifest.eos
            loss[start:stop] = 0
            documents, tokens = documents + 1, tokens + stop - start
        changed.flush()
        loss.flush()
        del changed, loss
        rewritten[place] = _upload(store, folder, shard, scratch, place)
    return rewritten, documents, tokens


def _loss(store: Store, folder: str, shard: Shard, target: Path, scratch: str) -> np.memmap:
    """Copy the loss mask of a shard to `target`, and open the copy. A shard without a mask gets a mask of ones (every
    token counts)."""
    if shard.loss:
        np.memmap(store.fetch(f"{folder}/{shard.loss}", scratch), "u1", "r").tofile(target)
        return np.memmap(target, "u1", "r+")
    mask = np.memmap(target, "u1", "w+", shape=(shard.tokens,))
    mask[:] = 1
    return mask


def _upload(store: Store, folder: str, shard: Shard, scratch: Path, place: int) -> Shard:
    """Move a shard's new files from `scratch` to the store. Returns the shard's new entry in the manifest, with the
    checksums of the files."""
    body, loss, blocks = (scratch / f"{place}.{kind}" for kind in ("body", "loss", "blocks"))
    ends = store.fetch(f"{folder}/{shard.ends}", str(scratch))
    with open(blocks, "wb") as out:
        for path in (body, ends, loss):
            summer = BlockSummer()
            with open(path, "rb") as file:
                while data := file.read(COPY):
                    summer.update(data)
            out.write(summer.finish())
    sums = {kind: file_sha256(path) for kind, path in (("body", body), ("loss", loss), ("blocks", blocks))}
    names = {kind: file_name(shard.index, kind, sha) for kind, sha in sums.items()}
    for kind, path in (("body", body), ("loss", loss), ("blocks", blocks)):
        store.replace(str(path), f"{folder}/{names[kind]}")
    return replace(shard, body=names["body"], loss=names["loss"], blocks=names["blocks"], sha256=sums["body"],
                   loss_sha256=sums["loss"], blocks_sha256=sums["blocks"])


def _publish(store: Store, folder: str, old: Manifest, rewritten: dict[int, Shard], number: int, documents: int,
             tokens: int, check_lease: Callable[[], None]) -> Manifest:
    """Make the manifest of the new shard set, in which the entries `rewritten` replace those of the set `old`. Write it
    to a file whose name contains the set's sha256, and return it."""
    takedowns = [*old.source.get("takedowns", []),
                 {"number": number, "replaces": old.sha256, "documents": documents, "tokens": tokens}]
    shards = tuple(rewritten.get(place, shard) for place, shard in enumerate(old.shards))
    new = Manifest.of(old.stream, old.split, old.tokenizer, old.vocab_size, old.eos, shards, old.parts,
                      {**old.source, "takedowns": takedowns})
    if new.dtype != old.dtype:                   # tokens of two bytes, for a vocabulary of at most 256
        new = replace(new, dtype=old.dtype)
        new = replace(new, sha256=new.identity())
    check_lease()
    store.write(f"{folder}/shards-{new.sha256[:16]}.json", new.dumps().encode(), durable=True)
    return new


def _make_current(store: Store, folder: str, old: Manifest, new: Manifest) -> None:
    """Make the shard set `new` the current one of its folder, in place of `old`. If another set is current, nothing
    changes."""
    if json.loads(store.read(f"{folder}/{MANIFEST}"))["sha256"] == old.sha256:
        store.write(f"{folder}/{MANIFEST}", new.dumps().encode(), durable=True)


def _replacement(store: Store, folder: str, old: Manifest, number: int) -> tuple[Manifest, int, int] | None:
    """Return (new set, documents, tokens) if an interrupted attempt at takedown `number` has already replaced the shard
    set `old`. The new set is the one that replaced it, and the numbers say how much was overwritten. Otherwise return
    None."""
    for there, manifest in stored_sets(store):
        last = (manifest.source.get("takedowns") or [{}])[-1]
        if there == folder and last.get("replaces") == old.sha256 and last["number"] == number:
            return manifest, last["documents"], last["tokens"]
    return None


def _repack(store: Store, folder: str, old: Manifest, new: Manifest) -> dict[str, str]:
    """Write manifests that connect the packed rows of the shard set `old` to the set `new`. They name the same files of
    rows, because overwriting does not move tokens. Returns {sha256 of the old packed rows: sha256 of the new ones}."""
    packings = {}
    for path in list(store.list(folder)):
        name = path.rpartition("/")[2]
        if name.startswith("packed-") and name.endswith(".json"):
            packing = Packing.loads(store.read(path), store.at(path))
            if packing.shards == old.sha256:
                changed = replace(packing, shards=new.sha256)
                store.write(f"{folder}/{changed.name}", changed.dumps().encode(), durable=True)
                packings[packing.sha256] = changed.sha256
    current = f"{folder}/{PACKED}"
    if store.exists(current) and (packing := Packing.loads(store.read(current), store.at(current))).sha256 in packings:
        store.write(current, replace(packing, shards=new.sha256).dumps().encode(), durable=True)
    return packings


def _point_curricula(store: Store, replaced: ReplacedSet) -> None:
    """Change the curricula of all runs that name the old shard set, so that they name the new one."""
    for path, curriculum in curricula(store):
        streams = tuple(_pointed(stream, replaced) for stream in curriculum.streams)
        if streams != curriculum.streams:
            store.write(path, replace(curriculum, streams=streams).dumps().encode(), durable=True)


def _pointed(stream: Stream, replaced: ReplacedSet) -> Stream:
    if (stream.train, stream.sha256) == (replaced.folder, replaced.old):
        stream = replace(stream, sha256=replaced.new, replaces=(*stream.replaces, replaced.old))
        if stream.packing is not None:
            stream = replace(stream, packing=replaced.packings.get(stream.packing, stream.packing))
    if (stream.val, stream.val_sha256) == (replaced.folder, replaced.old):
        stream = replace(stream, val_sha256=replaced.new)
    return stream


def _remove_old(store: Store, folder: str, old: Manifest, new: Manifest) -> None:
    """Remove the files of the shard set `old` that no other set of its folder names. Files with tokens go first. The
    manifest goes last, because it shows a later attempt that this removal was interrupted."""
    others = [manifest for there, manifest in stored_sets(store) if there == folder and manifest.sha256 != old.sha256]
    named = {name for manifest in others for shard in manifest.shards
             for name in (shard.body, shard.ends, shard.table, shard.blocks, shard.loss)}
    for shard in old.shards:
        for name in (shard.body, shard.loss, shard.blocks):
            if name and name not in named:
                store.remove(f"{folder}/{name}")
    store.remove(f"{folder}/lookup-{old.sha256[:16]}.index")
    for path in list(store.list(folder)):
        name = path.rpartition("/")[2]
        if name.startswith("packed-") and name.endswith(".json") and \
                Packing.loads(store.read(path), store.at(path)).shards == old.sha256:
            store.remove(path)
    store.remove(f"{folder}/shards-{old.sha256[:16]}.json")


# -- who has read the documents ---------------------------------------------------------------------------------------
def seen(store: Store, ids: frozenset[str]) -> list[dict[str, Any]]:
    """Return which runs and streams have documents with these ids in their curriculum, as {run, stream, documents,
    samples, first_sample, checkpoints}. `samples` counts the training samples that hold a token of such a document.
    `checkpoints` lists the checkpoints in the run's own folder that were written after the first of these samples."""
    wanted = pa.array(sorted(ids), pa.string())
    sets = {(folder, manifest.sha256): manifest for folder, manifest in stored_sets(store)}
    result = []
    for path, curriculum in curricula(store):
        if not path.endswith("/curriculum.json"):
            continue
        run, order = path.split("/")[1], Order(curriculum)
        for number, stream in enumerate(curriculum.streams):
            manifest = sets.get((stream.train, stream.sha256))
            spans = documents_in(store, stream.train, manifest, wanted) if manifest else {}
            if not manifest or not spans:
                continue
            samples: set[int] = set()
            offset = 0
            for place, shard in enumerate(manifest.shards):
                for start, stop, _ in spans.get(place, ()):
                    samples.update(_samples(store, order, number, stream, manifest, offset + start, offset + stop))
                offset += shard.tokens
            first = min(samples, default=None)
            result.append({"run": run, "stream": stream.name, "documents": sum(map(len, spans.values())),
                           "samples": len(samples), "first_sample": first,
                           "checkpoints": _checkpoints(store, run, first)})
    return result


def _samples(store: Store, order: Order, number: int, stream: Stream, manifest: Manifest, start: int,
             stop: int) -> Iterator[int]:
    """Yield the numbers of the training samples that read tokens [start, stop) of a stream."""
    if stream.packing is not None:
        packed = StoredSet(store, stream.train, manifest, stream.packing).packed
        assert packed is not None
        for row in packed.rows_with(start, stop).tolist():
            for numbers, _, _ in order.samples_of(number, row, row + 1).values():
                yield from numbers.tolist()
        return
    longest = order.longest
    last = min((stop - 1) // longest + 1, stream.supers(longest))
    for phase, (numbers, windows, _) in order.samples_of(number, max(0, start - 1) // longest, last).items():
        length = order.curriculum.phases[phase].sequence
        begins = windows * length                # a window of L targets also reads the token at L
        yield from numbers[(begins < stop) & (begins + length >= start)].tolist()


def _checkpoints(store: Store, run: str, first: int | None) -> list[str]:
    """Return the complete checkpoints of a run's training, in the run's folder, that follow sample number `first`."""
    checkpoints = []
    for path in store.list(f"runs/{run}/train/checkpoints") if first is not None else ():
        if path.endswith("/meta.json"):
            samples = json.loads(store.read(path)).get("samples", 0)
            if samples > (first or 0):
                checkpoints.append(path.split("/checkpoints/")[1].split("/")[0])
    return sorted(set(checkpoints))
