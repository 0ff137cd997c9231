"""The plan for people: what goes in, the passes in order, what is fresh or stale, and what it will cost."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

STATUS = {"fresh": "[green]fresh[/]", "stale": "[yellow]stale[/]", "partly": "[yellow]partly[/]",
          "waits": "[dim]waits[/]"}


def human_bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def human_seconds(s: float) -> str:
    return f"{s:.0f} s" if s < 120 else f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.1f} h"


def print_plan(document: dict[str, Any], console: Console | None = None) -> None:
    out = console or Console()
    out.print(f"[bold]{document['recipe']}[/]  into {document['store']}")
    for name, source in document["inputs"].items():
        out.print(f"  {name}: {source['files']:,} files, {human_bytes(source['bytes'])}"
                  f" (about {human_bytes(source['expected'])} uncompressed)")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("node", "steps", "from"):
        table.add_column(title, overflow="fold")
    for title in ("partitions", "state", "bytes in", "CPU", "disk"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in document["nodes"]:
        if row["kind"] == "index" and not row["partitions"]:
            continue
        todo = f"{row['stale']} of {row['partitions']}" if row["partitions"] and row["stale"] else row["partitions"]
        table.add_row(row["name"], " → ".join(row["steps"]) or row["kind"],
                      ", ".join(d for d in row["deps"] if not d.startswith("index:")) or
                      ", ".join(d.removeprefix("index:") for d in row["deps"]),
                      str(todo or "?"), STATUS[row["status"]], human_bytes(row["bytes_in"]),
                      human_seconds(row["cpu_s"]) if row["cpu_s"] else "–",
                      human_bytes(row["disk_bytes"]) if row["disk_bytes"] else "–")
    out.print(table)
    total = document["total"]
    out.print(f"to run: about [bold]{human_seconds(total['cpu_s'])}[/] CPU, "
              f"[bold]{human_bytes(total['disk_bytes'])}[/] disk; {total['tasks_fresh']} tasks are done already")
    for warning in document["warnings"]:
        out.print(f"[yellow]warning:[/] {warning}")
