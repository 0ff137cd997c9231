"""Which faults happen in a history: drawn from its seed, site by site, so that leaving one out moves no other."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

#: (kind of fault, its probability)
Odds = Sequence[tuple[str, float]]


class Faults:
    """A site is a place where something may go wrong. Its n-th decision depends on the seed, its name and n alone."""

    def __init__(self, seed: int, only: Collection[str] | None = None) -> None:
        """`only`: the names of the faults that may happen; None: all that are drawn."""
        self.seed, self.only = seed, None if only is None else frozenset(only)
        self.over = False                        # from here on nothing goes wrong any more
        self.fired: list[str] = []
        self._random: dict[str, random.Random] = {}
        self._count: Counter[str] = Counter()
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    def random(self, site: str) -> random.Random:
        """The stream of random numbers of a site."""
        if site not in self._random:
            self._random[site] = random.Random(f"{self.seed} {site}")
        return self._random[site]

    def pick(self, site: str, odds: Odds) -> str:
        """The fault that happens now at `site`, "" for none."""
        self._count[site] += 1
        draw = self.random(site).random()
        for kind, probability in odds:
            if draw < probability:
                return kind if self.happens(f"{site}#{self._count[site]}:{kind}") else ""
            draw -= probability
        return ""

    def happens(self, name: str) -> bool:
        """Whether the fault of this name, which was drawn, takes place."""
        if self.over or (self.only is not None and name not in self.only):
            return False
        self.fired.append(name)
        self._counts[name.partition("#")[0]][name.rpartition(":")[2]] += 1
        return True

    def count(self, site: str, *kinds: str) -> int:
        """How many faults took place at sites that begin with `site`: of these kinds, or of all."""
        return sum(n for name, counts in self._counts.items() if name.startswith(site)
                   for kind, n in counts.items() if not kinds or kind in kinds)
