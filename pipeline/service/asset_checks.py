"""Checks the published datasets of a run with the help of the run's report, the manifests (lists of the published
files) and listings of the published folders. No published file of documents is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import pyarrow as pa

from pipeline.base.humanize import plural
from pipeline.base.redact import redact
from pipeline.engine.driver.sums import content_hash
from pipeline.service.asset_figures import Figures, dataset_of, entered, removed_by
from pipeline.service.duck import Stop
from pipeline.service.parts import DATASET, FOLDERS
from pipeline.service.problems import HttpProblem
from pipeline.service.stores import inside
from pipeline.store.dataset import MANIFEST, MANIFEST_SCHEMA
from pipeline.store.errors import EnvironmentFailure, StoreError
from pipeline.store.fs import Store

Result = Literal["passed", "warning", "failed"]
Check = dict[str, str]
#: most published files that an answer compares with a listing; most files and messages that a check names
MOST_FILES, NAMED = 20_000, 5
#: the time limit is checked each time that this many files of a listing were read
PAGE = 1000
#: bytes; a larger manifest is not read. One with some 50,000 files has this size
MANIFEST_BYTES = 16 << 20
TOO_MANY = "not compared, as there are too many files: tokenmill store verify compares them, and reads their bytes, too"
#: the folder of the kept documents; the columns of a manifest that are read
KEPT, COLUMNS = FOLDERS["kept"], pa.schema([MANIFEST_SCHEMA.field(name) for name in ("part", "bytes", "content")])


def dataset_checks(at: Store, figures: Figures, stop: Stop, most: int = MOST_FILES) -> dict[str, list[Check]]:
    """Check the published files and the counts of each dataset of a run. Returns {dataset: [{name, result, message}]},
    where `result` is passed, warning or failed. At most `most` published files in all are compared with a listing of
    their folder. Raises TooDear when the time is up, Cancelled when the client has disconnected (both come from
    `stop`), and StoreError when the storage does not answer."""
    left = most
    out: dict[str, list[Check]] = {}
    for dataset in figures.names.datasets:
        stop.check()
        tables, why = _manifests(at, dataset)
        if not why and tables is not None and KEPT not in tables:
            why = f"nothing is published as {KEPT}/{dataset}"
        if why:
            published = [_check(name, "failed", why) for name in ("files", "content")]
        elif tables is None:
            published = [_check(name, "warning", TOO_MANY) for name in ("files", "content")]
        else:
            published = [_files(at, dataset, tables, left, stop), _content(figures, dataset, tables[KEPT])]
        out[dataset] = [_documents(figures, dataset), *published, _quarantined(figures, dataset),
                        _warnings(figures, dataset)]
        left = max(0, left - sum(table.num_rows for table in (tables or {}).values()))
    return out


def _check(name: str, result: Result, message: str) -> Check:
    return {"name": name, "result": result, "message": message}


def _documents(figures: Figures, dataset: str) -> Check:
    """Check that the report's numbers add up: every document that entered the dataset was kept, dropped, removed by a
    barrier (a deduplication) or quarantined."""
    section = figures.datasets[dataset]
    if figures.missing_records:
        return _check("documents", "failed", f"{plural(figures.missing_records, 'task')} of the run left no record, so "
                                             f"documents are missing from its figures")
    removed = sum(removed_by(duplicates) for duplicates in figures.duplicates if duplicates.dataset == dataset)
    dropped = sum(reason.docs for reason in section.reasons) - removed
    quarantined, total = sum(_lost(figures, dataset).values()), entered(figures, dataset)
    parts = (f"{section.docs:,} kept, {dropped:,} dropped, {removed:,} removed as duplicates, {quarantined:,} "
             f"quarantined")
    differ = total - (section.docs + dropped + removed + quarantined)
    if differ:
        return _check("documents", "failed", f"{plural(total, 'document')} entered, but {parts}: the difference is "
                                             f"{differ:,}")
    return _check("documents", "passed", f"{plural(total, 'document')} entered: {parts}")


def _lost(figures: Figures, dataset: str) -> dict[str, int]:
    """Count the documents of a dataset that were put into quarantine, by reason. Input records that could not be read
    as documents are not counted."""
    sources = {dep.removeprefix("index:") for node in figures.lineage if dataset_of(node) == dataset
               for dep in node.deps if dep.startswith("index:")}
    unreadable = [figures.sources[name].bad for name in sources if name in figures.sources]
    return {reason: max(0, n - sum(bad.get(reason, 0) for bad in unreadable))
            for reason, n in figures.datasets[dataset].quarantined.items()}


def _manifests(at: Store, dataset: str) -> tuple[dict[str, pa.Table] | None, str]:
    """Read the manifests (lists of the published files) of a dataset. Returns the manifests by folder (datasets,
    dropped, quarantine), and a message that says why one of them cannot be read ('' if all can). A folder without a
    manifest is left out. The manifests are None if one is too large to be read here."""
    tables: dict[str, pa.Table] = {}
    if not DATASET.fullmatch(dataset):                            # the report may be damaged
        return tables, "no dataset can have this name"
    for folder in FOLDERS.values():
        path = f"{folder}/{dataset}/{MANIFEST}"
        try:
            inside(at, path)
            if (at.size(path) or 0) > MANIFEST_BYTES:
                return None, ""
            tables[folder] = at.table(path).select(COLUMNS.names).cast(COLUMNS)
        except FileNotFoundError:
            continue
        except EnvironmentFailure:                                # nothing is wrong with the dataset
            raise
        except (HttpProblem, StoreError, KeyError, pa.ArrowException) as e:
            return tables, f"{path} cannot be read ({redact(str(e))})"
    return tables, ""


def _files(at: Store, dataset: str, tables: Mapping[str, pa.Table], most: int, stop: Stop) -> Check:
    """Check that the published files of a dataset exist and have the sizes that the manifests give. If there are more
    than `most` files, none is checked, and the result is a warning."""
    files = sum(table.num_rows for table in tables.values())
    if files > most:
        return _check("files", "warning", f"not compared, as there are {files:,} files: tokenmill store verify "
                                          f"compares them, and reads their bytes, too")
    wrong = []
    for folder, table in tables.items():
        place = f"{folder}/{dataset}"
        manifest = dict(zip(table["part"].to_pylist(), table["bytes"].to_pylist()))
        listed: dict[str, int] = {}
        for number, entry in enumerate(at.entries(place)):
            if number % PAGE == 0:
                stop.check()
            if (part := entry.path.removeprefix(f"{place}/")) in manifest:      # other files are ignored
                listed[part] = entry.size
        wrong += [f"{place}/{part} {'has another size' if part in listed else 'is missing'}"
                  for part, size in manifest.items() if listed.get(part) != size]
    if wrong:
        return _check("files", "failed", _listed(wrong))
    absent = [f"{folder}/{dataset}" for folder in FOLDERS.values() if folder not in tables]
    if absent:
        return _check("files", "warning", f"{plural(files, 'file')} as published, but the store has no "
                                          f"{' and no '.join(absent)}")
    return _check("files", "passed", f"{plural(files, 'file')} as published, by name and size")


def _content(figures: Figures, dataset: str, manifest: pa.Table) -> Check:
    """Check that the documents that are published under the dataset's name are those that this run kept. A later run
    may have replaced them."""
    kept = next((node.content for node in figures.lineage if node.name == dataset), None)
    if kept is None:
        return _check("content", "warning", "the report does not say what the run kept")
    if content_hash(sorted(manifest["content"].to_pylist())) != kept:
        return _check("content", "warning", "other documents than this run kept: a later run has replaced them")
    return _check("content", "passed", "the documents that this run kept")


def _quarantined(figures: Figures, dataset: str) -> Check:
    """Check whether records or documents of the dataset were quarantined. If so, the result is a warning with their
    number for each reason."""
    reasons = figures.datasets[dataset].quarantined
    if not (total := sum(reasons.values())):
        return _check("quarantine", "passed", "no record is in quarantine")
    most = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
    return _check("quarantine", "warning", f"{plural(total, 'record')} in quarantine: "
                                           f"{_listed([f'{reason} × {n:,}' for reason, n in most], ', ')}")


def _warnings(figures: Figures, dataset: str) -> Check:
    """Return a warning that names the deduplications that removed or cut more than half of a source. It also repeats
    the run's warnings about the dataset, its nodes (passes and deduplications) and the sources that it reads."""
    nodes = [node for node in figures.lineage if dataset_of(node) == dataset]
    sources = {dep.removeprefix("index:") for node in nodes for dep in node.deps if dep.startswith("index:")}
    about = [f"{section.barrier} removed {alarm.removed:,} of {alarm.of:,} documents of source '{alarm.source}'"
             for section in figures.duplicates if section.dataset == dataset for alarm in section.alarms]
    about += [f"{section.barrier} cut {alarm.cut:,} of {alarm.of:,} bytes of source '{alarm.source}'"
              for section in figures.duplicates if section.dataset == dataset and section.cut
              for alarm in section.cut.alarms]
    begins = tuple(f"{node.name}{end}" for node in nodes for end in (" ", ":"))
    removals = tuple(f"{section.barrier} {did} " for section in figures.duplicates
                     for did in ("removed", "cut"))                        # the alarms above, as the run worded them
    setting = re.compile(rf"\bdatasets\.{re.escape(dataset)}(?![\w-])")
    about += [text for text in figures.warnings if not text.startswith(removals) and (
        text.startswith(begins) or setting.search(text) or any(f"source '{name}'" in text for name in sources))]
    if about:
        return _check("warnings", "warning", _listed(about))
    return _check("warnings", "passed", "the run warned of nothing here")


def _listed(texts: list[str], between: str = "; ") -> str:
    more = len(texts) - NAMED
    return between.join(texts[:NAMED]) + (f"{between}and {more:,} more" if more > 0 else "")
