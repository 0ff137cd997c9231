"""Writes the corpus and the recipe that every scenario runs: 2,000 documents, about 45 partitions, two barriers, and
tokens.

There are two sources. `web` has four big files with WARC records of the type `conversion`, which are indexed and split.
`notes` has small files, several of which make one partition. Both hold exact copies and near-duplicates of their own
documents and of each other's. Everything is a function of a seed. Seven documents are poison for one stage: in one
recipe it drops them, in the other they crash its process.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from tests.corpus import sentences

DOCUMENTS = 2000
WEB, NOTES = 1600, 400

RECIPE = """
version: 1
code: [own_poison.py]
sources:
  web: {{read: warc, path: web/*.warc.gz}}
  notes: {{read: jsonl, path: notes/*.jsonl}}
datasets:
  clean: {{from: web, steps: [{{"own_poison:Poison": {{die: {die}}}}}, gopher_quality, pii]}}
  unique: {{from: [clean, notes], steps: [exact, {{minhash: {{verify: 0.75}}}}], priority: [notes, clean]}}
tokenizer: {{train: {{kind: bpe, vocab: 600, from: unique, sample: 100KB}}}}
shards:
  web: {{from: unique, where: {{source: web}}, longest: 512, val: 5%}}
  notes: {{from: unique, where: {{source: notes}}, longest: 512, val: 5%}}
curriculum:
  seed: 3
  total: 100k
  phases:
    - {{name: stable, until: 70%, sequence: 128, batch: 1024, mix: {{web: 80, notes: 20}}, on_exhausted: repeat}}
    - {{name: anneal, until: 100%, sequence: 256, mix: {{web: 50, notes: 50}}, lr: decay}}
run: {{partition: 60KB}}
"""


STAGE = '''
import ctypes

from stages.stage import Stage, StageConfig, signal


class Poison(Stage):
    """Dies of what a document says; or, to compare with, only drops it."""

    name = "poison"

    class Config(StageConfig):
        die: bool = signal(True, "whether to die")

    def process(self, doc):
        kind = next((k for k in KINDS if f" {k}. " in doc.text), None)
        return None if kind is None else KINDS[kind]() if self.config.die else "poison"


def spin():
    while True:
        pass


def hog():
    held = []
    for _ in range(512):
        held.append(bytearray(16 << 20))       # 8 GB in all; not written to, for that is CPU time


def fail():
    raise LookupError("bad document of someone@mail.example.org")


KINDS = {"poison-segfault": lambda: ctypes.string_at(0), "poison-spin": spin, "poison-hog": hog, "poison-fail": fail}
'''
SEGFAULT, SPIN, HOG, FAIL = "poison-segfault", "poison-spin", "poison-hog", "poison-fail"
#: the number of each planted document in `web` → the word that makes it crash
PLANTED = {7: SEGFAULT, 8: SPIN, 451: HOG, 452: FAIL, 800: SEGFAULT, 1203: SPIN, 1590: FAIL}
REASONS = {SEGFAULT: "crash:SIGSEGV", SPIN: "cpu_limit", HOG: "memory", FAIL: "error:LookupError"}


def texts(n: int, seed: int) -> list[str]:
    """`n` texts of about 1.2 kB: 10 % exact copies, 15 % near-duplicates, 5 % too short for the filter."""
    rng, prose = random.Random(seed), sentences()
    found: list[str] = []
    for i in range(n):
        draw = rng.random()
        if draw < 0.10 and found:
            found.append(rng.choice(found))
        elif draw < 0.25 and found:
            words = rng.choice(found).split(" ")
            words[rng.randrange(len(words))] = "otherwise"
            found.append(" ".join(words))
        elif draw < 0.30:
            found.append(f"Too short to be kept: number {i}.")
        else:
            found.append(" ".join(rng.sample(prose, rng.randint(7, 13))))
    return found


def write_site(top: Path) -> None:
    """Write the inputs and two recipes: `recipe.yaml` drops the seven poisonous documents, and `poisoned.yaml` crashes
    on them."""
    found = texts(DOCUMENTS, 11)
    for number, word in PLANTED.items():
        found[number] = f"Number {number} {word}. " + " ".join(random.Random(number).sample(sentences(), 9))
    (top / "own_poison.py").write_text(STAGE)
    for name, die in (("recipe", "false"), ("poisoned", "true")):
        (top / f"{name}.yaml").write_text(RECIPE.format(die=die))
    for folder in ("web", "notes"):
        (top / folder).mkdir(parents=True, exist_ok=True)
    for i in range(4):
        with open(top / "web" / f"{i:02d}.warc.gz", "wb") as f:
            for number in range(i * WEB // 4, (i + 1) * WEB // 4):
                f.write(gzip.compress(_conversion(number, found[number].encode()), 1, mtime=0))
    for i in range(10):
        with open(top / "notes" / f"{i:02d}.jsonl", "w", encoding="utf-8") as f:
            for text in found[WEB + i * NOTES // 10:WEB + (i + 1) * NOTES // 10]:
                f.write(json.dumps({"text": text}) + "\n")


def _conversion(number: int, body: bytes) -> bytes:
    """Return a WARC record with a text, as WET files (Common Crawl's extracted texts) have it."""
    return (f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-{number:012d}>\r\n"
            f"WARC-Date: 2026-01-01T00:00:00Z\r\nWARC-Target-URI: https://site.example/{number}\r\n"
            f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body + b"\r\n\r\n"
