"""What is printed about tasks that make no progress: node, partition, document and stage, as long as this lasts."""

from __future__ import annotations

import io
import json

import pytest

from pipeline.engine.driver.progress import SHOWN, Progress
from pipeline.engine.driver.protocols import Running
from pipeline.engine.driver.sums import Summing
from pipeline.engine.task import TaskSpec
from pipeline.store.records import PartRecord
from tests.simulate.clock import VirtualClock

SPEC = TaskSpec("k", "m:T", "clean", {"chain": [{"name": "html"}, {"name": "pii"}]}, label="web: a.warc [3/8]")


@pytest.mark.parametrize(("row", "stage", "place", "name"), [
    (12, 1, "document 12 in stage pii", "pii"), (12, 7, "document 12 in stage 7", "7"),
    (12, -1, "while record 12 is read", "read"), (-1, -1, "outside any document", "")])
def test_a_task_that_hangs_is_named_until_it_goes_on(row, stage, place, name):
    out = io.StringIO()
    progress = Progress("json", stream=out)
    progress.planned([SPEC], {})
    at = {"row": row, "stage": stage, "host": "w1", "pid": 77, "does": "stopped"}
    progress.hanging(Running(SPEC, 139.0, still=20.5, **at))
    for still in (21.5, 75.0):                                          # as long as it stands there, with its age
        progress.running(1, [Running(SPEC, 140.0, still=still, **at)])
        assert progress.snapshot()["running"] == [
            {"node": "clean", "label": "web: a.warc [3/8]", "seconds": 140.0, "row": row, "stage": name, "still": still,
             "host": "w1", "pid": 77, "hangs": f"no progress for {still:.0f} s, {place}, process 77 on w1 (stopped); "
                                               f"on its machine, kill -CONT 77 lets it continue, and kill -9 77 makes "
                                               f"its task run again"}]
    [said] = [e for e in map(json.loads, out.getvalue().splitlines()) if e["event"] == "hanging"]
    assert said == {"event": "hanging", "node": "clean", "key": "k", "label": "web: a.warc [3/8]", "row": row,
                    "stage": name, "seconds": 20.5, "host": "w1", "pid": 77, "does": "stopped"}
    progress.running(1, [Running(SPEC, 141.0, row + 1)])
    assert "hangs" not in progress.snapshot()["running"][0]
    progress.running(1, [Running(SPEC, 142.0, row)])
    assert "hangs" not in progress.snapshot()["running"][0]


def test_people_read_it_too_and_a_task_that_ends_hangs_no_more():
    out = io.StringIO()
    progress = Progress("rich", stream=out)
    progress.planned([SPEC], {})
    progress.hanging(Running(SPEC, 130.0, 3, 0, still=121.0))
    assert "clean: web: a.warc [3/8]: no progress for 121 s, document 3 in stage html" in " ".join(
        out.getvalue().split())
    progress.running(1, [Running(SPEC, 131.0, 3, 0, still=122.0)])
    progress._lines()
    assert "clean: 0/1  1 without progress" in out.getvalue()
    progress.done(SPEC, PartRecord("k", "m:T", "clean", "a", {}, {}))
    progress.running(1, [Running(SPEC, 1.0, 3)])
    assert "hangs" not in progress.snapshot()["running"][0]


def test_failures_and_waits_are_told_once_with_node_and_partition():
    """All workers meet the same full disk: one line, and an event for each."""
    for what, line in (("failed", "clean: web: a.warc [3/8]: disk full (environment, trying again)"),
                       ("hindered", "clean: web: a.warc [3/8]: disk full (waiting, then trying again)")):
        out, events = io.StringIO(), io.StringIO()
        for progress in (Progress("rich", stream=out), Progress("json", stream=events)):
            progress.planned([SPEC], {})
            for _ in range(3):
                if what == "failed":
                    progress.failed(SPEC, "environment", "disk full", True)
                else:
                    progress.hindered(SPEC, "disk full")
        assert " ".join(out.getvalue().split()).count(line) == 1
        told = [e for e in map(json.loads, events.getvalue().splitlines()) if e["event"] == what]
        assert len(told) == 3
        assert told[0].items() >= {"node": "clean", "label": SPEC.label, "message": "disk full"}.items()


def test_labels_of_tasks_show_no_secrets_and_no_personal_data():
    """A label names an input file, and so its address. The key of a task is a hash, and stays as it is."""
    spec = TaskSpec("4111111111111111", "m:T", "clean", {},
                    label="s3://KEY:hush/hush@b/jane.roe@mail.org.warc?token=abcd123")
    bare = TaskSpec("4111111111111111", "m:T", "clean", {})
    out, lines, snaps = io.StringIO(), io.StringIO(), []
    for progress in (Progress("rich", snaps.append, stream=out), Progress("json", snaps.append, stream=lines)):
        for task in (spec, bare):
            progress.planned([task], {})
            progress.failed(task, "environment", "disk full", True)
            progress.hindered(task, "no answer")
            progress.doubled(task)
            progress.quarantined(task, 7, "crash")
            progress.hanging(Running(task, 139.0, 3, 0, still=20.5))
            progress.running(1, [Running(task, 140.0, 3, 0, still=21.5)])
            progress.done(task, PartRecord(task.key, "m:T", "clean", "a", {}, {}))
        progress.close("failed")
    shown = out.getvalue() + lines.getvalue() + json.dumps(snaps)
    assert "hush" not in shown and "jane.roe" not in shown and "abcd123" not in shown
    assert shown.count("s3://") == 10 and shown.count(bare.key) > 10


def test_a_long_look_at_what_is_done_already_is_seen_from_outside():
    """A run all of whose tasks are in the log has nothing else to tell."""
    clock, snaps = VirtualClock(), []
    progress = Progress("quiet", snaps.append, clock=clock)
    for i in range(10):
        spec = TaskSpec(f"k{i}", "m:T", "clean", {})
        clock.time += 1.0
        progress.planned([spec], {spec.key: PartRecord(spec.key, "m:T", "clean", "a", {}, {})})
    assert [s["done"] for s in snaps] == [3, 6, 9]


def test_documents_of_reused_tasks_are_counted_apart():
    snaps = []
    progress = Progress("quiet", snaps.append, clock=VirtualClock())
    specs = [TaskSpec(f"k{i}", "m:T", "clean", {}) for i in range(2)]
    progress.planned(specs, {"k0": PartRecord("k0", "m:T", "clean", "a", {}, {"in": {"web": {"docs": 40}}})})
    progress.done(specs[1], PartRecord("k1", "m:T", "clean", "a", {}, {"in": {"web": {"docs": 500}}}))
    progress.close()
    node = snaps[-1]["nodes"]["clean"]
    assert (node["docs_reused"], node["docs"]) == (40, 540)


def test_documents_read_are_those_of_sources_each_counted_once():
    snaps = []
    progress = Progress("quiet", snaps.append, clock=VirtualClock())

    def record(node: str, docs: int, source: str | None) -> PartRecord:
        read = {"read": {source: {"records": docs + 1}}} if source else {}
        return PartRecord(f"{node}-{docs}", "m:T", node, "a", {}, {"in": {source or "web": {"docs": docs}}, **read})

    spec = TaskSpec("clean-500", "m:T", "clean", {})
    progress.planned([spec, TaskSpec("clean-40", "m:T", "clean", {})], {"clean-40": record("clean", 40, "web")})
    progress.done(spec, record("clean", 500, "web"))
    for node, docs, source in (("other", 520, "web"), ("wiki", 7, "wiki"), ("clean:1", 300, None)):
        summing = Summing(node, "pass")
        summing.begin(node)
        summing.add(record(node, docs, source))
        progress.reused(summing.end().batches[0])
    progress.close()
    assert snaps[-1]["docs_read"] == 540 + 7 and snaps[-1]["docs"] == 540 + 520 + 7 + 300


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_for_each_node_with_its_figures(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, clock = Terminal(), VirtualClock()
    progress = Progress("rich", stream=out, clock=clock)
    specs = [TaskSpec(f"k{i}", "m:T", "clean", {}, weight=100) for i in range(4)]
    progress.planned(specs, {"k0": PartRecord("k0", "m:T", "clean", "a", {}, {})})
    clock.sleep(10)
    progress.done(specs[1], PartRecord("k1", "m:T", "clean", "a", {}, {"docs": 500}))
    clock.sleep(10)
    node = progress.nodes["clean"]
    words = progress._words(node)
    assert words.startswith("2/4  1 reused") and " left" in words
    progress.close()
    assert "clean" in out.getvalue() and "2/4  1 reused" in out.getvalue()


def test_a_mode_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="progress mode 'loud': use rich, quiet or json"):
        Progress("loud")


def test_failures_of_many_kinds_are_bounded():
    """A run on a broken cluster for days does not collect messages without end; the latest stay."""
    progress = Progress("quiet")
    progress.planned([SPEC], {})
    for i in range(SHOWN + 5):
        progress.failed(SPEC, "environment", f"disk full: {chr(97 + i // 26)}{chr(97 + i % 26)}", True)
    assert len(progress.failures) == SHOWN
    assert next(reversed(progress.failures.values()))[0] == SPEC.label
