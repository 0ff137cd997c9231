"""How fast are exports, compared with the writers of the projects that read them?

    python benchmarks/exports.py [--tokens 32000000] [--mean 800] [--repeat 3]

Makes a shard set of random documents (u16) on the disk, and exports it as `tokenmill shards export` does, which reads
and checks the shards. For comparison, each project's own writer writes the same documents, if it is installed. It gets
them from memory:

- mosaicml-streaming: MDSWriter
- litdata: BinaryWriter, which `litdata.optimize` uses
- megatron-core: IndexedDatasetBuilder
- datatrove: TokenizedFile

All run in turn, --repeat times. Figures are medians of CPU seconds and of wall seconds. Files are written to a
temporary folder, which is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tokenizer.export.export import FORMATS, export  # noqa: E402
from tokenizer.imports.assemble import Assembly  # noqa: E402
from tokenizer.imports.documents import ImportedDocuments  # noqa: E402
from tokenizer.shards.layout import MANIFEST, SHARD_BYTES, Manifest  # noqa: E402
from tokenizer.shards.reader import ShardSet  # noqa: E402

VOCAB, EOS = 50_000, 3
Writer = Callable[[Path, Sequence[np.ndarray], Sequence[str]], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_000_000)
    parser.add_argument("--mean", type=int, default=800, help="tokens of a document")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        documents, ids = shard_set(folder / "set", options.tokens, options.mean)
        writers = {name: writer for name, writer in WRITERS.items() if installed(name)}
        runs: dict[str, Callable[[Path], object]] = {
            **{name: lambda out, name=name: export(ShardSet(folder / "set"), name, out) for name in FORMATS},
            **{f"{name}: theirs": lambda out, write=write: write(out, documents, ids)
               for name, write in writers.items()}}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(options.repeat):
            for name, run in runs.items():
                times[name].append(timed(run, folder / "out"))
        for name in FORMATS:
            ours = medians(times[name])
            line = f"{name:<9} ours {ours[0]:6.2f} CPU-s, {ours[1]:6.2f} s"
            if name in writers:
                theirs = medians(times[f"{name}: theirs"])
                line += (f"; theirs {theirs[0]:6.2f} CPU-s, {theirs[1]:6.2f} s: {theirs[0] / ours[0]:.1f}x the CPU, "
                         f"{theirs[1] / ours[1]:.1f}x the time")
            print(line, flush=True)
    return 0


def shard_set(folder: Path, tokens: int, mean: int) -> tuple[list[np.ndarray], list[str]]:
    """Write a shard set of random documents. Returns their tokens and ids."""
    rng = np.random.default_rng(1)
    lengths = rng.geometric(1 / mean, tokens // mean)
    flat = rng.integers(4, VOCAB, int(lengths.sum()), np.uint16)
    flat[np.cumsum(lengths) - 1] = EOS
    ids = [f"{number:032x}" for number in range(len(lengths))]
    folder.mkdir()
    assembly = Assembly(folder, VOCAB, EOS, SHARD_BYTES)
    assembly.add(ImportedDocuments("a", 0, flat, lengths, ids, None), ids, 0, np.ones(len(lengths), bool))
    manifest = Manifest.of("web", "train", "t" * 64, VOCAB, EOS, assembly.close())
    (folder / MANIFEST).write_text(manifest.dumps())
    return np.split(flat, np.cumsum(lengths)[:-1]), ids


def timed(run: Callable[[Path], object], out: Path) -> tuple[float, float]:
    """Return the CPU seconds and wall seconds of a call of `run`. The files that it writes are removed."""
    cpu, began = time.process_time(), time.perf_counter()
    run(out)
    times = time.process_time() - cpu, time.perf_counter() - began
    shutil.rmtree(out)
    return times


def medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(cpu for cpu, _ in times), statistics.median(wall for _, wall in times)


# -- the writers of the other projects -------------------------------------------------------------------------------
def write_mds(out: Path, documents: Sequence[np.ndarray], ids: Sequence[str]) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(out), columns={"id": "str", "tokens": "ndarray:uint16"}) as writer:
        for id, tokens in zip(ids, documents):
            writer.write({"id": id, "tokens": tokens})


def write_litdata(out: Path, documents: Sequence[np.ndarray], ids: Sequence[str]) -> None:
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    out.mkdir()
    writer = BinaryWriter(str(out), chunk_bytes=64_000_000, item_loader=TokensLoader(block_size=2049))
    for number, tokens in enumerate(documents):
        writer[number] = torch.from_numpy(tokens.view(np.int16))       # its type of 2 bytes
    writer.done()
    writer.merge()


def write_megatron(out: Path, documents: Sequence[np.ndarray], ids: Sequence[str]) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    out.mkdir()
    builder = IndexedDatasetBuilder(str(out / "a.bin"), dtype=np.uint16)
    for tokens in documents:
        builder.add_document(torch.from_numpy(tokens.view(np.int16)), [len(tokens)])
    builder.finalize(str(out / "a.idx"))


def write_ds(out: Path, documents: Sequence[np.ndarray], ids: Sequence[str]) -> None:
    from datatrove.io import get_datafolder
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(get_datafolder(str(out)), "a.ds", save_index=True, token_size=2, tokenizer_name_or_path="t")
    for tokens in documents:
        file.write(tokens.tolist(), None)                              # it takes lists, as tokenizers give them
    file.close()


WRITERS: dict[str, Writer] = {"ds": write_ds, "megatron": write_megatron, "mds": write_mds, "litdata": write_litdata}
MODULES = {"ds": "datatrove.pipeline.tokens.tokenizer", "megatron": "megatron.core.datasets.indexed_dataset",
           "mds": "streaming", "litdata": "litdata.streaming.writer"}


def installed(name: str) -> bool:
    import importlib

    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        importlib.import_module(MODULES[name])
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
