"""report.json → one HTML file that works offline: no scripts to load, no fonts to fetch, light and dark."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from pipeline.report import charts


def render(document: dict[str, Any]) -> str:
    """The report as HTML. `document` is what `pipeline.report.collect.collect` returned."""
    env = Environment(loader=PackageLoader("pipeline.report", "templates"), undefined=StrictUndefined,
                      autoescape=select_autoescape(default=True, default_for_string=True), trim_blocks=True,
                      lstrip_blocks=True)
    env.filters |= {"number": charts.number, "size": charts.size, "seconds": seconds, "percent": percent}
    sources = list(document["sources"])
    return env.get_template("report.html.j2").render(
        d=document, color={name: i % charts.COLORS for i, name in enumerate(sources)},
        phases=phases(document), head=headline(document), cost=cost_bar(document), lengths=length_charts(document),
        languages=language_rows(document),
        stacked=lambda *a, **k: Markup(charts.stacked(*a, **k)), meter=lambda *a, **k: Markup(charts.meter(*a, **k)))


def seconds(s: float) -> str:
    if s < 120:
        return f"{s:.2g} s" if s < 10 else f"{s:.0f} s"
    return f"{s / 60:.1f} min" if s < 7200 else f"{s / 3600:.1f} h"


def percent(share: float) -> str:
    return f"{share:.1%}" if 0.0005 < share < 0.9995 or share in (0, 1) else f"{share:.2%}"


def headline(document: dict[str, Any]) -> dict[str, Any]:
    """The few numbers on top."""
    read = sum(rows[0]["docs"] for rows in document["funnel"].values() if rows)
    last = list(document["datasets"].values())[-1] if document["datasets"] else {"docs": 0, "bytes": 0}
    removed = sum(n for dup in document["duplicates"] for by in dup["removed"].values() for n in by.values())
    cpu = sum(t["cpu_s"] for t in document["tasks"])
    return {"read": read, "kept": last["docs"], "bytes": last["bytes"],
            "tokens": sum(t["tokens"] for t in document["tokens"].values()), "duplicates": removed, "cpu_s": cpu,
            "docs_per_cpu_s": read / cpu if cpu else 0.0,
            "quarantined": sum(n for d in document["datasets"].values() for n in d["quarantined"].values())}


def phases(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Mixture rows grouped by phase, with shares of realised tokens."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in document["mixture"]:
        grouped.setdefault(row["phase"], []).append(row)
    out = []
    for name, rows in grouped.items():
        total = sum(r["realised"] for r in rows) or 1
        planned = sum(r["planned"] for r in rows) or 1
        out.append({"name": name, "tokens": sum(r["tokens"] for r in rows),
                    "rows": [{**r, "share": r["realised"] / total, "planned_share": r["planned"] / planned,
                              "difference": r["realised"] - r["planned"]} for r in rows]})
    return out


def cost_bar(document: dict[str, Any]) -> list[tuple[str, float, int]]:
    """CPU seconds by stage name over all passes and by kind for other tasks, largest first."""
    by: dict[str, float] = {}
    for row in document["stages"]:
        by[row["stage"]] = by.get(row["stage"], 0.0) + row["cpu_s"]
    for task in document["tasks"]:
        if task["kind"] != "pass":
            by[task["kind"]] = by.get(task["kind"], 0.0) + task["cpu_s"]
    ordered = sorted(by.items(), key=lambda x: -x[1])
    return [(name, value, i) for i, (name, value) in enumerate(ordered) if value > 0]


def length_charts(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One histogram a source, over the last dataset, on common axes."""
    if not document["datasets"]:
        return []
    lengths = list(document["datasets"].values())[-1]["lengths"]
    used = [int(b) for bins in lengths.values() for b in bins]
    if not used:
        return []
    low, high = min(used), max(used)
    order = {name: i for i, name in enumerate(document["sources"])}
    return [{"source": s, "docs": sum(bins.values()),
             "svg": Markup(charts.histogram(bins, order.get(s, 0), low=low, high=high, top=max(bins.values())))}
            for s, bins in sorted(lengths.items(), key=lambda x: order.get(x[0], 99))]


def language_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Kept documents by source and language (the eight commonest, the rest together)."""
    if not document["datasets"]:
        return []
    out = []
    for source, found in list(document["datasets"].values())[-1]["languages"].items():
        ordered = sorted(found.items(), key=lambda x: (-x[1], x[0]))
        shown = [(name or "not identified", n, i) for i, (name, n) in enumerate(ordered[:7])]
        rest = sum(n for _, n in ordered[7:])
        out.append({"source": source, "parts": shown + ([("others", rest, 7)] if rest else [])})
    return out
