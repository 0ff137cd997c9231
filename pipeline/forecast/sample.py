"""Runs a recipe on a sample of its inputs, in a temporary store.

Every record has a rank, a pseudo-random function (PRF) of its id, and the records with the lowest ranks are drawn. The
same inputs therefore give the same sample, and a larger share contains all records of a smaller share. Every source is
represented. If the input is too large to be read whole for an estimate, whole files are drawn first, by the PRF of
their paths.

The sample of a source is written to `UNITS` files of unequal sizes. Each file becomes a partition, the input of one
task. The spread of the results of these tasks gives the error of an estimate. The different sizes of the files reveal
the fixed cost of a task.
"""

from __future__ import annotations

import heapq
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.base.errors import TokenmillError
from pipeline.base.parquet import open_parquet, parquet_writer
from pipeline.base.prf import prf
from pipeline.base.scratch import Scratch
from pipeline.engine.driver.endings import TaskFailed
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.protocols import Backend
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.task import TaskSpec
from pipeline.forecast.mixture import phases
from pipeline.plan.file_list import FileList, SourceFile
from pipeline.plan.planner import Planner
from pipeline.recipe.model import Recipe, Source
from pipeline.recipe.token_files import token_sources
from pipeline.run import make_backend, run_recipe
from pipeline.store.content_keys import task_key
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from pipeline.store.runs import RunTasks
from stages.catalog import reader_class
from stages.read.sample import SCHEMA

DRAW = "pipeline.passes.sample:DrawSample"
SEED = 20260101
UNITS = 16
#: limits of the input of one task that draws: stored bytes (or one file), and number of files
GROUP_BYTES, GROUP_FILES = 64 << 20, 1000


class SampleError(TokenmillError):
    """Raised when the sample of a recipe's inputs cannot be drawn or run; the message says what to change."""


@dataclass(frozen=True)
class SampleLimits:
    """The limits of a sample. Three apply to each source. At least `least` records are drawn, or all if the source has
    fewer. At most `drawn_bytes` uncompressed bytes are drawn. Files of at most `read_bytes` stored bytes are read, but
    at least one file. Two limits apply to this machine: the sample may take `seconds` seconds and `disk` bytes of
    disk."""

    least: int = 200
    drawn_bytes: int = 1 << 30
    read_bytes: int = 4 << 30
    seconds: float = 1800.0
    disk: int = 20 << 30


@dataclass
class SourceSample:
    """The sample of a source: counts of files, records and bytes. `bytes` and `bytes_read` count bytes as stored.
    `payload_read` and `bytes_drawn` count the bytes of uncompressed records."""

    files: int = 0
    files_read: int = 0
    bytes: int = 0
    bytes_read: int = 0
    records_read: int = 0
    payload_read: int = 0
    records_drawn: int = 0
    bytes_drawn: int = 0
    read_cpu_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def grown(self) -> float:
        """Return the stored bytes of the whole source divided by the stored bytes that were read to draw the sample."""
        return max(self.bytes / max(self.bytes_read, 1), 1.0)

    @property
    def scale(self) -> float:
        """Return the size of the source divided by the size of its sample. Results of the sample are multiplied by
        it."""
        return self.grown * (self.records_read / self.records_drawn if self.records_drawn else 1.0)


@dataclass(frozen=True)
class SampleRun:
    """The result of running a recipe on a sample: the nodes of the plan (as in plan.json), and for each node the commit
    records of its tasks. `notes` say what the sample leaves out."""

    recipe: Recipe
    sources: dict[str, SourceSample]
    nodes: list[dict[str, Any]]
    records: dict[str, list[PartRecord]]
    wall_s: float
    workers: int
    notes: tuple[str, ...] = ()


def run_sample(recipe: Recipe, share: float, *, workers: int, show: str = "quiet", verify_inputs: bool = False,
               limits: SampleLimits | None = None, backend: Callable[[Store], Backend] | None = None) -> SampleRun:
    """Draw about `share` (0 … 1) of every source and run the recipe on this sample. The tasks run on the workers of
    `backend`. Without `backend` they run in child processes of this machine, or in this process where there is no
    Linux.

    Raises InputError for missing inputs, CurriculumError when the phases of the training do not fit into its total, and
    SampleError when the sample is too small for the recipe or exceeds `limits`."""
    limits = limits or SampleLimits()
    imported = [name for name, shards in recipe.shards.items() if token_sources(recipe, shards.inputs)]
    texts = recipe.model_copy(update={"shards": {n: s for n, s in recipe.shards.items() if n not in imported}})
    make = backend or make_backend("process" if os.path.exists("/proc/self/stat") else "inline", workers, None)
    planner = Planner(texts, lambda path, sha256: b"", verify_inputs=verify_inputs)
    planner.nodes()
    phases(recipe)                               # raises for impossible phases before the sample is run
    began = time.monotonic()
    with Scratch() as scratch:
        folder = Path(scratch.folder())
        store, inputs = str(folder / "store"), folder / "inputs"
        guarded = _guard(make, folder, limits)
        files = {name: choose_files(planner.source_files(name), limits.read_bytes) for name in planner.sources_used()}
        drawn = _draw(planner, files, share, limits, store, guarded, show)
        sources = {name: _write_units(inputs / name, name, chosen, planner.source_files(name), drawn[name], share,
                                      limits, Store(store)) for name, chosen in files.items()}
        try:
            run_recipe(_sampled(texts, inputs, sources), store, make_backend=guarded, show=show, run="sample",
                       report=False)
        except TaskFailed as e:
            raise SampleError(f"the recipe fails on its sample, maybe because that is too small for it (take a larger "
                              f"--sample): {e}") from e
        at = Store(store)
        log, tasks = Log.read(at), RunTasks(at, "sample")
        nodes = json.loads(at.read("runs/sample/plan.json"))["nodes"]
        records = {n["name"]: [r for k in dict.fromkeys(tasks.keys(n["name"])) if (r := log.get(k)) is not None]
                   for n in nodes}
        notes = tuple(f"shards.{name}: imports token files, which a sample of texts cannot show; the forecast leaves "
                      f"out their tokens, the disk space for the imported files and the time of the import"
                      for name in imported)
        return SampleRun(recipe, sources, nodes, records, time.monotonic() - began, workers, notes)


class _Guarded:
    """Wraps a backend (the object that runs tasks). While it waits for events, it raises SampleError when the sample
    exceeds its limits of time or disk."""

    def __init__(self, backend: Backend, check: Callable[[], None]) -> None:
        self._backend, self._check = backend, check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def wait(self, timeout: float) -> Any:
        self._check()
        return self._backend.wait(timeout)


def _guard(make: Callable[[Store], Backend], folder: Path, limits: SampleLimits) -> Callable[[Store], Any]:
    """Wrap `make`, which creates a backend (the object that runs tasks), so that its backends raise SampleError when
    the sample exceeds the limits of time or disk. The time counts from the call of `_guard`."""
    began, free = time.monotonic(), shutil.disk_usage(folder).free

    def check() -> None:
        if time.monotonic() - began > limits.seconds:
            raise SampleError(f"the sample takes more than {limits.seconds / 60:.0f} minutes on this machine; take a "
                              f"smaller --sample")
        if free - shutil.disk_usage(folder).free > limits.disk:
            raise SampleError(f"the sample takes more than {limits.disk >> 30} GB of disk below {folder.parent}; take "
                              f"a smaller --sample")

    return lambda store: _Guarded(make(store), check)


# -- drawing ---------------------------------------------------------------------------------------------------------
def choose_files(files: Iterable[SourceFile], most: int) -> list[SourceFile]:
    """Choose the files of a source from which the sample is drawn. The files are put into a pseudo-random order. The
    first ones are chosen, as many as have at most `most` bytes together, but at least one."""
    first: list[tuple[int, SourceFile]] = []         # a heap of the files chosen so far, the last in order on top
    size = 0
    for file in files:
        heapq.heappush(first, (-prf(SEED, "sample-file", file.path), file))
        size += file.size
        while len(first) > 1 and size - first[0][1].size > most:
            size -= heapq.heappop(first)[1].size
    if len(first) > 1 and size > most:
        heapq.heappop(first)
    return sorted(file for _, file in first)


def _groups(files: list[SourceFile]) -> Iterator[list[SourceFile]]:
    """Divide the files into groups of consecutive files, the input of one task each. A group is one big file, or many
    small files."""
    group: list[SourceFile] = []
    for file in files:
        if group and (len(group) >= GROUP_FILES or sum(f.size for f in group) + file.size > GROUP_BYTES):
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _draw(planner: Planner, chosen: Mapping[str, list[SourceFile]], share: float, limits: SampleLimits, store: str,
          backend: Callable[[Store], Backend], show: str) -> dict[str, list[PartRecord]]:
    """Run the tasks that draw a sample of about `share` of the records of each source (DrawSample). They read only the
    files `chosen` of the source, and draw a larger share of these to make up for the other files. Returns, for each
    source, the commit records of these tasks in the order of the files."""
    specs: dict[str, list[TaskSpec]] = {}
    for name, files in chosen.items():
        unread = planner.source_files(name).bytes / max(sum(f.size for f in files), 1)
        reader = reader_class(planner.recipe.sources[name].read)
        if reader.in_units and unread > 1:
            raise SampleError(f"source '{name}': some of its files must be read together, so a sample of them cannot "
                              f"be drawn, and they have more than {limits.read_bytes >> 30} GB; name fewer under "
                              f"`path:` for the forecast")
        groups = [files] if reader.in_units else list(_groups(files))
        most = max(1 << 20, limits.drawn_bytes // max(len(groups), 1))
        specs[name] = []
        for order, group in enumerate(groups):
            args = {"source": name, "reader": planner.reader_arg(name), "files": [f.arg() for f in group], "seed": SEED,
                    "share": min(1.0, share * unread),         # a larger share makes up for the files not read
                    "least": limits.least, "most": most, "read_most": limits.read_bytes * 4}
            size = sum(f.size for f in group)
            memory = min(4000, 500 + reader.memory_mb + 3 * (min(most, size * 20) >> 20))
            specs[name].append(TaskSpec(task_key(DRAW, args), DRAW, f"sample:{name}", args, size,
                                        f"{name}: {group[0].path}", memory, order=order, confined=reader.confined,
                                        roots=planner.roots))
    at = Store(store)
    workers, progress = backend(at), Progress(show)
    try:
        with Log.open(at, run="sample") as log:
            records = iter(Scheduler(workers, log, progress).run(chain.from_iterable(specs.values())))
            return {name: [next(records) for _ in of_source] for name, of_source in specs.items()}
    finally:
        workers.close()
        progress.close("done")


def _write_units(folder: Path, name: str, chosen: list[SourceFile], files: FileList, records: list[PartRecord],
                 share: float, limits: SampleLimits, store: Store) -> SourceSample:
    """Write the sample of the source `name` into `folder` as units, which are files of unequal sizes. Returns a
    description of the sample. `chosen` are the input files that were read, and `files` all files of the source.

    `records` are the commit records of the tasks that drew the sample. Each task drew, from the input records that it
    read, those with the lowest ranks (pseudo-random numbers), up to a bound that differs between tasks. The sample of
    the source consists of the input records with ranks below the smallest of these bounds, and below the wanted
    share."""
    counters = [r.counters for r in records]
    out = SourceSample(files=len(files), files_read=len(chosen), bytes=files.bytes,
                       bytes_read=sum(c["covered"] for c in counters), records_read=sum(c["records"] for c in counters),
                       payload_read=sum(c["bytes"] for c in counters), read_cpu_s=sum(r.cpu_s for r in records))
    needed_share = max(share * out.grown, limits.least / max(out.records_read, 1))
    below = min([int(min(needed_share, 1.0) * 2**64), *(c["complete"]["below"] for c in counters)])
    if below < int(min(1.0, share) * 2**64):
        out.notes.append(f"source '{name}': the sample is smaller than asked for, because it would hold more than "
                         f"{limits.drawn_bytes >> 30} GB")
    by_file = len(chosen) < len(files)
    if by_file:
        out.notes.append(f"source '{name}': {len(chosen):,} of {len(files):,} files were read, picked at random")
    for counted, group in zip(counters, _groups(chosen)):
        if counted["covered"] < (size := sum(f.size for f in group)):
            out.notes.append(f"source '{name}': only the beginning of {group[0].path} was read "
                             f"({counted['covered'] / size:.1%}); it stands for the rest")
    folder.mkdir(parents=True)
    units: dict[int, Any] = {}
    for info in (record.files["drawn.parquet"] for record in records):
        with open_parquet(store.checked(info.path, info.sha256, str(folder.parent))) as file:
            for number in range(file.num_row_groups):
                of_unit: dict[int, list[dict[str, Any]]] = {}
                for row in (r for r in file.read_row_group(number).to_pylist() if r["rank"] < below):
                    key = json.loads(row["facts"])["locator"].get("file", "") if by_file else row["id"]
                    of_unit.setdefault(unit_of(key), []).append(row)
                    out.records_drawn += 1
                    out.bytes_drawn += len(row["raw"] or row["text"] or b"")
                for unit, rows in of_unit.items():
                    if unit not in units:
                        units[unit] = parquet_writer(folder / f"unit-{unit:02d}.sample.parquet", SCHEMA)
                    units[unit].write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    for writer in units.values():
        writer.close()
    return out


def unit_of(key: str) -> int:
    """Return the number of the unit (file of the sample) to which a record belongs. `key` is the id of the record, or
    the path of its file if all records of a file are to be kept together. Every fourth unit gets three times as many
    records."""
    block, place = divmod(prf(SEED, "sample-unit", key) % (UNITS // 4 * 6), 6)
    return block * 4 + min(place, 3)


def _sampled(recipe: Recipe, folder: Path, sources: Mapping[str, SourceSample]) -> Recipe:
    """Return the recipe with the files of the sample in `folder` as its inputs. Each file becomes a partition, the
    input of one task. The curriculum is left out, because a sample has too few tokens for it."""
    fed = {}
    for name, source in ((name, recipe.sources[name]) for name in sources):
        if not sources[name].records_drawn:
            raise SampleError(f"source '{name}' gave no record at all; see that its files are what `read: "
                              f"{source.read}` expects (tokenmill run says what is wrong with each)")
        fed[name] = Source(read="sample", path=sorted(map(str, (folder / name).iterdir())), root=str(folder / name),
                           config={"signals": reader_class(source.read)(source.config).signals})
    return recipe.model_copy(update={"sources": fed, "curriculum": None, "train": {}, "input": None,
                                     "run": recipe.run.model_copy(update={"partition": 1})})
