"""A commit-msg hook: refuse a subject of more than 72 characters, which `git log --oneline` and most forges cut."""

import sys
from pathlib import Path

subject = Path(sys.argv[1]).read_text(encoding="utf-8").partition("\n")[0]
if len(subject) > 72:
    sys.exit(f"the commit's subject has {len(subject)} characters, at most 72 fit: say the rest in the body")
