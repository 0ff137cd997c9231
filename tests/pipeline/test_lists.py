"""The description of a task stays small, however many files it reads, and its key depends on the contents of the files,
not on where they are."""

from __future__ import annotations

import json

import pytest

from pipeline.engine.task import TaskInputs, TaskSpec
from pipeline.store.content_keys import content_key, ref_contents
from pipeline.store.errors import DamagedFile
from pipeline.store.fs import Store
from pipeline.store.lists import INLINE, ListFiles, unfold, writes_to
from stages.barrier import PartRef, TaskResult
from stages.dedup.exact import Exact
from stages.dedup.fragment import Sizes, groups
from stages.dedup.minhash import MinHash


def ref(n: int, place: str = "a") -> dict:
    return {"$ref": f"objects/{n:032x}/{place}-{n:08x}.bands.seg", "content": f"{n:064x}", "bytes": 10**9 + n,
            "rows": n}


def test_a_task_gets_its_lists_back(tmp_path):
    store = Store(tmp_path)
    args = {"maps": [ref(n) for n in range(40)], "deep": {"firsts": list(range(300)), "few": [1, 2]},
            "pairs": [{"text": ref(1), "side": None}] * 20, "$volatile": {"ids": list(range(50))}, "bucket": 3}
    folded = ListFiles(writes_to(store)).fold(args)
    assert {*folded["maps"]} == {"$list", "content", "items"} and folded["deep"]["few"] == [1, 2]
    assert folded["$volatile"] == args["$volatile"]
    assert unfold(folded, store.read) == args
    inputs = TaskInputs(TaskSpec("k", "t", "n", folded), store, str(tmp_path))
    assert inputs.args == args
    assert len(list(store.list("objects/lists"))) == 3
    assert ref_contents(args)[:3] == [ref(n)["content"] for n in range(3)] and len(ref_contents(folded)) == 3
    short = {"maps": [ref(n) for n in range(INLINE)]}
    assert ListFiles(writes_to(store)).fold(short) == short


def test_keys_mean_contents(tmp_path):
    def key(items: list, put=None) -> str:
        return content_key("m:T", 1, ListFiles(put).fold({"maps": items}))

    many = [ref(n) for n in range(100)]
    before = key(many)
    assert key([{**r, "$ref": "elsewhere", "bytes": 1} for r in many]) == before
    assert key(many, writes_to(Store(tmp_path))) == before, "planning and running agree"
    assert len({before, key(many[::-1]), key(many[1:]), key([*many[:-1], ref(7)])}) == 4
    numbers = list(range(100))
    assert key(numbers) != key([*numbers[:-1], 0])


def test_a_list_of_a_wave_is_written_once(tmp_path):
    put: list[str] = []
    lists = ListFiles(lambda path, data: put.append(path))
    shared, mine = [ref(n) for n in range(1000)], [[ref(n), *(ref(i) for i in range(9))] for n in range(30)]
    for n in range(30):
        lists.fold({"maps": shared, "sides": mine[n], "bucket": n})
    assert len(put) == 31 and len(set(put)) == 31


def test_a_damaged_list_is_an_error(tmp_path):
    store = Store(tmp_path)
    folded = ListFiles(writes_to(store)).fold({"maps": list(range(20))})
    (tmp_path / folded["maps"]["$list"]).write_text("[1,2,3]")
    with pytest.raises(DamagedFile, match=folded["maps"]["$list"]):
        unfold(folded, store.read)
    store.remove(folded["maps"]["$list"])
    with pytest.raises(DamagedFile, match="is missing"):
        unfold(folded, store.read)


class AnyFile(dict[str, dict]):
    """The files of the task number `n`: a file of any name, made when it is asked for."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __missing__(self, name: str) -> dict:
        return ref(self.n, name)

    def get(self, name, default=None):
        return self[name]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("barrier", [MinHash(), Exact(by="both")], ids=["minhash", "exact"])
def test_specs_are_below_4_kb_with_thousands_of_groups(barrier, rounds):
    barrier.sizes = Sizes(group_rows=6000, bucket_bytes=1 << 20, segment_bytes=1 << 10,
                          one_task_edges=0 if rounds else Sizes.one_task_edges)
    parts = [PartRef(f"{n:032x}", "web", 0, 1000, 10**6, ref(n), ref(n, "side")) for n in range(10_000)]
    counters = {"linked": 1000, "candidates": 10**6, "repeated": 5, "moved": 0, "max_round": 1}
    done: dict = {}
    lists = ListFiles()
    for wave in barrier.waves(parts):
        done[wave.name] = []
        longest = 0
        for n, draft in enumerate(wave.tasks(done)):
            if n < 300:
                spec = TaskSpec("0" * 32, draft.task, wave.name, lists.fold(draft.args), draft.weight, draft.label)
                longest = max(longest, len(json.dumps(spec.to_json())))
            done[wave.name].append(TaskResult(AnyFile(n), counters))
        assert longest < 4096, wave.name
    assert len(done["slices"]) == len(groups(parts, barrier.sizes)) > 1500
    assert bool(done.get("star")) == (rounds and isinstance(barrier, MinHash))
