"""Estimates, before training, how much memory a rank will need, in two ways: by a formula, and by a measurement on fake
tensors. Neither includes memory that the allocator cannot use, so a plan should fill at most 92 % of the device.

The formula adds up everything that a step keeps in memory at some time. Its result is a little too high, because not
everything is there at the same time: gradients appear while activations are freed.

The measurement is an upper bound. It runs the model, sharded over a fake process group of N ranks, on tensors with
shapes but no storage (FakeTensorMode), and torch's FSDPMemTracker counts the bytes. It needs no GPU and uses the CPU's
kernels. These keep more than those of CUDA, because norms are not fused, and keys and values are repeated for all
heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from trainer.base.config import ConfigError
from trainer.loop.config import TrainConfig
from trainer.loop.run import Run
from trainer.model.config import ModelConfig
from trainer.parallel.config import Checkpointing, Every, Sharding
from trainer.parallel.world import gathered

#: share of a device's memory that a plan may fill
FILL = 0.92
#: memory in bytes by torch's name of the device
MEMORY = {"NVIDIA A100-SXM4-40GB": 40e9, "NVIDIA A100-SXM4-80GB": 80e9, "NVIDIA H100 80GB HBM3": 80e9,
          "NVIDIA H100 NVL": 94e9, "NVIDIA H200": 141e9, "NVIDIA H200 NVL": 141e9, "NVIDIA B200": 180e9,
          "NVIDIA L40S": 48e9, "NVIDIA GeForce RTX 4090": 24e9}
#: short names that fit several devices, and the device that each of them means
MEANT = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB"}
#: which kernels compute a layer. "compiled": fused CUDA kernels; backward recomputes everything except matrix products
#: and attention. "eager": CUDA's kernels one by one; a norm keeps its float32 input. "cpu": the CPU's kernels, which
#: also keep normalised values and repeat keys and values
Kernels = Literal["compiled", "eager", "cpu"]
#: numbers of layers of the two models that are measured; their difference gives the memory of a layer
MEASURED = (3, 5)


def micro_batch(run: Run, ranks: int) -> tuple[int, int, bool]:
    """Return (rows, tokens per row, several) of a rank's largest micro-batch (the samples that a rank computes at
    once). `several` is whether any step of the run has more than one micro-batch."""
    data = max(1, ranks // run.config.parallel.tensor)
    result = []
    for phase in run.curriculum.phases:
        here = -(-phase.batch // data)
        rows = min(run.micro_rows(phase.sequence), here)
        result.append((rows * phase.sequence, rows, phase.sequence, here > rows))
    _, rows, length, _ = max(result)
    return rows, length, any(several for *_, several in result)


def number_bytes(run: Run, device: str) -> int:
    """Return how many bytes a number takes in matrix products on `device` (cpu or cuda)."""
    precision = run.config.precision
    return 2 if precision == "bf16" or (precision == "auto" and device == "cuda") else 4


def activation_bytes(model: ModelConfig, how: str | Every, size: int, tensor: int, kernels: Kernels) -> float:
    """Return the bytes of activations that a layer keeps per token from forward to backward, on average over the
    layers.

        how      the setting `parallel.checkpointing`
        size     bytes of a number in the compute dtype
        tensor   number of ranks among which heads and hidden units are divided
        kernels  what computes the layer (see `Kernels`)
    """
    width, query, key = model.width, model.heads * model.dim / tensor, model.kv_heads * model.dim / tensor
    hidden = model.ffn / tensor
    upcast = _upcast(size, kernels)
    gated = model.activation == "swiglu"
    keys_passed = key if kernels != "cpu" and grouped() else query             # keys or values, as passed to attention
    if kernels == "compiled":       # inputs of the matrix products and of attention; backward recomputes all between
        normed = query + key if model.qk_norm else 0
        everything = size * (4 * width + normed + 2 * query + 2 * keys_passed + (3 if gated else 2) * hidden) \
            + 4 * query / model.dim
    else:
        norms = 2 * upcast * width + (upcast * (query + key) if model.qk_norm else 0)
        attention = size * (width + query + 2 * keys_passed + 2 * query) + 4 * query / model.dim
        mlp = size * (width + (4 if gated else 2) * hidden)
        everything = norms + attention + mlp + (0 if size < 4 else 2 * size * width)
    if how == "none":
        return everything
    block = size * width                                              # input of the block
    if how == "selective":                                            # results of the matrix products and of attention
        sums = (1 if kernels == "compiled" and tensor == 1 else 2) * width * (2 if tensor > 1 else 1)
        return block + size * (query + 2 * key + query + sums + (2 if gated else 1) * hidden)
    if how == "full":
        return block
    assert isinstance(how, Every)
    again = -(-model.layers // how.every) / model.layers
    return again * block + (1 - again) * everything


def _upcast(size: int, kernels: Kernels) -> int:
    """Return how many bytes an uncompiled norm keeps for each number of its input, which has `size` bytes. It keeps a
    float32 copy of an input in half precision. On a CPU it also keeps the normalised value."""
    return (4 if size < 4 else 0) + (4 if kernels == "cpu" else 0)


def grouped() -> bool:
    """Return whether the attention kernels in this version of torch support grouped-query attention, i.e. fewer heads
    of keys and values than of queries. Otherwise, keys and values are repeated for all heads. varlen_attn supports it
    from torch 2.13 on. A torch without varlen_attn uses other kernels, which support it."""
    from trainer.model import attention

    return attention.VARLEN_GQA or attention.varlen_attn is None


def kernels_on(config: TrainConfig, device: str) -> Kernels:
    """Return the kind of kernels that compute a training with the settings `config` on `device` (cpu or cuda): cpu,
    compiled or eager."""
    if device == "cpu":
        return "cpu"
    return "eager" if config.compile is False else "compiled"


def optimizer_bytes(config: TrainConfig, vocab: int) -> float:
    """Return the bytes of the optimiser's state for the whole model, summed over all ranks."""
    return config.optimizer.state_bytes(*_sizes(config, vocab))


def _sizes(config: TrainConfig, vocab: int) -> tuple[int, int, int]:
    """Return (number of parameters of the model, number of them in hidden matrices, width of the model)."""
    model = config.model
    return model.parameters(vocab), model.matmul_parameters(vocab) - vocab * model.width, model.width


def checkpoint_bytes(config: TrainConfig, vocab: int) -> float:
    """Return the bytes of a checkpoint: parameters in float32, and the optimiser's state as `checkpoint.moments` stores
    it."""
    return 4.0 * config.model.parameters(vocab) + config.optimizer.stored_bytes(
        *_sizes(config, vocab), half=config.checkpoint.moments == "bf16")


def estimate(config: TrainConfig, vocab: int, ranks: int, tokens: int, size: int, accumulate: bool = False,
             kernels: Kernels | None = None) -> dict[str, float]:
    """Estimate the memory of one of `ranks` ranks by a formula. Returns {what the memory is used for: bytes}; the sum
    is the estimate. Raises ConfigError when that many ranks do not fit the settings under `train.parallel`.

        tokens      tokens of a micro-batch
        size        bytes of a number in matrix products
        accumulate  whether a step has several micro-batches
        kernels     what computes a layer (None: CUDA's kernels, compiled or not according to `config`)
    """
    kernels = kernels or kernels_on(config, "cuda")
    model, parallel = config.model, config.parallel
    shards = parallel.shape(ranks)["shard"] * parallel.tensor
    parameters = model.parameters(vocab)
    ends = vocab * model.width * (1 if model.tie else 2)
    layer = (parameters - ends) / model.layers
    unsharded = parameters if gathered(parallel) else ends + 2 * layer      # the next layer is gathered ahead
    loss_tokens = tokens / parallel.tensor                                         # tokens of the loss on this rank
    host = parallel.offload
    result = {
        "parameters": 0.0 if host else 4.0 * parameters / shards,
        "gradients": 0.0 if host else 4.0 * parameters / shards,
        "optimizer": 0.0 if host else optimizer_bytes(config, vocab) / shards,
        "gathered": size * unsharded / parallel.tensor,
        "accumulated": accumulated_bytes(config, vocab, ranks) if accumulate else 0.0,
        "activations": tokens * model.layers * activation_bytes(model, parallel.checkpointing, size, parallel.tensor,
                                                                kernels),
    }
    output = vocab * model.width / parallel.tensor
    # at the end of forward, memory has: logits, softmax (which compiled kernels do not write) and gradient of a chunk;
    # the gradient of the whole output matrix (and with tensor parallelism the gathered matrix); the gradient of its
    # input
    chunk = min(config.loss.tokens(vocab, kernels != "cpu"), loss_tokens)
    loss = chunk * vocab * ((0 if kernels == "compiled" else 4) + 2 * size) + loss_tokens * model.width * size
    loss += vocab * model.width * (4 + (size if parallel.tensor > 1 else 0))
    # in backward, memory has: a layer's gradients before and during their reduction; the gradients of the output, which
    # are reduced together with those of the embedding; the activations of a recomputed layer
    backward = size * output + (size + 4) * layer / parallel.tensor
    if parallel.checkpointing != "none":
        backward += tokens * activation_bytes(model, "none", size, parallel.tensor, kernels)
    result["working"] = tokens * model.width * (_upcast(size, kernels) + 2 * size) + max(loss, backward)
    return result


def accumulated_bytes(config: TrainConfig, vocab: int, ranks: int) -> float:
    """Return the bytes of gradients that a rank keeps only to add up the micro-batches of a step, without the gradients
    that the optimiser reads. A rank keeps such gradients with `accumulate: unsharded`, or if gradients are offloaded
    with hybrid sharding; otherwise the result is 0."""
    parallel, parameters = config.parallel, config.model.parameters(vocab)
    if parallel.accumulate == "unsharded":
        return 4.0 * parameters / parallel.tensor
    shape = parallel.shape(ranks)
    if parallel.offload and shape.get("replicate", 1) > 1:            # gradients not yet summed over the copies
        return 4.0 * parameters / (shape["shard"] * parallel.tensor)
    return 0.0


def measure(config: TrainConfig, vocab: int, ranks: int, rows: int, length: int, size: int,
            accumulate: bool = False) -> float:
    """Measure the peak memory of one of `ranks` ranks on fake tensors, in bytes. Parameters, gradients, forward and
    backward are measured; the optimiser's state is added by the formula. `parallel.fp8` and `offload` are ignored. A
    micro-batch has `rows` rows of `length` tokens, and a number in matrix products has `size` bytes. With `accumulate`,
    a step of two micro-batches is measured.

    Of a large model, smaller versions with MEASURED layers are measured, and the result is extrapolated to all layers.
    No process group may exist. Raises RuntimeError when torch's memory tracker, a private part of torch, fails.
    """
    layers = config.model.layers
    if layers <= MEASURED[1]:
        return _measured(config, vocab, ranks, rows, length, size, accumulate)
    low, high = (_measured(replace(config, model=replace(config.model, layers=n)), vocab, ranks, rows, length, size,
                           accumulate) for n in MEASURED)
    return low + (high - low) / (MEASURED[1] - MEASURED[0]) * (layers - MEASURED[0])


def _measured(config: TrainConfig, vocab: int, ranks: int, rows: int, length: int, size: int,
              accumulate: bool) -> float:
    import torch
    import torch.distributed as dist

    from trainer.model.attention import DocMask
    from trainer.model.transformer import Transformer
    from trainer.parallel.world import arrange, gather_gradients, shard

    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no such tracker any more ({error})") from None

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        world = arrange(0, ranks, torch.device("cpu"), replace(config.parallel, fp8=False, offload=False))
        with torch.device("meta"):
            model = Transformer(config.model, vocab)
        # sharded on the meta device and given fake storage later, as meshes cannot be made of fake tensors
        shard(model, replace(world, device=torch.device("meta")), torch.bfloat16 if size == 2 else torch.float32, False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            tokens = torch.zeros(rows, length, dtype=torch.int64)
            mask = DocMask(torch.arange(length).repeat(rows, 1), None, None, length)
            tracker = FSDPMemTracker(model)
            tracker.track_inputs((tokens, tokens))
            with tracker:
                for last in (False, True) if accumulate else (True,):
                    tracker.reset_mod_stats()                # it accepts one pass per module; the peak is kept
                    gather_gradients(model, world, last)
                    model(tokens, mask, tokens, torch.ones(()), config.loss.z,
                          config.loss.tokens(vocab, False))[0].backward()
            peak = float(sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values()))
            # the optimiser's step is not run, because DTensor's bookkeeping would count the whole model's shapes
            shards = config.parallel.shape(ranks)["shard"] * config.parallel.tensor
            return peak + optimizer_bytes(config, vocab) / shards
    except (AttributeError, TypeError, NotImplementedError) as error:
        raise RuntimeError(f"torch {torch.__version__}: its tracker cannot count this model ({error})") from error
    finally:
        dist.destroy_process_group()


def table(config: TrainConfig, vocab: int, ranks: int, length: int, size: int, capacity: float | None,
          rows: int) -> tuple[list[str], str]:
    """Return (lines, advice). The lines are a table of the estimated memory in GB. It has a row for each size of
    micro-batch and each kind of activation checkpointing, and a column for each way to divide the model among ranks.
    `rows` is the number of samples of `length` tokens that a rank has in a step, so it is the largest micro-batch.
    Others are powers of two below it; at most six sizes are shown.

    The advice names settings that need at most the share FILL of `capacity` (bytes), with the run's own way to divide
    the model. It prefers the least recomputation that fits, and with it the largest micro-batch. It says so if nothing
    fits, or if `capacity` is None (unknown).
    """
    own, data = config.parallel.shard, ranks // config.parallel.tensor
    ways: dict[Sharding, tuple[str, int]] = {"full": ("full", 0)}
    node = config.parallel.shard_size or 8
    if own == "hybrid" or (data > node and data % node == 0):
        ways["hybrid"] = (f"hybrid {node}", node)
    if data > 1:
        ways |= {"grad": ("grad", 0), "none": ("none", 0)}
    sizes = sorted({1 << i for i in range(rows.bit_length()) if 1 << i <= rows} | {rows})[-6:]
    lines = [f"{'micro_batch':>12}  {'checkpointing':<14}" + "".join(f"{name:>12}" for name, _ in ways.values())]
    best: tuple[int, int, str] | None = None
    cheap: dict[Checkpointing, int] = {"none": 3, "selective": 2, "full": 1}
    for how in cheap:
        for count in sizes:
            cells = []
            for way, (_, node) in ways.items():
                candidate = replace(config, parallel=replace(config.parallel, checkpointing=how, shard=way,
                                                          shard_size=node))
                total = sum(estimate(candidate, vocab, ranks, count * length, size, rows > count).values())
                fits = capacity is not None and total <= FILL * capacity
                cells.append(f"{total / 1e9:>11.1f}{'*' if fits else ' '}")
                own_way = own if own in ways else "full"          # one rank divides nothing
                if fits and way == own_way and (best is None or (cheap[how], count) > best[:2]):
                    best = (cheap[how], count, how)
            lines.append(f"{count * length:>12,}  {how:<14}" + "".join(cells))
    if capacity is None:
        return lines, "the memory of this device is not known: --memory 141GB marks what fits"
    if best is None:
        return lines, (f"nothing fits into {FILL:.0%} of {capacity / 1e9:.0f} GB as `shard: {own}`: more ranks, tensor "
                       f"parallelism (train.parallel.tensor) or train.parallel.offload")
    return lines, (f"* fits into {FILL:.0%} of {capacity / 1e9:.0f} GB; the least recomputation that fits, and with it "
                   f"the largest micro-batch: train.parallel.checkpointing {best[2]}, train.micro_batch "
                   f"{best[1] * length}")


def parse_bytes(text: str) -> float:
    """Parse an amount of memory: '141GB' → 141e9. Units are MB, GB, TB, MiB, GiB and TiB. Raises ConfigError for any
    other text."""
    units = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    for unit, factor in units.items():
        if text.strip().upper().endswith(unit):
            try:
                value = float(text.strip()[:-len(unit)])
            except ValueError:
                break
            if value > 0:
                return value * factor
    raise ConfigError(f"--memory {text}: no amount of memory; write 141GB or 80GiB")


def device_named(text: str, devices: dict[str, Any]) -> str:
    """Find the key of `devices` that a short name means: 'H200' → 'NVIDIA H200'. Raises ConfigError when the name fits
    no device, or when it fits several devices that have different values in `devices`."""
    text = MEANT.get(text.lower(), text)
    exact = [name for name in devices if text.lower() in (name.lower(), name.lower().removeprefix("nvidia "))]
    close = exact or [name for name in devices if text.lower() in name.lower().split()]
    if len(close) == 1 or (close and len({devices[name] for name in close}) == 1):
        return close[0]
    raise ConfigError(f"--gpu {text}: " + (f"which? {', '.join(close)}" if close else f"not known; there are "
                                                                            f"{', '.join(devices)}"))
