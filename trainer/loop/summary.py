"""Makes the results at the end of a training: a text that the model generates as a sample, and the contents of
summary.json, which the run's report and the demo read."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from trainer.data.tokenizer import load_tokenizer
from trainer.loop.generate import generate
from trainer.loop.run import Run
from trainer.model.transformer import Transformer
from trainer.observe.goodput import Goodput
from trainer.observe.story import story_of
from trainer.parallel.world import World

#: longest prompt, in tokens
PROMPT = 256


def sample(run: Run, model: Transformer, world: World, dtype: torch.dtype) -> tuple[str | None, str]:
    """Let the model generate a sample of text. Returns (text, ""), or (None, the reason) if there is no sample. Every
    rank must call this, because all ranks compute the model; only rank 0 has the tokenizer and gets the text."""
    config = run.config.sample
    if not config.tokens:
        return None, "no sample: train.sample.tokens is 0"
    tokenizer, why = load_tokenizer(run.store / run.curriculum.tokenizer.path) if world.first else (None, "")
    prompt = (tokenizer.encode(config.prompt) if tokenizer else [])[-PROMPT:] or [run.curriculum.tokenizer.eos]
    # whether there is a tokenizer, the number of ids, the ids; of fixed length, so that every rank can receive them
    message = struct.pack(f"<{PROMPT + 2}q", tokenizer is not None, len(prompt), *prompt, *[0] * (PROMPT - len(prompt)))
    has_tokenizer, count, *ids = struct.unpack(f"<{PROMPT + 2}q", world.broadcast(message))
    if not has_tokenizer:
        return None, f"no sample: {why}"
    out = generate(model, ids[:count], config, run.curriculum.tokenizer.eos, run.config.seed, dtype, world)
    return (tokenizer.decode([*ids[:count], *out]) if tokenizer else None), ""


def summarise(run: Run, before: dict[str, Any], after: dict[str, Any], gap: dict[str, Any], text: str | None, why: str,
              seconds: float, speed: float | None, goodput: Goodput) -> dict[str, Any]:
    """Return the contents of summary.json. `before` and `after` are the results of the first and the last evaluation,
    and `gap` is the result of `Heldout.gap`. `text` is a text that the model has generated, or None; `why` is the
    reason if it is None. `seconds` is how long the steps of this process took, with the evaluations and checkpoints
    between them, and `speed` is in tokens per second."""
    story = story_of(run.out / "metrics.jsonl")
    steps = [loss for loss in story.loss if not math.isnan(loss)]
    before = before or (story.evals[0] if story.evals else {})
    return {
        "parameters": run.config.model.parameters(run.vocab),
        "parameters_without_embeddings": run.config.model.parameters(run.vocab) - run.vocab * run.config.model.width
        * (1 if run.config.model.tie else 2),
        "steps": run.curriculum.steps, "tokens": run.curriculum.tokens, "seconds": round(seconds, 1),
        "tokens_per_s": round(speed) if speed else None, "wall_time": goodput.summary(),
        "train_loss_first": steps[0] if steps else None,
        "train_loss_last": sum(steps[-10:]) / len(steps[-10:]) if steps else None,
        "heldout_loss_before": before.get("loss"), "heldout_loss": after.get("loss"),
        "unigram_entropy": after.get("unigram_entropy"),
        "ratio": after["loss"] / after["unigram_entropy"] if after else None,
        "gap": gap.get("gap"), "train_loss_on_seen": gap.get("train"), "streams": after.get("streams", {}),
        "sample": text, "sample_skipped": why or None,
    }
