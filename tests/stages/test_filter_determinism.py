"""The result of a chain of filters does not depend on hash seeds, on the order of documents, or on what a process has
seen before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from stages.catalog import stage_class
from stages.document import Document
from tests.stages.texts import AWKWARD, random_texts, real_texts
from stages.text import words
order, capacity = int(sys.argv[1]), int(sys.argv[2])
words.VOCABULARIES.capacity = capacity
chain = [stage_class(name)() for name in ("gopher_repetition", "gopher_quality", "c4", "fineweb", "pii")]
texts = list(enumerate([*AWKWARD, *random_texts(30, seed=31), *real_texts(40)]))
out = {}
for i, text in texts[::order]:
    for alone in [[stage] for stage in chain] + [chain]:
        doc = Document(str(i), text)
        reasons = []
        for stage in alone:
            reasons.append(stage.process(doc))
            if reasons[-1] is not None:
                break
        out[f"{i} {alone[0].name} {len(alone)}"] = [reasons, doc.text, doc.signals]
print(json.dumps(out, sort_keys=True))
"""


def outcome(seed: str, order: int, capacity: int) -> str:
    env = dict(os.environ, PYTHONHASHSEED=seed, PYTHONPATH=str(ROOT))
    return subprocess.run([sys.executable, "-c", PROGRAM, str(order), str(capacity)], env=env, cwd=ROOT, check=True,
                          capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def expected():
    return outcome("0", 1, 1_000_000)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "order", "capacity"), [("1", 1, 1_000_000), ("7", -1, 300)])
def test_same_result(expected, seed, order, capacity):
    assert json.loads(outcome(seed, order, capacity)) == json.loads(expected)
