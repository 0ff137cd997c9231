"""The bill for people: what a recipe will leave and cost, with ranges."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rich.markup import escape

from pipeline.engine.driver.progress import size
from pipeline.plan.show import WIDTH, human_seconds


def human_count(n: float) -> str:
    """Documents or tokens: 1234 → '1,234', 1.2e9 → '1.20 B'."""
    for one, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(n) >= one:
            return f"{n / one:.3g} {unit}"
    return f"{n:,.0f}"


def between(found: Mapping[str, float], say: Callable[[float], str]) -> str:
    """'870 (540 … 1,062)', or the number alone when it is certain."""
    low, value, high = say(found["low"]), say(found["value"]), say(found["high"])
    return value if low == high == value else f"{value} ({low} … {high})"


def bill_lines(document: Mapping[str, Any]) -> list[str]:
    """Lines of `pipeline.forecast.bill.bill`, with rich's markup."""
    total = document["total"]
    out = ["[bold]sample[/]"]
    names = [*document["sample"], *(r["name"] for r in document["nodes"]),
             *(f"{d['node']}, {d['source']}" for d in document["duplicates"])]
    width = max(map(len, names)) + 2
    for name, s in document["sample"].items():
        out.append(f"  {escape(name):<{width}}{s['records_drawn']:,} of {s['records']:,} records read, in "
                   f"{s['files_read']:,} of {s['files']:,} files: a {1 / s['scale']:.3%} sample")
    out.append(f"  run here in {human_seconds(document['sample_wall_s'])}")
    out += ["", "[bold]documents[/]"]
    for dataset in document["datasets"]:
        out.append(f"  {escape(dataset['dataset']):<{width}}{between(dataset['documents'], human_count)} documents, "
                   f"{between(dataset['text_bytes'], size)} of text")
        if len(dataset["sources"]) > 1:
            out += [f"    {escape(source):<{width - 2}}{between(n['documents'], human_count)}"
                    for source, n in dataset["sources"].items()]
    if document["streams"]:
        out += ["", "[bold]tokens[/]"]
        out += [f"  {escape(s['stream']):<{width}}{between(s['tokens'], human_count)} to train on, "
                f"{between(s['held_out'], human_count)} held out" for s in document["streams"]]
    if document["mixture"]:
        out += ["", "[bold]mixture[/]"]
        out += [f"  {escape(m['stream']):<{width}}{human_count(m['needed'])} tokens wanted: "
                f"{between(m['epochs'], _epochs)} epochs" for m in document["mixture"]]
    found = [d for d in document["duplicates"] if d["documents"]]
    if found:
        out += ["", "[bold]duplicates[/]  (they grow faster than the input)"]
        out += [f"  {escape(d['node'] + ', ' + d['source']):<{width}}{d['in_sample']:.1%} of the sample; of the whole "
                f"{d['removed']['low'] / d['documents']:.1%} … {d['removed']['high'] / d['documents']:.1%}"
                for d in found]
    out += ["", f"[bold]{'nodes':<{width}}  {'tasks':>9}  {'CPU':<32}{'disk':>10}{'exchange':>11}{'memory':>9}[/]"]
    for row in document["nodes"]:
        disk, exchange = row["disk_bytes"]["value"], row["exchange_bytes"]["value"]
        out.append(f"  {escape(row['name'].rstrip(':')):<{width}}{row['tasks']:>9,}  "
                   f"{between(row['cpu_s'], human_seconds):<32}{size(disk) if disk else '–':>10}"
                   f"{size(exchange) if exchange else '–':>11}"
                   + (f"{row['memory_mb']:>6.0f} MB" if row["memory_mb"] else f"{'–':>9}"))
    cores = f"{total['cores']:,} core" + ("s" if total["cores"] != 1 else "")
    out += ["", f"CPU:      [bold]{between(total['cpu_hours'], _hours)}[/]",
            f"wall:     [bold]{between(total['wall_s'], human_seconds)}[/] on {cores}",
            f"memory:   {total['memory_mb_per_worker']:.0f} MB a worker at most, in the sample",
            f"disk:     {between(total['disk_bytes'], size)} in the store, and "
            f"{between(total['exchange_bytes'], size)} for exchange",
            f"          in object storage {between(total['published_bytes'], size)} more: what is published is "
            f"copied there"]
    if "cost" in total:
        out.append(f"cost:     [bold]{between(total['cost'], _money)}[/] at {total['price_per_core_hour']:g} per "
                   f"core-hour")
    notes = [*document["notes"], *document.get("warnings", [])]
    return [*out, *([""] if notes else []), *(escape(line) for note in notes for line in textwrap.wrap(
        f"note: {note}", WIDTH, subsequent_indent="      "))]


def _epochs(n: float) -> str:
    return f"{n:.2g}" if n < 10 else f"{n:,.0f}"


def _hours(hours: float) -> str:
    """Core-hours, or less than two of them in smaller units."""
    return f"{hours:,.0f} core-hours" if hours >= 10 else human_seconds(3600 * hours)


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2g}"
