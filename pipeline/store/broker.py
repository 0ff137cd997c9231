"""Lets a confined child process use object storage. The child runs tasks and has neither credentials nor sockets. A
separate process, the broker, has both, and sends the child's requests to the storage.

The child gets one end of a socket pair from the supervisor, which starts it. When the child first writes to this
socket, the supervisor starts the broker; a child that works on local files therefore has no broker.

Each thread of the child makes a further socket pair and passes one end to the broker. The thread's requests and the
replies go through this pair. A message is a length, then JSON, then bytes. To upload a file, the child passes an open
file descriptor.

Even a compromised child can ask only for what its task needs. It may read files of the store and of the sources of its
run. It may write and remove files below `objects/` of the store. The broker downloads to a folder that the child can
read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.base import confinement, process
from pipeline.base.redact import redact
from pipeline.store import errors
from pipeline.store.errors import EnvironmentFailure
from pipeline.store.listing import RemoteObject
from pipeline.store.remote import Remote, connect

if TYPE_CHECKING:
    from pipeline.store.fs import Needs

_LENGTH = struct.Struct(">I")
_OBJECT = re.compile(r"objects/(?!\.{1,2}(/|$))[^/\0]+(/(?!\.{1,2}(/|$))[^/\0]+)*")
#: most bytes of a request; the longest ones list ranges of a file, and none carries data
_MOST = 16 << 20
_ERRORS = ("ChangedFile", "EnvironmentFailure", "StoreError")


def _send(sock: socket.socket, message: dict[str, Any], data: bytes = b"", files: tuple[int, ...] = ()) -> None:
    body = json.dumps({**message, "bytes": len(data)}).encode()
    head = _LENGTH.pack(len(body))
    if files:
        socket.send_fds(sock, [head], files)
    else:
        sock.sendall(head)
    sock.sendall(body)
    if data:
        sock.sendall(data)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        n = source.recv_into(view)
        if n == 0:
            raise EOFError
        view = view[n:]
    return bytes(data)


def _receive(source: socket.socket, *, request: bool = False) -> tuple[dict[str, Any], bytes, list[int]]:
    """Receive a message over a socket between a confined child and its broker (the process that uses object storage for
    the child). Returns the JSON of the message, the bytes that follow, and the open file descriptors sent with it.
    Raises EOFError when the other side has closed the socket.

    `request` says that a child sent the message. EOFError is then also raised when the message is larger than allowed,
    so that a child cannot fill the broker's memory.
    """
    head, files, _, _ = socket.recv_fds(source, _LENGTH.size, 1)
    if not head:
        raise EOFError
    head += _exactly(source, _LENGTH.size - len(head))
    [size] = _LENGTH.unpack(head)
    if request and size > _MOST:
        raise EOFError
    message = json.loads(_exactly(source, size))
    if request and message["bytes"] != 0:
        raise EOFError
    return message, _exactly(source, message["bytes"]), files


# -- in the child ----------------------------------------------------------------------------------------------------
class Broker:
    """The connection of a confined child to its broker, the process that uses object storage for it. Any number of
    threads may use the connection at the same time."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._threads, self._used = control, threading.local(), False

    def connect(self, root: str) -> Brokered:
        return Brokered(self, root)

    def ask(self, message: dict[str, Any], file: int | None = None, needs: Needs | None = None) -> tuple[Any, bytes]:
        """Send a request to the broker (the process that uses object storage for this one) and return (result, bytes)
        from its reply. `file` is an open file descriptor to send with the request. If the broker asks which byte ranges
        of a file to download, the function `needs` chooses them. Raises the error that the broker reports, or
        EnvironmentFailure when the broker process is gone."""
        line = self._line()
        reply, data = _exchange(line, message, () if file is None else (file,))
        while "needs" in reply:
            assert needs is not None
            reply, data = _exchange(line, {"ranges": self._ranges(line, message, reply["needs"], needs)})
        return reply["result"], data

    def release(self) -> None:
        """Tell the broker process to remove the files that it has downloaded for this process."""
        if self._used:
            self.ask({"call": "release"})

    def _line(self) -> socket.socket:
        """Return the socket by which this thread talks to the broker process."""
        if getattr(self._threads, "line", None) is None:
            own_end, broker_end = socket.socketpair()
            with broker_end, _raises_if_gone():
                socket.send_fds(self._control, [b"+"], [broker_end.fileno()])
            self._threads.line, self._used = own_end, True
        line: socket.socket = self._threads.line
        return line

    def _ranges(self, line: socket.socket, message: dict[str, Any], size: int, needs: Needs) -> Any:
        """Ask the function `needs` which byte ranges of a file must be downloaded, and return these ranges. `needs` may
        read some bytes of the file before it decides; they are requested from the broker (the process that uses object
        storage for this one)."""
        def read(start: int, stop: int) -> bytes:
            return _exchange(line, {"call": "read_range", "start": start, "stop": stop})[1]

        try:
            return needs(size, read)
        except BaseException:
            del self._threads.line                  # the broker waits for ranges on this socket until it is closed
            line.close()
            raise


@contextlib.contextmanager
def _raises_if_gone() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as e:
        raise EnvironmentFailure(f"the process that talks to object storage for this one is gone ({e or 'its end'})"
                                 ) from e


def _exchange(line: socket.socket, message: dict[str, Any],
              files: tuple[int, ...] = ()) -> tuple[dict[str, Any], bytes]:
    """Send a message to the process at the other end of a broker's socket, and return (JSON of the reply, bytes of the
    reply). Raises the error that the reply reports."""
    with _raises_if_gone():
        _send(line, message, files=files)
        reply, data, _ = _receive(line)
    if "error" in reply:
        raise _error(reply["error"], reply["args"])
    return reply, data


class Brokered(Remote):
    """Access to the objects below the URL `root` for a confined child process. All requests go through its broker, a
    separate process that has the credentials."""

    def __init__(self, broker: Broker, root: str) -> None:
        self.root, self.prefix, self.fs = root, root.partition("://")[2], None
        self._broker = broker

    def _call(self, call: str, path: str, **arguments: Any) -> tuple[Any, bytes]:
        return self._broker.ask({"call": call, "root": self.root, "path": path, **arguments})

    def head(self, path: str) -> RemoteObject | None:
        entry, _ = self._call("head", path)
        return None if entry is None else RemoteObject(**entry)

    def read(self, path: str) -> bytes:
        return self._call("read", path)[1]

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        return b"" if stop <= start else self._call("read_range", path, start=start, stop=stop)[1]

    def fetch(self, path: str, scratch: str, size: int | None, version: str | None, needs: Needs | None) -> str:
        local, _ = self._broker.ask({"call": "fetch", "root": self.root, "path": path, "size": size,
                                     "version": version, "partly": needs is not None}, needs=needs)
        return str(local)

    def forget(self, path: str, scratch: str, size: int | None) -> None:
        self._call("forget", path, size=size)

    def upload(self, local: str, path: str) -> None:
        with open(local, "rb") as f:
            self._broker.ask({"call": "upload", "root": self.root, "path": path}, file=f.fileno())

    def remove(self, path: str) -> None:
        self._call("remove", path)


def _error(kind: str, args: list[Any]) -> Exception:
    if kind in _ERRORS:
        return getattr(errors, kind)(*args)                     # type: ignore[no-any-return]
    error_type = {"FileNotFoundError": FileNotFoundError, "OSError": OSError}.get(kind)
    return error_type(*args) if error_type else RuntimeError(f"{kind}: {args[0]}")


# -- the broker ------------------------------------------------------------------------------------------------------
class Server:
    """Serves the requests of a confined child in the broker, the process that uses object storage for it. A child may
    read files below `store` and `roots`, and write below objects/ of `store`. Downloads go to the folder `scratch`."""

    def __init__(self, store: str, roots: list[str], scratch: str) -> None:
        self.store, self.roots, self.scratch = store, {store, *roots}, scratch
        self._remotes: dict[str, Remote] = {}
        self._lock = threading.Lock()

    def remote(self, root: str) -> Remote:
        if root not in self.roots:
            raise PermissionError(errno.EPERM, "neither the store nor a source of this run", root)
        with self._lock:
            if root not in self._remotes:
                self._remotes[root] = connect(root)
            return self._remotes[root]

    def run(self, control: socket.socket) -> None:
        """Receive sockets over the socket `control` until the child process is gone, and serve each one in a thread of
        its own."""
        while True:
            data, files, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            for file in files:
                threading.Thread(target=self.serve, args=(socket.socket(fileno=file),), daemon=True).start()

    def serve(self, line: socket.socket) -> None:
        """Answer the requests of one thread of the child until the thread closes its socket."""
        with line, contextlib.suppress(EOFError, ConnectionError):
            while True:
                message, _, files = _receive(line, request=True)
                try:
                    result, data = self._answer(message, files, line)
                except (EOFError, ConnectionError):
                    raise
                except Exception as e:
                    _send(line, {"error": _kind(e), "args": _args(e)})
                else:
                    _send(line, {"result": result}, data)
                finally:
                    for file in files:
                        os.close(file)

    def _answer(self, message: dict[str, Any], files: list[int], line: socket.socket) -> tuple[Any, bytes]:
        call = message["call"]
        if call == "release":
            for name in os.listdir(self.scratch):
                os.unlink(os.path.join(self.scratch, name))
            return None, b""
        remote, path = self.remote(message["root"]), message["path"]
        if ".." in path.split("/"):
            raise PermissionError(errno.EPERM, "not below its root", path)
        if call == "head":
            entry = remote.head(path)
            return None if entry is None else asdict(entry), b""
        if call == "read":
            return None, remote.read(path)
        if call == "read_range":
            return None, remote.read_range(path, message["start"], message["stop"])
        if call == "fetch":
            needs = self._child_needs(line) if message["partly"] else None
            return remote.fetch(path, self.scratch, message["size"], message["version"], needs), b""
        if call == "forget":
            remote.forget(path, self.scratch, message["size"])
            return None, b""
        if call not in ("upload", "remove") or message["root"] != self.store or not _OBJECT.fullmatch(path):
            raise PermissionError(errno.EPERM, f"{call}: a task writes only below objects/ of its store", path)
        if call == "upload":
            _refuse_unreadable(files[0])
            remote.upload(f"/proc/self/fd/{files[0]}", path)
        else:
            remote.remove(path)
        return None, b""

    def _child_needs(self, line: socket.socket) -> Needs:
        """Return a function that asks the child which byte ranges of a file to download. Before the child answers, it
        may request some bytes of the file."""
        def needs(size: int, read: Any) -> Any:
            _send(line, {"needs": size})
            while True:
                message, _, _ = _receive(line, request=True)
                if "ranges" in message:
                    ranges = message["ranges"]
                    return None if ranges is None else [(a, b) for a, b in ranges]
                try:
                    data = read(message["start"], message["stop"])
                except Exception as e:
                    _send(line, {"error": _kind(e), "args": _args(e)})
                else:
                    _send(line, {"result": None}, data)

        return needs


def _refuse_unreadable(file: int) -> None:
    """Raise PermissionError if `file`, a descriptor that a child sent for an upload, is not a regular file or was not
    opened for reading. The check prevents a child from uploading the broker's environment (/proc/PID/environ), which
    holds credentials. A process can open a file with O_PATH even if it may not read the file, and the broker opens the
    file again with its own rights."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if flags & os.O_PATH or flags & os.O_ACCMODE == os.O_WRONLY or not stat.S_ISREG(os.fstat(file).st_mode):
        raise PermissionError(errno.EPERM, "upload: not a file that was opened for reading")


def _kind(error: Exception) -> str:
    if isinstance(error, OSError):
        return "FileNotFoundError" if isinstance(error, FileNotFoundError) else "OSError"
    return next((name for name in _ERRORS if isinstance(error, getattr(errors, name))), type(error).__name__)


def _args(error: Exception) -> list[Any]:
    if isinstance(error, OSError) and error.errno is not None:
        return [error.errno, error.strerror, error.filename]
    return [redact(str(error))]  # the child must not learn secrets, and cannot mask them itself


def main() -> None:
    """Run a broker, the process that uses object storage for a confined child. The command is `python -m
    pipeline.store.broker CONTROL_FD PARENT_PID JSON`. CONTROL_FD is the broker's end of the socket pair that the child
    got at its start. JSON holds the arguments of `Server`."""
    process.die_with_parent(int(sys.argv[2]))
    process.no_core()
    confinement.not_dumpable()
    control, server = socket.socket(fileno=int(sys.argv[1])), Server(**json.loads(sys.argv[3]))
    server.run(control)
    shutil.rmtree(server.scratch, ignore_errors=True)
    os._exit(0)                                         # the child is gone: its requests are abandoned


if __name__ == "__main__":
    main()
