"""Cuts the input files of a source into partitions, each of which is the input of one task. The size of a partition is
bounded, unless a file that cannot be split, or a group of files that must be read together, is bigger. The cuts depend
only on the input files and the settings, not on earlier runs.

Small files are packed in the order of their sorted paths. File names decide the boundaries, so that an added file
changes only the partitions next to it. Big files are split at record boundaries that an index task finds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pipeline.plan.file_list import SourceFile

#: no file is added to a partition that would grow beyond this many times the target
OVERFULL = 2.0
#: Most files of a partition, because its argument list and its record would become too long. Only a group of files that
#: must be read together may have more.
MAX_FILES = 512
#: Least probability that a file is the last of its partition, once the partition has more than half of MAX_FILES.
#: Nearly every partition is then cut by a file name before it is full, so that an added file moves only the next few
#: cuts.
LAST = 4 / MAX_FILES


@dataclass(frozen=True)
class Partition:
    """The input of one task: consecutive slices (files, or pieces of files) of one source, in path order. `weight` is
    the expected number of uncompressed bytes."""

    source: str
    slices: tuple[dict[str, Any], ...]
    weight: int
    label: str


def needs_index(file: SourceFile, expansion: float, target: int) -> bool:
    """Whether a file is so big that several tasks should read pieces of it. An index task must then first find the
    boundaries at which it can be split. `expansion` is the expected number of uncompressed bytes per stored byte, and
    `target` the wanted number of uncompressed bytes that a task reads."""
    return file.size * expansion > 1.5 * target


def partitions(source: str, files: Iterable[SourceFile], expansions: Callable[[str], float], target: int,
               indexes: Mapping[str, list[dict[str, int]] | None],
               group: Callable[[str], str] = lambda path: "",
               units: Iterable[Sequence[SourceFile]] | None = None) -> Iterator[Partition]:
    """Yield the partitions of a source (each the input of one task), in the order of `files`, which the caller gives in
    path order. They are not returned as a list, because there may be millions.

    `target` is the wanted number of uncompressed bytes in a partition (`run.partition`). `expansions` maps a path to
    the expected uncompressed bytes per stored byte. `indexes` maps the path of a big file to its splits, {start, stop,
    ordinal (number of the first record in the file), records, bytes (uncompressed)}. A file that cannot be split is
    missing or None in `indexes`.

    Some files must be read by the same task. `group` (`Reader.group`) returns a text for each file. Consecutive files
    with the same text stay together, however many they are; "" means no group.

    For some formats, only the contents of the files tell which of them belong together. `units` (the result of
    `Reader.units`) then gives the groups, in the order in which they are to be read; `files` and `group` are ignored. A
    file may be in several groups.
    """
    pending: list[SourceFile] = []
    size = 0.0

    def packed() -> Iterator[Partition]:
        nonlocal size
        if pending:
            names = pending[0].path if len(pending) == 1 else f"{pending[0].path} … {pending[-1].path}"
            once = {f.path: f.arg() for f in pending}             # units may share a file, such as an index
            yield Partition(source, tuple(once.values()), int(size) + 1, f"{source}: {names}")
            pending.clear()
        size = 0.0

    grouped = (list(members) for _, members in groupby(files, key=lambda f: group(f.path) or f.path))
    for together in grouped if units is None else map(list, units):
        file = together[0]
        expected = sum(f.size * expansions(f.path) for f in together)
        splits = indexes.get(file.path) if len(together) == 1 else None
        if splits and len(splits) > 1:
            yield from packed()
            for i, split in enumerate(splits):
                arg = file.arg(start=split["start"], stop=split["stop"], ordinal=split["ordinal"])
                label = f"{source}: {file.path} [{i + 1}/{len(splits)}]"
                yield Partition(source, (arg,), split["bytes"] + 1, label)
            continue
        if pending and (size + expected > OVERFULL * target or len(pending) + len(together) > MAX_FILES):
            yield from packed()
        pending += together
        size += expected
        name = group(file.path) or file.path if units is None else file.path
        if boundary(name, max(expected / target, LAST if len(pending) > MAX_FILES // 2 else 0.0)):
            yield from packed()
    yield from packed()


def boundary(path: str, probability: float) -> bool:
    """Whether a partition ends after the file at `path`. The answer is true with the given `probability`, and depends
    only on a hash of the path."""
    draw = int.from_bytes(hashlib.blake2b(path.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    return draw < probability * 2.0**64
