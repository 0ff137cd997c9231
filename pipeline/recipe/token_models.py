"""The parts of a recipe that describe tokens, as pydantic models: `tokenizer:`, `shards:` (token files) and
`curriculum:` (the phases of a training and their mixtures)."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, TypeAdapter, field_validator, model_validator

from pipeline.base.quantities import parse_bytes, parse_weight
from pipeline.recipe.phase_values import check_rate, check_rope_scaling, parse_batch, parse_until
from pipeline.recipe.values import Bytes, Count, Name, Names, RecipeModel, Share, Weight, Where, listed
from tokenizer.byte_level import EOS
from tokenizer.special import special_tokens


class TokenizerSample(RecipeModel):
    """How much text of which groups a tokenizer is trained on: `bytes` in all. Documents with the same values in the
    columns `by` are a group. The share of a group in the sample is in proportion to its weight × (its bytes)^`alpha`.

    `source` and `language` give weights by the names of sources and languages; the weight of a group is their product.
    Documents of sources or languages that the mapping does not list are not in the sample. Columns with weights need
    not be listed in `by`. `alpha` is 0 by default: without weights, all groups then have the same share; with 1, each
    has its share of the dataset. If a group has less text than its share, the other groups get the rest."""

    bytes: Bytes
    by: Annotated[list[Literal["source", "language"]], BeforeValidator(listed)] | None = None
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


class SpecialTokens(RecipeModel):
    """Special tokens that a new tokenizer gets beside its end-of-text token.

    * `fim`: four tokens for fill-in-the-middle
    * `chat`: the tokens of a template for dialogues
    * `tokens`: names of further tokens
    * `reserved`: how many tokens without a meaning are kept for later
    """

    fim: StrictBool = False
    chat: Literal["chatml", "llama3"] | None = None
    tokens: Annotated[list[str], BeforeValidator(listed)] = []
    reserved: Annotated[int, Field(ge=0, le=65_536)] = 0

    @model_validator(mode="after")
    def _names(self) -> SpecialTokens:
        special_tokens(self.model_dump(), EOS)
        return self


def _sample(value: Any) -> Any:
    """Parse the `sample` of a tokenizer: a number of bytes, or a mapping that weighs groups of documents."""
    return TokenizerSample.model_validate(value) if isinstance(value, dict) else parse_bytes(value)


class TokenizerTrain(RecipeModel):
    """Settings for the training of a tokenizer: byte-level BPE or SentencePiece (`model: unigram | bpe`), with `vocab`
    tokens. It is trained on a `sample` of the text of `inputs` (the key is `from:`). The sample is given by its largest
    number of bytes, or by a TokenizerSample.

    `digits`: how numbers are encoded. With single, each digit is encoded alone. Otherwise digits are encoded in groups
    of three, counted from the first digit (left3) or from the last (right3). The default of BPE is left3. SentencePiece
    can only do single.

    `space_runs`: every run of spaces, from 2 up to this number, has a token of its own. `special`: further special
    tokens.
    """

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

    @property
    def sample_bytes(self) -> int:
        """Return how many bytes of text the sample has at most."""
        return self.sample if isinstance(self.sample, int) else self.sample.bytes


class TokenizerSettings(RecipeModel):
    """The tokenizer of a recipe. `kind: bytes` is the tokenizer whose tokens are the bytes of UTF-8. `train:` trains a
    new tokenizer. `load:` names a tokenizer.json, a SentencePiece .model, a .tiktoken file, a folder that holds one of
    these files, or a tokenizer on the Hugging Face hub.

    `pattern` is the pattern by which a .tiktoken file splits text: r50k, p50k, cl100k, o200k, qwen or a regular
    expression. It may be left out if the name of the file contains one of these five names. `eos` is the end-of-text
    token. It may be left out if the tokenizer's files tell it (`tokenizer.load.load_tokenizer` lists how).
    """

    kind: Literal["bytes"] | None = None
    train: TokenizerTrain | None = None
    load: str | None = None
    pattern: str | None = None
    eos: str | None = None


def _split_label(value: Any) -> Any:
    """Check a label by which `shards:` are split: a name, or a mapping {signal.NAME: ascending edges}."""
    name = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else value
    if not isinstance(name, str) or not re.fullmatch(r"source|language|bucket|meta\..+|signal\.\w+", name):
        raise ValueError(f"{value!r} is no label; write source, language, bucket, meta.KEY, signal.NAME or "
                         "{signal.NAME: [edges]}")
    if isinstance(value, dict):
        edges = value[name]
        if not name.startswith("signal.") or not isinstance(edges, list) or not edges or not all(
                isinstance(edge, int | float) and not isinstance(edge, bool) and math.isfinite(edge)
                for edge in edges) or not all(a < b for a, b in pairwise(edges)):
            raise ValueError(f"{value!r}: edges are numbers that ascend, and belong to a signal: "
                             "{signal.perplexity: [300, 1000]}")
    return value


SplitLabel = Annotated[str | dict[str, list[float]], BeforeValidator(_split_label)]


class Shards(RecipeModel):
    """The token files (shards) of one stream. They hold the documents of the datasets in `inputs` (the key is `from:`)
    that match `where`. `longest` is the length in tokens of a super-window, the unit in which a phase of the training
    reserves tokens. It is a multiple of every sequence length used. `val` is the share of documents held out for
    evaluation. With `from_phase`, the name of a phase, only this phase and later ones may read the stream. With
    `packing: best-fit`, a training sample is a row of whole documents instead of consecutive tokens.

    With `by`, the documents are split into several streams by one to three labels (`by: [language, bucket]`). A label
    is `source`, `language`, `bucket` (the number that the step `buckets` gives), `meta.KEY`, `signal.NAME`, or
    `{signal.NAME: [edges]}`, which cuts the signal into numbered buckets. Labels with fewer than `min_tokens` training
    tokens are put together (`pipeline.passes.labels.streams_of`). By default, these are the labels that do not fill one
    super-window.
    """

    inputs: Names = Field(alias="from")
    where: Where = {}
    longest: Count
    val: Share = 0.005
    from_phase: str | None = None
    by: Annotated[list[SplitLabel], BeforeValidator(listed), Field(min_length=1, max_length=3)] | None = None
    min_tokens: Count | None = None
    packing: Literal["best-fit"] | None = None

    @property
    def labels(self) -> list[str]:
        """Return the names of the labels by which the documents are split."""
        return [item if isinstance(item, str) else next(iter(item)) for item in self.by or ()]


def _streams(value: Any) -> Any:
    """Parse the streams of a group: a mapping that gives their weights, or a list of their names."""
    return value if isinstance(value, list) else _GROUP_WEIGHTS.validate_python(value)


_GROUP_WEIGHTS = TypeAdapter(dict[str, Weight])


class Curve(RecipeModel):
    """A rule that says how often each of `buckets` quality buckets is read: C·x^`power`·e^(`rate`·x) times, where x
    rises from 0 (the worst bucket) to 1 (the best one). Buckets below x = `drop` are not read.

    C is chosen so that the tokens read add up to the share of these streams (`tokenizer.mixture.split`). No bucket is
    read more than `cap` times. If the share cannot be reached in this way, all are read more often, with a warning."""

    power: Annotated[float, Field(ge=0, le=100)] = 1
    rate: Annotated[float, Field(ge=-100, le=100)] = 0
    cap: Annotated[float, Field(gt=0)] = 7
    drop: Annotated[float, Field(ge=0, lt=1)] = 0
    buckets: Annotated[int, Field(ge=2, le=1000)] = 20


class LabelRule(RecipeModel):
    """How the streams of split shards divide the share that they have together (`tokenizer.mixture.split`). They divide
    it by one rule (`alpha`, `temperature`, `unimax`, `weights`, `upsample` or `curve`), or without a rule in proportion
    to their tokens.

    `by` names a label, such as `language`. The share is then first divided among the values of this label. The streams
    with the same value divide the part of that value by the rule `within`, or without `within` in proportion to their
    tokens. Without `by`, the share is divided among all streams at once.
    """

    by: str | None = None
    alpha: Annotated[float, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    unimax: Annotated[float, Field(gt=0)] | None = None
    weights: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    upsample: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    curve: Curve | None = None
    within: LabelRule | None = None

    @property
    def rules(self) -> list[str]:
        """Return the names of those rules (`alpha`, `unimax` …) that this group of streams has a value for."""
        return [rule for rule in ("alpha", "temperature", "unimax", "weights", "upsample", "curve")
                if getattr(self, rule) is not None]


class StreamGroup(LabelRule):
    """Several streams (sets of token files) of a phase that together get the weight `share`. `streams` is a mapping
    from each stream to its weight within the group, or a list of streams. Without `streams`, the group has the name of
    split shards and consists of their streams, which divide the share as `LabelRule` says.

    For a list, the weights follow from the streams' numbers of tokens: they are in proportion to tokens^`alpha`
    (default 1). With `unimax`, they are equal instead, but no stream is read more than `unimax` times in the phase.
    This limit does not hold if all streams together have too few tokens for it.
    """

    share: Weight
    streams: Annotated[dict[str, Weight] | list[str], BeforeValidator(_streams), Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_rule(self) -> StreamGroup:
        if len(self.rules) + isinstance(self.streams, dict) > 1:
            raise ValueError("the weights come from a mapping of streams, from `alpha`, from `unimax` or another rule: "
                             "give one of them, `alpha` and `unimax` with a list of streams")
        if self.streams is not None and (self.by or self.within or not {*self.rules} <= {"alpha", "unimax"}):
            raise ValueError("`by`, `within`, `temperature`, `weights`, `upsample` and `curve` are for the streams of "
                             "split shards: remove `streams`, or these keys")
        return self

    @property
    def mixed(self) -> set[str] | None:
        """Return the names of the group's streams that have a weight above 0. None means the streams of split shards,
        which are known only after their documents were read."""
        if self.streams is None:
            return None if self.share else set()
        weights = self.streams if isinstance(self.streams, dict) else dict.fromkeys(self.streams, 1)
        return {stream for stream, weight in weights.items() if weight and self.share}


def _mixed(value: Any) -> Any:
    """Parse the weight of one entry of a `mix`: a number, or a mapping that describes a group of streams."""
    return StreamGroup.model_validate(value) if isinstance(value, dict) else parse_weight(value)


class PhaseSettings(RecipeModel):
    """A phase of the curriculum (the plan of a training), as written in the recipe. A field that is None is inherited
    from the phase before, except `until`, `extra`, `reset_optimizer`, and an `lr` that is a curve.

    * `until`: where the phase ends, as a share of the total such as '70%' or as a token count
    * `extra`, instead of `until`: how many tokens the phase has beyond the total
    * `sequence`: tokens of a window
    * `batch`: tokens of a training step; with a mapping, the number changes during the phase
    * `mix`: the weight of each stream in `shards:`, or of a group of streams
    * `max_epochs`: how often each stream may have been read when the phase ends (default 1)
    * `on_exhausted`: whether reading a stream more often is an error or is allowed
    * `lr`: how the learning rate behaves in this phase (stable, constant or decay), or a mapping that describes a curve
      for this phase alone
    * `reset_optimizer`: whether the optimizer's moments start at zero
    * `rope_theta` and `rope_scaling`: as in `train.model`, from this phase on
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
        """Return the names of the streams to which `mix` gives a weight above 0. For split shards, whose streams are
        known only after their documents were read, the name of the entry of `shards:` is returned."""
        mixed: set[str] = set()
        for name, weight in (self.mix or {}).items():
            inside = weight.mixed if isinstance(weight, StreamGroup) else {name} if weight else set()
            mixed |= {name} if inside is None else inside
        return mixed


class CurriculumSettings(RecipeModel):
    """The phases of a training, and the `total` number of its tokens. All token counts count the tokens to predict, so
    n windows of length L count as n × L tokens. `tokenizer.mixture` computes curriculum.json from the curriculum."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    total: Count
    phases: Annotated[list[PhaseSettings], Field(min_length=1)]
