"""Measure tokens per second and MFU of the trainer on one GPU, and of plain PyTorch in the same run.

    python -m benchmarks.train_speed --out speed.json --minutes 8       # as many as fit; again: the rest
    python -m benchmarks.train_speed --models 125m --ways ours titan    # a part of it

Models of 125 M, 350 M and 1 B parameters, each trained on the same random tokens in four ways:

  ours      `trainer.loop.train.train`, the whole loop: shards, loader, document masks, metrics. Windows of one
            document. The figures are the trainer's own; they exclude the time of printing a line (every fourth step
            here)
  nanochat  as nanochat and nanoGPT do: autocast to bf16, the whole model compiled, causal flash attention,
            F.cross_entropy over all logits, fused AdamW
  titan     as torchtitan does: FSDP2 with bf16 compute and fp32 reductions, compiled block by block, the rest the same
  packed    as ours, with documents of 600 tokens on average. Attention stays inside a document, and the MFU counts only
            this work

The most important comparison comes first: ours and nanochat for all models. Every measurement is a process of its own,
so that one that fails does not stop the next. It begins with a micro-batch that fits an H200, and halves it whenever
memory runs out. Each result is written at once. Called again with the same --out, the script measures only what is
missing or has failed.

The figure is the median over windows of four steps; the first window is left out (compilation, warm-up). MFU uses the
formula of trainer/observe/mfu.py for all ways. For each model, MODELS sets the lowest MFU that we accept (`floor`) and
the one that we want (`goal`). Without CUDA, the script says so and runs a tiny model on the CPU, which shows only that
the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

#: all ways, in the order in which they are measured
WAYS = ("ours", "nanochat", "titan", "packed")
#: model shapes; `sequence`, `batch` (tokens per step), `micro` (initial tokens per micro-batch); floor and goal of the
#: MFU
MODELS: dict[str, dict[str, Any]] = {
    "125m": {"model": {"layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "ffn": 2048}, "sequence": 2048,
             "batch": 262144, "micro": 65536, "floor": 0.38, "goal": 0.45},
    "350m": {"model": {"layers": 24, "width": 1024, "heads": 16, "kv_heads": 16, "ffn": 2816}, "sequence": 2048,
             "batch": 131072, "micro": 32768, "floor": 0.44, "goal": 0.50},
    "1b": {"model": {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192}, "sequence": 4096,
           "batch": 65536, "micro": 32768, "floor": 0.50, "goal": 0.55},
}
SMOKE = {"model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128}, "sequence": 64, "batch": 512,
         "micro": 256, "floor": None, "goal": None}
VOCAB, SMOKE_VOCAB, EOS = 50304, 512, 0
#: steps per window; windows measured; windows left out before them
WINDOW, WINDOWS, WARM = 4, 5, 1
LR = 3e-4
#: the line of a traceback that names the error; torch's compiler adds advice below it, NCCL a warning
ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception|Failed|Unsupported)\b(: |$)")
#: fewest seconds left in which another measurement is begun
LEAST = 45


# -- the parent: one process a measurement, a table, a file ------------------------------------------------------------
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, help="where the figures go as JSON; those that are there are not repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="end after M minutes")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for one measurement")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "WAY", "MICRO"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, way, micro = options.one
        print(json.dumps(measure(SMOKE if model == "smoke" else MODELS[model], way, int(micro), model == "smoke")))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM must not leave the running measurement behind
    began = time.monotonic()

    import torch

    from trainer.observe.mfu import FORMULA, peak

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if not cuda:
        print("torch sees no CUDA device. What follows is a smoke test of this script with a tiny model on the CPU; "
              "its figures mean nothing.\n")
    document: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
                                "formula": FORMULA, "peak_flops": peak(device), "smoke": not cuda}
    results = former(options.out, document)
    document["results"] = results
    if options.out:                               # fails before the measurements if the file cannot be written
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{document['device']}, torch {torch.__version__}, peak "
          + (f"{document['peak_flops'] / 1e12:.0f} TFLOP/s bf16" if document["peak_flops"] else "unknown")
          + f"; MFU by {FORMULA}\n\n{HEADER}", flush=True)
    for found in results:
        print(row(found), flush=True)
    models = options.models if cuda else ["smoke"]
    for name, way in ((name, way) for pair in (WAYS[:2], WAYS[2:3], WAYS[3:]) for name in models for way in pair):
        if way not in options.ways or any((r["model"], r["way"]) == (name, way) for r in results):
            continue
        left = 60 * options.minutes - (time.monotonic() - began)
        if left < LEAST:
            print(f"out of time before {name} {way}; the same command goes on with it")
            break
        spec = MODELS.get(name, SMOKE)
        found = supervise(name, way, spec["micro"], spec["sequence"], min(options.timeout, left))
        results.append({"model": name, "way": way, "floor": spec["floor"], "goal": spec["goal"], **found})
        print(row(results[-1]), flush=True)
        if options.out:                           # after each: no measurement is lost
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    for line in verdicts(results):
        print(line)
    return 1 if any("error" in r for r in results) else 0


def former(path: Path | None, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measurements in `path` that were made on this device with this torch and did not fail."""
    try:
        found = json.loads(path.read_text()) if path else {}
    except FileNotFoundError:
        return []
    alike = all(found.get(key) == value for key, value in document.items())
    return [r for r in found["results"] if "error" not in r] if alike else []


def supervise(name: str, way: str, micro: int, sequence: int, seconds: float) -> dict[str, Any]:
    """Run a measurement in its own process for at most `seconds` seconds. If memory runs out, it is run again with half
    the micro-batch. Returns its figures, or an error."""
    began = time.monotonic()
    while True:
        print(f"… {name} {way}, micro-batch of {micro:,} tokens", file=sys.stderr, flush=True)
        code, out, err = child([sys.executable, str(Path(__file__).resolve()), "--one", name, way, str(micro)],
                               seconds - (time.monotonic() - began))
        if code == 0:
            return {"micro": micro, **json.loads(out.splitlines()[-1]), "took_s": round(time.monotonic() - began, 1)}
        if "out of memory" in err and micro >= 2 * sequence:
            micro //= 2
            continue
        said = err.strip().splitlines()
        errors = [line for line in said if ERROR.match(line)]
        why = f"no result after {seconds:.0f} s" if code is None else (errors or said or [f"exit code {code}"])[-1]
        return {"micro": micro, "error": why, "log": said[-40:]}


def child(command: list[str], seconds: float) -> tuple[int | None, str, str]:
    """Run a command. Returns (exit code, or None if it took too long; stdout; stderr). All its processes are killed at
    the end, because torch's compile workers would keep pipes and GPU memory."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT, process_group=0)
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0.0, seconds) if math.isfinite(seconds) else None)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


HEADER = (f"{'model':<7}{'way':<10}{'tokens/s':>10}{'spread':>8}{'MFU':>8}{'floor':>8}{'goal':>8}{'memory':>10}"
          f"{'micro-batch':>13}")


def share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def row(r: dict[str, Any]) -> str:
    if "error" in r:
        return f"{r['model']:<7}{r['way']:<10}failed: {r['error']}"
    ours = r["way"] in ("ours", "packed")
    return (f"{r['model']:<7}{r['way']:<10}{r['tokens_per_s']:>10,.0f}{r['spread']:>8.1%}{share(r['mfu']):>8}"
            f"{share(r['floor']) if ours and r['floor'] else '':>8}{share(r['goal']) if ours and r['goal'] else '':>8}"
            f"{r['memory_gb']:>7.1f} GB{r['micro']:>13,}")


def verdicts(results: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each model: whether the MFU of the way `ours` reaches the floor and the goal in MODELS, and
    its speed compared with the faster of nanochat and titan."""
    lines = []
    for name in dict.fromkeys(r["model"] for r in results):
        done = {r["way"]: r for r in results if r["model"] == name and "error" not in r}
        ours, others = done.get("ours"), [done[w] for w in ("nanochat", "titan") if w in done]
        if not ours:
            continue
        best = max(others, key=lambda r: r["tokens_per_s"], default=None)
        against = "" if best is None else \
            f"; {ours['tokens_per_s'] / best['tokens_per_s']:.2f} of the speed of {best['way']}"
        if ours["mfu"] is None or ours["floor"] is None:
            lines.append(f"{name}: MFU unknown{against}")
        else:
            reached = "goal" if ours["mfu"] >= ours["goal"] else "floor" if ours["mfu"] >= ours["floor"] else "neither"
            lines.append(f"{name}: MFU {ours['mfu']:.1%}, floor {ours['floor']:.0%}, goal {ours['goal']:.0%}: "
                         f"{reached} reached{against}")
    return lines


# -- one measurement ---------------------------------------------------------------------------------------------------
def measure(spec: dict[str, Any], way: str, micro: int, smoke: bool) -> dict[str, Any]:
    """Measure one way of training a model. Returns tokens_per_s (the median of the windows), spread (of the windows,
    relative to it), mfu, memory_gb (peak) and windows (tokens per second of each)."""
    import torch

    torch.manual_seed(0)
    vocab = SMOKE_VOCAB if smoke else VOCAB
    windows, mfu, memory = (ours(spec, vocab, micro, way == "packed", smoke) if way in ("ours", "packed")
                            else plain(spec, vocab, micro, way == "titan", smoke))
    middle = statistics.median(windows)
    return {"tokens_per_s": middle, "spread": (max(windows) - min(windows)) / middle, "mfu": mfu,
            "memory_gb": memory / 1e9, "windows": windows}


def ours(spec: dict[str, Any], vocab: int, micro: int, packed: bool, smoke: bool
         ) -> tuple[list[float], float | None, float]:
    """Run the whole training loop on shards written for it. Returns tokens per second of each window, median MFU, and
    peak bytes of memory."""
    from unittest import mock

    from trainer.checkpoint import saver
    from trainer.loop.run import open_run
    from trainer.loop.train import train
    from trainer.observe.metrics import read
    from trainer.parallel.world import world

    # the final checkpoint (13 GB for the 1 B model) comes after the measurement and takes longer than it
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(saver.Saver, "save"), world("auto") as here:
        run = store(Path(folder), spec, vocab, micro, packed, smoke)
        train(open_run(str(run), None, None, []), here, None, lambda text: print(text, file=sys.stderr, flush=True))
        steps = [line for line in read(run / "train" / "metrics.jsonl") if line["event"] == "step"]
    # each step repeats the figures of its window; the last step also holds the peak memory since the line before
    each = [steps[i] for i in range(WINDOW - 1, len(steps), WINDOW)]
    known = [line["mfu"] for line in each[WARM:] if line["mfu"] is not None]
    return ([line["tokens_per_s"] for line in each[WARM:]], statistics.median(known) if known else None,
            max(line.get("gpu_memory_bytes", 0) for line in each))


def store(top: Path, spec: dict[str, Any], vocab: int, micro: int, packed: bool, smoke: bool) -> Path:
    """Make a store of random tokens with one stream, and a run over it. Returns the run's folder."""
    import numpy as np
    import yaml

    from tokenizer.mixture.resolve import resolve
    from tokenizer.shards.layout import MANIFEST, Manifest, Shard, file_name, token_dtype
    from tokenizer.shards.writer import ShardWriter

    sequence, rng = spec["sequence"], np.random.default_rng(0)
    total = spec["batch"] * WINDOW * (WARM + WINDOWS)
    identity = hashlib.sha256(b"random tokens").hexdigest()
    folder = top / "shards" / "random" / "split=train"  # no held-out data: evaluations would have to be compiled, too
    folder.mkdir(parents=True)
    mean, tokens = max(8, min(600, sequence // 4)), total + 2 * sequence
    lengths = rng.integers(mean // 2, mean * 3 // 2, 2 * tokens // mean) if packed else \
        np.full(-(-tokens // sequence), sequence)
    lengths = lengths[:int(np.searchsorted(lengths.cumsum(), tokens)) + 1]
    body = rng.integers(1, vocab, int(lengths.sum()))
    body[lengths.cumsum() - 1] = EOS
    paths = {kind: folder / f"{kind}.tmp" for kind in ("body", "ends", "table", "blocks")}
    writer = ShardWriter(*(str(p) for p in paths.values()), vocab, EOS)
    writer.add(body, lengths, [f"{i:032x}" for i in range(len(lengths))], 0, np.arange(len(lengths)), 3 * lengths)
    facts = writer.close()
    sums = {kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in paths.items()}
    names = {kind: file_name(0, kind, sums[kind]) for kind in paths}
    for kind, path in paths.items():
        path.rename(folder / names[kind])
    shard = Shard(index=0, **facts, **names, table_sha256=sums["table"])
    made = Manifest("random", "train", token_dtype(vocab).name, identity, vocab, EOS, shard.tokens, shard.documents,
                    shard.text_bytes, (shard,))
    made = replace(made, sha256=made.identity())
    (folder / MANIFEST).write_text(made.dumps())
    split = {"path": str(folder.relative_to(top)), "sha256": made.sha256, "tokens": made.tokens,
             "documents": made.documents, "bytes": made.text_bytes}
    tokenizer = {"sha256": identity, "vocab_size": vocab, "eos": EOS, "path": "tokenizers/none/tokenizer.json"}
    recipe = {
        "curriculum": {"seed": 1, "total": total, "phases": [
            {"name": "speed", "until": "100%", "sequence": sequence, "batch": spec["batch"], "mix": {"random": 1}}]},
        "shards": {"random": {"longest": sequence}},
        "train": {"model": spec["model"], "optimizer": {"lr": LR}, "schedule": {"kind": "constant"},
                  "parallel": {"shard": "none"}, "compile": not smoke, "micro_batch": micro, "log_every": WINDOW,
                  "evaluate": {"every": 10 ** 6, "windows": 1}, "checkpoint": {"every": 10 ** 6},
                  "sample": {"tokens": 0}}}
    curriculum, _ = resolve(recipe, {"random": {"name": "random", "tokenizer": identity,
                                                "dtype": token_dtype(vocab).name, "train": split}}, tokenizer)
    run = top / "runs" / "speed"
    run.mkdir(parents=True)
    curriculum.save(run / "curriculum.json")
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return run


def plain(spec: dict[str, Any], vocab: int, micro: int, sharded: bool, smoke: bool
          ) -> tuple[list[float], float | None, float]:
    """Measure `titan` if `sharded`, else `nanochat`, without our trainer. Returns tokens per second of each window, MFU
    of the median window, and peak bytes of memory."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from trainer.model.config import ModelConfig
    from trainer.observe.mfu import peak, step_flops

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda, dtype = device.type == "cuda", torch.float32 if smoke else torch.bfloat16
    torch.set_float32_matmul_precision("high")
    with device:
        model = decoder(spec["model"], vocab, spec["sequence"], dtype)

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model.blocks:
            if not smoke:
                block.forward = torch.compile(block.forward, dynamic=False)  # not compiled: FSDP's hooks
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        cross_entropy = cross_entropy if smoke else torch.compile(cross_entropy, dynamic=False)
    elif not smoke:
        loss_of = torch.compile(loss_of, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    rows = max(1, micro // spec["sequence"])
    parts = max(1, spec["batch"] // (rows * spec["sequence"]))
    tokens = torch.randint(1, vocab, (parts, rows, spec["sequence"] + 1))
    tokens = tokens.pin_memory() if cuda else tokens

    def step() -> None:
        for i, part in enumerate(tokens):
            if sharded:
                model.set_requires_gradient_sync(i == len(tokens) - 1)
            with torch.autocast(device.type, dtype, enabled=not sharded and not smoke):
                loss = loss_of(part.to(device, non_blocking=True))
            (loss / len(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    speeds, count = [], parts * rows * spec["sequence"]
    for _ in range(WARM + WINDOWS):
        began = time.perf_counter()
        for _ in range(WINDOW):
            step()
        if cuda:
            torch.cuda.synchronize()
        speeds.append(WINDOW * count / (time.perf_counter() - began))
        print(f"{speeds[-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
    if sharded:
        dist.destroy_process_group()
    flops = step_flops(ModelConfig(**spec["model"]), vocab, count, count * spec["sequence"])
    speeds = speeds[WARM:]
    top = peak(device)
    return (speeds, statistics.median(speeds) * flops / count / top if top else None,
            torch.cuda.max_memory_allocated() if cuda else 0)


def decoder(shape: dict[str, int], vocab: int, length: int, dtype: Any) -> Any:
    """Return a plain Llama decoder of the trainer's shape (tied embedding, no biases), without our optimisations.
    `dtype` is that of the residual stream, which under autocast would otherwise be float32."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    width, heads, groups = shape["width"], shape["heads"], shape["kv_heads"]
    dim = width // heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv = nn.Linear(width, (heads + 2 * groups) * dim, bias=False)
            self.o = nn.Linear(heads * dim, width, bias=False)
            self.gate_up = nn.Linear(width, 2 * shape["ffn"], bias=False)
            self.down = nn.Linear(shape["ffn"], width, bias=False)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, heads + 2 * groups, dim).transpose(1, 2).split(
                (heads, groups, groups), 1)
            q, k = turn(q, cos, sin), turn(k, cos, sin)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups != heads)
            x = x + self.o(a.transpose(1, 2).reshape(b, t, heads * dim))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab, width)
            self.blocks = nn.ModuleList(Block() for _ in range(shape["layers"]))
            self.norm = nn.RMSNorm(width)
            angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())
            for p in self.parameters():
                if p.ndim > 1:
                    nn.init.normal_(p, std=0.02)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens).to(dtype)
            cos, sin = self.cos[: tokens.shape[1]].to(dtype), self.sin[: tokens.shape[1]].to(dtype)
            for block in self.blocks:
                x = block(x, cos, sin)
            return F.linear(self.norm(x), self.embed.weight)

    return Decoder()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(1)
