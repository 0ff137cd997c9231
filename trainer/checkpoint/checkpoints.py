"""Finds, loads and deletes checkpoints in torch's distributed format (DCP), which any number of ranks may read.
`trainer.checkpoint.saver` writes them.

    checkpoints/step_00000120/<nonce>/…    the DCP files and meta.json of one attempt to write the checkpoint; never
                                           overwritten
    checkpoints/step_00000120/COMPLETE     names the valid attempt; created once all of its files are on disk, and only
                                           if there is no COMPLETE yet

COMPLETE commits the checkpoint: a folder without it is ignored. So after a kill at any time, the latest checkpoint is
the last one that was written completely. If two trainers use one folder, the second one to complete a step gets an
error. COMPLETE lists all files of the attempt with size and sha256; `trainer.checkpoint.damage` compares them with the
files before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from pipeline.base.files import link, sync, write_synced
from pipeline.base.files import sha256 as sha256
from trainer.base.config import CheckpointError as CheckpointError
from trainer.checkpoint import in_use
from trainer.checkpoint.config import CheckpointConfig
from trainer.checkpoint.reader import MetadataError, SafeMetadataReader
from trainer.parallel.world import reshard

VERSION = 1
#: pattern of checkpoint folders; copies that a user put beside them under other names do not match
STEP = "step_" + "[0-9]" * 8
#: name to which COMPLETE is renamed when the checkpoint turns out to be damaged
ASIDE = "DAMAGED"
#: largest number of checkpoints that stay only because they are still to be scored on tasks. They must not fill the
#: disk when scoring is slower than training
AWAITING = 4
#: seconds that a rank waits until it sees a checkpoint: over NFS, listings are out of date for up to 60 s by default
PATIENCE_S = 90


@dataclass(frozen=True)
class Checkpoint:
    folder: Path                  # folder of the committed attempt
    meta: dict[str, Any]
    files: dict[str, int] = field(default_factory=dict)      # name of a file → its bytes
    sha256: dict[str, str] = field(default_factory=dict)     # name of a file → its sha256

    @property
    def step(self) -> int:
        return self.meta["step"]


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that was completely written but can no longer be used, because a file is missing or damaged. `why`
    says which file and what is wrong."""

    step: int
    why: str


def put_absent(path: Path, data: bytes) -> bool:
    """Create the file `path` with the contents `data` if and only if it does not exist. Returns whether this call
    created the file. When it returns True, the file is on disk and survives a crash of the machine (POSIX)."""
    part = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        write_synced(part, data)
        if not link(part, path):
            return False
        sync(path.parent)
        return True
    finally:
        part.unlink(missing_ok=True)


def survey(folder: Path) -> tuple[list[Checkpoint], list[DamagedCheckpoint]]:
    """Return (undamaged, damaged) checkpoints of a run, each list oldest first. Only committed checkpoints (those with
    a file COMPLETE) are considered. COMPLETE, meta.json and the sizes of files are checked; `trainer.checkpoint.damage`
    checks the contents of files."""
    sound, damaged = [], []
    for marker in sorted(folder.glob(f"{STEP}/COMPLETE")):
        try:
            sound.append(_committed(marker))
        except FileNotFoundError:            # just being deleted
            continue
        except CheckpointError as error:
            damaged.append(DamagedCheckpoint(int(marker.parent.name.removeprefix("step_")), str(error)))
    return sorted(sound, key=lambda c: c.step), damaged


def commit(marker: Path) -> tuple[Path, dict[str, int], dict[str, str]]:
    """Read the file `marker` (COMPLETE), which names the valid attempt to write a checkpoint. Returns (folder of this
    attempt, {file: size in bytes}, {file: sha256}). The files themselves are not checked. Raises CheckpointError when
    the marker is damaged, FileNotFoundError when it is missing."""
    try:
        record = json.loads(marker.read_bytes())
        attempt, files, sums = marker.parent / record["attempt"], record["files"], record["sha256"]
        if not files.keys() == sums.keys() >= {"meta.json"} or not all(type(n) is int for n in files.values()):
            raise ValueError("files without size or sum")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{marker}: damaged ({error!r})") from None
    return attempt, files, sums


def _committed(marker: Path) -> Checkpoint:
    """Read the checkpoint that the file `marker` (COMPLETE) commits. Raises CheckpointError when a file that the marker
    lists is missing or has another size, or when meta.json is damaged. The contents of the other files are not checked.
    Raises FileNotFoundError when the checkpoint is deleted during the call."""
    attempt, files, sums = commit(marker)
    for name, size in files.items():
        if not (attempt / name).is_file() or (attempt / name).stat().st_size != size:
            if not marker.exists():
                raise FileNotFoundError(marker)
            raise CheckpointError(f"{attempt / name}: missing or not {size} bytes though committed")
    data = (attempt / "meta.json").read_bytes()
    if hashlib.sha256(data).hexdigest() != sums["meta.json"]:
        raise CheckpointError(f"{attempt / 'meta.json'}: sha256 is not what COMPLETE says: damaged or replaced")
    return Checkpoint(attempt, json.loads(data), files, sums)


def complete(folder: Path) -> list[Checkpoint]:
    """Return the committed checkpoints of a run (those whose files were all written), oldest first. Raises
    CheckpointError when `survey` finds that one is damaged."""
    sound, damaged = survey(folder)
    if damaged:
        raise CheckpointError(f"{damaged[0].why}; restore it from a copy, or delete "
                              f"{folder / f'step_{damaged[0].step:08d}'} and use another one")
    return sound


def latest(folder: Path) -> Checkpoint | None:
    """Return the last committed checkpoint of a run whose files exist and have the right sizes (see `survey`), or
    None."""
    sound, _ = survey(folder)
    return sound[-1] if sound else None


def at(folder: Path, step: int) -> Checkpoint | None:
    """Return the checkpoint of step `step` in `folder`, which rank 0 has already seen. Returns None for step 0, the
    start of the training. This rank looks for up to PATIENCE_S seconds, because listings of network file systems can be
    out of date. Raises CheckpointError when it has not seen the checkpoint by then."""
    since = time.monotonic()
    while step:
        checkpoint = next((c for c in survey(folder)[0] if c.step == step), None)
        if checkpoint is not None:
            return checkpoint
        if time.monotonic() - since >= PATIENCE_S:
            raise CheckpointError(f"{folder}: this rank does not see the checkpoint of step {step}, the first rank "
                                  f"does: all must share the folder")
        time.sleep(1)
    return None


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer, moments: str = "fp32") -> dict[str, torch.Tensor]:
    """Return all tensors that a checkpoint stores, by name: the parameters (`model.NAME`) and the optimiser's state
    (`optimizer.NAME.KEY`). Only tensors are stored, because torch would pickle other values. Hyperparameters are not
    stored, because they follow from the configuration. With `moments` bf16, float32 moments are converted to
    bfloat16."""
    reshard(model)
    state = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            half = moments == "bf16" and value.ndim > 0 and value.dtype == torch.float32
            state[f"optimizer.{name}.{key}"] = value.bfloat16() if half else value
    return state


@torch.no_grad()
def reset(optimizer: torch.optim.Optimizer) -> None:
    """Reset the optimiser's moments and step counters to their values before the first step, in place."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser allocate its state, so that a checkpoint can be loaded into it or saved from it. This is done
    by a step with zero gradients and zero learning rate. Parameters do not change, but step counters count this step,
    and gradients are discarded."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


def steps_to_keep(checkpoints: Sequence[Checkpoint], config: CheckpointConfig) -> set[int]:
    """Return the steps of those `checkpoints` (oldest first) that the settings `config` keep: the latest `keep`, those
    at the ends of phases (stretches of the training), and those that `keep_every` and `keep_best` select."""
    steps = {c.step for c in checkpoints[-config.keep:]} | {c.step for c in checkpoints if c.meta.get("pinned")}
    if config.keep_every:
        first: dict[int, int] = {}
        for c in checkpoints:
            first.setdefault(c.meta["tokens"] // config.keep_every, c.step)
        steps |= {step for stretch, step in first.items() if stretch}
    judged = sorted((c.meta["heldout"], c.step) for c in checkpoints if c.meta.get("heldout") is not None)
    return steps | {step for _, step in judged[:config.keep_best]}


def withdraw(checkpoint: Checkpoint) -> None:
    """Delete the file COMPLETE, which commits a checkpoint. Called before the checkpoint's other files are deleted, so
    that no reader takes a partly deleted checkpoint for a complete one."""
    (checkpoint.folder.parent / "COMPLETE").unlink(missing_ok=True)              # another process may have deleted it


def delete(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint. Files in its folder that another process reads or writes may stay; `retain` deletes them
    later."""
    withdraw(checkpoint)
    shutil.rmtree(checkpoint.folder.parent, ignore_errors=True)


def retain(folder: Path, config: CheckpointConfig,
           awaits: Callable[[Checkpoint], bool] = lambda _checkpoint: False) -> list[int]:
    """Delete the checkpoints of a run that are no longer needed, and return the steps of those that were deleted before
    they were scored. These checkpoints stay:

    * those that the settings `config` keep (see `steps_to_keep`);
    * those that another process reads (`trainer.checkpoint.in_use`);
    * the latest AWAITING of the others for which `awaits` returns True, because they are still to be scored;
    * damaged ones that were not set aside.

    Also deletes the files of attempts that were never completed or were set aside as damaged, up to the step of the
    latest checkpoint.
    """
    checkpoints, damaged = survey(folder)
    steps = steps_to_keep(checkpoints, config) | {c.step for c in checkpoints if in_use.in_use(c.folder.parent)}
    awaiting = [c.step for c in checkpoints if c.step not in steps and awaits(c)]
    steps |= set(awaiting[-AWAITING:])
    for old in checkpoints:
        if old.step not in steps:
            withdraw(old)
    kept, untouched = {c.folder for c in checkpoints if c.step in steps}, {d.step for d in damaged}
    latest_step = max((c.step for c in checkpoints), default=-1)
    for place in list(folder.glob(f"{STEP}/")):
        step = int(place.name.removeprefix("step_"))
        with suppress(OSError):         # another process marks or deletes the folder now; a later call deletes the rest
            for attempt in place.iterdir() if step not in untouched and step <= latest_step else ():
                if attempt.is_dir() and attempt not in kept:
                    shutil.rmtree(attempt, ignore_errors=True)       # NFS keeps files that are being read
            rest = list(place.iterdir())
            if all(p.name == ASIDE or p.match(in_use.MARKS) for p in rest):
                for path in rest:
                    path.unlink(missing_ok=True)
                place.rmdir()
    return awaiting[:-AWAITING]


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into model and optimiser, in place. Any number of ranks may have written it. Every rank must
    call this. Raises CheckpointError when the checkpoint cannot be read."""
    if checkpoint.meta.get("version") != VERSION:
        raise CheckpointError(f"{checkpoint.folder}: version {checkpoint.meta.get('version')!r}; this trainer reads "
                              f"{VERSION}")
    reader = SafeMetadataReader(checkpoint.folder)
    try:
        reader.read_metadata()                   # read here first, where its errors are not wrapped
    except MetadataError as error:
        raise CheckpointError(f"{error}; delete {checkpoint.folder.parent} to go on from the checkpoint before "
                              f"it") from None
    materialise_state(optimizer)
    try:
        dcp.load(tensors(model, optimizer), storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(f"{checkpoint.folder}: could not be read: {error}") from None
    dist.barrier()
