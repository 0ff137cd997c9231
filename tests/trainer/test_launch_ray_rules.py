"""The rules of the launcher on Ray: when it starts the training again, with how many ranks, and when it gives up. Ray
itself does not run; its answers are faked."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.simulate.clock import VirtualClock
from trainer.base.config import ConfigError

launcher = pytest.importorskip("trainer.launch.ray", reason="needs ray")


@pytest.fixture
def started(monkeypatch):
    """A function that runs `launch` without a cluster, with given outcomes of the attempts and given steps of the
    latest checkpoint, one after the other."""
    monkeypatch.setattr(launcher.ray, "init", lambda **_: None)
    monkeypatch.setattr(launcher.ray, "shutdown", lambda: None)
    monkeypatch.setattr(launcher.signal, "signal", lambda *_: None)

    def launch(outcomes, steps=(), restarts=3):
        tried, outcomes, steps = [], iter(outcomes), itertools.chain(steps, itertools.repeat(0))

        def attempt(_arguments, size, least, *_):
            tried.append((size, least))
            outcome = next(outcomes)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(launcher, "attempt", attempt)
        code = launcher.launch(["run"], "h:1", 4, gpu=True, ship_code=False, least=2, restarts=restarts,
                               possible=lambda _n: True, progress=lambda: next(steps))
        return code, len(tried)

    return launch


def test_what_dies_again_and_again_without_a_new_checkpoint_is_given_up(started, capsys):
    lost = launcher.RankLost("a rank died: X")
    assert started([lost] * 9) == (1, 4)
    assert "error: a rank died: X. Run the same command" in capsys.readouterr().err
    assert started([lost] * 9, restarts=0) == (1, 1)
    # progress() is asked at the start, and after each loss: 5 losses, each with a checkpoint more
    assert started([*[lost] * 5, 0], steps=[0, 10, 20, 30, 40, 50]) == (0, 6)
    assert started([*[lost] * 9], steps=[0, 10, 10, 10, 10, 10, 10]) == (1, 4)


def test_exit_codes_are_final_and_more_room_is_no_loss(started):
    assert started([2]) == (2, 1) and started([1]) == (1, 1)
    assert started([launcher.Pause()] * 7 + [0], restarts=0) == (0, 8)
    assert started([launcher.RankLost(), launcher.Pause()] * 3 + [0], restarts=3) == (0, 7)
    assert started([KeyboardInterrupt()]) == (130, 1)


def test_a_cluster_with_another_ray_or_python_is_no_traceback(monkeypatch):
    def init(**_):
        raise RuntimeError("Version mismatch: The cluster was started with: Ray: 2.50.0")

    monkeypatch.setattr(launcher.ray, "init", init)
    with pytest.raises(ConfigError, match="--address h:1: Version mismatch"):
        launcher.launch(["run"], "h:1", 1, gpu=False, ship_code=False, least=1, restarts=0, possible=bool,
                        progress=lambda: 0)


def test_of_what_a_rank_says_for_ten_days_the_end_is_kept(capsys):
    said = launcher.Both(launcher.sys.stderr)
    for i in range(1000):
        print(f"warning {i}", file=said)
    assert len(said.end) == 4000 and said.end.endswith("warning 999\n")
    assert capsys.readouterr().err.count("warning") == 1000


@pytest.mark.parametrize(("drained", "said"), [({"b"}, "a node is about to go"), ({"x"}, ""), (set(), "")])
def test_ranks_leave_a_node_that_is_drained_with_a_checkpoint(monkeypatch, capsys, drained, said):
    asked = []
    member = SimpleNamespace(stop=SimpleNamespace(remote=lambda: asked.append(1)))
    monkeypatch.setattr(launcher, "draining", lambda: drained)
    monkeypatch.setattr(launcher.ray, "wait", lambda refs, num_returns=1, timeout=None: (refs[:1], refs[1:]))
    monkeypatch.setattr(launcher.ray, "get", lambda result: (130 if asked else 0, ""))
    if said:
        with pytest.raises(launcher.Pause):
            launcher.finish([member], [1, 2], [], {"a", "b"})
    else:
        assert launcher.finish([member], [1, 2], [], {"a", "b"}) == 0
    assert said in capsys.readouterr().err and bool(asked) == bool(said)


@pytest.fixture
def cluster(monkeypatch):
    """A fake cluster for `room`. A test sets how many GPUs it has and how many of them are free, at each time. Time is
    virtual."""
    clock, gpus = VirtualClock(), SimpleNamespace()

    class Group:
        def __init__(self, bundles):
            self.size = len(bundles)

        def wait(self, seconds):
            clock.sleep(seconds)
            return self.size <= gpus.free(clock.time)

    monkeypatch.setattr(launcher, "placement_group", lambda bundles, strategy: Group(bundles))
    monkeypatch.setattr(launcher, "remove_placement_group", lambda _group: None)
    monkeypatch.setattr(launcher.ray, "cluster_resources", lambda: {"CPU": 999, "GPU": gpus.total(clock.time)})
    monkeypatch.setattr(launcher.ray, "available_resources", lambda: {"CPU": 999, "GPU": gpus.free(clock.time)})

    def room(size, least, total, free, possible=lambda _n: True):
        clock.time, gpus.total, gpus.free = 0.0, total, free
        group, found = launcher.room({"CPU": 1, "GPU": 1}, size, least, possible, clock)
        assert group.size == found
        return found, clock.time

    return room


def test_fewer_ranks_at_once_when_nodes_are_gone_and_after_a_minute_when_others_use_them(cluster):
    assert cluster(16, 8, lambda _t: 16, lambda _t: 16) == (16, 2)
    found, after = cluster(16, 8, lambda _t: 12, lambda _t: 12)
    assert found == 12 and after < 20
    found, after = cluster(16, 8, lambda _t: 16, lambda _t: 12)
    assert found == 12 and launcher.PATIENCE_S < after < launcher.PATIENCE_S + 20
    assert cluster(16, 8, lambda _t: 16, lambda t: 12 if t < 30 else 16)[0] == 16         # they came in time


def test_ranks_whose_node_has_vanished_before_they_began_are_not_waited_for(monkeypatch):
    """Their places wait for another node: it may never come, while there is room for fewer."""
    def get(_refs, timeout=None):
        assert timeout, "for ever"
        raise launcher.ray.exceptions.GetTimeoutError

    removed, actor = [], mock.MagicMock()
    monkeypatch.setattr(launcher, "room", lambda *_: ("group", 2))
    monkeypatch.setattr(launcher, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(launcher, "remove_placement_group", removed.append)
    monkeypatch.setattr(launcher.ray, "remote", lambda _rank: actor)
    monkeypatch.setattr(launcher.ray, "get", get)
    with pytest.raises(launcher.RankLost, match="could not start: GetTimeoutError"):
        launcher.attempt(["run"], 2, 1, False, bool)
    assert removed == ["group"]


def test_a_number_of_ranks_the_model_cannot_be_divided_over_is_not_taken(cluster):
    assert cluster(32, 8, lambda _t: 31, lambda _t: 31, lambda n: n % 8 == 0)[0] == 24
    with pytest.raises(ConfigError, match="no room for 8 ranks after 600 s"):
        cluster(32, 8, lambda _t: 7, lambda _t: 7)
    with pytest.raises(ConfigError, match="no room for 4 ranks"):                          # all or none
        cluster(4, 4, lambda _t: 3, lambda _t: 3)


@pytest.mark.parametrize(("results", "interrupted", "outcome"), [
    ([0, 0], False, 0), ([0, 2], False, 2), ([130, 130], True, 130), ([1, 130], True, 1),
    (["dies"], False, launcher.RankLost), (["dies"], True, KeyboardInterrupt)])
def test_a_death_begins_again_unless_somebody_asked_for_the_end(monkeypatch, capsys, results, interrupted, outcome):
    asked = []
    member = SimpleNamespace(stop=SimpleNamespace(remote=lambda: asked.append(1)))
    waits = itertools.count()

    def wait(refs, num_returns=1, timeout=None):
        if next(waits) == 0 and interrupted:
            raise KeyboardInterrupt
        return refs[:1], refs[1:]

    def get(result):
        if result == "dies":
            raise launcher.ray.exceptions.WorkerCrashedError
        return result, "error: the disk is full"

    monkeypatch.setattr(launcher.ray, "wait", wait)
    monkeypatch.setattr(launcher.ray, "get", get)
    if isinstance(outcome, int):
        assert launcher.finish([member], list(results), []) == outcome
    else:
        with pytest.raises(outcome):
            launcher.finish([member], list(results), [])
    assert bool(asked) == interrupted
    # the last checkpoint of a training that was to stop may be what failed
    assert ("the disk is full" in capsys.readouterr().err) == (outcome in (1, 2))


def test_ranks_that_were_left_out_come_back_when_there_is_room(monkeypatch, capsys):
    """All stop with a checkpoint once every group that was missing is placed, not before."""
    asked, waits = [], itertools.count()
    member = SimpleNamespace(stop=SimpleNamespace(remote=lambda: asked.append(1)))
    rooms = [SimpleNamespace(wait=lambda _s: True), SimpleNamespace(wait=lambda _s: next(waits) >= 3)]
    monkeypatch.setattr(launcher, "draining", set)
    monkeypatch.setattr(launcher.ray, "wait", lambda refs, num_returns=1, timeout=None: (
        (refs[:1], refs[1:]) if asked else ([], refs)))
    monkeypatch.setattr(launcher.ray, "get", lambda _result: (130, ""))
    with pytest.raises(launcher.Pause):
        launcher.finish([member], [1, 2], rooms)
    assert next(waits) == 4 and asked
    assert "there is room for all ranks again: stopping after this step" in capsys.readouterr().err


def test_the_second_ctrl_c_does_not_wait_for_a_checkpoint(monkeypatch, capsys):
    asked = []
    member = SimpleNamespace(stop=SimpleNamespace(remote=lambda: asked.append(1)))

    def wait(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher.ray, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        launcher.finish([member], [1], [])
    assert capsys.readouterr().err.count("stopping after this step") == 1
