"""A tokenizer of bytes, small models and small tasks for the tests of the evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from trainer.evaluation.evaluate import PromptReader
from trainer.evaluation.task_file import EvalTask, read_task
from trainer.model.attention import document_mask
from trainer.model.config import ModelConfig
from trainer.model.init import initialise
from trainer.model.transformer import Transformer

EOS = 0
VOCAB = 257
SMALL = ModelConfig(layers=2, width=48, heads=6, kv_heads=2, ffn=80)


class Bytes:
    """A tokenizer whose tokens are bytes: byte b is the token b + 1. Two bytes that are one of the pairs `merges`
    become the token 256."""

    def __init__(self, *merges: str) -> None:
        self.merges = merges

    def encode(self, text: str) -> list[int]:
        data = list(text.encode())
        if not self.merges:
            return [1 + byte for byte in data]
        ids = []
        while data:
            pair = bytes(data[:2]).decode("utf-8", "replace")
            merged = pair in self.merges
            ids.append(1 + data[0] if not merged else 256)
            data = data[2 if merged else 1:]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i - 1 for i in ids if i).decode("utf-8", "replace")


def model_of(config: ModelConfig = SMALL, vocab: int = VOCAB, seed: int = 3) -> Transformer:
    model = Transformer(config, vocab)
    initialise(model, config, seed)
    with torch.no_grad():
        for parameter in model.parameters():                 # initial values predict almost uniformly
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model.requires_grad_(False)


def reader(context: int = 512, batch: int = 2048, coder: Any = None) -> PromptReader:
    return PromptReader(coder or Bytes(), EOS, EOS, VOCAB, context, batch)


def alone(model: Transformer, tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities [T, V] after each token of a row, computed by a plain forward over this row
    alone."""
    row = torch.tensor([list(map(int, tokens))])
    positions = torch.arange(row.shape[1])[None]
    with torch.no_grad():
        return model(row, document_mask(positions, torch.float32)).log_softmax(-1)[0]


def write_task(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "quiz", **settings: Any) -> EvalTask:
    """Write rows to data/NAME.jsonl and a task file NAME.yaml below `folder`."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {"version": 1, "description": "a test", "files": ["none"], "forms": ["bpb", "cf", "mcf"],
               "context": "Q: {q}\nA:", "lettered": "Q: {q}\n{options}\nA:", "choices_from": "answers",
               "gold": "{right}", "prior": "A:", "norm": "raw", **settings}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return read_task(path)


def word_run(folder: Path, total: int = 3840, sequence: int = 0, batch: int = 0, **train: Any) -> Path:
    """Make a store with a run and a tokenizer of words, and a task `quiz` of 30 rows for it (quiz.yaml and the folder
    data below `folder`). Returns the folder of the run. Given a `sequence` and a `batch` of tokens, the run has one
    phase; otherwise it has the phases of `make_run`."""
    import tokenizers

    from tests.trainer import synthetic

    size = synthetic.VOCAB
    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, size - 4)}, "Q:": size - 4, "A:": size - 3, "A": size - 2,
             "B": size - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = folder / "store" / "tokenizers" / "none" / "tokenizer.json"
    path.parent.mkdir(parents=True)
    tokenizer.save(str(path))
    with mock.patch.dict(synthetic.TOKENIZER, sha256=hashlib.sha256(path.read_bytes()).hexdigest()):
        run = synthetic.make_run(folder / "store", total=total, documents=max(200, total // 30), train=train,
                                 longest=sequence or 64, phases=[{
                                     "name": "all", "until": "100%", "sequence": sequence, "batch": batch,
                                     "mix": {"web": 1}}] if sequence else None)
    rows = [{"q": f"w{i + 1} w{i + 2}", "answers": [f"w{i + 3}", f"w{i + 4} w{i + 5}"], "right": i % 2}
            for i in range(30)]
    write_task(folder, rows, shots=2)
    return run


def quiz(count: int) -> list[dict[str, Any]]:
    """Rows of a quiz with two to five answers of different lengths."""
    words = ["red", "green apple", "a very long answer, indeed", "x", "blue sky"]
    return [{"q": f"what is {i * 7919 % 1000}?" + " why" * (i % 5), "answers": words[i % 3:][:2 + i % 4],
             "right": i % len(words[i % 3:][:2 + i % 4])} for i in range(count)]
