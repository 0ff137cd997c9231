"""Files that are made once per install and kept: compiled lists, and spaCy's tokenizer rules.

Environment: TOKENMILL_CACHE names the folder (default ~/.cache/tokenmill).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

#: format version of the exported rules
FORMAT = 2


def cache_dir() -> Path:
    return Path(os.environ.get("TOKENMILL_CACHE") or Path.home() / ".cache" / "tokenmill")


def rules_path(language: str = "en") -> Path:
    """Path of the exported rules of a language, by spaCy's code. They are exported now if this install has none yet.

    Raises:
        RuntimeError: spaCy is missing or the export failed; the message holds its error output.
    """
    version = metadata.version("spacy")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    path = cache_dir() / "words" / f"{language}-spacy-{version}-py{python}-v{FORMAT}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "stages.text.spacy_export", language, str(path)]
        root = str(Path(__file__).resolve().parents[2])
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])))
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"exporting spaCy's tokenizer rules to {path} failed:\n{done.stderr[-2000:]}")
    return path
