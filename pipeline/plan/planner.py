"""Turns the sources and datasets of a recipe into nodes of a plan. These are tasks that index big files, passes (steps
that run together, document by document) and barriers (steps that need all documents at once). `plan.tokens` adds
tokenizer and shards, and `plan.pass_plans` divides datasets into passes and barriers. Planning runs no task.

A node is a generator. It yields task specs, and is sent the records of these tasks from the commit log, in the order of
the specs, until it returns its result. The same code thus runs a recipe (the driver sends records of finished tasks),
plans it (the records come from the log alone) and resumes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.base.files import file_sha256
from pipeline.base.machine import cpu_tag
from pipeline.engine.task import TaskSpec
from pipeline.passes.replay import replay_arg
from pipeline.plan.file_list import FileList, SourceFile
from pipeline.plan.indexes import Indexes
from pipeline.plan.inputs import list_source
from pipeline.plan.nodes import (
    DOCUMENTS,
    INDEX,
    UNITS,
    BarrierResult,
    Node,
    PassResult,
    SplitIndex,
    Units,
    Work,
    result,
    spilled_parts,
)
from pipeline.plan.objects import ListingJournal, Listings
from pipeline.plan.overlap import check_overlaps
from pipeline.plan.pass_plans import DatasetPasses, PassPlan
from pipeline.plan.split import Partition, needs_index, partitions
from pipeline.recipe.code import own_source
from pipeline.recipe.model import Recipe
from pipeline.store.content_keys import OWN_PACKAGES, SharedArgs, content_key, placeless, task_key
from pipeline.store.lists import ListFiles
from pipeline.store.records import PartRecord
from pipeline.store.temp import Spilled
from pipeline.store.tombstones import Tombstones
from stages.barrier import COUNT, Barrier, FileRef, PartRef, TaskDraft, TaskResult, Wave
from stages.catalog import load, reader_class, reader_target
from stages.dedup.counts import count_waves
from stages.dedup.fragment import groups, slices_of
from stages.dedup.index import IndexedBarrier
from stages.read.reader import Reader
from stages.stage import resource_files

#: memory in MB that a task needs on top for replay, which reads row groups of earlier parts
REPLAY_MB = 150
#: a file that cannot be split is warned of if its expected size is more than this many partitions; a smaller one is
#: read in little more time than other tasks take
LONG = 4


class Planner:
    """Makes the nodes of a recipe's plan (passes, barriers …), each of which is a group of tasks.

    * `read_file` (`Store.read_checked`) reads a file of the store, here the splits of big input files.
    * `quarantined` takes a list of stage keys, and returns the documents that these stages have put into quarantine.
    * `earlier` takes the `replay_key` of a new task. It returns the record of the latest task that differs from the new
      one only in thresholds.
    * `put_list` writes long lists in task arguments to files (`pipeline.store.lists`), and `journal` continues an
      interrupted listing of a bucket. Both are None when nothing will run.
    * `tombstones` says which documents tasks must leave out.
    * `indexed` names a dataset whose deduplications make indexes, even if nothing in the recipe reads these.
    """

    def __init__(self, recipe: Recipe, read_file: Callable[[str, str], bytes], *,
                 quarantined: Callable[[list[str]], dict[str, dict[str, Any]]] = lambda keys: {},
                 earlier: Callable[[str], PartRecord | None] = lambda replay_key: None, verify_inputs: bool = False,
                 put_list: Callable[[str, bytes], Any] | None = None, journal: ListingJournal | None = None,
                 tombstones: Tombstones | None = None, indexed: str = "") -> None:
        self.recipe = recipe
        self.lists = ListFiles(put_list)
        #: the tombstones as an argument of tasks, under `$volatile`; {} if there are none
        self.tombstones = {"tombstones": tombstones.packed(put_list)} if tombstones else {}
        self.tombstones_mb = self.tombstones["tombstones"]["bytes"] >> 20 if tombstones else 0
        self.read_file = read_file
        self._quarantined = quarantined
        self.earlier = earlier
        self.target = recipe.run.partition
        self.verify = verify_inputs
        self.warnings: list[str] = []                    # to be shown to the user
        self._journal = journal
        self.listings: Listings = {}                     # of remote sources, so that each is listed once per plan
        self.files: dict[str, FileList] = {}
        self._listed: dict[str, str] = {}                # source → hash of the list of its files
        self._division = DatasetPasses(recipe)
        self.passes, self.barriers = self._division.passes, self._division.barriers
        self._indexed = indexed
        self.indexes = Indexes({}, {})

    # -- the plan ------------------------------------------------------------------------------------------------
    def nodes(self) -> list[Node]:
        """Return all nodes of the plan, each after the nodes that it depends on."""
        check_overlaps(self.recipe)
        self._division.divide()
        self.indexes = Indexes(self.passes, self.barriers, self._indexed)
        nodes: list[Node] = []
        for name in self.sources_used():
            nodes.append(Node(f"index:{name}", "index", (), self._index_work(name), name,
                              inputs=partial(self._source_inputs, name)))
        for passes in self.passes.values():
            for plan in passes:
                if plan.barrier is not None:
                    nodes.append(self._barrier_node(plan))
                nodes.append(self._pass_node(plan))
        self.warnings += [f"{name} is not confined: it runs with this user's environment, network and files, as its "
                          f"class asks for (confined = False)" for name in self.unconfined]
        return nodes

    @property
    def unconfined(self) -> list[str]:
        """Return the names of the user's own steps and readers that opted out of the confinement of workers."""
        steps = {s.target for plans in self.passes.values() for p in plans for s in p.chain if not s.stage.confined}
        readers = {self.recipe.sources[name].read for name in self.sources_used()}
        return sorted(steps) + sorted(name for name in readers if not reader_class(name).confined)

    @property
    def roots(self) -> tuple[str, ...]:
        """Return the URLs of the object storage locations of the sources, and of indexes outside the store."""
        return tuple(sorted({files.root for files in self.files.values() if "://" in files.root} | self.indexes.roots))

    def sources_used(self) -> list[str]:
        used = {name for plans in self.passes.values() for p in plans for kind, name in p.inputs if kind == "source"}
        used.update(name for shards in self.recipe.shards.values() for name in shards.inputs)      # `read: tokens`
        return [name for name in self.recipe.sources if name in used]

    def quarantined(self, stage_keys: list[str]) -> Any:
        """Return, as an argument for a task, the documents that the log lists as quarantined by these stages, sorted by
        id. A long list is stored as a file, which the task reads with `lists.unfold`."""
        entries = self._quarantined(stage_keys)
        return self.lists.fold({"entries": [entries[id] for id in sorted(entries)]})["entries"]

    # -- work ----------------------------------------------------------------------------------------------------
    def source_files(self, name: str) -> FileList:
        if name not in self.files:
            source = self.recipe.sources[name]
            self.files[name] = list_source(name, source.path, base=self.recipe.base, root=source.root,
                                           suffixes=reader_class(source.read).suffixes, verify=self.verify,
                                           warnings=self.warnings, listings=self.listings,
                                           journal=self._journal, follow_symlinks=source.follow_symlinks)
        return self.files[name]

    def reader_arg(self, name: str) -> dict[str, Any]:
        source = self.recipe.sources[name]
        cls = reader_class(source.read)
        reader = cls(source.config)
        config = reader.config.model_dump(mode="json")
        target = reader_target(source.read)
        key, hidden = reader.key(), {"target": target, "config": config}
        if own := own_source(target, self.recipe.code):
            key, hidden = content_key(key, 0, own), {**hidden, "code": self.recipe.code_args()}
        if resources := resource_files(reader.config):
            hidden["resources"] = {field: file_sha256(path) for field, path in resources.items()}
        return {"name": reader.name, "key": key, "$volatile": hidden}

    def expansion(self, source: str) -> Callable[[str], float]:
        """Return a function that maps the path of an input file of `source` to the expected number of uncompressed
        bytes per stored byte of this file."""
        settings = self.recipe.sources[source]
        return reader_class(settings.read)(settings.config).expansion

    def _index_work(self, name: str) -> Any:
        def work(results: Mapping[str, Any]) -> Work:
            source = self.recipe.sources[name]
            reader = reader_class(source.read)(source.config)
            files = self.source_files(name)
            if reader.in_units:
                [record] = yield iter([self._units_spec(name, files)])
                units = record.files["units.json"]
                return Units(files, self.read_file, units.path, units.sha256)
            can = type(reader).splits is not Reader.splits
            big = FileList(files.root, ((f.path, f.size, f.etag, f.bad, f.hashed) for f in (files if can else ())
                                        if not f.bad and needs_index(f, reader.expansion(f.path), self.target)))
            arg = self.reader_arg(name)
            specs = (self._spec(INDEX, f"index:{name}", i, f.size, f"index of {f.path}",
                                {"reader": arg, "file": f.arg(), "target": self.target}) for i, f in enumerate(big))
            records = yield (replace(spec, confined=reader.confined) for spec in specs)
            return SplitIndex(self._splits(name, zip(big, records, strict=True)), self.read_file)

        return work

    def _units_spec(self, name: str, files: FileList) -> TaskSpec:
        """Return the task that finds which of the files of the source `name` must be read together."""
        args = {"reader": self.reader_arg(name), "files": [file.arg() for file in files]}
        return self._spec(UNITS, f"index:{name}", 0, len(files), f"{name}: {len(files):,} files", self.lists.fold(args))

    def _splits(self, name: str, indexed: Iterable[tuple[SourceFile, PartRecord]]) -> Iterator[tuple[str, str, str]]:
        """Yield the splits of each big input file of the source `name`; separate tasks read these pieces. They are
        given as (path, path of the file with the splits in the store, its sha256). `indexed` lists the big files, with
        the records of the tasks that looked for their splits. Files that cannot be split are left out, and a warning is
        added about very big ones."""
        for file, record in indexed:
            if record.counters.get("unreadable"):
                continue                                  # the pass that reads the file reports it
            if record.counters["unsplittable"]:
                if file.size * self.expansion(name)(file.path) > LONG * self.target:
                    self.warnings.append(f"source '{name}': {file.path} cannot be split (one stream of compressed "
                                         f"data), so one worker reads all of it; gzip per record, or several files, "
                                         f"would share the work")
            else:
                splits = record.files["splits.json"]
                yield file.path, splits.path, splits.sha256

    def _pass_node(self, plan: PassPlan) -> Node:
        deps = [f"index:{n}" if kind == "source" else n for kind, n in plan.inputs]
        if plan.barrier:
            deps.append(plan.barrier)
        labels = ([f"apply {plan.barrier_name}"] if plan.barrier else []) + [s.name for s in plan.chain]
        return Node(plan.name, "pass", tuple(deps), lambda results: self._pass_work(plan, results), plan.dataset,
                    tuple(labels), plan.final, partial(self._pass_inputs_of, plan))

    def _source_inputs(self, name: str) -> Any:
        """Return everything that decides which tasks read a source, and what the keys of these tasks are
        (`Node.inputs`)."""
        if name not in self._listed:
            digest = hashlib.sha256()
            for file in self.source_files(name):
                digest.update(json.dumps([file.path, file.size, file.etag, file.bad]).encode())
            self._listed[name] = digest.hexdigest()
        return [self.target, placeless(self.reader_arg(name)), self._listed[name]]

    def _pass_inputs_of(self, plan: PassPlan) -> Any:
        return [placeless(self._common(plan)), load(DOCUMENTS).version, plan.barrier_name, plan.dataset, plan.inputs,
                [self._source_inputs(name) for kind, name in plan.inputs if kind == "source"]]

    def _common(self, plan: PassPlan) -> dict[str, Any]:
        """Return the arguments that all tasks of a pass share and that determine the keys of the tasks."""
        return {"chain": [s.arg() for s in plan.chain], "rewrites": plan.rewrites, "where": plan.where,
                "signals": list(plan.signals), "signals_mode": self.recipe.run.signals}

    def _pass_work(self, plan: PassPlan, results: Mapping[str, Any]) -> Work:
        records = yield self._pass_specs(plan, results)
        return PassResult(records, plan.dataset, results[plan.barrier] if plan.barrier and not plan.rewrites else None)

    def _pass_specs(self, plan: PassPlan, results: Mapping[str, Any]) -> Iterator[TaskSpec]:
        """Yield the tasks of a pass. There is one for each partition (group of slices of files) of its sources, and one
        for each part (file of documents) that the passes before it wrote."""
        memory = 300 + self.tombstones_mb + sum(s.stage.memory_mb for s in plan.chain) + max(
            (reader_class(self.recipe.sources[n].read).memory_mb for kind, n in plan.inputs if kind == "source"),
            default=0)
        gpus = max((s.stage.gpus for s in plan.chain), default=0.0)
        confined = all(s.stage.confined for s in plan.chain) and all(
            reader_class(self.recipe.sources[n].read).confined for kind, n in plan.inputs if kind == "source")
        cpu = "" if all(s.stage.exact for s in plan.chain) else cpu_tag()      # the keys of numeric stages carry it
        readers = [self.reader_arg(name)["key"] for kind, name in plan.inputs if kind == "source"]
        hidden = {"quarantined": self.quarantined([s.key for s in plan.chain] + readers),
                  "code": self.recipe.code_args(), **self.tombstones}
        common = {**self._common(plan), "$volatile": hidden}
        undecided = [{**entry, "key": s.replay_key} for entry, s in zip(common["chain"], plan.chain)]
        shared = SharedArgs(DOCUMENTS, common, {**common, "chain": undecided})
        roots = self.roots
        for order, (args, weight, label, origin) in enumerate(self._pass_inputs(plan, results)):
            key, replay_key = shared.keys(args)
            own, memory_mb = args, memory
            if plan.rewrites and (earlier := self.earlier(replay_key)) is not None and earlier.key != key:
                own, memory_mb = {**args, "$volatile": {**hidden, "replay": replay_arg(earlier)}}, memory + REPLAY_MB
            yield TaskSpec(key, DOCUMENTS, plan.name, {**common, **own}, weight, label, memory_mb, gpus=gpus,
                           order=order, origin=origin, replay_key=replay_key, cpu=cpu, confined=confined, roots=roots)

    def _pass_inputs(self, plan: PassPlan,
                     results: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], int, str, str]]:
        """Yield a tuple for each task of a pass: the arguments that name its input, the estimated number of bytes that
        it reads (`TaskSpec.weight`), its label, and the source or dataset that its input comes from."""
        for kind, name in plan.inputs:
            if kind == "source":
                reader = self.reader_arg(name)
                for part in self.partitions(name, results[f"index:{name}"]):
                    yield ({"source": name, "reader": reader, "slices": list(part.slices)}, part.weight, part.label,
                           name)
            elif not plan.barrier:
                before: PassResult = results[name]
                for kept in before.parts():
                    if kept.rows:
                        # the origin of a part of another dataset is that dataset and not a source, because
                        # `priority` ranks the names in `from:`
                        yield ({"part": {"text": kept.text, "gone": kept.gone, "removed": None, "barrier": ""}},
                               kept.bytes * 3, f"{name}: part {kept.record.key[:8]}",
                               kept.origin if before.dataset == plan.dataset else before.dataset)
        if plan.barrier:
            for part, removed, counts in results[plan.barrier].counted():
                if part.rows:
                    yield ({"part": {"text": part.text, "gone": part.gone, "removed": removed,
                                     "barrier": plan.barrier_name,
                                     **({"counts": counts} if plan.reads_counts else {})}},
                           part.bytes * 3, f"{part.dataset}: part {part.key[:8]}", part.dataset)

    def partitions(self, name: str, index: Mapping[str, Any] | Units) -> Iterator[Partition]:
        """Yield the partitions of the source `name`, each the input of one task. `index` is the result of the node
        `index:NAME`: the splits of big files, or the groups of files that must be read together."""
        files = self.source_files(name)
        reader = reader_class(self.recipe.sources[name].read)(self.recipe.sources[name].config)
        if isinstance(index, Units):
            return partitions(name, (), reader.expansion, self.target, {}, units=index)
        return partitions(name, files, reader.expansion, self.target, index, reader.group)

    def _barrier_node(self, plan: PassPlan) -> Node:
        assert plan.barrier is not None
        prepare, barrier, ranks, names = self.barriers[plan.barrier]
        deps = (*(n for _, n in plan.inputs), *self.indexes.nodes(plan.barrier))
        return Node(plan.barrier, "barrier", deps,
                    lambda results: self._barrier_work(plan, barrier, prepare, ranks, names, results),
                    plan.dataset, (barrier.name,), inputs=partial(self._barrier_inputs, plan)
                    if type(barrier).__module__.partition(".")[0] in OWN_PACKAGES else None,
                    against=tuple(self.indexes.read.get(plan.barrier, ())))

    def _barrier_inputs(self, plan: PassPlan) -> Any:
        """Return everything that decides which tasks a barrier (such as deduplication) has, and what the keys of these
        tasks are (`Node.inputs`). It is used only for Tokenmill's own barriers. For others it is not known which
        modules define their tasks."""
        assert plan.barrier is not None
        prepare, barrier, ranks, names = self.barriers[plan.barrier]
        return [barrier.key(), prepare, ranks, names, plan.dataset, plan.inputs, *([COUNT] if plan.counting else []),
                *(["index"] if plan.barrier in self.indexes.made else []),
                *self.indexes.folders(plan.barrier, barrier.name)]

    def _barrier_work(self, plan: PassPlan, barrier: Barrier, prepare: str, ranks: list[str], names: list[str],
                      results: Mapping[str, Any]) -> Work:
        parts = spilled_parts()
        dataset_names = names if len(plan.inputs) == len(names) else [None] * len(plan.inputs)
        for (_, node), input_name in zip(plan.inputs, dataset_names, strict=True):
            before: PassResult = results[node]
            for kept in before.parts():
                side = kept.record.files.get(f"side.{prepare}.parquet")
                dataset = input_name if input_name is not None else kept.origin
                rank = ranks.index(dataset) if dataset in ranks else len(ranks)
                if kept.rows:
                    parts.append(PartRef(kept.record.key, dataset, rank, kept.rows, kept.bytes, kept.text,
                                         side.ref() if side else None, kept.gone, kept.counts))
        assert plan.barrier is not None
        against = self.indexes.of(plan.barrier, barrier.name, results)
        waves = barrier.waves(parts, against) if isinstance(barrier, IndexedBarrier) else barrier.waves(parts)
        done = yield from self._waves(plan.barrier, waves)
        slices, index = _spilled_refs(barrier.slices(parts, done)), None
        if plan.barrier in self.indexes.made and isinstance(barrier, IndexedBarrier):
            index_results = yield from self._waves(plan.barrier, barrier.index_waves(parts, slices, done))
            index = barrier.index(parts, index_results, len(ranks))
        if not plan.counting or COUNT not in barrier.signals:
            return BarrierResult(parts, slices, index=index)
        stored = any(COUNT in before.signals for plans in self.passes.values() for before in plans
                     if ("pass", before.name) in plan.inputs)
        done = yield from self._waves(f"{plan.barrier}/count", count_waves(parts, slices, stored, barrier.rounds))
        return BarrierResult(parts, slices, _spilled_refs(slices_of(groups(parts), done["counts"], "counts")), index)

    def _waves(self, node: str, waves: Iterable[Wave]) -> Generator[Any, Any, dict[str, Sequence[TaskResult]]]:
        """Yield the tasks of `waves` to the caller, one wave after another, and return the results of each wave by its
        name. A wave is a group of tasks that may run at the same time. The caller sends the records of the finished
        tasks."""
        done: dict[str, Sequence[TaskResult]] = {}
        for wave in waves:
            more = True
            while more:
                drafts = wave.tasks(done)
                records = yield (self.draft_spec(f"{node}/{wave.name}", i, d) for i, d in enumerate(drafts))
                done[wave.name] = Spilled(map(result, records), encode=vars, decode=lambda doc: TaskResult(**doc))
                more = wave.again(done)
        return done

    # -- specs ---------------------------------------------------------------------------------------------------
    def draft_spec(self, node: str, order: int, draft: TaskDraft) -> TaskSpec:
        return self._spec(draft.task, node, order, draft.weight, draft.label, self.lists.fold(draft.args),
                          draft.memory_mb)

    def _spec(self, task: str, node: str, order: int, weight: int, label: str, args: dict[str, Any],
              memory_mb: int = 500) -> TaskSpec:
        return TaskSpec(task_key(task, args), task, node, args, weight, label, memory_mb, order=order, roots=self.roots)


def _spilled_refs(refs: Iterable[FileRef | None]) -> Spilled[FileRef | None]:
    return Spilled(refs, encode=lambda ref: ref, decode=lambda ref: ref)
