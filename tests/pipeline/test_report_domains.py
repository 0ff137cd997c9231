"""The host of a URL, for everything that crawls call a URL."""

from __future__ import annotations

import pytest

from pipeline.base.domain import domain_of


@pytest.mark.parametrize(("url", "domain"), [
    ("https://www.Example.org:8080/a?b=https://other.example", "example.org"), ("HTTP://example.org.", "example.org"),
    ("https://user:secret@example.org/x", "example.org"), ("//example.org/a", ""), ("javascript:alert('x')//\"><b", ""),
    ("mailto:someone@example.org", ""), ("", ""), (None, ""), ("https://", ""), ("https://" + "a" * 300, ""),
    ("https://ex\u202eample.org/", "ex\u202eample.org"), ("https://example.org\\@evil.example/", "example.org")])
def test_domains(url, domain):
    assert domain_of(url) == domain
