"""Read an export of token shards with the loader of its own project, shuffled, and print how many tokens per second
come.

    PYTHON peer_delivery.py litdata|mds FOLDER LENGTH BATCH SECONDS [raw|masks EOS]

Runs in the environment of litdata or mosaicml-streaming (`benchmarks/delivery.py --peer`) and prints a JSON object. The
loader runs in a single process without workers, as the trainer's own loader does in `delivery.py`.

litdata gives blocks of LENGTH + 1 tokens, which its loader stacks to batches. streaming gives documents, one by one, as
numpy arrays. From these, inputs and targets are made as int64 tensors, the least that a training needs.

With `raw`, tokens are only counted. With `masks`, litdata's blocks become what the trainer's loader gives: positions
within documents, and no target in the next document. EOS, the id of the end-of-text token, shows where documents end,
because neither loader says so.

The comparison favours the peers in three points. They do not verify checksums. streaming's documents are not cut into
windows. litdata shuffles the chunks, and inside a chunk 256 blocks at a time, while the trainer's loader shuffles all
windows.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time


def main() -> None:
    kind, folder, length, batch, seconds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    import numpy as np
    import torch

    torch.set_num_threads(1)
    if kind == "litdata":
        import litdata as peer
        from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

        dataset = StreamingDataset(folder, item_loader=TokensLoader(block_size=length + 1), shuffle=True, seed=1)
        rows = iter(StreamingDataLoader(dataset, batch_size=batch, num_workers=0))
    else:
        import streaming as peer

        dataset = peer.StreamingDataset(local=folder, shuffle=True, shuffle_seed=1, batch_size=batch)
        rows = (row["tokens"] for row in dataset)
    warm, tokens, began, cpu = 20 if kind == "litdata" else 2000, 0, 0.0, 0.0
    extra, eos = sys.argv[6] if sys.argv[6:] else "", int(sys.argv[7]) if sys.argv[7:] else -1
    numbers = np.arange(length)
    for number, row in enumerate(rows):
        if number == warm:
            tokens, began, cpu = 0, time.perf_counter(), time.process_time()
        if extra != "raw":
            wide = (row if kind == "litdata" else torch.from_numpy(row)).to(torch.int64)
            inputs, targets = wide[..., :-1].contiguous(), wide[..., 1:].contiguous()
        if extra == "masks":
            ended = inputs.numpy() == eos
            begins = np.zeros_like(numbers, shape=ended.shape)
            begins[:, 1:] = numbers[1:] * ended[:, :-1]
            targets.numpy()[ended] = -100
            _ = numbers - np.maximum.accumulate(begins, axis=1, out=begins)
        tokens += row.numel() if kind == "litdata" else len(row)
        if number > warm and time.perf_counter() - began > seconds:
            break
    print(json.dumps({"version": peer.__version__, "tokens_per_s": tokens / (time.perf_counter() - began),
                      "tokens_per_cpu_s": tokens / (time.process_time() - cpu)}))


if __name__ == "__main__":
    tempfile.tempdir = tempfile.mkdtemp()
    main()
