"""The parts on which supervisor and child depend: measurements, protocol, scratch folders and fingerprints."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.base import process
from pipeline.base.scratch import Scratch, user_folder
from pipeline.engine.backends.fingerprint import (
    Fingerprint,
    code_hash,
    declared_libraries,
    differences,
    fingerprint,
)
from pipeline.engine.messages import (
    ANSWERS,
    ASSIGNMENTS,
    EVENTS,
    MAX_BYTES,
    ORDERS,
    Assignment,
    Done,
    Failed,
    Failure,
    Finished,
    Hanging,
    Hindered,
    Lost,
    NeedsFreshProcess,
    ProtocolError,
    Quarantined,
    Raised,
    Ready,
    Returned,
    StatusReport,
    TaskStatus,
    Work,
    pack,
)
from pipeline.engine.task import Skip, TaskSpec
from pipeline.engine.worker import limits
from pipeline.engine.worker.crash_triage import CrashTriage
from pipeline.engine.worker.job import Job
from pipeline.engine.worker.process import _environment
from pipeline.store.records import FileInfo, PartRecord

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def test_messages_come_whole_whatever_the_pipe_does():
    sent = [Raised(Failure("exception", "ü" * i, row=i)) for i in range(5)]
    wire = b"".join(map(pack, sent))
    for step in (1, 3, 7, len(wire)):
        buffer, found = bytearray(), []
        for i in range(0, len(wire), step):
            buffer += wire[i:i + step]
            while (message := ANSWERS.unpack(buffer)) is not None:
                found.append(message)
        assert found == sent
        assert not buffer


def test_a_length_beyond_reason_is_refused():
    with pytest.raises(ProtocolError, match="not the engine's protocol"):
        ANSWERS.unpack(bytearray(struct.pack(">I", MAX_BYTES + 1)))


@pytest.mark.parametrize("body", [b"{{{", b"[]", b"3", b"{}", b'{"type":"Done"}',
                                  b'{"type":"Done","id":1,"record":{}}',
                                  b'{"type":"Raised"}', b'{"type":"Raised","failure":7}',
                                  b'{"type":"Finished","more":1}'])
def test_anything_but_an_expected_message_is_refused(body):
    """A child that was taken over must not speak as a backend does, nor make its supervisor fail."""
    with pytest.raises(ProtocolError):
        ANSWERS.unpack(bytearray(struct.pack(">I", len(body)) + body))


def test_every_message_survives_the_border():
    spec = TaskSpec("k", "m:T", "n", {"a": [1, {"b": None}]}, weight=3, gpus=0.5, roots=("s3://b", "gs://c"))
    record = PartRecord("k", "t", "n", "1-1", {"a": FileInfo("objects/k/1-1.a", 3, "ab", "cd", 1, {"x": 1})}, {"n": 2})
    skip, status = (Skip(3, -2, "memory"), Skip(7, 0, "cpu_limit")), TaskStatus(1, 5, 2, 1.5, 0.5, "n1", 77, "waiting")
    sent = [
        (ASSIGNMENTS, Assignment(1, spec, "1-1", skip)), (EVENTS, Ready(fingerprint([]), {"landlock": 3}, True)),
        (EVENTS, Done(1, record)), (EVENTS, Failed(1, Failure("damaged", "gone", path="objects/x", traceback="T"))),
        (EVENTS, Hindered(1, "full")), (EVENTS, Lost((1, 2), "died")), (EVENTS, Returned((3,), "drained")),
        (EVENTS, Hanging(status)), (EVENTS, Quarantined(1, 7, 0, "cpu_limit")), (EVENTS, StatusReport((status,))),
        (ORDERS, Work(spec, "1-1", "/store", "/scratch", skip, (3, 4), None, 1)),
        (ORDERS, Work(spec, "1-1", "/s", "/t")),
        (ANSWERS, Finished(record)), (ANSWERS, Raised(Failure("exception", "no", row=3))),
        (ANSWERS, NeedsFreshProcess())]
    for channel, message in sent:
        assert channel.unpack(bytearray(pack(message))) == message


@pytest.mark.parametrize("doc", [
    {"type": "Raised", "failure": {"kind": "damaged", "message": 5}},
    {"type": "Raised", "failure": {"kind": "damaged", "message": "m", "path": ["x"]}},
    {"type": "Raised", "failure": {"kind": "innocent", "message": "m"}},
    {"type": "Finished", "record": {"key": 1, "task": "t", "node": "n", "attempt": "a", "files": {}, "counters": {}}},
    {"type": "Finished", "record": {"key": "k", "task": "t", "node": "n", "attempt": "a", "counters": {}, "files": {
        "x": {"path": 5, "bytes": 1, "sha256": "", "content": ""}}}},
    {"type": "Lost", "ids": [1], "message": "a supervisor's word"}])
def test_an_answer_with_a_field_of_another_type_is_refused(doc):
    with pytest.raises(ProtocolError):
        ANSWERS.decode(doc)


def test_nesting_without_end_is_refused_and_so_is_an_order_that_is_too_long():
    body = b"[" * 200_000
    with pytest.raises(ProtocolError):
        ANSWERS.unpack(bytearray(struct.pack(">I", len(body)) + body))
    with pytest.raises(ProtocolError, match="a Work of 6"):
        pack(Work(TaskSpec("k", "m:T", "n", {"a": "x" * MAX_BYTES}), "1-1", "/s", "/t"))


@pytest.mark.parametrize(("answer", "allowed"), [
    (Raised(Failure("damaged", "m", path="objects/lists/0123.json")), True),
    (Raised(Failure("exception", "m")), True), (NeedsFreshProcess(), True),
    (Raised(Failure("damaged", "m", path="objects/lists/../../log/00000001.json")), False),
    (Raised(Failure("damaged", "m", path="/etc/passwd")), False),
    (Finished(PartRecord("k", "t", "n", "1-1-ab", {"a": FileInfo("objects/k/1-1-ab.a", 3, "", "")}, {})), True),
    (Finished(PartRecord("other", "t", "n", "1-1-ab", {}, {})), False),
    (Finished(PartRecord("k", "t", "other", "1-1-ab", {}, {})), False),
    (Finished(PartRecord("k", "t", "n", "1-2-ab", {}, {})), False),
    (Finished(PartRecord("k", "t", "n", "1-1-ab", {}, {}, replay_key="another pass")), False),
    (Finished(PartRecord("k", "t", "n", "1-1-ab", {"a": FileInfo("objects/k/1-1-ab/../x", 3, "", "")}, {})), False),
    (Finished(PartRecord("k", "t", "n", "1-1-ab", {"a": FileInfo("objects/j/1-1-ab.a", 3, "", "")}, {})), False)])
def test_a_child_speaks_of_its_task_alone(answer, allowed):
    assert Job(Assignment(1, TaskSpec("k", "m:T", "n", {}), "1-1"), CrashTriage()).allows(answer) is allowed


def test_a_node_of_another_version_is_named_for_its_code():
    ours = fingerprint([])
    theirs = Fingerprint.from_json({"node": "old", "code": "1", "python": ours.python, "a field of then": 1})
    assert differences(ours, theirs) == ["other code (there: )"]


@linux
def test_cpu_time_and_memory_of_a_process_are_seen():
    code = ("import time\nx = bytearray(b'x' * (50 << 20))\nwhile time.process_time() < 0.2: pass\n"
            "print('ok', flush=True)\ninput()")
    p = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        p.stdout.readline()
        assert limits.cpu_seconds(p.pid) >= 0.15
        assert 50 < limits.anonymous_mb(p.pid) < 120
        assert process.data_bytes(p.pid) > 50 << 20
    finally:
        p.kill()
        p.communicate()
    with pytest.raises(OSError):
        limits.cpu_seconds(p.pid)


def test_a_batch_may_take_what_its_documents_may_but_not_hours():
    ours = limits.ProcessLimits()
    assert [ours.batch_cpu_s(n) for n in (1, 2, 16, 17, 64, 256)] == [60, 120, 960, 960, 960, 1920]
    assert all(ours.batch_cpu_s(n) >= n * ours.cpu_s / 10 for n in range(1, 5000)), "ten times what they usually take"


@linux
def test_the_data_limit_bites_and_is_lifted_again():
    code = ("from pipeline.base import process as limits\n"
            "limits.limit_data(limits.data_bytes() + (50 << 20))\n"
            "try:\n    bytearray(200 << 20)\nexcept MemoryError:\n    print('refused')\n"
            "limits.limit_data(None)\nbytearray(200 << 20)\nprint('lifted')\n")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["refused", "lifted"]


@linux
def test_memory_use_is_of_the_tightest_group_without_its_cache(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    for folder, total, used in ((inner, "max", 70), (tmp_path / "a", 100, 90), (tmp_path, 1000, 95)):
        (folder / "memory.max").write_text(f"{total}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 50\ninactive_file 30\nactive_file 5\n")
    found = limits._groups(str(tmp_path), "/a/b", "memory.max", "memory.current", "inactive_file")
    assert found == [(60, 100), (65, 1000)]
    used, total = limits.memory_use()
    assert 0 < used < total


@linux
def test_children_get_one_thread_our_path_and_their_own_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    env = _environment({"OMP_NUM_THREADS": "8", "HOME": "/h"}, "/scratch")
    assert (env["OMP_NUM_THREADS"], env["NUMBA_NUM_THREADS"]) == ("1", "1")
    assert (env["TMPDIR"], env["HOME"]) == ("/scratch", "/h")
    paths = env["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(tmp_path)
    assert os.path.dirname(json.__file__.removesuffix("/__init__.py")) not in paths      # never before the stdlib


@linux
def test_scratch_of_the_dead_is_swept_and_of_the_living_is_not(tmp_path):
    living = Scratch(str(tmp_path))
    Path(living.folder(), "x").touch()
    code = "import os, sys; from pipeline.base.scratch import Scratch; Scratch(sys.argv[1]); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    top = user_folder(str(tmp_path))
    assert len(list(top.glob("scratch-*"))) == 2
    other = Scratch(str(tmp_path))
    assert sorted(map(str, top.glob("scratch-*"))) == sorted([living.path, other.path])
    living.close()
    other.close()
    assert list(top.glob("scratch-*")) == []


@linux
def test_old_kernels_are_swept(tmp_path):
    top = user_folder(str(tmp_path))
    for name, days in (("numba-old", 40), ("numba-new", 1)):
        (top / name).mkdir()
        then = time.time() - days * 86400
        os.utime(top / name, (then, then))
    Scratch(str(tmp_path)).close()
    assert [p.name for p in top.glob("numba-*")] == ["numba-new"]


@linux
def test_a_folder_that_others_may_write_is_refused(tmp_path):
    (tmp_path / f"tokenmill-{os.getuid()}").mkdir()
    (tmp_path / f"tokenmill-{os.getuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match="not private"):
        Scratch(str(tmp_path))


def test_fingerprints_tell_code_and_libraries_apart(tmp_path):
    ours = fingerprint(declared_libraries())
    assert differences(ours, ours) == []
    assert ours.libraries["pyarrow"]
    assert differences(ours, replace(ours, roots={"pipeline": "/elsewhere"}, node="n2", cpu="arm-base")) == []
    theirs = replace(ours, code="0", python="3.10.1", libraries={**ours.libraries, "pyarrow": "1.0", "numpy": ""})
    said = "; ".join(differences(ours, theirs))
    for words in ("other code", "Python 3.10.1 instead of", "pyarrow 1.0 instead of", "numpy missing"):
        assert words in said


def test_the_code_hash_sees_contents_and_names_but_not_places(tmp_path):
    for root in ("a", "b"):
        (tmp_path / root / "sub").mkdir(parents=True)
        (tmp_path / root / "sub" / "m.py").write_text("x = 1\n")
    first = code_hash({"stages": str(tmp_path / "a"), "trainer": ""})
    assert first == code_hash({"stages": str(tmp_path / "b"), "trainer": ""})
    (tmp_path / "b" / "sub" / "m.py").write_text("x = 2\n")
    assert first != code_hash({"stages": str(tmp_path / "b"), "trainer": ""})
    (tmp_path / "a" / "sub" / "m.py").rename(tmp_path / "a" / "sub" / "n.py")
    assert first != code_hash({"stages": str(tmp_path / "a"), "trainer": ""})


@pytest.mark.parametrize(("still", "idle", "told", "said"), [
    (19.0, 19.0, 0, False), (20.0, 20.0, 0, True), (75.0, 0.0, 0, False), (120.0, 0.0, 0, True),
    (20.0, 500.0, 0, True), (39.0, 39.0, 1, False), (40.0, 40.0, 1, True), (239.0, 0.0, 1, False),
    (240.0, 0.0, 1, True)])
def test_who_uses_no_cpu_time_is_said_to_hang_sooner_than_who_computes(still, idle, told, said):
    assert limits.ProcessLimits(hanging_s=120.0, idle_s=20.0).hangs(still, idle, told) is said
