"""Tombstones (the records of documents that were taken down): which documents they cover, and what happens to damaged
and unfinished ones."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict

import pyarrow as pa
import pytest

from pipeline.cli.errors import BadUsage
from pipeline.cli.takedown import _wanted
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from pipeline.store.lists import writes_to
from pipeline.store.tombstones import (
    DamagedTakedown,
    GoneDocuments,
    Takedown,
    Tombstones,
    UnfinishedTakedown,
    finished_tombstones,
    gone_documents,
    sealed_json,
    takedowns,
    text_hash,
    url_hash,
)
from pipeline.takedown.reports import redact
from pipeline.takedown.search import Matches, _add_twins


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


@pytest.mark.parametrize("entry", ["bücher.example", "xn--bcher-kva.example", "BÜCHER.example."])
def test_a_domain_is_the_same_in_both_spellings(tmp_path, entry):
    (tmp_path / "list").write_text(f"\ufeff{entry}\r\n\r\n", encoding="utf-8")
    wanted, _ = _wanted(None, None, tmp_path / "list")
    assert wanted.cover("id", "https://bücher.example/a") and wanted.cover("id", "https://www.xn--bcher-kva.example/")
    assert not wanted.cover("id", "https://bucher.example/")


def test_a_byte_order_mark_is_no_part_of_the_first_entry(tmp_path):
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbfabc\r\ndef\r\n")
    assert _wanted(tmp_path / "list", None, None)[0].ids == {"abc", "def"}


def test_www_alone_is_refused_because_it_would_take_the_whole_domain(tmp_path):
    (tmp_path / "list").write_text("www.example.org\n")
    with pytest.raises(BadUsage, match=r"give example\.org, which covers all its subdomains"):
        _wanted(None, None, tmp_path / "list")


def dropped_for(kept: str, similarity: float | None, reason: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": "dropped", "stage": "dedup", "reason": reason, "meta": json.dumps(
        {"dedup": {"kept": kept, "similarity": similarity}})}])


@pytest.mark.parametrize(("similarity", "reason", "twin"), [
    (0.8, "minhash", True), (1.0, "exact_text", True), (1.0, "exact_url", True),
    (0.03, "minhash", False),                    # `verify: record` joins without a threshold
    (None, "minhash", False), (1.0, "exact_meta", False), (0.2, "minhash_contained", True)])
def test_only_documents_that_are_similar_go_together(similarity, reason, twin):
    for listed, other in (("dropped", "kept"), ("kept", "dropped")):
        matches = Matches(ids={listed})
        _add_twins(dropped_for("kept", similarity, reason), matches)
        assert (matches.twins, matches.unverified) == (({other}, set()) if twin else (set(), {other}))


def test_error_messages_and_driver_logs_lose_their_quotations(tmp_path):
    store, text = Store(str(tmp_path)), "Jane Roe of 5 Elm Street was seen with a zorblak yesterday."
    store.write("runs/a/progress.json", json.dumps({"state": "failed", "error": f"ValueError: {text}", "failures": [
        {"node": "all", "message": text[10:50]}], "traceback": f"Traceback\n{text}"}).encode())
    store.write("runs/a/run.json", json.dumps({"run": "a", "error": text}).encode())
    store.write("runs/a/log/0001-000001.txt", f"begun\nerror: {text}\nended\n".encode())
    store.write("runs/b/progress.json", b'{"state": "done"}')
    redact(store, Tombstones(frozenset({"id"})), [text])
    assert not [path for path in store.list("runs") if b"zorblak" in store.read(path) or b"Elm" in store.read(path)]
    assert store.read("runs/a/log/0001-000001.txt") == b"begun\n[taken down]\nended\n"
    assert json.loads(store.read("runs/a/progress.json"))["state"] == "failed"
    assert store.read("runs/b/progress.json") == b'{"state": "done"}'


def packed(store: Store, tombstones: Tombstones) -> GoneDocuments:
    """The tombstones as a task reads them."""
    ref = tombstones.packed(writes_to(store)) if tombstones else {}
    return gone_documents(ref, lambda ref: store.checked(ref["$ref"], ref["sha256"], "", size=ref["bytes"]))


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 9, 63, 64, 5000])
def test_a_task_that_reads_packed_tombstones_leaves_out_the_same_documents(tmp_path, size):
    rng, store = random.Random(size), Store(str(tmp_path))
    names = [f"{n}-{rng.random()}\ud800é" for n in range(2 * size + 2)]
    for chosen in ("ids", "urls", "domains", "texts", "all"):
        def some(kind, values, chosen=chosen):
            return frozenset(values if chosen in (kind, "all") else ())
        listed, domains = names[:size], [f"d{n}.example" for n in range(size)]
        tombstones = Tombstones(some("ids", listed), some("urls", map(url_hash, listed)), some("domains", domains),
                                some("texts", map(text_hash, listed)))
        gone = packed(store, tombstones)
        assert bool(gone) == bool(tombstones)
        assert [len(kind) for kind in vars(gone).values()] == [len(kind) for kind in vars(tombstones).values()]
        for n, name in enumerate(names):
            for document in ((name, None), ("", name), ("", f"https://www.d{n}.example/{n}"), ("", "", name)):
                assert gone.cover(*document) == tombstones.cover(*document)


def test_damaged_tombstones_of_tasks_are_noticed(tmp_path):
    store = Store(str(tmp_path))
    ref = Tombstones(frozenset({"a"})).packed(writes_to(store))
    store.write(ref["$ref"], b"x" * ref["bytes"])
    with pytest.raises(DamagedFile):
        gone_documents(ref, lambda ref: store.checked(ref["$ref"], ref["sha256"], "", size=ref["bytes"]))


def test_reading_many_tombstones_takes_the_memory_that_a_task_declares(tmp_path):
    """Otherwise its process would be killed, and the run would end. 600,000 tombstones took 150 MB as lists of JSON."""
    program = """
import json, sys
from pipeline.store.tombstones import gone_documents
def memory(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) >> 10
before, ref = memory(), json.loads(sys.argv[1])
gone = gone_documents(ref, lambda ref: sys.argv[2])
assert all(f"{n:032x}" in gone.ids for n in range(0, 300_000, 3))
print(memory() - before, ref["bytes"] >> 20)
"""
    store = Store(str(tmp_path))
    ref = Tombstones(frozenset(f"{n:032x}" for n in range(300_000)),
                     texts=frozenset(f"{n:064x}" for n in range(300_000))).packed(writes_to(store))
    done = subprocess.run([sys.executable, "-c", program, json.dumps(ref), store.at(ref["$ref"])], capture_output=True,
                          text=True, check=True)
    taken, declared = map(int, done.stdout.split())
    assert 0 < taken <= declared + 5 and declared < 15

