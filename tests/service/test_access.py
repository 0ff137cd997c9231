"""Who gets access: tokens and roles, the headers Host and Origin, forms of other sites, limits, and what is logged of a
write."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator

import pytest
from fastapi import Depends, Request
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient

from pipeline.service.access import operator
from pipeline.service.app import create_app
from pipeline.service.limits import RateBuckets
from pipeline.service.session import SESSION_S, Role, Sessions
from pipeline.service.settings import BadSettings, ServiceSettings, read_token
from pipeline.store.fs import Store
from tests.service.conftest import BASE, OPERATOR, PATIENT_S, VIEWER, pass_time, problem
from tests.simulate.clock import VirtualClock

PATHS = ("/api/v1/stores", "/api/v1/stores/s/runs/first", "/api/v1/stores/s/runs/first/events", "/api/v1/openapi.json",
         "/nowhere", "/", "/api/v1/stores/s/audit", "/loginx", "/api/v1/session/x")


def with_writes(client: TestClient) -> list[str]:
    """Add two routes that write: one that requires an operator, and one whose author forgot to. Returns the list of
    what was written."""
    written: list[str] = []
    app = client.app

    @app.post("/api/v1/stores/{store}/probe", dependencies=[Depends(operator)])
    def probe(store: str) -> dict[str, str]:
        written.append(store)
        return {"wrote": store}

    @app.post("/forgotten")
    def forgotten() -> None:
        written.append("forgotten")

    return written


# -- settings --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("settings", "key"), [
    ({"stores": {}}, "--store"),
    ({"host": "0.0.0.0"}, "--token-file"),
    ({"host": "192.0.2.7"}, "--token-file"),
    ({"host": "mill.example"}, "--token-file"),
    ({"host": "192.0.2.7", "operator_token": OPERATOR}, "--certificate"),
    ({"host": "0.0.0.0", "operator_token": OPERATOR, "behind_proxy": True}, "--name"),
    ({"behind_proxy": True}, "--token-file"),
    ({"behind_proxy": True, "viewer_token": VIEWER}, "--name"),
    ({"certificate": "cert.pem"}, "--key"),
    ({"operator_token": VIEWER, "viewer_token": VIEWER}, "tokens"),
])
def test_settings_that_would_let_others_in_are_refused(settings, key):
    with pytest.raises(BadSettings) as e:
        ServiceSettings(**{"stores": {"s": "store"}, **settings})
    assert key in str(e.value) and VIEWER not in str(e.value) and OPERATOR not in str(e.value)


def test_settings_that_are_safe_are_taken():
    ServiceSettings({"s": "store"}, host="::1")
    ServiceSettings({"s": "store"}, host="192.0.2.7", operator_token=OPERATOR, certificate="c", key="k")
    shown = repr(
        ServiceSettings({"s": "store"}, host="::", operator_token=OPERATOR, behind_proxy=True, names=("m.example", )))
    assert OPERATOR not in shown


def test_tokens_come_from_a_file_or_the_environment(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{OPERATOR}\n")
    assert read_token("T", str(path), {"T": VIEWER}) == OPERATOR
    assert read_token("T", None, {"T": VIEWER}) == VIEWER
    assert read_token("T", None, {}) is None and read_token("T", None, {"T": " "}) is None
    for bad in ("short", "two words of enough length", "n" * 30 + "é", ""):
        path.write_text(bad)
        with pytest.raises(BadSettings) as e:
            read_token("T", str(path), {})
        assert "token" in str(e.value) and (not bad or bad not in str(e.value))
    with pytest.raises(BadSettings, match="absent"):
        read_token("T", str(tmp_path / "absent"), {})


# -- roles -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_told_without_a_token(guarded, path):
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        answer = guarded().request(method, path)
        assert problem(answer, 401)["key"] == "Authorization" and answer.headers["www-authenticate"]


@pytest.mark.parametrize("header", ["Bearer wrong", f"Bearer {OPERATOR}x", f"Bearer {OPERATOR[:-1]}", "Bearer",
                                    "Bearer ", f"Basic {OPERATOR}", OPERATOR, "Bearer \u00e9"])
def test_a_wrong_token_is_no_token(guarded, header):
    problem(guarded().get("/api/v1/stores", headers={"Authorization": header.encode("latin-1")}), 401)


def test_a_token_works_in_its_header_alone(guarded):
    client = guarded()
    assert client.get("/api/v1/stores", headers={"Authorization": f"bearer {VIEWER}"}).status_code == 200
    problem(client.get("/api/v1/stores", params={"token": OPERATOR}), 401)
    problem(client.get("/api/v1/stores", headers={"Cookie": f"tokenmill={OPERATOR}"}), 401)


def test_a_viewer_reads_and_does_not_write(guarded):
    client = guarded("viewer")
    written = with_writes(client)
    assert client.get("/api/v1/stores").status_code == 200
    for path in ("/api/v1/stores/s/probe", "/forgotten", "/nowhere", "/api/v1/stores"):
        problem(client.post(path), 403)
    problem(client.get("/api/v1/stores/s/audit"), 403)
    assert written == [] and not list(Store(client.app.state.settings.stores["s"]).list("audit"))
    assert guarded("operator").get("/api/v1/stores/s/audit").status_code == 200


def test_a_route_that_asks_for_nothing_is_not_open(guarded):
    client = guarded()
    written = with_writes(client)
    problem(client.post("/forgotten"), 401)
    assert written == []


# -- rebinding and other sites ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:8700", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil.example",
    "evil.example#localhost", "evil.example/localhost", "", "[::1", "localhost:99999", "127.0.0.1:0",
    "localhost, evil.example", "192.0.2.7", "0.0.0.0"])
def test_another_host_is_refused(client, host):
    assert problem(client.get("/api/v1/stores", headers={"Host": host}), 403)["key"] == "Host"


def test_a_misspelt_parameter_is_refused(client):
    for path in ("/api/v1/stores?x=1", "/api/v1/stores/s/runs?limt=3", "/api/v1/stores/s/datasets/clean/kept?reasn=x"):
        answer = client.get(path)
        assert answer.status_code == 422 and answer.json()["key"] in path
    assert client.get("/api/v1/stores/s/runs?limit=3").status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8700", "127.0.0.1:9000", "[::1]:8700", "localhost.",
                                  "127.1.2.3"])
def test_loopback_has_many_names(client, host):
    assert client.get("/api/v1/stores", headers={"Host": host}).status_code == 200


def test_two_hosts_are_refused(client):
    problem(client.get("/api/v1/stores", headers=[("Host", "localhost"), ("Host", "evil.example")]), 403)


def test_behind_a_proxy_its_public_name_counts(guarded):
    client = guarded("operator", host="192.0.2.7", behind_proxy=True, names=("Mill.example",))
    assert client.get("/api/v1/stores", headers={"Host": "mill.example"}).status_code == 200
    for host in ("localhost", "127.0.0.1:8700", "evil.example"):
        problem(client.get("/api/v1/stores", headers={"Host": host}), 403)
    for origin, status in (("https://mill.example", 200), ("https://evil.example", 403)):
        answer = client.get("/api/v1/stores", headers={"Host": "192.0.2.7:8700", "Origin": origin})
        assert answer.status_code == status


@pytest.mark.parametrize(("headers", "get", "post"), [
    ({}, 200, 200),
    ({"Origin": BASE}, 200, 200),
    ({"Origin": "https://127.0.0.1:8700"}, 200, 200),
    ({"Origin": "http://evil.example"}, 403, 403),
    ({"Origin": "http://127.0.0.1:3000"}, 403, 403),
    ({"Origin": "http://localhost:8700"}, 403, 403),
    ({"Origin": "null"}, 403, 403),
    ({"Origin": ""}, 403, 403),
    ({"Sec-Fetch-Site": "same-origin"}, 200, 200),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200, 403),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403, 403),
    ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403, 403),
])
def test_pages_of_other_sites_are_refused(client, headers, get, post):
    written = with_writes(client)
    assert client.get("/api/v1/stores", headers=headers).status_code == get
    answer = client.post("/api/v1/stores/s/probe", headers={"X-Tokenmill": "1", **headers})
    assert answer.status_code == post and len(written) == (post == 200)


def test_a_write_without_a_proof_of_intent_is_refused(client):
    written = with_writes(client)
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for content in ("", "csrf=", "csrf=wrong", "csrf=%ff", "csrf=" + "0" * 64, "&" * 2000 + "a=b"):
        answer = client.post("/api/v1/stores/s/probe", content=content, headers=form)
        problem(answer, 400 if content[:8] in ("csrf=%ff", "&" * 8) else 403)
    problem(client.post("/api/v1/stores/s/probe", headers={"Authorization": "Basic eDp5"}), 403)
    problem(client.post("/api/v1/stores/s/probe", json={"csrf": "x"}), 403)
    assert written == []


def test_the_hidden_field_of_our_own_form_is_a_proof(guarded):
    client = guarded()
    written = with_writes(client)

    @client.app.get("/form")
    def form(request: Request) -> str:
        return request.state.csrf

    assert client.post("/api/v1/session", json={"token": OPERATOR}).status_code == 204
    field = client.get("/form").json()
    assert client.post("/api/v1/stores/s/probe", data={"csrf": field}).status_code == 200
    other = guarded()                                                  # another session, whose user is somebody else
    other_written = with_writes(other)
    assert other.post("/api/v1/session", json={"token": OPERATOR}).status_code == 204
    other.cookies.set("tokenmill", other.cookies["tokenmill"])
    problem(other.post("/api/v1/stores/s/probe", data={"csrf": field[::-1]}), 403)
    assert written == ["s"] and other_written == []


# -- sessions --------------------------------------------------------------------------------------------------------
def test_a_session_is_a_signed_cookie(guarded):
    client = guarded()
    answer = client.post("/api/v1/session", data={"token": VIEWER}, follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("tokenmill=viewer.") and VIEWER not in cookie
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert client.get("/api/v1/stores").status_code == 200
    problem(client.post("/nowhere"), 403)                              # a viewer's
    problem(client.delete("/api/v1/session"), 403)                     # anybody's page could send this
    assert client.delete("/api/v1/session", headers={"X-Tokenmill": "1"}).status_code == 204
    problem(client.get("/api/v1/stores"), 401)


def test_by_tls_the_cookie_stays_with_the_host(guarded):
    client = guarded(host="192.0.2.7", behind_proxy=True, names=("mill.example",))
    answer = client.post("/api/v1/session", json={"token": VIEWER}, headers={"Host": "mill.example"})
    assert answer.headers["set-cookie"].startswith("__Host-tokenmill=") and "; Secure" in answer.headers["set-cookie"]


def test_sessions_outlive_the_server_and_end_with_the_token_or_the_time():
    clock = VirtualClock()
    settings = ServiceSettings({"s": "x"}, viewer_token=VIEWER, operator_token=OPERATOR)

    def role(cookie: str, settings: ServiceSettings = settings) -> Role | None:
        return Sessions(settings, clock).role_of(Request({"type": "http", "headers": [(b"cookie", cookie.encode())]}))

    cookie = Sessions(settings, clock).cookie_for(Role.viewer).partition(";")[0]
    assert role(cookie) is Role.viewer
    assert role(cookie.replace("viewer", "operator", 1)) is None
    assert role(f"{cookie}0") is None and role(cookie[:-1]) is None
    name, end, mac = cookie.split(".")
    assert role(f"{name}.{int(end) + 1}.{mac}") is None and role(f"{name}.{end}") is None
    assert role("tokenmill=viewer.9999999999.") is None and role("tokenmill=\x7f;;=") is None
    assert role(cookie, ServiceSettings({"s": "x"}, viewer_token=VIEWER + "2", operator_token=OPERATOR)) is None
    assert role(cookie, ServiceSettings({"s": "x"}, operator_token=OPERATOR)) is None
    clock.sleep(SESSION_S)
    assert role(cookie) is None


def test_signing_in_with_a_wrong_token_says_so(guarded):
    client = guarded()
    for body in ({"token": "wrong"}, {"token": 7}, {}):
        assert problem(client.post("/api/v1/session", json=body), 401)["key"] == "token"
    problem(client.post("/api/v1/session", content=b"[" * 100_000), 400)
    problem(client.post("/api/v1/session", content=b"\xff"), 400)
    assert "set-cookie" not in client.post("/api/v1/session", json={"token": "wrong"}).headers


# -- limits ----------------------------------------------------------------------------------------------------------
def test_a_bucket_fills_again():
    clock = VirtualClock()
    bucket = RateBuckets(2.0, 3, clock)
    assert [bucket.take("a") for _ in range(4)] == [True, True, True, False]
    assert bucket.take("b")
    clock.sleep(0.5)
    assert [bucket.take("a"), bucket.take("a")] == [True, False]
    clock.sleep(60)
    assert [bucket.take("a") for _ in range(4)] == [True, True, True, False]


def test_too_many_requests_wait(guarded):
    client = guarded("viewer", rate=1e-9, burst=3)
    assert [client.get("/api/v1/stores").status_code for _ in range(3)] == [200] * 3
    assert "retry-after" in client.get("/api/v1/stores").headers
    problem(client.get("/nowhere"), 429)


@pytest.mark.parametrize("way", ["header", "form"])
def test_guessing_is_slowed_and_sessions_go_on(guarded, way):
    client = guarded(wrong_tokens=3)
    client.app.user_middleware[0].kwargs["clock"] = VirtualClock()     # no time passes in which one may guess again
    client.post("/api/v1/session", json={"token": VIEWER})

    def guess(token: str):
        if way == "header":
            return client.get("/api/v1/stores", headers={"Authorization": f"Bearer {token}"})
        return client.post("/api/v1/session", json={"token": token})

    for n in range(3):
        problem(guess(f"guess {n}"), 401)
    problem(guess("one more"), 429)
    problem(guess(OPERATOR), 429)                                      # not even the right one says that it is
    assert client.get("/api/v1/stores").status_code == 200


@pytest.mark.parametrize("length", ["1048577", "9" * 400, "-1", "ten", "1e3"])
def test_a_body_that_says_it_is_too_large_is_refused(client, length):
    written = with_writes(client)
    answer = client.post("/api/v1/stores/s/probe", headers={"Content-Length": length, "X-Tokenmill": "1"}, content=b"x")
    problem(answer, 413)
    assert written == []


def test_a_body_that_does_not_say_how_large_it_is_is_cut_off(client):
    written, sent = with_writes(client), 0

    def chunks():
        nonlocal sent
        for _ in range(40):
            sent += 1
            yield b"x" * (64 << 10)

    problem(client.post("/api/v1/stores/s/probe", content=chunks(), headers={"X-Tokenmill": "1"}), 413)
    problem(client.post("/api/v1/session", content=chunks()), 413)
    assert written == []


def test_a_long_url_is_refused(client):
    problem(client.get("/" + "a" * 9000), 414)
    problem(client.get("/api/v1/stores?" + "a" * 9000), 414)


def test_an_answer_that_takes_too_long_is_given_up(guarded):
    client = guarded("viewer", request_s=PATIENT_S)
    ended = []

    @client.app.get("/slow")
    async def slow() -> None:
        pass_time(PATIENT_S)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    problem(client.get("/slow"), 503)
    assert ended == [True]


def test_an_answer_that_has_begun_may_take_longer(guarded):
    client = guarded("viewer", request_s=PATIENT_S)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"begun, "
        pass_time(5 * PATIENT_S)
        for _ in range(5):                                        # turns of the loop, in which it notices
            await asyncio.sleep(0)
        yield b"ended"

    @client.app.get("/long")
    async def long() -> StreamingResponse:
        return StreamingResponse(pieces())

    assert client.get("/long").text == "begun, ended"


def test_a_timeout_of_a_route_is_not_taken_for_the_limit(guarded):
    client = guarded("viewer", request_s=PATIENT_S)

    @client.app.get("/own")
    async def own() -> None:
        raise TimeoutError

    @client.app.get("/slow")
    async def slow() -> None:
        pass_time(PATIENT_S)
        await asyncio.Event().wait()

    assert problem(client.get("/own"), 503)["title"] != problem(client.get("/slow"), 503)["title"]


# -- headers, errors, logs -------------------------------------------------------------------------------------------
def test_an_unexpected_error_is_logged_and_not_told(client, caplog):
    @client.app.get("/broken")
    def broken() -> None:
        raise KeyError("a secret detail")

    with caplog.at_level(logging.ERROR, "tokenmill.service"):
        document = problem(client.get("/broken"), 500)
    assert "secret detail" not in json.dumps(document) and "secret detail" in caplog.text


@pytest.mark.parametrize("path", ["/api/v1/stores", "/api/v1/openapi.json", "/nowhere",
                                  "/api/v1/stores/s/runs/first/events"])
def test_every_answer_has_the_headers(client, path):
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "same-origin" and headers["cache-control"] == "no-store"
    assert "default-src 'none'" in headers["content-security-policy"] and "server" not in headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cross-origin-resource-policy"] == "same-origin" and "access-control-allow-origin" not in headers


def test_a_page_gets_a_policy_with_a_nonce_of_its_own(client):
    from starlette.responses import HTMLResponse

    @client.app.get("/page")
    def page(request: Request) -> HTMLResponse:
        return HTMLResponse(request.state.nonce)

    answers = [client.get("/page") for _ in range(2)]
    assert answers[0].text != answers[1].text
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert f"script-src 'nonce-{answer.text}'" in policy and "unsafe" not in policy


def test_the_access_log_has_no_token_and_one_line_a_request(guarded, caplog):
    client = guarded("operator")
    with caplog.at_level(logging.INFO, "tokenmill.access"):
        client.get("/api/v1/stores", params={"token": VIEWER})
        client.get("/a%0aFAKE%1b%5b2J%e2%80%ae")
        client.post("/api/v1/session", json={"token": VIEWER})
        guarded("wrong-" + "w" * 30).get("/api/v1/stores")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4 and all("\n" not in line and "\x1b" not in line and "\u202e" not in line for line in lines)
    assert not any(word in line for line in lines for word in (VIEWER, OPERATOR, "w" * 30))
    assert [" 422 " in lines[0], " 404 " in lines[1], " 204 " in lines[2], " 401 " in lines[3]] == [True] * 4


# -- audit -----------------------------------------------------------------------------------------------------------
def test_a_write_is_noted_in_its_store_before_it_is_done(guarded, store):
    client = guarded("operator")
    written = with_writes(client)
    body = b'{"password": "hunter2-hunter2"}'
    for n in range(3):
        assert client.post("/api/v1/stores/s/probe", content=body * n).status_code == 200
    assert len(written) == 3 and not list(store.list("log"))
    answer = client.get("/api/v1/stores/s/audit", params={"limit": 2}).json()
    rest = client.get("/api/v1/stores/s/audit", params={"after": answer["after"]}).json()
    entries = answer["entries"] + rest["entries"]
    assert len(answer["entries"]) == 2 and rest["after"] is None
    assert sorted(e["sha256"] for e in entries) == sorted(hashlib.sha256(body * n).hexdigest() for n in range(3))
    assert all(e["role"] == "operator" and e["path"] == "/api/v1/stores/s/probe" and e["method"] == "POST" and e["from"]
               for e in entries)
    assert all(OPERATOR.encode() not in data and b"hunter2" not in data
               for data in map(store.read, store.list("audit")))


def test_a_write_that_cannot_be_noted_is_not_done(client, store):
    written = with_writes(client)
    store.write("audit", b"a file stands where the folder should")
    problem(client.post("/api/v1/stores/s/probe", headers={"X-Tokenmill": "1"}), 409)
    assert written == []


def test_entries_are_never_overwritten(store):
    from pipeline.service.audit import entries, note_write

    clock = VirtualClock()
    paths = {note_write(store, {"n": n}, clock) for n in range(50)}    # all in one second
    assert len(paths) == 50 and sorted(e["n"] for e in entries(store, "", 100)) == list(range(50))
    store.write("audit/2026-damaged.json", b"{")
    assert entries(store, "", 100)[-1] == {"id": "2026-damaged.json", "damaged": True}


def test_checking_a_token_compares_all_of_both(monkeypatch):
    """An early return would tell by its time how much of a guess is right, and which token it is."""
    import hmac

    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    sessions = Sessions(ServiceSettings({"s": "x"}, viewer_token=VIEWER, operator_token=OPERATOR))
    for token in ("", "x", OPERATOR, VIEWER, VIEWER * 100):
        compared.clear()
        sessions.role_of_token(token)
        assert compared == [(32, 32), (32, 32)]


def test_time_is_only_that_of_the_clock():
    """The cookie's end is on the wall clock, so that another server agrees."""
    end = int(Sessions(ServiceSettings({"s": "x"}, viewer_token=VIEWER)).cookie_for(Role.viewer).split(".")[1])
    assert abs(end - SESSION_S - time.time()) < 3600


def test_an_app_without_tokens_is_for_loopback_alone():
    assert create_app(ServiceSettings({"s": "x"})).state.settings.local
