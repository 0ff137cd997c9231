"""The page of the queue: its form checks and plans a recipe before it submits it, and its buttons cancel and resume
runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lxml.html
import pytest
from starlette.testclient import TestClient

from pipeline.cluster.queue import Queue
from pipeline.store.fs import Store
from tests.service.conftest import write_run
from tests.service.test_pages import client_of, links, read, text_of
from tests.service.test_submit import RECIPE
from tests.service.test_tune_page import press, row

pytestmark = pytest.mark.usefixtures("checks_here")
QUEUE = "/stores/s/queue"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("a text of some words that nobody needs to read\n")
    (tmp_path / "store").mkdir()
    return tmp_path


@pytest.fixture
def browser(site: Path) -> TestClient:
    return client_of({"s": site / "store"}, allowed_roots=(str(site),), backend="inline")


def page_of(answer: Any) -> Any:
    assert answer.headers["content-type"].startswith("text/html") and "Traceback" not in answer.text
    return lxml.html.document_fromstring(answer.text)


def entries(tree: Any, caption: str = "What waits and runs") -> list[str]:
    return [text_of(line) for line in tree.xpath(f"//table[starts-with(caption, '{caption}')]/tbody/tr")]


def test_a_recipe_is_planned_before_it_waits(browser: TestClient, site: Path, check_processes: None) -> None:
    assert QUEUE in links(read(browser, "/stores/s"))
    odd = RECIPE.replace("version: 1", "# \u202eodd\nversion: 1").replace("\n", "\r\n")
    plan = press(browser, read(browser, QUEUE), "/queue/plan", recipe=odd, name="mine",
                 overrides="run.partition=4KB\r\n")
    tree = page_of(plan)
    assert plan.status_code == 200 and row(tree, "What runs", "clean")[0] in ("stale", "waits")
    queue = Queue(Store(site / "store"))
    assert queue.entries() == [], "a plan submits nothing"
    for _ in range(2):                                                        # pressed twice
        assert press(browser, tree, "/queue").headers["location"] == QUEUE
    [entry] = queue.entries()
    submission = queue.submission(1)
    assert submission.text.strip() == odd.replace("\r\n", "\n").strip(), "every character comes through the two forms"
    assert submission.overrides == ("run.partition=4KB",) and entry.run.startswith("mine-")
    [shown] = entries(read(browser, QUEUE))
    assert entry.run in shown and "waiting" in shown and "place 1" in shown


def test_errors_are_told_with_line_and_key_and_the_form_keeps_what_was_typed(browser: TestClient) -> None:
    bad = RECIPE.replace("read: text", "read: txet")
    answer = press(browser, read(browser, QUEUE), "/queue/plan", recipe=bad, inputs="docs/a.txt")
    tree = page_of(answer)
    [found] = tree.xpath("//ul[contains(@class, 'findings')]/li[b='Error']")
    assert answer.status_code == 422 and "line 3" in text_of(found) and "sources.docs.read" in text_of(found)
    assert tree.get_element_by_id("recipe").value.strip() == bad.strip()
    assert tree.get_element_by_id("inputs").value.strip() == "docs/a.txt"
    for fields, key in (({}, "recipe"), ({"recipe": RECIPE, "ready": "fineweb"}, "recipe"),
                        ({"recipe": RECIPE, "name": "a/b"}, "name")):
        answer = press(browser, read(browser, QUEUE), "/queue/plan", **fields)
        assert answer.status_code == 422 and key in text_of(page_of(answer).xpath("//div[@role='alert']")[0])
    assert browser.post(QUEUE, data={"csrf": "x"}).status_code == 403


@pytest.mark.slow
def test_buttons_cancel_what_waits_and_resume_what_has_failed(browser: TestClient, site: Path) -> None:
    for name in ("one", "two"):
        plan = press(browser, read(browser, QUEUE), "/queue/plan", recipe=RECIPE, run=name)
        press(browser, page_of(plan), "/queue")
    queue = browser.app.state.queues["s"]
    assert press(browser, read(browser, QUEUE), "/queue/2/cancel", csrf="wrong").status_code == 403
    assert press(browser, read(browser, QUEUE), "/queue/2/cancel").headers["location"] == QUEUE
    assert [entry.state for entry in queue.entries()] == ["waiting", "cancelled"]
    started = queue.append(queue.entry(1), "start")
    assert started is not None
    running = queue.append(started, "running", attempt=1)
    assert running is not None
    queue.append(running, "failed", attempt=1, error="<b>no space left</b>")
    write_run(Store(site / "store"), "one", state="failed")
    tree = read(browser, QUEUE)
    assert not entries(tree) and "<b>no space left</b>" in entries(tree, "What has ended")[1]
    assert "/stores/s/runs/one" in links(tree)
    press(browser, tree, "/runs/one/resume")
    [shown] = entries(read(browser, QUEUE))
    assert "one resumed" in shown and queue.submission(3).resumes


def test_the_page_of_a_run_has_the_button_that_fits(site: Path) -> None:
    store = Store(site / "store")
    write_run(store, "ended", state="failed")
    write_run(store, "done")
    write_run(store, "going")
    (site / "store/runs/going/progress.json").unlink()
    for role, run, button in (("operator", "ended", "Resume"), ("operator", "going", "Cancel"),
                              ("operator", "done", ""), ("viewer", "ended", "")):
        tree = read(client_of({"s": site / "store"}, role), f"/stores/s/runs/{run}")
        assert [text_of(b) for b in tree.xpath("//main//button")] == ([button] if button else [])


def test_viewers_see_the_queue_and_change_nothing(browser: TestClient, site: Path) -> None:
    press(browser, page_of(press(browser, read(browser, QUEUE), "/queue/plan", recipe=RECIPE)), "/queue")
    viewer = client_of({"s": site / "store"}, "viewer")
    tree = read(viewer, QUEUE)
    assert len(entries(tree)) == 1 and not tree.xpath("//main//form")
    for way in ("queue", "queue/plan", "queue/1/cancel", "runs/one/resume", "runs/one/cancel"):
        assert viewer.post(f"/stores/s/{way}", data={"recipe": RECIPE}).status_code == 403
