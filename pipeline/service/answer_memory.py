"""Remembers answers to queries about a dataset. So the parts (data files) of the dataset need not be read again for the
same query, or for the next page of its answer.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any

#: characters of all answers that are kept, written as Python values; in memory they take up to five times as many bytes
MOST_CHARACTERS = 16 << 20


class AnswerMemory:
    """Keeps answers to questions about datasets in the memory of this process, up to `most` characters in all. Beyond
    this, the answers that were used longest ago are forgotten. The key of an answer is the question and a hash of the
    list of the dataset's parts (data files).

    A remembered answer is never out of date: a part never changes, and a dataset that is published anew has another
    list of parts. Callers must not change an answer.
    """

    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._most, self._characters = most, 0
        self._answers: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, parts_hash: bytes, question: tuple[Any, ...]) -> Any:
        """Return the remembered answer to a question about a list of parts (data files) with the hash `parts_hash`.
        Returns None if the answer is not remembered."""
        key = _key(parts_hash, question)
        with self._lock:
            if key not in self._answers:
                return None
            self._answers.move_to_end(key)
            return self._answers[key][0]

    def put(self, parts_hash: bytes, question: tuple[Any, ...], answer: Any) -> None:
        """Remember an answer to a question about a list of parts (data files) with the hash `parts_hash`. If this makes
        the answers too long in all, those that were used longest ago are forgotten. An answer that alone would take
        more than a quarter of the memory is not remembered."""
        key, size = _key(parts_hash, question), len(repr(answer))
        if size > self._most // 4:
            return
        with self._lock:
            self._characters += size - self._answers.pop(key, (None, 0))[1]
            self._answers[key] = answer, size
            while self._characters > self._most:
                self._characters -= self._answers.popitem(last=False)[1][1]


def _key(parts_hash: bytes, question: tuple[Any, ...]) -> bytes:
    return hashlib.blake2b(parts_hash + repr(question).encode("utf-8", "surrogatepass"), digest_size=16).digest()
