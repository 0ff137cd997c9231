"""Shows the plan of a recipe before the recipe is submitted: which nodes of the plan (passes, barriers …) are stale and
would run, what the run would cost, and which errors the recipe has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.responses import HTMLResponse

from pipeline.cluster.queue import Submission
from pipeline.service.html import page
from pipeline.service.submit import check_submission
from pipeline.store.fs import Store


async def planned(request: Request, submission: Submission, at: Store) -> dict[str, Any]:
    """Plan a submission (a recipe to run) in a store, and return the result of `check_submission`. In the result, `run`
    is None if the recipe has errors."""
    result = await check_submission(request, submission, at)
    return {**result, "run": None} if any(p["severity"] == "error" for p in result["problems"]) else result


def plan_page(request: Request, store: str, submission: Submission, result: Mapping[str, Any], *, action: str,
              fields: Mapping[str, str], back: tuple[str, str], ask_name: bool = False) -> HTMLResponse:
    """Return the HTML page that shows the plan of a submitted recipe. The button of the page sends `fields` to the URL
    `action`; `back` is the text and the URL of the link that leads back. With `ask_name`, the page has a field for the
    name of the run."""
    return page(request, "plan.html.j2", 200 if result["run"] else 422, store=store, name=submission.name,
                plan=result["plan"], run=result["run"], problems=result["problems"],
                fields={**fields, "request": submission.request}, action=action, back=back, ask_name=ask_name)
