"""Reads from a finished run what is needed to judge the documents of a dataset under other thresholds. This is the
stages (code of the steps) that judged the documents, and the files that the dataset's passes (groups of consecutive
steps) wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.base.errors import TokenmillError
from pipeline.passes.outcomes import Link
from pipeline.passes.replay import THRESHOLDS
from pipeline.recipe.errors import RecipeError
from pipeline.recipe.marks import parse_yaml
from pipeline.service.signal_table import DocumentFile
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.runs import RunTasks
from stages.catalog import UnknownName, stage_class, step_target
from stages.stage import Stage, role_of


class PlaygroundError(TokenmillError):
    """Raised when a question about other thresholds cannot be answered from a finished run. `key` names the parameter
    of the question that is wrong."""

    exit_code = 2

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key, self.message = key, message


def run_documents(store: Store, run: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read plan.json and recipe.yaml of a run. Raises PlaygroundError when one is missing or damaged."""
    try:
        plan = json.loads(store.read(f"runs/{run}/plan.json"))
        recipe, _ = parse_yaml(store.read(f"runs/{run}/recipe.yaml").decode(), f"runs/{run}/recipe.yaml")
    except FileNotFoundError:
        raise PlaygroundError(f"'{run}' is no finished run of this store", "run") from None
    except (ValueError, RecipeError) as e:
        raise PlaygroundError(f"runs/{run}: plan.json or recipe.yaml is damaged ({e}); run the recipe again",
                              "run") from None
    if not (isinstance(recipe, dict) and isinstance(recipe.get("datasets"), dict) and isinstance(plan, dict)
            and isinstance(plan.get("nodes"), list)):
        raise PlaygroundError(f"runs/{run}: plan.json or recipe.yaml is damaged; run the recipe again", "run")
    return plan, recipe


def links_of(steps: list[Any], passes: list[dict[str, Any]]) -> list[Link]:
    """Return the steps of a dataset in order, each with the number of the pass (group of consecutive steps) that runs
    the step. `passes` comes from plan.json. There, a pass lists the names of its steps, `apply NAME` for a barrier (a
    step over all documents), and stages that prepare a barrier. Raises PlaygroundError when a step is missing there."""
    named = [(step, {}) if isinstance(step, str) else next(iter(step.items())) for step in steps]
    labels = iter([(label.removeprefix("apply "), part) for part, node in enumerate(passes) for label in node["steps"]])
    links = []
    for number, (full, config) in enumerate(named):
        name = full.rpartition(":")[2]
        part = next((part for label, part in labels if label == name), None)
        if part is None:
            raise PlaygroundError(f"plan.json has no step '{name}' where recipe.yaml has it; run the recipe again",
                                  "run")
        stage, foreign = _stage(full, config or {})
        links.append(Link(name, number, part, stage, foreign, opaque=type(stage) is Stage))
    return links


def _stage(full: str, config: Mapping[str, Any]) -> tuple[Stage, bool]:
    """Return the stage (code) of a step, and whether the stage is foreign (not one of Tokenmill's). A step from the
    user's own file becomes an empty Stage, which does nothing, because the service does not run users' code. A step
    whose model or library is not on this machine becomes an empty Stage, too."""
    try:
        target = "" if ":" in full else step_target(full)
        cls = stage_class(full) if target else Stage
    except (UnknownName, ImportError):
        return Stage(), True
    if cls is Stage:
        return Stage(), True
    try:
        stage: Stage = cls(dict(config))
    except (OSError, ValueError, ImportError):          # a model or a library that this machine does not have
        return Stage(), True
    return stage, not target.startswith("stages.") or full == "datatrove"


def files_of(store: Store, run: str, passes: Sequence[Mapping[str, Any]]) -> list[DocumentFile]:
    """Return the files of documents that the passes (groups of consecutive steps) of a run wrote. These are the dropped
    documents of every pass, and the kept documents of the pass that publishes the dataset. Files without documents are
    left out. Raises PlaygroundError when the log lacks the record of a task."""
    log, tasks = Log.read(store), RunTasks(store, run)
    files: list[DocumentFile] = []
    for part, node in enumerate(passes):
        for key in tasks.keys(node["name"]):
            record = log.get(key)
            if record is None:
                raise PlaygroundError(f"the log has no record of a task of '{node['name']}'; run the recipe again",
                                      "run")
            kept = record.files.get("kept.parquet") if node["publishes"] else None
            files += [DocumentFile(info, part, dropped) for info, dropped in (
                (kept, False), (record.files["dropped.parquet"], True)) if info is not None and info.rows]
    return files


def check_thresholds(store: Store, run: str, links: Sequence[Link], passes: Sequence[Mapping[str, Any]],
                     files: Sequence[DocumentFile]) -> None:
    """Raise PlaygroundError when files of documents were written under other thresholds than those in the run's
    recipe.yaml. Somebody may have edited that file after the run."""
    first = next((file for file in files if not file.dropped), None)
    if first is None:
        return
    with store.parquet(first.info.path, first.info.sha256) as parquet:
        metadata = (parquet.schema_arrow.metadata or {}).get(THRESHOLDS)
    chain = [name for name in passes[first.part]["steps"] if not name.startswith("apply ")]
    written = json.loads(metadata) if metadata else []
    for link in links:
        if link.part != first.part or link.opaque or link.name not in chain or len(written) != len(chain):
            continue
        now = {name: value for name, value in link.stage.config.model_dump(mode="json").items()
               if role_of(type(link.stage.config), name) == "decision"}
        if written[chain.index(link.name)] != now:
            raise PlaygroundError(f"runs/{run}/recipe.yaml has other thresholds of '{link.name}' than the parts; run "
                                  f"the recipe again", "run")
