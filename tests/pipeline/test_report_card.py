"""The dataset card, and the head of the report page with its totals and its size, for generated reports."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from typing import Any

import pytest
import yaml
from huggingface_hub import DatasetCard
from huggingface_hub.repocard_data import DatasetCardData
from markdown_it import MarkdownIt

from pipeline.cluster import origin
from pipeline.passes.licences import licence_label
from pipeline.report import markdown
from pipeline.report.card import language_codes, render_card, size_category
from pipeline.report.collect import collect
from pipeline.report.html import render
from pipeline.report.recipe_words import first_sentence, recipe_of, steps_of, unscrubbed
from pipeline.report.schema import Report
from pipeline.report.trim import LARGEST, ROWS, trimmed
from tests.e2e.test_report_page import check_page
from tests.pipeline.generated_report import generated

HOSTILE = ("<script>alert(1)</script>", "[x](javascript:alert(1))", "![i](http://evil.example/p.png)", "a | b || c",
           "# heading", "- item", "1. item", "`code` ``` fence", "--- \n---\n# out", "&lt;b&gt; &#60;i&#62;",
           "https://evil.example/x www.evil.example me@evil.example", "*bold* _it_ ~~gone~~ $x$ @all :smile:",
           "\u202eright to left\u202c \x1b[31m\x00", "\ud800 lone", "| --- |", "\\", "no", "null", "key: value # c",
           "'\"")


GITHUB = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
#: what GitHub and the hub turn into links and mentions though nothing marks it: addresses, names after @, :emoji:
BARE = re.compile(r"(?<!\\)(?:://|@)|\bwww\.|(?<!\\):\w+(?<!\\):")


def rendered(text: str) -> tuple[str, list[str]]:
    """Return (the text of Markdown with tables as a reader sees it, the types of its tokens)."""
    page = GITHUB.parse(text)
    inside = [child for token in page for child in token.children or ()]
    words = "".join(c.content if c.type in ("text", "code_inline", "text_special") else "\n" for c in inside)
    return words, [t.type for t in [*page, *inside]]


# -- Markdown --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_only_text(value):
    shown = " ".join(markdown.visible(value).split())
    for text in (markdown.plain(value), f"- {markdown.plain(value)}", f"Some {markdown.plain(value)} words."):
        words, kinds = rendered(text)
        assert shown in words
        assert not {"html_inline", "html_block", "link_open", "image", "heading_open", "fence", "hr", "em_open",
                    "strong_open", "s_open", "code_inline", "ordered_list_open"} & set(kinds), kinds
        assert kinds.count("bullet_list_open") == text.startswith("- ")
    assert not BARE.search(markdown.plain(value))
    words, kinds = rendered(f"Run {markdown.code(value)}.")
    assert kinds.count("code_inline") == 1 and shown.strip("`") in words and "link_open" not in kinds
    lines = markdown.block(f"{value}\nlast", "yaml")
    [fence] = GITHUB.parse("\n".join([*lines, "after"]))[:1]
    assert fence.type == "fence" and fence.content.endswith("last\n")
    rows = [[markdown.plain(value), "1"], ["x", "2"]]
    words, kinds = rendered("\n".join(markdown.table(["name", "n"], rows)))
    assert kinds.count("td_open") == 4 and shown in words


def test_a_table_without_rows_is_nothing():
    assert markdown.table(["a"], []) == []


# -- front matter ----------------------------------------------------------------------------------------------------
def front(document: dict[str, Any]) -> DatasetCardData:
    card = render_card(document)
    assert card.startswith("---\n")
    data = DatasetCard(card).data
    assert isinstance(data, DatasetCardData)
    assert DatasetCardData(**yaml.safe_load(card.split("---\n")[1])).to_dict() == data.to_dict()
    return data


def test_front_matter_is_what_the_hub_reads():
    data = front(generated(3)).to_dict()
    assert data == {"pretty_name": "generated", "size_categories": ["n<1K"], "license": ["mit"],
                    "language": ["en", "no"], "task_categories": ["text-generation"],
                    "source_datasets": ["user/source-0000", "user/source-0001", "user/source-0002"],
                    "configs": [{"config_name": "clean", "data_files": "datasets/clean/part-*.parquet"}]}


def test_what_is_not_known_is_left_out():
    document = generated(2, streams=0)
    document["made"] |= {"recipe": None, "author": None, "at": None, "host": None, "name": None}
    document["mixture"], document["order"], document["course"] = [], None, None
    document["order_quality"] = None
    section = document["datasets"]["clean"]
    section["languages"] = {"source-0000": {"": 18}}
    document["licences"] = {"clean": {"source-0000": {"mit": 9}}}
    assert set(front(document).to_dict()) == {"pretty_name", "size_categories", "configs"}
    card = render_card(document)
    for sentence in ("The recipe of this run is not known.", "Not known: no step of the recipe identifies languages",
                     "The licence of 50.0% of the documents is not known.", "Overlap with benchmarks is not known"):
        assert sentence in card
    assert "Tokens and mixture" not in card
    document["licences"] = {"clean": {"source-0000": {"mit": 9}, "source-0001": {"other": 9}}}
    assert front(document).license is None, "another licence is not named by the hub"


@pytest.mark.parametrize(("docs", "category"), [
    (0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (9999, "1K<n<10K"), (10**6, "1M<n<10M"), (10**9, "1B<n<10B"),
    (10**12 - 1, "100B<n<1T"), (10**12, "n>1T")])
def test_size_categories(docs, category):
    assert size_category(docs) == category


def test_only_codes_of_languages_are_named():
    assert language_codes({"eng_Latn": 50, "en": 10, "no": 30, "": 9, "<b>": 30, "English": 30, "fr": 1}) == [
        "eng", "no", "en"]
    assert language_codes({}) == []


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_names_stay_values_of_the_front_matter(value):
    document = generated(2)
    document["about"] = {"name": value, "version": 1, "title": value, "after": [value], "changed": [value]}
    data = front(document)
    assert data.pretty_name == (" ".join(markdown.visible(value).split()) or "corpus")
    assert set(data.to_dict()) == set(front(generated(2)).to_dict())


# -- the card --------------------------------------------------------------------------------------------------------
def hostile(document: dict[str, Any], value: str) -> dict[str, Any]:
    """Return the report with `value` in every field that a document, a path or a person can fill."""
    document = copy.deepcopy(document)
    document["made"] |= dict.fromkeys(("at", "host", "author", "version", "python", "name", "store"), value)
    document["made"]["recipe"] += f"code: [{json.dumps(value)}]\n"
    document["warnings"] = [value]
    section = document["datasets"]["clean"]
    section["quarantined"] = {value: 3}
    section["quarantine_samples"] = [{"id": value, "source": value, "file": value, "record": 1, "stage": value,
                                      "reason": value, "detail": value}]
    section["languages"] = {"source-0000": {value: 9}, "source-0001": {"en": 9}}
    section["reasons"][0] |= {"reason": value, "stage": value, "samples": [
        {**s, "url": value, "file": value, "excerpt": value} for s in section["reasons"][0]["samples"]]}
    document["samples"]["clean"] = [{**s, "url": value, "excerpt": value} for s in document["samples"]["clean"]]
    document["totals"]["unreadable"] = {value: 2}
    document["licences"]["clean"]["source-0000"] = {value: 1}
    return document


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_report_is_only_text(value):
    document = hostile(generated(2), value)
    benign = rendered(render_card(hostile(generated(2), "word")).partition("\n---\n")[2])[1]
    card = render_card(document)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\ud800-\udfff]", card)
    kinds = rendered(card.partition("\n---\n")[2])[1]
    for kind in ("html_inline", "html_block", "link_open", "image", "heading_open", "fence", "td_open", "tr_open",
                 "list_item_open", "hr"):
        assert kinds.count(kind) == benign.count(kind), kind
    check_page(render(document))


def test_the_steps_are_said_in_words():
    document = generated(2)
    card = render_card(document)
    assert "1. **gopher\\_quality**: Drop documents that do not read like prose" in card
    assert "   - fewest words; null\\: no such rule: 50" in card
    assert "2. **mine\\:Own**: a step of the recipe's author." in card and "   - deep: a 1" in card
    recipe = recipe_of(document)
    assert [s.scrubs for s in steps_of(recipe, "clean")] == [False, False, True]
    assert unscrubbed(recipe, ["clean"]) == []
    recipe["datasets"]["clean"]["steps"].pop()
    assert unscrubbed(recipe, ["clean"]) == ["source-0000", "source-0001"]
    recipe["datasets"]["later"] = {"from": "clean", "steps": [{"pii": {}}]}
    assert unscrubbed(recipe, ["later"]) == []
    assert first_sentence("One, e.g. this.\n  Two.") == "One, e.g. this" and first_sentence("") == ""


def test_shares_of_the_input_are_recomputed():
    """Judged documents = kept + dropped, here 18 + 5·2, on the card and on the page."""
    card, judged = render_card(generated(2)), 28
    assert "**clean** kept 18 of 28 documents that were judged (64.3%); 5 more were quarantined." in card
    assert f"| stage0 | reason\\_0 | 2 | {2 / judged:.1%} |" in card
    assert "| quarantine | error\\:E0 | 1 | – |" in card
    page = render(generated(2))
    shares = page.partition("<caption>Shares of the input of clean</caption>")[2].partition("</table>")[0]
    assert "28 documents judged" in page and f">{2 / judged:.1%}</td>" in shares
    reasons = page.partition("<caption>Drop reasons of clean</caption>")[2].partition("</table>")[0]
    assert ">of dropped</th>" in reasons and ">20.0%</td>" in reasons
    assert "| **all** |  | 4 | 2 kB | 29 | 18 | 62.1% | 211 |" in card
    assert "| en | 12 | 66.7% |" in card and "| not identified | 2 | 11.1% |" in card
    assert "- 11.1% of the documents is not known" not in card and "The language of 11.1% of the documents" in card


def test_documents_that_were_taken_down_are_said_not_to_have_failed():
    document = generated(2)
    words = "3 documents, counted as quarantined with the reason"
    assert "taken down" not in render_card(document) and words not in render(document)
    document["datasets"]["clean"]["quarantined"]["taken_down"] = 3
    assert "Of the quarantined ones, 3 documents had been taken down" in render_card(document)
    assert words in render(document)


def test_no_share_is_given_where_final_datasets_share_a_source():
    document = generated(2, datasets=2, streams=0)
    card = render_card(document)
    assert "of those read" not in card and "Documents may be in several of these datasets" in card
    assert "| **all** |  | 4 | 2 kB | 29 | 36 | – | 0 |" in card and "| 14 | 18 | – | 0 |" in card
    table = render(document).partition("<caption>Sources and their sums</caption>")[2].partition("</table>")[0]
    assert "%</td>" not in table and "no share is given" in render(document)
    many = copy.deepcopy(document)
    for section in many["datasets"].values():
        section["docs"], section["kept"] = 600, {s: {"docs": 300, "bytes": 900} for s in section["kept"]}
    assert front(many).to_dict()["size_categories"] == ["n<1K"], "600 documents, each in two datasets"
    apart = json.loads(json.dumps(many))             # deepcopy would keep the section that the datasets share
    for name, source in zip(("clean", "clean-1"), ("source-0000", "source-0001"), strict=True):
        apart["datasets"][name] |= {"kept": {source: {"docs": 600, "bytes": 900}}}
    assert front(apart).to_dict()["size_categories"] == ["1K<n<10K"] and "of those read" in render_card(apart)


# -- the page --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_report_of_500_sources_is_small_and_says_what_it_leaves_out():
    document = generated(500, reasons=30, scores=20, warnings=700)
    Report.model_validate(document)
    page = render(document)
    assert len(page.encode()) <= LARGEST
    check_page(page)
    cut = re.search(r"The largest are shown; (\d+) sources more in", page)
    shown = 500 - int(cut[1])
    assert f"{500 - shown} other sources" in page and "warnings more in" in page and "streams more in" in page
    assert "lines more in" in page, "the recipe names 500 sources"
    table = page.partition("<caption>Sources and their sums</caption>")[2].partition("</table>")[0]
    rows = [[re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", row)]
            for row in re.findall(r"<tr><td>.*?</tr>|<tr><td class=\"group\">.*?</tr>", table, re.S)]
    assert len(rows) == shown + 2
    numbers = [[int(row[i].replace(",", "")) for i in (1, 3, 4, 7, 8)] for row in rows]
    assert [sum(column) for column in zip(*numbers[:-1])] == numbers[-1]
    reads = [14 + i for i in range(500)]
    assert numbers[-1][:4] == [1000, sum(reads), 4500, 30 * 500]
    assert [n[1] for n in numbers[:-2]] == reads[-shown:], "those with the most documents"
    assert len(render_card(document).encode()) < 200_000
    front(document)


@pytest.mark.slow
def test_a_page_shrinks_until_it_fits():
    for sources, sizes in ((60, {"datasets": 12, "reasons": 60, "scores": 40}),
                           (30, {"datasets": 40, "reasons": 10, "streams": 300})):
        page = render(generated(sources, **sizes))
        assert len(page.encode()) <= LARGEST and "see <code>report.json</code>" not in page, "no section is left out"
        check_page(page)


def _long_names(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    for i in range(5):
        text = text.replace(f"reason_{i}", f"reason_{i}<" + "é" * 60_000)
    document.update(json.loads(text))


def _many_tasks(document: dict[str, Any]) -> None:
    for section in document["datasets"].values():
        section["contamination"] = {f"task-{i}{'-' * 200}": {"items": {"test": ["1"]}, "dropped": 1, "cut": 0,
                                                             "noted": 0} for i in range(1500)}


def _many_reasons_to_skip(document: dict[str, Any]) -> None:
    for name in document["names"]["sources"][-ROWS[-1]:]:              # those with the most documents, which stay
        document["sources"][name]["skipped"] = {f"not the pattern {i} </section>": i for i in range(6000)}


def _long_warnings(document: dict[str, Any]) -> None:
    document["warnings"] = ["</section><pre>" + "w" * 700_000] * 2


@pytest.mark.parametrize("grow", [_long_names, _many_tasks, _many_reasons_to_skip, _long_warnings])
def test_a_page_that_does_not_fit_with_few_rows_leaves_out_its_largest_sections(grow):
    document, heading = generated(40, reasons=12, datasets=3), r'<section [^>]*aria-labelledby="(\w+)">\s*<h2.*?</h2>'
    whole = render(document)
    assert "see <code>report.json</code>" not in whole
    grow(document)
    page = render(document)
    assert len(page.encode()) <= LARGEST
    check_page(page)
    assert 1 <= len(re.findall(heading + r'\n<p class="say">This would make the page larger', page)) <= 3
    assert set(re.findall(heading, page)) >= set(re.findall(heading, whole)) - {"samples", "lineage"}
    assert "<caption>Sources and their sums</caption>" in page and "Made by Tokenmill" in page


def test_a_small_report_is_not_cut():
    document = generated(3)
    shown, cut = trimmed(document, 40)
    assert cut == {} and shown["names"] == document["names"]
    assert " more in <code>report.json" not in render(document)
    assert trimmed(document, 2)[1]["sources"] == 1 and trimmed(document, 2)[0]["names"]["sources"] == [
        "source-0001", "source-0002"]
    few = trimmed(document, 2)[0]["datasets"]["clean"]["reasons"]
    assert [r["docs"] for r in few] == [3, 3, 9], "rare reasons are one row, so that all rows add up"


def test_the_head_says_where_the_report_comes_from():
    page = render(generated(2))
    said = re.sub("<[^>]+>", "", page.partition("<header>")[2].partition("</header>")[0])
    for words in ("Begun 2026-11-26 16:56:42 UTC by An Author on machine.",
                  "Made by Tokenmill 0.1.0 with Python 3.11.7 in the store s3://bucket/store.",
                  "The recipe as it ran", "- gopher_quality: {min_doc_words: 50}"):
        assert words in said
    document = generated(2)
    document["made"] |= dict.fromkeys(("at", "host", "author", "version", "python", "recipe"))
    head = render(document).partition("<header>")[2].partition("</header>")[0]
    assert "Begun at an unknown time." in head and "recipe as it ran" not in head


def test_kept_samples_stand_beside_dropped_ones_of_the_same_source():
    page = render(generated(2, reasons=2)).partition('id="samples"')[2].partition("</section>")[0]
    pairs = page.split('<div class="pair">')[1:]
    assert len(pairs) == 2
    for source, pair in zip(("source-0000", "source-0001"), pairs):
        kept, dropped = pair.split("<b>dropped</b>")
        assert kept.count(f"https://{source}.example/") == 2 and re.findall("<code>(.*?)</code>", kept) == []
        assert f"https://{source}.example/" in dropped and "stage0 · reason_0" in pairs[0]
    assert 'id="samples"' not in render(generated(2, reasons=0)), "nothing was dropped"


def test_a_source_without_samples_of_dropped_documents_says_how_many_were_dropped():
    document = generated(2, reasons=1)
    [reason] = document["datasets"]["clean"]["reasons"]
    reason["samples"] = reason["samples"][:1]
    for sources, text in (({"source-0000": 1, "source-0001": 4}, "4 documents, but none among the samples."),
                          ({"source-0000": 5}, "None was dropped.")):
        reason["sources"] = sources
        page = render(document).partition('id="samples"')[2].partition("</section>")[0]
        assert text in page.partition("<b>dropped</b>")[2].partition("<b>dropped</b>")[2]


def test_domains_with_one_document_are_not_listed():
    document = generated(2)
    section = document["domains"]["clean"]
    for i, row in enumerate(section["top"]):
        row |= {"kept": 1, "dropped": 3 - i if i < 3 else 0}
    page = render(document).partition('id="domains"')[2].partition("</section>")[0]
    assert re.findall(r"<td[^>]*>(d\d+\.example)</td>", page) == ["d0.example", "d1.example", "d2.example"]
    assert "and 47 smaller domains" in page
    for row in section["top"]:
        row |= {"kept": 1, "dropped": 0}
    page = render(document).partition('id="domains"')[2].partition("</section>")[0]
    assert "No domain has more than one document." in page and "d0.example" not in page


def test_every_link_of_the_head_leads_to_a_section_in_the_order_of_the_page():
    for document in (generated(2), generated(1, reasons=0, scores=0)):
        page = render(document)
        links = re.findall('<a href="#([^"]*)">([^<]*)</a>', page.partition("<nav")[2].partition("</nav>")[0])
        headings = re.findall('<h2 id="([^"]*)">([^<]*)</h2>', page)
        assert links == [heading for heading in headings if heading[0] != "warnings"]


# -- where it comes from ---------------------------------------------------------------------------------------------
def test_the_author_is_the_environments_or_gits(monkeypatch, tmp_path):
    for name in origin.AUTHOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text("[user]\n\tname = Git Name\n\temail = git@mail.example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(origin, "GIT_S", 300.0)
    assert origin.author() == "Git Name" and origin.origin()["author"] == "Git Name"
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Other  Name\n")
    assert origin.author() == "Other Name"
    monkeypatch.setenv("TOKENMILL_AUTHOR", "Me <me.myself@mail.example.org>")
    assert origin.author() == "Me <email@example.com>"
    monkeypatch.setenv("TOKENMILL_AUTHOR", " ")
    monkeypatch.delenv("GIT_AUTHOR_NAME")
    (tmp_path / "config").write_text("")
    assert origin.author() == "" and "author" not in origin.origin()

    def hangs(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("git", 5)

    for broken in (hangs, lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("git"))):
        monkeypatch.setattr(subprocess, "run", broken)
        assert origin.author() == ""


def test_secrets_and_addresses_in_the_recipe_are_masked(tmp_path, tokenmill, monkeypatch):
    from pipeline.store.fs import Store
    from pipeline.store.log import Log

    home = tmp_path / "jane.roe@mail.example.org"
    (home / "docs").mkdir(parents=True)
    (home / "docs" / "a.txt").write_text("A few words.")
    (home / "r.yaml").write_text("version: 1\nsources: {docs: {read: text, path: docs}}\n"
                                 "datasets: {all: {from: docs, steps: []}}\n")
    monkeypatch.setenv("TOKENMILL_AUTHOR", "Jane <jane.roe@mail.example.org>")
    done = tokenmill("run", home / "r.yaml", "--store", tmp_path / "store", "--backend", "inline", "--quiet", "--name",
                     "r")
    assert done.code == 0, done.err
    folder = tmp_path / "store" / "runs" / "r"
    assert "jane.roe@mail" in (folder / "recipe.yaml").read_text(), "the run itself needs the path"
    for name in ("report.json", "report.html", "report.md", "run.json"):
        text = (folder / name).read_text()
        assert "jane.roe" not in text or name == "run.json", name
    made = json.loads((folder / "report.json").read_text())["made"]
    assert made["author"] == "Jane <email@example.com>" and "email@example.com/docs" in made["recipe"]
    secret = "AKIA" + "ABCDEFGHIJKLMNOP"
    with open(folder / "recipe.yaml", "a") as f:
        f.write(f"other: s3://{secret}:{'x' * 40}@bucket\n")
    store = Store(str(tmp_path / "store"))
    document = collect(store, "r", Log.read(store).get)
    assert secret not in json.dumps(document) and "x" * 40 not in json.dumps(document)
    (folder / "recipe.yaml").write_bytes(b"\xff{")
    (folder / "run.json").write_text("[]")
    unknown = dict.fromkeys(("at", "host", "author", "version", "python", "name", "recipe"))
    assert collect(store, "r", Log.read(store).get)["made"] == {**unknown, "store": str(tmp_path / "store")}


# -- licences --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("meta", "label"), [
    ({}, ""), ({"licence": ""}, ""), ({"licence": "MIT"}, "mit"), ({"licence": "GPL-3.0-or-later"}, "gpl-3.0"),
    ({"licence": "Apache-2.0 OR MIT"}, "other"), ({"licence": "<b>"}, "other"), ({"licence": "x" * 10**6}, "other"),
    ({"licence": ["MIT"]}, "other"), ({"license": "ODbL-1.0"}, "odbl"),
    ({"license": "https://creativecommons.org/licenses/by-sa/4.0/deed.de"}, "cc-by-sa-4.0"),
    ({"license": "http://creativecommons.org/publicdomain/zero/1.0/"}, "cc0-1.0"),
    ({"license": "https://creativecommons.org/licenses/by/1.0/"}, "other"),
    ({"license": "https://evil.example/creativecommons.org/licenses/by/4.0/"}, "other")])
def test_licence_labels(meta, label):
    assert licence_label(meta) == label


def test_the_page_says_why_stages_took_longer_than_their_pass():
    """A pass that judges documents again by stored signals counts the time of the stages that computed these."""
    pages = [" ".join(re.sub("<[^>]+>", "", render(generated(2, reasons=stages))).split()) for stages in (3, 6)]
    assert ["clean judged documents again by stored signals" in page for page in pages] == [False, True]
