"""Nodes for Ray's autoscaler that are processes on this machine. The autoscaler imports this module in
test_engine_cluster.py."""

from __future__ import annotations

from typing import Any

from ray._private import parameter
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class Nodes(FakeMultiNodeProvider):
    """Ray's own provider of such nodes, changed so that a node can have a given amount of memory."""

    def _create_node_with_resources_and_labels(self, node_config: Any, tags: Any, count: int,
                                               resources: dict[str, Any], labels: Any) -> None:
        rest, real = dict(resources), parameter.RayParams
        memory = int(rest.pop("memory"))
        parameter.RayParams = lambda **kw: real(memory=memory, **kw)
        try:
            super()._create_node_with_resources_and_labels(node_config, tags, count, rest, labels)
        finally:
            parameter.RayParams = real
