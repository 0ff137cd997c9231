"""Says who starts a run, and with which Tokenmill and Python. run.json keeps it with each attempt, and the report shows
it, so that a report that is passed on still says where it came from."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from stages.scrub.pii import scrub_text

#: environment variables that may hold the author's name, the first that is set counts
AUTHOR_VARIABLES = ("TOKENMILL_AUTHOR", "GIT_AUTHOR_NAME")
#: most characters of an author's name
LONGEST = 100
#: seconds that git may take
GIT_S = 5.0


def origin() -> dict[str, str]:
    """{version, python, author} of this process. `author` is left out where none is known."""
    name = author()
    return {"version": tokenmill_version(), "python": ".".join(map(str, sys.version_info[:3])),
            **({"author": name} if name else {})}


def tokenmill_version() -> str:
    """The version of the installed package; '' where Tokenmill runs from a folder that was never installed."""
    try:
        return installed_version("tokenmill")
    except PackageNotFoundError:
        return ""


def author() -> str:
    """The author's name from the environment, else from git's `user.name`; '' where neither is set. It is one line, and
    e-mail addresses and other personal data in it are masked, because reports leave the machine."""
    stated = (os.environ.get(variable, "").strip() for variable in AUTHOR_VARIABLES)
    name = next(filter(None, stated), "") or _git_name()
    return scrub_text(" ".join(name.split())[:LONGEST])


def _git_name() -> str:
    try:
        done = subprocess.run(["git", "config", "--get", "user.name"], capture_output=True, timeout=GIT_S, check=False,
                              stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):                    # there is no git
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""
