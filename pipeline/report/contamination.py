"""Makes contamination.jsonl, which lists the items of evaluation sets that a run found in its documents."""

from __future__ import annotations

from typing import Any

from pipeline.base.visible import json_text


def contamination_lines(document: dict[str, Any]) -> str:
    """Return the lines of contamination.jsonl. `document` is the content of report.json. Each line has the name of a
    dataset and of a set, the number of a row in the set, the part of the row, and the number of documents that hold
    it."""
    return "".join(
        json_text({"dataset": dataset, "set": name, "row": int(row), "part": part, "documents": docs}) + "\n"
        for dataset in document["names"]["datasets"]
        for name, figures in sorted(document["datasets"][dataset].get("contamination", {}).items())
        for part, rows in sorted(figures["items"].items())
        for row, docs in sorted(rows.items(), key=lambda item: int(item[0])))
