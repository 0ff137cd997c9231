"""A small store to train on: a synthetic language in real shards, a resolved curriculum, and a recipe with a `train`
section."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.tokenizer.packs import write_packing
from tokenizer.mixture.resolve import resolve
from tokenizer.shards.layout import MANIFEST, Manifest, Shard, file_name, token_dtype
from tokenizer.shards.writer import ShardWriter
from trainer.observe.metrics import read

#: a prime, so that nothing divides evenly over ranks
VOCAB, EOS = 97, 0
TOKENIZER = {"sha256": "c" * 64, "vocab_size": VOCAB, "eos": EOS, "path": "tokenizers/none/tokenizer.json"}
MODEL = {"layers": 1, "width": 36, "heads": 3, "kv_heads": 1, "ffn": 51, "qk_norm": True}


def quiet(_text: str) -> None:
    pass


def steps(out: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl about steps; [] if the training has not begun."""
    path = out / "metrics.jsonl"
    return [line for line in read(path) if line["event"] == "step"] if path.exists() else []


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in steps(out)}


def language(seed: int, documents: int, successors: int = 3, mean: int = 40, chain: int = 0) -> list[np.ndarray]:
    """Return random documents in which each token is followed by one of `successors` possible tokens. `chain` is the
    seed that determines these successors."""
    following = np.random.default_rng(chain).integers(1, VOCAB, (VOCAB, successors))
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(documents):
        tokens = [int(rng.integers(1, VOCAB))]
        for _ in range(int(rng.integers(3, 2 * mean))):
            tokens.append(int(following[tokens[-1], rng.integers(successors)]))
        made.append(np.array([*tokens, EOS]))
    return made


def write_shards(folder: Path, name: str, split: str, documents: list[np.ndarray], shards: int,
                 masked: bool = False) -> dict[str, Any]:
    """Write documents (each ended by EOS) as a published set of `shards` shards. With `masked`, no token counts in the
    loss. Returns what a curriculum needs to know of the set."""
    folder.mkdir(parents=True)
    made = []
    for i, piece in enumerate(np.array_split(np.arange(len(documents)), shards)):
        docs = [documents[j] for j in piece]
        kinds = ("body", "ends", "table", "blocks", "loss")
        paths = {kind: folder / f"{kind}.tmp" for kind in (kinds if masked else kinds[:4])}
        writer = ShardWriter(*(str(paths[kind]) for kind in kinds[:4]), VOCAB, EOS, lambda: str(folder / "loss.tmp"))
        lengths = np.array([len(d) for d in docs])
        writer.add(np.concatenate(docs), lengths, [f"{j:032x}" for j in piece], 0, np.arange(len(docs)), 3 * lengths,
                   np.zeros(lengths.sum(), np.uint8) if masked else None)
        facts = writer.close()
        sums = {kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in paths.items()}
        names = {kind: file_name(i, kind, sums[kind]) for kind in paths}
        for kind, path in paths.items():
            path.rename(folder / names[kind])
        made.append(Shard(index=i, **facts, **names, table_sha256=sums["table"]))
    found = Manifest(name, split, token_dtype(VOCAB).name, TOKENIZER["sha256"], VOCAB, EOS, sum(s.tokens for s in made),
                     sum(s.documents for s in made), sum(s.text_bytes for s in made), tuple(made))
    found = replace(found, sha256=found.identity())
    (folder / MANIFEST).write_text(found.dumps())
    return {"path": str(folder.relative_to(folder.parents[2])), "sha256": found.sha256, "tokens": found.tokens,
            "documents": found.documents, "bytes": found.text_bytes}


def make_run(store: Path, train: dict[str, Any] | None = None, phases: list[dict[str, Any]] | None = None,
             total: int = 7680, documents: int = 600, model: dict[str, Any] | None = None,
             masked: tuple[str, ...] = (), packed: tuple[str, ...] = (), longest: int = 64) -> Path:
    """Write a store with two streams and a run, and return the folder of the run. The default phases have sequences of
    32 and 64 tokens, and batches of 5 and 3 rows. In the streams `masked`, no token counts in the loss. The documents
    of the streams `packed` are packed into rows of 64."""
    sets = {}
    for s, name in enumerate(("web", "code")):
        info = {split: write_shards(store / "shards" / name / f"split={split}", name, split,
                                    language(10 * s + k, n, chain=s), shards, name in masked)
                for k, (split, n, shards) in enumerate((("train", documents, 3), ("val", 12, 1)))}
        if name in packed:
            info["train"]["packing"] = write_packing(store / info["train"]["path"], 64)
        sets[name] = {"name": name, "tokenizer": TOKENIZER["sha256"], "dtype": token_dtype(VOCAB).name, **info}
    phases = phases or [
        {"name": "stable", "until": "50%", "sequence": 32, "batch": 160, "mix": {"web": 70, "code": 30}},
        {"name": "mid", "until": "75%", "sequence": 64, "batch": 192, "mix": {"web": 50, "code": 50}},
        {"name": "anneal", "until": "100%", "mix": {"web": 30, "code": 70}, "lr": "decay"}]
    recipe = {"curriculum": {"seed": 1, "total": total, "phases": phases},
              "shards": {name: {"longest": longest} for name in sets},
              "train": {"model": model or MODEL, "optimizer": {"lr": 0.01}, "schedule": {"warmup": "5%"},
                        "log_every": 100, "evaluate": {"every": 1000}, "checkpoint": {"every": 1000},
                        "sample": {"tokens": 0}, **(train or {})}}
    run = store / "runs" / "toy"
    run.mkdir(parents=True)
    curriculum, _ = resolve(recipe, sets, TOKENIZER)
    curriculum.save(run / "curriculum.json")
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return run
