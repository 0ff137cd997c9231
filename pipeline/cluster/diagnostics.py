"""Checks whether this machine is fit for a run. `tokenmill doctor` runs the checks on the user's machine and on every
node of a cluster.

The result of a check is {"name", "level": green | yellow | red, "said", "remedy"}, where `said` describes what the
check found. A red check means that a run will probably fail, and a yellow check that a run may fail, be slow or be less
safe. Results are plain JSON, so that a node can send them. Files that the checks write are removed again.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.base import confinement
from pipeline.base.clock import SYSTEM
from pipeline.base.machine import usable_cores
from pipeline.base.scratch import user_folder
from pipeline.engine.backends.fingerprint import declared_libraries, fingerprint
from pipeline.engine.backends.pools import OWN_MB
from pipeline.engine.worker.limits import memory_use, visible_gpus
from pipeline.store.fs import Store, StoreError
from stages.scoring.models import default_lid176

Check = dict[str, str]

#: limits of checks: a value below the first number is red, a value below the second or only number is yellow
OPEN_FILES = (1024, 4096)
FREE_BYTES = (2 << 30, 20 << 30)
FREE_INODES = (10_000, 200_000)
CORE_BYTES = (700 << 20, 2 << 30)         # of memory for each core
SHM_BYTES = 256 << 20                     # Ray's object store takes 200 MB of /dev/shm
#: seconds by which a clock may be wrong. Beyond the first number, times in reports mislead (yellow). Beyond the second,
#: object storage may refuse signed requests (red; S3 does so from 15 minutes on).
CLOCK_S = (5.0, 300.0)


def check(name: str, level: str, finding: str, remedy: str = "") -> Check:
    return {"name": name, "level": level, "said": finding, "remedy": "" if level == "green" else remedy}


def inspect_node(store_root: str | None = None, witness: str | None = None) -> dict[str, Any]:
    """Check whether this machine is fit for a run. Returns {"fingerprint" (versions of code and libraries), "time" (of
    the call, in seconds since 1970), "checks"}.

    If `store_root` is given, the store is also checked. `witness` is the path of a file that another machine has
    written to its store. If this machine does not find the file, the two machines do not see the same store.
    """
    began = SYSTEM.wall()
    parts = (_open_files, _shm, _scratch, _memory, _children, _confinement, _models, _ocr, _gpus)
    checks = [result for part in parts for result in part()]
    if store_root is not None:
        checks += list(check_store(Store(store_root), witness))
    return {"fingerprint": asdict(fingerprint(declared_libraries())), "time": began, "checks": checks}


def _level(value: float, limits: tuple[float, float]) -> str:
    return "red" if value < limits[0] else "yellow" if value < limits[1] else "green"


def _open_files() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    level = "green" if soft == resource.RLIM_INFINITY else _level(soft, OPEN_FILES)
    allowed = "as many as wanted" if hard == resource.RLIM_INFINITY else f"up to {hard:,}"
    yield check("open files", level, f"{most} a process",
                f"ulimit -n 65536 before starting (this user may raise it {allowed}; beyond it: LimitNOFILE= of the "
                f"service, nofile in limits.conf, --ulimit of the container)")


def _shm() -> Iterator[Check]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        yield check("/dev/shm", "yellow", "not there", "Ray then keeps its objects in TMPDIR, which is slower; mount a "
                                                      "tmpfs, in a container --shm-size=1g")
        return
    yield check("/dev/shm", "green" if free >= SHM_BYTES else "yellow", f"{_mb(free)} free",
                "in a container: --shm-size=1g (Kubernetes: an emptyDir with medium: Memory at /dev/shm)")


def _scratch() -> Iterator[Check]:
    place = tempfile.gettempdir()
    try:
        folder = user_folder()
    except OSError as e:
        yield check("scratch", "red", str(e), "set TMPDIR to a folder on a local disk that this user may write")
        return
    yield from _space("scratch", folder, f"set TMPDIR to a larger local disk (it is {place}); a child needs room "
                                         f"for about three partitions")
    cache = Path(os.environ.get("TOKENMILL_CACHE") or folder)
    if _there(cache).stat().st_dev != folder.stat().st_dev:
        yield check("cache", "yellow", f"{cache} is on another disk than {folder}: downloads are not cached",
                    "put TOKENMILL_CACHE and TMPDIR on one disk, or leave TOKENMILL_CACHE out")


def _space(name: str, folder: Path, remedy: str) -> Iterator[Check]:
    """Check the free bytes and inodes of a folder's file system."""
    info = os.statvfs(_there(folder))
    free, inodes = info.f_bavail * info.f_frsize, info.f_favail
    yield check(f"{name}: space", _level(free, FREE_BYTES), f"{_mb(free)} free of {_mb(info.f_blocks * info.f_frsize)}",
                remedy)
    if info.f_files:                          # btrfs and others have no fixed number of inodes
        yield check(f"{name}: inodes", _level(inodes, FREE_INODES), f"{inodes:,} free",
                    f"the filesystem can hold few more files: {remedy}")


def _there(folder: Path) -> Path:
    """Return `folder` itself if it exists, else its nearest ancestor that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _memory() -> Iterator[Check]:
    try:
        used, total = memory_use()
    except OSError:
        return
    cores = usable_cores()
    each = (total - (OWN_MB << 20)) / cores
    yield check("memory", _level(each, CORE_BYTES), f"{_mb(total)}, {_mb(total - used)} of it free, for {cores} cores",
                "use fewer --workers, or give the machine (or its container: memory limit of the cgroup) more; a child "
                "takes 300 MB to 1.5 GB")


def _children() -> Iterator[Check]:
    if sys.platform != "linux":
        yield check("child processes", "yellow", f"{sys.platform} has no parent-death signal",
                    "only --backend inline works here; use Linux for more than small inputs")
        return
    try:
        os.close(os.memfd_create("tokenmill-doctor"))
        yield check("child processes", "green", "can be started, watched and killed")
    except OSError as e:
        yield check("child processes", "red", f"memfd_create: {e.strerror}", "allow memfd_create in the container's "
                                                                              "seccomp profile")


def _confinement() -> Iterator[Check]:
    supported = confinement.support()
    gaps = confinement.missing(supported)
    yield check("confinement", "yellow" if gaps else "green",
                gaps or f"parsers are confined by seccomp and Landlock (version {supported['landlock']})",
                "use a kernel with Landlock (5.13 or newer, landlock among lsm=) and seccomp; in a container allow "
                "both in its seccomp profile")


def _models() -> Iterator[Check]:
    model = default_lid176()
    yield check("language model", "green" if model else "yellow", "lid.176.ftz is " + ("there" if model else "missing"),
                "the step `language` needs it: tokenmill fetch lid176 on every node, or one TOKENMILL_MODELS that all "
                "share")


def _ocr() -> Iterator[Check]:
    """Report which OCR programs are installed. Only recipes that read scanned pages need one, so this check is always
    green."""
    from stages.extract.pdf.ocr import MissingEngine, engine, languages_of_tesseract

    engines = []
    with contextlib.suppress(MissingEngine):
        engines.append(f"tesseract ({', '.join(sorted(languages_of_tesseract()[2]))})")
    with contextlib.suppress(MissingEngine):
        engine("rapidocr", "eng")
        engines.append("rapidocr")
    yield check("OCR", "green", "; ".join(engines) or "none (what the step `pdf` with `ocr` would need)")


def _gpus() -> Iterator[Check]:
    gpus = visible_gpus()
    if not gpus:
        return
    with contextlib.suppress(OSError):
        version = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()[0]
        yield check("GPU", "green", f"{len(gpus)} visible; {' '.join(version.split())[:100]}")
        return
    yield check("GPU", "yellow", f"{len(gpus)} visible, but no NVIDIA driver is loaded",
                "install the driver, or hide them with CUDA_VISIBLE_DEVICES= ; in a container: --gpus all")


# -- the store -------------------------------------------------------------------------------------------------------
def check_store(store: Store, witness: str | None = None) -> Iterator[Check]:
    """Check that this machine can commit to a store. It must be able to write to the store, and the store must refuse
    to create a file that exists already. `witness` is the path of a file that another machine has written. If this
    machine does not find the file, the two machines do not see the same store."""
    try:
        sees_store = witness is None or store.exists(witness)
    except (StoreError, OSError) as e:                           # no credentials or no connection, not another store
        yield _refusal("store", e)
        return
    if not sees_store:
        yield check("store", "red", f"{store.root} is not the one the driver sees",
                    "put the store on a file system that all nodes share under one path, or on object storage")
        return
    if store.local is not None:
        yield from _space("store", store.local, "free some space, or choose another --store")
    probe = f"runs/.doctor-{SYSTEM.new_id()}"
    existed = store.local is None or store.local.is_dir()
    try:
        store.check_conditional_put()
        began = SYSTEM.wall()
        first, second = store.put_absent(probe, b"1"), store.put_absent(probe, b"2")
        if not first or second or store.read(probe) != b"1":
            yield check("store: commits", "red", "a file could be created twice",
                        "use a local disk, NFS, S3 or another object store that honours If-None-Match")
            return
        yield check("store: commits", "green", "put-if-absent works" + (", with hard links" if store.local else ""))
        yield from _clock_of_store(store, probe, began)
    except (StoreError, OSError) as e:
        yield _refusal("store: commits", e)
    finally:
        with contextlib.suppress(Exception):
            store.remove(probe)
        if store.local is not None and not existed:                # leave no store behind: it was only inspected
            for folder in (store.local / "runs", store.local):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _refusal(name: str, error: Exception) -> Check:
    message, _, remedy = str(error).partition("; ")
    return check(name, "red", message, remedy or "see that it can be reached and written by this user")


def _clock_of_store(store: Store, probe: str, began: float) -> Iterator[Check]:
    """Compare the clock of this machine with the time of writing that the store recorded for the file `probe`. The file
    was written after `began` (seconds since 1970)."""
    written = None
    if store.local is not None:
        written = (store.local / probe).stat().st_mtime
    else:
        info = _quietly(lambda: store.remote.fs.info(store.remote.at(probe))) if hasattr(store, "remote") else None
        stamp = (info or {}).get("LastModified") or (info or {}).get("mtime")
        written = stamp.timestamp() if isinstance(stamp, datetime) else None
    if written is not None:
        # some stores give whole seconds; the file was written between `began` and now
        off = max(0.0, began - 1 - written, written - SYSTEM.wall() - 1)
        yield clock("store: clock", off, "the store's clock")


def clock(name: str, off: float, whose: str) -> Check:
    level = "red" if off > CLOCK_S[1] else "yellow" if off > CLOCK_S[0] else "green"
    return check(name, level, f"{off:.1f} s away from {whose}" if off >= 0.05 else f"agrees with {whose}",
                 "let chrony or ntpd set the clocks; results do not depend on them, but signed requests and the times "
                 "in reports do")


def _quietly(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:                                     # object storage libraries raise their own exceptions
        return None


def _mb(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"
