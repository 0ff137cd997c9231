"""Formats the cost forecast as lines for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from rich.markup import escape

from pipeline.base.humanize import count, duration, size
from pipeline.forecast.range import Range
from pipeline.forecast.results import CostForecast
from pipeline.plan.show import WIDTH


def between(estimate: Range, as_text: Callable[[float], str]) -> str:
    """Format an estimate with its bounds as text: '870 (540 … 1,062)', or only the number when both bounds are equal to
    it. `as_text` turns a number into text."""
    low, value, high = as_text(estimate.low), as_text(estimate.value), as_text(estimate.high)
    return value if low == high == value else f"{value} ({low} … {high})"


def lines(forecast: CostForecast, warnings: Sequence[str] = ()) -> list[str]:
    """Return the printed lines of a cost forecast, with the markup of the library `rich`."""
    names = [*forecast.sample, *(n.name for n in forecast.nodes),
             *(f"{d.node}, {d.source}" for d in forecast.duplicates)]
    width = max(map(len, names)) + 2
    notes = [*forecast.notes, *warnings]
    return [*_sample(forecast, width), *_yields(forecast, width), *_costs(forecast, width),
            *([""] if notes else []), *(escape(line) for note in notes for line in textwrap.wrap(
                f"note: {note}", WIDTH, subsequent_indent="      "))]


def _sample(forecast: CostForecast, width: int) -> list[str]:
    rows = [f"  {escape(name):<{width}}{s.records_drawn:,} of {s.records_read:,} records read, in {s.files_read:,} of "
            f"{s.files:,} files: a {1 / s.scale:.3%} sample" for name, s in forecast.sample.items()]
    return ["[bold]sample[/]", *rows, f"  run here in {duration(forecast.sample_wall_s)}"]


def _yields(forecast: CostForecast, width: int) -> list[str]:
    """Return the lines about the results of a run: documents, tokens, epochs of the mixture of streams, and
    duplicates."""
    out = ["", "[bold]documents[/]"]
    for dataset in forecast.datasets:
        out.append(f"  {escape(dataset.dataset):<{width}}{between(dataset.documents, count)} documents, "
                   f"{between(dataset.text_bytes, size)} of text")
        if len(dataset.sources) > 1:
            out += [f"    {escape(source):<{width - 2}}{between(n.documents, count)}"
                    for source, n in dataset.sources.items()]
    if forecast.streams:
        out += ["", "[bold]tokens[/]"]
        out += [f"  {escape(s.stream):<{width}}{between(s.tokens, count)} to train on, "
                f"{between(s.held_out, count)} held out" for s in forecast.streams]
    if forecast.mixture:
        out += ["", "[bold]mixture[/]"]
        out += [f"  {escape(m.stream):<{width}}{count(m.needed)} tokens wanted: {between(m.epochs, _epochs)} "
                f"epochs" for m in forecast.mixture]
    if duplicates := [d for d in forecast.duplicates if d.documents]:
        out += ["", "[bold]duplicates[/]  (they grow faster than the input)"]
        out += [f"  {escape(d.node + ', ' + d.source):<{width}}{d.in_sample:.1%} of the sample; of the whole "
                f"{d.removed.low / d.documents:.1%} … {d.removed.high / d.documents:.1%}" for d in duplicates]
    return out


def _costs(forecast: CostForecast, width: int) -> list[str]:
    total = forecast.total
    out = ["", f"[bold]{'nodes':<{width}}  {'tasks':>9}  {'CPU':<32}{'disk':>10}{'exchange':>11}{'memory':>9}[/]"]
    for node in forecast.nodes:
        disk, exchange = node.disk_bytes.value, node.exchange_bytes.value
        out.append(f"  {escape(node.name.rstrip(':')):<{width}}{node.tasks:>9,}  "
                   f"{between(node.cpu_s, duration):<32}{size(disk) if disk else '–':>10}"
                   f"{size(exchange) if exchange else '–':>11}"
                   + (f"{node.memory_mb:>6.0f} MB" if node.memory_mb else f"{'–':>9}"))
    cores = f"{total.cores:,} core" + ("s" if total.cores != 1 else "")
    out += ["", f"CPU:      [bold]{between(total.cpu_hours, _hours)}[/]",
            f"wall:     [bold]{between(total.wall_s, duration)}[/] on {cores}",
            f"memory:   {total.memory_mb_per_worker:.0f} MB a worker at most, in the sample",
            f"disk:     {between(total.disk_bytes, size)} in the store, and {between(total.exchange_bytes, size)} for "
            f"exchange",
            f"          in object storage {between(total.published_bytes, size)} more: what is published is copied "
            f"there"]
    if total.cost is not None:
        out.append(f"cost:     [bold]{between(total.cost, _money)}[/] at {total.price_per_core_hour:g} per core-hour")
    return out


def _epochs(n: float) -> str:
    return f"{n:.2g}" if n < 10 else f"{n:,.0f}"


def _hours(hours: float) -> str:
    """Format core-hours as text. Less than ten core-hours are given in smaller units of time."""
    return f"{hours:,.0f} core-hours" if hours >= 10 else duration(3600 * hours)


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2g}"
