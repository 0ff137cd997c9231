"""Publishes the shards (files of tokens for training) that the tasks of `pipeline.passes.encode` have assembled.
`pipeline.publication` calls `publish_shards` at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipeline.base.errors import TokenmillError
from pipeline.passes.encode import SPLITS
from pipeline.store.dataset import link_committed
from pipeline.store.fs import Store
from stages.barrier import PartRef, TaskResult
from tokenizer.shards.layout import MANIFEST, Manifest, Shard, file_name, token_dtype


class ImportedShards(TokenmillError):
    """Raised when a run would replace shards that were imported and cannot be made again."""


def refuse_imported(store: Store, name: str) -> None:
    """Raise ImportedShards if `tokenmill shards import` has written the shards of the stream `name`."""
    path = f"shards/{name}/split=train/{MANIFEST}"
    with suppress(FileNotFoundError, ValueError):                        # a damaged manifest is replaced
        if Manifest.loads(store.read(path), path).imported:
            raise ImportedShards(f"{store.at(path)}: these shards were imported, and a run would replace them; give "
                                 f"`shards.{name}` of the recipe another name, or remove the folder shards/{name}")


def publish_shards(store: Store, name: str, assembled: Sequence[TaskResult], parts: Sequence[PartRef],
                   tokenizer: Mapping[str, Any], check_lease: Callable[[], None] = lambda: None,
                   source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Link finished shards under shards/NAME/split=…/ and write a manifest for each split. A manifest is written to two
    files. The name of the first contains the manifest's hash, so its content never changes. The second is the current
    manifest.

    `check_lease` (`Log.check_lease`) is called before the manifests of a split are written. It raises if another driver
    has taken over the store, because the manifests of that driver must not be replaced.

    `source` says which token files the tokens are from, if they are from no dataset (`Manifest.source`).

    Returns {name, tokenizer (sha256), dtype, train, val}, the form that `tokenizer.mixture.resolve.resolve` takes.
    `train` and `val` are {path, sha256, tokens, documents, bytes}; `val` is None if no tokens are held out. Publishing
    the same results again changes nothing. Raises ImportedShards if imported shards have this name.
    """
    refuse_imported(store, name)
    shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    links: list[tuple[str, str]] = []
    texts = store.map(lambda ref: store.read_checked(ref["$ref"], ref["sha256"]),
                      (result.files["shard.json"] for result in assembled))
    for result, facts in zip(assembled, map(json.loads, texts)):
        if not facts["documents"]:          # a document longer than a shard leaves the next shard empty
            continue
        split = facts.pop("split")
        sums = {"body": facts["sha256"], "ends": facts["ends_sha256"],
                "table": result.files["table.parquet"]["content"], "blocks": facts["blocks_sha256"]}
        if facts["loss_sha256"]:
            sums["loss"] = facts["loss_sha256"]
        names = {kind: file_name(facts["index"], kind, sha) for kind, sha in sums.items()}
        for kind in names:
            file = "table.parquet" if kind == "table" else kind
            links.append((result.files[file]["$ref"], f"shards/{name}/split={split}/{names[kind]}"))
        shards[split].append(Shard(**{**facts, **names}, table_sha256=sums["table"]))
    for _ in store.map(lambda pair: link_committed(store, *pair), links):
        pass
    info: dict[str, Any] = {"name": name, "tokenizer": tokenizer["sha256"],
                            "dtype": token_dtype(tokenizer["vocab_size"]).name}
    for split in SPLITS:
        members = tuple(sorted(shards[split], key=lambda s: s.index))
        manifest = Manifest.of(name, split, tokenizer["sha256"], tokenizer["vocab_size"], tokenizer["eos"], members,
                               tuple(p.key for p in parts), source)
        folder = f"shards/{name}/split={split}"
        check_lease()
        for file in (f"shards-{manifest.sha256[:16]}.json", MANIFEST):
            store.write(f"{folder}/{file}", manifest.dumps().encode())
        info[split] = {"path": folder, "sha256": manifest.sha256, "tokens": manifest.tokens,
                       "documents": manifest.documents, "bytes": manifest.text_bytes} \
            if manifest.tokens or split == "train" else None
    return info
