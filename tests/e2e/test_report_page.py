"""report.html and `tokenmill report`: rewriting it gives the same file, personal data is removed, hostile text is
escaped, it is one file, and it shows the training."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.cli.training import forward
from pipeline.report.card import render_card
from pipeline.report.html import render
from tests.e2e.report_site import EVIL_URL, SECRETS, Site
from tests.service.shard_site import RECIPE as SHARDS
from tests.service.shard_site import make_site

ROOT = Path(__file__).resolve().parents[2]
#: elements the page is made of; nothing a document says may add one
ELEMENTS = {"html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "h3", "p", "code", "nav",
            "a", "div", "b", "span", "section", "ul", "li", "table", "caption", "tr", "th", "td", "svg", "rect", "text",
            "i", "small", "details", "summary", "blockquote", "br", "mark", "footer", "line", "polyline", "circle",
            "pre", "path", "g"}


@pytest.fixture(scope="module")
def site(report_site) -> Site:
    return report_site


class Elements(HTMLParser):
    """Parses a page. `found` has all its elements with their attributes, and `wrong` the unbalanced tags."""

    VOID = ("meta", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def check_page(html: str) -> Elements:
    """Check what must hold for every report: only known elements, balanced, nothing is loaded or executed, and every
    part has a label. Returns the parsed page."""
    page = Elements(html)
    assert not page.wrong and not page.open
    assert {tag for tag, _ in page.found} <= ELEMENTS
    for tag, attrs in page.found:
        assert not [a for a in attrs if a.startswith("on") or a in ("src", "srcset", "xlink:href", "action")], attrs
        assert "href" not in attrs or (attrs["href"].startswith("#") and tag == "a")
    ids = [attrs["id"] for _, attrs in page.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for t, a in page.found if t == "a"} <= set(ids)
    assert {a["aria-labelledby"] for t, a in page.found if t == "section"} <= set(ids)
    assert all(a.get("aria-label") or a.get("aria-hidden") == "true" for t, a in page.found if t == "svg")
    assert "url(" not in html and "@import" not in html
    return page


def test_rewritten_identically(site):
    """`tokenmill report`, another process, reads the log and the parts and writes the same bytes."""
    paths = [site.folder / "report.json", site.folder / "report.html", site.folder / "report.md",
             site.store / "report.json"]
    before = [p.read_bytes() for p in paths]
    for p in paths:
        p.unlink()
    done = subprocess.run([sys.executable, "-m", "pipeline.cli", "report", site.run, "--store", str(site.store)],
                          cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr
    assert [p.read_bytes() for p in paths] == before
    assert render(json.loads(before[0])).encode() == before[1], "the page must not need more than report.json"
    assert render_card(json.loads(before[0])).encode() == before[2]


def test_addresses_do_not_reach_the_report(site):
    planted = " ".join(p.html + p.url for p in site.responses) + " ".join(site.notes)
    assert SECRETS[0] in planted and SECRETS[5] in planted
    for name in ("report.json", "report.html", "report.md"):
        text = (site.folder / name).read_text()
        for secret in (*SECRETS, "8.8.4.4"):
            for form in (secret, secret.replace("@", "%40"), secret.replace("@", "&#64;"), secret.partition("@")[0]):
                assert form not in text, f"{form} in {name}"
    said = json.loads((site.folder / "report.json").read_text())
    dropped = [s for r in said["datasets"]["clean"]["reasons"] if r["reason"] == "lorem_ipsum" for s in r["samples"]]
    assert len(dropped) == 3 and any("email@example.com" in s["excerpt"] for s in dropped), "they are shown"
    assert sum("email@example.com" in s["url"] for s in dropped) == 2, "also where a URL says %40"
    kept = [p["kept"] for p in said["duplicates"][0]["pairs"] if p["kept"]["source"] == "docs"]
    assert kept and all("Ask email@example.com from" in s["excerpt"] for s in kept), "no step scrubbed this source"
    failed = [s for s in said["datasets"]["plain"]["quarantine_samples"] if s["reason"] == "error:ValueError"]
    assert len(failed) == 1 and "email@example.com" in failed[0]["detail"] and "email@example.com" in failed[0]["file"]


def test_hostile_pages_are_only_text(site):
    html = (site.folder / "report.html").read_text()
    check_page(html)
    assert "&lt;script&gt;alert(1)" in html, "the planted page is shown, as text"
    assert "javascript:alert(&#39;x&#39;)//&#34;&gt;&lt;b onmouseover=alert(3) c=d" in html
    assert "alert(1)" in json.dumps(site.report) and EVIL_URL in [
        s["url"] for d in site.report["datasets"].values() for r in d["reasons"] for s in r["samples"]]


def test_reasons_stand_as_inspect_takes_them(site):
    html = (site.folder / "report.html").read_text()
    said = site.report["datasets"].values()
    reasons = {r["reason"] for d in said for r in d["reasons"]} | {name for d in said for name in d["quarantined"]}
    assert {"lorem_ipsum", "error:ValueError"} <= reasons
    assert all(f"<code>{escape(reason)}</code>" in html for reason in reasons)


def test_names_and_reasons_from_documents_are_escaped(site):
    document = site.report
    evil = "<script>x</script>\"'"
    document["run"] = evil
    document["warnings"].append(evil)
    document["datasets"]["deduped"]["languages"]["web"] = {evil: 3, "": 1}
    document["datasets"]["deduped"]["quarantined"][evil] = 1
    document["duplicates"][1]["pairs"][0]["removed"]["excerpt"] = evil + " and"
    check_page(render(document))


def test_a_run_without_anything(tmp_path, tokenmill):
    """A recipe that only reads, over an empty folder's worth of documents: sections without content are left out."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("")
    (tmp_path / "r.yaml").write_text("version: 1\nsources: {docs: {read: text, path: docs}}\n"
                                     "datasets: {all: {from: docs, steps: []}}\n")
    done = tokenmill("run", tmp_path / "r.yaml", "--store", tmp_path / "store", "--backend", "inline", "--quiet",
                     "--name", "none")
    assert done.code == 0, done.err
    html = (tmp_path / "store" / "runs" / "none" / "report.html").read_text()
    check_page(html)
    assert not re.search(r'id="(mixture|training|duplicates|tokens|shape)"', html)
    assert "1 file" in html and "1 files" not in html


def test_numbers_of_the_page(site):
    """The tiles say what the figures say."""
    page = (site.folder / "report.html").read_text()
    tiles = re.findall(r'class="tile"><b>(.*?)</b><span>(.*?)</span>', page)
    said = {what: n for n, what in tiles}
    read = sum(rows[0]["docs"] for rows in site.report["funnel"].values())
    assert said["documents read from 3 sources"] == f"{read:,}"
    assert said["records quarantined"] == str(sum(sum(d["quarantined"].values())
                                                  for d in site.report["datasets"].values()))


# -- training --------------------------------------------------------------------------------------------------------
def a_training(folder: Path, loss: float):
    """Return a function that stands in for the trainer's command: it writes a summary to the folder of the run."""
    def main(arguments: list[str]) -> int:
        (folder / "train").mkdir(exist_ok=True)
        (folder / "train" / "summary.json").write_text(json.dumps({
            "parameters": 10, "steps": 3, "tokens": 90, "seconds": 1.5, "train_loss_last": loss, "heldout_loss": loss,
            "heldout_loss_before": 9.0, "streams": {}}))
        return 0

    return main


@pytest.fixture
def copied(site, tmp_path) -> Path:
    """The folder of the run and the store's report, as somebody copied them to another cluster: without the log and the
    parts."""
    shutil.copytree(site.folder, tmp_path / "store" / "runs" / site.run)
    shutil.copyfile(site.store / "report.json", tmp_path / "store" / "report.json")
    return tmp_path / "store" / "runs" / site.run


def test_train_run_adds_its_section_to_the_report(copied, monkeypatch, capsys):
    before = json.loads((copied / "report.json").read_text())
    assert before["training"] is None and "held-out loss" not in (copied / "report.html").read_text()
    for arguments, loss in (([str(copied)], 4.25), ([copied.name, "--store", str(copied.parents[1]), "--quiet"], 3.75)):
        monkeypatch.setattr("trainer.__main__.main", a_training(copied, loss))
        assert forward(["run", *arguments]) == 0
        after = json.loads((copied / "report.json").read_text())
        assert after["training"]["heldout_loss"] == loss and {**after, "training": None} == before
        assert f"<b>{loss:.2f}</b><span>held-out loss" in (copied / "report.html").read_text()
        assert json.loads((copied.parents[1] / "report.json").read_text()) == after
    assert capsys.readouterr().out == f"report: {copied}/report.html\n"


def test_the_report_stays_as_it_is(copied, monkeypatch):
    """After a training elsewhere, by another rank, without the pipeline's packages; the store's is of a later run."""
    before = (copied / "report.json").read_bytes()
    monkeypatch.setattr("trainer.__main__.main", a_training(copied, 4.25))
    assert forward(["run", str(copied), "--out", "elsewhere"]) == 0
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        assert forward(["run", str(copied)]) == 0
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "pipeline.report.html")
        patch.setitem(sys.modules, "jinja2", None)
        assert forward(["run", str(copied)]) == 0
    monkeypatch.setattr("trainer.__main__.main", lambda arguments: 1)
    assert forward(["run", str(copied)]) == 1
    assert (copied / "report.json").read_bytes() == before
    later = json.dumps({"run": "later"}).encode()
    (copied.parents[1] / "report.json").write_bytes(later)
    monkeypatch.setattr("trainer.__main__.main", a_training(copied, 4.25))
    assert forward(["run", str(copied)]) == 0
    assert (copied / "report.json").read_bytes() != before and (copied.parents[1] / "report.json").read_bytes() == later


@pytest.fixture(scope="module")
def trained(site) -> Site:
    """A model trained on the run by `tokenmill train run`, which writes the report anew."""
    done = subprocess.run([sys.executable, "-m", "pipeline.cli", "train", "run", str(site.folder)], cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"report: {site.folder}/report.html\n")
    return site


@pytest.mark.slow
def test_training(trained):
    summary = json.loads((trained.folder / "train" / "summary.json").read_text())
    said = trained.report["training"]
    for key in ("steps", "tokens", "heldout_loss", "heldout_loss_before", "unigram_entropy", "ratio", "streams"):
        assert said[key] == summary[key]
    html = (trained.folder / "report.html").read_text()
    page = check_page(html)
    assert f"{summary['heldout_loss']:.3f}" in html and f"{summary['heldout_loss_before']:.3f}" in html
    assert {"t-loss", "t-held", "t-rate"} <= {a.get("class") for t, a in page.found if t == "polyline"}


def test_no_warning_stands_twice(tmp_path):
    """The check of the recipe and the curriculum that is made from it say the same about weights."""
    store = make_site(tmp_path, SHARDS.replace("mix: {web: 1}", "mix: {web: 3}"))
    warnings = json.loads((store / "runs/main/report.json").read_text())["warnings"]
    assert len([w for w in warnings if "weights sum to 3" in w]) == 2, "one for each phase"
    assert len(set(warnings)) == len(warnings)
