"""Turns a model's configuration into transformers' config.json, and back.

The features that a model has beyond Llama's determine its architecture in transformers (`ARCHITECTURES`). If no
architecture has all features of the model, an error is raised, instead of silently dropping a feature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.base.config import ConfigError, build
from trainer.model.config import ModelConfig, RopeScaling

#: features beyond Llama's → (architecture, model_type). No architecture has more than one such feature
ARCHITECTURES = {
    frozenset(): ("LlamaForCausalLM", "llama"),
    frozenset({"qk_norm"}): ("Qwen3ForCausalLM", "qwen3"),
    frozenset({"qkv_bias"}): ("Qwen2ForCausalLM", "qwen2"),
    frozenset({"nope_every"}): ("SmolLM3ForCausalLM", "smollm3"),
    frozenset({"activation: relu2"}): ("ArceeForCausalLM", "arcee"),
    frozenset({"rotary"}): ("Phi3ForCausalLM", "phi3"),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def features(config: ModelConfig) -> frozenset[str]:
    """Return the features that a model has beyond those of Llama, named by their keys in the configuration, for
    instance qk_norm."""
    used = {"qk_norm": config.qk_norm, "qkv_bias": config.qkv_bias, "nope_every": config.nope_every > 0,
            "activation: relu2": config.activation == "relu2", "rotary": config.rotary < 1,
            "softcap": config.softcap > 0}
    return frozenset(name for name, there in used.items() if there)


def to_json(config: ModelConfig, vocab: int, longest: int, eos: int, dtype: str) -> dict[str, Any]:
    """Return the contents of config.json for a model. `longest` is the longest sequence the model was trained on, in
    tokens; `dtype` is a key of DTYPES. Raises ConfigError when no architecture of transformers has the model's
    features, or when the one that has them cannot express its sizes."""
    used = features(config)
    if used not in ARCHITECTURES:
        one = "; ".join(f"{', '.join(sorted(k)) or 'none of them'}: {name}" for k, (name, _) in ARCHITECTURES.items())
        raise ConfigError(f"no architecture of transformers has {' and '.join(sorted(used))}. There is, for {one}")
    name, kind = ARCHITECTURES[used]
    if config.width % config.heads and kind in ("llama", "arcee"):
        raise ConfigError(f"{name} wants a width ({config.width}) that is a multiple of the heads ({config.heads})")
    if config.rope_scaling is not None and kind == "phi3":
        raise ConfigError(f"no architecture of transformers has partial rotation with rope_scaling "
                          f"{config.rope_scaling.kind}")
    scaling = rope_scaling(config.rope_scaling) if config.rope_scaling else None
    stretched = round(config.rope_scaling.factor * (config.rope_scaling.original or 0)) if config.rope_scaling else 0
    result = {"architectures": [name], "model_type": kind, "vocab_size": vocab, "hidden_size": config.width,
            "intermediate_size": config.ffn, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads, "head_dim": config.dim,
            "hidden_act": "relu2" if config.activation == "relu2" else "silu",
            "max_position_embeddings": max(longest, stretched), "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta, "rope_scaling": scaling, "tie_word_embeddings": config.tie,
            "attention_bias": False, "mlp_bias": False, "initializer_range": config.init_std,
            "bos_token_id": None, "eos_token_id": eos, "pad_token_id": None, "use_cache": True,
            "torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    if kind == "smollm3":
        result |= {"no_rope_layer_interval": config.nope_every,
                 "no_rope_layers": [int((i + 1) % config.nope_every != 0) for i in range(config.layers)]}
    if kind == "phi3":
        result |= {"partial_rotary_factor": config.rotary, "original_max_position_embeddings": longest}
    return result


def rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """Return RoPE's scaling as config.json's `rope_scaling`, with the keys that transformers uses."""
    result: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        result["original_max_position_embeddings"] = scaling.original
    if scaling.kind == "llama3":
        result |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        result |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            result["attention_factor"] = scaling.attention_factor
    return result


def read_config(folder: Path) -> tuple[ModelConfig, int]:
    """Read config.json in `folder`. Returns (settings of the model, number of rows of the embedding). Raises
    ConfigError if the file is missing or damaged, or if the model has a feature that this trainer lacks; the message
    names it."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a folder with config.json and safetensors")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return settings_in(document, path), document["vocab_size"]
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged, or lacks a value ({error!r:.200}): fetch the model again") from error


def settings_in(document: Mapping[str, Any], path: Path) -> ModelConfig:
    """Return the settings of the model that a config.json describes. `document` is its contents; messages name `path`.
    Raises ConfigError if the model has a feature that this trainer lacks. A damaged `document` may also raise one of
    the errors that `read_config` turns into ConfigError."""
    kinds = {kind for _, kind in ARCHITECTURES.values()}
    kind = document.get("model_type")
    if kind not in kinds:
        raise ConfigError(f"{path}: model_type {kind!r}; this trainer has {', '.join(sorted(kinds))}")

    def refuse(key: str, allowed: tuple[Any, ...]) -> None:
        if document.get(key) not in allowed:
            raise ConfigError(f"{path}: {key}: {document[key]!r}: this trainer has no such {kind} model")

    refuse("hidden_act", ("relu2",) if kind == "arcee" else ("silu", None))
    refuse("mlp_bias", (False, None))
    refuse("attention_bias", (False, None))
    refuse("quantization_config", (None,))
    refuse("use_sliding_window", (False, None))
    sliding = document.get("sliding_window")
    if kind == "phi3" and sliding is not None and sliding < document["max_position_embeddings"] - 1:
        refuse("sliding_window", (None,))
    heads = document["num_attention_heads"]
    theta, share, scaling = read_rope(document, path)
    own_rope = document.get("no_rope_layers") or []
    if kind == "smollm3" and "no_rope_layers" not in document:
        nope = document.get("no_rope_layer_interval", 4)
    else:
        nope = own_rope.index(0) + 1 if 0 in own_rope else 0
        if nope and any(bool(own_rope[i]) == ((i + 1) % nope == 0) for i in range(len(own_rope))):
            raise ConfigError(f"{path}: no_rope_layers: {own_rope}: this trainer leaves out RoPE in every k-th layer")
    # for a key that config.json leaves out, the default of the transformers class that reads it
    tied = document.get("tie_word_embeddings", kind == "smollm3")
    mapping = {"layers": document["num_hidden_layers"], "width": document["hidden_size"], "heads": heads,
               "kv_heads": document.get("num_key_value_heads") or heads, "ffn": document["intermediate_size"],
               "head_dim": document.get("head_dim") or (128 if kind == "qwen3" else document["hidden_size"] // heads),
               "tie": tied, "qk_norm": kind == "qwen3", "qkv_bias": kind == "qwen2", "nope_every": nope,
               "rope_theta": theta, "norm_eps": document.get("rms_norm_eps", 1e-6 if kind != "phi3" else 1e-5),
               "activation": "relu2" if kind == "arcee" else "swiglu", "rotary": share,
               "init_std": document.get("initializer_range", 0.02)}
    if scaling:
        mapping["rope_scaling"] = scaling
    return build(ModelConfig, mapping, str(path))


def read_rope(document: Mapping[str, Any], path: Path) -> tuple[float, float, dict[str, Any] | None]:
    """Read the RoPE settings in `document`, a config.json of transformers 4 or 5. Returns (θ, the share of a head's
    dimensions that is rotated, the scaling with the keys of `RopeScaling`, or None if there is no scaling). Raises
    ConfigError if θ is missing, if this trainer lacks the kind of scaling, or if the share is below 1 and the model is
    not a Phi-3."""
    settings = dict(document.get("rope_parameters") or document.get("rope_scaling") or {})
    theta = settings.get("rope_theta", document.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{path}: rope_theta is missing; add it (the class's default differs between versions)")
    share = settings.get("partial_rotary_factor", document.get("partial_rotary_factor", 1.0))
    if share < 1 and document["model_type"] != "phi3":
        raise ConfigError(f"{path}: partial_rotary_factor {share} is read of phi3 models alone")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return float(theta), float(share), None
    names = {"factor": "factor", "original_max_position_embeddings": "original", "low_freq_factor": "low",
             "high_freq_factor": "high", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
             "attention_factor": "attention_factor"}
    passed = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    other = sorted(k for k, v in settings.items() if k not in names and k not in passed and v is not None)
    if kind not in ("linear", "llama3", "yarn") or other:
        raise ConfigError(f"{path}: rope_scaling {kind} with {', '.join(other) or 'its keys'}: this trainer has "
                          f"linear, llama3 and yarn with {', '.join(names)}")
    scaling = {ours: settings[theirs] for theirs, ours in names.items() if settings.get(theirs) is not None}
    if kind != "linear" and "original" not in scaling:
        scaling["original"] = document["max_position_embeddings"]
    if kind == "linear":
        scaling.pop("original", None)
    return float(theta), float(share), {"kind": kind, **scaling}
