"""The service over the store of a real run: its figures compared with DuckDB, its windows with the reader of shards."""

from __future__ import annotations

import json

import duckdb
from starlette.testclient import TestClient

from pipeline.service.app import create_app
from pipeline.service.duck import QueryLimits, Stop
from pipeline.service.query import Queries
from pipeline.service.settings import ServiceSettings
from pipeline.service.shard_sets import find
from pipeline.store.fs import Store
from tokenizer.shards.reader import ShardSet

BASE = "/api/v1/stores/main/datasets"


def test_windows_of_documents(site):
    """All documents of a real run: their tokens and windows as the trainer reads them."""
    store, queries = Store(site / "store"), Queries()
    curriculum = json.loads((site / "store/runs/first/curriculum.json").read_bytes())
    lengths = {phase["sequence"] for phase in curriculum["phases"]}
    checked = 0
    for folder in sorted((site / "store/shards").glob("*/split=*")):
        shards = ShardSet(folder)
        for span in shards.documents(0, len(shards))[:4]:
            places = find(queries, store, span.id, Stop(600), exact=True)["places"]
            [place] = [p for p in places if (p["stream"], f"split={p['split']}") == (folder.parent.name, folder.name)]
            assert (place["start"], place["stop"]) == (span.start, span.stop)
            for length in lengths:
                holds = [w for w in range(shards.windows(length))
                         if w * length < span.stop and w * length + length >= span.start]
                assert place["windows"].get(str(length)) == ([holds[0], holds[-1]] if holds else None)
                checked += bool(holds)
    assert checked > 4


def test_figures_of_a_real_run(site):
    app = create_app(ServiceSettings({"main": str(site / "store")}, request_s=600))
    app.state.queries = Queries(QueryLimits(seconds=600, wait_s=600))
    api = TestClient(app, base_url="http://127.0.0.1:8700")
    for kind, folder in (("kept", "datasets"), ("dropped", "dropped")):
        wanted = duckdb.sql(f"select source, count(*) from '{site}/store/{folder}/clean/part-*.parquet' group by 1")
        groups = api.get(f"{BASE}/clean/{kind}/counts", params={"by": "source"}).json()["groups"]
        assert {g["source"]: g["documents"] for g in groups} == dict(wanted.fetchall())
    [(id, kept)] = duckdb.sql(
        f"select id, json_extract_string(meta, '$.minhash.kept') from '{site}/store/dropped/deduped/part-*.parquet' "
        f"where stage = 'minhash' limit 1").fetchall()
    twin = api.get(f"{BASE}/deduped/documents/{id}").json()["twin"]
    assert twin["id"] == kept and twin["difference"]["rows"]
