"""Plans the nodes that turn datasets into tokens: one for the tokenizer, and one for the shards (token files) of each
stream. `pipeline.run` publishes the results of these nodes and resolves the curriculum."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from pipeline.engine.driver.queue import TaskRecords
from pipeline.passes.encode import LABELS, SPLITS, assemble_drafts, encode_drafts
from pipeline.passes.fit_tokenizer import byte_draft, load_draft, tokenizer_info, tokenizer_waves
from pipeline.passes.import_tokens import FILES, IDS, MOST, check_draft, import_draft
from pipeline.passes.labels import Label, streams_of
from pipeline.passes.pack import ShardPlace, pack_drafts
from pipeline.passes.part_tokens import LabelPiece
from pipeline.plan.inputs import InputError
from pipeline.plan.label_pieces import LabelPieces
from pipeline.plan.nodes import Node, PassResult, Work, result, spilled_parts
from pipeline.plan.planner import Planner
from pipeline.recipe.hub import hub_tokenizer
from pipeline.recipe.model import Recipe
from pipeline.recipe.splits import label_sources
from pipeline.recipe.token_files import token_sources
from pipeline.store.temp import Spilled
from stages.barrier import PartRef, TaskDraft, TaskResult, Wave
from tokenizer.load import load_tokenizer

#: name of the tokenizer's node; the colon keeps it apart from a dataset called "tokenizer"
TOKENIZER = "tokenizer:"


@dataclass(frozen=True)
class StreamResult:
    """The result of the node that makes the shards of a token stream, or of several streams if the shards are split.

    * `assembled`: the results of the tasks that wrote shards, by stream
    * `parts`: the files of documents that the tokens come from
    * `encoded`: the records of the encoding tasks, which count the documents that could not be encoded
    * `packed`: the results of the tasks that packed the documents of training shards into rows, by stream; empty
      without `packing`
    * `source`: describes the imported token files, for the manifests of the shards; empty if the tokens are from
      datasets
    """

    assembled: dict[str, list[TaskResult]]
    parts: Sequence[PartRef]
    encoded: TaskRecords
    packed: dict[str, list[TaskResult]] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)


def token_nodes(recipe: Recipe, planner: Planner) -> list[Node]:
    """Return the nodes of the plan that make tokens: one for the tokenizer (its result: `tokenizer_info`), and one for
    the shards of each stream, called 'shards:NAME' (its result: StreamResult). Returns [] for a recipe without a
    tokenizer."""
    if recipe.tokenizer is None:
        return []
    hub = hub_tokenizer(recipe)                      # fetched before anything runs
    if hub is not None and hub.pinned != recipe.tokenizer.load:
        planner.warnings.append(f"tokenizer.load: '{recipe.tokenizer.load}' names no revision, so a later run may load "
                                f"another tokenizer; write '{hub.pinned}' to load the same one always")
    trained = recipe.tokenizer.train
    deps = tuple(trained.inputs) if trained else ()
    nodes = [Node(TOKENIZER, "tokenizer", deps, lambda results: _tokenizer(recipe, planner, results),
                  steps=(f"{trained.kind} {trained.vocab}",) if trained else (recipe.tokenizer.kind or "load",))]
    for name, shards in recipe.shards.items():
        def work(results: Mapping[str, Any], name: str = name, inputs: list[str] = shards.inputs) -> Work:
            return _shards(recipe, planner, name, inputs, results)

        steps = ("encode", "assemble", *(["pack"] if shards.packing else []))
        imports = token_sources(recipe, shards.inputs)
        deps = tuple(f"index:{source}" for source in imports) or tuple(shards.inputs)
        nodes.append(Node(f"shards:{name}", "shards", (TOKENIZER, *deps), work,
                          steps=("import", *steps[1:]) if imports else steps))
    return nodes


def parts_of(results: Mapping[str, Any], datasets: list[str], sources: list[str] | None = None) -> Spilled[PartRef]:
    """Return the parts (files of kept documents) of finished datasets, in plan order. Parts without documents are left
    out. With `sources`, only parts that hold documents of one of these sources are returned."""
    parts = spilled_parts()
    for dataset in datasets:
        before: PassResult = results[dataset]
        for kept in before.parts():
            sources_kept = kept.record.counters["kept"]
            if kept.rows and (sources is None or any(s in sources_kept for s in sources)):
                parts.append(PartRef(kept.record.key, kept.origin, 0, kept.rows, kept.bytes, kept.text, None))
    return parts


def _tokenizer(recipe: Recipe, planner: Planner, results: Mapping[str, Any]) -> Work:
    assert recipe.tokenizer is not None
    spec = recipe.tokenizer
    if spec.train is not None:
        plain = recipe.plain()["tokenizer"]["train"]
        waves = tokenizer_waves({"sample": spec.train.sample, **plain}, parts_of(results, spec.train.inputs))
    elif spec.kind == "bytes":
        waves = [Wave("bytes", lambda done: [byte_draft()])]
    else:
        hub = hub_tokenizer(recipe)
        draft = load_draft(os.path.join(recipe.base, spec.load or ""), spec.eos, pattern=spec.pattern) \
            if hub is None else load_draft(str(hub.path.parent), spec.eos, recipe.kept_at)
        waves = [Wave("load", lambda done: [draft])]
    done: dict[str, list[TaskResult]] = {}
    for wave in waves:
        name = TOKENIZER if wave is waves[-1] else f"{TOKENIZER}/{wave.name}"
        records = yield (planner.draft_spec(name, i, d) for i, d in enumerate(wave.tasks(done)))
        done[wave.name] = [result(r) for r in records]
    [trained] = done[waves[-1].name]
    return tokenizer_info(trained, spec.eos)


def _shards(recipe: Recipe, planner: Planner, name: str, inputs: list[str], results: Mapping[str, Any]) -> Work:
    tokenizer, imports = results[TOKENIZER], token_sources(recipe, inputs)
    config = recipe.plain()["shards"][name]
    parts = parts_of(results, [] if imports else inputs, config.get("where", {}).get("source"))
    by: list[dict[str, Any]] = []
    if imports:
        drafts = [draft for source in imports for draft in _imports(recipe, planner, source, results, name)]
    else:
        by = label_sources(recipe, name)
        drafts = encode_drafts(parts, tokenizer, {**config, "val": float(recipe.shards[name].val)},
                               planner.quarantined, by)
    encoded = yield (planner.draft_spec(f"shards:{name}/encode", i, d) for i, d in enumerate(drafts))
    parts_encoded = [result(r) for r in encoded]
    places, listed = (None, {}) if not imports else _imported(planner, imports, parts_encoded, drafts)
    if imports:
        yield (planner.draft_spec(f"shards:{name}/check", i, draft)
               for i, draft in enumerate(_checks(planner, imports, parts_encoded, drafts)))
    shards_of: dict[str, list[ShardPlace]] = {}

    def assembling() -> Iterator[TaskDraft]:             # of one stream at a time: each names all parts
        streams: Iterable[tuple[str, dict[str, list[list[LabelPiece]]] | None]] = \
            _split(recipe, planner, name, parts_encoded) if by else [(name, None)]
        for stream, ranges in streams:
            of_stream = assemble_drafts(parts_encoded, tokenizer, ranges=ranges, stream=stream if by else "",
                                        places=places)
            shards_of[stream] = [(draft.args["split"], draft.args["index"]) for draft in of_stream]
            yield from of_stream

    assembled = yield (planner.draft_spec(f"shards:{name}/assemble", i, d) for i, d in enumerate(assembling()))
    left = iter(assembled)
    shards = {stream: [result(r) for r in islice(left, len(places))] for stream, places in shards_of.items()}
    packed: dict[str, list[TaskResult]] = {}
    if recipe.shards[name].packing:
        drafts_of = {stream: pack_drafts(places, shards[stream], recipe.shards[name].longest)
                     for stream, places in shards_of.items()}
        records = yield (planner.draft_spec(f"shards:{name}/pack", i, d)
                         for i, d in enumerate(chain.from_iterable(drafts_of.values())))
        left = iter(records)
        packed = {stream: [result(r) for r in islice(left, len(drafts))] for stream, drafts in drafts_of.items()}
    source = {"tokens": [_described(recipe, source, listed[source]) for source in imports]} if imports else {}
    return StreamResult(shards, parts, encoded, packed, source)


def _described(recipe: Recipe, source: str, files: list[tuple[str, int]]) -> dict[str, Any]:
    """Return what the manifest of the shards says about a source of token files: its name, format, sequence length (of
    files of rows) and files. `files` is the source's list from `_imported`: (file, number of its first document)."""
    config = recipe.sources[source].config
    rows = {"sequence": config["sequence"]} if config["sequence"] else {}
    return {"source": source, "format": config["format"], **rows, "files": files}


def _imports(recipe: Recipe, planner: Planner, source: str, results: Mapping[str, Any], name: str) -> list[TaskDraft]:
    """Return the tasks that import a source of token files for the shards `name`. Raises InputError if the source names
    another tokenizer than that of the recipe."""
    config, spec, tokenizer = recipe.sources[source].config, recipe.tokenizer, results[TOKENIZER]
    assert spec is not None
    if config["tokenizer"]:
        named = load_tokenizer(config["tokenizer"], spec.eos, spec.pattern)
        if named.sha256 != tokenizer["sha256"]:
            raise InputError(f"sources.{source}.tokenizer: {config['tokenizer']} (sha256 {named.sha256[:12]}) is not "
                             f"the tokenizer of the recipe (sha256 {tokenizer['sha256'][:12]}); `load:` it under "
                             f"`tokenizer:`, or add `decode: true` to the source and make a dataset from it")
    share = float(recipe.shards[name].val)
    return [import_draft(source, config, part.slices, part.weight, tokenizer, share, planner.tombstones,
                         planner.tombstones_mb)
            for part in planner.partitions(source, results[f"index:{source}"])]


def _imported(planner: Planner, sources: Sequence[str], imported: Sequence[TaskResult],
              drafts: Sequence[TaskDraft]) -> tuple[list[tuple[int, int]], dict[str, list[tuple[str, int]]]]:
    """Number the documents of imported token files. Returns a list and a dict:

    * for each task of `drafts`, (number of its source, number of its first document in the source)
    * for each source, a list of (file, number of the file's first document in the source)

    Raises InputError if a source has no documents or too many, or if only some of its files have loss masks.
    """
    rows = dict.fromkeys(sources, 0)
    masks: dict[str, dict[bool, str]] = {source: {} for source in sources}
    places: list[tuple[int, int]] = []
    files: dict[str, list[tuple[str, int]]] = {source: [] for source in sources}
    for task, draft in zip(imported, drafts, strict=True):
        source, ref = draft.args["source"], task.files[FILES]
        places.append((sources.index(source), rows[source]))
        starts = json.loads(planner.read_file(ref["$ref"], ref["sha256"]))
        files[source] += [(file, start + rows[source]) for file, start in starts]
        if task.counters["masked"] is not None:
            masks[source].setdefault(task.counters["masked"], starts[0][0])
        rows[source] += sum(task.counters[split]["docs"] for split in SPLITS)
        rows[source] += sum(task.counters["quarantined"].values())   # left out by a takedown, but keep their numbers
    for source, count in rows.items():
        root = planner.source_files(source).root
        if not count:
            raise InputError(f"{root}: has no documents; take the source '{source}' out, or give it files")
        if count > MOST:
            raise InputError(f"{root}: the source '{source}' has {count:,} documents, more than {MOST:,}; make several "
                             f"sources of it")
        if len(masks[source]) > 1:
            raise InputError(f"{root}/{masks[source][False]}: has no loss mask, unlike {masks[source][True]}; add it, "
                             f"or remove it from all files if all tokens count in the loss")
    return places, files


def _checks(planner: Planner, sources: Sequence[str], imported: Sequence[TaskResult],
            drafts: Sequence[TaskDraft]) -> Iterator[TaskDraft]:
    """Yield one task for each source of token files whose files give ids to documents. The task fails if two documents
    of the source have the same id."""
    for source in sources:
        tasks = [task for task, draft in zip(imported, drafts, strict=True) if draft.args["source"] == source]
        if any(task.files[IDS]["bytes"] for task in tasks):
            yield check_draft(source, planner.source_files(source).root, tasks)


def _split(recipe: Recipe, planner: Planner, name: str,
           encoded: list[TaskResult]) -> Iterator[tuple[str, dict[str, list[list[LabelPiece]]]]]:
    """Yield (stream, pieces) for each stream of the split shards `name`, sorted by the names of the streams. The pieces
    say where the documents of the stream are in the encoded parts (`LabelPieces.of`)."""
    shards = recipe.shards[name]
    files = (r.files[LABELS] for r in encoded)
    pieces = LabelPieces(json.loads(planner.read_file(file["$ref"], file["sha256"])) for file in files)
    least = shards.longest + 1 if shards.min_tokens is None else shards.min_tokens
    labels: dict[str, list[Label]] = {}
    for label, stream in streams_of(name, pieces.tokens, least).items():
        labels.setdefault(stream, []).append(label)
    for stream in sorted(labels):
        yield stream, pieces.of(labels[stream])
