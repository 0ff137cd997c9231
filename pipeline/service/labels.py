"""Stores the labels that people give to documents of a dataset: good, bad or unsure.

    labels/DATASET/00000001.json    one label: of which document, by whom, and which text was read

Each label is a separate file, created under the first free number and never changed. If a person labels a document
again, another file is added, and only this person's last label of the document counts. So no label is lost when two
people label at the same time, and all servers of a store count the same labels.

A file holds only a hash of the text that was read. So no copy of a document stays when the document is removed from the
store.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal, get_args

from pipeline.base.clock import SYSTEM, Clock
from pipeline.cluster.attempts import utc_now
from pipeline.cluster.sealed import OtherFormat, Unsound, opened, sealed
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store

FORMAT = 1
Name = Literal["good", "bad", "unsure"]
NAMES: tuple[Name, ...] = get_args(Name)
_FILE = re.compile(r"(\d{8})\.json")


class DamagedLabel(StoreError):
    """Raised when a file that holds a label is damaged, or was written by another version of Tokenmill."""


@dataclass(frozen=True)
class Label:
    """The label (good, bad or unsure) that the person `by` gave to a document. `text` is a hash of the text that the
    person read (`pipeline.service.label_routes.text_hash`). `run` is the run from which the document was drawn, and
    `at` the time of the label."""

    document: str
    label: Name
    by: str
    text: str
    run: str = ""
    at: str = ""


class Labels:
    """Reads and writes the labels that people give to the documents of one dataset. Thread-safe. Labels stay in memory
    once they are read, because their files never change."""

    def __init__(self, store: Store, dataset: str, clock: Clock = SYSTEM) -> None:
        self._store, self._folder, self._clock = store, f"labels/{dataset}", clock
        self._labels: list[Label] = []
        self._next = 0                                        # the first free number; 0 until the store was listed
        self._lock = threading.Lock()

    def all(self) -> list[Label]:
        """Return all labels of the dataset, in the order in which they were given, including those that other servers
        have just added."""
        with self._lock:
            self._read_on()
            return list(self._labels)

    def put(self, label: Label) -> Label:
        """Store a label as a new file, and return it with the present time. Nothing is written if this person's last
        label of the document has the same value (good, bad or unsure) and the same text; that label is then
        returned."""
        with self._lock:
            while True:
                self._read_on()
                last = next((old for old in reversed(self._labels)
                             if (old.document, old.by) == (label.document, label.by)), None)
                if last is not None and (last.label, last.text) == (label.label, label.text):
                    return last
                new = Label(**{**asdict(label), "at": utc_now(self._clock)})
                if self._store.put_absent(self._name(self._next), sealed(asdict(new), FORMAT)):
                    self._labels.append(new)
                    self._next += 1
                    return new

    def _read_on(self) -> None:
        """Read the files of labels that this or another server has added since the last call."""
        if not self._next:
            numbers = [int(m[1]) for path in self._store.list(self._folder)
                       if (m := _FILE.fullmatch(path.rpartition("/")[2]))]
            last = max(numbers, default=0)                    # a listing may lack recent files
            self._labels = [label for label in self._store.map(self._load, range(1, last + 1)) if label is not None]
            self._next = last + 1
        while (label := self._load(self._next)) is not None:
            self._labels.append(label)
            self._next += 1

    def _load(self, number: int) -> Label | None:
        try:
            document = opened(self._store.read(self._name(number)), FORMAT)
            label = Label(**{k: v for k, v in document.items() if k != "format"})
        except FileNotFoundError:
            return None
        except Unsound as e:
            raise DamagedLabel(f"{self._store.at(self._name(number))} {e}; restore it from a copy, or remove "
                               f"it") from None
        except (OtherFormat, TypeError):
            raise DamagedLabel(f"{self._name(number)} was written by another version of Tokenmill; use that "
                               f"version") from None
        return label

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:08d}.json"


# -- what labels say -------------------------------------------------------------------------------------------------
def latest(labels: Iterable[Label]) -> dict[str, dict[str, Label]]:
    """Return only the labels that count, as {document: {person: label}}. If a person has labelled a document several
    times, the last label counts."""
    result: dict[str, dict[str, Label]] = {}
    for label in labels:
        result.setdefault(label.document, {})[label.by] = label
    return result


def decided(by_person: Mapping[str, Label]) -> str:
    """Combine the labels that several people gave to one document. Returns `good` or `bad` if at least one person says
    so and nobody says the opposite. Returns `disagreed` if people say both, and `unsure` if everybody is unsure."""
    names = {label.label for label in by_person.values()} - {"unsure"}
    return "unsure" if not names else "disagreed" if len(names) > 1 else names.pop()


def summary(labels: Iterable[Label], most: int) -> dict[str, Any]:
    """Return, as JSON:

    - how many documents have which label
    - what each person has labelled
    - how far each pair of people agrees
    - the first `most` documents on which people disagree

    `kappa` is Cohen's kappa (1960) of two people: 1 for full agreement, 0 for as much agreement as chance would bring.
    It is None if chance alone would make them agree on everything. It is computed from the documents that both people
    have called good or bad.
    """
    of = latest(labels)
    outcomes = Counter(decided(by) for by in of.values())
    people: dict[str, Counter[str]] = {}
    for by in of.values():
        for person, label in by.items():
            people.setdefault(person, Counter())[label.label] += 1
    both: dict[tuple[str, str], list[tuple[Name, Name]]] = {}
    for by in of.values():
        for a, b in combinations(sorted(person for person, label in by.items() if label.label != "unsure"), 2):
            both.setdefault((a, b), []).append((by[a].label, by[b].label))
    disagreed = [{"document": document, "labels": {person: label.label for person, label in sorted(by.items())}}
                 for document, by in of.items() if decided(by) == "disagreed"]
    return {"documents": len(of), **{name: outcomes[name] for name in (*NAMES, "disagreed")},
            "people": [{"by": person, **{name: counts[name] for name in NAMES}}
                       for person, counts in sorted(people.items())],
            "pairs": [_pair(*pair, both[pair]) for pair in sorted(both)],
            "disagreements": disagreed[:most]}


def _pair(first: str, second: str, both: list[tuple[Name, Name]]) -> dict[str, Any]:
    n, agree = len(both), sum(a == b for a, b in both)
    shares = [sum(pair[i] == "good" for pair in both) / n for i in range(2)]
    chance = shares[0] * shares[1] + (1 - shares[0]) * (1 - shares[1])
    return {"people": [first, second], "both": n, "agree": agree,
            "kappa": None if chance == 1 else round((agree / n - chance) / (1 - chance), 4)}
