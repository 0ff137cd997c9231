"""The test vectors of datatrove's dialects, checked against datatrove itself; and what vectors must cover: every reason
of every rule."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from stages.catalog import stage_class
from stages.vectors import expand, read_vectors
from tests.stages.test_conformance_vectors import FOLDER, check, stage_of
from tests.stages.test_filter_fineweb2 import their_reason, theirs

#: reasons each dialect gives
REASONS = {
    "gopher_quality": {"gopher_short_doc", "gopher_long_doc", "gopher_below_avg_threshold",
                       "gopher_above_avg_threshold", "gopher_too_many_hashes", "gopher_too_many_ellipsis",
                       "gopher_too_many_bullets", "gopher_too_many_end_ellipsis", "gopher_below_alpha_threshold",
                       "gopher_enough_stop_words"},
    "gopher_repetition": {"empty", "dup_para_frac", "dup_para_char_frac", "dup_line_frac", "dup_line_char_frac",
                          *(f"top_{n}_gram" for n in (2, 3, 4)), *(f"duplicated_{n}_n_grams" for n in range(5, 11))},
    "fineweb": {"empty", "line_punct_ratio", "short_line_ratio", "char_dup_ratio", "list_ratio"},
    "c4": {"lorem_ipsum", "curly_bracket", "too_few_sentences"},
    "c4_paragraphs": {"too_few_paragraphs"},
    "c4_badwords": {"document_removed_with_badwords"},
    "fineweb2": {"empty", "no_thresholds", "dup_line_frac", "top_2_gram", "line_punct_ratio", "char_dup_ratio",
                 "list_ratio", "gopher_short_doc", "gopher_below_avg_threshold", "gopher_above_avg_threshold",
                 "gopher_below_alpha_threshold", "gopher_enough_stop_words"},
    "madlad400": {"madlad400_few_sentences", "madlad400_questionable"},
}
#: gram limits of ours that are lists of pairs to datatrove
_GRAMS = re.compile(r"(top|dup)_(\d+)_gram")


@pytest.mark.parametrize("dialect", REASONS)
def test_vectors_reach_every_reason_and_every_signal(dialect):
    _, cases = read_vectors(FOLDER / f"{dialect}.jsonl")
    assert {case["reason"] for case in cases} == {None, *REASONS[dialect]}
    if dialect != "fineweb2":                            # whose signals are those of three others
        named = {name for case in cases for name in case.get("signals", {})}
        stage = stage_class(dialect)
        assert named == set(stage.signals) - {"madlad400_consistency"}


def test_a_threshold_off_by_a_little_is_seen():
    """Vectors lie at the thresholds and just beyond: moved ones fail some."""
    for dialect, moved in (
            ("gopher_quality", [{"min_doc_words": 49}, {"min_doc_words": 51}, {"max_doc_words": 99_999},
                                {"max_doc_words": 100_001}, {"min_avg_word_length": 2.98},
                                {"max_avg_word_length": 10.03}, {"max_symbol_word_ratio": 0.099},
                                {"max_symbol_word_ratio": 0.12}, {"max_bullet_lines_ratio": 0.89},
                                {"max_bullet_lines_ratio": 0.92}, {"max_ellipsis_lines_ratio": 0.29},
                                {"max_non_alpha_words_ratio": 0.81}, {"max_non_alpha_words_ratio": 0.78},
                                {"min_stop_words": 1}, {"min_stop_words": 3}]),
            ("gopher_repetition", [{"dup_line_frac": 0.29}, {"dup_para_frac": 0.29}, {"dup_line_char_frac": 0.199},
                                   {"dup_para_char_frac": 0.22}, {"top_2_gram": 0.199}, {"top_2_gram": 0.21},
                                   {"top_3_gram": 0.179}, {"top_4_gram": 0.17}, {"dup_5_gram": 0.149},
                                   {"dup_5_gram": 0.155}, {"dup_10_gram": 0.099}, {"dup_10_gram": 0.102}]),
            ("fineweb", [{"line_punct_thr": 0.11}, {"line_punct_thr": 0.13}, {"short_line_thr": 0.66},
                         {"short_line_thr": 0.69}, {"short_line_length": 29}, {"char_duplicates_ratio": 0.009},
                         {"char_duplicates_ratio": 0.011}, {"new_line_ratio": 0.29}, {"new_line_ratio": 0.41}]),
            ("c4", [{"min_num_sentences": 4}, {"min_num_sentences": 6}, {"min_words_per_line": 2},
                    {"min_words_per_line": 4}, {"max_word_length": 999}, {"max_word_length": 1001},
                    {"remove_citations": False}, {"filter_policy": False}, {"filter_javascript": False}]),
            ("c4_paragraphs", [{"min_paragraphs": 2}, {"min_paragraphs": 4}, {"min_paragraph_len": 199},
                               {"min_paragraph_len": 201}]),
            ("madlad400", [{"min_sentences": 4}, {"min_sentences": 6}, {"max_questionable": 0.199},
                           {"max_questionable": 0.2015}, {"list_case_words": 11}, {"list_case_share": 0.6},
                           {"list_case_share": 0.4}, {"min_length": 21}, {"min_length": 19}, {"max_length": 499},
                           {"max_length": 501}, {"max_technical": 0.19}, {"max_technical": 0.31}])):
        _, cases = read_vectors(FOLDER / f"{dialect}.jsonl")
        for change in moved:
            assert any(fails(dialect, case, change) for case in cases), (dialect, change)


def fails(dialect: str, case: dict[str, Any], change: dict[str, Any]) -> bool:
    """Return whether a case fails when the config is changed in a key that the case does not set itself."""
    config = case.get("config", {})
    if set(change) & set(config):
        return False
    try:
        check(stage_of(dialect, json.dumps({**config, **change}, sort_keys=True)), case)
    except AssertionError:
        return True
    return False


def datatrove_says(dialect: str, case: dict[str, Any]) -> tuple[str | None, str]:
    """Return (datatrove's reason in our words, the text after the filter)."""
    from datatrove.data import Document as Theirs
    from datatrove.pipeline import filters

    config, text = dict(case.get("config", {})), expand(case["text"])
    if dialect == "gopher_repetition":
        limits = {name: field.default for name, field in stage_class(dialect).Config.model_fields.items()} | config
        pairs: dict[str, list[tuple[int, float]]] = {"top": [], "dup": []}
        for name, limit in limits.items():
            found = _GRAMS.fullmatch(name)
            if found and limit is not None:
                pairs[found[1]].append((int(found[2]), limit))
        rest = {name: limit for name, limit in limits.items() if not _GRAMS.fullmatch(name)}
        block = filters.GopherRepetitionFilter(**rest, top_n_grams=pairs["top"], dup_n_grams=pairs["dup"])
    elif dialect == "gopher_quality":
        block = filters.GopherQualityFilter(**config)
    elif dialect == "fineweb":
        block = filters.FineWebQualityFilter(**config)
    elif dialect == "c4":
        block = filters.C4QualityFilter(**{"filter_no_terminal_punct": False, **config})
    else:
        block = filters.C4ParagraphFilter(**config)
    doc = Theirs(text=text, id="id")
    if not text and dialect in ("gopher_repetition", "gopher_quality"):     # theirs divides by its length
        return {"gopher_repetition": "empty", "gopher_quality": "gopher_short_doc"}[dialect], text
    result = block.filter(doc)
    reason = None if result is True else result[1]
    return {"< 3 paragraphs": "too_few_paragraphs"}.get(reason, reason), doc.text


@pytest.mark.parametrize("dialect", ["gopher_quality", "gopher_repetition", "fineweb", "c4", "c4_paragraphs"])
def test_vectors_are_what_datatrove_says(dialect):
    _, cases = read_vectors(FOLDER / f"{dialect}.jsonl")
    for case in cases:
        reason, text = datatrove_says(dialect, case)
        assert reason == case["reason"], case["name"]
        if reason is None:
            assert text == expand(case.get("text_after", case["text"])), case["name"]


def test_bad_words_are_what_datatrove_says(tmp_path, monkeypatch):
    from datatrove.data import Document as Theirs
    from datatrove.pipeline.filters import c4_filters

    lists = json.loads((FOLDER / "c4_badwords-lists.json").read_text(encoding="utf-8"))
    for language, entries in lists.items():
        (tmp_path / language).write_text("\n".join(entries), encoding="utf-8")
    monkeypatch.setattr(c4_filters, "cached_asset_path_or_download",
                        lambda url, **kw: str(tmp_path / url.rpartition("/")[2]))
    block = c4_filters.C4BadWordsFilter(fail_on_missing_language=False, seed=0)
    _, cases = read_vectors(FOLDER / "c4_badwords.jsonl")
    for case in cases:
        language = case.get("language", "").partition("_")[0].replace("fra", "fr")
        if "keep_fraction" in case["config"]:
            continue                                     # they draw otherwise: see the stage
        doc = Theirs(text=expand(case["text"]), id="id", metadata={"language": language} if language else {})
        result = block.filter(doc)
        assert (None if result is True else result[1]) == case["reason"], case["name"]


def test_fineweb2_vectors_are_what_datatrove_says():
    _, cases = read_vectors(FOLDER / "fineweb2.jsonl")
    compared = 0
    for case in cases:
        name, config, text = case["language"], case.get("config", {}), expand(case["text"])
        if case["reason"] == "no_thresholds" or not text or set(config) - {"change", "languages"}:
            continue
        stage = stage_of("fineweb2", json.dumps(config, sort_keys=True))
        name = {"fr": "fra_Latn"}.get(name, name)
        assert their_reason(theirs(stage.limits()[name], name), text) == case["reason"], case["name"]
        compared += 1
    assert compared >= 15
