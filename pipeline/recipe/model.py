"""The structure of a recipe, as pydantic models. `pipeline.recipe.check` checks what they cannot: names, the settings
of steps, and that no dataset is made from itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    StrictBool,
    field_validator,
)

from pipeline.base.files import file_sha256
from pipeline.base.quantities import parse_bytes, parse_count, parse_share, parse_weight, percent
from pipeline.recipe.errors import KeyPath, Mark, nearest
from pipeline.recipe.marks import Marks, dump_yaml
from tokenizer.mixture.curriculum import RATES, CurriculumError
from tokenizer.mixture.resolve import own_rate
from trainer.base.config import names
from trainer.model.config import RopeScaling

#: methods and keys of a phase's `rope_scaling`
ROPE_SCALINGS = get_args(get_type_hints(RopeScaling)["kind"])
ROPE_SCALING_KEYS = names(RopeScaling)


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError(f"'{value}' is not a name; names become folders: at most 64 letters, digits, '_', '-', '.', "
                         "beginning with a letter or digit")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _step(value: Any) -> Any:
    """Turn a step of a recipe into {"name", "config"}. It is written as a name or as a mapping with one key: `url`,
    `{language: {keep: [en]}}`, `{pii: }`."""
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


def _until(value: Any) -> str | int:
    """The end of a phase: a share such as '70%' of the total, or a token count. A share stays a string, so that it
    remains exact."""
    if isinstance(value, str) and value.strip().endswith("%"):
        if parse_share(value) == 0:
            raise ValueError("a phase that ends at 0% is empty")
        return value.strip()
    return parse_count(value)


def _batch(value: Any) -> Any:
    """A batch size in tokens: '0.5M', or {0: 64k, 100M: 128k, 1B: 0.5M}, where each size begins at that many tokens of
    the phase."""
    if not isinstance(value, dict):
        return parse_count(value)
    rows = sorted((parse_count(at, least=0), parse_count(size)) for at, size in value.items())
    if not rows or rows[0][0] or any(a[1] >= b[1] or a[0] == b[0] for a, b in pairwise(rows)):
        raise ValueError(f"a batch that grows begins at token 0 of the phase and gets larger, e.g. "
                         f"{{0: 64k, 100M: 128k, 1B: 0.5M}}; got {value!r}")
    return dict(rows)


def _rate(value: Any) -> Any:
    """The learning rate of a phase: a name in RATES (stable, constant, decay), or a mapping that describes a curve for
    this phase alone. The curve is checked here, and its numbers are computed later by `tokenizer.mixture.resolve`."""
    if isinstance(value, dict):
        try:
            own_rate(value, 10**18, "")
        except CurriculumError as e:
            raise ValueError(str(e).removeprefix(".")) from None
    elif value is not None and value not in RATES:
        hint = nearest(value, RATES) if isinstance(value, str) else ""
        raise ValueError(f"{value!r} is not one of {', '.join(RATES)}" + (f"; {hint}" if hint.startswith("did") else "")
                         + "; a rate of its own is a mapping, {peak: 2e-5, warmup: 50M, shape: cosine}")
    return value


def _rope_scaling(value: Any) -> Any:
    """A mapping with keys of `RopeScaling`, which must include `kind` and `factor`. The trainer checks their values."""
    if not isinstance(value, dict) or value.get("kind") not in ROPE_SCALINGS or "factor" not in value:
        raise ValueError(f"give kind ({', '.join(ROPE_SCALINGS)}) and factor, e.g. {{kind: yarn, factor: 4, original: "
                         f"4096}}; got {value!r}")
    for key in value:
        if key not in ROPE_SCALING_KEYS:
            raise ValueError(f"unknown key '{key}': {nearest(str(key), ROPE_SCALING_KEYS)}")
    return value


def _empty(value: Any) -> Any:
    """A key without a value counts as left out, so None becomes {}."""
    return {} if value is None else value


Count = Annotated[int, BeforeValidator(parse_count)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Share = Annotated[float, BeforeValidator(parse_share), PlainSerializer(percent)]
Weight = Annotated[int | float, BeforeValidator(parse_weight)]
Name = Annotated[str, AfterValidator(_name)]
Names = Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]
#: column → value or values a document must have
Where = Annotated[dict[Literal["source", "language"], Names], BeforeValidator(_empty)]
Settings = Annotated[dict[str, Any], BeforeValidator(_empty)]


class Source(Model):
    """A named set of input files, and the reader that turns them into documents. All keys that are not listed here are
    settings of the reader; they are moved into `config`.

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
    """One line of `steps:`: the name of a stage (the code of the step), and its settings, which the stage's own Config
    validates."""

    name: str
    config: Settings = {}


class Dataset(Model):
    """A dataset: the documents of `inputs` (sources or other datasets; the key is `from:`) after they went through
    `steps`.

    `where` selects documents before the first step. `priority` is a list of inputs: of two duplicates, the document of
    the input listed first is kept. Inputs that it does not list come last, in the order of `from`.
    """

    inputs: Names = Field(alias="from")
    steps: list[Annotated[Step, BeforeValidator(_step)]] = []
    priority: list[str] = []
    where: Where = {}


class TokenizerTrain(Model):
    """How to train a tokenizer: byte-level BPE or SentencePiece (`model: unigram | bpe`), with `vocab` tokens, on at
    most `sample` bytes of the text of `inputs` (the key is `from:`)."""

    kind: Literal["bpe", "sentencepiece"] = "bpe"
    model: Literal["unigram", "bpe"] = "unigram"
    vocab: Count
    inputs: Names = Field(alias="from")
    where: Where = {}
    sample: Bytes = 1_000_000_000

    @field_validator("vocab")
    @classmethod
    def _vocab(cls, value: int) -> int:
        if not 257 <= value <= 1 << 24:
            raise ValueError(f"a vocabulary of {value:,} is outside 257 … 16,777,216 (256 bytes and end-of-text)")
        return value


class Tokenizer(Model):
    """The tokenizer of a recipe. `train:` trains a new one. `load:` names a tokenizer.json, a SentencePiece .model, a
    folder that holds one of them, or a tokenizer on the Hugging Face hub. `eos` is the end-of-text token; it is needed
    when the tokenizer's files do not name it."""

    train: TokenizerTrain | None = None
    load: str | None = None
    eos: str | None = None


class Shards(Model):
    """The token files of one stream. They hold the documents of the datasets in `inputs` (the key is `from:`) that
    match `where`. `longest` is the length of a super-window (the unit in which a phase reserves tokens), a multiple of
    every sequence length used. `val` is the share of documents held out."""

    inputs: Names = Field(alias="from")
    where: Where = {}
    longest: Count
    val: Share = 0.005


class Phase(Model):
    """A phase of the curriculum, as written in the recipe. A field that is None is inherited from the phase before,
    except `until`, `extra`, `reset_optimizer`, and an `lr` that is a curve.

    `until`: where the phase ends, as a share of the total such as '70%' or as a token count; `extra` instead of
    `until`: how many tokens the phase has beyond the total. `sequence`: tokens of a window; `batch`: tokens of a step,
    growing if it is a mapping. `mix`: the weight of each entry of `shards:`; `max_epochs`: how often each may be read;
    `on_exhausted`: whether reading it more often is an error or is allowed. `lr`: how the trainer's schedule behaves in
    this phase, or a curve of its own. `reset_optimizer`: moments start at zero; `rope_theta` and `rope_scaling`: as in
    `train.model`, from this phase on.
    """

    name: Name
    until: Annotated[str | int, BeforeValidator(_until)] | None = None
    extra: Count | None = None
    sequence: Count | None = None
    batch: Annotated[int | dict[int, int], BeforeValidator(_batch)] | None = None
    mix: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    max_epochs: dict[str, Weight] | None = None
    lr: Annotated[Any, BeforeValidator(_rate)] = None
    on_exhausted: Literal["error", "repeat"] | None = None
    reset_optimizer: StrictBool | None = None
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    rope_scaling: Annotated[dict[str, Any], BeforeValidator(_rope_scaling)] | None = None


class Curriculum(Model):
    """The phases of a training, and the `total` number of its tokens. Numbers of tokens count the tokens to predict, so
    n windows of length L count as n × L tokens. `tokenizer.mixture` resolves a curriculum into curriculum.json."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    total: Count
    phases: Annotated[list[Phase], Field(min_length=1)]


def _files(value: Any) -> int | float:
    """A number of files such as '20', or a share of them such as '1%'."""
    return parse_share(value) if isinstance(value, str) and value.strip().endswith("%") else parse_count(value, least=0)


class Run(Model):
    """How a recipe is run. The outcome of a document does not depend on these settings.

    `partition`: uncompressed bytes per partition (the input of one task). `signals`: which signals (numbers that steps
    store beside a text) are computed for a dropped document, those until the step that drops it or all.
    `max_error_rate`: the share of a pass's documents that may fail before the run does (ten may always fail).
    `max_bad_files`: how many input files may be unreadable, whole or in part, before the run fails: a number, or a
    share of them (but at least ten).
    """

    partition: Bytes = 32_000_000
    signals: Literal["until-drop", "all"] = "until-drop"
    max_error_rate: Share = 0.01
    max_bad_files: Annotated[int | float, BeforeValidator(_files),
                             PlainSerializer(lambda n: n if isinstance(n, int) else percent(n))] = 0.01


class About(Model):
    """The description of a ready recipe, with which a corpus made with it can be cited: its `name`, its `version`, a
    one-line `title`, and the papers and code it follows (`after`). The version is raised whenever a change to the
    recipe changes the documents it makes."""

    name: Name
    version: Annotated[int, Field(ge=1)]
    title: str
    after: Names


class Recipe(Model):
    """A whole recipe file. `input` names the source whose path `--input` gives. `code` lists the files of the user's
    own stages. `wants` lists values that must be given with `--set`: {key: what the value is and how to get it}.

    `pipeline.recipe.load_recipe` returns it, with the settings of readers and steps completed by their defaults. It
    also sets `name`, `base` (the folder that relative paths start at) and `warnings`.
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
        """Set the name and folder of the original file. This is for a recipe that was read back from the recipe.yaml of
        a run: it then has the same digest as the original."""
        self._name, self._base = name, base

    def keep_code_at(self, folder: str) -> None:
        """Set the store folder that holds copies of the files of `code`."""
        self._kept_at = folder

    @property
    def kept_at(self) -> str:
        """The store folder set by `keep_code_at`."""
        return self._kept_at

    def pin_tokenizer(self, name: str) -> None:
        """Set the name with revision (NAME@REVISION) of a tokenizer that is loaded from the hub. The recipe.yaml of the
        run then names this revision."""
        self._pinned = name

    def code_args(self) -> list[dict[str, str]]:
        """The files of `code` as an argument of tasks, for `pipeline.recipe.code.import_planned`: a list of {"path" on
        this machine, "sha256", "kept": path of the copy in the store}."""
        return [{"path": path, "sha256": file_sha256(path), "kept": f"{self._kept_at}/{os.path.basename(path)}"}
                for path in self.code]

    def mark(self, path: KeyPath) -> Mark:
        """The place of a key in the file it was read from."""
        return self._marks.at(path) if self._marks is not None else Mark(self._name)

    def dataset_order(self) -> list[str]:
        """The names of the datasets, each after the datasets it is made from, and otherwise in the order of the
        file."""
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
        """Names of the sources whose documents can reach `dataset`, in the order of the file."""
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
        """The recipe as plain values under the keys of the file, with defaults filled in and paths as they were
        written."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def canonical(self) -> dict[str, Any]:
        """`plain` without paths. It does not depend on where the recipe, its inputs and its models are stored."""
        doc = self.plain()
        for source in doc["sources"].values():
            source.pop("path")
            source.pop("root", None)
            source.pop("follow_symlinks")
        doc["code"] = [os.path.basename(path) for path in doc["code"]]
        return _without_prefix(doc, self.base.rstrip("/") + "/")

    def digest(self) -> str:
        """A hash of `canonical`, 32 hex characters."""
        blob = json.dumps(self.canonical(), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(blob.encode(), digest_size=16).hexdigest()

    def canonical_yaml(self) -> str:
        """The recipe as YAML that can be run from any folder. A run keeps it as its recipe.yaml."""
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
        return dump_yaml(doc)


def _without_prefix(value: Any, prefix: str) -> Any:
    if isinstance(value, dict):
        return {k: _without_prefix(v, prefix) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_prefix(v, prefix) for v in value]
    return value.removeprefix(prefix) if isinstance(value, str) else value
