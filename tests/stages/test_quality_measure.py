"""ROC-AUC, average precision, calibration and drift, compared with plain implementations of their definitions."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from stages.models import measure
from stages.scoring import calibration

ONE = 1_000_000


def cases():
    rng = np.random.Generator(np.random.PCG64(7))
    for n, values in ((2, 2), (9, 3), (40, 5), (60, 1000)):
        for _ in range(6):
            scores = rng.integers(0, values, n) / values
            good = rng.random(n) < 0.3 + scores / 2
            good[0], good[1] = True, False
            yield scores, good


def plain_auc(scores, good):
    pairs = [(a > b) + (a == b) / 2 for a in scores[good] for b in scores[~good]]
    return sum(pairs) / len(pairs)


def plain_average_precision(scores, good):
    total, before = 0.0, 0.0
    for t in sorted(set(scores), reverse=True):
        kept = scores >= t
        recall = good[kept].sum() / good.sum()
        total, before = total + (recall - before) * good[kept].mean(), recall
    return total


def test_ranking_equals_its_definitions():
    for scores, good in cases():
        ranking = measure.Ranking(scores, good)
        assert ranking.auc() == pytest.approx(plain_auc(scores, good))
        assert ranking.average_precision() == pytest.approx(plain_average_precision(scores, good))


def test_weights_are_documents_drawn_again():
    rng = np.random.Generator(np.random.PCG64(3))
    for scores, good in cases():
        times = rng.integers(0, 3, len(scores))
        times[:2] = 1
        ranking, drawn = measure.Ranking(scores, good), np.repeat(np.arange(len(scores)), times)
        again = measure.Ranking(scores[drawn], good[drawn])
        assert ranking.auc(times) == pytest.approx(again.auc())
        assert ranking.average_precision(times) == pytest.approx(again.average_precision())


def test_one_sided_truths_have_no_auc():
    assert np.isnan(measure.Ranking([0.1, 0.2], [True, True]).auc())
    assert np.isnan(measure.Ranking([0.1, 0.2], [False, False]).average_precision())
    with pytest.raises(ValueError, match="not finite"):
        measure.Ranking([0.1, float("nan")], [True, False])


def test_every_point_of_the_curve_is_what_its_threshold_keeps():
    for scores, good in cases():
        curve = measure.Ranking(scores, good).curve()
        assert curve[-1]["recall"] == 1
        assert [p["threshold"] for p in curve] == sorted({p["threshold"] for p in curve}, reverse=True)
        for p in curve:
            kept = scores >= p["threshold"]
            assert p["precision"] == pytest.approx(good[kept].mean(), abs=1e-4)
            assert p["recall"] == pytest.approx(good[kept].sum() / good.sum(), abs=1e-4)
            assert p["kept"] == pytest.approx(kept.mean(), abs=1e-4)


def test_bootstrap_is_seeded_and_paired():
    rng = np.random.Generator(np.random.PCG64(5))
    good = rng.random(300) < 0.5
    scores = good + rng.normal(0, 1, 300)
    ranking = measure.Ranking(scores, good)
    draws = [measure.bootstrap({"a": ranking.auc, "b": ranking.auc}, 300, seed, 200) for seed in (1, 1, 2)]
    assert (draws[0]["a"] == draws[0]["b"]).all(), "both measures see the same draws"
    assert (draws[0]["a"] == draws[1]["a"]).all() and (draws[0]["a"] != draws[2]["a"]).any()
    low, high = measure.interval(draws[0]["a"])
    # the standard error of an AUC of this size is about 0.027 (Hanley and McNeil 1982)
    assert low < ranking.auc() < high and 0.07 < high - low < 0.14
    assert measure.interval(np.array([np.nan])) is None


def test_threshold_keeps_at_most_the_share():
    for scores, _ in cases():
        for share in (0.0, 0.1, 0.34, 0.5, 1.0):
            t = measure.threshold_keeping(scores, share)
            assert (scores >= t).mean() <= share + 1e-9
            lower = scores[scores < t]
            if len(lower):                            # the next lower score would keep too many
                assert (scores >= lower.max()).mean() > share - 1e-9
    assert measure.threshold_keeping([1, 1, 1, 0], 0.5) > 1, "three of four share the best score"


def test_isotonic_regression_is_the_monotone_fit():
    rng = np.random.Generator(np.random.PCG64(11))
    x = np.sort(rng.choice(ONE, 1500, replace=False))
    y = np.where(rng.random(1500) < x / ONE, ONE, 0)
    method, knots = calibration.fit(x, y, 0, ONE)
    assert method == "isotonic"
    # the min-max formula: max over starts of min over ends of the mean between them
    sums = np.r_[0, np.cumsum(y)]
    fitted = np.empty(1500)
    for i in range(0, 1500, 97):
        ends = np.arange(i + 1, 1501)
        fitted[i] = max(((sums[ends] - sums[j]) / (ends - j)).min() for j in range(i + 1))
        assert any(abs(k[1] - np.clip(fitted[i], ONE / 3000, ONE - ONE / 3000)) <= 1 for k in knots), (i, fitted[i])
    table = calibration.Table(knots)
    mapped = [table(int(v)) for v in range(0, ONE + 1, 1000)]
    assert mapped == sorted(mapped) and mapped[0] >= 0 and mapped[-1] <= ONE
    # the truth is the score itself: the fit stays near it
    assert max(abs(table(v) - v) for v in range(50_000, 950_001, 10_000)) < 120_000


def test_platt_finds_the_sigmoid_that_made_the_truths():
    rng = np.random.Generator(np.random.PCG64(12))
    odds = rng.normal(0, 3, 900)
    x = np.round(ONE / (1 + np.exp(-odds))).astype(int)
    true = 1 / (1 + np.exp(-(0.5 * odds - 1)))
    method, knots = calibration.fit(x, np.where(rng.random(900) < true, ONE, 0), 0, ONE)
    assert method == "platt"
    table = calibration.Table(knots)
    assert max(abs(table(int(v)) / ONE - p) for v, p in zip(x, true)) < 0.08
    assert (knots[0][0], knots[-1][0]) == (0, ONE)


@pytest.mark.parametrize("truths", [[0, ONE] * 400, [ONE, 0] * 400])
def test_a_score_that_tells_nothing_or_the_contrary_keeps_its_order(truths):
    x = np.arange(800) * 1000
    for n in (800, 60):
        _, knots = calibration.fit(x[:n], truths[:n], 0, ONE)
        assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(knots))
    _, knots = calibration.fit(x, np.where(x < 400_000, ONE, 0), 0, ONE)
    assert all(a[1] <= b[1] for a, b in pairwise(knots))


def test_too_little_calibrates_nothing():
    assert calibration.fit(range(30), [0, ONE] * 15, 0, ONE) is None
    assert calibration.fit(range(100), [ONE] * 100, 0, ONE) is None
    assert calibration.fit([5] * 100, [0, ONE] * 50, 0, ONE) is None


def test_a_table_is_integer_lines_between_its_knots():
    table = calibration.Table([[0, 100], [1000, 300], [2000, 300], [3000, 1000]])
    assert [table(v) for v in (-5, 0, 1, 500, 1000, 1500, 2001, 3000, 9999)] == \
        [100, 100, 100, 200, 300, 300, 301, 1000, 1000]
    assert table(3) == 101, "0.6 is rounded up"


def test_a_damaged_calibration_is_named(tmp_path):
    good = {"format": calibration.FORMAT, "model_sha256": "a", "grid": 1e-6, "method": "platt", "documents": 99,
            "labels": {"hq": [[0, 0], [ONE, ONE]]}, "grade": None}
    path = tmp_path / "q.calibration.json"

    def said(change):
        path.write_text(json.dumps(good | change))
        with pytest.raises(calibration.CalibrationError) as e:
            calibration.read(path, "a")
        return str(e.value)

    path.write_text(json.dumps(good))
    assert calibration.read(path, "a") == good
    assert "made for another model" in said({"model_sha256": "b"})
    assert "no calibration" in said({"format": "x"})
    for knots in ([[0, 0]], [[0, 1], [5, 0]], [[0, 0], [0, 1]], [[0, 0], [5, "1"]], [[0, 0], [5, True]], None, "no"):
        assert "ascending" in said({"labels": {"hq": knots}})
    assert "ascending" in said({"labels": None})
    path.write_text("[" * 100_000)
    with pytest.raises(calibration.CalibrationError, match="no calibration"):
        calibration.read(path)


def test_calibration_error_and_brier():
    p = np.repeat([0.1, 0.9], 500)
    good = np.r_[np.arange(500) < 50, np.arange(500) < 450]
    assert measure.calibration_error(p, good, bins=2) == pytest.approx(0)
    assert measure.calibration_error(np.full(1000, 0.9), good, bins=1) == pytest.approx(0.4)
    assert measure.brier([1, 0, 0.5], [True, False, True]) == pytest.approx(0.25 / 3)


def test_distances_of_samples():
    rng = np.random.Generator(np.random.PCG64(2))
    a, b = rng.normal(0, 1, 400), rng.normal(0.4, 1, 300)
    at = np.sort(a)
    below = np.arange(1, 401) / 400
    plain = max(abs((a <= v).mean() - (b <= v).mean()) for v in (*a, *b))
    assert measure.ks_distance(at, below, b) == pytest.approx(plain, abs=1 / 300)
    # Kolmogorov's law: one in a thousand pairs of one population is farther apart
    x = measure.ks_critical(400, 300) * np.sqrt(400 * 300 / 700)
    assert 2 * sum((-1) ** (k - 1) * np.exp(-2 * k * k * x * x) for k in range(1, 9)) == pytest.approx(0.001, rel=0.01)
    assert measure.stability_index([50, 50], [50, 50]) == 0
    assert measure.stability_index([5000, 5000], [7500, 2500]) == pytest.approx(0.25 * np.log(3), rel=1e-3)


def test_chance_alone_makes_the_stability_index_that_is_expected():
    rng = np.random.Generator(np.random.PCG64(8))
    found = [measure.stability_index(np.bincount(rng.integers(0, 10, 500), minlength=10),
                                     np.bincount(rng.integers(0, 10, 300), minlength=10)) for _ in range(200)]
    assert np.mean(found) == pytest.approx(measure.stability_noise(10, 500, 300), rel=0.15)
