"""`tokenmill train doctor RUN` checks whether this machine can train the run on several ranks. It prints a line per
check: ok, or failed with a remedy.

The run's model (its first layers) is built and trained for a few steps by N ranks, and again by one rank:

* Initial values and batches must be identical.
* Losses and gradient norms must be equal up to rounding.
* No two ranks may have identical values for different parts of a parameter. (SmolLM3 had to discard a training of 1T
  tokens, because tensor-parallel ranks shared a seed.)
* One rank must be able to resume from the checkpoint of N ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.arguments import of_a_run, positive, say

if TYPE_CHECKING:
    from torch import nn

    from trainer.loop.run import Run
    from trainer.parallel.world import World

#: number of layers of the reduced model: enough to have every kind of parameter twice
LAYERS = 2
#: number of steps that N ranks train. One rank trains one step more, and then repeats that step from the checkpoint of
#: the N ranks
STEPS = 3
#: largest relative difference in loss and in gradient norm, by the dtype of matrix products
TOLERANCE = {"fp32": (1e-4, 1e-3), "bf16": (1e-2, 5e-2)}
#: bytes of shards that are read to measure the speed
READ = 64 << 20


def add_parser(commands: Any) -> None:
    doctor = commands.add_parser("doctor", parents=[of_a_run()], description="Check that this machine trains alike on "
                                                                             "one rank and on several.")
    doctor.add_argument("--ranks", type=positive, default=2, metavar="N", help="ranks to compare with one (default 2)")
    doctor.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    doctor.add_argument("--probe", help=argparse.SUPPRESS)       # in a rank: the folder for its results


def run(options: argparse.Namespace) -> int:
    """Run all checks of `tokenmill train doctor`. Returns the exit code: 0 when all pass, else 1."""
    from trainer.base.config import ConfigError
    from trainer.loop.run import open_run
    from trainer.parallel.world import world

    training = open_run(options.run, options.store, options.out, options.overrides)
    if training.source:
        raise ConfigError(f"{options.run}: the doctor measures this machine's own disk; give a folder")
    if options.probe:
        with world(options.device) as here:
            examine(training, here, Path(options.probe))
        return 0
    checks = Checks()
    device, precision = environment(checks, options.ranks, options.device, training)
    disk(checks, training)
    folder = output(checks, training)
    memory(checks, training, options.ranks, device)
    if folder is not None:
        try:
            compare(checks, options, folder, device, precision)
        finally:
            shutil.rmtree(folder)
    say(f"{checks.failed} of {checks.done} failed" if checks.failed else f"all {checks.done} checks passed")
    return 1 if checks.failed else 0


class Checks:
    """Prints a line for each check of `tokenmill train doctor`, and counts the checks that failed."""

    def __init__(self) -> None:
        self.done = self.failed = 0

    def report(self, name: str, good: bool, observation: str, remedy: str = "") -> bool:
        self.done, self.failed = self.done + 1, self.failed + (not good)
        say(f"{'ok' if good else 'failed':<8}{name:<22}{observation}" + ("" if good or not remedy else f"; {remedy}"))
        return good


def environment(checks: Checks, ranks: int, device: str, run: Run) -> tuple[str, str]:
    """Check the version of torch and the number of devices. Returns the device (cpu or cuda) and the dtype of matrix
    products (fp32 or bf16) for the comparison of one rank with several."""
    import torch

    tested = torch.__version__.split("+")[0]
    checks.report("torch", tuple(map(int, tested.split(".")[:2])) >= (2, 11), f"{torch.__version__}, Python "
                  f"{platform.python_version()}", "install torch 2.11 or later")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda":
        names = sorted({torch.cuda.get_device_name(i) for i in range(gpus)})
        version = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
        text = f"{gpus} × {', '.join(names)}, CUDA {torch.version.cuda}, NCCL {version}" if gpus else "no CUDA device"
        if not checks.report("devices", gpus >= ranks, text, f"{ranks} ranks need as many: --ranks {max(1, gpus)}, or "
                             f"--device cpu; compared on the CPU now"):
            device = "cpu"
    else:
        checks.report("devices", True, f"{os.cpu_count()} CPU cores (gloo)")
    bf16 = run.config.precision == "bf16" or (run.config.precision == "auto" and device == "cuda")
    return device, "bf16" if bf16 else "fp32"


def disk(checks: Checks, run: Run) -> None:
    """Measure how fast samples are read from shards that are not in the page cache."""
    from trainer.data.batches import Data

    data = Data(run.curriculum, run.store, source=run.source)
    samples, length = run.curriculum.samples, max(p.sequence for p in run.curriculum.phases)
    count = max(1, min(samples, 2000, READ // (4 * length)))
    for shards in data.train:
        for path in shards.folder.iterdir():
            if path.is_file():
                with open(path, "rb") as f:
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began, tokens = time.perf_counter(), 0
    for i in range(count):
        tokens += data.samples([i * samples // count]).tokens.numel()
    rate = tokens / (time.perf_counter() - began)
    checks.report("shards", True, f"{count} windows from all over the curriculum, {rate / 1e6:.2f}M tokens/s by one "
                                f"reader from a cold cache")


def output(checks: Checks, run: Run) -> Path | None:
    """Make a scratch folder in the run's output folder, where checkpoints will be written. Checks that the file system
    can create a file only if it does not exist (put-if-absent). Returns the scratch folder, or None when the output
    folder cannot be written."""
    from trainer.checkpoint.checkpoints import put_absent

    try:
        run.out.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=run.out))
    except OSError as error:
        checks.report("checkpoint folder", False, f"{run.out}: {error.strerror}",
                      "name one you may write to with --out")
        return None
    try:
        once = put_absent(folder / "COMPLETE", b"one"), put_absent(folder / "COMPLETE", b"two")
        detail = f"put-if-absent gave {once}"
    except OSError as error:
        once, detail = (False, False), f"{error.strerror} when a hard link was made"
    atomic = once == (True, False)
    checks.report("checkpoint folder", atomic, f"{run.out}: writable, " + ("put-if-absent works" if atomic else detail),
                  "checkpoints are committed by hard links; take a file system that has them")
    return folder


def memory(checks: Checks, run: Run, ranks: int, device: str) -> None:
    """Check whether memory and disk are large enough: compare the estimated memory of a rank with the free memory, and
    the estimated size of a checkpoint with the free disk space."""
    import torch

    from trainer.tools.memory import checkpoint_bytes, estimate, kernels_on, micro_batch, number_bytes
    from trainer.tools.sizes import gb

    rows, length, accumulate = micro_batch(run, ranks)
    need = sum(estimate(run.config, run.vocab, ranks, rows * length, number_bytes(run, device), accumulate,
                        kernels_on(run.config, device)).values())
    if device == "cuda":
        free = min(torch.cuda.mem_get_info(i)[0] for i in range(ranks))
    else:
        pages = Path("/proc/meminfo").read_text(encoding="ascii") if Path("/proc/meminfo").exists() else ""
        lines = dict(line.split(":", 1) for line in pages.splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024 // ranks if lines else 0
    checks.report("memory", need <= free, f"{gb(need)} wanted of a rank, {gb(free)} free",
                  "see `tokenmill train plan`: more ranks, smaller train.micro_batch, or train.parallel.checkpointing")
    place = next(p for p in (run.out.absolute(), *run.out.absolute().parents) if p.exists())    # OUT may not exist yet
    size, free_disk = checkpoint_bytes(run.config, run.vocab), shutil.disk_usage(place).free
    count = run.config.checkpoint.keep + 1
    checks.report("disk space", count * size <= free_disk, f"{count} checkpoints of {gb(size)}, {gb(free_disk)} free",
                  "lower train.checkpoint.keep, or name another place with --out")


def compare(checks: Checks, options: argparse.Namespace, folder: Path, device: str, precision: str) -> None:
    """Train a small version of the run (see `examine`) with `options.ranks` ranks and with one rank, and report to
    `checks` whether the results agree. Compared are initial values, copies, batches, losses, gradient norms, and the
    loss after one rank has resumed from the checkpoint of the others. The ranks write their results to `folder`. If a
    training fails, only this is reported."""
    from trainer.launch.local import launch

    n = options.ranks
    for ranks in sorted({n, 1}, reverse=True):
        arguments = [*options.arguments, "--device", device, "--probe", str(folder)]     # the last --device counts
        code = launch(arguments, ranks, device)
        if code:
            checks.report(f"{ranks} rank{'s' * (ranks > 1)}", False, f"ended with code {code}, see above",
                          "this is how training would end, too")
            return
    one, *others = [json.loads((folder / f"{name}.json").read_text())
                    for name in ("rank.1.0", *(f"rank.{n}.{r}" for r in range(n)))]
    wrong = sorted({k for other in others for k in one["init"] if other["init"].get(k) != one["init"][k]})
    checks.report("initial values", not wrong, f"differ on {n} ranks: {', '.join(wrong[:5])}" if wrong else
                  f"{len(one['init'])} parameters, identical on 1 and {n} ranks",
                  "another torch on some rank, or a defect")
    twins = sorted({k for other in others for k in other["twins"]})
    checks.report("shards differ", not twins, "no two ranks hold the same part twice" if not twins else
                  f"identical on ranks that hold different parts: {', '.join(twins[:5])}",
                  "do not train: ranks draw the same numbers")
    unequal = sorted({k for other in others for k in other["unequal"]})
    checks.report("copies agree", not unequal, "replicas hold the same values" if not unequal else
                  f"replicas differ in {', '.join(unequal[:5])}", "do not train: a rank computes wrongly")
    digests: dict[str, set[str]] = {}
    for other in others:
        for sample, digest in other["batches"].items():
            digests.setdefault(sample, set()).add(digest)
    wrong = sorted(s for s in one["batches"].keys() | digests.keys() if digests.get(s) != {one["batches"].get(s)})
    checks.report("batches", not wrong, f"{len(digests)} samples, identical on 1 and {n} ranks" if not wrong else
                  f"differ on {n} ranks in {len(wrong)} of {len(digests)} samples, first {wrong[0]}",
                  "the ranks do not see the same shards")
    for key, most in zip(("loss", "grad_norm"), TOLERANCE[precision]):
        a, b = one["steps"][key][:STEPS], others[0]["steps"][key][:STEPS]
        away = max(abs(x - y) / max(abs(x), 1e-6) for x, y in zip(a, b))
        name = {"loss": "losses", "grad_norm": "gradient norms"}[key]
        checks.report(name, len(a) == len(b) == STEPS and away <= most,
                      f"{len(b)} steps of {LAYERS} layers, {away:.1e} apart on 1 and {n} ranks in {precision} (at most "
                      f"{most:.0e}): {' '.join(f'{x:.4f}' for x in b)}", "gradients are not reduced as they should be")
    away = abs(one["steps"]["loss"][STEPS] - one["resumed"]) / abs(one["resumed"])
    checks.report("checkpoint", away <= TOLERANCE[precision][0], f"of {n} ranks, read by 1: the next step's loss is "
                  f"{one['resumed']:.4f}, {away:.1e} away", "checkpoints could not be read by another number of ranks")


def examine(run: Run, world: World, folder: Path) -> None:
    """Train a small version of the run on this rank, and write the results to `folder`/rank.SIZE.RANK.json (SIZE is the
    number of ranks). Every rank must call this. It is called on several ranks first and then on one. The single rank
    also resumes from the checkpoint that the several ranks have written."""
    import torch

    from trainer.data.batches import Data
    from trainer.loop.train import train
    from trainer.model import tensor
    from trainer.model.init import initialise
    from trainer.model.transformer import Transformer
    from trainer.observe.metrics import read
    from trainer.parallel.config import ParallelConfig
    from trainer.parallel.world import arranged, shard

    alone = world.size == 1
    # a single rank is the reference: nothing is divided
    world = arranged(world, ParallelConfig(fp8=run.config.parallel.fp8) if alone else run.config.parallel)
    small = reduced(run, folder / str(world.size), world)
    with torch.device("meta"):
        model = Transformer(small.config.model, small.vocab)
    shard(model, world, torch.float32, False)
    initialise(model, small.config.model, small.config.seed)
    result: dict[str, Any] = {"init": {name: digest(tensor.full(p.detach())) for name, p in model.named_parameters()},
                            **copies_and_twins(model, world), "batches": {}}
    del model
    data = Data(run.curriculum, run.store, run.config.loss.repeats, run.source)
    for phase in run.curriculum.phases:
        step = next(run.steps(phase.start))
        batch = data.step(step.first, step.batch, world.data_rank, world.data_size)
        for i, row in zip(range(world.data_rank, step.batch, world.data_size), zip(*batch.tensors())):
            result["batches"][step.first + i] = digest(*row)

    def steps(out: Path, stop: int) -> list[dict[str, Any]]:
        train(replace(small, out=out), world, stop, lambda _text: None)
        return [line for line in read(out / "metrics.jsonl") if line["event"] == "step"] if world.first else []

    lines = steps(small.out, STEPS + alone)
    result["steps"] = {key: [line[key] for line in lines] for key in ("loss", "grad_norm")}
    others = [path for path in folder.iterdir() if path.is_dir() and path.name != "1"]
    if alone:
        result["resumed"] = steps(others[0], STEPS + 1)[-1]["loss"] if others else lines[-1]["loss"]
    (folder / f"rank.{world.size}.{world.rank}.json").write_text(json.dumps(result))


def reduced(run: Run, out: Path, world: World) -> Run:
    """Return a small version of the run: the model has only its first layers, and the curriculum only the first phase
    (stretch of the training) with a few samples per step. The learning rate is constant."""
    from trainer.loop.config import EvaluateConfig, TrainConfig
    from trainer.optim.schedule import ScheduleConfig

    config, phase = run.config, run.curriculum.phases[0]
    steps = STEPS + 3                                    # more than are run, since a curriculum's end adds work
    rows = max(1, min(7, phase.samples // steps))        # 7 is prime, so that ranks have unequal shares
    small = TrainConfig(model=replace(config.model, layers=min(LAYERS, config.model.layers)), seed=config.seed,
                        optimizer=config.optimizer, schedule=ScheduleConfig(kind="constant", warmup="0"),
                        loss=config.loss, evaluate=EvaluateConfig(every=1000, windows=1), parallel=world.parallel,
                        clip=config.clip, micro_batch=config.micro_batch, precision=config.precision,
                        compile=config.compile is True)
    first = replace(phase, batch=rows, samples=rows * steps, lr="stable", extra=False, reset_optimizer=False,
                    ramp=None)
    return replace(run, config=small, out=out, curriculum=replace(run.curriculum, phases=(first,)))


def copies_and_twins(model: nn.Module, world: World) -> dict[str, list[str]]:
    """Find parameters whose values are wrong on some ranks. Every rank must call this. Returns their names under two
    keys. A matrix is one of the "twins" if two ranks hold equal values for different parts of it. A parameter is
    "unequal" if two ranks hold different values for the same part of it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from trainer.model import tensor

    names, rows = [], []
    for name, parameter in model.named_parameters():
        local, part = tensor.local(parameter.detach()), 0
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for size, at, placement in zip(mesh.shape, mesh.get_coordinate() or (), parameter.placements):
                part = part if placement.is_replicate() else part * size + at
        names.append((name, parameter.ndim > 1))
        rows.append((part, int(digest(local), 16) if local.numel() else -1))
    here = torch.tensor(rows, dtype=torch.int64, device=world.device)
    all_ranks = [torch.empty_like(here) for _ in range(world.size)]
    dist.all_gather(all_ranks, here)
    result: dict[str, list[str]] = {"twins": [], "unequal": []}
    for (name, matrix), ranks in zip(names, zip(*(rank.tolist() for rank in all_ranks))):
        values = {(part, value) for part, value in ranks if value >= 0}
        if len({part for part, _ in values}) < len(values):
            result["unequal"].append(name)
        elif matrix and len({value for _, value in values}) < len(values):
            result["twins"].append(name)
    return result


def digest(*tensors: Any) -> str:
    """Return 63 bits of the blake2b hash of the tensors' bytes, in hex."""
    total = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        total.update(tensor.contiguous().cpu().numpy().tobytes())
    return f"{int.from_bytes(total.digest(), 'little') >> 1:x}"
