"""The service over Google Cloud Storage. A recipe whose sources are in a bucket is checked, planned and run from the
queue. The store is in a bucket, too, and its documents, their sources, and the effect of other thresholds can be
queried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from tests.corpus import sentences
from tests.processes import until
from tests.service.conftest import patient, problem  # noqa: F401  (a fixture)
from tests.service.test_pages import client_of, read
from tests.service.test_sources import documents, source
from tests.service.test_submit import Site
from tests.storage.test_gcs import gcs  # noqa: F401

TEXTS = ["\n".join(sentences()[i:i + 4 + i % 5]) for i in range(40)]
RECIPE = """
version: 1
sources:
  lines: {read: jsonl, path: "PLACE/lines/*.jsonl"}
  files: {read: text, path: "PLACE/texts/**"}
datasets:
  clean: {from: [lines, files], steps: [{gopher_quality: {min_doc_words: 80, min_stop_words: 1}}]}
run: {partition: 4KB, signals: all}
"""
RUN = "/api/v1/stores/main/runs/first"


@pytest.fixture
def bucket(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """A bucket with sources, which processes started by the service can also read."""
    for protocol in ("GS", "GCS"):
        monkeypatch.setenv(f"FSSPEC_{protocol}_ENDPOINT_URL", gcs.url)
        monkeypatch.setenv(f"FSSPEC_{protocol}_TOKEN", "anon")
    put = Store("gs://bucket/in").write
    for name, texts in (("a", TEXTS[:15]), ("b", TEXTS[15:30])):
        put(f"lines/{name}.jsonl", b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    for i, text in enumerate(TEXTS[30:]):
        put(f"texts/deep/a b {i}.txt", text.encode())
    Store("gs://bucket/secret").write("s.txt", b"hunter2")
    return "gs://bucket"


def on_disk(bucket: str, top: Path) -> Path:
    """Run the recipe on a local disk, over copies of the sources in the bucket. Returns the store, for comparison."""
    remote = Store(f"{bucket}/in")
    for name in remote.list(""):
        (top / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (top / "in" / name).write_bytes(remote.read(name))
    run(RECIPE.replace("PLACE", str(top / "in")), top, str(top / "disk"))
    return top / "disk"


def run(recipe: str, top: Path, store: str) -> None:
    (top / "recipe.yaml").write_text(recipe)
    run_recipe(load_recipe(top / "recipe.yaml", []), store, run="first", make_backend=make_backend("inline", 1, None))


def rows(api: TestClient, kind: str) -> list[dict[str, Any]]:
    """Return all documents of a kind, read in pages of seven, without the fields that name their place in storage."""
    found: list[dict[str, Any]] = []
    after = ""
    while after is not None:
        page = api.get(f"/api/v1/stores/main/datasets/clean/{kind}", params={
            "sort": "id", "limit": 7, "chars": 2000, "show": ["source", "text", "signals"],
            **({"after": after} if after else {})}).json()
        found, after = found + page["documents"], page["next"]
    return found


@pytest.mark.slow
def test_a_store_in_a_bucket_answers_as_one_on_disk(bucket: str, tmp_path: Path) -> None:
    run(RECIPE.replace("PLACE", f"{bucket}/in"), tmp_path, f"{bucket}/store")
    disk = on_disk(bucket, tmp_path)
    assert dataset_hash(Store(f"{bucket}/store"), "clean") == dataset_hash(Store(disk), "clean")
    remote = client_of({"main": f"{bucket}/store"}, "operator", allowed_roots=(f"{bucket}/in",), backend="inline")
    local = client_of({"main": disk}, "operator", allowed_roots=(str(tmp_path / "in"),), backend="inline")
    for kind in ("kept", "dropped"):
        assert rows(remote, kind) == rows(local, kind) != []
    assert {row["text"] for kind in ("kept", "dropped") for row in rows(remote, kind)} == {
        text[:2000] for text in TEXTS}
    for path, parameters in (
            (f"{RUN}/datasets/clean/tune", {}),
            (f"{RUN}/datasets/clean/tune/answer", {"changes": '{"thresholds": {"0": {"min_doc_words": 100}}}',
                                                   "exact": "true"}),
            (f"{RUN}/datasets/clean/tune/cube", {"step": 0, "key": "min_doc_words"}),
            ("/api/v1/stores/main/datasets/clean/kept/counts", {"by": "source"}),
            ("/api/v1/stores/main/datasets/clean/kept", {"text": TEXTS[4].split()[5], "show": "id", "sort": "id"})):
        there, here = (api.get(path, params=parameters) for api in (remote, local))
        assert there.status_code == here.status_code == 200, there.text
        if "next" not in here.json():
            assert there.json() == here.json(), path
        else:
            assert [row["id"] for row in there.json()["documents"]] == [row["id"] for row in here.json()["documents"]]
    states = {node["name"]: node["state"] for node in remote.get(f"{RUN}/assets").json()["nodes"]}
    assert states == {node["name"]: node["state"] for node in local.get(f"{RUN}/assets").json()["nodes"]}
    assert set(states.values()) == {"fresh"}
    for page in ("/stores/main", "/stores/main/runs/first", "/stores/main/runs/first/datasets/clean/tune"):
        read(remote, page)


@pytest.mark.slow
def test_the_source_of_a_document_is_shown_from_an_allowed_bucket_alone(bucket: str, tmp_path: Path) -> None:
    run(RECIPE.replace("PLACE", f"{bucket}/in"), tmp_path, str(tmp_path / "store"))
    api = client_of({"main": tmp_path / "store"}, "operator", allowed_roots=(f"{bucket}/in",))
    for name, what in (("lines", "line"), ("files", "file")):
        row = documents(api, "clean", name)[0]
        shown = source(api, "clean", row["id"], unmasked=True).json()
        assert shown["what"] == what
        text = json.loads(shown["text"])["text"] if what == "line" else shown["text"]
        assert text in TEXTS and text.startswith(row["text"])
    for roots in ((), (f"{bucket}/other",), (str(tmp_path),)):
        refused = problem(source(client_of({"main": tmp_path / "store"}, "operator", allowed_roots=roots), "clean",
                                 row["id"]), 403)
        assert refused["remedy"] and "gs://" not in json.dumps(refused)


@pytest.mark.slow
def test_a_submitted_recipe_reads_a_bucket_and_no_other(bucket: str, gcs: Any, tmp_path: Path) -> None:  # noqa: F811
    site = Site(tmp_path, roots=(f"{bucket}/in",))
    recipe = RECIPE.replace("PLACE", f"{bucket}/in")
    checked = site.post("/recipes/validate", {"recipe": recipe}).json()
    assert checked["valid"] and not [p for p in checked["problems"] if p["key"].startswith("sources")]
    missing = site.post("/recipes/validate", {"recipe": recipe.replace("*.jsonl", "*.nothing")}).json()
    assert [p["key"] for p in missing["problems"] if "no object matches" in p["message"]] == ["sources.lines.path"]
    outside = site.post("/recipes/validate", {"recipe": recipe.replace("/in/texts", "/secret")}).json()
    assert not outside["valid"] and [p["key"] for p in outside["problems"]] == ["sources.files.path"]
    planned = site.post("/recipes/plan", {"recipe": recipe}).json()
    assert {name: source["files"] for name, source in planned["inputs"].items()} == {"lines": 2, "files": 10}
    with site.client:
        site.post("/queue", {"recipe": recipe, "run": "first"})
        until(lambda: site.get("/queue/1")["state"] in ("done", "failed", "cancelled"), what="the end of the run")
        assert site.get("/queue/1")["state"] == "done", site.get("/queue/1")
    assert dataset_hash(site.store, "clean") == dataset_hash(Store(on_disk(bucket, tmp_path)), "clean")
