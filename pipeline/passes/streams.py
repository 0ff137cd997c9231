"""Hides the streams (shards by label) that an entry of `shards:` had under other settings.

If `by` (the labels by which shards are split) changes, an old stream such as `web.en` would stay beside the new streams
of `web`, and look like one of them. Hiding a stream removes its current manifest, `shards.json`, by which commands and
the service list streams. Trainings of earlier runs still find the shards: a curriculum names them by the hash of their
manifest, `shards-SHA.json`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress

from pipeline.passes.encode import SPLITS
from pipeline.store.fs import Store
from tokenizer.shards.layout import MANIFEST, Manifest
from tokenizer.shards.packed import MANIFEST as PACKED


def note_streams(store: Store, name: str, streams: Collection[str]) -> None:
    """Note in shards/NAME/streams.json which streams the entry `name` of `shards:` has, in addition to those noted
    before. Call this before the streams are published. An entry that was never split has no such file."""
    earlier = _noted(store, name)
    if earlier or set(streams) != {name}:
        _write(store, name, {*earlier, *streams})


def hide_stale(store: Store, name: str, streams: Collection[str]) -> None:
    """Hide the streams of the entry `name` of `shards:` that a run has published and that are not among `streams`.
    Imported shards stay."""
    earlier = _noted(store, name)
    for stream in sorted({*earlier, name} - set(streams)):
        folders = [f"shards/{stream}/split={split}" for split in SPLITS]
        if not _imported(store, f"{folders[0]}/{MANIFEST}"):
            for path in (f"{folder}/{file}" for folder in folders for file in (MANIFEST, PACKED)):
                if store.exists(path):
                    store.remove(path)
    if earlier:
        _write(store, name, set(streams))


def _path(name: str) -> str:
    return f"shards/{name}/streams.json"


def _noted(store: Store, name: str) -> set[str]:
    """Return the streams that shards/NAME/streams.json lists for the entry `name` of `shards:`. The set is empty if the
    file is missing or damaged."""
    with suppress(FileNotFoundError, ValueError):
        streams = json.loads(store.read(_path(name)))
        if isinstance(streams, list):
            return {stream for stream in streams if isinstance(stream, str) and "/" not in stream
                    and (stream == name or stream.startswith(f"{name}."))}
    return set()


def _write(store: Store, name: str, streams: set[str]) -> None:
    data = json.dumps(sorted(streams)).encode()
    if not store.exists(_path(name)) or store.read(_path(name)) != data:
        store.write(_path(name), data)


def _imported(store: Store, path: str) -> bool:
    with suppress(FileNotFoundError, ValueError):
        return Manifest.loads(store.read(path), path).imported
    return False
