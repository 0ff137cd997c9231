"""Nothing in a document, a run or an address is interpreted as HTML, and personal data in documents is masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import lxml.html
import pytest

from pipeline.base.visible import visible
from pipeline.service.html import path
from pipeline.store.fs import Store
from tests.conftest import rest_slow
from tests.service.conftest import write_log, write_run
from tests.service.corpus import publish_rows
from tests.service.test_pages import DATASET, EVIL, client_of, ids, read, submit, text_of


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which every text, name and value is hostile that can be."""
    top = tmp_path_factory.mktemp("hostile")
    store = Store(top / "store")

    def row(i: int, text: str, **more: Any) -> dict[str, Any]:
        evil = EVIL[i % len(EVIL)]
        return {"id": f"{i:032x}", "text": text, "url": evil, "source": evil, "language": evil, "date": evil,
                "signals": {"a": float(i)}, "meta": {evil: [evil]}, **more}

    kept = [row(i, f"{evil}\nmore {evil}") for i, evil in enumerate(EVIL)]
    dropped = [row(100 + i, f"{evil}\nless {evil}", reason=evil, stage=evil,
                   meta={evil: {"kept": f"{i:032x}", "similarity": 0.9}}) for i, evil in enumerate(EVIL)]
    bad = [{"id": evil, "source": evil, "file": evil, "record": i, "stage": evil, "reason": evil, "detail": evil,
            "bytes": 1} for i, evil in enumerate(EVIL)]
    publish_rows(store, top / "scratch", kept, 1, name="clean", dropped=dropped, quarantined=bad)
    nodes: dict[str, Any] = {evil: {"parts": 2, "done": 1, "documents_run": {"in": evil}} for evil in EVIL}
    write_run(store, "evil", "failed", error=EVIL[0] + EVIL[6], nodes=nodes | {"odd": "no object"},
              docs_read=EVIL[1],
              failures=[{"node": evil, "label": evil, "kind": evil, "message": evil, "times": evil} for evil in EVIL],
              facts={"begun": EVIL[2]})
    write_log(store, "evil", "\n".join(EVIL))
    store.write("runs/evil/recipe.yaml", "\n".join(EVIL).encode())
    return top / "store"


@pytest.mark.parametrize("kind", rest_slow(1, ["kept", "dropped", "quarantined"]))
def test_hostile_documents_stay_text_in_a_list(hostile, kind):
    browser = client_of({"main": hostile})
    tree = read(browser, f"{DATASET}?kind={kind}")
    entries = tree.xpath("//ol[@class='documents']/li")
    assert len(entries) == len(EVIL)
    for entry, evil in zip(entries, EVIL):
        assert text_of(entry).count(" ".join(visible(evil).split())) >= 3
    for href in tree.xpath("//table//a/@href"):
        one = read(browser, href)
        chosen = next(v for values in parse_qs(urlsplit(href).query).values() for v in values if v != kind)
        assert chosen in EVIL and len(one.xpath("//ol[@class='documents']/li")) == 1
        answer = submit(browser, one, source="")
        assert ids(lxml.html.document_fromstring(answer.text)) == ids(one), "the form keeps every character of a value"


@pytest.mark.parametrize("first", [0, 100])
def test_hostile_document_stays_text_on_its_page(hostile, first):
    browser = client_of({"main": hostile})
    for i, evil in enumerate(EVIL):
        tree = read(browser, f"{DATASET}/documents/{first + i:032x}")
        word = "more" if first == 0 else "less"
        assert tree.xpath("//pre[contains(@class, 'text')]")[0].text == visible(f"{evil}\n{word} {evil}")
        if first and "\x00" not in evil:
            assert tree.xpath("//del/text()") == ["less"] and tree.xpath("//ins/text()") == ["more"]


def test_hostile_run_stays_text_and_a_damaged_one_is_shown(hostile):
    browser = client_of({"main": hostile})
    tree = read(browser, "/stores/main/runs/evil")
    names = [th.text for th in tree.xpath("//table[caption='Passes and tasks']/tbody/tr/th")]
    assert names == [visible(evil) for evil in EVIL], "the entry that is no object is left out"
    assert [pre.text for pre in tree.xpath("//table[caption='Failed attempts']//pre")] == [visible(e) for e in EVIL]
    assert tree.xpath("//details/pre")[0].text == visible("\n".join(EVIL))
    assert tree.xpath("//div[@class='problem']/pre")[0].text == visible(EVIL[0] + EVIL[6])
    assert EVIL[0] in text_of(read(browser, "/stores/main/runs/evil/log"))
    for where in ("/", "/stores/main"):
        assert visible(EVIL[1]) in text_of(read(browser, where))


@pytest.mark.parametrize("evil", [*EVIL[:7], "%", "\\", "a\nb"])
def test_hostile_address_stays_text(hostile, evil):
    browser = client_of({"main": hostile})
    for where in (path("stores", evil), path("stores", "main", "runs", evil), path("stores", "main", "datasets", evil),
                  path("stores", evil, x=evil)):
        read(browser, where, 404)
    quarantined = path("stores", "main", "datasets", "clean", "documents", evil)
    read(browser, quarantined, 200 if evil in EVIL and "/" not in evil else 404)
    for name in ("source", "text", "domain", "id", "language"):
        tree = read(browser, path("stores", "main", "datasets", "clean", **{name: evil}))
        assert " ".join(visible(evil).split()) in text_of(tree.xpath("//ul[@class='chips']")[0])
    for name, status in (("sort", 400), ("signal", 422), ("after", 400), ("kind", 422)):
        read(browser, path("stores", "main", "datasets", "clean", **{name: evil}), status)


def test_personal_data_is_masked(tmp_path):
    mail = "jane.roe@home.example.com"
    row = {"id": "0" * 32, "text": f"write to {mail}", "url": f"https://example.org/?m={mail}", "source": "web",
           "language": "en", "date": None, "signals": {"a": 1.0}, "meta": {"m": mail}}
    publish_rows(Store(tmp_path / "store"), tmp_path / "scratch", [row], 1, name="clean")
    browser = client_of({"main": tmp_path / "store"})
    for where in (DATASET, f"{DATASET}/documents/{row['id']}", f"{DATASET}?text=write"):
        answer = browser.get(where)
        assert answer.status_code == 200 and "write to" in answer.text and "home.example" not in answer.text
