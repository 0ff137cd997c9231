"""Prints a plan: the inputs, the nodes (passes, barriers …) in order with the cost of each, and why nodes are stale
(have tasks to run)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from pipeline.base.humanize import duration, size
from pipeline.base.visible import visible

COLOR = {"fresh": "green", "stale": "yellow", "partly": "yellow", "waits": "cyan"}
WIDTH = 100


def print_plan(document: dict[str, Any]) -> None:
    """Print a plan that `pipeline.plan.estimate.survey_recipe` has described."""
    out = Console(highlight=False, soft_wrap=True)
    for line in lines(document):
        out.print(line)


def lines(document: dict[str, Any]) -> list[str]:
    """Return the lines of text that describe a plan, with the markup of the library `rich`."""
    rows = [r for r in document["nodes"] if r["kind"] != "index" or r["partitions"]]
    width = max(len("inputs"), *(len(r["name"]) for r in rows), *(len(n) for n in document["inputs"])) + 2
    out = [f"[bold]{escape(document['recipe'])}[/] → {escape(document['store'])}", "", "[bold]inputs[/]"]
    for name, source in document["inputs"].items():
        stored, inside = size(source["bytes"]), size(source["expected"])
        files = f"{source['files']:,} file{'s' if source['files'] != 1 else ''}"
        unpacked = f"   about {inside} uncompressed" if source["expected"] != source["bytes"] else ""
        out.append(f"  {name:<{width}}{source['reader']:<9} {files:>12} {stored:>9}{unpacked}")
    out += ["", f"[bold]{'nodes':<{width}}  {'state':<16}{'partitions':>11}{'bytes in':>10}{'CPU':>9}{'disk':>10}[/]"]
    for row in rows:
        out += _node(row, width)
    return [*out, "", *_what_reruns(document), *_costs(document), *_warnings(document)]


def _node(row: dict[str, Any], width: int) -> list[str]:
    """Return the lines that `tokenmill plan` prints for one node of the plan. The first has the counts of its tasks and
    its forecast. The others name its steps and the nodes that its documents come from."""
    state, total = _state(row), row["partitions"]
    if total is None:
        total = f"about {row['expected_partitions']}" if row["expected_partitions"] else "?"
    elif row["more"]:
        total = f"{total}+"
    cpu = duration(row["cpu_s"]) if row["cpu_s"] else "–"
    disk = size(row["disk_bytes"]) if row["disk_bytes"] else "–"
    first = (f"  {row['name'].rstrip(':'):<{width}}[{COLOR[row['status']]}]{state:<16}[/]{total:>11}"
             f"{size(row['bytes_in']):>10}{cpu:>9}{disk:>10}")
    barrier = row["name"].split(":")[0] + "/"  # not shown as an origin, since the steps name the barrier
    origin = [d.removeprefix("index:").rstrip(":") for d in row["deps"] if not d.startswith(barrier)]
    steps = " → ".join(row["steps"]) or ("read" if row["kind"] == "pass" else "where to split big files")
    text = steps + (f"  ← {', '.join(origin)}" if origin else "")
    if row["replayed"]:
        which = "verdicts" if row["replayed"] == row["stale"] else f"verdicts of {row['replayed']}"
        text += f"; {which} replayed from stored signals"
    return [first, *(f"[dim]    {escape(part)}[/]" for line in (text, *row.get("facts", ()))
                     for part in textwrap.wrap(line, WIDTH - 4))]


def _state(row: dict[str, Any]) -> str:
    if row["status"] == "fresh":
        return "fresh" if row["partitions"] else "nothing to do"
    if row["status"] == "waits":
        return "waits"
    stale = f"{row['stale']} to run" if row["stale"] else ""
    return ", ".join([stale] * bool(stale) + [f"{row['pending']} wait"] * bool(row["pending"]))


def _what_reruns(document: dict[str, Any]) -> list[str]:
    """Return lines of text: which settings changed since the latest run, which nodes a run would execute, and which it
    would leave as they are."""
    out = []
    changes = document["changes"]
    if changes and changes["settings"]:
        out.append(f"changed since run {escape(changes['run'])}:")
        out += [f"  {escape(c['key'])}: {escape(_value(c['was']))} → {escape(_value(c['now']))}"
                for c in changes["settings"]]
    if not document["reruns"] and not document["waits"]:
        return [*out, *_nothing_reruns(changes)]
    if document["total"]["tasks_fresh"]:
        runs = [f"{name} ({r['tasks']} of {r['of']})" for name, r in document["reruns"].items()]
        out += _listed("to run:   ", runs)
        out += _listed("after it: ", [*document["waits"]], "  (as far as the results before them change)")
        out += _listed("unchanged:", document["unchanged"])
    return out


def _nothing_reruns(changes: Mapping[str, Any] | None) -> list[str]:
    """Return lines of text for a plan without stale nodes: why nothing runs again although settings have changed, and
    what a run would still do."""
    sections = list(dict.fromkeys(str(c["key"]).partition(".")[0] for c in changes["settings"])) if changes else []
    if not sections:
        return ["everything is done already: a run would only publish it again"]
    lines = [f"nothing runs again: no node depends on what changed in {escape(', '.join(sections))}"]
    writes = [*(["writes the curriculum anew, from the shards as they are"] if "curriculum" in sections else []),
              "publishes the results again"]
    lines.append(f"a run only {' and '.join(writes)}")
    if "train" in sections:
        lines.append("the settings of train take effect when you train on that run")
    return lines


def _listed(title: str, names: list[str], note: str = "") -> list[str]:
    if not names:
        return []
    return [escape(line) for line in textwrap.wrap(f"{title} {', '.join(n.rstrip(':') for n in names)}{note}", WIDTH,
                                                   subsequent_indent=" " * (len(title) + 1))]


def _costs(document: dict[str, Any]) -> list[str]:
    total = document["total"]
    if not document["reruns"] and not document["waits"]:
        return []
    basis = "speeds measured in this store" if document["measured"] else "typical speeds; nothing was measured here yet"
    most = "at most about" if document["waits"] and total["tasks_fresh"] else "about"
    return [f"cost:      {most} [bold]{duration(total['cpu_s'])}[/] CPU (over all cores) and "
            f"[bold]{size(total['disk_bytes'])}[/] disk  ({basis})"]


def _warnings(document: dict[str, Any]) -> list[str]:
    out = []
    for warning in document["warnings"]:
        first, *more = textwrap.wrap(visible(f"warning: {warning}"), WIDTH, subsequent_indent=" " * 9,
                                     break_long_words=False, break_on_hyphens=False)
        out += [f"[yellow]warning:[/]{escape(first.removeprefix('warning:'))}", *map(escape, more)]
    return out


def _value(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
