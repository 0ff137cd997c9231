"""Storage whose requests fail, full disks, slow workers and jumping clocks: they cost time, but change no result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import checks
from tests.chaos.cluster import ROOT
from tests.chaos.test_workers import finish_well, moment
from tests.processes import until

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_fail(world, undisturbed, seed):
    """One in twenty times out, is throttled, breaks off, or is performed and its answer lost; some of them twice."""
    notes = world.temp / "notes"
    notes.mkdir()
    world.env |= {"CHAOS_STORAGE": str(notes), "CHAOS_SEED": str(seed)}
    driver = world.run(local=True, scheme="chaos://")
    assert driver.finish() == 0, driver.stderr
    assert not driver.told("failed"), "requests were not repeated"
    failed = [p.name.rpartition(".")[2] for p in notes.iterdir()]
    assert len(failed) > 25 and set(failed) == {"read", "write", "copy"}
    world.check(undisturbed)


def test_a_disk_is_full_for_a_while(world, undisturbed):
    """Workers wait for space; no task is charged, no document is quarantined."""
    world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, "read")):
        full = world.tell("full")
    refused = full.with_name("refused")

    def tried_again() -> bool:
        return refused.exists() and max(Counter(refused.read_text().split()).values(), default=0) > 1

    until(tried_again, what="a second attempt to write a result")
    full.unlink()
    refused.unlink()
    finish_well(world, driver, undisturbed)
    assert not [e for e in driver.told("failed") if e["kind"] == "exception"]


FULL = """
mount -t tmpfs -o size={small}k tmpfs {store} || exit 77
{run} 2> {top}/first.txt; echo $? > {top}/code
mount -o remount,size=1g {store}
{run} 2> {top}/second.txt || exit 78
cp -a {store} {top}/kept
"""


def test_a_disk_that_stays_full_ends_the_run_until_there_is_space(world, undisturbed, kernels):
    """A real file system that is too small, then large enough: exit 1 says which folder is full, nothing half-written
    stays, and the next run goes on."""
    if shutil.which("unshare") is None or subprocess.run(
            ["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs -o size=64k tmpfs {world.temp}"],
            capture_output=True).returncode != 0:
        pytest.skip("no user namespace with a tmpfs of its own can be had here")
    Path(world.store).mkdir()
    run = (f"{sys.executable} -m pipeline.cli run {world.corpus}/recipe.yaml --store {world.store} --backend process "
           f"--workers 2 --allow-custom-stages --quiet")
    script = FULL.format(small=2500, store=world.store, top=world.temp, run=run)
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", script], cwd=ROOT, timeout=900,
                          env={**world.env, "CHAOS_LIMITS": json.dumps({"max_environment": 0})})
    said = (world.temp / "first.txt").read_text()
    assert done.returncode == 0, (world.temp / "second.txt").read_text()
    assert (world.temp / "code").read_text() == "1\n"
    assert "is full" in said and world.store in said and "Traceback" not in said.splitlines()[0]
    shutil.copytree(world.temp / "kept", world.store, dirs_exist_ok=True, copy_function=os.link)
    assert not list(Path(world.store).rglob("*.tmp~"))
    assert checks.hashes(world.store) == undisturbed.hashes
    checks.check_log(world.store)


def test_a_straggler_is_overtaken(world, undisturbed):
    """A child stands still at the end of a task; another one does the task, and the run does not wait for the first."""
    world.start()
    slow = world.tell("slow", "unique:2")
    driver = world.run()
    driver.until("unique:2", undisturbed.tasks["unique:2"] - 1)
    assert not slow.exists(), "nobody was slow"
    began = time.monotonic()
    finish_well(world, driver, undisturbed)
    assert time.monotonic() - began < 1800
    slow.with_suffix(".done").unlink()


@pytest.mark.parametrize("jump", [86400.0, -1e8])
def test_clocks_jump(world, undisturbed, jump):
    """The time of day of driver and children goes wild; nothing but displays may look at it."""
    world.env["CHAOS_CLOCK"] = str(jump)
    driver = world.run(local=True)
    assert driver.finish() == 0, driver.stderr
    assert not driver.told("failed")
    world.check(undisturbed)


def test_what_hangs_is_named(world, undisturbed):
    """A document that waits for something that never comes: node, partition, row and stage are said, and it is freed
    when it is let go."""
    world.env["CHAOS_LIMITS"] = json.dumps({"hanging_s": 3.0})
    world.start()
    driver = world.run()
    with driver.held_at(*moment(world, undisturbed, "read"), inside=True):
        event = driver.until_event("hanging")
    assert event["seconds"] >= 3 and {"node", "label", "row", "stage"} <= event.keys()
    finish_well(world, driver, undisturbed)
