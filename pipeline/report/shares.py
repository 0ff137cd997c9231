"""Compares the documents that came into a dataset with those that it kept. It computes the share of the documents that
each drop reason removed, and the lengths, languages, licences and personal data of the documents before and after.
Everything is computed from the sections of report.json about datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pipeline.base.humanize import count, percent, plural
from pipeline.base.svg import Element, tag
from pipeline.report.charts import COLORS, axis, stacked
from pipeline.report.distributions import FOOT, HEIGHT, WIDTH, bar_path

#: sources and reasons that a table lists, reasons with a colour of their own, labels (languages, licences) of a bar;
#: others are combined
SOURCES, REASONS, COLOURED, LABELS = 6, 15, 7, 6
KEPT, OTHERS = 2, COLORS - 1
#: colours of reasons, none of them that of kept documents
REASON_COLORS = (5, 1, 3, 4, 0, 6, 8)
#: kinds of personal data, in words
PII = {"pii_emails": "e-mail addresses", "pii_ips": "IP addresses", "pii_cards": "payment cards",
       "pii_ibans": "bank accounts", "pii_phones": "telephone numbers", "pii_ids": "national ids",
       "pii_secrets": "keys and tokens", "pii_wallets": "cryptocurrency addresses", "pii_names": "names of persons",
       "pii_addresses": "postal addresses"}

Counts = Mapping[str, int]


def share_sections(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, for every dataset that dropped documents, its reasons for dropping. Each reason has its share of all
    judged documents, and of those of each source; small sources are combined. A judged document was kept or dropped,
    but not quarantined."""
    out = []
    for name in document["names"]["datasets"]:
        section = document["datasets"][name]
        if not section["reasons"]:
            continue
        judged = {source: n["docs"] for source, n in section["kept"].items()}
        for reason in section["reasons"]:
            for source, docs in reason["sources"].items():
                judged[source] = judged.get(source, 0) + docs
        ordered = sorted((source for source in judged if judged[source]), key=lambda source: (-judged[source], source))
        listed = ordered[:SOURCES] if len(ordered) > SOURCES + 1 else ordered
        groups = [(source, [source]) for source in listed]
        if others := ordered[len(listed):]:
            groups.append((f"{len(others)} others", others))
        columns = [{"name": label, "of": sum(judged[source] for source in members), "members": members}
                   for label, members in groups]
        out.append({"dataset": name, "of": sum(judged.values()), "columns": columns,
                    "rows": [_row(reason, columns, sum(judged.values())) for reason in section["reasons"][:REASONS]],
                    "left_out": len(section["reasons"][REASONS:]),
                    "bars": [(c["name"], Markup(_bar(section, c))) for c in columns],
                    "keys": [(r["stage"], r["reason"], REASON_COLORS[i]) for i, r in
                             enumerate(section["reasons"][:COLOURED])]})
    return out


def _row(reason: Mapping[str, Any], columns: Sequence[Mapping[str, Any]], of: int) -> dict[str, Any]:
    lost = [sum(reason["sources"].get(s, 0) for s in c["members"]) for c in columns]
    return {"stage": reason["stage"], "reason": reason["reason"], "docs": reason["docs"], "share": reason["docs"] / of,
            "cells": [{"share": n / c["of"], "docs": n} for n, c in zip(lost, columns, strict=True)]}


def _bar(section: Mapping[str, Any], column: Mapping[str, Any]) -> Element:
    """Draw a horizontal bar of the documents of `column`, a group of sources, in a dataset: the kept ones, then those
    dropped for each reason. `section` has the counts of the dataset."""
    members = column["members"]
    kept = sum(section["kept"].get(source, {"docs": 0})["docs"] for source in members)
    parts: list[tuple[str, float, int]] = [("kept", kept, KEPT)]
    for color, reason in zip(REASON_COLORS, section["reasons"], strict=False):
        docs = sum(reason["sources"].get(source, 0) for source in members)
        if docs:
            parts.append((reason["reason"], docs, color))
    others = sum(r["sources"].get(source, 0) for r in section["reasons"][COLOURED:] for source in members)
    return stacked([*parts, ("other reasons", others, OTHERS)], height=18, label=f"documents of {column['name']}")


def before_after(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return charts for every dataset that dropped documents: one of document lengths, with the kept part of each bar;
    bars of languages and licences, for all judged (kept or dropped) documents and for the kept ones; and the personal
    data found in both.

    An older version may have made the dataset without counting the lengths, licences and personal data of dropped
    documents. `counted` is then False, and these charts are left out.
    """
    out = []
    for name in document["names"]["datasets"]:
        section = document["datasets"][name]
        dropped_docs = sum(r["docs"] for r in section["reasons"])
        if not dropped_docs:
            continue
        kept, dropped = _summed(section["lengths"]), _summed(section.get("dropped_lengths", {}))
        counted = sum(dropped.values()) == dropped_docs
        stated, lost = _summed(document["licences"].get(name, {})), _summed(section.get("dropped_licences", {}))
        shares = [_labels(_summed(section["languages"]), _summed(section["dropped_languages"]), "language",
                          "not identified", name)]
        personal = None
        if sum(lost.values()) == dropped_docs:
            stated[""] = section["docs"] - sum(stated.values())
            shares.append(_labels(stated, lost, "licence", "none stated", name))
            personal = _personal_data(section, document.get("signals", {}).get(name, {}))
        out.append({"dataset": name, "counted": counted, "docs": section["docs"] + dropped_docs,
                    "kept": section["docs"], "chart": Markup(_lengths(kept, dropped, name)) if counted else "",
                    "medians": [_median(bins) for bins in (_added(kept, dropped), kept)] if counted else None,
                    "shares": [s for s in shares if s is not None], "personal": personal})
    return out


def _summed(by: Mapping[str, Counts]) -> dict[str, int]:
    out: dict[str, int] = {}
    for counts in by.values():
        out = _added(out, counts)
    return out


def _added(one: Counts, other: Counts) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


def _median(bins: Counts) -> str:
    """Return the histogram bin in which the median length lies, as "512 to 1,024"; "" if there are no documents."""
    half, counted = sum(bins.values()) / 2, 0
    for b in sorted(map(int, bins)):
        counted += bins[str(b)]
        if counted and counted >= half:
            return f"{count(2 ** b)} to {count(2 ** (b + 1))}"
    return ""


def _lengths(kept: Counts, dropped: Counts, name: str) -> Element:
    """Draw a histogram of the documents of the dataset `name` by log2 of their characters. Bars of dropped documents
    stand on top of those of kept ones."""
    used = sorted(int(b) for b in {**kept, **dropped})
    bins = range(used[0], used[-1] + 1)
    both = [[by.get(str(b), 0) for b in bins] for by in (kept, dropped)]
    step = (WIDTH - 10) / len(bins)
    tall = (HEIGHT - FOOT - 8) / max(map(sum, zip(*both, strict=True)))
    names = axis([count(2 ** b) for b in bins], step, WIDTH)
    label = f"lengths of {name} in characters: " + ", ".join(
        f"{count(2 ** b)} {k + d:,} of which kept {k:,}" for b, k, d in zip(bins, *both, strict=True))
    return tag("svg", tag("title", label),
               tag("path", class_="kept", d=bar_path(both[0], [float(HEIGHT - FOOT)] * len(bins), step, tall)),
               tag("path", class_="gone", d=bar_path(both[1], [HEIGHT - FOOT - n * tall for n in both[0]], step, tall)),
               *(tag("text", text, class_="axis", x=left + room / 2, y=HEIGHT - 4, text_anchor="middle")
                 for text, left, room in names),
               class_="hist", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)


def _labels(kept: Counts, dropped: Counts, kind: str, none: str, name: str) -> dict[str, Any] | None:
    """Return bars of the labels of all judged (kept or dropped) documents and of the kept ones, and the labels whose
    share changed most. `kind` is the kind of label (language or licence), and `none` the name of the label ''. The
    label `other` stands for labels that were not counted apart. Returns None if there are fewer than two labels."""
    words = {"": none, "other": f"another {kind}"}
    before = {label: docs for label, docs in _added(kept, dropped).items() if docs}
    ordered = sorted(before, key=lambda label: (-before[label], label))
    if len(ordered) < 2:
        return None
    bars = []
    for word, by in (("input", before), ("kept", kept)):
        parts = [(words.get(label, label), float(by.get(label, 0)), i) for i, label in enumerate(ordered[:LABELS])]
        others = sum(by.get(label, 0) for label in ordered[LABELS:])
        bars.append((word, Markup(stacked([*parts, *([("others", others, OTHERS)] if others else [])], height=18,
                                          label=f"{kind}s of {name}, {word}"))))
    total, kept_total = sum(before.values()), sum(kept.values())
    changes = [(words.get(label, label), before[label] / total, kept.get(label, 0) / kept_total if kept_total else 0.0)
               for label in ordered]
    changes.sort(key=lambda c: (-abs(c[2] - c[1]), c[0]))
    return {"kind": kind, "bars": bars,
            "changes": [(label, percent(a), percent(b)) for label, a, b in changes[:3] if abs(b - a) >= 0.001],
            "keys": [*((words.get(label, label), i) for i, label in enumerate(ordered[:LABELS])),
                     *([(plural(len(ordered) - LABELS, f"more {kind}"), OTHERS)] if len(ordered) > LABELS else [])]}


def _personal_data(section: Mapping[str, Any], signals: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of personal data by kind that were found in all judged documents and in the kept ones, and the
    number of documents that were searched, as far as the section `signals` of the dataset tells it. Returns None if
    nothing was found."""
    kept, dropped = section["pii"], section["dropped_pii"]
    before = {kind: n for kind, n in _added(kept, dropped).items() if n}
    searched = [row["docs"] for row in signals.get("signals", ()) if row["signal"] in before]
    return {"rows": [{"kind": PII.get(kind, kind.removeprefix("pii_").replace("_", " ")), "before": n,
                      "after": kept.get(kind, 0)} for kind, n in sorted(before.items(), key=lambda i: (-i[1], i[0]))],
            "searched": max(searched, default=None), "exact": signals.get("read", {}).get("exact", True),
            } if before else None
