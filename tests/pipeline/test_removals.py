"""`removal_stats` raises an alarm for a domain whose pages resemble each other, and for no other."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.report.removals import removal_stats
from tests.commands import command

PAGES = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("removals")
    texts = [f"Recipe {i} of the week: take {i + 3} eggs and {i + 7} grams of flour, stir them, and bake the result "
             f"for {i + 20} minutes while somebody sings verse {i}." for i in range(PAGES)]
    rows = [(f"https://www.shop.example/item/{i % 4}?page={i}", texts[i % 4]) for i in range(PAGES)]       # 36 repeat
    rows += [(f"https://small.example/{i}", texts[5]) for i in range(10)]                                    # too few
    rows += [(f"https://fine.example/{i}", text) for i, text in enumerate(texts)]                            # 5 of 40
    table = pa.table({"text": [text for _, text in rows], "url": [url for url, _ in rows]})
    pq.write_table(table, folder / "pages.parquet")
    recipe = {"version": 1,
              "sources": {"web": {"read": "parquet", "path": str(folder / "pages.parquet")}},
              "datasets": {"deduped": {"from": ["web"], "steps": ["exact"]}}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    done = command("pipeline.cli", "run", str(folder / "recipe.yaml"), "--store", str(folder / "store"),
                   "--backend", "inline", "-q")
    assert done.returncode == 0, done.stderr
    return folder / "store"


def test_only_a_domain_with_enough_documents_that_lost_most_of_them_raises_an_alarm(store):
    from pipeline.store.fs import Store

    stats = removal_stats(Store(store), "deduped")
    assert stats["alarms"] == [{"domain": "shop.example", "removed": 36, "of": 40}]
    assert {d["domain"]: (d["removed"], d["of"]) for d in stats["domains"]} == {
        "shop.example": (36, 40), "small.example": (9, 10), "fine.example": (5, 40)}
    assert stats["removed"] == 50 and stats["kept"] == 40


def test_the_number_of_listed_entries_is_bounded(store):
    from pipeline.store.fs import Store

    stats = removal_stats(Store(store), "deduped", most=1, groups=2)
    assert len(stats["domains"]) == len(stats["pairs"]) == 1 and len(stats["largest"]) == 2
    assert [group["size"] for group in stats["largest"]] == [11, 11]
    assert all(len(group["removed"]) == 2 and group["removed"][0]["diff"] for group in stats["largest"])
