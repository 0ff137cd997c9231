"""Checks whether a checkpoint's files are as they were committed, and chooses another checkpoint if they are not.

Every file is read once and compared with the sha256 in COMPLETE, the file that commits a checkpoint. If the number of
ranks is unchanged, each rank checks the files that it wrote. It will load most of their contents afterwards, and then
finds them in the page cache. The ranks exchange their results, so that no rank loads a checkpoint that another rank
found damaged. If the storage of a rank fails, the rank sends the errno instead of a result, so that the other ranks do
not wait for it. An input/output error (EIO) counts as damage of the file, not as a failure of the storage.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from pipeline.base.files import sync
from trainer.base.config import TrainingError
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.checkpoints import ASIDE, Checkpoint, CheckpointError
from trainer.parallel.world import World

#: code of a fault (index) → text; 0 means no fault. Over all ranks, the highest code of a file counts
FAULTS = ("", "sha256 is not what COMPLETE says: damaged or replaced", "not as long as COMPLETE says",
          "cannot be read (input/output error)", "missing")
#: a code of STORAGE + errno means that the storage failed, which says nothing about the file's contents
STORAGE = 1000
#: number of files that a rank reads at a time
READERS = 4


def damage(checkpoint: Checkpoint, world: World | None = None) -> list[str]:
    """Return a line for each file of a checkpoint that is missing, or differs from the size and sha256 that were
    recorded when it was written. The result is [] if all files are intact. With `world`, each rank reads a share of the
    files, and all ranks get the same lines; every rank must call this. Raises CheckpointError, on every rank, when the
    storage of any rank fails."""
    names = sorted(checkpoint.files)
    share = [i for i, name in enumerate(names) if world is None or writer(name) % world.size == world.rank]
    with ThreadPoolExecutor(READERS) as pool:
        faults = list(pool.map(lambda i: fault(checkpoint, names[i]), share))
    verdict = torch.zeros(len(names), dtype=torch.int64)
    verdict[share] = torch.tensor(faults, dtype=torch.int64)
    if world is not None:
        verdict = world.max(verdict.to(world.device))
    verdicts = list(zip(names, verdict.tolist()))
    for name, code in verdicts:
        if code >= STORAGE:
            raise unreadable(checkpoint.folder / name, code - STORAGE)
    return [f"{checkpoint.folder / name}: {FAULTS[code]}" for name, code in verdicts if code]


def unreadable(path: Path, number: int) -> CheckpointError:
    """Return the CheckpointError for a storage error with errno `number`."""
    return CheckpointError(f"{path}: cannot be read ({os.strerror(number)}); the checkpoint may be sound: see that "
                           f"every rank reaches its storage, then give the same command again")


def writer(name: str) -> int:
    """Return the rank that wrote the file `name` of a checkpoint: 3 for '__3_0.distcp'; 0 for files that do not name a
    rank."""
    number = name.removeprefix("__").partition("_")[0]
    return int(number) if name.startswith("__") and number.isdecimal() else 0


def fault(checkpoint: Checkpoint, name: str) -> int:
    """Check one file of a checkpoint against its recorded size and sha256. Returns a code: 0 if the file is intact,
    another index into FAULTS (texts of faults), or STORAGE plus the errno of an error while reading."""
    path = checkpoint.folder / name
    try:
        if path.stat().st_size != checkpoint.files[name]:
            return 2
        return int(ckpt.sha256(path) != checkpoint.sha256[name])
    except FileNotFoundError:
        return 4
    except OSError as error:
        return 3 if error.errno == errno.EIO else STORAGE + (error.errno or 0)


def choose(folder: Path, world: World, say: Callable[[str], None],
           pick: Callable[[Sequence[Checkpoint]], Checkpoint | None],
           loaded: Callable[[Checkpoint | None], bool] = lambda _found: True) -> Checkpoint | None:
    """Choose a checkpoint, the same on every rank. Every rank must call this. `pick` is called on rank 0 only. It gets
    the undamaged checkpoints, oldest first, and returns one of them, or None for the start of the training. `loaded`
    says whether the chosen checkpoint will be loaded; if not, its files are not checked.

    If the chosen checkpoint is damaged, a message says so, and `pick` is called again without it. Damaged checkpoints
    of later steps are then set aside (see `set_aside`), because the training will write these steps again. They stay as
    they are if the chosen checkpoint will not be loaded.

    Raises CheckpointError when there are checkpoints and all are damaged, when the storage of a rank fails, or when a
    rank does not see the chosen checkpoint. If `pick` raises TrainingError, rank 0 raises it, and the other ranks raise
    CheckpointError.
    """
    wrong: dict[int, str] = {}                   # step → its damage; only the first rank knows all
    while True:
        answer = -1
        refused: Exception = CheckpointError(f"{folder}: no checkpoint to go on from; the first rank says why")
        if world.first:
            try:
                with _storage(folder):
                    sound, damaged = ckpt.survey(folder)
                for bad in damaged:
                    if bad.step not in wrong:
                        wrong[bad.step] = bad.why
                        say(f"checkpoint step_{bad.step:08d} is damaged and not used: {bad.why}")
                answer = _answer([c for c in sound if c.step not in wrong], wrong, folder, pick)
            except (CheckpointError, TrainingError) as error:
                refused = error
        [step] = struct.unpack("<q", world.broadcast(struct.pack("<q", answer)))
        if step < 0:
            raise refused
        checkpoint = _seen_by_all(folder, step, world)
        lines = damage(checkpoint, world) if checkpoint is not None and loaded(checkpoint) else []
        if not lines:
            if world.first and loaded(checkpoint):
                set_aside(folder, [bad for bad in wrong if bad > step])
            return checkpoint
        wrong[step] = "; ".join(lines)
        say(f"checkpoint step_{step:08d} is damaged and not used: {wrong[step]}")


def _seen_by_all(folder: Path, step: int, world: World) -> Checkpoint | None:
    """Return the checkpoint of step `step`, which rank 0 has chosen; None for step 0. Every rank must call this. Raises
    CheckpointError, on every rank, when any rank does not see the checkpoint in `folder`."""
    if not step:
        return None
    refused = CheckpointError(f"{folder / f'step_{step:08d}'}: another rank cannot read it; see that all ranks share "
                              f"the folder, then give the same command again")
    checkpoint = None
    try:
        with _storage(folder):
            checkpoint = ckpt.at(folder, step)
    except CheckpointError as error:
        refused = error
    if world.max(torch.tensor(int(checkpoint is None), device=world.device)).item():
        raise refused
    return checkpoint


@contextmanager
def _storage(folder: Path) -> Iterator[None]:
    """Within this context, an OSError from reading below `folder` becomes a CheckpointError that names the remedy."""
    try:
        yield
    except OSError as error:
        raise unreadable(Path(error.filename or folder), error.errno or 0) from error


def _answer(sound: Sequence[Checkpoint], wrong: dict[int, str], folder: Path,
            pick: Callable[[Sequence[Checkpoint]], Checkpoint | None]) -> int:
    """Call `pick` with the undamaged checkpoints, `sound`. Returns the step of the checkpoint that it chooses; 0 for
    None, the start of the training. `wrong` maps the steps of damaged checkpoints to reasons. Raises CheckpointError
    when all checkpoints are damaged: a training from the start would delete their files, which can perhaps be restored
    from a copy."""
    if wrong and not sound:
        last = max(wrong)
        raise CheckpointError(f"{wrong[last]}; there is no sound checkpoint before it: restore the file from a copy, "
                              f"or delete {folder} to start anew")
    chosen = pick(sound)
    return chosen.step if chosen else 0


def set_aside(folder: Path, steps: Sequence[int]) -> None:
    """Rename the files COMPLETE of the damaged checkpoints of `steps`. Without COMPLETE a checkpoint is ignored, and
    the training can write a new checkpoint of this step. The damaged files are deleted only after a checkpoint of the
    same or a later step is complete."""
    for step in steps:
        place = folder / f"step_{step:08d}"
        with suppress(FileNotFoundError):        # another process has deleted the checkpoint, or COMPLETE is missing
            os.replace(place / "COMPLETE", place / ASIDE)
            sync(place)
