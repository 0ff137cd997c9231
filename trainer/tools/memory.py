"""Memory of a rank, before there is one: a closed formula, and the same step measured without memory and without ranks.

The formula adds up what a step keeps at one time or another, and is a little too much: gradients come while activations
go. The measurement runs the very model, sharded over a fake process group of N ranks, on tensors that have shapes and
no storage (FakeTensorMode), and lets torch's FSDPMemTracker count. It runs where there is no GPU, hence with the CPU's
kernels, which keep more than CUDA's: norms are not fused there, and keys and values are repeated for all heads. It says
at most, the formula about. Neither knows what the allocator wastes: fit into 92 % of the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.base.config import ConfigError
from trainer.loop.config import TrainConfig
from trainer.loop.run import Run
from trainer.model.config import ModelConfig
from trainer.parallel.config import Checkpointing, Every, Sharding
from trainer.parallel.world import gathered

#: share of a device's memory that a plan may fill
FILL = 0.92
#: memory in bytes by the name torch gives the device
MEMORY = {"NVIDIA A100-SXM4-40GB": 40e9, "NVIDIA A100-SXM4-80GB": 80e9, "NVIDIA H100 80GB HBM3": 80e9,
          "NVIDIA H100 NVL": 94e9, "NVIDIA H200": 141e9, "NVIDIA H200 NVL": 141e9, "NVIDIA B200": 180e9,
          "NVIDIA L40S": 48e9, "NVIDIA GeForce RTX 4090": 24e9}
#: what is meant where a short name fits several
MEANT = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB"}
#: layers of the models that are measured; what a layer adds is the difference
MEASURED = (3, 5)


def micro_batch(run: Run, ranks: int) -> tuple[int, int, bool]:
    """(rows, their length, whether a step has several of them) of the largest micro-batch of a rank of `ranks`."""
    data = max(1, ranks // run.config.parallel.tensor)
    result = []
    for phase in run.curriculum.phases:
        here = -(-phase.batch // data)
        rows = min(run.micro_rows(phase.sequence), here)
        result.append((rows * phase.sequence, rows, phase.sequence, here > rows))
    _, rows, length, _ = max(result)
    return rows, length, any(several for *_, several in result)


def number_bytes(run: Run, device: str) -> int:
    """Bytes of a number in matrix products on `device` (cpu or cuda)."""
    precision = run.config.precision
    return 2 if precision == "bf16" or (precision == "auto" and device == "cuda") else 4


def activation_bytes(model: ModelConfig, how: str | Every, size: int, tensor: int, fused: bool = True) -> float:
    """Bytes that one layer keeps for one token from forward to backward, on average over the layers.

    `size`: bytes of a number in the compute dtype. `fused`: CUDA's kernels (a norm keeps its float32 input alone), not
    the CPU's (and its normalised values; keys and values repeated). Heads and hidden units are divided by `tensor`.
    """
    width, query, key = model.width, model.heads * model.dim / tensor, model.kv_heads * model.dim / tensor
    hidden = model.ffn / tensor
    upcast = _upcast(size, fused)
    norms = 2 * upcast * width + (upcast * (query + key) if model.qk_norm else 0)
    given = query if not fused else key                               # keys or values as attention gets them
    attention = size * (width + query + 2 * given + 2 * query) + 4 * query / model.dim
    mlp = size * (width + (4 if model.activation == "swiglu" else 2) * hidden)
    everything = norms + attention + mlp + (0 if size < 4 else 2 * size * width)
    if how == "none":
        return everything
    block = size * width                                              # its input
    if how == "selective":                                            # results of the matrix products and of attention
        sums = 2 * width * (2 if tensor > 1 else 1)
        return block + size * (query + 2 * key + query + sums + (2 if model.activation == "swiglu" else 1) * hidden)
    if how == "full":
        return block
    assert isinstance(how, Every)
    again = -(-model.layers // how.every) / model.layers
    return again * block + (1 - again) * everything


def _upcast(size: int, fused: bool) -> int:
    """Bytes a norm keeps for a number: its float32 input (which is there already, if size is 4), not fused also the
    normalised value."""
    return (4 if size < 4 else 0) + (0 if fused else 4)


def optimizer_bytes(config: TrainConfig, vocab: int) -> float:
    """Bytes of optimiser state of the whole model."""
    all_parameters = config.model.parameters(vocab)
    matrices = config.model.matmul_parameters(vocab) - vocab * config.model.width
    return config.optimizer.state_bytes(all_parameters, matrices, config.model.width)


def checkpoint_bytes(config: TrainConfig, vocab: int) -> float:
    """Bytes of a checkpoint: parameters and optimiser state, all in float32."""
    return 4.0 * config.model.parameters(vocab) + optimizer_bytes(config, vocab)


def estimate(config: TrainConfig, vocab: int, ranks: int, tokens: int, size: int, accumulate: bool = False,
             fused: bool = True) -> dict[str, float]:
    """Bytes on a rank of `ranks` with micro-batches of `tokens` tokens, `size` bytes a number in matrix products.
    `accumulate`: a step has several micro-batches. Raises ConfigError when the ranks cannot be arranged."""
    model, parallel = config.model, config.parallel
    shards = parallel.shape(ranks)["shard"] * parallel.tensor
    parameters = model.parameters(vocab)
    ends = vocab * model.width * (1 if model.tie else 2)
    layer = (parameters - ends) / model.layers
    unsharded = parameters if gathered(parallel) else ends + 2 * layer      # the next layer is gathered ahead
    mine = tokens / parallel.tensor                                         # of the loss
    host = parallel.offload
    result = {
        "parameters": 0.0 if host else 4.0 * parameters / shards,
        "gradients": 0.0 if host else 4.0 * parameters / shards,
        "optimizer": 0.0 if host else optimizer_bytes(config, vocab) / shards,
        "gathered": size * unsharded / parallel.tensor,
        "accumulated": accumulated_bytes(config, vocab, ranks) if accumulate else 0.0,
        "activations": tokens * model.layers * activation_bytes(model, parallel.checkpointing, size, parallel.tensor,
                                                                fused),
    }
    output = vocab * model.width / parallel.tensor
    # the end of forward: a chunk's logits, their softmax and its gradient; the gradients of the whole output matrix
    # (of which a tensor group also gathers a copy) and of its input
    loss = min(config.loss.chunk, mine) * vocab * (4 + 2 * size) + mine * model.width * size + vocab * model.width * (
        4 + (size if parallel.tensor > 1 else 0))
    # backward: a layer's gradients before and while they are reduced, the output's, which wait for the embedding's,
    # and of a layer that is computed again what it keeps
    backward = size * output + (size + 4) * layer / parallel.tensor
    if parallel.checkpointing != "none":
        backward += tokens * activation_bytes(model, "none", size, parallel.tensor, fused)
    result["working"] = tokens * model.width * (_upcast(size, fused) + 2 * size) + max(loss, backward)
    return result


def accumulated_bytes(config: TrainConfig, vocab: int, ranks: int) -> float:
    """Bytes of gradients that a rank holds between the micro-batches of a step, beside those the optimiser gets."""
    parallel, parameters = config.parallel, config.model.parameters(vocab)
    if parallel.accumulate == "unsharded":
        return 4.0 * parameters / parallel.tensor
    shape = parallel.shape(ranks)
    if parallel.offload and shape.get("replicate", 1) > 1:            # what is not summed over the copies yet
        return 4.0 * parameters / (shape["shard"] * parallel.tensor)
    return 0.0


def measure(config: TrainConfig, vocab: int, ranks: int, rows: int, length: int, size: int,
            accumulate: bool = False) -> float:
    """Peak bytes of forward and backward on a rank of `ranks`, parameters, gradients and optimiser state included, as
    counted on fake tensors; of models with MEASURED layers, and from them on to all. `accumulate`: of two micro-batches
    of a step.

    No process group may be there. Raises RuntimeError when this torch's tracker, a private tool, cannot do it.
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
        # on the meta device, where it stays until it is given fake storage: meshes are not made of fake tensors
        shard(model, replace(world, device=torch.device("meta")), torch.bfloat16 if size == 2 else torch.float32, False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            tokens = torch.zeros(rows, length, dtype=torch.int64)
            mask = DocMask(torch.arange(length).repeat(rows, 1), None, None, length)
            tracker = FSDPMemTracker(model)
            tracker.track_inputs((tokens, tokens))
            with tracker:
                for last in (False, True) if accumulate else (True,):
                    tracker.reset_mod_stats()                # it takes one pass of a module; its peak stays
                    gather_gradients(model, world, last)
                    model(tokens, mask, tokens, torch.ones(()), config.loss.z, config.loss.chunk)[0].backward()
            peak = float(sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values()))
            # the optimiser's step would be counted with the shapes of the whole model: DTensor's own bookkeeping
            shards = config.parallel.shape(ranks)["shard"] * config.parallel.tensor
            return peak + optimizer_bytes(config, vocab) / shards
    except (AttributeError, TypeError, NotImplementedError) as error:
        raise RuntimeError(f"torch {torch.__version__}: its tracker cannot count this model ({error})") from error
    finally:
        dist.destroy_process_group()


def table(config: TrainConfig, vocab: int, ranks: int, length: int, size: int, capacity: float | None,
          rows: int) -> tuple[list[str], str]:
    """GB by micro-batch and checkpointing for each way to divide the state, and of the run's own way the largest that
    fits FILL of `capacity` (bytes). `rows`: windows of `length` tokens a rank has in a step, the most a micro-batch can
    be."""
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
                wanted = replace(config, parallel=replace(config.parallel, checkpointing=how, shard=way,
                                                          shard_size=node))
                total = sum(estimate(wanted, vocab, ranks, count * length, size, rows > count).values())
                fits = capacity is not None and total <= FILL * capacity
                cells.append(f"{total / 1e9:>11.1f}{'*' if fits else ' '}")
                mine = own if own in ways else "full"          # one rank divides nothing
                if fits and way == mine and (best is None or (cheap[how], count) > best[:2]):
                    best = (cheap[how], count, how)
            lines.append(f"{count * length:>12,}  {how:<14}" + "".join(cells))
    if capacity is None:
        return lines, "the memory of this device is not known: --memory 141GB marks what fits"
    if best is None:
        return lines, (f"nothing fits into {FILL:.0%} of {capacity / 1e9:.0f} GB as `shard: {own}`: more ranks, tensor "
                       f"parallelism (train.parallel.tensor) or train.parallel.offload")
    return lines, (f"* fits into {FILL:.0%} of {capacity / 1e9:.0f} GB; least computed again first, then most at once: "
                   f"train.parallel.checkpointing {best[2]}, train.micro_batch {best[1] * length}")


def parse_bytes(text: str) -> float:
    """'141GB' → 141e9; also MB, GiB, TB. Raises ConfigError."""
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


def device_named(text: str, known: dict[str, Any]) -> str:
    """The full name of a device from a short one ('H200' → 'NVIDIA H200'). Raises ConfigError when none or several
    unlike ones are meant."""
    text = MEANT.get(text.lower(), text)
    exact = [name for name in known if text.lower() in (name.lower(), name.lower().removeprefix("nvidia "))]
    close = exact or [name for name in known if text.lower() in name.lower().split()]
    if len(close) == 1 or (close and len({known[name] for name in close}) == 1):
        return close[0]
    raise ConfigError(f"--gpu {text}: " + (f"which? {', '.join(close)}" if close else f"not known; there are "
                                                                            f"{', '.join(known)}"))
