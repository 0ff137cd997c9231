"""The ledger (the file in which a training notes its rewinds and skipped steps). Its lines alone decide which steps are
skipped, whatever was killed and whatever the recipe says now."""

from __future__ import annotations

import json

import pytest

from trainer.base.config import ConfigError
from trainer.checkpoint.checkpoints import CheckpointError
from trainer.checkpoint.ledger import Ledger, clipped


def passed(ledger: Ledger, last: int = 60) -> list[int]:
    return [step for step in range(1, last + 1) if ledger.why(step)]


@pytest.fixture
def ledger(tmp_path, alone):
    return Ledger.open(tmp_path, alone)


def again(ledger: Ledger) -> Ledger:
    return Ledger.read(ledger.path.parent)


def test_manual_ranges_hold_from_where_they_were_given(ledger):
    ledger.declare([(10, 13), (40, 42)], 0)
    assert passed(ledger) == passed(again(ledger)) == [10, 11, 12, 40, 41]
    ledger.declare([(10, 13), (40, 42)], 20)                              # the same again: no line
    ledger.declare([(40, 42)], 20)                                        # the past need not be repeated
    assert len(again(ledger).lines) == 1
    ledger.declare([(10, 13), (30, 32)], 20)                              # 40 to 41 are taken back, 30 to 31 added
    assert passed(again(ledger)) == [10, 11, 12, 30, 31]
    ledger.declare([], 30)                                                # in the middle of one: its rest is taken back
    assert passed(again(ledger)) == [10, 11, 12, 30]
    assert ledger.why(30) == "train.skip"
    assert [line["v"] for line in again(ledger).lines] == [1, 1, 1]


def test_steps_that_have_been_performed_cannot_be_skipped(ledger):
    ledger.declare([(10, 13)], 0)
    with pytest.raises(ConfigError, match=r"train\.skip: \[12, 15\]: step 13 has been performed.*from 21 on"):
        ledger.declare([(12, 15)], 20)
    assert len(again(ledger).lines) == 1


def test_a_rewind_says_why_and_makes_what_came_after_unsound(ledger):
    ledger.declare([(5, 6)], 0)
    ledger.rewind(37, (28, 36), 20, "step_00000020", "3 updates skipped within 9")
    assert passed(again(ledger)) == [5, *range(28, 36)]
    assert ledger.why(28) == "3 updates skipped within 9: went back from step 37 to 20"
    line = json.loads(ledger.path.read_text().splitlines()[-1])
    assert {k: line[k] for k in ("event", "step", "steps", "back", "checkpoint")} == {
        "event": "rewind", "step": 37, "steps": [28, 36], "back": 20, "checkpoint": "step_00000020"}
    for step, known, sound in ((20, 1, True), (24, 1, False), (36, 1, False), (24, 2, True), (60, 2, True),
                               (10, 0, True), (24, 0, False)):
        assert again(ledger).sound({"step": step, "ledger": known}) == sound, (step, known)
    with pytest.raises(CheckpointError, match=r"ledger\.jsonl: has 2 lines.*knows of 3; restore"):
        ledger.sound({"step": 1, "ledger": 3})


def test_what_a_kill_left_of_a_line_is_cut_off_and_nothing_else(ledger, alone, tmp_path):
    ledger.declare([(10, 13)], 0)
    whole = ledger.path.read_bytes()
    for torn in (whole[:-1], whole + whole[:-1], whole + b"{"):
        ledger.path.write_bytes(torn)
        kept = Ledger.open(tmp_path, alone)
        assert len(kept.lines) == torn.count(b"\n") == len(again(kept).lines)
        kept.rewind(9, (7, 9), 0, "start", "x")
        assert [line["event"] for line in again(kept).lines] == ["manual"] * torn.count(b"\n") + ["rewind"]
    for damaged in (b"{\n" + whole, whole.replace(b'"v": 1', b'"v": 2'), whole.replace(b"manual", b"m")):
        ledger.path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"ledger\.jsonl: line 1 is not one this trainer writes"):
            Ledger.open(tmp_path, alone)


def test_only_the_first_rank_writes(tmp_path, alone):
    other = Ledger(tmp_path)
    other.rewind(9, (7, 9), 0, "start", "x")
    assert other.why(8)
    assert not other.path.exists()


def test_clipped():
    assert list(clipped([(1, 5), (7, 9), (20, 30)], 3, 25)) == [(3, 5), (7, 9), (20, 25)]
    assert list(clipped([(1, 5)], 5, None)) == []
