"""A driver is killed, stopped, or joined by a second one: the next run of the recipe ends well, and a store never has
two drivers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pipeline.base.files import UNFINISHED
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.chaos import checks
from tests.chaos.driver import Driver
from tests.chaos.test_workers import moment
from tests.processes import stopped, until

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.parametrize(("phase", "new"), [
    pytest.param("read", False, marks=pytest.mark.slow), ("near", True), ("tokens", False)])
def test_the_driver_is_killed(world, undisturbed, phase, new):
    """The next one goes on, on the same cluster or on a `new` one."""
    cluster = world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, phase)):
        until(lambda: len(Log.read(Store(world.store))), what="a commit")       # a second after the first result
        world.note()
        driver.send(signal.SIGKILL)
        assert driver.finish() == -signal.SIGKILL
    world.check_workers_are_gone()
    if new:
        cluster = world.replace_cluster()
    again = world.run()
    assert again.finish() == 0, again.stderr
    world.check(undisturbed)
    assert cluster is world.cluster
    assert [e for e in again.told("planned") if e["reused"]], "it began anew"


@pytest.mark.parametrize(("point", "nth"), [("commit", 37), ("publish", 2)])
def test_the_driver_dies_at_its_most_delicate(world, undisturbed, point, nth):
    """A result is in the store and its record not yet in the log; a dataset's folder is half built."""
    world.start()
    died = world.run(module=("tests.e2e.kill", point, str(nth)))
    assert died.finish() == -signal.SIGKILL, died.stderr
    again = world.run()
    assert again.finish() == 0, again.stderr
    world.check(undisturbed)


def test_the_driver_is_asked_to_stop(world, undisturbed):
    """SIGTERM: a clean end, exit 1, no worker is left, everything finished is committed."""
    world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, "apply")):
        world.note()
        driver.send(signal.SIGTERM)
        assert driver.finish() == 1
    assert "run again to go on" in driver.stderr
    world.check_workers_are_gone()
    again = world.run()
    assert again.finish() == 0, again.stderr
    assert sum(e["reused"] for e in again.told("planned")) >= driver.done() - 2
    world.check(undisturbed)


def stop_between_writes(driver: Driver, store: str) -> None:
    """Stop a driver (SIGSTOP) at a moment when it has no half-written file in the store. A stopped driver that goes on
    would rename such a file to its final name, and nothing could prevent that."""
    def unfinished() -> list[Path]:
        return list(Path(store).rglob(f"*{UNFINISHED}"))

    while True:
        driver.send(signal.SIGSTOP)
        until(lambda: all(stopped(int(thread.name)) for thread in Path(f"/proc/{driver.pid}/task").iterdir()))
        if not unfinished():
            return
        driver.send(signal.SIGCONT)
        until(lambda: not unfinished())


@pytest.mark.slow
def test_a_fenced_driver_changes_nothing(world, undisturbed):
    """Driver 1 is stopped, driver 2 takes over and finishes; when driver 1 goes on, it ends with exit 1, says why, and
    not a byte of the store has changed."""
    world.start()
    first = world.run()
    with first.held_at(*moment(world, undisturbed, "read")):
        world.note()
        stop_between_writes(first, world.store)
    second = world.run("--takeover", local=True)
    assert second.finish() == 0, second.stderr
    before = {k: v for k, v in checks.tree(world.store).items() if "/.witness-" not in k}      # its own, it removes it
    assert checks.hashes(world.store) == undisturbed.hashes
    first.send(signal.SIGCONT)
    assert first.finish() == 1
    assert "took the store over" in first.stderr
    world.check_workers_are_gone()
    after = checks.tree(world.store)
    # what its workers were still about to write carries its epoch and is named nowhere: garbage, not a change
    garbage = {k for k in after.keys() - before.keys()
               if k.startswith("objects/lists/") or (k.startswith("objects/") and "/00000001-" in k)}
    assert {k: v for k, v in after.items() if k not in garbage} == before
    world.check(undisturbed)


def test_a_second_driver_is_refused_while_the_first_one_lives(world, undisturbed):
    world.start()
    first = world.run()
    with first.held_at(*moment(world, undisturbed, "read")):
        second = world.run(local=True)
        assert second.finish() == 1
    assert "is in use by run" in second.stderr
    assert first.finish() == 0, first.stderr
    world.check(undisturbed)
    until(lambda: not world.cluster.children)
