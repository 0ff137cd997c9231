"""The pages about shards and trainings, with real content: a training is started, watched to its end and explained, and
a document is followed from its place in the shards to the steps that read it. The training is a real process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from pipeline.service import training_starts
from pipeline.service.settings import ServiceSettings
from tests.browser.conftest import TIMEOUT_MS, serving, settings_of
from tests.browser.pages import faults, kinds_of_pages, tab_order
from tests.service.shard_site import make_site
from tests.service.test_trainings import SPIKE, STEPS, write_training

pytestmark = pytest.mark.slow
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServiceSettings:
    """Settings of a service over a store with shards, whose run has a training that has ended. Trainings of other runs
    are written to another folder."""
    top = tmp_path_factory.mktemp("trainings")
    store, others = make_site(top), top / "others"
    ended = store / "runs/main/train"
    write_training(ended)
    (ended / "summary.json").write_text(json.dumps({"parameters": 19872, "heldout_loss": 3.2, "sample": "<b> " * 99}))
    others.mkdir()
    return settings_of({"main": store}, trainings={"main": (str(others),)})


@pytest.fixture(scope="module")
def origin(settings: ServiceSettings) -> Iterator[str]:
    with serving(settings) as place:
        yield place


def open_first_document(page: Page) -> str:
    """Follow the first link to a document of a step or a window; returns the document's id."""
    link = page.locator("ol.documents b a").first
    id = link.inner_text()
    link.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(id)
    return id


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of the trainings that a server starts. Each stands still until the test lets it go on."""
    launch, children = training_starts._launch, []

    def launch_and_hold(*of: Any) -> subprocess.Popen[bytes]:
        children.append(launch(*of))
        children[-1].send_signal(signal.SIGSTOP)
        return children[-1]

    monkeypatch.setattr(training_starts, "_launch", launch_and_hold)
    yield children
    for child in children:
        child.send_signal(signal.SIGCONT)


def test_a_training_is_started_watched_to_its_end_and_explained(origin: str, open_page: Open,
                                                                held: list[subprocess.Popen[bytes]]) -> None:
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
    held[0].send_signal(signal.SIGCONT)
    page.get_by_text("What it has printed").click()
    expect(page.get_by_role("status")).to_contain_text("The training has ended")
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


def test_pages_with_shards_and_trainings_are_accessible(origin: str, settings: ServiceSettings,
                                                        open_page: Open) -> None:
    addresses = [address for address in kinds_of_pages(settings) if re.search("/(shards|trainings|documents)", address)]
    kinds = (r"/shards", r"/shards/step\?.*", r"/shards/web/train/windows/.*", r"/trainings", r"/trainings/main",
             rf"/trainings/main/step\?step={SPIKE + 2}", r"/datasets/clean/documents/.*")
    for kind in kinds:
        assert any(re.fullmatch("/stores/main" + kind, address) for address in addresses), (kind, addresses)
    page = open_page(origin)
    for address in [*addresses, "/stores/main/shards?id=a"]:
        page.goto(address, wait_until="networkidle")
        assert (address, tab_order(page), faults(page)) == (address, [], [])


# -- the page of a training that runs --------------------------------------------------------------------------------
#: a page with a mark that a reload would remove, and a list of what happened to its plot while it was exchanged
MARKED = """() => {
  window.mark = 'not loaded again';
  window.plots = [];
  new MutationObserver((changes) => changes.forEach((change) => change.addedNodes.forEach((node) => {
    if (node.nodeName === 'IMG') window.plots.push(node.complete && node.naturalWidth > 0);
  }))).observe(document.body, {childList: true, subtree: true});
}"""
PERIOD_MS = 3000


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """The folder of a training that seems to run on another machine."""
    folder = tmp_path / "store/runs/live/train"
    write_training(folder)
    (folder / "trainer.pid").touch()
    (folder / "train.log").write_text("it begins\n")
    return folder


@pytest.fixture
def watching(running: Path, tmp_path: Path, open_page: Open) -> Iterator[Page]:
    """The page of the training `running`. Its clock stands still; `ask` and `poll` advance it."""
    with serving(settings_of({"s": tmp_path / "store"})) as place:
        page = open_page(place, "narrow")
        with_still_clock(page, "/stores/s/trainings/live")
        page.evaluate(MARKED)
        poll(page)
        expect(page.get_by_role("status")).to_have_text("Live.")
        yield page
        assert page.evaluate("window.mark") == "not loaded again"


def with_still_clock(page: Page, address: str) -> None:
    """Open the page at an address. From then on, its clock stands still."""
    page.clock.install(time=0)
    page.goto(address)
    page.clock.pause_at(3_600_000)


def ask(page: Page) -> None:
    """Advance the page's clock until the page loads itself again."""
    with page.expect_request(page.url) as asked:
        while not asked.is_done():
            page.clock.run_for(PERIOD_MS)


def poll(page: Page) -> None:
    with page.expect_response(page.url):
        ask(page)


def expect_plots(page: Page, n: int) -> None:
    """Wait until the page has put in a plot for the `n`-th time. Playwright's `wait_for_function` cannot be used,
    because it needs `eval`, which the page's Content-Security-Policy forbids."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while page.evaluate("window.plots.length") != n:
        assert time.monotonic() < deadline, page.evaluate("window.plots")
        page.wait_for_timeout(50)


def add_step(folder: Path, step: int, **more: Any) -> None:
    line = {"v": 1, "event": "step", "step": step, "tokens": 100 * step, "loss": 2.5, "streams": {"web": 2.5},
            "lr": 0.01, **more}
    with open(folder / "metrics.jsonl", "a") as f:
        f.write(json.dumps(line) + "\n")


def test_a_running_trainings_page_changes_in_place_and_disturbs_nobody(running: Path, watching: Page) -> None:
    plots: list[str] = []
    watching.on("request", lambda request: plots.append(request.url) if "losses.svg" in request.url else None)
    watching.get_by_text("What it has printed").click()
    field = watching.get_by_label("Explain step")
    field.fill("12345")
    field.evaluate("(e) => e.setSelectionRange(1, 3)")
    region = watching.get_by_role("region", name="Losses over tokens")
    region.evaluate("(e) => { e.scrollLeft = 70 }")
    watching.evaluate("scrollTo(0, 210)")
    add_step(running, STEPS + 1, skipped=True, why="<b>odd</b>")
    poll(watching)
    spikes = watching.get_by_role("region", name="Spikes").get_by_role("row")
    expect(spikes.nth(1)).to_contain_text("skipped: <b>odd</b>")
    expect(watching.get_by_role("progressbar")).to_have_attribute("value", str(STEPS + 1))
    expect(field).to_be_focused()
    expect(field).to_have_value("12345")
    assert field.evaluate("(e) => [e.selectionStart, e.selectionEnd]") == [1, 3]
    expect(watching.locator("details")).to_have_attribute("open", "")
    assert region.evaluate("(e) => e.scrollLeft") == 70 and watching.evaluate("scrollY") == 210
    expect_plots(watching, 1)
    poll(watching)                                                 # nothing has changed
    poll(watching)
    assert watching.evaluate("window.plots") == [True] and len(plots) == 1, "drawn once, and shown when it was there"
    watching.clock.resume()
    assert faults(watching) == []


def test_a_link_with_the_focus_leads_where_it_did_when_rows_come_before_it(running: Path, watching: Page) -> None:
    link = watching.get_by_role("link", name=str(SPIKE), exact=True)
    link.focus()
    add_step(running, STEPS + 1, skipped=True)
    poll(watching)
    expect(watching.get_by_role("link", name=str(STEPS + 1), exact=True)).to_be_visible()
    expect(link).to_be_focused()


def test_the_button_that_stops_a_training_never_becomes_the_one_that_resumes_it(running: Path,
                                                                                watching: Page) -> None:
    stop = watching.get_by_role("button", name="Stop")
    stop.focus()
    add_step(running, STEPS + 1)
    poll(watching)
    expect(stop).to_be_focused()
    (running / "trainer.pid").unlink()
    poll(watching)
    expect(watching.get_by_role("button", name="Resume")).to_be_visible()
    expect(watching.locator("main")).to_be_focused()
    expect(watching.get_by_role("status")).to_have_text("The training has ended: stopped.")


def test_the_end_of_a_training_is_said_and_ends_the_polling(running: Path, watching: Page) -> None:
    asked: list[str] = []
    (running / "summary.json").write_text(json.dumps({"heldout_loss": 3.2}))
    poll(watching)
    expect(watching.get_by_role("status")).to_have_text("The training has ended: done.")
    expect(watching.locator("main .state")).to_have_text("done")
    expect(watching).to_have_title(re.compile("^live: done"))
    expect(watching.get_by_role("heading", name="Summary")).to_be_visible()
    watching.on("request", lambda request: asked.append(request.url))
    watching.clock.run_for(20 * PERIOD_MS)
    watching.clock.resume()
    assert asked == [] and faults(watching) == []


def test_a_server_that_is_away_is_said_and_asked_again(running: Path, watching: Page, watched: list[str]) -> None:
    answers: dict[str, Callable[[Route], None]] = {
        "does not answer. Trying again": lambda route: route.abort(),
        "(503). Trying again": lambda route: route.fulfill(status=503)}
    for words, answer in answers.items():
        watching.route("**/trainings/live", answer)
        ask(watching)
        expect(watching.get_by_role("status")).to_contain_text(words)
        watching.unroute("**/trainings/live")
        poll(watching)
        expect(watching.get_by_role("status")).to_have_text("Live.")
    assert all("Failed to load" in complaint for complaint in watched)         # which the browser notes itself
    watched.clear()


def test_a_hidden_page_asks_for_nothing_until_it_is_seen(running: Path, watching: Page) -> None:
    asked: list[str] = []
    watching.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    watching.on("request", lambda request: asked.append(request.url))
    for _ in range(20):
        watching.clock.run_for(PERIOD_MS)
    assert asked == []
    watching.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    poll(watching)


def test_the_list_of_trainings_follows_them_while_one_runs(running: Path, tmp_path: Path, open_page: Open) -> None:
    with serving(settings_of({"s": tmp_path / "store"})) as place:
        page = open_page(place)
        with_still_clock(page, "/stores/s/trainings")
        row = page.get_by_role("row").filter(has_text="live")
        add_step(running, STEPS + 7)
        poll(page)
        expect(row).to_contain_text(f"{STEPS + 7} of 48")
        (running / "summary.json").write_text("{}")
        poll(page)
        expect(row).to_contain_text("done")
        expect(page.get_by_role("status")).to_have_text("No training runs any more.")
        page.clock.resume()
        assert faults(page) == []
