"""A takedown leaves nothing of a document in a store, and no later run brings it back."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.store.fs import Store
from pipeline.store.tombstones import takedowns
from tests.e2e.takedown_site import HOST, PLANTED, places, planted_ids, run, tokenmill, write_site
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify

WORDS = list(PLANTED.values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A site whose recipe has run."""
    folder = write_site(tmp_path_factory.mktemp("takedown"))
    run(folder)
    return folder


@pytest.fixture
def site(whole, tmp_path):
    """A copy of it, in which published files are hard links again."""
    shutil.copytree(whole, tmp_path / "site", copy_function=shutil.copy2)
    return tmp_path / "site"


def kinds(paths: set[str]) -> set[str]:
    return {path.split("/")[0] for path in paths}


def test_nothing_of_the_documents_is_left_in_any_file(site, capsys):
    store = Store(str(site / "store"))
    before = places(store, WORDS)
    assert {"datasets", "objects", "shards"} <= kinds(before["zorblak"])
    assert {"datasets", "objects", "shards"} <= kinds(before["vemphist"])
    assert {"dropped", "objects"} <= kinds(before["yulgrob"]) and {"dropped", "objects"} <= kinds(before["quixnar"])
    assert {"quarantine", "objects"} <= kinds(before["wexfrond"])
    assert any("report.html" in path for paths in before.values() for path in paths)
    ids = planted_ids(store)
    (site / "ids.txt").write_text("\n".join(ids[name] for name in ("kept", "long", "dropped", "quarantined")))
    assert tokenmill("takedown", "--ids", site / "ids.txt", "--reason", "request 17", "--store", site / "store") == 0
    assert "5 documents were removed, 1 of them as near-duplicates" in capsys.readouterr().out
    assert places(store, WORDS) == {word: set() for word in WORDS}
    [takedown] = takedowns(store)
    assert set(takedown.documents) == set(ids.values()) and takedown.twins == (ids["twin"],)
    run(site)
    assert places(store, WORDS) == {word: set() for word in WORDS}
    assert tokenmill("store", "verify", "--store", site / "store") == 0
