"""Gives tests the generators and the scoring of benchmarks/pii.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from pii import GENERATED, score
from pii_cases import Case, cases
from pii_ids import ids

__all__ = ["GENERATED", "Case", "cases", "ids", "score"]
