"""Repairs a run when files of its store are damaged. The commit records of these files are retired (withdrawn), and the
run is planned again.

The new plan finds all other results in the commit log, so only the tasks that wrote the damaged or missing files run
again. When files are damaged again and again, the disk is at fault, and the run ends with an error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from pipeline.engine.driver.endings import DamageFound
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.store.errors import DamagedFile, StoreError
from pipeline.store.fs import Store
from pipeline.store.lists import FOLDER as LISTS
from pipeline.store.log import Log

T = TypeVar("T")
logger = logging.getLogger("tokenmill")
#: most damaged files of a run, and most of one task; when there are more, the disk counts as broken and the run ends
MOST_MENDED, MOST_REPEATED = 10_000, 12


def until_sound(store: Store, log: Log, scheduler: Scheduler, plan_and_run: Callable[[], T],
                mended: dict[str, str]) -> T:
    """Call `plan_and_run` and return its result. If it raises an error because files of the store are damaged, their
    commit records are withdrawn. Then it is called again, so that the files are written again.

    The path of each damaged file is added to `mended`, with a description of the damage. Raises StoreError when too
    many files are damaged, in total or of one task. Raises the original error when none of the damaged files can be
    written again, because none has a commit record and none is a list of task arguments. This happens, for example,
    when a published copy is damaged; it can be repaired with `tokenmill store verify --repair` and another run."""
    while True:
        try:
            return plan_and_run()
        except (DamageFound, DamagedFile) as e:
            log.check_lease()
            damaged = e.paths if isinstance(e, DamageFound) else {e.path: f"{e.path} {e.why}"}
            _retire(store, log, damaged, mended, e)
            mended.update(damaged)
            scheduler.plan_again()


def _retire(store: Store, log: Log, damaged: dict[str, str], mended: dict[str, str], error: StoreError) -> None:
    """Retire (withdraw) the commit records of damaged files, and remove damaged files that hold lists of task
    arguments. Raises `error` when no damaged file has a record or holds such a list, and StoreError when too many files
    are damaged."""
    if len(mended) + len(damaged) > MOST_MENDED:
        raise StoreError(f"{len(mended) + len(damaged)} files of {store.root} were damaged or missing: its disk, or "
                         f"somebody who writes there, is at fault. See to that and run again; `tokenmill store verify` "
                         f"checks all files") from error
    before = Counter(_task(path) for path in mended)
    for path in damaged:
        if before[_task(path)] >= MOST_REPEATED:
            raise StoreError(f"{path} was damaged each time it was written: the disk of {store.root}, or somebody "
                             f"who writes there, is at fault. See to that and run again") from error
    lists = [path for path in damaged if path.rpartition("/")[0] == LISTS]
    for path in lists:
        store.remove(path)                                # the next plan that names the list writes it again
    if not log.retire_files(damaged) and not lists:
        raise error
    for why in damaged.values():
        logger.warning("%s; the task that wrote it runs again", why)


def _task(path: str) -> str:
    """Return the folder of the task that wrote the file at `path`: objects/KEY. A list of task arguments was written by
    no task; for such a file the path itself is returned."""
    return path if path.startswith(f"{LISTS}/") else path.rpartition("/")[0]
