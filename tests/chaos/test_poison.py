"""Documents that crash a stage: exactly these go into quarantine, each with the reason, and all other data is as in a
run without them."""

from __future__ import annotations

import json
import signal

import pytest

from tests.chaos import checks, site
from tests.processes import signal_all, until

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.parametrize("kills", [pytest.param(False, marks=pytest.mark.slow), True])
def test_poison_costs_exactly_its_documents(world, undisturbed, kills):
    """A segmentation fault, an endless loop, 8 GB, an exception: alone, and while supervisors are killed besides."""
    world.env["CHAOS_LIMITS"] = json.dumps({"cpu_s": 4.0})
    cluster = world.start()
    driver = world.run(recipe=world.corpus / "poisoned.yaml")
    done = 0
    for _ in range(2 if kills else 0):
        done += world.rng.randint(3, 8)
        with driver.held_at("clean", done):
            victims = until(lambda: cluster.supervisors)
            world.note()
            assert signal_all(victims[:1], signal.SIGKILL)
    assert driver.finish(1500) == 0, driver.stderr
    world.note()
    world.check_workers_are_gone()
    lost = {row["record"] + int(row["file"][:2]) * site.WEB // 4: row["reason"]
            for row in checks.rows(world.store, "quarantine/clean", ["record", "file", "reason"])}
    assert lost == {number: site.REASONS[kind] for number, kind in site.PLANTED.items()}
    found = checks.places(world.store)
    for folder in ("datasets/clean", "datasets/unique", "dropped/unique", "quarantine/unique"):
        assert found[folder] == undisturbed.places[folder]
    assert sorted(found["dropped/clean"] + found["quarantine/clean"]) == undisturbed.places["dropped/clean"]
    assert checks.hashes(world.store) == undisturbed.hashes
    checks.check_log(world.store)
    told = sorted(e["reason"] for e in driver.told("quarantined"))
    assert told == sorted(site.REASONS[kind] for kind in site.PLANTED.values() if kind != site.FAIL), "not once each"
