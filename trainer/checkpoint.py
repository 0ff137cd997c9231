"""Checkpoints: torch's distributed format (any number of ranks may read them), committed by put-if-absent.

    checkpoints/step_00000120/<nonce>/…    what one attempt wrote, never overwritten; DCP files and meta.json
    checkpoints/step_00000120/COMPLETE     created only if absent, when everything is on disk; names the attempt

A folder without COMPLETE does not exist for a reader, so a kill at any point leaves the checkpoint before it. Two
trainers in one folder: the second to complete a step is refused.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from trainer.parallel import World

VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or used; the message names the folder and the remedy."""


@dataclass(frozen=True)
class CheckpointConfig:
    """`every`: steps between two checkpoints; `keep`: how many of the latest stay (a phase's last always does)."""

    every: int = 200
    keep: int = 2

    def check(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ValueError("every and keep must be at least 1")


@dataclass(frozen=True)
class Checkpoint:
    folder: Path                  # of the attempt that was committed
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        return self.meta["step"]


def put_absent(path: Path, data: bytes) -> bool:
    """Create `path` with `data` if and only if it is not there. True when we created it. Durable on return (POSIX)."""
    part = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with open(part, "xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:
            if os.stat(part).st_nlink != 2:      # NFS may have linked and lost the reply; the link count tells
                raise
        sync_folder(path.parent)
        return True
    finally:
        part.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def complete(folder: Path) -> list[Checkpoint]:
    """The committed checkpoints of a run, oldest first. Raises CheckpointError for one whose files have gone."""
    found = []
    for marker in sorted(folder.glob("step_*/COMPLETE")):
        commit = json.loads(marker.read_bytes())
        attempt = marker.parent / commit["attempt"]
        for name, size in commit["files"].items():
            if not (attempt / name).is_file() or (attempt / name).stat().st_size != size:
                raise CheckpointError(f"{attempt / name}: missing or not {size} bytes though committed; delete "
                                      f"{marker.parent} to go on from the checkpoint before it")
        found.append(Checkpoint(attempt, json.loads((attempt / "meta.json").read_bytes())))
    return sorted(found, key=lambda c: c.step)


def latest(folder: Path) -> Checkpoint | None:
    found = complete(folder)
    return found[-1] if found else None


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that is saved: parameters and optimiser state by parameter name. Only tensors, hence no pickles;
    hyperparameters are not state, they follow from the configuration."""
    model.reshard()               # after a forward without backward the root still holds whole parameters
    state = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser allocate its state by a step that changes nothing (zero gradient, zero learning rate)."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, meta: dict[str, Any], world: World,
         keep: int) -> Checkpoint:
    """Write and commit the checkpoint of step `meta['step']`; every rank calls it. Old ones beyond `keep` are deleted
    unless their meta says `pinned`. Raises CheckpointError when another trainer has committed this step."""
    step = folder / f"step_{meta['step']:08d}"
    attempt = step / world.broadcast(secrets.token_bytes(6)).hex()
    attempt.mkdir(parents=True, exist_ok=True)
    try:
        dcp.save(tensors(model, optimizer), storage_writer=FileSystemWriter(attempt))
    except CheckpointException as error:         # not an Exception, hence easily missed: a full disk, a lost mount
        raise CheckpointError(f"{attempt}: could not be written: {error}. The checkpoint before it is sound") from None
    won = True
    if world.first:
        with open(attempt / "meta.json", "w") as f:
            json.dump({"version": VERSION, **meta}, f, indent=1, sort_keys=True)
            f.flush()
            os.fsync(f.fileno())
        for path in (attempt, step, folder):
            sync_folder(path)
        files = {p.name: p.stat().st_size for p in sorted(attempt.iterdir())}
        won = put_absent(step / "COMPLETE", json.dumps({"attempt": attempt.name, "files": files}, indent=1).encode())
        if won:
            retain(folder, keep)
    if not world.broadcast(bytes([won]))[0]:
        raise CheckpointError(f"{step}: another trainer has completed this step; two runs must not share a folder: "
                              f"give one of them another --out")
    return Checkpoint(attempt, meta)


def retain(folder: Path, keep: int) -> None:
    """Delete checkpoints that are neither pinned nor among the latest `keep`, and older attempts nobody committed."""
    found = complete(folder)
    for old in found[:-keep]:
        if not old.meta.get("pinned"):
            (old.folder.parent / "COMPLETE").unlink()      # first it stops to exist, then it goes
            shutil.rmtree(old.folder.parent)
    kept = {c.folder for c in found}
    for attempt in folder.glob("step_*/*/"):
        if attempt not in kept and int(attempt.parent.name.removeprefix("step_")) <= found[-1].step:
            shutil.rmtree(attempt, ignore_errors=True)
    for step in folder.glob("step_*/"):
        if not any(step.iterdir()):
            step.rmdir()


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into model and optimiser, in place, whatever number of ranks wrote it. Every rank calls it."""
    if checkpoint.meta.get("version") != VERSION:
        raise CheckpointError(f"{checkpoint.folder}: version {checkpoint.meta.get('version')!r}; this trainer reads "
                              f"{VERSION}")
    reader = Reader(checkpoint.folder)
    try:
        reader.read_metadata()                   # here its errors are plain
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.folder / '.metadata'}: {error}; delete {checkpoint.folder.parent} to go on "
                              f"from the checkpoint before it") from None
    materialise_state(optimizer)
    try:
        dcp.load(tensors(model, optimizer), storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(f"{checkpoint.folder}: could not be read: {error}") from None
    dist.barrier()


class Reader(FileSystemReader):
    """torch's reader, but for `.metadata`: torch unpickles it without limits, here only the classes it consists of may
    appear in it, so a hostile checkpoint cannot run code. (The tensors themselves torch reads with weights_only.)"""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self.path / ".metadata"
        metadata = MetadataUnpickler(io.BytesIO(Path(path).read_bytes())).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    NAMES = frozenset({("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
                       ("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath")})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.NAMES:
            return super().find_class(module, name)
        if "." not in name:
            value = getattr(torch, name, None) if module == "torch" else None
            if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
                return value
            # classes defined there, not what these modules happen to import
            found = super().find_class(module, name) if module in self.MODULES else None
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise CheckpointError(f"the checkpoint's .metadata names {module}.{name}, which none of this trainer's does")
