"""Crash triage: which documents are quarantined and which are not. It is a pure function, so every case can be
tested."""

from __future__ import annotations

import errno
import signal
from dataclasses import replace

import pytest

from pipeline.engine.messages import Failure
from pipeline.engine.task import CrashCursor
from pipeline.engine.worker.crash_triage import (
    CPU_LIMIT,
    ENDLESS,
    MEMORY,
    PRESSURE,
    STALLED,
    CrashTriage,
    GaveUp,
    classify,
    damaged_path,
    failure,
    hinders,
)
from pipeline.store.errors import DamagedFile, EnvironmentFailure, StoreError
from pipeline.store.records import READING
from stages.stage import SettingsError

SEGV = classify(-signal.SIGSEGV)
OUTSIDE = classify(-signal.SIGKILL)


def test_exit_statuses():
    assert [(f.reason, f.charged) for f in map(classify, (-11, -6, 3, 0, 137, -signal.SIGXCPU))] == [
        ("crash:SIGSEGV", True), ("crash:SIGABRT", True), ("crash:exit3", True), ("crash:exit0", True),
        ("memory", True), ("cpu_limit", True)]
    assert [(f.reason, f.charged) for f in map(classify, (-9, -15, -2, -signal.SIGBUS))] == [
        ("killed:SIGKILL", False), ("killed:SIGTERM", False), ("killed:SIGINT", False), ("killed:SIGBUS", False)]


def test_a_single_row_is_probed_alone_and_then_quarantined():
    q = CrashTriage()
    assert q.died(SEGV, (7, 7, 2)) is None
    assert (q.mode, q.rows, q.fresh, q.skip) == ("probe", (7, 7), True, {})
    assert q.died(SEGV, (7, 7, 2)) == (7, 2, "crash:SIGSEGV")
    assert (q.mode, q.rows, q.skip) == ("run", None, {7: (2, "crash:SIGSEGV")})
    assert q.passed()


def test_a_batch_is_replayed_then_the_suspect_probed_then_the_rest_replayed():
    q = CrashTriage()
    q.died(CPU_LIMIT, (8, 15, 1))
    assert (q.mode, q.rows) == ("replay", (8, 15))
    q.died(CPU_LIMIT, (11, 11, 1))
    assert (q.mode, q.rows) == ("probe", (11, 11))
    assert q.died(CPU_LIMIT, (11, 11, 3)) == (11, 3, "cpu_limit")
    assert (q.mode, q.rows) == ("replay", (8, 15))
    q.died(SEGV, (12, 12, 1))
    assert q.died(SEGV, (12, 12, 1)) == (12, 1, "crash:SIGSEGV")
    assert not q.passed()
    assert (q.mode, q.unproven, q.batch_rows) == ("run", 0, None)
    assert q.passed()


def test_a_probe_that_passes_quarantines_no_document():
    q = CrashTriage()
    q.died(MEMORY, (4, 4, 0))
    assert not q.passed()
    assert (q.mode, q.skip, q.unproven) == ("run", {}, 1)
    for _ in range(2):
        q.died(MEMORY, (4, 4, 0))
        q.passed()
    q.died(MEMORY, (4, 4, 0))
    with pytest.raises(GaveUp, match="that document alone is well") as e:
        q.passed()
    assert e.value.kind == "exception"
    assert q.skip == {}


def test_a_batch_that_dies_only_together_goes_on_one_by_one():
    q = CrashTriage()
    q.died(SEGV, (0, 7, 0))
    assert not q.passed()
    assert (q.mode, q.batch_rows, q.skip) == ("run", 1, {})


def test_standing_still_quarantines_no_document_and_is_repeated_once():
    q = CrashTriage()
    assert q.died(STALLED, (3, 3, 0)) is None
    assert (q.mode, q.skip) == ("run", {})
    with pytest.raises(GaveUp, match="stood still 2 times, at row 3, stage 0"):
        q.died(STALLED, (3, 3, 0))
    assert q.skip == {}


@pytest.mark.parametrize("fault", [OUTSIDE, PRESSURE])
@pytest.mark.parametrize("mode", ["run", "probe"])
def test_the_environment_is_never_charged_to_a_document(fault, mode):
    q = CrashTriage()
    if mode == "probe":
        q.died(SEGV, (3, 3, 0))
    for _ in range(3):
        assert q.died(fault, (3, 3, 0)) is None
        assert q.mode == mode
    with pytest.raises(GaveUp) as e:
        q.died(fault, (3, 3, 0))
    assert (e.value.kind, q.skip) == ("environment", {})


def test_a_crash_in_set_up_is_never_charged_to_a_document():
    q = CrashTriage()
    for _ in range(3):
        assert q.died(SEGV, (-1, -1, -1)) is None
    with pytest.raises(GaveUp, match="outside any document") as e:
        q.died(SEGV, (-1, -1, -1))
    assert (e.value.kind, q.skip) == ("exception", {})


def test_memory_that_no_document_took_says_what_would_help():
    q = CrashTriage()
    for _ in range(3):
        assert q.died(MEMORY, (-1, -1, -1)) is None
    with pytest.raises(GaveUp, match="smaller files"):
        q.died(MEMORY, (-1, -1, -1))


def test_a_task_that_does_not_skip_or_single_out_is_told_so():
    q = CrashTriage({5: (0, "memory")})
    with pytest.raises(GaveUp, match=r"honour inputs\.skip"):
        q.died(SEGV, (5, 5, 0))
    q = CrashTriage()
    q.died(SEGV, (5, 5, 0))
    with pytest.raises(GaveUp, match=r"honour inputs\.only"):
        q.died(SEGV, (6, 6, 0))


def test_quarantines_are_bounded():
    q = CrashTriage(max_quarantined=2)
    for row in (0, 1):
        q.died(SEGV, (row, row, 0))
        q.died(SEGV, (row, row, 0))
    q.died(SEGV, (2, 2, 0))
    with pytest.raises(GaveUp, match="bad code, not bad data"):
        q.died(SEGV, (2, 2, 0))


def test_what_happens_while_a_record_is_read_is_not_its_documents_fault():
    q = CrashTriage()
    for _ in range(3):
        assert q.died(SEGV, (6, 6, -1)) is None
    with pytest.raises(GaveUp, match="while reading record 6") as e:
        q.died(SEGV, (6, 6, -1))
    assert (e.value.kind, q.skip, q.mode) == ("exception", {}, "run")


def test_a_file_that_kills_its_reader_alone_is_not_read_on():
    q = CrashTriage()
    assert q.died(SEGV, (6, 6, READING - 2)) is None             # file 2 of the partition
    assert (q.mode, q.file, q.fresh) == ("read", 2, True)
    assert q.died(SEGV, (4, 4, READING - 2)) == (6, READING - 2, "crash:SIGSEGV")      # alone it counts from elsewhere
    assert (q.mode, q.file, q.skip) == ("run", None, {6: (READING - 2, "crash:SIGSEGV")})
    assert q.passed()


def test_a_file_costs_two_deaths_for_each_of_three_records_at_most():
    q = CrashTriage()
    for row in (9, 5, 3):
        assert q.died(MEMORY, (row, row, READING)) is None
        assert q.died(MEMORY, (row, row, READING)) == (row, READING, "memory")
        assert q.skip == {row: (READING, "memory")}, "rows behind it are others from here on"
    for row in (4, 6):
        assert q.died(MEMORY, (row, row, READING)) is None
        assert q.died(MEMORY, (row, row, READING)) == (row, READING, "memory")
    with pytest.raises(GaveUp, match=r"told to pass over .*while reading record 7.*honour inputs.skip"):
        q.died(MEMORY, (7, 7, READING))


def test_a_file_that_can_be_read_alone_is_released():
    q = CrashTriage(max_unproven=1)
    q.died(SEGV, (6, 6, READING))
    assert not q.passed()
    assert (q.mode, q.file, q.batch_rows, q.skip) == ("run", None, 1, {})
    q.died(SEGV, (6, 6, READING))
    with pytest.raises(GaveUp, match="record 6, but that file alone can be read, 2 times"):
        q.passed()


def test_what_kills_while_a_file_is_read_from_outside_or_for_no_reason_costs_no_file():
    for fault in (classify(-9), PRESSURE, STALLED):
        q = CrashTriage()
        assert q.died(fault, (6, 6, READING)) is None
        assert (q.mode, q.skip) == ("run", {})


@pytest.mark.parametrize(("cursor", "place"), [((-1, -1, -1), "outside any document"),
                                               ((12, 12, -1), "while reading record 12")])
def test_what_never_ends_outside_documents_is_the_tasks_own_doing(cursor, place):
    with pytest.raises(GaveUp, match=place) as e:
        CrashTriage().died(ENDLESS, cursor)
    assert e.value.kind == "exception"


def test_the_environment_is_given_time_and_then_another_node():
    q = CrashTriage()
    assert [q.hindered("the disk is full") for _ in range(3)] == [1.0, 2.0, 4.0]
    with pytest.raises(GaveUp, match="the disk is full") as e:
        q.hindered("the disk is full")
    assert (e.value.kind, q.skip) == ("environment", {})


@pytest.mark.parametrize(("error", "verdict"), [
    (EnvironmentFailure("x"), True), (OSError(errno.ENOSPC, "full"), True), (OSError(errno.EIO, "broken"), True),
    (OSError(errno.ESTALE, "NFS"), True), (OSError(errno.ENOTCONN, "FUSE"), True), (TimeoutError(110, "NFS"), True),
    (StoreError("x"), False), (OSError("a decoder's own"), False), (FileNotFoundError(errno.ENOENT, "x"), False),
    (ValueError("x"), False)])
def test_errors_that_are_the_machines(error, verdict):
    assert hinders(error) is verdict


def test_a_cursor_read_while_its_writer_is_preempted_has_rows():
    """The first of three stores is done: 6309, but the last row is still that of before."""
    cursor = CrashCursor()
    cursor.set(6309, 6308, 0)
    assert cursor.read() == (6309, 6309, 0)
    assert CrashTriage().died(CPU_LIMIT, cursor.read()) is None, "a suspect to be probed, not a row to be skipped"


@pytest.mark.parametrize(("error", "told"), [
    (SettingsError("a: no column 'text'"), Failure("permanent", "a: no column 'text'")),
    (EnvironmentFailure("the disk is full"), Failure("environment", "the disk is full")),
    (KeyError("x"), Failure("exception", "KeyError: 'x'", row=7)),
    (OSError("reset"), Failure("exception", "OSError: reset"))])
def test_what_an_attempt_that_raised_tells(error, told):
    assert replace(failure(error, 7), traceback="") == told


def test_errors_that_are_each_others_context_name_no_file():
    """As generators make them that raise an error again: following the chain must come to an end."""
    a, b = ValueError("a"), ValueError("b")
    a.__context__, b.__context__ = b, a
    assert damaged_path(a) == ""
    b.__cause__ = DamagedFile("objects/k/1.kept.parquet", "is gone")
    assert damaged_path(a) == "objects/k/1.kept.parquet"
