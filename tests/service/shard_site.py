"""A store with shards and a curriculum, made by a run of a recipe."""

from __future__ import annotations

import json
import random
from pathlib import Path

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from tests.corpus import sentences

MAIL = "jane.roe@home.example.com"
RECIPE = """
version: 1
sources: {web: {read: jsonl, path: a.jsonl}}
datasets: {clean: {from: web, steps: [exact]}}
tokenizer: {train: {kind: bpe, vocab: 300, from: clean}}
shards: {web: {from: clean, longest: 64, val: 5%}}
curriculum:
  seed: 3
  total: 4096
  phases:
    - {name: first, until: 50%, sequence: 32, batch: 128, mix: {web: 1}}
    - {name: second, until: 100%, sequence: 64, batch: 128, mix: {web: 1}}
train:
  model: {layers: 1, width: 36, heads: 3, kv_heads: 1, ffn: 51}
  optimizer: {lr: 0.01}
  schedule: {warmup: "5%"}
  log_every: 4
  evaluate: {every: 10, windows: 4}
  checkpoint: {every: 10}
  sample: {tokens: 0}
"""


def make_site(top: Path, recipe: str = RECIPE) -> Path:
    """Run a recipe in the folder `top`. Returns the folder of its store; the run is called `main`."""
    rng, prose = random.Random(5), sentences()
    rows = [{"text": " ".join(rng.sample(prose, 5)) + f" Write to {MAIL}. <script>alert({i})</script>",
             "url": f"https://example.org/{i}?m={MAIL}"} for i in range(60)]
    (top / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (top / "recipe.yaml").write_text(recipe)
    run_recipe(load_recipe(top / "recipe.yaml", []), str(top / "store"), run="main",
               make_backend=make_backend("inline", 1, None))
    return top / "store"
