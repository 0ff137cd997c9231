"""Says where the documents of each label are in the encoded parts (files of encoded documents) of split shards
(`shards.NAME.by`). A piece is the documents of one label in one part. The pieces are kept on disk, because there may be
millions: 10,000 parts with 200 labels each have two million."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.passes.encode import SPLITS
from pipeline.passes.labels import Label
from pipeline.passes.part_tokens import LabelPiece
from pipeline.store.temp import scratch_database


class LabelPieces:
    """The pieces of all encoded parts. `parts` are the contents of their files labels.json, in plan order. `tokens` has
    the training tokens of each label."""

    def __init__(self, parts: Iterable[Mapping[str, Any]]) -> None:
        self.tokens: dict[Label, int] = {}
        self._numbers: dict[Label, int] = {}
        self._parts = 0
        self._db = scratch_database()
        self._db.execute("CREATE TABLE piece (label INTEGER, split INTEGER, part INTEGER, place TEXT, "
                         "PRIMARY KEY (label, split, part)) WITHOUT ROWID")
        for part in parts:
            self._add(part)

    def _add(self, part: Mapping[str, Any]) -> None:
        rows = []
        for number, split in enumerate(SPLITS):
            for label, place in part[split]:
                piece, label = LabelPiece(*place), tuple(label)
                self.tokens[label] = self.tokens.get(label, 0) + (piece.stop - piece.first if split == "train" else 0)
                rows.append((self._numbers.setdefault(label, len(self._numbers)), number, self._parts,
                             json.dumps(piece)))
        self._db.executemany("INSERT INTO piece VALUES (?, ?, ?, ?)", rows)
        self._parts += 1

    def of(self, labels: Sequence[Label]) -> dict[str, list[list[LabelPiece]]]:
        """Return the pieces of the documents with one of these labels, as {split: [pieces of the first part, pieces of
        the second part, …]}, the form that `assemble_drafts` takes."""
        pieces: dict[str, list[list[LabelPiece]]] = {split: [[] for _ in range(self._parts)] for split in SPLITS}
        for label in sorted(labels):
            for split, part, place in self._db.execute("SELECT split, part, place FROM piece WHERE label = ?",
                                                       (self._numbers[label],)):
                pieces[SPLITS[split]][part].append(LabelPiece(*json.loads(place)))
        return pieces
