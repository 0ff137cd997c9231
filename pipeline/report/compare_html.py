"""Shows a comparison of two runs (`pipeline.report.compare`). The functions that choose and format rows are used for
the terminal, too. The page is one HTML file that works offline and holds no script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from pipeline.base import humanize
from pipeline.base.visible import visible_json
from pipeline.report import charts
from pipeline.report.html import environment, marked
from pipeline.report.side_by_side import HASHES, other_tokenizer

#: sections of report.json in the order of the page, with their titles. Sections that are not named follow
TITLES = {"sources": "Sources", "funnel": "Funnel", "datasets": "Reasons, languages, lengths, scores",
          "duplicates": "Duplicates", "tokens": "Tokens", "mixture": "Mixture", "order": "Order",
          "training": "Training", "lineage": "Outputs", "passes": "Passes", "stages": "Stages",
          "tasks": "Cost of nodes", "missing_records": "Missing records"}
#: most rows of a table of the page, and most reasons listed for a dataset
ROWS, GROUPS = 60, 40
#: characters of a value of a recipe
VALUE = 160
UNITS = {"bytes": humanize.size, "cpu_s": humanize.duration, "wall_s": humanize.duration, "seconds": humanize.duration,
         "share": humanize.percent}


def render(document: dict[str, Any]) -> str:
    """Return the comparison as an HTML page. `document` is the result of `pipeline.report.compare.compare_runs`."""
    document = visible_json(json.loads(json.dumps(document)))
    differ, equal = by_difference(overview(document))
    differ, retokenised = without_retokenised(document, differ)
    return environment().get_template("compare.html.j2").render(
        d=document, head=cut(differ, ROWS), equal=equal, retokenised=retokenised, more=max(0, len(differ) - ROWS),
        lengths=_lengths(document), sections=sections(document, ROWS), datasets=datasets(document),
        rows=ROWS, groups=GROUPS, value=value, figure=figure, change=change, fate=fate, decided=decided, marked=marked,
        plural=humanize.plural, bar=_bar, names=lambda path: " · ".join(path) or "–", swatches=_COLORS)


def overview(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of figures that are always shown: documents and bytes of every dataset and of its sources, and
    documents and tokens of every token stream and of its sources. Each row has a `name` (dataset, stream or source) and
    a `what` (the quantity). The figures of a stream are of training or held-out data, and those of its sources are of
    both."""
    out = []
    for row in document["figures"]:
        section, *path = row["path"]
        *names, what = path or [""]
        if section == "datasets":
            is_overview = what in ("docs", "bytes") and (len(names) == 1 or (len(names) == 3 and names[1] == "kept"))
        else:
            is_overview = section == "tokens" and what in ("docs", "tokens", "val_tokens")
        if is_overview:
            first = f"shards {names[0]}" if section == "tokens" and names else "".join(names[:1])
            words = "documents" if what == "docs" else what
            if section == "tokens":
                words = ("held-out tokens" if what == "val_tokens" else f"training {words}" if len(names) < 2 else
                         f"training and held-out {words}")
            out.append({**row, "name": " · ".join([first, *names[2:]]), "what": words})
    return out


def by_difference(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (the rows of figures that differ between the two runs, the rows that are equal)."""
    different = [row for row in rows if row["before"] != row["after"]]
    return different, [row for row in rows if row["before"] == row["after"]]


def without_retokenised(document: Mapping[str, Any], rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]],
                                                                                         list[dict[str, Any]]]:
    """Divide rows of the overview into (those to show, those to leave out). If the runs have different tokenizers, all
    token counts differ, which would hide what changed in the documents. Therefore the token counts of a stream or
    source are left out if both runs have as many documents of it."""
    if not other_tokenizer(document["figures"]):
        return rows, []
    same = {row["name"] for row in overview(document) if row["path"][-1] == "docs" and row["before"] == row["after"]}
    tokens = [row for row in rows if row["path"][0] == "tokens" and row["path"][-1] != "docs" and row["name"] in same]
    return [row for row in rows if row not in tokens], tokens


def datasets(document: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and comparison of each dataset. Those in which documents changed come first."""
    return sorted(document["documents"].items(), key=lambda item: not any(item[1]["changes"].values()))


def sections(document: Mapping[str, Any], most: int, brief: bool = False) -> list[dict[str, Any]]:
    """Return, for each section of the report, the figures that differ between the runs: {title, rows, left_out, equal}.
    `rows` are the `most` figures with the largest relative difference, `left_out` is the number of further figures that
    differ, and `equal` the number of equal ones. Figures that the overview has are not included.

    A section that only one run has is left out. With `brief`, figures that say nothing about documents are left out:
    measured ones (such as times), hashes, and bins of histograms.
    """
    in_overview = {tuple(row["path"]) for row in overview(document)}
    lonely = one_sided(document["figures"])
    by_section: dict[str, list[dict[str, Any]]] = {}
    for row in document["figures"]:
        if tuple(row["path"]) not in in_overview and row["path"][0] not in lonely:
            by_section.setdefault(row["path"][0], []).append(row)
    out = []
    for name in [*(name for name in TITLES if name in by_section),
                 *(name for name in by_section if name not in TITLES)]:
        different, equal = by_difference(by_section[name])
        different = [row for row in different if not (brief and _is_technical(row))]
        largest = cut(different, most)
        out.append({"title": TITLES.get(name, name.replace("_", " ").capitalize()), "rows": largest,
                    "left_out": len(different) - len(largest), "equal": len(equal)})
    return [section for section in out if section["rows"]]


def one_sided(figures: list[dict[str, Any]]) -> dict[str, str]:
    """Return the sections of the report that only one of the two runs has, such as the section about a training, as
    {section: "before" or "after"}."""
    sides: dict[str, set[str]] = {}
    for row in figures:
        sides.setdefault(row["path"][0], set()).update(side for side in ("before", "after") if row[side] is not None)
    return {section: side for section, (side, *others) in sides.items() if not others}


def _is_technical(row: Mapping[str, Any]) -> bool:
    return row["measured"] or row["path"][-1] in HASHES or "bins" in row["path"]


def cut(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return the `most` rows with the largest relative difference between the two runs, in the order of `rows`."""
    def change(place: int) -> float:
        row = rows[place]
        return -(abs(row["relative"]) if row["relative"] is not None else float("inf"))

    return [rows[place] for place in sorted(sorted(range(len(rows)), key=change)[:most])]


def figure(row: Mapping[str, Any], side: str) -> str:
    """Format one figure of a row for people. `side` names the run, "before" or "after". The text is "–" if that run
    does not have the figure. Hashes are cut to 12 characters."""
    number = row[side]
    if number is None:
        return "not in the top list" if row["path"][0] == "domains" and "top" in row["path"] else "–"
    if isinstance(number, str):
        return number[:12]
    unit = UNITS.get(row["path"][-1])
    return unit(number) if unit else f"{number:,}" if isinstance(number, int) else humanize.digits(number)


def change(row: Mapping[str, Any]) -> str:
    """Return, as text, by how much a figure differs between the two runs: the signed difference and, in brackets, its
    percentage of the figure before."""
    if row["difference"] is None:
        return "" if row["before"] == row["after"] else "differs"
    if not row["difference"]:
        return "="
    sign = "+" if row["difference"] > 0 else "−"
    size = figure({**row, "size": abs(row["difference"])}, "size")
    return f"{sign}{size}" + (f" ({sign}{humanize.percent(abs(row['relative']))})" if row["relative"] else "")


def value(setting: Any) -> str:
    """Return a value of a recipe as text on one line, cut to VALUE characters."""
    text = json.dumps(setting, ensure_ascii=False) if not isinstance(setting, str) else setting
    return text if len(text) <= VALUE else text[:VALUE] + "…"


def fate(side: Mapping[str, Any] | None) -> str:
    """Return as text what became of a document in one of the runs: kept, dropped or quarantined, by which step and for
    what reason. `side` is the document's entry for this run (`compare.documents_section`), None if the document was not
    given to the dataset."""
    if side is None:
        return "did not reach it"
    return f"{side['fate']} by {side['stage'] or 'reader'}: {side['reason']}" if side.get("reason") else side["fate"]


def decided(side: Mapping[str, Any] | None) -> str:
    """Return as text the signal (a number stored beside the document) and the threshold that made a run drop a
    document. The text is "" if they are unknown. `side` is the document's entry for this run."""
    rule = side and side.get("decided")
    return "" if not rule else (f"{rule['signal']} {rule['value']:.4g}, {rule['key']} {rule['threshold']:.4g}: "
                                f"{humanize.percent(rule['distance'])} away")


_COLORS = {"same": 2, "newly_dropped": 5, "newly_kept": 0, "changed_text": 4, "other_reason": 3, "only_before": 1,
           "only_after": 6, "unknown": 9}


def _bar(name: str, section: Mapping[str, Any]) -> Markup:
    """Draw a bar of the documents of the dataset `name`, divided by the change between the two runs (unchanged, newly
    dropped …). `section` is the dataset's section of the comparison."""
    parts = [(kind.replace("_", " "), n, _COLORS[kind]) for kind, n in [("same", section["same"]),
                                                                      *section["changes"].items()] if n]
    return Markup(charts.stacked(parts, label=f"documents of {name}"))


def _lengths(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draw the lengths of the kept documents in both runs, as charts, for each dataset in which they differ."""
    bins: dict[str, dict[str, dict[str, int]]] = {}
    for row in document["figures"]:
        if row["path"][0] == "datasets" and row["path"][2:3] == ["lengths"]:
            sides = bins.setdefault(row["path"][1], {"before": {}, "after": {}})
            for side in sides:
                sides[side][row["path"][-1]] = sides[side].get(row["path"][-1], 0) + (row[side] or 0)
    out = []
    for name, sides in bins.items():
        if sides["before"] != sides["after"]:
            used = [int(number) for number in {**sides["before"], **sides["after"]}]
            out.append({"dataset": name, **{side: Markup(charts.lengths(
                counts, color, low=min(used), high=max(used), label=f"lengths of the documents of {name}, {side}"))
                for (side, counts), color in zip(sides.items(), (1, 0))}})
    return out
