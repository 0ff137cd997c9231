"""The settings of the step: kinds, countries, placeholders and pseudonyms, dropping, audit and spans; and properties
that hold for any text."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from stages.document import Document
from stages.scrub.pii import KINDS, MODELLED, Pii, scrub_text
from stages.scrub.pseudonyms import Pseudonyms
from tests.stages.pii_benchmark import GENERATED, cases

ON = {"ipv6": True, "cards": True, "ibans": True, "phones": True, "ids": ["all"], "secrets": True, "wallets": True}
TEXT = "Card 4539 1488 0343 6467, IBAN DE89 3704 0044 0532 0130 00, +49 30 901820, SSN 536-90-4399, me@home.net"


def done(text: str, **config) -> Document:
    doc = Document("0" * 32, text)
    doc.meta["verdict"] = Pii(**config).process(doc)
    return doc


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef0123456789abcdef")
    return str(path)


def test_kinds_are_asked_for_one_by_one():
    assert done(TEXT).text == TEXT.replace("me@home.net", "email@example.com")
    assert done(TEXT, cards=True, emails=False).text == TEXT.replace("4539 1488 0343 6467", "<CREDIT_CARD>")
    assert done(TEXT, ibans=True, emails=False).text == TEXT.replace("DE89 3704 0044 0532 0130 00", "<IBAN_CODE>")
    assert done(TEXT, phones=True, emails=False).text == TEXT.replace("+49 30 901820", "<PHONE_NUMBER>")
    assert done(TEXT, ids=["us"], emails=False).text == TEXT.replace("536-90-4399", "<NATIONAL_ID>")
    assert done(TEXT, ids=["de", "fr"], emails=False).text == TEXT
    assert scrub_text(TEXT) == done(TEXT, **ON).text == (
        "Card <CREDIT_CARD>, IBAN <IBAN_CODE>, <PHONE_NUMBER>, SSN <NATIONAL_ID>, email@example.com")


def test_signals_count_what_is_on_and_nothing_else():
    assert Pii().signals == ("pii_emails", "pii_ips")
    stage = Pii(emails=False, cards=True, ids=["us"])
    assert stage.signals == ("pii_ips", "pii_cards", "pii_ids")
    assert done(TEXT + TEXT, emails=False, cards=True, ids=["us"]).signals == {
        "pii_ips": 0, "pii_cards": 2, "pii_ids": 2}


@pytest.mark.parametrize(("config", "says"), [
    ({"ids": ["xx"]}, "no rules for xx; there are: au, be"), ({"region": "US"}, "set phones: true"),
    ({"phones": True, "region": "usa"}, "two capitals"), ({"mode": "pseudonym"}, "key_file belong together"),
    ({"key_file": "k"}, "key_file belong together"), ({"drop": ["cards"]}, "drop names cards"),
    ({"drop": ["money"]}, "Input should be 'emails'"), ({"mode": "drop"}, "'placeholder' or 'pseudonym'")])
def test_settings_that_cannot_be_are_refused(config, says):
    with pytest.raises(ValidationError, match=says):
        Pii(**config)


def test_documents_are_dropped_by_kind_and_a_threshold_changes_no_signal_key():
    doc = done(TEXT, **ON, drop=["secrets", "ids", "cards"])
    assert doc.meta["verdict"] == "pii_ids" and "536" not in doc.text
    assert done("nothing", **ON, drop=[k for k in KINDS if k not in MODELLED]).meta["verdict"] is None
    one, two = Pii(**ON), Pii(**ON, drop=["cards"])
    assert one.key(("signal", "resource")) == two.key(("signal", "resource")) and one.key() != two.key()
    # what `verdict` says of the stored signals is what `process` said
    assert two.verdict(Document("1", "", signals={"pii_cards": 1.0})) == "pii_cards"
    assert two.verdict(Document("1", "", signals={"pii_cards": 0.0})) is None


def test_audit_says_where_and_never_what():
    text = "Ünser: +49 30 901820 and DE89370400440532013000 🙂 4539148803436467."
    doc = done(text, **ON, audit=True)
    said = doc.meta["pii"]
    data = doc.text.encode()
    assert [(s["kind"], s["rule"], data[s["start"]:s["end"]].decode()) for s in said] == [
        ("phones", "", "<PHONE_NUMBER>"), ("ibans", "de", "<IBAN_CODE>"), ("cards", "", "<CREDIT_CARD>")]
    assert not any(digits in json.dumps(doc.meta) for digits in ("901820", "3704", "4539"))
    assert "pii" not in done("nothing here", **ON, audit=True).meta and "pii" not in done(text, **ON).meta


def test_pseudonyms_are_the_same_for_the_same_value_however_it_is_written(key):
    text = "4539 1488 0343 6467, 4539148803436467; DE89370400440532013000 de89 3704 0044 0532 0130 00; A@b.net a@B.net"
    cards, ibans, mails = done(text, **ON, mode="pseudonym", key_file=key).text.split("; ")
    one, two = cards.split(", ")
    assert one.replace(" ", "") == two != "4539148803436467" and one.startswith("4111 11")
    one, two = ibans.split(" ", 1)
    assert one == two.replace(" ", "") and one.startswith("DE00")
    assert len(set(mails.split())) == 1 and mails.endswith("@example.com")
    again = done("It was a@b.net.", **ON, mode="pseudonym", key_file=key).text
    assert again == f"It was {mails.split()[0]}."


def test_another_key_makes_other_fakes_and_the_key_is_only_in_its_file(tmp_path, key):
    other = tmp_path / "other"
    other.write_bytes(b"f" * 32)
    mine, theirs = (done(TEXT, **ON, mode="pseudonym", key_file=k) for k in (key, str(other)))
    assert mine.text != theirs.text
    stage = Pii(**ON, mode="pseudonym", key_file=key)
    stage.setup()
    secret = "0123456789abcdef"
    assert secret not in stage.config.model_dump_json() + stage.key() + repr(vars(stage)) + json.dumps(mine.meta)
    assert stage.resource_files() == {"key_file": key}
    short = tmp_path / "short"
    short.write_bytes(b"hunter2-hunter2")
    with pytest.raises(ValueError, match="at least 32 bytes") as e:
        Pii(mode="pseudonym", key_file=str(short)).setup()
    assert "hunter2" not in str(e.value)


@pytest.mark.parametrize("kind", GENERATED)
def test_fakes_are_nobodys_and_are_not_found_again(kind, key):
    stage = Pii(**ON, mode="pseudonym", key_file=key)
    made = Counter()
    for case in cases(kind, 40, seed=3):
        once = stage._scrubbed(case.text)
        assert stage._scrubbed(once) == once
        for value in case.values:
            assert value not in once
            made[once] += 1
    # the fakes of addresses (762), the values of wallets' four published addresses and the like may meet
    assert len(made) > 30


def test_pseudonyms_do_not_depend_on_the_machine():
    fakes = Pseudonyms(b"k" * 32)
    plain = fakes.fake("cards", "", "4539148803436467")
    assert fakes.fake("cards", "", "4539 1488 0343 6467") == " ".join(plain[i:i + 4] for i in (0, 4, 8, 12))
    assert [fakes.fake(k, r, v) for k, r, v in (
        ("emails", "email", "a@b.net"), ("ips", "ipv4", "8.8.8.8"), ("ids", "us", "536-90-4399"))] == GOLDEN


GOLDEN = ["user-9587676d1c@example.com", "198.51.100.217", "000-05-6136"]


def pieces(seed: int) -> list[str]:
    """Return values of all kinds, lookalikes and words, in random order."""
    rng = random.Random(seed)
    found = [rng.choice(cases(kind, 3, seed=rng.randrange(1000))).text for kind in GENERATED]
    found += ["SSN", "card", "NIF 5", "and", "1234 5678", "é🙂", "+", "12", "0049", "A", "-", "DE89", "user@"]
    return rng.sample(found, len(found))


@settings(max_examples=settings.default.max_examples // 10)
@given(st.integers(0, 10**6), st.sampled_from((" ", "\n", ", ", " - ", "/")))
def test_scrubbing_twice_is_scrubbing_once(seed, between):
    text = between.join(pieces(seed))
    stage = Pii(**ON, emails=False, ips=False) if seed % 2 else Pii(**ON)
    once = stage._scrubbed(text)
    assert stage._scrubbed(once) == once
    assert scrub_text(scrub_text(text)) == scrub_text(text)


@given(st.text(st.sampled_from("0123456789 +-./()ABXDE@:é\n"), max_size=80))
def test_any_text_of_digits_is_scrubbed_once_and_for_all(text):
    stage = Pii(emails=False, ips=False, **{k: v for k, v in ON.items() if k != "ipv6"})
    once = stage._scrubbed(text)
    assert stage._scrubbed(once) == once
    found = stage._find(text)
    assert all(a.end <= b.start for a, b in pairwise(found)) and all(a.start < a.end for a in found)


@settings(max_examples=settings.default.max_examples // 10)
@given(st.integers(0, 10**6), st.data())
def test_what_counts_for_the_loss_is_the_same_after_scrubbing(seed, draw):
    text = "\n".join(pieces(seed))
    data = text.encode()
    cuts = sorted({draw.draw(st.integers(0, len(text))) for _ in range(4)})
    at = [len(text[:cut].encode()) for cut in cuts]
    spans = [{"start": a, "end": b} for a, b in zip(at[::2], at[1::2])]
    doc = Document("0" * 32, text, loss_spans=[dict(s) for s in spans])
    whole = Pii(**ON)._find(text)
    if any(m.start < cut < m.end for m in whole for cut in (c for pair in zip(cuts[::2], cuts[1::2]) for c in pair)):
        with pytest.raises(ValueError, match="border"):
            Pii(**ON).process(doc)
        return
    Pii(**ON).process(doc)
    for was, now in zip(spans, doc.loss_spans, strict=True):
        before = data[was["start"]:was["end"]].decode()
        after = doc.text.encode()[now["start"]:now["end"]].decode()
        if not any(m.start < cuts[-1] and m.end > cuts[0] for m in whole):
            assert after == before
        # what is no digit, address or key stands there still, in its order
        assert [w for w in after.split() if w in ("and", "é🙂", "SSN")] == [w for w in before.split() if w in
                                                                            ("and", "é🙂", "SSN")]


def test_the_verdict_on_a_document_does_not_depend_on_those_before_it(key):
    texts = [c.text for kind in GENERATED for c in cases(kind, 4)]
    for config in ({}, {"mode": "pseudonym", "key_file": key}):
        stage, alone = Pii(**ON, **config), [done(t, **ON, **config).text for t in texts]
        docs = [Document(str(i), t) for i, t in enumerate(texts)]
        for doc in reversed(docs):
            stage.process(doc)
        assert [d.text for d in docs] == alone


def test_meta_is_scrubbed_like_the_text(key):
    doc = Document("0" * 32, "x", meta={"title": "Call +49 30 901820", "n": {"deep": ["4539148803436467"]}})
    Pii(**ON, audit=True).process(doc)
    assert doc.meta == {"title": "Call <PHONE_NUMBER>", "n": {"deep": ["<CREDIT_CARD>"]}}
    assert doc.signals["pii_phones"] == 0


def test_local_telephone_numbers_need_a_region():
    pytest.importorskip("phonenumbers")
    text = "Tel. 030 901820"
    assert done(text, phones=True).text == text
    assert done(text, phones=True, region="DE").text == "Tel. <PHONE_NUMBER>"
    assert Pii(phones=True, region="DE").libraries == ("phonenumbers",) and Pii(phones=True).libraries == ()


RECIPE = """
version: 1
sources: {{web: {{read: jsonl, path: in.jsonl}}}}
datasets:
  raw: {{from: web, steps: []}}
  clean: {{from: raw, steps: [{{pii: {{cards: true, ids: [all], secrets: true, audit: true, drop: [{drop}]}}}}]}}
run: {{partition: {partition}}}
"""


def ran(folder: Path, store: str, drop: str = "", partition: str = "64MB") -> list[dict]:
    """Run the recipe. Returns the rows of `clean`, kept and dropped, sorted by id."""
    (folder / "r.yaml").write_text(RECIPE.format(drop=drop, partition=partition), encoding="utf-8")
    run_recipe(load_recipe(str(folder / "r.yaml"), []), str(folder / store),
               make_backend=make_backend("inline", 1, None), report=False)
    paths = [p for kind in ("datasets", "dropped") for p in (folder / store / kind / "clean").glob("part-*.parquet")]
    return sorted((row for path in paths for row in pq.read_table(path).to_pylist()), key=lambda row: row["id"])


def test_another_drop_and_another_split_give_what_a_fresh_run_gives(tmp_path):
    with (tmp_path / "in.jsonl").open("w", encoding="utf-8") as out:
        for kind in ("cards", "ids", "secrets", "phones"):
            for case in cases(kind, 15, seed=4):
                out.write(json.dumps({"text": case.text + " and more words" * 40}, ensure_ascii=False) + "\n")
    whole = ran(tmp_path, "a")
    assert len(whole) == 120 and not any(row.get("reason") for row in whole)
    assert ran(tmp_path, "b", partition="20KB") == whole
    replayed = ran(tmp_path, "a", drop="ids, cards")
    fresh = ran(tmp_path, "c", drop="ids, cards", partition="30KB")
    assert replayed == fresh
    assert Counter(row.get("reason") for row in fresh).keys() == {None, "pii_ids", "pii_cards"}
