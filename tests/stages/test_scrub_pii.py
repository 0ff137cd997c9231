"""E-mail and IP addresses: the result equals that of datatrove's formatter in every byte."""

from __future__ import annotations

import gzip
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.document import Document
from stages.scrub.pii import EMAILS, Pii, scrub_text, scrub_value
from tests.stages.texts import AWKWARD, real_texts

TEXTS = [
    "Write to a.b+c@mail.example.org, or (x_y@z.de)! Not to @name or a@b or a..b@c.de or .a@b.de",
    "first@a.com second@b.com third@c.com fourth@d.com", "éa@b.com äöü@x.org a@ü.org user@[8.8.8.8] u@[IPv6:1]",
    "8.8.8.8 10.0.0.1 192.168.1.1 127.0.0.1 256.1.1.1 1.2.3.4.5 01.2.3.4 9.9.9.9. 1.1.1.1:80 v1.2.3.4 224.0.0.1",
    "-" * 5000 + "a@b.org" + "-" * 5000, "a.-b..c.d@e.f .@g.h", "a-" * 2000 + "@ " + "a-" * 2000 + "@b.c",
    "8.8.8.8 " * 9, "a@b.c-d.e f-@g.h i@j-.k l@m.n- -o@p.q", "a@b@c.de d@e.fg@h.ij", "mail:a@b.de;c@d.ef,g@h.ij",
    "x" * 500 + "@y.de and " + "a.b" * 300 + "@c.de", "no address at all", "", "@", "a@", "@b.c", "...@...",
]


def theirs(text: str, **config) -> str:
    from datatrove.pipeline.formatters import PIIFormatter

    return PIIFormatter(**config).format(text)


def ours(text: str, **config) -> str:
    doc = Document("id", text)
    assert Pii(**config).process(doc) is None
    return doc.text


def test_equal_to_datatrove():
    for text in [*TEXTS, *AWKWARD, *real_texts(200)]:
        assert ours(text) == theirs(text)
        assert ours(text, public_only=False) == theirs(text, only_remove_public_ips=False)
        assert ours(text, emails=False) == theirs(text, remove_emails=False)
        assert ours(text, ips=False) == theirs(text, remove_ips=False)


@given(st.text(st.sampled_from("ab1.2@-_ é[]:\n8+"), max_size=60))
def test_equal_to_datatrove_on_any_text(text):
    assert ours(text) == theirs(text)


def test_counts_and_replacements_begin_anew_with_each_document():
    stage = Pii()
    for _ in range(2):
        doc = Document("id", "a@b.org c@d.org 8.8.8.8 10.0.0.1")
        stage.process(doc)
        assert doc.text == "email@example.com firstname.lastname@example.org 22.214.171.124 10.0.0.1"
        assert doc.signals == {"pii_emails": 2, "pii_ips": 1}
    doc = Document("id", "nothing")
    before = doc.text
    stage.process(doc)
    assert doc.text is before
    assert doc.signals == {"pii_emails": 0, "pii_ips": 0}


def test_ipv6():
    text = "dns 2606:4700:4700::1111, ::1, fe80::1, 12:30:45, std::vector, aa:bb:cc:dd:ee:ff, 2a00:1450:4001:81b::200e."
    assert ours(text) == text
    assert ours(text, ipv6=True) == scrub_text(text) == text.replace("2606:4700:4700::1111", "2001:db8::1").replace(
        "2a00:1450:4001:81b::200e", "2001:db8::2")


def test_scrubbed_text_holds_no_address(data):
    path = data("pii", "presidio_synth_dataset_v2.json.gz")
    rows = json.loads(gzip.decompress(path.read_bytes()))
    found = 0
    for row in rows:
        scrubbed = scrub_text(row["full_text"])
        for span in row["spans"]:
            if span["entity_type"] == "EMAIL_ADDRESS":
                found += 1
                assert span["entity_value"] not in scrubbed
    assert found > 20


def test_hostile_runs_take_linear_time():
    for text in ("a-" * 50_000 + "@" + "b-" * 10_000, "a" * 500_000 + "@", "a@" * 25_000, "1." * 100_000,
                 "a:" * 100_000, ("a-" * 2000 + "@ ") * 50, ("a-" * 2000 + "@b-") * 50, "@" * 400_000,
                 "a@" + "b." * 100_000, "a@" + "b-" * 100_000, "@b.c" * 50_000):
        begun = time.process_time()
        ours(text, ipv6=True)
        assert time.process_time() - begun < 1.5, text[:20]
    # in a run longer than any address, what stands right beside an @ is still found
    text = "-" * 5000 + "a@b.org" + "-" * 5000
    assert "a@b.org" not in ours(text)


def test_a_domain_has_an_end():
    # datatrove takes any number of labels; an address has at most 320 characters
    long = "a@" + "b." * 158 + "org"
    assert ours(long) == theirs(long) == EMAILS[0]
    assert ours("a@" + "b." * 200 + "org").startswith(EMAILS[0] + ".b.")


def test_strings_of_meta_are_scrubbed_as_the_text_is_and_the_url_stays():
    meta = {"title": "Ask me@home.org", "n": 3, "canonical": "https://h.org/?m=me@home.org", "me@home.org": None,
            "list": ["you@home.org", {"deep": "8.8.8.8"}], "v6": "2606:4700:4700::1111"}
    doc = Document("id", "text", url="https://h.org/?m=me@home.org", meta=meta)
    assert Pii().process(doc) is None
    assert doc.meta == {"title": "Ask email@example.com", "n": 3, "canonical": "https://email@example.com",
                        "me@home.org": None, "list": ["email@example.com", {"deep": "22.214.171.124"}],
                        "v6": "2606:4700:4700::1111"}
    assert meta["list"] == ["you@home.org", {"deep": "8.8.8.8"}]
    assert (doc.url, doc.signals) == ("https://h.org/?m=me@home.org", {"pii_emails": 0, "pii_ips": 0})
    doc = Document("id", "text", meta=meta)
    Pii(emails=False, ips=False).process(doc)
    assert doc.meta == meta


def test_values_of_any_shape():
    assert scrub_value("a@b.org, 2606:4700:4700::1111") == "email@example.com, 2001:db8::1"
    assert scrub_value((1, None, True, 2.5, ("a@b.org",), {})) == [1, None, True, 2.5, ["email@example.com"], {}]
    assert scrub_value(None) is None
    deep = value = ["a@b.org"]
    for _ in range(5000):
        deep = [{"k": deep}]
    found = scrub_value(deep)
    for _ in range(5000):
        found = found[0]["k"]
    assert found == ["email@example.com"]
    assert value == ["a@b.org"]


def test_what_counts_for_the_loss_moves_with_the_text():
    text = "User: I am ann.b@mail.example.net, née Ö.\n\nAssistant: Write to x@y.example.net, or 8.8.4.4!\n\nUser: ok"
    said = "Write to x@y.example.net, or 8.8.4.4!"
    start = text.encode().index(said.encode())
    doc = Document("0" * 32, text, loss_spans=[{"start": start, "end": start + len(said)}])
    assert Pii().process(doc) is None
    (span,) = doc.loss_spans
    assert doc.text.encode()[span["start"]:span["end"]].decode() == "Write to email@example.com, or 22.214.171.124!"
    assert doc.text.startswith("User: I am email@example.com, née Ö.") and doc.signals["pii_emails"] == 2
    doc = Document("0" * 32, "ab@cd.example.net", loss_spans=[{"start": 4, "end": 17}])
    with pytest.raises(ValueError, match="border"):
        Pii().process(doc)
    doc = Document("0" * 32, "ab@cd.example.net", loss_spans=[])
    assert Pii().process(doc) is None and doc.loss_spans == [] and doc.text == "email@example.com"
