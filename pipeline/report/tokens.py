"""Makes the report's sections about tokens. They describe the token streams, and how many windows (training samples)
each phase of the curriculum takes from each stream, as planned and in reality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.report.nodes import NodeFigures
from pipeline.report.samples import quarantine_samples
from pipeline.store.fs import Store
from pipeline.store.records import Counters, merge_counters
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.realised import plan, realised


def token_counts(store: Store, nodes: list[NodeFigures], curriculum: Curriculum | None = None) -> dict[str, Any]:
    """Return counts for every entry of `shards:`, by its name: the documents, tokens and targets of the training data.
    The counts of the held-out data have the prefix `val_`. Targets are the tokens that count in the training loss.

    Each entry also has these figures:

    * `sources`: documents and tokens by source, training and held-out data together
    * `near_held_out`: documents that resemble held-out ones and are in neither
    * `quarantined` and `quarantine_samples`: documents that could not be encoded, by reason
    * `packing`, if the documents are packed: the rows and their padding
    * `streams`, if the entry is split by labels: its streams in the curriculum
    """
    out = {}
    entries = [node.name.removeprefix("shards:") for node in nodes if node.kind == "shards"]
    split = split_streams(entries, curriculum)
    for node in nodes:
        if node.kind != "shards":
            continue
        counters: Counters = {"quarantined": {}, "near_held_out": 0,
                           **{split: {"docs": 0, "tokens": 0, "targets": 0} for split in ("train", "val")}}
        merge_counters(counters, node.counters.get("encode", {}))
        name = node.name.removeprefix("shards:")
        out[name] = {
            "docs": counters["train"]["docs"], "tokens": counters["train"]["tokens"],
            "targets": counters["train"]["targets"],
            "val_docs": counters["val"]["docs"], "val_tokens": counters["val"]["tokens"],
            "val_targets": counters["val"]["targets"], "near_held_out": counters["near_held_out"],
            "sources": {s: {"docs": n["docs"], "tokens": n["tokens"]} for s, n in counters.get("sources", {}).items()},
            **({"packing": node.counters["pack"]} if "pack" in node.counters else {}),
            **({"streams": split[name]} if name in split else {}),
            "quarantined": counters["quarantined"], "quarantine_samples": quarantine_samples(store, [node])}
    return out


def split_streams(entries: Sequence[str], curriculum: Curriculum | None) -> dict[str, dict[str, dict[str, int]]]:
    """Return the streams of those entries of `shards:` that are split by labels (`by:`): {entry: {stream: {tokens,
    val_tokens, read}}}. `read` is the number of tokens that the curriculum reads of the stream, in all phases. The name
    of a stream is that of its entry and its labels. Streams that the curriculum does not name are left out."""
    out: dict[str, dict[str, dict[str, int]]] = {}
    if curriculum is None:
        return out
    read = Counter[str]()
    for row in realised(curriculum, curriculum.samples):
        read[row["stream"]] += row["tokens"]
    for stream in curriculum.streams:
        within = [entry for entry in entries if stream.name.startswith(f"{entry}.")]
        if within and stream.name not in entries:
            out.setdefault(max(within, key=len), {})[stream.name] = {
                "tokens": stream.tokens, "val_tokens": stream.val_tokens, "read": read[stream.name]}
    return out


def curriculum_of(store: Store, run: str) -> Curriculum | None:
    path = f"runs/{run}/curriculum.json"
    return Curriculum.loads(store.read(path), path) if store.exists(path) else None


def mixture(curriculum: Curriculum | None) -> list[dict[str, Any]]:
    """Return one row for each phase of the curriculum and each token stream with a weight in it.

    * `planned`: the number of windows (training samples) that the stream's weight gives it, which may be fractional
    * `realised`: the number of windows that the order of samples really gives it
    * `tokens`: the tokens of the realised windows
    * `epochs`: the tokens read of the stream by the end of the phase, divided by the stream's length in tokens
    * `repeats_from`: the number of the first sample in the phase that reads the stream a second time, or None
    * `padding`, for a packed stream: about how many tokens of the realised windows are padding
    """
    if curriculum is None:
        return []
    planned = {(r["phase"], r["stream"]): r for r in plan(curriculum)}
    packed = {s.name for s in curriculum.streams if s.packing is not None}
    tokens_of = {s.name: s.tokens if s.packing is None else s.rows * curriculum.longest for s in curriculum.streams}
    read_of = dict.fromkeys(tokens_of, 0)
    rows = []
    for row in realised(curriculum, curriculum.samples):
        name = row["stream"]
        read_of[name] += row["tokens"]
        rows.append({**row, "epochs": read_of[name] / tokens_of[name] if tokens_of[name] else 0.0,
                     "repeats_from": planned[row["phase"], name]["repeats_from"],
                     **({"padding": planned[row["phase"], name]["padding"]} if name in packed else {})})
    return rows


def warnings(document: dict[str, Any]) -> list[str]:
    """Return the warnings at the top of the report: those that the run gave, followed by warnings about figures of the
    report."""
    out = list(document["warnings"])
    if document["missing_records"]:
        out.append(f"{document['missing_records']:,} tasks of this run have no record in the log: figures are "
                   f"incomplete")
    for name, source in document["sources"].items():
        bad = sum(source["bad"].values())
        if bad:
            out.append(f"source '{name}': {bad:,} of {source['records']:,} records could not be read")
    for dup in document["duplicates"]:
        out += [f"{dup['barrier']} removed {a['removed']:,} of {a['of']:,} documents of source '{a['source']}' "
                f"({a['removed'] / a['of']:.0%}): look at the pairs below" for a in dup["alarms"]]
        out += [f"{dup['barrier']} cut {a['cut']:,} of {a['of']:,} bytes of source '{a['source']}' "
                f"({a['cut'] / a['of']:.0%}): see `tokenmill dedup stats {dup['dataset']}`"
                for a in dup.get("cut", {}).get("alarms", [])]
    seen = set()
    for row in document["mixture"]:
        if row["repeats_from"] is not None and row["stream"] not in seen:
            seen.add(row["stream"])
            out.append(f"stream '{row['stream']}' is exhausted in phase '{row['phase']}': from sample "
                       f"{row['repeats_from']:,} on it is read again")
        if abs(row["realised"] - row["planned"]) > 1:
            out.append(f"phase '{row['phase']}', stream '{row['stream']}': {row['realised']:,} windows are more than "
                       f"one away from the planned {row['planned']:,.1f}")
    return out
