"""The training loop, top to bottom."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from trainer.base.files import replace
from trainer.base.signals import interruptions
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint import hf
from trainer.checkpoint.damage import choose
from trainer.checkpoint.ledger import Ledger
from trainer.data.batches import Batch, Data, Prefetch
from trainer.data.provenance import GENESIS, chain, code, machine
from trainer.data.step import Step
from trainer.loop import threads
from trainer.loop.evaluate import Heldout, losses
from trainer.loop.finish import sample, summarise
from trainer.loop.meters import Meters
from trainer.loop.policy import Guard, Policy, go_back
from trainer.loop.run import Run, TrainingError, changes, differences, edits
from trainer.loop.window import HEAD, Row, Window, diverged
from trainer.loop.worst import WorstRows
from trainer.model import attention
from trainer.model.init import initialise
from trainer.model.loss import IGNORE
from trainer.model.transformer import Transformer
from trainer.observe import metrics as log
from trainer.observe import mfu
from trainer.observe.goodput import Goodput
from trainer.observe.noise import MicroNorms
from trainer.observe.plot import write_plot
from trainer.optim import build as optim
from trainer.parallel.world import (
    World,
    arranged,
    clip,
    compiles,
    compute_dtype,
    gather_gradients,
    reshard,
    shard,
    uncompiled,
)

#: rows of the last step whose loss is stored with a checkpoint and compared after loading it
PROBE_ROWS = 4


def train(run: Run, world: World, stop_at: int | None = None, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train `run` from its latest checkpoint (or from the start) to the end of its curriculum, or to step `stop_at`.

    Every rank calls it; rank 0 writes `run.out`: metrics.jsonl, tensorboard/, loss.svg, checkpoints/, ledger.jsonl,
    worst_rows.jsonl, summary.json.
    Returns the summary, on rank 0. Raises TrainingError, CheckpointError; SystemExit(128 + n) after signal n (a
    checkpoint is written first).
    """
    goodput = Goodput()
    config, curriculum = run.config, run.curriculum
    say = say if world.first else (lambda _text: None)
    world = arranged(world, config.parallel)
    dtype = compute_dtype(config.precision, world.device)
    checkpoints = run.out / "checkpoints"
    ledger = Ledger.open(run.out, world)
    ledger.clear(checkpoints, world)     # a kill between the decision to go back and going back
    found, first, through = resume_point(run, world, ledger, stop_at, say)
    done = run.out / "summary.json"
    if through:
        say(f"nothing to do: {found.folder.parent if found else run.out} is at "
            + ("the end of the curriculum" if first is None else f"or beyond step {stop_at}, where this was to stop"))
        return json.loads(done.read_text(encoding="utf-8")) if first is None and world.first else {}
    # at the end without a summary: an earlier process died between its last checkpoint and the end; do the rest
    number, samples, tokens = position(found)
    ledger.declare(config.skip, number)

    data = Data(curriculum, run.store, config.loss.repeats)
    heldout = Heldout(data, curriculum.phases[0].sequence, config.evaluate.windows)
    schedule = run.schedule()

    with torch.device("meta"):
        model = Transformer(config.model, run.vocab)
    compiled = compiles(config.compile, world.device)
    shard(model, world, dtype, compiled)
    optimizer = optim.build(config.optimizer, model.named_parameters(), world, config.model.rate)
    kernel = attention.describe(world.device, dtype, config.model.masking)
    say(f"model: {config.model.parameters(run.vocab):,} parameters, vocabulary {run.vocab:,}; {world.describe()}, "
        f"shard {config.parallel.shard}, {str(dtype).removeprefix('torch.')}, {'' if compiled else 'not '}compiled, "
        f"{kernel}, {threads.describe()}")
    say(optim.describe(optimizer))

    metrics = log.Metrics(run.out, world.first, config.metrics, run.folder.name, config.identity(), say)
    guard, policy = Guard(config.stability, world.device), Policy(config.stability)
    worst = WorstRows(run.out, config.stability.worst_rows, data.streams, world)
    worst.begin(number)
    restore(found, run, data, model, optimizer, guard, policy, world, dtype)
    read = history(found, run, data, ledger) if world.first else GENESIS
    here, changed = machine(device_name(world)), []
    if found:
        edited = edits(found.meta, run)
        ledger.edited(number, edited)
        changed = [*changes(found.meta, run, world.size, here), *edited]
        say("\n  ".join([f"resumed from {found.folder.parent.name} at sample {samples:,}", *changed]))
    meters = Meters(run, metrics, world, goodput, model, optimizer, number, say)
    metrics.write("resume" if found else "start", number, samples=samples, world=world.size, changed=changed,
                  goodput=goodput.record(), device=device_name(world), threads=torch.get_num_threads(),
                  kernel=kernel, compiled=compiled, precision=str(dtype).removeprefix("torch."),
                  sharding=config.parallel.shape(world.size), mfu_formula=mfu.FORMULA,
                  config=config.identity(), streams=data.streams,
                  phases=[{"name": p.name, "tokens": p.tokens, "steps": p.steps, "lr": p.lr, "sequence": p.sequence,
                           "batch": p.batch, "ramp": p.ramp, "weights": p.weights} for p in curriculum.phases])
    metrics.flush()

    def evaluate(step: int, tokens: int) -> dict[str, Any]:
        with goodput.of("evaluation"):
            values = heldout.evaluate(model, run.micro_rows(heldout.length), dtype, config.loss.chunk, world)
            length = curriculum.phases[curriculum.phase_at(max(0, samples - 1))].sequence
            if values and length != heldout.length:
                there = heldout.at(length).evaluate(model, run.micro_rows(length), dtype, config.loss.chunk, world)
                values |= {"lengths": {str(length): there}} if there else {}
        if values:
            meters.evaluated(step, tokens, values)
        return values

    def save(step: Step, heldout: float | None) -> None:
        worst.write()
        meters.saving(step.number + 1)
        rows = list(range(step.stop - min(PROBE_ROWS, step.batch), step.stop))
        probe = probe_loss(rows, run, data, model, world, dtype)
        if not math.isfinite(probe):     # the step's own loss is of the parameters before it
            raise TrainingError(diverged(run, step.number + 1, f"loss {probe} after it"))
        meta = {"step": step.number + 1, "samples": step.stop, "tokens": tokens, "world": world.size, **here,
                "phase": curriculum.phases[step.phase].name, "pinned": step.stop == curriculum.phases[step.phase].stop,
                "code": code(), "config": config.identity(), "train": asdict(config), "chain": read.hex(),
                "curriculum": curriculum.to_json(), "heldout": heldout,
                "probe": {"samples": rows, "loss": probe}, "ledger": len(ledger.lines),
                "ledger_sha256": ledger.digest(len(ledger.lines)), "guard": guard.state(),
                "policy": policy.state()}
        saver.save(model, optimizer, meta)

    def saved(written: ckpt.Writing) -> None:
        meters.saved(written.meta["step"], written.held, folder=written.attempt.parent.name,
                     written_s=round(written.seconds, 3), bytes=written.size)
        say(written.describe())

    if world.first and first is not None:
        done.unlink(missing_ok=True)     # of a curriculum that has been prolonged since
    before = after = evaluate(0, 0) if not found else {}
    window = Window(run, data.streams, metrics, meters, worst, world, say)
    began = time.perf_counter()
    with interruptions() as interrupted, ckpt.Saver(checkpoints, config.checkpoint, world, saved) as saver:
        while True:                          # once, and again after every rewind
            todo = takewhile(lambda s: stop_at is None or s.number < stop_at, run.steps(samples))
            suspicion = None
            goodput.enter("warmup")
            batches = Prefetch(data, todo, world.data_rank, world.data_size, ledger.why)
            for step, batch in batches:
                phase = curriculum.phases[step.phase]
                model.rope = run.rope(step.stop)
                tokens = step.tokens + step.batch * phase.sequence
                if phase.reset_optimizer and step.first == phase.start:
                    say(f"phase {phase.name}: the optimiser begins anew")
                    ckpt.reset(optimizer)
                if batch is None:
                    window.passed_over(step, tokens, ledger.why(step.number + 1) or "")
                else:
                    factor = schedule.factor((step.tokens + tokens) / 2)
                    for group in optimizer.param_groups:
                        group["lr"] = group["peak"] * factor
                    meters.begin(step, batches.waited)
                    sums, norm = forward_backward(model, step, batch, run, data, worst, meters.micro, world, dtype)
                    verdict = guard.judge(step.phase, sums[HEAD:], norm)
                    # offloaded parameters step on the CPU, and torch would read this before it has arrived there
                    device = "cpu" if config.parallel.offload else world.device
                    optim.skip_when(optimizer, verdict[0].to(device).float())
                    meters.before(step)
                    optimizer.step()
                    meters.after()
                    optimizer.zero_grad()
                    read = chain(data.order, [step], read) if world.first else read
                    window.add(Row(step, tokens, config.optimizer.lr * factor, sums, norm, verdict))

                number, samples, last = step.number + 1, step.stop, step.stop == phase.stop
                ending = samples == curriculum.samples or number == stop_at
                due = number % config.checkpoint.every == 0 or last or ending
                judged = number % config.evaluate.every == 0 or ending
                if world.device.type == "cpu" or meters.cold or meters.due(number) or due or judged:
                    stopping, seen = window.flush(interrupted())
                    if suspicion := policy.review(seen, f"tokenmill train explain {run.folder}"):
                        break
                    if judged:
                        after = evaluate(number, tokens)
                    with goodput.of("checkpoint"):
                        saver.poll()
                        if due or stopping:
                            save(step, after.get("loss") if judged else None)
                        if last or ending or stopping:
                            saver.wait()
                    if world.first and judged:
                        metrics.flush()
                        write_plot(run.out)
                    if stopping:
                        metrics.flush()
                        say(goodput.told())
                        say(f"stopped by {signal.Signals(stopping).name} after step {number}; the same command goes on")
                        raise SystemExit(128 + stopping)
                    window.restart()        # evaluation and checkpoints are not part of the speed
            if suspicion is None:
                break
            saver.wait()
            found = go_back(suspicion, ledger, checkpoints, world, say)
            number, samples, tokens = position(found)
            worst.begin(number)
            meters.rewound(number)
            restore(found, run, data, model, optimizer, guard, policy, world, dtype)
            read = history(found, run, data, ledger) if world.first else GENESIS
            start, stop = ledger.lines[-1]["steps"]
            metrics.write("rewind", number, samples=samples, seen=suspicion.step, steps=[start, stop],
                          why=suspicion.why)
            say(f"step {suspicion.step:>6}  {suspicion.why}: back to step {number}, to pass over steps {start} to "
                f"{stop - 1}")
            window.restart()

    seconds = time.perf_counter() - began
    goodput.enter("evaluation")
    summary: dict[str, Any] = {}
    if samples == curriculum.samples:
        after = after or evaluate(number, tokens)
        gap = heldout.gap(after, model, samples, 4 * config.evaluate.windows, run.micro_rows(heldout.length), dtype,
                          config.loss.chunk, world)
        text, why = sample(run, model, world, dtype)
        metrics.write("sample", number, prompt=config.sample.prompt, text=text, skipped=why)
        say(why or f"sample: {text}")
        metrics.flush()
        if world.first:
            summary = summarise(run, before, after, gap, text, why, seconds, window.speed(), goodput)
            metrics.write("end", number, **summary)
    metrics.close()
    say(goodput.told())
    if world.first and summary:
        write_plot(run.out)
        replace(done, json.dumps(summary, indent=1, ensure_ascii=False))
        if after:
            say(f"held-out loss {summary['heldout_loss']:.3f} nats/token = {summary['ratio']:.2f} of the unigram "
                f"entropy {summary['unigram_entropy']:.3f}"
                + (f"; gap to the training data {gap['gap']:.3f}" if gap else ""))
        say(f"{number} steps, {tokens:,} tokens, {seconds:.0f} s this time; {run.out}")
    return summary


def forward_backward(model: Transformer, step: Step, batch: Batch, run: Run, data: Data, worst: WorstRows,
                     micro: MicroNorms, world: World, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of one step, clipped. Returns sums over all ranks [HEAD + 2·S] float64 (see `trainer.loop.window`) and
    the global gradient norm."""
    config = run.config
    streams = len(data.streams)
    sums = torch.zeros(HEAD + 2 * streams, dtype=torch.float64, device=world.device)
    length = batch.tokens.shape[1]
    # Σ length² of the documents, or of the windows where documents are not kept apart; this rank's part
    # (fill_, since assigning a number to one place copies it from the host, and the host waits for that)
    sums[1].fill_(batch.attended if config.model.masking == "document" else step.batch * length ** 2 / world.data_size)
    sums[2].fill_(batch.repeated)
    # the loss is divided by the number of targets that count in the whole step, on all ranks and micro-batches
    valid = world.sum(torch.full((), float(batch.valid()), device=world.device))
    scale = 1 / valid.clamp(min=1)
    rows = min(run.micro_rows(length), batch.rows)
    starts = list(range(0, batch.rows, rows))
    for start, part in zip(starts, batch.micro(rows, world.device)):
        gather_gradients(model, world, start == starts[-1])
        objective, nll, z_sum = model(part.tokens, part.mask(dtype, config.model.masking), part.targets, scale,
                                      config.loss.z, config.loss.chunk)
        objective.backward()
        sums[0] += z_sum
        nll, targets = nll.detach().double().sum(1), (part.targets != IGNORE).double().sum(1)
        sums[HEAD:HEAD + streams].index_add_(0, part.stream, nll)
        sums[HEAD + streams:].index_add_(0, part.stream, targets)
        worst.add(step, start, nll, targets, part.stream)
        micro.add(targets.sum(), scale)
    return world.sum(sums), clip(model, config.clip, world)


def resume_point(run: Run, world: World, ledger: Ledger, stop_at: int | None,
                 say: Callable[[str], None]) -> tuple[ckpt.Checkpoint | None, Step | None, bool]:
    """The sound checkpoint to go on from (None: the start), the first step after it (None: there is none), and whether
    nothing is left to do. Every rank calls it, and what the first one sees counts: ranks apart would wait for each
    other forever, or learn from different data."""
    same = hashlib.sha256(json.dumps([run.curriculum.to_json(), asdict(run.config)], sort_keys=True).encode()).digest()
    summed, firsts = struct.unpack("<?32s", world.broadcast(
        struct.pack("<?32s", (run.out / "summary.json").exists(), same)))
    if same != firsts:
        raise TrainingError(f"rank {world.rank} has read another recipe or curriculum than the first rank: "
                            f"{run.folder} has just been changed, or is not one folder for all; start again")

    def following(found: ckpt.Checkpoint | None) -> Step | None:
        return next(run.steps(found.meta["samples"] if found else 0), None)

    def through(found: ckpt.Checkpoint | None) -> bool:
        if found:
            refuse_another(found, run)
        step = following(found)
        return summed if step is None else stop_at is not None and stop_at <= step.number

    found = choose(run.out / "checkpoints", world, say, lambda sound: sound[-1] if sound else None,
                   lambda found: not through(found))
    if found:
        ledger.check(found.meta)
    return found, following(found), through(found)


def refuse_another(found: ckpt.Checkpoint, run: Run) -> None:
    """Raise CheckpointError, listing what differs, unless `found` was written by this training."""
    wrong = differences(found.meta, run)
    if wrong:
        older = ", ".join(str(p) for p in sorted(run.folder.glob("curriculum.*.json")))
        raise ckpt.CheckpointError(f"{found.folder.parent} belongs to another training than this one:\n  "
                                   + "\n  ".join(wrong) + "\nTake these back"
                                   + (f" (older curricula: {older})" if older else "")
                                   + ", or start anew with another --out")


def position(found: ckpt.Checkpoint | None) -> tuple[int, int, int]:
    """(steps, samples, tokens) at a checkpoint, or (None) at the start."""
    return (found.meta["step"], found.meta["samples"], found.meta["tokens"]) if found else (0, 0, 0)


def restore(found: ckpt.Checkpoint | None, run: Run, data: Data, model: Transformer, optimizer: torch.optim.Optimizer,
            guard: Guard, policy: Policy, world: World, dtype: torch.dtype) -> None:
    """Everything as it was at a checkpoint, or (None) at the start. Of a checkpoint it is checked that it came back
    whole: the loss on a few samples must be what it was at saving."""
    optim.skip_when(optimizer, None)
    model.rope = run.rope(found.meta["samples"] if found else 0)
    guard.load(found.meta.get("guard") if found else None)       # a checkpoint from before there was a guard has none
    policy.load(found.meta.get("policy") if found else None)
    if found is None:
        reshard(model)
        if run.config.init.from_:
            hf.load(model, run.config.model, run.vocab, Path(run.config.init.from_),
                    run.store / run.curriculum.tokenizer.path)
        else:
            initialise(model, run.config.model, run.config.seed)
        optimizer.state.clear()
        return
    ckpt.load(found, model, optimizer)
    probe = found.meta["probe"]
    loss = probe_loss(probe["samples"], run, data, model, world, dtype)
    close = 1e-3 if dtype == torch.float32 else 2e-2
    if not abs(loss - probe["loss"]) <= close * max(1.0, abs(probe["loss"])):
        raise ckpt.CheckpointError(
            f"{found.folder.parent}: the loss on samples {probe['samples'][0]}… is {loss:.4f}, at saving it was "
            f"{probe['loss']:.4f}: model or data have changed; do not go on from it")


def history(found: ckpt.Checkpoint | None, run: Run, data: Data, ledger: Ledger) -> bytes:
    """The hash chain at a checkpoint; of one that has none it is computed."""
    if found is None:
        return GENESIS
    if "chain" in found.meta:
        return bytes.fromhex(found.meta["chain"])
    done = takewhile(lambda s: s.number < found.step, run.steps())
    return chain(data.order, done, passed=ledger.why)


def probe_loss(samples: list[int], run: Run, data: Data, model: Transformer, world: World, dtype: torch.dtype) -> float:
    batch = data.samples(samples)
    rows = run.micro_rows(batch.tokens.shape[1])
    with uncompiled(model):
        totals = losses(model, batch, len(data.streams), rows, dtype, run.config.loss.chunk, world)
    return sum(t.nll for t in totals) / max(1, sum(t.targets for t in totals))


def device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
