"""Makes contamination.jsonl, which lists the items of evaluation sets that a run found in its documents."""

from __future__ import annotations

from typing import Any

from pipeline.base.visible import json_text


def contamination_lines(document: dict[str, Any]) -> str:
    """Return the lines of contamination.jsonl, made from `document`, the content of report.json. Each line is a JSON
    object about an item of an evaluation set that a dataset contains. It names the dataset, the evaluation set, and the
    item's row and part of the row. It gives the number of the dataset's documents that hold the item."""
    return "".join(
        json_text({"dataset": dataset, "set": name, "row": int(row), "part": part, "documents": docs}) + "\n"
        for dataset in document["names"]["datasets"]
        for name, figures in sorted(document["datasets"][dataset].get("contamination", {}).items())
        for part, rows in sorted(figures["items"].items())
        for row, docs in sorted(rows.items(), key=lambda item: int(item[0])))
