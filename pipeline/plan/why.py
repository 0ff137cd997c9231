"""Explains why a node of the plan is stale (`tokenmill plan --why NODE`): which of its tasks have to run, for what
reason, and since which run.

A task is stale when the log has no record under its key. The key is a hash and shows no reason. Therefore the
ingredients of the key are compared with those that the runs of the store have recorded (`pipeline.plan.provenance`).
Ingredients are settings and thresholds, versions of stages, readers, tasks and libraries, contents of resource files,
input files, and the partition size. If a node is stale because of an earlier node, the cause is traced to the earlier
node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from pipeline.base.redact import redact_json
from pipeline.engine.task import TaskSpec
from pipeline.plan.estimate import Plan, open_plan
from pipeline.plan.nodes import Node
from pipeline.plan.provenance import THRESHOLD, Ingredients, node_ingredients, plain_path, read_inputs, read_provenance
from pipeline.plan.survey import NodeState, survey
from pipeline.recipe import Recipe
from pipeline.recipe.errors import nearest

#: labels of tasks, or names of files, shown for a cause
EXAMPLES = 5


class UnknownNode(LookupError):
    """Raised when `--why` names a node that the plan does not have. The message suggests the nearest
    name, or lists all names if none is near."""


@dataclass
class Cause:
    """One reason why tasks are stale (have to run). `tasks` is the number of tasks that it explains, or None if
    unknown."""

    what: str
    tasks: int | None = None
    examples: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "tasks": self.tasks, "examples": self.examples}


def explain(recipe: Recipe, store_root: str, name: str, *, verify_inputs: bool = False) -> dict[str, Any]:
    """Explain why tasks of the node `name` are stale (have to run). A node is a group of tasks, such as a pass. `name`
    may also be a dataset, which means its last pass, or an entry of `shards:`. Returns a document:

        {"node", "state": fresh | stale | waits, "fresh", "stale", "pending", "compared_with": run or None,
         "causes": [{"what", "tasks", "examples"}], "notes": [str],
         "upstream": [such a document for each input node that is not fresh]}

    Nothing is run and nothing is written. Raises UnknownNode.
    """
    plan = open_plan(recipe, store_root, verify_inputs=verify_inputs)
    states = survey(plan.nodes, plan.log.get_all, plan.fresh, keep=True)
    names = [s.node.name for s in states]
    node = next((n for n in (name, f"{name}:", f"shards:{name}") if n in names), None)
    if node is None:
        raise UnknownNode(f"--why {name}: there is no such node; {nearest(name, [n.rstrip(':') for n in names])}")
    return _Why(plan, states).of(node)


def stale_causes(plan: Plan, states: Sequence[NodeState], most: int) -> dict[str, list[dict[str, Any]]]:
    """Return why tasks are stale (have to run), as {node: causes}, for the first `most` nodes that have stale tasks.
    The causes have the form of "causes" in the document of `explain`. A node that only waits for other nodes is left
    out. `states` are the states of all nodes of `plan`, from `survey` with `keep`."""
    stale = [s.node.name for s in states if s.stale][:most]
    if not stale:
        return {}
    why = _Why(plan, states)
    return {name: [c.to_json() for c in why.causes_of(name)] for name in stale}


class _Why:
    def __init__(self, plan: Plan, states: Sequence[NodeState]) -> None:
        self.plan, self.states = plan, {s.node.name: s for s in states}
        ingredients: dict[str, Ingredients] = redact_json(node_ingredients(plan.planner, plan.nodes))
        self.ingredients = ingredients
        self.runs = read_provenance(plan.store)
        #: runs with the same set of nodes; if there are none, also runs of other recipes that share names of nodes
        same = [run for run in self.runs if run[1]["nodes"].keys() == ingredients.keys()]
        self.runs = same or self.runs

    def _before(self, name: str) -> tuple[str | None, Ingredients | None]:
        """Return the run with which the node `name` is compared, and the ingredients (settings, versions and files)
        that the node had in this run. The run is the latest one in which the node had the same ingredients as now, or
        else the latest one that has the node. Returns (None, None) when no run has it."""
        versions = [(run, doc["nodes"][name]) for run, doc in self.runs if name in doc["nodes"]]
        same = [version for version in versions if not differences(version[1], self.ingredients[name])]
        return next(iter(same or versions), (None, None))

    def of(self, name: str) -> dict[str, Any]:
        state = self.states[name]
        node = state.node
        run, was = self._before(name)
        waits = state.unknown or bool(state.pending)
        if state.stale:
            causes = self._causes(node, state, run, was)
        else:                                # no task is stale yet; later tasks will be if settings differ
            changed = differences(was, self.ingredients[name]) if waits and was is not None else []
            causes = [Cause(change) for change in changed]
        late = [d for d in node.deps if self.states[d].stale or self.states[d].pending or self.states[d].unknown]
        if state.pending:
            causes.append(Cause(f"whether {_tasks(state.pending)} of it must run is known only when {_list(late)} "
                                f"{'is' if len(late) == 1 else 'are'} done: a part that is made again with the same "
                                f"content is not processed again", state.pending))
        elif state.unknown:
            causes.append(Cause(f"its tasks are known only when {_list(late)} {'is' if len(late) == 1 else 'are'} "
                                f"done, because it needs all results of that at once"))
        return {"node": name, "state": "stale" if state.stale else "waits" if waits else "fresh",
                "fresh": state.fresh, "stale": state.stale, "pending": state.pending, "compared_with": run,
                "causes": [c.to_json() for c in causes], "notes": self._notes(node, state),
                "upstream": [self.of(d) for d in late]}

    # -- causes --------------------------------------------------------------------------------------------------
    def causes_of(self, name: str) -> list[Cause]:
        """Return the causes why tasks of a node are stale (have to run). At least one task of the node must be
        stale."""
        state = self.states[name]
        return self._causes(state.node, state, *self._before(name))

    @cached_property
    def _committed(self) -> Counter[str]:
        """Return how many records the log has of each node (group of tasks), or of each wave (subgroup) of a node that
        has waves. This reads the whole log."""
        return Counter(r.node for r in self.plan.log.records())

    def _causes(self, node: Node, state: NodeState, run: str | None, was: Ingredients | None) -> list[Cause]:
        stale = state.stale_tasks
        if run is None or was is None:
            change = "no run of this store has made it" if self.runs else (
                "nothing was run in this store yet" if not len(self.plan.log) else
                "the runs of this store were made by a version that did not record what it used")
            return [Cause(change, len(stale), _labels(stale))]
        causes = [Cause(change, len(stale)) for change in differences(was, self.ingredients[node.name])]
        causes += self._of_inputs(node, stale, run, settled=bool(causes))
        if not causes:
            causes = self._of_parts(node, stale, run)
        return causes

    def _of_inputs(self, node: Node, stale: Sequence[TaskSpec], run: str, settled: bool) -> list[Cause]:
        """Return those causes of stale tasks that are changes of input files: files that were added, removed or changed
        since the earlier run `run`. `settled` says that other causes already explain why every task is stale (has to
        run)."""
        read = [(t, [(t.origin or node.dataset, s["$file"]) for s in files]) for t in stale if (files := _files(t))]
        causes = []
        for source in dict.fromkeys(s for _, files in read for s, _ in files):
            was = read_inputs(self.plan.store, run, source)
            if was is None:
                continue
            now = {plain_path(f.path): (f.size, f.etag) for f in self.plan.planner.source_files(source)}
            other = sorted(p for p in now.keys() & was.keys() if now[p] != was[p])
            hashed = [p for p in other if now[p][0] == was[p][0] and _is_hash(now[p][1]) != _is_hash(was[p][1])]
            kinds = {"added": sorted(now.keys() - was.keys()), "removed": sorted(was.keys() - now.keys()),
                     "changed": [p for p in other if p not in set(hashed)], "named otherwise": hashed}
            unexplained = [(t, {plain_path(p) for s, p in files if s == source}) for t, files in read]
            unexplained = [(t, paths) for t, paths in unexplained if paths]
            for kind in ("changed", "added", "named otherwise"):
                touched = [(t, paths) for t, paths in unexplained if not paths.isdisjoint(kinds[kind])]
                if touched or (kinds[kind] and settled):
                    unexplained = [x for x in unexplained if x not in touched]
                    what = f"input files {kind} in source '{source}': {_examples(kinds[kind])}"
                    if kind == "named otherwise":
                        one, two = ("content", "time") if _is_hash(now[hashed[0]][1]) else ("time", "content")
                        what = (f"input files of source '{source}' are compared by {one} now, but were compared by "
                                f"{two} in that run (--verify-inputs): {_examples(hashed)}")
                    causes.append(Cause(what, len(touched), _labels(t for t, _ in touched)))
            moved = [x for x in unexplained if not settled and any(kinds.values())]
            if kinds["removed"]:
                causes.append(Cause(f"input files removed from source '{source}': {_examples(kinds['removed'])}"
                                    + ("; small files that were in a task with them are now in others" if moved
                                       else ""), len(moved), _labels(t for t, _ in moved)))
            elif moved:
                causes.append(Cause(f"small files of source '{source}' are now in other tasks, because files next to "
                                    f"them were added or changed", len(moved), _labels(t for t, _ in moved)))
        return causes

    def _of_parts(self, node: Node, stale: Sequence[TaskSpec], run: str) -> list[Cause]:
        """Return the causes why tasks of a node are stale although its own settings are unchanged. Either the parts
        (files of documents) that it reads differ from those of the earlier run `run`, or that run ended before it
        reached this node."""
        inherited = []
        for dep in node.deps:
            before, was = self._before(dep)
            if was is not None:
                inherited += [f"{dep}: {s} (since run {before})" for s in differences(was, self.ingredients[dep])]
        if inherited:
            return [Cause(f"parts that it reads have changed: {'; '.join(inherited[:EXAMPLES])}", len(stale))]
        if not self.plan.store.exists(f"runs/{run}/plan.json"):
            return [Cause(f"run {run} had the same settings, but ended before it reached this node", len(stale),
                          _labels(stale))]
        if not self._committed[node.name] and not any(n.startswith(f"{node.name}/") for n in self._committed):
            return [Cause("it has no record in the log", len(stale), _labels(stale))]
        upstream = [d for d in node.deps if not d.startswith("index:")]
        if not upstream:
            return [Cause("the log has no record under this key: the input was cut differently, or read under another "
                          "path", len(stale), _labels(stale))]
        return [Cause(f"parts of {_list(upstream)} are new, or differ from those that it has processed",
                      len(stale), _labels(stale))]

    def _notes(self, node: Node, state: NodeState) -> list[str]:
        notes = []
        if state.replayed:
            notes.append(f"{_tasks(state.replayed)} replay verdicts from stored signals: only documents whose verdict "
                         f"changes are processed again")
        quarantined = max((_entries(t) for t in state.stale_tasks[:1]), default=0)   # tasks of a node share their list
        if quarantined:
            notes.append(f"{quarantined:,} document{'s are' if quarantined > 1 else ' is'} in quarantine for these "
                         f"stages and will be skipped (quarantine makes nothing stale)")
        return notes


def _entries(spec: TaskSpec) -> int:
    """Return the number of quarantined documents that a task is told to skip. If there are many, the task's argument
    refers to a file that lists them (`pipeline.store.lists`)."""
    entries = spec.args.get("$volatile", {}).get("quarantined", [])
    return entries["items"] if isinstance(entries, dict) else len(entries)


# -- words -----------------------------------------------------------------------------------------------------------
def differences(was: Ingredients, now: Ingredients) -> list[str]:
    """Return the differences between two sets of ingredients (settings, versions and files that determine results),
    each as a line of text; [] when they are equal."""
    changes = []
    changed_steps: set[str] = set()
    if was.get("steps", []) != now.get("steps", []):
        changes.append(f"steps: {_chain(was.get('steps', []))} became {_chain(now.get('steps', []))}")
        changed_steps = set(was.get("steps", ())) ^ set(now.get("steps", ()))
    for key in [*now, *(k for k in was if k not in now)]:
        if key in ("steps", "signals") or key.removeprefix("step.").split(".")[0].split(" ")[0] in changed_steps:
            continue
        old, new = was.get(key), now.get(key)
        if old != new:
            name = key.removesuffix(THRESHOLD)
            changes.append(f"{name}: {_value(old)} → {_value(new)}" + (
                " (a threshold: verdicts are replayed)" if key.endswith(THRESHOLD) else ""))
    if not changes and was.get("signals") != now.get("signals"):
        more = sorted(set(now.get("signals", ())) ^ set(was.get("signals", ())))
        changes.append(f"signals that steps before it write: {', '.join(more)}")
    return changes


def _files(task: TaskSpec) -> list[dict[str, Any]]:
    """Return the input files that a task reads."""
    if "file" in task.args and task.node.startswith("index:"):
        return [task.args["file"]]
    return list(task.args.get("slices", ()))


def _is_hash(etag: str) -> bool:
    """Whether an etag is a content hash, as --verify-inputs computes it."""
    return etag.startswith("sha256:")


def _labels(tasks: Iterable[TaskSpec]) -> list[str]:
    return [t.label or t.key[:8] for t in islice(tasks, EXAMPLES)]


def _tasks(n: int) -> str:
    return f"{n:,} task" + ("s" if n != 1 else "")


def _examples(names: list[str]) -> str:
    more = len(names) - EXAMPLES
    return ", ".join(names[:EXAMPLES]) + (f" and {more:,} more" if more > 0 else "")


def _list(names: list[str]) -> str:
    return ", ".join(n.rstrip(":") for n in names)


def _chain(steps: list[str]) -> str:
    return " → ".join(steps) or "none"


def _value(value: Any) -> str:
    text = "nothing" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"


def lines(document: Mapping[str, Any], indent: str = "") -> list[str]:
    """Return the lines of text that `tokenmill plan --why` prints. `document` is the result of `explain`."""
    state = {"fresh": "is fresh", "stale": f"{_tasks(document['stale'])} to run, {document['fresh']:,} fresh",
             "waits": "waits"}[document["state"]]
    out = [f"{indent}{document['node'].rstrip(':')}: {state}"
           + (f"   (compared with run {document['compared_with']})" if document["compared_with"] else "")]
    for cause in document["causes"]:
        count = f"  [{_tasks(cause['tasks'])}]" if cause["tasks"] else ""
        out.append(f"{indent}  because {cause['what']}{count}")
        out += [f"{indent}      {label}" for label in cause["examples"] if cause["tasks"] is not None]
    out += [f"{indent}  {note}" for note in document["notes"]]
    for before in document["upstream"]:
        out += lines(before, indent + "  ")
    return out
