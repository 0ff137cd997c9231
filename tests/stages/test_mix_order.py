"""The order in which a training reads samples: the permutations, and which windows each phase reserves. Both are
compared with slow references that follow the definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizer.webster import draw
from tokenizer.mixture.curriculum import Curriculum, CurriculumError, Order, Phase, Stream, TokenizerRef, edit
from tokenizer.mixture.permutation import permutation_key, permute, unpermute


def make(tokens: dict[str, int], phases: list[tuple], seed: int = 1, longest: int = 64) -> Curriculum:
    """Return a curriculum. `phases` are tuples (samples, sequence, batch, weights[, further fields])."""
    made, start = [], 0
    for i, (samples, sequence, batch, weights, *rest) in enumerate(phases):
        extra = rest[0] if rest else {}
        made.append(Phase(f"p{i}", start, samples, extra.get("reserved", samples), sequence, batch, weights, "stable",
                          extra.get("max_epochs", {}), extra.get("on_exhausted", "error"),
                          groups=extra.get("groups")))
        start += samples
    found = Curriculum(seed, TokenizerRef("t" * 64, 1000, 0, "tokenizer.json"), longest,
                       tuple(Stream(n, f"shards/{n}/split=train", None, "0" * 64, None, t, 0, "uint16")
                             for n, t in tokens.items()), tuple(made), "")
    return replace(found, order=Order(found).hash())


# -- permutation -------------------------------------------------------------------------------------------------
@given(st.integers(1, 2000), st.text(max_size=12))
def test_permutation_is_a_bijection_and_unpermute_its_inverse(n, key):
    out = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(out), np.arange(n))
    assert np.array_equal(unpermute(out, n, key), np.arange(n))


@given(st.integers(1, 1 << 61), st.data())
def test_inverse_holds_for_huge_domains(n, data):
    i = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)), np.int64)
    out = permute(i, n, "k")
    assert (out >= 0).all()
    assert (out < n).all()
    assert np.array_equal(unpermute(out, n, "k"), i)


def test_permutation_mixes():
    n = 200_000
    out = permute(np.arange(n), n, "a").astype(float)
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(np.arange(n), out)[0, 1]) < 0.01
    other = permute(np.arange(n), n, "b")
    assert (other == out).mean() < 1e-3
    # chi-square of where a tenth of the inputs lands in 100 bins: 99 degrees of freedom, mean 99, sd 14
    seen = np.histogram(out[: n // 10], 100, (0, n))[0]
    assert ((seen - n / 1000) ** 2 / (n / 1000)).sum() < 99 + 6 * 14


def test_permutation_refuses_what_is_outside():
    with pytest.raises(ValueError, match="outside a permutation of 5"):
        permute(np.array([5]), 5, "k")


def test_permutation_golden():
    assert permute(np.arange(10), 10, "v1/1/web/0/super").tolist() == GOLDEN_PERMUTATION
    assert permutation_key(1, "web", 0, "super") == "v1/1/web/0/super"


# -- the whole order ---------------------------------------------------------------------------------------------
def reference(c: Curriculum) -> list[tuple[int, int, int, int, int]]:
    """Compute the order by its definition, one sample at a time and with tables: reservations, then permutations, then
    draws."""
    names = [s.name for s in c.streams]
    supers = [(s.tokens - 1) // c.longest for s in c.streams]
    row = {(s, e): permute(np.arange(n), n, permutation_key(c.seed, names[s], e, "super")).tolist()
           for s, n in enumerate(supers) if n for e in range(40)}
    used, stock, out = [0] * len(names), {}, []
    for p, phase in enumerate(c.phases):
        weights = [phase.weights.get(n, 0) for n in names]
        ratio, L = c.longest // phase.sequence, phase.sequence
        order = draw(phase.reserved, weights, [[names.index(n) for n in group]
                                               for group in (phase.groups or {}).values()])
        for s in range(len(names)):
            queue = stock.setdefault((s, L), [])
            if queue and queue[0][0] != (used[s] - 1) // supers[s]:
                queue.clear()                                   # its epoch is over
            want, missing = order[:phase.samples].count(s), order.count(s) - len(queue)
            missing = -(-max(0, missing) // ratio)
            while len(queue) < want:
                epoch, first = divmod(used[s], supers[s])
                size = min(missing, supers[s] - first)
                windows = [row[s, epoch][first + k] * ratio + r for k in range(size) for r in range(ratio)]
                key = permutation_key(c.seed, names[s], epoch, p)
                queue += [(epoch, windows[int(q)]) for q in permute(np.arange(len(windows)), len(windows), key)]
                used[s], missing = used[s] + size, missing - size
        for s in order[:phase.samples]:
            epoch, window = stock[s, L].pop(0)
            out.append((p, s, epoch, window, L))
    return out


SETUPS = {
    "two phases": make({"a": 2000, "b": 900}, [(20, 32, 4, {"a": 3, "b": 1}), (6, 64, 2, {"a": 1, "b": 1})]),
    "lengths there and back": make({"a": 6000, "b": 5000}, [
        (30, 16, 5, {"a": 3, "b": 2}), (11, 64, 1, {"a": 1, "b": 1}), (33, 16, 3, {"a": 1, "b": 2}),
        (7, 32, 7, {"b": 1})]),
    "many epochs": make({"a": 333, "b": 4097}, [(40, 32, 4, {"a": 1, "b": 1}, {"on_exhausted": "repeat"}),
                                                (30, 16, 3, {"a": 5, "b": 1}, {"on_exhausted": "repeat"}),
                                                (9, 64, 3, {"a": 1}, {"on_exhausted": "repeat"}),
                                                (20, 16, 4, {"a": 5, "b": 1}, {"on_exhausted": "repeat"})]),
    "cut short": make({"a": 3000, "b": 3000}, [(10, 16, 5, {"a": 1, "b": 1}, {"reserved": 90}),
                                               (12, 16, 4, {"a": 2, "b": 1}), (4, 64, 2, {"a": 1})]),
    "forty streams": make({f"s{i:02}": 300 + 70 * i for i in range(40)}, [
        (90, 16, 5, {f"s{i:02}": 1 + i % 7 * 3 for i in range(40)}),
        (60, 32, 5, {f"s{i:02}": 1 for i in range(0, 40, 3)}, {"on_exhausted": "repeat"}),
        (60, 16, 5, {f"s{i:02}": 1 for i in range(40)}, {"on_exhausted": "repeat"})]),
    "groups": make({"a": 2000, "b": 900, "c": 4000, "d": 1500, "e": 700}, [
        (40, 32, 4, {"a": 3, "b": 1, "c": 4, "d": 1, "e": 1},
         {"groups": {"x": ["a", "b"], "y": ["e", "d"]}, "on_exhausted": "repeat"}),
        (20, 16, 4, {"a": 3, "b": 1, "c": 4}, {"groups": {"x": ["c", "b"]}, "on_exhausted": "repeat"})]),
}


@pytest.mark.parametrize("name", SETUPS)
def test_locate_equals_the_reference(name):
    c = SETUPS[name]
    c.validate()
    expected = reference(c)
    at = Order(c).locate(0, c.samples)
    assert list(zip(*(x.tolist() for x in at))) == expected


@pytest.mark.parametrize("name", SETUPS)
def test_any_cut_into_batches_gives_the_same_samples(name):
    c, rng = SETUPS[name], np.random.default_rng(0)
    order = Order(c)
    whole = np.stack(order.locate(0, c.samples))
    for _ in range(5):
        cuts = sorted({0, c.samples, *rng.integers(0, c.samples, 6).tolist()})
        parts = [np.stack(order.locate(a, b)) for a, b in pairwise(cuts)]
        assert np.array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("name", SETUPS)
def test_samples_of_is_the_inverse_of_locate(name):
    c = SETUPS[name]
    order = Order(c)
    at = order.locate(0, c.samples)
    found = {}
    for s in range(len(c.streams)):
        for first in range(0, order.supers[s], 5):
            for p, (n, window, epoch) in order.samples_of(s, first, min(first + 5, order.supers[s])).items():
                keys = list(zip(window.tolist(), epoch.tolist()))
                assert keys == sorted(keys)
                for x, w, e in zip(n.tolist(), window.tolist(), epoch.tolist()):
                    assert x not in found
                    found[x] = (p, s, e, w)
    assert [found[n] for n in range(c.samples)] == list(zip(*(x.tolist() for x in at[:4])))


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from([8, 16, 32, 64]), st.integers(1, 5), st.integers(1, 5)),
                min_size=1, max_size=5), st.integers(200, 4000), st.integers(0, 3))
def test_no_token_is_read_twice_in_an_epoch_whatever_the_lengths(phases, tokens, seed):
    c = make({"a": tokens, "b": 20_000}, [(n, L, 1, {"a": wa, "b": wb}, {"on_exhausted": "repeat"})
                                          for n, L, wa, wb in phases], seed)
    at = Order(c).locate(0, c.samples)
    for s, stream in enumerate(c.streams):
        for epoch in range(int(at.epoch.max()) + 1):
            here = (at.stream == s) & (at.epoch == epoch)
            starts, lengths = at.window[here] * at.sequence[here], at.sequence[here]
            assert (starts + lengths < stream.tokens).all()
            order = np.argsort(starts)
            assert (starts[order][:-1] + lengths[order][:-1] <= starts[order][1:]).all()


def test_one_length_reads_a_whole_epoch_before_the_next_and_visits_every_window():
    c = make({"a": 64 * 5 + 1}, [(10, 32, 1, {"a": 1}), (13, 32, 1, {"a": 1}, {"on_exhausted": "repeat"})])
    at = Order(c).locate(0, c.samples)
    assert at.epoch.tolist() == [0] * 10 + [1] * 10 + [2] * 3
    assert sorted(at.window[:10].tolist()) == sorted(at.window[10:20].tolist()) == list(range(10))
    assert at.window[:10].tolist() != at.window[10:20].tolist()


def test_leftover_windows_go_to_the_next_phase_of_the_same_length():
    # 4 windows a super-window; 3 phases of 3, 3 and 2 windows need exactly two super-windows, nothing is lost
    c = make({"a": 64 * 2 + 1}, [(3, 16, 1, {"a": 1}), (3, 16, 1, {"a": 1}), (2, 16, 1, {"a": 1})])
    assert sorted(Order(c).locate(0, 8).window.tolist()) == list(range(8))


def test_adding_a_phase_or_a_stream_changes_nothing_before_it():
    first = make({"a": 9000, "b": 9000}, [(40, 16, 4, {"a": 3, "b": 1}), (40, 32, 4, {"a": 1, "b": 1})])
    before = Order(first).locate(0, first.samples)
    fresh = Stream("c", "shards/c", None, "1" * 64, None, 5000, 0, "uint16")
    new = Phase("new", 0, 30, 30, 16, 5, {"a": 1, "c": 2}, "stable", {}, "error")
    for at in (12, 40, 52):
        edited = edit(first, at, [new], (fresh,))
        after = Order(edited).locate(0, edited.samples)
        assert edited.samples == at + 30
        assert all(np.array_equal(x[:at], y[:at]) for x, y in zip(before, after))
        keys = [(s, e, w * q + k) for s, e, w, q in zip(*(x.tolist() for x in after[1:])) for k in range(q)]
        assert len(keys) == len(set(keys))
    with pytest.raises(CurriculumError, match="inside a step"):
        edit(first, 13, [new], (fresh,))


def test_exhaustion_is_an_error_unless_repeat_or_epochs_allow_it():
    phases = (20, 32, 1, {"a": 1, "b": 1})
    tokens = {"a": 64 * 3 + 1, "b": 9999}
    with pytest.raises(CurriculumError, match=r"'p0' exhausts stream 'a'.*max_epochs: \{a: 2\}"):
        make(tokens, [phases]).validate()
    make(tokens, [(*phases, {"on_exhausted": "repeat"})]).validate()
    make(tokens, [(*phases, {"max_epochs": {"a": 2}})]).validate()
    with pytest.raises(CurriculumError, match="fewer tokens"):
        make({"a": 64}, [(1, 32, 1, {"a": 1})]).validate()


def test_a_stream_of_almost_nothing_does_not_fill_the_memory():
    phases = [(10**9, 64, 1, {"a": 1, "b": 1}, {"on_exhausted": "repeat"})]
    with pytest.raises(CurriculumError, match=r"'p0' would read stream 'a' 500,000,000 times.*leave 'a' out"):
        make({"a": 65, "b": 10**12}, phases)


def test_a_long_run_is_located_from_anywhere():
    c = make({"a": 3 * 10**12, "b": 10**12}, [(10**9, 2048, 1000, {"a": 85, "b": 15}), (10**6, 16384, 100, {"a": 1})],
             longest=16384)
    order = Order(c)
    at = order.locate(10**9 - 500, 10**9 + 500)
    assert at.phase.tolist() == [0] * 500 + [1] * 500
    assert set(at.sequence.tolist()) == {2048, 16384}
    assert len({*zip(at.stream.tolist(), at.window.tolist(), at.sequence.tolist())}) == 1000


def test_golden_order_hashes():
    assert {name: Order(c).hash() for name, c in SETUPS.items()} == GOLDEN_ORDERS


GOLDEN_PERMUTATION = [7, 6, 4, 5, 2, 9, 3, 8, 1, 0]
GOLDEN_ORDERS = {
    "two phases": "6f231eb8e576b21528a266a75aeb61e7",
    "lengths there and back": "bfb9b444c9442354d964be7e09b399c8",
    "many epochs": "a2b36e8d509112c4268bddb96e37054b",
    "cut short": "a20317397638043ad5567c439e503cb5",
    "forty streams": "1c9c055f3c1f470408d36ae8eea735f8",
    "groups": "7e9dbce069b7a7f2117326a851969704",
}
