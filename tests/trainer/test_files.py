"""Only one process of a machine trains in a folder. A dead process does not block the folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.base.config import ConfigError
from trainer.base.files import alone

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def other(tmp_path):
    """Another process that trains in the folder `out`. The fixture waits until it has marked the folder as in use."""
    script = "import time\nfrom pathlib import Path\nfrom trainer.base.files import alone\n" \
             "with alone(Path('out')):\n    print('in use', flush=True)\n    time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert process.stdout is not None and process.stdout.readline() == "in use\n"
        assert (tmp_path / "out" / "trainer.pid").read_text().startswith(f"{process.pid} ")
        yield process
    finally:
        process.kill()
        process.wait()


@linux
def test_a_second_trainer_of_this_machine_is_refused_and_changes_nothing(tmp_path, other):
    before = (tmp_path / "out" / "trainer.pid").read_text()
    with pytest.raises(ConfigError, match=rf"out: process {other.pid} of this machine trains there.*--out"), \
            alone(tmp_path / "out"):
        pytest.fail("two at once")
    assert (tmp_path / "out" / "trainer.pid").read_text() == before
    with alone(tmp_path / "another"):
        pass


@linux
def test_who_was_killed_keeps_nobody_out(tmp_path, other):
    other.send_signal(signal.SIGKILL)
    other.wait()
    with alone(tmp_path / "out"):
        assert (tmp_path / "out" / "trainer.pid").read_text().startswith(f"{os.getpid()} ")
    assert not (tmp_path / "out" / "trainer.pid").exists()


@linux
def test_who_was_killed_and_has_not_been_waited_for_keeps_nobody_out(tmp_path, other):
    """In a container often nobody waits for whom the killed launcher leaves behind: it stays listed for good."""
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{other.pid}").exists()
    with alone(tmp_path / "out"):
        pass


@linux
def test_a_number_that_another_process_has_got_since_is_nobody(tmp_path, other):
    """After a restart of the machine, or in another container, the numbers are given out anew."""
    held = tmp_path / "out" / "trainer.pid"
    number, began, boot = held.read_text().split()
    for text in (f"{number} {int(began) - 1} {boot}", f"{number} {began} {boot[::-1]}", "", "torn", "\xff"):
        held.write_bytes(text.encode("latin-1"))
        with alone(tmp_path / "out"):
            pass


def test_a_folder_that_cannot_be_written_is_for_others_to_name(tmp_path):
    (tmp_path / "file").touch()
    with alone(tmp_path / "file" / "out"):
        pass
