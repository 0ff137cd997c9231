"""Finds the documents of each label, such as a language, in the encoded parts of shards that are split by labels
(`shards.NAME.by`). An encoded part holds the tokens of one file of documents. A piece is the place of the documents
with one label in one encoded part. The pieces are kept on disk, because there may be millions: 10,000 parts with 200
labels each have two million."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.passes.encode import SPLITS
from pipeline.passes.labels import Label
from pipeline.passes.part_tokens import LabelPiece
from pipeline.store.temp import scratch_database


class LabelPieces:
    """The places of the documents of each label in all encoded parts (token files of one part each). `parts` are the
    contents of their files labels.json, in plan order. `tokens` maps each label to its number of training tokens."""

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
        """Return where the documents with one of these labels are in the encoded parts: {split: [LabelPieces of the
        first part, LabelPieces of the second part, …]}. `assemble_drafts` takes this form."""
        pieces: dict[str, list[list[LabelPiece]]] = {split: [[] for _ in range(self._parts)] for split in SPLITS}
        for label in sorted(labels):
            for split, part, place in self._db.execute("SELECT split, part, place FROM piece WHERE label = ?",
                                                       (self._numbers[label],)):
                pieces[SPLITS[split]][part].append(LabelPiece(*json.loads(place)))
        return pieces
