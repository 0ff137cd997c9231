"""Runs whose documents attack whoever looks at them. Their reports and all pages show the documents as text, and
nothing else happens. (`open_page` fails a test for any dialog, console error or request to another host.)"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from tests.browser.conftest import serving, settings_of
from tests.browser.pages import kinds_of_pages
from tests.service.test_pages import EVIL

pytestmark = pytest.mark.slow
#: texts by which pages were taken over elsewhere: markup that ends where it should not, that is parsed a second time,
#: that asks another host, and that a reader sees in another order than a machine
MORE = (
    "</title></textarea></style></script><script>alert(1)</script>", "<plaintext><script>alert(1)</script>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=alert(1)&gt;'>",
    "<svg><style><img src='</style><img src=x onerror=alert(1)>'></svg>", "<noscript><p title='</noscript><img src=x on"
    "error=alert(1)>'>", "<iframe srcdoc='<script>parent.alert(1)</script>'></iframe>", "<object data=https://evil.exa"
    "mple></object><embed src=//evil.example>", "<link rel=stylesheet href=//evil.example/x.css><style>@import '//evil"
    ".example'</style>", "<form action=//evil.example><button autofocus onfocus=alert(1)>", "<table><tr><td></table></"
    "div></div></main></body></html><img src=//evil.example>", "<a href='data:text/html,<script>alert(1)</script>'>",
    "<details open ontoggle=alert(1)>", "<video autoplay onloadstart=alert(1)><source src=//evil.example></video>",
    "\u202e>tpircs/<)1(trela>tpircs<\u202c", "a\u2066b\u2069c\u200f\u061c\ufeff\u2028<b>", "\x07\x1b]0;x\x07\x9b2J",
    "{{constructor.constructor('alert(1)')()}}${alert(1)}<%= 1 %>", "\ud83d\ude00\u0301" * 40, "<" * 3000, "&" * 3000,
)
RECIPE = """
version: 1
sources:
  web: {read: jsonl, path: in}
datasets:
  clean: {from: web, steps: [{gopher_quality: {min_doc_words: 20, min_stop_words: null}}, exact, minhash]}
run: {max_error_rate: 50%}
"""
#: what no template makes
FOREIGN = "iframe, object, embed, base, video, audio, img, math, plaintext, noscript, template, " \
          "meta[http-equiv=refresh], style:not([nonce]), script:not([src]), " \
          "[onerror], [onload], [onfocus], [ontoggle], [srcdoc]"


def attacks() -> Iterator[dict[str, Any]]:
    """Yield documents with every attack: in a text that is too short to be kept, in a kept text, in a duplicate of it,
    in a URL, and at both ends of a line of 5 MB."""
    for i, evil in enumerate((*EVIL, *MORE)):
        long = " ".join(f"word{i} and{n} the other" for n in range(30))
        yield {"text": evil, "url": f"https://a.example/{evil}"}
        yield {"text": f"{evil} {long}", "url": f"javascript:alert({i})//{evil}"}
        yield {"text": f"{evil} {long} {evil}", "url": evil}
        yield {"text": f"{evil} {long}", "url": f"https://a.example/again/{evil}"}
    for evil in (EVIL[0], EVIL[1], "x", "\u202e"):
        yield {"text": evil + "x" * 5_000_000 + evil, "url": "https://a.example/" + evil + "y" * 50_000}
        yield {"text": f"{evil} " + "the word " * 550_000 + evil, "url": evil}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("attacks")
    (top / "in").mkdir()
    (top / "in" / "<img src=x onerror=alert(1)>.jsonl").write_text(
        "".join(json.dumps(document) + "\n" for document in attacks()) + "<script>alert(1)</script> is no JSON\n")
    (top / "recipe.yaml").write_text(RECIPE)
    for run, settings in (("first", ["datasets.clean.steps.gopher_quality.min_doc_words=300"]), ("second", [])):
        run_recipe(load_recipe(top / "recipe.yaml", settings), str(top / "store"), run=run,
                   make_backend=make_backend("inline", 1, None))
    return top / "store"


def test_pages_show_attacks_as_text(root: Path, open_page: Callable[..., Page]) -> None:
    settings = settings_of({"main": root})
    with serving(settings) as origin:
        page = open_page(origin)
        page.goto("/stores/main/datasets/clean?kind=dropped")
        documents = page.locator("ol.documents h3 a").evaluate_all("(a) => a.map((e) => e.getAttribute('href'))")
        assert len(documents) == 50
        compared = "/stores/main/compare?before=first&after=second&examples=50"
        page.goto(compared)
        assert page.locator("ol.documents > li").count() > 50
        for address in [*kinds_of_pages(settings), *documents, compared]:
            page.goto(address)
            assert page.locator(FOREIGN).count() == 0, address
            assert page.locator("main").count() == 1, address


def test_a_report_shows_attacks_as_text(root: Path, open_page: Callable[..., Page]) -> None:
    file = root / "runs/second/report.html"
    with serving(settings_of({"main": root})) as origin:
        page = open_page(origin)
        for address in (f"/api/v1/stores/main/runs/{file.parent.name}/report.html", file.as_uri()):
            page.goto(address)
            page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
            foreign = FOREIGN.replace("style:not([nonce]), ", "")              # its style stands in it
            assert page.locator(foreign).count() == 0 and page.locator("style").count() == 1
            assert "alert(1)" in page.locator("main").inner_text()
