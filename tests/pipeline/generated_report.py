"""Makes a report with any number of sources, datasets and reasons, without a run. It agrees with the schema of
report.json."""

from __future__ import annotations

from typing import Any

from pipeline.report.totals import totals

RECIPE = """version: 1
sources:
{sources}datasets:
  clean:
    from: [{names}]
    steps:
    - gopher_quality: {{min_doc_words: 50}}
    - mine:Own: {{deep: {{a: 1}}}}
    - pii: {{emails: true}}
"""


def sample(source: str, i: int, text: str = "An excerpt of a text, as long as they are. " * 7) -> dict[str, Any]:
    return {"id": f"{i:032x}", "url": f"https://{source}.example/{i}", "file": f"{source}/{i}.warc.gz",
            "source": source, "chars": 1000 + i, "excerpt": text}


def dataset(sources: list[str], reasons: int, scores: int) -> dict[str, Any]:
    return {
        "docs": 9 * len(sources), "bytes": 900 * len(sources), "parts": 3,
        "kept": {s: {"docs": 9, "bytes": 900} for s in sources},
        "reasons": [{"stage": f"stage{i}", "reason": f"reason_{i}", "docs": len(sources),
                     "sources": dict.fromkeys(sources, 1),
                     "samples": [sample(s, i) for s in sources[i % 7:][:3]]} for i in range(reasons)],
        "quarantined": {f"error:E{i}": 1 for i in range(reasons)},
        "quarantine_samples": [{"id": "", "source": sources[0], "file": f"f{i}", "record": i, "stage": "", "reason":
                                f"error:E{i}", "detail": "what it said"} for i in range(reasons)],
        "languages": {s: {"en": 6, "no": 2, "": 1} for s in sources},
        "lengths": {s: {str(j): j for j in range(3, 20)} for s in sources},
        "dropped_lengths": {s: {"9": reasons} for s in sources},
        "dropped_languages": {"stage0": {"en": len(sources)}},
        "scores": {f"score_{i}": {str(j): j for j in range(1, 200)} for i in range(scores)},
        "dropped_licences": {s: {"": reasons} for s in sources},
        "pii": {"pii_emails": 7}, "dropped_pii": {"pii_emails": 2}, "pdf": None}


def figures(names: list[str], sets: list[str], scores: int) -> dict[str, Any]:
    """Return the sections about signals, the plan and groups of duplicates."""
    read = {"docs": 9, "of": 90, "exact": False, "uncovered": 4}
    bound = {"key": "most", "side": "max", "value": 2.0, "at": [{"value": 2.0, "docs": 9, "kept": 9}]}
    signals = [{"signal": f"signal_{i}", "step": f"stage{i}", "docs": 199, "kept": 199, "bounds": [bound],
                "bins": {"kept": {str(j): 1 for j in range(200, 399)}, "dropped": {}}} for i in range(scores)]
    removed = {**sample(names[0], 3), "similarity": 0.9, "diff": [["both", "one two"], ["removed", "three"]]}
    clusters = {"step": "minhash", "read": read, "groups": 3, "sizes": {"1": 3}, "unknown": 0,
                "largest": [{"kept_id": "a", "size": 2, "kept": sample(names[0], 4), "removed": [removed]}],
                "pairs": [{"removed": names[0], "kept": s, "docs": 1} for s in names[:40]]}
    nodes = [{"name": n, "kind": "pass" if n in sets else "index", "steps": ["a", "b"], "tasks": 3}
             for n in [*(f"index:{s}" for s in names), *sets]]
    point = {"tokens": 64, "loss": 3.0, "streams": {}, "lr": 0.1}
    return {"course": {"at": [0, 64], "phases": [{"name": "one", "from": 0, "to": 64}],
                       "streams": {"stream-0": {"planned": [64.0], "realised": [64]}}},
            "order_quality": {"steps": 1, "of": 2, "samples": 9, "deviation": 0.5, "streams": {
                "stream-0": {"windows": 9, "neighbours": 0, "expected": 0.1, "spread": 1.0}},
                "lags": [{"lag": 1, "pairs": 8, "stream": 1.0, "stream_expected": 1.0, "document": 0.0,
                          "document_expected": 0.01}],
                "run": {"windows": 9, "stream": "stream-0", "expected": 9.0},
                "repeats": {"pairs": 0, "expected": 0.1}},
            "losses": {"steps": [point], "evals": []},
            "domains": {d: {"read": read, "domains": 50, "without": 1, "top": [
                {"domain": f"d{i}.example", "kept": 1, "dropped": 1} for i in range(30)]} for d in sets},
            "signals": {d: {"read": read, "signals": signals[:80], "left_out": 0} for d in sets},
            "clusters": [{"barrier": f"{d}/minhash.1", **clusters} for d in sets],
            "graph": {"nodes": nodes,
                      "edges": [{"from": f"index:{s}", "to": d, "docs": 14} for s in names for d in sets]}}


def generated(sources: int, *, reasons: int = 5, datasets: int = 1, scores: int = 1, streams: int | None = None,
              warnings: int = 3) -> dict[str, Any]:
    """Return a report with `sources` sources. Every dataset reads each of them, and by default each has a stream of its
    own."""
    names = [f"source-{i:04d}" for i in range(sources)]
    sets = [f"clean-{i}" if i else "clean" for i in range(datasets)]
    flows = [f"stream-{i}" for i in range(sources if streams is None else streams)]
    section = dataset(names, reasons, scores)
    paths = "".join(f"  {s}: {{read: warc, path: hf://datasets/user/{s}/*.gz}}\n" for s in names)
    nodes = [*(f"index:{s}" for s in names), *sets]
    document = {
        "version": 6, "run": "generated-0", "recipe": "0" * 32, "about": None, "missing_records": 0, "order": "1" * 32,
        "made": {"at": "2026-11-26T16:56:42Z", "host": "machine", "author": "An Author", "version": "0.1.0",
                 "python": "3.11.7", "name": "generated", "store": "s3://bucket/store",
                 "recipe": RECIPE.format(names=", ".join(names), sources=paths)},
        "names": {"sources": names, "datasets": sets, "final": sets, "streams": flows},
        "sources": {s: {"files": 2, "bytes": 1000, "records": 20 + i, "skipped": {"empty": 1}, "bad": {"bad_json": 1},
                        "bad_files": {"files": 100, "bytes": 5, "listed": [
                            {"file": f"{s}/a-file-that-cannot-be-read-{j}.gz", "reasons": {"memory": 5}}
                            for j in range(100)]}} for i, s in enumerate(names)},
        "funnel": {s: [{"step": "read", "docs": 14 + i, "bytes": 2000}, *({"step": d, "docs": 9, "bytes": 900}
                                                                         for d in sets)] for i, s in enumerate(names)},
        "datasets": dict.fromkeys(sets, section),
        "samples": {d: [sample(s, j) for s in names[:12] for j in range(2)] for d in sets},
        "licences": {d: {s: {"mit": 9} for s in names} for d in sets},
        "duplicates": [{"barrier": f"{d}/minhash.1", "step": "minhash", "dataset": d,
                        "looked_at": dict.fromkeys(names, 9), "removed": {"minhash": dict.fromkeys(names, 5)},
                        "candidates": 5, "clusters": 2,
                        "max_cluster": 3, "similarity": {"15": 3, "19": 1}, "pairs": [
                            {"similarity": 0.9, "removed": sample(names[0], 1), "kept": sample(names[-1], 2)}],
                        "cut": {"docs": 9, "cuts": {"repeated": 12}, "bytes": {"repeated": 9 * len(names)},
                                "sources": dict.fromkeys(names, 9),
                                "alarms": [{"source": s, "cut": 9, "of": 11} for s in names]},
                        "alarms": [{"source": s, "removed": 5, "of": 9} for s in names]} for d in sets],
        "tokens": {f: {"docs": 8, "tokens": 100 + i, "targets": 100 + i, "near_held_out": 0, "val_docs": 1,
                       "val_tokens": 5, "val_targets": 5, "quarantined": {}, "quarantine_samples": [],
                       "sources": {names[i % sources]: {"docs": 9, "tokens": 105 + i}}} for i, f in enumerate(flows)},
        "mixture": [{"phase": p, "stream": f, "planned": 1.0, "realised": 1, "tokens": 64, "epochs": 1.5,
                     "repeats_from": 7} for p in ("one", "two") for f in flows],
        "passes": [{"pass": d, "tasks": 3, "docs": 14 * sources, "bytes": 9, "cpu_s": 3.0, "wall_s": 3.0,
                    "docs_per_core_s": 9.0, "max_rss_mb": 100.0} for d in sets],
        "stages": [{"pass": d, "stage": f"stage{i}", "in": 9, "dropped": 1, "cpu_s": 1.0, "share": 0.1,
                    "docs_per_cpu_s": 9.0} for d in sets for i in range(reasons)],
        "tasks": [{"node": n, "kind": "pass", "tasks": 3, "cpu_s": 1.0, "wall_s": 1.0, "max_rss_mb": 1.0}
                  for n in nodes],
        "lineage": [{"name": n, "kind": "pass" if n in sets else "index", "deps": names[:3], "steps": ["a", "b"],
                     "tasks": 3, "bytes": 9, "cpu_s": 1.0, "content": "2" * 64} for n in nodes],
        **figures(names, sets, scores), "training": None,
        "warnings": [f"warning {i} about something" for i in range(warnings)]}
    document["totals"] = totals(document)
    return document
