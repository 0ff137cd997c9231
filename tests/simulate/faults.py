"""Decides which faults happen in a history. Each place where faults happen has its own random numbers, so leaving out
one fault does not change the others."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

#: (kind of fault, its probability)
Odds = Sequence[tuple[str, float]]


class Faults:
    """The faults of a history. A site is a place in the simulation where something may go wrong. Its n-th decision
    depends only on the seed, its name and n."""

    def __init__(self, seed: int, only: Collection[str] | None = None) -> None:
        """`only` has the names of the faults that may happen; None means all that are drawn."""
        self.seed, self.only = seed, None if only is None else frozenset(only)
        self.over = False                        # True at the end of a history: no more faults happen
        self.fired: list[str] = []
        self._random: dict[str, random.Random] = {}
        self._count: Counter[str] = Counter()
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    def random(self, site: str) -> random.Random:
        """Return the random number generator of a site."""
        if site not in self._random:
            self._random[site] = random.Random(f"{self.seed} {site}")
        return self._random[site]

    def pick(self, site: str, odds: Odds) -> str:
        """Return the kind of fault that happens now at `site`, or ""."""
        self._count[site] += 1
        draw = self.random(site).random()
        for kind, probability in odds:
            if draw < probability:
                return kind if self.happens(f"{site}#{self._count[site]}:{kind}") else ""
            draw -= probability
        return ""

    def happens(self, name: str) -> bool:
        """Return whether the fault of this name, which was drawn, takes place. If so, it is recorded."""
        if self.over or (self.only is not None and name not in self.only):
            return False
        self.fired.append(name)
        self._counts[name.partition("#")[0]][name.rpartition(":")[2]] += 1
        return True

    def count(self, site: str, *kinds: str) -> int:
        """Return how many faults of these kinds (default: all) took place at sites whose name begins with `site`."""
        return sum(n for name, counts in self._counts.items() if name.startswith(site)
                   for kind, n in counts.items() if not kinds or kind in kinds)
