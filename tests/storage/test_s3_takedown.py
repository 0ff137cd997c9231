"""A takedown in a store on S3 leaves nothing of a document there. A takedown that was killed can be completed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.store.fs import Store
from pipeline.store.tombstones import unfinished
from tests.e2e.takedown_site import HOST, places, run, tokenmill, write_site
from tests.e2e.test_takedown import Killed, dying
from tokenizer.shards.verify import verify

WORDS = ["zorblak", "quixnar", "vemphist", "yulgrob"]


def copied(store: Store, to: Path | str) -> Store:
    """Copy all files of a store to another place."""
    copy = Store(str(to))
    for path in store.list(""):
        copy.write(path, store.read(path))
    return copy


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Store]:
    """(a site, the store of its run on this machine)"""
    site = write_site(tmp_path_factory.mktemp("takedown") / "site")
    store = run(site, str(site.parent / "store"))
    assert all(places(store, WORDS).values())
    (site / "urls.txt").write_text("".join(f"{HOST}/{name}\n" for name in ("kept", "long", "dropped")))
    return site, store


@pytest.mark.slow
@pytest.mark.parametrize("changes", [None, 12, 30])
def test_nothing_of_the_documents_is_left_in_a_bucket(made, bucket, tmp_path, monkeypatch, changes):
    site, store = made[0], copied(made[1], f"{bucket}/store")
    arguments = ("takedown", "--urls", site / "urls.txt", "--reason", "r", "--store", store.root)
    left = [changes]
    with monkeypatch.context() as patch, suppress(Killed):
        for name in ("write", "remove", "replace", "upload", "put_absent") if changes else ():
            patch.setattr(Store, name, dying(getattr(Store, name), left))
        assert tokenmill(*arguments) == 0
    if changes:
        assert unfinished(store)
        assert tokenmill(*arguments) == 0
    after = copied(store, tmp_path / "after")
    assert places(after, WORDS) == {word: set() for word in WORDS}
    assert verify(after.local / "shards/web/split=train") == []
    assert places(copied(run(site, store.root), tmp_path / "again"), WORDS) == {word: set() for word in WORDS}
