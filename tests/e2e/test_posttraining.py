"""Records of fine-tuning beside papers in one mixture: of their tokens only answers become targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.fs import Store
from stages.mix.curriculum import Curriculum
from tokenizer.load import load_tokenizer
from tokenizer.shards.verify import verify

RECIPE = """version: 1
sources:
  chats:  {read: sft, path: chats.jsonl}
  liked:  {read: preference, path: pairs.jsonl, template: {turn: "## {role}\\n{content}\\n", separator: ""}}
  papers: {read: text, path: "papers/*.tex"}
datasets:
  papers_text: {from: papers, steps: [latex]}
  anneal: {from: [papers_text, chats, liked], steps: [{pii: {}}]}
tokenizer: {train: {kind: bpe, vocab: 320, from: anneal}}
shards:
  chats:  {from: anneal, where: {source: chats}, longest: 64}
  liked:  {from: anneal, where: {source: liked}, longest: 64}
  papers: {from: anneal, where: {source: papers}, longest: 64}
curriculum:
  seed: 1
  total: 4096
  phases: [{name: anneal, until: 100%, sequence: 64, batch: 256, mix: {chats: 50, liked: 25, papers: 25}}]
"""


def records(folder: Path) -> None:
    (folder / "papers").mkdir()
    for i in range(30):
        (folder / "papers" / f"{i:02}.tex").write_text(
            f"% secret comment\n\\section{{Part {i}}}\nLet $x_{{{i}}}$ be \\emph{{small}}.\n" * 4)
    with open(folder / "chats.jsonl", "w") as f:
        for i in range(200):
            f.write(json.dumps({"messages": [
                {"role": "user", "content": f"Asked {i}? I am ann@mail.example.net"},
                {"role": "assistant", "content": f"Said {i}! Ask bob.long.name@corp.example.net"}]}) + "\n")
        f.write(json.dumps({"messages": [{"role": "critic", "content": "nobody knows this role"}]}) + "\n")
    with open(folder / "pairs.jsonl", "w") as f:
        for i in range(120):
            f.write(json.dumps({"prompt": f"Asked {i}", "chosen": f"Good {i}", "rejected": f"Awful {i}"}) + "\n")


def test_only_answers_are_targets(tmp_path):
    pytest.importorskip("torch")
    from trainer.data import Data

    records(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "r.yaml", [])
    run_recipe(recipe, str(tmp_path / "store"), make_backend=make_backend("inline", 1, None))
    store = Store(str(tmp_path / "store"))
    [lost] = iter_rows(store, "quarantine/anneal", ["source", "reason", "record"])
    assert (lost["source"], lost["reason"], lost["record"]) == ("chats", "unknown_role", 200)
    for row in iter_rows(store, "datasets/anneal", ["source", "text", "loss_spans"]):
        said = [row["text"].encode()[s["start"]:s["end"]].decode() for s in row["loss_spans"] or []]
        assert "mail.example.net" not in row["text"] and "secret" not in row["text"]
        if row["source"] == "chats":
            assert len(said) == 1 and said[0].startswith("Said ") and said[0].endswith("example.com<|im_end|>")
        else:
            assert said == ([row["text"].rpartition("assistant\n")[2]] if row["source"] == "liked" else [])
    [run] = (tmp_path / "store" / "runs").glob("*/curriculum.json")
    curriculum = Curriculum.from_json(json.loads(run.read_text()))
    data = Data(curriculum, tmp_path / "store")
    tokenizer = load_tokenizer(tmp_path / "store" / curriculum.tokenizer.path)
    learned = dict.fromkeys(data.streams, "")
    for n in range(curriculum.samples):
        batch = data.samples([n])
        targets = [int(t) for t in batch.targets[0] if t >= 0]
        learned[data.streams[int(batch.stream[0])]] += tokenizer.decode(targets)
    assert "Said" in learned["chats"] and not any(w in learned["chats"] for w in ("Asked", "user", "im_start"))
    assert "Good" in learned["liked"] and not any(w in learned["liked"] for w in ("Asked", "##", "Awful"))
    assert "Part" in learned["papers"] and "$x_{" in learned["papers"] and "\\section" not in learned["papers"]
    for stream in curriculum.streams:
        folder = tmp_path / "store" / stream.train
        assert verify(folder, stream.sha256) == []
        assert bool(list(folder.glob("*.loss"))) == (stream.name != "papers")
