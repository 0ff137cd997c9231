"""The child processes of a supervisor: starts and ends them, and tells which of them can take an attempt at a task."""

from __future__ import annotations

import contextlib
import selectors
import shutil
from collections.abc import Iterator, Mapping

from pipeline.base.clock import Clock
from pipeline.base.scratch import Scratch
from pipeline.engine.worker import limits as measure
from pipeline.engine.worker.job import Job
from pipeline.engine.worker.limits import Devices
from pipeline.engine.worker.process import ChildProcess
from pipeline.store.errors import disk_full


class Children:
    """The child processes of a supervisor, at most `slots`, and the GPUs (`devices`) that they hold. A child gets the
    environment `env` and a folder in `scratch`. The children may be iterated over while some of them end."""

    def __init__(self, store: str, slots: int, devices: Devices, env: Mapping[str, str], scratch: Scratch,
                 clock: Clock) -> None:
        self.selector = selectors.DefaultSelector()
        self._store, self._slots, self._devices, self._env = store, slots, devices, env
        self._scratch, self._clock = scratch, clock
        self._parts: dict[ChildProcess, dict[str, float]] = {}       # child → its parts of the devices

    def __iter__(self) -> Iterator[ChildProcess]:
        return iter(list(self._parts))

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def jobs(self) -> list[Job]:
        """The jobs (attempts at tasks) on which children work, one for each busy child."""
        return [c.job for c in self if c.job]

    def can_free(self, share: float) -> bool:
        """Whether `share` GPUs (a number of GPUs, or a part of one) are free, or would be if idle child processes
        ended."""
        trial = self._devices.copy()
        for child, part in self._parts.items():
            if not child.job:
                trial.give_back(part)
        return trial.take(share) is not None

    def warm(self, job: Job) -> ChildProcess | None:
        """Returns an idle child process that can take the job (attempt at a task), or None if the job needs a new
        child."""
        if job.fresh or job.triage.fresh:
            return None
        return next((c for c in self if not c.job and self._suits(c, job)), None)

    def _suits(self, child: ChildProcess, job: Job) -> bool:
        """Whether an idle child process can take the job (an attempt at a task). There are four conditions:

        * The child must be confined (without rights that a parser must not have) if the job's task must be confined,
          and only then.
        * Its storage broker (the process that accesses object storage for it) must serve exactly the storage that the
          job reads, or must not have started yet.
        * The child must hold exactly the share of GPUs that the job needs.
        * A child that ran tasks of another plan node (group of tasks) may still hold models. Such a child must hold no
          GPUs, and at most half of the memory that the job declares (not counting `empty_mb`, which an idle child holds
          anyway).
        """
        if child.confined != job.spec.confined:
            return False
        if child.broker is not None and child.broker.roots not in (None, job.spec.roots):
            return False                         # its broker would refuse what the job reads
        if abs(sum(self._parts[child].values()) - job.share) > 1e-6:
            return False
        if child.node in ("", job.spec.node):
            return True
        if self._parts[child]:
            return False                         # its memory on the devices cannot be measured
        try:
            return measure.anonymous_mb(child.pid) - child.empty_mb <= job.spec.memory_mb / 2
        except OSError:
            return False

    def spawn(self, job: Job) -> ChildProcess:
        """Start a child process for a job (attempt at a task), with the GPUs that the job needs. Before that, one idle
        child of the same sort (with or without GPUs) is ended if there is one. If there is none but all slots are
        taken, any idle child is ended. Then more idle children are ended until enough GPUs are free."""
        idle = [c for c in self if not c.job]
        alike = [c for c in idle if bool(self._parts[c]) == bool(job.spec.gpus)]
        if alike or len(self) >= self._slots:
            self.end((alike or idle)[0])
        while (part := self._devices.take(job.share)) is None:
            self.end(next(c for c in self if not c.job and self._parts[c]))
        folder = ""
        try:
            with disk_full(self._scratch.path):
                folder = self._scratch.folder()
            child = ChildProcess(folder, {**self._env, "CUDA_VISIBLE_DEVICES": ",".join(part)},
                                 self._store, self._clock, confined=job.spec.confined)
        except BaseException:
            self._devices.give_back(part)
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._parts[child] = part
        child.register(self.selector)
        return child

    def memory_mb(self) -> dict[ChildProcess, float]:
        """Returns the memory that each child process holds, in MB; 0 for a child that has just died."""
        sizes = dict.fromkeys(self, 0.0)
        for child in sizes:
            with contextlib.suppress(OSError):
                sizes[child] = measure.anonymous_mb(child.pid)
        return sizes

    def end(self, child: ChildProcess) -> None:
        child.end(self.selector)
        self._devices.give_back(self._parts.pop(child))

    def close(self) -> None:
        for child in self:
            self.end(child)
        self.selector.close()
