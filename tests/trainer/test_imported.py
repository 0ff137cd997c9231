"""A training continues with an imported shard set as a new stream."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.synthetic import EOS, TOKENIZER, VOCAB, language, make_run, quiet, steps
from tokenizer.imports.imports import import_tokens
from tokenizer.imports.source import Coding
from trainer.__main__ import main
from trainer.data.batches import Data
from trainer.loop.run import open_run
from trainer.loop.train import train


@pytest.mark.parametrize("masked", [False, True])
def test_an_imported_set_is_a_stream_of_a_training(tmp_path, masked):
    from trainer.parallel.world import world

    run = make_run(tmp_path / "store", total=640, phases=[
        {"name": "first", "until": "100%", "sequence": 32, "batch": 160, "mix": {"web": 70, "code": 30}}],
        train={"schedule": {"warmup": "5%", "floor": 0.1}})
    texts = language(7, 300)
    (tmp_path / "a.ds").write_bytes(np.concatenate(texts).astype("<u2").tobytes())
    (tmp_path / "a.ds.index").write_bytes(np.cumsum([len(text) for text in texts]).astype("<u8").tobytes())
    if masked:
        (tmp_path / "a.ds.loss").write_bytes(bytes([number % 2 for text in texts for number in range(len(text))]))
    import_tokens(tmp_path / "a.ds", "ds", Coding(TOKENIZER["sha256"], VOCAB, EOS),
                  tmp_path / "store" / "shards" / "more", "more", lambda file, number: f"{file} {number}")
    (tmp_path / "phases.yaml").write_text("- {name: second, extra: 960, mix: {more: 100}}\n")
    assert main(["edit", str(run), "--at", "4", "--phases", str(tmp_path / "phases.yaml")]) == 0
    opened = open_run(str(run), None, None, [])
    batch = Data(opened.curriculum, opened.store).step(20, 5, 0, 1)
    flat = np.concatenate(texts)
    windows = {tuple(flat[start:start + 32].tolist()) for start in range(0, len(flat) - 32, 32)}
    assert all(tuple(row) in windows for row in batch.tokens.tolist())
    assert float((batch.targets >= 0).float().mean()) == pytest.approx(0.5 if masked else 1, abs=0.1)
    with world("cpu") as here:
        train(opened, here, None, quiet)
    assert [set(step["streams"]) for step in steps(run / "train")][-6:] == [{"more"}] * 6


def test_imported_rows_are_the_samples_of_a_training(tmp_path):
    """Rows that another project has packed: each is read exactly as it is, and once an epoch."""
    run = make_run(tmp_path / "store", total=640, phases=[
        {"name": "first", "until": "100%", "sequence": 32, "batch": 160, "mix": {"web": 70, "code": 30}}],
        train={"schedule": {"warmup": "5%", "floor": 0.1}})
    flat = np.concatenate(language(7, 300))
    length = open_run(str(run), None, None, []).curriculum.longest
    rows = flat[:len(flat) // (length + 1) * (length + 1)].reshape(-1, length + 1)[:40]
    pq.write_table(pa.table({"input_ids": rows.tolist()}), tmp_path / "rows.parquet")
    import_tokens(tmp_path / "rows.parquet", "parquet", Coding(TOKENIZER["sha256"], VOCAB, EOS),
                  tmp_path / "store" / "shards" / "more", "more", lambda file, number: f"{file} {number}",
                  sequence=length)
    (tmp_path / "phases.yaml").write_text(
        f"- {{name: second, extra: {40 * length}, sequence: {length}, batch: {8 * length}, mix: {{more: 100}}}}\n")
    assert main(["edit", str(run), "--at", "4", "--phases", str(tmp_path / "phases.yaml")]) == 0
    opened = open_run(str(run), None, None, [])
    first = opened.curriculum.phases[-1].start
    data = Data(opened.curriculum, opened.store)
    read = []
    for begin in range(first, first + 40, 8):
        batch = data.step(begin, 8, 0, 1)
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist()):
            row = next(row for row in rows.tolist() if row[:-1] == tokens)
            assert targets == [-100 if token == EOS else target for token, target in pairwise(row)]
            read.append(tuple(row))
    assert sorted(read) == sorted(map(tuple, rows.tolist()))
