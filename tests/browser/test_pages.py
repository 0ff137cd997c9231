"""Every page in a real browser: it is accessible in light and dark mode, on a phone, and by keyboard alone. A user gets
from a run to a document that it dropped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import serving, settings_of
from tests.browser.pages import faults, kinds_of_pages, tab_order
from tests.service.conftest import OPERATOR, VIEWER
from tests.service.test_hostile_pages import hostile  # noqa: F401  (a fixture)
from tests.service.test_pages import root, rows  # noqa: F401  (fixtures)

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def addresses(root: Path, hostile: Path) -> list[str]:  # noqa: F811
    """An address of every kind of page of a real store, and of a store in which all names are hostile."""
    pages = [*kinds_of_pages(settings_of({"main": root})), *kinds_of_pages(settings_of({"evil": hostile})), "/login",
             *(f"/stores/main/datasets/clean/label?by=me&draw=random&run={run.name}" for run in root.glob("runs/*"))]
    wanted = {"/stores/main/queue", "/stores/main/datasets/clean/labels", "/stores/evil/runs/evil/assets"}
    for run in root.glob("runs/*"):
        wanted |= {f"/stores/main/runs/{run.name}/assets", f"/stores/main/compare?after={run.name}"}
    assert wanted <= set(pages)
    assert len(pages) > 18 and any("/tune?" in address for address in pages), pages
    return list(dict.fromkeys(pages))


@pytest.fixture(scope="module")
def origin(root: Path, hostile: Path) -> Iterator[str]:  # noqa: F811
    with serving(settings_of({"main": root, "evil": hostile}, allowed_roots=(str(root.parent),))) as place:
        yield place


@pytest.fixture(scope="module")
def report(root: Path) -> Path:  # noqa: F811
    [file] = root.glob("runs/*/report.html")
    return file


@pytest.mark.slow
def test_every_page_is_accessible_and_fits_a_phone(origin: str, addresses: list[str], report: Path,
                                                   open_page: Open) -> None:
    page = open_page(origin)
    for address in [*addresses, report.as_uri()]:
        page.goto(address)
        assert (address, faults(page)) == (address, [])


@pytest.mark.slow
def test_every_page_is_walked_by_keyboard(origin: str, addresses: list[str], report: Path, open_page: Open) -> None:
    walked, coming = open_page(origin, "narrow"), open_page(origin, "narrow")
    places = [*addresses, report.as_uri()]
    coming.goto(places[0])
    for address, following in zip(places, [*places[1:], "about:blank"]):
        walked, coming = coming, walked
        coming.goto(following)                                     # its scripts run while the other page is walked
        walked.wait_for_load_state("networkidle")                  # half a second after its scripts have changed it
        assert (address, tab_order(walked)) == (address, [])


def test_a_problem_is_a_page_as_the_others(origin: str, open_page: Open, watched: list[str]) -> None:
    page = open_page(origin)
    with page.expect_console_message():
        page.goto("/stores/main/runs/absent")
    expect(page.get_by_role("alert")).to_contain_text("What to do")
    assert faults(page) == [] and tab_order(page) == []
    assert all("404" in complaint for complaint in watched)                    # which the browser notes itself
    watched.clear()


def test_dropped_documents_are_browsed_from_the_run_to_the_text(origin: str, report: Path, open_page: Open) -> None:
    page = open_page(origin)
    page.goto("/stores/main")
    page.get_by_role("link", name="Report").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(report.parent.name)
    page.go_back()
    page.get_by_role("link", name="dropped of clean").click()
    page.get_by_role("link", name="gopher_short_doc").click()
    expect(page.get_by_role("link", name="Remove the filter reason gopher_short_doc")).to_be_visible()
    page.get_by_text("Filter and sort").click()
    page.get_by_label("Text holds").fill("<script>")
    page.get_by_role("button", name="Show").click()
    entry = page.get_by_role("listitem").filter(has=page.get_by_role("heading"))
    expect(entry).to_have_count(1)
    expect(entry).to_contain_text("short <script>alert(1)</script>")
    entry.get_by_role("heading").get_by_role("link").click()
    expect(page.locator("pre.text")).to_have_text("short <script>alert(1)</script>")
    page.get_by_role("navigation", name="Where you are").get_by_role("link", name="clean").click()
    page.get_by_role("link", name=re.compile("Dropped")).click()
    page.get_by_role("link", name="exact_text").click()
    page.locator("ol.documents h3 a").click()
    expect(page.get_by_role("heading", name="The document that was kept")).to_be_visible()


def test_a_filter_is_set_with_the_keyboard_alone(origin: str, open_page: Open) -> None:
    page = open_page(origin)
    page.goto("/stores/main/datasets/clean?kind=dropped")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    summary = page.get_by_text("Filter and sort")
    for _ in range(10):
        page.keyboard.press("Tab")
        if summary.evaluate("(e) => e === document.activeElement"):
            break
    page.keyboard.press("Enter")
    for _ in range(2):                                             # the second field: why a document was dropped
        page.keyboard.press("Tab")
    page.keyboard.type("exact_text")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Remove the filter reason exact_text")).to_be_visible()
    expect(page.locator("ol.documents > li")).to_have_count(1)


@pytest.mark.slow
def test_signing_in_with_a_token_leads_on_and_out_again(root: Path, open_page: Open,  # noqa: F811
                                                        watched: list[str]) -> None:
    with serving(settings_of({"main": root}, operator_token=OPERATOR, viewer_token=VIEWER)) as origin:
        page = open_page(origin)
        page.goto("/stores/main/datasets/clean?kind=dropped")
        page.get_by_label("Token").fill("a-word-that-is-no-token")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("Not a token of this server")
        assert all("401" in complaint for complaint in watched)
        watched.clear()
        page.goto("/stores/main/datasets/clean?kind=dropped")
        page.get_by_label("Token").fill(VIEWER)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("clean")
        assert page.url.endswith("/stores/main/datasets/clean?kind=dropped")
        assert faults(page) == [] and page.evaluate("document.cookie") == "", "no script reads the session"
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        page.goto("/")
        assert "/login" in page.url
