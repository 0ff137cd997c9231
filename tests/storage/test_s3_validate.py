"""The service checks a recipe whose sources are in S3: it finds out in bounded time whether they have files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.service import submit
from pipeline.store.remote import connect
from tests.service.conftest import patient  # noqa: F401  (a fixture)
from tests.service.test_submit import RECIPE, Site
from tests.storage.s3_server import KEYS

pytestmark = pytest.mark.slow


def warnings_of(site: Site, path: str) -> list[str]:
    """Return the warnings about `path` as the path of a source in a valid recipe."""
    answer = site.post("/recipes/validate", {"recipe": RECIPE.replace("path: docs", f"path: '{path}'")})
    document = answer.json()
    assert answer.status_code == 200 and document["valid"], document
    assert not [key for key in KEYS.values() if key in answer.text]
    return [p["message"] for p in document["problems"] if p["key"] == "sources.docs.path"]


def test_sources_in_a_bucket_without_files_are_warned_of(bucket: str, s3: Any, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    connect(bucket).write("in/a.txt", b"text")
    site = Site(tmp_path, roots=(bucket,))
    assert warnings_of(site, f"{bucket}/in/*.txt") == []
    [warning] = warnings_of(site, f"{bucket}/in/*.nothing")
    assert f"no object matches '{bucket}/in/*.nothing'" in warning
    s3.trouble(lambda method, path, n: "hang")
    monkeypatch.setattr(submit, "FILES_S", 5.0)
    assert warnings_of(site, f"{bucket}/in/*.nothing") == [], "a check that takes too long is no answer"
