"""Opens models for evaluation: checkpoints of a training, and exported models in Hugging Face's layout. First,
everything about a model except its weights is read. The caller can check it before the weights are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.base.files import file_sha256
from tokenizer.mixture.curriculum import Curriculum
from trainer.base.config import ConfigError, build
from trainer.checkpoint import hf
from trainer.checkpoint.checkpoints import Checkpoint, CheckpointError
from trainer.checkpoint.damage import damage
from trainer.checkpoint.hf_config import read_config
from trainer.data.tokenizer import TextCoder, load_tokenizer
from trainer.model.config import ModelConfig
from trainer.model.transformer import Transformer, phase_rope


@dataclass(frozen=True)
class StoredModel:
    """A model that can be loaded: a checkpoint or an exported model.

        about             identifies the model in results
        step              None for an exported model
        context           number of tokens in the longest sequence that it was trained on; for an exported model, its
                          `max_position_embeddings`
        start             the token that is put before a text without context: EOS, or BOS if it is an exported model
                          that has one
        tokenizer_sha256  the sha256 that the tokenizer's file must have (None: any)
        load              reads the weights, in float32 on the CPU
    """

    about: dict[str, Any]
    step: int | None
    context: int
    eos: int
    start: int
    vocab: int
    tokenizer: Path
    tokenizer_sha256: str | None
    load: Callable[[], Transformer]

    def coder(self) -> TextCoder:
        """Load the model's tokenizer. Raises ConfigError when that is impossible, or when its file has another
        sha256."""
        return load_coder(self.tokenizer, self.tokenizer_sha256)


def load_coder(path: Path, sha256: str | None) -> TextCoder:
    """Load the tokenizer in the file `path` for an evaluation. Raises ConfigError when it cannot be loaded, or when the
    file has another sha256 than `sha256` (None: any)."""
    coder, why = load_tokenizer(path)
    if coder is None:
        raise ConfigError(f"{path}: an evaluation needs the tokenizer ({why})")
    if sha256 not in (None, file_sha256(path)):
        raise ConfigError(f"{path}: is not the tokenizer with which the model was trained (its sha256 differs); "
                          f"restore the file from a copy of the store")
    return coder


def of_checkpoint(checkpoint: Checkpoint, store: Path) -> StoredModel:
    """Return the model of a checkpoint, without reading its weights. `store` is the folder to which the curriculum's
    path of the tokenizer is relative. The model's `load` raises CheckpointError when files of the checkpoint are
    damaged."""
    meta, where = checkpoint.meta, checkpoint.folder / "meta.json"
    curriculum = Curriculum.from_json(meta["curriculum"], f"{where}: curriculum")
    config = build(ModelConfig, meta["config"]["model"], f"{where}: model")
    begun = [p for p in curriculum.phases if p.start < meta["samples"]]

    def load() -> Transformer:
        if lines := damage(checkpoint):
            raise CheckpointError("; ".join(lines) + "; restore it from a copy, or evaluate another step")
        model = _empty(config, curriculum.tokenizer.vocab_size)
        model.rope = phase_rope(config, begun[-1])
        hf.read_parameters(checkpoint, dict(model.named_parameters()))
        return model

    about = {"step": checkpoint.step, "tokens": meta["tokens"], "checkpoint": checkpoint.folder.name,
             "parameters": config.parameters(curriculum.tokenizer.vocab_size)}
    return StoredModel(about, checkpoint.step, max(p.sequence for p in begun), curriculum.tokenizer.eos,
                       curriculum.tokenizer.eos, curriculum.tokenizer.vocab_size, store / curriculum.tokenizer.path,
                       curriculum.tokenizer.sha256, load)


def of_export(folder: Path) -> StoredModel:
    """Return the model in a folder in Hugging Face's layout, without reading its weights. Raises ConfigError when the
    folder has no model, when the model has features that this trainer lacks, or when its config.json has no
    `eos_token_id`."""
    config, vocab = read_config(folder)
    hf.check(folder, config, vocab)
    data = (folder / "config.json").read_bytes()
    document = json.loads(data)
    eos = document.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int):
        raise ConfigError(f"{folder / 'config.json'}: eos_token_id is missing; add the id of the token that ends texts")

    def load() -> Transformer:
        model = _empty(config, vocab)
        hf.load(model, config, vocab, folder)
        return model

    tokenizer = next((folder / n for n in ("tokenizer.json", "tokenizer.model") if (folder / n).is_file()),
                     folder / "tokenizer.json")
    about = {"config_sha256": hashlib.sha256(data).hexdigest(), "parameters": config.parameters(vocab)}
    bos = document.get("bos_token_id")
    return StoredModel(about, None, document.get("max_position_embeddings", 2048), eos,
                       bos if isinstance(bos, int) else eos, vocab, tokenizer, None, load)


def _empty(config: ModelConfig, vocab: int) -> Transformer:
    """Return a model on the CPU with memory for its weights, which are not initialised."""
    with torch.device("meta"):
        model = Transformer(config, vocab)
    return model.to_empty(device="cpu").requires_grad_(False)
