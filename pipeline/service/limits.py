"""Limits the rate of requests from each network address. The state is kept in memory, so a restarted server has
forgotten earlier requests.
"""

from __future__ import annotations

from collections import OrderedDict

from pipeline.base.clock import SYSTEM, Clock

ADDRESSES = 10_000       # most buckets in memory; the one that was used least recently is forgotten first


class RateBuckets:
    """Limits requests from each network address by a token bucket: `burst` requests are allowed at once, and `rate` per
    second on average."""

    def __init__(self, rate: float, burst: int, clock: Clock = SYSTEM) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def empty(self, address: str) -> bool:
        """Return whether the token bucket of an address is empty, so that a request from it would be refused."""
        return self._now(address) < 1.0

    def take(self, address: str) -> bool:
        """Take one token from the token bucket of an address, for a request from it. Returns False if the bucket is
        empty."""
        left = self._now(address)
        if left < 1.0:
            return False
        self._left[address] = left - 1.0, self._clock.now()
        self._left.move_to_end(address)
        if len(self._left) > ADDRESSES:
            self._left.popitem(last=False)
        return True

    def _now(self, address: str) -> float:
        left, at = self._left.get(address, (float(self._burst), self._clock.now()))
        return min(float(self._burst), left + (self._clock.now() - at) * self._rate)
