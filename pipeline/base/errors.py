"""The root of our errors: problems a user can fix. The message names file, key and remedy."""

from __future__ import annotations

from typing import ClassVar


class TokenmillError(Exception):
    """Shown as one line, without a traceback. `exit_code` is that of the command: 1 when it failed, 2 for bad usage or
    a bad recipe, when nothing was run."""

    exit_code: ClassVar[int] = 1
