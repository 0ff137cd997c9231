"""Finds the pages of a service, and checks what must be true for every page."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from urllib.parse import parse_qs, urljoin, urlsplit

import lxml.html
from playwright.sync_api import Page
from starlette.testclient import TestClient

from pipeline.service.app import create_app
from pipeline.service.settings import ServiceSettings
from tests.browser.conftest import MODES
from tests.service.conftest import BASE

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
#: the rules of WCAG 2.2 AA, and what axe recommends beyond them
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
#: the parts of a path that are followed by a name
NAMED = re.compile(r"/(stores|runs|datasets|documents|queue|trainings|windows)/[^/]+")
OPENED = """() => {
  document.querySelectorAll('ol.documents > li:nth-child(n + 4)').forEach((e) => e.remove());
  document.querySelectorAll('details').forEach((e) => { e.open = true });
}"""
#: the elements that can have the focus
STOPS = """() => {
  const all = 'a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex]';
  window.stops = [...document.querySelectorAll(all)].filter((e) =>
    e.tabIndex >= 0 && !e.disabled && e.checkVisibility({visibilityProperty: true}));
  return window.stops.map((e) => e.outerHTML.slice(0, 120));
}"""
#: for the element that has the focus: its index among these elements, whether one sees that it has the focus, and
#: whether the middle of its part inside the window is uncovered
FOCUSED = """() => {
  const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
  const middle = (from, to, end) => (Math.max(from, 0) + Math.min(to, end)) / 2;
  const seen = document.elementFromPoint(middle(box.left, box.right, innerWidth),
                                         middle(box.top, box.bottom, innerHeight));
  return [window.stops.indexOf(e), style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
          seen !== null && (e.contains(seen) || seen.contains(e) && seen.tagName !== 'BODY')];
}"""


def kinds_of_pages(settings: ServiceSettings) -> list[str]:
    """Return one address for each kind of page that can be reached by links from the first page. Two pages are of the
    same kind if their paths differ only in names, and both show the same kind of documents (or both have a moved
    threshold)."""
    client = TestClient(create_app(settings), base_url=BASE, headers={"Accept": "text/html"})
    pages: dict[tuple[str, ...], str] = {}
    seen, todo = set(), ["/"]
    while todo:
        where = todo.pop(0)
        place = urlsplit(where)
        query = parse_qs(place.query)
        kind = (NAMED.sub(r"/\1/*", place.path), *query.get("kind", ["kept"]), *["move"] * ("move" in query))
        if kind in seen:
            continue
        seen.add(kind)
        answer = client.get(where)
        if answer.status_code == 200 and "script-src" in answer.headers["content-security-policy"]:
            place = urlsplit(str(answer.url))                      # where a redirect has led
            pages[kind] = where = f"{place.path}?{place.query}".rstrip("?")
            hrefs = lxml.html.document_fromstring(answer.text).xpath("//a/@href")
            todo += [urljoin(where, href).partition("#")[0] for href in hrefs if not href.startswith("#")]
    return list(dict.fromkeys(pages.values()))


def faults(page: Page) -> list[str]:
    """Return what is wrong with an open page in each mode (light, dark, narrow): violations that the accessibility
    checker axe finds, and content that is wider than the window. This changes the page: it opens all its details, and
    shortens long lists of documents to three entries."""
    page.evaluate(OPENED)
    page.evaluate(AXE)
    wrong = []
    for mode, options in MODES.items():
        page.set_viewport_size(options["viewport"])
        page.emulate_media(color_scheme=options["color_scheme"])
        run_only = ["color-contrast"] if mode == "dark" else RULES             # only this rule depends on colours
        for violation in page.evaluate("async (only) => (await axe.run({runOnly: only})).violations", run_only):
            nodes = json.dumps([node["html"][:160] for node in violation["nodes"][:3]])
            wrong.append(f"{mode}: {violation['impact']} {violation['id']}: {nodes}")
        too_wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if too_wide > 0:
            wrong.append(f"{mode}: {too_wide} pixels wider than the window")
    return wrong


def tab_order(page: Page) -> list[str]:
    """Walk through a page with the Tab key alone, and return what is wrong. Every element that can have the focus must
    be reached in order, be in sight, and visibly have the focus. Further stops of the browser, at areas that scroll,
    are allowed."""
    stops, reached, wrong = page.evaluate(STOPS), [], []
    for _ in range(2 * len(stops) + 10):
        if reached and reached[-1] == len(stops) - 1:
            break
        page.keyboard.press("Tab")
        at, seen, in_sight = page.evaluate(FOCUSED)
        if at >= 0:
            reached.append(at)
            wrong += [f"{stops[at]}: not shown to have the focus"] * (not seen)
            wrong += [f"{stops[at]}: out of sight"] * (not in_sight)
    order = list(range(len(stops)))
    return wrong if reached == order else [*wrong, f"stops {order} are reached as {reached}"]
