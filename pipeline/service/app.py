"""Builds the web service: its routes, its access control and its answers to errors. The service keeps all lasting state
in the stores."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware

from pipeline.cluster.queue import Queue
from pipeline.service import (
    assets,
    compare,
    datasets,
    label_page,
    label_routes,
    pages,
    problems,
    queue_page,
    runs,
    shard_pages,
    shards,
    sign_in,
    sources,
    submit,
    training_control,
    training_pages,
    trainings,
    tune,
    tune_page,
)
from pipeline.service.access import Guard, known_parameters
from pipeline.service.checks import CheckRoom
from pipeline.service.comparison import Comparisons
from pipeline.service.dispatching import dispatching
from pipeline.service.plans import Plans
from pipeline.service.problems import SafeJSON
from pipeline.service.query import Queries
from pipeline.service.session import Sessions
from pipeline.service.settings import ServiceSettings
from pipeline.service.training_files import MetricsFiles
from pipeline.service.watch import RunWatch
from pipeline.store.fs import Store


def create_app(settings: ServiceSettings) -> FastAPI:
    """Return the web application that serves the stores of `settings`. While the application runs, it starts the runs
    that wait in the queues of the stores.

    The routes share the objects in `app.state`:

    - `settings`
    - `stores` (name → Store) and `queues` (name → Queue)
    - `sessions` (Sessions), `checks` (CheckRoom), `plans` (Plans), `watch` (RunWatch), `queries` (Queries),
      `playgrounds` (Playgrounds), `comparisons` (Comparisons), `labels` (Books) and `metrics` (MetricsFiles)
    - `streams`: the number of open event streams
    - `children`: the processes of the trainings that this server started
    """
    sessions = Sessions(settings)
    app = FastAPI(title="Tokenmill", version=version("tokenmill"), openapi_url="/api/v1/openapi.json", docs_url=None,
                  redoc_url=None, default_response_class=SafeJSON, redirect_slashes=False, lifespan=dispatching,
                  dependencies=[Depends(known_parameters)],
                  responses=problems.RESPONSES,
                  middleware=[Middleware(Guard, settings=settings, sessions=sessions)])
    app.state.settings, app.state.sessions = settings, sessions
    app.state.stores = {name: Store(root) for name, root in settings.stores.items()}
    app.state.queues = {name: Queue(store) for name, store in app.state.stores.items()}
    app.state.checks = CheckRoom(settings)
    app.state.plans = Plans()
    app.state.watch, app.state.streams = RunWatch(settings.look_s), 0
    app.state.queries, app.state.playgrounds = Queries(), tune.Playgrounds()
    app.state.comparisons = Comparisons()
    app.state.labels, app.state.metrics = label_routes.Books(), MetricsFiles()
    app.state.children = []
    problems.install(app)
    for module in (sign_in, runs, compare, assets, label_routes, datasets, sources, shards, training_control, trainings,
                   tune, submit):
        app.include_router(module.router)
    for router in (pages.open_router, pages.router, compare.page_router, assets.page_router, tune_page.router,
                   tune_page.run_router, tune_page.latest_router, queue_page.router, label_page.router,
                   shard_pages.router, training_pages.router, training_control.forms):
        app.include_router(router)
    return app
