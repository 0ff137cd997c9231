"""The main function of a process that answers one request. The server starts such a process for work that may hang,
crash or be attacked.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn


def answer_request(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> NoReturn:
    """Read a request (JSON) from standard input, call `handle` on it, write the result as JSON to standard output, and
    end this process. What other code prints meanwhile goes to standard error and does not become part of the answer.
    The process does not wait for threads that are still running."""
    request = json.loads(sys.stdin.buffer.read())
    answer = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    answer.write(json.dumps(handle(request)))
    answer.flush()
    os._exit(0)
