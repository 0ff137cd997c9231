"""What a stage is: a small class with a typed config that reads one document (or a batch) and gives a verdict.

A filter of twenty lines as an example::

    class MeanWordLength(Stage):
        '''Drop documents whose mean word length is outside [low, high] (Gopher, arXiv 2112.11446, table A1).'''
        name = "mean_word_length"
        version = 1
        signals = ("mean_word_length",)

        class Config(StageConfig):
            low: float = decision(3.0, "shortest mean word length kept, characters")
            high: float = decision(10.0, "longest mean word length kept, characters")

        def process(self, doc):
            mean = doc.words.mean_length
            doc.signals["mean_word_length"] = mean
            if not self.config.low <= mean <= self.config.high:
                return "mean_word_length"
            return None

`process` returns None to keep the document, or a reason (snake_case) to drop it. It may edit `doc.text`, `doc.meta`,
`doc.language` … An exception quarantines the document and never stops the run.

Keys. A stage's key covers its name, version and canonical config, the sha256 of the resource files it names, and the
versions of Python and of the libraries it declares. Every config field has a role: `signal` (changes what is computed),
`decision` (changes only the verdict drawn from stored signals) or `resource` (a path whose content counts).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from pipeline.base.files import file_sha256
from pipeline.base.machine import cpu_tag
from pipeline.base.process import ProcessDied as ProcessDied

if TYPE_CHECKING:
    import pyarrow as pa

    from stages.document import Document


class StageConfig(BaseModel):
    """Base of every stage's config: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def decision(default: Any, help: str, **kw: Any) -> Any:
    """A threshold, which changes the verdict and not what is computed. After a change, verdicts are replayed from the
    stored signals; only documents whose verdict changes are computed again."""
    return Field(default, description=help, json_schema_extra={"role": "decision"}, **kw)


def signal(default: Any, help: str, **kw: Any) -> Any:
    """A setting that changes what is computed (the default role)."""
    return Field(default, description=help, json_schema_extra={"role": "signal"}, **kw)


def resource(default: Any, help: str, **kw: Any) -> Any:
    """A path of a file (model, list) or folder, or a mapping name → path. The sha256 of the content enters the key, the
    path does not."""
    return Field(default, description=help, json_schema_extra={"role": "resource"}, **kw)


def role_of(config: type[BaseModel], field: str) -> str:
    extra = config.model_fields[field].json_schema_extra
    return str(extra.get("role", "signal")) if isinstance(extra, dict) else "signal"


#: bytes of input that `Stage.cost_ms` refers to
SAMPLE_BYTES = 5000


class SettingsError(ValueError):
    """A setting does not fit the input or the machine. The message names file, key and remedy; nothing else is
    shown. The attribute `permanent` tells the engine that a retry cannot succeed; errors of other packages may have
    it, too."""

    permanent = True


class Stage:
    """One step of a recipe. Subclasses set the class attributes and `process` (or `process_batch`).

    Attributes that are not ClassVar may depend on the config; `__init__` sets them on the instance.
    """

    name: ClassVar[str]
    version: int = 1
    #: signals written into `doc.signals` (float); the Parquet schema of a dataset has those of all its steps
    signals: tuple[str, ...] = ()
    #: signals whose distribution the report shows, over all documents that the stage has seen, to help choose
    #: thresholds. None: all signals of a numeric stage, none of an exact one
    scores: ClassVar[tuple[str, ...] | None] = None
    #: False for a numeric stage, whose numbers depend on BLAS, libm or threads (fastText, OCR, transformers). It rounds
    #: its scores to `grid` before the verdict and stores them; the pass ends after it.
    exact: bool = True
    grid: ClassVar[float] = 1e-4
    #: distributions whose versions enter the key
    libraries: tuple[str, ...] = ()
    #: True: `process_batch` is called with lists of documents, not `process`
    batched: ClassVar[bool] = False
    #: True for stages that remove personal data; the `prepare` stage of a dedup is placed before the first of them
    scrubs: bool = False
    #: True when the stage reads `doc.raw` (bytes) and makes `doc.text`
    extracts: bool = False
    #: the reader for files that `tokenmill extract --as` accepts under the name of this step; "": no such files
    read_by: ClassVar[str] = ""
    #: False when it does not read the text, so that it may precede the step that makes it
    reads_text: ClassVar[bool] = True
    #: its kind as `tokenmill steps` shows it; "": derived from the other attributes
    does: ClassVar[str] = ""
    #: True when it sets `doc.language`: verdicts of earlier steps by language cannot be replayed from the stored value
    sets_language: ClassVar[bool] = False
    #: columns of the side table this stage fills by `doc.side[name] = {column: value}`; None: no side table
    side: pa.Schema | None = None
    #: CPU milliseconds for 5 kB of input on one core (benchmarks/step_costs.py). Plans use it until the store has
    #: measured its own; the order of steps depends on its ratios. None: unknown
    cost_ms: ClassVar[float | None] = None
    #: bytes of text left per byte of input, for a usual crawl
    leaves: ClassVar[float] = 1.0
    #: True when it drops documents and so saves other steps work
    drops: ClassVar[bool] = False
    #: True when it changes the text of documents it keeps, so that later steps see another text
    edits: ClassVar[bool] = False
    #: languages its rules are made for; (): any language
    made_for: ClassVar[tuple[str, ...]] = ()
    #: the setting that lists the languages it keeps; "": there is none
    keeps: ClassVar[str] = ""
    #: memory of one child process while this stage is loaded, MB
    memory_mb: int = 300
    gpus: float = 0.0
    #: After `setup` a worker opens no sockets, starts only `programs()`, writes only to its scratch folder and never
    #: has credentials. False: a stage of your own needs more; the plan and the run then say so.
    confined: ClassVar[bool] = True

    Config: ClassVar[type[StageConfig]] = StageConfig

    def __init__(self, config: Any = None, **kw: Any) -> None:
        if config is None or isinstance(config, dict):
            config = self.Config(**{**(config or {}), **kw})
        self.config: Any = config

    def setup(self) -> None:
        """Load models. Called once in each worker before its first document, so that a failure is never blamed on a
        document."""

    def process(self, doc: Document) -> str | None:
        """Judge one document: None keeps it, a snake_case reason drops it."""
        raise NotImplementedError(f"{type(self).__name__} defines neither process nor process_batch")

    def process_batch(self, docs: list[Document]) -> list[str | None]:
        """Judge a batch: one verdict per document, in order."""
        return [self.process(doc) for doc in docs]

    def verdict(self, doc: Document) -> str | None:
        """The part of the decision that depends on thresholds: None or a reason. It may use only `doc.signals`,
        `doc.language` and `doc.source`. Nothing else exists when verdicts are replayed: there is no text, and there are
        only the signals that `process` writes or `reads` names. If the verdict stays the same under other thresholds,
        `process` must also do the same.

        A stage that does not define it (NotImplementedError) is run again when a threshold changes.
        """
        raise NotImplementedError

    def reads(self) -> dict[str, str]:
        """Signals of earlier steps that this stage needs, {signal: config field that names it}, and "language" when its
        verdict uses `doc.language`. A recipe in which no earlier step writes such a signal is refused."""
        return {}

    def forget(self, doc: Document) -> None:
        """Remove the signals of this stage that an earlier dataset stored. Stages that do not write all their signals
        for every document need it."""
        for name in self.signals:
            doc.signals.pop(name, None)

    @classmethod
    def may_drop(cls, config: Mapping[str, Any]) -> bool:
        """Whether the stage drops documents with these settings, so that the work of earlier steps on them is
        wasted."""
        return cls.drops

    def programs(self) -> tuple[str, ...]:
        """Programs that the stage starts for documents, by name or path; a worker starts no others. Called after
        `setup`."""
        return ()

    def scored(self) -> tuple[str, ...]:
        """The signals in `scores`, with None resolved."""
        return self.scores if self.scores is not None else () if self.exact else self.signals

    def counts(self, doc: Document) -> dict[str, Any] | None:
        """More figures for the report about a document that passed through this stage, kept or dropped: nested dicts of
        numbers that are added up over documents. They may use only the document's signals and meta, as they are
        stored."""
        return None

    # -- resources -----------------------------------------------------------------------------------------------
    def resource_files(self) -> dict[str, str]:
        """Returns the resource files the stage reads, {config field: path}. A stage with default files overrides this
        to add them. A worker checks that its files equal the driver's. Errors in finding them are raised."""
        result: dict[str, str] = {}
        for field, value in self.config.model_dump(mode="json").items():
            if value and role_of(type(self.config), field) == "resource":
                named = {f"{field}.{name}": path for name, path in value.items()} if isinstance(value, dict) else {}
                result.update(named or {field: value})
        return result

    def problems(self) -> dict[str, str]:
        """Settings that do not fit the contents of its resource files, {field: what is wrong and what to do}. Called
        while a recipe is checked; files that are absent or too big to be read are not checked."""
        return {}

    def warnings(self) -> list[str]:
        """Warnings to show before a run with these settings on this machine, each with its remedy; the run goes on."""
        return []

    # -- keys ----------------------------------------------------------------------------------------------------
    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        """32 hex characters over everything that affects this stage's output (restricted to `roles`)."""
        fields: dict[str, Any] = {}
        for field, value in self.config.model_dump(mode="json").items():
            role = role_of(type(self.config), field)
            if role not in roles:
                continue
            if role == "resource" and isinstance(value, dict):
                value = {name: file_sha256(path) for name, path in value.items()}
            elif role == "resource" and value is not None:
                value = file_sha256(value)
            fields[field] = value
        doc = {"name": self.name, "version": self.version, "config": fields,
               "libraries": library_versions(self.libraries), "python": python_version()}
        if not self.exact:
            doc["cpu"] = cpu_tag()
        return hashlib.blake2b(json.dumps(doc, sort_keys=True).encode(), digest_size=16).hexdigest()

    def round(self, score: float) -> float:
        """A score of a numeric stage, rounded to its grid."""
        return round(round(score / self.grid) * self.grid, 10)


def library_versions(names: tuple[str, ...]) -> dict[str, str]:
    return {name: metadata.version(name) for name in sorted(names)}


def python_version() -> str:
    """Major and minor version, e.g. '3.11': its Unicode tables decide what is a letter, a digit or a space."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
