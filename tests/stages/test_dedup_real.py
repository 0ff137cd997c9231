"""Near-duplicates in real collections: 2 × 1,000 documents with 50 planted near-duplicates each, and 2,843 texts of
licences.

`pytest -s` prints precision and recall.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from collections import defaultdict

import pytest

from pipeline.store.fs import Store
from stages.dedup.curve import chance
from stages.dedup.minhash import MinHash
from stages.document import document_id
from tests.conftest import shared_data
from tests.stages.dedup_corpus import grams
from tests.stages.dedup_fragment import Doc, run_fragment, write_parts


def alike(docs: list[Doc], least: float) -> dict[str, dict[str, float]]:
    """Return {id: {id: similarity}} for all pairs whose Jaccard similarity of word 5-grams is at least `least`, found
    by an inverted index."""
    sets = {d.id: grams(d.text, 5) for d in docs}
    having: dict[tuple[str, ...], list[str]] = defaultdict(list)
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for i, mine in sets.items():
        common: dict[str, int] = defaultdict(int)
        for gram in mine:
            for j in having[gram]:
                common[j] += 1
            having[gram].append(i)
        for j, both in common.items():
            similarity = both / (len(mine) + len(sets[j]) - both)
            if similarity >= least:
                found[i][j] = found[j][i] = similarity
    return found


def planted(name: str) -> list[tuple[Doc, str]]:
    """Return (document, its family). The files 00-10, 11-20, 21-30, 31-40 and 41-49 are edits of five documents; each
    other file is a family of its own."""
    with zipfile.ZipFile(shared_data("dedup", "NDD-Collection.zip")) as z:
        out = []
        for path in sorted(n for n in z.namelist() if n.startswith(name) and n.endswith(".txt")):
            number = path.removeprefix(f"{name}/file").removesuffix(".txt")
            text = z.read(path).decode("utf-8", "replace")
            family = f"planted {max(int(number) - 1, 0) // 10}" if int(number) < 50 else number
            out.append((Doc(text, name, document_id(name, path, "", 0)), family))
        return out


@pytest.mark.parametrize("name", ["R8", "webkb"])
def test_planted_near_duplicates(tmp_path, name):
    labelled = planted(name)
    docs, family = [d for d, _ in labelled], {d.id: f for d, f in labelled}
    assert len(docs) == 1000
    store = Store(tmp_path)
    got = run_fragment(MinHash(), write_parts(MinHash(), docs, store, part_rows=90), store)
    truth = alike(docs, 0.75)
    for i, (_, kept, similarity, _) in got.removed.items():       # every removal is a true one, and recomputable
        assert similarity == truth[i][kept]
    of_family = [i for i, f in family.items() if f.startswith("planted")]
    assert len(of_family) == 50
    gone = [i for i in of_family if i in got.removed]
    wrong = [i for i in gone if family[got.removed[i][1]] != family[i]]
    should = {i for i in truth if any((-len(a.text), a.id) < (-len(b.text), b.id) for b in docs if b.id == i
                                      for a in docs if a.id in truth[i])}
    recall = len(set(got.removed) & should) / len(should)
    print(f"\n{name}: {len(got.removed)} removed, all with a similarity of at least 0.75; planted: {len(gone)} of 45 "
          f"gone, {len(wrong)} for another family; {recall:.3f} of the documents with a true near-duplicate found")
    assert len(gone) == 45
    assert not wrong
    assert recall > 0.97


def licences() -> list[Doc]:
    with gzip.open(shared_data("dedup", "scancode_rules_dev.jsonl.gz"), "rt", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    return [Doc(r["text"], "rules", document_id("rules", r["id"], "", n)) for n, r in enumerate(rows)]


@pytest.mark.parametrize("name", ["licences", "R8", "webkb"])
@pytest.mark.parametrize("config", [{"recall": 0.99}, {"recall": 0.9}, {"recall": 0.99, "containment": 0.8}])
def test_no_wrong_removal_and_as_many_true_ones_as_the_curve_says(tmp_path, config, name):
    """Against all pairs: each removal is a true one, and of the documents that have a true near-duplicate among the
    kept ones, the share that stays is at most that of the curve, pair by pair."""
    docs = licences() if name == "licences" else [d for d, _ in planted(name)]
    barrier, store = MinHash(config), Store(tmp_path)
    got = run_fragment(barrier, write_parts(barrier, docs, store, part_rows=300, row_group=50), store)
    c = barrier.config
    sizes = {d.id: len(grams(d.text, 5)) for d in docs}
    pairs = alike(docs, 0.3 if c.containment else c.verify)
    rank = {d.id: (-len(d.text), d.id) for d in docs}

    def true(i: str, j: str) -> bool:
        similarity = pairs.get(i, {}).get(j, 0.0)
        common = similarity * (sizes[i] + sizes[j]) / (1 + similarity)
        inside = c.containment is not None and sizes[i] <= sizes[j] and round(common) / sizes[i] >= c.containment
        return similarity >= c.verify or inside

    assert all(true(i, kept) and rank[kept] < rank[i] for i, (_, kept, _, _) in got.removed.items())
    due, likely = 0, 0.0
    for i in pairs:
        before = [j for j in pairs[i] if j not in got.removed and rank[j] < rank[i] and true(i, j)]
        if before:
            due += 1
            missed = 1.0
            for j in before:
                missed *= 1 - chance(pairs[i][j], c.bands, c.rows)
            likely += 1 - missed
    found = sum(i in got.removed for i in pairs)
    print(f"\n{name} {config}: {c.bands} x {c.rows}, {len(got.removed)} of {due} due removed "
          f"({found / due:.4f}; the curve says {likely / due:.4f})")
    assert found == len(got.removed)
    assert found / due >= likely / due - 0.02


def test_licences(tmp_path):
    with gzip.open(shared_data("dedup", "scancode_rules_dev.jsonl.gz"), "rt", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    docs = [Doc(r["text"], "rules", document_id("rules", r["id"], "", n)) for n, r in enumerate(rows)]
    label = {d.id: r["cluster"] for d, r in zip(docs, rows)}
    store = Store(tmp_path)
    got = run_fragment(MinHash(), write_parts(MinHash(), docs, store, part_rows=200, row_group=50), store)
    truth = alike(docs, 0.75)
    for i, (_, kept, similarity, _) in got.removed.items():
        assert similarity == truth[i][kept]
    rank = {d.id: (-len(d.text), d.id) for d in docs}
    kept = [d.id for d in docs if d.id not in got.removed]
    left = [(i, j) for i in kept for j in truth[i] if j not in got.removed and rank[j] < rank[i]]
    blind = run_fragment(MinHash(verify=None), write_parts(MinHash(), docs, store, part_rows=200), store)
    other = [sum(label[o.removed[i][1]] != label[i] for i in o.removed) / len(o.removed) for o in (got, blind)]
    print(f"\nlicences: {len(got.removed)} of {len(docs)} removed, {other[0]:.1%} of them for a text of another "
          f"licence; without verification {len(blind.removed)}, {other[1]:.1%}; largest cluster "
          f"{got.counters['clusters']['max_cluster']}; pairs of similarity >= 0.75 that stay: {len(left)}; "
          f"{got.counters['verify']['comparisons']} comparisons")
    assert len(got.removed) > 500
    assert other[0] < other[1]
    assert len({i for i, _ in left}) < 0.1 * len(got.removed)
