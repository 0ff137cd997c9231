"""Loads a recipe from a file, or a ready recipe (one that comes with Tokenmill) by name. Applies `--set` and `--input`,
and checks the recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.redact import secret_in
from pipeline.recipe.check import check_recipe
from pipeline.recipe.code import import_code
from pipeline.recipe.errors import KeyPath, Mark, Problem, RecipeError, nearest
from pipeline.recipe.marks import Marks, parse_yaml
from pipeline.recipe.model import Recipe, Source
from pipeline.recipe.problems import Checker

READY = Path(__file__).resolve().parents[1] / "recipes"


def ready_recipes() -> list[str]:
    """Return the names of the recipes that come with Tokenmill."""
    return sorted(p.stem for p in READY.glob("*.yaml"))


def load_recipe(path_or_name: str | os.PathLike[str], overrides: Sequence[str] = (), *, inputs: Sequence[str] = (),
                allow_custom: bool = False) -> Recipe:
    """Load the recipe in a YAML file, or a ready recipe (one that comes with Tokenmill) by name.

    `overrides` have the form `a.b.c=value` with a YAML value, for example `datasets.clean.steps.language.min=0.8`. An
    item of a list is given by its number, counted from 0, or by the name of the step or phase. The override
    `until=NAME` (or a list of names) keeps only the dataset NAME and what it is made from or compared with (`against`).
    It removes `tokenizer:`, `shards:`, `curriculum:` and `train:`.

    `inputs` are paths for the source that the recipe names under `input:`, or for its only source. They are relative to
    the current folder, and so are all paths given to a ready recipe.

    With `allow_custom`, the recipe may name the user's own stages, and its files under `code:` are imported. Raises
    RecipeError, which lists problems with their places (`check_recipe` says how many at once).
    """
    file = _find(str(path_or_name))
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as e:
        raise _error(str(file), f"cannot read the recipe: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise _error(str(file), f"not UTF-8 text (byte {e.start}); save the recipe as UTF-8") from None
    base = os.getcwd() if file.parent == READY else str(file.resolve().parent)
    return load_text(text, str(file), name=file.stem, base=base, overrides=overrides, inputs=inputs,
                     inputs_from=os.getcwd(), allow_custom=allow_custom)


def load_text(text: str, file: str, *, name: str, base: str, overrides: Sequence[str] = (), inputs: Sequence[str] = (),
              inputs_from: str, allow_custom: bool = False,
              confine: Callable[[dict[str, Any], Marks], Iterable[Problem]] | None = None) -> Recipe:
    """Load the recipe in a YAML text. `file` is the name of the text in messages, and `name` the name of the recipe.
    The recipe's relative paths start at the folder `base`, and relative paths in `inputs` start at `inputs_from`.
    `confine` is called with the data before any file that the data names is opened or imported, and returns problems
    that refuse the recipe (`pipeline.recipe.confine`)."""
    data, marks = parse_yaml(text, file)
    if not isinstance(data, dict):
        raise _error(file, "a recipe is a mapping that begins with `version: 1`")
    for override in overrides:
        _set(data, marks, override)
    _prune(data, marks, bool(inputs))
    if missing := [*_feed(data, marks, list(inputs), inputs_from), *_missing_values(data, marks)]:
        raise RecipeError(missing)
    _split_sources(data)
    if confine is not None and (refused := list(confine(data, marks))):
        raise RecipeError(refused)

    checker = Checker(marks, base, allow_custom)
    recipe = checker.validate(Recipe, data, ())
    _no_secrets(data, checker, ())
    checker.stop_if_failed()
    assert isinstance(recipe, Recipe)
    recipe._name, recipe._base, recipe._marks = name, base, marks
    recipe._text = None if overrides or inputs else text
    if allow_custom:
        recipe.code[:] = [os.path.normpath(os.path.join(base, path)) for path in recipe.code]
        try:
            import_code(recipe.code)
        except (OSError, ImportError, SyntaxError) as e:
            checker.fail(("code",), f"{type(e).__name__}: {e}")
    check_recipe(recipe, checker)
    recipe._warnings.extend(checker.warnings)
    return recipe


def _no_secrets(value: Any, checker: Checker, path: KeyPath) -> None:
    """Report credentials in `value` as problems. `path` is the key of `value` in the recipe. A run keeps its recipe,
    and everyone with access to the store can read it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _no_secrets(inner, checker, (*path, str(key)))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _no_secrets(inner, checker, (*path, i))
    elif isinstance(value, str) and (what := secret_in(value)) is not None:
        checker.fail(path, f"this contains {what}, and a run keeps its recipe, which others can read; give "
                           f"credentials in the environment (AWS_ACCESS_KEY_ID …, fsspec's configuration)")


def _error(file: str, message: str, path: KeyPath = ()) -> RecipeError:
    return RecipeError([Problem(Mark(file), path, message)])


def _find(path_or_name: str) -> Path:
    looks_like_a_file = path_or_name.endswith((".yaml", ".yml")) or os.sep in path_or_name
    if not looks_like_a_file and path_or_name in ready_recipes():
        return READY / f"{path_or_name}.yaml"
    if not os.path.isfile(path_or_name):
        what = "is a folder; name the file in it" if os.path.isdir(path_or_name) else "no such recipe file"
        hint = "" if looks_like_a_file else f"; ready recipes: {nearest(path_or_name, ready_recipes())}"
        raise _error(path_or_name, what + hint)
    return Path(path_or_name)


# -- --set and --input --------------------------------------------------------------------------------------------
def _set(data: dict[str, Any], marks: Marks, override: str) -> None:
    label = f"--set {override}"
    key, equals, text = override.partition("=")
    steps = [s.strip() for s in key.split(".")]
    if not equals or not all(steps):
        raise _error(label, "write --set KEY=VALUE, e.g. --set curriculum.total=2B")
    try:
        value, _ = parse_yaml(text, label)
    except RecipeError as e:
        raise _error(label, e.problems[0].message) from None
    here: Any = data
    path: list[str | int] = []
    for i, step in enumerate(steps):
        where: str | int = step
        if isinstance(here, list):
            where = _item(here, step, label, tuple(path))
            name = here[where]
            if isinstance(name, str) and i + 1 < len(steps) and name in (step, steps[i + 1]):
                here[where] = {name: {}}  # a step given as a bare name becomes a mapping that can hold keys
                marks.put((*path, where), Mark(label))
            if isinstance(here[where], dict) and list(here[where]) == [step]:
                path.append(where)
                here, where = here[where], step
        elif not isinstance(here, dict):
            raise _error(label, "there is a single value here, without keys", tuple(path))
        path.append(where)
        if i == len(steps) - 1:
            here[where] = value
            marks.put(tuple(path), Mark(label))
        else:
            if isinstance(here, dict) and here.get(where) is None:
                here[where] = {}
                marks.put(tuple(path), Mark(label))
            here = here[where]


def _item(items: list[Any], step: str, label: str, path: KeyPath) -> int:
    """Return the position of an item in a list of the recipe. `step` is the number of the item, or its name: the name
    of a step, or the value of the item's key `name:`. Raises RecipeError if no item or several items have this name;
    `label` and `path` are for its message."""
    if step.isdecimal() and int(step) < len(items):
        return int(step)
    names = [item if isinstance(item, str) else item.get("name", next(iter(item), "")) if isinstance(item, dict) else ""
             for item in items]
    if names.count(step) == 1:
        return names.index(step)
    if step in names:
        raise _error(label, f"'{step}' stands there {names.count(step)} times; use its number, counting from 0", path)
    raise _error(label, f"there is no '{step}' here: {nearest(step, [str(n) for n in names if n])}", path)


def _feed(data: dict[str, Any], marks: Marks, inputs: list[str], base: str) -> Iterator[Problem]:
    """Put the paths given with `--input` into the source that the recipe names under `input:`, or into its only source.
    Relative paths start at `base`. Raises RecipeError if it is not known which source is meant.

    Without `--input`, yields a problem if the source that `input:` names has no `path`.
    """
    sources, name = data.get("sources"), data.get("input")
    if not isinstance(sources, dict) or not isinstance(name, str | None):
        return                                                      # wrong types: pydantic reports them
    if inputs:
        if name is None and len(sources) == 1:
            [name] = sources
        if name is None:
            raise _error("--input", f"which of the sources {', '.join(map(str, sources))} is meant? Put `input: NAME` "
                                    "into the recipe, or use --set sources.NAME.path=…")
        if isinstance(sources.get(name), dict):
            sources[name]["path"] = [p if "://" in p else os.path.abspath(os.path.join(base, os.path.expanduser(p)))
                                     for p in inputs]
            marks.put(("sources", name, "path"), Mark("--input"))
    elif name is not None and isinstance(sources.get(name), dict) and "path" not in sources[name]:
        yield Problem(marks.at(("sources", name)), ("sources", name),
                      "this recipe wants its input from you: add --input 'FILES'")


def _prune(data: dict[str, Any], marks: Marks, fed: bool) -> None:
    """Apply the override `until: NAMES`: keep only the datasets NAMES, and the datasets and sources that they are made
    from or compared with (`against`). What makes tokens of datasets is removed: `tokenizer`, `shards`, `curriculum` and
    `train`. `fed` tells whether `--input` was given."""
    last, datasets, sources = data.pop("until", None), data.get("datasets"), data.get("sources")
    if last is None or not isinstance(datasets, dict) or not isinstance(sources, dict):
        return                                                      # wrong types: pydantic reports them
    needed: list[Any] = []
    waiting = [str(name) for name in (last if isinstance(last, list) else [last])]
    for name in waiting:
        if name not in datasets:
            raise _error(marks.at(("until",)).file, f"unknown dataset '{name}': {nearest(name, datasets)}", ("until",))
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.append(name)
            dataset = datasets.get(name)
            inputs = dataset.get("from") if isinstance(dataset, dict) else None
            waiting += [str(i) for i in (inputs if isinstance(inputs, list) else [inputs])]
            waiting += [name for name in _against(dataset) if name in datasets]
    data["datasets"] = {name: dataset for name, dataset in datasets.items() if name in needed}
    data["sources"] = {name: source for name, source in sources.items() if name in needed}
    if (feeds := data.get("input")) in list(sources) and feeds not in needed:
        if fed:
            raise _error("--input", f"the files go into the source '{feeds}', which until={last} leaves out; leave "
                                    "out one of the two options")
        del data["input"]
    for key in ("tokenizer", "shards", "curriculum", "train"):
        data.pop(key, None)
    if isinstance(data.get("wants"), dict):
        data["wants"] = {key: how for key, how in data["wants"].items() if str(key).split(".")[1:2] in
                         ([name] for name in needed)}


def _against(dataset: Any) -> list[str]:
    """Return the values of `against` in the steps of a dataset, as the recipe writes them: names of datasets, or
    folders of indexes."""
    steps = dataset.get("steps") if isinstance(dataset, dict) else None
    settings = [config for step in (steps if isinstance(steps, list) else []) if isinstance(step, dict)
                for config in step.values() if isinstance(config, dict)]
    values = [config.get("against") for config in settings]
    return [str(name) for value in values for name in (value if isinstance(value, list) else [value])]


def _missing_values(data: dict[str, Any], marks: Marks) -> Iterator[Problem]:
    """Yield a problem for each value that the recipe requires under `wants:` and that the user has not given."""
    wants, datasets = data.get("wants"), data.get("datasets")
    for key, how in wants.items() if isinstance(wants, dict) else ():
        # a copy of the recipe may lack a dataset
        dataset_missing = value_at(data, ".".join(str(key).split(".")[:2])) is None
        if not dataset_missing and value_at(data, str(key)) is None:
            before = value_at(data, ".".join([*str(key).split(".")[:2], "from"]))
            stop = isinstance(before, str) and isinstance(datasets, dict) and before in datasets
            hint = f". Without it, stop before: --set until={before}" if stop else ""
            yield Problem(marks.at(("wants", key)), (), f"this recipe wants a file from you: add --set {key}=PATH. It "
                                                        f"is {' '.join(str(how).split())}{hint}")


def value_at(data: Any, key: str) -> Any:
    """Return the value under a key of a recipe, which is written as in `--set`; None when the recipe has no such key.
    Raises RecipeError when a list on the way has no such item."""
    here = data
    for step in key.split("."):
        if isinstance(here, list):
            here = here[_item(here, step, f"wants: {key}", ())]
            here = here.get(step, here) if isinstance(here, dict) else None
        else:
            here = here.get(step) if isinstance(here, dict) else None
    return here


def _split_sources(data: dict[str, Any]) -> None:
    """In each source of the recipe, move the settings of its reader into the key `config`."""
    sources = data.get("sources")
    if not isinstance(sources, dict):
        return
    own = set(Source.model_fields) - {"config"}
    for name, source in sources.items():
        if isinstance(source, dict):
            sources[name] = {**{k: v for k, v in source.items() if k in own},
                             "config": {k: v for k, v in source.items() if k not in own}}
