"""S3 and compatible storage (MinIO, Ceph, R2 …), through s3fs.

A store needs conditional writes (`If-None-Match: *`, sent by `Remote.put_absent`), strong consistency and server-side
copies. AWS has all of them. Listings are read page by page, so that a listing of a million objects takes little memory.
A file larger than one part is sent as a multipart upload, and each part is retried on its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from pipeline.store.remote import Remote, RemoteObject, in_parallel, merged, start_of, version_of
from pipeline.store.retry import answer, patiently

#: bytes of a part of an upload, parts sent at a time, most parts of an upload (S3 allows parts of at least 5 MiB, and
#: at most 10,000 of them)
PART, UPLOADS, MAX_PARTS = 16 << 20, 4, 10_000


class S3(Remote):
    by_pages = True
    # Only `retry.patiently` waits and retries. Listings are not cached: other drivers' commits must be seen.
    options = {"use_listings_cache": False, "max_concurrency": 1,  # noqa: RUF012
               "config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "max_pool_connections": 64,
                                 "retries": {"mode": "standard", "total_max_attempts": 1}}}

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.fs.retries = 1
        self.bucket, _, self.folder = self.prefix.partition("/")

    def _key(self, path: str) -> str:
        return "/".join(p for p in (self.folder, path) if p)

    def _call(self, what: str, path: str, method: str, **arguments: Any) -> dict[str, Any]:
        return self._ask(what, path, lambda: self.fs.call_s3(method, Bucket=self.bucket, **arguments))

    def head(self, path: str) -> RemoteObject | None:
        try:
            response = self._call("read", path, "head_object", Key=self._key(path))
        except FileNotFoundError:
            return None
        return RemoteObject(path, response["ContentLength"], version_of(response))

    def scan(self, begin: str, *, deep: bool = True, after: str = "") -> Iterator[RemoteObject | str]:
        top = f"{self.folder}/" if self.folder else ""
        query = {"Prefix": top + begin, **({} if deep else {"Delimiter": "/"})}
        if start := start_of(begin, deep, after, top):
            query["StartAfter"] = start
        token: str | None = None
        while token != "":
            try:
                page = self._call("list", begin, "list_objects_v2", **query,
                                  **({"ContinuationToken": token} if token else {}))
            except FileNotFoundError as e:
                raise self._no_bucket(begin, e) from e
            objects = [(item["Key"], item) for item in page.get("Contents", ())]
            yield from merged(objects, (item["Prefix"] for item in page.get("CommonPrefixes", ())), len(top))
            token = page.get("NextContinuationToken", "")

    def upload(self, local: str, path: str) -> None:
        size = os.path.getsize(local)
        if size <= PART:
            with open(local, "rb") as f:
                self.write(path, f.read())
            return
        key, step = self._key(path), max(PART, -(-size // MAX_PARTS))
        try:
            upload = self._call("write", path, "create_multipart_upload", Key=key)["UploadId"]
        except FileNotFoundError as e:
            raise self._no_place(path, e) from e

        def send(number: int) -> dict[str, Any]:
            data = os.pread(fd, step, number * step)
            response = self._call("write", path, "upload_part", Key=key, UploadId=upload, PartNumber=number + 1,
                                  Body=data)
            return {"PartNumber": number + 1, "ETag": response["ETag"]}

        fd = os.open(local, os.O_RDONLY)
        try:
            parts = list(in_parallel(send, range(-(-size // step)), UPLOADS))
            try:
                self._call("write", path, "complete_multipart_upload", Key=key, UploadId=upload,
                           MultipartUpload={"Parts": parts})
            except FileNotFoundError:           # the upload may be complete and only the reply lost
                uploaded = self.head(path)
                if uploaded is None or uploaded.size != size:
                    raise
        except BaseException:
            with contextlib.suppress(Exception):
                self.fs.call_s3("abort_multipart_upload", Bucket=self.bucket, Key=key, UploadId=upload)
            raise
        finally:
            os.close(fd)

    def copy(self, path: str, to: str) -> None:
        # one request, while fsspec would first ask for the size. S3 refuses it for objects of more than 5 GiB, which
        # fsspec copies in parts
        def ask() -> None:
            try:
                self.fs.call_s3("copy_object", Bucket=self.bucket, Key=self._key(to),
                                CopySource={"Bucket": self.bucket, "Key": self._key(path)})
            except OSError as e:
                if answer(e)[0] != 400:
                    raise
                self.fs.cp_file(self.at(path), self.at(to))
        try:
            patiently("copy", self.url(path), ask, self.tries, self.clock)
        except FileNotFoundError as e:
            raise FileNotFoundError(2, "no such object", self.url(path)) from e
