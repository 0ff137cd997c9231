"""The language of mixtures: weights, groups, temperature and UniMax, and what is refused."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer.mixture.apportion import CurriculumError
from tokenizer.mixture.mix import WEIGHT_SUM, read_mix, streams_in
from tokenizer.mixture.resolve import resolve

SIZES = {"code": 10**9, "de": 4 * 10**9, "en": 64 * 10**9, "is": 10**8}


def shares(mix: dict[str, Any], tokens: int = 10**10, sizes: dict[str, float] | None = None) -> dict[str, float]:
    weights, _ = read_mix(mix, "mix", sizes or SIZES, tokens, [])
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def test_a_list_of_streams_is_read_in_proportion_to_their_tokens():
    assert shares({"web": {"share": 68, "streams": ["de", "en"]}, "code": 32}) == pytest.approx(
        {"code": 0.32, "de": 0.04, "en": 0.64}, abs=1e-7)


def test_temperature_lifts_small_streams():
    mixed = shares({"web": {"share": 100, "streams": ["de", "en"], "alpha": 0.5}})
    assert mixed == pytest.approx({"de": 0.2, "en": 0.8}, abs=1e-7)
    assert shares({"web": {"share": 1, "streams": ["de", "en"], "alpha": 0}}) == {"de": 0.5, "en": 0.5}


def test_unimax_is_equal_but_for_streams_that_would_be_read_too_often():
    # 12 G tokens: 4 G each; `is` gives 4 epochs of 0.1 G, and the other two share the rest
    mixed = shares({"web": {"share": 80, "streams": ["is", "de", "en"], "unimax": 4}, "code": 20}, 15 * 10**9)
    assert mixed == pytest.approx({"code": 0.2, "is": 0.4 / 15, "de": 5.8 / 15, "en": 5.8 / 15}, abs=1e-7)


def test_unimax_with_too_few_tokens_gives_each_its_most():
    assert shares({"all": {"share": 1, "streams": ["is", "code"], "unimax": 1}}, 10**12) == pytest.approx(
        {"is": 1 / 11, "code": 10 / 11}, abs=1e-7)


@given(st.lists(st.integers(10**6, 10**12), min_size=1, max_size=50), st.integers(10**6, 10**13),
       st.sampled_from([0.5, 1, 4]))
def test_unimax_keeps_its_caps_and_spends_the_budget(sizes, budget, epochs):
    names = {f"s{i:02}": size for i, size in enumerate(sizes)}
    mixed = shares({"g": {"share": 1, "streams": list(names), "unimax": epochs}}, budget, names)
    if budget <= epochs * sum(sizes):
        slack = 2 * budget / WEIGHT_SUM + 1
        assert all(mixed[name] * budget <= epochs * size + slack for name, size in names.items())
        free = [share for name, share in mixed.items() if share * budget < epochs * names[name] - slack]
        assert not free or max(free) - min(free) <= 4 / WEIGHT_SUM, "what is not capped is equal"


def test_the_share_of_a_group_is_kept_whatever_its_streams_weigh():
    sizes = {f"l{i:03}": 10**6 + i**3 for i in range(999)} | {"web": 10**12}
    mixed = shares({"web": 34, "rest": {"share": 66, "streams": [n for n in sizes if n != "web"], "alpha": 0.3}},
                   10**13, sizes)
    assert mixed["web"] == pytest.approx(0.34, abs=3 / WEIGHT_SUM)
    assert mixed["l998"] / mixed["l000"] == pytest.approx(((10**6 + 998**3) / 10**6) ** 0.3, rel=1e-3)


def test_the_order_of_lines_decides_nothing():
    sizes = {f"s{i:02}": 10**6 * (1 + i % 3) for i in range(40)}
    mix: dict[str, Any] = {name: 0.3333333333333 + i % 5 for i, name in enumerate(sizes) if i >= 20}
    mix |= {"g": {"share": 7, "streams": list(sizes)[:10], "alpha": 0.3},
            "h": {"share": 7, "streams": list(sizes)[10:20]}}
    mixed = read_mix(mix, "mix", sizes, 10**9, [])
    for seed in range(8):
        names = Random(seed).sample(sorted(mix), len(mix))
        again = read_mix({name: mix[name] for name in names}, "mix", sizes, 10**9, [])
        assert list(again[0].items()) == list(mixed[0].items())
        assert list((again[1] or {}).items()) == list((mixed[1] or {}).items())


def test_names_are_found_in_mixes_that_are_not_valid():
    assert streams_in({"a": 1, "g": {"streams": ["b", "c"]}, "h": {"streams": {"d": 1}}, "x": {"streams": 5}}) == [
        "a", "b", "c", "d"]


@pytest.mark.parametrize(("group", "said"), [
    ({"share": 1, "streams": ["dee"]}, r"mix.g.streams: unknown stream 'dee': did you mean 'de'"),
    ({"share": 1, "streams": []}, "mix.g: a group is a mapping such as"),
    ({"share": 1, "streams": ["de"], "alhpa": 1}, "mix.g: a group is a mapping such as"),
    ({"streams": ["de"]}, r"mix.g.share: weight None is not a number"),
    ({"share": 1, "streams": {"de": 1}, "alpha": 0.3}, "mix.g: `alpha` and `unimax` find weights"),
    ({"share": 1, "streams": ["de"], "alpha": -1}, r"mix.g.alpha: an exponent of at least 0"),
    ({"share": 1, "streams": ["de"], "alpha": "x"}, r"mix.g.alpha: an exponent of at least 0"),
    ({"share": 1, "streams": ["de"], "unimax": 0}, r"mix.g.unimax: a number of epochs above 0"),
    ({"share": 1, "streams": ["de"], "unimax": 4, "alpha": 1}, r"mix.g.unimax: a number of epochs above 0, without"),
    ({"share": 1, "streams": {"de": 0}}, r"mix.g.streams: at least one stream needs a weight"),
    ({"share": 0, "streams": ["de"]}, r"mix: at least one stream needs a weight"),
])
def test_wrong_groups_name_key_and_remedy(group, said):
    with pytest.raises(CurriculumError, match=said):
        read_mix({"g": group}, "mix", SIZES, 10**9, [])


@pytest.mark.parametrize(("limit", "total", "allowed"), [(4, 10**9, True), (3.9, 10**9, False), (1, 4 * 10**8, False)])
def test_unimax_reads_streams_as_often_as_their_limit_allows(limit, total, allowed):
    """Integer weights and whole windows read a stream a little more often than `unimax` says."""
    sizes = {f"l{i:02}": 5_000_000 + 997_331 * i**2 for i in range(40)}
    sets = {name: {"tokenizer": "t" * 64, "dtype": "uint16", "val": None,
                   "train": {"path": name, "sha256": "0" * 64, "tokens": size}} for name, size in sizes.items()}
    mix = {"g": {"share": 1, "streams": [*sizes], "unimax": 4 if limit > 1 else 1}}
    phase = {"name": "all", "until": "100%", "sequence": 4096, "batch": 40960, "mix": mix,
             "max_epochs": dict.fromkeys(sizes, limit)}
    recipe = {"shards": {name: {"longest": 4096} for name in sizes},
              "curriculum": {"seed": 1, "total": total, "phases": [phase]}}
    tokenizer = {"sha256": "t" * 64, "vocab_size": 300, "eos": 0, "path": "t"}
    if allowed:
        resolve(recipe, sets, tokenizer)
        return
    with pytest.raises(CurriculumError, match="exhausts stream"):
        resolve(recipe, sets, tokenizer)
