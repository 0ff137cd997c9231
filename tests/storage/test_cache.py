"""The cache of remote files: its limit of size, which files are removed first, several processes that want the same
file, kill -9, and a full disk."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.base.scratch import Scratch
from pipeline.store import cache as caches
from pipeline.store.cache import Cache, joined
from pipeline.store.errors import EnvironmentFailure, disk_full
from pipeline.store.fs import Store
from tests.processes import alive, signal_all, stopped, until

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20


def name(i: int) -> str:
    return f"{i:032x}"


def maker(size: int, calls: list | None = None, content: bytes = b"x"):
    def make(path: str) -> None:
        if calls is not None:
            calls.append(path)
        with open(path, "wb") as f:
            f.write(content * size)
    return make


@pytest.fixture
def place(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "use").mkdir()
    return tmp_path


def held(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.name[0] != "."}


def test_a_file_is_made_once_and_shared(place):
    cache, calls = Cache(place / "cache", 10 * MB), []
    for i in range(3):
        cache.put(name(1), MB, str(place / "use" / str(i)), maker(MB, calls))
    assert len(calls) == 1
    assert len({(place / "use" / str(i)).stat().st_ino for i in range(3)}) == 1
    assert not os.access(place / "use" / "0", os.W_OK) or os.getuid() == 0
    assert (place / "use" / "0").stat().st_mode & 0o222 == 0


def test_the_least_recently_used_go_first_and_what_is_in_use_stays(place):
    # half a megabyte more than it takes: a file has some blocks beside its own where free space lies in pieces
    cache = Cache(place / "cache", 21 * MB // 2)
    for i in range(9):
        cache.put(name(i), MB, str(place / "use" / str(i)), maker(MB))
        os.utime(place / "cache" / name(i), (i + 1, i + 1))
    for i in (1, 2, 3, 5):
        os.unlink(place / "use" / str(i))                       # 0, 4, 6, 7, 8 stay in use
    assert cache.take(name(2), str(place / "use" / "again"))     # 2 is the youngest now
    os.unlink(place / "use" / "again")
    cache.put(name(20), 3 * MB, str(place / "use" / "20"), maker(3 * MB))
    assert held(place / "cache") == {name(i) for i in (0, 2, 4, 6, 7, 8, 20)}
    # all but 2 in use: no room for 3 MB more, so they are not cached
    cache.put(name(21), 3 * MB, str(place / "use" / "21"), maker(3 * MB))
    assert (place / "use" / "21").stat().st_size == 3 * MB
    assert name(21) not in held(place / "cache") and not cache.take(name(21), str(place / "use" / "x"))
    cache.put(name(22), 50 * MB, str(place / "use" / "22"), maker(100))            # larger than the cap
    assert name(22) not in held(place / "cache")


def test_what_fails_leaves_nothing(place):
    cache = Cache(place / "cache", 10 * MB)

    def broken(path: str) -> None:
        maker(1000)(path)
        raise ConnectionError("gone")
    with pytest.raises(ConnectionError):
        cache.put(name(1), 1000, str(place / "use" / "1"), broken)
    assert held(place / "cache") == held(place / "use") == set()
    cache.put(name(1), 1000, str(place / "use" / "1"), maker(1000))
    assert (place / "use" / "1").stat().st_size == 1000


WORKER = """
    import os, random, sys, time
    from pathlib import Path
    from pipeline.base.scratch import Scratch
    from pipeline.store.cache import Cache
    top, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng, scratch = random.Random(seed), Scratch(str(top))
    cache = Cache(top / "cache", 8 << 20)
    for n in range(rounds):
        key, at = rng.randrange(24), os.path.join(scratch.folder(), "f")
        def make(path):
            with open(path, "wb") as f:
                for _ in range(4):
                    f.write(bytes([key]) * (1 << 18))
                    time.sleep(0.002)
            with open(top / "made", "a") as f:
                f.write(f"{key}\\n")
        cache.put(f"{key:032x}", 1 << 20, at, make)
        data = Path(at).read_bytes()
        assert data == bytes([key]) * (1 << 20), "somebody else's bytes, or half of them"
        time.sleep(0.002)
        os.unlink(at)
        if n % 10 == 0:
            print(n, flush=True)
    print("well", flush=True)
    scratch.close()
"""


def start(top: Path, seed: int, rounds: int) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(WORKER), str(top), str(seed), str(rounds)], cwd=ROOT,
                            stdout=subprocess.PIPE, text=True)


def used(top: Path, workers: Sequence[subprocess.Popen] = ()) -> int:
    """Return how many bytes of disk the files below `top` take. A file with several names counts once. The workers
    stand still meanwhile, so that all is counted at one moment."""
    pids = signal_all([worker.pid for worker in workers if worker.poll() is None], signal.SIGSTOP)
    found = {}
    try:
        until(lambda: all(stopped(pid) or not alive(pid) for pid in pids), what="processes stopped")
        for folder, _, files in os.walk(top):
            for file in files:
                try:
                    info = os.lstat(os.path.join(folder, file))
                except FileNotFoundError:
                    continue
                found[info.st_ino] = info.st_blocks * 512
    finally:
        signal_all(pids, signal.SIGCONT)
    return sum(found.values())


def test_processes_that_share_it_and_are_killed(place):
    """Four workers, of which one after the other is killed wherever it is, and the disk watched meanwhile."""
    rng = random.Random(7)
    workers = [start(place, seed, 60) for seed in range(4)]
    most = 0
    for worker in workers:
        assert worker.stdout.readline()
    for serial in range(4, 10):
        time.sleep(rng.uniform(0.05, 0.2))
        most = max(most, used(place, workers))
        i = rng.randrange(4)
        if workers[i].poll() is None:
            workers[i].send_signal(signal.SIGKILL)
        workers[i].communicate()
        workers[i] = start(place, serial, 60)
    for worker in workers:
        while worker.poll() is None:
            most = max(most, used(place, workers))
            time.sleep(0.05)
        # not communicate(timeout=…): it reads past the buffer into which `readline` may have put the last line
        assert worker.wait(300) == 0 and worker.stdout.read().endswith("well\n")
    # the cap, one file in use of each living worker, and what dead ones used until somebody swept
    assert most <= (8 + 4 + 6) * MB + 200_000
    Scratch(str(place)).close()                                  # sweeps
    Cache(place / "cache", 8 * MB).evict(8 * MB)
    assert used(place) <= 8 * MB + 200_000
    assert not [f for f in held(place / "cache") if f.endswith(".part")], "downloads of the dead are removed"


def test_one_of_those_who_wait_downloads(place):
    """The download takes until all have begun to ask for the file."""
    code = """
        import sys, time
        from pathlib import Path
        from pipeline.store.cache import Cache
        top = Path(sys.argv[1])
        def make(path):
            with open(top / "made", "a") as f:
                f.write("x")
            while len(list((top / "asking").iterdir())) < 5:
                time.sleep(0.02)
            Path(path).write_bytes(b"data")
        (top / "asking" / sys.argv[2]).touch()
        Cache(top / "cache", 1 << 20).put("0" * 32, 4, str(top / "use" / sys.argv[2]), make)
    """
    (place / "asking").mkdir()
    running = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(place), str(i)], cwd=ROOT)
               for i in range(5)]
    assert [p.wait(300) for p in running] == [0] * 5
    assert (place / "made").read_text() == "x"
    assert {(place / "use" / str(i)).read_bytes() for i in range(5)} == {b"data"}


def test_a_download_that_is_killed_at_its_end_stands_in_nobodys_way(place):
    """Whoever comes next is the same user, not root: what is left must be a file he may open."""
    code = """
        import os, signal, sys
        from pathlib import Path
        from pipeline.store import cache
        top = Path(sys.argv[1])
        cache.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        cache.Cache(top / "cache", 1 << 20).put("0" * 32, 4, str(top / "use" / "a"),
                                                lambda path: Path(path).write_bytes(b"half") and None)
    """
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(place)], cwd=ROOT)
    assert died.returncode == -9
    [part] = [p for p in (place / "cache").iterdir() if p.name.endswith(".part")]
    assert part.stat().st_mode & 0o600 == 0o600
    Cache(place / "cache", MB).put("0" * 32, 4, str(place / "use" / "b"), maker(4, content=b"y"))
    assert (place / "use" / "b").read_bytes() == b"yyyy" and held(place / "cache") == {"0" * 32}


def test_it_may_be_deleted_at_any_time(s3, bucket, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    store = Store(bucket)
    for n in range(3):
        store.write(f"f{n}", bytes([n]) * MB)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert Path(store.fetch("f0", str(scratch))).read_bytes() == bytes(MB)
    shutil.rmtree(tmp_path / "cache")                             # between two files
    assert Path(store.fetch("f1", str(scratch))).read_bytes() == bytes([1]) * MB
    real = store.remote.download

    def meanwhile(*args):
        real(*args)
        if (tmp_path / "cache").exists():
            monkeypatch.setattr(store.remote, "download", real)
            shutil.rmtree(tmp_path / "cache")                     # and under a download
    monkeypatch.setattr(store.remote, "download", meanwhile)
    assert Path(store.fetch("f2", str(scratch))).read_bytes() == bytes([2]) * MB
    assert len(held(tmp_path / "cache")) == 1


def test_a_full_disk_makes_the_cache_give_way_once(place):
    cache, tries = Cache(place / "cache", 10 * MB), []
    cache.put(name(1), MB, str(place / "use" / "1"), maker(MB))
    os.unlink(place / "use" / "1")

    def make(path: str) -> None:
        tries.append(held(place / "cache"))
        with disk_full(os.path.dirname(path)), open(path, "wb") as f:
            f.write(b"half")
            if name(1) in held(place / "cache"):
                raise OSError(errno.ENOSPC, "No space left on device")
    cache.put(name(2), MB, str(place / "use" / "2"), make)
    assert len(tries) == 2 and (place / "use" / "2").read_bytes() == b"half"
    assert held(place / "cache") == {name(2)}

    def never(path: str) -> None:
        with disk_full(os.path.dirname(path)), open(path, "wb") as f:
            f.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(EnvironmentFailure, match=rf"no space left for temporary files in {place}/cache.*TMPDIR"):
        cache.put(name(3), MB, str(place / "use" / "3"), never)
    assert held(place / "cache") == {name(2)} and held(place / "use") == {"2"}


def test_a_really_full_disk(s3, bucket, tmp_path):
    """A file system of 6 MB takes a download of 4 MB, another one once the cache has given way, and never one of 8."""
    store = Store(bucket)
    for size in (4, 5, 8):
        store.write(f"f{size}", bytes([size]) * (size * MB))
    code = f"""
        import os
        from pathlib import Path
        from pipeline.store.errors import EnvironmentFailure
        from pipeline.store.fs import Store
        top = Path(os.environ["SMALL"])
        (top / "use").mkdir()
        store = Store({bucket!r})
        one = store.fetch("f4", str(top / "use"))
        assert Path(one).stat().st_size == 4 << 20
        os.unlink(one)
        two = store.fetch("f5", str(top / "use"))
        assert Path(two).read_bytes() == bytes([5]) * (5 << 20)
        os.unlink(two)
        try:
            store.fetch("f8", str(top / "use"))
        except EnvironmentFailure as e:
            assert "no space left for temporary files in " + str(top) in str(e), e
        else:
            raise SystemExit("8 MB in 6 MB")
        assert os.listdir(top / "use") == []
        assert not [f for f in os.listdir(top / "cache") if f[0] != "."], os.listdir(top / "cache")
        print("well")
    """
    small = tmp_path / "small"
    small.mkdir()
    command = f"mount -t tmpfs -o size=6m tmpfs {small} && exec {sys.executable} -c \"$CODE\""
    done = subprocess.run(["unshare", "--mount", "--map-root-user", "sh", "-c", command], cwd=ROOT, text=True,
                          capture_output=True, timeout=300,
                          env={**os.environ, "CODE": textwrap.dedent(code), "SMALL": str(small),
                               "TOKENMILL_CACHE": str(small / "cache"), "TOKENMILL_CACHE_SIZE": "1GB"})
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[:100]}")
    assert done.stdout == "well\n", done.stderr


def test_ranges_are_joined():
    near = 64 << 10
    assert joined(None, 10) is None
    assert joined([], 10) == []
    assert joined([(5, 20), (0, 3)], 10) == [(0, 10)]
    far = 10 * near
    assert joined([(far, far + 5), (0, 10), (far + 3, far + 9), (50, 50)], 20 * near) == [(0, 10), (far, far + 9)]
    assert joined([(-5, 3), (far, 99 * near)], 20 * near) == [(0, 3), (far, 20 * near)]


def test_where_it_is_and_how_large(monkeypatch, tmp_path):
    from pipeline.store.errors import StoreError

    found = caches._cache(str(tmp_path / "a"), "2GB")
    assert (found.folder, found.cap) == (tmp_path / "a", 2 * 10**9)
    assert caches._cache(str(tmp_path / "b"), "").cap > 1000
    with pytest.raises(StoreError, match="TOKENMILL_CACHE_SIZE=much"):
        caches._cache(str(tmp_path / "c"), "much")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot make the cache of remote files at .*file/x.*TOKENMILL_CACHE"):
        caches._cache(str(tmp_path / "file" / "x"), "")
