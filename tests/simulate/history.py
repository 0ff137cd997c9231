"""Runs a history by its seed, finds histories that break a promise, and makes them small."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.simulate.audit import Violation
from tests.simulate.world import World

LEAST_TASKS, MOST_TASKS = 2, 10
SHRINKS = 150                # histories that are run to make one smaller


@dataclass(frozen=True)
class History:
    """A simulated sequence of events, determined by its fields. `only` has the names of the faults that may happen;
    None means all that the seed draws."""

    seed: int
    tasks: int
    only: tuple[str, ...] | None = None

    @staticmethod
    def of(seed: int) -> History:
        return History(seed, LEAST_TASKS + seed % (MOST_TASKS - LEAST_TASKS + 1))

    @property
    def command(self) -> str:
        """The command that runs the history again."""
        only = "" if self.only is None else f" --only '{','.join(self.only)}'"
        return f"python -m tests.simulate --seed {self.seed} --tasks {self.tasks}{only}"


@dataclass(frozen=True)
class Failure:
    history: History
    reason: str
    faults: tuple[str, ...]          # that took place
    broken: bool = True              # a promise was broken; otherwise an exception was not handled

    def __str__(self) -> str:
        return (f"{self.reason}\n  {len(self.faults)} faults: {', '.join(self.faults)}\n"
                f"  at commit {_commit()}: {self.history.command}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within this context, warnings of the simulated drivers are not shown."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run(history: History) -> Failure | None:
    """Run a history. Returns None if all promises were kept."""
    world = World(history.seed, history.tasks, history.only)
    with quiet():
        try:
            world.run()
        except Violation as violation:
            return Failure(history, str(violation), tuple(world.faults.fired))
        except Exception as error:              # an error of the simulator, or one of the product that nothing handles
            return Failure(history, f"{type(error).__name__}: {error}", tuple(world.faults.fired), broken=False)
    return None


def search(seeds: Iterable[int], told: Callable[[int], None] = lambda seed: None) -> Failure | None:
    """Return the first failure among the histories of these seeds, or None."""
    for seed in seeds:
        told(seed)
        if (failure := run(History.of(seed))) is not None:
            return failure
    return None


def shrink(failure: Failure) -> Failure:
    """Return a smaller history that also fails: first with fewer tasks, then with fewer faults. Faults are left out
    half by half at first (ddmin by Zeller)."""
    best, tries = failure, 0

    def fails(history: History) -> bool:
        nonlocal best, tries
        tries += 1
        if tries > SHRINKS:
            return False
        again = run(history)
        if again is not None:
            best = again
        return again is not None

    for tasks in range(1, best.history.tasks):
        if fails(replace(best.history, tasks=tasks)):
            break
    fails(replace(best.history, only=best.faults))
    size = max(1, len(best.faults) // 2)
    while best.history.only is not None and tries < SHRINKS:
        names, smaller = best.history.only, False
        for at in range(0, len(names), size):
            if fails(replace(best.history, only=names[:at] + names[at + size:])):
                smaller = True
                break
        if not smaller:
            if size == 1:
                break
            size //= 2
        size = max(1, min(size, len(best.history.only or ())))
    return best


def _commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True,
                          cwd=Path(__file__).parent)
    return said.stdout.strip() or "unknown"
