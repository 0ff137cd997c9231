"""Google Cloud Storage, through gcsfs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.store.listing import RemoteObject, merged, start_of
from pipeline.store.remote import Remote


class Gcs(Remote):
    """Access to Google Cloud Storage. Its client library retries each request six times by itself, which takes a
    minute, so this class sends a request only twice."""

    options = {"use_listings_cache": False}  # noqa: RUF012
    tries = 2
    by_pages = True

    def scan(self, begin: str, *, deep: bool = True, after: str = "") -> Iterator[RemoteObject | str]:
        bucket, _, folder = self.prefix.partition("/")
        top = f"{folder}/" if folder else ""
        query = {"prefix": top + begin, "delimiter": None if deep else "/",
                 "startOffset": start_of(begin, deep, after, top)}
        token: str | None = None
        while token != "":
            query["pageToken"] = token
            try:
                page: dict[str, Any] = self._ask("list", begin, lambda: self.fs.call(
                    "GET", "b/{}/o", bucket, json_out=True, **query))
            except FileNotFoundError as e:
                raise self._no_bucket(begin, e) from e
            objects = [(item["name"], item) for item in page.get("items", ())]
            yield from merged(objects, page.get("prefixes", ()), len(top))
            token = page.get("nextPageToken", "")
