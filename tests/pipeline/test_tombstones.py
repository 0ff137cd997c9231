"""Tombstones: which documents they cover, and what becomes of damaged and unfinished ones."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from pipeline.store.fs import Store
from pipeline.store.tombstones import (
    DamagedTakedown,
    Takedown,
    Tombstones,
    UnfinishedTakedown,
    finished_tombstones,
    sealed_json,
    takedowns,
    text_hash,
    url_hash,
)


@pytest.mark.parametrize(("url", "gone"), [
    ("https://example.org/a", True), ("http://EXAMPLE.org:8080", True), ("https://www.example.org/", True),
    ("https://sub.example.org/a", True), ("https://user@example.org/", True), ("https://notexample.org/", False),
    ("https://example.org.evil.net/", False), ("https://evil.net/example.org", False), ("example.org", False),
    ("", False), (None, False)])
def test_a_domain_covers_its_hosts_and_no_other(url, gone):
    assert Tombstones(domains=frozenset({"example.org"})).cover("id", url) is gone


def test_ids_urls_and_texts_are_covered_each_by_itself():
    tombstones = Tombstones(frozenset({"a"}), frozenset({url_hash("https://x.org/\ud800")}), frozenset(),
                            frozenset({text_hash("one  two\n")}))
    assert tombstones.cover("a", None) and tombstones.cover("b", "https://x.org/\ud800")
    assert tombstones.cover("b", None, "one two") and not tombstones.cover("b", "https://x.org/", "one two three")
    assert not Tombstones().cover("a", "https://x.org/", "") and not Tombstones()
    assert Tombstones.of(tombstones.arg()) == tombstones and Tombstones().arg() == {}


def test_damaged_and_unfinished_takedowns_stop_runs(tmp_path):
    store = Store(str(tmp_path))
    assert not finished_tombstones(store)
    takedown = Takedown(1, "r", "now", ("a",), (), ("example.org",), ("a", "b"), ("b",))
    store.write(takedown.path, sealed_json(asdict(takedown)))
    assert takedowns(store) == [takedown]
    with pytest.raises(UnfinishedTakedown, match="--complete"):
        finished_tombstones(store)
    store.write(takedown.done_path, sealed_json({"number": 1}))
    assert finished_tombstones(store) == Tombstones(frozenset({"a", "b"}), domains=frozenset({"example.org"}))
    store.write(takedown.path, store.read(takedown.path).replace(b"example.org", b"example.com"))
    with pytest.raises(DamagedTakedown, match=takedown.path):
        finished_tombstones(store)
