"""Shows the plan of a recipe before the recipe is submitted. The page says which nodes of the plan (passes, barriers …)
are stale and would run, what the run would cost, and which errors the recipe has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.responses import HTMLResponse

from pipeline.cluster.queue import Submission
from pipeline.service.html import page
from pipeline.service.submit import check_submission
from pipeline.store.fs import Store


async def planned(request: Request, submission: Submission, at: Store, before: str = "") -> dict[str, Any]:
    """Plan a submission (a recipe to run) in a store, and return the result of `check_submission`. In the result, `run`
    is None if the recipe has errors. If the recipe was made by changing another one, `before` is the text of that other
    recipe."""
    result = await check_submission(request, submission, at, before=before)
    return {**result, "run": None} if any(p["severity"] == "error" for p in result["problems"]) else result


def plan_page(request: Request, store: str, submission: Submission, result: Mapping[str, Any], *, action: str,
              fields: Mapping[str, str], back: tuple[str, str], changed_run: str = "") -> HTMLResponse:
    """Return the HTML page that shows the plan of a submitted recipe. The button of the page sends `fields` to the URL
    `action`; `back` is the text and the URL of the link that leads back. If the recipe is a changed recipe of the run
    `changed_run`, the page says so and asks for a name of the new run."""
    return page(request, "plan.html.j2", 200 if result["run"] else 422, store=store, name=submission.name,
                plan=result["plan"], run=result["run"], problems=result["problems"], as_before=result["as_before"],
                fields={**fields, "request": submission.request}, action=action, back=back, changed_run=changed_run)
