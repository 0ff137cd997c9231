"""The sample of texts for the training of a tokenizer: drawn in several tasks, it is the one that a single task draws,
and so is the trained tokenizer."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.passes import sample_text
from pipeline.passes.fit_tokenizer import _sample, tokenizer_waves
from pipeline.passes.rows import Selection
from pipeline.passes.sample_text import GROUP_BYTES, picked_texts
from pipeline.passes.strata import Strata
from stages.barrier import TaskResult
from stages.dedup.fragment import SIZES, Sizes, groups
from stages.document import Document, document_id
from tests.tokenizer.test_encode_tasks import TRAIN, Runner, documents
from tokenizer.load import TokenizerError


def waves(run: Runner, train: dict, parts: list, seed: int, sizes: Sizes = SIZES) -> dict[str, list[TaskResult]]:
    done: dict[str, list[TaskResult]] = {}
    for wave in tokenizer_waves(train, parts, seed, sizes):
        drafts = list(wave.tasks(done))
        done[wave.name] = run(drafts, order=range(len(drafts))[::-1])
    return done


@pytest.fixture
def run(tmp_path) -> Runner:
    return Runner(tmp_path)


def mixed(n: int) -> list[Document]:
    rng = np.random.default_rng(5)
    return [Document(document_id("s", "f", "", i), f"{i} " + "x\u00fc" * int(k), source="web" if i % 3 else "wiki",
                     signals={"quality": i / n}) for i, k in enumerate(np.exp(rng.uniform(0, 7, n)))]


def test_groups_draw_what_one_task_draws(run):
    docs, sizes = mixed(260), Sizes(group_bytes=10_000, group_rows=40)
    web, both = {"source": "web"}, {"source": ["web", "wiki"]}
    for rows, size, where in ((7, 1, {}), (7, 400, web), (23, 9_000, both), (260, 30_000, {}), (11, 10**9, web)):
        parts = run.parts(docs, rows)
        wanted = _sample([run.store.at(p.text["$ref"]) for p in parts], Selection(where), size, 7)
        done = {}
        for wave in tokenizer_waves({**TRAIN, "where": where, "sample": size}, parts, 7, sizes)[:-1]:
            done[wave.name] = run(list(wave.tasks(done)))
        assert len(done["pick"]) == len(groups(parts, sizes)) >= 1
        texts = [x for r in done["pick"] for x in picked_texts(run.store.at(r.files["picked.parquet"]["$ref"]))]
        assert texts == [(d.id, d.text) for d in docs if d.id in wanted]
        [cut] = done["cut"]
        assert (cut.counters["documents"], cut.counters["bytes"]) == (len(wanted), sum(wanted.values()))


def test_picked_texts_are_written_a_few_at_a_time(run):
    docs = [Document(document_id("s", "f", "", i), f"{i}" + "x" * size)
            for i, size in enumerate((GROUP_BYTES // 2, GROUP_BYTES // 2, 1000, 1000))]
    done: dict[str, list[TaskResult]] = {}
    for wave in tokenizer_waves({**TRAIN, "sample": 10**9}, run.parts(docs, 3), 7, Sizes(group_bytes=1))[:-1]:
        done[wave.name] = run(list(wave.tasks(done)))
    files = [run.store.at(result.files["picked.parquet"]["$ref"]) for result in done["pick"]]
    assert [text for file in files for text in picked_texts(file)] == [(doc.id, doc.text) for doc in docs]
    assert [pq.read_metadata(file).num_row_groups for file in files] == [2, 1], "two texts of three exceed the limit"


def languages(n: int) -> list[Document]:
    """Return documents of two sources and four languages, whose sizes differ much."""
    rng = np.random.default_rng(8)
    drawn = rng.choice(4, n, p=[.7, .2, .08, .02])
    return [Document(document_id("s", "f", "", i), "x" * int(k), source="web" if i % 3 else "wiki",
                     language=("en", "de", "fr", "sw")[lang])
            for i, (k, lang) in enumerate(zip(np.exp(rng.uniform(0, 6, n)), drawn))]


STRATA = [{"by": ["language"]}, {"by": ["language"], "alpha": 0.3}, {"by": ["source", "language"], "alpha": 1},
          {"language": {"en": 1, "sw": 1}},
          {"language": {"en": 5, "de": 1, "fr": 2.5}, "source": {"wiki": 3, "web": 1}},
          {"source": {"wiki": 1}, "by": ["language"], "alpha": 0.5}]


def reference(docs: list[Document], settings: dict, size: int, seed: int) -> set[str]:
    """Return the ids of the documents that a sample of `size` bytes must have: the bytes are divided among the groups
    step by step, and each group gives its documents by rising rank."""
    columns = [c for c in ("source", "language") if c in settings or c in settings.get("by", [])]
    groups_: dict = {}
    for doc in docs:
        groups_.setdefault(tuple(getattr(doc, c) for c in columns), []).append(doc)
    totals = {g: sum(len(d.text.encode()) for d in members) for g, members in groups_.items()}
    weights = {g: totals[g] ** settings.get("alpha", 0) * np.prod(
        [settings[c].get(name, 0) for c, name in zip(columns, g) if c in settings] or [1]) for g in groups_}
    shares = dict.fromkeys(groups_, 0.0)
    for _ in range(60):                                      # what is left over is shared out again
        left, open_ = size - sum(shares.values()), [g for g in groups_ if weights[g] and shares[g] < totals[g]]
        for g in open_:
            shares[g] = min(totals[g], shares[g] + left * weights[g] / sum(weights[h] for h in open_))
    chosen = set()
    for g, members in groups_.items():
        total = 0
        for doc in sorted(members, key=lambda d: sample_text.rank_of(seed, d.id)):
            total += len(doc.text.encode())
            if total > shares[g] + 1e-3:
                break
            chosen.add(doc.id)
    return chosen


@pytest.mark.parametrize("settings", STRATA, ids=str)
def test_a_balanced_sample_is_that_of_the_reference_however_it_is_drawn(run, settings):
    docs = languages(300)
    for rows in (300, 23):
        parts = run.parts(docs, rows)
        paths = [run.store.at(p.text["$ref"]) for p in parts]
        for size in (3000, 9000, 10**9):
            wanted = reference(docs, settings, size, 7)
            assert set(_sample(paths, Selection({}), size, 7, Strata(settings))) == wanted
    size, done = 9000, {}
    wanted = reference(docs, settings, size, 7)
    for wave in tokenizer_waves({**TRAIN, "sample": {"bytes": size, **settings}}, parts, 7, Sizes(20_000, 100))[:-1]:
        done[wave.name] = run(list(wave.tasks(done)))
    assert len(done["rank"]) > 2
    texts = [x for r in done["pick"] for x in picked_texts(run.store.at(r.files["picked.parquet"]["$ref"]))]
    assert [id for id, _ in texts] == [d.id for d in docs if d.id in wanted]
    assert done["cut"][0].counters["documents"] == len(wanted) > 3


def test_a_sample_smaller_than_every_document_has_one(run):
    docs = languages(60)
    parts = run.parts(docs, 60)
    chosen = _sample([run.store.at(parts[0].text["$ref"])], Selection({}), 0, 7, Strata({"by": ["language"]}))
    assert list(chosen) == [min(docs, key=lambda d: sample_text.rank_of(7, d.id)).id]


def test_the_tokenizer_is_the_same(run):
    docs = documents(240)
    train = {**TRAIN, "sample": sum(len(d.text) for d in docs) // 2}
    alone = waves(run, train, run.parts(docs, 60), 4)
    assert not alone["rank"] and not alone["pick"]
    shared = waves(run, train, run.parts(docs, 17), 4, Sizes(group_bytes=1, group_rows=50))
    assert len(shared["rank"]) > 3
    assert shared["fit"][0].files["tokenizer.json"]["content"] == alone["fit"][0].files["tokenizer.json"]["content"]
    assert shared["fit"][0].counters == alone["fit"][0].counters


def test_no_document_is_an_error_that_says_so(run):
    with pytest.raises(TokenizerError, match="there is no document to train on"):
        waves(run, {**TRAIN, "where": {"source": "nobody"}}, run.parts(documents(30), 7), 1, Sizes(group_bytes=1))
