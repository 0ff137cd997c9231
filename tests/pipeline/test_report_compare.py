"""`tokenmill report --compare`: recipe, figures and documents of two runs, compared with what is computed from what
each published."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import lxml.html
import pytest

from pipeline.base.files import file_sha256
from pipeline.report import compare_html
from pipeline.report import documents as documents_of_report
from pipeline.report.collect import collect
from pipeline.report.compare import FinishedRun, NotFinished, compare_runs
from pipeline.report.moved import Side, compare_documents
from pipeline.report.recipe_diff import compare_recipes
from pipeline.report.schema import Report
from pipeline.report.side_by_side import compare_figures
from pipeline.store.fs import Store
from pipeline.store.parts import PartWriter, document_schema
from pipeline.store.records import FileInfo
from stages.document import Document
from tests.pipeline.compare_site import SECOND, SECRETS, Made, documents, run, write

SAMPLES = ("samples", "quarantine_samples", "pairs", "listed", "alarms")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[str, Made]:
    """{name: run}. `second` has published the datasets of `first` anew. `moved` has another store and other inputs."""
    top = tmp_path_factory.mktemp("compare")
    web, docs = documents()
    write(top / "a", web, docs)
    made = {"first": run(top / "a", top / "store", "first"), "second": run(top / "a", top / "store", "second", *SECOND)}
    shutil.copytree(top / "a", top / "b")
    made["same"] = run(top / "b", top / "other", "same")
    n = next(i for i in range(40, 120) if 120 < len(web[i]["text"].split()) < 250)             # one that is kept
    changed = [*web[:n], {**web[n], "text": web[n]["text"] + " One more sentence."}, *web[n + 1:132]]
    write(top / "c", changed, [*docs, {"text": docs[0]["text"] + " And an end of its own.", "url": ""}])
    made["moved"] = run(top / "c", top / "moved", "moved")
    return made


@pytest.fixture(scope="module")
def compared(site) -> dict[str, Any]:
    return compare_runs(site["first"].run, site["second"].run, 4)


# -- documents -------------------------------------------------------------------------------------------------------
def expected(before: Made, after: Made, dataset: str) -> tuple[int, Counter]:
    """Compute in plain Python (number of equal documents, number of other documents by (change, fate before, fate
    after, source))."""
    same, groups = 0, Counter()
    sides = before.rows[dataset], after.rows[dataset]
    for id in sides[0].keys() | sides[1].keys():
        a, b = (side.get(id) for side in sides)
        fates = [row and (row["fate"], row["stage"], row["reason"]) for row in (a, b)]
        if a is None or b is None:
            change = "only_after" if a is None else "only_before"
        elif a["fate"] == b["fate"] == "kept":
            change = "changed_text" if a["text"] != b["text"] else ""
        elif "kept" in (a["fate"], b["fate"]):
            change = "newly_dropped" if a["fate"] == "kept" else "newly_kept"
        else:
            change = "other_reason" if fates[0] != fates[1] else ""
        if change:
            groups[change, fates[0], fates[1], (a or b)["source"]] += 1
        else:
            same += 1
    return same, groups


def groups_of(section: dict[str, Any]) -> Counter:
    def fate(side: dict[str, str] | None) -> tuple[str, str, str] | None:
        return side and (side["fate"], side.get("stage", ""), side.get("reason", ""))

    out = Counter()
    for row in section["groups"]:
        assert row["docs"] == sum(row["sources"].values())
        for source, n in row["sources"].items():
            out[row["change"], fate(row["before"]), fate(row["after"]), source] += n
    return out


@pytest.mark.parametrize(("one", "two"), [("first", "second"), ("second", "first"), ("first", "moved"),
                                          ("moved", "second")])
def test_documents_change_sides_as_in_what_each_run_published(site, one, two):
    document = compare_runs(site[one].run, site[two].run)
    for dataset in ("clean", "deduped"):
        section = document["documents"][dataset]
        same, groups = expected(site[one], site[two], dataset)
        assert groups_of(section) == groups and section["same"] == same
        totals = Counter()
        for (change, *_), n in groups.items():
            totals[change] += n
        assert {change: n for change, n in section["changes"].items() if n} == totals
    assert not document["equal"]


def test_the_site_shows_every_change(site):
    """Otherwise the test above proves nothing about a change that does not occur."""
    seen = Counter()
    for one, two in (("first", "second"), ("second", "first"), ("first", "moved")):
        for dataset in ("clean", "deduped"):
            for (change, *_), n in expected(site[one], site[two], dataset)[1].items():
                seen[change] += n
    assert set(seen) == {"newly_dropped", "newly_kept", "changed_text", "other_reason", "only_before", "only_after"}
    assert any(row["fate"] == "quarantined" for row in site["first"].rows["clean"].values())


def test_the_nearest_to_the_threshold_come_first(site, compared):
    """Documents that the second run drops for being short: kept with 80 words, so 1 - words / 80 away."""
    rows = site["second"].rows["clean"]
    newly = [id for id, row in site["first"].rows["clean"].items() if row["fate"] == "kept"
             and rows[id]["fate"] == "dropped"]
    threshold = {"gopher_short_doc": 80, "where_gopher_words": 300}
    known = sorted((abs(rows[id]["words"] - threshold[rows[id]["reason"]]) / threshold[rows[id]["reason"]], id)
                   for id in newly if rows[id]["reason"] in threshold)
    assert len(known) >= 4 and {rows[id]["reason"] for _, id in known} == set(threshold)
    examples = compared["documents"]["clean"]["examples"]["newly_dropped"]
    got = [(example["distance"], example["id"]) for example in examples]
    assert len(got) == 4 and got == sorted(got)
    others = [id for id in newly if rows[id]["reason"] not in threshold]
    assert [pair for pair in got if pair[1] not in others] == [(pytest.approx(far), id) for far, id in known[:4]]
    decided = examples[0]["after"]["decided"]
    assert decided["value"] == rows[examples[0]["id"]]["words"]
    assert (decided["key"], decided["threshold"]) in {("gopher_quality.min_doc_words", 80),
                                                      ("where.signals.gopher_words.max", 300)}


def test_duplicates_are_measured_by_their_similarity(site, compared):
    examples = compared["documents"]["deduped"]["examples"]["newly_kept"]
    decided = [e["before"]["decided"] for e in examples if e["before"]["stage"] == "minhash"]
    assert decided
    for rule in decided:
        assert rule["key"] == "minhash.verify" and 0.7 <= rule["value"] < 0.9
        assert rule["distance"] == pytest.approx((rule["value"] - 0.7) / 0.7)


def test_memory_is_bounded_by_spilling(site, monkeypatch):
    """Facts go to disk in pieces of `most`; the result does not depend on it."""
    one, two = site["first"].run, site["moved"].run
    whole = compare_documents(one.side("clean"), two.side("clean"), 3)
    pieces = compare_documents(one.side("clean"), two.side("clean"), 3, most=7)
    assert pieces.groups == whole.groups and pieces.same == whole.same

    def ids(moved: Any) -> dict[str, list]:
        return {change: [[None if fact is None else (fact["high"], fact["low"]) for fact in pair] for pair in pairs]
                for change, pairs in moved.nearest.items()}

    assert ids(pieces) == ids(whole)


def quality(**signals: float) -> dict[str, float]:
    return {"gopher_words": 200, "gopher_mean_word_length": 5, "gopher_hash_ratio": 0, "gopher_ellipsis_ratio": 0,
            "gopher_bullet_lines_ratio": 0, "gopher_ellipsis_lines_ratio": 0, "gopher_alpha_words_ratio": 1,
            "gopher_stop_words": 5, **signals}


def part_of(path: Path, rows: list[tuple[str, int]], reason: str) -> FileInfo:
    """Write a part with documents given as (id, words). They are dropped for `reason`, or kept if it is empty."""
    writer = PartWriter(str(path), document_schema(quality(), dropped=bool(reason)))
    for id, words in rows:
        writer.write(Document(id, f"text {id}", source="s", signals=quality(gopher_words=words)),
                     **({"reason": reason, "stage": "gopher_quality"} if reason else {}))
    writer.close()
    return FileInfo(path.name, path.stat().st_size, file_sha256(path), writer.content or "", writer.rows)


@dataclass
class Files:
    """Stands in for the pass of a run."""

    files: dict[str, FileInfo]
    publishes: bool = True

    def records(self) -> Iterator[Files]:
        return iter([self])


def test_the_nearest_of_many_documents_are_found(tmp_path):
    """All ids begin alike, so that they are joined at once; the smallest distances have the largest ids."""
    rows = [(f"ab{i:030x}", 1 + i) for i in range(79)]
    kept = Files({"kept.parquet": part_of(tmp_path / "k", rows, "")})
    gone = Files({"dropped.parquet": part_of(tmp_path / "d", rows, "gopher_short_doc")})
    sides = [Side(Store(tmp_path), [node], [{"gopher_quality": {"min_doc_words": 80}}], 1) for node in (kept, gone)]
    moved = compare_documents(*sides, 3)
    assert sum(moved.groups.values()) == 79
    assert [fact["distance"] for _, fact in moved.nearest["newly_dropped"]] == pytest.approx([1 / 80, 2 / 80, 3 / 80])
    assert [int(fact["low"]) for _, fact in moved.nearest["newly_dropped"]] == [78, 77, 76]


def test_changed_texts_are_shown_from_where_they_part(site):
    document = compare_runs(site["first"].run, site["moved"].run)
    [example] = document["documents"]["clean"]["examples"]["changed_text"]
    rows = [site[name].rows["clean"][example["id"]] for name in ("first", "moved")]
    assert rows[1]["text"] == rows[0]["text"] + " One more sentence."
    assert example["after"]["chars"] == len(rows[1]["text"]) and example["before"]["chars"] == len(rows[0]["text"])
    assert example["before"]["excerpt"] != example["after"]["excerpt"] or len(rows[0]["text"]) > 320


# -- equal, disjoint, missing ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("two", ["first", "same"])
def test_equal_runs_differ_in_nothing_but_measured_figures(site, two):
    document = compare_runs(site["first"].run, site[two].run)
    if two == "same":                                   # the inputs lie in another folder
        assert {row["key"] for row in document["recipe"]} <= {"sources.web.path", "sources.docs.path", "code"}
        document["recipe"] = []
    else:
        assert document["equal"]
    assert document["recipe"] == [] and document["notes"] == []
    assert [row for row in document["figures"] if row["before"] != row["after"] and not row["measured"]] == []
    for dataset, section in document["documents"].items():
        assert section["groups"] == [] and section["examples"] == {} and not any(section["changes"].values())
        assert section["same"] == len(site["first"].rows[dataset])


def test_equal_parts_are_not_read(site, tmp_path):
    """A store of which every object is gone: its runs still compare as equal, from the hashes in the log."""
    shutil.copytree(site["first"].store, tmp_path / "store")
    shutil.rmtree(tmp_path / "store" / "objects")
    name = "first"
    [document] = [compare_runs(site[name].run, FinishedRun.open(Store(tmp_path / "store"), name))]
    kept = sum(row["fate"] != "quarantined" for row in site[name].rows["clean"].values())
    assert document["documents"]["clean"]["same"] == kept
    # quarantined records have no equal parts: they are read, and named as missing
    assert document["documents"]["clean"]["missing"]["after"] > 0 and document["notes"]


def test_tokens_that_only_another_tokenizer_changed_stand_apart(site):
    def with_tokens(run: FinishedRun, tokenizer: str, docs: int, tokens: int) -> FinishedRun:
        counts = {name: {"docs": n, "tokens": tokens + n, "val_tokens": 5} for name, n in (("web", 7), ("code", docs))}
        lineage = [*run.report["lineage"], {"name": "tokenizer:", "kind": "tokenizer", "content": tokenizer}]
        return FinishedRun(run.store, run.name, run.plan, run.recipe, {**run.report, "tokens": counts,
                                                                       "lineage": lineage}, run.get)

    first, second = site["first"].run, site["second"].run
    document = compare_runs(with_tokens(first, "a" * 64, 3, 100), with_tokens(second, "b" * 64, 4, 200), 0)
    assert [note for note in document["notes"] if "tokenizers differ" in note]
    rows, apart = compare_html.without_retokenised(document, compare_html.by_difference(
        compare_html.overview(document))[0])
    assert [(row["name"], row["what"]) for row in apart] == [("shards web", "training tokens")]
    assert ("shards code", "training tokens") in {(row["name"], row["what"]) for row in rows}
    assert "1 token count of as many documents" in compare_html.render(document)
    document = compare_runs(with_tokens(first, "a" * 64, 3, 100), with_tokens(second, "a" * 64, 3, 200), 0)
    rows = compare_html.by_difference(compare_html.overview(document))[0]
    assert compare_html.without_retokenised(document, rows) == (rows, []) and not document["notes"]


def test_figures_of_shards_say_what_they_count():
    """A stream is counted without its held-out documents, and a source of the stream with them."""
    figures = [{"path": ["tokens", "web", *path], "before": 1, "after": 2} for path in (
        ["docs"], ["tokens"], ["val_tokens"], ["sources", "web", "docs"], ["sources", "web", "tokens"])]
    assert [f"{row['name']}: {row['what']}" for row in compare_html.overview({"figures": figures})] == [
        "shards web: training documents", "shards web: training tokens", "shards web: held-out tokens",
        "shards web · web: training and held-out documents", "shards web · web: training and held-out tokens"]


def test_runs_without_a_common_dataset(site, tmp_path):
    web, docs = documents()
    write(tmp_path / "in", web[:40], docs, "version: 1\nsources:\n  web: {read: jsonl, path: web/*.jsonl}\ndatasets:\n"
                                           "  another: {from: web, steps: [gopher_quality]}\n")
    other = run(tmp_path / "in", tmp_path / "store", "other")
    document = compare_runs(site["first"].run, other.run)
    assert document["documents"] == {} and not document["equal"]
    assert document["only_before"] == ["clean", "deduped"] and document["only_after"] == ["another"]
    assert len(document["notes"]) == 2
    rows = {tuple(row["path"]): row for row in document["figures"]}
    row = rows["datasets", "another", "docs"]
    assert row["before"] is None and row["difference"] is None
    assert row["after"] == sum(r["fate"] == "kept" for r in other.rows["another"].values())
    assert "no dataset in common" in compare_html.render(document)


def test_documents_of_a_missing_part_are_unknown_not_gone(site, tmp_path):
    """The parts of `first` with dropped documents are gone. What the other run has and they may have had is unknown."""
    shutil.copytree(site["first"].store, tmp_path / "store")
    run_ = FinishedRun.open(Store(tmp_path / "store"), "first")
    [node] = [n for n in run_.side("clean").passes if n.name == "clean"]
    gone = list(node.files("dropped.parquet"))
    for info in gone:
        (tmp_path / "store" / info.path).unlink()
    document = compare_runs(run_, site["moved"].run)
    section = document["documents"]["clean"]
    before, after = site["first"].rows["clean"], site["moved"].rows["clean"]
    assert 0 < section["missing"]["before"] <= len(gone) and section["missing"]["after"] == 0
    assert section["changes"]["only_after"] == 0
    lost = {id for id, row in before.items() if row["fate"] == "dropped"}
    assert 0 < section["changes"]["unknown"] <= len(after.keys() - (before.keys() - lost))
    assert section["changes"]["only_before"] > 0          # the other run has all its parts
    [note] = [n for n in document["notes"] if n.startswith("clean")]
    assert gone[0].path in note or any(info.path in note for info in gone)
    assert not document["equal"]


def test_a_damaged_part_is_named_and_not_used(site, tmp_path):
    shutil.copytree(site["first"].store, tmp_path / "store")
    run_ = FinishedRun.open(Store(tmp_path / "store"), "first")
    equal = {info.content for _, info in site["moved"].run.side("clean").parts()}
    parts = run_.side("clean").passes[-1].files("kept.parquet")
    path = tmp_path / "store" / next(info.path for info in parts if info.content not in equal)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    section = compare_runs(run_, site["moved"].run)["documents"]["clean"]
    assert section["missing"] == {"before": 1, "after": 0} and "damaged" in section["missing_parts"]["before"][0]


def test_tasks_without_a_record_are_missing(site, monkeypatch):
    one, two = site["first"].run, site["moved"].run
    side = one.side("clean")
    keys = {record.key for record in side.passes[-1].records()}
    hidden = FinishedRun(one.store, one.name, one.plan, one.recipe, one.report,
                         lambda key: None if key == min(keys) else one.get(key))
    section = compare_runs(hidden, two)["documents"]["clean"]
    assert section["missing"]["before"] == 1 and section["changes"]["only_after"] == 0 < section["changes"]["unknown"]


# -- recipe ----------------------------------------------------------------------------------------------------------
def test_recipes_are_compared_by_key(compared):
    rows = {row["key"]: (row["change"], row["before"], row["after"]) for row in compared["recipe"]}
    assert rows == {"datasets.clean.steps.gopher_quality.min_doc_words": ("changed", 50, 80),
                    "datasets.clean.steps.gopher_quality.min_stop_words": ("changed", 2, 6),
                    "datasets.clean.steps.where.signals.gopher_words.max": ("changed", 400, 300),
                    "datasets.deduped.steps.minhash.verify": ("changed", 0.7, 0.9)}


def test_steps_are_matched_by_name_whatever_stands_in_front():
    before = {"datasets": {"d": {"steps": [{"a": {"x": 1}}, {"b": {}}, {"w": {"y": 1}}, {"w": {"y": 2}}]}}, "old": 1}
    after = {"datasets": {"d": {"steps": [{"c": {}}, {"b": {}}, {"a": {"x": 2, "z": [1]}}, {"w": {"y": 1}},
                                          {"w": {"y": 3}}]}}, "new": True}
    rows = {row["key"]: (row["change"], row["before"], row["after"]) for row in compare_recipes(before, after)}
    assert rows == {"datasets.d.steps": ("changed", ["a", "b", "w", "w#2"], ["b", "a", "w", "w#2"]),
                    "datasets.d.steps.c": ("added", None, {}), "datasets.d.steps.a.x": ("changed", 1, 2),
                    "datasets.d.steps.a.z": ("added", None, [1]), "datasets.d.steps.w#2.y": ("changed", 2, 3),
                    "new": ("added", None, True), "old": ("removed", 1, None)}


def test_secrets_in_recipes_are_masked():
    before = {"train": {"api_key": "hunter22"}, "sources": {"s": {"path": "s3://me:sesame1@b/x"}}, "password": 12345678}
    after = {"train": {"api_key": "hunter23"}, "sources": {"s": {"path": "s3://b/x"}}, "hub": {"password": "sesame2"}}
    rows = compare_recipes(before, after)
    assert [row["key"] for row in rows] == ["train.api_key", "sources.s.path", "hub", "password"]
    assert not any(secret in str(rows) for secret in ("hunter", "sesame", "12345678")), rows
    assert rows[1]["after"] == "s3://b/x" and rows[2]["after"] == {"password": "***"}
    rows = compare_recipes({"hubs": []}, {"hubs": [{"url": "https://h", "password": "sesame3"}, [{"a": "b"}]],
                                          "api_key": ["hunter24", ["hunter25"]]})
    assert rows[0]["after"] == [{"url": "https://h", "password": "***"}, [{"a": "b"}]]
    assert rows[1]["after"] == ["***", ["***"]]


def test_a_recipe_compares_as_equal_to_itself():
    recipe = {"a": [1, {"b": None}], "phases": [{"name": "x", "mix": {"web": 1}}], "none": None}
    assert compare_recipes(recipe, json.loads(json.dumps(recipe))) == []
    assert compare_recipes({"a": 1}, {"a": True}) != []          # YAML's 1 and true are not the same setting
    assert [row["change"] for row in compare_recipes({"a": None}, {})] == ["removed"]


def test_personal_data_in_paths_is_masked(site, tmp_path):
    """As in the report's section `made`."""
    home = tmp_path / "jane.roe@mail.example.org"
    shutil.copytree(site["first"].store, home / "store")
    one = FinishedRun.open(Store(home / "store"), "first")
    other = FinishedRun(one.store, one.name, one.plan, {
        **one.recipe, "sources": {
            "web": {
                "path": f"{home}/web"
            }
        }
    }, one.report, one.get)
    document = compare_runs(one, other)
    for text in (json.dumps(document), compare_html.render(document)):
        assert "jane.roe" not in text and "email@example.com/web" in text and "email@example.com/store" in text


# -- figures ---------------------------------------------------------------------------------------------------------
def numbers(value: Any) -> list[float]:
    """Return all numbers in a section of a report, except those in samples."""
    if isinstance(value, dict):
        return [n for k, v in value.items() if not (k in SAMPLES and isinstance(v, list)) for n in numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


@pytest.mark.parametrize("section", ["sources", "funnel", "datasets", "duplicates", "tokens", "mixture", "passes",
                                     "stages", "tasks", "lineage", "missing_records"])
def test_every_figure_of_both_reports_is_there(site, compared, section):
    for side, name in (("before", "first"), ("after", "second")):
        got = Counter(round(row[side], 9) for row in compared["figures"]
                      if row["path"][0] == section and isinstance(row[side], (int, float)))
        report = Counter(round(n, 9) for n in numbers(site[name].report[section]))
        assert not report - got
        assert set((got - report).elements()) <= {0}             # counts that only the other report has


def test_figures_are_those_of_the_documents(site, compared):
    rows = {tuple(row["path"]): row for row in compared["figures"]}
    for dataset in ("clean", "deduped"):
        for source in ("web", "docs"):
            counts = []
            for name in ("first", "second"):
                kept = [r["text"] for r in site[name].rows[dataset].values() if r["fate"] == "kept"
                        and r["source"] == source]
                counts.append((len(kept), sum(len(text.encode()) for text in kept)))
            if counts == [(0, 0), (0, 0)]:
                continue
            for place, what in enumerate(("docs", "bytes")):
                row = rows["datasets", dataset, "kept", source, what]
                before, after = counts[0][place], counts[1][place]
                assert (row["before"], row["after"], row["difference"]) == (before, after, after - before)
                assert row["relative"] == pytest.approx((after - before) / before)
        for reason, n in Counter((r["stage"], r["reason"]) for r in site["second"].rows[dataset].values()
                                 if r["fate"] == "dropped").items():
            row = rows["datasets", dataset, "reasons", *reason, "docs"]
            assert row["after"] == n
            assert row["before"] == sum((r["stage"], r["reason"], r["fate"]) == (*reason, "dropped")
                                        for r in site["first"].rows[dataset].values())


def test_a_count_that_only_one_report_has_is_0_in_the_other():
    reports = [{"datasets": {"d": {"docs": 1, "dropped_lengths": lengths}}, "licences": {"d": licences},
                "signals": {"d": {"signals": [{"signal": "x", "docs": 1, "bins": {"kept": {}, "dropped": bins}}]}}}
               for lengths, licences, bins in (({}, {}, {}), ({"web": {"9": 2}}, {"web": {"mit": 3}}, {"200": 4}))]
    for before, after in (reports, reports[::-1]):
        rows = [row for row in compare_figures(before, after) if row["difference"] != 0]
        assert sorted(abs(row["difference"] or 0) for row in rows) == [2, 3, 4]
        assert 0 in [row["before"] for row in rows] + [row["after"] for row in rows]


def test_what_an_older_version_did_not_count_is_missing_and_not_zero(site, monkeypatch):
    """Of a dataset, some of whose tasks an older version ran: their counters lack the licences of what they dropped."""
    counted = site["first"].run.report["datasets"]
    name = next(name for name, section in counted.items() if section["dropped_licences"])
    merged = documents_of_report.merged

    def of_fewer(passes: list[Any], what: str) -> dict[str, Any]:
        counts = merged(passes, what)
        if what != "dropped_licences":
            return counts
        return {source: by for source, by in counts.items() if source != min(counts)}

    monkeypatch.setattr(documents_of_report, "merged", of_fewer)
    run = site["first"].run
    old = collect(run.store, run.name, run.get)
    assert counted[name].keys() - old["datasets"][name].keys() == {"dropped_licences", "dropped_pii"}
    Report.model_validate(json.loads(json.dumps(old)))
    rows = {tuple(row["path"]): row for row in compare_figures(old, run.report)}
    for source, by in counted[name]["dropped_licences"].items():
        for licence in by:
            row = rows["datasets", name, "dropped_licences", source, licence]
            assert (row["before"], row["difference"]) == (None, None)
    assert rows["datasets", name, "docs"]["difference"] == 0


def test_a_report_of_another_version_is_collected_again_and_not_written(site, tmp_path, compared):
    shutil.copytree(site["first"].store, tmp_path / "store")
    path = tmp_path / "store" / "runs" / "first" / "report.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 0, "datasets": {}}))
    before = path.read_bytes()
    document = compare_runs(FinishedRun.open(Store(tmp_path / "store"), "first"), site["second"].run, 4)
    assert document["figures"] == compared["figures"] and path.read_bytes() == before


def test_the_comparison_writes_nothing_to_the_store(site):
    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in site["first"].store.rglob("*") if p.is_file()}

    before = state()
    compare_runs(site["first"].run, site["second"].run)
    assert state() == before


# -- the command and the page ----------------------------------------------------------------------------------------
class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs


def test_the_command_prints_text_json_and_a_page(site, tokenmill, tmp_path, compared):
    page = tmp_path / "compare.html"
    said = tokenmill("report", "--compare", "first", "second", "--store", site["first"].store, "--html", page)
    assert said.code == 0 and str(page) in said.out
    n = compared["documents"]["clean"]["changes"]["newly_dropped"]
    assert f"{n:,} newly dropped" in said.out and "gopher_quality.min_doc_words: 50 → 80" in said.out
    said = tokenmill("report", site["second"].store / "runs" / "second", "--compare",
                     site["first"].store / "runs" / "first", "--json", "--examples", "4")
    [document] = said.json()
    assert document == json.loads(json.dumps(compared))


def test_what_changed_comes_first_and_equal_figures_are_folded(site, tokenmill, compared):
    """In the terminal, equal figures are only counted; on the page, they lie in a part that is closed."""
    rows = compare_html.overview(compared)
    different, equal = compare_html.by_difference(rows)
    assert different and equal and len(different) + len(equal) == len(rows)
    out = tokenmill("report", "--compare", "first", "second", "--full", "--store", site["first"].store).out
    table = out.split("\ndocuments and tokens\n")[1].split("\n\n")[0].splitlines()
    assert table[-1].strip() == f"{len(equal):,} are equal"
    assert len(table) == len(different) + 1 and not any(line.endswith(" =") for line in table)
    changed = [any(section["changes"].values()) for _, section in compare_html.datasets(compared)]
    assert changed == sorted(changed, reverse=True)
    page = lxml.html.fromstring(compare_html.render(compared))
    [open_, folded] = page.xpath("//section[@aria-labelledby='figures']//table")
    assert (len(open_.xpath(".//tr")), len(folded.xpath(".//tr"))) == (len(different) + 1, len(equal) + 1)
    assert folded.getparent().tag == "details" and "open" not in folded.getparent().attrib
    assert open_.getparent().tag != "details"


def test_the_command_prints_a_summary_unless_asked_for_all(site, tokenmill, compared):
    arguments = "report", "--compare", "first", "second", "--store", site["first"].store
    brief, full = tokenmill(*arguments).out, tokenmill(*arguments, "--full").out
    assert len(brief.splitlines()) <= 30 < len(full.splitlines())
    for text in (brief, full):
        for name, section in compared["documents"].items():
            for kind in ("newly_kept", "newly_dropped"):
                if n := section["changes"][kind]:
                    assert f"{n:,} {kind.replace('_', ' ')}" in text, name
        assert "gopher_quality.min_doc_words: 50 → 80" in text
    assert not re.search(r"rss|cpu s|wall s|content  |· bins ·", full)


def test_a_training_that_only_one_run_had_is_a_note_and_no_figures():
    def rows(*sides):
        return [{"path": ["training", "loss"], "before": sides[0], "after": sides[1], "difference": None,
                 "relative": None, "measured": False}]

    assert compare_html.one_sided(rows(3.1, None)) == {"training": "before"}
    assert compare_html.one_sided(rows(3.1, 3.0)) == {}
    assert compare_html.sections({"figures": rows(3.1, None)}, 9) == []
    assert len(compare_html.sections({"figures": rows(3.1, 3.0)}, 9)) == 1


def test_a_domain_outside_of_a_list_is_not_said_to_be_missing():
    row = {"path": ["domains", "clean", "top", "a.example", "kept"], "before": None, "after": 2}
    assert compare_html.figure(row, "before") == "not in the top list"


def test_datasets_in_which_documents_changed_come_first():
    same, moved = {"changes": {"newly_kept": 0}}, {"changes": {"newly_kept": 2}}
    document = {"documents": {"a": same, "b": moved, "c": same, "d": moved}}
    assert [name for name, _ in compare_html.datasets(document)] == ["b", "d", "a", "c"]


def test_hostile_texts_stay_harmless(site, tokenmill, tmp_path):
    page = tmp_path / "compare.html"
    said = tokenmill("report", "--compare", site["moved"].store / "runs" / "moved",
                     site["first"].store / "runs" / "first", "--examples", "20", "--full", "--html", page)
    html = page.read_text()
    assert "alert(1)" in html and "alert(1)" in said.out            # the hostile documents are among the examples
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", said.out + html)
    assert not any(secret in said.out + html for secret in SECRETS)
    parsed = Page(html)
    assert not {"script", "img", "iframe", "link", "object", "a onclick"} & parsed.tags.keys()
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name == "src"]
    assert all((value or "").startswith("#") for name, value in parsed.attributes if name == "href")
    assert "default-src 'none'" in html
    said = tokenmill("report", "--compare", site["moved"].store / "runs" / "moved",
                     site["first"].store / "runs" / "first", "--examples", "20", "--json")
    assert not any(secret in said.out for secret in SECRETS) and said.json()


def test_a_page_of_many_figures_is_cut_and_says_so(compared):
    document = json.loads(json.dumps(compared))
    document["figures"] += [{"path": ["datasets", "clean", "reasons", "stage", f"reason {i}", "docs"], "before": i,
                             "after": 2 * i, "difference": i, "relative": 1.0, "measured": False}
                            for i in range(10_000)]
    document["recipe"] += [{"key": f"key{i}", "change": "added", "before": None, "after": "x" * 50_000}
                           for i in range(80)]
    document["documents"]["clean"]["groups"] *= 500
    html = compare_html.render(document)
    assert len(html.encode()) <= 1 << 20 and html.count("more") >= 3


@pytest.mark.parametrize(("arguments", "word"), [
    (["first", "--html", "x.html"], "--compare"), (["--compare", "nobody", "first"], "nobody"),
    (["--compare", "first", "nobody"], "nobody"), (["--compare", "first", "second", "--html", "/no/such/folder/x"],
                                                   "/no/such/folder/x")])
def test_bad_usage_says_what_to_do(site, tokenmill, arguments, word):
    said = tokenmill("report", *arguments, "--store", site["first"].store)
    assert said.code in (1, 2) and word in said.err and len(said.err.splitlines()) == 1


@pytest.mark.parametrize("file", ["plan.json", "tasks.parquet"])
def test_a_run_that_has_not_finished_cannot_be_compared(site, tmp_path, file):
    shutil.copytree(site["first"].store / "runs", tmp_path / "store" / "runs")
    (tmp_path / "store" / "runs" / "first" / file).unlink()
    with pytest.raises(NotFinished):
        FinishedRun.open(Store(tmp_path / "store"), "first")


def test_the_json_is_as_docs_cli_md_describes_it(compared):
    page = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
    section = page.partition("### `tokenmill report`")[2].partition("| key | content |\n|---|---|\n")[2]
    rows = [line.split("|") for line in section.partition("\n\n")[0].splitlines()]
    described = {name for row in rows for name in re.findall(r"`([\w.]+)`", row[1])}
    section = compared["documents"]["clean"]
    inside = section.keys() - {"same", "missing_parts"}
    assert described == {*compared, *(f"documents.NAME.{key}" for key in inside), "missing_parts"}
    content = {re.findall(r"`([\w.]+)`", row[1])[0]: set(re.findall(r"`(\w+)`", row[2])) for row in rows}
    assert set(compared["before"]) == content["before"] and set(section) == content["documents"]
    assert set(compared["recipe"][0]) <= content["recipe"]
    assert set(compared["figures"][0]) <= content["figures"]
    assert set(section["changes"]) == content["documents.NAME.changes"]
    assert set(section["groups"][0]) <= content["documents.NAME.groups"]
    example = section["examples"]["newly_dropped"][0]
    assert {*example, *example["after"], *example["after"]["decided"]} - {"id", "source"} \
        <= content["documents.NAME.examples"]
