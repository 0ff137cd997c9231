"""Reads the log of a run's driver (the process that leads the run) in pieces. A client keeps a place in the log, from
which it reads on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.base.visible import visible
from pipeline.cluster.attempts import LogReader, piece_name, standing
from pipeline.service.outward import cluster_addresses, outward_text
from pipeline.service.problems import HttpProblem
from pipeline.service.stores import inside
from pipeline.store.fs import Store


@dataclass(frozen=True)
class LogPlace:
    """A place in the logs of a run: the attempt, the number of a piece (file) of this attempt's log, and a byte offset
    in the piece. As text, it is `attempt-piece-offset`."""

    attempt: int
    piece: int = 1
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}-{self.piece}-{self.offset}"

    @classmethod
    def parse(cls, text: str, key: str) -> LogPlace | None:
        """Return the place that `text` denotes, or None for "". Raises HttpProblem for a text that denotes no place;
        the problem names the parameter `key`."""
        if not text:
            return None
        match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})-([0-9]{1,12})", text)
        if match is None or match[2].strip("0") == "":
            raise HttpProblem(400, "Not a place in a log", visible(text), key,
                              "give an id that this server gave, or none")
        return cls(*map(int, match.groups()))


@dataclass(frozen=True)
class LogStretch:
    """A passage of a log. `next` is the place where it ends and the following passage begins. `complete` says that the
    run has ended and nothing follows."""

    text: str
    next: LogPlace
    complete: bool


def read_log(store: Store, run: str, place: LogPlace | None) -> LogStretch:
    """Read the log of a run from `place` on, at most one piece (file) of it. If `place` is None, read from the
    beginning of the latest attempt's log (an attempt is one execution of the run). When the log of an earlier attempt
    is at its end, `next` is the beginning of the following attempt's log. Raises HttpProblem for a run that has no log
    because it was started in a terminal."""
    current = standing(store, run)
    place = place or LogPlace(max(current.attempt, 1))
    if not store.exists(piece_name(run, place.attempt, 1)) and current.facts.get("how") == "local":
        raise HttpProblem(404, "No log", f"the run {run!r} was started in a terminal, and its output went there", "run",
                          "follow the run itself")
    reader = LogReader(store, run, place.attempt, check=lambda piece: inside(store, piece))
    reader.piece, reader.offset = place.piece, place.offset
    text = next(reader.more(), "")
    if not text and place.attempt < current.attempt:
        return LogStretch("", LogPlace(place.attempt + 1), False)
    end = LogPlace(place.attempt, reader.piece, reader.offset)
    addresses = cluster_addresses(current.facts)
    return LogStretch(visible(outward_text(text, addresses)), end,
                      not text and current.ended and place.attempt >= current.attempt)
