"""URL rules: small lists compared with plain sets, and the built-in lists compared with datatrove where it can run."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import xxhash

from stages import vectors
from stages.document import Document
from stages.filter.blacklists import categories_of
from stages.filter.url import Url
from stages.text.hashlist import HashList, LabelledList, write_hashes, write_labelled
from stages.vectors import read_vectors
from tests.conftest import shared_data
from tests.stages.test_conformance_vectors import FOLDER


@pytest.fixture
def lists(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    files = {"domains": "# comment\nbad.com\nhost.shared.com\nblogs.co.uk\n", "urls": "http://a.com/this\n",
             "banned_words": "Slur\n\nrude-word\n", "banned_subwords": "casino\n",
             "soft_banned_words": "free\nwin\nprize\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return {name: str(tmp_path / name) for name in files}


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


# -- places in a URL ---------------------------------------------------------------------------------------------------
def marked(stage: Url, url: str, reason: str) -> list[str]:
    return [url[a:b] for a, b in stage.url_matches(url, reason)]


@pytest.mark.parametrize("name", ["url", "url_dclm"])
def test_every_blocked_url_has_a_marked_part_by_which_it_is_blocked(name):
    """A URL of which only the marked parts are left in place is dropped for the same reason."""
    for case in read_vectors(FOLDER / f"{name}.jsonl")[1]:
        stage, url, reason = vectors.stage_of("url", json.dumps(case["config"]), FOLDER), case["url"], case["reason"]
        if reason is not None:
            assert marked(stage, url, reason) != [], url
        if reason in ("hard_blacklisted", "soft_blacklisted", "blacklisted_subword"):
            rest = Document("id", "", url="http://fine.org/" + " ".join(marked(stage, url, reason)))
            assert stage.process(rest) == reason, url


@pytest.mark.parametrize(("dialect", "url", "reason", "parts"), [
    ("datatrove", "http://me@a.worse.co.uk:80/worse.co.uk", "domain", ["worse.co.uk"]),
    ("datatrove", "http://host.shared.com/host.shared.com", "subdomain", ["host.shared.com"]),
    ("dclm", "http://www.bad.com:80/x", "domain", ["www.bad.com"]),
    ("datatrove", "http://x.com/Slur-slur_roodeword", "hard_blacklisted", ["slur"]),
    ("dclm", "http://x.com/Slur-a/RUDE-word", "hard_blacklisted", ["Slur", "RUDE-word"]),
    ("datatrove", "http://free.win/a-freebie", "soft_blacklisted", ["free", "win"]),
    ("datatrove", "http://x.com/the-CA-si.no-page", "blacklisted_subword", ["CA-si.no"]),
    ("dclm", "http://x.com/İ/the-CA-si.no", "blacklisted_subword", ["CA-si.no"]),
    ("dclm", "http://x.com/the-ca_sino", "blacklisted_subword", []),
    ("datatrove", "http://a.com/this", "url", ["http://a.com/this"]), ("datatrove", "not a url", "domain", []),
    ("datatrove", "http://x.com/", "url_gambling", [])])
def test_the_blocked_part_of_a_url_is_marked(lists, dialect, url, reason, parts):
    assert marked(Url(integrated=False, dialect=dialect, **lists), url, reason) == parts


# -- archives of categories --------------------------------------------------------------------------------------------
def archive(path, files: dict[str, bytes], links: dict[str, str] | None = None) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return str(path)


@pytest.fixture
def ut1(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    return archive(tmp_path / "blacklists.tar.gz", {
        "blacklists/gambling/domains": b"# made up\nBet.com\n.dotted.org\n10.1.2.3\n\n",
        "blacklists/gambling/urls": b"shop.com/games/\nwww.x.com/play\nx.com/q?id=1\n",
        "blacklists/gambling/usage": b"black\n", "blacklists/adult/domains": b"both.com\n", "blacklists/README": b"x",
        "blacklists/mixed-adult/domains": b"both.com\nmixed.co.uk\n"}, {"blacklists/porn": "adult"})


def categories(path: str, *names: str) -> Url:
    stage = Url(integrated=False, blacklists=path, categories=names)
    stage.setup()
    return stage


def test_categories_block_hosts_and_what_is_below(ut1):
    stage = categories(ut1, "gambling", "mixed-adult", "adult")
    for url, reason in (
            ("http://bet.com/", "gambling"), ("https://www.BET.com:80/x", "gambling"),
            ("http://a.b.bet.com", "gambling"), ("http://notbet.com/", None), ("http://bet.com.org/", None),
            ("http://x.dotted.org/", "gambling"),
            ("http://10.1.2.3/x", "gambling"), ("http://2.3/", None), ("http://com/", None), ("", None),
            ("http://me:pw@bet.com/?x", "gambling"), ("http://x.com/?u=bet.com", None),
            ("x.com/?u=http://bet.com/", None), ("bet.com/?u=http://x.com/", "gambling"),
            ("HTTP://bet.com", "gambling"), ("http://x.com/@bet.com", None),
            ("http://shop.com/games", "gambling"), ("http://www.shop.com/games/one/two?x#y", "gambling"),
            ("http://shop.com/gamesome", None), ("http://shop.com/", None), ("http://x.com/play/", "gambling"),
            ("http://x.com/q?id=1", "gambling"), ("http://x.com/q?id=12", None), ("http://x.com/Play", None),
            ("http://both.com/", "mixed_adult"), ("http://mixed.co.uk/", "mixed_adult"), ("http://co.uk/", None),
            ("http://[::1]/", None), ("not a url", None), ("//bet.com/x", "gambling"), ("bet.com/x", "gambling")):
        doc = Document("id", "text", url=url)
        assert stage.process(doc) == (reason and f"url_{reason}"), url
        assert bool(doc.signals.get("url_category")) == bool(reason)
        assert stage.verdict(Document("", signals=doc.signals)) == (reason and f"url_{reason}")
    for url, reason, part in (
            ("http://me:pw@a.b.BET.com:80/x?bet.com", "gambling", "BET.com"), ("http://10.1.2.3/x", "gambling",
            "10.1.2.3"), ("http://www.shop.com:80/games/one/two?x#y", "gambling", "shop.com:80/games"),
            ("http://x.com/q?id=1#y", "gambling", "x.com/q?id=1"), ("http://both.com/", "mixed_adult", "both.com"),
            ("http://both.com/", "adult", None), ("http://fine.com/", "gambling", None)):
        assert marked(stage, url, f"url_{reason}") == [part] * (part is not None), url
    assert categories(ut1, "porn").process(Document("id", "", url="http://both.com/")) == "url_porn", "a link"
    assert categories(ut1, "gambling").process(Document("id", "", url="http://both.com/")) is None


def test_categories_that_are_not_there(ut1, tmp_path):
    known = "adult, gambling, mixed-adult, porn"
    assert Url(integrated=False, blacklists=ut1).problems() == {
        "categories": f"the archive has no 'phishing'; it has {known}"}
    with pytest.raises(ValueError, match=rf"blacklists\.tar\.gz has no category 'phishing'; it has {known}"):
        categories(ut1, "gambling", "phishing")
    assert Url(integrated=False, blacklists=ut1, categories=("porn",)).problems() == {}
    assert Url(integrated=False).problems() == {}
    (tmp_path / "text.tar.gz").write_text("no archive", encoding="utf-8")
    assert "is no archive" in Url(integrated=False, blacklists=str(tmp_path / "text.tar.gz")).problems()["blacklists"]
    for wrong in ((), ("adult", "adult")):
        with pytest.raises(ValueError, match="categories: "):
            Url(integrated=False, blacklists=ut1, categories=wrong)


def test_an_archive_that_is_too_much_is_refused(ut1):
    """Before what is too much of it is unpacked."""
    assert len(categories_of(Path(ut1), max_files=7, max_bytes=1000)) == 4
    for limits in ({"max_bytes": 100}, {"max_files": 3}):
        with pytest.raises(ValueError, match=r"blacklists\.tar\.gz holds more than"):
            categories_of(Path(ut1), **limits)


def test_many_categories_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    names = [f"category_with_a_long_name_{i}" for i in range(60)]
    path = archive(tmp_path / "own.tar.gz", {f"{name}/domains": f"host{i}.com".encode()
                                             for i, name in enumerate(names)})
    stage = categories(path, *names)
    for i in (0, 37, 59):
        assert stage.process(Document("id", "", url=f"http://host{i}.com/")) == f"url_{names[i]}"


@pytest.mark.parametrize("category", ["dating", "gambling", "warez", "agressif"])
def test_lists_of_the_university_of_toulouse(tmp_path, monkeypatch, category):
    folder = shared_data("lists/ut1")
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    lists = {kind: gzip.decompress((folder / f"{category}.{kind}.gz").read_bytes()) for kind in ("domains", "urls")}
    stage = categories(archive(tmp_path / "ut1.tar.gz", {f"blacklists/{category}/{kind}": data
                                                         for kind, data in lists.items()}), category)
    for kind in ("domains", "urls"):
        for name in lists[kind].decode().splitlines()[::7]:
            for url in (f"http://{name}", f"https://www.{name}/deeper" if not name[0].isdigit() else f"http://{name}/x"):
                assert stage.process(Document("id", "t", url=url)) == f"url_{category}", url
    for url in ("https://www.python.org/doc", "http://nowhere.example/dating", "http://10.9.8.7/"):
        assert stage.process(Document("id", "t", url=url)) is None


def test_packed_lists(lists, tmp_path):
    (tmp_path / "more.gz").write_bytes(gzip.compress(b"packed.com\n"))
    stage = Url(integrated=False, domains=str(tmp_path / "more.gz"))
    stage.setup()
    assert stage.process(Document("id", "t", url="http://packed.com/x")) == "domain"
    # its content says whether it is packed, for keys and caches know contents alone; lists of words are read so, too
    (tmp_path / "more.txt").write_bytes(gzip.compress(b"other.com\n"))
    (tmp_path / "words.gz").write_bytes(gzip.compress(b"# made up\ntulip\n"))
    (tmp_path / "plain.gz").write_bytes(b"lily\n")
    stage = Url(integrated=False, domains=str(tmp_path / "more.txt"), banned_words=str(tmp_path / "words.gz"),
                banned_subwords=str(tmp_path / "plain.gz"))
    stage.setup()
    for url, reason in (("other.com", "domain"), ("x.com/tulip", "hard_blacklisted"),
                        ("xlilyx.com", "blacklisted_subword")):
        assert stage.process(Document("id", "t", url=f"http://{url}")) == reason
    (tmp_path / "latin1.txt").write_bytes("fl\xf6te\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin1\.txt is no text in UTF-8"):
        Url(integrated=False, banned_words=str(tmp_path / "latin1.txt")).setup()


def test_vectors_are_datatroves():
    pytest.importorskip("ahocorasick", reason="datatrove's URL filter needs pyahocorasick")
    from datatrove.data import Document as Theirs
    from datatrove.pipeline.filters import URLFilter

    head, cases = read_vectors(FOLDER / "url.jsonl")
    assert head["dialect"] == "datatrove 0.10.1"

    @cache
    def their_filter(config: str) -> URLFilter:
        config = json.loads(config)

        def entries(name: str) -> list[str]:
            lines = (FOLDER / config[name]).read_text(encoding="utf-8").splitlines() if name in config else []
            return [line for line in lines if not line.startswith("#")]

        return URLFilter(soft_word_threshold=config.get("soft_words", 2), use_integrated_lists=False,
                         extra_domains=entries("domains"), extra_urls=entries("urls"),
                         banned_words=entries("banned_words"), banned_subwords=entries("banned_subwords"),
                         soft_banned_words=entries("soft_banned_words"))

    seen = set()
    for case in cases:
        if not case["url"]:
            continue                                       # theirs must have one
        result = their_filter(json.dumps(case["config"])).filter(
            Theirs(text="x", id="id", metadata={"url": case["url"]}))
        assert case["reason"] == (None if result is True else result[1]), case["url"]
        seen.add(case["reason"])
    assert seen == {None, "domain", "subdomain", "url", "hard_blacklisted", "soft_blacklisted", "blacklisted_subword"}


# -- hashed lists ------------------------------------------------------------------------------------------------------
def test_labels(tmp_path):
    rng = random.Random(1)
    wanted: dict[str, int] = {}
    lists = []
    for label in (7, 1, 255):
        names = [f"n{rng.randrange(3000)}" for _ in range(2000)]
        lists.append((label, [name.encode() for name in names]))
        for name in names:
            wanted[name] = min(label, wanted.get(name, 255))
    write_labelled(iter(lists), tmp_path / "list.npy")
    found = LabelledList(tmp_path / "list.npy")
    assert len(found) == len(wanted)
    assert all(found.label(f"n{i}") == wanted.get(f"n{i}", 0) for i in range(3000))
    write_labelled([], tmp_path / "none.npy")
    assert LabelledList(tmp_path / "none.npy").label("n1") == 0


#: asks the cache for a file. The process that writes it waits until all three processes have found that it is missing
WRITER = """
import fcntl, os, sys
from pathlib import Path
from stages.text.cache import cached
from tests.processes import until

own, others = sys.argv[1], Path("seen")
lock = fcntl.flock

def locked(file, operation):
    (others / own).touch()
    lock(file, operation)

def write(path):
    (others / own).touch()
    with open("calls", "a") as calls:
        calls.write("x")
    until(lambda: len(os.listdir(others)) == 3)
    path.write_text("list")

fcntl.flock = locked
print(cached(Path("lists/a.npy"), write).read_text())
"""


def test_one_process_writes_what_many_want(tmp_path):
    (tmp_path / "seen").mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    runs = [subprocess.Popen([sys.executable, "-c", WRITER, str(number)], cwd=tmp_path, env=env, text=True,
                             stdout=subprocess.PIPE) for number in range(3)]
    assert [run.communicate(timeout=600)[0] for run in runs] == ["list\n"] * 3
    assert (tmp_path / "calls").read_text(encoding="utf-8") == "x"


@pytest.mark.slow
def test_a_worker_needs_less_than_100_mb_for_millions_of_domains(tmp_path):
    """2 million of them, in a process of its own, both from a list (hashed there) and from one that is hashed."""
    with open(tmp_path / "domains", "w", encoding="utf-8") as out:
        out.writelines(f"site{i * 2654435761 % 2**32:08x}.com\n" for i in range(2_000_000))
    script = ("import sys; from pathlib import Path; import tldextract\n"
              "from stages.document import Document; from stages.filter.url import Url\n"
              "def rss(): return int(Path('/proc/self/statm').read_text().split()[1]) * 4096\n"
              "before = rss(); stage = Url(integrated=False, domains=sys.argv[1]); stage.setup()\n"
              "urls = [f'http://site{i * 2654435761 % 2**32:08x}.com/' for i in range(0, 2_000_000, 1000)]\n"
              "assert all(stage.process(Document('', '', url=url)) == 'domain' for url in urls)\n"
              "print(rss() - before)")
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "domains")], capture_output=True, text=True,
                             env={**os.environ, "TOKENMILL_CACHE": str(tmp_path / "cache")}, check=True)
        assert int(run.stdout) < 100 << 20
