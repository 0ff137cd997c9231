"""Implements `tokenmill materialize RUN`, which writes the training samples of a run to files, in the order in which a
training reads them. `pipeline.passes.materialize` describes the tasks and the files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator

from pipeline.base.scratch import Scratch
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.protocols import Backend
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.task import TaskSpec
from pipeline.heal import until_sound
from pipeline.passes.materialize import FILE_BYTES, map_drafts, publish_rows, reduce_drafts
from pipeline.plan.drive import drive
from pipeline.plan.nodes import Node, Work, result
from pipeline.store.content_keys import task_key
from pipeline.store.fs import Store
from pipeline.store.lists import ListFiles, writes_to
from pipeline.store.log import Log
from stages.barrier import TaskDraft
from tokenizer.mixture.curriculum import Curriculum, CurriculumError
from tokenizer.shards.rows import MANIFEST as ROWS
from tokenizer.shards.rows import RowManifest


def materialize(store_root: str, run: str, format: str, *, make_backend: Callable[[Store], Backend],
                show: str = "quiet", takeover: bool = False, map_bytes: int | None = None,
                file_bytes: int = FILE_BYTES) -> tuple[RowManifest, str]:
    """Write all training samples of `run` to the folder runs/RUN/rows-FORMAT of the store. Returns the manifest, which
    lists the written files, and the path of their folder relative to the store. Raises CurriculumError if the run has
    no curriculum, and the errors of `Log.open` and `Scheduler.step`.

    `format` is bytes or parquet. The tasks are committed like those of a run, so an interrupted call resumes where it
    stopped. The tasks that sort the samples do not depend on the format, so a later call with the other format reuses
    their results.
    """
    store = Store(store_root)
    path, folder = f"runs/{run}/curriculum.json", f"runs/{run}/rows-{format}"
    if not store.exists(path):
        raise CurriculumError(f"{path}: no curriculum there; add `curriculum:` to the recipe and run it first")
    backend = make_backend(store)                 # the backend acquires nothing before it is started
    log = Log.open(store, run=run, takeover=takeover)
    state = "failed"
    with contextlib.ExitStack() as ending:        # runs the callbacks in reverse order, even when one of them raises
        ending.callback(log.close)
        progress = Progress(show, lambda doc: None)
        ending.callback(lambda: progress.close(state))
        ending.callback(backend.close)
        curriculum = Curriculum.loads(store.read(path), path)  # we hold the log, so no other process replaces it now

        def work(_: object) -> Work:
            lists = ListFiles(writes_to(store))
            mapped = yield _specs("materialize/scatter", map_drafts(store, curriculum, map_bytes, file_bytes), lists)
            drafts = reduce_drafts(curriculum, [result(r) for r in mapped], format, file_bytes)
            written = yield _specs("materialize/write", drafts, lists)
            log.flush()
            return publish_rows(store, folder, curriculum, drafts, [result(r) for r in written], log.check_lease)

        scheduler = Scheduler(backend, log, progress)
        results = until_sound(store, log, scheduler, lambda: drive(
            [Node("materialize", "materialize", (), work)], scheduler, lambda *_: None), {})
        log.flush()
        state = "done"
        return results["materialize"], folder


def copy_rows(store: Store, folder: str, out: str) -> None:
    """Copy the files with training samples that `materialize` wrote to `folder` of the store to the folder or URL
    `out`. The list of the files, rows.json, is copied last. The name of a file identifies its content. A file that an
    interrupted copy has left in `out` is therefore not copied again if its size is right."""
    target = Store(out)
    sums = {file["files"][kind]: sha256 for file in json.loads(store.read(f"{folder}/{ROWS}"))["files"]
            for kind, sha256 in file["sha256"].items()}
    for name, sha256 in sums.items():
        if target.size(name) == store.size(f"{folder}/{name}"):
            continue
        if target.local is not None:
            target.write(name, store.read_checked(f"{folder}/{name}", sha256))
            continue
        with Scratch() as scratch:                              # uploaded in parts, several at a time
            target.remote.upload(store.checked(f"{folder}/{name}", sha256, scratch.path), name)
    target.write(ROWS, store.read(f"{folder}/{ROWS}"))


def _specs(node: str, drafts: Iterable[TaskDraft], lists: ListFiles) -> Iterator[TaskSpec]:
    for i, draft in enumerate(drafts):
        args = lists.fold(draft.args)
        yield TaskSpec(task_key(draft.task, args), draft.task, node, args, draft.weight,
                       draft.label, draft.memory_mb, order=i)
