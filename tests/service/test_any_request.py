"""Valid and invalid requests that are generated from the service's own OpenAPI document: no answer is a server error,
and every refusal is a problem document."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from pipeline.service.app import create_app
from pipeline.service.settings import ServiceSettings
from tests.service.conftest import BASE
from tests.service.test_pages import RECIPE, root, rows  # noqa: F401  (fixtures)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("checks_here")]
#: requests of each kind to each operation; a check or a plan of a recipe takes long
EXAMPLES, DEAR = 25, 4
#: operations that take nothing, so that nothing can be wrong with it
PLAIN = ("/api/v1/stores", "/api/v1/session")
#: statuses that the documentation names for what the server cannot do now
BUSY = (503, 504)


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A copy of the store, because the requests change it: they label, submit, cancel and resume."""
    store = Path(shutil.copytree(root, tmp_path_factory.mktemp("asked") / "store"))
    [run] = (store / "runs").iterdir()
    shutil.copytree(run, store / "runs/copy")                       # to be compared with
    return store


def with_real_values(document: dict[str, Any], site: Path) -> dict[str, Any]:
    """Return the OpenAPI document with allowed values for some parameters: values that exist in the store, and similar
    ones that do not. Values generated from the types alone would never pass the first check. The name of the store
    always exists."""
    [run] = (path.name for path in (site / "runs").iterdir() if path.name != "copy")
    odd = ["absent", "\u202e<b>"]
    changes = [{"thresholds": {"0": {"min_doc_words": words}}, "off": off}
               for words in (80, None, "x") for off in ([], [9])]
    real: dict[str, list[Any]] = {
        "store": ["main"], "run": [run, *odd], "dataset": ["clean", *odd], "other": [run, *odd],
        "before": [run, "copy", *odd], "after": [run, "copy", *odd],
        "changes": [*map(json.dumps, changes), "{}", "[]", "{", '{"thresholds": {"0": {"absent": 1}}}'],
        "sort": ["stored", "id", "signals.gopher_words", "source", "signals.absent", *odd], "step": [0, 1, 99],
        "of": ["gopher_words", *odd], "key": ["min_doc_words", *odd], "threshold": ["0.min_doc_words", "9.x", *odd],
        "signal": [["gopher_words:2:"], ["gopher_words::nan"], [":::"], [f"{odd[1]}:1:2"], ["bytes:inf:-inf"]]}
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if (values := real.get(parameter["name"])) is not None:
                    parameter["schema"] = {"enum": values}
    recipes = [RECIPE, RECIPE.replace("jsonl", "absent"), RECIPE.replace("a.jsonl", "../../etc/passwd"), "a: [", "\x00",
               "- 1", "!!python/object:os.system x", None]
    for schema in document["components"]["schemas"].values():
        if "recipe" in schema.get("properties", {}):
            schema["properties"]["recipe"] = {"enum": recipes}
    return document


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_is_a_server_error(site: Path, tmp_path: Path, mode: GenerationMode,
                                      caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(ServiceSettings({"main": str(site)}, rate=1e6, burst=10**6, look_s=0.0, wrong_tokens=10**6,
                                     allowed_roots=(str(tmp_path),)))
    client = TestClient(app, base_url=BASE, raise_server_exceptions=False)
    document = with_real_values(client.get("/api/v1/openapi.json").json(), site)
    schema = schemathesis.openapi.from_dict(document)
    schema.app = app
    answered: Counter[int] = Counter()
    caplog.set_level(logging.ERROR, "tokenmill.service")

    def ask(case: schemathesis.Case) -> None:
        answer = case.call(base_url=BASE, headers={"X-Tokenmill": "1"})
        status = answer.status_code
        answered[status] += 1
        assert status < 500 or status in BUSY, (case.as_curl_command(), answer.text, caplog.text)
        if status >= 400:
            assert answer.headers["content-type"] == ["application/problem+json"], case.as_curl_command()

    for result in schema.get_all_operations():
        operation = result.ok()
        dear = operation.path.endswith("/assets") or (
            operation.method == "post" and operation.path.endswith(("/validate", "/plan", "/queue", "/resume")))
        if mode is GenerationMode.NEGATIVE and operation.path in PLAIN:
            continue
        asked = given(case=operation.as_strategy(generation_mode=mode))(ask)
        settings(max_examples=DEAR if dear else EXAMPLES, derandomize=True, deadline=None, database=None,
                 suppress_health_check=list(HealthCheck))(asked)()
    assert answered[200 if mode is GenerationMode.POSITIVE else 422] > 50, answered
