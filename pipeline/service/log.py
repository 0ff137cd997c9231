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
    """A place in the logs of a run. It has the number of the attempt (one execution of the run), the number of a piece
    (file) of this attempt's log, and a byte offset in the piece. As text, it is `attempt-piece-offset`."""

    attempt: int
    piece: int = 1
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}-{self.piece}-{self.offset}"

    @classmethod
    def parse(cls, text: str, key: str) -> LogPlace | None:
        """Return the place in a run's log that `text` denotes, or None for "". Raises HttpProblem, which names the
        parameter `key`, for a text that denotes no place."""
        if not text:
            return None
        match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})-([0-9]{1,12})", text)
        if match is None or match[2].strip("0") == "":
            raise HttpProblem(400, "Not a place in a log", visible(text), key,
                              "give an id that this server gave, or none")
        return cls(*map(int, match.groups()))


@dataclass(frozen=True)
class LogStretch:
    """A passage of a run's log. `next` is the place in the log where this passage ends and the following one begins.
    `complete` says that the run has ended and nothing follows."""

    text: str
    next: LogPlace
    complete: bool


def read_log(store: Store, run: str, place: LogPlace | None) -> LogStretch:
    """Return the text of a run's log from `place` to the end of the piece (one of the files of the log). If `place` is
    None, the text begins with the log of the latest attempt (one execution of the run).

    `next` of the result is where the next call must begin. At the end of an earlier attempt's log, this is the
    beginning of the following attempt's log. Raises HttpProblem for a run that has no log because it was started in a
    terminal.
    """
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
