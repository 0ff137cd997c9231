"""What the playground says about moved thresholds is what a run with these thresholds does, document by document."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.passes.outcomes import REASONS
from pipeline.service import sampling
from pipeline.service.cube import make_cube
from pipeline.service.finished import PlaygroundError
from pipeline.service.playground import Changes, Playground
from pipeline.service.sampling import in_sample
from pipeline.service.token_counts import with_estimates
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from tests.conftest import rest_slow
from tests.service.tuned_site import CHAINS, make_site, run, sides, write_recipe

MODES = ("until-drop", "all")


@pytest.fixture(scope="session")
def sites(tmp_path_factory):
    """A function from (chain of steps, mode) to a site with a finished run."""
    made: dict[tuple[str, str], Path] = {}

    def site(name: str, mode: str) -> Path:
        if (name, mode) not in made:
            made[name, mode] = make_site(tmp_path_factory.mktemp(f"{name}-{mode}"), name, mode)
        return made[name, mode]

    return site


def playground(site: Path) -> Playground:
    return Playground(Store(str(site / "store")), "r", "clean")


@pytest.fixture(scope="session")
def rerun(sites, tmp_path_factory):
    """A function from (chain of steps, changes) to where each document ends if a run has the changes from its start.
    This is the same in either mode."""
    done: dict[str, dict[str, tuple[str, str, str]]] = {}

    def ends(chain: str, changes: Changes) -> dict[str, tuple[str, str, str]]:
        if (key := f"{chain} {changes}") not in done:
            site, store = sites(chain, "until-drop"), tmp_path_factory.mktemp("anew")
            steps = copy.deepcopy(CHAINS[chain])
            for number, new in changes.thresholds.items():
                [config] = steps[number].values()
                config.update(new)
            steps = [step for i, step in enumerate(steps) if i not in changes.off]
            write_recipe(site, steps, "until-drop", "changed.yaml")
            run(site, store, "changed.yaml")
            done[key] = sides(store)
        return done[key]

    return ends


def predicted(site: Path, changes: Changes) -> dict[str, tuple[str, str, str]]:
    """Return where each document ends according to the playground."""
    game = playground(site)
    replayed = game.outcomes(game.moved(changes))
    ids = replayed.table.ids(replayed.rows)
    return {id: tuple(replayed.outcomes[code]) for id, code in zip(ids, replayed.after.tolist())}


def c(step: int, *off: int, **thresholds: Any) -> Changes:
    return Changes({step: thresholds} if thresholds else {}, frozenset(off))


#: (chain, changes, whether some outcomes must be unknown with until-drop)
CASES = [
    ("english", c(1, min_doc_words=120), False),                           # an integer, stricter
    ("english", c(1, min_doc_words=20), True),                             # an integer, laxer
    ("english", c(1, min_doc_words=None), True),                           # no such rule
    ("english", c(0, dup_line_frac=0.02), False),                          # a share, in front
    ("english", c(0, dup_line_frac=None, dup_line_char_frac=0.9, dup_para_frac=None), True),
    ("english", c(2, min_num_sentences=12), False),                         # of a step that edits
    ("english", c(2, min_num_sentences=4), True),                          # the same, laxer: another text behind it
    ("english", c(3, line_punct_thr=0.5), False),                          # the last that drops: all is known
    ("english", c(3, short_line_thr=0.999, char_duplicates_ratio=0.9), False),
    ("english", c(3, 3), False),                                           # the last filter left out
    ("english", c(1, 1), True),                                            # one in the middle left out
    ("english", c(2, 2), True),                                            # one that edits left out
    ("english", Changes({1: {"min_doc_words": 100}, 3: {"short_line_thr": 0.05}}), False),
    ("english", Changes({1: {"max_symbol_word_ratio": 0.001}}, frozenset({3})), False),
    ("lines", c(0, respect=[]), True),                                     # a list
    ("lines", c(0, respect=["copyright"]), False),                         # another list
    ("lines", c(1, min_words=120, max_symbol_ratio=0.0), False),
    ("lines", c(1, min_stop_words=0, max_ellipsis_ratio=1.0), True),
    ("lines", c(2, line=0.01, top_2_gram=0.01), False),
    ("lines", c(3, min_paragraph_len=400), False),
    ("lines", c(4, max_words_flagged=0.001), False),
    ("lines", c(5, max_words_cut=0.0), False),
    ("lines", c(5, max_words_cut=0.9), False),                             # the last: nothing is behind it
    ("signals", c(1, language=["fr"]), True),
    ("signals", c(1, language=["en", "de", "fr"], source=["web"]), True),
    ("signals", c(1, language=["en", "de"], signals={"gopher_words": {"min": 100, "max": 300}}), False),
    ("signals", c(2, drop=[]), True),
    ("signals", c(2, drop=["emails", "ips"]), False),
    ("signals", c(4, line_punct_exclude_zero=False), False),               # a switch
    ("signals", Changes({0: {"min_doc_words": 100}}, frozenset({1})), True),
    ("last", c(2, 2), False),
    ("last", c(2, min_doc_words=10), False),
    ("last", c(0, top_2_gram=0.05), False),
    ("passes", c(1, min=0.925), False),                                     # numeric, which ends a pass: stricter
    ("passes", c(1, min=0.5), True),                                       # laxer: the next pass has not seen them
    ("passes", c(1, keep=["de"], min={"default": 0.5}), False),            # a mapping
    ("passes", c(2, min_doc_words=150), False),
    ("passes", c(0, dup_line_frac=0.5), True),
    ("passes", c(3, 3), False),
    ("deduped", c(2, line_punct_thr=0.4, short_line_thr=0.2), False),      # behind the barrier: nothing but steps
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("chain", "changes", "unknown"), rest_slow(12, CASES),
                         ids=lambda v: v if isinstance(v, str) else json.dumps({**v.thresholds}) + str(
                             sorted(v.off)) if isinstance(v, Changes) else "")
def test_outcomes_are_those_of_a_run_with_the_changes(sites, rerun, chain, changes, unknown, mode):
    site = sites(chain, mode)
    foretold, before, there = predicted(site, changes), sides(site / "store"), rerun(chain, changes)
    assert before == sides(sites(chain, "until-drop") / "store"), "the mode changes no outcome"
    assert foretold.keys() == {id for id, side in before.items() if side[0] != "quarantined"} == there.keys()
    known = {id: side for id, side in foretold.items() if side[0] != "unknown"}
    assert known == {id: there[id] for id in known}
    rest = {id: side for id, side in foretold.items() if side[0] == "unknown"}
    if mode == "until-drop":
        assert bool(rest) == unknown
        # only what the changed step lets pass, or what would have another text, may be unknown
        edits = any(side[2] == "edit" for side in rest.values())
        assert edits or all(before[id][0] == "dropped" and there[id] != before[id] for id in rest)
    else:
        assert len(rest) < len(foretold) / 2
    assert {reason for _, _, reason in rest.values()} <= REASONS.keys()


@pytest.mark.parametrize("mode", MODES)
def test_more_is_known_with_all_signals(sites, mode):
    site = sites("last", mode)
    said = Counter(side[0] for side in predicted(site, c(0, 0)).values())
    assert (said["unknown"] == 0) == (mode == "all")


def test_every_unknown_document_is_counted_with_its_reason(sites, rerun):
    """Those that the changed step dropped and a run with the change lets pass it, no more and no fewer."""
    site, changes = sites("english", "until-drop"), c(1, min_doc_words=20)
    there, before = rerun("english", changes), sides(site / "store")
    stopped = {"gopher_quality", "gopher_repetition"}
    wanted = {id for id in before if before[id][1] == "gopher_quality" and there[id][1] not in stopped}
    answer = playground(site).answer(changes, exact=True)
    assert answer["unknown"]["documents"] == len(wanted) > 0
    [move] = [m for m in answer["moves"] if m["to"]["side"] == "unknown"]
    assert move["to"]["reason"] == "signals" and "signals: all" in move["remedy"]
    assert {id for id, side in predicted(site, changes).items() if side[0] == "unknown"} == wanted


def test_what_gets_to_a_barrier_is_counted_up_to_it(sites, rerun):
    site, changes = sites("deduped", "until-drop"), c(0, min_doc_words=100)
    there = rerun("deduped", changes)
    answer = playground(site).answer(changes, exact=True)
    assert answer["up_to"] == "exact"
    assert answer["totals"]["after"]["kept"]["documents"] == sum(s[1] != "gopher_quality" for s in there.values())
    assert answer["leaves"]["documents"] > 0
    beyond = playground(site).answer(Changes({0: {"min_doc_words": 100}, 2: {"line_punct_thr": 0.5}}), exact=True)
    reached = sum(s[1] != "gopher_quality" for s in sides(site / "store").values())
    assert beyond["unknown"]["documents"] == reached
    assert {m["to"]["reason"] for m in beyond["moves"] if m["to"]["side"] == "unknown"} == {"barrier"}


def test_counts_add_up_and_are_those_of_the_documents(sites):
    import duckdb

    site, changes = sites("english", "until-drop"), c(1, min_doc_words=120)
    game = playground(site)
    answer = game.answer(changes, exact=True)
    query = (f"SELECT source, coalesce(language, '') AS language, count(*), sum(signals.bytes)::BIGINT FROM "
             f"read_parquet('{site}/store/{{}}/clean/*.parquet') GROUP BY ALL ORDER BY ALL")
    for folder, side in (("datasets", "kept"), ("dropped", "dropped")):
        wanted = duckdb.sql(query.format(folder)).fetchall()
        groups = sorted((g["source"], g["language"], *g["before"][side].values()) for g in answer["groups"]
                        if g["before"][side]["documents"])
        assert groups == wanted
        assert answer["totals"]["before"][side] == {"documents": sum(w[2] for w in wanted),
                                                    "bytes": sum(w[3] for w in wanted)}
    for what in ("documents", "bytes"):
        assert sum(t[what] for t in answer["totals"]["after"].values()) == \
               sum(t[what] for t in answer["totals"]["before"].values())
    words = "signals.gopher_words < 120"
    left = duckdb.sql(f"SELECT count(*) FROM read_parquet('{site}/store/datasets/clean/*.parquet') WHERE {words}")
    assert answer["leaves"]["documents"] == left.fetchall()[0][0] > 0


def test_examples_are_nearest_to_the_threshold_first_and_scrubbed(sites):
    site, changes = sites("signals", "until-drop"), c(0, min_doc_words=300)
    answer = playground(site).answer(changes, exact=True)
    gone = [e for e in answer["examples"] if e["to"]["side"] == "dropped"]
    assert 0 < len(gone) <= 5
    words = [e["signals"]["gopher_words"] for e in gone]
    assert words == sorted(words, reverse=True) and all(40 <= n < 300 for n in words)
    edges = [e["edge"] for e in gone]
    assert edges == sorted(edges) and all(0 < edge <= 1 for edge in edges)
    everything = json.dumps(playground(site).answer(c(2, drop=[]), exact=True)["examples"])
    assert "8.8.4." not in everything and "@mail.example.org" not in everything and "<" not in everything


CUBES = [("english", 1, "min_doc_words"), ("english", 1, "max_symbol_word_ratio"), ("english", 3, "line_punct_thr"),
         ("english", 2, "min_num_sentences"), ("lines", 1, "min_words"), ("lines", 3, "min_paragraph_len"),
         ("signals", 4, "char_duplicates_ratio"), ("last", 2, "min_doc_words")]


@pytest.mark.parametrize(("chain", "step", "key"), rest_slow(4, CUBES))
@pytest.mark.parametrize("mode", MODES)
def test_a_cube_is_exact_at_its_edges_and_within_its_error_between_them(sites, chain, step, key, mode):
    game = playground(sites(chain, mode))
    others = Changes({0 if step else 1: {}})
    cube = make_cube(game, others, step, key)
    whole = "words" in key or "sentences" in key or "len" in key
    between = [(a + b) / 2 for a, b in zip(cube.edges, cube.edges[1:])]
    values = [*cube.edges, *between[::4]]
    moved = set()
    for value in values:
        if whole and value % 1:
            continue
        given = int(value) if whole else value
        if given <= 0 and key != "line_punct_thr":
            continue
        answer = game.answer(Changes({step: {key: given}}), exact=True)["totals"]["after"]
        for side, counts in cube.at(value).items():
            for what, span in counts.items():
                is_there = answer[side][what]
                assert span["low"] <= is_there <= span["high"], (value, side, what)
                if value in cube.edges:
                    assert span["low"] == span["high"] == is_there
                moved.add((side, what, is_there))
    assert len(moved) > 4, "the threshold moves something, or the test says nothing"


def test_the_cells_of_a_cube_add_up_to_its_figures(sites):
    game = playground(sites("english", "until-drop"))
    cube = make_cube(game, Changes(), 1, "min_doc_words")
    page = json.loads(json.dumps(cube.to_json()))
    for number, edge in enumerate(page["edges"]):
        sums = [0.0] * 4
        for cell in page["cells"]:
            sums = [a + b for a, b in zip(sums, cell["start"])]
            for bin, *deltas in cell["bins"]:
                if bin < number:
                    sums = [a + b for a, b in zip(sums, deltas)]
        at = cube.at(edge)
        assert sums == [at[s][w]["estimate"] for s in ("kept", "unknown") for w in ("documents", "bytes")]
    assert {(cell["source"], cell["language"]) for cell in page["cells"]} == {
        (s, lang) for s in ("web", "docs") for lang in ("en", "de", "fr")}


def test_a_cube_has_no_threshold_that_a_recipe_would_refuse(sites):
    cube = make_cube(playground(sites("passes", "all")), Changes(), 1, "min_script_share")
    assert 0 <= cube.edges[0] < cube.edges[-1] <= 1                # many documents have a share of 1


def test_a_cube_stands_while_other_changes_stand(sites):
    game = playground(sites("english", "until-drop"))
    cube = make_cube(game, Changes({3: {"line_punct_thr": 0.6}}), 1, "min_doc_words")
    both = game.answer(Changes({1: {"min_doc_words": int(cube.edges[20])}, 3: {"line_punct_thr": 0.6}}), exact=True)
    assert cube.at(int(cube.edges[20]))["kept"]["documents"]["estimate"] == \
           both["totals"]["after"]["kept"]["documents"]


@pytest.mark.parametrize(("changes", "key"), [
    (Changes({9: {"x": 1}}), "step"), (Changes({1: {"stop_words": ["a"]}}), "stop_words"),
    (Changes({1: {"min_doc_words": "many"}}), "min_doc_words"), (Changes({1: {"nonsense": 1}}), "nonsense"),
    (Changes(off=frozenset({77})), "step")])
def test_changes_that_cannot_be_are_refused_with_their_key(sites, changes, key):
    with pytest.raises(PlaygroundError) as caught:
        playground(sites("english", "until-drop")).answer(changes, exact=True)
    assert caught.value.key == key


def test_a_step_whose_signal_another_needs_cannot_be_left_out(sites, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(sites("signals", "until-drop"), site)
    write_recipe(site, [{"gopher_quality": {}}, {"where": {"signals": {"gopher_words": {"min": 80}}}}], "until-drop")
    shutil.rmtree(site / "store")
    run(site, site / "store")
    with pytest.raises(PlaygroundError, match="gopher_words"):
        playground(site).answer(c(0, 0), exact=True)
    assert playground(site).answer(c(1, 1), exact=True)["enters"]["documents"] > 0


def test_an_edited_recipe_is_not_taken_for_what_the_run_did(sites, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(sites("english", "until-drop"), site)
    path = site / "store/runs/r/recipe.yaml"
    path.write_text(path.read_text().replace("min_doc_words: 60", "min_doc_words: 61"))
    with pytest.raises(PlaygroundError, match="gopher_quality"):
        playground(site)


@pytest.mark.parametrize(("run_name", "dataset", "key"), [("gone", "clean", "run"), ("r", "gone", "dataset")])
def test_what_is_not_there_is_named(sites, run_name, dataset, key):
    with pytest.raises(PlaygroundError) as caught:
        Playground(Store(str(sites("english", "until-drop") / "store")), run_name, dataset)
    assert caught.value.key == key


def test_a_sample_has_the_figures_of_its_documents(sites):
    """The sample is those documents whose ids a pseudo-random function chooses, whoever counts them."""
    site, changes = sites("english", "until-drop"), c(1, min_doc_words=150)
    there = predicted(site, changes)
    before = sides(site / "store")
    for most in (10**6, 10):                         # all documents in memory, or only the sample
        game = Playground(Store(str(site / "store")), "r", "clean", sample=40, most=most)
        answer = game.answer(changes, exact=False)
        chosen = [id for id in there if in_sample([id], game.share, sampling.SEED)[0]]
        assert answer["counted"] == len(chosen) < len(there) == answer["documents"]
        left = sum(before[id][0] == "kept" and there[id][0] == "dropped" for id in chosen)
        assert left and answer["leaves"]["documents"]["estimate"] == round(left / len(chosen) * len(there))
        assert sum(g["after"]["kept"]["documents"]["estimate"] for g in answer["groups"]) == pytest.approx(
            answer["totals"]["after"]["kept"]["documents"]["estimate"], abs=len(answer["groups"]))
    with pytest.raises(PlaygroundError) as caught:
        game.answer(changes, exact=True)
    assert caught.value.key == "exact"


def test_intervals_of_many_samples_hold_the_true_figures(sites):
    """An interval holds the true number for 95 of 100 samples. The least that is asked of 60 is three standard
    deviations below."""
    site, changes, seeds = sites("english", "until-drop"), c(1, min_doc_words=150), range(60)
    exact, held, widths = playground(site).answer(changes, exact=True), Counter[str](), Counter[str]()
    for seed in seeds:
        game = Playground(Store(str(site / "store")), "r", "clean", sample=40, most=(10**6, 10)[seed % 2], seed=seed)
        answer = game.answer(changes, exact=False)
        for name, truth, found in (("leaves", exact["leaves"], answer["leaves"]),
                                   ("kept", exact["totals"]["after"]["kept"], answer["totals"]["after"]["kept"])):
            interval = found["documents"]
            held[name] += interval["low"] <= truth["documents"] <= interval["high"]
            widths[name] += interval["high"] - interval["low"]
    for name in ("leaves", "kept"):
        assert held[name] >= 0.86 * len(seeds)
        assert 0 < widths[name] / len(seeds) < 0.4 * exact["documents"], "an interval of everything says nothing"


def test_the_same_question_has_the_same_answer(sites):
    site = sites("english", "until-drop")
    answers = [Playground(Store(str(site / "store")), "r", "clean", sample=40).answer(c(1, min_doc_words=150), exact)
               for exact in (False, True, False, True)]
    assert answers[0] == answers[2] and answers[1] == answers[3]


def test_a_damaged_part_is_not_counted(sites, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(sites("english", "until-drop"), site)
    for path in (site / "store/objects").rglob("*dropped.parquet"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.unlink()
        path.write_bytes(data)
    with pytest.raises(DamagedFile):
        playground(site).answer(c(1, min_doc_words=150), exact=True)


def test_each_threshold_says_on_which_side_documents_are_dropped(sites):
    sides = {key["key"]: key["drops"] for step in playground(sites("english", "until-drop")).steps()
             for key in step["keys"]}
    assert sides["min_doc_words"] == "less" and sides["max_doc_words"] == "more"
    # its name says the opposite
    assert sides["max_non_alpha_words_ratio"] == "less" and sides["line_punct_exclude_zero"] == ""


def test_a_step_that_is_not_ours_is_not_run_and_unknown(sites, tmp_path):
    """The recipe's own file is never imported; what it would do to documents that get there now is not known."""
    site = tmp_path / "site"
    shutil.copytree(sites("english", "until-drop"), site)
    (site / "mine.py").write_text("from stages.stage import Stage\n\nclass Mine(Stage):\n    name = 'mine'\n"
                                  "    def process(self, doc):\n        return None\n")
    write_recipe(site, [{"gopher_quality": {"min_doc_words": 60}}, {"fineweb": {}}, {"mine:Mine": {}}], "all")
    with open(site / "r.yaml", "a") as file:
        file.write("code: [mine.py]\n")
    shutil.rmtree(site / "store")
    run(site, site / "store", custom=True)
    sys.modules.pop("mine", None)
    (site / "mine.py").write_text("raise SystemExit('imported')")
    game = playground(site)
    assert [step["own"] for step in game.steps()] == [False, False, True] and "mine" not in sys.modules
    answer = game.answer(c(0, min_doc_words=20), exact=True)
    # it may have overwritten signals, so that of documents that have been there nothing is known
    assert {m["to"]["reason"] for m in answer["moves"] if m["to"]["side"] == "unknown"} == {"overwritten"}
    with pytest.raises(PlaygroundError):
        game.answer(c(2, 2), exact=True)


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory) -> Path:
    """A site whose run also makes shards of the English documents of its dataset."""
    site = make_site(tmp_path_factory.mktemp("tokens"), "last", "until-drop")
    with open(site / "r.yaml", "a") as file:
        file.write("tokenizer: {train: {kind: bpe, vocab: 400, from: clean, sample: 50KB}}\n"
                   "shards: {en: {from: clean, where: {language: en}, longest: 64, val: 10%}}\n")
    run(site, site / "store")
    return site


def encoded(site: Path) -> dict[str, tuple[bool, int, int]]:
    """Return the English documents of the dataset, kept or dropped: {id: (whether it is kept, tokens by the run's
    tokenizer, words)}."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    [path] = sorted((site / "store/shards").glob("tokenizer-*.json"))
    tokenizer = Tokenizer.from_file(str(path))
    return {row["id"]: (kept, len(tokenizer.encode(row["text"], add_special_tokens=False).ids) + 1,
                        row["signals"].get("gopher_words") or 0)
            for kept, folder in ((True, "datasets"), (False, "dropped"))
            for part in (site / "store" / folder / "clean").glob("*.parquet") for row in pq.read_table(part).to_pylist()
            if row["language"] == "en"}


def english(figures: dict, side: str) -> dict:
    """Add up, over an answer of the playground, the tokens of the English documents that are on `side` (kept, dropped,
    …) after the changes."""
    counts = [group["after"][side]["tokens"] for group in figures["groups"] if group["language"] == "en"]
    counts = [n if isinstance(n, dict) else {"estimate": n, "low": n, "high": n} for n in counts]
    return {key: sum(count[key] for count in counts) for key in ("estimate", "low", "high")}


def test_tokens_of_documents_in_shards_are_those_of_the_tokenizer(with_tokens):
    game, documents = playground(with_tokens), encoded(with_tokens)
    answer = game.answer(c(2, min_doc_words=150), exact=True)
    kept = [(tokens, words) for is_kept, tokens, words in documents.values() if is_kept]
    after = sum(tokens for tokens, words in kept if words >= 150)
    assert answer["totals"]["before"]["kept"]["tokens_of"] == len(kept) > 5
    assert english(answer, "kept") == {"estimate": after, "low": after, "high": after} and after > 0
    cube = make_cube(game, Changes(), 2, "min_doc_words")
    for edge in cube.edges[1::9]:
        totals = game.answer(c(2, min_doc_words=int(edge)), exact=True)["totals"]["after"]["kept"]["tokens"]
        assert cube.at(edge)["kept"]["tokens"] == totals


def test_tokens_of_documents_in_no_shard_are_estimated_and_move_with_the_threshold(with_tokens):
    game, documents = playground(with_tokens), encoded(with_tokens)
    estimates = []
    for least in (60, 40, 20, 5):
        answer = game.answer(c(2, min_doc_words=least), exact=True)
        enter = {id for id, *_ in game.outcomes(game.moved(c(2, min_doc_words=least))).documents()}
        true = sum(tokens for id, (is_kept, tokens, _) in documents.items() if is_kept or id in enter)
        kept = english(answer, "kept")
        assert kept["low"] <= kept["estimate"] <= kept["high"] and abs(kept["estimate"] / true - 1) < 0.02, least
        estimates.append(kept["estimate"])
    assert estimates[0] < estimates[-1] and estimates == sorted(estimates)
    enters = answer["enters"]
    assert enters["documents"] > 0 and enters["tokens_of"] == 0
    assert 0 < enters["tokens"]["low"] < enters["tokens"]["estimate"] < enters["tokens"]["high"]


def test_the_range_of_estimated_tokens_is_that_of_the_documents_of_the_source():
    rng = np.random.default_rng(5)
    sizes, rates = rng.integers(100, 10_000, 4000).astype(float), rng.normal(0.25, 0.02, 4000)
    sources = np.repeat([0, 1], 2000)
    tokens = np.rint(sizes * rates * (1 + sources))                       # twice as many tokens per byte in source 1
    known = np.where(np.arange(4000) % 4 == 0, tokens, np.nan)
    columns = with_estimates(known, sizes, sources)
    assert (columns.estimate[columns.counted] == tokens[columns.counted]).all()
    inside = (columns.low <= tokens) & (tokens <= columns.high)
    for source in (0, 1):
        rows = ~columns.counted & (sources == source)
        assert abs(columns.estimate[rows].sum() / tokens[rows].sum() - 1) < 0.01
        assert 0.93 < inside[rows].mean() < 0.97
    unseen = with_estimates(np.where(sources == 0, known, np.nan), sizes, sources)
    assert (unseen.low[sources == 1] < unseen.estimate[sources == 1]).all(), "no document of source 1 is in a shard"
    nothing = with_estimates(np.full(4000, np.nan), sizes, sources)
    assert not nothing.counted.any() and not nothing.high.any()


def test_what_a_step_lets_into_the_next_pass_is_unknown_even_with_all_signals(sites):
    said = predicted(sites("passes", "all"), c(1, min=0.5))
    unknown = [side for side in said.values() if side[0] == "unknown"]
    assert {reason for _, _, reason in unknown} == {"pass"} and len(unknown) > 10
