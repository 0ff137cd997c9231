"""A study from texts to its verdict, where the truth is known: a variant with half of its words shuffled is found to
differ, and a copy is not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pipeline.cli.app import run_command

RECIPE = """
version: 1
sources: {docs: {read: jsonl, path: a.jsonl}}
datasets: {all: {from: docs, steps: []}}
tokenizer: {train: {kind: bpe, vocab: 500, from: all}}
shards: {docs: {from: all, longest: 64}}
curriculum: {total: 60k, phases: [{name: all, until: 100%, sequence: 64, batch: 1024, mix: {docs: 1}}]}
train:
  model: {layers: 1, width: 32, heads: 2}
  optimizer: {lr: 0.01}
  sample: {tokens: 0}
"""


def texts(seed: int, documents: int) -> list[list[str]]:
    """Return documents as lists of words. Each word is followed by one of four words that belong to it."""
    words = ["".join(random.Random(i).choices("abcdefghijklmnopqrstuvwxyz", k=5)) for i in range(150)]
    rng, following = random.Random(seed), random.Random(0)
    successors = {word: following.sample(words, 4) for word in words}
    made = []
    for _ in range(documents):
        text = [rng.choice(words)]
        while len(text) < 120:
            text.append(rng.choice(successors[text[-1]]))
        made.append(text)
    return made


def half_shuffled(text: list[str], rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text)), len(text) // 2))
    words = [text[place] for place in places]
    rng.shuffle(words)
    shuffled = list(text)
    for place, word in zip(places, words):
        shuffled[place] = word
    return shuffled


def write(path: Path, documents: list[list[str]]) -> None:
    path.write_text("".join(json.dumps({"text": " ".join(words)}) + "\n" for words in documents))


@pytest.mark.slow
def test_shuffled_words_are_told_apart_and_a_copy_is_not(tmp_path, capsys):
    documents, rng = texts(1, 800), random.Random(5)
    write(tmp_path / "a.jsonl", documents)
    write(tmp_path / "copy.jsonl", rng.sample(documents, len(documents)))      # other ids, so another order of training
    write(tmp_path / "bad.jsonl", [half_shuffled(text, rng) for text in documents])
    write(tmp_path / "judge.jsonl", texts(2, 60))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = ["train", "ablate", "--data", f"good={tmp_path / 'recipe.yaml'}", "--vary", "copy",
               f"sources.docs.path={tmp_path / 'copy.jsonl'}", "--vary", "shuffled",
               f"sources.docs.path={tmp_path / 'bad.jsonl'}", "--held-out", str(tmp_path / "judge.jsonl"), "--store",
               str(tmp_path / "store"), "--seeds", "3", "--jobs", "2", "--device", "cpu", "--name", "planted", "--json"]
    assert run_command(command) == 0
    found = json.loads(capsys.readouterr().out)
    [(source, of)] = found["sources"].items()
    shuffled, copy = of["arms"]["shuffled"], of["arms"]["copy"]
    assert source == "held-out" and found["unit"] == "bits/byte" and found["seeds"] == 3
    assert shuffled["beyond_noise"] and shuffled["delta"] > 0.02
    assert not copy["beyond_noise"] and abs(copy["delta"]) < shuffled["delta"] / 4
    out = tmp_path / "store" / "studies" / "planted"
    assert json.loads((out / "ablate" / "table.json").read_text()) == found
    assert "shuffled is worse than good on held-out" in (out / "ablate" / "table.txt").read_text()
    assert [v["name"] for v in json.loads((out / "study.json").read_text())["variants"]] == ["good", "copy", "shuffled"]
    assert run_command(command) == 0                                          # again: nothing is trained
    assert json.loads(capsys.readouterr().out) == found
