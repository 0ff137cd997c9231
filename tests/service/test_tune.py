"""The API of the playground."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from pipeline.recipe import load_recipe
from pipeline.recipe.marks import parse_yaml
from pipeline.run import make_backend, run_recipe
from pipeline.service.app import create_app
from pipeline.service.playground import Changes, Playground
from pipeline.service.settings import ServiceSettings
from pipeline.service.tune import Playgrounds
from pipeline.store.fs import Store
from tests.service.tuned_site import make_site

PLACE = "/api/v1/stores/s/runs/r/datasets/clean/tune"
VIEWER, OPERATOR = "v" * 24, "o" * 24


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return make_site(tmp_path_factory.mktemp("tune"), "english", "until-drop")


@pytest.fixture(scope="module")
def app(site):
    return create_app(ServiceSettings({"s": str(site / "store")}, viewer_token=VIEWER, operator_token=OPERATOR))


def client(app: Any, token: str = VIEWER) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1:8700", headers={"Authorization": f"Bearer {token}"},
                      raise_server_exceptions=False)


def asked(thresholds: dict[int, Any], off: tuple[int, ...] = ()) -> dict[str, str]:
    return {"changes": json.dumps({"thresholds": thresholds, "off": list(off)})}


def test_a_page_learns_what_may_move(app):
    document = client(app).get(PLACE).json()
    assert [step["name"] for step in document["steps"]] == [
        "gopher_repetition", "gopher_quality", "c4", "fineweb", "pii"]
    keys = {key["key"]: key for key in document["steps"][1]["keys"]}
    assert keys["min_doc_words"]["value"] == 60 and keys["min_doc_words"]["number"]
    assert "stop_words" not in keys and document["documents"] == 122


def test_answers_are_those_of_the_playground(app, site):
    response = client(app).get(f"{PLACE}/answer", params={**asked({1: {"min_doc_words": 120}}), "exact": "true"})
    game = Playground(Store(str(site / "store")), "r", "clean")
    wanted = game.answer(Changes({1: {"min_doc_words": 120}}), exact=True)
    assert response.json() == json.loads(json.dumps(wanted)) and wanted["leaves"]["documents"] > 0


def test_the_commands_of_the_documentation_are_answered(app, site):
    """The changes that the page about the playground sends, and its recipe with the header that it names."""
    page = (Path(__file__).parents[2] / "docs" / "playground.md").read_text()
    [changes] = re.findall(r"curl -sG \"\$T/answer\" --data-urlencode 'changes=(.*)'", page)
    response = client(app).get(f"{PLACE}/answer", params={"changes": changes})
    assert response.status_code == 200 and json.loads(changes)["thresholds"] == {"1": {"min_doc_words": 60}}
    headers = dict(re.findall(r"-H '([\w-]+): ([\w/]+)'", page))
    assert headers == {"X-Tokenmill": "1", "Content-Type": "application/json"}
    body = {"recipe": (site / "store" / "runs" / "r" / "recipe.yaml").read_text(), "changes": json.loads(changes)}
    response = client(app, OPERATOR).post(f"{PLACE}/recipe.yaml", headers=headers, content=json.dumps(body))
    assert response.status_code == 200


def test_changed_documents_come_in_pages(app):
    seen, after = [], 0
    while after is not None:
        page = client(app).get(f"{PLACE}/documents", params={**asked({1: {"min_doc_words": 200}}), "limit": 4,
                                                             "after": after}).json()
        seen += [d["id"] for d in page["documents"]]
        after = page["after"]
    assert len(set(seen)) == len(seen) == page["of"] > 4
    assert all(d["from"]["side"] == "kept" for d in page["documents"])


def test_a_cube_comes_as_json(app):
    cube = client(app).get(f"{PLACE}/cube", params={"step": 1, "key": "min_doc_words"}).json()
    assert cube["edges"] == sorted(cube["edges"]) and cube["cells"]


def test_a_recipe_is_saved_with_the_changes(app, site):
    changes = asked({1: {"min_doc_words": 77}}, (3,))
    text = client(app).get(f"{PLACE}/recipe.yaml", params=changes).text
    steps = parse_yaml(text, "")[0]["datasets"]["clean"]["steps"]
    assert [next(iter(s)) for s in steps] == ["gopher_repetition", "gopher_quality", "c4", "pii"]
    assert steps[1]["gopher_quality"]["min_doc_words"] == 77
    own = "# mine\n" + (site / "r.yaml").read_text() + "# end\n"
    body = {"recipe": own, "changes": json.loads(changes["changes"])}
    refused = client(app).post(f"{PLACE}/recipe.yaml", json=body)
    assert refused.status_code == 403
    text = client(app, OPERATOR).post(f"{PLACE}/recipe.yaml", json=body).text
    assert text.startswith("# mine\n") and text.endswith("# end\n") and '"min_doc_words": 77' in text


def test_a_saved_recipe_keeps_the_text_and_comments_of_its_author(app, site):
    """Not if settings were overridden when the run was started, because the run then differs from the text."""
    text = "# why 60: jane.roe@home.example.com\n" + (site / "r.yaml").read_text() + "# end\n"
    (site / "commented.yaml").write_text(text)
    saved = {}
    for run, overrides in (("plain", []), ("other", ["run.partition=9MB"])):
        run_recipe(load_recipe(site / "commented.yaml", overrides), str(site / "store"), run=run,
                   make_backend=make_backend("inline", 1, None))
        saved[run] = client(app).get(f"{PLACE.replace('runs/r/', f'runs/{run}/')}/recipe.yaml",
                                     params=asked({1: {"min_doc_words": 77}})).text
        steps = parse_yaml(saved[run], "")[0]["datasets"]["clean"]["steps"]
        assert steps[1]["gopher_quality"]["min_doc_words"] == 77
    lines = list(zip(saved["plain"].splitlines()[1:], text.splitlines()[1:], strict=True))
    assert saved["plain"].startswith("# why 60: ") and "home.example" not in saved["plain"]
    assert sum(new != old for new, old in lines) == 1, "only the line of the threshold differs"
    assert "why 60" not in saved["other"] and "partition: 9000000" in saved["other"]
    resumed = load_recipe(site / "store/runs/plain/recipe.yaml")
    resumed.came_from("commented", str(site))
    run_recipe(resumed, str(site / "store"), run="plain", make_backend=make_backend("inline", 1, None))
    again = client(app).get(f"{PLACE.replace('runs/r/', 'runs/plain/')}/recipe.yaml",
                            params=asked({1: {"min_doc_words": 77}})).text
    assert again == saved["plain"], "a resumed run keeps its text"


def test_a_saved_recipe_tells_no_more_than_that_of_the_run(app, site):
    shutil.copytree(site / "store/runs/r", site / "store/runs/secret")
    for name in ("recipe.yaml", "recipe.text.yaml"):
        with open(site / "store/runs/secret" / name, "a", encoding="utf-8") as file:
            file.write("# jane.roe@home.example.com, https://me:hunter2@example.org/\n")
    api = client(app)
    kept = api.get("/api/v1/stores/s/runs/secret/recipe.yaml").text
    response = api.get(f"{PLACE.replace('runs/r/', 'runs/secret/')}/recipe.yaml",
                       params=asked({1: {"min_doc_words": 77}}))
    assert parse_yaml(response.text, "")[0]["datasets"]["clean"]["steps"][1]["gopher_quality"]["min_doc_words"] == 77
    assert not any(word in text for text in (kept, response.text) for word in ("home.example", "hunter2"))
    assert response.text.splitlines()[-1] == kept.splitlines()[-1]


@pytest.mark.parametrize(("path", "params", "status", "key"), [
    ("/answer", {"changes": "{"}, 422, "changes"), ("/answer", {"changes": '{"what": 1}'}, 422, "changes"),
    ("/answer", {"changes": '{"thresholds": {"x": {}}}'}, 422, "changes"),
    ("/answer", asked({9: {"a": 1}}), 422, "step"), ("/answer", asked({1: {"stop_words": []}}), 422, "stop_words"),
    ("/answer", asked({1: {"min_doc_words": "<b>"}}), 422, "min_doc_words"),
    ("/answer", asked({1: {"min_doc_words": 10**400}}), 422, "min_doc_words"),
    ("/answer", asked({1: {"min_doc_words": "9" * 400}}), 422, "min_doc_words"),
    ("/answer", asked({}, (99,)), 422, "step"),
    ("/cube", {"step": 77, "key": "a"}, 422, "step"), ("/cube", {"step": 1, "key": "nope"}, 422, "nope"),
    ("/cube", {"step": 0, "key": ""}, 422, ""), ("/cube", {"step": 4, "key": "drop"}, 422, "drop"),
    ("/documents", {**asked({}), "limit": "0"}, 422, "limit"), ("/recipe.yaml", asked({8: {"a": 1}}), 422, "step")])
def test_bad_questions_are_problems_with_their_key(app, path, params, status, key):
    response = client(app).get(PLACE + path, params=params)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document.get("key", "") == key and "Traceback" not in response.text


@pytest.mark.parametrize(("place", "status"), [
    (PLACE.replace("runs/r", "runs/gone"), 404), (PLACE.replace("clean", "gone"), 404),
    (PLACE.replace("clean", "..%2f.."), 404), (PLACE.replace("stores/s", "stores/x"), 404)])
def test_what_is_not_there_is_a_problem(app, place, status):
    assert client(app).get(place).status_code == status


def test_an_unfinished_run_says_so(app, site):
    folder = site / "store/runs/unfinished"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    (folder / "recipe.yaml").write_text("version: 1\n")
    response = client(app).get(PLACE.replace("runs/r/", "runs/unfinished/"))
    assert response.status_code in (404, 409) and response.json()["key"] == "run"


@pytest.mark.parametrize("path", ["", "/answer", "/documents", "/cube?step=1&key=min_doc_words", "/recipe.yaml"])
def test_few_work_at_a_time_and_few_wait(app, monkeypatch, path):
    get, lock, go = Playgrounds.get, threading.Lock(), threading.Event()
    at_once, most, answers, answered = 0, 0, [], threading.Semaphore(0)

    def slow(self: Playgrounds, *of: Any) -> Playground:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        try:
            assert go.wait(300)
            return get(self, *of)
        finally:
            with lock:
                at_once -= 1

    def ask() -> None:
        answers.append(client(app).get(PLACE + path))
        answered.release()

    monkeypatch.setattr(Playgrounds, "get", slow)
    threads = [threading.Thread(target=ask) for _ in range(13)]
    for thread in threads:
        thread.start()
    for _ in range(3):                                              # two work, eight wait
        assert answered.acquire(timeout=300)
    go.set()
    for thread in threads:
        thread.join()
    busy = [answer for answer in answers if answer.status_code == 503]
    assert most == 2 and len(busy) == 3
    assert all(answer.headers["Retry-After"] and answer.json()["title"] == "Busy" for answer in busy)
    assert sum(answer.status_code == 200 for answer in answers) == 10
    assert client(app).get(PLACE + path).status_code == 200         # all places are free again


def test_mistakes_free_their_place(app):
    for _ in range(5):
        assert client(app).get(f"{PLACE}/cube", params={"step": 77, "key": "a"}).status_code == 422
        assert client(app).get(PLACE.replace("clean", "gone")).status_code == 404


def test_nobody_asks_without_a_token(app):
    assert client(app, "x" * 24).get(PLACE).status_code == 401


def test_a_cube_belongs_to_its_playground(monkeypatch):
    """An object in the place of one that is gone has its id."""
    class Game:
        pass

    monkeypatch.setattr("pipeline.service.tune.make_cube", lambda game, *_: type(game).__name__ + str(next(numbers)))
    games, numbers = Playgrounds(), itertools.count()
    cubes = [games.cube(Game(), Changes(), 0, "key") for _ in range(20)]
    assert len(set(cubes)) == 20
    game = Game()
    assert games.cube(game, Changes(), 0, "key") == games.cube(game, Changes(), 0, "key")


def test_datasets_leave_the_memory_when_others_need_it(site):
    games, store = Playgrounds(most=200), Store(str(site / "store"))
    first = games.get(store, "r", "clean")
    assert games.get(store, "r", "clean") is first
    (site / "store/runs/r2").mkdir(exist_ok=True)
    for name in ("plan.json", "tasks.parquet", "recipe.yaml"):
        (site / "store/runs/r2" / name).write_bytes((site / "store/runs/r" / name).read_bytes())
    games.get(store, "r2", "clean")                                # 122 documents each
    assert games.get(store, "r", "clean") is not first
