"""Compare Tokenmill's MinHash deduplication with datatrove's by the CPU time of signatures and by the documents kept.
Measure the CPU time of Tokenmill's waves, the rounds of tasks that a deduplication runs after the signatures.

    python benchmarks/dedup.py signatures [--texts FILE.jsonl.gz] [--peer-texts N]
    python benchmarks/dedup.py waves      [--documents N]
    python benchmarks/dedup.py kept       [--texts FILE.jsonl.gz]

- `signatures`: each side computes the signatures of the same texts: words, shingles, minima, and on our side also the
  band keys. The texts are shuffled by a fixed seed. datatrove gets only the first --peer-texts of them, because it
  takes long.
- `waves`: the waves `bands`, `links` and `clusters` run over random band keys, then the waves that count duplicates.
  Every fifth document shares some of its keys with another one. In a second run, nine tenths of the documents also
  share one key. Then the whole step runs over texts of 500 words, of which every fifth is an edited copy.
- `kept`: the step with `dialect: datatrove, verify: null` and datatrove's own stages run on the same texts, by default
  60,000, of which 10,000 are edited copies. The clusters, and the number of documents kept, must be equal. Which
  document of a cluster is kept may differ, since datatrove keeps an arbitrary one.

Costs per text are slopes, so that imports, compiled kernels and the fixed costs of tasks do not count: the CPU time for
all texts minus that for a part of them, divided by the difference of the two numbers of texts.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.base.parquet import write_table  # noqa: E402
from pipeline.engine.task import CrashCursor, TaskSpec  # noqa: E402
from pipeline.engine.worker.attempt import run_attempt  # noqa: E402
from pipeline.store.content_keys import task_key  # noqa: E402
from pipeline.store.fs import Store  # noqa: E402
from pipeline.store.lists import ListFiles, writes_to  # noqa: E402
from stages.barrier import PartRef, TaskResult, Wave  # noqa: E402
from stages.dedup.counts import count_waves  # noqa: E402
from stages.dedup.minhash import MinHash  # noqa: E402
from stages.dedup.signature import MinHashSignature  # noqa: E402
from stages.document import Document  # noqa: E402
from tests.stages.dedup_corpus import edited, vocabulary  # noqa: E402
from tests.stages.dedup_fragment import Doc, run_fragment, write_parts  # noqa: E402

DATA = Path(os.environ.get("TOKENMILL_TEST_DATA") or ROOT / ".cache" / "data")


def ours(**config: Any) -> Callable[[str], None]:
    stage = MinHashSignature(**config)
    return lambda text: (stage.process(Document("0" * 32, text, language="eng_Latn")), None)[1]


def datatrove(function: str) -> Callable[[str], None]:
    """Return a function that computes datatrove's signature of a text, as datatrove's stage does, but reads and writes
    no files. `function` is the hash of the shingles: sha1 or xxhash."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig, create_hash_func
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    config = MinhashConfig(hash_config=HashConfig(hash_fc=function, precision=64))
    peer = MinhashDedupSignature.__new__(MinhashDedupSignature)        # no output folder
    peer.config, peer.num_hashes, peer._parameters = config, 14 * 8, None
    digest = create_hash_func(config.hash_config, bytes)
    peer._hash_func = lambda text: digest(text.encode())
    peer.word_tokenizer = load_word_tokenizer("eng")

    def sign(text: str) -> None:
        shingles = peer.get_shingles(text)
        if shingles.size:
            peer.get_signature(shingles)

    return sign


def seconds(sign: Callable[[str], None], texts: list[str]) -> float:
    begun = time.process_time()
    for text in texts:
        sign(text)
    return time.process_time() - begun


def slope(sign: Callable[[str], None], texts: list[str], repeats: int) -> tuple[float, float]:
    """Return (bytes per CPU second, CPU seconds per text) of computing signatures. The CPU time is that of all texts
    minus that of their first half, so it is the cost of the second half without fixed costs. It is the median of
    `repeats` measurements."""
    half = texts[len(texts) // 2:]
    seconds(sign, texts)
    costs = [seconds(sign, texts) - seconds(sign, texts[:len(texts) // 2]) for _ in range(repeats)]
    cost = statistics.median(costs)
    return sum(len(text.encode()) for text in half) / cost, cost / len(half)


def signatures(texts: list[str], peer_texts: int) -> None:
    random.Random(0).shuffle(texts)
    print(f"{len(texts)} texts, {sum(len(t.encode()) for t in texts) / 1e6:.1f} MB")
    print(f"{'':28s}{'MB/CPU-s':>10s}{'us/text':>10s}{'of datatrove':>14s}")
    for function in ("sha1", "xxhash"):
        peer = slope(datatrove(function), texts[:peer_texts], 1)
        sides = {f"datatrove, {function}": peer,
                 f"dialect datatrove, {function}": slope(ours(dialect="datatrove", hash=function), texts, 3),
                 "dialect tokenmill": slope(ours(), texts, 5)}
        for name, (speed, each) in sides.items():
            print(f"{name:28s}{speed / 1e6:10.2f}{each * 1e6:10.1f}{speed / peer[0]:13.1f}x", flush=True)


# -- waves -----------------------------------------------------------------------------------------------------------
def band_key_parts(store: Store, documents: int, hot: bool, rows: int = 50_000) -> list[PartRef]:
    """Write side tables with random band keys: the files that `minhash` reads beside the parts of a dataset. The parts
    themselves are not written. A fifth of the documents share three keys with another one. With `hot`, nine tenths of
    the documents also share one key."""
    rng = np.random.default_rng(1)
    bands = rng.integers(0, 2**63, (documents, 14), dtype=np.uint64)
    copies = np.flatnonzero(rng.random(documents) < 0.2)
    bands[copies, :3] = bands[(copies * rng.random(len(copies))).astype(int), :3]
    if hot:
        bands[rng.permutation(documents)[:documents * 9 // 10], 5] = 12345
    parts = []
    for start in range(0, documents, rows):
        keys = bands[start:start + rows]
        table = pa.table({"row": pa.array(np.arange(len(keys)), pa.uint32()),
                          "id": [f"{start + row:032x}" for row in range(len(keys))],
                          "chars": pa.array(np.full(len(keys), 3000), pa.uint32()),
                          "bands": pa.array([row.tobytes() for row in keys], pa.binary())})
        path = Path(store.at(f"in/{hot}-{documents}-{start}.side"))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(table, str(path))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        ref = {"$ref": f"in/{path.name}", "bytes": path.stat().st_size, "rows": len(keys), "content": digest,
               "sha256": digest}
        parts.append(PartRef(digest, "web", 0, len(keys), 3000 * len(keys), ref, ref))
    return parts


def run_waves(waves: list[Wave], store: Store) -> tuple[dict[str, float], dict[str, list[TaskResult]]]:
    """Run waves in this process. Returns (CPU seconds by wave, results by wave)."""
    done: dict[str, list[TaskResult]] = {}
    cost: dict[str, float] = {}
    lists, waves = ListFiles(writes_to(store)), list(waves)
    while waves:
        wave, results = waves.pop(0), []
        for draft in wave.tasks(done):
            args = lists.fold(draft.args)
            begun = time.process_time()
            record = run_attempt(TaskSpec(task_key(draft.task, args), draft.task, wave.name, args), store, "a0",
                                 CrashCursor())
            cost[wave.name] = cost.get(wave.name, 0.0) + time.process_time() - begun
            results.append(TaskResult({name: file.ref() for name, file in record.files.items()}, record.counters))
        done[wave.name] = results
        if wave.again(done):
            waves.insert(0, wave)
    return cost, done


def costs_of_waves(barrier: MinHash, parts: list[PartRef], store: Store) -> tuple[dict[str, float], dict[str, float]]:
    """Return the CPU seconds by wave, in two mappings: the waves that find clusters, and those that count
    duplicates."""
    cost, done = run_waves(barrier.waves(parts), store)
    counting, _ = run_waves(count_waves(parts, list(barrier.slices(parts, done)), False, barrier.rounds), store)
    return {wave: seconds for wave, seconds in cost.items() if wave not in ("shingles", "verify", "slices")}, counting


def waves(documents: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, barrier = Store(folder), MinHash(verify=None)
        costs_of_waves(barrier, band_key_parts(store, 2000, False), store)
        for name, hot in (("as they are", False), ("a hot key", True)):
            costs = [costs_of_waves(barrier, band_key_parts(store, n, hot), store) for n in (documents // 4, documents)]
            for what, less, more in zip(("", ", dup_count"), *costs, strict=True):
                each = {w: 1e6 * (more[w] - less[w]) / (documents - documents // 4) for w in more}
                print(f"{name}{what}: " + ", ".join(f"{w} {us:.2f}" for w, us in each.items())
                      + f"; {sum(each.values()):.2f} us/document", flush=True)
    sizes, costs, candidates = (4000, 16_000), [], []
    for size in (500, *sizes):                                  # the first one warms up
        with tempfile.TemporaryDirectory() as folder:
            store, barrier = Store(folder), MinHash()
            docs = synthetic(size, size // 5, 500)
            stage, begun = MinHashSignature(barrier.prepare()[1]), time.process_time()
            for doc in docs:
                stage.process(Document(doc.id, doc.text))
            signing = time.process_time() - begun
            parts = write_parts(barrier, docs, store, part_rows=20_000, row_group=500)
            del docs                    # else the garbage collector would visit them while the waves are measured
            cost, done = run_waves(barrier.waves(parts), store)
            costs.append({"signatures": signing, **cost})
            candidates.append(sum(r.counters["candidates"] for r in done["clusters"]))
    each = {w: 1e6 * (costs[-1][w] - costs[-2][w]) / (sizes[1] - sizes[0]) for w in costs[-1]}
    total, verifying = sum(each.values()), sum(each[w] for w in ("shingles", "verify", "slices"))
    share = (candidates[-1] - candidates[-2]) / (sizes[1] - sizes[0])
    print("texts of 500 words: " + ", ".join(f"{w} {us:.1f}" for w, us in each.items()) + f"; {total:.1f} us/document; "
          f"{share:.0%} candidates; verification {verifying / share:.1f} us/candidate, {verifying / total:.0%} of all")


# -- kept sets -------------------------------------------------------------------------------------------------------
def synthetic(documents: int, copies: int, words: int) -> list[Doc]:
    """Return random texts, of which `copies` are edited copies of others. They are in random order."""
    rng = random.Random(7)
    names = vocabulary(rng)
    texts = [rng.choices(names, k=words) for _ in range(documents - copies)]
    texts += [edited(rng, rng.choice(texts), rng.choice((0, 0.01, 0.02, 0.05)), names) for _ in range(copies)]
    rng.shuffle(texts)
    return [Doc(" ".join(text), "web", f"{number:032x}") for number, text in enumerate(texts)]


def kept(docs: list[Doc]) -> bool:
    """Deduplicate the documents with `dialect: datatrove` and with datatrove's own stages (signatures, buckets,
    clusters). Returns whether both find the same clusters and keep equally many documents."""
    from datatrove.data import Document as PeerDocument
    from datatrove.pipeline.dedup import minhash as theirs
    from datatrove.utils.hashing import HashConfig, create_hash_func

    with tempfile.TemporaryDirectory() as folder:
        config = theirs.MinhashConfig(hash_config=HashConfig(hash_fc="sha1", precision=64))
        stage = theirs.MinhashDedupSignature(f"{folder}/signatures", config)
        digest = create_hash_func(config.hash_config, bytes)
        stage._hash_func = lambda text: digest(text.encode())
        with np.errstate(over="ignore"):
            stage.run([PeerDocument(text=doc.text, id=doc.id) for doc in docs])
        for band in range(14):
            theirs.MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config).run(None, band, 14)
        theirs.MinhashDedupCluster(f"{folder}/buckets", f"{folder}/remove", config=config).run()
        removed = Path(f"{folder}/remove/000000.remove")
        gone = {docs[i].id for i in np.fromfile(removed, "<u4")} if removed.exists() else set()
        store, barrier = Store(f"{folder}/store"), MinHash(dialect="datatrove", verify=None)
        got = run_fragment(barrier, write_parts(barrier, docs, store, part_rows=10_000, row_group=10_000), store)
    alive = Counter(name for id, name in got.clusters.items() if id not in gone)
    agree = (len(got.removed) == len(gone) and gone <= set(got.clusters)
             and set(alive.values()) <= {1} and set(alive) == set(got.clusters.values()))
    print(f"{len(docs)} documents: datatrove removes {len(gone)}, dialect datatrove {len(got.removed)}, in "
          f"{len(alive)} clusters, of each of which datatrove keeps one: {agree}")
    return agree


def read_texts(path: Path) -> list[str]:
    with (gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8")) as lines:
        return [json.loads(line)["text"] for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["signatures", "waves", "kept"])
    parser.add_argument("--texts", type=Path, help="JSON lines with a key `text`, may be gzipped")
    parser.add_argument("--peer-texts", type=int, default=400, help="signatures: texts that datatrove gets")
    parser.add_argument("--documents", type=int, default=400_000, help="waves: documents with random band keys")
    options = parser.parse_args()
    if options.what == "signatures":
        signatures(read_texts(options.texts or DATA / "dedup" / "scancode_rules_dev.jsonl.gz"), options.peer_texts)
    elif options.what == "waves":
        waves(options.documents)
    else:
        docs = ([Doc(text, "web", f"{n:032x}") for n, text in enumerate(read_texts(options.texts))] if options.texts
                else synthetic(60_000, 10_000, 40))
        return 0 if kept(docs) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
