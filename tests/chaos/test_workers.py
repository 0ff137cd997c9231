"""Children and supervisors are killed and stopped: no document is quarantined or lost, and the same run ends well."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.processes import alive, signal_all, stopped, until

pytestmark = pytest.mark.xdist_group("chaos")      # one after the other: each wants the machine
#: where a fault strikes: nodes by the beginning of their names
PHASES = {"read": "clean", "exact": "unique/exact", "apply": "unique:2", "near": "unique/minhash", "last": "unique",
          "tokens": "shards:web"}


def moment(world, undisturbed, phase: str) -> tuple[str, int]:
    """Choose the moment of a fault in a phase of the run. Returns (beginning of the names of the phase's nodes, number
    of their tasks that are done at this moment). The random number generator of the scenario chooses it; it is never so
    late that the last task may already run."""
    total = sum(n for node, n in undisturbed.tasks.items() if node.startswith(PHASES[phase]))
    return PHASES[phase], world.rng.randint(1, max(1, total - 2))


def finish_well(world, driver, undisturbed) -> None:
    world.note()
    assert driver.finish() == 0, driver.stderr
    assert not driver.told("quarantined"), "a document was blamed"
    world.check(undisturbed)


@pytest.mark.parametrize(("phase", "signum"), [
    pytest.param("read", signal.SIGKILL, marks=pytest.mark.slow), ("near", signal.SIGKILL), ("tokens", signal.SIGTERM)])
def test_children_are_killed(world, undisturbed, phase, signum):
    cluster = world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, phase), inside=phase == "read") as folder:
        victims = until(lambda: len(pids := cluster.children) >= 2 and pids, what="two children")
        if phase == "read":
            until(lambda: [*folder.glob("inside.*")], what="a child at a document")
        world.note()
        killed = signal_all(victims, signum)
    assert len(killed) >= 2
    finish_well(world, driver, undisturbed)


@pytest.mark.parametrize("phase", ["read", "near", "last"])
def test_a_supervisor_is_killed(world, undisturbed, phase):
    """As the kernel's or Ray's OOM killer does it: with everything it had at hand."""
    cluster = world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, phase)):
        world.note()
        assert signal_all([world.rng.choice(cluster.supervisors)], signal.SIGKILL)
    finish_well(world, driver, undisturbed)
    assert not [e for e in driver.told("failed") if e["kind"] == "exception"]


def test_a_storm_of_kills(world, undisturbed):
    """Every few tasks somebody dies: a child, a supervisor, in any order."""
    cluster = world.start()
    driver = world.run()
    moments = [5]
    while moments[-1] < sum(undisturbed.tasks.values()) - 30:
        moments.append(moments[-1] + world.rng.randint(15, 40))
    assert len(moments) > 5
    for at in moments[:-1]:
        supervisor = world.rng.random() < 0.3
        with driver.held_at("", at):
            victims = until(lambda supervisor=supervisor: cluster.supervisors if supervisor else cluster.children)
            world.note()
            assert signal_all([world.rng.choice(victims)], signal.SIGKILL)
    finish_well(world, driver, undisturbed)


@pytest.mark.parametrize("who", ["children", "supervisors"])
def test_a_stopped_machine_quarantines_no_document(world, undisturbed, who):
    """Everything of a node stands still, within a document, for longer than `wall_s`. The children are replaced.

    With the usual `idle_cpu_s`, a process that gets less than a quarter of a core beside others would stand still, too.
    """
    limits = {"cpu_s": 2.0, "wall_s": 10.0, "idle_cpu_s": 0.02}
    world.env["CHAOS_LIMITS"] = json.dumps(limits)
    cluster = world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, "read"), inside=True) as folder:
        [inside, *_] = until(lambda: [int(path.suffix[1:]) for path in folder.glob("inside.*")], what="a child inside")
        world.note()
        node = next(node for node in cluster.nodes if inside in node.children)
        children, supervisors = node.children, node.supervisors if who == "supervisors" else []
        signal_all([*supervisors, *children], signal.SIGSTOP)
        until(lambda: all(stopped(p) or not alive(p) for p in [*supervisors, *children]), what="a stop")
    try:
        if supervisors:                                 # nobody replaces children before they go on
            time.sleep(1.5 * limits["wall_s"])
            signal_all([*supervisors, *children], signal.SIGCONT)
        until(lambda: not any(map(alive, children)), what="the end of the children")
        finish_well(world, driver, undisturbed)
    finally:
        signal_all([*supervisors, *children], signal.SIGCONT)
