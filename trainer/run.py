"""A run opened for training: its curriculum and `train:` mapping, where results go, and what a resume may change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from stages.mix.curriculum import Curriculum, CurriculumError, Phase
from trainer import remote
from trainer.checkpoint import CheckpointConfig
from trainer.config import ConfigError, Count, build, override, read_train
from trainer.evaluate import EvaluateConfig
from trainer.generate import SampleConfig
from trainer.loss import LossConfig
from trainer.model import ModelConfig
from trainer.optim.adamw import AdamWConfig
from trainer.schedule import Schedule, ScheduleConfig

MICRO_BATCH = Count(16384)


class TrainingError(RuntimeError):
    """Training cannot go on; the message says what to do."""


@dataclass(frozen=True)
class TrainConfig:
    """The `train:` section. Sequence, batch and mixture are the curriculum's, by phase.

    `seed` of the initial values; `clip` bounds the gradient norm; `micro_batch` is the number of tokens a rank computes
    at once (memory), `precision` the dtype of matrix products (`auto`: bf16 on CUDA, fp32 on CPU), `log_every` how many
    steps lie between two printed lines and, on CUDA, two synchronisations (metrics.jsonl has a line for every step).
    """

    model: ModelConfig
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    seed: int = 0
    clip: float = 1.0
    micro_batch: Count = MICRO_BATCH
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    log_every: int = 10

    def check(self) -> None:
        if self.clip <= 0 or self.micro_batch < 1 or self.log_every < 1:
            raise ValueError("clip must be > 0, micro_batch and log_every at least 1")

    def identity(self) -> dict[str, Any]:
        """What decides about the losses: a resume may not change it. (Rounding apart, nothing else does.)"""
        return {"model": asdict(self.model), "optimizer": asdict(self.optimizer), "schedule": asdict(self.schedule),
                "loss.z": self.loss.z, "seed": self.seed, "clip": self.clip, "precision": self.precision}


@dataclass(frozen=True)
class Step:
    """Samples [first, first + batch) of one phase; `number` counts from 0 over the whole run."""

    number: int
    phase: int
    first: int
    batch: int
    tokens: int               # targets before this step

    @property
    def stop(self) -> int:
        return self.first + self.batch


@dataclass(frozen=True)
class Run:
    folder: Path              # STORE/runs/RUN
    store: Path
    out: Path                 # checkpoints, metrics, plot
    curriculum: Curriculum
    config: TrainConfig
    source: str | None = None # URL of the store where it is object storage; `folder` and `store` are a local copy

    @property
    def vocab(self) -> int:
        return self.curriculum.tokenizer.vocab_size

    def schedule(self) -> Schedule:
        return Schedule(self.config.schedule, self.curriculum.phases)

    def micro_rows(self, length: int) -> int:
        """Windows of `length` tokens a rank computes at once."""
        return max(1, self.config.micro_batch // length)

    def steps(self, sample: int = 0) -> Iterator[Step]:
        """The steps from sample number `sample` (a step's first) to the end, in O(1) memory."""
        number = tokens = 0
        for p, phase in enumerate(self.curriculum.phases):
            done = min(max(sample - phase.start, 0), phase.samples)
            if done % phase.batch:
                raise ConfigError(f"sample {sample} is inside a step of phase {phase.name!r} (batch {phase.batch})")
            for i in range(done // phase.batch, phase.steps):
                yield Step(number + i, p, phase.start + i * phase.batch, phase.batch,
                           tokens + i * phase.batch * phase.sequence)
            number, tokens = number + phase.steps, tokens + phase.tokens


def open_run(run: str, store: str | None, out: str | None, overrides: Sequence[str]) -> Run:
    """Open `run`, a folder or URL (STORE/runs/RUN) or the name of a run in `store`. `overrides`: `key=value` of
    `train:`. Of a run in object storage only its small files are fetched here (`remote.fetch_shards`)."""
    source = None
    if out is not None and remote.is_url(out):
        raise ConfigError(f"--out {out}: checkpoints and metrics need a file system; give a folder")
    if remote.is_url(run) or remote.is_url(store):
        source, name = remote.split_run(run, store)
        folder = remote.fetch_run(source, name)
        run, store = str(folder), str(folder.parent.parent)
    folder = Path(run)
    if store is not None and not (folder / "curriculum.json").is_file():
        folder = Path(store) / "runs" / run
    path = folder / "curriculum.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the folder of a run that has shards and a curriculum "
                          f"(STORE/runs/RUN), or its name with --store")
    try:
        curriculum = Curriculum.load(path)
    except (CurriculumError, json.JSONDecodeError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: {error}") from None
    train = read_train(folder / "recipe.yaml")
    for assignment in overrides:
        override(train, assignment)
    config = build(TrainConfig, train, f"{folder / 'recipe.yaml'}: train")
    made = Run(folder, Path(store) if store else folder.absolute().parent.parent,
               Path(out) if out else folder / "train", curriculum, config, source)
    made.schedule()               # its errors belong here, before anything starts
    return made


def differences(meta: dict[str, Any], run: Run) -> list[str]:
    """What a checkpoint's `meta` and a run disagree about, one line each; [] means the run may go on from it.

    The world, the micro-batch, logging and phases that lie ahead may change.
    """
    found = []
    new = flat(run.config.identity())
    old = flat(meta["config"])
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            found.append(f"train.{key}: checkpoint {old.get(key)!r}, now {new.get(key)!r}")
    was, now = meta["curriculum"], run.curriculum.to_json()
    for key in ("seed", "longest"):
        if was[key] != now[key]:
            found.append(f"curriculum.{key}: checkpoint {was[key]!r}, now {now[key]!r}")
    if was["tokenizer"]["sha256"] != now["tokenizer"]["sha256"]:
        found.append("curriculum.tokenizer: another one")
    for i, stream in enumerate(was["streams"]):
        if i >= len(now["streams"]) or any(stream[k] != now["streams"][i][k] for k in ("name", "sha256")):
            found.append(f"stream {stream['name']}: missing, in another place, or other data")
    for i, phase in enumerate(was["phases"]):
        if phase["start"] < meta["samples"]:
            new_phase = run.curriculum.phases[i] if i < len(run.curriculum.phases) else None
            found += past(Phase(**phase), new_phase, meta["samples"])
    before = Schedule(run.config.schedule, [Phase(**p) for p in was["phases"]]).factor(meta["tokens"])
    after = run.schedule().factor(meta["tokens"])
    if abs(before - after) > 1e-6:                       # shares of a total that has changed
        found.append(f"schedule: at token {meta['tokens']:,} the learning rate would jump from {before:.4g} to "
                     f"{after:.4g} of its peak; give warmup and decay in tokens, or `lr: decay` in a phase")
    return found


def past(old: Phase, new: Phase | None, samples: int) -> list[str]:
    """Differences in a phase that has begun: it may only have been cut, and not before sample number `samples`."""
    if new is None:
        return [f"phase {old.name}: has begun, but is missing now"]
    same = ("start", "sequence", "batch", "weights", "reserved", "lr")
    found = [f"phase {old.name}.{k}: checkpoint {getattr(old, k)!r}, now {getattr(new, k)!r}"
             for k in same if getattr(old, k) != getattr(new, k)]
    if new.stop < min(old.stop, samples):
        found.append(f"phase {old.name}: cut at sample {new.stop}, but {samples} samples have been read")
    return found


def flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} → {'a.b': 1}, tuples as lists (as JSON gives them back)."""
    out: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = list(value) if isinstance(value, tuple) else value
    return out
