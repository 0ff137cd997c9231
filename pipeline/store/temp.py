"""A database for what a process has to know but not to keep: on disk, so that memory does not grow with it."""

from __future__ import annotations

import sqlite3

CACHE_MB = 8


def scratch_database(cache_mb: int = CACHE_MB) -> sqlite3.Connection:
    """An empty SQLite database that nobody else sees and that is gone with its connection. It lies in a file without a
    name below TMPDIR as soon as it outgrows the cache. Several threads may use it, one at a time."""
    db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for pragma in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", f"cache_size={-1024 * cache_mb}"):
        db.execute(f"PRAGMA {pragma}")
    db.execute("BEGIN")           # never committed: nobody else is to see it, and each statement would be a transaction
    return db
