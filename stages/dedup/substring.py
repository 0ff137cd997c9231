"""Cuts passages that occur elsewhere in the corpus, word for word: the recipe step `substring`.

    - substring                                  # passages of at least 500 bytes, as OLMo 3
    - {substring: {length: 200, merge: 1}}       # of at least 200 bytes; what lies between two passages always stays
    - {substring: {unit: tokens, tokenizer: t.json}}      # of at least 50 tokens (Lee et al. 2022)

A *window* is a run of `length` bytes (or tokens) of a text. A window is repeated if an equal one comes before it: in a
document of an earlier dataset in `priority:`, in a document of the same dataset with a smaller id, or further up in the
same document without overlapping it. All bytes of repeated windows are cut, so one copy of every passage stays. (Lee et
al. 2022, arXiv 2107.06499, remove all copies.) The result depends only on the texts and ids (and the tokenizer).

So that only few windows need to be compared, a pass first stores the *seeds* of each document: short runs of bytes that
represent its windows (`stages.dedup.windows`). A window whose seed occurs only once is not repeated. Tasks then work in
waves; the tasks of a wave may run at the same time. A group is several consecutive parts (files of documents), and a
range is a range of hashes. Each entry below names a wave, what one of its tasks reads, and what the task writes.

    seeds     side tables of a group → the hashes of the group's seeds, and how often each occurs
    shared    a range of seeds       → the seeds that occur more than once, sent to the groups that have them
    windows   texts of a group       → the hashes of the windows with such seeds
    first     a range of windows     → for each repeated window, where its first copy is
    runs      a group                → runs of repeated windows, with a cryptographic hash of their bytes
    check     a group                → the runs whose first copy, in this group, really has the same bytes
    slices    a group                → for each part, the passages to cut

The wave check is needed because different windows may have equal hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import model_validator

from pipeline.base.errors import TokenmillError
from stages.barrier import Barrier, Done, FileRef, PartRef, TaskDraft, Wave
from stages.cut import CutConfig
from stages.dedup.fragment import SIZES, files_of, groups, slices_of
from stages.dedup.substring_tasks import SEED, WINDOW
from stages.dedup.token_units import NotBytes, TokenUnits
from stages.dedup.windows import seeds_of
from stages.document import storable_text
from stages.stage import Stage, StageConfig, decision, keyed_settings, resource, signal

if TYPE_CHECKING:
    from stages.document import Document

TASKS = "stages.dedup.substring_tasks:"
#: bytes of a token, about; only the memory and the number of tasks depend on it
TOKEN_BYTES = 4


class SeedConfig(StageConfig):
    length: int = signal(500, "fewest bytes of a passage that is cut; with unit: tokens its fewest tokens, where the "
                              "default is 50", ge=16, le=1 << 20)
    unit: Literal["bytes", "tokens"] = signal("bytes", "what `length` counts; with tokens, a passage begins and ends "
                                                       "between two tokens", added=True)
    tokenizer: str | None = resource(None, "tokenizer of unit: tokens, a file or folder", added=True)

    @model_validator(mode="before")
    @classmethod
    def _usual_length(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("unit") == "tokens" and "length" not in given:
            return {**given, "length": 50}
        return given

    @model_validator(mode="after")
    def _tokenizer_of_tokens(self) -> SeedConfig:
        if (self.unit == "tokens") != (self.tokenizer is not None):
            raise ValueError("unit: tokens and tokenizer: FILE belong together; give both, or neither")
        return self


class SubstringSeeds(Stage):
    """Compute the seeds of a document for the step `substring`. A window is a run of `length` bytes or tokens; its seed
    is a short run inside it that represents it (`stages.dedup.windows`). The column `seeds` of the side table holds the
    hashes of the seeds as little-endian uint64. It is empty for a text that is shorter than a window."""

    name = "substring_seeds"
    version = 3
    cost_ms = 0.12
    side = pa.schema([("seeds", pa.binary())])
    Config = SeedConfig
    _units: TokenUnits | None = None

    def setup(self) -> None:
        if self.config.tokenizer is not None and self._units is None:
            self._units = TokenUnits(self.config.tokenizer)

    def process(self, doc: Document) -> str | None:
        self.setup()
        data = storable_text(doc.text).encode()
        if len(data) >= 2**32:
            raise ValueError("the text has 4 GiB or more")             # places of bytes are stored as uint32
        units = self._units.tokens(data)[0] if self._units else np.frombuffer(data, np.uint8)
        hashes, _ = seeds_of(units, self.config.length)
        doc.side[self.name] = {"seeds": hashes.astype("<u8").tobytes()}
        return None


class Substring(Barrier):
    """Cut passages of at least `length` bytes of which an equal copy comes before, in another document or in the same
    one.

    Of equal passages, the one in the first dataset of `priority:` stays. If that dataset has several of them, the one
    in the document with the smallest id stays, and within a document the one that comes first. Two neighbouring cuts
    and the text between them become one cut, if at least the share `merge` of its bytes would be cut anyway. A document
    that was cut is dropped if it has fewer than `min_chars` characters or `min_words` words left.

    With `unit: tokens`, a passage has at least `length` tokens of the given tokenizer, and begins and ends where a
    token does. The tokenizer must be one whose tokens spell the bytes of a text (byte-level BPE without a normaliser).

    Texts are compared byte for byte, as the steps before this one have left them. Put `exact` and `minhash` first: they
    remove whole pages that are the same, and cost less.
    """

    name = "substring"
    version = 1
    cost_ms, leaves = 0.1, 0.95
    edits = True
    #: groups are smaller than those of other barriers: a task holds the shared seeds of a group, at worst 1/15 of it
    sizes = replace(SIZES, group_bytes=1 << 30)

    class Config(SeedConfig, CutConfig):
        merge: float = decision(0.95, "two neighbouring cuts become one, with the text between them, if at least this "
                                      "share of the whole is cut already; 1: never", gt=0, le=1)

    def prepare(self) -> tuple[str, dict[str, Any]]:
        return "stages.dedup.substring:SubstringSeeds", self._seeds()

    def _seeds(self) -> dict[str, Any]:
        return {k: v for k, v in keyed_settings(self.config).items() if k in SeedConfig.model_fields}

    def problems(self) -> dict[str, str]:
        if self.config.tokenizer is not None and Path(self.config.tokenizer).exists():
            try:
                TokenUnits(self.config.tokenizer)
            except (NotBytes, TokenmillError) as e:
                return {"tokenizer": str(e)}
        return {}

    def waves(self, parts: Sequence[PartRef]) -> list[Wave]:
        sizes, plan, length = self.sizes, groups(parts, self.sizes), self.config.length
        text_bytes = sum(group.bytes for group in plan)
        window_bytes = length * (TOKEN_BYTES if self.config.unit == "tokens" else 1)      # about
        ranges = sizes.buckets(4 * text_bytes // window_bytes * SEED.itemsize, len(plan))
        # the key covers the tokenizer's content, where the path does not count
        units: dict[str, Any] = {} if self.config.tokenizer is None else {
            "units": SubstringSeeds(self._seeds()).key(), "$volatile": {"tokenizer": self.config.tokenizer}}
        for group in plan:
            group.sides(self.name)                        # a part without a side table is refused before anything runs

        def files(number: int) -> list[dict[str, FileRef]]:
            """Return, for each part (file of documents) of a group, references to its side table and to its text."""
            return [{"side": s, "text": p.text} for s, p in zip(plan[number].sides(self.name), plan[number].parts)]

        def window_ranges(done: Done) -> int:
            repeated = sum(r.counters["occurrences"] for r in done["shared"])
            return sizes.buckets(repeated * length // 4 * WINDOW.itemsize, len(plan))

        def seeds(done: Done) -> Iterator[TaskDraft]:
            for group in plan:
                side = group.sides(self.name)
                yield TaskDraft(f"{TASKS}SeedMap", {"sides": side, "buckets": ranges}, sum(s["bytes"] for s in side),
                                f"{group.dataset}: seeds of {group.size} parts",
                                500 + group.bytes * 150 // window_bytes // 2**20)

        def shared(done: Done) -> Iterator[TaskDraft]:
            maps = files_of(done["seeds"], "seeds.seg")
            size = sum(m["bytes"] for m in maps) // ranges
            for b in range(ranges if plan else 0):
                yield TaskDraft(f"{TASKS}SharedSeeds", {"maps": maps, "bucket": b}, size,
                                f"seeds that occur twice, range {b + 1}/{ranges}", 600)

        def windows(done: Done) -> Iterator[TaskDraft]:
            common, buckets = files_of(done["shared"], "shared.seg"), window_ranges(done)
            for number, group in enumerate(plan):
                args = {"parts": files(number), "shared": common, "group": number, "length": length,
                        "buckets": buckets, "rank": group.rank, **units}
                yield TaskDraft(f"{TASKS}WindowMap", args, group.bytes,
                                f"{group.dataset}: windows of {group.size} parts",
                                700 + group.bytes * 100 // window_bytes // 2**20)

        def first(done: Done) -> Iterator[TaskDraft]:
            maps, buckets = files_of(done["windows"], "windows.seg"), window_ranges(done)
            size = sum(m["bytes"] for m in maps) // buckets
            for b in range(buckets if plan else 0):
                yield TaskDraft(f"{TASKS}FirstWindows", {"maps": maps, "bucket": b, "length": length},
                                size, f"windows that occur twice, range {b + 1}/{buckets}", 700)

        def by_group(task: str, wave: str, name: str, label: str, text: bool) -> Any:
            def tasks(done: Done) -> Iterator[TaskDraft]:
                records = files_of(done[wave], name)
                for number, group in enumerate(plan if any(f["rows"] for f in records) else ()):
                    args: dict[str, Any] = {"records": records, "group": number, "groups": len(plan)}
                    if text:
                        args |= {"parts": files(number), "length": length, **units}
                    else:
                        args |= {"dataset": group.dataset, "merge": self.config.merge}
                    yield TaskDraft(f"{TASKS}{task}", args, group.bytes if text else 1 << 20,
                                    f"{group.dataset}: {label} of {group.size} parts", 700)
            return tasks

        return [Wave("seeds", seeds), Wave("shared", shared), Wave("windows", windows), Wave("first", first),
                Wave("runs", by_group("RunMap", "first", "repeated.seg", "repeated passages", True)),
                Wave("check", by_group("CheckRuns", "runs", "claims.seg", "first copies", True)),
                Wave("slices", by_group("SubstringSlices", "check", "proved.seg", "cuts", False))]

    def slices(self, parts: Sequence[PartRef], results: Done) -> Iterable[FileRef | None]:
        return slices_of(groups(parts, self.sizes), results["slices"])
