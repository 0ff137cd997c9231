"""`substring` cuts exactly those passages that a search through all texts before would find."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.store.fs import Store
from stages.dedup.fragment import SIZES
from stages.dedup.substring import Substring
from stages.dedup.substring_tasks import _RUN, CHUNK, PROVED, _needed, cuts_of
from stages.dedup.windows import merged, run_hashes, seed_length, seeds_of, window_seeds, windows_with
from stages.document import storable_text
from tests.stages.dedup_fragment import Doc, run_fragment, write_parts

PRIME, BASE = (1 << 61) - 1, 0x1A37F2C94D6B8E51


def brute_force(docs: list[Doc], length: int, ranks: dict[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Return {id: ranges of bytes of repeated windows}, by looking up each window in a dict."""
    first: dict[bytes, tuple[str, int]] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
    for doc in sorted(docs, key=lambda d: (ranks.get(d.dataset, 0), d.name)):
        data = doc.text.encode()
        for start in range(len(data) - length + 1):
            owner, place = first.setdefault(data[start:start + length], (doc.name, start))
            if (owner, place) == (doc.name, start) or (owner == doc.name and start < place + length):
                continue
            found = spans.setdefault(doc.name, [])
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], start + length
            else:
                found.append((start, start + length))
    return spans


def cuts(docs: list[Doc], store: Store, *, part_rows: int = 3, sizes=SIZES, shuffle: int | None = None,
         ranks: dict[str, int] | None = None, **config) -> tuple[dict[str, list[tuple[int, int]]], list]:
    barrier = Substring(config)
    barrier.sizes = sizes
    parts = write_parts(barrier, docs, store, part_rows=part_rows, ranks=ranks)
    outcome = run_fragment(barrier, parts, store, shuffle=shuffle)
    spans: dict[str, list[tuple[int, int]]] = {}
    for part, ref in zip(parts, outcome.slices, strict=True):
        if ref is None:
            continue
        with store.open(part.text["$ref"]) as text, store.open(ref["$ref"]) as slice:
            ids = pq.read_table(text, columns=["id"])["id"].to_pylist()
            for row in pq.read_table(slice).to_pylist():
                spans[ids[row["row"]]] = [(cut["start"], cut["end"]) for cut in row["cuts"]]
    return spans, outcome


def corpus(seed: int, alphabet: str, count: int = 24) -> list[Doc]:
    """Return texts that share passages of all lengths, within and across documents. Some are periodic."""
    draw = random.Random(seed)
    passages = ["".join(draw.choices(alphabet, k=draw.randrange(4, 90))) for _ in range(8)]
    docs = []
    for number in range(count):
        pieces = [draw.choice([draw.choice(passages), "".join(draw.choices(alphabet, k=draw.randrange(1, 60))),
                               alphabet[0] * draw.randrange(1, 80)]) for _ in range(draw.randrange(0, 7))]
        docs.append(Doc("".join(pieces), ("web", "books")[number % 2], f"{draw.getrandbits(128):032x}"))
    return docs


@pytest.mark.parametrize("alphabet", ["ab", "abcdefghij", "aé漢😀"])
@pytest.mark.parametrize("seed", range(2))
def test_cuts_equal_a_search_through_all_texts(tmp_path, seed, alphabet):
    docs, ranks = corpus(seed, alphabet), {"books": 0, "web": 1}
    expected = brute_force(docs, 24, ranks)
    assert expected
    for part_rows, sizes in ((24, SIZES), (1, SIZES), (5, replace(SIZES, group_bytes=300, bucket_bytes=500,
                                                                  segment_bytes=10))):
        got, outcome = cuts(docs, Store(tmp_path / f"{part_rows}"), part_rows=part_rows, sizes=sizes, ranks=ranks,
                            shuffle=seed, length=24, merge=1)
        assert got == expected
        assert outcome.counters["check"]["refuted"] == 0
        assert outcome.counters["slices"]["cut"]["web"]["bytes"] == sum(
            end - start for doc in docs if doc.dataset == "web" for start, end in expected.get(doc.name, ()))


@pytest.mark.parametrize("alphabet", ["ab", "abcdefghij"])
def test_blocks_of_a_few_records_change_nothing(tmp_path, monkeypatch, alphabet):
    """Records of one hash, and runs of windows, then lie in several blocks."""
    import pipeline.engine.shuffle.exchange as exchange
    from pipeline.engine.shuffle.merge import MergeLimits

    def tiny(store, refs, bucket, **how):
        blocks = merge_segments(store, refs, bucket, MergeLimits(memory=200, block=40, fan_in=2), **how)
        if how.get("whole"):
            yield from blocks
        else:
            yield from (block[i:i + 1 + i % 3] for block in blocks for i in _steps(len(block)))

    def _steps(size):
        at = 0
        while at < size:
            yield at
            at += 1 + at % 3

    merge_segments = exchange.merge_segments
    docs, ranks = corpus(9, alphabet), {"books": 0, "web": 1}
    expected = brute_force(docs, 24, ranks)
    assert expected
    monkeypatch.setattr(exchange, "merge_segments", tiny)
    got, _ = cuts(docs, Store(tmp_path), part_rows=2, ranks=ranks, length=24, merge=1, sizes=replace(
        SIZES, group_bytes=300, bucket_bytes=500, segment_bytes=10))
    assert got == expected


def test_texts_with_odd_contents_are_cut_as_a_search_would(tmp_path):
    """Lone surrogates are stored as U+FFFD, so seeds must be those of this text."""
    odd = "".join(f"\ud800 \x00 {n % 3}" for n in range(30))
    texts = ["", "x", odd, "before " + odd, "\x00" * 500, odd[:50], "a" * 700, "a" * 23, "a" * 24]
    docs = [Doc(text, "web", f"{n:032x}") for n, text in enumerate(texts)]
    stored = [replace(doc, text=storable_text(doc.text)) for doc in docs]
    expected = brute_force(stored, 24, {})
    got, _ = cuts(docs, Store(tmp_path), length=24, merge=1)
    assert got == expected and f"{3:032x}" in expected


def test_a_long_run_of_one_byte_costs_little(tmp_path):
    docs = [Doc("a" * 300_000, "web", "0" * 32), Doc("b" + "a" * 200_000 + "c", "web", "1" * 32)]
    got, outcome = cuts(docs, Store(tmp_path), length=500, merge=1)
    assert got == {"0" * 32: [(500, 300_000)], "1" * 32: [(1, 200_001)]}
    assert outcome.counters["seeds"]["seeds"] < 3_000 and outcome.counters["runs"]["runs"] < 2_100


def test_windows_that_are_written_in_several_blocks_are_compared_with_each_other(tmp_path):
    lengths = 700_000, 400_000, 2_000
    docs = [Doc(f"{n}" + "a" * length + f"{n}", "web", f"{n}" * 32) for n, length in enumerate(lengths)]
    got, outcome = cuts(docs, Store(tmp_path), length=500, merge=1)
    assert outcome.counters["windows"]["windows"] - lengths[-1] > CHUNK, "the last document is in another block"
    assert got == {"0" * 32: [(501, 700_001)], "1" * 32: [(1, 400_001)], "2" * 32: [(1, 2_001)]}


def test_the_copy_in_the_dataset_with_priority_stays(tmp_path):
    passage = "The same words stand in both of these documents, and one copy stays."
    docs = [Doc("First. " + passage + " End.", "web", "0" * 32), Doc(passage + " Another end.", "books", "f" * 32)]
    for ranks, loser in (({"web": 0, "books": 1}, "f" * 32), ({"web": 1, "books": 0}, "0" * 32)):
        got, _ = cuts(docs, Store(tmp_path / loser[:1]), ranks=ranks, length=40, merge=1)
        assert list(got) == [loser]


def test_equal_hashes_of_different_bytes_cut_nothing(tmp_path, monkeypatch):
    """Every window gets the hash of another: only the comparison of bytes stands between them and a cut."""
    import stages.dedup.substring_tasks as tasks

    def colliding(data, window, shared):
        for hashes, starts in windows_with(data, window, shared):
            yield hashes % np.uint64(3), starts

    docs = corpus(1, "abcdefghij")
    expected = brute_force(docs, 24, {})
    monkeypatch.setattr(tasks, "windows_with", colliding)
    got, outcome = cuts(docs, Store(tmp_path), length=24, merge=1)
    assert outcome.counters["check"]["refuted"] > 100
    for name, spans in got.items():
        assert all(any(a <= start and end <= b for a, b in expected.get(name, ())) for start, end in spans)


def test_a_passage_names_the_document_with_the_first_copy(tmp_path):
    passage = "These words stand in three documents, of which the first keeps them."
    docs = [Doc(f"{i}{passage}{i * 7}", "web", f"{i}" * 32) for i in (3, 1, 2)]
    barrier = Substring(length=40)
    parts = write_parts(barrier, docs, Store(tmp_path), part_rows=1)
    outcome = run_fragment(barrier, parts, Store(tmp_path))
    for doc, ref in zip(docs, outcome.slices, strict=True):
        if doc.name[0] == "1":
            assert ref is None
            continue
        with Store(tmp_path).open(ref["$ref"]) as file:
            [row] = pq.read_table(file).to_pylist()
        assert [(cut["match"], cut["reason"]) for cut in row["cuts"]] == [("1" * 32, "repeated")]


def test_tasks_are_reused_when_a_new_part_shares_nothing(tmp_path):
    docs = corpus(2, "abcdefghij")
    sizes = replace(SIZES, group_bytes=1)                                   # a group for each part
    _, before = cuts(docs, Store(tmp_path), sizes=sizes, length=24)
    _, after = cuts([*docs, Doc("ZYX" * 30, "zoo", "e" * 32)], Store(tmp_path), sizes=sizes, length=24)
    assert set(before.keys["seeds"]) < set(after.keys["seeds"])


# -- the parts of the algorithm ---------------------------------------------------------------------------------------
def slow_hashes(data: bytes, width: int) -> list[int]:
    out = []
    for start in range(len(data) - width + 1):
        hashed = 0
        for byte in data[start:start + width]:
            hashed = (hashed * BASE + byte + 1) % PRIME
        hashed ^= hashed >> 33
        hashed = hashed * 0xFF51AFD7ED558CCD % 2**64
        hashed ^= hashed >> 33
        hashed = hashed * 0xC4CEB9FE1A85EC53 % 2**64
        out.append(hashed ^ hashed >> 33)
    return out


@settings(deadline=None, max_examples=150)
@given(st.one_of(st.binary(max_size=150), st.text("ab", max_size=150).map(str.encode)), st.integers(1, 40))
def test_hashes_and_seeds_equal_their_definition(data, window):
    array = np.frombuffer(data, np.uint8)
    assert run_hashes(array, window, 0, len(data) - window + 1).tolist() == slow_hashes(data, window)
    width = seed_length(window)
    hashes = slow_hashes(data, width)
    inside = window - width + 1
    expected: list[int] = []
    for i in range(max(0, len(data) - window + 1)):
        least = min(hashes[i:i + inside])
        stays = expected and expected[-1] >= i and hashes[expected[-1]] == least
        expected.append(expected[-1] if stays else max(p for p in range(i, i + inside) if hashes[p] == least))
    places, firsts = window_seeds(np.array(hashes, np.uint64), inside)
    assert np.repeat(places, np.diff(np.r_[firsts, len(expected)])).tolist() == expected
    seeds, places = seeds_of(array, window)
    assert places.tolist() == sorted(set(expected)) and seeds.tolist() == [hashes[p] for p in sorted(set(expected))]
    for most in (7, 1):
        block_seeds, block_places = seeds_of(array, window, most)
        assert set(block_seeds.tolist()) == set(seeds.tolist())
        assert (np.diff(block_places.astype(np.int64)) > 0).all()
        assert block_seeds.tolist() == [hashes[p] for p in block_places.tolist()]
    some = np.unique(seeds[::2])
    wanted = [i for i, place in enumerate(expected) if hashes[place] in set(some.tolist())]
    for most in (1 << 20, 7):
        blocks = list(windows_with(array, window, some, most))
        assert all(len(starts) <= most for _, starts in blocks)
        assert [start for _, starts in blocks for start in starts.tolist()] == wanted
        assert [h for got, _ in blocks for h in got.tolist()] == [slow_hashes(data, window)[i] for i in wanted]


def test_spans_are_joined_while_enough_of_them_is_covered():
    assert merged([(0, 95), (100, 200)], 0.95) == [(0, 200)]                # 195 of 200
    assert merged([(0, 94), (100, 120), (130, 900)], 0.99) == [(0, 94), (100, 120), (130, 900)]
    assert merged([(0, 50), (60, 100), (101, 1000)], 0.95) == [(0, 1000)]    # the third span brings the first one in
    assert merged([(0, 50), (51, 60)], 1) == [(0, 50), (51, 60)]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), unique=True), st.integers(1, 9), st.integers(1, 5))
def test_as_few_spans_as_possible_cover_the_same_bytes(spans, width, size):
    """In blocks of any size."""
    runs = np.zeros(len(spans), _RUN)
    for i, (row, start) in enumerate(sorted(spans)):
        runs[i]["row"], runs[i]["start"], runs[i]["stop"] = row, start, start + width
    kept = np.concatenate([*_needed(iter([runs[i:i + size] for i in range(0, len(runs), size)]))])

    def covered(some):
        return {(int(r["row"]), byte) for r in some for byte in range(int(r["start"]), int(r["stop"]))}

    assert covered(kept) == covered(runs) and set(kept["start"].tolist()) <= set(runs["start"].tolist())
    for own in (kept[kept["row"] == row] for row in range(3)):
        assert (own["start"][2:] > own["stop"][:-2]).all()                   # otherwise the one between is not needed


def test_overlapping_and_touching_passages_are_one_cut():
    records = np.zeros(3, PROVED)
    records["start"], records["stop"], records["id_lo"] = [10, 30, 60], [40, 60, 90], [1, 2, 3]
    assert cuts_of(records, 1) == [{"start": 10, "end": 90, "reason": "repeated", "match": f"{1:032x}"}]


# -- tokens -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """A byte-level BPE tokenizer, trained on other texts of the same alphabets. Some of its tokens end inside a
    character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    texts = [doc.text for alphabet in ("ab", "abcdefghij", "aé漢😀") for doc in corpus(99, alphabet)]
    made.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|endoftext|>"], show_progress=False, max_token_length=3,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def brute_force_tokens(docs: list[Doc], length: int, ranks: dict[str, int], path: str) -> dict[str, list]:
    """Return {id: ranges of bytes of repeated windows of tokens}, by looking up each window in a dict."""
    from tokenizers import Tokenizer, pre_tokenizers

    native = Tokenizer.from_file(path)
    native.encode_special_tokens = True
    known = set(pre_tokenizers.ByteLevel.alphabet())
    first: dict[tuple[int, ...], tuple[str, int]] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
    for doc in sorted(docs, key=lambda d: (ranks.get(d.dataset, 0), d.name)):
        encoding = native.encode(doc.text, add_special_tokens=False)
        assert all(set(token) <= known for token in encoding.tokens)
        places = [0]
        for token in encoding.tokens:
            places.append(places[-1] + len(token))
        for start in range(len(encoding.ids) - length + 1):
            owner, place = first.setdefault(tuple(encoding.ids[start:start + length]), (doc.name, start))
            if (owner, place) == (doc.name, start) or (owner == doc.name and start < place + length):
                continue
            found = spans.setdefault(doc.name, [])
            if found and places[start] <= found[-1][1]:
                found[-1] = found[-1][0], places[start + length]
            else:
                found.append((places[start], places[start + length]))
    return spans


@pytest.mark.parametrize("alphabet", ["ab", "abcdefghij", "aé漢😀"])
@pytest.mark.parametrize("seed", range(2))
def test_cuts_of_tokens_equal_a_search_through_the_tokens_of_all_texts(tmp_path, seed, alphabet, tokenizer):
    docs, ranks = corpus(seed, alphabet), {"books": 0, "web": 1}
    expected = brute_force_tokens(docs, 16, ranks, tokenizer)
    assert expected
    for part_rows, sizes in ((24, SIZES), (5, replace(SIZES, group_bytes=300, bucket_bytes=500, segment_bytes=10))):
        got, outcome = cuts(docs, Store(tmp_path / f"{part_rows}"), part_rows=part_rows, sizes=sizes, ranks=ranks,
                            shuffle=seed, length=16, merge=1, unit="tokens", tokenizer=tokenizer)
        assert got == expected
        assert outcome.counters["check"]["refuted"] == 0


def test_equal_hashes_of_different_tokens_cut_nothing(tmp_path, monkeypatch, tokenizer):
    import stages.dedup.substring_tasks as tasks

    def colliding(data, window, shared):
        for hashes, starts in windows_with(data, window, shared):
            yield hashes % np.uint64(3), starts

    docs = corpus(1, "abcdefghij", 32)
    expected = brute_force_tokens(docs, 16, {}, tokenizer)
    monkeypatch.setattr(tasks, "windows_with", colliding)
    got, outcome = cuts(docs, Store(tmp_path), length=16, merge=1, unit="tokens", tokenizer=tokenizer)
    assert outcome.counters["check"]["refuted"] > 100
    for name, spans in got.items():
        assert all(any(a <= start and end <= b for a, b in expected.get(name, ())) for start, end in spans)


def test_the_tokenizer_is_known_by_its_content_and_bytes_keep_their_key(tmp_path, tokenizer):
    copy, other = tmp_path / "copy.json", tmp_path / "other.json"
    text = Path(tokenizer).read_text()
    copy.write_text(text)
    other.write_text(text + "\n")
    steps = [Substring(unit="tokens", tokenizer=str(path)) for path in (tokenizer, copy, other)]
    assert steps[0].config.length == 50
    assert steps[0].key() == steps[1].key() != steps[2].key()
    assert Substring().prepare()[1] == {"length": 500} and Substring().key() == Substring(unit="bytes").key()
    for settings_ in ({"unit": "tokens"}, {"tokenizer": tokenizer}):
        with pytest.raises(ValueError, match="belong together"):
            Substring(settings_)


def test_a_tokenizer_that_does_not_spell_the_bytes_of_texts_is_refused(tmp_path, tokenizer):
    import json

    made = json.loads(Path(tokenizer).read_text())
    assert not Substring(unit="tokens", tokenizer=tokenizer).problems()
    made["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "lower.json").write_text(json.dumps(made))
    problems = Substring(unit="tokens", tokenizer=str(tmp_path / "lower.json")).problems()
    assert list(problems) == ["tokenizer"] and "set unit: bytes" in problems["tokenizer"]
    (tmp_path / "broken.json").write_text("{")
    assert list(Substring(unit="tokens", tokenizer=str(tmp_path / "broken.json")).problems()) == ["tokenizer"]
