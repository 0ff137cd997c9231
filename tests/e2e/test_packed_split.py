"""A recipe with packed rows of byte tokens, split by language, and a stream kept for the last phase: from the run to
the batches of a training."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from tests.e2e.test_split_shards import curriculum_of, run, write_site
from tests.tokenizer.packs import slow_sample
from tokenizer.mixture.order import Order
from tokenizer.mixture.steps import steps
from trainer.data.batches import Data
from trainer.model.loss import IGNORE

RECIPE = """
version: 1
sources:
  web: {read: jsonl, path: texts/*.jsonl, language: lang, signals: [score], keep: [topic]}
datasets:
  all: {from: web}
tokenizer: {kind: bytes}
shards:
  web: {from: all, by: [language], min_tokens: 5500, longest: 128, val: 5%, packing: best-fit}
  late: {from: all, longest: 128, val: 5%, packing: best-fit, from_phase: anneal}
curriculum:
  seed: 3
  total: 20k
  phases:
    - {name: stable, until: 70%, sequence: 128, batch: 512, mix: {web: {share: 100, by: language, alpha: 0.3}}}
    - {name: anneal, until: 100%, lr: decay, mix: {web: {share: 60, by: language, alpha: 0.3}, late: 40}}
run: {partition: 40KB}
"""


def test_packed_split_and_kept_streams_give_the_batches_built_token_by_token(tmp_path):
    write_site(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    store = run(tmp_path / "recipe.yaml", tmp_path / "store")
    curriculum = curriculum_of(store)
    assert [(s.name, s.from_phase) for s in curriculum.streams] == [
        ("late", "anneal"), ("web.de", None), ("web.en", None), ("web.other", None), ("web.zh", None)]
    assert all(stream.packing and stream.dtype == "uint8" for stream in curriculum.streams)
    data, at = Data(curriculum, store.local), Order(curriculum).locate(0, curriculum.samples)
    assert set(at.stream[:curriculum.phases[0].samples].tolist()) == {1, 2, 3, 4}
    assert 0 in at.stream[curriculum.phases[0].samples:]
    for step in steps(curriculum):
        batch = data.step(step.first, step.batch, 0, 1)
        for i in range(step.batch):
            shards = data.train[int(at.stream[step.first + i])]
            slow = slow_sample(shards, shards.packed.row(int(at.window[step.first + i])), 128)
            assert batch.tokens[i].tolist() == slow["inputs"] and batch.positions[i].tolist() == slow["positions"]
            assert [None if t == IGNORE else t for t in batch.targets[i].tolist()] == slow["targets"]
