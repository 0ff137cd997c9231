"""report.json → one HTML file that works offline: no scripts, no fonts, nothing to fetch; light, dark, print, phone."""

from __future__ import annotations

import json
from difflib import SequenceMatcher
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from pipeline.report import charts

#: languages shown of a source, stages in the legend of the cost bar; the rest together
LANGUAGES, COSTS = 7, 9
#: the grey of what stands for several
REST = charts.COLORS - 1


def render(document: dict[str, Any]) -> str:
    """The report as HTML. `document` is what `pipeline.report.collect.collect` returned (or report.json holds).

    The order of keys does not count: what has an order stands in lists, or is named in `names`."""
    env = Environment(loader=PackageLoader("pipeline.report", "templates"), undefined=StrictUndefined,
                      autoescape=select_autoescape(default=True, default_for_string=True), trim_blocks=True,
                      lstrip_blocks=True)
    env.filters |= {"number": charts.number, "size": charts.size, "seconds": charts.seconds,
                    "percent": charts.percent, "exact": lambda n: f"{n:,}", "words": lambda s: s.replace("_", " ")}
    document = json.loads(json.dumps(document, sort_keys=True))
    color = colors(document)
    return env.get_template("report.html.j2").render(
        d=document, color=color, names=document["names"], head=headline(document), phases=phases(document),
        cost=cost_bar(document), lengths=length_charts(document, color), languages=language_rows(document),
        similarity_charts=similarity_charts(document), plural=charts.plural, marked=marked,
        stacked=lambda *a, **k: Markup(charts.stacked(*a, **k)), meter=lambda *a, **k: Markup(charts.meter(*a, **k)),
        curve=Markup((document["training"] or {}).get("curve") or ""))


def colors(document: dict[str, Any]) -> dict[str, int]:
    """Sources in order, then streams that are not named like a source."""
    names = [*document["names"]["sources"], *document["names"]["streams"]]
    return {name: i % (charts.COLORS - 1) for i, name in enumerate(dict.fromkeys(names))}


def headline(document: dict[str, Any]) -> dict[str, Any]:
    """The few numbers on top. Kept is what the datasets hold that no other dataset is made from."""
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
    """Mixture rows grouped by phase, with shares of realised tokens."""
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
    """CPU seconds by stage name over all passes and by kind for other tasks, largest first, the small ones together."""
    by: dict[str, float] = {}
    for row in document["stages"]:
        by[row["stage"]] = by.get(row["stage"], 0.0) + row["cpu_s"]
    for task in document["tasks"]:
        if task["kind"] != "pass":
            by[task["kind"]] = by.get(task["kind"], 0.0) + task["cpu_s"]
    ordered = sorted(((n, v) for n, v in by.items() if v > 0), key=lambda x: (-x[1], x[0]))
    rest = sum(v for _, v in ordered[COSTS:])
    return [(n, v, i) for i, (n, v) in enumerate(ordered[:COSTS])] + ([("all others", rest, REST)] if rest else [])


def length_charts(document: dict[str, Any], color: dict[str, int]) -> list[dict[str, Any]]:
    """One histogram a source over the final datasets, on a common axis."""
    found: dict[str, dict[str, int]] = {}
    for name in document["names"]["final"]:
        for source, bins in document["datasets"][name]["lengths"].items():
            into = found.setdefault(source, {})
            for b, n in bins.items():
                into[b] = into.get(b, 0) + n
    used = [int(b) for bins in found.values() for b in bins]
    return [{"source": s, "docs": sum(found[s].values()),
             "svg": Markup(charts.lengths(found[s], color[s], low=min(used), high=max(used),
                                          label=f"lengths of the documents of {s}"))}
            for s in document["names"]["sources"] if s in found]


def language_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Kept documents of the final datasets by source and language (the commonest, the rest together)."""
    out = []
    for source in document["names"]["sources"]:
        found: dict[str, int] = {}
        for name in document["names"]["final"]:
            for language, n in document["datasets"][name]["languages"].get(source, {}).items():
                found[language] = found.get(language, 0) + n
        ordered = sorted(((k, n) for k, n in found.items() if k), key=lambda x: (-x[1], x[0]))
        rest = sum(n for _, n in ordered[LANGUAGES:])
        parts = [(name, n, i) for i, (name, n) in enumerate(ordered[:LANGUAGES])]
        parts += [("others", rest, REST - 1)] if rest else []
        parts += [("not identified", found[""], REST)] if found.get("") else []
        if parts:
            out.append({"source": source, "parts": parts})
    return out


def similarity_charts(document: dict[str, Any]) -> dict[str, Markup]:
    """By barrier, where removed documents differ in similarity at all."""
    from pipeline.report.documents import SIMILARITY_BINS

    return {dup["barrier"]: Markup(charts.similarities(dup["similarity"], 0, of=SIMILARITY_BINS,
                                                       label=f"similarity of what {dup['step']} removed"))
            for dup in document["duplicates"] if len(dup["similarity"]) > 1}


def marked(text: str, other: str) -> Markup:
    """`text` with the words marked that `other` does not have there."""
    a, b = text.split(), other.split()
    out = []
    for tag, i, j, _, _ in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if i < j:
            words = escape(" ".join(a[i:j]))
            # past the end of the shorter excerpt nothing can be said to differ
            out.append(words if tag == "equal" or j == len(a) else Markup("<mark>{}</mark>").format(words))
    return Markup(" ").join(out)
