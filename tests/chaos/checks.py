"""Checks of the store after every scenario: the run has made the expected data, every document is there exactly once,
and no stray files or processes are left."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds

from pipeline.base.scratch import Scratch
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store

DATASETS = ("clean", "unique")


def hashes(store: str) -> dict[str, str]:
    """Return hashes of everything that must be the same in every run of the recipe: of the datasets, the shards, the
    order of samples and the tokenizer."""
    at = Store(store)
    [run] = {p.split("/")[1] for p in at.list("runs") if p.endswith("/curriculum.json")}
    curriculum = json.loads(at.read(f"runs/{run}/curriculum.json"))
    return {**{d: dataset_hash(at, d) for d in DATASETS},
            **{f"{s['name']}/train": s["sha256"] for s in curriculum["streams"]},
            **{f"{s['name']}/val": s["val_sha256"] for s in curriculum["streams"]},
            "order": curriculum["order"], "tokenizer": curriculum["tokenizer"]["sha256"]}


def ids(store: str, folder: str) -> list[str]:
    return [row["id"] for row in rows(store, folder)]


def rows(store: str, folder: str, columns: list[str] | None = None) -> list[dict[str, Any]]:
    parts = sorted(map(str, Path(store, folder).glob("part-*.parquet")))
    return ds.dataset(parts).to_table(columns or ["id"]).to_pylist() if parts else []


def places(store: str) -> dict[str, list[str]]:
    """Return in which folder each document ended, as {folder: sorted ids of its documents}. A folder is datasets/NAME,
    dropped/NAME or quarantine/NAME."""
    return {f"{kind}/{d}": sorted(ids(store, f"{kind}/{d}")) for d in DATASETS
            for kind in ("datasets", "dropped", "quarantine")}


def check_log(store: str) -> None:
    """Check the commit log: each key is committed once, every file that a record names exists with the recorded sha256,
    and epochs are numbered 1, 2, 3, …"""
    keys: Counter[str] = Counter()
    epochs = []
    for path in sorted(Path(store, "log").glob("0*.json")):
        body = json.loads(path.read_text())["body"]
        if body["kind"] == "epoch":
            epochs.append(body["epoch"])
        for record in body.get("records", ()):
            keys[record["key"]] += 1
            for info in record["files"].values():
                file = Path(store, info["path"])
                assert hashlib.sha256(file.read_bytes()).hexdigest() == info["sha256"], f"{file} is not what was said"
    assert set(keys.values()) == {1}, f"committed twice: {[k for k, n in keys.items() if n > 1]}"
    assert epochs == list(range(1, len(epochs) + 1))


def check_objects(store: str) -> None:
    """Check that objects/ has exactly the files that the log names. (Lists of files, in folders `lists`, are not
    compared.) This only holds after a run that has collected garbage, followed by a run that had nothing to do."""
    named = {info["path"] for path in Path(store, "log").glob("0*.json")
             for record in json.loads(path.read_text())["body"].get("records", ())
             for info in record["files"].values()}
    there = {p.relative_to(store).as_posix() for p in Path(store, "objects").rglob("*")
             if p.is_file() and p.parent.name != "lists"}
    assert there == named, "files of dead attempts were not collected"


def tree(store: str) -> dict[str, str]:
    """Return {path: sha256} for every file of a store. A link counts as the file that it leads to."""
    return {p.relative_to(store).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(Path(store).rglob("*")) if p.is_file()}


def check_scratch(temp: Path) -> None:
    """Check that no scratch folder is left below `temp`, and nothing in /dev/shm. A new owner of scratch space removes
    what a killed owner left, so one is created first."""
    Scratch(str(temp)).close()
    left = [str(p) for top in temp.glob("tokenmill-*") for p in top.iterdir() if p.name.startswith("scratch-")]
    assert left == []
    shared = [name for name in os.listdir("/dev/shm") if "tokenmill" in name]
    assert shared == []
