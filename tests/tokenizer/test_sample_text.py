"""The sample drawn by groups of parts is the one that one task draws, and so is the tokenizer trained on it."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.passes import sample_text
from pipeline.passes.fit_tokenizer import _sample, tokenizer_waves
from pipeline.passes.rows import Selection
from pipeline.passes.sample_text import picked_texts
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


def test_groups_draw_what_one_task_draws(run, monkeypatch):
    monkeypatch.setattr(sample_text, "GROUP_BYTES", 2000)
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
