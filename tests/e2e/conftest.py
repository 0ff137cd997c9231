"""Fixtures of the tests of whole runs: the command, called in this process, and a run with everything in its report."""

from __future__ import annotations

import pytest

from tests.e2e.report_site import Site, build
from tests.pipeline.conftest import tokenmill

__all__ = ["tokenmill"]


@pytest.fixture(scope="session")
def report_site(tmp_path_factory) -> Site:
    return build(tmp_path_factory.mktemp("report"))
