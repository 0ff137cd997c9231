"""URL rules: small lists against plain sets, and the integrated ones against datatrove where it can run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xxhash

from stages.document import Document
from stages.filter.url import Url
from stages.text.hashlist import HashList, write_hashes


@pytest.fixture
def lists(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    files = {"domains": "# comment\nbad.com\nhost.shared.com\nblogs.co.uk\n", "urls": "http://a.com/this\n",
             "banned_words": "Slur\n\nrude-word\n", "banned_subwords": "casino\n",
             "soft_banned_words": "free\nwin\nprize\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return {name: str(tmp_path / name) for name in files}


def test_rules_in_their_order(lists):
    stage = Url(integrated=False, **lists)
    stage.setup()
    for url, reason in (
            ("http://good.com/page", None), ("http://www.bad.com/", "domain"), ("https://bad.com:80/x", "domain"),
            ("http://host.shared.com/x", "subdomain"), ("http://other.shared.com/x", None),
            ("http://my.blogs.co.uk/x", "domain"), ("http://a.com/this", "url"), ("http://a.com/this/", None),
            ("http://x.com/a-slur-b", "hard_blacklisted"), ("http://x.com/a-Slur-b", None),
            ("http://x.com/rudeword", "hard_blacklisted"), ("http://x.com/free-win", "soft_blacklisted"),
            ("http://x.com/free-free", None), ("http://x.com/bigCas-ino", "blacklisted_subword"),
            ("http://10.1.2.3/x", None), ("http://x.com/?q=", None), ("", None)):
        doc = Document("id", "text", url=url)
        assert stage.process(doc) == reason, url
        assert ("url_soft_words" in doc.signals) == bool(url)
    assert Url(integrated=False, soft_words=1, **lists).config.soft_words == 1
    assert stage.verdict(Document("", signals={"url_soft_words": 3})) == "soft_blacklisted"


def test_blank_lines_block_nothing(lists, tmp_path):
    for name in ("domains", "urls"):
        (tmp_path / name).write_bytes(b"bad.com\n\n  \r\n # x\n")
    stage = Url(integrated=False, **lists)
    stage.setup()
    for url in ("http://10.1.2.3/x", "http://localhost/x", "http://[::1]/", "not a url", "http://x.com/"):
        assert stage.process(Document("id", "t", url=url)) is None, url
    assert stage.process(Document("id", "t", url="http://bad.com/")) == "domain"
    write_hashes([b"\n", b"a\n", b" \n", b"", b"# b"], tmp_path / "list.npy")
    found = HashList(tmp_path / "list.npy")
    assert len(found) == 1 and "a" in found and "" not in found
    # a list hashed by an earlier version may hold it
    np.save(tmp_path / "old.npy", np.array([xxhash.xxh3_64_intdigest(b"")], np.uint64))
    stage._domains = [HashList(tmp_path / "old.npy")]
    assert stage.process(Document("id", "t", url="http://10.1.2.3/x")) is None


def test_lists_count_by_content(lists, tmp_path):
    key = Url(integrated=False, **lists).key()
    moved = tmp_path / "moved"
    moved.write_text((tmp_path / "domains").read_text(encoding="utf-8"), encoding="utf-8")
    assert Url(integrated=False, **{**lists, "domains": str(moved)}).key() == key
    moved.write_text("other.com\n", encoding="utf-8")
    changed = Url(integrated=False, **{**lists, "domains": str(moved)})
    assert changed.key() != key
    changed.setup()  # a list that changed is hashed anew
    assert changed.process(Document("id", "t", url="http://other.com/")) == "domain"


def test_hash_list(tmp_path):
    rng = random.Random(0)
    names = [f"site{rng.randrange(10**9)}.com" for _ in range(5000)]
    write_hashes((f" {name} \n".encode() for name in names + names[:10]), tmp_path / "list.npy")
    found = HashList(tmp_path / "list.npy")
    assert len(found) == len(set(names))
    assert all(name in found for name in names)
    assert not any(f"other{i}.example" in found for i in range(5000))
    write_hashes([], tmp_path / "empty.npy")
    assert "x" not in HashList(tmp_path / "empty.npy")


@pytest.mark.slow
def test_integrated_lists_equal_datatrove():
    pytest.importorskip("ahocorasick", reason="datatrove's URL filter needs pyahocorasick")
    from datatrove.data import Document as Theirs
    from datatrove.pipeline.filters import URLFilter

    theirs, ours = URLFilter(), Url()
    ours.setup()
    theirs.download_data()
    rng = random.Random(1)
    hosts = ["example.org", "blog.example.co.uk", *rng.sample(sorted(theirs.block_listed_domains)[:200_000], 200)]
    words = [*rng.sample(sorted(theirs.banned_words), 30), *rng.sample(sorted(theirs.soft_banned_words), 20),
             *rng.sample(sorted(theirs.banned_subwords), 30), "house", "river"]
    urls = [f"http{rng.choice(['', 's'])}://{rng.choice(['', 'www.', 'a.b.'])}{rng.choice(hosts)}/"
            f"{rng.choice('-/_.').join(rng.sample(words, 3))}" for _ in range(600)]
    urls += rng.sample(sorted(theirs.block_listed_url)[:20_000], 50)
    for url in urls:
        result = theirs.filter(Theirs(text="x", id="id", metadata={"url": url}))
        assert ours.process(Document("id", "x", url=url)) == (None if result is True else result[1])
