"""Prepares the arguments of the templates that draw figures, from the sections of report.json. A figure is left out if
the report lacks its section because an older version made the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from pipeline.report import course_chart, dag, distributions
from pipeline.report.groups import cluster_cards
from pipeline.report.shares import PII, before_after, share_sections

#: most domains that are listed of a dataset
DOMAINS = 12


def figures(document: Mapping[str, Any], scores: list[dict[str, Any]], color: Mapping[str, int],
            rows: int = 100) -> dict[str, Any]:
    """Return the arguments of the templates that draw figures. `scores` are charts of scores. Of these, a chart is left
    out if the report also has the distribution of its signal (a number per document). About `rows` entries of each list
    are shown."""
    return {**distributions.sections(document, scores, rows), "clusters": cluster_cards(document)[:rows],
            "shares": share_sections(document)[:rows], "before_after": before_after(document)[:rows],
            "places": places, "pii": PII, "domains": _domains(document, rows), "course": _course(document, color),
            "graph": Markup(dag.draw(document["graph"]) or "") if "graph" in document else ""}


def _course(document: Mapping[str, Any], color: Mapping[str, int]) -> dict[str, Any] | None:
    course, losses = document.get("course"), document.get("losses")
    if not course:
        return None
    return {"svg": Markup(course_chart.draw(course, losses, color)), "losses": bool(losses),
            "lines": course_chart.lines(course, losses) if losses else ([], 0),
            "keys": course_chart.keys(course, color)}


def _domains(document: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """Return the datasets whose documents come from more than one domain (host of URLs), each with its largest domains.
    Domains with a single document are not listed."""
    out = []
    for name in document["names"]["datasets"]:
        section = document.get("domains", {}).get(name)
        if section and section["domains"] > 1:
            top = [row for row in section["top"] if row["kept"] + row["dropped"] > 1][:max(5, min(DOMAINS, rows // 2))]
            out.append({**section, "dataset": name, "top": top, "left_out": section["domains"] - len(top)})
    return out[:rows]


def places(match: list[list[str]]) -> Markup:
    """Return an excerpt as HTML. The passages that made a rule drop the document are marked."""
    templates = {"mark": Markup("<mark>{}</mark>"), "text": Markup("{}"), "cut": Markup("…{}")}
    return Markup("").join(templates[kind].format(text) for kind, text in match)
