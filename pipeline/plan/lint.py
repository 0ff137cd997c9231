"""Warns about a recipe that can run but looks wrong. Each warning names the place in the recipe and a remedy. A warning
about an entry that nothing uses needs no remedy.

`pipeline.recipe` refuses a recipe that cannot run. A rule warns only when it is certain. There are no warnings about
the recipes that come with Tokenmill and the demo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.plan.lint_imports import Finding, unlisted_imports
from pipeline.recipe import Recipe
from pipeline.recipe.errors import KeyPath, Problem
from pipeline.recipe.model import Step
from pipeline.recipe.token_files import holds_tokens
from stages.barrier import Barrier
from stages.catalog import STAGES, load, reader_class, stage_class
from stages.stage import SAMPLE_BYTES, role_of
from stages.text.language_codes import meet, short
from tokenizer.mixture.resolve import WORTHWHILE_EPOCHS

#: a step this many times cheaper than one before it should have come first
CHEAPER = 10
#: most paths to a dataset that are examined
MOST_WAYS = 64


def lint(recipe: Recipe, speeds: Mapping[str, float] | None = None) -> list[str]:
    """Return warnings about a valid recipe, in the order of the file, each as 'FILE:LINE:COLUMN: KEY: MESSAGE'.
    `speeds` maps names of steps to their measured speeds, in bytes of text per CPU-second."""
    return list(map(str, findings(recipe, speeds)))


def findings(recipe: Recipe, speeds: Mapping[str, float] | None = None) -> list[Problem]:
    """Return warnings about a valid recipe in the order of the file, each with its key and its line and column.

    `speeds` maps names of steps to their speeds in bytes of text per CPU-second, as measured in a store
    (`estimate.Speeds.stages`).
    """
    rules = (_order(recipe, speeds or {}), _extraction(recipe), _language(recipe), _lineage(recipe), _crawls(recipe),
             _against(recipe), _unused(recipe), _overlap(recipe), _epochs(recipe), _tokenizer(recipe),
             unlisted_imports(recipe))
    problems = [Problem(recipe.mark(path), path, message) for rule in rules for path, message in rule]
    return sorted(problems, key=lambda p: (p.mark.line, p.mark.column))


def _is_barrier(step: Step) -> bool:
    return issubclass(stage_class(step.name), Barrier)


def _filters(step: Step) -> bool:
    """Whether a step drops documents one by one. A barrier (such as deduplication) does not, because it compares all
    documents before it drops any."""
    return stage_class(step.name).may_drop(step.config)


def _foreign(step: Step) -> bool:
    """Whether the effect of a step is unknown, because the step is the user's own, from a package, or from
    datatrove."""
    return step.name not in STAGES or step.name == "datatrove"


def _shapes(step: Step) -> bool:
    """Whether the purpose of a step is to make or change texts. The position of such a step decides which texts filters
    see, so the rules about cheap and expensive steps do not apply to it."""
    stage = stage_class(step.name)
    return stage.extracts or step.name == "datatrove" or (stage.edits and not stage.drops)


def _cost(step: Step, speeds: Mapping[str, float]) -> float | None:
    """Return the CPU time of a step in milliseconds per document of 5 kB; None when it is unknown. The cost of a
    barrier (such as deduplication) includes its `prepare` stage, which runs in the pass before the barrier."""
    stage = stage_class(step.name)
    parts = [(step.name.rpartition(":")[2], stage)]
    if issubclass(stage, Barrier):
        prepare = load(stage(dict(step.config)).prepare()[0])
        parts.append((prepare.name, prepare))
    costs = [SAMPLE_BYTES * 1000 / speeds[name] if name in speeds else part.cost_ms for name, part in parts]
    return None if costs[0] is None else sum(c or 0.0 for c in costs)


def _steps(name: str) -> KeyPath:
    return ("datasets", name, "steps")


def _order(recipe: Recipe, speeds: Mapping[str, float]) -> Iterator[Finding]:
    """Finds steps in a costly order, such as expensive filters before cheap ones. (OLMo 3 saved most of the cost of its
    language identification by reordering.)"""
    for name, dataset in recipe.datasets.items():
        costs = [None if _shapes(s) else _cost(s, speeds) for s in dataset.steps]
        for i, step in enumerate(dataset.steps):
            cost = costs[i]
            if cost is None or not (_filters(step) or _is_barrier(step)):
                continue
            # never advise moving a barrier before a filter: the barrier keeps one of two copies, and the filter may
            # then drop that copy
            dearer = [s.name for s, c in zip(dataset.steps[:i], costs) if c is not None and c >= CHEAPER * cost
                      and (_is_barrier(s) or not _is_barrier(step))]
            if dearer:
                yield (*_steps(name), i), (f"'{step.name}' is cheaper than '{dearer[0]}' before it; put it first, so "
                                           f"that '{dearer[0]}' need not process what '{step.name}' drops")
        extractors = [i for i, s in enumerate(dataset.steps) if stage_class(s.name).extracts]
        for i, step in enumerate(dataset.steps):
            if not stage_class(step.name).reads_text and extractors and extractors[0] < i:
                yield (*_steps(name), i), (f"'{step.name}' needs no text; put it before "
                                           f"'{dataset.steps[extractors[0]].name}', which is expensive")
        for i, step in enumerate(dataset.steps):
            cutting = [s.name for s in dataset.steps[:i] if _is_barrier(s) and stage_class(s.name).edits]
            if cutting and _is_barrier(step) and not stage_class(step.name).edits:
                yield (*_steps(name), i), (f"'{cutting[0]}' before '{step.name}' cuts copies of a document to pieces; "
                                           f"put '{step.name}' first, so that it removes them as a whole")
        for i, (step, cost) in enumerate(zip(dataset.steps, costs)):
            behind = [(s, c) for s, c in zip(dataset.steps[i + 1:], costs[i + 1:]) if c is not None and _filters(s)]
            # (the rule above names a much cheaper filter; a much more expensive one belongs after the barrier)
            if _is_barrier(step) and behind and cost and cost / CHEAPER < behind[0][1] < CHEAPER * cost:
                yield (*_steps(name), i), (f"'{step.name}' compares documents that '{behind[0][0].name}' after it "
                                           f"drops, and of two copies it may keep the one that is then dropped; put "
                                           f"'{behind[0][0].name}' first")


def _extraction(recipe: Recipe) -> Iterator[Finding]:
    """Finds sources of raw bytes that a dataset reads without a suitable extractor, so that its documents would have no
    text. For a crawl, an extractor for PDFs also counts as suitable, because crawls contain PDFs. For any source, a
    step whose effect is unknown (`_foreign`) counts as suitable."""
    for name, dataset in recipe.datasets.items():
        for source in dataset.inputs:
            if source not in recipe.sources:
                continue
            reader = recipe.sources[source].read
            extractor = reader_class(reader).extractor
            fitting = {extractor, *(["pdf"] if reader_class(reader).crawl else [])}
            if extractor and not any(s.name in fitting or _foreign(s) for s in dataset.steps):
                yield ("datasets", name), (f"source '{source}' gives raw pages ({reader}) and no step makes text of "
                                           f"them; begin the steps with '{extractor}'")


def _language(recipe: Recipe) -> Iterator[Finding]:
    """Finds steps made for English that a dataset applies to documents that may be in other languages. The first such
    step of a dataset is reported."""
    english: dict[str, bool] = {}                          # whether a dataset gives only English documents
    for name in recipe.dataset_order():
        dataset = recipe.datasets[name]
        only = all(english.get(i, False) for i in dataset.inputs) or _english(dataset.where.get("language"))
        for i, step in enumerate(dataset.steps):
            if keeps := stage_class(step.name).keeps:
                only = only or _english(step.config.get(keeps))
            elif stage_class(step.name).made_for == ("en",) and not only:
                yield (*_steps(name), i), (f"'{step.name}' is made for English, but documents of other languages reach "
                                           f"it; put 'language: {{keep: [en]}}' before it")
                only = True                                # one warning per dataset
        english[name] = only


def _english(languages: list[str] | None) -> bool:
    return languages is not None and bool(languages) and all(short(name) == "en" for name in languages)


# -- steps without effect on a way through the datasets ---------------------------------------------------------------
def _lineage(recipe: Recipe) -> Iterator[Finding]:
    """Finds steps that drop nothing, or drop everything, because of earlier steps. A step is reported only if this
    holds on every path of documents to it."""
    before: dict[str, list[list[Step]]] = {}               # dataset → the steps of every path that ends in it
    for name in recipe.dataset_order():
        dataset = recipe.datasets[name]
        ways = [way for i in dataset.inputs for way in before.get(i, [[]])]
        if len(dataset.inputs) > 1:                        # no barrier has compared documents of different inputs yet
            ways = [[s for s in way if not _is_barrier(s)] for way in ways]
        selected = set(map(short, dataset.where.get("language", ())))
        languages = [_languages(way) for way in ways]
        if selected and languages and all(passed is not None and passed.isdisjoint(selected) for passed in languages):
            yield ("datasets", name, "where"), (f"no document is left: steps before it keep only "
                                                f"{_list(set().union(*(k or set() for k in languages)))}; select one "
                                                f"of these languages, or keep others before")
        for i, step in enumerate(dataset.steps):
            so_far = [[*way, *dataset.steps[:i]] for way in ways]
            messages = [_superfluous(way, step) for way in so_far]
            if messages and all(messages):
                yield (*_steps(name), i), str(messages[0])
            passed = [_languages(way) for way in so_far]
            keep = set(map(short, _kept_languages(step)))
            if keep and passed and all(k is not None and k.isdisjoint(keep) for k in passed):
                yield (*_steps(name), i), (f"no document passes: steps before it keep only "
                                           f"{_list(set().union(*(k or set() for k in passed)))}; keep all these "
                                           f"languages in one step, or make two datasets")
        # with more than MOST_WAYS paths no warning is given, because an unexamined path might lack the step
        before[name] = [[*way, *dataset.steps] for way in ways] if len(ways) <= MOST_WAYS else [[]]


def _languages(way: list[Step]) -> set[str] | None:
    """Return the languages of the documents that are left after the steps in `way` (a path through datasets); None when
    unknown."""
    languages: set[str] | None = None
    for step in way:
        if keep := set(map(short, _kept_languages(step))):
            languages = keep if languages is None else languages & keep
    return languages


def _kept_languages(step: Step) -> list[str]:
    """Return the languages that a step keeps; [] when the step checks no language, or keeps all of them."""
    keeps = stage_class(step.name).keeps
    return list(step.config.get(keeps) or ()) if keeps else []


def _superfluous(way: list[Step], step: Step) -> str | None:
    """Return an explanation why `step` changes nothing after the steps in `way` (a path through datasets). Returns None
    when the step may still drop or change documents, and for a step that only adds signals."""
    stage = stage_class(step.name)
    if not (stage.drops or stage.edits or _is_barrier(step)):
        return None
    for earlier in reversed(way):
        if earlier.name == step.name:
            if earlier.config == step.config:
                return f"'{step.name}' ran before with the same settings; remove one of the two"
            return _implied(earlier, step) if stage.drops else None
        if ":" in earlier.name or (stage_class(earlier.name).edits and not stage.scrubs):
            return None                                    # a step between them has changed the text
    return None


def _implied(earlier: Step, step: Step) -> str | None:
    """Return an explanation why `step` drops nothing after `earlier`, the same step with other settings. Returns None
    when `step` may drop more documents. It drops no more if four things hold: its `min…` settings are no higher, its
    `max…` settings are no lower, its `keep` has at least the same values, and all other settings are equal."""
    config = stage_class(step.name).Config
    looser = []
    for field in config.model_fields:
        was, now = earlier.config.get(field), step.config.get(field)
        if was == now:
            continue
        if role_of(config, field) != "decision":
            return None
        if field == "keep":
            if now is not None and (was is None or not set(was) <= set(now)):
                return None
        elif not _looser(field, was, now):
            return None
        looser.append(f"{field} {_short(was)} before, {_short(now)} here")
    return (f"'{step.name}' cannot drop anything: an earlier one was stricter ({'; '.join(looser)}); take this one "
            f"out, or make it stricter") if looser else None


def _looser(field: str, was: Any, now: Any) -> bool:
    """Whether every document that passes the threshold `was` also passes the threshold `now`. The name of the field
    tells whether the thresholds are minima or maxima."""
    numbers = isinstance(was, (int, float)) and isinstance(now, (int, float))
    return numbers and ((field.startswith("min") and now <= was) or (field.startswith("max") and now >= was))


def _short(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else "all" if value is None else str(value)


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


# -- old documents ----------------------------------------------------------------------------------------------------
def _against(recipe: Recipe) -> Iterator[Finding]:
    """Finds deduplications that compare a dataset with an old one, but not with the still older ones with which the old
    one was compared. The old dataset lacks documents that are in the older ones. Copies of these would thus be kept in
    the new dataset."""
    for name, dataset in recipe.datasets.items():
        for number, step in enumerate(dataset.steps):
            named = (step.config.get("against") or ()) if _is_barrier(step) else ()
            for i, old in enumerate(named):
                steps = recipe.datasets[old].steps if old in recipe.datasets else []
                earlier = [other for s in steps if s.name == step.name for other in s.config["against"]]
                missing = [other for other in earlier if other not in named]
                if missing:
                    yield (*_steps(name), number, step.name, "against", i), (
                        f"'{old}' was compared with '{missing[0]}' and lacks its documents; name '{missing[0]}', too, "
                        f"so that no copy of them is kept")


# -- crawls -----------------------------------------------------------------------------------------------------------
def _crawls(recipe: Recipe) -> Iterator[Finding]:
    """Finds crawled pages that reach a final dataset without a check of their language, or without a step that removes
    e-mail and IP addresses. Datasets with a step whose effect is unknown (`_foreign`) on the way are left out."""
    ends = _ends(recipe)
    for name in recipe.dataset_order():
        if name not in ends:
            continue
        steps = {s.name: s for way in _ways(recipe, name) for s in way}
        reached = [s for s in recipe.sources_of(name) if reader_class(recipe.sources[s].read).crawl]
        if not reached or any(map(_foreign, steps.values())):                    # a foreign step may do the check
            continue
        for source in reached:
            ways = list(_ways(recipe, name, source))
            identified = any(stage_class(s.name).sets_language for way in ways for s in way)
            if not identified and not _by_language(recipe, name):
                yield ("datasets", name), (f"pages of '{source}' reach it in any language; add "
                                           f"'language: {{keep: [en]}}' (or the languages you want)")
            if not all(any(stage_class(s.name).scrubs for s in way) for way in ways):
                yield ("datasets", name), (f"pages of '{source}' reach it with e-mail and IP addresses in them; add "
                                           f"'pii' as the last step before deduplication")


def _ends(recipe: Recipe) -> set[str]:
    """Return the final datasets: those from which shards (files of tokens) are made. In a recipe without shards, these
    are the datasets that no other dataset reads and whose documents have passed a filter or a barrier."""
    if recipe.shards:
        return {i for s in recipe.shards.values() for i in s.inputs}
    read = {i for d in recipe.datasets.values() for i in d.inputs}
    return {n for n in recipe.datasets if n not in read
            and any(_filters(s) or _is_barrier(s) for way in _ways(recipe, n) for s in way)}


def _ways(recipe: Recipe, name: str, source: str | None = None) -> Iterator[list[Step]]:
    """For each path from a source to the end of the dataset `name`, yield the list of the steps on this path. With
    `source`, only paths from this source count; with None, those from all sources."""
    if name in recipe.sources:
        if source in (None, name):
            yield []
        return
    dataset = recipe.datasets[name]
    for upstream in dataset.inputs:
        for way in _ways(recipe, upstream, source):
            yield [*way, *dataset.steps]


def _by_language(recipe: Recipe, name: str) -> bool:
    """Whether a `where` selects documents by language, in the dataset `name` or in a dataset that it is made from."""
    dataset = recipe.datasets.get(name)
    return dataset is not None and ("language" in dataset.where or any(_by_language(recipe, i) for i in dataset.inputs)
                                    or any(s.name == "where" and _kept_languages(s) for s in dataset.steps))


# -- shards and curriculum ---------------------------------------------------------------------------------------------
def _unused(recipe: Recipe) -> Iterator[Finding]:
    read = {i for d in recipe.datasets.values() for i in d.inputs}
    imported = {i for s in recipe.shards.values() for i in s.inputs}
    for name in recipe.sources:
        if name not in read | imported:
            yield ("sources", name), ("no shards take it; name it in shards, or remove it"
                                      if holds_tokens(recipe.sources[name]) else
                                      "no dataset is made from it; name it in a dataset's from, or remove it")
    if recipe.shards:
        used = read | {i for s in recipe.shards.values() for i in s.inputs}
        used |= {old for dataset in recipe.datasets.values() for old in dataset.against}
        if recipe.tokenizer is not None and recipe.tokenizer.train is not None:
            used |= set(recipe.tokenizer.train.inputs)
        for name in recipe.datasets:
            if name not in used:
                yield ("datasets", name), "no dataset, tokenizer or shards read it; use it there, or remove it"
    if recipe.curriculum is not None:
        mixed = {name for phase in recipe.curriculum.phases for name in phase.mixed}
        for name in recipe.shards:
            if name not in mixed and not any(stream.startswith(f"{name}.") for stream in mixed):
                yield ("shards", name), "no phase of the curriculum mixes it in; add it to a mix, or remove it"


def _overlap(recipe: Recipe) -> Iterator[Finding]:
    """Finds pairs of shards that are made from the same dataset and whose `where` settings do not keep them apart. A
    training would read documents of both more often than the mixture says."""
    entries = list(recipe.shards.items())
    for i, (name, shards) in enumerate(entries):
        for other, earlier in entries[:i]:
            both = set(shards.inputs) & set(earlier.inputs)
            apart = any(not any(meet(a, b) if key == "language" else a == b
                                for a in shards.where[key] for b in earlier.where[key])
                        for key in shards.where.keys() & earlier.where.keys())
            if both and not apart:
                yield ("shards", name), (f"documents of {_list(both)} are in shards '{other}' too; tell them apart "
                                         f"with `where: {{source: …}}`")


def _epochs(recipe: Recipe) -> Iterator[Finding]:
    """Finds phases of the curriculum that allow more epochs of a stream (the tokens of one `shards:` entry) than are
    worthwhile. How many epochs a mixture really needs is known only when the tokens have been counted."""
    for i, phase in enumerate(recipe.curriculum.phases if recipe.curriculum else ()):
        for name, epochs in (phase.max_epochs or {}).items():
            if epochs > WORTHWHILE_EPOCHS:
                yield ("curriculum", "phases", i, "max_epochs", name), (
                    f"{epochs} epochs of '{name}': beyond {WORTHWHILE_EPOCHS} a repeated token is worth little (arXiv "
                    f"2305.16264); give it less weight, or find more text")


def _tokenizer(recipe: Recipe) -> Iterator[Finding]:
    """Finds datasets that a tokenizer is trained on, but whose sources the training of the model does not read. The
    training reads the shards that a phase of the curriculum mixes in, or all shards in a recipe without a curriculum.
    """
    train = recipe.tokenizer.train if recipe.tokenizer else None
    if train is None or not recipe.shards:
        return
    mixed = {name for phase in recipe.curriculum.phases for name in phase.mixed} if recipe.curriculum else set()
    used = [s for n, s in recipe.shards.items() if not mixed or n in mixed]
    fed = {source for s in used for i in s.inputs for source in recipe.sources_of(i)
           if source in s.where.get("source", [source])}
    for i, name in enumerate(train.inputs):
        picked = [s for s in recipe.sources_of(name) if s in train.where.get("source", [s])]
        if picked and fed.isdisjoint(picked):
            yield ("tokenizer", "train", "from", i), (f"the tokenizer is trained on '{name}', but the mixture reads "
                                                      f"none of it; train it on the data that the model will read")
