"""The product keeps its promises in a thousand simulated histories, and the simulator finds the bugs planted in it."""

from __future__ import annotations

import pytest

from tests.conftest import rest_slow
from tests.simulate.history import History, quiet, run, search, shrink
from tests.simulate.mutants import MUTANTS, Mutant
from tests.simulate.world import World

HISTORIES = 1000                 # of `make test`; the tests share them, so that each takes a few seconds
SHARES = 4
SLOW_HISTORIES = 10_000
WITHIN = 200                     # histories within which every planted bug has to be found


def check(seeds: range) -> None:
    failure = search(seeds)
    assert failure is None, f"\n{failure}\n\nshrunk: {shrink(failure)}"


@pytest.mark.parametrize("share", rest_slow(1, range(SHARES)))
def test_promises_are_kept(share: int) -> None:
    size = HISTORIES // SHARES
    check(range(share * size, (share + 1) * size))


@pytest.mark.slow
@pytest.mark.parametrize("share", range(10))
def test_promises_are_kept_for_long(share: int) -> None:
    size = SLOW_HISTORIES // 10
    check(range(HISTORIES + share * size, HISTORIES + (share + 1) * size))


def test_a_driver_killed_while_it_cleans_up_ended_there() -> None:
    assert run(History.of(21119)) is None


def test_a_fenced_driver_may_know_verdicts_that_were_taken_back() -> None:
    assert run(History.of(5861)) is None


def test_a_log_that_was_replayed_in_part_is_not_taken_for_a_whole_one() -> None:
    assert run(History(2949, 8, (
        "task first/0#1:lost", "driver0#85:pause", "driver1#92:pause", "driver2#15:pause",
        "harm#log/packs/00000005-00000006.pack:torn"))) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    with mutant.planted():
        found = search((mutant.seed, *range(WITHIN)))
    assert found is not None and found.broken, "a crash of the mutant is no find of the auditor"


def test_a_history_is_the_same_every_time() -> None:
    def trace(seed: int) -> tuple[float, list[str], dict[str, bytes], list[str]]:
        world = World(seed, 9)
        with quiet():
            world.run()
        return world.time, world.faults.fired, world.bucket.objects, [d.state for d in world.drivers]
    for seed in range(20):
        assert trace(seed) == trace(seed)


def test_every_kind_of_fault_happens() -> None:
    seed = 0
    missing = {"before", "after", "later", "repeated", "full", "outage", "late", "exception", "same", "vanish",
               "environment", "lost", "returned", "hanging", "straggle", "fail late", "innocent", "twice", "kill",
               "pause", "flip", "torn", "killed", "done", "Fenced", "LeaseHeld", "EnvironmentFailure", "TaskFailed",
               "CorruptLog"}
    while missing and seed < 500:
        world = World(seed, History.of(seed).tasks)
        with quiet():
            world.run()
        missing -= {name.rpartition(":")[2] for name in world.faults.fired}
        missing -= {d.state if d.error is None else type(d.error).__name__ for d in world.drivers}
        seed += 1
    assert not missing


def test_a_failure_shrinks_and_says_how_to_see_it_again() -> None:
    [mutant] = [m for m in MUTANTS if m.name == "a verdict is not logged"]
    with mutant.planted():
        found = search(range(WITHIN))
        assert found is not None
        small = shrink(found)
        assert len(small.faults) <= len(found.faults) and small.history.tasks <= found.history.tasks
        assert len(small.faults) <= 2
        assert run(small.history) == small
    assert f"python -m tests.simulate --seed {found.history.seed} --tasks {small.history.tasks}" in str(small)
