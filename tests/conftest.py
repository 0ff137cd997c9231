"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.distribute import pytest_xdist_make_scheduler  # noqa: F401

#: a busy machine may stand still while an example is made or tested, so no test of hypothesis fails for taking long
UNTIMED = (HealthCheck.too_slow,)
settings.register_profile("fuzz", max_examples=3000, deadline=None, suppress_health_check=UNTIMED)      # make fuzz
# the same examples every time, so that a change is not blamed for an older bug; `make fuzz` looks for new examples
settings.register_profile("steady", max_examples=30, derandomize=True, deadline=None, database=None,
                          suppress_health_check=UNTIMED)
settings.load_profile("steady")
# until all tests are collected, nothing is garbage, and looking for it takes a fifth of the time
gc.disable()
# without .pyc files, hundreds of processes would compile all they import; container images often switch them off
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# no test cuts the power, so none needs fsync, which takes a third of a small run's time
os.fsync = lambda fd: None
# all processes of all tests share compiled kernels, which numba keys by their source
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "numba"))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray kills no worker because another program has filled the memory, and does not give up a worker that starts slowly
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Turn warnings of this process on again. A command with --quiet, called by an earlier test, has turned them off,
    and which tests came earlier depends on how tests are distributed to workers."""
    logging.getLogger("tokenmill").setLevel(logging.NOTSET)


#: folder of real data (`make test DATA=FOLDER`); without it the tests that need real data are skipped
DATA = Path(os.environ["TOKENMILL_TEST_DATA"]).resolve() if os.environ.get("TOKENMILL_TEST_DATA") else None


def pytest_configure(config):
    """Fail if the folder of real data (DATA) does not exist. Without this check, a mistyped folder would skip every
    test that needs real data."""
    if DATA is not None and not DATA.is_dir():
        raise pytest.UsageError(f"DATA={DATA}: no such folder")


def pytest_collection_finish():
    """Leave the modules and tests, which stay for the session, out of every later search for garbage."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    """Let the interpreter delete everything at its end. A library (nanobind) would report the rest as leaked."""
    gc.unfreeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """Store the exit status in pytest's cache, beside the failed tests. `.ci/repeat.py` needs it: it repeats failed
    tests only if the run was complete."""
    cache = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("ci/exitstatus", int(exitstatus))


def shared_data(*parts: str) -> Path:
    """Return the path `parts` below the folder of real data. The test is skipped if the path, or the folder, does not
    exist."""
    if DATA is None:
        pytest.skip(f"needs real data, make test DATA=FOLDER: {'/'.join(parts)}")
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"not in the folder of real data: {'/'.join(parts)}")
    return path


def real_files(pattern: str, *parts: str) -> list[Path]:
    """Return the files below `parts` in the folder of real data, sorted, or [] without that folder. It is for tests
    that do not need real files, but are stronger with them."""
    return sorted(DATA.joinpath(*parts).rglob(pattern)) if DATA is not None else []


def alone(measure: Callable[..., Any], *args: Any) -> Any:
    """Return `measure(*args)`, called in a process of its own. `measure` stands at the top of a module.

    What switches tracemalloc on needs this: Python 3.11 crashes if a thread of a library allocates at that moment.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *args).result()


@pytest.fixture(scope="session")
def data():
    return shared_data


def rest_slow(quick: int, cases: Sequence[Any]) -> list[Any]:
    """Return the cases of a parametrised test. `quick` of them, evenly spread, run by `make test`; the others are slow.
    """
    chosen = {round(i * len(cases) / quick) for i in range(quick)}
    return [case if i in chosen else pytest.param(*(case if isinstance(case, tuple) else (case,)),
                                                  marks=pytest.mark.slow) for i, case in enumerate(cases)]


class SlowClock:
    """Stands in for the module `time`. Its monotonic clock runs at a tenth of the speed, so that deadlines measured
    with it are ten times as long."""

    time, sleep = time.time, time.sleep

    @staticmethod
    def monotonic() -> float:
        return time.monotonic() / 10


@pytest.fixture(scope="session")
def ray_session():
    """The one Ray of the session: 2 CPUs on this machine, and all free memory. A test that uses it must have the mark
    `ray`.
    """
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        yield ray
        return
    from ray._private.authentication import authentication_utils

    temp = tempfile.mkdtemp(prefix="tmr", dir="/tmp")      # short: socket paths may have 107 characters
    with pytest.MonkeyPatch.context() as patch:
        # Ray waits only 30 s for its raylet to start, even on a busy machine, and has no setting for this
        patch.setattr("ray._private.node.time", SlowClock)
        # A command called in this process since it imported Ray (`--address`) may have found the user's token and asked
        # for it: Ray's servers would hear of that, its client not. Without a mode Ray itself tells both.
        if os.environ.get("RAY_AUTH_MODE") == "token" and not authentication_utils.is_token_auth_enabled():
            patch.delenv("RAY_AUTH_MODE")
        ray.init(address="local", num_cpus=2, object_store_memory=100 << 20, include_dashboard=False,
                 log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1", _temp_dir=temp,
                 _memory=8 << 30)
    yield ray
    ray.shutdown()
    shutil.rmtree(temp, ignore_errors=True)


def pytest_collection_modifyitems(items):
    """Put all tests that share the session's Ray into one group, so that one worker of pytest-xdist runs them (`--dist
    loadgroup`)."""
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
