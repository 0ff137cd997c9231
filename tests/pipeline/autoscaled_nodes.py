"""Nodes for Ray's autoscaler that are processes on this machine; its monitor imports this (test_engine_cluster)."""

from __future__ import annotations

from typing import Any

from ray._private import parameter
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class Nodes(FakeMultiNodeProvider):
    """Ray's own provider, which cannot start a node of a given size of memory as it is."""

    def _create_node_with_resources_and_labels(self, node_config: Any, tags: Any, count: int,
                                               resources: dict[str, Any], labels: Any) -> None:
        rest, real = dict(resources), parameter.RayParams
        memory = int(rest.pop("memory"))
        parameter.RayParams = lambda **kw: real(memory=memory, **kw)
        try:
            super()._create_node_with_resources_and_labels(node_config, tags, count, rest, labels)
        finally:
            parameter.RayParams = real
