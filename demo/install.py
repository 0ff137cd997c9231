"""`python demo/install.py ARGUMENTS…` runs `pip install ARGUMENTS…` and prints a line about the progress every few
seconds, while pip itself prints either nothing or hundreds of lines.

It uses only the standard library, because nothing is installed yet when it runs. It installs into the environment of
the Python that runs it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

#: seconds between two lines
EVERY = 5.0
_STEP = re.compile(r"\s*(Collecting|Processing|Downloading|Using cached|Building wheel for|"
                   r"Installing collected packages:)\s+(\S.*)")


class Progress:
    """The progress of pip, taken from the lines that it prints. While pip unpacks packages, it prints nothing. The
    progress is then the number of packages that are installed so far."""

    def __init__(self) -> None:
        self.collected, self.packages, self.last = 0, 0, ""
        self.before = installed()

    def read(self, line: str) -> None:
        if (step := _STEP.match(line)) is None:
            return
        if step[1] in ("Collecting", "Processing"):          # from a package index, or from a folder
            self.collected += 1
        elif step[1].startswith("Installing"):
            self.packages = step[2].count(",") + 1
        else:
            size = re.search(r"\(([\d.]+ [kMG]B)\)", line)
            self.last = f", {step[1].lower()} {Path(step[2].split()[0]).name.partition('-')[0]}" \
                        f"{' ' + size[1] if size else ''}"

    def __str__(self) -> str:
        if not self.packages:
            return f"{self.collected} packages looked up{self.last}"
        return f"{min(max(installed() - self.before, 0), self.packages)} of {self.packages} packages installed"


def installed() -> int:
    return sum(1 for _ in Path(sysconfig.get_paths()["purelib"]).glob("*.dist-info/RECORD"))


def main(*arguments: str, every: float = EVERY) -> int:
    # --no-compile: Python compiles a module when it is first imported, and compiling all modules would take longer than
    # installing them
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--no-compile", *arguments]
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                           env={**os.environ, "PYTHONUNBUFFERED": "1"})
    progress, lines, began = Progress(), [], time.monotonic()

    def read() -> None:
        for line in pip.stdout or ():
            lines.append(line)
            progress.read(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    said = ""
    while reader.is_alive():
        reader.join(every)
        if reader.is_alive() and (now := str(progress)) != said:
            said = now
            print(f"  {time.monotonic() - began:4.0f} s  {said}", flush=True)
    if code := pip.wait():
        print("".join(lines[-40:]), end="", file=sys.stderr, flush=True)
    else:
        print(f"  {time.monotonic() - began:4.0f} s  done", flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
