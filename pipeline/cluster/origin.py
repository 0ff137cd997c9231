"""Says who starts a run, and with which versions of Tokenmill and Python. The file run.json of a run records this for
the latest attempt. The report shows it, so that a report that is passed on still says where it came from."""

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
    """Return {version, python, author} of this process, to note who started a run. `author` is left out when it is
    unknown."""
    name = author()
    return {"version": tokenmill_version(), "python": ".".join(map(str, sys.version_info[:3])),
            **({"author": name} if name else {})}


def tokenmill_version() -> str:
    """Return the version of the installed Tokenmill package; '' when Tokenmill runs from a folder that was never
    installed."""
    try:
        return installed_version("tokenmill")
    except PackageNotFoundError:
        return ""


def author() -> str:
    """Return the user's name from the environment, or else git's `user.name`; '' when neither is set. The name is put
    on one line. E-mail addresses and other personal data in it are masked, because reports leave the machine."""
    stated = (os.environ.get(variable, "").strip() for variable in AUTHOR_VARIABLES)
    name = next(filter(None, stated), "") or _git_name()
    return scrub_text(" ".join(name.split())[:LONGEST])


def _git_name() -> str:
    try:
        done = subprocess.run(["git", "config", "--get", "user.name"], capture_output=True, timeout=GIT_S, check=False,
                              stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):                    # git is not installed
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""
