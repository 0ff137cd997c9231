"""Publishes documents that a test made itself, for the tests of the queries of the service."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipeline.passes.tables import QUARANTINE_SCHEMA, RowWriter
from pipeline.store.dataset import PassParts, publish
from pipeline.store.fs import Store
from pipeline.store.parts import PartWriter, document_schema
from pipeline.store.records import FileInfo, PartRecord
from stages.document import Document

#: hostile texts: a query must neither execute them nor fail because of them
HOSTILE = ("'; drop table x; --", '" or 1=1 --', "%", "_", "\\", "*", "$1", "?", "\u202eevil", "é", "e\u0301", "日本",
           "a\nb", "\t", "<script>alert(1)</script>", "a\x00b", "\ufffd", "{}", "]")
SOURCES = ("web", "books", "co'de", 'wi"ki', "日本")
LANGUAGES = ("en", "de", "", "zh")


def documents(n: int, seed: int = 0, dropped: bool = False) -> list[dict[str, Any]]:
    """Return `n` documents as rows. Only the second half of them, which comes from another node of the plan, has the
    signal `b`."""
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        text = " ".join(rng.choice((*HOSTILE, "alpha", "beta", "gamma", "delta")) for _ in range(rng.randrange(30)))
        signals = {"a": rng.choice((0.0, -0.0, 0.1, 1 / 3, 1e300, -5.0, float("inf"), float("nan"), rng.random()))}
        if rng.random() < 0.2:
            signals = {}
        if i >= n // 2:
            signals["b"] = float(rng.randrange(10))
        host = rng.choice(("example.org", "www.example.org", "notexample.org", "EXAMPLE.org:80", "u:p@x@example.org",
                           "[::1]:8", "münchen.de"))
        rows.append({"id": hashlib.md5(f"{seed}/{i}".encode()).hexdigest(), "text": text,
                     "url": rng.choice((f"https://{host}/a?b=https://example.com", "", f"//{host}", "no url")),
                     "source": rng.choice(SOURCES), "language": rng.choice(LANGUAGES),
                     "date": rng.choice((None, "2020-01-01", "1999")), "signals": signals, "meta": {"t": "x"}})
        if dropped:
            rows[-1] |= {"reason": rng.choice(("short", "lo'ng", "%")), "stage": rng.choice(("gopher", "c4"))}
    return rows


def put_part(store: Store, scratch: Path, key: str, node: str, kept: Iterable[dict[str, Any]],
             dropped: Iterable[dict[str, Any]] = (), quarantined: Sequence[dict[str, Any]] = (),
             signals: Sequence[str] = ("a",)) -> PartRecord:
    """Write the files that a task would write, and return its record."""
    files = {}
    scratch.mkdir(exist_ok=True)

    def add(name: str, local: Path, rows: int, content: str, text_bytes: int = 0) -> None:
        data = local.read_bytes()
        path = f"objects/{key}/00000001-00000000.{name}.parquet"
        store.upload(str(local), path)
        files[f"{name}.parquet"] = FileInfo(path, len(data), hashlib.sha256(data).hexdigest(), content, rows,
                                            {"text_bytes": text_bytes})

    for name, rows in (("kept", kept), ("dropped", dropped)):
        local = scratch / f"{key}.{name}"
        writer = PartWriter(str(local), document_schema(signals, name == "dropped"), row_group_bytes=4096)
        for row in rows:
            verdict = {k: row[k] for k in ("reason", "stage") if k in row}
            writer.write(Document(row["id"], row["text"], source=row["source"], url=row["url"], meta=row["meta"],
                                  language=row["language"], date=row["date"], signals=dict(row["signals"]),
                                  locator={"file": "f", "offset": 0, "record": 0, "sub": ""}), **verdict)
        writer.close()
        add(name, local, writer.rows, writer.content or "", writer.text_bytes)
    if quarantined:
        local = scratch / f"{key}.quarantine"
        table = RowWriter(str(local), QUARANTINE_SCHEMA)
        for row in quarantined:
            table.write(row)
        table.close()
        add("quarantine", local, len(quarantined), "")
    return PartRecord(key, "m:C", node, "00000001-00000000", files, {"in": {"web": {"docs": 1, "bytes": 1}}})


def publish_rows(store: Store, scratch: Path, kept: list[dict[str, Any]], parts: int = 5, *, name: str = "d",
                 dropped: Sequence[dict[str, Any]] = (), quarantined: Sequence[dict[str, Any]] = (),
                 salt: str = "", signals: tuple[str, ...] = ("a",)) -> None:
    """Publish the documents `kept` in `parts` parts. All parts have the columns `signals`. The first half of the parts
    comes from a node of the plan that does not have the signal `b`."""
    records = []
    for i in range(parts):
        def share(rows: Sequence[dict[str, Any]], i: int = i) -> list[dict[str, Any]]:
            return list(rows[len(rows) * i // parts:len(rows) * (i + 1) // parts])

        late = any("b" in row["signals"] for rows in (kept, dropped) for row in share(rows))
        key = hashlib.md5(f"{salt}/{i}".encode()).hexdigest()
        records.append(put_part(store, scratch, key, "late" if late else "early", share(kept), share(dropped),
                                share(quarantined), (*signals, "b") if late else signals))
    publish(store, name, [PassParts(records)])
