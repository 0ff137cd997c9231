"""Measure the memory and time that 4.5 million blocked domains cost a worker: a Python set, or the mapped `url` hashes.

    python benchmarks/url_lists.py [--domains 4500000]

Writes a list of made-up domains, and the same as an archive in UT1's layout (ten categories), into a temporary folder.
Each side is measured in a process of its own:

    set            the list as a Python set
    first          hashing the list, as the first worker of a machine does
    ready          using the hashes that are there, as every other worker does
    archive first  the same two with the archive
    archive ready

Time is measured until the first answer. Then 100,000 URLs are looked up, half of them blocked. Memory is what the
process has gained at the end: private pages; RSS, which adds the mapped pages of the file that all workers share; and
the peak.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

CATEGORIES = ("adult", "phishing", "dating", "gambling", "filehosting", "ddos", "agressif", "chat", "mixed_adult",
              "arjel")
SIDES = ("set", "first", "ready", "archive first", "archive ready")


def domain(i: int) -> str:
    """A made-up domain of the usual length (17 characters)."""
    return f"site{i * 2654435761 % 2**32:08x}x.com"


def write(folder: Path, count: int) -> None:
    names = [domain(i) for i in range(count)]
    (folder / "domains").write_text("\n".join(names) + "\n", encoding="utf-8")
    with tarfile.open(folder / "blacklists.tar.gz", "w:gz", compresslevel=1) as tar:
        for n, category in enumerate(CATEGORIES):
            data = "\n".join(names[n::len(CATEGORIES)]).encode()
            member = tarfile.TarInfo(f"blacklists/{category}/domains")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def memory() -> tuple[float, float]:
    """Returns (RSS, private) memory of this process in MB."""
    found = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    rss, clean, dirty = (int(found[key].split()[0]) / 1024 for key in ("Rss", "Private_Clean", "Private_Dirty"))
    return rss, clean + dirty


def side(name: str, folder: Path, count: int) -> None:
    """Measure one side in its own process. Prints its figures as JSON."""
    import tldextract  # noqa: F401  (what a worker has loaded before its lists)

    from stages.document import Document
    from stages.filter.url import Url

    domains, archive = folder / "domains", folder / "blacklists.tar.gz"
    stage = Url(integrated=False, **({"blacklists": str(archive)} if "archive" in name else {"domains": str(domains)}))
    rng = random.Random(0)
    hosts = [domain(rng.randrange(count)) if i % 2 else f"other{i}.com" for i in range(100_000)]
    documents = [Document("id", "", url=f"http://{host}/page") for host in hosts]
    before, wall, cpu = memory(), time.perf_counter(), time.process_time()
    if name == "set":
        with open(domains, encoding="utf-8") as lines:
            known = {line.strip() for line in lines}
        answer = [domain(0) in known]
    else:
        stage.setup()
        answer = [stage.process(Document("id", "", url=f"http://{domain(0)}/")) is not None]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    began = time.process_time()
    answer += [host in known for host in hosts] if name == "set" else [stage.process(d) is not None for d in documents]
    asked = (time.process_time() - began) / len(hosts)
    assert answer == [True] + [bool(i % 2) for i in range(len(hosts))]
    after = memory()
    peak = next(int(line.split()[1]) / 1024 for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmHWM"))
    print(json.dumps({"wall s": wall, "CPU s": cpu, "private MB": after[1] - before[1], "RSS MB": after[0] - before[0],
                      "peak MB": peak - before[0], "us a URL": 1e6 * asked}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--domains", type=int, default=4_500_000)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.side:
        side(options.side, options.folder, options.domains)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.domains)
        print(f"{options.domains:,} domains")
        for name in SIDES:
            run = subprocess.run([sys.executable, __file__, "--side", name, "--folder", folder, "--domains",
                                  str(options.domains)], capture_output=True, text=True, check=True,
                                 env={**os.environ, "TOKENMILL_CACHE": f"{folder}/cache"})
            print(f"{name:14}", " ".join(f"{key} {value:.3g}" for key, value in json.loads(run.stdout).items()))


if __name__ == "__main__":
    main()
