"""An error in a run is reported at once, as one line and only once. Tracebacks are only shown with --debug."""

from __future__ import annotations

import errno
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.app import run_command


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"body": ["A text."] * 5}), "a.parquet")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "b.txt").write_text("A text.")
    return tmp_path


def run(capfd, recipe: str, *more: str) -> tuple[int, list[str]]:
    """Run a recipe quietly in this process. Returns (exit code, lines on stderr)."""
    with open("r.yaml", "w") as f:
        f.write("version: 1\n" + recipe)
    code = run_command(["run", "r.yaml", "--backend", "inline", "--quiet", *more])
    return code, capfd.readouterr().err.splitlines()


WRONG_COLUMN = "sources: {s: {read: parquet, path: a.parquet}}\ndatasets: {d: {from: s}}\n"
EMPTY = ("sources: {s: {read: text, path: empty.txt}}\ndatasets: {d: {from: s}}\n"
         "tokenizer: {train: {kind: bpe, vocab: 600, from: d, sample: 1KB}}\nshards: {w: {from: d, longest: 64}}\n")
TEXTS = "sources: {s: {read: text, path: b.txt}}\ndatasets: {d: {from: s}}\n"


@pytest.mark.parametrize(("recipe", "said"), [
    (WRONG_COLUMN, "its reader failed in every file: s: a.parquet (wrong_schema): a.parquet: no column"),
    (EMPTY, "failed: tokenizer.train.from: there is no document to train on; see that the sources hold text")])
def test_a_setting_that_does_not_fit_is_one_line_after_one_attempt(site, capfd, recipe, said):
    code, [line] = run(capfd, recipe)
    assert code == 1 and line.startswith("error: ") and said in line and "times" not in line


def test_people_who_watch_read_it_once_too(site, capfd):
    with open("r.yaml", "w") as f:
        f.write("version: 1\n" + WRONG_COLUMN)
    assert run_command(["run", "r.yaml", "--backend", "inline"]) == 1
    assert capfd.readouterr().err.count("no column 'text'") == 1


def test_a_source_that_gave_nothing_is_named_where_that_ends_the_run(site, caplog):
    with open("r.yaml", "w") as f:
        f.write("version: 1\n" + EMPTY)
    assert run_command(["run", "r.yaml", "--backend", "inline"]) == 1
    assert "source 's' gave no document" in caplog.text


def test_debug_shows_the_tracebacks_wherever_it_stands(site, capfd):
    for arguments in (["--debug", "run", "r.yaml"], ["run", "r.yaml", "--debug"]):
        run(capfd, EMPTY)
        assert run_command([*arguments, "--backend", "inline", "--quiet"]) == 1
        err = capfd.readouterr().err
        assert err.count("Traceback (most recent call last)") >= 2, "of the driver and of the worker"
        assert "pipeline/passes/fit_tokenizer.py" in err
        assert err.splitlines()[-1].startswith("error: ") and "no document to train on" in err.splitlines()[-1]


def test_the_store_keeps_the_traceback_for_status(site, capfd):
    run(capfd, EMPTY, "--name", "r")
    assert run_command(["status", "r"]) == 0
    out = capfd.readouterr().out
    assert "no document to train on" in out and "Traceback" not in out
    assert run_command(["status", "r", "--debug"]) == 0
    assert "pipeline/passes/fit_tokenizer.py" in capfd.readouterr().out


def test_an_error_nobody_expected_is_one_line_that_names_debug(site, capfd, monkeypatch):
    def fails(*_, **__):
        raise KeyError("slices")

    monkeypatch.setattr("pipeline.run.write_report", fails)
    code, [line] = run(capfd, TEXTS)
    assert (code, line) == (1, "error: KeyError: 'slices' (unexpected: the same command with --debug shows where it "
                               "comes from)")


@pytest.mark.parametrize("place", ["pipeline.store.disk.put_absent", "pipeline.store.disk.replace",
                                   "pipeline.store.disk.move", "pipeline.run.write_report",
                                   "pipeline.publication.publish", "tempfile.mkdtemp"])
def test_a_disk_that_is_full_is_one_line_wherever_it_is_met(site, capfd, monkeypatch, place):
    """In the log, in progress, in a part, in the report, in a publication, in scratch."""
    from pipeline.store.errors import cannot_write

    def full(*_, **__):
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/x")
        raise cannot_write("/full/x", error) if "disk." in place else error

    monkeypatch.setattr(place, full)
    code, [line] = run(capfd, TEXTS)
    assert code == 1 and line.startswith("error: ") and "free some space" in line and "Traceback" not in line
