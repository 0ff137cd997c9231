"""The attempts at tasks that are in flight: handed to the backend, and not ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass

from pipeline.base.clock import Clock
from pipeline.engine.driver.losses import BaseRate
from pipeline.engine.task import TaskSpec


@dataclass(frozen=True)
class Flight:
    """An attempt at a task that was handed to the backend and has not ended. `started` is the time on the scheduler's
    clock, in seconds, at which it was handed over. An attempt that was handed over in advance begins to run later."""

    spec: TaskSpec
    started: float


class Flights(Mapping[int, Flight]):
    """The attempts in flight, by their ids. Ids follow the order of starts. The statistics of losses (`base_rates`)
    belong to a class of machines: to all tasks that declare the same share of GPUs and the same kind of CPU."""

    def __init__(self, clock: Clock) -> None:
        self.latest = 0                              # id of the attempt that began last
        self.base_rates: dict[tuple[float, str], BaseRate] = defaultdict(BaseRate)
        self._clock = clock
        self._flights: dict[int, Flight] = {}
        self._attempts: dict[str, list[int]] = {}    # ids of a task's attempts, by its key

    def __getitem__(self, id: int) -> Flight:
        return self._flights[id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._flights)

    def __len__(self) -> int:
        return len(self._flights)

    def values(self) -> ValuesView[Flight]:
        return self._flights.values()                # that of Mapping looks up each id

    def attempts(self, key: str) -> list[int]:
        """Returns the ids of the attempts in flight at the task `key`."""
        return list(self._attempts.get(key, ()))

    def begin(self, spec: TaskSpec) -> int:
        """Note that an attempt at a task begins. Returns its id."""
        self.latest += 1
        flight = self._flights[self.latest] = Flight(spec, self._clock.now())
        self._attempts.setdefault(spec.key, []).append(self.latest)
        self.base_rates[spec.gpus, spec.cpu].began(flight.started)
        return self.latest

    def end(self, ids: Iterable[int]) -> list[Flight]:
        """Remove attempts, and return them. Ids of attempts that are not in flight are ignored."""
        landed, now = [], self._clock.now()
        for id in ids:
            if (flight := self._flights.pop(id, None)) is not None:
                landed.append(flight)
                spec = flight.spec
                self._attempts[spec.key].remove(id)
                if not self._attempts[spec.key]:
                    del self._attempts[spec.key]
                self.base_rates[spec.gpus, spec.cpu].ended(flight.started, now)
        return landed
