"""Opens a run for training: reads its curriculum and its `train:` settings, and finds its output folder. Also decides
which changes to curriculum and settings are permitted when a training resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tokenizer.mixture.apportion import is_flat
from tokenizer.mixture.curriculum import Curriculum, CurriculumError, Phase
from tokenizer.mixture.steps import TrainingStep, step_of, steps
from trainer.base.config import ConfigError, build, override, read_train
from trainer.base.config import TrainingError as TrainingError
from trainer.data import remote
from trainer.data.provenance import code
from trainer.loop.config import TrainConfig
from trainer.model.rope import Rope
from trainer.model.transformer import phase_rope
from trainer.optim.schedule import Schedule


@dataclass(frozen=True)
class Run:
    folder: Path              # STORE/runs/RUN
    store: Path
    out: Path                 # checkpoints, metrics, plot
    curriculum: Curriculum
    config: TrainConfig
    source: str | None = None # URL of the store if it is in object storage; `folder` and `store` are then a local copy

    @property
    def vocab(self) -> int:
        return self.curriculum.tokenizer.vocab_size

    def schedule(self) -> Schedule:
        return Schedule(self.config.schedule, self.curriculum.phases, self.config.optimizer.lr)

    def rope(self, samples: int) -> Rope:
        """Return the model's RoPE settings after `samples` samples of the training. A phase (stretch of the training)
        may have its own settings, so they are those of the phase of the last of these samples."""
        return phase_rope(self.config.model, self.curriculum.phases[self.curriculum.phase_at(max(0, samples - 1))])

    def micro_rows(self, length: int) -> int:
        """Return how many samples of `length` tokens a rank computes at once."""
        return max(1, self.config.micro_batch // length)

    def loss_chunk(self, device: torch.device) -> int:
        """Return for how many tokens a rank on `device` computes logits and loss at once."""
        return self.config.loss.tokens(self.vocab, device.type == "cuda")

    def unshared(self, ranks: int) -> list[str]:
        """Return a warning for each phase (stretch of the training) whose batches cannot be divided equally among the
        data ranks. The first batch of a phase is checked, because it is the smallest. A data rank is one rank, or
        several that share layers; `ranks` is the number of all ranks. Raises ConfigError when that many ranks do not
        fit the settings under `train.parallel`."""
        self.config.parallel.shape(ranks)
        groups, warnings = ranks // self.config.parallel.tensor, []
        for phase in self.curriculum.phases:
            batch = phase.batch_at(0)
            if batch < groups:
                idle = ranks - batch * self.config.parallel.tensor
                warnings.append(f"phase {phase.name}: a batch of {batch} sequences leaves {idle} ranks idle")
            elif batch % groups:
                most = -(-batch // groups)
                warnings.append(f"phase {phase.name}: a batch of {batch} sequences does not divide by {groups}: ranks "
                             f"with {most} are waited for, {1 - batch / groups / most:.0%} of the time is lost")
        return warnings

    def sample_at(self, step: int) -> int:
        """Return how many samples the first `step` steps of the curriculum read, those of skipped steps included.
        Raises ConfigError if the curriculum has fewer steps."""
        samples = 0
        for phase in self.curriculum.phases:
            for first, stop, batch in phase.stretches:
                steps = min(step, (stop - first) // batch)
                samples, step = samples + steps * batch, step - steps
        if step > 0:
            raise ConfigError(f"the curriculum has {self.curriculum.steps} steps, {step} fewer than that")
        return samples

    def step_of(self, sample: int) -> int:
        """Return the number (from 1) of the step that reads sample number `sample`. Raises ConfigError if the
        curriculum has no such sample."""
        try:
            return step_of(self.curriculum, sample)
        except CurriculumError as error:
            raise ConfigError(str(error)) from None

    def steps(self, sample: int = 0) -> Iterator[TrainingStep]:
        """Yield the steps from sample number `sample` to the end, in O(1) memory. Raises ConfigError if `sample` is
        inside a step."""
        try:
            yield from steps(self.curriculum, sample)
        except CurriculumError as error:
            raise ConfigError(str(error)) from None


def open_run(run: str, store: str | None, out: str | None, overrides: Sequence[str]) -> Run:
    """Open `run`, which is a folder or URL (STORE/runs/RUN), or the name of a run in `store`. `out` is the folder for
    checkpoints and metrics (None: RUN/train). `overrides` are assignments `key=value` to settings under `train:`. For a
    run in object storage, only its curriculum and recipe are fetched; `remote.fetch_shards` fetches the shards. Raises
    ConfigError when something cannot be used."""
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
    except CurriculumError as error:
        raise ConfigError(str(error)) from None                     # the message names the file
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    train = read_train(folder / "recipe.yaml")
    for assignment in overrides:
        override(train, assignment)
    config = build(TrainConfig, train, f"{folder / 'recipe.yaml'}: train")
    opened = Run(folder, Path(store) if store else folder.absolute().parent.parent,
               Path(out) if out else folder / "train", curriculum, config, source)
    opened.schedule()               # raises its errors now, before anything starts
    for first, stop in config.skip:
        if first > curriculum.steps:
            raise ConfigError(f"train.skip: [{first}, {stop}]: the curriculum has {curriculum.steps:,} steps; name "
                              f"steps of it, or take the range out")
    for phase in curriculum.phases:
        phase_rope(config.model, phase)
    return opened


def differences(meta: dict[str, Any], run: Run) -> list[str]:
    """Return the differences between a checkpoint and a run that forbid the run to continue from the checkpoint, one
    line each. If the list is empty, the run may continue. `meta` is the checkpoint's metadata.

    Permitted differences are not in the list; `changes` and `edits` return them.
    """
    result = unequal(meta["config"], run.config.identity())
    was, now = meta["curriculum"], run.curriculum.to_json()
    for key in ("seed", "longest"):
        if was[key] != now[key]:
            result.append(f"curriculum.{key}: checkpoint {was[key]!r}, now {now[key]!r}")
    if was["tokenizer"]["sha256"] != now["tokenizer"]["sha256"]:
        result.append("curriculum.tokenizer: another one")
    for i, stream in enumerate(was["streams"]):
        new = now["streams"][i] if i < len(now["streams"]) else None
        # `tokenmill takedown` overwrites documents in place, and lists the sets that the present one replaces
        if new is None or stream["name"] != new["name"] or stream["sha256"] not in (new["sha256"],
                                                                                    *new.get("replaces", ())):
            result.append(f"stream {stream['name']}: missing, in another place, or other data")
    for i, phase in enumerate(was["phases"]):
        if phase["start"] < meta["samples"]:
            new_phase = run.curriculum.phases[i] if i < len(run.curriculum.phases) else None
            result += past(Phase(**phase), new_phase, meta["samples"])
            if was["version"] == 1 and not is_flat(list(phase["weights"].values())):
                result.append(f"phase {phase['name']}: an earlier Tokenmill read its {len(phase['weights'])} streams "
                              f"in another order; go on with that one, or start the training anew")
    if result:
        return result
    phases = [Phase(**p) for p in was["phases"]]
    last = meta["tokens"] - 1  # last token read; the next one may belong to a phase with its own rate
    before = Schedule(run.config.schedule, phases, run.config.optimizer.lr).factor(last)
    after = run.schedule().factor(last)
    if abs(before - after) > 1e-6:                       # e.g. shares of a total that has changed
        result.append(f"schedule: at token {meta['tokens']:,} the learning rate would jump from {before:.4g} to "
                     f"{after:.4g} of its peak; give warmup and decay in tokens, or `lr: decay` in a phase")
    return result


def past(old: Phase, new: Phase | None, samples: int) -> list[str]:
    """Return the forbidden differences between two versions of a phase (stretch of the training) that had begun when a
    checkpoint was written, one line each. `old` is from the checkpoint, and `new` from the present curriculum (None if
    the phase is missing there). The phase may end elsewhere, but not before sample number `samples`. Fields that affect
    neither samples nor rates, such as `max_epochs`, are not compared."""
    if new is None:
        return [f"phase {old.name}: has begun, but is missing now"]
    same = ("start", "sequence", "batch", "ramp", "weights", "groups", "reserved", "lr", "extra", "reset_optimizer",
            "rope_theta", "rope_scaling")
    result = [f"phase {old.name}.{k}: checkpoint {getattr(old, k)!r}, now {getattr(new, k)!r}"
             for k in same if getattr(old, k) != getattr(new, k)]
    if new.stop < min(old.stop, samples):
        result.append(f"phase {old.name}: cut at sample {new.stop}, but {samples} samples have been read")
    return result


def changes(meta: dict[str, Any], run: Run, world: int, machine: Mapping[str, Any]) -> list[str]:
    """Return the permitted changes since a checkpoint was written, one line each: of settings, machine, number of ranks
    and code. `edits` returns the changes of the curriculum. `meta` is the checkpoint's metadata."""
    result = unequal({"world": meta["world"], **{k: meta.get(k, v) for k, v in machine.items()}},
                    {"world": world, **machine}, "")
    decided = flat(run.config.identity())
    result += [line for line in unequal(meta["train"], asdict(run.config))
              if line.split(":")[0].removeprefix("train.") not in decided]
    was, now = meta.get("code"), code()
    if was and was["sha256"] != now["sha256"]:
        result.append(f"code: checkpoint {version(was)}, now {version(now)}")
    return result


def edits(meta: dict[str, Any], run: Run) -> list[str]:
    """Return the changes to the curriculum since a checkpoint was written, one line each. `meta` is the checkpoint's
    metadata. Call this only after `differences` has found no forbidden change."""
    was, now = meta["curriculum"], run.curriculum.to_json()
    result = [f"stream {s['name']}: new" for s in now["streams"][len(was["streams"]):]]
    old, new = ({phase["name"]: phase for phase in side["phases"]} for side in (was, now))
    for name, phase in old.items():
        if name not in new:
            result.append(f"phase {name}: taken out")
            continue
        keys = sorted({*phase, *new[name]} - {"start"})              # a phase's start follows from those before it
        result += [f"phase {name}.{k}: was {phase.get(k)!r}, now {new[name].get(k)!r}" for k in keys
                  if phase.get(k) != new[name].get(k)]
    return result + [f"phase {name}: new, {Phase(**phase).tokens:,} tokens from sample {phase['start']:,} on"
                    for name, phase in new.items() if name not in old]


def version(sums: Mapping[str, str | None]) -> str:
    """Return a version of the trainer's code as short text: commit or package version, and the first digits of the hash
    over the source files. `sums` is the result of `provenance.code`."""
    return f"{(sums['commit'] or sums['package'] or 'unknown')[:12]} ({(sums['sha256'] or '')[:8]})"


def unequal(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "train.") -> list[str]:
    """Return a line such as 'train.KEY: checkpoint 1, now 2' for each key in which two (nested) mappings differ: `old`,
    from a checkpoint, and `new`."""
    then, now = flat(dict(old)), flat(dict(new))
    return [f"{prefix}{written(k)}: checkpoint {then.get(k)!r}, now {now.get(k)!r}"
            for k in sorted(then.keys() | now.keys()) if then.get(k) != now.get(k)]


def written(key: str) -> str:
    """Return a key of the settings as it is written in a recipe: checkpoint.async_ → checkpoint.async."""
    return ".".join(part.removesuffix("_") for part in key.split("."))


def flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a mapping: {'a': {'b': 1}} → {'a.b': 1}. Tuples become lists, as JSON returns them."""
    out: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = lists(value)
    return out


def lists(value: Any) -> Any:
    """Convert tuples to lists, at any depth."""
    return [lists(item) for item in value] if isinstance(value, (list, tuple)) else value
