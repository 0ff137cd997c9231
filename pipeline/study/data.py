"""Makes the data of a study, which compares recipes (its *variants*) by the models that are trained on their data. The
variants are run as one plan, and their names, recipes and runs are written to STORE/studies/STUDY/study.json. Models
are trained elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.base.redact import redact_json
from pipeline.cluster.attempts import bad_name
from pipeline.engine.driver.protocols import Backend
from pipeline.plan.tokens import TOKENIZER
from pipeline.publication import NamedRecipe
from pipeline.recipe.model import Recipe
from pipeline.run import RunSummary, run_recipes
from pipeline.store.fs import Store
from pipeline.study.variants import (
    HELD_OUT,
    DataVariant,
    StudyError,
    held_out_changes,
    load_variant,
    refuse_changed,
    refuse_leak,
)

VERSION = 1


@dataclass(frozen=True)
class StudyData:
    """The variants of a study, ready to run: their recipes, and the name of the study."""

    name: str
    variants: Sequence[DataVariant]
    recipes: Sequence[Recipe]
    tokenizers: bool              # each variant has its own tokenizer
    held_out: Sequence[str]

    @property
    def runs(self) -> list[str]:
        return [f"{self.name}@{variant.name}" for variant in self.variants]

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, "study": self.name, "held_out": list(self.held_out),
                "tokenizers": self.tokenizers,
                "variants": [{"name": v.name, "recipe": v.file, "changes": list(v.changes), "run": run,
                              "digest": recipe.digest()}
                             for v, run, recipe in zip(self.variants, self.runs, self.recipes)]}


def study_data(variants: Sequence[DataVariant], held_out: Sequence[str], *, name: str | None = None,
               tokens: int | None = None, tokenizers: bool = False, added: Sequence[str] = (),
               allow_custom: bool = False) -> StudyData:
    """Load and check the recipes of a study, and return them ready to run. All variants get the same total number of
    training tokens: `tokens`, or that of the first variant. `held_out` are the words of the option --held-out, which
    name the text by which the variants are judged. `added` are assignments to the recipes of all variants.

    With `tokenizers`, each variant has its own tokenizer and its own tokens of the held-out text. Otherwise all
    variants use the tokenizer and the held-out tokens of the first one. Raises StudyError and RecipeError."""
    if len(variants) < 2:
        raise StudyError("one recipe alone is compared with nothing: name another one, or give --vary NAME KEY=VALUE")
    if not held_out:
        raise StudyError("--held-out: by what text are variants judged? Each filter changes the text that a variant "
                         "itself holds out, so give a dataset of another source, or files")
    if not tokenizers:
        refuse_changed(variants, "tokenizer", f"all variants have the tokenizer of '{variants[0].name}'; give "
                                              f"--tokenizers if each is to have its own")
    first = load_variant(variants[0], added, allow_custom)
    assert first.curriculum is not None
    shared = [*added, f"curriculum.total={tokens or first.curriculum.total}"]
    judged = held_out_changes(first, held_out)
    recipes = []
    for number, variant in enumerate(variants):
        changes = [*shared, *(judged if tokenizers or not number else [])]
        recipes.append(load_variant(variant, changes, allow_custom))
    if tokenizers:
        _same_text(variants, recipes)
    for variant, recipe in zip(variants, recipes):
        merged = recipe if HELD_OUT in recipe.shards else load_variant(variant, [*shared, *judged], allow_custom)
        refuse_leak(variant.name, merged)
    return StudyData(_name(name, variants, recipes), variants, recipes, tokenizers, held_out)


def candidate_data(variants: Sequence[DataVariant], tokenizer: Mapping[str, Any], *, name: str | None = None,
                   allow_custom: bool = False) -> StudyData:
    """Load and check the recipes of `variants`, whose data may be added to a training that exists (`tokenmill train
    anneal`), and return them ready to run. Each recipe gets the `tokenizer:` section of this training, `tokenizer`, and
    loses its own `curriculum:` and `train:`. Raises StudyError and RecipeError."""
    for section in ("tokenizer", "curriculum"):
        refuse_changed(variants, section, f"candidates have the {section} of the run; leave this change out")
    changes = [f"tokenizer={json.dumps(tokenizer)}", "curriculum=null", "train={}"]
    recipes = [load_variant(variant, changes, allow_custom, needs=["shards"]) for variant in variants]
    return StudyData(_name(name, variants, recipes), variants, recipes, True, [])


def _name(given: str | None, variants: Sequence[DataVariant], recipes: Sequence[Recipe]) -> str:
    digest = hashlib.blake2b(json.dumps([[v.name, r.digest()] for v, r in zip(variants, recipes)]).encode())
    name = given or f"{recipes[0].name}-{digest.hexdigest()[:8]}"
    if "@" in name or (reason := bad_name(name)) is not None:
        raise StudyError(f"--name {name[:80]!r}: {'it must not contain @' if '@' in name else reason}")
    return name


def _same_text(variants: Sequence[DataVariant], recipes: Sequence[Recipe]) -> None:
    """Raise StudyError unless all variants make the held-out text in the same way. This is checked if each variant has
    its own tokenizer and therefore makes its own tokens of this text."""
    for variant, recipe in zip(variants, recipes):
        if _definition(recipe) != _definition(recipes[0]):
            raise StudyError(f"--held-out: this dataset is made in another way in '{variant.name}' than in "
                             f"'{variants[0].name}'; with --tokenizers it must be the same in all variants")


def _definition(recipe: Recipe) -> list[Any]:
    plain, waiting, parts = recipe.plain(), list(recipe.shards[HELD_OUT].inputs), []
    while waiting:
        name = waiting.pop()
        part = plain["datasets"].get(name) or plain["sources"].get(name)
        parts.append([name, part])
        waiting += recipe.datasets[name].inputs if name in recipe.datasets else []
    return parts


def make_data(study: StudyData, root: str, *, make_backend: Callable[[Store], Backend],
              show: str = "quiet") -> list[RunSummary]:
    """Run the variants of a study as one plan. Raises StudyError if the store has a different study of the same name: a
    variant of the same name has another recipe, held-out text or number of tokens there."""
    store, path = Store(root), f"studies/{study.name}/study.json"
    document = redact_json(study.to_json())
    if store.exists(path):
        before = {v["name"]: v["digest"] for v in json.loads(store.read(path))["variants"]}
        for variant in document["variants"]:
            if before.get(variant["name"], variant["digest"]) != variant["digest"]:
                raise StudyError(f"{store.at(path)}: there, the variant '{variant['name']}' has another recipe, "
                                 f"held-out text or number of tokens; give this study another --name, or the variant "
                                 f"another name")
    shared = frozenset() if study.tokenizers else frozenset({TOKENIZER, f"shards:{HELD_OUT}"})
    named = [NamedRecipe(run, recipe, f"@{variant.name}", shared if number else frozenset())
             for number, (run, variant, recipe) in enumerate(zip(study.runs, study.variants, study.recipes))]
    summaries = run_recipes(named, root, make_backend=make_backend, show=show)
    store.write(path, json.dumps(document, indent=1).encode())
    return summaries
