"""Finds the step at which a training continues. Checks that the model gives the same loss after a checkpoint was loaded
as when it was saved."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from tokenizer.mixture.steps import TrainingStep
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint import hf
from trainer.checkpoint.damage import choose
from trainer.checkpoint.ledger import Ledger
from trainer.data.batches import Data
from trainer.data.provenance import GENESIS
from trainer.loop.evaluate import losses
from trainer.loop.run import Run, TrainingError, differences
from trainer.loop.stability import SpikeDetector, StabilityMonitor
from trainer.model.init import initialise
from trainer.model.transformer import Transformer
from trainer.optim import build as optim
from trainer.parallel.world import World, reshard, uncompiled


def resume_point(run: Run, world: World, ledger: Ledger, stop_at: int | None,
                 say: Callable[[str], None]) -> tuple[ckpt.Checkpoint | None, TrainingStep | None, bool]:
    """Find where to continue a training. Every rank must call this; rank 0 decides for all, because ranks that
    disagreed would wait for each other forever or learn from different data. Returns three values: the undamaged
    checkpoint to continue from (None: the start), the first step after it (None at the end of the curriculum), and
    whether nothing is left to do. If nothing is left, the files of the checkpoint are not checked.

    Raises CheckpointError if the checkpoint belongs to another training, if every checkpoint is damaged, or if the
    ledger (the list of skipped steps) has changed. Raises TrainingError on a rank that has read another recipe or
    curriculum than rank 0.
    """
    digest = hashlib.sha256(json.dumps([run.curriculum.to_json(), asdict(run.config)],
                                       sort_keys=True).encode()).digest()
    has_summary, first_digest = struct.unpack("<?32s", world.broadcast(
        struct.pack("<?32s", (run.out / "summary.json").exists(), digest)))
    if digest != first_digest:
        raise TrainingError(f"rank {world.rank} has read another recipe or curriculum than the first rank: "
                            f"{run.folder} has just been changed, or is not one folder for all; start again")

    def following(checkpoint: ckpt.Checkpoint | None) -> TrainingStep | None:
        return next(run.steps(checkpoint.meta["samples"] if checkpoint else 0), None)

    def nothing_left(checkpoint: ckpt.Checkpoint | None) -> bool:
        if checkpoint:
            refuse_another(checkpoint, run)
        step = following(checkpoint)
        return has_summary if step is None else stop_at is not None and stop_at <= step.number

    checkpoint = choose(run.out / "checkpoints", world, say, lambda sound: sound[-1] if sound else None,
                   lambda checkpoint: not nothing_left(checkpoint))
    if checkpoint:
        ledger.check(checkpoint.meta)
    return checkpoint, following(checkpoint), nothing_left(checkpoint)


def refuse_another(checkpoint: ckpt.Checkpoint, run: Run) -> None:
    """Raise CheckpointError if the training `run` may not continue from `checkpoint`: its settings or its curriculum
    differ from the checkpoint's in a way that is not permitted. The message lists the differences."""
    wrong = differences(checkpoint.meta, run)
    if wrong:
        older = ", ".join(str(p) for p in sorted(run.folder.glob("curriculum.*.json")))
        raise ckpt.CheckpointError(f"{checkpoint.folder.parent} belongs to another training than this one:\n  "
                                   + "\n  ".join(wrong) + "\nTake these back"
                                   + (f" (older curricula: {older})" if older else "")
                                   + ", or start anew with another --out")


def position(checkpoint: ckpt.Checkpoint | None) -> tuple[int, int, int]:
    """Return how far the training was when `checkpoint` was written, as the numbers of (steps, samples, tokens); (0, 0,
    0) if it is None."""
    return (checkpoint.meta["step"], checkpoint.meta["samples"], checkpoint.meta["tokens"]) if checkpoint else (0, 0, 0)


def restore(checkpoint: ckpt.Checkpoint | None, run: Run, data: Data, model: Transformer,
            optimizer: torch.optim.Optimizer, detector: SpikeDetector, monitor: StabilityMonitor, world: World,
            dtype: torch.dtype) -> None:
    """Set model, optimiser, spike detector and stability monitor to their state in a checkpoint; if it is None, to
    their state before the first step.

    The loss on a few samples is computed and compared with that at the time of saving. Raises CheckpointError when they
    differ by more than rounding, because then the model, the data or the code has changed. They are not compared if
    `tokenmill takedown` may have overwritten a document in one of the samples since (see `overwritten`).
    """
    optim.skip_when(optimizer, None)
    model.rope = run.rope(checkpoint.meta["samples"] if checkpoint else 0)
    detector.load(checkpoint.meta["guard"] if checkpoint else None)
    monitor.load(checkpoint.meta["policy"] if checkpoint else None)
    if checkpoint is None:
        reshard(model)
        if run.config.init.from_:
            hf.load(model, run.config.model, run.vocab, Path(run.config.init.from_),
                    run.store / run.curriculum.tokenizer.path)
        else:
            initialise(model, run.config.model, run.config.seed)
        optimizer.state.clear()
        return
    ckpt.load(checkpoint, model, optimizer)
    probe = checkpoint.meta["probe"]
    if overwritten(checkpoint, run, data):
        return
    loss = probe_loss(probe["samples"], run, data, model, world, dtype)
    close = 1e-3 if dtype == torch.float32 else 2e-2
    if not abs(loss - probe["loss"]) <= close * max(1.0, abs(probe["loss"])):
        raise ckpt.CheckpointError(
            f"{checkpoint.folder.parent}: the loss on samples {probe['samples'][0]}… is {loss:.4f}, at saving it was "
            f"{probe['loss']:.4f}: model or data have changed; do not go on from it")


def overwritten(checkpoint: ckpt.Checkpoint, run: Run, data: Data) -> bool:
    """Return whether `tokenmill takedown` may have overwritten a document in one of the samples whose losses the
    checkpoint stores. The answer is yes if the shard set of any stream (data source) was replaced since, and one of
    these samples has two EOS in a row: takedown replaces all tokens of a document by EOS. The answer may be yes without
    a takedown, because padding of packed rows also consists of EOS."""
    was = [stream["sha256"] for stream in checkpoint.meta["curriculum"]["streams"]]
    if was == [stream.sha256 for stream in run.curriculum.streams[:len(was)]]:
        return False
    is_eos = data.samples(checkpoint.meta["probe"]["samples"]).tokens == run.curriculum.tokenizer.eos
    return bool((is_eos[:, 1:] & is_eos[:, :-1]).any())


def history(checkpoint: ckpt.Checkpoint | None) -> bytes:
    """Return the hash over the data of all performed steps before a checkpoint (the hash chain of
    `trainer.data.provenance`); for None, its value before the first step."""
    return bytes.fromhex(checkpoint.meta["chain"]) if checkpoint else GENESIS


def probe_loss(samples: list[int], run: Run, data: Data, model: Transformer, world: World, dtype: torch.dtype) -> float:
    batch = data.samples(samples)
    rows = run.micro_rows(batch.tokens.shape[1])
    with uncompiled(model):
        totals = losses(model, batch, len(data.streams), rows, dtype, run.loss_chunk(world.device), world)
    return sum(t.nll for t in totals) / max(1, sum(t.targets for t in totals))
