"""The names in `train:` that a training would stumble over only once all data is made; the values are the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.recipe.errors import shown

if TYPE_CHECKING:
    from pipeline.recipe.checker import Checker

#: keys of `train:` and of the mappings in it, and names of models, as in trainer.loop.run.TrainConfig and
#: trainer.model.transformer.ModelConfig, which need torch
TRAIN_KEYS = {
    "train": "model optimizer schedule loss evaluate checkpoint sample parallel stability metrics alerts skip init "
             "seed clip micro_batch precision compile log_every",
    "train.model": "preset layers width heads kv_heads ffn head_dim tie qk_norm nope_every rope_theta norm_eps "
                   "init_std activation rotary rope_scaling qkv_bias masking softcap mup",
    "train.model.rope_scaling": "kind factor original low high beta_fast beta_slow attention_factor",
    "train.optimizer": "kind lr embedding_lr weight_decay groups betas eps adamw_lr scaling momentum nesterov steps "
                       "beta2_decay update_clip",
    "train.schedule": "kind warmup decay shape floor milestones batch_rate",
    "train.loss": "z chunk repeats",
    "train.loss.repeats": "ngram times",
    "train.evaluate": "every windows",
    "train.checkpoint": "every keep keep_every keep_best async moments",
    "train.sample": "prompt tokens temperature top_k",
    "train.parallel": "shard shard_size tensor checkpointing accumulate offload fp8",
    "train.parallel.checkpointing": "every",
    "train.stability": "sigma window warm in_a_row most rewind worst_rows",
    "train.stability.rewind": "trigger skip budget",
    "train.stability.rewind.trigger": "skips within loss_above for",
    "train.metrics": "wandb",
    "train.metrics.wandb": "project entity name",
    "train.alerts": "throughput evaluation spikes data_wait checkpoint",
    "train.init": "from",
}
MODEL_PRESETS = ("tiny", "demo", "135m", "360m", "1.7b", "1b", "3b", "qwen3-0.6b", "8b", "d4", "d8", "d12", "d16",
                 "d20", "d24", "d32")


def check_train(train: dict[str, Any], checker: Checker) -> None:
    _keys(train, ("train",), checker)
    model = train.get("model", {})
    if not isinstance(model, dict):
        checker.fail(("train", "model"), f"must be a mapping, e.g. model: {{preset: 135m}}; got {shown(model)}")
    elif "preset" in model:
        checker.known(str(model["preset"]), MODEL_PRESETS, ("train", "model", "preset"), "preset")


def _keys(mapping: dict[str, Any], path: tuple[str, ...], checker: Checker) -> None:
    known = TRAIN_KEYS[".".join(path)].split()
    for key, value in mapping.items():
        inner = (*path, str(key))
        if checker.known(str(key), known, inner, "key") and isinstance(value, dict) and ".".join(inner) in TRAIN_KEYS:
            _keys(value, inner, checker)
