"""Answers one request in a process of its own, which the server starts for work that may hang, crash or be attacked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn


def answer_request(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> NoReturn:
    """Read a request from standard input, write what `handle` returns for it to standard output, both as JSON, and end
    this process. What other code prints in between goes to standard error, so it is no part of the answer. Threads that
    it has started are not waited for."""
    request = json.loads(sys.stdin.buffer.read())
    answer = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    answer.write(json.dumps(handle(request)))
    answer.flush()
    os._exit(0)
