"""metrics.jsonl has all metrics; TensorBoard, W&B and trainer.prom show the same numbers, and none of them can end a
training."""

from __future__ import annotations

import errno
import itertools
import json
import math
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.synthetic import make_run
from tokenizer.shards.reader import ShardSet
from trainer.__main__ import main
from trainer.base import files
from trainer.base.config import ConfigError
from trainer.data.batches import Data
from trainer.loop.evaluate import Heldout, text_bytes
from trainer.loop.meters import Meters
from trainer.loop.metrics_buffer import MetricsBuffer
from trainer.loop.run import open_run
from trainer.loop.stability import StepRecord
from trainer.loop.train import train
from trainer.model.loss import IGNORE
from trainer.observe.goodput import CAUSES, Goodput
from trainer.observe.metrics import Metrics, MetricsConfig, WandbConfig, read, scan, standing
from trainer.observe.noise import NoiseScale
from trainer.observe.prometheus import METRICS, PREFIX, render
from trainer.parallel.world import world

STEPS, EVERY = 24, 4
#: seconds that no process of `done` runs
DOWN = 7.0


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A training of two phases with different sequence lengths, stopped in the middle and resumed DOWN seconds later:
    (run, printed lines)."""
    folder = make_run(tmp_path_factory.mktemp("store"), documents=300, total=STEPS * 256, phases=[
        {"name": "short", "until": "50%", "sequence": 32, "batch": 256, "mix": {"web": 70, "code": 30}},
        {"name": "long", "until": "100%", "sequence": 64, "batch": 256}],
        train={"log_every": EVERY, "evaluate": {"every": 8}, "checkpoint": {"every": 7}, "micro_batch": 128})
    said: list[str] = []
    gone = [0.0]
    ticks = itertools.count()
    clock = types.SimpleNamespace(time=lambda: 1e9 + next(ticks) / 1000 + gone[0],
                                  perf_counter=lambda: next(ticks) / 1000)
    with pytest.MonkeyPatch.context() as patch, world("cpu") as here:
        for module in ("goodput", "metrics"):                        # a look at the clock takes a millisecond
            patch.setattr(f"trainer.observe.{module}.time", clock)
        train(open_run(str(folder), None, None, []), here, 10, said.append)
        gone[0] = DOWN
        train(open_run(str(folder), None, None, []), here, None, said.append)
    return open_run(str(folder), None, None, []), said


def steps(run) -> list[dict]:
    return [line for line in read(run.out / "metrics.jsonl") if line["event"] == "step"]


@pytest.mark.parametrize("number", [7, 97])         # that of the first file: between two rewinds it gets longer
def test_tensorboard_has_no_step_twice(tmp_path, monkeypatch, number):
    """What a kill or a rewind made void is not drawn: a curve that goes back on itself is read wrongly. Files are read
    in the order of their names, of which the second counts first, and then a number that no zeros precede."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    second = 1_000_000_000
    numbers = itertools.count(number)
    monkeypatch.setattr(event_file_writer, "time", types.SimpleNamespace(time=lambda: second))
    monkeypatch.setattr(event_file_writer, "_global_uid", types.SimpleNamespace(get=lambda: next(numbers)))

    def drawn() -> list[tuple[int, float]]:
        board = EventAccumulator(str(tmp_path / "tensorboard"))
        board.Reload()
        return [(e.step, e.value) for e in board.Scalars("train/loss")]

    for first, turns in ((0, ("start",)), (3, ("resume",)), (5, ("rewind", "rewind")), (0, ("start",))):
        metrics = Metrics(tmp_path, True)
        for again, turn in enumerate(turns):
            metrics.write(turn, first)
            for step in range(first + 1, first + 5):
                metrics.write("step", step, loss=float(10 * first + step + again))
        metrics.close()
        second += 1                                  # no process begins in the second in which another ended
        assert [step for step, _ in drawn()] == list(range(1, first + 5))
        assert drawn()[-4:] == [(step, 10 * first + step + again) for step in range(first + 1, first + 5)]


def test_printed_steps_have_what_is_measured_at_intervals(done):
    run, _ = done
    lines = steps(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line.keys() >= {"loss", "z", "lr", "grad_norm", "tokens", "targets", "streams", "tokens_per_s", "mfu"}
        assert ("goodput" in line) == ("updates" in line) == ("noise" in line) == (line["step"] % EVERY == 0)
    for line in (line for line in lines if line["step"] % EVERY == 0):
        assert line["host_memory_bytes"] > 10_000_000
        assert 0 <= line["data_wait_ms"]["p50"] <= line["data_wait_ms"]["p99"]
        assert 0 <= line["data_wait_ms"]["share"] <= 1
        assert line["flops_per_s"] > 0 and line["mfu"] is None and line["skips"] == 0
        groups = line["updates"]
        assert line["parameter_norm"] ** 2 == pytest.approx(sum(g["parameter_norm"] ** 2 for g in groups.values()))
        for group in groups.values():
            assert group["update_norm"] == pytest.approx(group["ratio"] * group["parameter_norm"])
            assert 1e-6 < group["ratio"] < 1
        assert line["noise"].keys() == {"trace", "signal", "critical_batch_tokens"}


def test_the_ledger_of_the_wall_time_survives_a_restart(done):
    run, said = done
    lines = read(run.out / "metrics.jsonl")
    start = next(line for line in lines if line["event"] == "start")
    last = [line for line in lines if "goodput" in line][-1]
    spent, before = (sum(line["goodput"][cause] for cause in CAUSES) for line in (last, start))
    # a record is made before its line is written, a few looks at the clock earlier
    assert before < spent <= last["time"] - start["time"] + before + 0.1
    assert last["goodput"]["restart"] >= DOWN
    assert last["goodput"]["warmup"] > 0 and last["goodput"]["evaluation"] > 0 and last["goodput"]["checkpoint"] > 0
    summary = json.loads((run.out / "summary.json").read_text())["wall_time"]
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_s"], abs=0.01)
    assert summary["share"] == pytest.approx(summary["seconds"]["training"] / summary["wall_s"], abs=0.01)
    assert summary["wall_mfu"] is None
    assert sum("of wall time: " in text for text in said) == 2                  # at the stop, and at the end
    assert any(text.startswith("mfu unknown: no peak is known") for text in said)


def test_scripts_get_the_summary_as_json(done, capsys):
    run, _ = done                                                    # it is at its end: nothing is trained
    assert main(["run", str(run.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run.out / "summary.json").read_text())
    assert main(["run", str(run.folder), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_phases_of_another_length_are_evaluated_at_theirs_too(done):
    run, said = done
    evals = {line["step"]: line for line in read(run.out / "metrics.jsonl") if line["event"] == "eval"}
    assert sorted(evals) == [0, 8, 10, 16, 24]
    for step, line in evals.items():
        assert ("lengths" in line) == (step > 12)
    there = evals[24]["lengths"]["64"]
    # all of the held-out data in both: one target a window fewer or more
    assert there["targets"] == evals[24]["targets"]
    assert there["loss"] != evals[24]["loss"]
    assert there["loss"] == pytest.approx(evals[24]["loss"], abs=0.3)
    assert any(text.strip().startswith("windows of 64: ") for text in said)


def test_bits_per_byte_are_of_the_documents_evaluated(done):
    run, _ = done
    data = Data(run.curriculum, run.store)
    whole, few = Heldout(data, 32, 10_000), Heldout(data, 32, 3)
    for s, shards in enumerate(data.heldout):
        begin, end, size = shards.spans(0, shards.tokens)
        spans = shards.documents(0, shards.tokens)
        assert [(d.start, d.stop, d.n_bytes) for d in spans] == list(zip(begin.tolist(), end.tolist(), size.tolist()))
        some = shards.documents(40, 95)
        assert [(d.start, d.stop, d.n_bytes) for d in some] == [tuple(map(int, d)) for d in zip(*shards.spans(40, 95))]
        # 3 bytes a token (tests.trainer.synthetic), so as many times 3 as targets count
        for heldout in (whole, few):
            own = heldout.batch.targets[heldout.batch.stream == s]
            assert heldout.bytes[s] == pytest.approx(3 * int((own != IGNORE).sum()))
    web = data.streams.index("web")
    line = [line for line in read(run.out / "metrics.jsonl") if line["event"] == "eval"][-1]["streams"]["web"]
    assert line["bits_per_byte"] == pytest.approx(line["loss"] * line["targets"] / math.log(2) / whole.bytes[web])


def test_bytes_of_a_cut_document_are_shared_out(tmp_path):
    class Shards(ShardSet):
        def __init__(self):
            pass

        def spans(self, start, stop):
            return np.array([0, 10]), np.array([10, 30]), np.array([100, 60])

    assert text_bytes(Shards(), 0, 30) == pytest.approx(9 / 10 * 100 + 19 / 20 * 60)
    assert text_bytes(Shards(), 4, 15) == pytest.approx(5 / 10 * 100 + 4 / 20 * 60)


# -- trainer.prom ------------------------------------------------------------------------------------------------------
SAMPLE = re.compile(r'^([a-z_][a-z0-9_]*)\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (\S+)$')


def parsed(text: str) -> dict[str, tuple[str, list[tuple[dict, float]]]]:
    """Parse the text of a Prometheus file strictly: HELP, TYPE, then samples, and each metric only once. Returns
    {metric: (type, samples)}."""
    found: dict[str, tuple[str, list]] = {}
    lines = iter(text.splitlines())
    assert text.endswith("\n")
    name = ""
    for line in lines:
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in found and len(line.split(" ")) > 3
            kind = next(lines)
            assert re.fullmatch(rf"# TYPE {name} (gauge|counter)", kind)
            found[name] = (kind.rsplit(" ", 1)[1], [])
        else:
            match = SAMPLE.match(line)
            assert match and match[1] == name, line
            labels = dict(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match[2]))
            found[name][1].append((labels, float(match[3])))
    assert all(samples for _, samples in found.values())
    return found


def test_the_text_file_holds_the_last_numbers(done):
    run, _ = done
    found = parsed((run.out / "trainer.prom").read_text())
    last = steps(run)[-1]
    for name, value in (("step", STEPS), ("loss_nats", last["loss"]), ("tokens_total", last["tokens"]),
                        ("gradient_norm", last["grad_norm"]), ("learning_rate", last["lr"]),
                        ("checkpoint_step", STEPS), ("skipped_steps_total", 0)):
        assert found[PREFIX + name][1] == [({"run": "toy"}, pytest.approx(value))], name
    streams = {labels["stream"]: v for labels, v in found[PREFIX + "stream_loss_nats"][1]}
    assert streams == pytest.approx(last["streams"])
    seconds = {labels["cause"]: v for labels, v in found[PREFIX + "wall_seconds_total"][1]}
    assert set(seconds) == set(CAUSES)
    assert {labels["rule"] for labels, _ in found[PREFIX + "alert"][1]} == {
        "throughput", "evaluation", "tasks", "spikes", "data_wait", "checkpoint"}
    assert PREFIX + "mfu_ratio" not in found                                    # unknown is not 0
    assert [p.name for p in run.out.iterdir() if "trainer.prom" in p.name] == ["trainer.prom"]


def test_prometheus_itself_reads_it(done):
    parser = pytest.importorskip("prometheus_client.parser")
    run, _ = done
    text = (run.out / "trainer.prom").read_text()
    families = list(parser.text_string_to_metric_families(text))
    mine = parsed(text)
    assert {s.name for f in families for s in f.samples} == set(mine)
    assert {f.type for f in families} == {"gauge", "counter"}


def test_names_carry_units_and_labels_are_escaped():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.help.endswith(".") and "\n" not in metric.help
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
    odd = 'a"b\\c\nd'
    found = parsed(render(odd, {"streams": {odd: 1.5, "none": None, "nan": math.nan}, "loss": math.inf, "step": 3}))
    escaped = 'a\\"b\\\\c\\nd'
    assert found == {PREFIX + "step": ("gauge", [({"run": escaped}, 3.0)]),
                     PREFIX + "stream_loss_nats": ("gauge", [({"run": escaped, "stream": escaped}, 1.5)])}


def test_a_number_not_measured_keeps_its_last_value(tmp_path):
    metrics = Metrics(tmp_path, True, name="r")
    metrics.export(loss=2.0, step=1)
    metrics.export(loss=None, step=2)
    metrics.close()
    found = parsed((tmp_path / "trainer.prom").read_text())
    assert found[PREFIX + "loss_nats"][1][0][1] == 2.0 and found[PREFIX + "step"][1][0][1] == 2


def test_a_step_that_was_left_out_says_nothing_about_the_noise(done, monkeypatch):
    """Its gradient is out of all proportion: in the running mean it would outweigh every other."""
    seen = []

    class Told(Exception):
        pass

    def interval(line):
        seen.append(line.get("skipped"))
        raise Told

    meters = types.SimpleNamespace(due=lambda _: True, interval=lambda _, line: interval(line))
    fake = types.SimpleNamespace(meters=meters, say=lambda _: None, steps=9)
    for bad in (True, False):
        with pytest.raises(Told):
            MetricsBuffer.write(fake, StepRecord(3, 9.0, 99.0, bad, 2.0, 3.0, 4.0), {"loss": 9.0})
    assert seen == [True, None]
    measured = []
    monkeypatch.setattr(NoiseScale, "measure", lambda *_: measured.append(1))
    run, said = done
    with world("cpu") as here:
        metrics = Metrics(run.out, False)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for group in optimizer.param_groups:
            group["name"] = "all"
        meters = Meters(run, metrics, here, Goodput(), model, optimizer, 0, said.append)
        meters.moved = torch.zeros(1, 3)
        for line in ({"skipped": True}, {"grad_norm": 1.0, "targets": 5}):
            meters.waits = [0.1]
            meters.interval(4, line)
    assert measured == [1]


# -- reading -----------------------------------------------------------------------------------------------------------
def test_what_a_rewind_made_void_does_not_count(tmp_path):
    metrics = Metrics(tmp_path, True)
    metrics.write("start", 0)
    for step in range(1, 6):
        metrics.write("step", step, loss=1.0)
    metrics.write("rewind", 2)
    metrics.write("step", 3, loss=2.0)
    metrics.close()
    path = tmp_path / "metrics.jsonl"
    assert [(line["event"], line["step"]) for line in read(path)] == [
        ("start", 0), ("step", 1), ("step", 2), ("rewind", 2), ("step", 3)]
    some = scan(path, lambda event, step, text: event == "rewind" or (step == 4 and '"loss": 1.0' in text))
    assert [(line["event"], line["step"]) for line in some] == [
        ("step", 4), ("rewind", 2), ("step", 3)]                                        # and the last
    assert standing([]) == [] == list(scan(tmp_path / "none"))


def test_a_letter_a_kill_tore_hides_no_other_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"v": 1, "event": "start", "step": 0}\n{"v": 1, "event": "rewind", "why": "\xe2\x80\n[]\n{}\n'
                     b'{"v": 1, "event": "step", "step": 1}\n\0\0\0')
    assert [line["event"] for line in read(path)] == ["start", "step"]
    Metrics(tmp_path, True).close()
    assert path.read_bytes().endswith(b"\0\n")


def test_a_full_disk_leaves_what_was_there_and_says_what_to_do(tmp_path, monkeypatch, capsys):
    def full(self, text, **_):
        self.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    files.replace(tmp_path / "a", "old")
    with monkeypatch.context() as m:
        m.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            files.replace(tmp_path / "a", "new text")
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"
    run = make_run(tmp_path / "store", documents=100)
    monkeypatch.setattr(Metrics, "flush", lambda self: full(tmp_path / "b", "line"))
    assert main(["run", str(run), "--device", "cpu", "--out", str(tmp_path / "out"), "--quiet"]) == 1
    said = capsys.readouterr().err
    assert f"error: No space left on device; make room where checkpoints and metrics go ({tmp_path / 'out'})" in said


def test_an_edit_on_a_full_disk_leaves_the_run_as_it_was(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "store", documents=400)
    (tmp_path / "phases.yaml").write_text("- {name: other, until: 100%, mix: {web: 1}}")
    before = {path: path.read_bytes() for path in run.iterdir()}

    def full(_number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main(["edit", str(run), "--at", "20", "--phases", str(tmp_path / "phases.yaml")]) == 1
    assert "make room" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.iterdir()} == before


# -- W&B ---------------------------------------------------------------------------------------------------------------
class FakeRun:
    def __init__(self, fails_at: int | None = None) -> None:
        self.logged, self.finished, self.fails_at = [], False, fails_at

    def define_metric(self, *_args, **_more):
        pass

    def log(self, values):
        if len(self.logged) == self.fails_at:
            raise ConnectionError("https://user:secret@host")
        self.logged.append(values)

    def finish(self):
        self.finished = True


def fake_wandb(monkeypatch, run: FakeRun, netrc) -> list[dict]:
    calls: list[dict] = []

    def init(**options):
        calls.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Settings=lambda **options: options))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(netrc))
    return calls


def wandb_metrics(folder, said, **more) -> Metrics:
    config = MetricsConfig(WandbConfig("mills", **more))
    return Metrics(folder, True, config, "run-1", {"seed": 0}, said.append)


def test_wandb_is_a_view_with_one_run_over_restarts(tmp_path, monkeypatch):
    said: list[str] = []
    run = FakeRun()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789abcdef\n")
    calls = fake_wandb(monkeypatch, run, tmp_path / "netrc")
    for step in (1, 2):
        metrics = wandb_metrics(tmp_path, said, entity="us")
        metrics.write("step", step, loss=2.0, streams={"web": 1.0}, phase="a", mfu=None)
        metrics.write("eval", step, loss=3.0)
        metrics.write("checkpoint", step, seconds=1.0)
        metrics.close()
    assert run.logged[:2] == [{"train/loss": 2.0, "train/streams/web": 1.0, "step": 1},
                              {"heldout/loss": 3.0, "step": 1}]
    assert len(run.logged) == 4 and run.finished
    assert calls[0]["mode"] == "online" and calls[0]["project"] == "mills" and calls[0]["entity"] == "us"
    assert calls[0]["name"] == "run-1" and calls[0]["config"] == {"seed": 0}
    assert calls[0]["id"] == calls[1]["id"] and calls[0]["resume"] == "allow"
    everything = "".join(said) + (tmp_path / "metrics.jsonl").read_text() + str(calls)
    assert "0123456789abcdef" not in everything


def test_wandb_without_a_key_is_offline_and_never_asks(tmp_path, monkeypatch):
    said: list[str] = []
    calls = fake_wandb(monkeypatch, FakeRun(), tmp_path / "none")
    wandb_metrics(tmp_path, said).close()
    assert calls[0]["mode"] == "offline" and any("wandb sync" in text for text in said)
    monkeypatch.setenv("WANDB_API_KEY", "0")
    wandb_metrics(tmp_path, said).close()
    assert calls.pop()["mode"] == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb_metrics(tmp_path, said).close()
    assert calls[1]["mode"] == "disabled"


def test_wandb_that_fails_or_is_not_there_ends_nothing(tmp_path, monkeypatch):
    said: list[str] = []
    run = FakeRun(fails_at=1)
    fake_wandb(monkeypatch, run, tmp_path / "none")
    metrics = wandb_metrics(tmp_path, said)
    for step in (1, 2, 3):
        metrics.write("step", step, loss=1.0)
    metrics.close()
    assert len(run.logged) == 1 and len(read(tmp_path / "metrics.jsonl")) == 3
    assert sum("W&B failed (ConnectionError)" in text for text in said) == 1
    assert "secret" not in "".join(said)
    monkeypatch.setitem(sys.modules, "wandb", None)
    said.clear()
    wandb_metrics(tmp_path, said).close()
    assert any("pip install wandb" in text for text in said)


def test_unknown_keys_are_errors(tmp_path):
    folder = make_run(tmp_path, documents=60, total=1920)
    with pytest.raises(ConfigError, match=r"train\.metrics\.wandb: project must be given"):
        open_run(str(folder), None, None, ["metrics.wandb={}"])
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        open_run(str(folder), None, None, ["metrics.wandbb={project: x}"])
    assert open_run(str(folder), None, None, ["metrics.wandb={project: x}"]).config.metrics.wandb.project == "x"
