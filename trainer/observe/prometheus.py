"""Writes trainer.prom: the latest numbers in Prometheus' text format, for node_exporter's textfile collector.

The trainer opens no port. `node_exporter --collector.textfile.directory=OUT` exports the file; a link to the file in a
directory that node_exporter already watches works too. A new file is renamed over the old one, so that a partial file
is never read. All metric names begin with `tokenmill_train_` and include the unit; all samples have the label `run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.base.files import replace

PREFIX = "tokenmill_train_"


class MetricFormat(NamedTuple):
    """How a value of the training becomes a Prometheus metric. Values are in a nested mapping.

        kind   gauge or counter
        key    the dotted path to the value in the mapping. A value may itself be a mapping; each of its entries then
               becomes a sample
        label  name of the label of these samples; the label's value is the key of the entry
        field  key of the number, if an entry is itself a mapping
    """

    name: str
    kind: str
    help: str
    key: str
    label: str = ""
    field: str = ""


METRICS = (
    MetricFormat("step", "gauge", "Steps done.", "step"),
    MetricFormat("tokens_total", "counter", "Targets read (falls when a training goes back).", "tokens"),
    MetricFormat("tokens_planned", "gauge", "Targets of the whole curriculum.", "planned"),
    MetricFormat("loss_nats", "gauge", "Training loss, nats per token.", "loss"),
    MetricFormat("stream_loss_nats", "gauge", "Training loss of each stream.", "streams", "stream"),
    MetricFormat("z_squared", "gauge", "Mean of log Z squared (what the z-loss punishes).", "z"),
    MetricFormat("gradient_norm", "gauge", "Global gradient norm before clipping.", "grad_norm"),
    MetricFormat("parameter_norm", "gauge", "Norm of all parameters.", "parameter_norm"),
    MetricFormat("update_ratio", "gauge", "Norm of a step's update over the norm of the parameters.", "updates",
                 "group", "ratio"),
    MetricFormat("update_norm", "gauge", "Norm of a step's update.", "updates", "group", "update_norm"),
    MetricFormat("learning_rate", "gauge", "Learning rate.", "lr"),
    MetricFormat("tokens_per_second", "gauge", "Targets per second, without evaluation, checkpoints and compilation.",
                 "tokens_per_s"),
    MetricFormat("flops_per_second", "gauge", "Model FLOPs per second of all devices.", "flops_per_s"),
    MetricFormat("mfu_ratio", "gauge", "Step MFU: without evaluation, checkpoints and compilation.", "mfu"),
    MetricFormat("wall_mfu_ratio", "gauge", "Wall MFU: over all the wall time, restarts included.", "wall_mfu"),
    MetricFormat("goodput_ratio", "gauge", "Share of the wall time spent on steps that count.", "goodput_share"),
    MetricFormat("wall_seconds_total", "counter", "Wall time by cause.", "wall", "cause"),
    MetricFormat("data_wait_seconds", "gauge", "Time a step waited for its batch since the last line, over ranks.",
                 "data_wait_s", "quantile"),
    MetricFormat("critical_batch_tokens", "gauge", "Gradient noise scale (B_simple).", "noise.critical_batch_tokens"),
    MetricFormat("host_memory_bytes", "gauge", "Resident memory of the largest rank.", "host_memory_bytes"),
    MetricFormat("gpu_memory_bytes", "gauge", "Peak allocated GPU memory of the largest rank.", "gpu_memory_bytes"),
    MetricFormat("gpu_reserved_bytes", "gauge", "GPU memory the allocator holds.", "gpu_reserved_bytes"),
    MetricFormat("gpu_temperature_celsius", "gauge", "Hottest GPU.", "gpu_temperature_c"),
    MetricFormat("gpu_utilization_ratio", "gauge", "Mean GPU utilisation.", "gpu_utilization"),
    MetricFormat("gpu_power_watts", "gauge", "Power of all GPUs.", "gpu_power_w"),
    MetricFormat("straggler_ratio", "gauge", "Time of a fixed piece of work: slowest rank over the median.",
                 "straggler.ratio"),
    MetricFormat("skipped_steps_total", "counter", "Steps whose update was skipped.", "skips"),
    MetricFormat("spike_score_ratio", "gauge", "Share of the last 1000 steps out of all proportion.", "spike_score"),
    MetricFormat("checkpoint_seconds", "gauge", "Time the last checkpoint took.", "checkpoint_s"),
    MetricFormat("checkpoint_step", "gauge", "Step of the last checkpoint.", "checkpoint_step"),
    MetricFormat("heldout_loss_nats", "gauge", "Held-out loss, nats per token.", "heldout"),
    MetricFormat("heldout_stream_loss_nats", "gauge", "Held-out loss of each stream.", "heldout_streams", "stream",
                 "loss"),
    MetricFormat("heldout_bits_per_byte", "gauge", "Held-out bits per byte of each stream.", "heldout_streams",
                 "stream", "bits_per_byte"),
    MetricFormat("task_score", "gauge", "Latest score on each task: bits per byte, or else an accuracy.", "tasks",
                 "task", "value"),
    MetricFormat("ranks", "gauge", "Processes.", "world"),
    MetricFormat("alert", "gauge", "1 while the alert stands.", "alerts", "rule"),
    MetricFormat("updated_timestamp_seconds", "gauge", "When this file was written.", "time"),
)


def render(run: str, values: Mapping[str, Any]) -> str:
    """Return the text of the Prometheus file of a run, with the latest values. A metric whose value is missing or not a
    finite number is left out, with its HELP and TYPE lines."""
    lines = []
    for metric in METRICS:
        samples = list(labelled_numbers(metric, values))
        if samples:
            lines += [f"# HELP {PREFIX}{metric.name} {metric.help}", f"# TYPE {PREFIX}{metric.name} {metric.kind}"]
            for label, number in samples:
                more = f',{metric.label}="{escape(label)}"' if metric.label else ""
                lines.append(f'{PREFIX}{metric.name}{{run="{escape(run)}"{more}}} {number!r}')
    return "\n".join(lines) + "\n"


def labelled_numbers(metric: MetricFormat, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (value of the label, number) for each sample of `metric` in `values`. The label is '' for a metric without
    one. Values that are missing or not finite numbers are left out."""
    value: Any = values
    for part in metric.key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    for label, number in value.items() if metric.label and isinstance(value, Mapping) else [("", value)]:
        if metric.field and isinstance(number, Mapping):
            number = number.get(metric.field)
        if isinstance(number, (bool, int, float)) and math.isfinite(number):
            yield str(label), float(number)


def escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Textfile:
    """Keeps the latest values of all metrics of a run, and writes them to `path` in Prometheus' text format."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.values: dict[str, Any] = {}

    def update(self, values: Mapping[str, Any]) -> None:
        """Set the latest values of metrics to `values`. Values that are None are ignored, and metrics that are not in
        `values` keep their value."""
        self.values |= {key: value for key, value in values.items() if value is not None}

    def write(self) -> None:
        replace(self.path, render(self.run, self.values))
