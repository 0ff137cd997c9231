"""The shares of the input by reason and source, and distributions before and after filters, from the figures of
datasets."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

from pipeline.report.shares import COLOURED, OTHERS, REASONS, SOURCES, before_after, share_sections


def document(sources: int, reasons: int, **more: Any) -> dict[str, Any]:
    kept = {f"s{i}": {"docs": 100 * (i + 1), "bytes": 1} for i in range(sources)}
    rows = [{"stage": "step", "reason": f"r{i}", "docs": sources * (reasons - i),
             "sources": dict.fromkeys(kept, reasons - i)} for i in range(reasons)]
    return {"names": {"datasets": ["d"]}, "datasets": {"d": {
        "docs": sum(k["docs"] for k in kept.values()), "kept": kept, "reasons": rows, "languages": {}, "lengths": {},
        "dropped_languages": {}, **more}}, "licences": {"d": {}}}


def test_many_sources_and_reasons_are_combined_and_nothing_is_lost():
    [section] = share_sections(document(500, 40))
    assert [c["name"] for c in section["columns"]] == [*(f"s{i}" for i in range(499, 499 - SOURCES, -1)), "494 others"]
    assert sum(c["of"] for c in section["columns"]) == section["of"] == 100 * 500 * 501 // 2 + 500 * 820
    assert (len(section["rows"]), section["left_out"], len(section["keys"])) == (REASONS, 40 - REASONS, COLOURED)
    for row in section["rows"]:
        assert sum(c["docs"] for c in row["cells"]) == row["docs"] == round(row["share"] * section["of"])
    for _, bar in section["bars"]:
        widths = [float(r.get("width", "").rstrip("%")) for r in ET.fromstring(bar).iter("rect")]
        assert abs(sum(widths) - 100) < 0.01, "kept, coloured and other reasons make up the whole"


def test_a_source_that_lost_everything_is_listed():
    figures = document(1, 1)
    figures["datasets"]["d"]["reasons"][0]["sources"]["gone"] = 7
    assert {c["name"]: c["of"] for c in share_sections(figures)[0]["columns"]} == {"s0": 101, "gone": 7}


def test_lengths_that_were_not_counted_are_not_drawn():
    [old] = before_after(document(1, 2, lengths={"s0": {"5": 100}}))
    assert (old["counted"], old["chart"], old["medians"]) == (False, "", None)
    [new] = before_after(document(1, 2, lengths={"s0": {"5": 100}}, dropped_lengths={"s0": {"2": 3}}))
    assert new["counted"] and new["medians"] == ["32 to 64", "32 to 64"] and (new["docs"], new["kept"]) == (103, 100)
    drawn = ET.fromstring(new["chart"])
    assert "4 3 of which kept 0, 8 0 of which kept 0" in drawn.get("aria-label", "")


def test_languages_that_changed_most_are_named():
    [section] = before_after(document(1, 2, lengths={"s0": {"5": 100}}, languages={"s0": {"en": 90, "de": 10}},
                                      dropped_languages={"step": {"fr": 300, "de": 10}}))
    [shares] = section["shares"]
    assert shares["kind"] == "language"
    assert shares["changes"] == [("fr", "73.2%", "0%"), ("en", "22.0%", "90.0%"), ("de", "4.9%", "10.0%")]
    [one] = before_after(document(1, 2, lengths={"s0": {"5": 100}}, languages={"s0": {"en": 90}}))
    assert one["shares"] == [] and one["personal"] is None


def test_licences_and_personal_data_before_and_after():
    figures = document(1, 2, dropped_licences={"s0": {"": 1, "mit": 2}},
                       pii={"pii_emails": 6, "pii_ips": 0, "pii_own": 0},
                       dropped_pii={"pii_emails": 2, "pii_ips": 0, "pii_own": 3})
    figures["licences"]["d"] = {"s0": {"mit": 60, "other": 1}}
    figures["signals"] = {"d": {"read": {"exact": True}, "signals": [{"signal": "pii_emails", "docs": 101}]}}
    [section] = before_after(figures)
    [licences] = section["shares"]
    assert licences["keys"] == [("mit", 0), ("none stated", 1), ("another licence", 2)]
    assert "mit 60.2%, none stated 38.8%, another licence 1.0%" in licences["bars"][0][1]
    assert "mit 60.0%, none stated 39.0%" in licences["bars"][1][1]
    assert section["personal"] == {"searched": 101, "exact": True, "rows": [
        {"kind": "e-mail addresses", "before": 8, "after": 6}, {"kind": "own", "before": 3, "after": 0}]}
    figures["datasets"]["d"]["dropped_licences"] = {}
    [old] = before_after(figures)
    assert (old["shares"], old["personal"]) == ([], None), "an older version did not count what it dropped"


def test_labels_that_are_combined_are_named():
    [section] = before_after(document(1, 2, languages={"s0": {f"l{i}": 9 - i for i in range(9)}}))
    assert section["shares"][0]["keys"][-1] == ("3 more languages", OTHERS)
