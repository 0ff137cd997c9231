"""Fixtures of the tests of whole runs: the command, called in this process, and a run with everything in its report."""

from __future__ import annotations

import json

import pytest

from pipeline.report import collect
from pipeline.report.schema import Report
from tests.e2e.report_site import Site, build
from tests.pipeline.conftest import tokenmill

__all__ = ["tokenmill"]


@pytest.fixture(scope="session")
def report_site(tmp_path_factory) -> Site:
    return build(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="package", autouse=True)
def valid_reports():
    """Check every report that a test of this folder makes in its own process against the schema of report.json."""
    whole = collect.collect

    def validated(*args, **kwargs):
        document = whole(*args, **kwargs)
        Report.model_validate(json.loads(json.dumps(document)))
        return document

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "collect", validated)
        yield
