"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
