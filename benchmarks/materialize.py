"""Does the memory of `tokenmill materialize` grow with the data?

    python benchmarks/materialize.py [--gb 1 3] [--workers 1] [--work DIR]

For each size, makes a shard set of random tokens (u16, documents of 800 tokens, shards of 256 MB), and a curriculum
that reads all of it once. Then materializes the curriculum. Prints the peak memory of the largest process and of all
processes together, CPU seconds, and MB per CPU second. Memory is sampled four times a second, as the proportional set
size, which counts shared pages once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fineweb_vs_datatrove import descendants, pss  # noqa: E402
from tokenizer.mixture.resolve import resolve  # noqa: E402
from tokenizer.shards.layout import MANIFEST, Manifest, Shard, file_name  # noqa: E402
from tokenizer.shards.writer import ShardWriter  # noqa: E402

VOCAB, EOS, DOCUMENT, SHARD = 32_000, 0, 800, 256 << 20
TOKENIZER = {"sha256": "c" * 64, "vocab_size": VOCAB, "eos": EOS, "path": "shards/tokenizer.json"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", nargs="+", type=float, default=[1, 3], metavar="GB", help="sizes of the shard sets")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--work", type=Path, help="scratch folder (default: a temporary one)")
    options = parser.parse_args()
    for size in options.gb:
        work = options.work or Path(tempfile.mkdtemp(prefix="materialize-"))
        shutil.rmtree(work / "store", ignore_errors=True)
        make(work / "store", int(size * 1e9))
        one, together, cpu = measured(work / "store", options.workers)
        print(f"{size:g} GB: largest process {one:,.0f} MB, all processes {together:,.0f} MB, {cpu:.0f} s of CPU, "
              f"{size * 1e3 / cpu:.0f} MB per CPU second", flush=True)
        shutil.rmtree(work, ignore_errors=True)
    return 0


def make(store: Path, size: int) -> None:
    """Write a store with one shard set of `size` bytes of tokens, and a run whose curriculum reads it once."""
    folder = store / "shards" / "web" / "split=train"
    folder.mkdir(parents=True)
    shards = [shard(folder, number, min(SHARD, size - first)) for number, first in enumerate(range(0, size, SHARD))]
    manifest = Manifest("web", "train", "uint16", TOKENIZER["sha256"], VOCAB, EOS, sum(s.tokens for s in shards),
                        sum(s.documents for s in shards), sum(s.text_bytes for s in shards), tuple(shards))
    manifest = replace(manifest, sha256=manifest.identity())
    for name in (MANIFEST, f"shards-{manifest.sha256[:16]}.json"):
        (folder / name).write_text(manifest.dumps())
    train = {"path": "shards/web/split=train", "sha256": manifest.sha256, "tokens": manifest.tokens,
             "documents": manifest.documents, "bytes": manifest.text_bytes}
    val = {"path": None, "sha256": None, "tokens": 0, "documents": 0, "bytes": 0}
    recipe = {"curriculum": {"total": manifest.tokens - manifest.tokens // 50, "phases": [
        {"name": "all", "until": "100%", "sequence": 2048, "batch": 2048 * 64, "mix": {"web": 1}}]},
        "shards": {"web": {"longest": 8192}}}
    curriculum, _ = resolve(recipe, {"web": {"name": "web", "tokenizer": TOKENIZER["sha256"], "dtype": "uint16",
                                             "train": train, "val": val}}, TOKENIZER)
    run = store / "runs" / "random"
    run.mkdir(parents=True)
    curriculum.save(run / "curriculum.json")


def shard(folder: Path, number: int, size: int) -> Shard:
    rng = np.random.default_rng(number)
    paths = {kind: folder / f"{kind}.tmp" for kind in ("body", "ends", "table", "blocks")}
    writer = ShardWriter(*(str(path) for path in paths.values()), VOCAB, EOS, lambda: str(folder / "loss.tmp"))
    documents = size // 2 // DOCUMENT
    for first in range(0, documents, 4096):
        count = min(4096, documents - first)
        tokens = rng.integers(1, VOCAB, (count, DOCUMENT))
        tokens[:, -1] = EOS
        lengths = np.full(count, DOCUMENT)
        writer.add(tokens.ravel(), lengths, [f"{number:08x}{row:024x}" for row in range(first, first + count)], 0,
                   np.arange(first, first + count), 3 * lengths)
    facts = writer.close()
    sums = {kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in paths.items()}
    names = {kind: file_name(number, kind, digest) for kind, digest in sums.items()}
    for kind, path in paths.items():
        path.rename(folder / names[kind])
    return Shard(index=number, **facts, **names, table_sha256=sums["table"])


def measured(store: Path, workers: int) -> tuple[float, float, float]:
    """Materialize the run of a store. Returns (peak MB of the largest process, of all together, CPU seconds)."""
    before = os.times()
    process = subprocess.Popen([sys.executable, "-m", "pipeline.cli", "materialize", "random", "--store", str(store),
                                "--backend", "process", "--workers", str(workers), "--quiet"],
                               env={**os.environ, "PYTHONPATH": str(ROOT)})
    one = together = 0.0
    while process.poll() is None:
        sizes = [pss(pid) for pid in descendants(process.pid)]
        one, together = max(one, *sizes), max(together, sum(sizes))
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit(process.returncode)
    after = os.times()
    return one, together, (after.children_user + after.children_system - before.children_user
                           - before.children_system)


if __name__ == "__main__":
    sys.exit(main())
