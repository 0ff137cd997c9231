"""The signal `dup_count` in whole runs: it equals brute force, and only what reads it depends on it."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.recipe import load_recipe
from pipeline.recipe.errors import RecipeError
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset import iter_rows
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.corpus import sentences
from tests.e2e.test_split_shards import curriculum_of, documents

RECIPE = """
version: 1
sources:
  web: {read: jsonl, path: web/*.jsonl, keep: [family]}
  notes: {read: jsonl, path: notes/*.jsonl, keep: [family]}
datasets:
  clean: {from: [web, notes], priority: [notes], steps: [STEPS]}
run: {partition: 20KB}
"""
BOTH = "{exact: {by: both}}, minhash"
#: size of a family of texts that are equal or nearly so
SIZES = [1] * 60 + [2] * 12 + [3] * 8 + [4] * 4 + [7] * 3 + [12]


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """A folder with families of similar documents, over several files and two sources: exact copies, near-duplicates,
    and equal URLs."""
    top, rng, prose = tmp_path_factory.mktemp("dup_count"), random.Random(4), sentences()
    rows = []
    for family, size in enumerate(SIZES):
        base = [f"{s} ({family} {n})" for n, s in enumerate(rng.sample(prose, 14))]
        variants = [base, [*base, f"More of {family}."], [f"Less of {family}.", *base]]
        for copy in range(size):
            url = f"https://example.org/{family}" if rng.random() < 0.3 else f"https://example.org/{family}/{copy}"
            rows.append({"text": " ".join(rng.choice(variants)), "url": url, "family": family})
    rng.shuffle(rows)
    for number, row in enumerate(rows):
        path = top / ("notes" if number % 4 == 0 else "web") / f"{number // 40}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
    return top


def run(top: Path, store: Path, steps: str, *overrides: str, more: str = "", make: Any = InlineBackend) -> Any:
    path = top / "recipe.yaml"
    path.write_text(RECIPE.replace("STEPS", steps) + more)
    return run_recipe(load_recipe(path, list(overrides)), str(store), make_backend=make, report=False)


def kept(store: Path, dataset: str = "clean") -> list[dict[str, Any]]:
    return [{**row, "meta": json.loads(row["meta"])} for row in iter_rows(Store(store), f"datasets/{dataset}")]


def brute_force(store: Path, dataset: str = "clean") -> Counter[str]:
    """Return for each kept document the number of documents for which it stands: all that lead to it when removals are
    followed, and itself."""
    instead = {row["id"]: json.loads(row["meta"])[row["stage"]]["kept"]
               for row in iter_rows(Store(store), f"dropped/{dataset}") if row["stage"] in ("exact", "minhash")}
    counts: Counter[str] = Counter(row["id"] for row in kept(store, dataset))
    for removed in instead:
        end = removed
        while end in instead:
            end = instead[end]
        counts[end] += 1
    return counts


def counted(store: Path, dataset: str = "clean") -> dict[str, float]:
    return {row["id"]: row["signals"]["dup_count"] for row in kept(store, dataset)}


def records(store: Path) -> dict[str, str]:
    return {r.key: r.node for r in Log.read(Store(store)).records()}


@pytest.mark.parametrize("steps", ["minhash, exact", "exact, gopher_repetition, minhash, pii",
                                   "exact, {repeats: {min_chars: 0}}, minhash", "{exact: {by: url}}, exact, minhash"])
def test_a_kept_document_counts_all_that_were_removed_for_it(top, tmp_path, steps):
    run(top, tmp_path, f"{steps}, rehydrate")
    expected = brute_force(tmp_path)
    assert counted(tmp_path) == expected and max(expected.values()) > 3


def test_the_counts_of_planted_families_are_their_sizes(top, tmp_path):
    run(top, tmp_path, f"{BOTH}, rehydrate")
    rows = kept(tmp_path)
    assert {row["meta"]["family"]: row["signals"]["dup_count"] for row in rows} == dict(enumerate(SIZES))
    weights = {1: 1, 2: 2, 3: 3, 4: 3, 7: 5, 12: 5}
    assert [row["signals"]["rehydrate"] for row in rows] == [weights[SIZES[row["meta"]["family"]]] for row in rows]


def test_kept_documents_name_their_cluster_as_removed_ones_do(top, tmp_path):
    run(top, tmp_path, "exact, rehydrate")
    clusters = Counter(json.loads(row["meta"])["cluster"] for row in iter_rows(Store(tmp_path), "dropped/clean"))
    named = {row["meta"]["cluster"]: row["signals"]["dup_count"] for row in kept(tmp_path) if "cluster" in row["meta"]}
    assert named == {cluster: n + 1 for cluster, n in clusters.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("room")
def test_counts_are_the_same_for_any_division_into_parts_and_workers(top, tmp_path):
    for partition, make in (("20KB", InlineBackend), ("3KB", make_backend("process", 2, None)), ("1MB", InlineBackend)):
        run(top, tmp_path / partition, f"{BOTH}, rehydrate", f"run.partition={partition}", make=make)
        assert counted(tmp_path / partition) == counted(tmp_path / "20KB")
        assert dataset_hash(Store(tmp_path / partition), "clean") == dataset_hash(Store(tmp_path / "20KB"), "clean")


def test_counts_go_on_through_datasets_that_are_made_of_each_other(top, tmp_path):
    second = "  {}: {{from: clean, steps: [minhash, {{where: {{signals: {{dup_count: {{min: 2}}}}}}}}]}}\nrun:"
    path = top / "two.yaml"
    path.write_text(RECIPE.replace("STEPS", "exact, pii").replace("run:", second.format("both")))
    run_recipe(load_recipe(path), str(tmp_path), make_backend=InlineBackend)
    assert {row["meta"]["family"]: row["signals"]["dup_count"] for row in kept(tmp_path, "both")} == {
        family: size for family, size in enumerate(SIZES) if size > 1}
    assert sum(counted(tmp_path).values()) == sum(SIZES)              # of `clean`, as far as `exact` knows


def test_a_survivor_may_be_chosen_by_its_count(top, tmp_path):
    """The number of exact copies decides which near-duplicate stays, so the counts are needed between the barriers."""
    run(top, tmp_path, "exact, {minhash: {prefer: [signal:dup_count, longest]}}")
    assert all("dup_count" in (row["signals"] or {}) for row in kept(tmp_path))
    rows = list(iter_rows(Store(tmp_path), "dropped/clean"))
    copies = Counter(json.loads(row["meta"])["exact"]["kept"] for row in rows if row["stage"] == "exact")
    pairs = [(copies[json.loads(row["meta"])["minhash"]["kept"]], copies[row["id"]])
             for row in rows if row["stage"] == "minhash"]
    assert all(kept >= removed for kept, removed in pairs) and any(kept > removed > 0 for kept, removed in pairs)


# -- what runs again ---------------------------------------------------------------------------------------------------
def test_a_recipe_that_does_not_read_the_signal_has_no_task_for_it(top, tmp_path):
    run(top, tmp_path, f"{BOTH}, gopher_repetition")
    assert not [node for node in records(tmp_path).values() if "/count/" in node]
    assert not any("dup_count" in (row["signals"] or {}) for row in kept(tmp_path))


@pytest.mark.parametrize("reads", [True, False])
def test_another_duplicate_changes_only_the_part_whose_count_it_changes(tmp_path, reads):
    """The barrier keeps what it kept, since the new source has the lowest priority."""
    prose = sentences()
    for number in range(6):
        path = tmp_path / "notes" / f"{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"text": f"{s} {number}"}) + "\n" for s in prose[:12]))
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "0.jsonl").write_text(json.dumps({"text": f"{prose[3]} 2"}) + "\n")
    steps = "exact, gopher_repetition" + ", rehydrate" * reads
    override = "run.partition=1KB"
    run(tmp_path, tmp_path / "store", steps, override)
    before = records(tmp_path / "store")
    assert Counter(before.values())["clean"] > 6
    (tmp_path / "web" / "1.jsonl").write_text(json.dumps({"text": f"{prose[5]}  {4}"}) + "\n")
    run(tmp_path, tmp_path / "store", steps, override)
    again = Counter(node for key, node in records(tmp_path / "store").items() if key not in before)
    assert again["clean"] == 1 + reads                                # the new part, and the one with the kept document


# -- what reads it -----------------------------------------------------------------------------------------------------
TOKENS = """
  single: {from: clean, steps: [{where: {signals: {dup_count: 1}}}]}
tokenizer: {kind: bytes}
shards:
  web: {from: clean, by: signal.rehydrate, min_tokens: 1, longest: 64, val: 0}
  web_by_count: {from: clean, by: [{signal.dup_count: [2, 5]}], min_tokens: 1, longest: 64, val: 0}
curriculum:
  seed: 1
  total: 20k
  phases: [{name: all, until: 100%, sequence: 64, batch: 256, on_exhausted: repeat, mix: {
            web: {share: 100, by: signal.rehydrate, upsample: {'2': 2, '3': 3, '5': 5}}}}]
run:"""


def test_where_shards_and_mixture_see_the_counts(top, tmp_path):
    path = top / "tokens.yaml"
    path.write_text(RECIPE.replace("STEPS", f"{BOTH}, rehydrate").replace("run:", TOKENS.lstrip("\n")))
    run_recipe(load_recipe(path), str(tmp_path), make_backend=InlineBackend)
    store = Store(str(tmp_path))
    assert sorted(row["meta"]["family"] for row in kept(tmp_path, "single")) == [
        family for family, size in enumerate(SIZES) if size == 1]
    ids = {row["id"]: row["signals"] for row in kept(tmp_path)}
    for stream, accepts in {**{f"web.{n}": (lambda s, n=n: s["rehydrate"] == n) for n in (1, 2, 3, 5)},
                            "web_by_count.b00": lambda s: s["dup_count"] < 2,
                            "web_by_count.b01": lambda s: 2 <= s["dup_count"] < 5,
                            "web_by_count.b02": lambda s: s["dup_count"] >= 5}.items():
        in_stream = {id for id, _ in documents(store, stream)["train"]}
        assert in_stream == {id for id, signals in ids.items() if accepts(signals)} and in_stream
    curriculum = curriculum_of(store)
    tokens = {stream.name: stream.tokens for stream in curriculum.streams}
    [phase] = curriculum.phases
    assert phase.weights == {f"web.{times}": tokens[f"web.{times}"] * times for times in (1, 2, 3, 5)}


def test_a_reader_of_the_signal_without_a_deduplication_is_refused(top):
    path = top / "none.yaml"
    path.write_text(RECIPE.replace("STEPS", "gopher_repetition, rehydrate"))
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert "rehydrate" in str(error.value) and "dup_count" in str(error.value)


def test_a_table_of_weights_without_single_documents_is_refused(top):
    path = top / "table.yaml"
    path.write_text(RECIPE.replace("STEPS", "exact, {rehydrate: {weights: {2: 3}}}"))
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert "weights" in str(error.value)
