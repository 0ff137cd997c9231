"""An object store that misbehaves: a folder behind fsspec. Some requests time out, are throttled or break off; others
are performed, but the answer is lost. Which requests fail, and how, is a function of (kind of request, path) and a
seed. Each of them fails once or twice over all processes, and then succeeds."""

import errno
import hashlib
import os
import time

from fsspec.implementations.local import LocalFileSystem

FAULTS = (lambda: TimeoutError("the request timed out"), lambda: ConnectionResetError("Connection reset by peer"),
          lambda: OSError(errno.EBUSY, "Please reduce your request rate. (SlowDown, 503)"),
          lambda: OSError(errno.EREMOTEIO, "We encountered an internal error. Please try again. (InternalError, 500)"))
SHARE = 0.05               # of requests that fail


class ChaosStorage(LocalFileSystem):
    protocol = "chaos"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path, **kw):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("chaos://"))

    def _fails(self, kind, path):
        """Return the exception that this request raises, or None if it succeeds."""
        said = os.environ["CHAOS_STORAGE"]
        # relative, so that the faults do not depend on where the store is
        path = os.path.relpath(self._strip_protocol(path), os.path.dirname(said))
        name = hashlib.blake2b(f"{os.environ.get('CHAOS_SEED', '')}/{kind}/{path}".encode(), digest_size=8)
        draw = int.from_bytes(name.digest(), "little")
        if draw / 2**64 >= SHARE:
            return None
        for nth in range(1 + draw % 2):                # once, or twice
            try:
                os.close(os.open(os.path.join(said, f"{name.hexdigest()}.{nth}.{kind}"), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            time.sleep(0.01)
            return FAULTS[draw // 2 % len(FAULTS)]()
        return None

    def _try(self, kind, path):
        error = self._fails(kind, path)
        if error is not None:
            raise error

    def cat_file(self, path, start=None, end=None, **kw):
        self._try("read", path)
        return super().cat_file(self._strip_protocol(path), start=start, end=end, **kw)

    def get_file(self, rpath, lpath, **kw):
        self._try("read", rpath)
        return super().get_file(self._strip_protocol(rpath), lpath, **kw)

    def info(self, path, **kw):
        return super().info(self._strip_protocol(path), **kw)

    def pipe_file(self, path, value, mode="overwrite", **kw):
        """Write a file. If the request is to fail, this may happen before the file is written or after it, so that the
        caller cannot know whether it was written."""
        path = self._strip_protocol(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        error = self._fails("write", path)
        if error is not None and hashlib.blake2b(path.encode()).digest()[0] % 2:
            raise error
        if mode == "create":
            with open(path, "xb") as f:
                f.write(value)
        else:
            part = f"{path}.{os.urandom(6).hex()}"       # object stores replace at once
            with open(part, "wb") as f:
                f.write(value)
            os.replace(part, path)
        if error is not None:
            raise error

    def put_file(self, lpath, rpath, **kw):
        self._try("write", rpath)
        os.makedirs(os.path.dirname(self._strip_protocol(rpath)), exist_ok=True)
        return super().put_file(lpath, self._strip_protocol(rpath))

    def cp_file(self, path1, path2, **kw):
        self._try("copy", path2)
        path2 = self._strip_protocol(path2)
        os.makedirs(os.path.dirname(path2), exist_ok=True)
        return super().cp_file(self._strip_protocol(path1), path2)
