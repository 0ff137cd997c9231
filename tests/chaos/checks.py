"""What must hold after every scenario: equal hashes, nothing lost, nothing twice, nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds

from pipeline.base.scratch import Scratch
from pipeline.store.dataset import dataset_hash
from pipeline.store.fs import Store

DATASETS = ("clean", "unique")


def hashes(store: str) -> dict[str, str]:
    """Everything a run promises to be equal: of the datasets, of the shards, of the order."""
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
    """Where every document ended: ids, sorted, by folder."""
    return {f"{kind}/{d}": sorted(ids(store, f"{kind}/{d}")) for d in DATASETS
            for kind in ("datasets", "dropped", "quarantine")}


def check_log(store: str) -> None:
    """Every key was committed once, every file the log names is there, and epochs count up one by one."""
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
    """Only what the log names, and lists of it, are in objects/: to be asked after a run that collected garbage and
    then ran nothing."""
    named = {info["path"] for path in Path(store, "log").glob("0*.json")
             for record in json.loads(path.read_text())["body"].get("records", ())
             for info in record["files"].values()}
    there = {p.relative_to(store).as_posix() for p in Path(store, "objects").rglob("*")
             if p.is_file() and p.parent.name != "lists"}
    assert there == named, "files of dead attempts were not collected"


def tree(store: str) -> dict[str, str]:
    """sha256 of every file of a store, by path; links by the file they are."""
    return {p.relative_to(store).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(Path(store).rglob("*")) if p.is_file()}


def check_scratch(temp: Path) -> None:
    """No scratch is left once the next worker has looked: what a killed owner left, its successor sweeps away."""
    Scratch(str(temp)).close()
    left = [str(p) for top in temp.glob("tokenmill-*") for p in top.iterdir() if p.name.startswith("scratch-")]
    assert left == []
    shared = [name for name in os.listdir("/dev/shm") if "tokenmill" in name]
    assert shared == []
