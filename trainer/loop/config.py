"""Defines the recipe's `train:` section: settings of the training loop and of the parts it combines (model, optimiser,
…). Imports no torch, so that a recipe can be checked where torch is not installed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer.base.config import Count
from trainer.checkpoint.config import CheckpointConfig
from trainer.model.config import InitConfig, LossConfig, ModelConfig
from trainer.observe.alerts import AlertsConfig
from trainer.observe.metrics import MetricsConfig
from trainer.optim.config import OptimizerConfig, default
from trainer.optim.schedule import ScheduleConfig
from trainer.parallel.config import ParallelConfig

MICRO_BATCH = Count(16384)


@dataclass(frozen=True)
class TaskScoringConfig:
    """Settings by which a process beside the training scores checkpoints on benchmark tasks (`tokenmill train eval
    --follow`). It scores the checkpoint of every `every`-th step and those at the ends of phases (stretches of the
    training). Up to four checkpoints that are still to be scored stay, even if the settings `checkpoint` would delete
    them.

    `tasks` are names of tasks or paths of task files, `data` is the folder with their data, and `shots` is the number
    of examples before each question (null: the number in the task's file). The process computes on `device`; on `cuda`
    it takes GPU memory beside the training. `share` limits by how much the process slows the training down: with 0.02,
    the steps together take at most 2 % longer. To keep to this limit, the process is paused at times.
    """

    every: int
    tasks: tuple[str, ...]
    data: str
    shots: int | None = None
    share: float = 0.02
    device: Literal["cpu", "cuda"] = "cpu"

    def check(self) -> None:
        if self.every < 1 or not self.tasks:
            raise ValueError("every must be at least 1, and tasks must name a task")
        if any("," in name for name in self.tasks):
            raise ValueError("the names of tasks and of their files must not have commas")
        if self.shots is not None and self.shots < 0:
            raise ValueError("shots must be at least 0, or null")
        if self.share <= 0:
            raise ValueError("share must be above 0 (0.02: steps may take 2 % longer)")


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of the evaluation on held-out data. `every` is the number of steps between two evaluations. Another one
    comes before the first step of a new training, and one after the last step (or the step of `--stop-at`).

    `windows` is the largest number of held-out samples that are used from each stream (the data of one source, language
    or bucket). These samples have the sequence length of the first phase. In a phase with another sequence length,
    samples of that length are used as well, with about as many tokens. `tasks` are the settings by which checkpoints
    are scored on benchmark tasks (null: they are not scored).
    """

    every: int = 100
    windows: int = 64
    tasks: TaskScoringConfig | None = None

    def check(self) -> None:
        if self.every < 1 or self.windows < 1:
            raise ValueError("every and windows must be at least 1")


@dataclass(frozen=True)
class SampleConfig:
    """Settings of the sample of text that the model generates at the end of training. The sample has up to `tokens`
    tokens (0: no sample) after `prompt`, and ends before an end-of-text token. Each token is drawn from the `top_k`
    likeliest ones; with `temperature` 0 it is always the likeliest one."""

    prompt: str = "The"
    tokens: int = 64
    temperature: float = 0.8
    top_k: int = 50

    def check(self) -> None:
        if self.tokens < 0 or self.temperature < 0 or self.top_k < 1:
            raise ValueError("tokens and temperature must be ≥ 0, top_k ≥ 1")


@dataclass(frozen=True)
class TriggerConfig:
    """Settings of what triggers a rewind (training goes back to a checkpoint and skips data). There are two triggers:

    * `skips` skipped updates within `within` steps (null: off);
    * a loss that is too high for `for` steps in a row, that is, more than `loss_above` nats above the mean loss of the
      last accepted steps (null: off). StabilityConfig's `window` is the number of these steps. The trigger is off at
      the beginning of each phase, until `warm` steps are accepted.

    An accepted step is one whose update was not skipped.
    """

    skips: int | None = None
    within: int = 50
    loss_above: float | None = None
    for_: int = 20

    def check(self) -> None:
        if self.skips is None and self.loss_above is None:
            raise ValueError("give skips or loss_above (or both)")
        if self.skips is not None and not 1 <= self.skips <= self.within:
            raise ValueError("skips must lie between 1 and within")
        if (self.loss_above is not None and self.loss_above <= 0) or self.for_ < 1:
            raise ValueError("loss_above must be > 0, for at least 1")

    @property
    def span(self) -> int:
        """The largest number of steps from the first suspect step to the one at which the trigger fires, both
        included."""
        return max(self.within if self.skips else 0, self.for_ if self.loss_above else 0)


@dataclass(frozen=True)
class RewindConfig:
    """Settings of rewinds. When `trigger` fires, training goes back to a checkpoint, and skips the data of `skip`
    steps. The first suspect step is in the middle of the skipped steps.

    Training goes back to the latest checkpoint before all of the skipped steps. If there is none, it goes back to the
    oldest checkpoint, and skips only the steps after it. It ends with an error if even the oldest checkpoint is not
    before the first suspect step, or when a run needs more than `budget` rewinds. Without any checkpoint, training goes
    back to its start.
    """

    trigger: TriggerConfig = field(default_factory=lambda: TriggerConfig(skips=3))
    skip: int = 200
    budget: int = 5

    def check(self) -> None:
        if self.budget < 1 or self.skip < 2 * self.trigger.span:
            raise ValueError(f"budget must be at least 1, skip at least {2 * self.trigger.span}: twice the steps it "
                             f"may take to notice (within, for), since the first suspect step is in its middle")


@dataclass(frozen=True)
class StabilityConfig:
    """Settings against loss spikes. The update of a step is skipped if the step's loss or gradient norm is not finite
    or is an outlier. An outlier is more than `sigma` standard deviations above the mean over the last `window` accepted
    steps (those whose update was not skipped). Only steps of the same phase are compared, because each phase has its
    own data mixture. So outliers are recognised only once a phase has `warm` accepted steps. If `sigma` is null, there
    are no outliers.

    Training ends with an error after `in_a_row` skipped updates in a row, or after `most` skipped updates within
    `window` steps. `rewind` makes training go back before a spike (null: it does not). The `worst_rows` samples with
    the highest loss are recorded in worst_rows.jsonl whenever a line is printed (`log_every`) or a checkpoint is
    written (0: none).
    """

    sigma: float | None = 6.0
    window: int = 128
    warm: int = 128
    in_a_row: int = 5
    most: int = 20
    rewind: RewindConfig | None = None
    worst_rows: int = 20

    def check(self) -> None:
        if self.sigma is not None and self.sigma <= 0:
            raise ValueError("sigma must be > 0, or null")
        if min(self.window, self.warm) < 2 or min(self.in_a_row, self.most) < 1 or self.worst_rows < 0:
            raise ValueError("window and warm must be at least 2, in_a_row and most at least 1, worst_rows at least 0")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training, from the recipe's section `train:`. Sequence length, batch size and data mixture are
    set elsewhere: in the curriculum, for each phase of the training.

        skip         ranges [first, stop) of steps, numbered as printed, that are skipped. When a training resumes, the
                     ranges of later steps may be changed
        seed         determines the initial values
        clip         the largest gradient norm; larger gradients are scaled down
        micro_batch  the largest number of tokens that a rank computes at once, but at least one sample. A smaller
                     number needs less memory
        precision    dtype of matrix products (`auto`: bf16 on CUDA, fp32 on CPU)
        compile      whether each layer is compiled (`auto`: on CUDA, if Triton is installed)
        log_every    the number of steps between two printed lines (metrics.jsonl has a line for every step). On CUDA
                     also the largest number of steps between two synchronisations
        fetch        how a run in object storage gets its tokens. `all` copies them to the disk before the first step;
                     `ahead` reads each sample a few steps before it is needed; `auto` copies them if the disk has room
    """

    model: ModelConfig
    optimizer: OptimizerConfig = field(default_factory=default)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    init: InitConfig = field(default_factory=InitConfig)
    skip: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    clip: float = 1.0
    micro_batch: Count = MICRO_BATCH
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: Literal["auto", True, False] = "auto"
    log_every: int = 10
    fetch: Literal["auto", "all", "ahead"] = "auto"

    def check(self) -> None:
        self.parallel.refuse(self.model)
        if self.clip <= 0 or self.micro_batch < 1 or self.log_every < 1:
            raise ValueError("clip must be > 0, micro_batch and log_every at least 1")
        if self.checkpoint.keep_best and self.checkpoint.every % self.evaluate.every:
            raise ValueError("checkpoint.keep_best: only a checkpoint with an evaluation can be the best: let "
                             "checkpoint.every be a multiple of evaluate.every")
        if self.evaluate.tasks is not None and self.evaluate.tasks.every % self.checkpoint.every:
            raise ValueError("evaluate.tasks.every: only checkpoints are scored: let it be a multiple of "
                             f"checkpoint.every ({self.checkpoint.every})")
        if not all(1 <= first < stop for first, stop in self.skip):
            raise ValueError("skip is a list of [first, stop] step numbers from 1, stop itself being performed")

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the losses, apart from rounding. They must not change when a training
        resumes.

        `stability` and `skip` also affect the losses, but are left out, because a person must be able to change them
        when training goes wrong. What they have caused so far is recorded in the checkpoint and in ledger.jsonl.
        `Ledger.declare` refuses a `skip` that names a step already performed.
        """
        return {"model": self.model.identity(), "optimizer": asdict(self.optimizer), "schedule": asdict(self.schedule),
                "loss.z": self.loss.z, "loss.repeats": self.loss.repeats and asdict(self.loss.repeats),
                "seed": self.seed, "clip": self.clip, "precision": self.precision,
                **({"fp8": True} if self.parallel.fp8 else {}),
                **({"init.from": self.init.from_} if self.init.from_ else {})}
