"""Making anew what a run finds damaged: the records of such files are retired, and the plan is made again.

A plan that is made again finds everything else fresh, so only the tasks whose files are damaged or gone run. A disk
that goes on damaging files ends the run instead of keeping it busy for ever.
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
#: damaged files that are made anew before the disk is taken for broken: in all, and of one task
MOST_MENDED, MOST_REPEATED = 10_000, 12


def until_sound(store: Store, log: Log, scheduler: Scheduler, plan_and_run: Callable[[], T],
                mended: dict[str, str]) -> T:
    """The result of `plan_and_run`, which is called again as long as it meets damaged files that can be made anew.

    `mended`: path → what was wrong, of the files that were; it grows. Raises StoreError when they are too many, and
    what was met when it is no file of a record (a published copy: `tokenmill store verify --repair`).
    """
    while True:
        try:
            return plan_and_run()
        except (DamageFound, DamagedFile) as e:
            log.verify()
            damaged = e.paths if isinstance(e, DamageFound) else {e.path: f"{e.path} {e.why}"}
            _retire(store, log, damaged, mended, e)
            mended.update(damaged)
            scheduler.plan_again()


def _retire(store: Store, log: Log, damaged: dict[str, str], mended: dict[str, str], error: StoreError) -> None:
    """Take back the records of damaged files. Raises `error` when none of them has one."""
    if len(mended) + len(damaged) > MOST_MENDED:
        raise StoreError(f"{len(mended) + len(damaged)} files of {store.root} were damaged or gone: its disk, or "
                         f"somebody who writes there, is at fault. See to that and run again; `tokenmill store verify` "
                         f"looks at everything") from error
    before = Counter(_task(path) for path in mended)
    for path in damaged:
        if before[_task(path)] >= MOST_REPEATED:
            raise StoreError(f"{path} was damaged again each time it was made: the disk of {store.root}, or somebody "
                             f"who writes there, is at fault. See to that and run again") from error
    lists = [path for path in damaged if path.rpartition("/")[0] == LISTS]
    for path in lists:
        store.remove(path)                                # written again by the plan that names it
    if not log.retire_files(damaged) and not lists:
        raise error
    for why in damaged.values():
        logger.warning("%s; what made it runs again", why)


def _task(path: str) -> str:
    """objects/KEY of a file of a task; a list is a task of its own."""
    return path if path.startswith(f"{LISTS}/") else path.rpartition("/")[0]
