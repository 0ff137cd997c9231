"""A takedown leaves nothing of a document in a store, and no later run brings it back."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest

from pipeline.service.labels import Label, Labels
from pipeline.store.copies import note_copy
from pipeline.store.dataset import iter_rows
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.shard_set import dataset_parts
from pipeline.store.tombstones import takedowns, unfinished
from tests.e2e.takedown_site import HOST, PLANTED, places, planted_ids, run, tokenmill, write_site
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.urls import documents, paths_of
from tokenizer.shards.verify import verify

WORDS = list(PLANTED.values())
#: target of a token that does not count (`trainer.model.loss.IGNORE`)
IGNORED = -100


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A site whose recipe was run."""
    folder = write_site(tmp_path_factory.mktemp("takedown"))
    run(folder)
    return folder


@pytest.fixture
def site(whole, tmp_path):
    """A copy of `whole` for one test."""
    shutil.copytree(whole, tmp_path / "site", copy_function=shutil.copy2)
    return tmp_path / "site"


def kinds(paths: set[str]) -> set[str]:
    return {path.split("/")[0] for path in paths}


def test_nothing_of_the_documents_is_left_in_any_file(site, capsys):
    store = Store(str(site / "store"))
    before = places(store, WORDS)
    assert {"datasets", "objects", "shards"} <= kinds(before["zorblak"])
    assert {"datasets", "objects", "shards"} <= kinds(before["vemphist"])
    assert {"dropped", "objects"} <= kinds(before["yulgrob"]) and {"dropped", "objects"} <= kinds(before["quixnar"])
    assert {"quarantine", "objects"} <= kinds(before["wexfrond"])
    assert any("report.html" in path for paths in before.values() for path in paths)
    ids = planted_ids(store)
    (site / "ids.txt").write_text("\n".join(ids[name] for name in ("kept", "long", "dropped", "quarantined")))
    assert tokenmill("takedown", "--ids", site / "ids.txt", "--reason", "request 17", "--store", site / "store") == 0
    assert "5 documents were removed, 1 of them as near-duplicates" in capsys.readouterr().out
    assert places(store, WORDS) == {word: set() for word in WORDS}
    [takedown] = takedowns(store)
    assert set(takedown.documents) == set(ids.values()) and takedown.twins == (ids["twin"],)
    run(site)
    assert places(store, WORDS) == {word: set() for word in WORDS}
    assert tokenmill("store", "verify", "--store", site / "store") == 0


def test_nothing_is_left_in_the_tokens_of_split_shards(tmp_path):
    """Their document tables lie in one file for all streams of a split."""
    site = write_site(tmp_path)
    recipe = (site / "recipe.yaml").read_text()
    (site / "recipe.yaml").write_text(recipe.replace("web: {from: all,", "web: {from: all, by: source,"))
    store = run(site)
    assert any(path.endswith(".tokens") for path in places(store, ["zorblak"])["zorblak"])
    ids = listing(site, "ids.txt", *(planted_ids(store)[name] for name in ("kept", "long")))
    (lost, *_) = [path for path in store.list("objects") if path.endswith("labels.json")]
    store.remove(lost)                       # what the store has lost is made anew by the next run, and stops nothing
    assert tokenmill("takedown", "--ids", ids, "--reason", "r", "--store", store.root, "--dry-run") == 0
    assert tokenmill("takedown", "--ids", ids, "--reason", "r", "--store", store.root) == 0
    words = ["zorblak", "vemphist", "quixnar"]
    assert places(store, words) == {word: set() for word in words}
    run(site)
    assert places(store, words) == {word: set() for word in words}


def listing(site, name: str, *lines: str):
    (site / name).write_text("\n".join(lines) + "\n")
    return site / name


def state(store: Store) -> dict[str, bytes]:
    return {path: store.read(path) for path in store.list("") if not path.startswith("log/")}


def rows(store: Store, folder: str) -> list[dict]:
    return list(iter_rows(store, folder))


def test_a_near_duplicate_comes_back_only_with_only(site, tmp_path):
    shutil.copytree(site, tmp_path / "other", copy_function=shutil.copy2)
    store = Store(str(site / "store"))
    kept = listing(tmp_path, "ids.txt", planted_ids(store)["kept"])
    assert tokenmill("takedown", "--ids", kept, "--reason", "r", "--only", "--store", site / "store") == 0
    assert places(store, ["zorblak"]) == {"zorblak": set()}
    assert kinds(places(store, ["quixnar"])["quixnar"]) >= {"dropped"}
    run(site)
    assert [row["url"] for row in rows(store, "datasets/all") if "quixnar" in row["text"]] == [f"{HOST}/twin"]
    assert tokenmill("takedown", "--ids", kept, "--reason", "r", "--store", tmp_path / "other/store") == 0
    run(tmp_path / "other")
    assert places(Store(str(tmp_path / "other/store")), ["zorblak", "quixnar"]) == {"zorblak": set(), "quixnar": set()}


@pytest.mark.parametrize(("option", "lines"), [("--urls", [f"{HOST}/kept", f"{HOST}/long", f"{HOST}/dropped"]),
                                               ("--domains", ["Gone.example.org"])])
def test_urls_and_domains_name_documents_and_stay_out_of_other_recipes(site, option, lines):
    """The other recipe has other names, so its documents have other ids. The quarantined document has no URL in the
    store, so only the new run, which reads it, can leave it out. The twin is recognised by its text."""
    store = Store(str(site / "store"))
    assert tokenmill("takedown", option, listing(site, "list.txt", *lines), "--reason", "r", "--store", store.root) == 0
    words = ["zorblak", "vemphist", "yulgrob", "quixnar"]
    assert places(store, words) == {word: set() for word in words}
    assert not [path for path in store.list("takedowns") if f"{HOST}/".encode() in store.read(path)]
    recipe = (site / "recipe.yaml").read_text().replace("  all:", "  again:").replace("from: all", "from: again")
    (site / "recipe.yaml").write_text(recipe.replace("web:", "site:").replace("mix: {web", "mix: {site").replace(
        "from: web", "from: site"))
    run(site)                                    # other names of source and dataset: other ids and keys
    assert places(store, words) == {word: set() for word in words}
    gone = [row["reason"] for row in rows(store, "quarantine/again")]
    assert gone.count("taken_down") == (4 if option == "--urls" else 5)
    report = json.loads(store.read("report.json"))
    assert "taken_down" in json.dumps(report["datasets"]["again"])


def test_damaged_reports_and_messages_are_removed_and_named(site, capsys, caplog):
    """They might quote a document in a form that is not recognised."""
    store = Store(str(site / "store"))
    [folder] = (site / "store/runs").iterdir()
    assert any("report." in path for path in places(store, ["zorblak"])["zorblak"])
    shutil.copytree(folder, folder.with_name("half"))                 # a report was killed before its last file
    (folder.with_name("half") / "report.json").unlink()
    damaged = [folder / "report.json", site / "store/report.json", folder / "progress.json"]
    for path in damaged:
        path.write_text('{"samples": "The zor\\u0062lak was here", ')
    ids = listing(site, "ids.txt", planted_ids(store)["kept"])
    assert tokenmill("takedown", "--ids", ids, "--reason", "r", "--store", store.root) == 0
    assert not any(path.exists() for path in damaged) and not list((site / "store").glob("runs/*/report.*"))
    assert places(store, ["zorblak", "zor\\u0062lak"]) == {"zorblak": set(), "zor\\u0062lak": set()}
    for path in damaged:
        [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith(f"{path} is damaged")]
        assert "run the recipe again" in line and "\n" not in line
    assert "Traceback" not in capsys.readouterr().err
    run(site)
    assert (folder / "report.html").exists() and places(store, ["zorblak"]) == {"zorblak": set()}


def test_a_dry_run_changes_nothing_and_says_what_would_go(site, capsys):
    store = Store(str(site / "store"))
    assert tokenmill("shards", "export", site / "store/shards/web/split=train", "--format", "olmo", "--out",
                     site / "web-olmo", "--quiet") == 0
    before = state(store)
    urls = listing(site, "urls.txt", f"{HOST}/kept", f"{HOST}/nowhere")
    assert tokenmill("takedown", "--urls", urls, "--dry-run", "--store", store.root) == 0
    out, err = capsys.readouterr()
    assert "2 documents would be removed, 1 of them as near-duplicates" in out and "shards/web/split=train" in out
    assert f"outside the store, and not changed: {site}/web-olmo (on " in out
    assert err.strip() == f"no document matches {HOST}/nowhere"
    assert state(store) == before


@pytest.mark.parametrize(("option", "content", "word"), [
    ("--ids", b"", "empty"), ("--ids", b"\xff\xfe", "UTF-8"), ("--ids", b"one two\n", "more than one"),
    ("--urls", b"example.org/page\n", "URL"), ("--domains", b"https://example.org\n", "domain"),
    ("--ids", b"0123\n", "match"), ("--domains", b"nowhere.example\n", "match")])
def test_a_list_that_cannot_be_meant_is_refused_in_one_line(site, option, content, word, capsys):
    store, path = Store(str(site / "store")), site / "list.txt"
    path.write_bytes(content)
    before = state(store)
    assert tokenmill("takedown", option, path, "--reason", "r", "--store", store.root) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and word in err
    assert state(store).keys() == before.keys()


def test_a_second_takedown_of_the_same_documents_is_refused(site, capsys):
    store = Store(str(site / "store"))
    urls = listing(site, "urls.txt", f"{HOST}/kept")
    arguments = ("takedown", "--urls", urls, "--reason", "r", "--store", store.root)
    assert tokenmill(*arguments) == 0
    assert tokenmill(*arguments) == 2
    assert tokenmill("takedown", "--store", store.root) == 2
    assert tokenmill("takedown", "--urls", urls, "--store", store.root) == 2


def test_only_tasks_with_such_documents_run_again(site):
    store = Store(str(site / "store"))
    before = {record.key for record in Log.read(store).records()}
    parts = set(store.list("datasets"))
    assert tokenmill("takedown", "--urls", listing(site, "urls.txt", f"{HOST}/long"), "--reason", "r", "--store",
                     store.root) == 0
    left = {record.key for record in Log.read(store).records()}
    gone = [record for record in takedowns(store)[0].holds["records"] if record["node"].startswith("all")]
    assert {record["key"] for record in gone} == {key for key in before - left if key in {r["key"] for r in gone}}
    assert len(gone) == 3                        # of twelve passes over parts: one before, between and after barriers
    assert len(parts - set(store.list("datasets"))) == 1
    run(site)
    assert left <= {record.key for record in Log.read(store).records()}


def test_documents_are_looked_up_from_shards_as_before(site, capsys):
    store = Store(str(site / "store"))
    folder = site / "store/shards/web/split=train"

    def looked_up() -> list[tuple[str, str | None]]:
        found = documents(ShardSet(folder), paths_of(dataset_parts(store)), store.parquet)
        return [pair for ids, urls in found for pair in zip(ids, urls, strict=True)]

    before, ids, gone = looked_up(), planted_ids(store), set()
    for name in ("kept", "long"):                # the second changes what the first has changed
        lines = [f"{HOST}/{name}", *(["https://stays.example.org/0/7"] if name == "long" else [])]
        assert tokenmill("takedown", "--urls", listing(site, "urls.txt", *lines), "--reason", "r", "--store",
                         store.root) == 0
        gone |= set(takedowns(store)[-1].documents)
        assert looked_up() == [(id, None if id in gone else url) for id, url in before]
    assert {ids["kept"], ids["long"]} < gone and len(gone) == 4
    assert tokenmill("store", "verify", "--store", store.root) == 0 and verify(folder) == []
    assert tokenmill("shards", "index", folder) == 0
    assert tokenmill("shards", "find", folder, "--url", f"{HOST}/kept") == 1
    assert tokenmill("shards", "find", folder, "--url", "https://stays.example.org/0/8") == 0
    capsys.readouterr()
    [run_folder] = (site / "store/runs").iterdir()
    assert tokenmill("shards", "explain", run_folder, "--sample", "5") == 0
    assert "https://stays.example.org/" in capsys.readouterr().out


def test_labels_lookup_indexes_and_materialised_rows_go(site):
    store = Store(str(site / "store"))
    [folder] = (site / "store/runs").iterdir()
    ids = planted_ids(store)
    labels = Labels(store, "all")
    for name in ("kept", "long"):
        labels.put(Label(ids[name], "good", "ann", "hash", folder.name))
    assert tokenmill("shards", "index", site / "store/shards/web/split=train") == 0
    assert tokenmill("materialize", folder.name, "--store", store.root, "--format", "bytes", "--out", site / "rows",
                     "--backend", "inline") == 0
    before = places(store, ["vemphist"])["vemphist"]
    assert any("/rows-" in path for path in before) and list(store.local.rglob("lookup-*.index"))
    assert tokenmill("takedown", "--ids", listing(site, "ids.txt", ids["long"]), "--reason", "r", "--store",
                     store.root) == 0
    assert places(store, ["vemphist"]) == {"vemphist": set()}
    assert not list(store.local.rglob("lookup-*.index"))
    assert [label.document for label in Labels(store, "all").all()] == [ids["kept"]]
    assert tokenmill("shards", "find", site / "store/shards/web/split=train", "--id", ids["long"]) == 0
    assert takedowns(store)[0].holds["exports"] == [f"runs/{folder.name}/rows-bytes"]


class Killed(BaseException):
    pass


def dying(call, left: list[int]):
    """Wrap a method `call` of a store that changes files: the call number left[0] raises Killed instead of changing
    anything. Calls for the log do not count, because other tests check what becomes of the lease of a dead process."""
    def method(self, *args, **kwargs):
        if not str(args[0]).startswith("log/"):
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
        return call(self, *args, **kwargs)
    return method


#: numbers of changes after which it is killed; those to shards are about the 30th
@pytest.mark.parametrize("changes", [2, 4, 28, 30, 32, *(pytest.param(n, marks=pytest.mark.slow) for n in (
    1, 3, 5, 6, 8, 14, 20, 26, 27, 29, 31, *range(33, 42), 50, 70))])
def test_a_takedown_that_is_killed_anywhere_is_completed_by_the_same_command(site, changes, monkeypatch, capsys):
    store = Store(str(site / "store"))
    ids = planted_ids(store)
    listed = listing(site, "ids.txt", *(ids[name] for name in ("kept", "long", "dropped", "quarantined")))
    arguments = ("takedown", "--ids", listed, "--reason", "r", "--store", store.root)
    note_copy(store, "tokens", "shards/web", "s3://team/web-ds")
    left = [changes]
    with monkeypatch.context() as patch:
        for name in ("write", "remove", "replace", "upload", "link", "put_absent"):
            patch.setattr(Store, name, dying(getattr(Store, name), left))
        with suppress(Killed):
            tokenmill(*arguments)
    if unfinished(store):
        assert tokenmill("run", site / "recipe.yaml", "--store", store.root, "--quiet", "--backend", "inline",
                         "--allow-custom-stages") == 2
        assert "takedown --complete" in capsys.readouterr().err
    tokenmill(*arguments)
    printed = capsys.readouterr()
    assert "not changed: s3://team/web-ds" in printed.out + printed.err
    assert not unfinished(store) and len(takedowns(store)) == 1
    assert places(store, WORDS) == {word: set() for word in WORDS}
    assert tokenmill("store", "verify", "--store", store.root) == 0
    for split in ("train", "val"):
        assert verify(site / f"store/shards/web/split={split}") == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "packed", "split"])
def test_a_training_continues_with_the_same_order_after_a_takedown(site, tmp_path, form):
    """Of split shards, each of the two streams has one of the documents."""
    pytest.importorskip("torch")
    from trainer.__main__ import main as trainer
    from trainer.checkpoint.checkpoints import CheckpointError
    from trainer.data.batches import Data
    from trainer.loop.run import open_run
    from trainer.loop.train import train
    from trainer.parallel.world import world

    if form != "plain":
        site = write_site(tmp_path / form, packing=form == "packed")
    if form == "split":
        recipe = (site / "recipe.yaml").read_text()
        for old, new in (("web: {read: jsonl, path: texts/*.jsonl}", "a: {read: jsonl, path: 'texts/[02].jsonl'}\n  "
                          "b: {read: jsonl, path: 'texts/[13].jsonl'}"), ("from: web\n", "from: [a, b]\n"),
                         ("web: {from: all,", "web: {from: all, by: source,")):
            assert old in recipe
            recipe = recipe.replace(old, new)
        (site / "recipe.yaml").write_text(recipe)
    if form != "plain":
        run(site)
    store = Store(str(site / "store"))
    [folder] = (site / "store/runs").iterdir()

    def go(stop_at: int | None) -> None:
        with world("cpu") as here:
            train(open_run(str(folder), None, None, []), here, stop_at, lambda text: None)

    go(40)
    before = Curriculum.load(folder / "curriculum.json")
    samples = [batch(Data(before, store.local), n) for n in range(before.samples)]
    urls = listing(tmp_path, "urls.txt", f"{HOST}/kept", f"{HOST}/long")
    assert tokenmill("takedown", "--urls", urls, "--reason", "r", "--store", store.root) == 0
    after = Curriculum.load(folder / "curriculum.json")
    assert (after.order, after.samples) == (before.order, before.samples)
    assert len(after.streams) == (2 if form == "split" else 1)
    assert [stream.replaces for stream in after.streams] == [(stream.sha256,) for stream in before.streams]
    data, eos, changed = Data(after, store.local), before.tokenizer.eos, set()
    for number, (tokens, targets) in enumerate(samples):
        new_tokens, new_targets = batch(data, number)
        other = new_tokens != tokens
        assert (new_tokens[other] == eos).all() and (new_targets[new_targets != targets] == IGNORED).all()
        changed |= {number} if other.any() else set()
    seen = takedowns(store)[0].seen
    assert changed <= set(range(before.samples)) and len(changed) == sum(each["samples"] for each in seen)
    assert len(seen) == len(after.streams) and all(each["samples"] for each in seen)
    assert min(changed) == min(each["first_sample"] for each in seen)
    assert all(each["checkpoints"] == ["step_00000040"] or each["first_sample"] >= 160 for each in seen)
    text = (folder / "curriculum.json").read_text()
    (folder / "curriculum.json").write_text(replace(after, streams=tuple(
        replace(stream, replaces=()) for stream in after.streams)).dumps())
    with pytest.raises(CheckpointError, match=f"stream {after.streams[0].name}"):
        go(None)
    (folder / "curriculum.json").write_text(text)
    go(60)
    go(None)
    assert json.loads((folder / "train/summary.json").read_text())["steps"] == before.steps
    assert trainer(["verify", str(folder)]) == 0


def batch(data, number: int):
    step = data.step(number, 1, 0, 1)
    return step.tokens[0], step.targets[0]
