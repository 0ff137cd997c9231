"""A sample of a recipe's inputs, and the whole recipe run on it, in a store that is thrown away.

Which records are drawn is decided by PRF(record id) alone: the same inputs give the same sample, a larger share holds
the smaller one's records, and every source gives some. Where there is more input than is reasonable to read for an
estimate, whole files are drawn first, by PRF(path).

The sample of a source lies in `UNITS` files of unequal sizes, which become the partitions of the run: from how they
differ follows how sure an estimate is, and from small and large ones what a task costs before its first document. The
recipe runs twice, on a quarter of the units and on all of them: what deduplication costs and finds does not grow
evenly, and two sizes show more than one. The second run takes over every pass of the first.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.base.errors import TokenmillError
from pipeline.base.parquet import open_parquet, parquet_writer
from pipeline.base.prf import prf
from pipeline.base.scratch import Scratch
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.scheduler import Scheduler, TaskFailed
from pipeline.engine.task import TaskSpec
from pipeline.plan.inputs import SourceFile
from pipeline.plan.planner import Planner
from pipeline.recipe.model import Recipe, Source
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from pipeline.store.keys import task_key
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from pipeline.store.runs import RunTasks
from stages.catalog import reader_class
from stages.read.sample import SCHEMA

DRAW = "pipeline.passes.sample:DrawSample"
SEED = 20260101
UNITS, QUARTER = 16, 4
#: of each source: records drawn at least, if it has them; bytes drawn at most; stored bytes read at most
LEAST, MOST_BYTES, READ_BYTES = 200, 1 << 30, 4 << 30
#: what a sample may take of this machine: seconds, and bytes of disk
MOST_S, MOST_DISK = 1800.0, 20 << 30
#: what one task reads to draw from: stored bytes (or one file), and files
GROUP_BYTES, GROUP_FILES = 64 << 20, 1000


class SampleError(TokenmillError):
    """The sample could not be run; the message says what to change."""


@dataclass
class SourceSample:
    """What was drawn of a source. `scale`: how many times larger than its sample the source is."""

    files: int = 0
    files_read: int = 0
    bytes: int = 0                 # stored
    bytes_read: int = 0            # stored bytes that were read
    records_read: int = 0
    payload_read: int = 0          # bytes of the records read, uncompressed
    drawn: int = 0
    drawn_bytes: int = 0
    read_cpu_s: float = 0.0
    by_file: bool = False          # whole files were left out
    notes: list[str] = field(default_factory=list)

    @property
    def scale(self) -> float:
        of_records = self.records_read / self.drawn if self.drawn else 1.0
        return of_records * self.bytes / max(self.bytes_read, 1) if self.bytes_read < self.bytes else of_records


@dataclass
class Sampled:
    """A recipe run on its sample: records of the tasks of the large and of the small run, by node."""

    sources: dict[str, SourceSample]
    recipe: Recipe
    nodes: list[dict[str, Any]]                    # as in plan.json, of the large run
    records: dict[str, list[PartRecord]]
    quarter: dict[str, list[PartRecord]]
    wall_s: float
    workers: int


def run_sample(recipe: Recipe, share: float, *, workers: int, show: str = "quiet", verify_inputs: bool = False,
               most_s: float = MOST_S) -> Sampled:
    """Draw about `share` (0 … 1) of every source and run the recipe on it, in child processes of this machine.

    Raises InputError for inputs that are not there, SampleError when the sample is too small for the recipe, or takes
    longer than `most_s` or more disk than MOST_DISK.
    """
    planner = Planner(recipe, lambda path, sha256: b"", verify_inputs=verify_inputs)
    planner.nodes()
    began = time.monotonic()
    with Scratch() as scratch:
        folder = Path(scratch.folder())
        guard = _Guard(folder, most_s)
        store = str(folder / "store")
        drawn = {name: _choose(planner, name) for name in planner.sources_used()}
        records = _draw(planner, drawn, share, store, guard, workers, show)
        sources = {name: _units(name, files, planner.source_files(name), records[name], share, Store(store),
                                folder / "inputs") for name, files in drawn.items()}
        runs = []
        for units in (QUARTER, UNITS):
            made = _recipe_of(recipe, folder / "inputs", sources, units)
            runs.append(_run(made, store, guard, workers, show, must=units == UNITS))
        quarter, whole = runs
        assert whole is not None
        return Sampled(sources, recipe, whole[0], whole[1], quarter[1] if quarter else {}, time.monotonic() - began,
                       workers)


class _Guard:
    """Ends a sample that takes too much. `around(backend)` looks at every wait."""

    def __init__(self, folder: Path, most_s: float) -> None:
        self.folder, self.most_s, self.began = folder, most_s, time.monotonic()
        self.free = shutil.disk_usage(folder).free

    def check(self) -> None:
        if time.monotonic() - self.began > self.most_s:
            raise SampleError(f"the sample takes more than {self.most_s / 60:.0f} minutes on this machine; take a "
                              f"smaller --sample")
        if self.free - shutil.disk_usage(self.folder).free > MOST_DISK:
            raise SampleError(f"the sample takes more than {MOST_DISK >> 30} GB of disk below {self.folder.parent}; "
                              f"take a smaller --sample")

    def backend(self, workers: int) -> Callable[[Store], Any]:
        make = make_backend("process" if os.path.exists("/proc/self/stat") else "inline", workers, None)
        return lambda store: _Watched(make(store), self.check)


class _Watched:
    """A backend that asks `check` whenever it waits."""

    def __init__(self, inner: Any, check: Callable[[], None]) -> None:
        self._inner, self._check = inner, check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def wait(self, timeout: float) -> list[dict[str, Any]]:
        self._check()
        return self._inner.wait(timeout)


# -- drawing ---------------------------------------------------------------------------------------------------------
def _choose(planner: Planner, name: str) -> list[SourceFile]:
    """The files to read: all, or as many, by PRF of their paths, as have READ_BYTES (one at least)."""
    files = planner.source_files(name)
    if sum(f.size for f in files) <= READ_BYTES:
        return list(files)
    chosen, size = [], 0
    for file in sorted(files, key=lambda f: prf(SEED, "sample-file", f.path)):
        if chosen and size + file.size > READ_BYTES:
            break
        chosen.append(file)
        size += file.size
    return sorted(chosen)


def _draw(planner: Planner, chosen: dict[str, list[SourceFile]], share: float, store: str, guard: _Guard, workers: int,
          show: str) -> dict[str, list[PartRecord]]:
    """Records of the DrawSample tasks, by source, in the order of the files."""
    specs: dict[str, list[TaskSpec]] = {}
    for name, files in chosen.items():
        total = sum(f.size for f in planner.source_files(name))
        rest = total / max(sum(f.size for f in files), 1)           # what is not read is drawn from what is
        reader = planner.reader_arg(name)
        groups = list(_groups(files))
        for order, some in enumerate(groups):
            args = {"source": name, "reader": reader, "files": [f.arg() for f in some], "seed": SEED,
                    "share": min(1.0, share * rest), "least": LEAST, "most": max(1 << 20, MOST_BYTES // len(groups)),
                    "read_most": READ_BYTES * 4}
            size = sum(f.size for f in some)
            memory = 500 + reader_class(planner.recipe.sources[name].read).memory_mb \
                + 3 * (min(args["most"], size * 20) >> 20)
            specs.setdefault(name, []).append(TaskSpec(
                task_key(DRAW, args), DRAW, f"sample:{name}", args, size,
                f"{name}: {some[0].path}", min(memory, 4000), order=order,
                confined=reader_class(planner.recipe.sources[name].read).confined, roots=planner.roots))
    at = Store(store)
    backend = guard.backend(workers)(at)
    progress = Progress(show)
    try:
        with Log.open(at, run="sample") as log:
            flat = [s for of_source in specs.values() for s in of_source]
            found = iter(Scheduler(backend, log, progress).run(flat))
            return {name: [next(found) for _ in of_source] for name, of_source in specs.items()}
    finally:
        backend.close()
        progress.close("done")


def _groups(files: list[SourceFile]) -> Iterator[list[SourceFile]]:
    """Consecutive files one task reads: a big one, or many small ones."""
    some: list[SourceFile] = []
    for file in files:
        if some and (len(some) >= GROUP_FILES or sum(f.size for f in some) + file.size > GROUP_BYTES):
            yield some
            some = []
        some.append(file)
    if some:
        yield some


def _units(name: str, chosen: list[SourceFile], files: list[SourceFile], records: list[PartRecord], share: float,
           store: Store, folder: Path) -> SourceSample:
    """Settle how far down the ranks the sample of a source goes, and write it as units of unequal sizes."""
    found = SourceSample(files=len(files), files_read=len(chosen), bytes=sum(f.size for f in files))
    found.by_file = len(chosen) < len(files)
    counters = [r.counters for r in records]
    found.records_read = sum(c["records"] for c in counters)
    found.payload_read = sum(c["bytes"] for c in counters)
    found.bytes_read = sum(c["covered"] for c in counters)
    found.read_cpu_s = sum(r.cpu_s for r in records)
    wanted = max(share * found.bytes / max(found.bytes_read, 1), LEAST / max(found.records_read, 1))
    below = min([int(min(wanted, 1.0) * 2**64), *(c["complete"]["below"] for c in counters)])
    if below < int(min(1.0, share) * 2**64):
        found.notes.append(f"source '{name}': the sample is smaller than asked for, for it would hold more than "
                           f"{MOST_BYTES >> 30} GB")
    if found.by_file:
        found.notes.append(f"source '{name}': {len(chosen):,} of {len(files):,} files were read, picked at random")
    for record, some in zip(records, _groups(chosen)):
        size = sum(f.size for f in some)
        if record.counters["covered"] < size:
            found.notes.append(f"source '{name}': only the beginning of {some[0].path} was read "
                               f"({record.counters['covered'] / size:.1%}); it stands for the rest")
    (folder / name).mkdir(parents=True)
    paths = [folder / name / f"unit-{u:02d}.sample.parquet" for u in range(UNITS)]
    writers = [parquet_writer(p, SCHEMA) for p in paths]
    rows_in = [0] * UNITS
    for drawn in (record.files["drawn.parquet"] for record in records):
        with open_parquet(store.checked(drawn.path, drawn.sha256, str(folder))) as file:
            for group in range(file.num_row_groups):
                of_unit: dict[int, list[dict[str, Any]]] = {}
                for row in file.read_row_group(group).to_pylist():
                    if row["rank"] < below:
                        key = json.loads(row["facts"])["locator"].get("file", "") if found.by_file else row["id"]
                        of_unit.setdefault(unit_of(key), []).append(row)
                        found.drawn += 1
                        found.drawn_bytes += len(row["raw"] or row["text"] or b"")
                for unit, rows in of_unit.items():
                    writers[unit].write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                    rows_in[unit] += len(rows)
    for unit, writer in enumerate(writers):
        writer.close()
        if not rows_in[unit]:
            paths[unit].unlink()
    return found


def unit_of(key: str) -> int:
    """The unit of a record (or of all records of a file): three times as many go into every fourth one."""
    draw = prf(SEED, "sample-unit", key) % (UNITS // 4 * 6)
    block, place = divmod(draw, 6)
    return block * 4 + min(place, 3)


# -- running ---------------------------------------------------------------------------------------------------------
def _recipe_of(recipe: Recipe, folder: Path, sources: dict[str, SourceSample], units: int) -> Recipe:
    """The recipe over the first `units` units; every unit is a partition. No curriculum: there are too few tokens."""
    fed = {}
    for name, source in recipe.sources.items():
        if name in sources:
            paths = sorted(str(p) for p in (folder / name).glob("*.parquet"))
            some = [p for p in paths if int(Path(p).name[5:7]) < units] or paths[:1]
            if not some:
                raise SampleError(f"source '{name}' gave no record at all; see that its files are what `read: "
                                  f"{source.read}` expects (tokenmill run says what is wrong with each)")
            signals = reader_class(source.read)(source.config).signals
            fed[name] = Source(read="sample", path=some, root=str(folder / name), config={"signals": signals})
    return recipe.model_copy(update={"sources": fed, "curriculum": None, "train": {}, "input": None,
                                     "run": recipe.run.model_copy(update={"partition": 1})})


def _run(recipe: Recipe, store: str, guard: _Guard, workers: int, show: str, *,
         must: bool) -> tuple[list[dict[str, Any]], dict[str, list[PartRecord]]] | None:
    """(nodes of the plan, records of its tasks by node). None when a run that need not succeed had too little to go
    on."""
    name = "sample" if must else "quarter"
    try:
        run_recipe(recipe, store, make_backend=guard.backend(workers), show=show, run=name, report=False)
    except TaskFailed as e:
        if not must:
            return None
        raise SampleError(f"the recipe fails on its sample, maybe because that is too small for it (take a larger "
                          f"--sample): {e}") from e
    at = Store(store)
    nodes = json.loads(at.read(f"runs/{name}/plan.json"))["nodes"]
    log = Log.read(at)
    tasks = RunTasks(at, name)
    return nodes, {n["name"]: [r for k in dict.fromkeys(tasks.keys(n["name"])) if (r := log.get(k)) is not None]
                   for n in nodes}
