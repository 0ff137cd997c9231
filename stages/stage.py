"""What a stage is: a small class with a typed config that looks at one document (or a batch) and gives a verdict.

A filter of twenty lines is the model::

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

`process` returns None to keep the document or the reason (snake_case) to drop it. It may edit `doc.text`,
`doc.meta`, `doc.language` …; an exception quarantines the document and never stops the run.

Keys. A stage's key is its name, version, canonical config, the sha256 of the resource files it names,
the versions of the libraries it declares and of Python. Every config field has a role: `signal` (changes what is
computed), `decision` (only changes the verdict drawn from stored signals) or `resource` (a path: its content counts).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from pipeline.base.files import sha256

if TYPE_CHECKING:
    import pyarrow as pa

    from stages.document import Document


class StageConfig(BaseModel):
    """Base of every stage's config: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def decision(default: Any, help: str, **kw: Any) -> Any:
    """A threshold: it changes what `verdict` says, not what is computed. Changing it replays verdicts from the stored
    signals; only documents about which it says something new are computed again."""
    return Field(default, description=help, json_schema_extra={"role": "decision"}, **kw)


def signal(default: Any, help: str, **kw: Any) -> Any:
    """A setting that changes what is computed (the default role)."""
    return Field(default, description=help, json_schema_extra={"role": "signal"}, **kw)


def resource(default: Any, help: str, **kw: Any) -> Any:
    """A path of a file (model, list) or of a folder, or a mapping name → path. Its sha256 enters the key, its name does
    not."""
    return Field(default, description=help, json_schema_extra={"role": "resource"}, **kw)


def role_of(config: type[BaseModel], field: str) -> str:
    extra = config.model_fields[field].json_schema_extra
    return str(extra.get("role", "signal")) if isinstance(extra, dict) else "signal"


#: bytes that `Stage.cost_ms` is said of
SAMPLE_BYTES = 5000


class SettingsError(ValueError):
    """A setting does not fit the input or the machine. The message says file, key and remedy, and nothing else is
    shown. `permanent` tells the engine that no other attempt can succeed; errors of other packages have it, too."""

    permanent = True


class ProcessDied(Exception):
    """A process that a stage started for a document died of the signal `-returncode`, as subprocess has it. The engine
    takes it as the death of its own worker: the document is run alone before it is quarantined, and none is where the
    signal came from outside."""

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode


class Stage:
    """One step of a recipe. Subclasses set the class attributes and `process` (or `process_batch`).

    Those that are no ClassVar an instance may set in `__init__`, where they depend on its config.
    """

    name: ClassVar[str]
    version: int = 1
    #: signals it writes into `doc.signals` (float); the Parquet schema of a dataset is their union over its chain
    signals: tuple[str, ...] = ()
    #: those of them whose distribution the report shows, over every document the stage has seen: what a threshold is
    #: chosen by. None: all those of a numeric stage, none of another's
    scores: ClassVar[tuple[str, ...] | None] = None
    #: False for anything whose numbers depend on BLAS, libm or threads (fastText, OCR, transformers).
    #: A numeric stage rounds its scores to `grid` before the verdict and stores them; the pass ends after it.
    exact: bool = True
    grid: ClassVar[float] = 1e-4
    #: distributions whose version enters the key
    libraries: tuple[str, ...] = ()
    #: True: `process_batch` is called with lists of documents instead of `process`
    batched: ClassVar[bool] = False
    #: True for stages that remove personal data; a dedup's `prepare` stage is placed before the first of them
    scrubs: bool = False
    #: True when the stage reads `doc.raw` (bytes) and makes `doc.text`
    extracts: bool = False
    #: the reader of the files that `tokenmill extract --as` knows by the name of this step; "": there are none
    read_by: ClassVar[str] = ""
    #: False when it looks at no text, so that it may come before the step that makes it
    reads_text: ClassVar[bool] = True
    #: its kind as `tokenmill steps` shows it; "": derived from the other attributes
    does: ClassVar[str] = ""
    #: True when it sets `doc.language`: what earlier steps decided by it cannot be replayed from the stored one
    sets_language: ClassVar[bool] = False
    #: columns of the side table this stage fills by `doc.side[name] = {column: value}`; None = no side table
    side: pa.Schema | None = None
    #: CPU milliseconds for 5 kB of what it reads, on one core (benchmarks/step_costs.py). A plan reckons with it until
    #: the store has measured its own; the order of steps is judged by ratios of it. None: not known
    cost_ms: ClassVar[float | None] = None
    #: bytes of text it leaves per byte that reaches it, of a usual crawl
    leaves: ClassVar[float] = 1.0
    #: True when it drops documents that other steps would have to work on
    drops: ClassVar[bool] = False
    #: True when it changes texts that it keeps: what follows sees others
    edits: ClassVar[bool] = False
    #: languages its rules are made for; (): any
    made_for: ClassVar[tuple[str, ...]] = ()
    #: the setting that lists the languages it keeps; "": it looks at none
    keeps: ClassVar[str] = ""
    #: what one child process needs while this stage is loaded
    memory_mb: int = 300
    gpus: float = 0.0
    #: after `setup` a worker opens no sockets, starts no programs but `programs()`, writes to its scratch folder alone
    #: and never has credentials. False: a stage of one's own needs more; the plan and the run then say so
    confined: ClassVar[bool] = True

    Config: ClassVar[type[StageConfig]] = StageConfig

    def __init__(self, config: Any = None, **kw: Any) -> None:
        if config is None or isinstance(config, dict):
            config = self.Config(**{**(config or {}), **kw})
        self.config: Any = config

    def setup(self) -> None:
        """Load models. Called once in each worker before its first document; a failure is never blamed on one."""

    def process(self, doc: Document) -> str | None:
        """Look at one document: None keeps it, a snake_case reason drops it."""
        raise NotImplementedError(f"{type(self).__name__} defines neither process nor process_batch")

    def process_batch(self, docs: list[Document]) -> list[str | None]:
        """Batched form: one verdict a document, in order."""
        return [self.process(doc) for doc in docs]

    def verdict(self, doc: Document) -> str | None:
        """The part of the decision that thresholds take part in: None or a reason, from `doc.signals`, `doc.language`
        and `doc.source` alone. They are all that is there when verdicts are replayed: no text, and no signal that
        `process` did not write and `reads` does not name. With the same answer under other thresholds `process` must
        do the same.

        A stage without it (NotImplementedError) is run again when a threshold changes.
        """
        raise NotImplementedError

    def reads(self) -> dict[str, str]:
        """Signals of earlier steps that it needs, {signal: the field of its config that names it}, and "language" when
        its verdict rests on `doc.language`. A recipe in which no earlier step writes such a signal is refused."""
        return {}

    def forget(self, doc: Document) -> None:
        """Take out what a dataset before has stored under the names of its signals: for stages that do not write all of
        them for every document."""
        for name in self.signals:
            doc.signals.pop(name, None)

    @classmethod
    def may_drop(cls, config: Mapping[str, Any]) -> bool:
        """Whether it drops documents with these settings that steps before it would have worked on for nothing."""
        return cls.drops

    def programs(self) -> tuple[str, ...]:
        """Programs it starts for documents, by name or path: a worker starts no others. Asked after `setup`."""
        return ()

    def scored(self) -> tuple[str, ...]:
        """`scores`, with what None stands for."""
        return self.scores if self.scores is not None else () if self.exact else self.signals

    def counts(self, doc: Document) -> dict[str, Any] | None:
        """Further figures for the report about a document that has been through this stage, kept or dropped: nested
        dicts of numbers that add up over documents. From its signals and meta alone, as they are stored."""
        return None

    # -- resources -----------------------------------------------------------------------------------------------
    def resource_files(self) -> dict[str, str]:
        """The files it reads, {field of its config: path}: those the config names, and those it takes by itself where
        the config says nothing. A worker checks that its own are the driver's. Raises what finding them raises."""
        result: dict[str, str] = {}
        for field, value in self.config.model_dump(mode="json").items():
            if value and role_of(type(self.config), field) == "resource":
                named = {f"{field}.{name}": path for name, path in value.items()} if isinstance(value, dict) else {}
                result.update(named or {field: value})
        return result

    def problems(self) -> dict[str, str]:
        """Settings that do not fit what is in its resource files, {field: what is wrong and what to do}. Asked while a
        recipe is checked; a file that is absent, or too big to be read, is not checked."""
        return {}

    def warnings(self) -> list[str]:
        """What a person should hear before a run with these settings here, each with its remedy; the run goes on."""
        return []

    # -- keys ----------------------------------------------------------------------------------------------------
    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        """32 hex characters over everything that decides about this stage's output (restricted to `roles`)."""
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
        """A score of a numeric stage on its declared grid."""
        return round(round(score / self.grid) * self.grid, 10)


def file_sha256(path: str | Path) -> str:
    """sha256 of a file, 64 hex characters; of a folder: that of the names and hashes of the files in it and below,
    without those that begin with a dot."""
    if Path(path).is_dir():
        h = hashlib.sha256()
        inside = ((p.relative_to(path).as_posix(), p) for p in Path(path).rglob("*") if p.is_file())
        for name, file in sorted((name, p) for name, p in inside if not f"/{name}".count("/.")):
            h.update(f"{name}\0{file_sha256(file)}\n".encode("utf-8", "surrogateescape"))
        return h.hexdigest()
    return sha256(path)


def library_versions(names: tuple[str, ...]) -> dict[str, str]:
    return {name: metadata.version(name) for name in sorted(names)}


def python_version() -> str:
    """Major and minor version, e.g. '3.11': its Unicode tables decide what is a letter, a digit or a space."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def cpu_tag() -> str:
    """Instruction-set family that numeric results may depend on, e.g. 'x86_64-avx512'."""
    import platform

    machine, flags = platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                flags = line
                break
    except OSError:
        pass
    level = "avx512" if " avx512f" in flags else "avx2" if " avx2" in flags else "base"
    return f"{machine}-{level}"
