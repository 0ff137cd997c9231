"""A document of garbage among real ones, from texts to a training: the loss of its step jumps, `explain` names it by
its URL, and skipping its steps gives the same training as a corpus without it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.synthetic import losses
from trainer.__main__ import main
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.ledger import Ledger
from trainer.loop.run import open_run
from trainer.loop.train import train

pytestmark = pytest.mark.slow

RECIPE = """
version: 1
sources: {web: {read: jsonl, path: docs.jsonl}}
datasets:
  clean: {from: web, steps: [{gopher_repetition: LENIENT}, pii]}
tokenizer: TOKENIZER
shards: {web: {from: clean, longest: 128}}
curriculum:
  seed: 3
  total: 61440
  phases:
    - {name: stable, until: 100%, sequence: 128, batch: 512, mix: {web: 100}}
train:
  model: {layers: 2, width: 48, heads: 4, kv_heads: 2, ffn: 96}
  optimizer: {lr: 0.01}
  schedule: {kind: constant, warmup: 2048}
  log_every: 10
  evaluate: {every: 1000, windows: 16}
  checkpoint: {every: 10, keep: 20}
  sample: {tokens: 0}
  clip: 100
  stability: {sigma: null, window: 20, warm: 20}
"""
#: all its signals, and no document dropped
LENIENT = dict.fromkeys(("dup_line_frac", "dup_line_char_frac", "dup_para_frac", "dup_para_char_frac", "top_2_gram",
                         "top_3_gram", "top_4_gram", *(f"dup_{n}_gram" for n in range(5, 11))), 1.0)
#: what a spike calls for here: back before it, and four steps around it skipped
REWIND = "stability.rewind={trigger: {loss_above: 0.6, for: 1}, skip: 4, budget: 5}"
GARBAGE = "https://garbage.example/dump"


def texts(folder: Path, garbage: bool, tokenizer: str) -> None:
    """Write documents with sentences of a few patterns and, with `garbage`, a document of random characters in the
    middle."""
    rng = random.Random(1)
    nouns, verbs, ends = (["the " + w for w in ("river", "old house", "teacher", "north wind", "garden", "small boat")],
                          ["follows", "remembers", "looks like", "waits for", "belongs to"],
                          ["in winter.", "all day long.", "without a word.", "near the sea.", "again and again."])
    lines = []
    for i in range(420):
        sentences = [" ".join((rng.choice(nouns), rng.choice(verbs), rng.choice(nouns), rng.choice(ends))).capitalize()
                     for _ in range(rng.randint(6, 24))]
        lines.append({"text": "\n".join(sentences), "url": f"https://site{i % 7}.example/page/{i}"})
    if garbage:
        rng = random.Random(2)
        noise = " ".join("".join(chr(rng.randrange(0x21, 0x7F)) for _ in range(rng.randint(2, 9))) for _ in range(75))
        lines.insert(200, {"text": noise + " mail me at someone@garbage.example", "url": GARBAGE})
    folder.mkdir()
    (folder / "docs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text(RECIPE.replace("LENIENT", json.dumps(LENIENT)).replace("TOKENIZER", tokenizer))


def shards(folder: Path, garbage: bool, tokenizer: str) -> Path:
    """Run the recipe over these texts. Returns the folder of the run."""
    from pipeline.recipe import load_recipe
    from pipeline.run import make_backend, run_recipe

    texts(folder, garbage, tokenizer)
    run_recipe(load_recipe(folder / "recipe.yaml", []), str(folder / "store"),
               make_backend=make_backend("inline", 1, None))
    [run] = (p.parent for p in (folder / "store" / "runs").glob("*/curriculum.json"))
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the run with garbage, {name: (output folder, summary)}) of three trainings: `dirty` with the garbage, `rewind`,
    which also goes back, and `clean` without the garbage."""
    from trainer.parallel.world import world

    top = tmp_path_factory.mktemp("spike")
    dirty = shards(top / "dirty", True, "{train: {kind: bpe, vocab: 400, from: clean}}")
    path = json.loads((dirty / "curriculum.json").read_text())["tokenizer"]["path"]
    clean = shards(top / "clean", False, f"{{load: {dirty.parents[1] / path}}}")
    found = {}
    with world("cpu") as here:
        for name, run, more in (("dirty", dirty, []), ("rewind", dirty, [REWIND]), ("clean", clean, [])):
            opened = open_run(str(run), None, str(top / name), more)
            found[name] = top / name, train(opened, here, None, lambda _text: None)
    return dirty, found


def jumps(out: Path) -> dict[int, float]:
    """Return for each step by how much its loss is above the mean of the ten performed steps before it. The first 30
    steps are left out."""
    kept = [(step, loss) for step, loss in losses(out).items() if loss is not None]
    return {step: loss - sum(x for _, x in kept[i - 10:i]) / 10 for i, (step, loss) in enumerate(kept) if i >= 30}


def explained(capsys, run: Path, out: Path, *arguments: object) -> str:
    assert main(["explain", str(run), *map(str, arguments), "--out", str(out)]) == 0
    return capsys.readouterr().out


def test_the_garbage_makes_a_spike_that_explain_names(trained, capsys):
    run, found = trained
    out = found["dirty"][0]
    spike = max(jumps(out), key=jumps(out).get)
    assert jumps(out)[spike] > 0.6
    assert max(jumps(found["clean"][0]).values()) < 0.4
    said = json.loads(explained(capsys, run, out, spike, "--worst", 2, "--json"))
    assert said["loss"]["distance"] > 6
    assert said["not_at_hand"] is None
    worst = said["rows"][0]
    first = worst["documents"][0]
    assert first["url"] == GARBAGE
    assert worst["loss"] > said["loss"]["mean"] + 1
    assert (first["source"], first["dataset"], first["verdict"]) == ("web", "clean", "kept")
    assert first["signals"]
    assert "someone@" not in first["text"]                                # as the scrubber stored it
    shown = explained(capsys, run, out, spike)
    assert shown.splitlines()[1].endswith("σ")
    assert shown.index(GARBAGE) < shown.index("https://site")
    # it was not there in a step that was as usual
    calm = min(jumps(out), key=jumps(out).get)
    assert GARBAGE not in explained(capsys, run, out, calm)


def test_every_token_of_the_batch_is_accounted_for(trained, capsys):
    """Test 20: the documents `explain` gives are those whose tokens the loader reads."""
    from trainer.data.batches import Data

    run, found = trained
    opened = open_run(str(run), None, None, [])
    data = Data(opened.curriculum, opened.store)
    for number in (1, 57, 120):
        step = list(opened.steps())[number - 1]
        batch = data.step(step.first, step.batch, 0, 1)
        said = json.loads(explained(capsys, run, found["dirty"][0], number, "--json"))
        assert sorted(row["row"] for row in said["rows"]) == [1, 2, 3, 4]
        for row in said["rows"]:
            tokens = batch.tokens[row["row"] - 1].tolist()
            starts = [i for i, p in enumerate(batch.positions[row["row"] - 1].tolist()) if p == 0]
            places = sorted(d["tokens"] for d in row["documents"])
            assert [first for first, _ in places] == starts
            assert [stop for _, stop in places[:-1]] == starts[1:]
            assert places[-1][1] in (len(tokens), len(tokens) + 1)
            assert sum(stop - first for first, stop in places) >= len(tokens)


def test_going_back_removes_the_spike(trained, capsys):
    run, found = trained
    out, summary = found["rewind"]
    ledger = Ledger.read(out)
    assert 1 <= len(ledger.rewinds) <= 5
    spikes = [step for step, jump in jumps(found["dirty"][0]).items() if jump > 0.6]
    assert all(ledger.why(step) for step in spikes)
    assert max(jumps(out).values()) < 0.6
    assert len(losses(out)) == 120
    # the end is that of the corpus without it, within the noise of another order: 3 standard errors over 40 steps
    ends = [np.array([x for x in losses(found[name][0]).values() if x is not None][-40:]) for name in found]
    _, after, clean = ((end.mean(), end.std(ddof=1) / len(end) ** 0.5) for end in ends)
    assert abs(after[0] - clean[0]) < 3 * (after[1] ** 2 + clean[1] ** 2) ** 0.5
    assert summary["heldout_loss"] < 0.6 * summary["heldout_loss_before"]
    assert ckpt.latest(out / "checkpoints").step == 120
    shown = explained(capsys, run, out, spikes[0])
    assert "was skipped (loss more than 0.6 above" in shown.splitlines()[1]
    assert shown.splitlines()[1].endswith("before that it was like this")
    assert shown.splitlines()[2].endswith("σ")
    assert shown.index(GARBAGE) < shown.index("https://site")


def test_without_the_datasets_it_says_so_and_tells_what_the_shards_know(trained, capsys, tmp_path):
    run, found = trained
    store = tmp_path / "store"
    store.mkdir()
    (store / "shards").symlink_to(run.parent.parent / "shards")
    (store / "runs").symlink_to(run.parent)
    shown = explained(capsys, store / "runs" / run.name, found["dirty"][0], 5)
    assert "are not in" in shown.splitlines()[-1]
    assert "https://" not in shown
    assert shown.count(" tokens from ") >= 4


def test_wrong_numbers_are_said(trained, capsys):
    run, _ = trained
    for arguments, message in (((121,), "there is no step 121; the curriculum has 120"),
                               ((5, "--row", 5), "--row 5: step 5 has 4 rows")):
        assert main(["explain", str(run), *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
