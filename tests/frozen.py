"""Compares results with `frozen.json`, which holds what a change of the code's structure must not change.

Of whole runs, it holds the content hashes of datasets, shards and order, and hashes of the report's sections without
times. Of the product, it holds the commands with their options, and the metric names. `FREEZE=1 make test` (and `make
slow`) rewrites the entries that differ. Each changed entry is a change that users see, so it needs a line in CHANGELOG.

The figures of a run hold for one version of Python. If the run has a step whose scores depend on the CPU, they also
hold only for the kinds of CPU that are named with them. Elsewhere the comparison is skipped. `FREEZE=1` on a new kind
of CPU adds it to the list if the figures are equal.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.machine import cpu_tag
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from stages.stage import python_version

FILE = Path(__file__).with_name("frozen.json")
#: keys of the report whose values differ between two runs of one recipe
TIMES = {"cpu_s", "wall_s", "docs_per_core_s", "docs_per_cpu_s", "max_rss_mb", "share"}
#: sections of the report that name the run or say where it ran; its folder is part of the recipe's hash
NAMES = {"run", "recipe", "made"}
#: sections that follow from other ones, from the datasets or from what was dropped of them, and such a key of sections.
#: They have tests of their own, which compute them again
DERIVED = {"totals", "samples", "licences", "signals", "domains", "graph", "clusters", "course", "losses",
           "order_quality"}
DERIVED_KEYS = {"dropped_lengths", "dropped_licences", "dropped_pii", "match", "url_match"}


def hold(name: str, value: Any) -> None:
    """Compare a JSON value with the frozen value `name`. With FREEZE=1, store the value as the frozen one instead."""
    value = json.loads(json.dumps(value))
    if os.environ.get("FREEZE") == "1":
        with open(FILE, "r+", encoding="utf-8") as f:
            fcntl.flock(f, fcntl.LOCK_EX)                       # pytest runs several processes
            text = json.dumps({**json.loads(f.read() or "{}"), name: value}, indent=1, sort_keys=True) + "\n"
            f.seek(0)
            f.write(text)
            f.truncate()
        return
    frozen = json.loads(FILE.read_text(encoding="utf-8")).get(name)
    absent = object()
    differ = [key for key in sorted({*value, *(frozen or {})})
              if value.get(key, absent) != (frozen or {}).get(key, absent)]
    assert not differ, (f"{name}: {', '.join(differ)}: not as in {FILE.name}; if that is meant, say it in CHANGELOG.md "
                        f"and run FREEZE=1 python -m pytest {os.environ['PYTEST_CURRENT_TEST'].split()[0]}")


def hold_run(name: str, store: Path | str, **programs: str) -> None:
    """Compare what the only run of a store has made with the frozen figures `name`. `programs` are versions of other
    programs on which the figures depend; with other versions, the comparison is skipped."""
    frozen = json.loads(FILE.read_text(encoding="utf-8")).get(f"run {name}", {"on": {}})
    cpus = {cpu_tag()} if numeric(store) else set()
    here: dict[str, Any] = {"on": {"python": python_version(), **programs}, **figures(store)}
    known = set(frozen["on"].pop("cpus", []))
    if os.environ.get("FREEZE") == "1":
        cpus |= known if cpus and here == frozen else set()
    elif frozen["on"] and (frozen["on"] != here["on"] or not cpus <= known):
        pytest.skip(f"frozen on {frozen['on']} {sorted(known)}, this is {here['on']} {sorted(cpus)}")
    else:
        cpus = known
    hold(f"run {name}", {**here, "on": {**here["on"], "cpus": sorted(cpus)}})


def numeric(store: Path | str) -> bool:
    """Return whether the output of some step in the run may depend on the kind of CPU."""
    [provenance] = Path(store).glob("runs/*/provenance.json")
    return any(key.endswith(" CPU") for node in json.loads(provenance.read_text())["nodes"].values() for key in node)


def figures(store: Path | str) -> dict[str, Any]:
    """Return the content hashes of what a run made, and a hash of each section of its report."""
    at = Store(str(store))
    report = json.loads(at.read("report.json"))
    found: dict[str, Any] = {
        "datasets": {name: dataset_hash(at, name) for name in sorted({p.split("/")[1] for p in at.list("datasets")})},
        "report": {section: short(timeless(value)) for section, value in report.items()
                   if section not in NAMES | DERIVED}}
    path = f"runs/{report['run']}/curriculum.json"
    if at.exists(path):
        curriculum = json.loads(at.read(path))
        found |= {"order": curriculum["order"], "tokenizer": curriculum["tokenizer"]["sha256"],
                  "shards": {s["name"]: [s["sha256"], s["val_sha256"]] for s in curriculum["streams"]}}
    return found


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES | DERIVED_KEYS}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
