"""Records what the results of a run were made from, in readable form, beside the run's recipe. A later plan can then
say why a result is stale (has to be made again).

A result has a key, a hash of everything that determines it. A key shows that something differs, but not what. Every run
therefore writes, before its first task,

    runs/RUN/provenance.json      {"version", "epoch", "nodes": {NODE: ingredients}}
    runs/RUN/inputs.parquet  the input files: source, path, size, etag

The *ingredients* of a node (a group of tasks) are a flat dict of what enters the keys of its tasks:
`step.language.min`, `step.html version`, `sources.web.max_bytes` … Input files and the results of earlier nodes are not
among them. Values are recipe settings, versions and hashes of files. In the file, secrets are masked.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.files import file_sha256
from pipeline.base.machine import cpu_tag
from pipeline.base.parquet import parquet_writer
from pipeline.base.redact import redact_json
from pipeline.base.scratch import Scratch
from pipeline.passes.encode import ENCODE, libraries
from pipeline.passes.fit_tokenizer import FIT
from pipeline.passes.import_tokens import IMPORT
from pipeline.plan.nodes import DOCUMENTS, ChainStep, Node
from pipeline.plan.planner import Planner
from pipeline.recipe.code import own_source
from pipeline.recipe.model import Recipe
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from stages.barrier import Barrier
from stages.catalog import load, reader_class, reader_target
from stages.stage import Stage, keyed_settings, library_versions, python_version, role_of

VERSION = 1
#: suffix of an ingredient's name that marks a threshold: when it changes, verdicts are replayed
THRESHOLD = " (threshold)"

#: rows of inputs.parquet in memory while it is written
ROWS = 1 << 13
INPUTS = pa.schema([("source", pa.string()), ("path", pa.string()), ("size", pa.int64()), ("etag", pa.string())])

Ingredients = dict[str, Any]


def write_provenance(store: Store, run: str, planner: Planner, ingredients: Mapping[str, Ingredients],
                     epoch: int) -> None:
    """Write the files provenance.json (what the results of a run are made from) and inputs.parquet (its input files).
    They are written right after planning. `ingredients` is the result of `node_ingredients`."""
    document = {"version": VERSION, "epoch": epoch, "nodes": redact_json(ingredients)}
    store.write(f"runs/{run}/provenance.json", json.dumps(document, indent=1, sort_keys=True).encode())
    with Scratch() as scratch:
        out = f"{scratch.path}/inputs.parquet"
        with parquet_writer(out, INPUTS) as writer:
            for source in planner.sources_used():
                files = iter(planner.source_files(source))
                while rows := list(islice(files, ROWS)):               # in batches: there may be millions
                    writer.write_table(pa.table([[source] * len(rows), [plain_path(f.path) for f in rows],
                                                 [f.size for f in rows], [f.etag for f in rows]], schema=INPUTS))
        store.replace(out, f"runs/{run}/inputs.parquet")


def node_ingredients(planner: Planner, nodes: list[Node]) -> dict[str, Ingredients]:
    """Return, for each node of the plan, its ingredients: the settings, versions and hashes of resource files that
    enter the keys of its tasks."""
    plans = {p.name: p for out in planner.passes.values() for p in out}
    out: dict[str, Ingredients] = {}
    for node in nodes:
        if node.kind == "index":
            ingredients = {**_reader(planner, node.name.removeprefix("index:")), "run.partition": planner.target}
        elif node.kind == "pass":
            plan = plans[node.name]
            ingredients = {"task version": load(DOCUMENTS).version, "steps": [s.name for s in plan.chain],
                    "run.signals": planner.recipe.run.signals, "signals": list(plan.signals),
                    **{f"where.{k}": v for k, v in plan.where.items()}}
            for name, step in _named(plan.chain):
                ingredients |= _step(f"step.{name}", step, planner.recipe)
            for source in (n for kind, n in plan.inputs if kind == "source"):
                ingredients |= {**_reader(planner, source), "run.partition": planner.target}
        elif node.kind == "barrier":
            _, barrier, ranks, _ = planner.barriers[node.name]
            ingredients = {**_stage(f"step.{barrier.name}", barrier), "priority": list(ranks),
                    **_barrier_tasks(barrier)}
        else:
            ingredients = _tokens(planner.recipe, node)
        out[node.name] = ingredients
    return out


def _named(chain: list[ChainStep]) -> Iterator[tuple[str, ChainStep]]:
    """Yield the steps of a chain with unique names: the second step with the name `url` is called url#2."""
    counts: dict[str, int] = {}
    for step in chain:
        counts[step.name] = counts.get(step.name, 0) + 1
        yield step.name + (f"#{counts[step.name]}" if counts[step.name] > 1 else ""), step


def _step(prefix: str, step: ChainStep, recipe: Recipe) -> Ingredients:
    ingredients = _stage(prefix, step.stage)
    if own := own_source(step.target, recipe.code):
        ingredients[f"{prefix} source code"] = own
    return ingredients


def _stage(prefix: str, stage: Stage) -> Ingredients:
    """Return the ingredients of a stage, which are the settings, versions and files that determine its key. Their names
    begin with `prefix`."""
    files = stage.resource_files()
    ingredients: Ingredients = {f"{prefix} version": stage.version, f"{prefix} Python": python_version()}
    for field, value in keyed_settings(stage.config).items():
        role = role_of(type(stage.config), field)
        if not any(name == field or name.startswith(f"{field}.") for name in files):
            ingredients[f"{prefix}.{field}{THRESHOLD if role == 'decision' else ''}"] = value
    ingredients |= {f"{prefix}.{field} (content of the file)": file_sha256(path)[:16] for field, path in files.items()}
    ingredients |= {f"{prefix} library {name}": version for name, version in library_versions(stage.libraries).items()}
    if not stage.exact:
        ingredients[f"{prefix} CPU"] = cpu_tag()
    return ingredients


def _reader(planner: Planner, name: str) -> Ingredients:
    source = planner.recipe.sources[name]
    reader = reader_class(source.read)(source.config)
    prefix = f"sources.{name}"
    own = own_source(reader_target(source.read), planner.recipe.code)
    return {f"{prefix}.read": source.read, f"{prefix} reader version": reader.version,
            **({f"{prefix} reader source code": own} if own else {}),
            f"{prefix} reader Python": python_version(),
            **{f"{prefix}.{k}": v for k, v in reader.config.model_dump(mode="json").items()},
            **{f"{prefix} library {n}": v for n, v in library_versions(reader.libraries).items()}}


def _barrier_tasks(barrier: Stage) -> Ingredients:
    """Return the versions of the tasks of a barrier (a step such as deduplication). The tasks are those that the
    barrier's module defines. Tasks of other modules of its package count as well, if the source code of the module
    names these modules, directly or through other modules. Modules of other barriers are left out. If the module has no
    package, such as a file under a recipe's `code:`, only its own tasks count."""
    package = type(barrier).__module__.rpartition(".")[0]
    versions: Ingredients = {}
    names, visited = [type(barrier).__module__], set()
    while names:
        name = names.pop()
        if name not in visited:
            visited.add(name)
            module = importlib.import_module(name)
            others = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Barrier)
                      and c.__module__ == name and c is not type(barrier)]
            if others:
                continue
            versions |= _task_versions(name)
            text = inspect.getsource(module) if package else ""
            names += {m for m in re.findall(r"[\w.]+", text) if m.rpartition(".")[0] == package and _is_module(m)}
    return versions


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _task_versions(module: str) -> Ingredients:
    """Return the versions of the tasks that a Python module defines."""
    classes = [c for c in vars(importlib.import_module(module)).values() if isinstance(c, type)]
    tasks = [c for c in classes if c.__module__ == module and hasattr(c, "run") and not issubclass(c, Stage)]
    versions = {getattr(task, "name", ""): getattr(task, "version", None) for task in tasks}
    return {f"task {name} version": version for name, version in versions.items() if isinstance(version, int)}


def _tokens(recipe: Recipe, node: Node) -> Ingredients:
    """Return the ingredients (settings, versions and files that determine the results) of the tokenizer's node, or of
    the node for the shards of a stream."""
    plain: Mapping[str, Any] = recipe.plain()
    ingredients: Ingredients = {f"library {name}": version for name, version in libraries().items()}
    if node.kind == "tokenizer":
        assert recipe.tokenizer is not None
        ingredients |= _task_versions(FIT.partition(":")[0])
        ingredients |= {f"tokenizer.train.{k}": v for k, v in (plain["tokenizer"].get("train") or {}).items()}
        if recipe.tokenizer.kind:
            ingredients["tokenizer.kind"] = recipe.tokenizer.kind
        if recipe.tokenizer.eos:
            ingredients["tokenizer.eos"] = recipe.tokenizer.eos
        return ingredients
    name = node.name.removeprefix("shards:")
    for task in (ENCODE, *([IMPORT] if "import" in node.steps else [])):
        ingredients |= _task_versions(task.partition(":")[0])
    spec = plain["shards"][name]                 # `longest` decides which labels of split shards have enough tokens
    return ingredients | {f"shards.{name}.{k}": v for k, v in spec.items() if k != "longest" or "by" in spec}


def plain_path(path: str) -> str:
    """Return a path in a form that Parquet can hold: bytes that are not UTF-8 are replaced."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# -- reading ---------------------------------------------------------------------------------------------------------
def read_provenance(store: Store) -> list[tuple[str, dict[str, Any]]]:
    """Return the runs of a store that have a provenance.json, as (run, contents of provenance.json), the latest run
    first."""
    out = []
    for path in store.list("runs"):
        if path.endswith("/provenance.json") and path.count("/") == 2:
            try:
                document = json.loads(store.read(path))
            except (OSError, ValueError):
                continue
            if document.get("version") == VERSION:
                out.append((path.split("/")[1], document))
    return sorted(out, key=lambda f: -f[1]["epoch"])


def read_inputs(store: Store, run: str, source: str) -> dict[str, tuple[int, str]] | None:
    """Return the input files of a source as a run recorded them: {path: (size, etag)}. None when the run has no
    readable list of its input files."""
    try:
        table = store.table(f"runs/{run}/inputs.parquet")
    except (OSError, DamagedFile):
        return None
    table = table.filter(pc.equal(table["source"].cast(pa.string()), source))
    rows = zip(*(table[name].to_pylist() for name in ("path", "size", "etag")))
    return {path: (size, etag) for path, size, etag in rows}
