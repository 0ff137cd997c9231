"""A report with everything in it, opened as a file in a browser: it is accessible and harmless."""

from __future__ import annotations

import pytest

from tests.browser.conftest import chromium, open_page, watched  # noqa: F401  (fixtures)
from tests.browser.pages import faults, tab_order


@pytest.mark.slow
def test_a_report_is_accessible_fits_a_phone_and_asks_nobody(report_site, open_page):  # noqa: F811
    page = open_page("file://", "narrow")
    page.goto((report_site.folder / "report.html").as_uri())
    assert tab_order(page) == []
    assert faults(page) == []
    assert "<script>alert(1)" in page.locator("main").inner_text(), "a page that was read, as text"
