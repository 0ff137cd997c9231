"""Which files a source has: with links, loops of links, broken links and special files, and with inputs that change
during a run."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from pathlib import Path

import pytest

from pipeline.base.clock import Clock
from pipeline.engine.task import ChangedInput, CrashCursor, TaskInputs, TaskOutputs, TaskSpec
from pipeline.engine.worker.attempt import run_attempt
from pipeline.plan.inputs import SETTLED_S, InputError, check_patterns, list_source
from pipeline.plan.provenance import read_provenance
from pipeline.store.content_keys import content_key
from pipeline.store.errors import DamagedFile, EnvironmentFailure
from pipeline.store.fs import Store


def found(top: Path, *patterns: str, **kw) -> list[str]:
    return [f.path for f in list_source("s", list(patterns), base=str(top), **kw)]


@pytest.fixture
def tree(tmp_path) -> Path:
    """a/1.txt, a/b/2.txt, elsewhere/3.txt, and links: a/there → elsewhere, a/up → a, a/b/loop → a, a/4.txt → a file."""
    top = tmp_path / "tree"
    for path in ("a/1.txt", "a/b/2.txt", "elsewhere/3.txt", "elsewhere/deep/5.txt"):
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(path)
    (top / "a/there").symlink_to(top / "elsewhere")
    (top / "a/up").symlink_to(top / "a")
    (top / "a/b/loop").symlink_to("..")
    (top / "a/4.txt").symlink_to(top / "elsewhere/3.txt")
    return top


EXPECTED = ["1.txt", "4.txt", "b/2.txt", "there/3.txt", "there/deep/5.txt"]
FOLLOW = {"follow_symlinks": True}


def test_links_to_folders_are_followed_but_no_loop(tree):
    assert found(tree, "a", **FOLLOW) == found(tree, "a", suffixes=(".txt",), **FOLLOW) == EXPECTED
    assert found(tree, "a/**/*.txt", **FOLLOW) == found(tree, "a/**", **FOLLOW) == EXPECTED
    assert found(tree, "a/*/*.txt", **FOLLOW) == ["b/2.txt", "there/3.txt"]
    assert found(tree, "a/up/*.txt", **FOLLOW) == ["1.txt", "4.txt"], "named by the user, it is a folder like any other"


@pytest.mark.parametrize("pattern", ["a", "a/**", "a/**/*.txt", "a/*/../*.txt", "a/up"])
def test_links_that_lead_out_of_the_folder_are_not_followed_and_said_once(tree, pattern):
    """Of strangers' folders: a link in them may lead to the keys of this user."""
    (tree / "elsewhere/secret").symlink_to(tree / "a/1.txt")
    (tree / "a/inside.txt").symlink_to("b/2.txt")
    (tree / "ab").mkdir()
    (tree / "a/near.txt").symlink_to(tree / "ab/../elsewhere/3.txt")
    if pattern == "a/*/../*.txt":
        (tree / "a/there").unlink()
        pattern = "a/**/*.txt"
    warnings: list[str] = []
    assert found(tree, pattern, warnings=warnings) == ["1.txt", "b/2.txt", "inside.txt"]
    [said] = warnings
    assert "skipped, which are links that lead out of its folder: '4.txt', 'near.txt'" in said
    assert "`follow_symlinks: true`" in said


def test_a_link_that_the_pattern_names_is_the_users(tree):
    assert found(tree, "a/4.txt") == ["4.txt"]
    assert found(tree, "a/there/*.txt") == ["3.txt"]
    assert found(tree, "a/there") == ["3.txt", "deep/5.txt"]
    (tree / "elsewhere/back").symlink_to(tree / "a/b")
    assert found(tree, "a/there", "a/b") == ["b/2.txt", "there/3.txt", "there/back/2.txt", "there/deep/5.txt"]
    with pytest.raises(InputError, match=r"no file matches 'a/4\*'.*'a/4.txt' leads out of it.*follow_symlinks: true"):
        found(tree, "a/4*", root=str(tree))
    for name in ("a/*/3.txt", "a/*/deep/*.txt"):
        with pytest.raises(InputError, match="follow_symlinks: true"):
            found(tree, name)
        assert found(tree, name, **FOLLOW)


def test_many_loops_take_no_time(tmp_path):
    """Each folder has links to all the others: 2^n ways for who does not look where he is."""
    for i in range(7):
        (tmp_path / "t" / str(i)).mkdir(parents=True)
    (tmp_path / "t/0/x.txt").write_text("x")
    for i in range(7):
        for j in range(3):
            (tmp_path / "t" / str(i) / f"l{j}").symlink_to(tmp_path / "t")
    assert found(tmp_path, "t") == found(tmp_path, "t/**/*.txt") == ["0/x.txt"]


def test_links_to_nothing_and_other_than_files_are_skipped_and_named(tree):
    (tree / "a/gone.txt").symlink_to(tree / "nowhere")
    (tree / "a/b/self.txt").symlink_to(tree / "a/b/self.txt")
    os.mkfifo(tree / "a/pipe.txt")
    for pattern in ("a", "a/**/*.txt"):
        warnings: list[str] = []
        assert found(tree, pattern, warnings=warnings, **FOLLOW) == EXPECTED
        [said] = warnings
        assert "source 's': 3 skipped" in said and "'b/self.txt', 'gone.txt', 'pipe.txt'" in said
    with pytest.raises(InputError, match=r"'a/gone\.txt' is a broken link"):
        found(tree, "a/gone.txt")
    with pytest.raises(InputError, match=r"source 's': no file matches 'a/g\*'"):
        found(tree, "a/g*")


def test_as_the_shell_has_it(tree):
    (tree / "a/.hidden.txt").write_text("x")
    (tree / "a/.git").mkdir()
    (tree / "a/.git/x.txt").write_text("x")
    (tree / "a/[x].txt").write_text("x")
    assert found(tree, "a/**/*.txt", **FOLLOW) == sorted([*EXPECTED, "[x].txt"])
    assert found(tree, "a/.*") == [".hidden.txt"]
    assert found(tree, "a/[x].txt") == ["[x].txt"]
    assert found(tree, "a/[14].txt", **FOLLOW) == ["1.txt", "4.txt"]
    assert found(tree, "*/1.txt") == ["a/1.txt"]
    assert found(tree, "a/b/*.txt", "elsewhere/*.txt") == ["a/b/2.txt", "elsewhere/3.txt"]


@pytest.mark.parametrize("seed", range(5))
def test_globs_match_what_python_matches(tmp_path, seed):
    """On trees without links."""
    import glob

    rng = random.Random(seed)
    names = ["a", "b.txt", "ab", "b", "a.txt", ".c", "x[y]", "b.txt.gz"]
    for _ in range(60):
        path = tmp_path / "t" / "/".join(rng.choices(names, k=rng.randint(1, 4)))
        if not any(p.is_file() for p in path.parents) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    for pattern in ("t/*", "t/**", "t/**/*.txt", "t/*/b*", "t/**/a/*", "t/a/**/b.txt", "t/?b/**/*", "t/**/a/**/*.txt",
                    "t/[ab]/*", "t/*/../*", "t/**/b/a.txt"):
        expected = {p for p in glob.glob(str(tmp_path / pattern), recursive=True) if os.path.isfile(p)}
        expected = sorted(os.path.realpath(p) for p in expected)
        try:
            files = list_source("s", [pattern], base=str(tmp_path))
        except InputError:
            files = []
        assert sorted({os.path.realpath(os.path.join(f.root, f.path)) for f in files}) == sorted(set(expected)), pattern


def test_a_glob_on_object_storage_lists_files_only_and_no_hidden_ones(tmp_path):
    store = Store(f"memory://{tmp_path.name}")
    for path in ("in/a.txt", "in/.b.txt", "in/.c/d.txt", "in/e.txt/f.txt", "in/g/h.txt"):
        store.write(path, path.encode())
    listed = {pattern: [f.path for f in list_source("s", [f"{store.root}/{pattern}"])]
              for pattern in ("in/*", "in/*.txt", "in/**/*.txt", "in/.*")}
    assert listed == {"in/*": ["a.txt"], "in/*.txt": ["a.txt"], "in/**/*.txt": ["a.txt", "e.txt/f.txt", "g/h.txt"],
                      "in/.*": [".b.txt"]}


def test_a_check_for_files_refuses_what_a_listing_refuses(tree):
    """With the same words, and it ends with the first file."""
    (tree / "a/only").symlink_to(tree.parent / "nowhere")
    os.mkfifo(tree / "a/pipe")
    for patterns in (["a"], ["a/*.txt"], ["a/1.txt"], ["a/**"], ["a/*.nothing"], ["nothing"], ["nothing/*"], ["a/only"],
                     ["a/pipe"], ["a/b/*.txt", "a/*.nothing"], ["elsewhere", "s3://b/in"], ["a/there"], ["a/*/3.txt"]):
        outcomes = []
        for look in (list_source, check_patterns):
            try:
                look("s", patterns, base=str(tree), suffixes=(".txt",))
                outcomes.append("")
            except InputError as e:
                outcomes.append(str(e))
        assert outcomes[0] == outcomes[1], patterns


# -- changes -------------------------------------------------------------------------------------------------------
def rewrite(path: Path, text: str) -> None:
    """Write a file again, at a later time. Two writes within one tick of the clock of the file system would have the
    same time, so it writes until the time differs."""
    before = path.stat().st_ctime_ns
    path.write_text(text)
    while path.stat().st_ctime_ns == before:
        path.write_text(text)


def fetch(file, scratch, store) -> str:
    return TaskInputs(TaskSpec("k", "m:C", "d", {}), store, str(scratch)).fetch(file.arg())


@pytest.mark.parametrize("verify", [False, True])
def test_an_input_that_changed_since_the_plan(tmp_path, verify):
    path, store = tmp_path / "in.txt", Store(tmp_path / "store")
    path.write_text("the first text")
    [file] = list_source("s", [str(path)], verify=verify)
    times = path.stat()
    assert fetch(file, tmp_path, store) == str(path)
    rewrite(path, "THE OTHER TEXT")
    with pytest.raises(ChangedInput, match=r"in\.txt .* changed since the run was planned; run again"):
        fetch(file, tmp_path, store)
    if verify:                                  # same size, same time: only the hash tells
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(ChangedInput):
            fetch(file, tmp_path, store)
        rewrite(path, "the first text")         # same content, another time: that is what was asked for
        assert fetch(file, tmp_path, store) == str(path)
    path.unlink()
    with pytest.raises(ChangedInput):
        fetch(file, tmp_path, store)


class At(Clock):
    """A clock that stands still at a time."""

    def __init__(self, time: float) -> None:
        self.time = time

    def wall(self) -> float:
        return self.time


def test_a_file_in_the_state_that_the_driver_hashed_is_not_hashed_by_every_worker(tmp_path):
    path, store = tmp_path / "in.txt", Store(tmp_path / "store")
    path.write_text("the first text")
    written = path.stat().st_ctime
    [fresh] = list_source("s", [str(path)], verify=True, clock=At(written + SETTLED_S / 2))
    [settled] = list_source("s", [str(path)], verify=True, clock=At(written + 2 * SETTLED_S))
    assert not fresh.hashed and settled.hashed, "times of a file written just now may hide a second change"
    assert content_key("t", 1, fresh.arg()) == content_key("t", 1, settled.arg())
    other = "sha256:" + "0" * 64                # fits only unhashed
    assert fetch(settled._replace(etag=other), tmp_path, store) == str(path)
    with pytest.raises(ChangedInput):
        fetch(fresh._replace(etag=other), tmp_path, store)
    times = path.stat()
    rewrite(path, "THE OTHER TEXT")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ChangedInput):
        fetch(settled, tmp_path, store)
    rewrite(path, "the first text")             # another state, the same content
    assert fetch(settled, tmp_path, store) == str(path)


def test_a_pinned_file_is_hashed_too(tmp_path):
    """As `tokenizer: {load: …}` names it: by the sha256 of its bytes."""
    (tmp_path / "t.json").write_text("{}")
    ref = {"$file": "t.json", "root": str(tmp_path), "size": 2, "etag": hashlib.sha256(b"{}").hexdigest()}
    inputs = TaskInputs(TaskSpec("k", "m:C", "d", {}), Store(tmp_path / "store"), str(tmp_path))
    assert inputs.fetch(ref)
    rewrite(tmp_path / "t.json", "[]")
    with pytest.raises(ChangedInput):
        inputs.fetch(ref)


class ChangesItsInput:
    """Changes its input while it reads it."""

    name = "changes_its_input"
    version = 1

    @staticmethod
    def run(inputs, cursor, out):
        path = inputs.fetch(inputs.args["file"])
        text = Path(path).read_text()
        rewrite(Path(path), text.upper())
        Path(out.path("x")).write_text(text)
        return {}


def test_an_input_that_changes_while_it_is_read(tmp_path):
    (tmp_path / "in.txt").write_text("text")
    [file] = list_source("s", [str(tmp_path / "in.txt")])
    store = Store(tmp_path / "store")
    spec = TaskSpec("0" * 32, "tests.pipeline.test_inputs:ChangesItsInput", "d", {"file": file.arg()})
    with pytest.raises(ChangedInput):
        run_attempt(spec, store, "00000001-00000001", CrashCursor(), str(tmp_path))
    assert not list(store.list("objects")), "nothing stands under its key"


class WritesNumbers:
    name = "writes_numbers"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> dict[str, int]:
        Path(out.path("numbers")).write_text("1 2 3")
        return {}


class AddsNumbers:
    """Reads a file in ranges. If the numbers are not the expected ones, it fails before the file was compared with its
    checksum."""

    name = "adds_numbers"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> dict[str, int]:
        numbers = [int(n) for n in inputs.read_range(inputs.args["numbers"], 0, 5).split()]
        if numbers != [1, 2, 3]:
            raise DamagedFile("objects/other/1.file", "is blamed for numbers that are wrong")
        raise ArithmeticError("a mistake of its own")


@pytest.mark.parametrize(("now", "error"), [(b"1 2 3", ArithmeticError), (b"1 x 3", DamagedFile),
                                            (b"1 2 7", DamagedFile), (None, DamagedFile)])
def test_a_task_that_trips_over_damaged_bytes_names_their_file(tmp_path, now, error):
    """Its own error would end the run for good, and the wrong file would be made anew again and again."""
    store = Store(tmp_path / "store")
    made = run_attempt(TaskSpec("0" * 32, f"{__name__}:WritesNumbers", "d", {}), store, "00000001-00000001",
                       CrashCursor())
    path = made.files["numbers"].path
    if now is None:
        store.remove(path)
    else:
        Path(store.at(path)).write_bytes(now)
    ref = {"$ref": path, "sha256": made.files["numbers"].sha256, "bytes": 5, "content": ""}
    spec = TaskSpec("1" * 32, f"{__name__}:AddsNumbers", "d", {"numbers": ref})
    with pytest.raises(error, match=path if error is DamagedFile else "of its own"):
        run_attempt(spec, store, "00000001-00000002", CrashCursor())


class ReadsBoth:
    """Reads two files in ranges, and then blames the second one."""

    name = "reads_both"
    version = 1

    @staticmethod
    def run(inputs: TaskInputs, cursor: CrashCursor, out: TaskOutputs) -> dict[str, int]:
        for ref in inputs.args["refs"]:
            inputs.read_range(ref, 0, 1)
        if inputs.args["raise"] == "disk":
            raise OSError(errno.ENOSPC, "full")
        raise inputs.damaged(inputs.args["refs"][1])


def test_what_failed_is_looked_at_first_and_a_full_disk_is_no_reason_to_look(tmp_path, monkeypatch):
    store, refs, looked = Store(tmp_path / "store"), [], []
    for n in range(2):
        spec = TaskSpec(f"{n}" * 32, f"{__name__}:WritesNumbers", "d", {})
        info = run_attempt(spec, store, "00000001-00000001", CrashCursor()).files["numbers"]
        refs.append({"$ref": info.path, "sha256": info.sha256, "bytes": 5, "content": ""})
    Path(store.at(refs[1]["$ref"])).write_bytes(b"1 2 4")
    monkeypatch.setattr(Store, "checked", lambda self, path, *rest, checked=Store.checked, **more: (
        looked.append(path), checked(self, path, *rest, **more))[1])
    for how, error, paths in (("", DamagedFile, [refs[1]["$ref"]]), ("disk", EnvironmentFailure, [])):
        looked.clear()
        spec = TaskSpec("2" * 32, f"{__name__}:ReadsBoth", "d", {"refs": refs, "raise": how})
        with pytest.raises(error):
            run_attempt(spec, store, "00000001-00000002", CrashCursor())
        assert looked == paths


#: what a bucket would list, so that none is asked
LISTED = {"s3://b/crawl/*.gz": [("s3://b/crawl/x.gz", 3, "e1"), ("s3://b/crawl/deep/y.gz", 4, "e2")],
          "s3://b/one.gz": [("s3://b/one.gz", 5, "e3")], "s3://b/none/*": [],
          "s3://b/all": [("s3://b/all/p.GZ", 1, "e4"), ("s3://b/all/q.txt", 2, "e5")]}


@pytest.mark.parametrize(("patterns", "options", "said"), [
    (["s3://b/crawl/*.gz"], {"verify": True}, "--verify-inputs hashes local files only"),
    (["s3://b/crawl/*.gz", "a"], {}, "local and remote paths in one source; make two sources of them"),
    (["s3://b/crawl/*.gz", "s3://c/*"], {}, r"its paths lie in different buckets \(s3://b/crawl/\*.gz, s3://c/\*\)"),
    (["s3://*/crawl"], {}, "its paths lie in different buckets"),
    (["s3://b/none/*"], {}, r"no object matches 's3://b/none/\*'"),
    (["s3://b/all"], {"suffixes": (".warc",)}, "no object matches 's3://b/all'"),
    (["s3://b/crawl/*.gz"], {"root": "s3://b/crawl/deep"}, "'s3://b/crawl/x.gz' is outside its root")])
def test_objects_that_make_no_source_are_refused_with_the_remedy(tree, patterns, options, said):
    with pytest.raises(InputError, match=f"source 's': .*{said}"):
        found(tree, *patterns, listings=LISTED, **options)


def test_objects_are_named_from_the_folder_that_holds_all_of_them(tree):
    assert found(tree, "s3://b/crawl/*.gz", listings=LISTED) == ["deep/y.gz", "x.gz"]
    assert found(tree, "s3://b/crawl/*.gz", "s3://b/one.gz", listings=LISTED) == [
        "crawl/deep/y.gz", "crawl/x.gz", "one.gz"]
    # a folder stands for its files with a suffix of the reader; an object that a pattern names needs none
    assert found(tree, "s3://b/all/", listings=LISTED, suffixes=(".gz",)) == ["p.GZ"]
    assert found(tree, "s3://b/one.gz", listings=LISTED, suffixes=(".warc",)) == ["one.gz"]


def test_what_is_no_provenance_of_this_version_is_passed_over(tmp_path):
    """…and does not stop `why`: another run's file may be damaged, or of another version."""
    store = Store(tmp_path)
    for run, text in (("a", '{"version": 1, "epoch": 3}'), ("b", '{"version": 1, "epoch": 7}'), ("c", "{"),
                      ("d", '{"version": 0, "epoch": 9}'), ("e/deeper", '{"version": 1, "epoch": 9}')):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "provenance.json").write_text(text)
    assert [(run, document["epoch"]) for run, document in read_provenance(store)] == [("b", 7), ("a", 3)]
