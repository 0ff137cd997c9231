"""From a recipe to curriculum.json: counts of tokens, inherited keys, warnings, errors, the plan, and planned compared
with realised mixtures."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

from tokenizer.mixture.curriculum import Curriculum, CurriculumError, Order, cut, edit
from tokenizer.mixture.realised import plan, plan_text, realised
from tokenizer.mixture.resolve import parse_count, resolve, resolve_phases

TOKENIZER = {"sha256": "ab" * 32, "vocab_size": 32000, "eos": 0, "path": "shards/tokenizer.json"}


def info(name: str, tokens: int, val: int = 0) -> dict:
    return {"name": name, "tokenizer": TOKENIZER["sha256"], "dtype": "uint16",
            "train": {"path": f"shards/{name}/split=train", "tokens": tokens, "sha256": "1" * 64},
            "val": {"path": f"shards/{name}/split=val", "tokens": val, "sha256": "2" * 64} if val else None}


def recipe(**changes) -> dict:
    spec = {"seed": 1, "total": "1M", "phases": [
        {"name": "stable", "until": "70%", "sequence": 1024, "batch": 8192, "mix": {"web": 85, "wiki": 15}},
        {"name": "anneal", "until": "100%", "mix": {"web": 60, "wiki": 40}, "max_epochs": {"wiki": 4}, "lr": "decay"}]}
    return {"shards": {"web": {"longest": 2048}, "wiki": {"longest": 2048}}, "curriculum": {**spec, **changes}}


SETS = {"web": info("web", 2_000_000, 9000), "wiki": info("wiki", 150_000)}


def test_resolve_counts_targets_and_inherits():
    c, warnings = resolve(recipe(), SETS, TOKENIZER)
    stable, anneal = c.phases
    assert (stable.sequence, stable.batch, anneal.sequence, anneal.batch) == (1024, 8, 1024, 8)
    assert stable.tokens == stable.samples * 1024
    assert abs(stable.tokens - 700_000) <= 4096
    assert abs(c.tokens - 1_000_000) <= 4096
    assert stable.weights == {"web": 17, "wiki": 3}            # 85:15 in lowest terms
    assert (stable.lr, anneal.lr) == ("stable", "decay")
    assert [s.name for s in c.streams] == ["web", "wiki"]
    assert c.streams[0].val == "shards/web/split=val"
    assert c.streams[1].val is None
    assert warnings == []
    assert c.order == Order(c).hash()


def test_resolve_does_not_hang_on_the_order_of_lines():
    given = recipe()
    for phase in given["curriculum"]["phases"]:
        phase["mix"] = dict(reversed(phase["mix"].items()))
    assert resolve(given, dict(reversed(SETS.items())), TOKENIZER)[0].dumps() == \
        resolve(recipe(), SETS, TOKENIZER)[0].dumps()


def test_file_round_trip_and_checks(tmp_path):
    c, _ = resolve(recipe(), SETS, TOKENIZER)
    c.save(tmp_path / "curriculum.json")
    assert Curriculum.load(tmp_path / "curriculum.json") == c
    doc = json.loads(json.dumps(c.to_json()))
    for change, message in (({"version": 3}, "reads versions"),
                            ({"version": 2}, "run the recipe again"), ({"longest": 1500}, "no multiple of sequence"),
                            ({"extra": 1}, r"unknown keys \['extra'\]")):
        with pytest.raises(CurriculumError, match=message):
            Curriculum.from_json({**doc, **change})
    doc["phases"][1]["start"] += 8
    with pytest.raises(CurriculumError, match="phase 'anneal' starts at sample"):
        Curriculum.from_json(doc)


@pytest.mark.parametrize(("mix", "expected", "warned"), [
    ({"web": 85, "wiki": 15}, {"web": 17, "wiki": 3}, False),
    ({"web": 0.85, "wiki": 0.15}, {"web": 17, "wiki": 3}, False),
    ({"web": "85%", "wiki": "15%"}, {"web": 17, "wiki": 3}, False),
    ({"web": 3, "wiki": 1}, {"web": 3, "wiki": 1}, True),
    ({"web": 100, "wiki": 0}, {"web": 1}, False),
    ({"web": 0.3333333, "wiki": 0.1}, {"web": 3333333, "wiki": 1000000}, True),
    ({"web": 0.333333333333, "wiki": 0.1}, {"web": 76923077, "wiki": 23076923}, True),
])
def test_weights_become_integers(mix, expected, warned):
    given = recipe()
    given["curriculum"]["phases"][0].update(mix=mix, max_epochs={"wiki": 3})
    c, warnings = resolve(given, SETS, TOKENIZER)
    assert c.phases[0].weights == expected
    assert any("normalised" in w for w in warnings) == warned


def _phase(**change):
    def apply(given):
        given["curriculum"]["phases"][0].update(change)
        return given
    return apply


def test_groups_are_apportioned_before_their_streams():
    sets = {name: info(name, 3_000_000) for name in ("cc", "code", "de", "en", "wiki")}
    mix = {"web": {"share": 75, "streams": {"en": 3, "de": 1, "cc": 0}}, "code": 20, "wiki": 5}
    given = recipe(phases=[{"name": "all", "until": "100%", "sequence": 1024, "batch": 8192, "mix": mix},
                           {"name": "more", "extra": "64k"}])
    given["shards"] = {name: {"longest": 2048} for name in sets}
    c, warnings = resolve(given, sets, TOKENIZER)
    assert c.phases[0].weights == {"code": 16, "de": 15, "en": 45, "wiki": 4}
    assert c.phases[0].groups == c.phases[1].groups == {"web": ["de", "en"]}
    assert c.version == 2
    assert warnings == ["curriculum: no phase draws from cc"]
    assert Curriculum.loads(c.dumps().encode(), "c") == c
    at, number = Order(c).locate(0, c.samples), {s.name: i for i, s in enumerate(c.streams)}
    web = np.cumsum(np.isin(at.stream, [number["de"], number["en"]]))
    assert np.abs(web - 0.75 * np.arange(1, c.samples + 1)).max() <= 2
    assert np.abs(np.cumsum(at.stream == number["en"]) - 0.75 * web).max() <= 2
    grown = resolve_phases([{"name": "next", "extra": "64k"}], 1, {s.name: s.tokens for s in c.streams}, [], c.phases)
    assert (grown[0].weights, grown[0].groups) == (c.phases[1].weights, {"web": ["de", "en"]})


def test_a_thousand_languages_keep_their_weights():
    sets = {f"l{i:03}": info(f"l{i:03}", 200_000) for i in range(999)} | {"web": info("web", 2_000_000)}
    languages = {f"l{i:03}": 1 / (i + 1) for i in range(999)}
    given = recipe(phases=[{"name": "all", "until": "100%", "sequence": 1024, "batch": 8192, "on_exhausted": "repeat",
                            "mix": {"web": 34, "rest": {"share": 66, "streams": languages}}}])
    given["shards"] = {name: {"longest": 2048} for name in sets}
    c, _ = resolve(given, sets, TOKENIZER)
    weights, total = c.phases[0].weights, sum(c.phases[0].weights.values())
    assert weights["web"] / total == pytest.approx(0.34, abs=3e-6)
    assert weights["l000"] / weights["l009"] == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize(("groups", "message"), [
    ({"x": ["web", "no"]}, "groups have the streams .'no'., which have no weight"),
    ({"x": ["web"], "y": ["web", "wiki"]}, "the streams .'web'. are in two groups"),
    ({"x": [["web"]]}, "groups must be lists"),
    ({"x": []}, "groups must be lists"), (["web"], "groups must be lists"), ({"x": "web"}, "groups must be lists")])
def test_groups_of_a_file_are_checked(groups, message):
    doc = json.loads(resolve(recipe(), SETS, TOKENIZER)[0].dumps())
    doc["phases"][0]["groups"], doc["version"] = groups, 2
    with pytest.raises(CurriculumError, match=message):
        Curriculum.from_json({name: value for name, value in doc.items() if name != "sha256"})


def test_many_streams_in_the_order_of_version_1_are_refused():
    sets = {f"s{i}": info(f"s{i}", 2_000_000) for i in range(9)}
    given = recipe(phases=[{"name": "all", "until": "100%", "sequence": 1024, "batch": 8192,
                            "mix": dict.fromkeys(sets, 1)}])
    given["shards"] = {name: {"longest": 2048} for name in sets}
    doc = resolve(given, sets, TOKENIZER)[0].to_json()
    assert doc["version"] == 2
    with pytest.raises(CurriculumError, match="run the recipe again"):
        Curriculum.from_json({**doc, "version": 1})


@pytest.mark.parametrize(("change", "message"), [
    (_phase(mix={"wbe": 1}), r"phases\[0\].mix: unknown stream 'wbe': did you mean 'web'"),
    (_phase(mix={"web": -1}), r"mix.web: weight -1 is not a number >= 0"),
    (_phase(mix={"web": "x"}), r"mix.web: weight 'x'"),
    (_phase(mix={"web": 0}), r"needs a weight above 0"),
    (_phase(until="140%"), r"until: '140%' is not a share"),
    (_phase(sequence=1000), r"longest = 2048 is no multiple of sequence = 1000"),
    (_phase(batch="many"), r"phases\[0\].batch: 'many' is not a number of tokens"),
    (_phase(on_exhausted="stop"), r"on_exhausted must be"),
    (_phase(until=None), r"until is missing"),
    (_phase(extra="1M"), r"`until` says where .* give one of them"),
    (_phase(until=None, extra="100k"), r"'anneal' belongs to the total, yet stands after one that is extra"),
    (_phase(lr={"peek": 1e-3}), r"phases\[0\].lr.peek: unknown key; did you mean 'peak'"),
    (_phase(lr={"peak": 10**400}), r"phases\[0\].lr.peak: the highest rate"),
    (_phase(lr={"warmup": 0}), r"phases\[0\].lr.peak: the highest rate .* not None"),
    (_phase(lr={"peak": 1e-3, "warmup": "90M"}), r"lr.warmup: tokens between 0 and the phase's 696,320"),
    (_phase(lr={"peak": 1e-3, "shape": "cosinus"}), r"lr.shape: 'cosinus' is not one of constant, linear"),
    (_phase(lr={"peak": 1e-3, "floor": 2}), r"lr.floor: a share of the peak"),
    (_phase(rope_theta=0.5), r"rope_theta must be a number above 1"),
    (_phase(rope_scaling="yarn"), r"rope_scaling must be a mapping"),
    (_phase(reset_optimizer="yes"), r"reset_optimizer must be true or false"),
    (_phase(max_epochs={"wkii": 2}), r"unknown streams \['wkii'\]"),
    (_phase(max_epochs=2), r"phases\[0\].max_epochs: epochs by stream, e.g. \{code: 2\}, not 2"),
    (_phase(max_epochs={"web": "all"}), r"phases\[0\].max_epochs: epochs by stream"),
    (lambda g: {**g, "curriculum": {**g["curriculum"], "total": "100M"}}, r"exhausts stream 'web'"),
    (lambda g: {**g, "shards": {"web": {"longest": 2048}, "wiki": {"longest": 4096}}}, r"`longest` differs"),
])
def test_errors_name_key_and_remedy(change, message):
    with pytest.raises(CurriculumError, match=message):
        resolve(change(recipe()), SETS, TOKENIZER)


def test_another_tokenizer_is_refused():
    with pytest.raises(CurriculumError, match=r"shards.web was encoded with another tokenizer"):
        resolve(recipe(), SETS, {**TOKENIZER, "sha256": "cd" * 32})


def test_warnings_on_repetition_and_unused_streams():
    given = recipe(total="4M")
    for phase in given["curriculum"]["phases"]:
        phase.update(mix={"wiki": 100}, on_exhausted="repeat")
    _, warnings = resolve(given, SETS, TOKENIZER)
    assert any("'wiki' is read 26.7 times" in w and "4 epochs" in w for w in warnings)
    assert any("no phase draws from web" in w for w in warnings)


def test_plan_and_realised_agree_with_every_sample():
    c, _ = resolve(recipe(), SETS, TOKENIZER)
    order = Order(c)
    at = order.locate(0, c.samples)
    rows = {(r["phase"], r["stream"]): r for r in plan(c)}
    for p, phase in enumerate(c.phases):
        for s, stream in enumerate(c.streams):
            here = (at.phase == p) & (at.stream == s)
            row = rows[phase.name, stream.name]
            assert row["windows"] == here.sum()
            assert row["tokens"] == int(at.sequence[here].sum())
    wiki = rows["anneal", "wiki"]
    again = np.flatnonzero((at.stream == 1) & (at.epoch == 1))
    assert wiki["repeats_from"] == again[0]
    assert rows["stable", "wiki"]["repeats_from"] is None
    assert 1 < wiki["epochs"] < 2
    for done in (0, 1, 333, c.samples):
        for row in realised(c, done):
            assert abs(row["planned"] - row["realised"]) <= 1
    assert [r["realised"] for r in realised(c, c.samples)] == [r["windows"] for r in plan(c)]
    text = plan_text(c)
    assert f"second reading from sample {again[0]:,}" in text
    assert "85.00%" in text


def test_unread_windows_are_counted():
    given = recipe(total="0.1M")
    given["curriculum"]["phases"][0].update(sequence=256, batch=2560)
    c, _ = resolve(given, SETS, TOKENIZER)
    order, at = Order(c), Order(c).locate(0, c.samples)
    for s in range(2):
        reserved = order.used[-1][s] * c.longest
        read = int(at.sequence[at.stream == s].sum())
        unread = sum(r["unread"] * p.sequence for p in c.phases for r in plan(c)
                     if r["phase"] == p.name and r["stream"] == c.streams[s].name)
        assert reserved == read + unread


def test_counts_as_people_write_them():
    assert [parse_count(x, "k") for x in (16384, "0.5M", "20B", "1.5k", "16_384", 1e6)] == \
        [16384, 500_000, 20 * 10**9, 1500, 16384, 10**6]
    for bad in (0, -3, "x", None, True, "1/0", "1.5", "1,5M", "1e999999999"):
        with pytest.raises(CurriculumError, match="is not a number of tokens"):
            parse_count(bad, "k")


def test_a_bit_that_flips_in_the_file_is_an_error_or_nothing():
    """In a seed, a share or a number of tokens it would be another training."""
    c, _ = resolve(recipe(), SETS, TOKENIZER)
    data = c.dumps().encode()
    for bit in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(CurriculumError):
            assert Curriculum.loads(bytes(flipped), "x") == c


@pytest.mark.parametrize("lr", ["dacay", 0.001, ["decay"], None])
def test_a_rate_the_trainer_refuses_is_no_curriculum(lr):
    c, _ = resolve(recipe(), SETS, TOKENIZER)
    doc = json.loads(json.dumps(c.to_json()))
    doc["phases"][1]["lr"] = lr
    with pytest.raises(CurriculumError, match=r"phase 'anneal': lr: .* is not one of stable, constant, decay"):
        Curriculum.from_json(doc)


def staged(**long) -> dict:
    given = recipe()
    given["curriculum"]["phases"].append({
        "name": "long", "extra": "100k", "sequence": 2048, "mix": {"wiki": 100}, "rope_theta": 2e6,
        "lr": {"peak": "2e-5", "warmup": "10%", "shape": "linear"}, "reset_optimizer": True, **long})
    return given


def test_a_phase_beyond_the_total_leaves_what_was_before_it_as_it_was():
    short, _ = resolve(recipe(), SETS, TOKENIZER)
    made, warnings = resolve(staged(), SETS, TOKENIZER)
    assert warnings == []
    assert made.phases[:2] == short.phases
    long = made.phases[2]
    assert (long.extra, long.reset_optimizer, long.rope_theta, long.sequence) == (True, True, 2e6, 2048)
    assert abs(long.tokens - 100_000) <= 4 * 2048
    assert long.lr == {"peak": 2e-5, "warmup": round(long.tokens / 10), "shape": "linear", "floor": 0.0}
    a, b = Order(short).locate(0, short.samples), Order(made).locate(0, short.samples)
    assert all((x == y).all() for x, y in zip(a, b))
    # the same by an edit at the end of the finished run
    assert edit(short, short.samples, [long]) == made


def test_newer_keys_are_in_the_file_only_where_they_say_something():
    short, _ = resolve(recipe(), SETS, TOKENIZER)
    keys = {"name", "start", "samples", "reserved", "sequence", "batch", "weights", "lr", "max_epochs", "on_exhausted"}
    assert all(set(p) == keys for p in short.to_json()["phases"])
    made, _ = resolve(staged(), SETS, TOKENIZER)
    assert set(made.to_json()["phases"][2]) == {*keys, "extra", "reset_optimizer", "rope_theta"}
    assert Curriculum.loads(made.dumps().encode(), "x") == made
    assert Curriculum.loads(short.dumps().encode(), "x").phases[0].rope_theta is None


def test_what_happens_once_is_not_inherited():
    """theta goes on, a reset does not, and a rate of one's own has to be said again."""
    more = {"name": "more", "extra": "50k", "lr": "stable"}
    given = staged()
    given["curriculum"]["phases"].append(more)
    last = resolve(given, SETS, TOKENIZER)[0].phases[-1]
    assert (last.rope_theta, last.reset_optimizer, last.extra) == (2e6, False, True)
    del more["lr"]
    with pytest.raises(CurriculumError, match=r"phases\[3\].lr is missing: .* not inherited"):
        resolve(given, SETS, TOKENIZER)
    more["lr"], name = "stable", more.pop("name")
    with pytest.raises(CurriculumError, match=r"phases\[3\].name is missing"):
        resolve(given, SETS, TOKENIZER)
    more["name"], given["curriculum"]["phases"][0]["name"] = name, name
    with pytest.raises(CurriculumError, match=r"phases\[3\].name: two phases would be called 'more'"):
        resolve(given, SETS, TOKENIZER)


def test_phases_of_an_edit_inherit_from_what_is_kept():
    old, _ = resolve(recipe(), SETS, TOKENIZER)
    at = old.phases[0].batch * 40
    phases = resolve_phases([{"name": "new", "until": "60%"},
                             {"name": "end", "until": "100%", "mix": {"wiki": 1, "web": 9},
                              "max_epochs": {"wiki": 2}}], old.tokens, ["web", "wiki"], [], existing=cut(old, at))
    made = edit(old, at, phases)
    assert [p.name for p in made.phases] == ["stable", "new", "end"]
    assert made.phases[1].weights == old.phases[0].weights and made.phases[1].sequence == 1024
    assert abs(made.tokens - old.tokens) <= 8192
