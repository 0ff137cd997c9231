"""Remakes the files that a run finds damaged: their records are retired, and the plan is made again.

The new plan finds everything else fresh, so only the tasks whose files are damaged or missing run. A disk that keeps
damaging files ends the run instead of keeping it busy for ever.
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
#: number of damaged files (in all, and of one task) after which the disk counts as broken and the run ends
MOST_MENDED, MOST_REPEATED = 10_000, 12


def until_sound(store: Store, log: Log, scheduler: Scheduler, plan_and_run: Callable[[], T],
                mended: dict[str, str]) -> T:
    """Call `plan_and_run` and return its result. When it meets damaged files, retire their records and call it
    again, so that the files are made anew.

    Adds to `mended`, for each damaged file, its path and what was wrong. Raises StoreError when too many files are
    damaged, in all or of one task. Raises the original error when no record names any of the damaged files. This
    happens when a published copy is damaged, for example; `tokenmill store verify --repair` restores the copy.
    """
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
    """Retire the records of damaged files. Raises `error` when none of them has a record."""
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
        store.remove(path)                                # the next plan that names the list writes it again
    if not log.retire_files(damaged) and not lists:
        raise error
    for why in damaged.values():
        logger.warning("%s; what made it runs again", why)


def _task(path: str) -> str:
    """The task a file belongs to, as objects/KEY. A list counts as a task of its own."""
    return path if path.startswith(f"{LISTS}/") else path.rpartition("/")[0]
