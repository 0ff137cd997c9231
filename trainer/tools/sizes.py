"""Formats the plan of a training as text: phases, sources, sizes, memory and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.base.humanize import count
from tokenizer.mixture.curriculum import Phase
from tokenizer.mixture.realised import plan as mixture
from trainer.loop.run import Run
from trainer.model.tensor import PLAN
from trainer.observe.mfu import FORMULA, PEAKS, step_flops
from trainer.tools.memory import FILL, MEMORY, estimate, measure, micro_batch, number_bytes, table


@dataclass(frozen=True)
class Machine:
    """The device that a rank uses. `memory` is in bytes, and `peak` in dense bf16 FLOP/s (None: unknown). `mfu` is the
    share of the peak that training is assumed to reach. `price` is in $ per hour."""

    name: str = "NVIDIA H200"
    memory: float | None = MEMORY["NVIDIA H200"]
    peak: float | None = PEAKS["NVIDIA H200"]
    mfu: float = 0.4
    price: float | None = None


def plan(run: Run, ranks: int, machine: Machine = Machine(), measured: bool = False) -> str:
    curriculum, model, vocab = run.curriculum, run.config.model, run.vocab
    schedule = run.schedule()
    lines = [f"model      {model.parameters(vocab):,} parameters ({model.layers} layers × {model.width}, "
             f"{model.heads} heads, {model.kv_heads} key/value heads, ffn {model.ffn}, vocabulary {vocab:,}"
             f"{', tied' if model.tie else ''})",
             f"optimiser  {run.config.optimizer.kind}, peak lr {run.config.optimizer.lr:g}, warm-up "
             f"{count(schedule.warmup)} tokens" + (": longer than the training, which never gets to the peak; lower "
                                                   "train.schedule.warmup" if schedule.warmup > schedule.total else ""),
             f"total      {curriculum.tokens:,} tokens, {curriculum.steps:,} steps, {curriculum.samples:,} samples", "",
             f"{'phase':<12}{'steps':>9}{'tokens':>10}{'sequence':>10}{'batch':>10}{'lr from':>11}{'to':>10}"]
    start = 0
    for phase in curriculum.phases:
        # rates of the first and the last step; a step takes the rate at its middle
        ends = (start + phase.batch_at(0) * phase.sequence / 2, start + phase.tokens - phase.batch * phase.sequence / 2)
        first, last = (schedule.factor(t) * run.config.optimizer.lr for t in ends)
        lines.append(f"{phase.name:<12}{phase.steps:>9,}{count(phase.tokens):>10}{phase.sequence:>10,}"
                     f"{batches(phase):>10}{first:>11.2e}{last:>10.2e}")
        start += phase.tokens
    lines += ["", f"{'phase':<12}{'stream':<24}{'share':>7}{'tokens':>10}{'epochs so far':>15}"]
    lines += [f"{row['phase']:<12}{row['stream']:<24}{row['share']:>7.1%}{count(row['tokens']):>10}"
              f"{row['epochs']:>15.2f}" + (f"  ({count(row['tokens'] - row['padding'])} without padding)"
                                           if row["padding"] else "") for row in mixture(curriculum)]
    lines += ["", *idle] if (idle := run.unshared(ranks)) else []
    return "\n".join([*lines, "", *memory(run, ranks, machine, measured), "", *cost(run, ranks, machine)])


def memory(run: Run, ranks: int, machine: Machine, measured: bool) -> list[str]:
    """Return lines of text about the memory of a rank. It is estimated by a formula and, if `measured`, also measured
    on fake tensors (see `trainer.tools.memory`). Further lines show alternative settings and which of them fit."""
    config, parallel, vocab = run.config, run.config.parallel, run.vocab
    size = number_bytes(run, "cuda")
    rows, length, accumulate = micro_batch(run, ranks)
    parts = estimate(config, vocab, ranks, rows * length, size, accumulate)
    how = parallel.checkpointing if isinstance(parallel.checkpointing, str) else f"every {parallel.checkpointing.every}"
    shape = " × ".join(f"{name} {n}" for name, n in parallel.shape(ranks).items())
    lines = [f"memory     of a rank of {ranks} ({shape}): {rows} × {length:,} tokens at once in "
             f"{'bf16' if size == 2 else 'fp32'}, checkpointing {how}",
             "           " + " + ".join(f"{name} {gb(part)}" for name, part in parts.items() if part)
             + f" = {gb(sum(parts.values()))}"]
    if measured:
        try:
            peak = measure(config, vocab, ranks, rows, length, size, accumulate)
            here = replace(config, parallel=replace(parallel, offload=False))
            alike = sum(estimate(here, vocab, ranks, rows * length, size, accumulate, kernels="cpu").values())
            lines.append(f"           measured on fake tensors of {ranks} rank{'s' * (ranks > 1)}: {gb(peak)} with "
                         f"the CPU's kernels, which keep more; the formula for them: {gb(alike)}")
        except RuntimeError as error:
            lines.append(f"           not measured: {error}")
    if accumulate and ranks > parallel.tensor:
        lines += accumulation(run, ranks, machine, rows, length)
    if parallel.tensor > 1:
        lines += ["", "over a tensor group:"]
        lines += [f"           {text:<58}{' '.join(names).replace('.weight', '')}" for names, _, text in PLAN]
    most = max(-(-phase.batch // max(1, ranks // parallel.tensor)) for phase in run.curriculum.phases
               if phase.sequence == length)
    cells, best = table(config, vocab, ranks, length, size, machine.memory, most)
    lines += ["", "GB of a rank by what is divided (train.parallel.shard):", *cells, best]
    return lines


def accumulation(run: Run, ranks: int, machine: Machine, rows: int, length: int) -> list[str]:
    """Return lines about the memory of a rank with both values of the setting `parallel.accumulate`, sharded and
    unsharded, and which of the two to use."""
    config, size = run.config, number_bytes(run, "cuda")
    totals = {}
    for way in ("sharded", "unsharded"):
        candidate = replace(config, parallel=replace(config.parallel, accumulate=way))
        totals[way] = sum(estimate(candidate, run.vocab, ranks, rows * length, size, True).values())
    room = FILL * machine.memory if machine.memory else None
    fits = "" if room is None else f", {'fits' if totals['unsharded'] <= room else 'does not fit'}"
    lines = [f"           several micro-batches a step: {gb(totals['sharded'])} with accumulate: sharded, "
             f"{gb(totals['unsharded'])} with unsharded{fits}"]
    shards = config.parallel.shape(ranks)["shard"]
    if shards == 1:
        return [*lines, "           take sharded: nothing is divided, so both reduce once a step"]
    # bytes of float32 gradients that leave a rank while it computes the backward of a micro-batch
    traffic = 4.0 * config.model.parameters(run.vocab) / config.parallel.tensor * (shards - 1) / shards
    if room is not None and totals["unsharded"] > room:
        return [*lines, "           take sharded"]
    if machine.peak is None:
        return [*lines, f"           unsharded saves {gb(traffic)} of traffic a rank and micro-batch"]
    flops = step_flops(config.model, run.vocab, rows * length, rows * length * length) / config.parallel.tensor
    seconds = 2 / 3 * flops / (machine.mfu * machine.peak)
    return [*lines, f"           take sharded where a rank's links carry more than {traffic / seconds / 1e9:.3g} GB/s: "
                    f"then backward ({seconds * 1e3:.3g} ms) hides the {gb(traffic)} of a micro-batch; unsharded below "
                    f"that"]


def cost(run: Run, ranks: int, machine: Machine) -> list[str]:
    """Return lines about the FLOPs of the whole training, and its time and price."""
    flops = sum(step_flops(run.config.model, run.vocab, p.tokens, p.tokens * p.sequence) for p in run.curriculum.phases)
    lines = [f"compute    {flops:.3g} FLOPs ({FORMULA}, at most: documents as long as the sequence)"]
    if machine.peak is None:
        return [*lines, f"           no peak is known for {machine.name}: no hours"]
    hours = flops / (machine.mfu * machine.peak) / 3600
    paid = f" = ${hours * machine.price:,.2f} at ${machine.price:g} a GPU-hour" if machine.price else ""
    return [*lines, f"           = {hours:.3g} GPU-hours of {machine.name} at {machine.mfu:.0%} MFU{paid}; "
                    f"{hours / ranks:.3g} hours on {ranks}"]


def batches(phase: Phase) -> str:
    """Return the number of tokens of a step in a phase (stretch of the training) as text: '512k', or '64k→512k' when
    the batch size grows within the phase."""
    sizes = [count(batch * phase.sequence) for *_, batch in phase.stretches]
    return sizes[0] if len(sizes) == 1 else f"{sizes[0]}→{sizes[-1]}"


def gb(size: float) -> str:
    """Format a number of bytes as text: '3.20 GB', '41.70 MB'."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
