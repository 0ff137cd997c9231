"""`tokenmill shards index` and `tokenmill shards find`: find documents in a shard set by id, URL or domain."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.base.domain import domain_of
from pipeline.base.humanize import size
from pipeline.base.visible import visible
from pipeline.cli.errors import BadUsage, UserError, writing
from pipeline.cli.options import JsonOpt, LimitOpt, QuietOpt
from pipeline.cli.shard_sets import ShardsArg, opened

if TYPE_CHECKING:
    from tokenizer.shards.origin import OpenPart
    from tokenizer.shards.reader import ShardSet


def index(shards: ShardsArg, quiet: QuietOpt = False, json_lines: JsonOpt = False) -> None:
    """Write an index, with which `shards find` need not read all documents of a shard set.

    The index is a file in the folder of the shard set. URLs are read from the datasets of the store. Run the command
    again when the shards have changed.

    \b
    Example:
      tokenmill shards index store/shards/web/split=train
    """
    from tokenizer.shards.index_writer import write_index

    shard_set = opened(shards)
    datasets, open_part = _datasets(shards)
    with writing(shard_set.folder / "lookup.index", "folder for the shards"):
        path = write_index(shard_set, shard_set.folder, datasets, open_part)
    row = {"index": str(path), "documents": shard_set.manifest.documents, "bytes": path.stat().st_size}
    if json_lines:
        typer.echo(json.dumps(row))
    elif not quiet:
        typer.echo(f"{path}: {row['documents']:,} documents in {size(path.stat().st_size)}")


def find(shards: ShardsArg,
         id: Annotated[str | None, typer.Option(metavar="ID", help="Id of a document, or its beginning.")] = None,
         url: Annotated[str | None, typer.Option(metavar="URL", help="URL of documents, exactly as in the input.")] =
         None,
         domain: Annotated[str | None, typer.Option(
             metavar="DOMAIN", help="Host of the URLs, without port and `www.`; subdomains are not included.")] = None,
         limit: LimitOpt = 100,
         json_lines: JsonOpt = False) -> None:
    """Find where documents are in a shard set, by id, URL or domain.

    Prints the range of each document's tokens in the set's stream of tokens. The exit code is 1 when the set does not
    hold such a document. Without the index that `shards index` writes, all document tables are read, and for URLs and
    domains also the URLs in the datasets of the store.

    \b
    Examples:
      tokenmill shards find store/shards/web/split=train --id 3f2a91c0
      tokenmill shards find store/shards/web/split=train --domain example.org -n 5
    """
    asked = {name: text for name, text in (("id", id), ("url", url), ("domain", domain)) if text is not None}
    if len(asked) != 1 or not all(asked.values()):
        raise BadUsage("give one of --id, --url and --domain")
    [(column, text)] = asked.items()
    if column == "domain" and domain_of(f"http://{text}") != (text := text.lower().removeprefix("www.")):
        raise BadUsage(f"--domain {text}: this is no host; give it without scheme, port and path, as in example.org")
    count = 0
    with ExitStack() as stack:
        hits = _find(stack, opened(shards), shards, column, text)
        for row in islice(hits, limit or None):
            typer.echo(json.dumps(row) if json_lines else
                       visible(f"{row['id']}  tokens {row['start']:,} to {row['stop']:,}  {row['file']}"))
            count += 1
        if count and next(hits, None) is not None:
            typer.echo(f"more than {count:,} documents; -n 0 shows all", err=True)
    if not count:
        what = {"id": f"document {text}", "url": f"document of the URL {text}", "domain": f"document of {text}"}[column]
        raise UserError(f"{shards}: no {what}; it may be in the other split, or have been dropped")


def _find(stack: ExitStack, shard_set: ShardSet, shards: Path, column: str, text: str) -> Iterator[dict[str, Any]]:
    """Find the documents of a shard set whose id begins with `text`, or whose URL or domain is `text`; `column` says
    which. Returns where they are. The lookup index of the set is used if there is one; otherwise all documents are
    read."""
    from tokenizer.shards.find import places, places_of
    from tokenizer.shards.lookup import Lookup, by_id, by_text, name_of
    from tokenizer.shards.urls import documents, paths_of

    if column != "id" and not shard_set.manifest.has_texts:
        raise UserError(f"{shards}: was imported, and the URLs of its documents are not known; look for --id")
    path = shard_set.folder / name_of(shard_set.manifest.sha256)
    try:
        file = stack.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
    except FileNotFoundError:
        typer.echo(visible(f"{shards} has no index, so all its documents are read; `tokenmill shards index {shards}` "
                           f"writes one"), err=True)
        if column == "id":
            return places(shard_set, text)
    else:
        lookup = Lookup(file, shard_set.manifest, str(path))
        if column == "id":
            hits = by_id(shard_set, lookup, text)
            return places(shard_set, text) if hits is None else hits
        if column in lookup:
            return by_text(shard_set, lookup, column, text)
    datasets, open_part = _datasets(shards)
    of = domain_of if column == "domain" else (lambda url: url)
    everything = (url for _, urls in documents(shard_set, paths_of(datasets), open_part) for url in urls)
    return places_of(shard_set, (number for number, url in enumerate(everything) if url and of(url) == text))


def _datasets(shards: Path) -> tuple[Iterable[tuple[str, dict[str, str]]], OpenPart]:
    """Return the published datasets of the store that has the shard set in the folder `shards`, and a function that
    opens a part (data file) of these datasets. If the folder is in no store, there are no datasets."""
    from pipeline.store.fs import Store
    from pipeline.store.shard_set import dataset_parts

    root = next((folder.parent for folder in shards.absolute().parents if folder.name == "shards"), None)
    store = Store(root or shards)
    return (() if root is None else dataset_parts(store)), store.parquet
