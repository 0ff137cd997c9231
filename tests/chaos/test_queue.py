"""The head of the cluster is lost while a queued run uses it: the run waits, and continues on the next cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.cluster.dispatch import Dispatcher, DriverOptions, start_driver
from pipeline.cluster.queue import Queue, Submission
from pipeline.recipe import load_recipe
from pipeline.run import run_name
from pipeline.store.fs import Store
from tests.chaos.conftest import HOOK
from tests.processes import until

pytestmark = pytest.mark.xdist_group("chaos")
#: seconds until Ray has ended the driver and the next one has found that nothing answers
LOST_S = 600.0


class Server:
    """Starts drivers on a cluster, as `tokenmill serve --address` does."""

    def __init__(self, store: Store, address: str) -> None:
        self.queue, self._drivers = Queue(store), []
        options = DriverOptions("ray", workers=8, address=address, allow_code=True)

        def start(entry):
            self._drivers.append(start_driver(store, options, entry))
            return self._drivers[-1]

        self._dispatcher = Dispatcher(self.queue, start)

    def until(self, condition, seconds: float, what: str) -> None:
        def met() -> bool:
            self._dispatcher.tick()
            return condition(self.queue.entry(1))

        until(met, seconds, what)

    def kill(self) -> None:
        for driver in self._drivers:
            driver.kill()
            driver.wait()


def test_a_run_of_the_queue_waits_for_a_cluster_when_its_head_is_lost(world, undisturbed, monkeypatch):
    cluster = world.start()
    for name, value in world.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(HOOK)                        # drivers get the import path of this process
    store = Store(world.store)
    recipe = world.corpus / "recipe.yaml"
    name = run_name(load_recipe(recipe, [], allow_custom=True))          # that of the command, which checks it
    given = Submission("request", name, "operator", "recipe", str(world.corpus), recipe.read_text())
    server = Server(store, cluster.address)
    hold = world.tell("hold", "10 ")
    held = hold.with_name("held")
    try:
        server.queue.submit(given)
        server.queue.submit(replace(given, request="next", run="next"))
        server.until(lambda entry: held.exists(), 600, "ten tasks")
        world.note()
        cluster.kill_head()
        server.until(lambda entry: entry.last.kind == "unreachable", LOST_S, "the driver's end")
        waiting = server.queue.entry(1)
        assert waiting.state == "waiting" and "nothing answers" in waiting.last.error
        assert server.queue.entry(2).state == "waiting", "the next run does not overtake it"
        server.queue.cancel(2, "operator")
        held.unlink()
        server.kill()
        # the operator names another cluster
        server = Server(store, world.replace_cluster().address)
        server.until(lambda entry: entry.ended, 600, "the end of the run")
        kinds = [event.kind for event in server.queue.entry(1).events]
        assert kinds[-3:] == ["start", "running", "done"] and "failed" not in kinds
    finally:
        held.unlink(missing_ok=True)
        server.kill()
    world.check(undisturbed)
