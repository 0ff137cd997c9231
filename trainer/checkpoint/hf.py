"""Writes and reads models in Hugging Face's layout, for use with transformers. This module handles the safetensors
files, and `hf_config` handles config.json.

transformers and this trainer lay out rotary positions alike, so weights are copied, not permuted. muP (a
parametrisation for several widths) multiplies by factors at run time; the exported weights include these factors. A
file has at most about `SHARD` bytes. Only the weights of one file are in memory at a time.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tokenizer.mixture.curriculum import Curriculum
from trainer.base.config import ConfigError, build
from trainer.checkpoint.checkpoints import Checkpoint, CheckpointError
from trainer.checkpoint.damage import damage
from trainer.checkpoint.hf_config import DTYPES, read_config, to_json
from trainer.checkpoint.reader import SafeMetadataReader
from trainer.model.config import ModelConfig
from trainer.model.tensor import fill
from trainer.model.transformer import Transformer, phase_rope

#: largest size of a safetensors file in bytes, unless one tensor is larger
SHARD = 4 * 10**9
INDEX = "model.safetensors.index.json"


def safetensors() -> Any:
    """Import safetensors, which only export and import need. Raises ConfigError when it is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ConfigError("Hugging Face's layout needs the package `safetensors`, which is not installed: pip install "
                          "'tokenmill[trainer]'") from None
    return safetensors


# -- the tensors ---------------------------------------------------------------------------------------------------
def layout(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return which parameters of this trainer form each tensor of transformers' format: {name of the tensor: names of
    the parameters}. Usually a tensor is one parameter. Where Phi-3 fuses q, k and v, or gate and up, the tensor stacks
    the rows of several parameters."""
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
    """Return how to express a model with muP as a model without muP: (configuration without muP, factors). The factors
    are {name of a parameter, without `blocks.N.`: number by which to multiply the parameter}.

    muP divides the output by m (the model's width / the width that the hyperparameters are from). The gain of the norm
    before the output takes this factor. muP also changes the scale of attention from 1/√D to 8/D (D is a head's width).
    The gain of the queries' norm takes that factor; without this norm, the weights and bias that compute the queries
    take it. RoPE is applied after the factor, which makes no difference, because a rotation is linear.
    """
    if not config.mup:
        return config, {}
    attention = config.scale * config.dim ** 0.5
    queries = ["attention.q_norm.weight"] if config.qk_norm else ["attention.q.weight", "attention.q.bias"]
    return replace(config, mup=0), {"norm.weight": 1 / config.width_ratio, **dict.fromkeys(queries, attention)}


def factor(name: str, factors: Mapping[str, float]) -> float:
    """Return the number by which to multiply the parameter `name` (1 for most parameters). `factors` is the result of
    `folded`. In it, a parameter that every block has is named without `blocks.N.`."""
    return factors.get(name.split(".", 2)[2] if name.startswith("blocks.") else name, 1.0)


# -- out ---------------------------------------------------------------------------------------------------------------
def export(checkpoint: Checkpoint, out: Path, dtype: str, tokenizer: Path | None, shard: int = SHARD) -> list[str]:
    """Write the model of `checkpoint` into the new folder `out`. `dtype` is a key of DTYPES, and `shard` the largest
    size of a safetensors file in bytes (a larger tensor has one of its own). `tokenizer` (the file with which the
    shards were encoded) is copied if it exists. Returns lines to print about the export.

    Every file of the checkpoint is first compared with its sha256. The optimiser's state is not exported. The RoPE
    settings are those of the training phase in which the checkpoint was written. config.json is written last, because a
    folder without it is not recognised as a model.

    Raises ConfigError when `out` is not empty, or when no architecture of transformers has the model's features. Raises
    CheckpointError when a file of the checkpoint is damaged.
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
    for i, tensors in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        parameters = {n: torch.empty(sizes[n]) for names in tensors.values() for n in names}
        read_parameters(checkpoint, parameters)
        save_file({their: torch.cat([parameters[n] * factor(n, factors) for n in names]).to(DTYPES[dtype])
                   for their, names in tensors.items()}, out / name, metadata={"format": "pt"})
        # safetensors makes its files private; they get the mode that the umask gives the other files
        (out / name).chmod((out / "generation_config.json").stat().st_mode)
        where |= dict.fromkeys(tensors, name)
    total = config.parameters(vocab)
    if len(files) > 1:
        write(out / INDEX, {"metadata": {"total_size": total * width}, "weight_map": where})
    result = [f"{out}: {text['architectures'][0]}, {total:,} parameters in {dtype}, step {checkpoint.step}"]
    result.append(copy_tokenizer(tokenizer, out, eos))
    write(out / "config.json", text)
    return result


def read_parameters(checkpoint: Checkpoint, parameters: Mapping[str, Tensor]) -> None:
    """Fill the tensors in `parameters` with the parameters of these names in `checkpoint`. No process group is
    needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)      # it warns that there is no process group
        dcp.load({f"model.{name}": x.detach() for name, x in parameters.items()},
                 storage_reader=SafeMetadataReader(checkpoint.folder), no_dist=True)


def split(tensors: Mapping[str, tuple[str, ...]], sizes: Mapping[str, torch.Size],
          numbers: int) -> Iterator[dict[str, tuple[str, ...]]]:
    """Divide the tensors of a model among files, in order. Yields the tensors of one file at a time, which have at most
    `numbers` elements together; a larger tensor has a file of its own. `tensors` maps each tensor to the parameters
    that form it, and `sizes` has the shapes of the parameters."""
    part: dict[str, tuple[str, ...]] = {}
    size = 0
    for name, ours in tensors.items():
        n = sum(sizes[o].numel() for o in ours)
        if part and size + n > numbers:
            yield part
            part, size = {}, 0
        part[name], size = ours, size + n
    yield part


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_tokenizer(path: Path | None, out: Path, eos: int) -> str:
    """Copy the tokenizer into `out`, and write the tokenizer_config.json that transformers' AutoTokenizer needs. If
    there is no file `path`, write nothing. Returns a line to print about it."""
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
    """Return the vocabulary of a tokenizer.json as {id: token}. Raises ConfigError when the file is damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = document.get("model", {}).get("vocab", {})
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((r[0], i) for i, r in enumerate(vocabulary))
        return {i: word for word, i in pairs} | {t["id"]: t["content"] for t in document.get("added_tokens", [])}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged ({error!r:.200}): fetch the file again") from error


# -- in ----------------------------------------------------------------------------------------------------------------
@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file for reading, as a context manager. Raises ConfigError when it is missing or damaged."""
    package = safetensors()
    try:
        with package.safe_open(path, "pt") as f:
            yield f
    except (package.SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}): fetch the model again") from None


def files_of(folder: Path) -> dict[str, Path]:
    """Return {name of a tensor in `folder`: the safetensors file that holds it}. If the folder has an index (`INDEX`),
    only this is read; the files that it names may be missing. Raises ConfigError when there is neither an index nor a
    safetensors file, or when what is read is damaged."""
    index = folder / INDEX
    if index.is_file():
        try:
            where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / Path(file).name for name, file in where.items()}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{index}: damaged ({error!r:.200}): fetch the model again") from error
    result: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with opened(path) as f:
            result |= dict.fromkeys(f.keys(), path)
    if not result:
        raise ConfigError(f"{folder}: no safetensors there; other formats are pickles, which run whatever they hold")
    return result


def check(folder: Path, config: ModelConfig, vocab: int) -> dict[str, Path]:
    """Check that the tensors in `folder` are those of a model with settings `config`. Returns {name of a tensor: its
    file}. Embedding and output may have more rows than `vocab` (padding). The folder may also have tensors that the
    model does not use: an output matrix although embeddings are tied, and RoPE's `inv_freq`. Raises ConfigError for a
    tensor that is missing, unknown or of another shape, and for a damaged file."""
    files, sizes = files_of(folder), shapes(config, vocab)
    tensors = layout(config)
    spare = {"lm_head.weight"} if config.tie else set()
    missing = sorted(tensors.keys() - files.keys())
    unknown = sorted(n for n in files.keys() - tensors.keys() - spare if not n.endswith("rotary_emb.inv_freq"))
    if missing or unknown:
        raise ConfigError(f"{folder}: {len(missing)} tensors are missing ({', '.join(missing[:3]) or 'none'}) and "
                          f"{len(unknown)} unknown ({', '.join(unknown[:3]) or 'none'})")
    for name, path in files.items():
        if name not in tensors:
            continue
        with opened(path) as f:
            shape = list(f.get_slice(name).get_shape())
        expected = [sum(sizes[o][0] for o in tensors[name]), *sizes[tensors[name][0]][1:]]
        rows = name in ("model.embed_tokens.weight", "lm_head.weight")
        if shape[1:] != expected[1:] or (shape[0] < expected[0] if rows else shape[0] != expected[0]):
            what = f"the tokenizer of these shards has {vocab:,} tokens" if rows else "config.json says otherwise"
            raise ConfigError(f"{path}: {name} is {shape}, wanted {expected}: {what}")
    return files


def differing(config: ModelConfig, folder: Path) -> list[str]:
    """List how `config` differs from the model in `folder`, one line for each key.

    Some settings are not compared: `rope_theta` and `rope_scaling`, which may differ to lengthen the context;
    `init_std`, which has no effect once weights are loaded; and `masking`, which config.json does not state. For
    `head_dim` the resulting widths of a head are compared."""
    there, _ = read_config(folder)
    free = {"rope_theta", "rope_scaling", "init_std", "masking", "head_dim"}
    lines = [f"train.model.{f.name}: {getattr(config, f.name)!r}, there {getattr(there, f.name)!r}"
             for f in fields(ModelConfig) if f.name not in free and getattr(config, f.name) != getattr(there, f.name)]
    return lines + ([f"train.model.head_dim: {config.dim}, there {there.dim}"] if config.dim != there.dim else [])


@torch.no_grad()
def load(model: nn.Module, config: ModelConfig, vocab: int, folder: Path, tokenizer: Path | None = None) -> None:
    """Fill all parameters of `model`, sharded or not, with the weights in `folder`. Each rank reads one tensor at a
    time, so that only one is in memory. The files' embedding and output may have more rows than `vocab` (padding);
    these rows are not read into the model.

    Raises ConfigError when the settings of the model in `folder` differ from `config` (see `differing`), or when its
    tensors do not fit (see `check`). `tokenizer` is the file with which the shards were encoded. If it is a .json file,
    and `folder` has a tokenizer.json, ConfigError is also raised when their vocabularies differ.
    """
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
    for their, ours in layout(config).items():
        with opened(files[their]) as f:
            value: Tensor = f.get_tensor(their).float()
        edges = [0]
        for name in ours:
            edges.append(edges[-1] + sizes[name][0])
        for name, (start, stop) in zip(ours, pairwise(edges)):
            fill(parameters[name], value[start:stop])
