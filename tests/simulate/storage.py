"""Object storage in memory that fails as real object storage does. The real `Remote` and `Store` of the product work on
top of it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from pipeline.store.fs import Store
from pipeline.store.remote import Remote
from tests.simulate.faults import Odds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.simulate.world import World

ROOT = "sim"
#: how long a listing may miss an object
LATE_LIST_S = 5.0
#: before: no effect; after: done, but no answer; later: no answer, done in a while; repeated: done, then refused;
#: torn: half of it is stored. "pack" is the creation of a pack of the log
ODDS: dict[str, Odds] = {
    "create": (("before", .02), ("after", .02), ("later", .01), ("repeated", .015), ("full", .002), ("outage", .002)),
    "pack": (("before", .05), ("after", .03), ("later", .05), ("repeated", .03), ("torn", .08)),
    "write": (("before", .01), ("after", .01), ("later", .01), ("full", .002), ("outage", .002)),
    "read": (("before", .01), ("outage", .001)),
    "list": (("before", .01),),
    "remove": (("before", .01), ("after", .01), ("later", .005)),
}
OUTAGE_S = 200.0


class Bucket:
    """The stored objects. Each participant has its own `Requests` to them. `watch` is called for every change."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.objects: dict[str, bytes] = {}
        self.since: dict[str, float] = {}
        self.watch: Callable[[str, str, bytes, bytes | None, str], None] = lambda *_: None

    def create(self, path: str, data: bytes, who: str) -> bool:
        """Create an object. Returns False if it already exists."""
        if path in self.objects:
            return False
        self._put("create", path, data, who)
        return True

    def replace(self, path: str, data: bytes, who: str) -> None:
        self._put("replace", path, data, who)

    def _put(self, how: str, path: str, data: bytes, who: str) -> None:
        before = self.objects.get(path)
        self.objects[path], self.since[path] = data, self.now()
        self.watch(how, path, data, before, who)

    def remove(self, path: str, who: str) -> bool:
        before = self.objects.pop(path, None)
        if before is not None:
            self.watch("remove", path, b"", before, who)
        return before is not None

    def flip(self, path: str, bit: int) -> None:
        """Change one bit of an object without telling anybody."""
        data = bytearray(self.objects[path])
        data[bit // 8 % len(data)] ^= 1 << bit % 8
        self.objects[path] = bytes(data)


class Requests:
    """A filesystem with the interface of fsspec, for the participant `who`. Its requests may fail."""

    def __init__(self, world: World, who: str, point: Callable[[str], None] = lambda what: None) -> None:
        """`point` is called before and after every request. In it, a driver may be killed or stand still."""
        self.world, self.who, self.point = world, who, point
        self.cut_off_until = 0.0

    def _request(self, kind: str, effect: Callable[[], Any], torn: Callable[[], Any] | None = None) -> Any:
        """Perform a request by calling `effect`, or let one of the faults of this kind of request happen."""
        self.point(kind)
        fault = self.world.faults.pick(f"{self.who}.{kind}", ODDS[kind])
        if fault == "torn" and torn is not None:
            effect = torn
        if fault == "outage":
            self.cut_off_until = self.world.time + OUTAGE_S
        if fault in ("before", "outage") or (self.world.time < self.cut_off_until and not self.world.faults.over):
            raise TimeoutError("no answer")
        if fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if fault == "later":
            self.world.later(self.world.faults.random("later").uniform(0.3, 60.0), effect)
            raise TimeoutError("no answer")
        result = effect()
        self.point(kind)
        if fault == "after":
            raise TimeoutError("no answer")
        if fault == "repeated":
            raise FileExistsError(errno.EEXIST, "there is one")
        return result

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        name = path.removeprefix(f"{ROOT}/")
        if mode != "create":
            self._request("write", lambda: self.world.bucket.replace(name, data, self.who))
            return
        kind = "pack" if name.startswith("log/packs/") else "create"
        if not self._request(kind, lambda: self.world.bucket.create(name, data, self.who),
                             lambda: self.world.bucket.create(name, data[:len(data) // 2], self.who)):
            raise FileExistsError(errno.EEXIST, "there is one", path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        name = path.removeprefix(f"{ROOT}/")
        data = self._request("read", lambda: self.world.bucket.objects.get(name))
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return bytes(data[start:end])

    def info(self, path: str) -> dict[str, Any]:
        return self._info(path, self.cat_file(path))

    def _info(self, path: str, data: bytes) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(data)}

    def find(self, path: str, detail: bool = True) -> dict[str, Any]:
        prefix = path.removeprefix(ROOT).strip("/")
        prefix = f"{prefix}/" if prefix else ""
        bucket = self.world.bucket
        late = self.world.faults.pick(f"{self.who}.listing", (("late", .01),))
        until = self.world.time - (LATE_LIST_S if late else 0.0)
        objects = self._request("list", lambda: {
            name: len(data) for name, data in bucket.objects.items()
            if name.startswith(prefix) and bucket.since[name] <= until})
        return {f"{ROOT}/{name}": {"name": name, "type": "file", "size": size} for name, size in objects.items()}

    def rm_file(self, path: str) -> None:
        name = path.removeprefix(f"{ROOT}/")
        if not self._request("remove", lambda: self.world.bucket.remove(name, self.who)):
            raise FileNotFoundError(errno.ENOENT, "no such object", path)

    def invalidate_cache(self) -> None:
        """Do nothing, because nothing is cached."""


class SimRemote(Remote):
    def __init__(self, requests: Requests, clock: Any) -> None:
        self.root, self.prefix, self.fs, self.clock = f"{ROOT}://", ROOT, requests, clock


class SimStore(Store):
    """The product's store on simulated requests. It performs requests one after the other, because there is only one
    thread."""

    def __init__(self, requests: Requests, clock: Any) -> None:
        self.root, self.local = f"{ROOT}://", None
        self.remote, self.fs = SimRemote(requests, clock), requests

    def map(self, call: Callable[[Any], Any], items: Iterable[Any], most: int = 0) -> Iterator[Any]:
        return map(call, items)
