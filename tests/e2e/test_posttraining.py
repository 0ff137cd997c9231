"""Dialogues for fine-tuning and papers in one run: of the dialogues the trainer learns exactly the tokens of what the
assistant says, checked from the records to the gradient."""

from __future__ import annotations

import json
import random
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli.app import run_command
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from stages.document import document_id
from tests.frozen import hold_run
from tokenizer.load import load_tokenizer
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.shards.rows import RowSet
from tokenizer.shards.verify import verify

RECIPE = """version: 1
sources:
  chats:  {read: sft, path: chats.jsonl}
  liked:  {read: preference, path: pairs.jsonl, template: {turn: "## {role}\\n{content}\\n", separator: ""}}
  papers: {read: text, path: "papers/*.tex"}
datasets:
  papers_text: {from: papers, steps: [latex]}
  anneal: {from: [papers_text, chats, liked], steps: [{pii: {}}]}
tokenizer: {train: {kind: bpe, vocab: 400, from: anneal}}
shards:
  chats:  {from: anneal, where: {source: chats}, longest: 128}
  liked:  {from: anneal, where: {source: liked}, longest: 128}
  papers: {from: anneal, where: {source: papers}, longest: 128}
curriculum:
  seed: 1
  total: 10240
  phases:
    - {name: stable, until: 60%, sequence: 64, batch: 256, mix: {papers: 100}, max_epochs: {papers: 99}}
    - {name: anneal, until: 100%, sequence: 128, mix: {chats: 50, liked: 25, papers: 25}}
"""
CHATS, MAIL = 1000, "ann@mail.example.net"
#: what makes merges across the borders of turns, and what a template could take for its own
WORDS = ["a", "the answer", "user", "assistant", "Asked", "\n", "\n\n", " ", "  ", "{content}", "{role}", "é", "größe",
         "東京", "\U0001f469\u200d\U0001f467", "e\u0301", "<|", "|>", "<think>", "```py\nx = 1\n```", "1234", "...",
         "im_end", "Said.", "assistant\n", "\t", "<|endoftext|>"]


def said(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 12))).strip() or "x"


def chat(rng: random.Random) -> list[dict[str, Any]]:
    turns = [{"role": "system", "content": said(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randrange(1, 4)):
        turns += [{"role": "user", "content": said(rng)}, {"role": "assistant", "content": said(rng)}]
        if rng.random() < 0.2:
            turns += [{"role": "tool", "content": said(rng)}, {"role": "assistant", "content": said(rng), "weight": 0}]
    return turns


def answers(turns: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Write a conversation in the chatml template, without our code. Returns pieces (text, 1 if the loss counts the
    piece, else 0); neighbouring pieces with the same flag are joined."""
    pieces: list[tuple[str, int]] = []
    for i, turn in enumerate(turns):
        learned = turn["role"] == "assistant" and turn.get("weight") != 0
        pieces += [("\n" * (i > 0) + f"<|im_start|>{turn['role']}\n", 0),
                   (turn["content"] + "<|im_end|>", int(learned))]
    return [("".join(text for text, _ in some), learned)
            for learned, some in groupby([*pieces, ("\n", 0)], key=lambda piece: piece[1])]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(store, {document id: conversation}) of a run of RECIPE."""
    folder: Path = tmp_path_factory.mktemp("posttraining")
    rng, chats = random.Random(4), {}
    (folder / "papers").mkdir()
    for i in range(30):
        (folder / "papers" / f"{i:02}.tex").write_text(
            f"% secret comment\n\\section{{Part {i}}}\nLet $x_{{{i}}}$ be \\emph{{small}}.\n" * 4)
    with open(folder / "chats.jsonl", "w") as f:
        for i in range(CHATS):
            turns = chat(rng)
            chats[document_id("chats", "chats.jsonl", "", i)] = turns
            scrubbed = [t for t in turns if i % 9 == 5 and t["role"] == "assistant" and "weight" not in t]
            for turn in scrubbed:
                turn["content"] += f" {MAIL}"
            f.write(json.dumps({"messages": turns}) + "\n")
            for turn in scrubbed:
                turn["content"] = turn["content"].replace(MAIL, "email@example.com")
        f.write(json.dumps({"messages": [{"role": "critic", "content": "nobody knows this role"}]}) + "\n")
    with open(folder / "pairs.jsonl", "w") as f:
        for i in range(120):
            f.write(json.dumps({"prompt": f"Asked {i}", "chosen": f"Good {i}", "rejected": f"Awful {i}"}) + "\n")
    (folder / "r.yaml").write_text(RECIPE)
    run_recipe(load_recipe(folder / "r.yaml", []), str(folder / "store"),
               make_backend=make_backend("inline", 1, None))
    return folder / "store", chats


@pytest.fixture(scope="module")
def data(run):
    pytest.importorskip("torch")
    from trainer.data.batches import Data

    [path] = (run[0] / "runs").glob("*/curriculum.json")
    return Data(Curriculum.load(path), run[0])


def all_windows(data: Any, stream: int, length: int) -> Any:
    """Return all windows of a stream as one batch, as the trainer would get them, in their order in the stream."""
    from trainer.data.batches import collate
    from trainer.data.rows import windows

    places = [(stream, w) for w in range(data.train[stream].windows(length))]
    return collate(windows(data.train, places, length), length)


def test_the_tokens_are_those_of_before(run):
    hold_run("posttraining", run[0])


def test_what_is_learned_of_1000_conversations_is_what_the_assistant_says(run, data):
    store, chats = run
    stream = data.streams.index("chats")
    shards, tokenizer = data.train[stream], load_tokenizer(store / data.curriculum.tokenizer.path)
    # independent of spans, pieces and sidecars: turns → ids, each piece by itself, and 0/1 for each id
    ids, learned = [], []
    for span in shards.documents(0, shards.tokens):
        for piece, counts in answers(chats[span.id]):
            own = tokenizer.encode(piece).tolist()
            ids += own
            learned += [counts] * len(own)
        ids.append(tokenizer.eos)
        learned.append(0)
    forged = [c for c in chats.values() if any("<|im_end|>" in t["content"] for t in c)]
    assert shards.documents_count + data.heldout[stream].documents_count + len(forged) == CHATS and len(forged) < 10
    batch, length = all_windows(data, stream, 64), 64
    for w in range(batch.rows):
        want = [i if counts else -100 for i, counts in
                zip(ids[w * length + 1:w * length + length + 1], learned[w * length + 1:])]
        assert batch.targets[w].tolist() == want
    words = "".join(piece for span in shards.documents(0, shards.tokens)
                    for piece, counts in answers(chats[span.id]) if counts)
    heard = tokenizer.decode([int(t) for t in batch.targets.flatten() if t >= 0])
    assert words.startswith(heard) and len(words) - len(heard) < 400 and len(heard) > 20_000


def test_streams_of_one_mixture_have_each_its_targets(run, data, capsys):
    store, _ = run
    tokenizer = load_tokenizer(store / data.curriculum.tokenizer.path)
    heard = dict.fromkeys(data.streams, "")
    for n in range(data.curriculum.samples):
        batch = data.samples([n])
        heard[data.streams[int(batch.stream[0])]] += tokenizer.decode([int(t) for t in batch.targets[0] if t >= 0])
    assert "im_end" in heard["chats"] and not any(w in heard["chats"] for w in ("im_start", MAIL))
    assert "Good" in heard["liked"] and not any(w in heard["liked"] for w in ("Asked", "##", "Awful"))
    assert "Part" in heard["papers"] and "$x_{" in heard["papers"] and "secret" not in heard["papers"]
    for stream in data.curriculum.streams:
        assert verify(store / stream.train, stream.sha256) == []
        assert bool(list((store / stream.train).glob("*.loss"))) == (stream.name != "papers")
    said = json.loads((store / "report.json").read_text())["tokens"]
    for stream, shards in zip(data.streams, data.train):
        assert said[stream]["targets"] == shards.targets()
        assert (shards.targets() < shards.tokens) == (stream != "papers")
    folder = str(data.train[data.streams.index("liked")].folder)
    assert run_command(["shards", "head", folder, "-n", "1"]) == 0
    head = capsys.readouterr().out
    assert re.search(r"── \w{32}  \d+ tokens, \d+ learned\n## user\nAsked \d", head), head
    assert run_command(["shards", "stats", folder, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert 0 < stats["targets"] == said["liked"]["targets"] < stats["tokens"]


def test_losses_of_prompts_weigh_nothing(data):
    """The gradient of a step is that of the mean over what is learned, written out by hand over all tokens."""
    import torch
    import torch.nn.functional as F

    from trainer.model.attention import document_mask
    from trainer.model.config import ModelConfig
    from trainer.model.transformer import Transformer

    torch.manual_seed(0)
    first = data.curriculum.phases[1].start
    batch = data.samples(list(range(first, first + 8)))
    vocab = data.curriculum.tokenizer.vocab_size
    model = Transformer(ModelConfig(layers=1, width=16, heads=2, kv_heads=1, ffn=24), vocab)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    mask = document_mask(batch.positions, torch.float32)
    objective, nll, _ = model(batch.tokens, mask, batch.targets, torch.tensor(1 / batch.valid()))
    got = torch.autograd.grad(objective, list(model.parameters()))
    logits = model(batch.tokens, mask).double()
    kept = batch.targets >= 0
    mean = F.cross_entropy(logits[kept], batch.targets[kept])
    want = torch.autograd.grad(mean, list(model.parameters()))
    assert 0 < int(kept.sum()) < kept.numel() and objective.item() == pytest.approx(mean.item(), rel=1e-5)
    assert not nll[~kept].any()
    for a, b in zip(got, want):
        assert torch.allclose(a, b, atol=1e-6)


def test_materialised_rows_have_the_same_targets(run, data):
    from pipeline.materialize import materialize

    store, _ = run
    [name] = [p.parent.name for p in (store / "runs").glob("*/curriculum.json")]
    for format in ("bytes", "parquet"):
        _, folder = materialize(str(store), name, format, make_backend=make_backend("inline", 1, None))
        rows = RowSet(store / folder)
        for n in range(len(rows)):
            row = rows.row(n)
            length = len(row.tokens) - 1
            counts = np.ones(length, bool) if row.counts is None else row.counts.copy()
            counts[row.bounds - 1] = False
            assert data.samples([n]).targets[0].tolist() == np.where(counts, row.tokens[1:].astype(int), -100).tolist()
