"""What the service tells about stores and runs, event streams that are cut off, and stores that are damaged, hostile or
gone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from pipeline.cluster.attempts import note_attempt, standing
from pipeline.service import events as stream
from pipeline.service.app import create_app
from pipeline.service.runs import REPORT
from pipeline.service.settings import ServiceSettings
from pipeline.store.fs import Store
from tests.service.conftest import BASE, events, problem, write_log, write_run
from tests.simulate.clock import VirtualClock

RUNS = "/api/v1/stores/s/runs"


# -- stores and runs -------------------------------------------------------------------------------------------------
def test_stores_and_runs_are_listed_a_page_at_a_time(client, store):
    store.write("report.json", b'{"run": "first"}')
    assert client.get("/api/v1/stores").json() == {"stores": [{"store": "s", "root": store.root, "available": True}]}
    assert client.get("/api/v1/stores/s").json()["latest"] == "first"
    for name in ("third", "a", "zz"):
        write_run(store, name)
    expected, seen, after = ["a", "first", "second", "third", "zz"], [], ""
    while after is not None:
        page = client.get(RUNS, params={"after": after, "limit": 2}).json()
        assert len(page["runs"]) <= 2
        seen += page["runs"]
        after = page["after"]
    assert [row["run"] for row in seen] == expected
    assert [row["run"] for row in seen if row["latest"]] == ["first"]
    assert seen[2] | {"state": "failed", "docs": 3, "error": "no space left"} == seen[2]


@pytest.mark.parametrize(("path", "key"), [
    ("/api/v1/stores/t", "store"), ("/api/v1/stores/t/runs/first", "store"), (f"{RUNS}/absent", "run"),
    (f"{RUNS}/absent/events", "run"), (f"{RUNS}/absent/log", "run"), (f"{RUNS}/absent/report.html", "run"),
    (f"{RUNS}/first/report.html", "run"), (f"{RUNS}/first/report.json", "run"), (f"{RUNS}/first/recipe.yaml", "run"),
])
def test_what_is_not_there_is_a_404_with_its_key(client, path, key):
    document = problem(client.get(path), 404)
    assert document["key"] == key and document["remedy"]


@pytest.mark.parametrize(("params", "key"), [({"limit": 0}, "limit"), ({"limit": 501}, "limit"),
                                             ({"limit": "x"}, "limit"), ({"after": "a" * 401}, "after")])
def test_bad_parameters_are_named(client, params, key):
    assert problem(client.get(RUNS, params=params), 422)["key"] == key


def test_other_methods_are_problems_too(client):
    problem(client.put("/api/v1/stores", headers={"X-Tokenmill": "1"}), 405)


@pytest.mark.parametrize("name", [
    "%2e%2e%2f", "..%2f..", "..%2f..%2fsecret", "first%2f..%2fsecond", "first%00", "%ff", "..%5c..",
    "%c0%ae%c0%ae", "-first", ".hidden", "a" * 5000, "%0a", "%e2%80%ae", "first/"])
@pytest.mark.parametrize("rest", ["", "/events", "/log", "/report.html", "/report.json", "/recipe.yaml"])
def test_a_path_leads_nowhere_else(client, store, name, rest):
    outside = os.path.join(os.path.dirname(store.root), "report.html")
    for path in (outside, os.path.join(store.root, "report.html")):
        with open(path, "w") as f:
            f.write("outside")
    answer = client.get(f"{RUNS}/{name}{rest}")
    assert 400 <= answer.status_code < 500 and "outside" not in answer.text
    problem(answer, answer.status_code)


@pytest.mark.parametrize("name", [
    "<script>alert(1)<", "\"><img src=x onerror=alert(1)>", "' or 1=1 --", "a b", "$(reboot)", "{{7*7}}",
    "a&b?c#d;e", "ünï", "日本", "a" * 200])
def test_hostile_names_are_data(client, store, name):
    write_run(store, name, error="<script>\u202ealert(1)\x1b[2J</script>")
    assert name in [row["run"] for row in client.get(RUNS).json()["runs"]]
    for rest in ("", "/events", "/log"):
        answer = client.get(f"{RUNS}/{quote(name, safe='')}{rest}")
        assert answer.status_code == 200 and answer.headers["content-type"].partition(";")[0] in (
            "application/json", "text/event-stream")
        assert "\u202e" not in answer.text and "\x1b" not in answer.text
    assert client.get(f"{RUNS}/{quote(name, safe='')}").json()["run"] == name


def test_folders_that_no_run_can_be_are_counted_not_shown(client, store):
    for name in ("a\u202eb", "a\nb", os.fsdecode(b"a\xff"), "-x"):
        write_run(store, name)
    document = client.get(RUNS).json()
    assert [row["run"] for row in document["runs"]] == ["first", "second"] and document["hidden"] == 4


def test_what_only_the_server_needs_stays_there(client, store, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray.internal:6379")
    monkeypatch.setenv("SOME_API_TOKEN", "sesame-sesame-sesame")
    text = ("http://10.1.2.3:8265, 10.7.8.9:6379, [fd00::7]:6379 and ray.internal:6379 refuse sesame-sesame-sesame of "
            "jane.doe@example.org")
    write_run(store, "first", "failed", facts={"address": "http://10.1.2.3:8265", "job": "job-1"}, error=text,
              failures=[{"message": text}], traceback=text)
    write_log(store, "first", text + "\n")
    for path in (RUNS, f"{RUNS}/first", f"{RUNS}/first/events", f"{RUNS}/first/log", f"{RUNS}/first/log/events"):
        answer = client.get(path).text
        assert "refuse" in answer
        for inward in ("10.1.2.3", "10.7.8.9", "fd00::7", "ray.internal", "sesame", "jane.doe", "job-1"):
            assert inward not in answer, path


@pytest.mark.parametrize("data", [
    b"", b"{", b"[]", b"null", b'{"state": 7}', b'{"state": "done"}', b"\xff", b"[" * 100_000,
    b'{"state": "running", "parts": 1, "done": 0, "at": "x", "nodes": {"a": 1}}',
    b'{"state": "done", "parts": NaN, "done": 1e999}'])
@pytest.mark.parametrize("file", ["progress.json", "run.json", "../../log/heartbeat/00000001.json"])
def test_damaged_state_is_shown_as_such(client, store, file, data):
    write_run(store, "first", "running")
    store.write(os.path.normpath(f"runs/first/{file}"), data)
    assert client.get(f"{RUNS}/first").json()["run"] == "first"
    assert client.get(RUNS).status_code == 200


@pytest.mark.parametrize("beat", [
    {"at": "x"}, {"at": None}, {"at": [1]}, {"holder": 7}, {"holder": {"run": "first"}, "at": {}},
    {"holder": {"run": "first", "host": [], "pid": "x"}, "at": 0}])
def test_a_damaged_heartbeat_is_nobodys(store, beat):
    write_run(store, "first", "running")
    store.write("log/heartbeat/00000001.json", json.dumps({"holder": {"run": "first"}, **beat}).encode())
    assert standing(store, "first", VirtualClock()).state == "died"


def test_polling_an_unchanged_run_costs_no_body(client, store):
    answer = client.get(f"{RUNS}/first")
    tag = answer.headers["etag"]
    for sent in (tag, f'W/{tag}, "other"'):
        again = client.get(f"{RUNS}/first", headers={"If-None-Match": sent})
        assert again.status_code == 304 and again.content == b""
    write_run(store, "first", docs=13)
    changed = client.get(f"{RUNS}/first", headers={"If-None-Match": tag})
    assert changed.status_code == 200 and changed.json()["docs"] == 13


# -- streams ---------------------------------------------------------------------------------------------------------
def test_a_stream_that_was_cut_off_continues(client, store):
    first, end = events(client.get(f"{RUNS}/first/events").text)
    assert first["event"] == "progress" and first["data"] == client.get(f"{RUNS}/first").json()
    assert end["event"] == "end" and end["id"] == first["id"]
    known = {"Last-Event-ID": first["id"]}
    assert client.get(f"{RUNS}/first/events", headers=known).status_code == 204      # a browser asks no more
    write_run(store, "first", docs=99)
    again = events(client.get(f"{RUNS}/first/events", headers=known).text)
    assert [e["event"] for e in again] == ["progress", "end"] and again[0]["data"]["docs"] == 99
    for strange in ("7", "x" * 100, "1-0000"):
        assert len(events(client.get(f"{RUNS}/first/events", headers={"Last-Event-ID": strange}).text)) == 2
    problem(client.get(f"{RUNS}/first/events", headers={"Last-Event-ID": "x" * 101}), 422)


def test_a_stream_tells_every_change_until_the_end(client, store, monkeypatch):
    steps = iter(range(1, 6))                                          # what the driver does while the stream waits
    note_attempt(store, "live", 1, "job")

    async def next_state(seconds: float) -> None:
        n = next(steps)
        write_run(store, "live", "done" if n == 5 else "unknown-yet", docs=n)

    monkeypatch.setattr(stream.asyncio, "sleep", next_state)
    found = events(client.get(f"{RUNS}/live/events").text)
    told = [e["data"].get("docs") for e in found if e["event"] == "progress"]
    assert told == [None, 1, 2, 3, 4, 5] and found[0]["data"]["state"] == "submitted" and found[-1]["event"] == "end"
    assert len({e["id"] for e in found if e["event"] == "progress"}) == len(told)


def test_a_store_that_vanishes_in_mid_stream_is_its_last_event(client, store, monkeypatch):
    write_run(store, "live", "unknown-yet")

    async def vanish(seconds: float) -> None:
        shutil.rmtree(store.root)

    monkeypatch.setattr(stream.asyncio, "sleep", vanish)
    found = events(client.get(f"{RUNS}/live/events").text)
    assert [e["event"] for e in found] == ["progress", "problem"] and found[1]["data"]["key"] == "store"


def test_a_stream_ends_after_its_time_without_saying_that_the_run_did(store):
    write_run(store, "live", "unknown-yet")
    client = TestClient(create_app(ServiceSettings({"s": store.root}, stream_s=0.0)), base_url=BASE)
    assert "event: end" not in client.get(f"{RUNS}/live/events").text


def test_there_is_a_most_of_streams(store):
    app = create_app(ServiceSettings({"s": store.root}, streams=0))
    problem(TestClient(app, base_url=BASE).get(f"{RUNS}/first/events"), 429)


def test_many_who_ask_at_once_share_one_look(store, monkeypatch):
    from pipeline.service import watch

    reads, read_state = [], watch.read_state
    monkeypatch.setattr(watch, "read_state", lambda *args: reads.append(1) or read_state(*args))
    client = TestClient(create_app(ServiceSettings({"s": store.root}, look_s=3600.0)), base_url=BASE)
    with client:
        threads = [threading.Thread(target=client.get, args=(f"{RUNS}/first",)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(reads) == 1


def test_a_slow_look_holds_up_nobody_who_has_an_older_one(store, monkeypatch):
    from pipeline.service import watch

    gate, read_state = threading.Event(), watch.read_state

    async def main() -> None:
        seen = watch.RunWatch(0.0)
        first = await seen.state("s", store, "first")
        monkeypatch.setattr(watch, "read_state", lambda *args: gate.wait() and read_state(*args))
        monkeypatch.setattr(watch, "PATIENCE_S", 0.05)
        write_run(store, "first", docs=77)
        assert await seen.state("s", store, "first") is first
        gate.set()
        while (await seen.state("s", store, "first")).document["docs"] != 77:
            pass

    asyncio.run(main())


# -- the driver's log ------------------------------------------------------------------------------------------------
def test_a_log_is_read_stretch_by_stretch_without_a_gap(client, store):
    pieces = ["one ä\n", "two 日本\n" * 40, "three\n"]
    write_log(store, "first", *pieces)
    text, place, complete = "", "", False
    while not complete:
        answer = client.get(f"{RUNS}/first/log", params={"from": place}).json()
        text, place, complete = text + answer["text"], answer["next"], answer["complete"]
    assert text == "".join(pieces)
    assert client.get(f"{RUNS}/first/log/events", headers={"Last-Event-ID": place}).status_code == 204


def test_a_log_stream_continues_at_the_byte(client, store):
    pieces = [f"line {n} é\n" * 20 for n in range(4)]
    write_log(store, "first", *pieces)
    found = events(client.get(f"{RUNS}/first/log/events").text)
    assert "".join(e["data"]["text"] for e in found if e["event"] == "log") == "".join(pieces)
    for cut, e in enumerate(found[:-1], 1):
        rest = events(client.get(f"{RUNS}/first/log/events", headers={"Last-Event-ID": e["id"]}).text)
        assert "".join(x["data"]["text"] for x in rest if x["event"] == "log") == "".join(pieces[cut:])


def test_a_later_attempt_follows_in_the_stream(client, store):
    write_log(store, "first", "attempt one\n")
    write_log(store, "first", "attempt two\n", attempt=2)
    write_run(store, "first", attempt=2)
    assert client.get(f"{RUNS}/first/log").json()["text"] == "attempt two\n"
    found = events(client.get(f"{RUNS}/first/log/events", headers={"Last-Event-ID": "1-1-0"}).text)
    assert [e["data"].get("text") for e in found] == ["attempt one\n", "attempt two\n", None]


def test_control_characters_of_a_log_are_shown_as_escapes(client, store):
    write_log(store, "first", "a\x1b[2J\u202eb\n<script>\n")
    assert client.get(f"{RUNS}/first/log").json()["text"] == "a\\x1b[2J\\u202eb\n<script>\n"


@pytest.mark.parametrize("place", ["x", "1-0-0", "1-1", "-1-1-1", "1-1-1-1", "1" * 10 + "-1-0", "../1-1-0", "1-1-0\n"])
def test_a_bad_place_is_named(client, store, place):
    write_log(store, "first", "one\n")
    assert problem(client.get(f"{RUNS}/first/log", params={"from": place}), 400)["key"] == "from"


def test_a_run_of_a_terminal_has_no_log(client, store):
    write_run(store, "mine", how="local")
    problem(client.get(f"{RUNS}/mine/log"), 404)
    problem(client.get(f"{RUNS}/mine/log/events"), 404)


# -- reports ---------------------------------------------------------------------------------------------------------
def test_a_report_is_served_where_no_script_runs(client, store):
    page = b"<!doctype html><script>alert(1)</script>"
    store.write("runs/first/report.html", page)
    answer = client.get(f"{RUNS}/first/report.html")
    policy = answer.headers["content-security-policy"]
    assert answer.content == page and answer.headers["content-type"].startswith("text/html")
    assert "script-src" not in policy and policy.startswith("default-src 'none'") and policy.endswith("sandbox")
    assert client.get(f"{RUNS}/first").json()["report"] is True


def test_report_data_and_recipe_are_as_they_were_written(client, store):
    store.write("runs/first/report.json", b'{"run": "first", "x": [1, NaN], "y": "\\ud800"}')
    store.write("runs/first/recipe.yaml", "version: 1\n# <b>ü\n".encode())
    assert client.get(f"{RUNS}/first/report.json").json() == {"run": "first", "x": [1, None], "y": "\ud800"}
    answer = client.get(f"{RUNS}/first/recipe.yaml")
    assert answer.text == "version: 1\n# <b>ü\n" and answer.headers["content-type"].startswith("text/plain")


def test_damaged_and_huge_reports_are_problems(client, store):
    store.write("runs/first/report.json", b'{"run": ')
    assert "tokenmill report" in problem(client.get(f"{RUNS}/first/report.json"), 409)["remedy"]
    os.truncate(store.local / "runs/first/report.json", REPORT + 1)
    assert problem(client.get(f"{RUNS}/first/report.json"), 409)["title"] == "Too large"


def test_links_out_of_the_store_are_not_followed(client, store, tmp_path):
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "progress.json").write_text('{"state": "done", "parts": 1, "done": 1, "error": "outside"}')
    for name in ("report.html", "report.json", "recipe.yaml", "log/0001-000001.txt"):
        path = store.local / "runs" / "first" / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(tmp_path / "secret")
        answer = client.get(f"{RUNS}/first/{'log' if name.startswith('log') else name}")
        assert "outside" not in answer.text
        problem(answer, 404)
    (store.local / "runs" / "linked").symlink_to(tmp_path / "folder")
    assert "outside" not in client.get(f"{RUNS}/linked").text
    problem(client.get(f"{RUNS}/linked"), 404)


def test_a_next_piece_of_a_log_that_is_a_link_is_not_followed(client, store, tmp_path):
    (tmp_path / "secret").write_text("outside")
    write_log(store, "first", "one\n", "two\n")
    place = client.get(f"{RUNS}/first/log").json()["next"]
    piece = store.local / "runs/first/log/0001-000002.txt"
    piece.unlink()
    piece.symlink_to(tmp_path / "secret")
    answer = client.get(f"{RUNS}/first/log", params={"from": place})
    assert "outside" not in answer.text
    problem(answer, 404)
    assert "outside" not in client.get(f"{RUNS}/first/log/events").text


# -- stores that come and go -----------------------------------------------------------------------------------------
def test_a_store_that_vanishes_and_comes_back(client, store):
    before = client.get(f"{RUNS}/first").content
    shutil.move(store.root, store.root + "-away")
    for path in ("", "/runs", *(f"/runs/first{rest}" for rest in ("", "/events", "/log", "/report.json")), "/audit"):
        document = problem(client.get(f"/api/v1/stores/s{path}"), 404)
        assert document["key"] == "store" and "mounted" in document["remedy"]
    assert client.get("/api/v1/stores").json()["stores"][0]["available"] is False
    shutil.move(store.root + "-away", store.root)
    assert client.get(f"{RUNS}/first").content == before


def test_a_disk_that_fails_is_a_problem_that_may_pass(client, store, monkeypatch):
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error", f"{store.root}/secret/place")

    store.write("runs/first/report.html", b"x")
    monkeypatch.setattr(Store, "read", fail)
    answer = client.get(f"{RUNS}/first/report.html")
    assert problem(answer, 503)["remedy"] and answer.headers["retry-after"] and store.root not in answer.text


def test_another_server_tells_the_same(store):
    """All that a server knows lies in the store, the ids of events too."""
    write_log(store, "first", "one\n", "two\n")
    paths = ("/api/v1/stores", RUNS, f"{RUNS}/first", f"{RUNS}/second/events", f"{RUNS}/first/log/events")
    told = [[
        TestClient(create_app(ServiceSettings({"s": store.root})), base_url=BASE).get(path).content for path in paths
    ] for _ in range(2)]
    assert told[0] == told[1]


words = st.text(max_size=40) | st.sampled_from(["s", "first", "1-1-0", "..", "\x00", "\ud800", "0", "-1", "1e9"])


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """One client that all examples use."""
    at = Store(tmp_path_factory.mktemp("steady"))
    write_run(at, "first")
    write_log(at, "first", "one\n")
    return TestClient(create_app(ServiceSettings({"s": at.root}, rate=1e9)), base_url=BASE)


@given(data=st.data())
def test_no_request_is_an_error_of_the_server(steady, data):
    """Every route of the description, with whatever a client may put into its parameters."""
    client = steady
    paths = client.app.openapi()["paths"]
    path = data.draw(st.sampled_from(sorted(paths)))
    method, operation = data.draw(st.sampled_from(sorted(paths[path].items())))
    url, query, headers = path, {}, {"X-Tokenmill": "1"}
    for parameter in operation.get("parameters", ()):
        value = data.draw(words)
        if parameter["in"] == "path":
            url = url.replace(f"{{{parameter['name']}}}", quote(value.encode("utf-8", "surrogatepass"), safe=""))
        elif parameter["in"] == "query":
            query[parameter["name"]] = value.encode("utf-8", "surrogatepass")
        else:
            headers[parameter["name"]] = value.encode("latin-1", "replace").translate(None, b"\r\n\0")
    answer = client.request(method, url, params=query, headers=headers, content=data.draw(st.binary(max_size=60)),
                            follow_redirects=False)
    assert answer.status_code < 500
    if answer.status_code >= 400:
        problem(answer, answer.status_code)
