"""A Ray of our own on a busy machine."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.store.fs import Store

backends = pytest.importorskip("pipeline.engine.ray_backend", reason="ray is not installed")


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_ray_that_did_not_come_up_in_its_time_is_started_again(tmp_path, monkeypatch, caplog, bad):
    """Ray gives its own processes a fixed time to start: the agents of a node 15 s, the node 30 s."""
    starts: list[dict[str, Any]] = []
    ended = []

    def init(**how: Any) -> None:
        starts.append(how)
        if len(starts) <= bad:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(backends.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(backends.ray, "init", init)
    monkeypatch.setattr(backends.ray, "shutdown", lambda: ended.append(len(starts)))
    backend = backends.RayBackend(Store(tmp_path), workers=1)
    try:
        if bad == backends.STARTS:
            with pytest.raises(Exception, match="timed out during startup"):
                backend.start()
        else:
            backend.start()
    finally:
        backend.close()
    assert len(starts) == min(bad + 1, backends.STARTS) and all(how == starts[0] for how in starts)
    assert ended == list(range(1, bad + 1)), "what is left of one that failed goes before the next"
    assert len([r for r in caplog.records if "once more" in r.message]) == min(bad, 2)
