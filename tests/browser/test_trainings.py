"""The pages about shards and trainings with content: a training is started, watched to its end and explained, and a
document is followed from its place in the shards to the steps that read it. A training is a process of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from pipeline.service.settings import Settings
from tests.browser.conftest import serving, settings_of
from tests.browser.pages import faults, kinds_of_pages, tab_order
from tests.service.shard_site import make_site
from tests.service.test_trainings import SPIKE, write_training

pytestmark = pytest.mark.slow
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of a service over a store with shards, whose run has a training that has ended; others go to another folder."""
    top = tmp_path_factory.mktemp("trainings")
    store, others = make_site(top), top / "others"
    ended = store / "runs/main/train"
    write_training(ended)
    (ended / "summary.json").write_text(json.dumps({"parameters": 19872, "heldout_loss": 3.2, "sample": "<b> " * 99}))
    others.mkdir()
    return settings_of({"main": store}, trainings={"main": (str(others),)})


@pytest.fixture(scope="module")
def origin(settings: Settings) -> Iterator[str]:
    with serving(settings) as place:
        yield place


def open_first_document(page: Page) -> str:
    """Follow the first link to a document of a step or a window; returns the document's id."""
    link = page.locator("ol.documents b a").first
    id = link.inner_text()
    link.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(id)
    return id


def test_a_training_is_started_watched_to_its_end_and_explained(origin: str, open_page: Open) -> None:
    page = open_page(origin)
    page.goto("/stores/main")
    page.get_by_role("link", name="Trainings").click()
    form = page.get_by_role("form", name="Start a training")
    form.get_by_label("Run whose shards").select_option("main")
    form.get_by_label("Name").fill("mine")
    form.get_by_role("button", name="Start").click()
    state = page.locator("main .state")
    expect(state).to_have_text(re.compile("starting|running"))
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    while state.inner_text() in ("starting", "running"):
        page.get_by_role("link", name="Refresh").click()
    page.get_by_text("What it has printed").click()
    assert state.inner_text() == "done", page.locator("details pre").inner_text()
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "32")
    plot = page.get_by_role("img", name="Loss and learning rate")
    assert plot.evaluate("async (e) => { await e.decode(); return e.naturalWidth }") > 0
    held_out = page.get_by_role("region", name="Held-out loss by source").get_by_role("row").last
    expect(held_out.get_by_role("rowheader")).to_have_text("4,096 tokens")
    expect(held_out.get_by_role("cell")).to_have_text([re.compile(r"^\d\.\d+$")] * 2)
    expect(page.get_by_role("button", name="Resume")).to_have_count(0)
    assert faults(page) == []

    page.get_by_label("Explain step").fill("3")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Step 3 of 32")
    expect(page.get_by_role("region", name="Steps around it").get_by_role("row")).to_have_count(1 + 8)
    rows = page.get_by_role("region", name=re.compile(r"^Row \d+ loss [\d.]+"))
    expect(rows).to_have_count(4)
    id = open_first_document(page)
    page.get_by_role("region", name="Places in the shards").get_by_role("link", name="Step 3", exact=True).click()
    expect(page.get_by_role("link", name=id)).to_be_visible()


def test_a_document_is_found_in_the_shards_with_its_windows_and_steps(origin: str, open_page: Open) -> None:
    page = open_page(origin)
    page.goto("/stores/main")
    page.get_by_role("link", name="Shards").click()
    page.get_by_label("Documents of step").fill("20")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Step 20 of 32")
    id = page.locator("ol.documents b a").first.inner_text()
    page.get_by_role("navigation", name="Where you are").get_by_role("link", name="Shards").click()
    page.get_by_label("Id of a document").fill(id[:12])
    page.get_by_role("button", name="Find").click()
    place = page.get_by_role("region", name="Places in the shards").get_by_role("row").filter(has_text=id)
    expect(place).to_have_count(1)
    place.get_by_role("link", name="Step 20", exact=True).click()
    expect(page.get_by_role("link", name=id)).to_be_visible()
    page.go_back()
    place.get_by_role("link", name="Window").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Window")
    page.get_by_role("link", name=id).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(id)


def test_pages_with_shards_and_trainings_are_accessible(origin: str, settings: Settings, open_page: Open) -> None:
    addresses = [address for address in kinds_of_pages(settings) if re.search("/(shards|trainings|documents)", address)]
    kinds = (r"/shards", r"/shards/step\?.*", r"/shards/web/train/windows/.*", r"/trainings", r"/trainings/main",
             rf"/trainings/main/step\?step={SPIKE + 2}", r"/datasets/clean/documents/.*")
    for kind in kinds:
        assert any(re.fullmatch("/stores/main" + kind, address) for address in addresses), (kind, addresses)
    page = open_page(origin)
    for address in [*addresses, "/stores/main/shards?id=a"]:
        page.goto(address, wait_until="networkidle")
        assert (address, tab_order(page), faults(page)) == (address, [], [])
