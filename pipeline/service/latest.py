"""Finds the finished runs of a store that made a dataset, the latest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.base.visible import visible
from pipeline.cluster.attempts import bad_name, facts_of, run_names
from pipeline.plan.changes import latest_run, run_recipe_of
from pipeline.service.problems import HttpProblem
from pipeline.store.fs import Store

#: how many of the newest runs are searched for one that made a dataset
NEWEST = 100


def made_datasets(at: Store, run: str) -> list[str]:
    """Return the names of the datasets in the recipe of a run, or [] if the recipe is damaged."""
    named = run_recipe_of(at, run).get("datasets")
    return [name for name in named if isinstance(name, str)] if isinstance(named, Mapping) else []


def runs_with(at: Store, dataset: str) -> Iterator[str]:
    """Yield the names of the finished runs that made a dataset, the latest first. Only the NEWEST latest finished runs
    of the store are searched."""
    last = latest_run(at)
    # most callers want only this run, and listing the runs of a large store takes long
    if last is not None and _is_finished(at, last) and dataset in made_datasets(at, last):
        yield last
    for name in [name for name in finished_runs(at, {}) if name != last][:NEWEST - (last is not None)]:
        if dataset in made_datasets(at, name):
            yield name


def finished_runs(at: Store, known: Mapping[str, str]) -> dict[str, str]:
    """Return the finished runs of a store as {run: time of its start}. The run that finished last comes first; the
    others follow, the latest start first. A run counts as finished when the store has its list of tasks.

    `known` is the result of an earlier call, whose runs are not read again. All runs are read again if a run has
    finished since, because it may be one of them, run again under the same name.
    """
    last, names = latest_run(at), run_names(at)
    if last is None or next(iter(known.items()), None) != (last, _begun(at, last)):
        known = {}
    unread = [name for name in names if name not in known]
    finished = [name for name, is_finished in zip(unread, at.map(lambda name: _is_finished(at, name), unread))
                if is_finished]
    begun = at.map(lambda name: _begun(at, name), finished)
    runs = {**{name: known[name] for name in set(names).difference(unread)}, **dict(zip(finished, begun))}
    order = sorted(runs, key=lambda name: (name == last, runs[name], name), reverse=True)
    return {name: runs[name] for name in order}


def _begun(at: Store, run: str) -> str:
    """Return the time at which the latest attempt of a run started; "" if it is not known."""
    return str(facts_of(at, run).get("begun") or "")


def _is_finished(at: Store, run: str) -> bool:
    return bad_name(run) is None and at.exists(f"runs/{run}/tasks.parquet")


def latest_with(at: Store, dataset: str) -> str:
    """Return the name of the latest finished run that made a dataset. Raises HttpProblem when `runs_with` finds no such
    run."""
    for name in runs_with(at, dataset):
        return name
    raise HttpProblem(404, "No such run", f"no run that has finished made a dataset {visible(dataset)[:80]!r}",
                      "dataset", "run a recipe that makes it, or open the page of its run")
