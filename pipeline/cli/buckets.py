"""`tokenmill buckets fit`: finds the edges for the step `buckets`. Edges are the scores at which the step divides
documents into buckets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.base.files import replacing
from pipeline.cli.errors import BadUsage, reading, writing
from pipeline.cli.options import JsonOpt
from pipeline.cli.texts import files

#: with fewer documents per bucket, a message says that the edges are rough
ENOUGH = 50


def register(app: typer.Typer) -> None:
    buckets = typer.Typer(help="Find the edges of score buckets.", no_args_is_help=True, rich_markup_mode=None)
    buckets.callback()(lambda: None)
    buckets.command("fit")(fit)
    app.add_typer(buckets, name="buckets")


def fit(data: Annotated[list[Path], typer.Argument(
            metavar="DATA...", help="Parquet files with signals, or folders of them: STORE/datasets/NAME.")],
        score: Annotated[list[str], typer.Option("--score", metavar="SIGNAL",
                                                 help="Signal to divide into buckets, e.g. quality_score; "
                                                      "repeat it for several signals.")],
        out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The edges, for `buckets: {edges: …}`.")],
        by: Annotated[str | None, typer.Option(
            "--by", metavar="NAME", help="Compute separate edges for each group of documents: `language`, "
                                         "`source`, or a signal such as a topic.")] = None,
        buckets: Annotated[int | None, typer.Option(
            "--buckets", min=2, max=1000, metavar="N", help="Buckets of equal weight [default: 20].")] = None,
        at: Annotated[str | None, typer.Option(
            "--at", metavar="PERCENT,…", help="Cut at these percentages of the weight instead, say 30,60.")] = None,
        weight: Annotated[str, typer.Option(
            "--weight", metavar="NAME", help="Weight of a document: 'documents' (each weighs 1), 'bytes' (of its "
                                             "text), or a signal that holds whole numbers.")] = "documents",
        json_lines: JsonOpt = False) -> None:
    """Find the edges (scores) that divide the documents of a dataset into buckets.

    The edges are exact, because all documents are counted. They do not depend on how documents are divided into files.

    \b
    Examples:
      tokenmill buckets fit store/datasets/scored --score quality_score --by language --out edges.json
      tokenmill buckets fit store/datasets/scored --score perplexity --by language --at 30,60 --out ccnet.json
      tokenmill buckets fit store/datasets/scored --score a_score --score b_score --weight bytes --out nemotron.json
    """
    from stages.filter.buckets import Fit, vigintiles

    if at is not None and buckets is not None:
        raise BadUsage("give either --buckets or --at")
    shares = _shares(at) if at is not None else vigintiles(buckets or 20)
    scores = Fit(score, by)
    try:
        for groups, columns, weights in _columns(list(files(data)), score, by, weight):
            scores.add(groups, columns, weights)
    except ValueError as e:
        raise BadUsage(str(e)) from None
    empty = [s for s in score if not scores.weights[s]]
    if empty:
        raise BadUsage(f"no document has the score '{empty[0]}'; it is there, but null everywhere")
    document = scores.document(shares, weight)
    with writing(out), replacing(out) as part:
        part.write_text(json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")
    small = {s: [g for g, w in groups.items() if w.documents < ENOUGH * (len(shares) + 1)]
             for s, groups in scores.weights.items()}
    if json_lines:
        typer.echo(json.dumps({"edges": str(out), "buckets": len(shares) + 1, "scores": {
            s: {"groups": len(g), "documents": sum(w.documents for w in g.values()), "without": scores.missing[s],
                "small_groups": small[s]} for s, g in scores.weights.items()}}))
        return
    for s, groups in scores.weights.items():
        documents = sum(w.documents for w in groups.values())
        typer.echo(f"{out}: {s}: {len(shares) + 1} buckets over {documents:,} documents"
                   + (f" in {len(groups):,} groups by {by}" if by else "")
                   + (f"; {scores.missing[s]:,} have no such score" if scores.missing[s] else ""))
        if small[s]:
            named = ", ".join(f"'{g}'" if by else "all" for g in small[s][:5])
            typer.echo(f"  fewer than {ENOUGH} documents a bucket, edges are rough: {named}"
                       + (f" and {len(small[s]) - 5} more" if len(small[s]) > 5 else ""))


def _shares(text: str) -> list[Fraction]:
    """Parse the percentages of --at, such as '30,60', into shares between 0 and 1. Raises BadUsage unless they are
    numbers above 0 and below 100, each larger than the one before."""
    try:
        shares = [Fraction(part.strip().rstrip("%")) / 100 for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        raise BadUsage(f"--at {text}: give percentages, e.g. 30,60") from None
    if sorted(set(shares)) != shares or not 0 < shares[0] <= shares[-1] < 1:
        raise BadUsage(f"--at {text}: percentages ascend and lie between 0 and 100")
    return shares


def _columns(paths: Sequence[Path], scores: Sequence[str], by: str | None,
             weight: str) -> Iterator[tuple[Any, Any, Any]]:
    """Read the scores of documents from Parquet files. Yields, for each batch of rows, (group of each row, {signal:
    scores as float64}, weight of each row as int64). A score that is missing is NaN, and a missing weight is 0. The
    group of a row is its value in the column or signal `by`; if `by` is None, groups are None. Raises BadUsage for a
    file that is no Parquet file or lacks one of the signals, and for weights that are not whole numbers from 0 to
    2^53."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from pipeline.base.parquet import open_parquet
    from pipeline.recipe.errors import nearest
    from stages.filter.buckets import group_name

    column = by if by in ("language", "source") else None
    names = [*scores, *([by] if by and not column else []), *([weight] if weight != "documents" else [])]
    for path in paths:
        with reading(path):
            try:
                file = open_parquet(path)
            except pa.ArrowInvalid as e:
                raise BadUsage(f"{path} is no Parquet file ({e})") from None
            with file:
                schema = file.schema_arrow
                available = [f.name for f in schema.field("signals").type] if "signals" in schema.names else []
                for name in names:
                    if name not in available:
                        raise BadUsage(f"{path} has no signal '{name}': {nearest(name, available)}")
                for batch in file.iter_batches(65536, columns=[*([column] if column else []),
                                                               *(f"signals.{n}" for n in dict.fromkeys(names))]):
                    signals = {n: pc.struct_field(batch.column("signals"), n).cast(pa.float64()).to_numpy(False)
                               for n in dict.fromkeys(names)}
                    groups = None
                    if column:
                        groups = [g or "" for g in batch.column(column).to_pylist()]
                    elif by:
                        groups = [group_name(None if np.isnan(v) else float(v)) for v in signals[by]]
                    weights = np.ones(len(batch), np.int64)
                    if weight != "documents":
                        values = np.nan_to_num(signals[weight], nan=0.0)
                        if (values != np.floor(values)).any() or (values < 0).any() or (values > 2**53).any():
                            raise BadUsage(f"--weight {weight}: {path} has values that are no whole numbers; weights "
                                           f"are counts, say 'bytes'")
                        weights = values.astype(np.int64)
                    yield groups, {s: signals[s].astype(np.float64) for s in scores}, weights
