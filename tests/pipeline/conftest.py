"""Fixtures of the tests of the command: a site with one finished run, and the command itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.corpus import pages, sentences, warc
from tests.pipeline.cli_site import RECIPE, Said


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """`crawl/`, `docs/`, `recipe.yaml` and `store/` with the run 'first'. Tests must not write to them."""
    from pipeline.recipe import load_recipe
    from pipeline.run import make_backend, run_recipe

    top = tmp_path_factory.mktemp("cli")
    (top / "crawl").mkdir()
    found = pages(90, seed=2)
    damaged = bytearray(warc(found[60:]))
    damaged[-40:-20] = b"\xff" * 20
    (top / "crawl" / "a.warc.gz").write_bytes(warc(found[:60]))
    (top / "crawl" / "b.warc.gz").write_bytes(bytes(damaged))
    (top / "docs").mkdir()
    rng, prose = random.Random(5), sentences()
    for i in range(12):
        (top / "docs" / f"d{i:02d}.txt").write_text(" ".join(rng.sample(prose, 25)))
    (top / "docs" / "dup.txt").write_text((top / "docs" / "d00.txt").read_text() + " One more sentence here.")
    (top / "docs" / "same.txt").write_text((top / "docs" / "d01.txt").read_text().replace(" ", "  "))
    (top / "recipe.yaml").write_text(RECIPE)
    run_recipe(load_recipe(top / "recipe.yaml"), str(top / "store"), make_backend=make_backend("inline", 1, None),
               run="first")
    return top


@pytest.fixture
def tokenmill(capsys) -> Callable[..., Said]:
    """Calls the command in this process."""
    from pipeline.cli.app import run_command

    def call(*arguments: str | Path) -> Said:
        capsys.readouterr()
        code = run_command([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Said(code, out, err)

    return call
