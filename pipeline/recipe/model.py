"""The structure of a recipe, as pydantic models. `pipeline.recipe.check` checks what these models cannot: names, the
settings of steps, and that no dataset is made from itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    StrictBool,
    TypeAdapter,
    field_validator,
    model_validator,
)

from pipeline.base.files import file_sha256
from pipeline.base.quantities import parse_bytes, parse_count, parse_share, parse_weight, percent
from pipeline.recipe.errors import KeyPath, Mark
from pipeline.recipe.marks import Marks, dump_yaml
from pipeline.recipe.phase_values import check_rate, check_rope_scaling, parse_batch, parse_until
from tokenizer.byte_level import EOS
from tokenizer.special import special_tokens


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def checked_name(value: str) -> str:
    """Return the name of a dataset or stream. Raises ValueError when it cannot be the name of a folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError(f"'{value}' is not a name; names become folders: at most 64 letters, digits, '_', '-', '.', "
                         "beginning with a letter or digit")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _step(value: Any) -> Any:
    """Turn a step of a recipe into {"name", "config"}. In the recipe a step is a name, or a mapping whose one key is
    the name: `url`, `{language: {keep: [en]}}`, `{pii: }`."""
    if isinstance(value, Step):
        return value
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and len(value) == 1:
        [(name, config)] = value.items()
        if config is None or isinstance(config, dict):
            return {"name": name, "config": config or {}}
        raise ValueError(f"the settings of '{name}' must be a mapping, e.g. {name}: {{key: value}}; got {config!r}")
    if isinstance(value, dict) and len(value) > 1:
        raise ValueError(f"a step has one name, this has {len(value)} ({', '.join(map(str, value))}); indent the "
                         "settings of a step below its name, and begin every step with '- '")
    raise ValueError(f"a step is a name, or a name with settings such as 'language: {{min: 0.65}}'; got {value!r}")


def _empty(value: Any) -> Any:
    """Turn None into {}, so that a key of a recipe without a value counts as left out."""
    return {} if value is None else value


Count = Annotated[int, BeforeValidator(parse_count)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Share = Annotated[float, BeforeValidator(parse_share), PlainSerializer(percent)]
Weight = Annotated[int | float, BeforeValidator(parse_weight)]
Name = Annotated[str, AfterValidator(checked_name)]
Names = Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]
#: column → value or values a document must have
Where = Annotated[dict[Literal["source", "language"], Names], BeforeValidator(_empty)]
Settings = Annotated[dict[str, Any], BeforeValidator(_empty)]


class Source(Model):
    """A named set of input files, and the reader that turns them into documents. Keys of a source in the recipe that
    are no fields of this class are settings of the reader; they are moved into `config`.

    `path`: file, folder, glob or URL, or a list of them, relative to the recipe file. `root`: the folder to which the
    paths in document identities are relative (default: the folder before the first wildcard). `follow_symlinks`: also
    follow links that lead out of the folders in `path`.
    """

    read: str
    path: Names
    root: str | None = None
    follow_symlinks: StrictBool = False
    config: Settings = {}


class Step(Model):
    """One entry of `steps:` in a recipe: the name of a stage (the code of the step), and its settings. The stage's own
    class `Config` validates the settings."""

    name: str
    config: Settings = {}


class Dataset(Model):
    """A dataset of a recipe: the documents of `inputs` (sources or other datasets; the key is `from:`) after they went
    through `steps`.

    `where` selects documents before the first step. `priority` is a list of inputs: of two duplicates, the document of
    the input listed first is kept. Inputs that are not in the list come last, in the order of `from`.
    """

    inputs: Names = Field(alias="from")
    steps: list[Annotated[Step, BeforeValidator(_step)]] = []
    priority: list[str] = []
    where: Where = {}


class TokenizerSample(Model):
    """How much text of which groups a tokenizer is trained on: `bytes` in all. The columns in `by` say which documents
    are a group. The share of a group in the sample is in proportion to its weight × (its bytes)^`alpha`.

    `source` and `language` give weights by the names of sources and languages; the weight of a group is their product.
    Documents of sources or languages that the mapping does not list are not in the sample. Columns with weights need
    not be listed in `by`. `alpha` is 0 by default: without weights, all groups then have the same share; with 1, each
    has its share of the dataset. If a group has less text than its share, the other groups get the rest."""

    bytes: Bytes
    by: Annotated[list[Literal["source", "language"]], BeforeValidator(_listed)] | None = None
    source: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    language: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _grouped(self) -> TokenizerSample:
        if not self.by and self.source is None and self.language is None:
            raise ValueError("nothing says what the groups are: give `by: language`, or weights under `source:` or "
                             "`language:`; for a sample without groups, give the number of bytes alone")
        if any(weights is not None and not any(weights.values()) for weights in (self.source, self.language)):
            raise ValueError("all weights are 0; give at least one a higher weight")
        return self


class SpecialTokens(Model):
    """Special tokens that a new tokenizer gets beside its end-of-text token. `fim`: four tokens for fill-in-the-middle.
    `chat`: the tokens of a template for dialogues. `tokens`: names of further tokens. `reserved`: how many tokens
    without a meaning are kept for later."""

    fim: StrictBool = False
    chat: Literal["chatml", "llama3"] | None = None
    tokens: Annotated[list[str], BeforeValidator(_listed)] = []
    reserved: Annotated[int, Field(ge=0, le=65_536)] = 0

    @model_validator(mode="after")
    def _names(self) -> SpecialTokens:
        special_tokens(self.model_dump(), EOS)
        return self


def _sample(value: Any) -> Any:
    """Parse the `sample` of a tokenizer: a number of bytes, or a mapping that weighs groups of documents."""
    return TokenizerSample.model_validate(value) if isinstance(value, dict) else parse_bytes(value)


class TokenizerTrain(Model):
    """Settings for the training of a tokenizer: byte-level BPE or SentencePiece (`model: unigram | bpe`), with `vocab`
    tokens, on a `sample` of the text of `inputs` (the key is `from:`): at most so many bytes, or a TokenizerSample.

    `digits`: whether each digit of a number is encoded alone (single, the default of SentencePiece and all it can do),
    or groups of three, counted from the first digit (left3, the default of BPE) or from the last (right3).
    `space_runs`: every run of 2 to so many spaces has a token of its own. `special`: further special tokens."""

    kind: Literal["bpe", "sentencepiece"] = "bpe"
    model: Literal["unigram", "bpe"] = "unigram"
    vocab: Count
    inputs: Names = Field(alias="from")
    where: Where = {}
    sample: Annotated[TokenizerSample | int, BeforeValidator(_sample)] = 1_000_000_000
    digits: Literal["single", "left3", "right3"] | None = None
    space_runs: Annotated[int, Field(ge=2, le=256)] | None = None
    special: SpecialTokens | None = None

    @model_validator(mode="after")
    def _digits(self) -> TokenizerTrain:
        if self.kind == "sentencepiece" and self.digits in ("left3", "right3"):
            raise ValueError(f"`digits: {self.digits}` needs `kind: bpe`; SentencePiece splits numbers into single "
                             f"digits alone")
        return self

    @field_validator("vocab")
    @classmethod
    def _vocab(cls, value: int) -> int:
        if not 257 <= value <= 1 << 24:
            raise ValueError(f"a vocabulary of {value:,} is outside 257 … 16,777,216 (256 bytes and end-of-text)")
        return value


class Tokenizer(Model):
    """The tokenizer of a recipe. `kind: bytes` is the tokenizer whose tokens are the bytes of UTF-8. `train:` trains a
    new tokenizer. `load:` names a tokenizer.json, a SentencePiece .model, a folder that holds one of these files, a
    .tiktoken file, or a tokenizer on the Hugging Face hub. `pattern` is the pattern by which a .tiktoken file splits
    text: cl100k, o200k, p50k, r50k or a regular expression. `eos` is the end-of-text token; it is needed when the
    tokenizer's files do not name this token."""

    kind: Literal["bytes"] | None = None
    train: TokenizerTrain | None = None
    load: str | None = None
    pattern: str | None = None
    eos: str | None = None


class Shards(Model):
    """The token files (shards) of one stream. They hold the documents of the datasets in `inputs` (the key is `from:`)
    that match `where`. `longest` is the length in tokens of a super-window (the unit in which a phase of the training
    reserves tokens); it is a multiple of every sequence length used. `val` is the share of documents held out for
    evaluation."""

    inputs: Names = Field(alias="from")
    where: Where = {}
    longest: Count
    val: Share = 0.005


def _streams(value: Any) -> Any:
    """Parse the streams of a group: a mapping that gives their weights, or a list of their names."""
    return value if isinstance(value, list) else _GROUP_WEIGHTS.validate_python(value)


_GROUP_WEIGHTS = TypeAdapter(dict[str, Weight])


class StreamGroup(Model):
    """Several streams (sets of token files) of a phase that together get the weight `share`. `streams` is either a
    mapping from each stream to its weight within the group, or a list of streams.

    For a list, the weights follow from the streams' numbers of tokens: they are in proportion to tokens^`alpha`
    (default 1). With `unimax`, they are equal instead, but no stream is read more than `unimax` times in the phase.
    """

    share: Weight
    streams: Annotated[dict[str, Weight] | list[str], BeforeValidator(_streams), Field(min_length=1)]
    alpha: Annotated[float, Field(ge=0)] | None = None
    unimax: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_rule(self) -> StreamGroup:
        if isinstance(self.streams, dict) + (self.alpha is not None) + (self.unimax is not None) > 1:
            raise ValueError("the weights come from a mapping of streams, from `alpha` or from `unimax`: give one of "
                             "them, the last two with a list of streams")
        return self

    @property
    def mixed(self) -> set[str]:
        """Return the names of the streams that have a weight above 0."""
        weights = self.streams if isinstance(self.streams, dict) else dict.fromkeys(self.streams, 1)
        return {stream for stream, weight in weights.items() if weight and self.share}


def _mixed(value: Any) -> Any:
    """Parse the weight of one entry of a `mix`: a number, or a mapping that describes a group of streams."""
    return StreamGroup.model_validate(value) if isinstance(value, dict) else parse_weight(value)


class Phase(Model):
    """A phase of the curriculum (the plan of a training), as written in the recipe. A field that is None is inherited
    from the phase before, except `until`, `extra`, `reset_optimizer`, and an `lr` that is a curve.

    `until`: where the phase ends, as a share of the total such as '70%' or as a token count. `extra`, instead of
    `until`: how many tokens the phase has beyond the total. `sequence`: tokens of a window. `batch`: tokens of a
    training step; with a mapping, the number changes during the phase. `mix`: the weight of each stream in `shards:`,
    or of a group of streams. `max_epochs`: how often each stream may be read. `on_exhausted`: whether reading a stream
    more often is an error or is allowed. `lr`: how the learning rate behaves in this phase (stable, constant or decay),
    or a mapping that describes a curve for this phase alone. `reset_optimizer`: whether the optimizer's moments start
    at zero. `rope_theta` and `rope_scaling`: as in `train.model`, from this phase on.
    """

    name: Name
    until: Annotated[str | int, BeforeValidator(parse_until)] | None = None
    extra: Count | None = None
    sequence: Count | None = None
    batch: Annotated[int | dict[int, int], BeforeValidator(parse_batch)] | None = None
    mix: Annotated[dict[str, Annotated[StreamGroup | int | float, BeforeValidator(_mixed)]],
                   Field(min_length=1)] | None = None
    max_epochs: dict[str, Weight] | None = None
    lr: Annotated[Any, BeforeValidator(check_rate)] = None
    on_exhausted: Literal["error", "repeat"] | None = None
    reset_optimizer: StrictBool | None = None
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    rope_scaling: Annotated[dict[str, Any], BeforeValidator(check_rope_scaling)] | None = None

    @property
    def mixed(self) -> set[str]:
        """Return the names of the streams to which `mix` gives a weight above 0."""
        return {stream for name, weight in (self.mix or {}).items()
                for stream in (weight.mixed if isinstance(weight, StreamGroup) else {name} if weight else ())}


class Curriculum(Model):
    """The phases of a training, and the `total` number of its tokens. All token counts count the tokens to predict, so
    n windows of length L count as n × L tokens. `tokenizer.mixture` computes curriculum.json from the curriculum."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    total: Count
    phases: Annotated[list[Phase], Field(min_length=1)]


def _files(value: Any) -> int | float:
    """Parse a number of files such as '20', or a share of all files such as '1%'."""
    return parse_share(value) if isinstance(value, str) and value.strip().endswith("%") else parse_count(value, least=0)


class Run(Model):
    """Settings for how a recipe is run. They do not change which documents are kept, nor their texts.

    `partition`: uncompressed bytes per partition (the input of one task). `signals`: which signals (numbers that steps
    store beside a text) are computed for a dropped document: `until-drop` computes those of the steps up to the one
    that drops it, `all` those of all steps. `max_error_rate`: the share of documents that may fail in one pass before
    the run fails (ten may always fail). `max_bad_files`: how many input files may be unreadable, whole or in part,
    before the run fails: a number, or a share of the input files (but at least ten).
    """

    partition: Bytes = 32_000_000
    signals: Literal["until-drop", "all"] = "until-drop"
    max_error_rate: Share = 0.01
    max_bad_files: Annotated[int | float, BeforeValidator(_files),
                             PlainSerializer(lambda n: n if isinstance(n, int) else percent(n))] = 0.01


class About(Model):
    """The description of a ready recipe (one that comes with Tokenmill), by which a corpus made with the recipe can be
    cited: its `name`, its `version`, a one-line `title`, and the papers and code it follows (`after`). The version is
    raised whenever a change to the recipe changes the documents it makes."""

    name: Name
    version: Annotated[int, Field(ge=1)]
    title: str
    after: Names


class Recipe(Model):
    """A whole recipe file. `input` names the source whose path `--input` gives. `code` lists the Python files of the
    user's own stages. `wants` lists values that must be given with `--set`: {key: what the value is and how to get it}.

    `pipeline.recipe.load_recipe` returns a recipe in which the settings of readers and steps are completed by their
    defaults. It also sets `name`, `base` (the folder at which relative paths start) and `warnings`.
    """

    version: Literal[1]
    about: About | None = None
    input: str | None = None
    wants: dict[str, str] | None = None
    code: Annotated[list[str], BeforeValidator(_listed)] = []
    sources: Annotated[dict[Name, Source], Field(min_length=1)]
    datasets: Annotated[dict[Name, Dataset], Field(min_length=1)]
    tokenizer: Tokenizer | None = None
    shards: Annotated[dict[Name, Shards], BeforeValidator(_empty)] = {}
    curriculum: Curriculum | None = None
    train: Settings = {}
    run: Annotated[Run, BeforeValidator(_empty)] = Run()

    _name: str = PrivateAttr("recipe")
    _base: str = PrivateAttr(".")
    _warnings: list[str] = PrivateAttr(default_factory=list)
    _marks: Marks | None = PrivateAttr(None)
    _kept_at: str = PrivateAttr("")
    _pinned: str = PrivateAttr("")

    @property
    def name(self) -> str:
        return self._name

    @property
    def base(self) -> str:
        return self._base

    @property
    def warnings(self) -> list[str]:
        return self._warnings

    def came_from(self, name: str, base: str) -> None:
        """Set the name and folder of the original recipe file. This is for a recipe that was read from the recipe.yaml
        of a run. With this name and folder, it has the same digest as the original recipe."""
        self._name, self._base = name, base

    def keep_code_at(self, folder: str) -> None:
        """Set the folder of the store that holds copies of the user's own Python files (`code`)."""
        self._kept_at = folder

    @property
    def kept_at(self) -> str:
        """Return the folder of the store that holds copies of the user's own Python files, as set by `keep_code_at`."""
        return self._kept_at

    def pin_tokenizer(self, name: str) -> None:
        """Set the name with revision (NAME@REVISION) of a tokenizer that is loaded from the Hugging Face hub. The
        recipe.yaml of the run then names this revision."""
        self._pinned = name

    def code_args(self) -> list[dict[str, str]]:
        """Describe the user's own Python files (`code`) for the arguments of tasks, as a list of {"path" on this
        machine, "sha256", "kept": path of the copy in the store}. Workers pass the list to
        `pipeline.recipe.code.import_planned`."""
        return [{"path": path, "sha256": file_sha256(path), "kept": f"{self._kept_at}/{os.path.basename(path)}"}
                for path in self.code]

    def mark(self, path: KeyPath) -> Mark:
        """Return the place of a key in the recipe file (file, line and column)."""
        return self._marks.at(path) if self._marks is not None else Mark(self._name)

    def dataset_order(self) -> list[str]:
        """Return the names of the datasets so that each comes after the datasets it is made from. Apart from that, they
        are in the order of the recipe file."""
        done: list[str] = []

        def visit(name: str) -> None:
            if name in self.datasets and name not in done:
                for upstream in self.datasets[name].inputs:
                    visit(upstream)
                done.append(name)

        for name in self.datasets:
            visit(name)
        return done

    def sources_of(self, dataset: str) -> list[str]:
        """Return the names of the sources whose documents can reach `dataset`, in the order of the recipe file."""
        sources: set[str] = set()

        def visit(name: str, allowed: set[str]) -> None:
            if name in self.sources:
                sources.update({name} & allowed)
                return
            picked = self.datasets[name].where.get("source")
            for upstream in self.datasets[name].inputs:
                visit(upstream, allowed & set(picked) if picked else allowed)

        visit(dataset, set(self.sources))
        return [name for name in self.sources if name in sources]

    def plain(self) -> dict[str, Any]:
        """Return the recipe as plain values under the keys of the recipe file. Defaults are filled in, and paths are as
        the user wrote them."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def canonical(self) -> dict[str, Any]:
        """Return the recipe as plain values without paths. The result does not depend on where the recipe, its inputs
        and its models are stored."""
        doc = self.plain()
        for source in doc["sources"].values():
            source.pop("path")
            source.pop("root", None)
            source.pop("follow_symlinks")
        doc["code"] = [os.path.basename(path) for path in doc["code"]]
        return _map_strings(doc, lambda text: text.removeprefix(self.base.rstrip("/") + "/"))

    def digest(self) -> str:
        """Return a hash of the recipe without paths (`canonical`), as 32 hex characters."""
        blob = json.dumps(self.canonical(), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(blob.encode(), digest_size=16).hexdigest()

    def canonical_yaml(self) -> str:
        """Return the recipe as YAML text that can be run from any folder. A run keeps this text as its recipe.yaml."""
        doc = self.plain()
        for source in doc["sources"].values():
            source.update(source.pop("config"))
            source["path"] = [p if "://" in p else os.path.join(self.base, p) for p in source["path"]]
            if "root" in source and "://" not in source["root"]:
                source["root"] = os.path.join(self.base, source["root"])
        if "load" in doc.get("tokenizer", {}):
            doc["tokenizer"]["load"] = self._pinned or os.path.join(self.base, doc["tokenizer"]["load"])
        doc["code"] = [os.path.join(self.base, path) for path in doc["code"]]
        for dataset in doc["datasets"].values():
            dataset["steps"] = [{s["name"]: s["config"]} for s in dataset["steps"]]
        return dump_yaml(_map_strings(doc, lambda text: _without_parents(text, self.base)))


def _without_parents(text: str, base: str) -> str:
    """Resolve each `..` at the beginning of a path that was joined to the folder `base`, because the service refuses
    paths that contain `..`. Any other text is returned as it is."""
    path = text.removeprefix(f"{base.rstrip('/')}/")
    if path == text or path.partition("/")[0] != "..":
        return text
    while path.partition("/")[0] == "..":
        base, path = os.path.dirname(os.path.realpath(base)), path[3:].lstrip("/")
    return os.path.join(base, path)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain data in which `change` has replaced every string except the keys of dicts."""
    if isinstance(value, dict):
        return {k: _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_strings(v, change) for v in value]
    return change(value) if isinstance(value, str) else value
