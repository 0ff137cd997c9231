"""What may leave the server of what a store says about a run: no address of a cluster, no secret, no personal data, no
traceback."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from pipeline.base.auth import ADDRESS
from pipeline.base.redact import MASK, redact
from pipeline.cluster.attempts import Standing, status_document
from pipeline.service.problems import finite
from pipeline.store.fs import Store
from stages.scrub.pii import scrub_text, scrub_value

#: fields that only the server's own machine needs
INWARD = ("address", "job", "traceback")
#: fields with words of tasks and libraries, which may quote a document
WORDS = ("error", "failures", "running")


def run_document(store: Store, current: Standing) -> dict[str, Any]:
    """The state of a run as JSON, fit for a browser: `status --json` without what only the server needs."""
    document = status_document(store, current)
    addresses = cluster_addresses(current.facts)
    result = {k: v for k, v in document.items() if k not in (*INWARD, "report")}
    for name in WORDS:
        if result.get(name):
            result[name] = scrub_value([result[name]], lambda text: outward_text(text, addresses))[0]
    return {**{k: finite(v) for k, v in result.items()}, "report": document["report"] is not None}


def cluster_addresses(facts: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> list[str]:
    """The addresses of clusters that this server knows, longest first, as they may stand in a message."""
    known = {facts.get("address"), environment.get(ADDRESS), environment.get("RAY_ADDRESS")} - {None, "", "auto"}
    places = {str(address).partition("://")[2] or str(address) for address in known}
    return sorted({place.rstrip("/") for place in places} - {""}, key=lambda place: (-len(place), place))


def outward_text(text: str, addresses: list[str]) -> str:
    """`text` with addresses of clusters, secrets and personal data masked."""
    if addresses:
        text = re.sub("|".join(map(re.escape, addresses)), MASK, text)
    return scrub_text(redact(text))
