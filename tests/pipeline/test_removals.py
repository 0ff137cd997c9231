"""`removal_stats` warns about a domain whose pages resemble each other, and about no other."""

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


def test_a_url_with_line_feeds_and_markup_stays_on_its_line(tmp_path):
    """Otherwise a page could forge lines of the program, such as an alarm."""
    text = "The same words stand in both of these pages, and <script>alert(1)</script> \x1b[2J mallory@private-mail.net"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(
        {"text": text, "url": f"http://a.example/{n}\nALARM: \u202e<b>"}) + "\n" for n in range(2)))
    (tmp_path / "recipe.yaml").write_text(json.dumps({
        "version": 1, "sources": {"web": {"read": "jsonl", "path": str(tmp_path / "a.jsonl")}},
        "datasets": {"deduped": {"from": ["web"], "steps": ["exact"]}}}))
    at = ("--store", str(tmp_path / "store"))
    done = command("pipeline.cli", "run", str(tmp_path / "recipe.yaml"), *at, "--backend", "inline", "-q")
    assert done.returncode == 0, done.stderr
    stats = command("pipeline.cli", "dedup", "stats", "deduped", *at)
    [row] = [row for part in (tmp_path / "store/dropped/deduped").glob("part-*.parquet")
             for row in pq.read_table(part).to_pylist()]
    page = tmp_path / "page.html"
    explained = command("pipeline.cli", "dedup", "explain", row["id"], *at, "--html", str(page))
    assert explained.returncode == stats.returncode == 0, explained.stderr + stats.stderr
    for shown in (stats.stdout, explained.stdout, page.read_text()):
        assert "a.example" in shown and not any(line.startswith("ALARM") for line in shown.splitlines())
        assert not any(odd in shown for odd in ("\x1b", "\u202e", "mallory"))
    assert "<script" not in page.read_text() and "<b>" not in page.read_text()
    (tmp_path / "file").touch()
    refused = command("pipeline.cli", "dedup", "explain", row["id"], *at, "--html", str(tmp_path / "file/page.html"))
    assert refused.returncode != 0 and "choose another --html" in refused.stderr and "unexpected" not in refused.stderr
