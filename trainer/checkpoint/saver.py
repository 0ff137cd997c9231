"""Writes the checkpoints of a training (`trainer.checkpoint.checkpoints`).

With the setting `async`, the state is first copied to the CPU (into pinned memory, on CUDA). A thread of each rank then
writes the copy while training goes on. The files and the way of committing them are the same as without `async`.

Only one checkpoint is written at a time: the next one waits until it is finished, and the wait is reported. No
checkpoint is left out to avoid the wait, so that the set of checkpoints does not depend on the speed of a disk. When a
checkpoint cannot be written, training ends with an error soon after, at a step at which ranks communicate anyway.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from pipeline.base.files import sha256, sync
from trainer.base.config import CheckpointError
from trainer.checkpoint.checkpoints import (
    VERSION,
    Checkpoint,
    materialise_state,
    put_absent,
    reset,
    retain,
    tensors,
)
from trainer.checkpoint.config import CheckpointConfig
from trainer.parallel.world import World, reshard


@dataclass
class Writing:
    """A checkpoint that a rank is writing, perhaps in the background."""

    attempt: Path
    meta: dict[str, Any]
    began: float                  # time.perf_counter()
    waited_s: float = 0.0         # how long training waited for it
    thread: threading.Thread | None = None
    failed: BaseException | None = None
    parameters: int = 0
    size: int = 0                 # bytes; known on the first rank only
    seconds: float = 0.0          # how long it took until it was committed
    lost: list[int] = field(default_factory=list)     # steps whose checkpoints were deleted before they were scored

    def describe(self) -> str:
        size = f"{self.size / 1e9:.2f} GB" if self.size >= 1e9 else f"{self.size / 1e6:.2f} MB"
        waited = f"; training waited for {self.waited_s:.2f} s of it" if self.thread is not None else ""
        return (f"checkpoint {self.attempt.parent.name}: {size}, {self.size / self.parameters:.1f} bytes a parameter, "
                f"{self.seconds:.2f} s{waited}")


class Saver:
    """Writes the checkpoints of a run. Every rank has a Saver and calls it at the same steps. `report` is called for
    each checkpoint that has been completely written. `awaits` says whether a checkpoint is still to be scored (see
    `retain`). A Saver is a context manager: leaving the context, also by an error, waits until a checkpoint that is
    being written in the background is finished."""

    def __init__(self, folder: Path, config: CheckpointConfig, world: World,
                 report: Callable[[Writing], None] = lambda _written: None,
                 awaits: Callable[[Checkpoint], bool] = lambda _checkpoint: False) -> None:
        self.folder, self.config, self.world, self.report, self.awaits = folder, config, world, report, awaits
        # a separate group, since collectives of a background thread must not mix with those of a step; gloo takes no
        # GPU memory
        self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        # on CUDA the stager keeps its copy of the state for the next checkpoint, because pinned memory is expensive to
        # allocate; one copy is enough, since one checkpoint is written at a time. (DefaultStager of torch 2.11 fails at
        # its second copy)
        self.stager = BlockingAsyncStager(world.device.type == "cuda") if config.async_ else None
        self.writing: Writing | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        if self.writing is not None and self.writing.thread is not None:
            self.writing.thread.join()

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, meta: dict[str, Any]) -> None:
        """Write and commit the checkpoint of step `meta['step']`. With `async`, wait until the previous checkpoint is
        on disk, then start to write this one in the background. Raises CheckpointError when the checkpoint could not be
        written or committed. With `async`, this call raises the failure of the previous checkpoint, and a later call
        that of this one (see `poll`)."""
        self.wait()
        began = time.perf_counter()
        step = self.folder / f"step_{meta['step']:08d}"
        job = Writing(step / self.world.broadcast(secrets.token_bytes(6)).hex(), {"version": VERSION, **meta}, began)
        job.attempt.mkdir(parents=True, exist_ok=True)
        if not any(optimizer.state.values()):        # every step so far was skipped
            reshard(model)
            materialise_state(optimizer)
            reset(optimizer)
        state = tensors(model, optimizer, self.config.moments)
        job.parameters = sum(p.numel() for p in model.parameters())
        self.writing = job
        if self.stager is None:
            self._write(job, state)
        else:
            staged = self.stager.stage(state)
            job.thread = threading.Thread(target=self._write, args=(job, staged), name="checkpoint", daemon=True)
            job.thread.start()
        job.waited_s = time.perf_counter() - began
        if self.stager is None:
            self.poll()

    def poll(self) -> None:
        """Check whether the checkpoint that is being written in the background is finished on all ranks, and report it
        if so. Does nothing if none is being written. Every rank must call this. Raises CheckpointError when the
        checkpoint could not be written."""
        job = self.writing
        if job is None:
            return
        running = job.thread is not None and job.thread.is_alive()
        here = 1 if running else 2 if job.failed is not None else 0
        state = int(self.world.max(torch.tensor(here, device=self.world.device)))
        if state == 1:
            return
        self.writing = None
        if state == 0:
            self.report(job)
            return
        if job.thread is not None:
            job.thread.join(60)                  # another rank failed, so writing will also fail on this rank
        if isinstance(job.failed, CheckpointError):
            raise job.failed
        raise CheckpointError(f"{job.attempt}: could not be written: {job.failed or 'another rank says why'}. The "
                              f"checkpoint before it is sound") from job.failed

    def wait(self) -> None:
        """Wait until the checkpoint that is being written in the background is finished. Then report it, or raise
        CheckpointError if it could not be written (see `poll`)."""
        if self.writing is not None and self.writing.thread is not None:
            since = time.perf_counter()
            self.writing.thread.join()
            self.writing.waited_s += time.perf_counter() - since
        self.poll()

    def _write(self, job: Writing, state: dict[str, torch.Tensor]) -> None:
        """Write this rank's files of a checkpoint, whose tensors are `state`, and exchange their sha256 with the other
        ranks. Rank 0 then commits the checkpoint. Errors are stored in `job.failed`, because this method may run in a
        background thread."""
        if self.world.device.type == "cuda":         # a new thread would otherwise open a context on device 0
            torch.cuda.set_device(self.world.device)
        try:
            dcp.save(state, storage_writer=FileSystemWriter(job.attempt), process_group=self.group)
            own: dict[str, str] | Exception
            try:
                own = {p.name: sha256(p) for p in sorted(job.attempt.glob(f"__{dist.get_rank()}_*"))}
            except OSError as error:             # send it instead of sums, so that the other ranks do not wait
                own = error
            sums: list[Any] = [None] * self.world.size
            dist.all_gather_object(sums, own, group=self.group)
            for part in sums:
                if isinstance(part, Exception):
                    raise part
            if self.world.first:
                self._commit(job, {name: digest for part in sums for name, digest in part.items()})
        except CheckpointException as error:     # not a subclass of Exception; raised for a full disk or a lost mount
            why = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
            job.failed = CheckpointError(f"{job.attempt}: could not be written: {why}. The checkpoint before it is "
                                         f"sound")
        except Exception as error:
            job.failed = error
        # only the first rank, which commits, deletes the attempt: another rank may have failed only in a connection
        if job.failed is not None and self.world.first and not (job.attempt.parent / "COMPLETE").exists():
            shutil.rmtree(job.attempt, ignore_errors=True)  # on a full disk it would take the room of the next attempt
        job.seconds = time.perf_counter() - job.began

    def _commit(self, job: Writing, sums: dict[str, str]) -> None:
        step = job.attempt.parent
        with open(job.attempt / "meta.json", "w") as f:
            json.dump(job.meta, f, indent=1, sort_keys=True)
            f.flush()
            os.fsync(f.fileno())
        for path in (job.attempt, step, self.folder):
            sync(path)
        names = {p.name for p in job.attempt.iterdir()} | sums.keys()        # a listing over NFS may be stale
        files = {name: (job.attempt / name).stat().st_size for name in sorted(names)}
        sums |= {name: sha256(job.attempt / name) for name in files if name not in sums}
        job.size = sum(files.values())
        record = {"attempt": job.attempt.name, "files": files, "sha256": sums}
        if not put_absent(step / "COMPLETE", json.dumps(record, indent=1).encode()):
            raise CheckpointError(f"{step}: another trainer has completed this step; two runs must not share a folder: "
                                  f"give one of them another --out")
        job.lost = retain(self.folder, self.config, self.awaits)
