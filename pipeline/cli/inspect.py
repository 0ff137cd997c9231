"""`tokenmill inspect`: shows documents that were kept, dropped or quarantined, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.base.visible import json_text, visible
from pipeline.cli.errors import BadUsage
from pipeline.cli.options import CharsOpt, JsonOpt, LimitOpt, StoreOpt, open_store

if TYPE_CHECKING:
    from pipeline.store.fs import Store

KINDS = {"datasets": "kept", "dropped": "dropped", "quarantine": "quarantined"}


def register(app: typer.Typer) -> None:
    app.command("inspect")(inspect)


def inspect(dataset: Annotated[str | None, typer.Argument(
                metavar="DATASET", help="A dataset of the store; without one, all are listed.")] = None,
            store: StoreOpt = "store",
            dropped: Annotated[bool, typer.Option("--dropped", help="Show dropped documents, not kept ones.")] = False,
            quarantined: Annotated[bool, typer.Option("--quarantined", help=(
                "Show records that could not be read, and documents that failed a stage."))] = False,
            reason: Annotated[str | None, typer.Option(help="Only documents with this reason.")] = None,
            stage: Annotated[str | None, typer.Option(help=(
                "Only documents dropped or quarantined by this stage."))] = None,
            source: Annotated[str | None, typer.Option(help="Only documents of this source.")] = None,
            language: Annotated[str | None, typer.Option(help="Only documents of this language.")] = None,
            id: Annotated[str | None, typer.Option(help="Only the document with this id, or its beginning.")] = None,
            limit: LimitOpt = 5, chars: CharsOpt = 400, json_texts: JsonOpt = False) -> None:
    """Show documents of a dataset.

    Shows kept documents or, with an option, dropped or quarantined ones with the reasons. Personal data is masked.

    \b
    Examples:
      tokenmill inspect --store store
      tokenmill inspect clean --dropped --reason gopher_short_doc -n 3
      tokenmill inspect extracted --id 3f2a91c0 --chars 0 --json
    """
    from stages.scrub.rows import mask

    at = open_store(store)
    if dataset is None:
        _list_datasets(at, json_texts)
        return
    if dropped and quarantined:
        raise BadUsage("--dropped and --quarantined are two folders: give one of them")
    kind = "quarantine" if quarantined else "dropped" if dropped or reason or stage else "datasets"
    if quarantined and language:
        raise BadUsage("--language: nothing is known of the language of a quarantined record; leave it out")
    check_published(at, kind, dataset)
    filters = {"reason": reason, "stage": stage, "source": source, "language": language}
    count = 0
    for row in rows(at, kind, dataset, {k: v for k, v in filters.items() if v is not None}, id):
        mask(row, chars)
        typer.echo(json_text(row) if json_texts else card(row))
        count += 1
        if count == limit:
            break
    if not count:
        typer.echo(f"no {KINDS[kind]} document of '{dataset}' matches" if id or any(filters.values())
                   else f"'{dataset}' has no {KINDS[kind]} documents", err=True)


def check_published(store: Store, kind: str, dataset: str) -> None:
    """Raise BadUsage unless the store has published documents of this kind (datasets, dropped or quarantine) for the
    dataset."""
    from pipeline.store.dataset import manifest
    from pipeline.store.fs import StoreError

    try:
        manifest(store, dataset, kind)
    except StoreError as e:
        raise BadUsage(str(e)) from None


def rows(store: Store, kind: str, dataset: str, equal: dict[str, str] | None = None, id: str | None = None,
         columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows (documents) of the published folder KIND/DATASET as dicts, in the order of the folder's files.
    `equal` maps names of columns to the values that rows must have, and `id` is the beginning that their ids must have.
    `columns` are the columns to read; None means all."""
    import pyarrow.compute as pc

    from pipeline.store.dataset import iter_batches

    for batch in iter_batches(store, f"{kind}/{dataset}", columns):
        for column, value in (equal or {}).items():
            batch = batch.filter(pc.equal(batch.column(column), value))
        if id is not None:
            batch = batch.filter(pc.starts_with(batch.column("id"), id))
        for start in range(0, batch.num_rows, 16):
            yield from batch.slice(start, 16).to_pylist()


def card(row: dict[str, Any]) -> str:
    """Format a document for a terminal. The first line has its id, source, language and URL or file. Below are the step
    and the reason for which it was dropped or quarantined (if it was), its signals, metadata and text."""
    place = row.get("file") or (row.get("locator") or {}).get("file") or ""
    if row.get("record") is not None:
        place += f" record {row['record']}"
    head = [row["id"] or "(no id)", row.get("source") or "", row.get("language") or "", row.get("url") or place]
    lines = ["── " + "  ".join(word for word in head if word)]
    if row.get("reason"):
        unread = f"{row['bytes']:,} bytes of the file were not read  " if row.get("bytes") else ""
        lines.append(f"   {row['stage'] or 'reader'}: {row['reason']}  {unread}{row.get('detail') or ''}".rstrip())
    signals = {k: v for k, v in (row.get("signals") or {}).items() if v is not None}
    if signals:
        lines.append("   " + "  ".join(f"{k}={v:.4g}" for k, v in signals.items()))
    if row.get("meta") not in (None, "", "{}"):
        lines.append(f"   {row['meta']}")
    if row.get("text"):
        remaining = row["chars"] - len(row["text"])
        lines.append(row["text"] + (f" … ({remaining:,} more characters)" if remaining > 0 else ""))
    return visible("\n".join(lines))


def _list_datasets(store: Store, json_texts: bool) -> None:
    """Print a line for every dataset of the store: documents kept, dropped and quarantined, and bytes of text."""
    import pyarrow.compute as pc

    from pipeline.base.humanize import size
    from pipeline.store.dataset import MANIFEST, manifest

    names = sorted({p.split("/")[1] for p in store.list("datasets") if p.endswith("/" + MANIFEST)})
    if not names and not json_texts:
        typer.echo(f"no dataset in {store.root} yet", err=True)
    width = max((len(n) for n in names), default=0)
    for name in names:
        entry: dict[str, Any] = {"dataset": name}
        for kind, word in KINDS.items():
            table = manifest(store, name, kind)
            entry[word] = pc.sum(table["rows"]).as_py() or 0
            if kind == "datasets":
                entry |= {"parts": table.num_rows, "text_bytes": pc.sum(table["text_bytes"]).as_py() or 0}
        typer.echo(json.dumps(entry) if json_texts else
                   f"{name:<{width}}  {entry['kept']:>12,} kept  {entry['dropped']:>12,} dropped  "
                   f"{entry['quarantined']:>8,} quarantined  {size(entry['text_bytes']):>9} of text")
