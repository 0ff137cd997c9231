"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fuzz", max_examples=3000, deadline=None)      # make fuzz
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(*parts: str) -> Path:
    """Path below the shared test data; the test is skipped, visibly, where it is absent."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"test data not at hand: shared/data/{'/'.join(parts)}")
    return path


@pytest.fixture(scope="session")
def data():
    return shared_data


@pytest.fixture(scope="session")
def ray_session():
    """The session's one Ray: 2 CPUs on this machine. Whoever uses it marks the test `ray`."""
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        yield ray
        return
    temp = tempfile.mkdtemp(prefix="tmr", dir="/tmp")      # short: socket paths may have 107 characters
    ray.init(address="local", num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False,
             logging_level="ERROR", _node_ip_address="127.0.0.1", _temp_dir=temp)
    yield ray
    ray.shutdown()
    shutil.rmtree(temp, ignore_errors=True)


def pytest_collection_modifyitems(items):
    """All tests that share the session's Ray run in one worker of pytest-xdist (`--dist loadgroup`)."""
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
