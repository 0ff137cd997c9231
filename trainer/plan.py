"""What a training would do, before it does it: phases, sources, sizes, memory and FLOPs, as text."""

from __future__ import annotations

from stages.mix.curriculum import Phase
from stages.mix.realised import plan as mixture
from trainer.mfu import FORMULA, step_flops
from trainer.plot import short
from trainer.run import Run

#: float32 parameter, gradient and the two moments of AdamW
STATE_BYTES = 16
#: saved activations of a layer in bytes per token and width at 2 bytes a number, attention not materialised
#: (Korthikanti et al., arXiv 2205.05198, eq. 2 without the quadratic term)
ACTIVATION_BYTES = 34


def plan(run: Run, ranks: int) -> str:
    curriculum, model, vocab = run.curriculum, run.config.model, run.vocab
    schedule = run.schedule()
    lines = [f"model      {model.parameters(vocab):,} parameters ({model.layers} layers × {model.width}, "
             f"{model.heads} heads, {model.kv_heads} key/value heads, ffn {model.ffn}, vocabulary {vocab:,}"
             f"{', tied' if model.tie else ''})",
             f"optimiser  {run.config.optimizer.kind}, peak lr {run.config.optimizer.lr:g}, warm-up "
             f"{short(schedule.warmup)} tokens",
             f"total      {curriculum.tokens:,} tokens, {curriculum.steps:,} steps, {curriculum.samples:,} samples", "",
             f"{'phase':<12}{'steps':>9}{'tokens':>10}{'sequence':>10}{'batch':>10}{'lr from':>11}{'to':>10}"]
    at = 0
    for phase in curriculum.phases:
        first, last = (schedule.factor(t) * run.config.optimizer.lr for t in (at, at + phase.tokens))
        lines.append(f"{phase.name:<12}{phase.steps:>9,}{short(phase.tokens):>10}{phase.sequence:>10,}"
                     f"{batches(phase):>10}{first:>11.2e}{last:>10.2e}")
        at += phase.tokens
    lines += ["", f"{'phase':<12}{'stream':<24}{'share':>7}{'tokens':>10}{'epochs so far':>15}"]
    lines += [f"{row['phase']:<12}{row['stream']:<24}{row['share']:>7.1%}{short(row['tokens']):>10}"
              f"{row['epochs']:>15.2f}" for row in mixture(curriculum)]
    micro = min(run.config.micro_batch, max(p.sequence * p.batch for p in curriculum.phases))
    state = STATE_BYTES * model.parameters(vocab) / ranks
    activations = ACTIVATION_BYTES * model.layers * model.width * micro
    chunk = 2 * 4 * vocab * min(run.config.loss.chunk, micro)
    flops = sum(step_flops(model, vocab, p.tokens, p.tokens * p.sequence) for p in curriculum.phases)
    lines += ["", f"memory     per rank of {ranks}, estimated: state {gb(state)} + activations of "
              f"{short(micro)} tokens {gb(activations)} + logits {gb(chunk)}",
              f"compute    {flops:.3g} FLOPs ({FORMULA}, at most: documents as long as the sequence)",
              f"           = {flops / (0.4 * 989e12) / 3600:.3g} hours of one H100 or H200 at 40 % MFU"]
    return "\n".join(lines)


def batches(phase: Phase) -> str:
    """Tokens of a step: '512k', or '64k→512k' when they grow."""
    sizes = [short(batch * phase.sequence) for *_, batch in phase.stretches]
    return sizes[0] if len(sizes) == 1 else f"{sizes[0]}→{sizes[-1]}"


def gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
