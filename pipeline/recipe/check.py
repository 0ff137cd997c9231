"""Checks a recipe beyond the structure of its keys: names must exist, settings must be valid, no dataset may be made
from itself, and the curriculum must be consistent."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from pipeline.recipe.against import check_against
from pipeline.recipe.curriculum import check_curriculum
from pipeline.recipe.errors import KeyPath, key_path, nearest
from pipeline.recipe.hub import is_hub_name
from pipeline.recipe.model import Recipe
from pipeline.recipe.problems import Checker
from pipeline.recipe.splits import check_splits
from pipeline.recipe.token_files import check_token_files, token_sources
from pipeline.recipe.train import check_train
from pipeline.recipe.values import Where
from stages.barrier import Barrier
from stages.catalog import UnknownName, reader_class, readers, stage_class, steps
from stages.read.columns import RESERVED
from stages.read.reader import Reader
from stages.stage import Stage, role_of


def check_recipe(recipe: Recipe, checker: Checker) -> None:
    """Check the whole recipe, and fill in the defaults of settings that it leaves out, in place. The checks run in
    groups. A group that finds problems raises RecipeError with all of them. Later groups then do not run, because they
    rely on what earlier ones have checked."""
    for both in sorted(recipe.sources.keys() & recipe.datasets.keys()):
        checker.fail(("datasets", both), f"'{both}' is a source as well; give the dataset another name")
    for name in sorted({"index", "shards"} & recipe.datasets.keys()):  # names of the plan's own nodes: index:SOURCE
        checker.fail(("datasets", name), f"'{name}' is a name that Tokenmill uses for nodes of its plans; give the "
                                         f"dataset another name")
    for name in recipe.sources:
        if name.isdigit():                                                  # DATASET:2 names the second pass of DATASET
            checker.fail(("sources", name), f"'{name}' is a number, as in the names of a dataset's passes; give the "
                                            f"source a name with a letter in it")
    if recipe.input is not None:
        checker.check_name(recipe.input, recipe.sources, ("input",), "source")
    if recipe.code and not checker.allow_custom:
        checker.fail(("code",), "code of your own is run only with --allow-custom-stages")
    for name, source in recipe.sources.items():
        _reader(checker, source, ("sources", name))
    for name, dataset in recipe.datasets.items():
        at: KeyPath = ("datasets", name)
        _inputs(checker, dataset.inputs, {**recipe.sources, **recipe.datasets}, (*at, "from"), "source or dataset")
        for i, input_name in enumerate(dataset.priority):
            checker.check_name(input_name, dataset.inputs, (*at, "priority", i), "input of this dataset")
        for i, step in enumerate(dataset.steps):
            _step(checker, step, (*at, "steps", i))
    checker.stop_if_failed()
    _cycles(recipe, checker)
    checker.stop_if_failed()
    check_against(recipe, checker)
    checker.stop_if_failed()
    for name, dataset in recipe.datasets.items():
        _where(recipe, checker, dataset.inputs, dataset.where, ("datasets", name))
    _signals(recipe, checker)
    check_token_files(recipe, checker)
    _tokens(recipe, checker)
    checker.stop_if_failed()
    check_splits(recipe, checker)
    if recipe.curriculum is not None:
        check_curriculum(recipe.curriculum, recipe, checker)
    check_train(recipe.train, checker)
    checker.stop_if_failed()


def _inputs(checker: Checker, names: list[str], allowed: Iterable[str], path: KeyPath, what: str) -> None:
    for i, name in enumerate(names):
        checker.check_name(name, allowed, (*path, i), what)
        if name in names[:i]:
            checker.fail((*path, i), f"'{name}' is named twice; remove one")


# -- readers and steps ----------------------------------------------------------------------------------------------
def _reader(checker: Checker, source: Any, path: KeyPath) -> None:
    if ":" in source.read and not checker.allow_custom:
        checker.fail((*path, "read"), f"'{source.read}' is a reader of your own; such code is run only with "
                                      f"--allow-custom-stages")
        return
    try:
        cls = reader_class(source.read)
        config = cls.Config
        if not issubclass(cls, Reader):
            raise AttributeError
    except UnknownName:
        checker.fail((*path, "read"), f"unknown reader '{source.read}': {nearest(source.read, readers())}")
        return
    except (AttributeError, TypeError):
        checker.fail((*path, "read"), f"'{source.read}' names no reader; write 'module:Class', where Class derives "
                                      f"from Reader")
        return
    except ImportError as e:
        checker.fail((*path, "read"), _not_installed(f"the reader '{source.read}'", e))
        return
    before = len(checker.problems)
    _settings(checker, config, source.config, path)
    if len(checker.problems) == before:
        try:
            reader_class(source.read)(source.config)                # raises when settings contradict each other
        except ValueError as e:
            checker.fail(path, str(e))
    keep = source.config.get("keep")
    for i, name in enumerate(keep if isinstance(keep, list) else ()):
        if name in RESERVED:
            checker.fail((*path, "keep", i), f"'{name}' in meta says which near-duplicates belong together; rename "
                                             "the key or column to keep it")


def _step(checker: Checker, step: Any, path: KeyPath) -> None:
    if ":" in step.name and not checker.allow_custom:
        checker.fail(path, f"'{step.name}' is a stage of your own; such code is run only with --allow-custom-stages")
        return
    try:
        cls = stage_class(step.name)
        config = cls.Config
    except UnknownName:
        checker.fail(path, f"unknown step '{step.name}': {nearest(step.name, steps())}")
        return
    except ImportError as e:
        checker.fail(path, _not_installed(f"the step '{step.name}'", e))
        return
    except AttributeError:
        checker.fail(path, f"'{step.name}' names no stage; write 'module:Class', where Class derives from Stage")
        return
    before = len(checker.problems)
    _settings(checker, config, step.config, (*path, step.name))
    # valid settings may still not match the stage's files (not for barriers, which may need their input's schema)
    if len(checker.problems) == before and issubclass(cls, Stage):
        stage = cls(step.config)
        for field, message in stage.problems().items():
            checker.fail((*path, step.name, field), message)
        checker.warnings += [f"{key_path((*path, step.name))}: {message}" for message in stage.warnings()]


def _not_installed(what: str, e: ImportError) -> str:
    if e.name and e.name.split(".")[0] in ("stages", "pipeline"):
        return f"{what} cannot be loaded: {e}"
    return f"{what} needs the package '{e.name}', which is not installed; pip install 'tokenmill[pipeline]', or name " \
           "the file under `code:`"


def _settings(checker: Checker, config: type[BaseModel], settings: dict[str, Any], path: KeyPath) -> None:
    """Validate the settings of a reader or step by the model `config`, and fill in the defaults of those left out, in
    place. Paths of resource files, which are relative to the recipe's folder, become absolute. Problems are added to
    `checker`, under the key `path`."""
    completed = dict(settings)
    for field, value in completed.items():
        if field not in config.model_fields or role_of(config, field) != "resource":
            continue
        many = isinstance(value, dict)                              # name → path
        paths = {k: v for k, v in (value.items() if many else [(field, value)]) if isinstance(v, str)}
        for name, given_path in paths.items():
            paths[name] = os.path.join(checker.base, os.path.expanduser(given_path))
            if not os.path.exists(paths[name]):
                at = (*path, field, str(name)) if many else (*path, field)
                checker.fail(at, f"no such file: {paths[name]}; the path counts from {checker.counts_from}")
                return
        completed[field] = {**value, **paths} if many else paths.get(field, value)
    valid = checker.validate(config, completed, path)
    if valid is not None:
        settings.clear()
        settings.update(valid.model_dump(mode="json"))


# -- the DAG --------------------------------------------------------------------------------------------------------
def _cycles(recipe: Recipe, checker: Checker) -> None:
    state: dict[str, int] = {}                                      # 1 while being visited, 2 when known to be acyclic

    def visit(name: str, trail: list[str]) -> None:
        if state.get(name) == 2:
            return
        if state.get(name) == 1:
            ring = [*trail[trail.index(name):], name]
            also = any(old not in recipe.datasets[new].inputs for new, old in pairwise(ring))      # by `against`
            checker.fail(("datasets", name, "from"), "a dataset cannot be made from itself"
                         + (", or compared with one that is made from it" if also else "") + f": {' ← '.join(ring)}")
            return
        state[name] = 1
        for upstream in (*recipe.datasets[name].inputs, *recipe.datasets[name].against):
            if upstream in recipe.datasets:
                visit(upstream, [*trail, name])
        state[name] = 2

    for name in recipe.datasets:
        visit(name, [])


def _where(recipe: Recipe, checker: Checker, inputs: list[str], where: Where, path: KeyPath) -> None:
    reachable = {s for i in inputs for s in ([i] if i in recipe.sources else recipe.sources_of(i))}
    for i, source in enumerate(where.get("source", ())):
        at = (*path, "where", "source", i)
        if checker.check_name(source, recipe.sources, at, "source") and source not in reachable:
            checker.fail(at, f"no document of '{source}' gets into {', '.join(inputs)}, which is made from "
                             f"{', '.join(sorted(reachable))}")


def _signals(recipe: Recipe, checker: Checker) -> None:
    """Check the signals (numbers stored beside the text) that steps use to keep or drop documents. Three things are
    problems:

    * No earlier step, dataset or source writes the signal, so that every document would lack it.
    * A barrier reads a signal that a step writes after personal data was removed (`_ScrubbedPass`).
    * A step overwrites a signal of a source. The signal would then hold the source's value for documents that were
      dropped before the step, and the step's value for all other documents.
    """
    source_signals = {name: set(reader_class(source.read)(source.config).signals)
                      for name, source in recipe.sources.items()}
    if not any(source_signals.values()) and all(
            stage_class(step.name).reads is Stage.reads for d in recipe.datasets.values() for step in d.steps):
        return
    written: dict[str, set[str]] = dict(source_signals)
    ends: dict[str, _ScrubbedPass] = {}
    for name in recipe.dataset_order():
        dataset = recipe.datasets[name]
        here = {s for i in dataset.inputs for s in written.get(i, ())}
        # the `prepare` stage of a barrier that is the first step runs in the last passes of the inputs
        current = _ScrubbedPass.joined([ends[i] for i in dataset.inputs if i in ends and not dataset.where])
        for i, step in enumerate(dataset.steps):
            stage = stage_class(step.name)(dict(step.config))
            for signal, field in stage.reads().items():
                if signal not in here and signal != "language":
                    checker.fail(("datasets", name, "steps", i, step.name, field),
                                 f"no step before this one writes a signal '{signal}': {nearest(signal, here)}")
                elif isinstance(stage, Barrier) and signal in current.late:
                    writer, scrubber = current.late[signal]
                    checker.fail(("datasets", name, "steps", i, step.name, field),
                                 f"the signal '{signal}' is read before the step '{scrubber}' removes personal data, "
                                 f"but '{writer}' writes it after that; move '{writer}' before '{scrubber}'")
            current = current.after(step.name, stage, first=i == 0)
            for source in recipe.sources_of(name):
                for twice in sorted(source_signals[source] & set(stage.signals)):
                    checker.fail(("sources", source, "signals"),
                                 f"the step '{step.name}' of dataset '{name}' writes a signal with the same name "
                                 f"'{twice}'; remove it here (the column stays in meta), or remove that step")
            here |= set(stage.signals)
        written[name], ends[name] = here, current


@dataclasses.dataclass(frozen=True)
class _ScrubbedPass:
    """The signals of a pass (steps that run together) that a barrier after the pass cannot read. The barrier's
    `prepare` stage runs before the first step that removes personal data, so it cannot read signals that are written
    after this step. `late` maps a signal to (step that writes it, step that removes personal data before)."""

    late: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    scrubber: str = ""
    last: Stage | None = None

    @classmethod
    def joined(cls, passes: Sequence[_ScrubbedPass]) -> _ScrubbedPass:
        return cls({signal: names for one in passes for signal, names in one.late.items()})

    def after(self, name: str, stage: Stage, *, first: bool) -> _ScrubbedPass:
        """Return the state after the step `name` has been added. After a barrier, this is an empty pass. If the step
        begins a new pass by the rules of `pipeline.plan.pass_plans`, it is a pass with only this step. `first` says
        that the step is the first of its dataset."""
        if isinstance(stage, Barrier):
            return _ScrubbedPass()
        begins = first or (self.last is not None and (not self.last.exact or self.last.gpus != stage.gpus))
        before = _ScrubbedPass() if begins else self
        scrubber = before.scrubber or (name if stage.scrubs else "")
        return _ScrubbedPass({**before.late, **{signal: (name, scrubber) for signal in stage.signals if scrubber}},
                             scrubber, stage)


# -- tokens ---------------------------------------------------------------------------------------------------------
def _tokens(recipe: Recipe, checker: Checker) -> None:
    readers: list[tuple[KeyPath, list[str], Any]] = []
    readers += [(("shards", name), shards.inputs, shards.where) for name, shards in recipe.shards.items()
                if not token_sources(recipe, shards.inputs)]
    tokenizer = recipe.tokenizer
    if tokenizer is not None:
        if [tokenizer.kind, tokenizer.train, tokenizer.load].count(None) != 2:
            checker.fail(("tokenizer",), "give one of `train:` (a new tokenizer), `load:` (the path of one) and `kind: "
                                         "bytes`")
        if tokenizer.pattern is not None and not (tokenizer.load or "").endswith(".tiktoken"):
            checker.fail(("tokenizer", "pattern"), "only a .tiktoken file under `load:` needs a pattern; remove it")
        if tokenizer.load is not None and not os.path.exists(os.path.join(checker.base, tokenizer.load)) and \
                not is_hub_name(tokenizer.load, checker.base):
            checker.fail(("tokenizer", "load"), f"no such file: {os.path.join(checker.base, tokenizer.load)}; the path "
                                                f"counts from {checker.counts_from}")
        if tokenizer.train is not None:
            readers.append((("tokenizer", "train"), tokenizer.train.inputs, tokenizer.train.where))
    elif recipe.shards:
        checker.fail(("shards",), "shards hold tokens; add `tokenizer: {train: …}` or `tokenizer: {load: path}`")
    for path, inputs, where in readers:
        for i, name in enumerate(inputs):
            if name in recipe.sources:
                checker.fail((*path, "from", i), f"'{name}' is a source; name a dataset made from it")
        _inputs(checker, [n for n in inputs if n not in recipe.sources], recipe.datasets, (*path, "from"), "dataset")
        if all(name in recipe.datasets for name in inputs):
            _where(recipe, checker, inputs, where, path)
