"""A site with planted documents, and a search for their words in every file of a store, whatever its format."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.cli.app import run_command
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.corpus import sentences
from tokenizer.load import load_tokenizer

FILTER = '''
from stages.stage import Stage, StageConfig


class Judge(Stage):
    """Drop texts with the word 'unwanted', and fail on those with 'impossible'."""

    name = "judge"
    drops = True
    signals = ()

    class Config(StageConfig):
        pass

    def process(self, doc):
        if "impossible" in doc.text:
            raise ValueError(doc.text)
        return "unwanted" if "unwanted" in doc.text else None
'''
RECIPE = """
version: 1
code: [judge_filter.py]
sources:
  web: {read: jsonl, path: texts/*.jsonl}
datasets:
  all:
    from: web
    steps: ["judge_filter:Judge", exact, {minhash: {verify: 0.75}}, pii]
tokenizer: {train: {kind: bpe, vocab: 400, from: all, sample: 50KB}}
shards:
  web: {from: all, longest: 128, val: 5%PACKING}
curriculum:
  seed: 3
  total: 40k
  phases:
    - {name: stable, until: 100%, sequence: 128, batch: 512, mix: {web: 100}}
run: {partition: 40KB}
train:
  model: {layers: 1, width: 32, heads: 2, kv_heads: 1, ffn: 48}
"""
#: planted documents: {name: a word that is only in it}. A twin is a near-duplicate of `kept` with a word of its own
PLANTED = {"kept": "zorblak", "twin": "quixnar", "long": "vemphist", "dropped": "yulgrob", "quarantined": "wexfrond"}
HOST = "https://gone.example.org"


def write_site(folder: Path, packing: bool = False) -> Path:
    """Write texts, recipe and filter. The planted documents have URLs of gone.example.org."""
    rng, prose = random.Random(11), sentences()
    (folder / "texts").mkdir(parents=True)
    files = [[{"text": " ".join(rng.sample(prose, 6)), "url": f"https://stays.example.org/{file}/{n}"}
              for n in range(60)] for file in range(4)]

    def plant(name: str, text: str, file: int) -> None:
        files[file].insert(rng.randrange(60), {"text": text, "url": f"{HOST}/{name}"})

    body = rng.sample(prose, 30)
    plant("kept", " ".join([*body, "The zorblak was here for us all, and stayed."]), 0)
    plant("twin", " ".join([*body, "The quixnar was here for us all."]), 3)
    plant("long", " ".join(f"{sentence} A vemphist followed." for sentence in rng.sample(prose, 60)), 1)
    plant("dropped", " ".join([*rng.sample(prose, 5), "An unwanted yulgrob."]), 2)
    plant("quarantined", " ".join(["An impossible wexfrond.", *rng.sample(prose, 5)]), 2)
    for number, rows in enumerate(files):
        (folder / f"texts/{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judge_filter.py").write_text(FILTER)
    (folder / "recipe.yaml").write_text(RECIPE.replace("PACKING", ", packing: best-fit" if packing else ""))
    return folder


def tokenmill(*arguments: str | Path) -> int:
    return run_command([*map(str, arguments)])


def run(site: Path, store: str = "") -> Store:
    """Run the recipe; by default, the store is a folder of the site."""
    sys.modules.pop("judge_filter", None)
    at = store or str(site / "store")
    assert tokenmill("run", site / "recipe.yaml", "--store", at, "--quiet", "--backend", "inline",
                     "--allow-custom-stages") == 0
    return Store(at)


def planted_ids(store: Store) -> dict[str, str]:
    """Return {name: id} of the planted documents. The quarantined one is recognised by the word in its row's
    `detail`."""
    ids = {}
    for path in store.list("objects"):
        if path.endswith(".parquet"):
            table = pq.read_table(store.at(path), memory_map=False)
            if {"id", "url"} <= set(table.column_names):
                ids |= {url.removeprefix(f"{HOST}/"): id for id, url in zip(table["id"].to_pylist(),
                                                                            table["url"].to_pylist())
                        if url and url.startswith(HOST)}
            elif "detail" in table.column_names:
                for row in table.filter(pc.match_substring(table["detail"], "wexfrond")).to_pylist():
                    ids["quarantined"] = row["id"]
    return ids


def contents(store: Store) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for every file of a store, also hidden ones. Every file is yielded as it is. Parquet is also
    yielded as JSON, tokens as decoded text, and the log record by record."""
    decode = load_tokenizer(next(store.local.rglob("*tokenizer.json"))).decode
    for file in sorted(path for path in store.local.rglob("*") if path.is_file()):
        path, data = str(file.relative_to(store.local)), file.read_bytes()
        yield path, data.decode("utf-8", "replace")
        if data[:4] == b"PAR1":
            yield path, json.dumps(pq.read_table(file, memory_map=False).to_pylist(), default=str, ensure_ascii=False)
        elif data[:1] not in b"{<[" and len(data) % 2 == 0:          # tokens perhaps
            yield path, decode([token for token in np.frombuffer(data, "<u2").tolist() if token < 400])
    for record in Log.read(store).records():
        yield f"log: {record.key}", json.dumps(record.to_json())


def places(store: Store, words: list[str]) -> dict[str, set[str]]:
    """Return in which files of a store each of these words occurs: {word: paths}."""
    found: dict[str, set[str]] = {word: set() for word in words}
    pattern = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)
    for path, text in contents(store):
        for word in set(pattern.findall(text)):
            found[word.lower()].add(path)
    return found
