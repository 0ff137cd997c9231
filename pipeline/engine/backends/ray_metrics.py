"""Exports the metrics of a run through Ray, on the metrics port of the driver's machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

from pipeline.engine.driver.metrics import samples

TINY = sys.float_info.min        # a counter accepts no zero


class Exporter:
    """Hands a run's metrics to Ray. Ray exports them within about ten seconds, and drops them when this process
    ends."""

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | Gauge] = {}
        self._counted: dict[tuple[str, ...], float] = {}       # amounts already added to the counters

    def export(self, run: str, snapshot: Mapping[str, Any], nodes_lost: int) -> None:
        for metric, labels, value in samples(run, snapshot, nodes_lost):
            if metric.name not in self._metrics:
                make = Counter if metric.kind == "counter" else Gauge
                self._metrics[metric.name] = make(metric.name, metric.help, metric.labels)
            shown, key = self._metrics[metric.name], (metric.name, *labels.values())
            if isinstance(shown, Gauge):
                shown.set(value, labels)
                continue
            # a counter must exist before the first event: `increase()` sees only its growth
            before = self._counted.get(key)
            if before is None or value > before:
                shown.inc(max(value - (before or 0.0), TINY), labels)
                self._counted[key] = value
