"""Parses and checks values of a phase of the curriculum (the plan of a training) as a recipe writes them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args, get_type_hints

from pipeline.base.quantities import parse_count, parse_share
from pipeline.recipe.errors import nearest
from tokenizer.mixture.curriculum import RATES, CurriculumError
from tokenizer.mixture.resolve import own_rate
from trainer.base.config import names
from trainer.model.config import RopeScaling

#: methods and keys of a phase's `rope_scaling`
ROPE_SCALINGS = get_args(get_type_hints(RopeScaling)["kind"])
ROPE_SCALING_KEYS = names(RopeScaling)


def parse_until(value: Any) -> str | int:
    """Parse the end of a phase: a share of the curriculum's total such as '70%', or a number of tokens. A share stays a
    string, so that it remains exact."""
    if isinstance(value, str) and value.strip().endswith("%"):
        if parse_share(value) == 0:
            raise ValueError("a phase that ends at 0% is empty")
        return value.strip()
    return parse_count(value)


def parse_batch(value: Any) -> Any:
    """Parse a batch size in tokens: '0.5M', or a mapping such as {0: 64k, 100M: 128k, 1B: 0.5M}. A key of the mapping
    is the number of tokens of the phase after which the size begins."""
    if not isinstance(value, dict):
        return parse_count(value)
    rows = sorted((parse_count(at, least=0), parse_count(size)) for at, size in value.items())
    if not rows or rows[0][0] or any(a[1] >= b[1] or a[0] == b[0] for a, b in pairwise(rows)):
        raise ValueError(f"a batch that grows begins at token 0 of the phase and gets larger, e.g. "
                         f"{{0: 64k, 100M: 128k, 1B: 0.5M}}; got {value!r}")
    return dict(rows)


def check_rate(value: Any) -> Any:
    """Check the learning rate of a phase; raises ValueError if it is wrong. It is a name in RATES (stable, constant,
    decay), a mapping that describes a curve for this phase alone, or None (inherited). `tokenizer.mixture.resolve`
    computes the numbers of the curve later."""
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


def check_rope_scaling(value: Any) -> Any:
    """Check the `kind` and the keys of a mapping that describes a scaling of rotary position embeddings
    (`RopeScaling`). `kind` and `factor` are required. The trainer checks all values other than `kind`."""
    if not isinstance(value, dict) or value.get("kind") not in ROPE_SCALINGS or "factor" not in value:
        raise ValueError(f"give kind ({', '.join(ROPE_SCALINGS)}) and factor, e.g. {{kind: yarn, factor: 4, original: "
                         f"4096}}; got {value!r}")
    for key in value:
        if key not in ROPE_SCALING_KEYS:
            raise ValueError(f"unknown key '{key}': {nearest(str(key), ROPE_SCALING_KEYS)}")
    return value
