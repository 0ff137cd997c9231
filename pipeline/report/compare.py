"""Compares two runs, of one store or of two. It compares their recipes by key and the figures of their reports, and
finds the documents that one run treated differently from the other.

The comparison reads the parts (files of documents) that each run itself made. It does not read the published ones,
because a later run may have published a dataset again. It finds the parts by the tasks that the run lists
(`runs/RUN/tasks.parquet`) and the records of these tasks in the log. Parts that cannot be read any more are counted in
`missing`. The figures come from report.json, so parts are not needed for them.

The result is JSON; docs/cli.md describes it. Personal data is removed from the texts, URLs and paths of examples
(`pipeline.report.samples`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pipeline.base.errors import TokenmillError
from pipeline.base.humanize import plural
from pipeline.engine.driver.sums import NodeSums
from pipeline.plan.changes import run_recipe_of
from pipeline.report.collect import VERSION as REPORT_VERSION
from pipeline.report.collect import collect
from pipeline.report.made import masked_root
from pipeline.report.moved import CHANGES, DROPPED, QUARANTINED, MovedDocuments, Side, compare_documents
from pipeline.report.nodes import NodeFigures, take
from pipeline.report.recipe_diff import compare_recipes
from pipeline.report.samples import excerpt, masked_address, parting, sample
from pipeline.report.side_by_side import compare_figures, other_tokenizer
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.records import FileInfo, PartRecord
from pipeline.store.runs import RunTasks

#: version of the JSON document
VERSION = 1
#: examples of each change of a dataset
EXAMPLES = 5
#: columns of an example, and those of a quarantined one
COLUMNS = ["id", "url", "source", "language", "text", "meta", "locator", "signals"]
LOST_COLUMNS = ["id", "source", "file", "stage", "reason", "detail"]


class NotFinished(TokenmillError):
    """Raised for a run that has not finished, because there is nothing to compare yet."""

    exit_code = 2


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its store, its plan and recipe, its report, and the records of its tasks."""

    store: Store
    name: str
    plan: dict[str, Any]
    recipe: dict[str, Any]
    report: dict[str, Any]
    get: Callable[[str], PartRecord | None]

    @classmethod
    def open(cls, store: Store, name: str, get: Callable[[str], PartRecord | None] | None = None) -> FinishedRun:
        """Read a finished run. `get` returns the commit record of the task with a given key; by default the log is
        read. The run's report.json is used if it has the current format version and names the recipe of the run's plan.
        Otherwise the report is collected again, but not written. Raises NotFinished for a run without a plan or without
        a list of tasks."""
        if not all(store.exists(f"runs/{name}/{file}") for file in ("plan.json", "tasks.parquet")):
            raise NotFinished(f"run '{name}' in {store.root} has not finished, so there is nothing to compare yet; run "
                              f"its recipe again (`tokenmill resume`)")
        plan = json.loads(store.read(f"runs/{name}/plan.json"))
        get = get or Log.read(store).get
        return cls(store, name, plan, run_recipe_of(store, name), _report(store, name, plan, get), get)

    def datasets(self) -> list[str]:
        """Return the names of the datasets that the run made, in plan order."""
        return [node["dataset"] for node in self.plan["nodes"] if node["kind"] == "pass" and node["publishes"]]

    def side(self, dataset: str, check: Callable[[], None] = lambda: None) -> Side:
        """Return one dataset of the run as a `Side`, by which it is compared with the dataset of another run. `check`
        may raise an error to end the comparison."""
        nodes = [n for n in self.plan["nodes"] if n["kind"] == "pass" and n["dataset"] == dataset]
        tasks = RunTasks(self.store, self.name)
        passes = [NodeFigures(n, partial(self._records, tasks, n["name"]), NodeSums()) for n in nodes]
        steps = (self.recipe.get("datasets", {}).get(dataset) or {}).get("steps") or []
        return Side(self.store, passes, steps, sum(n["tasks"] for n in nodes), check)

    def _records(self, tasks: RunTasks, node: str) -> Iterator[PartRecord]:
        return (record for key in tasks.keys(node) if (record := self.get(key)) is not None)


def _report(store: Store, name: str, plan: dict[str, Any], get: Callable[[str], PartRecord | None]) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(store.read(f"runs/{name}/report.json"))
        if report["version"] == REPORT_VERSION and report["recipe"] == plan["recipe"]:
            return report
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    document: dict[str, Any] = json.loads(json.dumps(collect(store, name, get), sort_keys=True))
    return document


def compare_runs(before: FinishedRun, after: FinishedRun, limit: int = EXAMPLES,
                 section_of: Callable[[str], dict[str, Any] | None] | None = None) -> dict[str, Any]:
    """Compare two runs, and return the differences as a JSON document. It has at most `limit` example documents for
    each kind of change in a dataset.

    `section_of` takes the name of a dataset and returns how its documents differ, in the form of `dataset_section`,
    which is used by default. It returns None if this cannot be found out; the dataset is then missing in `documents` of
    the result."""
    recipe = compare_recipes(before.recipe, after.recipe)
    figures = compare_figures(before.report, after.report)
    common = common_datasets(before, after)
    sections = {name: section_of(name) if section_of else dataset_section(before, after, name, limit)
                for name in common}
    documents = {name: section for name, section in sections.items() if section is not None}
    only = [[name for name in run.datasets() if name not in common] for run in (before, after)]
    document = {
        "version": VERSION,
        "before": _about(before), "after": _about(after),
        "recipe": recipe, "figures": figures,
        "documents": documents, "only_before": only[0], "only_after": only[1],
        "notes": _notes(before, after, documents, only, figures),
    }
    different = [row for row in figures if not row["measured"] and row["before"] != row["after"]]
    complete = len(documents) == len(common) and not any(
        any(section["missing"].values()) for section in documents.values())
    document["equal"] = complete and not (recipe or different or any(only)) and not any(
        n for section in documents.values() for n in section["changes"].values())
    return document


def common_datasets(before: FinishedRun, after: FinishedRun) -> list[str]:
    """Return the names of the datasets that both runs made. Only their documents can be compared."""
    return [name for name in before.datasets() if name in after.datasets()]


def _about(run: FinishedRun) -> dict[str, Any]:
    return {"run": run.name, "store": masked_root(run.store), "recipe": run.plan["recipe"], "about": run.plan["about"],
            "order": run.report["order"], "missing_records": run.report["missing_records"]}


def _notes(before: FinishedRun, after: FinishedRun, documents: dict[str, Any], only: list[list[str]],
           figures: list[dict[str, Any]]) -> list[str]:
    """Return sentences about the limits of the comparison. They name recipes and parts (files of documents) that cannot
    be read, and datasets or a training that only one run has."""
    notes = []
    for run, key in ((before, "before"), (after, "after")):
        if not run.recipe:
            notes.append(f"runs/{run.name}/recipe.yaml cannot be read: its keys are missing from the comparison")
        notes += [f"{name}: {plural(section['missing'][key], 'part')} of {run.name} cannot be read (removed by "
                  f"`tokenmill store gc`, or damaged); documents that only the other run has count as unknown: "
                  f"{'; '.join(section['missing_parts'][key])}; run its recipe again to make them anew"
                  for name, section in documents.items() if section["missing"][key]]
    trained = [side for side in ("before", "after") if any(
        row[side] is not None for row in figures if row["path"][0] == "training")]
    if len(trained) == 1:
        run = before if trained == ["before"] else after
        notes.append(f"only {run.name} was trained: its losses have nothing to be compared with")
    if other_tokenizer(figures):
        notes.append("the tokenizers differ (a tokenizer is trained anew when its documents change), so the tokens of "
                     "a stream differ even if its documents are the same")
    for names, run in zip(only, (before, after)):
        if names:
            notes.append(f"only {run.name} has {', '.join(names)}: its documents have nothing to be compared with")
    return notes


# -- documents -------------------------------------------------------------------------------------------------------
def dataset_section(before: FinishedRun, after: FinishedRun, dataset: str, limit: int,
                    check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Describe how the documents of one dataset differ between two runs, in the form of `documents_section`, with at
    most `limit` example documents for each kind of change. `check` is called often, and may raise an error to end the
    comparison."""
    return documents_section(before.side(dataset, check), after.side(dataset, check), limit)


def documents_section(before: Side, after: Side, limit: int) -> dict[str, Any]:
    """Describe how the documents of one dataset differ between two runs, whose versions of it are `before` and `after`.

    In the result, `same` counts unchanged documents, `changes` counts changed ones by kind of change, and `groups`
    counts them by reasons and source. `examples` are, for each kind of change, the `limit` documents nearest to the
    threshold that decided. `missing` and `missing_parts` are the number of parts of each run that cannot be read, and
    the first of them.
    """
    moved = compare_documents(before, after, limit)
    totals: Counter[str] = Counter()
    for (change, *_), n in moved.groups.items():
        totals[change] += n
    sides = {"before": before, "after": after}
    return {"same": moved.same, "changes": {change: totals[change] for change in CHANGES},
            "groups": _groups(moved),
            "examples": {change: list(_examples(change, pairs, (before, after)))
                         for change, pairs in moved.nearest.items() if pairs},
            "missing": {key: side.missing_parts for key, side in sides.items()},
            "missing_parts": {key: side.missing for key, side in sides.items()}}


def _groups(moved: MovedDocuments) -> list[dict[str, Any]]:
    """Return the numbers of changed documents, grouped by kind of change and by the reasons before and after. Within a
    kind of change, the largest group comes first. Each group is also counted by source."""
    sources: dict[tuple[str, Any, Any], dict[str, int]] = {}
    for (*key, source), n in sorted(moved.groups.items(), key=lambda item: item[0][-1]):
        by_source = sources.setdefault((key[0], key[1], key[2]), {})
        by_source[source] = by_source.get(source, 0) + n
    rows = [{"change": change, "before": _fate(before), "after": _fate(after), "docs": sum(by.values()), "sources": by}
            for (change, before, after), by in sources.items()]
    return sorted(rows, key=lambda r: (CHANGES.index(r["change"]), -r["docs"], json.dumps([r["before"], r["after"]])))


def _fate(fate: tuple[str, str, str] | None) -> dict[str, str] | None:
    return None if fate is None else {"fate": fate[0], **({"stage": fate[1], "reason": fate[2]} if fate[2] else {})}


def _examples(change: str, pairs: list[tuple[np.void | None, np.void | None]],
              sides: tuple[Side, Side]) -> Iterator[dict[str, Any]]:
    for pair in pairs:
        rows = [None if fact is None else _row(side, fact) for side, fact in zip(sides, pair)]
        excerpts = [None if row is None else _example_side(row, side) for side, row in zip(sides, rows)]
        if change == "changed_text" and rows[0] and rows[1] and excerpts[0] and excerpts[1]:
            excerpts[0]["excerpt"], excerpts[1]["excerpt"] = parting(rows[0]["text"], rows[1]["text"])
        distances = [show["decided"]["distance"] for show in excerpts if show and show["decided"]]
        head = excerpts[1] or excerpts[0] or {}
        yield {"id": head["id"], "source": head["source"], "distance": min(distances, default=None),
               "before": excerpts[0], "after": excerpts[1]}


def _row(side: Side, fact: np.void) -> dict[str, Any]:
    """Read one document from the files that a run wrote, and return its columns and its `fate` (kept, dropped or
    quarantined). `fact` holds the number of its file and its row. Only the row group of the document is read."""
    side.check()
    path, sha256, fate = side.files[int(fact["file"])]
    columns = LOST_COLUMNS if fate == QUARANTINED else [*COLUMNS, *(("reason", "stage") if fate == DROPPED else ())]
    row = int(fact["row"])
    return {**take(side.store, FileInfo(path, 0, sha256, ""), [row], columns)[row], "fate": fate}


def _example_side(row: dict[str, Any], side: Side) -> dict[str, Any]:
    """Describe an example document in one of the two runs, with an excerpt of its text and without personal data."""
    stage, reason = row.get("stage") or "", row.get("reason") or ""
    if row["fate"] == QUARANTINED:
        return {"fate": row["fate"], "stage": stage, "reason": reason, "id": row["id"], "source": row["source"],
                "url": "", "file": masked_address(row["file"]), "chars": None, "excerpt": excerpt(row["detail"] or ""),
                "decided": None}
    decided = side.margins.decided(row) if row["fate"] == DROPPED else None
    return {"fate": row["fate"], "stage": stage, "reason": reason, **sample(row, stage), "decided": decided}
