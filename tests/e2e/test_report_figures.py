"""Every figure of report.json is computed again by DuckDB from the published parts, the input files and the log.

Measured times and memory (cpu_s, wall_s, max_rss_mb and what is derived from them) are not.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import duckdb
import numpy as np
import pytest

from pipeline.report.html import headline
from tests.e2e.report_site import Site
from tests.frozen import hold_run
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order

DATASETS = ("extracted", "clean", "plain", "deduped")
#: the dataset that reads a source itself, and the datasets it passes
WAY = {"web": ("extracted", "clean", "deduped"), "docs": ("deduped",), "notes": ("plain", "deduped")}


@pytest.fixture(scope="module")
def site(report_site) -> Site:
    return report_site


@pytest.fixture(scope="module")
def report(site) -> dict:
    return site.report


def test_the_figures_are_the_frozen_ones(site):
    hold_run("report", site.store)


def nested(rows: list[tuple]) -> dict:
    """Turn rows (a, b, …, value) into nested mappings {a: {b: … value}}."""
    out: dict = {}
    for *keys, value in rows:
        into = out
        for key in keys[:-1]:
            into = into.setdefault(key, {})
        into[keys[-1]] = value
    return out


def test_every_section_is_checked_here(report):
    """A new section needs a new test: this one fails until there is one."""
    assert set(report) == {"version", "run", "recipe", "about", "missing_records", "sources", "funnel", "names",
                           "datasets", "duplicates", "tokens", "mixture", "order", "training", "passes", "stages",
                           "tasks", "lineage", "warnings", "signals", "graph",
                           "clusters", "course", "losses", "domains",
                           "order_quality", "made", "totals", "samples", "licences"}
    assert set(report["datasets"]["clean"]) == {"docs", "bytes", "parts", "kept", "reasons", "quarantined",
                                                "quarantine_samples", "languages", "lengths", "dropped_languages",
                                                "dropped_lengths", "dropped_licences", "scores", "pii", "dropped_pii",
                                                "pdf"}
    assert set(report["duplicates"][1]) == {"barrier", "step", "dataset", "looked_at", "removed", "candidates",
                                            "clusters", "max_cluster", "similarity", "pairs", "alarms"}


def test_identity(site, report):
    plan = site.plan()
    records = site.records()
    assert report["run"] == site.run and report["recipe"][:8] == site.run.rpartition("-")[2]
    assert report["missing_records"] == sum(k not in records for n in plan["nodes"] for k in n["keys"]) == 0
    assert report["order"] == json.loads((site.folder / "curriculum.json").read_text())["order"]
    assert report["training"] is None
    assert report["names"] == {"sources": ["web", "docs", "notes"], "datasets": list(DATASETS), "final": ["deduped"],
                               "streams": ["web", "rest"]}


# -- sources and the funnel ------------------------------------------------------------------------------------------
def warc_records(files: list[Path]) -> Counter:
    """Count the WARC-Type of the records in files. A last record that was cut off counts as 'torn'."""
    found: Counter = Counter()
    for path in files:
        stream = io.BytesIO(path.read_bytes())
        with gzip.GzipFile(fileobj=stream) as f:
            try:
                text = f.read()
            except EOFError:
                text = b""
                f2 = gzip.GzipFile(fileobj=io.BytesIO(path.read_bytes()))
                while True:
                    try:
                        text += f2.read(1)
                    except EOFError:
                        found["torn"] += 1
                        break
        found.update(m.decode() for m in re.findall(rb"WARC/1\.0\r\nWARC-Type: (\w+)", text))
    found["response"] -= found["torn"]                                # its header could be read
    return found


def files_of(site: Site, source: str) -> list[Path]:
    return {"web": site.web_files, "docs": sorted((site.top / "docs").glob("*.txt")),
            "notes": sorted((site.top / "notes").iterdir())}[source]


def test_sources(site, report):
    records = warc_records(site.web_files)
    lines = files_of(site, "notes")[0].read_bytes().count(b"\n")
    expected = {"web": sum(records.values()), "docs": len(files_of(site, "docs")), "notes": lines}
    for name, said in report["sources"].items():
        files = files_of(site, name)
        bad = dict(site.sql(f"select reason, count(*) from {{quarantine:{WAY[name][0]}}} where stage = 'read' and "
                            f"source = '{name}' group by all"))
        assert said["files"] == len(files) and said["bytes"] == sum(f.stat().st_size for f in files)
        assert said["bad"] == bad
        assert said["records"] == expected[name]
        assert said["records"] == report["funnel"][name][0]["docs"] + sum(bad.values()) + sum(said["skipped"].values())
    assert report["sources"]["web"]["skipped"] == {"warcinfo": records["warcinfo"]}
    assert sum(report["sources"]["web"]["bad"].values()) == records["torn"] == 1
    assert report["sources"]["notes"]["bad"] == {"bad_json": 1, "missing_text": 1}
    assert report["sources"]["docs"]["skipped"] == {"empty": 1} == report["sources"]["notes"]["skipped"]


def test_funnel(site, report):
    raw = {"web": (len(site.responses), sum(len(p.html.encode()) for p in site.responses)),
           "docs": (len(site.docs), sum(len(d.encode()) for d in site.docs)),
           "notes": (len(site.notes), sum(len(n.encode()) for n in site.notes))}
    streams = {"web": "web", "docs": "rest", "notes": "rest"}
    for source, rows in report["funnel"].items():
        first = WAY[source][0]
        [[whole]] = site.sql(f"""select (select count(*) from {{kept:{first}}} where source = '{source}')
            + (select count(*) from {{dropped:{first}}} where source = '{source}')
            + (select count(*) from {{quarantine:{first}}} where source = '{source}' and stage <> 'read')""")
        expected = [{"step": "read", "docs": raw[source][0], "bytes": raw[source][1]}]
        assert whole == raw[source][0], "a document got lost"
        for dataset in WAY[source]:
            [[docs, size]] = site.sql(f"select count(*), sum(strlen(text)) from {{kept:{dataset}}} "
                                      f"where source = '{source}'")
            expected.append({"step": dataset, "docs": docs, "bytes": size})
        docs, tokens = tokens_by_source(site)[streams[source], source]
        expected.append({"step": f"tokens ({streams[source]})", "docs": docs, "tokens": tokens})
        assert rows == expected


# -- datasets --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dataset", DATASETS)
def test_kept_dropped_and_quarantined(site, report, dataset):
    said = report["datasets"][dataset]
    [[docs, size]] = site.sql(f"select count(*), sum(strlen(text)) from {{kept:{dataset}}}")
    [[parts]] = site.sql(f"select count(*) from read_parquet('{site.store}/datasets/{dataset}/.manifest')")
    assert (said["docs"], said["bytes"], said["parts"]) == (docs, size, parts)
    assert said["kept"] == {s: {"docs": n, "bytes": b} for s, n, b in site.sql(
        f"select source, count(*), sum(strlen(text)) from {{kept:{dataset}}} group by all")}
    reasons = nested(site.sql(f"select stage || '|' || reason, source, count(*) from {{dropped:{dataset}}} "
                              f"group by all"))
    assert {f"{r['stage']}|{r['reason']}": r["sources"] for r in said["reasons"]} == reasons
    assert all(r["docs"] == sum(r["sources"].values()) for r in said["reasons"])
    assert said["quarantined"] == dict(site.sql(f"select reason, count(*) from {{quarantine:{dataset}}} group by all"))


def test_there_is_something_to_report(report):
    found = {r["reason"] for d in report["datasets"].values() for r in d["reasons"]}
    assert len(found) >= 5
    assert sum(n for dup in report["duplicates"] for by in dup["removed"].values() for n in by.values()) >= 20
    assert {"bad_json", "missing_text", "error:ValueError"} <= set(report["datasets"]["plain"]["quarantined"])


@pytest.mark.parametrize("dataset", DATASETS)
def test_languages_lengths_and_personal_data(site, report, dataset):
    said = report["datasets"][dataset]
    assert said["languages"] == nested(site.sql(
        f"select source, coalesce(language, ''), count(*) from {{kept:{dataset}}} group by all"))
    assert said["dropped_languages"] == nested(site.sql(
        f"select stage, coalesce(language, ''), count(*) from {{dropped:{dataset}}} group by all"))
    assert said["lengths"] == nested(site.sql(
        f"select source, cast(floor(log2(greatest(length(text), 1))) as integer)::varchar, count(*) "
        f"from {{kept:{dataset}}} group by all"))
    assert said["dropped_lengths"] == nested(site.sql(
        f"select source, cast(floor(log2(greatest(length(text), 1))) as integer)::varchar, count(*) "
        f"from {{dropped:{dataset}}} group by all"))
    assert said["dropped_licences"] == {source: {"": n} for source, n in site.sql(
        f"select source, count(*) from {{dropped:{dataset}}} group by all")}, "none states one here"
    columns = [r[0] for r in site.sql(f"select unnest(json_keys(to_json(signals))) from {{kept:{dataset}}} limit 200")]
    fields = sorted({c for c in columns if c.startswith("pii_")})
    assert said["pii"] == {f: int(site.sql(f"select coalesce(sum(signals.{f}), 0) from {{kept:{dataset}}}")[0][0])
                           for f in fields}
    assert said["dropped_pii"] == {f: int(site.sql(f"select coalesce(sum(signals.{f}), 0) from {{dropped:{dataset}}}"
                                                   )[0][0]) for f in fields}
    assert fields or dataset == "extracted"
    assert dataset != "deduped" or said["dropped_pii"]["pii_emails"] > 0


@pytest.mark.parametrize("dataset", DATASETS)
def test_samples_are_the_smallest_ids(site, report, dataset):
    smallest = defaultdict(list)
    for stage, reason, id, chars, source in site.sql(
            f"select stage, reason, id, length(text), source from {{dropped:{dataset}}} "
            f"qualify row_number() over (partition by stage, reason order by id) <= 3 order by id"):
        smallest[stage, reason].append((id, chars, source))
    assert {(r["stage"], r["reason"]): [(s["id"], s["chars"], s["source"]) for s in r["samples"]]
            for r in report["datasets"][dataset]["reasons"]} == smallest
    quarantined = site.sql(f"select id, source, record, stage, reason from {{quarantine:{dataset}}} "
                           f"qualify row_number() over (partition by stage, reason order by id) <= 3 "
                           f"order by stage, reason, id")
    assert [(s["id"], s["source"], s["record"], s["stage"], s["reason"])
            for s in report["datasets"][dataset]["quarantine_samples"]] == quarantined


# -- duplicates ------------------------------------------------------------------------------------------------------
def test_duplicates(site, report):
    exact, minhash = report["duplicates"]
    entered = Counter(dict(site.sql("select source, count(*) from (select source from {kept:clean} union all "
                                    "select source from {kept:plain}) group by all")))
    entered["docs"] = len(site.docs)
    assert exact["looked_at"] == entered
    for dup, step in ((exact, "exact"), (minhash, "minhash")):
        assert dup["removed"] == nested(site.sql(
            f"select reason, source, count(*) from {{dropped:deduped}} where stage = '{step}' group by all"))
        assert dup["similarity"] == dict(site.sql(
            f"select least(floor(json_extract(meta, '$.{step}.similarity')::double * 20), 19)::integer::varchar, "
            f"count(*) from {{dropped:deduped}} where stage = '{step}' group by all"))
        lost = Counter()
        for by_source in dup["removed"].values():
            lost.update(by_source)
        assert dup["alarms"] == [{"source": s, "removed": n, "of": dup["looked_at"][s]} for s, n in sorted(lost.items())
                                 if 2 * n > dup["looked_at"][s]]
        said = dict(site.sql(f"select id, (json_extract_string(meta, '$.{step}.kept'), "
                             f"json_extract(meta, '$.{step}.similarity')::double) from {{dropped:deduped}} "
                             f"where stage = '{step}'"))
        chars = dict(site.sql("select id, length(text) from (select id, text from {dropped:deduped} union all "
                              "select id, text from {kept:deduped})"))
        assert dup["pairs"]
        for pair in dup["pairs"]:
            assert said[pair["removed"]["id"]] == (pair["kept"]["id"], pair["similarity"])
            assert all(pair[side]["chars"] == chars[pair[side]["id"]] for side in ("removed", "kept"))
        entered = Counter({s: n - lost[s] for s, n in entered.items() if n - lost[s]})
        if step == "exact":
            assert minhash["looked_at"] == entered
    assert any(a["source"] == "notes" for a in exact["alarms"])


def test_near_duplicate_clusters(site, report):
    """Candidates and clusters from the band keys in the side tables, by union-find over all of them."""
    minhash = report["duplicates"][1]
    plan = site.plan()
    records = site.records()
    deps = next(n["deps"] for n in plan["nodes"] if n["name"] == minhash["barrier"])
    sides = [f"{site.store}/{info['path']}" for n in plan["nodes"] if n["name"] in deps for k in n["keys"]
             for name, info in records[k]["files"].items() if name.startswith("side.minhash_signature")]
    holders = defaultdict(list)
    for id, bands in duckdb.sql(f"select id, bands from read_parquet({sides})").fetchall():
        for key in np.frombuffer(bands, "<u8"):
            holders[int(key)].append(id)
    parent: dict[str, str] = {}

    def root(x: str) -> str:
        parent.setdefault(x, x)
        while parent[x] != x:
            x = parent[x]
        return x

    for ids in holders.values():
        for other in ids[1:]:
            parent[root(other)] = root(ids[0])
    sizes = Counter(root(x) for x in list(parent))
    assert minhash["candidates"] == len(parent) and minhash["clusters"] == len(sizes)
    assert minhash["max_cluster"] == max(sizes.values())


# -- tokens and mixture ----------------------------------------------------------------------------------------------
def tables(site: Site, stream: str, split: str) -> list[str]:
    folder = site.store / "shards" / stream / f"split={split}"
    path = folder / "shards.json"
    return [str(folder / s["table"]) for s in json.loads(path.read_text())["shards"]] if path.exists() else []


def documents_of(site: Site, stream: str, split: str) -> list[tuple[str, str, int]]:
    """Return (id, source, number of tokens) of each document of a stream and split. The number comes from the ends in
    the document tables."""
    out = []
    for path in tables(site, stream, split):
        out += site.sql(f"""select t.id, d.source, (t."end" - coalesce(lag(t."end") over (order by t."end"), 0))::bigint
                            from '{path}' t join {{kept:deduped}} d using (id)""")
    return out


def tokens_by_source(site: Site) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict = defaultdict(lambda: (0, 0))
    for stream in ("web", "rest"):
        for split in ("train", "val"):
            for _, source, tokens in documents_of(site, stream, split):
                docs, before = found[stream, source]
                found[stream, source] = docs + 1, before + tokens
    return found


def test_tokens(site, report):
    by_source = tokens_by_source(site)
    for stream, said in report["tokens"].items():
        train, val = documents_of(site, stream, "train"), documents_of(site, stream, "val")
        count, held_out = sum(t for *_, t in train), sum(t for *_, t in val)
        [(kept,)] = site.sql(f"""select count(*) from {{kept:deduped}}
                                 where source {"=" if stream == "web" else "!="} 'web'""")
        near = kept - len(train) - len(val) - sum(said["quarantined"].values())       # like held-out ones: in neither
        assert said == {"docs": len(train), "tokens": count, "targets": count, "near_held_out": near,
                        "val_docs": len(val),
                        "val_tokens": held_out, "val_targets": held_out,
                        "sources": {s: {"docs": n, "tokens": t} for (name, s), (n, t) in by_source.items()
                                    if name == stream},
                        "quarantined": dict(site.sql(f"select reason, count(*) from {{quarantine:shards={stream}}} "
                                                     f"group by all")), "quarantine_samples": []}
    assert {s for t in report["tokens"].values() for s in t["sources"]} == {"web", "docs", "notes"}


def test_mixture(site, report):
    """Planned shares, and windows counted one by one: Webster's rule written out, without the order's arithmetic."""
    document = json.loads((site.folder / "curriculum.json").read_text())
    tokens = {s["name"]: s["tokens"] for s in document["streams"]}
    curriculum = Curriculum.load(site.folder / "curriculum.json")
    located = Order(curriculum).locate(0, curriculum.samples)
    rows, read = [], Counter()
    for p, phase in enumerate(document["phases"]):
        names = [s["name"] for s in document["streams"] if phase["weights"].get(s["name"])]
        got = dict.fromkeys(names, 0)
        for _ in range(phase["samples"]):
            due = min(names, key=lambda n: ((2 * got[n] + 1) / phase["weights"][n], names.index(n)))
            got[due] += 1
        for name in names:
            s = [x["name"] for x in document["streams"]].index(name)
            mine = (located.phase == p) & (located.stream == s)
            again = np.flatnonzero(mine & (located.epoch > 0))
            planned = phase["samples"] * phase["weights"][name] / sum(phase["weights"].values())
            read[name] += got[name] * phase["sequence"]
            assert got[name] == mine.sum()
            assert abs(got[name] - planned) <= 1
            rows.append({"phase": phase["name"], "stream": name, "planned": pytest.approx(planned),
                         "realised": got[name], "tokens": got[name] * phase["sequence"],
                         "epochs": pytest.approx(read[name] / tokens[name]),
                         "repeats_from": int(again[0]) if again.size else None})
    assert report["mixture"] == rows
    assert any(r["repeats_from"] is not None for r in rows), "the recipe should exhaust a stream"


# -- passes, lineage, warnings ---------------------------------------------------------------------------------------
def test_passes_and_stages(site, report):
    """Documents into each pass and each of its stages, from the parts its tasks wrote."""
    plan, records = site.plan(), site.records()
    kept_bytes: dict[str, int] = {}
    texts: dict[str, list[str]] = {}
    for node in plan["nodes"]:
        if node["kind"] != "pass":
            continue
        paths: dict[str, list[str]] = defaultdict(list)
        for name, info in ((name, i) for k in node["keys"] for name, i in records[k]["files"].items()):
            paths[name].append(f"{site.store}/{info['path']}")
        left = "true"
        if "gone.parquet" in paths:                    # it wrote no text; its side table names what is left
            paths["kept.parquet"] = [p for d in node["deps"] for p in texts.get(d, ())]
            [side] = [name for name in paths if name.startswith("side.")]
            left = f"id in (select id from read_parquet({paths[side]}))"
        texts[node["name"]] = paths["kept.parquet"]
        [[kept, kept_bytes[node["name"]]]] = duckdb.sql(
            f"select count(*), coalesce(sum(strlen(text)), 0) from read_parquet({paths['kept.parquet']}) where {left}"
        ).fetchall()
        gone = Counter(dict(duckdb.sql(f"select stage, count(*) from read_parquet({paths['dropped.parquet']}) "
                                       f"group by all").fetchall()))
        failed = Counter(dict(duckdb.sql(f"select stage, count(*) from read_parquet({paths['quarantine.parquet']}) "
                                         f"where stage <> 'read' group by all").fetchall()))
        left = kept + gone.total() + failed.total()
        [said] = [p for p in report["passes"] if p["pass"] == node["name"]]
        assert (said["docs"], said["tasks"]) == (left, len(node["keys"]))
        source = next((d.partition(":")[2] for d in node["deps"] if d.startswith("index:")), None)
        assert said["bytes"] == (report["funnel"][source][0]["bytes"] if source else
                                 sum(kept_bytes[d] for d in node["deps"] if d in kept_bytes))
        stages = {s["stage"]: (s["in"], s["dropped"]) for s in report["stages"] if s["pass"] == node["name"]}
        assert stages.pop("read and write") == (left, 0)
        expected = {}
        for step in node["steps"]:
            name = step.removeprefix("apply ")
            expected[name] = (left, gone[name])
            left -= gone[name] + failed[name]
        assert stages == {k: v for k, v in expected.items() if v[0] or k in stages}


def test_lineage(site, report):
    plan, records = site.plan(), site.records()
    for said, node in zip(report["lineage"], plan["nodes"], strict=True):
        files = [(name, i) for k in node["keys"] for name, i in records[k]["files"].items()]
        assert (said["name"], said["kind"], said["deps"], said["steps"]) == (node["name"], node["kind"], node["deps"],
                                                                            node["steps"])
        assert said["tasks"] == len(node["keys"])
        assert said["bytes"] == sum((site.store / i["path"]).stat().st_size for _, i in files)
        contents = [i["content"] for name, i in files
                    if node["kind"] != "pass" or name in ("kept.parquet", "gone.parquet")]
        if node["publishes"]:
            assert sorted(contents) == sorted(r[0] for r in site.sql(
                f"select content from read_parquet('{site.store}/datasets/{node['dataset']}/.manifest')"))
        assert said["content"] == hashlib.sha256("\n".join(sorted(contents)).encode()).hexdigest()
        [task] = [t for t in report["tasks"] if t["node"] == node["name"]]
        assert (task["kind"], task["tasks"]) == (node["kind"], len(node["keys"]))


def test_warnings(report):
    said = "\n".join(report["warnings"])
    [exhausted] = {r["stream"] for r in report["mixture"] if r["repeats_from"] is not None}
    assert f"stream '{exhausted}' is exhausted in phase" in said
    assert "removed 21 of 32 documents of source 'notes'" in said or "of source 'notes' (" in said
    assert "source 'web': 1 of " in said and "source 'notes': 2 of 36 records could not be read" in said


def test_headline(site, report):
    head = headline(report)
    count = lambda query: int(site.sql(query)[0][0] or 0)  # noqa: E731
    assert head["read"] == len(site.responses) + len(site.docs) + len(site.notes)
    assert (head["kept"], head["bytes"]) == (count("select count(*) from {kept:deduped}"),
                                             count("select sum(strlen(text)) from {kept:deduped}"))
    assert head["tokens"] == sum(len(np.fromfile(p, "<u2")) for s in ("web", "rest")
                                 for p in published_bodies(site, s))
    assert head["duplicates"] == count("select count(*) from {dropped:deduped}")
    assert head["quarantined"] == sum(count(f"select count(*) from {{quarantine:{d}}}")
                                      for d in (*DATASETS, "shards=web", "shards=rest"))


def published_bodies(site: Site, stream: str) -> list[Path]:
    folder = site.store / "shards" / stream / "split=train"
    return [folder / s["body"] for s in json.loads((folder / "shards.json").read_text())["shards"]]


def test_totals(site, report):
    """Sums over the sources, from the parts, the files and the curriculum."""
    said = report["totals"]
    kept = {source: {"docs": docs, "bytes": size} for source, docs, size in site.sql(
        "select source, count(*), sum(octet_length(encode(text))) from {kept:deduped} group by source")}
    gone = Counter()
    for dataset in DATASETS:
        gone.update(dict(site.sql(f"select source, count(*) from {{dropped:{dataset}}} group by source"))
                    if list((site.store / "dropped" / dataset).glob("part-*")) else {})
    assert {s: (row["kept"], row["kept_bytes"], row["dropped"]) for s, row in said["by_source"].items()} == {
        s: (kept[s]["docs"], kept[s]["bytes"], gone[s]) for s in WAY}
    assert said["kept"] == sum(k["docs"] for k in kept.values()) and said["dropped"] == sum(gone.values())
    assert said["read"] == len(site.responses) + len(site.docs) + len(site.notes)
    files = {"web": site.web_files, "docs": list((site.top / "docs").iterdir()),
             "notes": list((site.top / "notes").iterdir())}
    assert {s: (row["files"], row["bytes"]) for s, row in said["by_source"].items()} == {
        s: (len(paths), sum(p.stat().st_size for p in paths)) for s, paths in files.items()}
    assert (said["files"], said["bytes"]) == (sum(map(len, files.values())),
                                              sum(p.stat().st_size for paths in files.values() for p in paths))
    curriculum = Curriculum.loads((site.folder / "curriculum.json").read_text(), "curriculum.json")
    held = {s.name: s.tokens for s in curriculum.streams}
    assert {s["step"]: s["tokens"] - report["tokens"][s["step"][8:-1]]["val_tokens"] for s in said["steps"]
            if "tokens" in s} == {f"tokens ({name})": n for name, n in held.items()}
    assert said["tokens"] == sum(row["tokens"] for row in said["by_source"].values())
    for row in said["steps"][1:]:
        if row["step"] in DATASETS:
            [(docs, size, sources)] = site.sql("select count(*), sum(octet_length(encode(text))), count(distinct "
                                               f"source) from {{kept:{row['step']}}}")
            assert (row["docs"], row["bytes"], row["sources"]) == (docs, size, sources)
    bad: Counter = Counter()
    for source in report["sources"].values():
        bad.update(source["bad"])
    assert said["unreadable"] == dict(bad) and said["records"] == sum(s["records"] for s in report["sources"].values())
    assert said["quarantined"] == sum(site.sql(f"select count(*) from {{quarantine:{d}}}")[0][0] for d in DATASETS
                                      if list((site.store / "quarantine" / d).glob("part-*")))


def test_kept_samples_are_the_smallest_ids(site, report):
    for dataset in DATASETS:
        rows = site.sql("select source, id, length(text) from (select *, row_number() over (partition by source order "
                        f"by id) as n from {{kept:{dataset}}}) where n <= 2")
        assert sorted((s["source"], s["id"], s["chars"]) for s in report["samples"][dataset]) == sorted(rows)


def test_licences(site, report):
    """Pages and lines here state none; tests/e2e/test_report_schema.py has lines that do."""
    assert report["licences"] == {dataset: {} for dataset in DATASETS}
    assert site.sql("select count(*) from {kept:deduped} where meta like '%licen_e%'") == [(0,)]


def test_made(site, report):
    facts = json.loads((site.folder / "run.json").read_text())
    made = report["made"]
    assert (made["at"], made["host"], made["name"], made["store"]) == (facts["begun"], facts["host"], "recipe",
                                                                       str(site.store))
    assert made["author"] == facts.get("author") and made["version"] == facts["version"]
    assert made["recipe"] == (site.folder / "recipe.yaml").read_text()
