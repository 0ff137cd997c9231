"""Whether the bytes of a checkpoint are those that were committed, and which one to use when they are not.

Every file is read once, by the rank that wrote it or by the one that has its number now, and compared with the sha256
in COMPLETE. The same rank reads most of that file again when it loads it, from the page cache. The verdicts of all
ranks are reduced to one, so that no rank loads what another has found damaged. A rank whose storage fails takes part
with the number of the error: without it the others would wait for it in the reduction.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from pipeline.base.files import sync
from trainer.base.config import TrainingError
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.checkpoints import ASIDE, Checkpoint, CheckpointError
from trainer.parallel.world import World

#: what may be wrong with a file; the reduced verdict is the highest
FAULTS = ("", "sha256 is not what COMPLETE says: damaged or replaced", "not as long as COMPLETE says",
          "cannot be read (input/output error)", "missing")
#: verdicts from here on are numbers of errors of the storage, which say nothing about the bytes
STORAGE = 1000
#: files that are read at a time
READERS = 4


def damage(checkpoint: Checkpoint, world: World | None = None) -> list[str]:
    """The files of a checkpoint that are not what COMPLETE says, one line each; [] means that all are. With `world`
    every rank calls it, reads its share, and returns the same lines. Raises CheckpointError, on every rank, where the
    storage of one fails."""
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
    """For an error of the storage, by its errno."""
    return CheckpointError(f"{path}: cannot be read ({os.strerror(number)}); the checkpoint may be sound: see that "
                           f"every rank reaches its storage, then give the same command again")


def writer(name: str) -> int:
    """The rank that wrote a file of a checkpoint: 3 of '__3_0.distcp', the first one of all that is not a shard."""
    number = name.removeprefix("__").partition("_")[0]
    return int(number) if name.startswith("__") and number.isdecimal() else 0


def fault(checkpoint: Checkpoint, name: str) -> int:
    """Index into FAULTS, or STORAGE and the number of an error of the storage."""
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
           wanted: Callable[[Sequence[Checkpoint]], Checkpoint | None],
           loaded: Callable[[Checkpoint | None], bool] = lambda _found: True) -> Checkpoint | None:
    """The checkpoint that `wanted` picks on the first rank among the sound ones (oldest first), None for the start; the
    same on every rank. `loaded` False: it will not be loaded, so its bytes are not read.

    A damaged one is named and left out, and `wanted` picks again. Later damaged ones are set aside when a sound one has
    been found: the training will write those steps again. Raises CheckpointError when none is sound.
    """
    wrong: dict[int, str] = {}                   # step → damage; complete on the first rank
    while True:
        answer = -1
        refused: Exception = CheckpointError(f"{folder}: no checkpoint to go on from; the first rank says why")
        if world.first:
            try:
                with _storage(folder):
                    there, damaged = ckpt.survey(folder)
                for one in damaged:
                    if one.step not in wrong:
                        wrong[one.step] = one.why
                        say(f"checkpoint step_{one.step:08d} is damaged and not used: {one.why}")
                answer = _answer([c for c in there if c.step not in wrong], wrong, folder, wanted)
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
    """The checkpoint of the step that the first rank has chosen, None for 0. Raises CheckpointError, on every rank,
    where one does not see it."""
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
    """Reading below `folder`, whose errors are CheckpointErrors."""
    try:
        yield
    except OSError as error:
        raise unreadable(Path(error.filename or folder), error.errno or 0) from error


def _answer(sound: Sequence[Checkpoint], wrong: dict[int, str], folder: Path,
            wanted: Callable[[Sequence[Checkpoint]], Checkpoint | None]) -> int:
    """Step of the checkpoint that is wanted, 0 for the start. The start is no answer where all are damaged: what they
    hold may come back from a copy, and a training that began anew would delete them."""
    if wrong and not sound:
        last = max(wrong)
        raise CheckpointError(f"{wrong[last]}; there is no sound checkpoint before it: restore the file from a copy, "
                              f"or delete {folder} to start anew")
    chosen = wanted(sound)
    return chosen.step if chosen else 0


def set_aside(folder: Path, steps: Sequence[int]) -> None:
    """Rename the COMPLETE of damaged checkpoints, so that they no longer exist for a reader and their steps can be
    committed again. Their files stay until then."""
    for step in steps:
        place = folder / f"step_{step:08d}"
        if (place / "COMPLETE").exists():
            os.replace(place / "COMPLETE", place / ASIDE)
            sync(place)
