"""A run whose tokens are bytes, from texts to a training: shards, samples and batches hold the bytes of the texts."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from pipeline.cli.app import run_command
from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import make_backend, run_recipe
from tokenizer.load import load_tokenizer
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify

RECIPE = """version: 1
sources: {texts: {read: text, path: "texts/*.txt"}}
datasets: {clean: {from: texts}}
tokenizer: {kind: bytes}
shards: {texts: {from: clean, longest: 64, val: 10%}}
curriculum:
  seed: 1
  total: 10240
  phases: [{name: all, until: 100%, sequence: 64, batch: 256, mix: {texts: 100}, max_epochs: {texts: 99}}]
train:
  model: {layers: 1, width: 16, heads: 2, kv_heads: 1, ffn: 24}
  optimizer: {lr: 0.02}
  log_every: 1
  evaluate: {every: 1000}
  checkpoint: {every: 1000}
  sample: {tokens: 8}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "texts").mkdir()
    for i in range(60):
        text = f"Größe {i}, 東京 <|endoftext|> \U0001f469\u200d {'ab ' * (i % 9)}"
        (folder / "texts" / f"{i:02}.txt").write_text(text)
    (folder / "r.yaml").write_text(RECIPE)
    run_recipe(load_recipe(folder / "r.yaml", []), str(folder / "store"), make_backend=make_backend("inline", 1, None))
    return folder / "store"


def test_bodies_are_the_texts_and_end_of_text_is_a_byte_that_no_text_holds(store, capsys):
    texts = sorted(path.read_text() for path in (store.parent / "texts").iterdir())
    read = []
    for split in ("train", "val"):
        shards = ShardSet(store / "shards/texts" / f"split={split}")
        assert verify(shards.folder) == []
        assert (shards.manifest.dtype, shards.manifest.vocab_size, shards.manifest.eos) == ("uint8", 256, 0xFF)
        body = b"".join((shards.folder / shard.body).read_bytes() for shard in shards.manifest.shards)
        assert len(body) == shards.tokens
        read += [text.decode() for text in body.split(b"\xff")[:-1]]
    assert sorted(read) == texts
    run_command(["shards", "head", str(store / "shards/texts/split=train"), "-n", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["text"] in texts


def test_the_order_reads_windows_of_the_body(store):
    [path] = (store / "runs").glob("*/curriculum.json")
    curriculum = Curriculum.loads(path.read_text(), str(path))
    assert curriculum.tokenizer.vocab_size == 256
    shards = ShardSet(store / "shards/texts/split=train")
    body = b"".join((shards.folder / shard.body).read_bytes() for shard in shards.manifest.shards)
    order = Order(curriculum)
    for sample in range(20):
        place = order.locate(sample, sample + 1)
        window = int(np.ravel(place.window)[0])
        assert shards.window(window, 64).tobytes() == body[window * 64:window * 64 + 65]


def test_a_training_learns_from_bytes(store, tmp_path):
    pytest.importorskip("torch")
    from trainer.__main__ import main

    [run] = (store / "runs").iterdir()
    assert not main(["run", str(run), "--out", str(tmp_path / "out"), "--quiet", "--device", "cpu"])
    events = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 40
    assert abs(losses[0] - np.log(256)) < 0.5 and losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("wrong", ["{kind: bytes, load: x.json}", "{}", "{kind: words}",
                                   "{load: x.json, pattern: cl100k}"])
def test_settings_of_the_tokenizer_that_do_not_fit_are_refused(store, tmp_path, wrong):
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "r.yaml").write_text(RECIPE.replace("{kind: bytes}", wrong))
    with pytest.raises(RecipeError, match="tokenizer"):
        load_recipe(tmp_path / "r.yaml", [])


def test_a_run_loads_a_tiktoken_file_and_keeps_a_tokenizer_json(tmp_path):
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
    lines += [base64.b64encode(b"ab") + b" 256", base64.b64encode(b" ab") + b" 257"]
    (tmp_path / "own.tiktoken").write_bytes(b"\n".join(lines))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("ab ab <|endoftext|> 12")
    head, _, _ = RECIPE.replace("{kind: bytes}", "{load: own.tiktoken, pattern: cl100k}").partition("curriculum:")
    (tmp_path / "r.yaml").write_text(head.replace("val: 10%", "val: 0%"))
    run_recipe(load_recipe(tmp_path / "r.yaml", []), str(tmp_path / "store"),
               make_backend=make_backend("inline", 1, None))
    shards = ShardSet(tmp_path / "store/shards/texts/split=train")
    assert (shards.manifest.vocab_size, shards.manifest.eos) == (259, 258)
    assert shards.read(0, shards.tokens).tolist() == [256, 257, *b" <|endoftext|> 12", 258]
    [kept] = (tmp_path / "store/shards").glob("tokenizer-*.json")
    assert load_tokenizer(kept).sha256 == shards.manifest.tokenizer
