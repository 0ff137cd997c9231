"""Turns report.json into one HTML file. The file works offline, because it needs no scripts, fonts or downloads. It has
a light and a dark mode, and can be printed and read on a phone.

The file has at most 1 MB. For this, long tables are cut to their most important rows (`pipeline.report.trim`), if
necessary to five. If names or lists inside a row are so long that this is not enough, the largest sections are left
out.
"""

from __future__ import annotations

import json
import re
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape
from markupsafe import Markup, escape

from pipeline.base import humanize
from pipeline.base.visible import visible_json
from pipeline.passes.tally import BINS, SIMILARITY_BINS, bin_edges
from pipeline.report import charts
from pipeline.report.figures import figures
from pipeline.report.overview import beside, source_rows
from pipeline.report.totals import shared
from pipeline.report.trim import LARGEST, ROWS, trimmed

#: most languages shown for a source, most stages in the bar of costs, and most languages shown in the table of a
#: dataset. All further ones are combined.
LANGUAGES, COSTS, FATES = 7, 9, 12
#: most bars in a chart of scores
MOST_BARS = 40
#: for each of these shares, the report says which score this share of the documents reaches
SHARES = (0.5, 0.25, 0.1, 0.05)
#: the grey of bars that combine several items
REST = charts.COLORS - 1


def render(document: dict[str, Any]) -> str:
    """Return the report as HTML. `document` is the content of report.json (`pipeline.report.collect.collect`).

    The HTML does not depend on the order of keys in `document`. Where an order matters, `document` has lists, or
    `document["names"]` lists the keys in order.
    """
    document = visible_json(json.loads(json.dumps(document, sort_keys=True)))
    page = ""
    for rows in ROWS:
        page = _page(document, rows)
        if len(page.encode()) <= LARGEST:
            return page
    return _without_largest(page)


def _without_largest(page: str) -> str:
    """Return the page without the contents of its largest sections, one after another until it has at most LARGEST
    bytes. Their headings stay, with a sentence that says where the figures are. What is outside all sections (the
    head, and the beginning of the recipe) has a few kilobytes."""
    pieces = re.split(r"(<section .*?</h2>)(.*?)(</section>)", page, flags=re.DOTALL)
    sizes = [len(piece.encode()) for piece in pieces]
    left_out = '\n<p class="say">This would make the page larger than 1 MB; see <code>report.json</code>.</p>\n'
    for i in sorted(range(2, len(pieces), 4), key=lambda i: -sizes[i]):
        if sum(sizes) <= LARGEST:
            break
        pieces[i], sizes[i] = left_out, len(left_out)
    return "".join(pieces)


def _page(report: dict[str, Any], rows: int) -> str:
    """Return the report as HTML with at most `rows` rows in every table. Sums and totals cover all rows, also those
    that are cut."""
    document, cut = trimmed(report, rows)
    color, grouped = colors(report), phases(report)
    cut |= {"phases": len(grouped) - rows} if len(grouped) > rows else {}
    return _template().render(
        d=document, cut=cut, color=color, names=document["names"], head=headline(report),
        sources=source_rows(report, document["names"]["sources"]), several=bool(shared(report)),
        beside=beside(document, report),
        phases=[{**phase, "rows": phase["rows"][:rows], "rest": phase["rows"][rows:]} for phase in grouped[:rows]],
        cost=cost_bar(report), lengths=length_charts(document, color), languages=language_rows(document),
        similarity_charts=similarity_charts(document), **figures(report, score_charts(document), color, rows),
        fates={name: language_fates(section) for name, section in document["datasets"].items()},
        plural=humanize.plural, marked=marked,
        stacked=lambda *a, **k: Markup(charts.stacked(*a, **k)), meter=lambda *a, **k: Markup(charts.meter(*a, **k)),
        curve=Markup((document["training"] or {}).get("curve") or ""),
        task_curves=Markup((document["training"] or {}).get("task_curves") or ""))


@cache
def _template() -> Template:
    env = Environment(loader=PackageLoader("pipeline.report", "templates"), undefined=StrictUndefined,
                      autoescape=select_autoescape(default=True, default_for_string=True), trim_blocks=True,
                      lstrip_blocks=True)
    env.filters |= {"number": humanize.count, "size": humanize.size, "seconds": humanize.duration,
                    "percent": humanize.percent, "exact": lambda n: f"{n:,}", "words": lambda s: s.replace("_", " ")}
    return env.get_template("report.html.j2")


def environment() -> Environment:
    """Return the Jinja environment of all HTML pages. It holds the templates, which escape every value, and the filters
    that the templates use."""
    return _template().environment


def colors(document: dict[str, Any]) -> dict[str, int]:
    """Return the number of the colour of each source and token stream, by name. A stream and a source with the same
    name have the same colour."""
    names = [*document["names"]["sources"], *document["names"]["streams"],
             *(row["stream"] for row in document["mixture"])]      # split shards have several streams
    return {name: i % (charts.COLORS - 1) for i, name in enumerate(dict.fromkeys(names))}


def headline(document: dict[str, Any]) -> dict[str, Any]:
    """Return the few numbers at the top of the report. Kept documents are those of the final datasets (from which no
    other dataset is made)."""
    read = sum(rows[0]["docs"] for rows in document["funnel"].values() if rows)
    final = [document["datasets"][name] for name in document["names"]["final"]]
    removed = sum(n for dup in document["duplicates"] for by in dup["removed"].values() for n in by.values())
    cpu = sum(t["cpu_s"] for t in document["tasks"])
    return {"read": read, "kept": sum(d["docs"] for d in final), "bytes": sum(d["bytes"] for d in final),
            "tokens": sum(t["tokens"] for t in document["tokens"].values()), "duplicates": removed, "cpu_s": cpu,
            "docs_per_cpu_s": read / cpu if cpu else 0.0,
            "quarantined": sum(n for part in ("datasets", "tokens") for section in document[part].values()
                               for n in section["quarantined"].values())}


def phases(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of `document["mixture"]`, grouped by phase of the curriculum. Each row is about one token stream.
    Two figures are added to a row. `share` is the stream's share of the windows (training samples) that the phase
    really takes. `difference` is the real minus the planned number of windows of the stream. In a phase the largest
    streams come first."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in document["mixture"]:
        grouped.setdefault(row["phase"], []).append(row)
    out = []
    for name, rows in grouped.items():
        total = sum(r["realised"] for r in rows) or 1
        out.append({"name": name, "tokens": sum(r["tokens"] for r in rows),
                    "rows": [{**r, "share": r["realised"] / total, "difference": r["realised"] - r["planned"]}
                             for r in sorted(rows, key=lambda r: -r["realised"])]})
    return out


def cost_bar(document: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Return the parts of the bar of costs: (name, CPU seconds, colour). CPU time in passes (groups of steps that run
    together) is added up by step. CPU time of other tasks is added up by the kind of their node in the plan. The
    largest parts come first, and the smallest ones are combined."""
    cpu_s: dict[str, float] = {}
    for row in document["stages"]:
        cpu_s[row["stage"]] = cpu_s.get(row["stage"], 0.0) + row["cpu_s"]
    for task in document["tasks"]:
        if task["kind"] != "pass":
            cpu_s[task["kind"]] = cpu_s.get(task["kind"], 0.0) + task["cpu_s"]
    ordered = sorted(((n, v) for n, v in cpu_s.items() if v > 0), key=lambda x: (-x[1], x[0]))
    others = sum(v for _, v in ordered[COSTS:])
    return [(n, v, i) for i, (n, v) in enumerate(ordered[:COSTS])] + ([("all others", others, REST)] if others else [])


def length_charts(document: dict[str, Any], color: dict[str, int]) -> list[dict[str, Any]]:
    """Draw a histogram of document lengths for each source, over the documents that the final datasets (from which no
    other dataset is made) kept. All histograms have the same axis."""
    by_source: dict[str, dict[str, int]] = {}
    for name in document["names"]["final"]:
        for source, bins in document["datasets"][name]["lengths"].items():
            into = by_source.setdefault(source, {})
            for b, n in bins.items():
                into[b] = into.get(b, 0) + n
    used = [int(b) for bins in by_source.values() for b in bins]
    return [{"source": s, "docs": sum(by_source[s].values()),
             "svg": Markup(charts.lengths(by_source[s], color[s], low=min(used), high=max(used),
                                          label=f"lengths of the documents of {s}"))}
            for s in document["names"]["sources"] if s in by_source]


def language_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row {source, parts} for each source that has documents in the final datasets (from which no other
    dataset is made). `parts` counts these documents by language. First come the LANGUAGES languages that are most
    common in this source, then all others together, and last the documents without a language."""
    out = []
    for source in document["names"]["sources"]:
        by_language: dict[str, int] = {}
        for name in document["names"]["final"]:
            for language, n in document["datasets"][name]["languages"].get(source, {}).items():
                by_language[language] = by_language.get(language, 0) + n
        ordered = sorted(((k, n) for k, n in by_language.items() if k), key=lambda x: (-x[1], x[0]))
        others = sum(n for _, n in ordered[LANGUAGES:])
        parts = [(name, n, i) for i, (name, n) in enumerate(ordered[:LANGUAGES])]
        parts += [("others", others, REST - 1)] if others else []
        parts += [("not identified", by_language[""], REST)] if by_language.get("") else []
        if parts:
            out.append({"source": source, "parts": parts})
    return out


def similarity_charts(document: dict[str, Any]) -> dict[str, Markup]:
    """Draw for each deduplication how similar the removed documents are to the kept ones. The charts are returned by
    the name of the deduplication. A deduplication has no chart if all similarities are in one bin."""
    return {dup["barrier"]: Markup(charts.similarities(dup["similarity"], 0, of=SIMILARITY_BINS,
                                                       label=f"similarity of what {dup['step']} removed"))
            for dup in document["duplicates"] if len(dup["similarity"]) > 1}


def score_charts(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Draw a chart of each score of every dataset, over the documents that have the score. Returns a list of {dataset,
    signal, docs, reached, svg}; the signal is the name of the score.

    `reached` lists pairs (share, score): this share of the documents has at least this score. Scores are counted in
    bins, so these scores are lower edges of bins. If several shares have the same score, only the largest share is
    listed."""
    out = []
    for dataset in document["names"]["datasets"]:
        for signal, bins in sorted(document["datasets"][dataset]["scores"].items()):
            by_bin = {int(number): docs for number, docs in bins.items()}
            total = sum(by_bin.values())
            reached: list[tuple[float, float]] = []
            above = 0
            for number in sorted(by_bin, reverse=True):
                above += by_bin[number]
                while len(reached) < len(SHARES) and above >= SHARES[-1 - len(reached)] * total:
                    reached.append((SHARES[-1 - len(reached)], least(number)))
            distinct = [(share, score) for i, (share, score) in enumerate(reached) if score not in
                    {s for _, s in reached[i + 1:]}]
            out.append({"dataset": dataset, "signal": signal, "docs": total, "reached": distinct[::-1],
                        "svg": Markup(charts.scores(bars_of(by_bin), 0, label=f"{signal} of {dataset}"))})
    return out


def least(number: int) -> float:
    """Return the smallest score that falls into the histogram bin with this number (`pipeline.passes.tally`)."""
    near, far = bin_edges(number)
    return near if number > 0 else -far if number < 0 else 0.0


def bars_of(bins: dict[int, int]) -> list[tuple[float, float, int]]:
    """Return the bars of a chart of scores, as (lowest score, highest score, documents). They reach from the lowest to
    the highest bin with documents. If there would be more than MOST_BARS bars, 2, 4, 8 … neighbouring bins are joined
    to one bar. Empty bars are kept, so that the axis is regular."""
    width = 1
    while max(bins) // width - min(bins) // width >= MOST_BARS and width < 64 * BINS:
        width *= 2
    joined: dict[int, int] = {}
    for number, docs in bins.items():
        joined[(number - 1) // width] = joined.get((number - 1) // width, 0) + docs
    return [(least(bar * width + 1), least((bar + 1) * width + 1), joined.get(bar, 0))
            for bar in range(min(joined), max(joined) + 1)]


def language_fates(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Count, for each language of a dataset, the documents that were kept, those that were dropped, and those that each
    stage dropped. The most common languages come first, and the other languages are combined. The result is empty if
    the dataset has at most one language."""
    row_of_language: dict[str, dict[str, Any]] = {}

    def row_of(language: str) -> dict[str, Any]:
        return row_of_language.setdefault(language, {"language": language, "kept": 0, "dropped": 0, "stages": {}})

    for by_language in section["languages"].values():
        for language, docs in by_language.items():
            row_of(language)["kept"] += docs
    for stage, by_language in section["dropped_languages"].items():
        for language, docs in by_language.items():
            row = row_of(language)
            row["dropped"] += docs
            row["stages"][stage] = row["stages"].get(stage, 0) + docs
    rows = sorted(row_of_language.values(), key=lambda r: (-r["kept"] - r["dropped"], r["language"]))
    if len(rows) < 2:
        return []
    if len(rows) > FATES + 1:
        others: dict[str, Any] = {"language": f"{len(rows) - FATES} others", "kept": 0, "dropped": 0, "stages": {}}
        for row in rows[FATES:]:
            others["kept"] += row["kept"]
            others["dropped"] += row["dropped"]
            for stage, docs in row["stages"].items():
                others["stages"][stage] = others["stages"].get(stage, 0) + docs
        rows = [*rows[:FATES], others]
    for row in rows:
        row["stages"] = sorted(row["stages"].items(), key=lambda x: (-x[1], x[0]))
    return rows


def marked(text: str, other: str) -> Markup:
    """Return `text` as HTML, with <mark> around the words that differ from the text `other`."""
    own_words, other_words = text.split(), other.split()
    out = []
    for tag, i, j, _, _ in SequenceMatcher(None, own_words, other_words, autojunk=False).get_opcodes():
        if i < j:
            words = escape(" ".join(own_words[i:j]))
            # words at the end are not marked when `other` ends before them: it is an excerpt of a text that may
            # continue with these words
            out.append(words if tag == "equal" or j == len(own_words) else Markup("<mark>{}</mark>").format(words))
    return Markup(" ").join(out)
