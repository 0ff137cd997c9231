"""`repeat.py FLAKY COMMAND…` runs a command that runs pytest, then each test that failed once more, alone.

Tests that pass only then are appended to the file FLAKY. Exits 0 when every test passed in the end, 1 when one failed
again, 2 when something else than a test failed: the installation, the collection, pytest itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

#: pytest's cache: the tests that failed, and the exit status that tests/conftest.py keeps
FAILED, STATUS = Path(".pytest_cache/v/cache/lastfailed"), Path(".pytest_cache/v/ci/exitstatus")
#: more failures than this are no chance, and repeating them one at a time would take longer than the run
MOST = 20


def main(flaky: str, *command: str) -> int:
    for path in (FAILED, STATUS):
        path.unlink(missing_ok=True)                     # of a run before this one
    if subprocess.call(command) == 0:
        return 0
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    # 1 is the only status after which every test had its turn
    if not failed or not STATUS.exists() or json.loads(STATUS.read_text()) != 1:
        print(f"{' '.join(command)} failed, and not by a test: nothing is repeated", flush=True)
        return 2
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed: more than {MOST} are not repeated", flush=True)
        return 1
    again = [test for test in failed if not passes(test)]
    with open(flaky, "a", encoding="utf-8") as lines:
        lines.writelines(f"  {test}\n" for test in failed if test not in again)
    print("".join(f"failed again: {test}\n" for test in again), end="", flush=True)
    return 1 if again else 0


def passes(test: str) -> bool:
    """Run one test in a process of its own. A skipped one has not passed."""
    print(f"\nonce more, alone: {test}", flush=True)
    done = subprocess.run([".venv/bin/python", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", test],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    print(done.stdout, end="", flush=True)
    closing = done.stdout.rstrip().rpartition("\n")[2]
    return done.returncode == 0 and re.search(r"\b[1-9]\d* passed", closing) is not None


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
