"""`tokenmill tokenizer …`, `shards …`, `materialize`: tokens and what they are made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import fail

ShardsArg = Annotated[Path, typer.Argument(metavar="SHARDS", help="A shard set: STORE/shards/NAME/split=train.")]


def register(app: typer.Typer) -> None:
    tokenizer = typer.Typer(help="Train and judge tokenizers.", no_args_is_help=True)
    tokenizer.command("train")(train)
    tokenizer.command("eval")(evaluate)
    app.add_typer(tokenizer, name="tokenizer")
    shards = typer.Typer(help="Look into token shards.", no_args_is_help=True)
    for name, command in (("verify", verify), ("head", head), ("stats", stats), ("find", find)):
        shards.command(name)(command)
    app.add_typer(shards, name="shards")
    app.command("materialize")(materialize)


def texts(paths: list[Path], column: str = "text") -> Iterator[str]:
    """Texts of Parquet parts (a column), or of text files (one text each)."""
    import pyarrow.parquet as pq

    for path in paths:
        if not path.is_file():
            fail(f"no such file: {path}", 2)
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as f:
                for batch in f.iter_batches(256, columns=[column]):
                    yield from batch.column(column).to_pylist()
        else:
            yield path.read_text(encoding="utf-8", errors="replace")


def train(files: Annotated[list[Path], typer.Argument(help="Parquet parts or text files.")],
          out: Annotated[Path, typer.Option(help="tokenizer.json, or a SentencePiece .model.")],
          vocab: Annotated[int, typer.Option(help="Number of tokens.")] = 32000,
          kind: Annotated[str, typer.Option(help="bpe, unigram or sentencepiece-bpe.")] = "bpe") -> None:
    """Train a tokenizer: byte-level BPE, or SentencePiece."""
    from tokenizer.train import train_bpe, train_sentencepiece

    if kind == "bpe":
        train_bpe(texts(files), vocab, out)
    elif kind in ("unigram", "sentencepiece-bpe"):
        train_sentencepiece(texts(files), vocab, out, "unigram" if kind == "unigram" else "bpe")
    else:
        fail(f"--kind {kind}: choose bpe, unigram or sentencepiece-bpe", 2)
    typer.echo(str(out))


def evaluate(tokenizer: Annotated[Path, typer.Argument(help="tokenizer.json, a .model, or a folder with one.")],
             files: Annotated[list[Path], typer.Argument(help="Parquet parts or text files; each is a group.")],
             json_lines: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Judge a tokenizer on texts: bytes per token, tokens per word, continued words, round trip."""
    from tokenizer.evaluate import evaluate as judge
    from tokenizer.load import load_tokenizer

    scores = judge(load_tokenizer(tokenizer), ((str(p), t) for p in files for t in texts([p])))
    for name, score in scores.items():
        row = score.to_json()
        typer.echo(json.dumps({"group": name, **row}) if json_lines else
                   f"{name}  " + "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                                           for k, v in row.items()))


def verify(shards: ShardsArg) -> None:
    """Check a shard set against its manifest; exit code 1 when something is wrong."""
    from tokenizer.shards.verify import verify as check

    problems = check(shards)
    for problem in problems:
        typer.echo(problem)
    if problems:
        fail(f"{shards}: {len(problems)} problems; restore the files from a copy, or run the recipe again")
    typer.echo(f"{shards}: sound")


def stats(shards: ShardsArg, json_lines: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Counts of a shard set."""
    from tokenizer.shards.reader import ShardSet

    found = ShardSet(shards)
    m = found.manifest
    row = {"shards": len(m.shards), "documents": m.documents, "tokens": m.tokens, "text_bytes": m.text_bytes,
           "dtype": m.dtype, "vocab_size": m.vocab_size, "eos": m.eos, "sha256": m.sha256,
           "tokens_per_document": round(m.tokens / max(m.documents, 1), 1),
           "bytes_per_token": round(m.text_bytes / max(m.tokens - m.documents, 1), 3)}
    typer.echo(json.dumps(row) if json_lines else "\n".join(f"{k:20} {v}" for k, v in row.items()))


def head(shards: ShardsArg, tokenizer: Annotated[Path, typer.Option(help="Tokenizer to decode with.")],
         limit: Annotated[int, typer.Option("-n")] = 3,
         chars: Annotated[int, typer.Option(help="Characters shown of each document.")] = 300) -> None:
    """The first documents of a shard set, decoded."""
    from stages.scrub.pii import scrub_text

    from tokenizer.load import load_tokenizer
    from tokenizer.shards.reader import ShardSet

    found, coder = ShardSet(shards), load_tokenizer(tokenizer)
    start = 0
    for _ in range(limit):
        if start >= found.tokens:
            break
        [span, *_] = found.documents(start, start + 1)
        text = scrub_text(coder.decode(found.read(span.start, span.stop - 1)))
        typer.echo(f"── {span.id}  {span.stop - span.start:,} tokens\n{text[:chars]}")
        start = span.stop


def find(shards: ShardsArg, id: Annotated[str, typer.Argument(help="Document id, or its beginning.")]) -> None:
    """Where a document stands in a shard set: its token range; exit code 1 when it is not there."""
    import pyarrow.parquet as pq

    from tokenizer.shards.reader import ShardSet

    found = ShardSet(shards)
    base = 0
    hits = 0
    for info in found.manifest.shards:
        before = 0
        with pq.ParquetFile(found.folder / info.table) as f:
            for batch in f.iter_batches(1 << 16, columns=["id", "end"]):
                for doc, end in zip(batch.column("id").to_pylist(), batch.column("end").to_pylist()):
                    if doc.startswith(id):
                        typer.echo(f"{doc}  tokens {base + before:,} to {base + end:,}  {info.body}")
                        hits += 1
                    before = end
        base += info.tokens
    if not hits:
        fail(f"{shards}: no document {id}")


def materialize(run: Annotated[str, typer.Argument(help="Name of a run in the store, or its folder.")],
                store: Annotated[str, typer.Option("--store", envvar="TOKENMILL_STORE")] = "store",
                format: Annotated[str, typer.Option(help="bytes (raw tokens) or parquet (input_ids).")] = "bytes",
                workers: Annotated[int | None, typer.Option(help="Child processes (default: all cores).")] = None,
                address: Annotated[str | None, typer.Option(help="Attach to this Ray cluster.")] = None,
                backend: Annotated[str, typer.Option(help="ray, process (no Ray) or inline (to debug).")] = "ray",
                takeover: Annotated[bool, typer.Option(help="Fence another driver that seems to hold it.")] = False,
                quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
                json_lines: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Write the samples of a run in the order they are trained on, for sequential reading."""
    from pipeline.cli.runs import resolve_run
    from pipeline.materialize import materialize as write
    from pipeline.run import default_workers, make_backend

    if format not in ("bytes", "parquet"):
        fail(f"--format {format}: choose bytes or parquet", 2)
    if backend not in ("ray", "process", "inline"):
        fail(f"--backend {backend}: choose ray, process or inline", 2)
    root, name = resolve_run(run, store)
    made, folder = write(root, name, format, make_backend=make_backend(backend, workers or default_workers(), address),
                         show="json" if json_lines else "quiet" if quiet else "rich", takeover=takeover)
    if json_lines:
        typer.echo(json.dumps({"event": "done", "folder": folder, "rows": made.rows, "files": len(made.files)}))
    elif not quiet:
        typer.echo(f"{made.rows:,} samples in {len(made.files)} files: {folder}")
