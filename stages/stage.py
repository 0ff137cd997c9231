"""Defines Stage, the base class of steps: a small class with a typed config that reads a document (or a batch) and
decides whether to keep or drop it.

This filter is an example::

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
`doc.language` … If `process` raises an exception, the document is quarantined, and the run goes on. For a full disk, a
missing library and other faults of the machine, the task fails instead.

A stage has a key, which is a hash. Stored results are reused while the key stays the same. The key covers the stage's
name, version and config, the sha256 of its resource files, and the versions of Python and of the libraries that the
stage declares. For a numeric stage (`exact` is False), whose results may differ between machines, the key also covers
the kind of CPU. Every config field has a role: `signal` (the field changes what is computed), `decision` (it changes
only the verdict, which is derived from stored signals) or `resource` (it is the path of a file or folder, whose content
enters the key).
"""

from __future__ import annotations

import hashlib
import json
import operator
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from pipeline.base.files import file_sha256
from pipeline.base.machine import cpu_tag
from pipeline.base.process import ProcessDied as ProcessDied

if TYPE_CHECKING:
    import pyarrow as pa

    from stages.document import Document


#: the name of a signal, or several names
Names = str | tuple[str, ...]


#: for each side of a limit, what holds for (value of a document, limit) if the document is kept
COMPARE: dict[str, Callable[[Any, Any], Any]] = {"min": operator.ge, "max": operator.le,
                                                "above": operator.gt, "below": operator.lt}


class Bound(NamedTuple):
    """A limit that a stage sets on a signal (a number that it computes for each document). The field `side` says how
    the signal of a kept document compares with `value`: at least ("min"), at most ("max"), more than ("above") or less
    than ("below"). A document that lacks the signal may be kept, too. `key` is the config field that sets the limit;
    names of nested fields are joined with dots."""

    signal: str
    key: str
    side: Literal["min", "max", "above", "below"]
    value: float

    def holds(self, value: float) -> bool:
        return bool(COMPARE[self.side](value, self.value))


class StageConfig(BaseModel):
    """Base class of the configs of stages. Unknown keys are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def is_accepted(config: StageConfig, key: str, value: float) -> bool:
    """Return whether the config of a stage stays valid if the field `key` gets `value` and all other settings of
    `config` are kept. `key` is written as in `Bound.key`."""
    settings = config.model_dump()
    first, dot, rest = key.partition(".")
    # the key of a nested field is FIELD.NAME.FIELD, and NAME may contain dots
    inner, last = (settings[first][rest.rpartition(".")[0]], rest.rpartition(".")[2]) if dot else (settings, key)
    inner[last] = value
    try:
        type(config).model_validate(settings)
    except ValueError:
        return False
    return True


def decision(default: Any, help: str, *, at_least: Names = (), at_most: Names = (), added: bool = False,
             **kw: Any) -> Any:
    """Declare a config field that is a threshold: it changes the verdict (keep or drop), but not the signals, which are
    the numbers that the stage computes. After a change of the field, verdicts are derived again from the stored
    signals, and only documents whose verdict changes are processed again.

    `at_least` names signals: a document is dropped if one of them is below the value of the field. `at_most` names
    signals of which none may exceed the value. Reports draw the value into the histogram of the signal
    (`Stage.bounds`). `signal` explains `added`.
    """
    at_least, at_most = ((names,) if isinstance(names, str) else names for names in (at_least, at_most))
    return Field(default, description=help, **kw, json_schema_extra={
        "role": "decision", "at_least": list(at_least), "at_most": list(at_most), "added": added})


def signal(default: Any, help: str, *, added: bool = False, **kw: Any) -> Any:
    """Declare a config field that changes what a stage computes, so that a change of the field runs the stage again.
    Fields that declare no role have this role.

    `added` says that the field was added to a stage that may already have stored results. As long as such a field has
    its default, it does not enter the stage's key, so that these results are reused.
    """
    return Field(default, description=help, json_schema_extra={"role": "signal", "added": added}, **kw)


def resource(default: Any, help: str, *, added: bool = False, **kw: Any) -> Any:
    """Declare a config field that holds the path of a file (a model, a list) or folder, or a mapping of names to paths.
    The stage's key, by which stored results are reused, covers the sha256 of the content but not the path. `signal`
    explains `added`."""
    return Field(default, description=help, json_schema_extra={"role": "resource", "added": added}, **kw)


def role_of(config: type[BaseModel], field: str) -> str:
    extra = config.model_fields[field].json_schema_extra
    return str(extra.get("role", "signal")) if isinstance(extra, dict) else "signal"


def resource_files(config: BaseModel) -> dict[str, str]:
    """Return the files that the `resource` fields of a config name, as {config field: path}. The config is that of a
    stage or reader. A field that maps names to paths gives an item 'field.name' for each of these paths."""
    result: dict[str, str] = {}
    for field, value in config.model_dump(mode="json").items():
        if value and role_of(type(config), field) == "resource":
            named = {f"{field}.{name}": path for name, path in value.items()} if isinstance(value, dict) else {}
            result.update(named or {field: value})
    return result


#: bytes of input that `Stage.cost_ms` refers to
SAMPLE_BYTES = 5000


def keyed_settings(config: StageConfig) -> dict[str, Any]:
    """Return those settings of a stage that enter its key (the hash by which stored results are found), as JSON values.
    These are all settings but the fields declared with `added` that have their default."""
    fields = type(config).model_fields
    added = {name for name, about in fields.items()
             if isinstance(about.json_schema_extra, dict) and about.json_schema_extra.get("added")}
    return {name: value for name, value in config.model_dump(mode="json").items()
            if name not in added or getattr(config, name) != fields[name].default}


class SettingsError(ValueError):
    """Raised when a setting does not fit the input or the machine. The message names the file, the key and the remedy,
    and is shown without a traceback. The attribute `permanent` tells the engine not to retry the task, because a retry
    cannot succeed. Error classes of other packages may set `permanent`, too."""

    permanent = True


class Stage:
    """One step of a recipe. Subclasses set the class attributes and `process` (or `process_batch`).

    Attributes that are not declared ClassVar may depend on the config. In that case, the `__init__` of the subclass
    sets them on the instance.
    """

    name: ClassVar[str]
    version: int = 1
    #: signals written into `doc.signals` (float); the Parquet schema of a dataset has those of all its steps
    signals: tuple[str, ...] = ()
    #: signals whose distribution the report shows, over all documents that the stage has seen, to help choose
    #: thresholds. None: all signals of a numeric stage, none of an exact one. Signals that a setting bounds
    #: (`at_least`, `at_most`) are shown in any case
    scores: ClassVar[tuple[str, ...] | None] = None
    #: False for a numeric stage: its scores depend on BLAS, libm or threads (fastText, OCR, transformers). Such a stage
    #: rounds its scores to multiples of `grid` before the verdict and stores them. It is the last stage of its pass.
    exact: bool = True
    grid: ClassVar[float] = 1e-4
    #: distributions whose versions enter the key
    libraries: tuple[str, ...] = ()
    #: True: `process_batch` is called with lists of documents, not `process`
    batched: ClassVar[bool] = False
    #: True for stages that remove personal data. The `prepare` stage of a deduplication, which hashes texts, is placed
    #: before the first of them
    scrubs: bool = False
    #: True when the stage reads `doc.raw` (bytes) and makes `doc.text`
    extracts: bool = False
    #: the reader for files that `tokenmill extract --as` accepts under the name of this step; "": no such files
    read_by: ClassVar[str] = ""
    #: False when the stage does not read the text; a recipe may then list it before the step that makes the text
    reads_text: ClassVar[bool] = True
    #: the kind of stage that `tokenmill steps` shows; "": derived from the other attributes
    does: ClassVar[str] = ""
    #: True when the stage sets `doc.language`. Earlier steps then saw another language than the stored one, so their
    #: verdicts by language cannot be derived from stored documents
    sets_language: ClassVar[bool] = False
    #: False when `process` may write all signals of a document and still drop it for a reason that `verdict` cannot
    #: find in the signals, such as an address on a list. A verdict of None then does not mean that the document is kept
    verdict_is_whole: ClassVar[bool] = True
    #: columns of the side table this stage fills by `doc.side[name] = {column: value}`; None: no side table
    side: pa.Schema | None = None
    #: CPU milliseconds for 5 kB of input on one core, as benchmarks/step_costs.py measures them. Plans use the value
    #: until the store holds measurements of real runs. Lint compares the values of steps to judge their order. None:
    #: unknown
    cost_ms: ClassVar[float | None] = None
    #: bytes of text that the stage keeps per byte of its input, for a usual crawl
    leaves: ClassVar[float] = 1.0
    #: True when the stage drops documents, which saves later steps work; False also when it drops only a few, such as
    #: those whose text it empties
    drops: ClassVar[bool] = False
    #: True when the stage changes the text of documents that it keeps, so that later steps see another text
    edits: ClassVar[bool] = False
    #: languages for which the stage's rules are made; (): any language
    made_for: ClassVar[tuple[str, ...]] = ()
    #: the setting that lists the languages whose documents the stage keeps; "": it has no such setting
    keeps: ClassVar[str] = ""
    #: memory of one child process while this stage is loaded, MB
    memory_mb: int = 300
    gpus: float = 0.0
    #: True: after `setup`, the worker process can open no sockets, start no programs except those of `programs()` and
    #: write only to its scratch folder; it has no credentials. Set it to False for a stage of your own that needs more
    #: rights. Plan and run then print that the stage is not confined.
    confined: ClassVar[bool] = True

    Config: ClassVar[type[StageConfig]] = StageConfig

    def __init__(self, config: Any = None, **kw: Any) -> None:
        if config is None or isinstance(config, dict):
            config = self.Config(**{**(config or {}), **kw})
        self.config: Any = config

    def setup(self) -> None:
        """Load models and other resources. The method is called once in each worker before the first document, so that
        a failure to load is never attributed to a document."""

    def process(self, doc: Document) -> str | None:
        """Decide about one document: return None to keep it, or a reason (snake_case) to drop it. The method may also
        change the document."""
        raise NotImplementedError(f"{type(self).__name__} defines neither process nor process_batch")

    def process_batch(self, docs: list[Document]) -> list[str | None]:
        """Decide about a batch of documents: return one verdict per document, in order. A verdict is None (keep) or a
        reason to drop the document."""
        return [self.process(doc) for doc in docs]

    def verdict(self, doc: Document) -> str | None:
        """Return the verdict on a document that follows from its stored signals and the thresholds: None to keep the
        document, or a reason to drop it.

        When a threshold changes, this method is called on stored documents without their text. It may use only
        `doc.language`, `doc.source` and the signals that `process` writes or `reads` names. If the verdict is the same
        under the old and the new thresholds, the stored result is reused and `process` is not called. So whenever the
        verdict is the same, `process` must give the same result under the old and the new thresholds.

        If a stage does not define this method (it then raises NotImplementedError), the whole stage runs again when a
        threshold changes.
        """
        raise NotImplementedError

    def bounds(self) -> list[Bound]:
        """Return the limits that the stage's settings set on signals (numbers per document), in the order of the
        config's fields. A field whose value is not a single number (null, or a number for each language) sets no
        limit."""
        out: list[Bound] = []
        for field, about in type(self.config).model_fields.items():
            value, extra = getattr(self.config, field), about.json_schema_extra
            if isinstance(value, (int, float)) and not isinstance(value, bool) and isinstance(extra, dict):
                sides: tuple[tuple[Literal["min", "max"], Any], ...] = (("min", extra.get("at_least")),
                                                                        ("max", extra.get("at_most")))
                out += [Bound(name, field, side, float(value)) for side, names in sides for name in names or ()]
        return out

    def matches(self, doc: Document, reason: str) -> list[tuple[int, int]]:
        """Return the places in a dropped text that show why it was dropped, in order, as (first character, one past the
        last). Reports mark these places in examples. `doc` holds only the language and the beginning of the stored
        text, from which personal data has been removed. The method `setup` has not been called before. The list is
        empty if no single place in the text is the reason."""
        return []

    def url_matches(self, url: str, reason: str) -> list[tuple[int, int]]:
        """Return the places in the URL of a dropped document that show why it was dropped, as `matches` does for the
        text. Personal data has been removed from `url`."""
        return []

    def reads(self) -> dict[str, str]:
        """Return the signals (numbers per document) of earlier steps that this stage needs, as {signal: config field
        that names it}. The result also has the key "language" if the verdict uses `doc.language`. A recipe is refused
        if one of these signals is written by no earlier step."""
        return {}

    def forget(self, doc: Document) -> None:
        """Remove the stage's signals (numbers per document) from a document. The document may have old values of these
        signals, from an earlier dataset whose steps included this stage. A stage that does not write all its signals
        for every document calls this method first, so that no old value remains."""
        for name in self.signals:
            doc.signals.pop(name, None)

    @classmethod
    def may_drop(cls, config: Mapping[str, Any]) -> bool:
        """Return whether the stage may drop documents under the settings `config`. Lint uses the answer to judge the
        order of steps, because the work of earlier steps on dropped documents is wasted."""
        return cls.drops

    def programs(self) -> tuple[str, ...]:
        """Return the external programs, by name or path, that the stage starts while it processes documents. The worker
        process can start no other programs. The method is called after `setup`."""
        return ()

    def scored(self) -> tuple[str, ...]:
        """Return the names of those signals (numbers per document) whose distribution the report shows. These are the
        signals in the attribute `scores`, if it is not None. Otherwise they are all signals of a numeric stage (`exact`
        is False), and no signals of an exact stage."""
        return self.scores if self.scores is not None else () if self.exact else self.signals

    def counts(self, doc: Document) -> dict[str, Any] | None:
        """Return additional numbers about one document for the report, or None. The numbers are in nested dicts and are
        summed over all documents that the stage kept or dropped. They must be computed only from the document's stored
        signals and meta."""
        return None

    # -- resources -----------------------------------------------------------------------------------------------
    def resource_files(self) -> dict[str, str]:
        """Return the resource files (models, lists) that the stage reads, as {config field: path}. A stage that has
        default files overrides this method to add them. A worker checks that these files have the same content on its
        machine as on the driver's (the process that planned the run). If a file cannot be found, the error of the
        search is raised."""
        return resource_files(self.config)

    def problems(self) -> dict[str, str]:
        """Return the settings that do not fit the contents of the stage's resource files, as {field: what is wrong and
        what to do}. The method is called when a recipe is checked. Files that are missing, or too big to be read in
        this check, are ignored."""
        return {}

    def warnings(self) -> list[str]:
        """Return warnings about the stage's settings on this machine. Each names a remedy. Warnings are shown before a
        run and do not prevent it."""
        return []

    def facts(self) -> list[str]:
        """Return facts that follow from the stage's settings and help a user to choose the settings. `tokenmill plan`
        shows each fact as a line."""
        return []

    # -- keys ----------------------------------------------------------------------------------------------------
    def key(self, roles: tuple[str, ...] = ("signal", "decision", "resource")) -> str:
        """Return the stage's key: a hash (32 hex characters) of everything that affects the stage's output. Of the
        config, only fields whose role is in `roles` enter it."""
        fields: dict[str, Any] = {}
        for field, value in keyed_settings(self.config).items():
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
        """Return a score rounded to a multiple of `grid`. Numeric stages, whose scores may differ slightly between
        machines, use this method before they decide by a score, so that all machines decide alike."""
        return round(round(score / self.grid) * self.grid, 10)


def library_versions(names: tuple[str, ...]) -> dict[str, str]:
    return {name: metadata.version(name) for name in sorted(names)}


def python_version() -> str:
    """Return the major and minor version of Python, e.g. '3.11'. Results may depend on the version, because Python's
    Unicode tables decide which characters are letters, digits or spaces."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
