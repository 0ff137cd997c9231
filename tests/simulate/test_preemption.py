"""A cluster whose nodes are preempted finishes its runs, and a task that takes its nodes down is found."""

from __future__ import annotations

import pytest

from pipeline.engine.driver.losses import MAX_LOST, PROOF, improbable
from tests.simulate.mutants import PREEMPTION_MUTANTS, Mutant
from tests.simulate.preemption import Cluster, announcements, killers, run, storms

SEEDS = range(3)


def test_a_stormy_cluster_finishes_its_runs():
    assert storms(range(1)) == ""


def test_announced_preemptions_cost_nothing():
    assert announcements(0) == ""


def test_a_task_that_takes_its_nodes_down_is_found_and_nobody_else_is_blamed():
    assert killers(SEEDS) == ""


def test_a_fixed_number_of_losses_would_end_the_run():
    lost = run(Cluster(40, 16, 0.3, longest=3), 8_000, 0).lost
    assert max(lost.values()) > MAX_LOST


@pytest.mark.slow
def test_a_hundred_seeds_of_killers_and_a_hundred_thousand_tasks():
    assert killers(range(100, 200)) == ""
    run(Cluster(625, 16, 0.3, longest=3), 100_000, 1)


@pytest.mark.parametrize("mutant", PREEMPTION_MUTANTS, ids=[mutant.name for mutant in PREEMPTION_MUTANTS])
def test_a_planted_bug_is_found(mutant: Mutant):
    with mutant.planted():
        assert killers(SEEDS) or announcements(0) or storms(range(1))


def test_chernoffs_bound_is_above_the_tail():
    """P(N ≥ 40) of a Poisson number with expectation 15 is 6e-8, with expectation 5 it is 9e-23."""
    assert not improbable(40, 15.0, PROOF) and improbable(40, 5.0, PROOF)
    assert improbable(7, 0.0, PROOF) and not improbable(5, 5.0, 0.0) and not improbable(3, 5.0, 0.0)
