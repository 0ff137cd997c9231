"""Machines are lost and join, and the head of the cluster dies. The run ends well, or the next run of the recipe on a
new cluster does."""

from __future__ import annotations

import signal

import pytest

from tests.chaos.test_workers import finish_well, moment
from tests.processes import until

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.parametrize(("phase", "joins"), [
    pytest.param("read", True, marks=pytest.mark.slow), ("exact", False), ("near", True), ("last", False)])
def test_a_node_is_lost(world, undisturbed, phase, joins):
    """With a machine that joins in its place, or none."""
    cluster = world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, phase)):
        world.note()
        world.rng.choice(cluster.nodes).kill()
    if joins:
        cluster.add()
    finish_well(world, driver, undisturbed)
    assert not [e for e in driver.told("failed") if e["kind"] == "exception"]


def test_all_nodes_are_lost_before_another_one_joins(world, undisturbed):
    cluster = world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, "apply")):
        world.note()
        for node in cluster.nodes:
            node.kill()
    until(lambda: not cluster.supervisors)
    cluster.add()
    finish_well(world, driver, undisturbed)


@pytest.mark.parametrize(("what", "phase"), [
    pytest.param("gcs", "read", marks=pytest.mark.slow), ("gcs", "tokens"), ("head", "near")])
def test_the_head_is_lost_and_the_run_resumed_on_a_new_cluster(world, undisturbed, what, phase):
    cluster = world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, phase)):
        world.note()
        cluster.kill_gcs() if what == "gcs" else cluster.kill_head()
    code = driver.finish()
    if code != 0:                     # it may have had all that it needed: nothing but its end is left then
        assert code in (1, -signal.SIGABRT), driver.stderr
        assert "What was committed is kept: run again" in driver.stderr
        world.replace_cluster()
        driver = world.run()
        assert driver.finish() == 0, driver.stderr
        assert [e for e in driver.told("planned") if e["reused"]], "it began anew"
    world.check(undisturbed)
    assert not driver.told("quarantined")


def test_a_node_is_frozen(world, undisturbed):
    """All processes of a machine stand still and never go on: what it had at hand is done by others."""
    cluster = world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, "read")):
        world.note()
        node = world.rng.choice(until(lambda: [n for n in cluster.nodes if n.children], what="a child"))
        node.send(signal.SIGSTOP)
    try:
        assert driver.finish() == 0, driver.stderr
    finally:
        node.kill()
    assert not driver.told("quarantined")
    world.check(undisturbed)


def test_a_sick_machine(world, undisturbed):
    """On one of two machines every worker is soon killed for want of memory, by Ray itself, again and again: the other
    one does the work, and nobody is blamed. No task ends anywhere until one has been killed there."""
    cluster = world.start(1)
    sick = cluster.add(env_vars={"RAY_memory_usage_threshold": "0.0001", "RAY_memory_monitor_refresh_ms": "500",
                                 "RAY_min_memory_free_bytes": "-1"})
    held = world.tell("held")
    driver = world.run()
    try:
        driver.until_event("failed", lambda event: "memory" in event["message"])
        held.unlink()
        assert driver.finish() == 0, driver.stderr
    finally:
        sick.kill()
    assert not driver.told("quarantined")
    world.check(undisturbed)
