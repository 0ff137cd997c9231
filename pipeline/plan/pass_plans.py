"""Divides the steps of datasets into passes and barriers.

How a dataset becomes passes (docs/contracts.md: Documents on disk, Tasks and blame):

* A barrier (deduplication) ends a pass. The next pass begins by applying the barrier's removal slices (lists of rows to
  drop). If two barriers follow each other without a step between them, the pass between them writes no text. It writes
  only row sets, which list the rows that the first barrier removed. The pass after the second barrier reads the files
  that the pass before the first one wrote, and drops the rows that either barrier removed.
* A numeric stage (fastText, OCR …), whose scores may differ between machines, ends a pass. So its scores are committed
  before later steps use them.
* Consecutive steps that need different shares of a GPU run in separate passes, so that a step that needs none does not
  wait for one.
* The `prepare` stage of a barrier computes signatures of texts. It runs in the pass before the barrier, before the
  first scrubber (a step that masks parts of the text). So signatures are computed from the unmasked texts, while the
  stored texts are masked.
* A dataset may begin with a barrier. The `prepare` stage then runs in the last pass of each input dataset, and in a
  pass of its own for each input source. If the dataset selects documents by `where:`, it runs in a first pass of the
  dataset instead.
* A barrier that cuts passages out of texts (`edits`) names them by ranges of bytes in the stored texts. Its `prepare`
  stage is therefore the last one of its pass, so that no later stage changes the texts. The next pass begins with the
  stage that carries out the cuts (`stages.cut`), and always writes its documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.base.files import file_sha256
from pipeline.plan.counts import counting_steps
from pipeline.plan.nodes import ChainStep
from pipeline.recipe.code import own_source
from pipeline.recipe.model import Recipe, Step
from pipeline.store.content_keys import content_key
from stages.barrier import COUNT, Barrier
from stages.catalog import load, reader_class, step_target
from stages.cut import cut_name, cut_settings

CUT = "stages.cut:CutPassages"


@dataclass
class PassPlan:
    """A pass (steps that run together, document by document) while the plan is being made. Until the plan is finished,
    `prepare` stages may be added to its chain of stages. They collect what a barrier (such as deduplication)
    compares."""

    name: str
    dataset: str
    inputs: list[tuple[str, str]]                 # (kind source|pass, name)
    chain: list[ChainStep]
    barrier: str | None = None                    # node whose removal slices this pass applies
    barrier_name: str = ""
    counting: bool = False                        # the barrier counts duplicates or hands counts on (`plan.counts`)
    signals: tuple[str, ...] = ()
    where: dict[str, list[str]] = field(default_factory=dict)   # selects documents of the inputs (`where:`)
    final: bool = False
    prepares: bool = True                         # runs no step of the recipe, only `prepare` stages of barriers

    @property
    def rewrites(self) -> bool:
        """Whether the pass writes the documents that it keeps. A pass between two barriers (steps that need all
        documents at once) with no step between them writes none. It writes a row set instead, which lists the rows that
        were removed. But it does write documents if one of its `prepare` stages adds signals."""
        return (self.final or self.barrier is None or not self.prepares
                or any(s.stage.signals for s in self.chain))

    @property
    def reads_counts(self) -> bool:
        """Whether the pass reads the duplicate counts of the barrier before it, and sets the signal `dup_count` of its
        documents from them. A pass that writes documents does. A pass that writes none does so only if one of its
        stages uses the signal. Otherwise its results stay fresh when only counts change."""
        return self.counting and (self.rewrites or any(COUNT in s.stage.reads() for s in self.chain))

    def add_prepare(self, step: ChainStep, *, last: bool) -> None:
        """Add the `prepare` stage of a barrier to the pass, unless the pass has it already. It is added before the
        first scrubber, or with `last` after all other stages."""
        if any(s.name == step.name and s.key == step.key for s in self.chain):
            return
        place = next((i for i, s in enumerate(self.chain) if s.stage.scrubs and not last), len(self.chain))
        self.chain.insert(place, step)


class DatasetPasses:
    """The passes and barriers of all datasets of a recipe, in an order in which each comes after those that it reads.

    `passes` maps a dataset to its passes. `barriers` maps the name of a barrier's node to a tuple: (name of its side
    table, the barrier, inputs of its dataset by priority, the same inputs in the order of `from:`).
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.passes: dict[str, list[PassPlan]] = {}
        self.barriers: dict[str, tuple[str, Barrier, list[str], list[str]]] = {}

    def divide(self) -> None:
        """Fill `passes` and `barriers` for all datasets of the recipe."""
        counting = counting_steps(self.recipe)
        for name in self.recipe.dataset_order():
            self._dataset(name, {number for dataset, number in counting if dataset == name})

    def _dataset(self, name: str, counting: set[int]) -> None:
        """Plan the passes of the dataset `name`, and add them to `passes` and `barriers`. `counting` holds the step
        numbers of those of its barriers that count duplicates, or that hand on the counts of an earlier barrier."""
        dataset = self.recipe.datasets[name]
        plans: list[PassPlan] = []
        inputs = [("source", i) if i in self.recipe.sources else ("pass", self.passes[i][-1].name)
                  for i in dataset.inputs]
        current = PassPlan(name, name, inputs, [], where=dict(dataset.where.items()))
        fresh = True                                    # no step of this dataset has been placed in `current` yet
        for number, step in enumerate(dataset.steps):
            placed = self.step(step)
            if isinstance(placed.stage, Barrier):
                current = self._barrier(placed, current, fresh, plans, dataset.inputs, dataset.priority)
                current.counting, fresh = number in counting, False
                continue
            last = current.chain[-1].stage if current.chain else None
            if not fresh and last is not None and (not last.exact or last.gpus != placed.stage.gpus):
                plans.append(current)
                current = PassPlan(name, name, [("previous", "")], [])
            current.chain.append(placed)
            current.prepares = fresh = False
        plans.append(current)
        plans[-1].final = True
        for i, plan in enumerate(plans):
            if plan.name == name and not plan.final:
                plan.name = f"{name}:{i + 1}"      # a dataset's name has no colon, so this one is unique
            if plan.inputs == [("previous", "")]:
                plan.inputs = [("pass", plans[i - 1].name)]
        self.passes[name] = plans
        for plan in plans:
            plan.signals = self._signals(plan)

    def _barrier(self, placed: ChainStep, current: PassPlan, fresh: bool, plans: list[PassPlan], inputs: list[str],
                 priority: list[str]) -> PassPlan:
        """End the pass `current` before the barrier `placed` (a step that needs all documents at once), and return the
        next pass. The ended pass gets the barrier's `prepare` stage and is added to `plans`. The next pass begins by
        dropping the documents that the barrier removes.

        If the dataset begins with the barrier (`fresh`) and has no `where:`, each input runs the `prepare` stage
        instead: a dataset in its last pass, a source in a pass of its own. `priority` lists the inputs whose documents
        are preferred among duplicates.
        """
        barrier = placed.stage
        assert isinstance(barrier, Barrier)
        target, config = barrier.prepare()
        prepare = self._chain_step(load(target).name, target, config)
        nxt = PassPlan(current.dataset, current.dataset, [], self._cut(placed), barrier_name=placed.name)
        if fresh and not current.where:          # each input writes its own side table, so no part is written twice
            for kind, source in zip((k for k, _ in current.inputs), inputs, strict=True):
                if kind == "source":
                    plans.append(PassPlan(f"{current.dataset}:{source}", current.dataset, [("source", source)], []))
                    plans[-1].add_prepare(prepare, last=barrier.edits)
                    nxt.inputs.append(("pass", plans[-1].name))
                else:
                    self.passes[source][-1].add_prepare(prepare, last=barrier.edits)
                    nxt.inputs.append(("pass", self.passes[source][-1].name))
        else:
            current.add_prepare(prepare, last=barrier.edits)
            plans.append(current)
            nxt.inputs = [("previous", "")]
        nxt.barrier = f"{current.dataset}/{placed.name}.{len(plans)}"
        ranks = list(priority) + [i for i in inputs if i not in priority]
        self.barriers[nxt.barrier] = (f"{prepare.name}-{prepare.key[:8]}", barrier, ranks, inputs)
        return nxt

    def _cut(self, placed: ChainStep) -> list[ChainStep]:
        """Return a list with the stage that carries out the cuts of the barrier `placed`, with which the next pass
        begins; [] if the barrier does not cut passages out of texts."""
        if not placed.stage.edits:
            return []
        return [self._chain_step(cut_name(placed.name), CUT, cut_settings(placed.name, placed.stage.config))]

    def _signals(self, plan: PassPlan) -> tuple[str, ...]:
        """Return the names of all signals (numbers stored beside the text) that a document of this pass can have. They
        come from the pass's own stages, from all earlier passes, and from columns of the sources."""
        names = {s for step in plan.chain for s in step.stage.signals} | ({COUNT} if plan.counting else set())
        for kind, name in plan.inputs:
            if kind == "pass":
                upstream = next(p for plans in [*self.passes.values()] for p in plans if p.name == name)
                names.update(upstream.signals or self._signals(upstream))
            elif kind == "source":
                source = self.recipe.sources[name]
                names.update(reader_class(source.read)(source.config).signals)
        return tuple(sorted(names))

    def step(self, step: Step) -> ChainStep:
        return self._chain_step(step.name, step_target(step.name), step.config)

    def _chain_step(self, name: str, target: str, config: Mapping[str, Any]) -> ChainStep:
        stage = load(target)(dict(config))
        key, replay_key = stage.key(), stage.key(("signal", "resource"))
        if source := own_source(target, self.recipe.code):  # a user's own stage: its source code counts
            key, replay_key = content_key(key, 0, source), content_key(replay_key, 0, source)
        resolved = stage.config.model_dump(mode="json")
        resources = {f: file_sha256(path) for f, path in stage.resource_files().items()}
        return ChainStep(name.rpartition(":")[2], key, replay_key, target, resolved, stage, resources)
