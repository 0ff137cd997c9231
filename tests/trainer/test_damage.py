"""A damaged checkpoint is reported and not loaded. All ranks use the checkpoint before it instead."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.processes import launch
from tests.trainer.synthetic import losses, make_run, quiet
from tests.trainer.test_checkpoint import committed, opened
from trainer.__main__ import main
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.damage import choose, damage, set_aside, writer
from trainer.checkpoint.reader import SafeMetadataReader
from trainer.loop.train import train
from trainer.observe.metrics import read

MOMENTS = "optimizer.embed.weight.exp_avg_sq"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("store"), documents=200)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The output folder of a training with checkpoints of steps 6, 12 and 18."""
    from trainer.parallel.world import world

    out = tmp_path_factory.mktemp("trained")
    with world("cpu") as here:
        train(opened(folder, out, "checkpoint.keep=9"), here, 18, quiet)
    return out


@pytest.fixture(scope="module")
def whole(folder, trained, tmp_path_factory):
    """The losses of the uninterrupted training."""
    from trainer.parallel.world import world

    out = tmp_path_factory.mktemp("whole") / "out"
    shutil.copytree(trained, out)
    with world("cpu") as here:
        train(opened(folder, out), here, 24, quiet)
    return losses(out)


@pytest.fixture
def out(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "out")
    return tmp_path / "out"


def zero_moments(found: ckpt.Checkpoint) -> Path:
    """Overwrite 12 kB of Adam's second moments with zeros. The size of the file does not change. Returns the file."""
    stored = {
        index.fqn: where
        for index, where in SafeMetadataReader(found.folder).read_metadata().storage_data.items()
    }
    where = stored[MOMENTS]
    path = found.folder / where.relative_path
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(data[where.offset:where.offset + where.length])) as archive:
        numbers = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
    head = where.offset + numbers.header_offset                 # of fixed size, with the lengths of what follows it
    start = head + 30 + sum(struct.unpack("<HH", data[head + 26:head + 30]))
    assert numbers.file_size > 12_000 and any(data[start:start + 12_000])
    data[start:start + 12_000] = bytes(12_000)
    path.write_bytes(data)
    return path


def test_zeroed_moments_are_named_and_the_checkpoint_before_is_used(folder, whole, out, alone):
    damaged, lines = zero_moments(ckpt.latest(out / "checkpoints")), []
    train(opened(folder, out), alone, 24, lines.append)
    assert [line for line in lines if "is damaged" in line] == [
        f"checkpoint step_00000018 is damaged and not used: {damaged}: sha256 is not what COMPLETE says: damaged or "
        f"replaced"]
    assert [x["step"] for x in read(out / "metrics.jsonl") if x["event"] == "resume"] == [12]
    assert losses(out) == pytest.approx(whole, abs=1e-6)
    sound, wrong = ckpt.survey(out / "checkpoints")             # the steps have been written again
    assert sound[-1].step == 24 and not wrong and not damaged.exists()
    assert all(damage(found) == [] for found in sound)


def flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["COMPLETE", "meta.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
def test_whatever_is_damaged_the_one_before_is_used(trained, tmp_path, alone, name, harm: Callable[[Path], None]):
    shutil.copytree(trained / "checkpoints", tmp_path / "c")
    last = ckpt.latest(tmp_path / "c")
    path = last.folder.parent / name if name == "COMPLETE" else last.folder / name
    harm(path)
    lines: list[str] = []
    found = choose(tmp_path / "c", alone, lines.append, lambda sound: sound[-1])
    assert found.step == 12
    if (name, harm) != ("COMPLETE", Path.unlink):               # without one it does not exist
        assert len(lines) == 1 and "step_00000018 is damaged" in lines[0] and (name in lines[0] or name == "COMPLETE")
        assert not (last.folder.parent / "COMPLETE").exists() and (last.folder.parent / "DAMAGED").is_file()
    assert ckpt.latest(tmp_path / "c").step == 12


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 7)),
                                  *(pytest.param(n, marks=pytest.mark.chaos) for n in range(7, 200))])
def test_wrecked_checkpoints_change_no_loss(folder, whole, out, alone, seed):
    """Random files of all checkpoints are flipped, cut or deleted: the newest sound one is used, or that is said."""
    rng = random.Random(seed)
    files = sorted(path for path in (out / "checkpoints").rglob("*") if path.is_file())
    wrecked = rng.sample(files, rng.randint(1, 6))
    for path in wrecked:
        rng.choice((lambda path: flip(path, rng.random()), cut, Path.unlink))(path)
    marked = {int(path.parent.name[5:]) for path in (out / "checkpoints").glob("*/COMPLETE")}
    sound = marked - {int(path.relative_to(out / "checkpoints").parts[0][5:]) for path in wrecked}
    if marked and not sound:
        with pytest.raises(ckpt.CheckpointError, match="no sound checkpoint before it"):
            train(opened(folder, out), alone, 24, quiet)
        return
    train(opened(folder, out), alone, 24, quiet)
    resumed = [x["step"] for x in read(out / "metrics.jsonl") if x["event"] == "resume"]
    assert resumed == ([max(sound)] if sound else [])
    assert losses(out) == pytest.approx(whole, abs=1e-6)


def test_without_a_sound_one_nothing_is_begun_anew(folder, out, alone):
    """Twice: what it says must not depend on what an earlier start has set aside."""
    for step, name in ((18, "meta.json"), (12, ".metadata"), (6, "__0_0.distcp")):
        flip(next((out / "checkpoints" / f"step_{step:08d}").glob(f"*/{name}")))
    for _ in range(2):
        with pytest.raises(ckpt.CheckpointError, match=r"no sound checkpoint before it: restore .* delete .*"):
            train(opened(folder, out), alone, 24, quiet)
    assert len(list((out / "checkpoints").glob("*/COMPLETE"))) == 3


def test_an_older_damaged_one_ends_no_training(folder, whole, out, alone):
    """It is neither used nor deleted: somebody may restore it."""
    cut(next((out / "checkpoints" / "step_00000006").glob("*/*.distcp")))
    train(opened(folder, out, "checkpoint.keep=1"), alone, 24, quiet)
    assert losses(out) == pytest.approx(whole, abs=1e-6)
    sound, [wrong] = ckpt.survey(out / "checkpoints")
    assert [c.step for c in sound] == [24] and wrong.step == 6 and "distcp" in wrong.why


def test_a_rewind_passes_a_damaged_one_over(folder, out, alone, monkeypatch):
    """The bytes are read before the ledger says where it went back to."""
    from trainer.checkpoint.ledger import Ledger
    from trainer.loop.stability import Rewind, rewind_to_checkpoint

    flip(next((out / "checkpoints" / "step_00000012").glob("*/*.distcp")))
    ledger = Ledger(out, writes=True)
    found = rewind_to_checkpoint(Rewind(16, 17, 14, 18, "why", 5), ledger, out / "checkpoints", alone)
    assert found.step == 6
    assert [(line["back"], line["checkpoint"]) for line in ledger.lines] == [(6, "step_00000006")]
    assert ckpt.latest(out / "checkpoints").step == 6
    flip(next((out / "checkpoints" / "step_00000006").glob("*/*.distcp")))
    with pytest.raises(ckpt.CheckpointError, match="no sound checkpoint"):
        rewind_to_checkpoint(Rewind(16, 17, 14, 18, "why", 5), ledger, out / "checkpoints", alone)
    assert len(ledger.lines) == 1


def test_a_ledger_that_was_changed_is_refused(folder, tmp_path, alone):
    """A digit in it: other steps would be skipped."""
    skipping = opened(folder, tmp_path, "skip=[[14,16]]")
    train(skipping, alone, 8, quiet)
    path = tmp_path / "ledger.jsonl"
    text = path.read_text()
    path.write_text(text.replace("[[14, 16]]", "[[14, 17]]"))
    with pytest.raises(ckpt.CheckpointError, match=r"ledger.jsonl: its first 1 lines are not those .* restore"):
        train(skipping, alone, 10, quiet)
    path.write_text(text)
    train(skipping, alone, 10, quiet)


def test_verify_reads_a_whole_checkpoint(folder, out, capsys):
    def said(*arguments: str) -> tuple[int, str]:
        status = main(["verify", *arguments])
        both = capsys.readouterr()
        return status, both.out + both.err

    here, steps = ["--out", str(out)], out / "checkpoints"
    path = zero_moments(ckpt.latest(steps))
    (path.parent / ".metadata").unlink()
    for arguments in ([str(folder), *here, "--checkpoint"], [str(folder), *here, "--checkpoint", "18"],
                      ["--checkpoint", str(steps / "step_00000018")], ["--checkpoint", str(path.parent)],
                      ["--checkpoint", str(out)]):
        status, text = said(*arguments)
        assert status == 1 and "4 files" not in text and "2 of them damaged" in text, arguments
        assert f"DAMAGED  {path}: sha256 is not" in text and f"DAMAGED  {path.parent / '.metadata'}: missing" in text
    status, text = said(str(folder), *here, "--checkpoint", "12")
    assert status == 0 and "3 files" in text and "every byte is what COMPLETE says" in text
    assert said(str(folder), *here, "--checkpoint", "13")[0] == 2
    assert said("--checkpoint", "12")[0] == 2 and said()[0] == 2
    assert said("--checkpoint", str(out.parent / "nothing"))[0] == 2


def test_a_damaged_checkpoint_is_not_exported(folder, out, tmp_path, capsys):
    pytest.importorskip("safetensors")
    zero_moments(ckpt.latest(out / "checkpoints"))
    arguments = ["export", str(folder), "--trained", str(out), "--out", str(tmp_path / "hf")]
    assert main(arguments) == 1
    assert "distcp: sha256 is not what COMPLETE says" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_files_are_shared_out_among_ranks():
    assert [writer(name) for name in ("__0_0.distcp", "__13_1.distcp", ".metadata", "meta.json")] == [0, 13, 0, 0]


def test_all_ranks_use_the_same_one(folder, tmp_path):
    """What only the second rank reads differently, neither of them loads."""
    launch("tests.trainer.damage_ranks", 2, str(folder), str(tmp_path))
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank.{rank}.json").read_text())
        assert seen["used"] == 6
        assert len(seen["damage"]) == 1 and "__1_0.distcp: sha256 is not" in seen["damage"][0]
        assert seen["read"] == [[".metadata", "__0_0.distcp", "meta.json"], ["__1_0.distcp"]][rank]


def test_storage_that_fails_for_one_rank_ends_all(tmp_path):
    """Each in one line that names what could not be read, none left waiting in a collective."""
    folder = tmp_path / "checkpoints"
    attempt = folder / "step_00000006" / "attempt"
    attempt.mkdir(parents=True)
    (attempt / "meta.json").write_text(json.dumps({"step": 6, "tokens": 6}))
    (attempt / "__1_0.distcp").write_bytes(b"tensors")
    files = sorted(attempt.iterdir())
    ckpt.put_absent(attempt.parent / "COMPLETE", json.dumps({
        "attempt": "attempt", "files": {f.name: f.stat().st_size for f in files},
        "sha256": {f.name: ckpt.sha256(f) for f in files}}).encode())
    launch("tests.trainer.storage_ranks", 2, str(folder), str(tmp_path))
    first, second = (json.loads((tmp_path / f"rank.{r}.json").read_text()) for r in range(2))

    def stale(path: Path) -> str:
        return (f"CheckpointError: {path}: cannot be read (Stale file handle); the checkpoint may be sound: see that "
                f"every rank reaches its storage, then give the same command again")

    assert second == [stale(attempt / "__1_0.distcp"), stale(attempt.parent / "COMPLETE"),
                      f"CheckpointError: {folder}: no checkpoint to go on from; the first rank says why"]
    assert first == [second[0], f"CheckpointError: {attempt.parent}: another rank cannot read it; see that all ranks "
                                "share the folder, then give the same command again", second[1]]
    sound, damaged = ckpt.survey(folder)
    assert [c.step for c in sound] == [6] and damaged == [], "nothing is set aside for it"


def test_a_set_aside_marker_goes_with_its_step(tmp_path):
    for step in (1, 2):
        committed(tmp_path, step)
    (tmp_path / "step_00000001" / "COMPLETE").rename(tmp_path / "step_00000001" / "DAMAGED")
    ckpt.retain(tmp_path, ckpt.CheckpointConfig(keep=1))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"]


def test_a_damaged_checkpoint_that_is_deleted_meanwhile_ends_nothing(tmp_path, monkeypatch):
    committed(tmp_path, 1)
    replace = os.replace

    def deleted(source: Path, target: Path) -> None:
        source.unlink()
        replace(source, target)

    monkeypatch.setattr(os, "replace", deleted)
    set_aside(tmp_path, [1])
    assert not (tmp_path / "step_00000001" / "COMPLETE").exists()
