"""The root of our errors: what a user can mend, in a message that says file, key and remedy."""

from __future__ import annotations

from typing import ClassVar


class TokenmillError(Exception):
    """Shown as one line, without a traceback. `exit_code` of the command: 1 failed; 2 bad usage or a bad recipe, of
    which nothing was run."""

    exit_code: ClassVar[int] = 1
