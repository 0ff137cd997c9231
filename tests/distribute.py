"""How tests are distributed to the workers of pytest-xdist (`-n`). tests/conftest.py takes over the hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
#: files whose tests start a Ray of their own, or share the session's: never two of them at a time
RAY_FILES = frozenset(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")
    if path.parent.name == "chaos" or any(word in path.read_text(encoding="utf-8")
                                    for word in ("xdist_group(", "ray_session", "mark.ray")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Distribute tests to the workers of pytest-xdist file by file, and all files of RAY_FILES to one worker. (The
    option `--dist loadgroup` alone would not do this: it marks groups in the ids of tests, which pytest 9.2 no longer
    shows the scheduler.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith("tests/e2e/test_report_"):           # they share a run of a minute
                return "report"
            return "ray" if file in RAY_FILES else file

        def remove_node(self, node: Any) -> str | None:
            """Give what a worker that ended had left to the others, and return the test that it was running, if any.

            xdist 3.8 would give them finished files as well. A worker never reports such a file, so it would wait for
            ever. It would also run the test that ended the worker again, and lose all the other workers to it.
            """
            workload = self.assigned_work.pop(node)
            crashed = next((test for file in workload.values() for test, done in file.items() if not done), None)
            for scope, file in workload.items():
                if crashed in file:
                    file[crashed] = True
                if not all(file.values()):
                    self.workqueue[scope] = file
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

        def _reschedule(self, node: Any) -> None:
            """Assign files until the worker has two tests, or knows that no more come: it runs a test only when it
            knows the next one. A worker that still collects, in place of one that crashed, is assigned files later."""
            if node not in self.registered_collections:
                return
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return ByFile(config, log)
