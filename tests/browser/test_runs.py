"""What a user of the service does, in a browser: submit a recipe, watch its run, cancel another run, move a threshold,
save the recipe, run it, and compare the two runs. Drivers are real processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from pipeline.cluster.queue import Queue
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.fs import Store
from tests.browser.conftest import serving, settings_of
from tests.browser.pages import faults, tab_order
from tests.corpus import sentences
from tests.processes import until

pytestmark = pytest.mark.slow
RECIPE = """
version: 1
sources: {docs: {read: text, path: docs}}
datasets:
  clean: {from: docs, steps: [{gopher_quality: {min_doc_words: 50}}]}
"""
#: keeps a run from ending until the test has seen it run
GATE = """
import time
from pathlib import Path
from stages.stage import Stage


class Gate(Stage):
    name = "gate"

    def process(self, doc):
        while not (Path(__file__).parent / "open").exists():
            time.sleep(0.05)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for i in range(40):
        (tmp_path / "docs" / f"d{i:02d}.txt").write_text("\n".join(sentences()[i:i + 1 + i % 8]))
    (tmp_path / "store").mkdir()
    return tmp_path


@pytest.fixture
def origin(site: Path) -> Iterator[str]:
    with serving(settings_of({"s": site / "store"}, allowed_roots=(str(site),), allow_code=True,
                             backend="inline")) as place:
        yield place


def submit(page: Page, recipe: str, run: str) -> None:
    page.goto("/stores/s/queue")
    page.get_by_label("Recipe (YAML)").fill(recipe)
    page.get_by_label("Name of the run").fill(run)
    page.get_by_role("button", name="Check and plan").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Plan of")
    assert faults(page) == []
    page.get_by_role("button", name="Run it").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Queue")


def test_a_run_is_watched_to_its_end_while_another_is_cancelled(site: Path, origin: str,
                                                                open_page: Callable[..., Page]) -> None:
    (site / "gate.py").write_text(GATE)
    page = open_page(origin)
    submit(page, RECIPE.replace("50}}]", '50}}, "gate:Gate"]') + "code: [gate.py]\n", "watched")
    page.get_by_role("link", name="watched").click()               # which it becomes once the run has begun
    expect(page.get_by_role("status")).to_have_text("Live.")
    expect(page.locator("#summary")).to_contain_text("running")
    watched = page
    page = open_page(origin)
    submit(page, RECIPE, "other")
    waiting = page.get_by_role("row").filter(has_text="other")
    expect(waiting).to_contain_text("place 1")
    waiting.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("region", name="What has ended")).to_contain_text("cancelled")
    (site / "open").touch()
    expect(watched.get_by_role("status")).to_have_text("The run has ended.")
    expect(watched.locator("#summary")).to_contain_text("done")
    assert faults(watched) == []
    queue = Queue(Store(site / "store"))
    until(lambda: queue.entry(1).ended, what="the entry's end")            # its driver notes it after the run's end
    assert [entry.state for entry in queue.entries()] == ["done", "cancelled"]


def test_no_figure_of_the_playground_is_cut_off_on_a_small_screen(site: Path, origin: str,
                                                                 open_page: Callable[..., Page]) -> None:
    """Also with tokens, whose estimates have a range. Where a table is wider than its place, a shadow shows it."""
    (site / "recipe.yaml").write_text(
        RECIPE + "tokenizer: {train: {kind: bpe, vocab: 300, from: clean, sample: 50KB}}\n"
        "shards: {docs: {from: clean, longest: 64, val: 10%}}\n")
    run_recipe(load_recipe(site / "recipe.yaml"), str(site / "store"), run="first",
               make_backend=make_backend("inline", 1, None))
    wider = "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)"
    tune = '/stores/s/runs/first/datasets/clean/tune?changes={"thresholds":{"0":{"min_doc_words":40}},"off":[]}'
    for width in (1100, 1280):
        page = open_page(origin)
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(tune)
        expect(page.get_by_role("columnheader", name="Kept tokens now")).to_be_visible()
        assert page.evaluate(wider) == []
    page = open_page(origin, "narrow")
    page.goto(tune)
    assert "By source and language" in page.evaluate(wider)
    assert "gradient" in page.locator(".wide").first.evaluate("e => getComputedStyle(e).backgroundImage")


def test_a_threshold_is_moved_saved_and_run(site: Path, origin: str, open_page: Callable[..., Page],
                                            watched: list[str]) -> None:
    (site / "recipe.yaml").write_text(RECIPE)
    run_recipe(load_recipe(site / "recipe.yaml"), str(site / "store"), run="first",
               make_backend=make_backend("inline", 1, None))
    page = open_page(origin)
    page.goto("/stores/s/runs/first/datasets/clean/tune")
    page.locator("summary").filter(has_text="of gopher_quality").click()
    page.get_by_role("link", name="Move min_doc_words").click()
    slider = page.get_by_role("slider")
    expect(slider).to_be_visible()
    before = slider.get_attribute("aria-valuetext")
    slider.press("End")
    expect(slider).not_to_have_attribute("aria-valuetext", str(before))
    assert faults(page) == []
    page.get_by_label("min doc words of gopher_quality").fill("100")
    page.get_by_role("button", name="Count exactly").click()
    expect(page).to_have_url(re.compile("min_doc_words.*100"))
    kept = page.get_by_role("region", name="Totals").get_by_role("row").filter(has_text="Kept").get_by_role("cell")
    counts = [int(kept.nth(i).inner_text()) for i in (0, 1)]
    assert counts[0] > counts[1] > 0
    with page.expect_download() as saving:
        page.get_by_role("link", name="Save as recipe").click()
    assert "min_doc_words: 100" in saving.value.path().read_text()
    assert [complaint.partition(":")[0] for complaint in watched] == ["download"]
    watched.clear()
    page.get_by_role("button", name="Run with these changes").click()
    expect(page.get_by_role("region", name="Changed settings")).to_contain_text("min_doc_words")
    page.get_by_label("Name of the run").fill("longer")
    assert faults(page) == []
    page.get_by_role("button", name="Run it").click()
    ended = page.get_by_role("region", name="What has ended")
    expect(ended).to_contain_text("done")
    ended.get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("longer")
    expect(page.locator("#live")).to_contain_text("tokenmill report --compare first longer")
    made = page.get_by_role("region", name="What it kept").get_by_role("row").filter(has_text="clean")
    made = made.get_by_role("cell")
    assert [int(made.nth(i).inner_text()) for i in (0, 1)] == [counts[1], counts[0]]
    expect(page.get_by_role("link", name="Driver's log")).to_be_visible()
    assert faults(page) == []
    page.get_by_role("link", name="Compare with first").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("first → longer")
    keys = page.get_by_role("region", name="Keys of the recipe that differ")
    expect(keys.get_by_role("row").nth(1)).to_have_text(re.compile(r"min_doc_words\s*50\s*100"))
    changed = page.get_by_role("region", name="What changed in clean").get_by_role("cell").first
    expect(changed).to_have_text(str(counts[0] - counts[1]))
    assert faults(page) == [] and tab_order(page) == []
    document = page.locator("ol.documents h4 a").first
    id = document.inner_text()
    document.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(id)
    expect(page.locator("main")).to_contain_text("gopher_short_doc")
    page.goto("/stores/s")
    page.get_by_role("combobox", name="Before").select_option("longer")
    page.get_by_role("combobox", name="After").select_option("first")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("longer → first")
    page.goto("/stores/s")
    shown = page.get_by_role("region", name=re.compile("Datasets")).get_by_role("link", name="kept of clean")
    expect(shown).to_have_text(re.compile(rf"^{counts[1]}\b"))
