"""Streams server-sent events about a run to clients. Every event has an id, from which a client can continue the stream
on any server of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pipeline.base.clock import SYSTEM
from pipeline.base.visible import json_text
from pipeline.service.log import LogPlace, read_log
from pipeline.service.problems import HttpProblem, problem_of
from pipeline.service.watch import RunState
from pipeline.store.fs import Store

QUIET_S = 15.0           # after this many seconds without an event, a comment shows that the connection works


class Events(StreamingResponse):
    """An HTTP response that streams server-sent events to a client. While the response is open, it counts in
    `app.state.streams`, whose number is limited."""

    media_type = "text/event-stream"

    def __init__(self, app: FastAPI, events: AsyncIterator[bytes]) -> None:
        # nginx would hold events back until it has a whole buffer of them
        super().__init__(events, headers={"X-Accel-Buffering": "no"})
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._app.state.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._app.state.streams -= 1


def room_for_stream(app: FastAPI) -> None:
    """Raise HttpProblem when the server has as many open event streams as its settings allow."""
    if app.state.streams >= app.state.settings.streams:
        raise HttpProblem(429, "Too many streams", f"{app.state.streams} are open", remedy="close one, or poll instead",
                          headers={"Retry-After": "10"})


def event(kind: str, data: bytes, id: str = "") -> bytes:
    """Encode one server-sent event as bytes. `kind` is the event's name, and `data` is JSON without line breaks."""
    return b"".join((b"event: ", kind.encode(), b"\n", b"id: " + id.encode() + b"\n" if id else b"",
                     b"data: ", data, b"\n\n"))


async def follow_run(app: FastAPI, name: str, store: Store, run: str, last: str | None) -> AsyncIterator[bytes]:
    """Yield server-sent events, each with the whole state of a run, until the run ends or the stream's time is up. An
    event is yielded when the state has changed. `last` is the id of the last event that the client has received; the
    state of that event is not sent again."""
    settings, begun = app.state.settings, SYSTEM.now()
    spoken = begun
    yield b"retry: 3000\n\n"
    try:
        while SYSTEM.now() - begun < settings.stream_s:
            state: RunState = await app.state.watch.state(name, store, run)
            if state.id != last:
                yield event("progress", state.data, state.id)
                last, spoken = state.id, SYSTEM.now()
            if state.ended:
                yield event("end", b"{}", state.id)
                return
            if SYSTEM.now() - spoken > QUIET_S:
                yield b":\n\n"
                spoken = SYSTEM.now()
            await asyncio.sleep(settings.look_s)
    except Exception as e:                    # the answer has begun, so the problem is sent as its last event
        yield _problem_event(e)


async def follow_log(app: FastAPI, store: Store, run: str, place: LogPlace | None) -> AsyncIterator[bytes]:
    """Yield server-sent events, each with the next piece of a run's log, until the run ends or the stream's time is up.
    `place` is where the first piece begins."""
    settings, begun = app.state.settings, SYSTEM.now()
    spoken = begun
    yield b"retry: 3000\n\n"
    try:
        while SYSTEM.now() - begun < settings.stream_s:
            stretch = await run_in_threadpool(read_log, store, run, place)
            moved, place = stretch.next != place, stretch.next
            if stretch.text:
                yield event("log", json_text({"text": stretch.text}).encode(), str(place))
                spoken = SYSTEM.now()
            if stretch.complete:
                yield event("end", b"{}", str(place))
                return
            if SYSTEM.now() - spoken > QUIET_S:
                yield b":\n\n"
                spoken = SYSTEM.now()
            if not moved:
                await asyncio.sleep(settings.look_s)
    except Exception as e:
        yield _problem_event(e)


def _problem_event(error: Exception) -> bytes:
    return event("problem", json_text(problem_of(error).document()).encode())
