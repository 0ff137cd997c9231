"""The variants of a study: recipes that are compared by what a model learns from their data."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.base.errors import TokenmillError
from pipeline.recipe import load_recipe
from pipeline.recipe.errors import Mark, RecipeError, nearest
from pipeline.recipe.model import Recipe
from stages.catalog import reader_class

#: name of the stream, and of the dataset, that holds the text by which variants are judged, and of the source of this
#: text if it is in files
HELD_OUT, HELD_OUT_FILES = "held-out", "held-out-files"
#: readers of files given as `--held-out`
READERS = ("text", "jsonl", "parquet")


class StudyError(TokenmillError):
    """Raised if a study cannot be made; the message names the option and the remedy."""

    exit_code = 2


@dataclass(frozen=True)
class DataVariant:
    """A recipe whose data a study compares with the data of other recipes. `name` is its name in the study, `file` the
    recipe, and `changes` are assignments to its keys, as `--set` takes them."""

    name: str
    file: str
    changes: tuple[str, ...] = ()


def named_variants(files: Sequence[str], vary: Sequence[Sequence[str]]) -> list[DataVariant]:
    """Return the variants that the options --data and --vary name. Each file of --data ([NAME=]RECIPE) is a variant.
    Each --vary ([NAME] KEY=VALUE …) is the recipe of the first file with changed keys.

    A file without NAME is called by its file name without folder and ending. A variant of --vary without NAME is called
    by the last word of its first key and the value: `a.min=0.8` is `min-0.8`. Raises StudyError if there is no file, or
    if a name cannot be used or is given twice. A --vary must change something, and neither `train:` nor
    `curriculum.total`.
    """
    if not files:
        raise StudyError("--vary changes a recipe: name it with --data RECIPE")
    variants = []
    for word in files:
        name, named, file = word.partition("=")
        variants.append(DataVariant(_checked(name if named else Path(word).stem, "--data"), file if named else word))
    for words in vary:
        has_name = "=" not in words[0]
        changes = tuple(words[1:] if has_name else words)
        if not changes or not all("=" in change for change in changes):
            raise StudyError(f"--vary {' '.join(words)}: a variant is a name and the keys in which it differs: --vary "
                             f"strict datasets.clean.steps.gopher_quality.min_stop_words=3")
        key, _, value = changes[0].partition("=")
        name = words[0] if has_name else re.sub(r"[^\w.-]+", "-", f"{key.rpartition('.')[2]}-{value}").strip("-.")
        if trained := next((change for change in changes if re.match(r"train[.=]", change)), None):
            raise StudyError(f"--vary {trained}: settings of the training are the same for all variants; to compare "
                             f"them, use --arm NAME KEY=VALUE with one RUN")
        if total := next((change for change in changes if change.startswith("curriculum.total=")), None):
            raise StudyError(f"--vary {total}: all variants train on equally many tokens; give their number with "
                             f"--tokens, or in {variants[0].file}")
        variants.append(DataVariant(_checked(name, "--vary"), variants[0].file, changes))
    names = [variant.name for variant in variants]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise StudyError(f"two variants are called '{doubled}'; give each a name of its own")
    return variants


def _checked(name: str, option: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,39}", name):
        raise StudyError(f"{option}: '{name}' cannot be the name of a variant, which becomes part of folders: at most "
                         f"40 letters, digits, '_', '-', '.', beginning with a letter or digit; write --data "
                         f"NAME=RECIPE or --vary NAME KEY=VALUE")
    return name


def load_variant(variant: DataVariant, added: Sequence[str], allow_custom: bool,
                 needs: Sequence[str] = ("tokenizer", "shards", "curriculum", "train")) -> Recipe:
    """Load the recipe of a variant. The assignments `added` are applied after the variant's own changes. An error in
    one of these changes is reported as an error of the option --vary. Raises StudyError if the recipe lacks a section
    of `needs`, or if a change adds a source or dataset that nothing reads."""
    try:
        recipe = load_recipe(variant.file, [*variant.changes, *added], allow_custom=allow_custom)
    except RecipeError as e:
        raise RecipeError(replace(problem, mark=_mark(problem.mark, variant)) for problem in e.problems) from None
    if variant.changes:
        _refuse_unread(variant, recipe, load_recipe(variant.file, added, allow_custom=allow_custom))
    for section, given in (("tokenizer", recipe.tokenizer), ("shards", recipe.shards),
                           ("curriculum", recipe.curriculum), ("train", recipe.train)):
        if not given and section in needs:
            raise StudyError(f"{variant.file}: a study trains on its data, so the recipe needs `{section}:` too")
    return recipe


def _refuse_unread(variant: DataVariant, recipe: Recipe, unchanged: Recipe) -> None:
    """Raise StudyError if a change of `variant` adds a source or dataset that nothing reads. A dataset, an entry of
    `shards:` or the tokenizer may read it. Without a reader, the variant would train on the same data as the recipe
    `unchanged`. `recipe` is the recipe with the changes."""
    read = {name for dataset in recipe.datasets.values() for name in (*dataset.inputs, *dataset.against)}
    read |= {name for shards in recipe.shards.values() for name in shards.inputs}
    if recipe.tokenizer is not None and recipe.tokenizer.train is not None:
        read |= set(recipe.tokenizer.train.inputs)
    names = {"sources": list(unchanged.sources), "datasets": list(unchanged.datasets)}
    for change in variant.changes:
        section, _, rest = change.partition("=")[0].partition(".")
        name = rest.partition(".")[0]
        known = names.get(section, [])
        if known and name and name not in known and name not in read:
            raise StudyError(f"--vary {change}: the recipe has no {section}.{name}, and nothing would read it; "
                             f"{nearest(name, known)}")


def refuse_changed(variants: Iterable[DataVariant], section: str, why: str) -> None:
    """Raise StudyError with the reason `why` if a variant's `--vary` changes the given section of its recipe, because
    this study sets the section itself."""
    for variant in variants:
        for change in variant.changes:
            if re.match(rf"{section}[.=]", change):
                raise StudyError(f"--vary {change}: {why}")


def _mark(mark: Mark, variant: DataVariant) -> Mark:
    change = mark.file.removeprefix("--set ")
    return replace(mark, file=f"--vary {variant.name} {change}") if change in variant.changes else mark


def held_out_changes(recipe: Recipe, words: Sequence[str]) -> list[str]:
    """Return the assignments (as for `--set`) that add to a recipe the stream `held-out`, by which the variants of a
    study are judged. `words` are those of `--held-out`: the name of one dataset of the recipe, or files or glob
    patterns.

    Raises StudyError if they are neither, or if no reader of READERS reads all the files. Also raises it if the recipe
    already has an entry with one of the added names.
    """
    for kind, names in (("sources", recipe.sources), ("datasets", recipe.datasets), ("shards", recipe.shards)):
        if taken := {HELD_OUT, HELD_OUT_FILES} & set(names):
            raise StudyError(f"{kind}.{min(taken)}: a study adds an entry of this name; rename it in the recipe")
    changes, dataset = [], words[0]
    if len(words) > 1 or dataset not in recipe.datasets:
        files = [os.path.abspath(file) for word in words for file in sorted(glob.glob(word)) or [word]]
        if missing := next((file for file in files if not os.path.isfile(file)), None):
            known = f"; {nearest(dataset, recipe.datasets)}" if len(words) == 1 else ""
            raise StudyError(f"--held-out: '{os.path.relpath(missing)}' is neither a dataset of the recipe nor a "
                             f"file{known}")
        changes = [_assignment(f"sources.{HELD_OUT_FILES}", {"read": _reader(files), "path": files}),
                   _assignment(f"datasets.{HELD_OUT}", {"from": HELD_OUT_FILES, "steps": []})]
        dataset = HELD_OUT
    longest = next(iter(recipe.shards.values())).longest
    return [*changes, _assignment(f"shards.{HELD_OUT}", {"from": dataset, "longest": longest, "val": "100%"})]


def _reader(files: Sequence[str]) -> str:
    for name in READERS:
        if all(file.endswith(tuple(reader_class(name).suffixes)) for file in files):
            return name
    known = ", ".join(suffix for name in READERS for suffix in reader_class(name).suffixes)
    raise StudyError(f"--held-out {os.path.relpath(files[0])}: such files need a source of their own in the recipe; "
                     f"files of one of these kinds are read as they are: {known}")


def _assignment(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"                                  # JSON is YAML


def refuse_leak(name: str, recipe: Recipe) -> None:
    """Raise StudyError if a source of the held-out text is also a source of text that is trained on."""
    judged = set(_sources(recipe, [HELD_OUT]))
    trained = set(_sources(recipe, mixed(recipe)))
    if both := sorted(judged & trained):
        raise StudyError(f"--held-out: the source '{both[0]}' is also trained on in '{name}', so its text would not be "
                         f"held out; name a dataset of another source, or files")


def mixed(recipe: Recipe) -> list[str]:
    """Return the entries of `shards:` from which some phase of the curriculum draws."""
    phases = recipe.curriculum.phases if recipe.curriculum else []
    streams = {stream for phase in phases for stream in phase.mixed}
    return [name for name in recipe.shards if name in streams or any(s.startswith(f"{name}.") for s in streams)]


def _sources(recipe: Recipe, entries: Iterable[str]) -> set[str]:
    """Return the sources of the documents in entries of `shards:`."""
    sources: set[str] = set()
    for entry in entries:
        shards = recipe.shards[entry]
        reached = {source for dataset in shards.inputs
                   for source in (recipe.sources_of(dataset) if dataset in recipe.datasets else [dataset])}
        picked = shards.where.get("source")
        sources |= reached & set(picked) if picked else reached
    return sources
