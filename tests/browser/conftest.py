"""Fixtures of the tests in a browser: Chromium, a running service, and pages that fail the test if anything goes wrong
in them."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from playwright.sync_api import Browser, Dialog, Page, expect, sync_playwright

from pipeline.service.app import create_app
from pipeline.service.settings import ServiceSettings
from tests.service.conftest import PATIENT_S, patient  # noqa: F401  (a fixture)

#: set by CI after it has installed Chromium: a missing browser is then an error
REQUIRED = "TOKENMILL_TEST_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: only the name of this machine can be resolved, so not even a successful attack reaches another host
FLAGS = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-quic", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
#: milliseconds to wait for something that must happen; long, because a busy machine may stand still
TIMEOUT_MS = 600_000
expect.set_options(timeout=TIMEOUT_MS)
#: width and colours of the modes in which a page must work
MODES: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 360, "height": 740}, "color_scheme": "light"},
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The system's Chromium, closed after each module of tests. While Playwright runs, its thread cannot run another
    event loop, which tests of other modules need."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        message = f"none of {', '.join(NAMES)} is on PATH (apt install chromium)"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{message}, and {REQUIRED} is set")
        pytest.skip(message)
    flags = FLAGS + ["--no-sandbox"] * (os.geteuid() == 0)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


def watch(page: Page, origin: str, complaints: list[str]) -> None:
    """Add to `complaints` whatever a page must not do: write an error to the console, raise an uncaught error, open a
    dialog or a window, download a file, or send a request to another host than `origin`."""
    def note(kind: str, what: object, wrong: bool = True) -> None:
        if wrong:
            complaints.append(f"{kind}: {str(what)[:300]}")

    def refuse(dialog: Dialog) -> None:
        note("dialog", dialog.message)
        dialog.dismiss()

    page.on("dialog", refuse)
    page.on("console", lambda message: note("console", message.text, message.type == "error"))
    page.on("pageerror", lambda error: note("uncaught", error))
    page.on("popup", lambda popup: note("popup", popup.url))
    page.on("download", lambda download: note("download", download.url))
    page.on("request", lambda request: note("request", request.url, not _belongs(request.url, origin)))


def _belongs(url: str, origin: str) -> bool:
    """Return whether a page may request this URL: it is at `origin`, or opens a local file, as when somebody opens a
    report that was sent to them."""
    return urlsplit(url).scheme in ("data", "file") or url.startswith(f"{origin}/")


@contextmanager
def serving(settings: ServiceSettings) -> Iterator[str]:
    """A context manager that runs a service. Yields its origin, such as http://127.0.0.1:8000."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_config=None, access_log=False, ws="none",
                                           timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()


def settings_of(stores: dict[str, Path], **more: Any) -> ServiceSettings:
    """Return settings of a service for these stores, whose limits on requests are too high for a fast browser to
    reach."""
    return ServiceSettings({name: str(root) for name, root in stores.items()},
                           **{"rate": 10_000, "burst": 10_000, "look_s": 0.1, "request_s": PATIENT_S, **more})


@pytest.fixture
def watched() -> list[str]:
    """The list of what pages of this test did that they must not do. The test fails if the list is not empty at its
    end."""
    return []


@pytest.fixture
def open_page(chromium: Browser, watched: list[str]) -> Iterator[Callable[..., Page]]:
    """A function that opens an empty page with a fresh browser profile. It is called as `open_page(origin, "dark")`,
    with a mode of MODES."""
    def make(origin: str, mode: str = "light") -> Page:
        page = chromium.new_context(base_url=origin, **MODES[mode]).new_page()
        page.set_default_timeout(TIMEOUT_MS)
        watch(page, origin, watched)
        return page

    yield make
    for context in chromium.contexts:
        context.close()
    assert watched == []
