"""What a submitted recipe must not read: files outside the allowed folders, however their names are written; addresses
of this machine and of its cloud; and servers that redirect to these."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pipeline.base import addresses
from pipeline.plan.inputs import InputError, list_source
from pipeline.recipe import confine
from pipeline.recipe.confine import refusals
from pipeline.recipe.errors import RecipeError, key_path
from pipeline.recipe.load import load_text
from pipeline.recipe.marks import parse_yaml
from pipeline.store import web
from pipeline.store.errors import StoreError
from pipeline.store.remote import connect

RECIPE = """
version: 1
sources: {{docs: {{read: text, path: {path}}}}}
datasets: {{clean: {{from: docs, steps: []}}}}
"""


@pytest.fixture
def top(tmp_path) -> Path:
    """A folder with a folder `allowed`, which has a file and links, and beside it a folder `secret`."""
    for folder in ("allowed/docs", "secret", "allowed-too"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text("text")
    (tmp_path / "allowed" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "allowed" / "file.txt").symlink_to(tmp_path / "secret" / "a.txt")
    (tmp_path / "allowed" / "in").symlink_to(tmp_path / "allowed" / "docs")
    (tmp_path / "allowed" / "a[b].txt").symlink_to(tmp_path / "secret" / "a.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "allowed")
    return tmp_path


def refused(top: Path, text: str, roots: tuple[str, ...] | None = None) -> list[str]:
    """Return the keys of a recipe that are refused. Its relative paths start at `allowed`."""
    data, marks = parse_yaml(text, "recipe.yaml")
    base = str(top / "allowed")
    return [key_path(p.path) for p in refusals(data, marks, base, (base,) if roots is None else roots)]


def path_refused(top: Path, path: str, roots: tuple[str, ...] | None = None) -> bool:
    return refused(top, RECIPE.format(path=f"'{path}'"), roots) == ["sources.docs.path"]


@pytest.mark.parametrize("path", [
    "docs", "docs/*.txt", "docs/**", "in", "in/*.txt", "**/*.txt", ".", "{top}/allowed/docs", "file://{top}/allowed/docs",
    "{top}/linked/docs", "docs/later/*.txt"])
def test_paths_inside_are_allowed(top, path):
    assert not path_refused(top, path.format(top=top))


@pytest.mark.parametrize("path", [
    "../secret", "docs/../../secret", "docs/*/../../../secret/*", "{top}/secret", "{top}/secret/*.txt", "/", "/**/*",
    "{top}/allowed-too", "{top}/*/a.txt", "out", "out/*.txt", "out/a.txt", "file.txt", "a[b].txt", "~", "~root/.ssh",
    "file:///etc/passwd", "file://{top}/secret", "FILE:///etc/passwd", "file:/../../etc/passwd", "local:///etc/passwd",
    "simplecache::file:///etc/passwd", "zip::/etc/passwd", "/proc/self/environ", "s3://bucket/x", "http://host/x",
    "memory://x", "ftp://host/x", "hf://datasets/x", "docs\\..\\..\\secret"])
def test_paths_outside_are_refused(top, path):
    assert path_refused(top, path.format(top=top))


def test_what_is_refused_could_be_read_otherwise(top):
    """The links and wildcards above do lead out for a recipe that is not confined."""
    for path in ("../secret", "out/*.txt", "file.txt", f"file://{top}/secret", "a[b].txt"):
        assert len(list_source("docs", [path], base=str(top / "allowed"))) == 1


def test_a_wildcard_meets_no_link_that_leads_out(top):
    """Such a link is not refused, for nobody knows it yet; it is not followed."""
    assert not path_refused(top, "*/a.txt")
    listed = [f.path for f in list_source("docs", ["*/a.txt"], base=str(top / "allowed"))]
    assert sorted(listed) == ["docs/a.txt", "in/a.txt"]
    with pytest.raises(InputError):
        list_source("docs", ["*/nothing.txt"], base=str(top / "allowed"))


@pytest.mark.parametrize(("text", "key"), [
    ("sources: {docs: {read: text, path: docs, root: /etc}}", "sources.docs.root"),
    ("sources: {docs: {read: text, path: [docs, /etc/passwd]}}", "sources.docs.path[1]"),
    ("sources: {docs: {read: text, path: docs, follow_symlinks: true}}", "sources.docs.follow_symlinks"),
    ("sources: {docs: {read: text, path: docs, follow_symlinks: 'yes'}}", "sources.docs.follow_symlinks"),
    ("code: /etc/evil.py", "code"),
    ("code: [docs/x.py, ../secret/y.py]", "code[1]"),
    ("code: out/x.py", "code"),
    ("tokenizer: {load: /etc/tokenizer.json}", "tokenizer.load"),
    ("tokenizer: {load: ../secret}", "tokenizer.load"),
    ("tokenizer: {load: gpt2}", "tokenizer.load"),
    ("tokenizer: {load: out}", "tokenizer.load"),
    ("train: {model: {from: /etc/model}}", "train.model.from"),
    ("train: {init: {from: /etc/model}}", "train.init.from"),
    ("train: {evaluate: {tasks: {tasks: [arc_easy, out/own.yaml], data: docs}}}", "train.evaluate.tasks.tasks[1]"),
    ("train: {evaluate: {tasks: {tasks: arc_easy, data: /etc}}}", "train.evaluate.tasks.data"),
    ("datasets: {d: {from: x, steps: [{url: {domains: /etc/hosts}}]}}", "datasets.d.steps[0].url.domains"),
    ("datasets: {d: {from: x, steps: [{perplexity: {models: {en: /etc/lm}}}]}}",
     "datasets.d.steps[0].perplexity.models.en"),
    ("datasets: {d: {from: x, steps: [{pii: {key_file: file.txt}}]}}", "datasets.d.steps[0].pii.key_file"),
    ("datasets: {d: {from: x, steps: [{datatrove: {block: filters.X, args: {list: /etc/passwd}}}]}}",
     "datasets.d.steps[0].datatrove.args.list"),
    ("datasets: {d: {from: x, steps: [{datatrove: {block: filters.X, args: {list: out}}}]}}",
     "datasets.d.steps[0].datatrove.args.list"),
    ("datasets: {d: {from: x, steps: [{exact: {against: /etc}}]}}", "datasets.d.steps[0].exact.against"),
    ("datasets: {d: {from: x, steps: [{minhash: {against: [d, docs, out]}}]}}",
     "datasets.d.steps[0].minhash.against[2]"),
    ("datasets: {d: {from: x, steps: ['os:system']}}", "datasets.d.steps[0]"),
    ("datasets: {d: {from: x, steps: [{'os:system': {}}]}}", "datasets.d.steps[0]"),
    ("sources: {docs: {read: 'os:system', path: docs}}", "sources.docs.read"),
])
def test_every_place_that_names_a_file_is_confined(top, text, key):
    assert refused(top, text) == [key]


def test_code_may_name_what_its_files_define(top):
    assert refused(top, "code: docs/mine.py\n"
                        "datasets: {d: {from: x, steps: [{'mine:Filter': {words: [a, b], list: docs/a.txt}}]}}") == []
    assert refused(top, "code: docs/mine.py\n"
                        "datasets: {d: {from: x, steps: [{'mine:Filter': {list: /etc/passwd}}]}}") != []


def test_values_of_wrong_types_are_left_to_validation(top):
    for text in ("sources: 3", "sources: {docs: 3}", "sources: {docs: {path: {a: 1}}}", "datasets: [1]", "code: 3",
                 "datasets: {d: {steps: 3}}", "datasets: {d: {steps: [3, null, {url: 3}]}}", "tokenizer: 3",
                 "sources: {docs: {read: [text], path: docs}}", "train: {evaluate: {tasks: [3]}}"):
        refused(top, text)


def test_nothing_is_imported_or_opened_before_the_refusal(top):
    (top / "secret" / "evil.py").write_text("raise SystemExit('imported')")
    base = str(top / "allowed")
    text = RECIPE.format(path="docs") + f"code: {top}/secret/evil.py\n"
    with pytest.raises(RecipeError) as e:
        load_text(text, "recipe.yaml", name="r", base=base, inputs_from=base, allow_custom=True,
                  confine=partial(refusals, base=base, roots=(base,)))
    assert [key_path(p.path) for p in e.value.problems] == ["code"]


def test_overrides_and_inputs_are_confined(top):
    base = str(top / "allowed")
    for more in ({"overrides": ["sources.docs.path=/etc/passwd"]}, {"inputs": ["/etc/passwd"]},
                 {"inputs": ["../secret/a.txt"]}, {"overrides": ["code=[/etc/x.py]"]}):
        with pytest.raises(RecipeError):
            load_text(RECIPE.format(path="docs"), "recipe.yaml", name="r", base=base, inputs_from=base, **more,
                      confine=partial(refusals, base=base, roots=(base,)))


# -- addresses -------------------------------------------------------------------------------------------------------
def test_urls_below_a_root_are_allowed(top, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [(0, 0, 0, "", ("93.184.216.34", 0))])
    roots = ("s3://bucket/corpus", "https://data.example/web/", "hf://gpt2")
    for path in ("s3://bucket/corpus", "s3://bucket/corpus/*.gz", "https://data.example/web/a.jsonl"):
        assert not path_refused(top, path, roots)
    for path in ("s3://bucket/corpus2/x", "s3://bucket/x", "s3://bucket", "s3://bucket/corpus/../x", "s3://other/corpus",
                 "https://data.example/other", "https://data.example.evil/web/x", "https://data.example@evil/web/x",
                 "https://u:p@data.example/web/x", "https://data.example/web/%2e%2e/x", "http://data.example/web/x",
                 "https://data.example/web/\\\\x", "S3://bucket/corpus/x", "docs"):
        assert path_refused(top, path, roots)
    assert refused(top, "tokenizer: {load: gpt2}", roots) == []
    assert refused(top, "tokenizer: {load: gpt3}", roots) == ["tokenizer.load"]


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "169.254.169.254", "169.254.170.2", "fe80::1", "fe80::1%eth0",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "fd00:ec2::254", "100.100.100.200", "224.0.0.1", "2002:7f00:1::",
    "fd20:ce::254", "fc00::1", "fdff::1", "192.0.0.192", "::ffff:192.0.0.1", "2001::1", "2001:0:7f00:1::", "fec0::1",
    "64:ff9b::a9fe:a9fe", "64:ff9b::10.0.0.7"])
def test_addresses_of_this_machine_and_its_cloud_are_refused(top, monkeypatch, address):
    assert not addresses.outside(address)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [(0, 0, 0, "", ("93.184.216.34", 0)),
                                                                   (0, 0, 0, "", (address, 0))])
    assert path_refused(top, "http://files.example/a", ("http://files.example",))


def test_addresses_of_others_are_not(top):
    assert all(map(addresses.outside, ("93.184.216.34", "10.0.0.7", "192.168.1.2", "2606:2800:220::1")))


def test_literal_addresses_are_refused_in_every_spelling(top):
    for host in ("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "169.254.169.254"):
        url = f"http://{host}/latest"
        assert path_refused(top, url, (url,)), host


# -- redirects -------------------------------------------------------------------------------------------------------
class Handler(http.server.BaseHTTPRequestHandler):
    """A server on which `/go/NAME` redirects to `/NAME`, and everything else is a text."""

    def do_GET(self) -> None:
        if self.path.startswith("/go/"):
            self.send_response(302)
            self.send_header("Location", self.path[3:])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"text")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"localhost:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_redirects_are_refused_for_submitted_recipes_alone(server, monkeypatch):
    assert connect(f"http://{server}/go").read("a.txt") == b"text"
    monkeypatch.setenv(web.DIRECT, "1")
    monkeypatch.setattr(web, "outside", lambda address: True)
    assert connect(f"http://{server}").read("a.txt") == b"text"
    for call in (lambda r: r.read("a.txt"), lambda r: r.head("a.txt"), lambda r: r.read_range("a.txt", 0, 2)):
        with pytest.raises(StoreError, match="redirects"):
            call(connect(f"http://{server}/go"))


def test_an_address_is_checked_when_the_connection_is_made(server, monkeypatch):
    """A name may lead to another address than when the recipe was checked."""
    monkeypatch.setenv(web.DIRECT, "1")
    with pytest.raises(StoreError, match="this machine"):
        connect(f"http://{server}").read("a.txt")


def test_confinement_uses_one_rule_for_addresses():
    assert confine.outside is web.outside is addresses.outside
