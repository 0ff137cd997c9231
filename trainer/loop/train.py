"""Contains the training loop. `train` performs a whole training; the loop over batches is `Trainer.steps`."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import torch

from tokenizer.mixture.steps import TrainingStep
from trainer.base.files import replace
from trainer.base.interrupts import interruptions
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.ledger import Ledger
from trainer.checkpoint.saver import Saver, Writing
from trainer.data.batches import Batch, Data, Prefetch
from trainer.data.provenance import GENESIS, chain, code, machine
from trainer.evaluation import score_rows
from trainer.loop import threads
from trainer.loop.evaluate import Heldout
from trainer.loop.high_loss import HighLossRows
from trainer.loop.meters import Meters
from trainer.loop.metrics_buffer import HEAD, MetricsBuffer, StepNumbers, diverged
from trainer.loop.resume import history, position, probe_loss, restore, resume_point
from trainer.loop.run import Run, TrainingError, changes, edits
from trainer.loop.stability import Rewind, SpikeDetector, StabilityMonitor, rewind_to_checkpoint
from trainer.loop.summary import sample, summarise
from trainer.loop.task_watcher import TaskWatcher
from trainer.model import attention
from trainer.model.loss import IGNORE
from trainer.model.transformer import Transformer
from trainer.observe import metrics as log
from trainer.observe import mfu
from trainer.observe.goodput import Goodput
from trainer.observe.noise import MicroNorms
from trainer.observe.plot import write_plot
from trainer.optim import build as optim
from trainer.parallel.world import World, arranged, clip, compiles, compute_dtype, gather_gradients, shard

#: number of samples of the last step whose loss is stored with a checkpoint and compared after loading it
PROBE_ROWS = 4


def train(run: Run, world: World, stop_at: int | None = None, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train `run` from its latest undamaged checkpoint (or from the start) to the end of its curriculum, or to step
    `stop_at` (included).

    Every rank must call this. Each rank writes its part of the checkpoints to `run.out`; rank 0 also writes
    metrics.jsonl, loss.svg, summary.json and the other files there. Returns the summary on rank 0 once the curriculum
    is at its end, else {}. Raises TrainingError, CheckpointError or ConfigError. After signal n, writes a checkpoint
    and raises SystemExit(128 + n).
    """
    goodput = Goodput()
    say = say if world.first else (lambda _text: None)
    world = arranged(world, run.config.parallel)
    ledger = Ledger.open(run.out, world)
    ledger.clear(run.out / "checkpoints", world)   # a kill may have come between recording a rewind and performing it
    checkpoint, following, finished = resume_point(run, world, ledger, stop_at, say)
    summary_file = run.out / "summary.json"
    if finished:
        say(f"nothing to do: {checkpoint.folder.parent if checkpoint else run.out} is at "
            + ("the end of the curriculum" if following is None
               else f"or beyond step {stop_at}, where this was to stop"))
        return json.loads(summary_file.read_text(encoding="utf-8")) if following is None and world.first else {}
    # all steps may be done although `finished` is False: an earlier process died after its last checkpoint, before it
    # wrote the summary. Then only the work after the last step remains
    trainer = Trainer(run, world, ledger, checkpoint, goodput, say)
    if world.first and following is not None:
        summary_file.unlink(missing_ok=True)           # the curriculum has been prolonged since it was written
    before = trainer.evaluate() if checkpoint is None else {}
    began = time.perf_counter()
    with trainer.watcher or nullcontext():
        with interruptions() as interrupted, trainer.saver:
            while rewind := trainer.steps(stop_at, interrupted):
                trainer.rewind(rewind)
        return trainer.finish(before, time.perf_counter() - began)


class Trainer:
    """A training on one rank. Its position is `number` (steps), `samples` and `tokens` (targets); all three count
    skipped steps, too."""

    def __init__(self, run: Run, world: World, ledger: Ledger, checkpoint: ckpt.Checkpoint | None, goodput: Goodput,
                 say: Callable[[str], None]) -> None:
        config, curriculum = run.config, run.curriculum
        self.run, self.world, self.ledger, self.goodput, self.say = run, world, ledger, goodput, say
        self.checkpoints = run.out / "checkpoints"
        self.number, self.samples, self.tokens = position(checkpoint)
        ledger.declare(config.skip, self.number)
        self.data = Data(curriculum, run.store, config.loss.repeats, run.source)
        self.heldout = Heldout(self.data, curriculum.phases[0].sequence, config.evaluate.windows)
        self.schedule = run.schedule()
        self.dtype = compute_dtype(config.precision, world.device)
        self.build_model()
        self.detector = SpikeDetector(config.stability, world.device)
        self.monitor = StabilityMonitor(config.stability)
        self.metrics = log.Metrics(run.out, world.first, config.metrics, run.folder.name, config.identity(), say)
        self.high_loss = HighLossRows(run.out, config.stability.worst_rows, self.data.streams, world)
        self.high_loss.begin(self.number)
        self.restore(checkpoint)
        self.machine = machine(device_name(world))
        changed = self.resumed(checkpoint) if checkpoint else []
        self.meters = Meters(run, self.metrics, world, goodput, self.model, self.optimizer, self.number, say)
        self.write_start("resume" if checkpoint else "start", changed)
        self.buffer = MetricsBuffer(run, self.data.streams, self.metrics, self.meters, self.high_loss, world, say)
        self.watcher: TaskWatcher | None = None
        if world.first and config.evaluate.tasks is not None:       # no other rank needs the data of the tasks
            here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            self.watcher = TaskWatcher(run, here * torch.get_num_threads(), say)
        self.saver = Saver(self.checkpoints, config.checkpoint, world, self.saved,
                           self.watcher.awaits if self.watcher else lambda _checkpoint: False)
        if world.first:
            score_rows.forget(run.out, self.number)
        self.last_evaluation: dict[str, Any] = {}

    def build_model(self) -> None:
        run, config, world = self.run, self.run.config, self.world
        with torch.device("meta"):
            self.model = Transformer(config.model, run.vocab)
        self.compiled = compiles(config.compile, world.device)
        shard(self.model, world, self.dtype, self.compiled)
        self.optimizer = optim.build(config.optimizer, self.model.named_parameters(), world, config.model.rate)
        self.kernel = attention.describe(world.device, self.dtype, config.model.masking)
        self.say(f"model: {config.model.parameters(run.vocab):,} parameters, vocabulary {run.vocab:,}; "
                 f"{world.describe()}, shard {config.parallel.shard}, {str(self.dtype).removeprefix('torch.')}, "
                 f"{'' if self.compiled else 'not '}compiled, {self.kernel}, {threads.describe()}")
        self.say(optim.describe(self.optimizer))

    def restore(self, checkpoint: ckpt.Checkpoint | None) -> None:
        """Set model, optimiser, spike detector, stability monitor and hash chain (hash over the data read so far) to
        their state in `checkpoint`. If it is None, they get their state before the first step."""
        restore(checkpoint, self.run, self.data, self.model, self.optimizer, self.detector, self.monitor, self.world,
                self.dtype)
        self.chain = history(checkpoint) if self.world.first else GENESIS

    def resumed(self, checkpoint: ckpt.Checkpoint) -> list[str]:
        """Return what has changed since the checkpoint was written: settings, machine, code and curriculum, one line
        for each change. The lines are also printed, and changes to the curriculum are recorded in the ledger (the file
        with the list of skipped steps)."""
        edited = edits(checkpoint.meta, self.run)
        self.ledger.edited(self.number, edited)
        changed = [*changes(checkpoint.meta, self.run, self.world.size, self.machine), *edited]
        self.say("\n  ".join([f"resumed from {checkpoint.folder.parent.name} at sample {self.samples:,}", *changed]))
        return changed

    def write_start(self, event: str, changed: list[str]) -> None:
        run, config, world = self.run, self.run.config, self.world
        self.metrics.write(
            event, self.number, samples=self.samples, world=world.size, changed=changed,
            goodput=self.goodput.record(), device=device_name(world), threads=torch.get_num_threads(),
            kernel=self.kernel, compiled=self.compiled, precision=str(self.dtype).removeprefix("torch."),
            sharding=config.parallel.shape(world.size), mfu_formula=mfu.FORMULA, config=config.identity(),
            streams=self.data.streams,
            phases=[{"name": p.name, "tokens": p.tokens, "steps": p.steps, "lr": p.lr, "sequence": p.sequence,
                     "batch": p.batch, "ramp": p.ramp, "weights": p.weights, "groups": p.groups}
                    for p in run.curriculum.phases])
        self.metrics.flush()

    # -- the loop ----------------------------------------------------------------------------------------------------
    def steps(self, stop_at: int | None, interrupted: Callable[[], int]) -> Rewind | None:
        """Perform the steps that remain, up to the end of the curriculum or step `stop_at` (included), and return None.
        Returns early, with a decision to go back to a checkpoint (a Rewind), if the losses require it. After a signal
        (a number other than 0 from `interrupted()`), writes a checkpoint and raises SystemExit."""
        config, curriculum = self.run.config, self.run.curriculum
        self.goodput.enter("warmup")
        self.buffer.restart()
        ahead = takewhile(lambda s: stop_at is None or s.number < stop_at, self.run.steps(self.samples))
        batches = Prefetch(self.data, ahead, self.world.data_rank, self.world.data_size, self.ledger.why)
        for step, batch in batches:
            phase = curriculum.phases[step.phase]
            self.number, self.samples = step.number + 1, step.stop
            self.tokens = step.tokens + step.batch * phase.sequence
            self.model.rope = self.run.rope(step.stop)
            if phase.reset_optimizer and step.first == phase.start:
                self.say(f"phase {phase.name}: the optimiser begins anew")
                ckpt.reset(self.optimizer)
            if batch is None:
                self.buffer.skipped(step, self.tokens, self.ledger.why(self.number) or "")
            else:
                self.perform(step, batch, batches.waited)

            phase_ends, ends = step.stop == phase.stop, step.stop == curriculum.samples or self.number == stop_at
            save = self.number % config.checkpoint.every == 0 or phase_ends or ends
            evaluate = self.number % config.evaluate.every == 0 or ends
            if not (self.world.device.type == "cpu" or self.meters.cold or self.meters.due(self.number) or save
                    or evaluate):
                continue                                # no number is needed yet, so the host runs ahead of the device
            stopping, records = self.buffer.flush(interrupted())
            self.watch((phase.sequence, step.batch))
            if rewind := self.monitor.review(records, f"tokenmill train explain {self.run.folder}"):
                return rewind
            if evaluate:
                self.last_evaluation = self.evaluate()
            with self.goodput.of("checkpoint"):
                self.saver.poll()
                if save or stopping:
                    self.save(step, self.last_evaluation.get("loss") if evaluate else None)
                if phase_ends or ends or stopping:
                    self.saver.wait()
            if self.world.first and evaluate:
                self.metrics.flush()
                write_plot(self.run.out)
            if stopping:
                self.stop(stopping)
            self.buffer.restart()                       # evaluation and checkpoints are not part of the speed
        return None

    def watch(self, shape: tuple[int, int]) -> None:
        """Pause the process that scores checkpoints, or let it run, depending on how long the last steps took. Also
        record the scores that it has written. `shape` is the shape (sequence length, batch size) of the last steps."""
        if self.watcher is not None:
            if self.buffer.took is not None:
                self.watcher.stepped(shape, *self.buffer.took)
            if self.watcher.due():
                self.meters.scored(self.watcher.look())

    def perform(self, step: TrainingStep, batch: Batch, waited: float) -> None:
        """Learn from one batch: compute loss and gradients, and step the optimiser. If the loss or the gradient norm is
        not finite or is an outlier, the step changes nothing. `waited` is how long training waited for the batch, in
        seconds. This method waits for the device only if parameters are offloaded to the CPU."""
        factor = self.schedule.factor((step.tokens + self.tokens) / 2)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.meters.begin(step, waited)
        sums, norm = forward_backward(self.model, step, batch, self.run, self.data, self.high_loss, self.meters.micro,
                                      self.world, self.dtype)
        verdict = self.detector.judge(step.phase, sums[HEAD:], norm)
        # offloaded parameters step on the CPU, where torch would read the verdict before its copy has arrived
        device = "cpu" if self.run.config.parallel.offload else self.world.device
        optim.skip_when(self.optimizer, verdict[0].to(device).float())
        self.meters.before(step)
        self.optimizer.step()
        self.meters.after()
        self.optimizer.zero_grad()
        if self.world.first:
            self.chain = chain(self.data.order, [step], self.chain)
        self.buffer.add(StepNumbers(step, self.tokens, self.run.config.optimizer.lr * factor, sums, norm, verdict))

    def rewind(self, rewind: Rewind) -> None:
        """Go back to the checkpoint that `rewind_to_checkpoint` chooses, from before a loss spike. When training
        continues from there, it skips the steps around the beginning of the spike."""
        self.saver.wait()
        checkpoint = rewind_to_checkpoint(rewind, self.ledger, self.checkpoints, self.world, self.say)
        self.number, self.samples, self.tokens = position(checkpoint)
        self.high_loss.begin(self.number)
        self.meters.rewound(self.number)
        if self.watcher is not None:
            self.watcher.stop()                         # it may be scoring a checkpoint that was just given up
        if self.world.first:
            score_rows.forget(self.run.out, self.number)
        if self.watcher is not None:
            self.watcher.start()
        self.restore(checkpoint)
        start, stop = self.ledger.lines[-1]["steps"]
        self.metrics.write("rewind", self.number, samples=self.samples, seen=rewind.step, steps=[start, stop],
                           why=rewind.why)
        self.say(f"step {rewind.step:>6}  {rewind.why}: back to step {self.number}, to skip steps {start} to "
                 f"{stop - 1}")

    def stop(self, number: int) -> None:
        """Write the metrics to disk, print where the training stopped, and raise SystemExit(128 + `number`), where
        `number` is the signal that asked for it."""
        self.metrics.flush()
        self.say(self.goodput.describe())
        self.say(f"stopped by {signal.Signals(number).name} after step {self.number}; the same command goes on")
        raise SystemExit(128 + number)

    # -- evaluation and checkpoints ----------------------------------------------------------------------------------
    def evaluate(self) -> dict[str, Any]:
        """Compute the held-out loss on samples with the sequence length of the first phase (stretch of the training).
        If the present phase has another sequence length, the loss on samples of that length is added under the key
        "lengths". Returns the values that `Heldout.evaluate` describes."""
        run, heldout, chunk = self.run, self.heldout, self.run.loss_chunk(self.world.device)
        with self.goodput.of("evaluation"):
            values = heldout.evaluate(self.model, run.micro_rows(heldout.length), self.dtype, chunk, self.world)
            length = run.curriculum.phases[run.curriculum.phase_at(max(0, self.samples - 1))].sequence
            if values and length != heldout.length:
                at_length = heldout.at(length).evaluate(self.model, run.micro_rows(length), self.dtype, chunk,
                                                        self.world)
                values |= {"lengths": {str(length): at_length}} if at_length else {}
        if values:
            self.meters.evaluated(self.number, self.tokens, values)
        return values

    def save(self, step: TrainingStep, heldout: float | None) -> None:
        """Write a checkpoint after `step`; with the setting `async`, only start to write it in the background.
        `heldout` is the held-out loss at this step, or None. Before the checkpoint is written, the loss on some samples
        of the step is computed, so that a resume can compare it. Raises TrainingError when this loss is not finite, and
        CheckpointError as `Saver.save` does."""
        run, phase = self.run, self.run.curriculum.phases[step.phase]
        self.high_loss.write()
        self.meters.saving(self.number)
        rows = list(range(step.stop - min(PROBE_ROWS, step.batch), step.stop))
        probe = probe_loss(rows, run, self.data, self.model, self.world, self.dtype)
        if not math.isfinite(probe):                    # the step's own loss was computed before its update
            raise TrainingError(diverged(run, self.number, f"loss {probe} after it"))
        lines = len(self.ledger.lines)
        self.saver.save(self.model, self.optimizer, {
            "step": self.number, "samples": step.stop, "tokens": self.tokens, "world": self.world.size, **self.machine,
            "phase": phase.name, "pinned": step.stop == phase.stop, "code": code(), "config": run.config.identity(),
            "train": asdict(run.config), "chain": self.chain.hex(), "curriculum": run.curriculum.to_json(),
            "heldout": heldout, "probe": {"samples": rows, "loss": probe}, "ledger": lines,
            "ledger_sha256": self.ledger.digest(lines), "guard": self.detector.state(),
            "policy": self.monitor.state()})

    def saved(self, written: Writing) -> None:
        self.meters.saved(written.meta["step"], written.waited_s, folder=written.attempt.parent.name,
                          written_s=round(written.seconds, 3), bytes=written.size)
        self.say(written.describe())
        if written.lost:
            self.say(f"step {', '.join(map(str, written.lost))}: the checkpoint was deleted before it was scored on "
                     f"tasks, because scoring is slower than training; raise evaluate.tasks.every or share, or "
                     f"checkpoint.keep")

    # -- the end -----------------------------------------------------------------------------------------------------
    def finish(self, before: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Finish the training in this process. At the end of the curriculum, make the last evaluation, a sample of text
        and the summary, and wait until all checkpoints are scored on tasks. If the training stops earlier, only close
        its metrics.

        `before` is the first evaluation; `seconds` is how long the steps of this process took, with the evaluations and
        checkpoints between them. Returns the summary on rank 0 at the end of the curriculum, else {}. Raises
        SystemExit(128 + n) if signal n arrives while checkpoints are scored.
        """
        run, config, world = self.run, self.run.config, self.world
        self.goodput.enter("evaluation")
        summary: dict[str, Any] = {}
        after, gap = self.last_evaluation or before, {}
        if self.samples == run.curriculum.samples:
            after = after or self.evaluate()
            gap = self.heldout.gap(after, self.model, self.samples, 4 * config.evaluate.windows,
                                   run.micro_rows(self.heldout.length), self.dtype, run.loss_chunk(world.device), world)
            text, reason = sample(run, self.model, world, self.dtype)
            self.metrics.write("sample", self.number, prompt=config.sample.prompt, text=text, skipped=reason)
            self.say(reason or f"sample: {text}")
            self.metrics.flush()
            if self.watcher is not None:                # after the last collective: the other ranks need not wait
                with interruptions() as interrupted:
                    self.watcher.wait(interrupted)
                    if number := interrupted():
                        self.stop(number)
                # delete the checkpoints that stayed only to be scored
                ckpt.retain(self.checkpoints, config.checkpoint, self.watcher.awaits)
            if world.first:
                summary = summarise(run, before, after, gap, text, reason, seconds, self.buffer.speed(), self.goodput)
                self.metrics.write("end", self.number, **summary)
        if self.watcher is not None:
            self.meters.scored(self.watcher.look())
        self.metrics.close()
        self.say(self.goodput.describe())
        if summary:
            write_plot(run.out)
            replace(run.out / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False))
            if after:
                self.say(f"held-out loss {summary['heldout_loss']:.3f} nats/token = {summary['ratio']:.2f} of the "
                         f"unigram entropy {summary['unigram_entropy']:.3f}"
                         + (f"; gap to the training data {gap['gap']:.3f}" if gap else ""))
            self.say(f"{self.number} steps, {self.tokens:,} tokens, {seconds:.0f} s this time; {run.out}")
        return summary


def forward_backward(model: Transformer, step: TrainingStep, batch: Batch, run: Run, data: Data,
                     high_loss: HighLossRows, micro: MicroNorms, world: World,
                     dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of one step and clip them. Returns (the step's sums over all ranks, float64 [HEAD + 2 ·
    streams]; the global gradient norm before clipping). The sums hold the losses and the counts of targets of each
    stream (data source); see `trainer.loop.metrics_buffer.StepNumbers`."""
    config = run.config
    streams = len(data.streams)
    sums = torch.zeros(HEAD + 2 * streams, dtype=torch.float64, device=world.device)
    length = batch.tokens.shape[1]
    # this rank's part of Σ length² of the documents; where attention crosses documents, of the samples. (fill_, because
    # assigning a number to an element copies it from the host, and the host waits for the copy)
    sums[1].fill_(batch.attended if config.model.masking == "document" else step.batch * length ** 2 / world.data_size)
    sums[2].fill_(batch.repeated)
    # the loss is divided by the number of targets that count in the whole step, on all ranks and micro-batches
    valid = world.sum(torch.full((), float(batch.valid()), device=world.device))
    scale = 1 / valid.clamp(min=1)
    rows, chunk = min(run.micro_rows(length), batch.rows), run.loss_chunk(world.device)
    starts = list(range(0, batch.rows, rows))
    for start, part in zip(starts, batch.micro(rows, world.device)):
        gather_gradients(model, world, start == starts[-1])
        objective, nll, z_sum = model(part.tokens, part.mask(dtype, config.model.masking), part.targets, scale,
                                      config.loss.z, chunk)
        objective.backward()
        sums[0] += z_sum
        nll, targets = nll.detach().double().sum(1), (part.targets != IGNORE).double().sum(1)
        sums[HEAD:HEAD + streams].index_add_(0, part.stream, nll)
        sums[HEAD + streams:].index_add_(0, part.stream, targets)
        high_loss.add(step, start, nll, targets, part.stream)
        micro.add(targets.sum(), scale)
    return world.sum(sums), clip(model, config.clip, world)


def device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
