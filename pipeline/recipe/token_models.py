"""The parts of a recipe that describe tokens, as pydantic models: `tokenizer:`, `shards:` (token files) and
`curriculum:` (the phases of a training and their mixtures)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, TypeAdapter, field_validator, model_validator

from pipeline.base.quantities import parse_weight
from pipeline.recipe.phase_values import check_rate, check_rope_scaling, parse_batch, parse_until
from pipeline.recipe.values import Bytes, Count, Model, Name, Names, Share, Weight, Where


class TokenizerTrain(Model):
    """Settings for the training of a tokenizer: byte-level BPE or SentencePiece (`model: unigram | bpe`), with `vocab`
    tokens, on at most `sample` bytes of the text of `inputs` (the key is `from:`)."""

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
    """The tokenizer of a recipe. `train:` trains a new tokenizer. `load:` names a tokenizer.json, a SentencePiece
    .model, a folder that holds one of these files, or a tokenizer on the Hugging Face hub. `eos` is the end-of-text
    token; it is needed when the tokenizer's files do not name this token."""

    train: TokenizerTrain | None = None
    load: str | None = None
    eos: str | None = None


class Shards(Model):
    """The token files (shards) of one stream. They hold the documents of the datasets in `inputs` (the key is `from:`)
    that match `where`. `longest` is the length in tokens of a super-window (the unit in which a phase of the training
    reserves tokens); it is a multiple of every sequence length used. `val` is the share of documents held out for
    evaluation. With `packing: best-fit`, a training sample is a row of whole documents instead of consecutive
    tokens."""

    inputs: Names = Field(alias="from")
    where: Where = {}
    longest: Count
    val: Share = 0.005
    packing: Literal["best-fit"] | None = None


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
