"""Planted poison: exactly those documents go into quarantine, with the reason; the rest is as in a run without them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos import checks, site
from tests.chaos.conftest import Undisturbed, reference
from tests.chaos.processes import signal_all

STAGE = '''
import ctypes

from stages.stage import Stage, StageConfig, signal


class Poison(Stage):
    """Dies of what a document says; or, to compare with, only drops it."""

    name = "poison"

    class Config(StageConfig):
        die: bool = signal(True, "whether to die")

    def process(self, doc):
        kind = next((k for k in KINDS if f" {k}. " in doc.text), None)
        return None if kind is None else KINDS[kind]() if self.config.die else "poison"


def spin():
    while True:
        pass


def hog():
    held = []
    for _ in range(512):
        held.append(bytearray(b"x" * (16 << 20)))       # 8 GB in all


def fail():
    raise LookupError("bad document of someone@mail.example.org")


KINDS = {"poison-segfault": lambda: ctypes.string_at(0), "poison-spin": spin, "poison-hog": hog, "poison-fail": fail}
'''
SEGFAULT, SPIN, HOG, FAIL = KINDS = "poison-segfault", "poison-spin", "poison-hog", "poison-fail"
PLANTED = {7: SEGFAULT, 8: SPIN, 451: HOG, 452: FAIL, 800: SEGFAULT, 1203: SPIN, 1590: FAIL}
REASONS = {SEGFAULT: "crash:SIGSEGV", SPIN: "cpu_limit", HOG: "memory", FAIL: "error:LookupError"}


@dataclass(frozen=True)
class Poisoned:
    top: Path
    clean: Undisturbed


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory, kernels) -> Poisoned:
    top = tmp_path_factory.mktemp("poison")
    site.write_corpus(top, PLANTED)
    (top / "own_poison.py").write_text(STAGE)
    for name, die in (("clean", "false"), ("recipe", "true")):
        site.write_recipe(top / f"{name}.yaml", f"{{'own_poison:Poison': {{die: {die}}}}}", "own_poison.py")
    return Poisoned(top, reference(top / "clean.yaml", str(top / "store"), kernels))


@pytest.mark.parametrize("kills", [pytest.param(False, marks=pytest.mark.slow), True])
def test_poison_costs_exactly_its_documents(world, poisoned, kills):
    """Alone, and while workers are killed besides."""
    world.env["CHAOS_LIMITS"] = json.dumps({"cpu_s": 1.5})
    cluster = world.start()
    recipe = poisoned.top / "recipe.yaml"
    driver = world.run(recipe=recipe)
    if kills:
        for _ in range(2):
            driver.until("clean", driver.done("clean") + world.rng.randint(3, 8))
            world.note()
            signal_all(cluster.supervisors[:1] or cluster.children[:1], 9)
    assert driver.finish(180) == 0, driver.stderr
    world.note()
    world.check_workers_are_gone()
    lost = {row["record"] + int(row["file"][:2]) * site.WEB // 4: row["reason"]
            for row in checks.rows(world.store, "quarantine/clean", ["record", "file", "reason"])}
    assert lost == {number: REASONS[kind] for number, kind in PLANTED.items()}
    clean, found = poisoned.clean, checks.places(world.store)
    assert found["datasets/clean"] == clean.places["datasets/clean"]
    assert sorted(found["dropped/clean"] + found["quarantine/clean"]) == clean.places["dropped/clean"]
    assert checks.hashes(world.store) == clean.hashes
    checks.check_log(world.store)
    told = sorted(e["reason"] for e in driver.told("condemned"))
    assert told == sorted(REASONS[kind] for kind in PLANTED.values() if kind != FAIL), "not once each"
