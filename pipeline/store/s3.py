"""S3 and compatible storage (MinIO, Ceph, R2 …), through s3fs.

A store needs conditional writes (`If-None-Match: *`, sent by `Remote.put_absent`), strong consistency and server-side
copies. AWS has all of them. Listings are read page by page, so that a listing of a million objects takes little memory.
A file larger than one part is sent as a multipart upload, and each part is retried on its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, cast

from pipeline.store.errors import StoreError
from pipeline.store.listing import RemoteObject, merged, start_of, version_of
from pipeline.store.remote import Remote
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

    @contextlib.contextmanager
    def writer(self, path: str, size: int = 0) -> Iterator[BinaryIO]:
        file = MultipartFile(self, path, max(PART, -(-size // MAX_PARTS)))
        try:
            yield cast(BinaryIO, file)
            file.finish()
        finally:
            file.discard()

    def upload(self, local: str, path: str) -> None:
        with open(local, "rb") as source, self.writer(path, os.path.getsize(local)) as target:
            shutil.copyfileobj(source, target, PART)

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


class MultipartFile(io.RawIOBase):
    """The object `path` of S3, open for writing from front to back. After `finish`, the object exists. If `discard` is
    called instead, nothing of it remains.

    An object of up to one part (`step` bytes) is sent in one request. A larger object is sent in parts, each while the
    next ones are written. Memory holds UPLOADS parts that are being sent, and the part that is being filled.
    """

    def __init__(self, s3: S3, path: str, step: int) -> None:
        self._s3, self._path, self._step = s3, path, step
        self._upload = ""                              # id of the multipart upload; "" before the first part
        self._part = bytearray()                       # the part that is being filled
        self._sent: list[Future[dict[str, Any]]] = []
        self._size = 0
        self._pool = ThreadPoolExecutor(UPLOADS)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        self._size += len(view)
        written = len(view)
        while view:
            if len(self._part) == self._step:          # more follows, so the part is not the whole object
                self._send()
            room = self._step - len(self._part)
            self._part += view[:room]
            view = view[room:]
        return written

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._s3._call("write", self._path, method, Key=self._s3._key(self._path), **arguments)

    def _send(self) -> None:
        """Begin to send the current part. If UPLOADS parts are being sent already, first wait for the oldest of them.
        """
        if not self._upload:
            try:
                self._upload = self._call("create_multipart_upload")["UploadId"]
            except FileNotFoundError as e:
                raise self._s3._no_place(self._path, e) from e
        number, data = len(self._sent) + 1, bytes(self._part)
        if number > MAX_PARTS:
            raise StoreError(f"{self._s3.url(self._path)}: needs more than {MAX_PARTS:,} parts of {self._step:,} bytes"
                             f", which S3 does not allow; write smaller files")
        self._part = bytearray()

        def send() -> dict[str, Any]:
            response = self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=data)
            return {"PartNumber": number, "ETag": response["ETag"]}

        if number > UPLOADS:
            self._sent[-UPLOADS].result()
        self._sent.append(self._pool.submit(send))

    def finish(self) -> None:
        if not self._upload:
            self._s3.write(self._path, bytes(self._part))
            return
        self._send()
        parts = [part.result() for part in self._sent]
        try:
            self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        except FileNotFoundError:                      # the upload may be complete and only the reply lost
            uploaded = self._s3.head(self._path)
            if uploaded is None or uploaded.size != self._size:
                raise
        self._upload = ""

    def discard(self) -> None:
        """Stop sending, and remove from S3 the parts of an object that was not finished."""
        self._pool.shutdown(cancel_futures=True)
        if self._upload:
            with contextlib.suppress(Exception):
                self._s3.fs.call_s3("abort_multipart_upload", Bucket=self._s3.bucket, Key=self._s3._key(self._path),
                                    UploadId=self._upload)
        self._part = bytearray()
