"""Shards that are split by labels: every document is in exactly one stream, and the streams do not depend on how the
run was executed."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pipeline.recipe import load_recipe
from pipeline.recipe.errors import RecipeError
from pipeline.report.trim import trimmed
from pipeline.run import make_backend, run_name, run_recipe
from pipeline.store.fs import Store
from tests import commands
from tests.corpus import sentences
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.resolve import resolve_phases, stream_sizes
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.verify import verify

LANGUAGES = {"en": 0.6, "de": 0.3, "zh": 0.09, "": 0.01}
BY = "by: [language, {signal.score: [0.25, 0.5, 0.75]}], min_tokens: 5500,"
RECIPE = """
version: 1
sources:
  web: {read: jsonl, path: texts/*.jsonl, language: lang, signals: [score], keep: [topic]}
datasets:
  all: {from: web}
tokenizer: {train: {kind: bpe, vocab: 400, from: all, sample: 50KB}}
shards:
  web: {from: all, BY longest: 128, val: 5%}
curriculum:
  seed: 3
  total: 40k
  phases:
    - {name: stable, until: 70%, sequence: 64, batch: 512, on_exhausted: repeat, mix: MIX}
    - {name: anneal, until: 100%, lr: decay, mix: {web: {share: 100, by: language, unimax: 4}}}
run: {partition: PARTITION}
"""
MIX = "{web: {share: 100, by: language, alpha: 0.3, within: {by: signal.score, upsample: {b00: 0, b03: 3}}}}"


def write_site(folder: Path) -> Path:
    rng, prose = random.Random(7), sentences()
    (folder / "texts").mkdir(parents=True)
    for file in range(4):
        rows = []
        for _ in range(150):
            [lang] = rng.choices(list(LANGUAGES), list(LANGUAGES.values()))
            row = {"text": " ".join(rng.sample(prose, 6)), "topic": rng.choice(["art & craft", "sport"])}
            if lang:
                row["lang"] = lang
            if rng.random() < 0.95:
                row["score"] = round(rng.random(), 3)
            rows.append(json.dumps(row))
        (folder / f"texts/{file}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def recipe(folder: Path, name: str = "recipe", by: str = BY, partition: str = "40KB", mix: str = MIX) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.replace("BY", by).replace("MIX", mix).replace("PARTITION", partition))
    return path


def run(path: Path, store: Path, backend: str = "inline", workers: int = 1) -> Store:
    run_recipe(load_recipe(path), str(store), make_backend=make_backend(backend, workers, None))
    return Store(str(store))


def curriculum_of(store: Store, path: Path | None = None) -> Curriculum:
    """Return the curriculum of the run of the recipe at `path`, by default of the only run."""
    name = run_name(load_recipe(path)) if path else "*"
    [path] = (store.local / "runs").glob(f"{name}/curriculum.json")
    return Curriculum.loads(path.read_text(), str(path))


def bytes_of(store: Store) -> dict[str, bytes]:
    """Return the contents of all files of the shards, and the curriculum, by path."""
    return {p: store.read(p) for p in store.list("shards")} | {"curriculum": curriculum_of(store).dumps().encode()}


def documents(store: Store, stream: str) -> dict[str, Counter[tuple[str, bytes]]]:
    """Return the documents of a stream with their tokens, for each split, as {split: Counter of (id, tokens as
    bytes)}."""
    found = {}
    for split in ("train", "val"):
        shards = ShardSet(store.local / "shards" / stream / f"split={split}")
        found[split] = Counter((d.id, np.asarray(shards.read(d.start, d.stop)).tobytes())
                               for d in shards.documents(0, shards.tokens)) if shards.tokens else Counter()
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return write_site(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def split(site) -> Store:
    return run(recipe(site), site / "store")


@pytest.fixture(scope="module")
def streams(split) -> list[str]:
    return [stream.name for stream in curriculum_of(split).streams]


def test_rare_labels_are_put_together_within_their_language_first(streams):
    assert {"web.en.b00", "web.en.b03", "web.de.b01", "web.zh.other"} <= set(streams)
    assert "web.other" in streams                                                      # all documents without language
    assert not [s for s in streams if s.startswith("web.none")]


def test_streams_of_another_split_are_hidden_and_stay_for_earlier_trainings(site, tmp_path):
    store = run(recipe(site), tmp_path / "store")
    before = curriculum_of(store)
    for by, mix in (("by: language, min_tokens: 5500,", "{web: {share: 100, by: language}}"), ("", "{web: 100}"),
                    (BY, MIX)):
        path = recipe(site, "changed", by=by, mix=mix)
        if not by:
            path.write_text(path.read_text().replace("{web: {share: 100, by: language, unimax: 4}}", "{web: 100}"))
        run(path, tmp_path / "store")
        shown = {path.split("/")[1] for path in store.list("shards") if path.endswith("split=train/shards.json")}
        assert shown == {stream.name for stream in curriculum_of(store, path).streams}
        for stream in before.streams:
            ShardSet(store.local / stream.train, stream.sha256)


def test_every_document_is_in_one_stream_with_the_tokens_it_has_unsplit(site, split, streams):
    whole = recipe(site, "whole", by="", mix="{web: 100}")
    whole.write_text(whole.read_text().replace("{web: {share: 100, by: language, unimax: 4}}", "{web: 100}"))
    unsplit = documents(run(whole, site / "whole"), "web")
    for part in ("train", "val"):
        together: Counter = Counter()
        for stream in streams:
            together += documents(split, stream)[part]
        assert together == unsplit[part]
        assert set(together.values()) == {1}


def test_streams_hold_the_documents_of_their_labels(site, split, streams):
    rows = [json.loads(line) for path in sorted((site / "texts").glob("*.jsonl")) for line in path.open()]
    counts = Counter((row.get("lang"), int(np.searchsorted([0.25, 0.5, 0.75], row["score"], "right")))
                     for row in rows if "score" in row)
    for stream in streams:
        _, language, bucket = [*stream.split("."), ""][:3]
        if bucket.startswith("b"):
            of_stream = documents(split, stream)
            assert sum(map(len, of_stream.values())) == counts[language, int(bucket[1:])]


def test_shards_pass_their_checks(split, streams):
    for stream in streams:
        assert not list(verify(split.local / "shards" / stream / "split=train"))


def test_streams_are_equal_to_the_byte_with_workers_and_after_a_second_run(site, split, tmp_path):
    other = run(recipe(site), tmp_path / "store", "process", 2)
    assert bytes_of(other) == bytes_of(split)
    run(recipe(site), tmp_path / "store", "process", 2)
    assert bytes_of(other) == bytes_of(split)


def test_tokens_do_not_depend_on_the_size_of_partitions(site, split, streams, tmp_path):
    other = run(recipe(site, partition="11KB"), tmp_path / "store")
    for stream in streams:
        for part in ("train", "val"):
            bodies = [sorted(p for p in store.list(f"shards/{stream}/split={part}") if p.endswith(".tokens"))
                      for store in (split, other)]
            assert [split.read(p) for p in bodies[0]] == [other.read(p) for p in bodies[1]]


def test_the_curriculum_says_what_the_weights_were_made_from(split):
    curriculum = curriculum_of(split)
    first, second = curriculum.phases
    assert first.made == {"web": {"labels": ["language", "signal.score"], "share": 100, "by": "language", "alpha": 0.3,
                                  "within": {"by": "signal.score", "upsample": {"b00": 0, "b03": 3}}}}
    assert second.made["web"]["unimax"] == 4
    assert not any(name.endswith(".b00") for name in first.weights)
    assert Curriculum.loads(curriculum.dumps().encode(), "again") == curriculum


@pytest.mark.parametrize(("by", "mix", "key"), [
    ("by: [language, colour],", MIX, "shards.web.by[1]"),
    ("by: language, min_tokens: -1,", MIX, "shards.web.min_tokens"),
    ("min_tokens: 5,", "{web: 100}", "shards.web.min_tokens"),
    ("by: [language, language],", MIX, "shards.web.by"),
    ("by: bucket,", "{web: 100}", "shards.web.by"),
    ("by: signal.colour,", "{web: 100}", "shards.web.by"),
    ("by: [{signal.score: [2, 1]}],", "{web: 100}", "shards.web.by[0]"),
    ("by: language,", "{web: {share: 100, by: source}}", "curriculum.phases[0].mix.web.by"),
    ("by: language,", "{web: {share: 100, alpha: 1, curve: {}}}", "curriculum.phases[0].mix.web"),
    ("by: language,", "{web: {share: 100, within: {alpha: 1}}}", "curriculum.phases[0].mix.web.within"),
    ("", "{web: {share: 100, by: language}}", "curriculum.phases[0].mix.web"),
    ("by: language,", "{all: {share: 100, streams: [web]}}", "curriculum.phases[0].mix.all.streams[0]"),
    ("by: language,", "{web: {share: 100, by: language, curve: {cap: 0}}}", "curriculum.phases[0].mix.web.curve.cap"),
])
def test_an_error_names_its_key(site, by, mix, key):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe(site, "bad", by, mix=mix))
    assert key in str(error.value), error.value


def test_a_training_may_be_edited_by_labels_as_the_recipe_was_written(split):
    curriculum = curriculum_of(split)
    sizes = stream_sizes(curriculum.streams, curriculum.splits, curriculum.longest)
    entry = {"name": "more", "extra": "4k", "max_epochs": {"web": 9}, "lr": "stable",
             "mix": {"web": {"share": 1, "by": "language", "weights": {"de": 1}}}}
    [phase] = resolve_phases([entry], 1, sizes, [], curriculum.phases, splits=curriculum.splits)
    assert set(phase.weights) == {name for name in sizes if name.startswith("web.de.")}
    assert set(phase.max_epochs) == set(sizes)


def test_the_report_counts_each_stream_as_realised_does(split, streams, tokenmill):
    document = json.loads(split.read("report.json"))
    shown = document["tokens"]["web"]
    assert set(shown["streams"]) == set(streams)
    for stream, row in shown["streams"].items():
        sets = [ShardSet(split.local / "shards" / stream / f"split={part}") for part in ("train", "val")]
        assert [row["tokens"], row["val_tokens"]] == [shards.tokens for shards in sets]
    for kind in ("tokens", "val_tokens"):
        assert sum(row[kind] for row in shown["streams"].values()) == shown[kind]
    result = json.loads(tokenmill("shards", "realised", document["run"], "--store", str(split.local), "--json").out)
    read = Counter()
    for row in result["mixture"]:
        read[row["stream"]] += row["tokens"]
    assert {stream: row["read"] for stream, row in shown["streams"].items()} == {name: read[name] for name in streams}


def test_the_page_shows_the_largest_streams_and_combines_the_others(split, streams):
    document = json.loads(split.read("report.json"))
    whole = document["tokens"]["web"]
    document["tokens"]["web"]["val_tokens"] += 7                   # as if a stream were in no phase
    cut = trimmed(document, 3)[0]["tokens"]["web"]["streams"]
    largest = sorted(whole["streams"], key=lambda name: -whole["streams"][name]["tokens"])[:3]
    assert list(cut) == [*largest, f"{len(streams) - 3} more streams", "streams of no phase"]
    for kind in ("tokens", "val_tokens"):
        assert sum(row[kind] for row in cut.values()) == whole[kind]
    assert sum(row["read"] for row in cut.values()) == sum(row["read"] for row in whole["streams"].values())
    page = split.read(f"runs/{document['run']}/report.html").decode()
    assert "Streams of web" in page and all(stream in page for stream in streams)


def test_gc_and_a_second_run_keep_all_streams(site, split, streams, tokenmill):
    before = bytes_of(split)
    assert tokenmill("store", "gc", "--store", str(split.local)).code == 0
    assert bytes_of(split) == before
    for stream in streams[:2]:
        shown = tokenmill("shards", "stats", str(split.local / "shards" / stream / "split=train"))
        assert shown.code == 0 and stream in shown.out


def test_streams_are_equal_to_the_byte_after_kills(site, split, tmp_path):
    """Killed while parts are encoded and while shards are assembled, then finished."""
    args = ("run", str(recipe(site)), "--store", str(tmp_path / "store"), "--backend", "inline", "--quiet")
    for nth in (8, 10, 12):
        died = commands.command("tests.e2e.kill", "commit", str(nth), *args)
        assert died.returncode == -signal.SIGKILL, f"was not killed: {died.stdout}{died.stderr}"
    done = commands.command("pipeline.cli", *args)
    assert done.returncode == 0, done.stderr
    assert bytes_of(Store(str(tmp_path / "store"))) == bytes_of(split)


def test_a_damaged_piece_of_an_encoded_part_is_found_and_made_again(site, split, tmp_path):
    first = run(recipe(site), tmp_path / "store")
    before = {stream.sha256 for stream in curriculum_of(first).streams}
    for kind in ("tokens", "tables"):
        for path in (first.local / "objects").glob(f"*/*train.{kind}"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    path = recipe(site, "changed", by=BY.replace("5500", "9000"))
    changed, other = run(path, tmp_path / "store"), run(path, tmp_path / "other")                # assembles again
    shards = {path: data for path, data in bytes_of_shards(changed).items() if path in bytes_of_shards(other)}
    assert shards == bytes_of_shards(other)
    assert not {stream.sha256 for stream in curriculum_of(changed, path).streams} <= before   # some were assembled


def bytes_of_shards(store: Store) -> dict[str, bytes]:
    return {path: store.read(path) for path in store.list("shards")}
