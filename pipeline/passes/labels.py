"""Splits the documents of one entry of `shards:` into several streams (sets of token files) by labels. A label is the
language, source, quality bucket, a value of the metadata, or a signal.

`EncodePart` reads the labels of each document (`ShardLabels`), and writes the documents of a part grouped by their
labels. When all parts are encoded, the number of tokens of each label is known, and `streams_of` decides which labels
become streams of their own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from pipeline.base.errors import TokenmillError
from pipeline.passes.rows import Rows
from tokenizer.shards.layout import STREAM_CHARS

#: the labels of one document, in the order of `by`
Label = tuple[str, ...]
#: label of a document that has none, and of a stream that collects labels with too few tokens
NONE, OTHER = "none", "other"
#: most streams that one entry of `shards:` may be split into
MOST_STREAMS = 2000
#: most characters of a label in the name of a stream
LABEL_CHARS = 24


class TooManyStreams(TokenmillError):
    """Raised when an entry of `shards:` would be split into more than MOST_STREAMS streams, or into a stream with too
    long a name."""


class ShardLabels:
    """Reads the labels of documents. `by` lists where they come from: {"column": NAME}, {"meta": KEY}, or {"signal":
    NAME}, with `edges` if the signal is to be cut into numbered buckets. A value equal to an edge belongs to the bucket
    above the edge."""

    def __init__(self, by: Sequence[Mapping[str, Any]]) -> None:
        self.by = by
        self.columns = tuple(f"signals.{item['signal']}" if "signal" in item else item.get("column", "meta")
                             for item in by)

    def of(self, batch: Rows) -> list[Label]:
        """Return the labels of each row of a batch: for each row a tuple of strings, one for each item of `by`."""
        return list(zip(*(_values(batch, item) for item in self.by)))


def _values(batch: Rows, item: Mapping[str, Any]) -> list[str]:
    if "column" in item:
        return [label_name(value) for value in batch.column(item["column"])]
    if "meta" in item:
        metas = (json.loads(meta) if meta else {} for meta in batch.column("meta"))
        return [label_name(meta.get(item["meta"]) if isinstance(meta, dict) else None) for meta in metas]
    signals = batch.column_of("signals")
    if signals is None or signals.type.get_field_index(item["signal"]) < 0:
        return [NONE] * len(batch.rows)
    values = pc.struct_field(signals, item["signal"]).to_pylist()
    edges = item.get("edges")
    if edges is None:
        numbered = item["signal"].endswith("_bucket")
        return [NONE if v is None or v != v else bucket_name(int(v)) if numbered and v >= 0
                else label_name(int(v) if v == int(v) else v) for v in values]
    return [NONE if v is None or v != v else bucket_name(int(np.searchsorted(edges, v, "right"))) for v in values]


def bucket_name(number: int) -> str:
    return f"b{number:02d}"


def label_name(value: Any) -> str:
    """Return the text for the label `value` in the names of streams. It has only letters, digits, `_` and `-`. A value
    that cannot be shown unchanged gets a text that ends in a hash of the value (32 bits), so that different values have
    different texts. A number and the text of its digits count as the same value. A missing or empty value becomes
    `none`."""
    if value is None or value == "":
        return NONE
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if re.fullmatch(rf"[A-Za-z0-9_-]{{1,{LABEL_CHARS}}}", text) and text not in (NONE, OTHER):
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{re.sub('[^A-Za-z0-9_-]+', '-', text)[:LABEL_CHARS - 9]}-{digest}"


def streams_of(name: str, tokens: Mapping[Label, int], least: int) -> dict[Label, str]:
    """Return the stream of each label, for the entry `name` of `shards:`. A label is a tuple of strings, such as
    (language, bucket), and its stream is usually `NAME.LANGUAGE.BUCKET`. `tokens` has the training tokens of each
    label. Raises TooManyStreams.

    A label with fewer than `least` tokens has no stream of its own. Its documents go to a stream in whose name `other`
    replaces the last string of the label. If that stream has fewer than `least` tokens as well, `other` replaces the
    last two strings, and so on. The stream `NAME.other` may have fewer than `least` tokens. So rare buckets of English
    become `web.en.other`, and rare languages become `web.other`."""
    place = dict(zip(tokens, tokens))
    levels = max(map(len, tokens), default=0)
    for level in reversed(range(levels)):
        sums: dict[Label, int] = {}
        for label, stream in place.items():
            sums[stream] = sums.get(stream, 0) + tokens[label]
        place = {label: (*stream[:level], OTHER)
                 if sums[stream] < least and (level == levels - 1 or stream[-1] == OTHER) else stream
                 for label, stream in place.items()}
    streams = {label: ".".join((name, *stream)) for label, stream in place.items()}
    if (longest := max(streams.values(), key=len, default="")) and len(longest) > STREAM_CHARS:
        raise TooManyStreams(f"shards.{name}.by: the labels make the stream '{longest[:80]}…', whose name has "
                             f"{len(longest)} characters, at most {STREAM_CHARS} are possible; take fewer labels")
    if (number := len(set(streams.values()))) > MOST_STREAMS:
        raise TooManyStreams(f"shards.{name}.by: the labels make {number:,} streams, at most {MOST_STREAMS:,} are "
                             f"possible; take fewer labels, give a signal edges, or raise shards.{name}.min_tokens")
    return streams
