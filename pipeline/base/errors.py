"""The base class of Tokenmill's errors: problems that a user can fix. Their messages name the file, the key and the
remedy."""

from __future__ import annotations

from typing import ClassVar


class TokenmillError(Exception):
    """A problem that the user can fix, shown as one line without a traceback. `exit_code` is the exit status of the
    command. It is 1 when a run failed, and 2 when the usage or the recipe is wrong, so that nothing was run."""

    exit_code: ClassVar[int] = 1
