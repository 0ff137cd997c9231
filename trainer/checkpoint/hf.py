"""Writes and reads models in Hugging Face's layout, config.json and safetensors, for use with transformers.

A model's features determine its transformers architecture (`ARCHITECTURES`). A model with features that no architecture
has is refused; no feature is dropped silently. Both sides lay out rotary positions alike, so weights are copied, not
permuted. Factors that muP applies at run time are folded into the weights. A file holds about `SHARD` bytes, and the
weights of one file are held in memory.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tokenizer.mixture.curriculum import Curriculum
from trainer.base.config import ConfigError, build
from trainer.checkpoint.checkpoints import Checkpoint, CheckpointError, Reader
from trainer.checkpoint.damage import damage
from trainer.model.config import ModelConfig, RopeScaling
from trainer.model.tensor import fill
from trainer.model.transformer import Transformer, phase_rope

#: features beyond Llama's → (architecture, model_type). No architecture has two of them
ARCHITECTURES = {
    frozenset(): ("LlamaForCausalLM", "llama"),
    frozenset({"qk_norm"}): ("Qwen3ForCausalLM", "qwen3"),
    frozenset({"qkv_bias"}): ("Qwen2ForCausalLM", "qwen2"),
    frozenset({"nope_every"}): ("SmolLM3ForCausalLM", "smollm3"),
    frozenset({"activation: relu2"}): ("ArceeForCausalLM", "arcee"),
    frozenset({"rotary"}): ("Phi3ForCausalLM", "phi3"),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: most bytes of a safetensors file
SHARD = 4 * 10**9
INDEX = "model.safetensors.index.json"


def safetensors() -> Any:
    """Import the package, which only export and import need. Raises ConfigError when it is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ConfigError("Hugging Face's layout needs the package `safetensors`, which is not installed: pip install "
                          "'tokenmill[trainer]'") from None
    return safetensors


# -- the two layouts ---------------------------------------------------------------------------------------------------
def features(config: ModelConfig) -> frozenset[str]:
    """Features of a model beyond Llama's, by their configuration keys."""
    used = {"qk_norm": config.qk_norm, "qkv_bias": config.qkv_bias, "nope_every": config.nope_every > 0,
            "activation: relu2": config.activation == "relu2", "rotary": config.rotary < 1,
            "softcap": config.softcap > 0}
    return frozenset(name for name, there in used.items() if there)


def to_json(config: ModelConfig, vocab: int, longest: int, eos: int, dtype: str) -> dict[str, Any]:
    """Return config.json of the model. `longest` is the longest sequence it was trained on, in tokens. Raises
    ConfigError when no architecture of transformers has its features."""
    found = features(config)
    if found not in ARCHITECTURES:
        one = "; ".join(f"{', '.join(sorted(k)) or 'none of them'}: {name}" for k, (name, _) in ARCHITECTURES.items())
        raise ConfigError(f"no architecture of transformers has {' and '.join(sorted(found))}. There is, for {one}")
    name, kind = ARCHITECTURES[found]
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
    """Return the scaling under transformers' keys."""
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


def layout(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Map each tensor of theirs to ours: several of ours are stacked by rows (Phi-3 fuses q, k, v and gate, up)."""
    fused = config.rotary < 1
    result: dict[str, tuple[str, ...]] = {"model.embed_tokens.weight": ("embed.weight",)}

    def add(their: str, names: str, our: str, kinds: tuple[str, ...], both: str) -> None:
        for kind in kinds:
            ours = tuple(f"{our}.{n}.{kind}" for n in names.split())
            if fused:
                result[f"{their}.{both}_proj.{kind}"] = ours
            else:
                result.update({f"{their}.{n}_proj.{kind}": (o,) for n, o in zip(names.split(), ours)})

    for i in range(config.layers):
        their, our = f"model.layers.{i}", f"blocks.{i}"
        result[f"{their}.input_layernorm.weight"] = (f"{our}.attention_norm.weight",)
        add(f"{their}.self_attn", "q k v", f"{our}.attention", ("weight", "bias") if config.qkv_bias else ("weight",),
            "qkv")
        result[f"{their}.self_attn.o_proj.weight"] = (f"{our}.attention.o.weight",)
        if config.qk_norm:
            result |= {f"{their}.self_attn.{n}_norm.weight": (f"{our}.attention.{n}_norm.weight",) for n in "qk"}
        result[f"{their}.post_attention_layernorm.weight"] = (f"{our}.mlp_norm.weight",)
        add(f"{their}.mlp", "up" if config.activation == "relu2" else "gate up", f"{our}.mlp", ("weight",), "gate_up")
        result[f"{their}.mlp.down_proj.weight"] = (f"{our}.mlp.down.weight",)
    result["model.norm.weight"] = ("norm.weight",)
    if not config.tie:
        result["lm_head.weight"] = ("head.weight",)
    return result


def shapes(config: ModelConfig, vocab: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: p.shape for name, p in Transformer(config, vocab).named_parameters()}


def folded(config: ModelConfig) -> tuple[ModelConfig, dict[str, float]]:
    """Express the same function without muP: (configuration, {ending of our parameter's name: factor for its values}).

    The output's factor 1/m goes into the gain of the norm before it. Attention scaled by 8/D instead of 1/√D goes into
    the queries: into their norm's gain, or into the weights and bias that make them (RoPE, a rotation, keeps the
    factor).
    """
    if not config.mup:
        return config, {}
    attention = config.scale * config.dim ** 0.5
    queries = ["attention.q_norm.weight"] if config.qk_norm else ["attention.q.weight", "attention.q.bias"]
    return replace(config, mup=0), {"norm.weight": 1 / config.width_ratio, **dict.fromkeys(queries, attention)}


def factor(name: str, factors: Mapping[str, float]) -> float:
    """Factor for the parameter `name`. The endings apply to the parameters of every block; 'norm.weight' is the last
    norm only."""
    return factors.get(name.split(".", 2)[2] if name.startswith("blocks.") else name, 1.0)


# -- out ---------------------------------------------------------------------------------------------------------------
def export(checkpoint: Checkpoint, out: Path, dtype: str, tokenizer: Path | None, shard: int = SHARD) -> list[str]:
    """Write the model of `checkpoint` into the new folder `out`. Returns lines to print about it.

    Every byte of the checkpoint is first compared with its sum; the optimiser's state is not used. Rotary positions are
    those of the checkpoint's phase. `tokenizer` (the file the shards were encoded with) is copied if it exists.
    config.json is written last: without it `out` is not a model.
    """
    save_file = safetensors().torch.save_file
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: is not empty; give a new folder")
    if lines := damage(checkpoint):
        raise CheckpointError("; ".join(lines) + "; restore it from a copy, or export another --step")
    meta = checkpoint.meta
    curriculum = Curriculum.from_json(meta["curriculum"], f"{checkpoint.folder / 'meta.json'}: curriculum")
    config, factors = folded(build(ModelConfig, meta["config"]["model"], f"{checkpoint.folder / 'meta.json'}: model"))
    begun = [p for p in curriculum.phases if p.start < meta["samples"]]
    rope = phase_rope(config, begun[-1])
    config = replace(config, rope_theta=rope.theta, rope_scaling=rope.scaling)
    vocab, eos = curriculum.tokenizer.vocab_size, curriculum.tokenizer.eos
    text = to_json(config, vocab, max(p.sequence for p in begun), eos, dtype)
    out.mkdir(parents=True, exist_ok=True)
    sizes, width = shapes(config, vocab), DTYPES[dtype].itemsize
    where: dict[str, str] = {}
    files = list(split(layout(config), sizes, shard // width))
    write(out / "generation_config.json", {"eos_token_id": eos, "do_sample": True})
    for i, theirs in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        ours = {n: torch.empty(sizes[n]) for names in theirs.values() for n in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it warns that there is no process group; none is needed
            dcp.load({f"model.{n}": x for n, x in ours.items()}, storage_reader=Reader(checkpoint.folder), no_dist=True)
        save_file({their: torch.cat([ours[n] * factor(n, factors) for n in names]).to(DTYPES[dtype])
                   for their, names in theirs.items()}, out / name, metadata={"format": "pt"})
        # safetensors makes its files private; they get the mode that the umask gives the other files
        (out / name).chmod((out / "generation_config.json").stat().st_mode)
        where |= dict.fromkeys(theirs, name)
    total = config.parameters(vocab)
    if len(files) > 1:
        write(out / INDEX, {"metadata": {"total_size": total * width}, "weight_map": where})
    result = [f"{out}: {text['architectures'][0]}, {total:,} parameters in {dtype}, step {checkpoint.step}"]
    result.append(copy_tokenizer(tokenizer, out, eos))
    write(out / "config.json", text)
    return result


def split(theirs: Mapping[str, tuple[str, ...]], sizes: Mapping[str, torch.Size],
          numbers: int) -> Iterator[dict[str, tuple[str, ...]]]:
    """Split the tensors into consecutive files of at most `numbers` values each (or one larger tensor)."""
    part: dict[str, tuple[str, ...]] = {}
    held = 0
    for name, ours in theirs.items():
        n = sum(sizes[o].numel() for o in ours)
        if part and held + n > numbers:
            yield part
            part, held = {}, 0
        part[name], held = ours, held + n
    yield part


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_tokenizer(path: Path | None, out: Path, eos: int) -> str:
    """Copy the tokenizer and write the settings that transformers' AutoTokenizer needs. Returns a line that says what
    was done."""
    if path is None or not path.is_file():
        return f"no tokenizer: {path} is not there" if path else "no tokenizer"
    if path.suffix == ".model":
        shutil.copyfile(path, out / "tokenizer.model")
        write(out / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False})
        return "tokenizer.model is beside it"
    shutil.copyfile(path, out / "tokenizer.json")
    word = words(path).get(eos)
    write(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast",
                                          **({"eos_token": word} if word else {})})
    return "tokenizer.json is beside it"


def words(path: Path) -> dict[int, str]:
    """Return {id: token} of a tokenizer.json."""
    document = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = document.get("model", {}).get("vocab", {})
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], i) for i, row in enumerate(vocabulary))
    return {i: word for word, i in pairs} | {t["id"]: t["content"] for t in document.get("added_tokens", [])}


# -- in ----------------------------------------------------------------------------------------------------------------
def read_config(folder: Path) -> tuple[ModelConfig, int]:
    """Read (configuration, rows of the embedding) of the model in `folder`. Raises ConfigError that names a feature
    this trainer does not have."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a folder with config.json and safetensors")
    given = json.loads(path.read_text(encoding="utf-8"))
    kinds = {kind for _, kind in ARCHITECTURES.values()}
    kind = given.get("model_type")
    if kind not in kinds:
        raise ConfigError(f"{path}: model_type {kind!r}; this trainer has {', '.join(sorted(kinds))}")

    def refuse(key: str, allowed: tuple[Any, ...]) -> None:
        if given.get(key) not in allowed:
            raise ConfigError(f"{path}: {key}: {given[key]!r}: this trainer has no such {kind} model")

    refuse("hidden_act", ("relu2",) if kind == "arcee" else ("silu", None))
    refuse("mlp_bias", (False, None))
    refuse("attention_bias", (False, None))
    refuse("quantization_config", (None,))
    refuse("use_sliding_window", (False, None))
    sliding = given.get("sliding_window")
    if kind == "phi3" and sliding is not None and sliding < given["max_position_embeddings"] - 1:
        refuse("sliding_window", (None,))
    heads = given["num_attention_heads"]
    theta, share, scaling = read_rope(given, path)
    own_rope = given.get("no_rope_layers") or []
    if kind == "smollm3" and "no_rope_layers" not in given:
        nope = given.get("no_rope_layer_interval", 4)
    else:
        nope = own_rope.index(0) + 1 if 0 in own_rope else 0
        if nope and any(bool(own_rope[i]) == ((i + 1) % nope == 0) for i in range(len(own_rope))):
            raise ConfigError(f"{path}: no_rope_layers: {own_rope}: this trainer leaves out RoPE in every k-th layer")
    # for a key that config.json leaves out, the default of the transformers class that reads it
    tied = given.get("tie_word_embeddings", kind == "smollm3")
    mapping = {"layers": given["num_hidden_layers"], "width": given["hidden_size"], "heads": heads,
               "kv_heads": given.get("num_key_value_heads") or heads, "ffn": given["intermediate_size"],
               "head_dim": given.get("head_dim") or (128 if kind == "qwen3" else given["hidden_size"] // heads),
               "tie": tied, "qk_norm": kind == "qwen3", "qkv_bias": kind == "qwen2", "nope_every": nope,
               "rope_theta": theta, "norm_eps": given.get("rms_norm_eps", 1e-6 if kind != "phi3" else 1e-5),
               "activation": "relu2" if kind == "arcee" else "swiglu", "rotary": share,
               "init_std": given.get("initializer_range", 0.02)}
    if scaling:
        mapping["rope_scaling"] = scaling
    return build(ModelConfig, mapping, str(path)), given["vocab_size"]


def read_rope(given: Mapping[str, Any], path: Path) -> tuple[float, float, dict[str, Any] | None]:
    """Read (θ, rotated share of a head, our mapping of the scaling) from a config.json of transformers 4 or 5."""
    told = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    theta = told.get("rope_theta", given.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{path}: rope_theta is missing; add it (the class's default differs between versions)")
    share = told.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    if share < 1 and given["model_type"] != "phi3":
        raise ConfigError(f"{path}: partial_rotary_factor {share} is read of phi3 models alone")
    kind = told.get("rope_type", told.get("type", "default"))
    if kind == "default":
        return float(theta), float(share), None
    names = {"factor": "factor", "original_max_position_embeddings": "original", "low_freq_factor": "low",
             "high_freq_factor": "high", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
             "attention_factor": "attention_factor"}
    passed = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    other = sorted(k for k, v in told.items() if k not in names and k not in passed and v is not None)
    if kind not in ("linear", "llama3", "yarn") or other:
        raise ConfigError(f"{path}: rope_scaling {kind} with {', '.join(other) or 'its keys'}: this trainer has "
                          f"linear, llama3 and yarn with {', '.join(names)}")
    scaling = {ours: told[theirs] for theirs, ours in names.items() if told.get(theirs) is not None}
    if kind != "linear" and "original" not in scaling:
        scaling["original"] = given["max_position_embeddings"]
    if kind == "linear":
        scaling.pop("original", None)
    return float(theta), float(share), {"kind": kind, **scaling}


def files_of(folder: Path) -> dict[str, Path]:
    """Return {their tensor: the safetensors file that holds it}."""
    package = safetensors()
    index = folder / INDEX
    if index.is_file():
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / Path(file).name for name, file in where.items()}
    result: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with package.safe_open(path, "pt") as f:
            result |= dict.fromkeys(f.keys(), path)
    if not result:
        raise ConfigError(f"{folder}: no safetensors there; other formats are pickles, which run whatever they hold")
    return result


def check(folder: Path, config: ModelConfig, vocab: int) -> dict[str, Path]:
    """Return the file in `folder` of each tensor of a model of `config`. Raises ConfigError for a tensor that is
    missing, unknown or of another shape; the embedding may have more rows than `vocab` (padding)."""
    package, files, sizes = safetensors(), files_of(folder), shapes(config, vocab)
    theirs = layout(config)
    spare = {"lm_head.weight"} if config.tie else set()
    missing = sorted(theirs.keys() - files.keys())
    unknown = sorted(n for n in files.keys() - theirs.keys() - spare if not n.endswith("rotary_emb.inv_freq"))
    if missing or unknown:
        raise ConfigError(f"{folder}: {len(missing)} tensors are missing ({', '.join(missing[:3]) or 'none'}) and "
                          f"{len(unknown)} unknown ({', '.join(unknown[:3]) or 'none'})")
    for name, path in files.items():
        if name not in theirs:
            continue
        with package.safe_open(path, "pt") as f:
            shape = list(f.get_slice(name).get_shape())
        want = [sum(sizes[o][0] for o in theirs[name]), *sizes[theirs[name][0]][1:]]
        rows = name in ("model.embed_tokens.weight", "lm_head.weight")
        if shape[1:] != want[1:] or (shape[0] < want[0] if rows else shape[0] != want[0]):
            what = f"the tokenizer of these shards has {vocab:,} tokens" if rows else "config.json says otherwise"
            raise ConfigError(f"{path}: {name} is {shape}, wanted {want}: {what}")
    return files


def differing(config: ModelConfig, folder: Path) -> list[str]:
    """How `config` differs from the model in `folder`, one line each. Not compared are rotary positions, which may be
    stretched, `init_std`, which plays no part once weights are loaded, and `masking`, which config.json does not state.
    Of `head_dim` the resolved value is compared."""
    there, _ = read_config(folder)
    free = {"rope_theta", "rope_scaling", "init_std", "masking", "head_dim"}
    lines = [f"train.model.{f.name}: {getattr(config, f.name)!r}, there {getattr(there, f.name)!r}"
             for f in fields(ModelConfig) if f.name not in free and getattr(config, f.name) != getattr(there, f.name)]
    return lines + ([f"train.model.head_dim: {config.dim}, there {there.dim}"] if config.dim != there.dim else [])


@torch.no_grad()
def load(model: nn.Module, config: ModelConfig, vocab: int, folder: Path, tokenizer: Path | None = None) -> None:
    """Fill all parameters of `model`, sharded or not, with the weights in `folder`. Each rank reads them one by one.
    Rows of the embedding beyond `vocab` are left out. Raises ConfigError when `folder` holds another model, or when its
    tokenizer.json and the shards' (`tokenizer`) both exist and have different vocabularies."""
    wrong = differing(config, folder)
    if wrong:
        raise ConfigError(f"train.init.from {folder}: is another model than train.model:\n  " + "\n  ".join(wrong)
                          + f"\n`tokenmill train import {folder}` prints the section that fits")
    own = folder / "tokenizer.json"
    if tokenizer and tokenizer.suffix == ".json" and tokenizer.is_file() and own.is_file() \
            and words(own) != words(tokenizer):
        raise ConfigError(f"train.init.from {folder}: its tokenizer.json has another vocabulary than the one of these "
                          f"shards; encode them with it (recipe: tokenizer: {{load: {own}}})")
    files, parameters, sizes = check(folder, config, vocab), dict(model.named_parameters()), shapes(config, vocab)
    package = safetensors()
    for their, ours in layout(config).items():
        with package.safe_open(files[their], "pt") as f:
            value: Tensor = f.get_tensor(their).float()
        edges = [0]
        for name in ours:
            edges.append(edges[-1] + sizes[name][0])
        for name, (start, stop) in zip(ours, pairwise(edges)):
            fill(parameters[name], value[start:stop])
