"""The figures of report.json about distributions, computed again by DuckDB over the published parts."""

from __future__ import annotations

import json
import operator
from collections import Counter
from itertools import pairwise

import duckdb
import numpy as np
import pytest

from pipeline.passes.tally import score_bin
from pipeline.report.shares import before_after, share_sections
from tests.e2e.report_site import Site
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order

#: side of a bound → whether a value is within it
WITHIN = {"min": operator.ge, "max": operator.le, "above": operator.gt, "below": operator.lt}


@pytest.fixture(scope="module")
def site(report_site) -> Site:
    return report_site


@pytest.mark.parametrize(("dataset", "signals"), [("clean", 25), ("extracted", 1), ("plain", 2), ("deduped", 0)])
def test_signals(site, dataset, signals):
    """Every signal of every step, over kept and dropped documents, and what each threshold tried lets pass."""
    section = site.report["signals"][dataset]
    everything = int(site.sql(f"select count(*) from (select id from {{kept:{dataset}}} union all select id from "
                              f"{{dropped:{dataset}}})")[0][0])
    assert section["read"] == {"docs": everything, "of": everything, "exact": True} and section["left_out"] == 0
    assert len(section["signals"]) == signals
    columns = ", ".join(f"signals.{row['signal']}" for row in section["signals"]) or "id"
    stored = {word: site.sql(f"select {columns} from {{{word}:{dataset}}}") for word in ("kept", "dropped")}
    for number, row in enumerate(section["signals"]):
        values = {word: [v[number] for v in of if v[number] is not None] for word, of in stored.items()}
        assert (row["docs"], row["kept"]) == (len(values["kept"]) + len(values["dropped"]), len(values["kept"]))
        for word in ("kept", "dropped"):
            bins = [score_bin(v) for v in values[word]]
            assert row["bins"][word] == {str(b): bins.count(b) for b in sorted(set(bins))}
        for bound in row["bounds"]:
            for at in bound["at"]:
                within = [sum(WITHIN[bound["side"]](v, at["value"]) for v in of) for of in values.values()]
                assert (at["docs"], at["kept"]) == (sum(within), within[0])
            assert bound["at"][[at["value"] for at in bound["at"]].index(bound["value"])]["kept"] == row["kept"]


def test_graph(site):
    """Documents on every arrow, from the parts that tasks wrote; tokens from the shards' tables."""
    graph, plan = site.report["graph"], site.plan()
    kinds = {n["name"]: n["kind"] for n in plan["nodes"]}
    assert {n["name"]: n["kind"] for n in graph["nodes"]} == {**kinds, "curriculum": "curriculum"}
    counts = {(e["from"], e["to"]): e.get("docs", e.get("tokens")) for e in graph["edges"]}
    count = lambda query: int(site.sql(f"select count(*) from {query}")[0][0])  # noqa: E731
    exact, near = (count(f"{{dropped:deduped}} where stage = '{s}'") for s in ("exact", "minhash"))
    plain, clean, read = count("{kept:plain}"), count("{kept:clean}"), len(site.docs)
    rest = plain + clean + read
    of = lambda stream: count("{kept:deduped} where source " + ("= 'web'" if stream == "web" else "<> 'web'"))  # noqa: E731
    tokens = {s: site.report["tokens"][s]["tokens"] for s in ("web", "rest")}
    assert counts == {
        ("index:web", "extracted"): len(site.responses), ("extracted", "clean"): count("{kept:extracted}"),
        ("index:notes", "plain"): len(site.notes), ("index:docs", "deduped:docs"): read,
        ("clean", "deduped/exact.1"): clean, ("plain", "deduped/exact.1"): plain,
        ("deduped:docs", "deduped/exact.1"): read, ("deduped/exact.1", "deduped:2"): rest - exact,
        ("deduped:2", "deduped/minhash.2"): rest - exact, ("deduped/minhash.2", "deduped"): rest - exact - near,
        ("deduped", "tokenizer:"): None, ("tokenizer:", "shards:web"): None, ("tokenizer:", "shards:rest"): None,
        ("deduped", "shards:web"): of("web"), ("deduped", "shards:rest"): of("rest"),
        ("shards:web", "curriculum"): tokens["web"], ("shards:rest", "curriculum"): tokens["rest"]}
    dropped = {n["name"]: n.get("dropped", 0) for n in graph["nodes"]}
    assert (dropped["deduped/exact.1"], dropped["deduped/minhash.2"]) == (exact, near)
    assert dropped["clean"] == count("{dropped:clean}") and dropped["deduped"] == 0
    tasks = {n["name"]: n["tasks"] for n in graph["nodes"]}
    assert all(tasks[n["name"]] == len(n["keys"]) for n in plan["nodes"])


def test_shares_of_the_input(site):
    sections = {s["dataset"]: s for s in share_sections(site.report)}
    assert set(sections) == {"clean", "deduped"}, "the others drop nothing"
    for name, section in sections.items():
        judged = dict(site.sql(f"select source, count(*) from (select source from {{kept:{name}}} union all "
                               f"select source from {{dropped:{name}}}) group by all"))
        assert (section["of"], section["left_out"]) == (sum(judged.values()), 0)
        assert {c["name"]: c["of"] for c in section["columns"]} == judged
        for row in section["rows"]:
            lost = dict(site.sql(f"select source, count(*) from {{dropped:{name}}} where stage = '{row['stage']}' and "
                                 f"reason = '{row['reason']}' group by all"))
            assert row["share"] == sum(lost.values()) / sum(judged.values())
            assert [c["share"] for c in row["cells"]] == [lost.get(c["name"], 0) / c["of"] for c in section["columns"]]


def test_before_and_after(site):
    for section in before_after(site.report):
        name = section["dataset"]
        [(kept,)], [(dropped,)] = (site.sql(f"select count(*) from {{{w}:{name}}}") for w in ("kept", "dropped"))
        assert (section["counted"], section["docs"], section["kept"]) == (True, kept + dropped, kept)
        after = f"{{kept:{name}}}"
        for said, rows in zip(section["medians"], (f"{after} union all select text from {{dropped:{name}}}", after),
                              strict=True):
            [(median,)] = site.sql(f"select quantile_disc(length(text), 0.5) from (select text from {rows})")
            assert 2 ** int(np.log2(median)) == float(said.partition(" ")[0].replace(",", ""))
        assert section["chart"].count(" of which kept ") > 1


def test_licences_and_personal_data_before_and_after(tmp_path, tokenmill):
    """Over documents that one step drops before `pii` searches them, `pii` itself, and a deduplication after it."""
    texts = ("Number {} has no address but some words of its own, as all of them do.",
             "Ask number {} of a.person@mail.example.org or b.person@mail.example.org for a few words.")
    licences = (None, "MIT", "GPL-3.0-only", "Mine")
    rows = [{"text": texts[i % 3 > 0].format(i), "licence": licences[i % 4],
             "url": f"https://{'a' if i % 5 else 'bad'}.com/"} for i in range(40)]
    rows += [{**row, "licence": "MIT"} for row in rows[:20]]                     # same texts, which `exact` removes
    rows += [{"text": f"Pay number {i} with 4539 1488 0343 6467 today, and write to c.person@mail.example.org",
              "licence": "Apache-2.0", "url": "https://a.example/"} for i in range(7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "domains").write_text("bad.com\n")
    (tmp_path / "r.yaml").write_text("""version: 1
sources: {rows: {read: jsonl, path: rows.jsonl}}
datasets:
  all: {from: rows, steps: [{url: {integrated: false, domains: domains}}, {pii: {cards: true, drop: [cards]}}, exact]}
""")
    done = tokenmill("run", tmp_path / "r.yaml", "--store", tmp_path / "s", "--backend", "inline", "--quiet")
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "s/report.json").read_text())
    section = report["datasets"]["all"]

    def query(what: str, words: tuple[str, ...] = ("datasets", "dropped")) -> list[tuple]:
        return duckdb.sql(" union all ".join(
            f"select {what} from read_parquet('{tmp_path}/s/{word}/all/part-*.parquet', union_by_name=true)"
            for word in words)).fetchall()

    label = {None: "", "MIT": "mit", "GPL-3.0-only": "gpl-3.0", "Mine": "other", "Apache-2.0": "apache-2.0"}
    for word, counts in (("datasets", report["licences"]["all"]), ("dropped", section["dropped_licences"])):
        stated = Counter(label[licence] for licence, in query("json_extract_string(meta, '$.licence')", (word,)))
        assert counts == {"rows": {k: n for k, n in stated.items() if k or word == "dropped"}}
    pii = {word: {k: int(query(f"coalesce(sum(signals.{k}), 0)", (word,))[0][0]) for k in
                  ("pii_emails", "pii_ips", "pii_cards")} for word in ("datasets", "dropped")}
    assert (section["pii"], section["dropped_pii"]) == (pii["datasets"], pii["dropped"])
    assert pii["dropped"]["pii_cards"] == 7 and pii["datasets"]["pii_emails"] > 0 < pii["dropped"]["pii_emails"] - 7
    [shown] = before_after(report)
    searched = sum(n for n, in query("count(signals.pii_emails)"))
    assert (shown["personal"]["searched"], shown["docs"]) == (searched, len(rows)) and 0 < searched < len(rows)
    emails, lost = pii["datasets"]["pii_emails"], pii["dropped"]["pii_emails"]
    assert {r["kind"]: (r["before"], r["after"]) for r in shown["personal"]["rows"]} == {
        "e-mail addresses": (emails + lost, emails), "payment cards": (7, 0)}
    page = (tmp_path / "s/runs" / report["run"] / "report.html").read_text()
    assert f"Searched for it: {searched} of {len(rows)} documents." in page
    assert "https://<mark>bad.com</mark>/" in page and "<mark>&lt;CREDIT_CARD&gt;</mark>" in page
    assert "4539" not in page and "person@mail" not in page
    again = tokenmill("report", report["run"], "--store", tmp_path / "s")
    assert again.code == 0, again.err
    page = (tmp_path / "s/runs" / report["run"] / "report.html").read_text()
    assert "<mark>bad.com" not in page and "No passage is marked: the recipe names a file for this step" in page


def test_groups_of_duplicates(site):
    for section in site.report["clusters"]:
        step = section["step"]
        rows = site.sql(f"select json_extract_string(meta, '$.{step}.kept'), source, id from {{dropped:deduped}} "
                        f"where stage = '{step}'")
        docs = Counter(kept for kept, *_ in rows)
        assert section["read"] == {"docs": len(rows), "of": len(rows), "exact": True}
        assert section["groups"] == len(docs)
        assert section["sizes"] == {str(b): n for b, n in
                                    sorted(Counter(int(np.log2(n + 1)) for n in docs.values()).items())}
        assert [(g["kept_id"], g["size"]) for g in section["largest"]] == [
            (kept, n + 1) for kept, n in sorted(docs.items(), key=lambda d: (-d[1], d[0]))[:4]]
        for group in section["largest"]:
            assert group["kept"]["id"] == group["kept_id"]
            members = sorted(id for kept, _, id in rows if kept == group["kept_id"])
            assert [r["id"] for r in group["removed"]] == members[:2]
        known = dict(site.sql("select id, source from {kept:deduped} union all "
                              "select id, source from {dropped:deduped}"))
        pairs = Counter((source, known[kept]) for kept, source, _ in rows)
        assert {(p["removed"], p["kept"]): p["docs"] for p in section["pairs"]} == pairs
        assert section["unknown"] == 0
    near = site.report["clusters"][1]
    assert sum(near["components"].values()) == site.report["duplicates"][1]["clusters"]


def test_mixture_over_tokens(site):
    """Tokens of every stretch and stream, counted over the order sample by sample."""
    course = site.report["course"]
    curriculum = Curriculum.load(site.folder / "curriculum.json")
    located = Order(curriculum).locate(0, curriculum.samples)
    ends = np.cumsum([curriculum.phases[p].sequence for p in located.phase])
    assert course["at"][0] == 0 and course["at"][-1] == curriculum.tokens
    phases = [(p["name"], p["to"] - p["from"]) for p in course["phases"]]
    assert phases == [(p.name, p.tokens) for p in curriculum.phases]
    for s, stream in enumerate(curriculum.streams):
        for i, (begin, end) in enumerate(pairwise(course["at"])):
            inside = (ends > begin) & (ends <= end)
            lengths = np.array([p.sequence for p in curriculum.phases])[located.phase[inside]]
            assert course["streams"][stream.name]["realised"][i] == lengths[located.stream[inside] == s].sum()
            [phase] = {int(p) for p in located.phase[inside]}
            weights = curriculum.phases[phase].weights
            share = weights.get(stream.name, 0) / sum(weights.values())
            assert course["streams"][stream.name]["planned"][i] == pytest.approx(share * lengths.sum())


@pytest.mark.parametrize("dataset", ["extracted", "clean", "plain", "deduped"])
def test_domains(site, dataset):
    host = ("regexp_replace(lower(regexp_extract(url, '^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/?#@]*@)?([^/?#:@]+)', 1)), "
            "'^www[.]', '')")
    rows = site.sql(f"select coalesce({host}, ''), count(*) filter (kept), count(*) filter (not kept) from "
                    f"(select url, true as kept from {{kept:{dataset}}} union all select url, false from "
                    f"{{dropped:{dataset}}}) group by 1")
    section = site.report["domains"][dataset]
    named = {host: (kept, dropped) for host, kept, dropped in rows if host}
    assert section["without"] == sum(k + d for host, k, d in rows if not host)
    assert section["domains"] == len(named) and section["read"]["exact"]
    top = sorted(named, key=lambda h: (-sum(named[h]), h))[:30]
    assert [(d["domain"], d["kept"], d["dropped"]) for d in section["top"]] == [(h, *named[h]) for h in top]
