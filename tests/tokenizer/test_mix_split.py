"""The rules that divide the share of split shards between their streams, compared with independent computations."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer.mixture.apportion import CurriculumError
from tokenizer.mixture.mix import WEIGHT_SUM, read_mix

LABELS = {"web": ["language", "bucket"]}
SIZES = {"code": 5000.0} | {f"web.{language}.b{bucket:02d}": float(size * (bucket + 1)) for language, size in
                           {"de": 1000, "en": 10000, "is": 10}.items() for bucket in range(4)} | {"web.other": 7.0}
DE, EN, IS = 10_000, 100_000, 100


def shares(web: dict[str, Any], tokens: int = 10_000, sizes: dict[str, float] | None = None,
           warnings: list[str] | None = None) -> dict[str, float]:
    weights, groups = read_mix({"web": {"share": 100, **web}}, "mix", sizes or SIZES, tokens,
                               [] if warnings is None else warnings, LABELS)
    assert groups == {"web": [name for name in sizes or SIZES if name in weights]}
    return {name.removeprefix("web."): weight / sum(weights.values()) for name, weight in weights.items()}


def by(place: int, mixed: dict[str, float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, share in mixed.items():
        label = name.split(".")[min(place, len(name.split(".")) - 1)]
        sums[label] = sums.get(label, 0) + share
    return sums


def test_a_number_alone_reads_every_stream_in_proportion_to_its_tokens():
    weights, groups = read_mix({"web": 60, "code": 40}, "mix", SIZES, 1000, [], LABELS)
    total = DE + EN + IS + 7
    assert weights["web.en.b03"] / sum(weights.values()) == pytest.approx(0.6 * 40_000 / total, abs=1e-7)
    assert weights["code"] / sum(weights.values()) == pytest.approx(0.4, abs=1e-7)
    assert "code" not in groups["web"]


@pytest.mark.parametrize("rule", [{"alpha": 0.3}, {"temperature": 1 / 0.3}])
def test_temperature_acts_on_whole_languages_and_leaves_their_buckets_in_proportion(rule):
    mixed = shares({"by": "language", **rule})
    powers = {"de": DE ** 0.3, "en": EN ** 0.3, "is": IS ** 0.3, "other": 7 ** 0.3}
    assert by(0, mixed) == pytest.approx({k: v / sum(powers.values()) for k, v in powers.items()}, abs=1e-6)
    assert mixed["en.b03"] / mixed["en.b00"] == pytest.approx(4, abs=1e-3)


def test_unimax_caps_the_epochs_of_whole_languages():
    # 10,000 tokens for four: 7 × 4 and 100 × 4 at most, the rest is equal
    mixed = by(0, shares({"by": "language", "unimax": 4}))
    rest = (10_000 - 28 - 400) / 2
    assert mixed == pytest.approx({"other": 28e-4, "is": 400e-4, "de": rest / 10_000, "en": rest / 10_000}, abs=1e-6)


def test_a_table_of_weights_leaves_out_the_other_labels_and_says_so():
    warnings: list[str] = []
    mixed = shares({"by": "language", "weights": {"en": 3, "de": 1}}, warnings=warnings)
    assert by(0, mixed) == pytest.approx({"en": 0.75, "de": 0.25})
    assert any("is" in warning and "other" in warning for warning in warnings)


def test_upsampling_multiplies_tokens_as_rehydration_does():
    mixed = by(1, shares({"by": "bucket", "upsample": {"b00": 0, "b02": 3, "b03": "0.5"}}))
    tokens = {f"b{i:02d}": (1000 + 10000 + 10) * (i + 1) for i in range(4)}
    read = {"b01": tokens["b01"], "b02": 3 * tokens["b02"], "b03": tokens["b03"] / 2, "other": 7}
    assert mixed == pytest.approx({k: v / sum(read.values()) for k, v in read.items()}, abs=1e-6)


def test_rules_are_nested_by_language_first_then_by_bucket():
    mixed = shares({"by": "language", "weights": {"en": 1, "de": 1},
                    "within": {"by": "bucket", "upsample": {"b00": 0, "b01": 0, "b02": 0}}})
    assert mixed == pytest.approx({"en.b03": 0.5, "de.b03": 0.5})


def riemann(start: float, stop: float, power: float, rate: float, drop: float, steps: int = 4_000) -> float:
    width = (stop - start) / steps
    points = [start + (i + 0.5) * width for i in range(steps)]
    return sum(x ** power * math.exp(rate * x) for x in points if x >= drop) / steps


def test_a_curve_reads_vigintiles_as_olmo_3_does():
    sizes = {f"web.en.b{b:02d}": 1000.0 + 10 * b for b in range(20)}
    power, rate, drop, budget = 1.5, 2.0, 0.4, 18_000
    mixed = shares({"by": "bucket", "curve": {"power": power, "rate": rate, "drop": drop, "cap": 100}}, budget, sizes)
    heights = {name: riemann(b / 20, (b + 1) / 20, power, rate, drop) for b, name in enumerate(sizes)}
    scale = budget / sum(size * heights[name] for name, size in sizes.items())      # the integral is the target
    epochs = {name.removeprefix("web."): scale * height for name, height in heights.items() if height}
    assert set(mixed) == set(epochs) and len(epochs) == 12
    assert {name: share * budget / sizes[f"web.{name}"] for name, share in mixed.items()} == pytest.approx(
        epochs, rel=1e-4)


@given(st.floats(0, 8), st.floats(-2, 12), st.sampled_from([2, 4, 7]), st.integers(2_000, 200_000),
       st.sampled_from([0, 0.25, 0.4]))
def test_a_curve_spends_the_target_under_its_cap_and_rises_in_its_order(power, rate, cap, budget, drop):
    sizes = {f"web.en.b{b:02d}": 500.0 * (1 + b % 3) for b in range(20)}
    warnings: list[str] = []
    weights, _ = read_mix({"web": {"share": 1, "by": "bucket", "curve": {
        "power": power, "rate": rate, "cap": cap, "drop": drop}}}, "mix", sizes, budget, warnings, LABELS)
    epochs = {n: budget * w / sum(weights.values()) / sizes[n] for n, w in weights.items()}
    if any("even" in warning for warning in warnings):              # the target is out of reach: all are equal
        assert max(epochs.values()) - min(epochs.values()) < 1e-3 * max(epochs.values())
        assert budget > cap * sum(sizes[n] for n in epochs) * 0.999
        return
    assert max(epochs.values()) <= cap * 1.001
    below = {n: e for n, e in epochs.items() if e < cap * 0.999}
    heights = {n: riemann(int(n[-2:]) / 20, (int(n[-2:]) + 1) / 20, power, rate, drop, 400) for n in below}
    ratios = [epochs[n] / heights[n] for n in below if epochs[n] > 1e-2]
    assert not ratios or max(ratios) < 1.02 * min(ratios), "below the cap, C is the same for all"


def test_a_thousand_languages_in_twenty_buckets_become_weights_within_the_sum():
    sizes = {f"web.l{i:03d}.b{b:02d}": float(1000 + i ** 3 * (b + 1)) for i in range(100) for b in range(20)}
    mixed = shares({"by": "language", "alpha": 0.3, "within": {"by": "bucket", "curve": {"power": 2}}}, 10**9, sizes)
    languages = {f"l{i:03d}": sum(1000 + i ** 3 * (b + 1) for b in range(20)) ** 0.3 for i in range(100)}
    assert by(0, mixed) == pytest.approx({k: v / sum(languages.values()) for k, v in languages.items()},
                                         abs=30 / WEIGHT_SUM)


def test_a_label_of_which_the_inner_rule_reads_nothing_leaves_its_share_to_the_others():
    warnings: list[str] = []
    sizes = {**SIZES, "web.fo.other": 500.0, "web.sv.b00": 500.0}        # no bucket, or only a dropped one
    mixed = shares({"by": "language", "alpha": 0, "within": {"by": "bucket", "curve": {"drop": 0.5, "buckets": 4}}},
                   sizes=sizes, warnings=warnings)
    assert by(0, mixed) == pytest.approx({"de": 1 / 3, "en": 1 / 3, "is": 1 / 3}, abs=1e-6)
    assert any("fo, other, sv" in warning for warning in warnings)


def test_rules_that_read_nothing_at_all_are_an_error():
    with pytest.raises(CurriculumError, match=r"^mix\.web:"):
        shares({"by": "bucket", "curve": {}}, sizes={"web.en.other": 1e6})


def test_streams_too_small_for_a_weight_are_left_out_with_a_warning():
    warnings: list[str] = []
    mixed = shares({}, 10**12, {"web.en": 1e13, "web.is": 1000.0}, warnings)
    assert mixed == {"en": 1.0} and any("web.is" in warning for warning in warnings)


@pytest.mark.parametrize(("web", "key"), [
    ({"by": "source"}, "mix.web.by"), ({"alpha": 1, "unimax": 2}, "mix.web"), ({"alpha": -1}, "mix.web.alpha"),
    ({"temperature": 0}, "mix.web.temperature"), ({"by": "language", "within": {"by": "x"}}, "mix.web.within.by"),
    ({"within": {"alpha": 1}}, "mix.web.within"), ({"colour": 1}, "mix.web.colour"),
    ({"by": "language", "weights": {"en": -1}}, "mix.web.weights.en"),
    ({"by": "language", "weights": 5}, "mix.web.weights"),
    ({"by": "bucket", "curve": {"cap": -1}}, "mix.web.curve.cap"),
    ({"by": "bucket", "curve": {"x": 1}}, "mix.web.curve"),
    ({"by": "bucket", "curve": {"buckets": 3}}, "mix.web.curve.buckets"),
])
def test_an_error_names_its_key(web, key):
    with pytest.raises(CurriculumError) as error:
        shares(web)
    assert str(error.value).startswith(f"{key}:"), error.value
