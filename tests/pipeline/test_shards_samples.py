"""`shards explain` and `shards realised` over a store that the test writes: compared with the `explain` of the trainer,
and with counts over all samples, one by one."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from pipeline.base.parquet import write_table
from pipeline.report.document_counts import count_documents
from pipeline.store.fs import Store
from stages.scrub.rows import mask
from tests.pipeline.cli_site import Said
from tests.trainer.synthetic import EOS, MODEL, TOKENIZER, VOCAB
from tokenizer.imports.assemble import Assembly
from tokenizer.imports.documents import ImportedDocuments
from tokenizer.mixture.curriculum import Curriculum, CurriculumError
from tokenizer.mixture.order import Order
from tokenizer.mixture.realised import realised_in
from tokenizer.mixture.resolve import resolve
from tokenizer.mixture.steps import step_at, step_of
from tokenizer.shards.layout import MANIFEST, Manifest
from tokenizer.shards.reader import ShardSet, loss_mask

SOURCES, LANGUAGES = ("blog", "news", "wiki"), ("de", "en")
PHASES = [{"name": "stable", "until": "50%", "sequence": 32, "batch": 160, "mix": {"web": 70, "code": 30}},
          {"name": "mid", "until": "75%", "sequence": 64, "batch": 192, "mix": {"web": 50, "code": 50}},
          {"name": "anneal", "until": "100%", "mix": {"web": 30, "code": 70}, "lr": "decay"}]


def make_stream(store: Path, name: str, seed: int, count: int) -> dict[str, object]:
    """Write a shard set of `count` documents with loss masks, and the two parts of the dataset NAME-clean from which it
    is said to be made."""
    rng = random.Random(seed)
    folder, data = store / "shards" / name / "split=train", store / "datasets" / f"{name}-clean"
    folder.mkdir(parents=True)
    data.mkdir(parents=True)
    assembly, rows = Assembly(folder, VOCAB, EOS, 9000), []
    for i in range(count):
        tokens = np.array([*[rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 150))], EOS], np.uint16)
        targets = np.array([rng.random() < 0.8 for _ in tokens], np.uint8)
        assembly.add(ImportedDocuments("", i % 300, tokens, np.array([len(tokens)]), None, targets if i % 3 else None),
                     [f"{seed}{i:031x}"], i // 300, np.ones(1, bool))
        rows.append({"id": f"{seed}{i:031x}", "text": f"text {i}, ask jo@{name}.example", "language": LANGUAGES[i % 2],
                     "url": f"https://{name}.example/{i}" if i % 5 else None, "source": SOURCES[i * i % 7 % 3],
                     "locator": {"file": f"{name}/{i}.txt", "offset": 0}, "meta": json.dumps({"title": f"number {i}"}),
                     "signals": {"quality": i / 7, "quality_bucket": float(i % 4) if i % 9 else None}})
    parts = {f"part-{p:06d}.parquet": f"{seed}{p:063x}" for p in range(-(-count // 300))}
    for p, part in enumerate(parts):
        write_table(pa.Table.from_pylist(rows[p * 300:p * 300 + 300]), data / part, row_group_size=70)
    write_table(pa.table({"part": list(parts), "key": list(parts.values())}), data / ".manifest")
    manifest = Manifest.of(name, "train", TOKENIZER["sha256"], VOCAB, EOS, assembly.close(), tuple(parts.values()))
    (folder / MANIFEST).write_text(manifest.dumps())
    train = {"path": f"shards/{name}/split=train", "sha256": manifest.sha256, "tokens": manifest.tokens,
             "documents": count, "bytes": 0}
    return {"name": name, "tokenizer": TOKENIZER["sha256"], "dtype": "uint16", "train": train, "val": None}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("samples") / "store"
    sets = {name: make_stream(top, name, seed, 500) for seed, name in enumerate(("web", "code"), 1)}
    recipe = {"curriculum": {"seed": 1, "total": 30720, "phases": PHASES},
              "shards": {name: {"longest": 64} for name in sets}, "train": {"model": MODEL, "optimizer": {"lr": 0.01}}}
    run = top / "runs" / "toy"
    run.mkdir(parents=True)
    resolve(recipe, sets, TOKENIZER)[0].save(run / "curriculum.json")
    (run / "recipe.yaml").write_text(yaml.safe_dump({k: v for k, v in recipe.items() if k != "train"}))
    return top


@pytest.fixture(scope="module")
def curriculum(store: Path) -> Curriculum:
    return Curriculum.load(store / "runs/toy/curriculum.json")


def test_explain_shows_what_the_trainer_says_of_the_step(store, curriculum, tokenmill):
    from trainer.loop.run import open_run
    from trainer.tools.explain import explain

    recipe = store / "runs/toy/recipe.yaml"
    without = recipe.read_text()
    for step in (1, 50, curriculum.steps):
        [ours] = tokenmill("shards", "explain", store / "runs/toy", "--step", step, "--json").json()
        recipe.write_text(without + yaml.safe_dump({"train": {"model": MODEL, "optimizer": {"lr": 0.01}}}))
        opened = open_run(str(store / "runs/toy"), None, None, [])
        theirs = [row for number in range(len(ours["rows"])) for row in explain(opened, step, number + 1)["rows"]]
        recipe.write_text(without)
        for row in theirs:
            del row["loss"]
            for document in row["documents"]:
                mask(document)
        assert ours["rows"] == theirs
        assert (ours["step"], ours["not_at_hand"]) == (step, None)
        sample = ours["rows"][1]["sample"]
        [one] = tokenmill("shards", "explain", "toy", "--store", store, "--sample", sample, "--json").json()
        assert one["rows"] == [ours["rows"][1]] and one["step"] == step
        shown = tokenmill("shards", "explain", store / "runs/toy", "--sample", sample).out
        for document in one["rows"][0]["documents"]:
            assert document["id"] in shown and "jo@" not in shown
            assert (document["url"] or document["locator"]["file"]) in shown


def test_a_document_that_was_dropped_since_is_shown_with_the_kept_one(store, curriculum, tokenmill, tmp_path):
    data, aside = store / "datasets/web-clean", tmp_path / "aside"
    [before] = tokenmill("shards", "explain", store / "runs/toy", "--step", 2, "--json").json()
    documents = [d for row in before["rows"] if row["stream"] == "web" for d in row["documents"]]
    data.rename(aside)
    dropped = store / "dropped/web-clean"
    dropped.mkdir(parents=True)
    gone = documents[0]["id"]
    write_table(pa.Table.from_pylist([
        {"id": gone, "url": "https://web.example/old", "locator": {"file": "x"}, "source": "blog", "language": "de",
         "meta": json.dumps({"minhash": {"kept": "f" * 32, "similarity": 0.9}}), "stage": "minhash",
         "reason": "near_duplicate"}]), dropped / "part.parquet")
    write_table(pa.table({"part": ["part.parquet"], "key": ["k"], "sha256": [""]}), dropped / ".manifest")
    try:
        [now] = tokenmill("shards", "explain", store / "runs/toy", "--step", 2, "--json").json()
        shown = tokenmill("shards", "explain", store / "runs/toy", "--step", 2).out
    finally:
        for path in (dropped / "part.parquet", dropped / ".manifest"):
            path.unlink()
        dropped.rmdir()
        aside.rename(data)
    found = {d["id"]: d for row in now["rows"] for d in row["documents"]}
    assert (found[gone]["verdict"], found[gone]["kept"], found[gone]["reason"]) == ("dropped", "f" * 32,
                                                                                   "near_duplicate")
    assert f"by minhash (near_duplicate); kept in its place: {'f' * 32}" in shown
    others = {d["id"] for d in documents} - {gone}
    assert others and all("dataset" not in found[id] for id in others)
    assert "are not in the datasets of the store any more" in now["not_at_hand"]


def counted(store: Path, curriculum: Curriculum, ranges: list[tuple[int, int]]) -> tuple[Counter, Counter]:
    """Count the tokens and the targets of each (label, value, phase), token by token."""
    tokens, targets = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    at = Order(curriculum).locate(0, curriculum.samples)
    sets = [ShardSet(store / stream.train) for stream in curriculum.streams]
    for sample in (n for first, stop in ranges for n in range(first, stop)):
        shards, window, length = sets[at.stream[sample]], int(at.window[sample]), int(at.sequence[sample])
        start = window * length + 1
        counts = shards.counts(start, start + length)
        assert counts is not None
        learned = counts & loss_mask(shards.bounds(window, length), length)
        for span in shards.documents(start, start + length):
            number = int(span.id[1:], 16)
            mine = slice(max(span.start - start, 0), min(span.stop - start, length))
            bucket = f"{number % 4}" if number % 9 else ""
            phase = curriculum.phases[at.phase[sample]].name
            for label, value in (("source", SOURCES[number * number % 7 % 3]), ("language", LANGUAGES[number % 2]),
                                 ("quality_bucket", bucket)):
                tokens[label, value, phase] += mine.stop - mine.start
                targets[label, value, phase] += int(learned[mine].sum())
    return tokens, targets


@pytest.mark.parametrize("steps", [None, [(1, 30)], [(3, 8), (9, 21), (60, 80)]])
def test_counts_are_those_of_all_samples_one_by_one(store, curriculum, steps):
    ranges = [(0, curriculum.samples)] if steps is None else [
        (step_at(curriculum, first).first, step_at(curriculum, stop - 1).stop) for first, stop in steps]
    tokens, targets = counted(store, curriculum, ranges)
    for block in (64, 1000, 1 << 20):
        result = count_documents(Store(store), curriculum, ranges, block=block)
        rows = {(row["label"], row["value"], row["phase"]): row for row in result["rows"] if row["tokens"]}
        assert {key: row["tokens"] for key, row in rows.items()} == {key: n for key, n in tokens.items() if n}
        assert all(row["targets"] == targets[key] and row["error"] == 0 for key, row in rows.items())
        assert result["exact"] and result["read"] == 1 and not result["missing"]
    at = Order(curriculum).locate(0, curriculum.samples)
    chosen = np.concatenate([np.arange(*r) for r in ranges])
    for row in realised_in(curriculum, ranges):
        mine = (at.phase[chosen] == [p.name for p in curriculum.phases].index(row["phase"])) & (
            at.stream[chosen] == [s.name for s in curriculum.streams].index(row["stream"]))
        assert (row["realised"], row["tokens"]) == (mine.sum(), at.sequence[chosen][mine].sum())
        assert abs(row["realised"] - row["planned"]) <= 2 * len(ranges)


def test_a_sample_belongs_to_one_step(curriculum):
    steps = [step_of(curriculum, sample) for sample in range(curriculum.samples)]
    assert all((at := step_at(curriculum, step)).first <= sample < at.stop for sample, step in enumerate(steps))
    for sample in (-1, curriculum.samples):
        with pytest.raises(CurriculumError, match=str(sample)):
            step_of(curriculum, sample)


def test_a_document_that_is_read_in_several_blocks_is_missing_once(store, curriculum, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    shutil.rmtree(tmp_path / "store/datasets")
    at, sets = Order(curriculum).locate(0, curriculum.samples), [ShardSet(store / s.train) for s in curriculum.streams]
    read = {span.id for stream, window, length in zip(at.stream, at.window, at.sequence)
            for span in sets[stream].documents(window * length + 1, window * length + 1 + length)}
    for block in (64, 1000, 1 << 20):
        found = count_documents(Store(tmp_path / "store"), curriculum, [(0, curriculum.samples)], block=block)
        assert found["missing"] == len(read)


def test_a_share_is_an_estimate_whose_intervals_hold_the_counts(store, curriculum):
    ranges = [(0, curriculum.samples)]
    tokens, _ = counted(store, curriculum, ranges)
    misses = cells = 0
    for share in (0.5, 0.34, 0.25, 0.2):
        result = count_documents(Store(store), curriculum, ranges, share, block=64)
        assert not result["exact"] and share - 0.05 < result["read"] < share + 0.05
        for row in result["rows"]:
            truth = tokens[row["label"], row["value"], row["phase"]]
            cells, misses = cells + 1, misses + (abs(row["tokens"] - truth) > row["error"])
            assert abs(row["tokens"] - truth) < 3 * row["error"] + 1
        for phase in curriculum.phases:
            of_phase = [row for row in result["rows"] if row["phase"] == phase.name]
            for label in ("source", "language", "quality_bucket"):
                total = sum(row["tokens"] for row in of_phase if row["label"] == label)
                assert total == pytest.approx(phase.tokens, abs=4)
    assert misses < 0.15 * cells


def test_the_command_counts_the_steps_that_a_training_has_performed(store, curriculum, tokenmill, tmp_path):
    def step(number: int, **more: object) -> dict[str, object]:
        return {"event": "step", "step": number, "targets": 100, "loss": 2.0, "lr": 0.1, **more}

    def masked(number: int, **more: object) -> dict[str, object]:
        """A step all of whose tokens are masked. It is computed, and so counts, although it has no targets."""
        return step(number, targets=0, loss=None, **more)

    def passed_over(number: int) -> dict[str, object]:
        return {k: v for k, v in masked(number, skipped=True, why="rewind").items() if k != "lr"}

    lines = [{"event": "start", "step": 0}, *map(step, range(1, 10)), step(10, skipped=True, why="norm"),
             *map(step, range(11, 20)), masked(20), {"event": "rewind", "step": 8, "steps": [10, 12]}, step(9),
             *map(passed_over, (10, 11)), *map(step, range(12, 31)),
             {"event": "resume", "step": 25}, step(26, skipped=True, why="loss"), masked(27, skipped=True, why="norm")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"v": 1, **line}) + "\n" for line in lines))
    (tmp_path / "ledger.jsonl").write_text(json.dumps(
        {"v": 1, "event": "rewind", "step": 20, "steps": [10, 12], "back": 8, "checkpoint": "c", "why": "w"}) + "\n")
    said = tokenmill("shards", "realised", store / "runs/toy", "--training", tmp_path, "--rows", "--json")
    assert said.code == 0, said.err
    [told] = said.json()
    assert told["training"] == {"last": 27, "skipped": [[10, 12]], "unchanged": 2, "abandoned": 12 + 5}
    ranges = [(step_at(curriculum, first).first, step_at(curriculum, last).stop) for first, last in ((1, 9), (12, 27))]
    assert told["mixture"] == realised_in(curriculum, ranges)
    assert told["samples"] == sum(stop - first for first, stop in ranges)
    assert told["documents"] == count_documents(Store(store), curriculum, ranges)
    assert told["order_quality"]["repeats"]["pairs"] >= 0
    shown = tokenmill("shards", "realised", store / "runs/toy", "--training", tmp_path, "--rows").out
    assert "up to step 27: 2 steps skipped, 2 read without an update, 17 undone" in shown and "all rows" in shown
    assert all(source in shown for source in SOURCES)


@pytest.mark.parametrize(("arguments", "words"), [
    (("explain", "RUN"), "--step and --sample"), (("explain", "RUN", "--step", "1", "--sample", "1"), "--step and"),
    (("explain", "RUN", "--step", "9999"), "--step 9999"), (("explain", "RUN", "--sample", "99999"), "--sample 99999"),
    (("realised", "RUN", "--rows", "--share", "0"), "--share 0"), (("realised", "RUN", "--share", "x%"), "--share x%"),
    (("realised", "RUN", "--training", "nosuch"), "nosuch/metrics.jsonl"), (("realised", "RUN2"), "nosuch"),
    (("head", "SET", "--at", "99999999"), "--at"), (("find", "SET"), "--url"),
    (("find", "SET", "--id", "1", "--url", "x"), "--url"), (("find", "SET", "--domain", "http://a.b/"), "--domain")])
def test_mistakes_are_named_in_a_line(store, tokenmill: Callable[..., Said], arguments, words):
    names = {"RUN": str(store / "runs/toy"), "RUN2": str(store / "runs/nosuch"),
             "SET": str(store / "shards/web/split=train")}
    said = tokenmill("shards", *(names.get(word, word) for word in arguments))
    assert said.code == 2 and words in said.err and len(said.err.strip().splitlines()) == 1


# -- find and head -----------------------------------------------------------------------------------------------------
def test_find_finds_the_same_with_and_without_an_index(store, tokenmill):
    shards = store / "shards/web/split=train"
    asked = [("--id", f"1{7:031x}"), ("--id", "1" + "0" * 28), ("--url", "https://web.example/8"),
             ("--domain", "web.example"), ("--domain", "WWW.web.example")]
    scanned = [tokenmill("shards", "find", shards, *pair, "-n", 0, "--json") for pair in asked]
    assert all("has no index" in said.err for said in scanned)
    [made] = tokenmill("shards", "index", shards, "--json").json()
    try:
        assert made["documents"] == 500
        for pair, before in zip(asked, scanned, strict=True):
            said = tokenmill("shards", "find", shards, *pair, "-n", 0, "--json")
            assert said.err == "" and sorted(said.out.splitlines()) == sorted(before.out.splitlines())
        assert [len(said.json()) for said in scanned] == [1, 500, 1, 400, 400]
        first = tokenmill("shards", "find", shards, "--domain", "web.example", "-n", 3)
        assert len(first.out.splitlines()) == 3 and "more than 3" in first.err
        for pair in (("--url", "https://web.example/5"), ("--domain", "code.example"), ("--id", "0" * 32)):
            said = tokenmill("shards", "find", shards, *pair)
            assert said.code == 1 and pair[1] in said.err
    finally:
        Path(made["index"]).unlink()


def test_the_document_of_a_token(store):
    shards = ShardSet(store / "shards/web/split=train")
    spans = shards.documents(0, shards.tokens)
    tokens = np.array([t for span in spans for t in (span.start, span.stop - 1)])
    assert shards.document_numbers(tokens).tolist() == [n for n in range(len(spans)) for _ in range(2)]
