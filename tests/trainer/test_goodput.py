"""Every second of wall time has exactly one cause, and the causes sum to the wall time, also over restarts, kills and
rewinds."""

from __future__ import annotations

import pytest

from trainer.observe import goodput as module
from trainer.observe.goodput import CAUSES, Goodput, clock


class Clock:
    """Stands in for both clocks that the module reads. The test moves it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now - 999_000.0


@pytest.fixture
def hand(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class Trainer:
    """A training process: its count of the wall time, and the lines of metrics that it writes."""

    def __init__(self, hand: Clock, lines: list, peak: float | None = 100.0) -> None:
        self.hand, self.lines, self.watch = hand, lines, Goodput(peak)

    def line(self, event: str, step: int, record: bool = True) -> None:
        found = {"goodput": self.watch.record()} if record else {}
        self.lines.append({"event": event, "step": step, "time": self.hand.now, **found})

    def steps(self, first: int, stop: int, seconds: float = 2.0) -> None:
        self.watch.enter("training")
        for step in range(first, stop):
            self.hand.now += seconds
            self.watch.flops += 50.0
            self.line("step", step)


def nonzero(watch: Goodput) -> dict[str, float]:
    watch.enter(watch.cause)
    return {cause: s for cause, s in watch.seconds.items() if s}


def test_a_watch_that_always_runs_for_one_cause(hand):
    one = Trainer(hand, [])
    hand.now += 5                                                    # set-up
    one.watch.enter("warmup")
    hand.now += 10
    one.watch.enter("training")
    hand.now += 20
    with one.watch.of("evaluation"):
        hand.now += 3
        with one.watch.of("checkpoint"):
            hand.now += 4
        hand.now += 1
    hand.now += 2
    one.watch.move(1.5, "training", "data")
    assert nonzero(one.watch) == {"setup": 5, "warmup": 10, "training": 20.5, "data": 1.5, "evaluation": 4,
                                  "checkpoint": 4}
    assert one.watch.wall == 45
    one.watch.move(1e9, "data", "lost")                              # never more than there is
    assert nonzero(one.watch)["lost"] == 1.5 and one.watch.wall == 45
    assert one.watch.describe().startswith("0:45 of wall time: training 45.6%, compile and warm-up 22.2%")


def test_an_error_in_a_block_does_not_leave_the_watch_there(hand):
    watch = Goodput()
    with pytest.raises(RuntimeError), watch.of("evaluation"):
        raise RuntimeError
    assert watch.cause == "setup"


def test_a_killed_process_loses_what_was_after_its_checkpoint(hand):
    lines: list = []
    one = Trainer(hand, lines)
    one.line("start", 0)
    one.steps(1, 11)                                                 # 20 s
    with one.watch.of("checkpoint"):
        hand.now += 4
    one.line("checkpoint", 10)
    one.steps(11, 16)                                                # 10 s that will be done again
    hand.now += 1
    one.line("step", 16, record=False)                               # written between two records, then killed
    hand.now += 100
    two = Trainer(hand, lines)
    two.watch.resume(lines, 10)
    two.line("resume", 10)
    assert nonzero(two.watch) == {"training": 20, "checkpoint": 4, "lost": 11, "restart": 100}
    assert two.watch.flops == 10 * 50
    two.steps(11, 13)
    wall = hand.now - 1_000_000
    assert two.watch.wall == pytest.approx(wall) == pytest.approx(139)
    assert two.watch.mfu() == pytest.approx(12 * 50 / (100 * wall))
    # killed again before another checkpoint: the same steps are lost once more
    hand.now += 50
    three = Trainer(hand, lines)
    three.watch.resume(lines, 10)
    assert nonzero(three.watch) == {"training": 20, "checkpoint": 4, "lost": 15, "restart": 150}
    assert three.watch.wall == pytest.approx(hand.now - 1_000_000)
    assert three.watch.flops == 10 * 50


def test_an_orderly_stop_loses_nothing(hand):
    lines: list = []
    one = Trainer(hand, lines)
    one.line("start", 0)
    one.steps(1, 6)
    one.line("checkpoint", 5)
    hand.now += 30
    two = Trainer(hand, lines)
    two.watch.resume(lines, 5)
    assert nonzero(two.watch) == {"training": 10, "restart": 30}


def test_what_a_checkpoint_took_after_its_record_is_not_forgotten(hand):
    """The trainer's order: the record, then the writing, then the line; and something printed after it."""
    lines: list = []
    one = Trainer(hand, lines)
    one.line("start", 0)
    one.steps(1, 6)
    record = one.watch.record()
    with one.watch.of("checkpoint"):
        hand.now += 3
    lines.append({"event": "checkpoint", "step": 5, "time": hand.now, "seconds": 3.0, "goodput": record})
    hand.now += 1
    one.line("alert", 5, record=False)
    hand.now += 30
    two = Trainer(hand, lines)
    two.watch.resume(lines, 5)
    assert nonzero(two.watch) == {"training": 10, "checkpoint": 3, "lost": 1, "restart": 30}
    assert two.watch.wall == pytest.approx(hand.now - 1_000_000)


def test_a_line_that_comes_late_does_not_hide_a_later_record(hand):
    lines: list = []
    one = Trainer(hand, lines)
    one.line("start", 0)
    one.steps(1, 6)
    record = one.watch.record()                                      # written in the background
    one.steps(6, 8)
    lines.append({"event": "checkpoint", "step": 5, "time": hand.now, "seconds": 0.0, "goodput": record})
    hand.now += 30
    two = Trainer(hand, lines)
    two.watch.resume(lines, 5)
    assert nonzero(two.watch) == {"training": 10, "lost": 4, "restart": 30}


def test_a_rewind_within_a_process(hand):
    lines: list = []
    one = Trainer(hand, lines)
    one.line("start", 0)
    one.steps(1, 11)
    one.watch.rewind(lines, 4)                                       # steps 5 to 10 are void
    one.line("resume", 4)
    assert nonzero(one.watch) == {"training": 8, "lost": 12}
    assert one.watch.flops == 200
    one.steps(5, 7)
    one.watch.rewind(lines, 5)                                       # and again: only the one after step 5
    assert nonzero(one.watch) == {"training": 10, "lost": 14}


def test_a_training_without_lines_begins_at_nothing(hand):
    watch = Goodput()
    watch.resume([], 0)
    watch.resume([{"event": "start", "step": 0, "time": 1.0}], 0)
    assert watch.wall == 0 and watch.mfu() is None and watch.share == 0
    assert set(watch.summary()["seconds"]) == set(CAUSES)


def test_clock():
    assert [clock(s) for s in (93, 7260, 200_000)] == ["1:33", "2:01:00", "2d 7:33:20"]
