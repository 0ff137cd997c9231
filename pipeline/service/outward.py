"""Removes from the facts about a run what must not leave the server: addresses of clusters, secrets, personal data and
tracebacks."""

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
#: an IP address with a port
_PLACE = re.compile(r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\]):\d{1,5}(?!\w)")
#: fields with messages of tasks and libraries, which may quote a document
WORDS = ("error", "failures", "running")


def run_document(store: Store, current: Standing) -> dict[str, Any]:
    """Return the state of a run as JSON for clients. It has the fields of `tokenmill status --json`, except those that
    only the server needs. Secrets, personal data and addresses of clusters are masked in its messages."""
    document = status_document(store, current)
    addresses = cluster_addresses(current.facts)
    result = {k: v for k, v in document.items() if k not in (*INWARD, "report")}
    for name in WORDS:
        if result.get(name):
            result[name] = scrub_value([result[name]], lambda text: outward_text(text, addresses))[0]
    return {**{k: finite(v) for k, v in result.items()}, "report": document["report"] is not None}


def cluster_addresses(facts: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the addresses of clusters that this server knows from a run's facts and from its environment. They have
    the form in which messages contain them, and the longest comes first."""
    known = {facts.get("address"), environment.get(ADDRESS), environment.get("RAY_ADDRESS")} - {None, "", "auto"}
    places = {str(address).partition("://")[2] or str(address) for address in known}
    return sorted({place.rstrip("/") for place in places} - {""}, key=lambda place: (-len(place), place))


def outward_text(text: str, addresses: list[str]) -> str:
    """Return `text` with secrets, personal data and the given addresses of clusters masked. Any IP address with a port
    is masked, too: if a cluster was given as `auto`, its real address is not known here."""
    if addresses:
        text = re.sub("|".join(map(re.escape, addresses)), MASK, text)
    return scrub_text(redact(_PLACE.sub(MASK, text)))
