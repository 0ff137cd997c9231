"""The recipe of the tests of the command, and ways to call the command. The fixtures are in conftest.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.commands import command

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
version: 1
sources:
  web: {read: warc, path: crawl/*.warc.gz}
  docs: {read: text, path: docs}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: [gopher_quality, pii]}
  deduped: {from: [clean, docs], steps: [exact, {minhash: {verify: 0.7, bands: 16}}], priority: [docs, clean]}
tokenizer: {train: {kind: bpe, vocab: 600, from: deduped, sample: 100KB}}
shards:
  web: {from: deduped, where: {source: web}, longest: 128, val: 5%}
  docs: {from: deduped, where: {source: docs}, longest: 128, val: 5%}
curriculum:
  seed: 3
  total: 8192
  phases:
    - {name: stable, until: 75%, sequence: 64, batch: 512, mix: {web: 80, docs: 20}, on_exhausted: repeat}
    - {name: anneal, until: 100%, sequence: 128, mix: {web: 50, docs: 50}, lr: decay}
train: {model: {preset: demo}}
"""


@dataclass
class Said:
    code: int
    out: str
    err: str

    def json(self) -> list[Any]:
        """The lines of stdout, each parsed as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


def process(*arguments: str | Path, python: bool = False, **env: str) -> Said:
    """Run the command in a process of its own. With `python`, run Python with these arguments instead."""
    done = command("pipeline.cli", *arguments, env=env) if not python else subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False, cwd=ROOT,
        env={**os.environ, **env})
    return Said(done.returncode, done.stdout, done.stderr)
