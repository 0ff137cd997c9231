"""What looks wrong in a recipe that can nevertheless run. Warnings only; `pipeline.recipe` refuses what cannot run."""

from __future__ import annotations

from pipeline.recipe import Recipe

#: order of magnitude of the CPU a document of 5 KB costs, in ms; measured on one core, only ratios matter
COST_MS = {"url": 0.01, "language": 0.3, "fineweb": 0.1, "gopher_quality": 0.3, "quality": 0.3, "pii": 0.3, "c4": 0.5,
           "gopher_repetition": 0.8, "exact": 0.1, "minhash": 4.0, "html": 20.0, "pdf": 50.0}
#: a step this many times cheaper than one before it should have come first
CHEAPER = 10
#: steps that drop documents and so save work of the steps behind them
DROPS = {"url", "language", "gopher_repetition", "gopher_quality", "c4", "fineweb", "quality", "exact", "minhash"}
#: rules made for English: stop words, terminal punctuation
ENGLISH = {"gopher_quality", "c4", "fineweb"}
#: readers that give raw bytes, and the steps that make text of them
EXTRACTOR = {"warc": "html", "html": "html", "pdf": "pdf"}


def lint(recipe: Recipe) -> list[str]:
    """Warnings about a checked recipe, in the order of the file."""
    return [*_order(recipe), *_extraction(recipe), *_language(recipe), *_unused(recipe), *_overlap(recipe)]


def _order(recipe: Recipe) -> list[str]:
    """Expensive before cheap (OLMo 3 saved most of its language identification by reordering)."""
    found = []
    for name, dataset in recipe.datasets.items():
        steps = [s.name for s in dataset.steps]
        for i, step in enumerate(steps):
            dearer = [s for s in steps[:i] if s in COST_MS and s not in EXTRACTOR.values()
                      and COST_MS[s] >= CHEAPER * COST_MS.get(step, float("inf"))]
            if step in DROPS and dearer:
                found.append(f"datasets.{name}.steps: '{step}' is cheaper than '{dearer[0]}' before it; put it first, "
                             f"so that what it drops costs nothing more")
        if steps.count("url") and "html" in steps[: steps.index("url")]:
            found.append(f"datasets.{name}.steps: 'url' needs no text; put it before 'html', which is dear")
    return found


def _extraction(recipe: Recipe) -> list[str]:
    """Sources of raw bytes whose first step is no extractor: every text would be empty."""
    found = []
    for name, dataset in recipe.datasets.items():
        steps = [s.name for s in dataset.steps]
        makes_text = any(s in EXTRACTOR.values() or s == "datatrove" or ":" in s for s in steps)
        for source in dataset.inputs:
            reader = recipe.sources[source].read if source in recipe.sources else None
            if reader in EXTRACTOR and not makes_text:
                found.append(f"datasets.{name}: source '{source}' gives raw pages ({reader}) and no step makes text of "
                             f"them; begin the steps with '{EXTRACTOR[reader]}'")
    return found


def _language(recipe: Recipe) -> list[str]:
    """Rules made for English over documents of any language."""
    found = []
    english: dict[str, bool] = {}                          # whether only English comes out of a dataset
    for name in recipe.dataset_order():
        dataset = recipe.datasets[name]
        only = all(english.get(i, False) for i in dataset.inputs) or dataset.where.get("language") == ["en"]
        for step in dataset.steps:
            if step.name == "language":
                only = only or step.config.get("keep") == ["en"]
            elif step.name in ENGLISH and not only:
                found.append(f"datasets.{name}.steps: '{step.name}' is made for English, but documents of other "
                             f"languages get there; put 'language: {{keep: [en]}}' before it")
                only = True                                # one warning a dataset
        english[name] = only
    return found


def _unused(recipe: Recipe) -> list[str]:
    read = {i for d in recipe.datasets.values() for i in d.inputs}
    found = [f"sources.{name}: no dataset is made from it" for name in recipe.sources if name not in read]
    if recipe.curriculum is not None:
        mixed = {name for phase in recipe.curriculum.phases for name in phase.mix or ()}
        found += [f"shards.{name}: no phase of the curriculum mixes it in" for name in recipe.shards
                  if name not in mixed]
    return found


def _overlap(recipe: Recipe) -> list[str]:
    """Shards that hold the same documents: they would be trained on more often than the mixture says."""
    found = []
    entries = list(recipe.shards.items())
    for i, (name, shards) in enumerate(entries):
        for other, earlier in entries[:i]:
            both = set(shards.inputs) & set(earlier.inputs)
            apart = any(set(shards.where[key]).isdisjoint(earlier.where[key])
                        for key in shards.where.keys() & earlier.where.keys())
            if both and not apart:
                found.append(f"shards.{name}: documents of {', '.join(sorted(both))} are in shards '{other}' too; tell "
                             f"them apart with `where: {{source: …}}`")
    return found
