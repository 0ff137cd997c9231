"""A cluster whose nodes are preempted finishes its runs, and a task that takes its nodes down is found."""

from __future__ import annotations

import math

import pytest

from pipeline.engine.driver.losses import EVIDENCE, MAX_LOST, PROOF, BaseRate, TaskLosses, improbable
from tests.simulate.mutants import PREEMPTION_MUTANTS, Mutant
from tests.simulate.preemption import Cluster, announcements, killers, run, storms

#: with the last seed, a task that runs beside the killer would be blamed if it were not held back
SEEDS = (0, 1, 102)


@pytest.mark.slow
def test_a_stormy_cluster_finishes_its_runs():
    assert storms(range(1)) == ""


def test_announced_preemptions_cost_nothing():
    assert announcements(0) == ""


@pytest.mark.slow
def test_a_task_that_takes_its_nodes_down_is_found_and_nobody_else_is_blamed():
    assert killers(SEEDS) == ""


@pytest.mark.slow
def test_a_fixed_number_of_losses_would_end_the_run():
    lost = run(Cluster(40, 16, 0.3, longest=3), 8_000, 0).lost
    assert max(lost.values()) > MAX_LOST


@pytest.mark.slow
def test_forty_seeds_of_killers():
    assert killers(range(100, 140)) == ""


@pytest.mark.slow
def test_a_hundred_thousand_tasks_on_ten_thousand_slots():
    run(Cluster(625, 16, 0.3, longest=3), 100_000, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", PREEMPTION_MUTANTS, ids=[mutant.name for mutant in PREEMPTION_MUTANTS])
def test_a_planted_bug_is_found(mutant: Mutant):
    with mutant.planted():
        assert announcements(0) or killers(SEEDS) or storms(range(1))          # the quickest first


def test_chernoffs_bound_is_above_the_tail():
    """P(40 of 60 events) is 1e-10 if each is the task's with a probability of 1/4, and 5e-4 if of 9/20."""
    assert improbable(40, 20, 0.25, math.log(1e9)) and not improbable(40, 20, 0.45, PROOF)
    for count, others, share in ((40, 20, 0.25), (40, 20, 0.45), (9, 0, 0.1), (7, 30, 0.05)):
        events = count + others
        tail = sum(math.comb(events, n) * share**n * (1 - share)**(events - n) for n in range(count, events + 1))
        assert not improbable(count, others, share, -math.log(tail) + 1e-9)
    assert improbable(7, 5, 0.0, PROOF) and not improbable(5, 5, 0.5, 0.0) and not improbable(3, 5, 0.5, 0.0)


def test_fewest_losses_are_a_proof_once_others_have_run_long_enough():
    assert improbable(MAX_LOST - 1, 0, 1 / (EVIDENCE + 1), PROOF)
    assert not improbable(MAX_LOST - 2, 0, 1 / (EVIDENCE + 1), PROOF)


def test_what_the_supervisors_of_a_node_report_is_one_death():
    base = BaseRate()
    for host, now in (("a", 0.0), ("a", 0.4), ("b", 1.0), ("a", 2.0), ("", 2.0), ("", 2.0)):
        base.failed("lost", 2, host, now)
    assert (base.events["lost"], base.lost["lost"]) == (4, 12)
    base.failed("lost", 2, "a", 60.0)
    assert base.events["lost"] == 5, "another death"


def test_a_task_that_nothing_compares_with_is_named_but_not_accused():
    base, losses = BaseRate(), None
    for n in range(MAX_LOST):
        base.began(100.0 * n)
        base.ended(100.0 * n, 100.0 * n + 50)
        base.failed("lost", 1)
        losses = losses or TaskLosses(base, 50.0)
        losses.add("lost", 50.0, 1, 0)
        why = losses.judge("lost", 100.0 * n + 50)
        assert bool(why) == (n == MAX_LOST - 1)
    assert "no other task ran for long enough to compare with" in why


def test_attempts_lost_with_a_task_show_nothing_of_others():
    """One node with eight attempts: it is lost twice with the task, then once without it."""
    base = BaseRate()

    def lost(began: float, now: float) -> None:
        for _ in range(8):
            base.began(began)
        for _ in range(8):
            base.ended(began, now)
        base.failed("lost", 8)

    lost(0, 100)
    losses = TaskLosses(base, 100)
    losses.add("lost", 100, 8, 0)
    lost(100, 150)
    losses.add("lost", 50, 8, 0)
    assert losses.others("lost", 150) == (0, 0.0)
    lost(150, 350)
    assert losses.others("lost", 350) == (1, 200.0)
