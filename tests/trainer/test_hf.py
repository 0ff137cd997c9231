"""Export and import: transformers computes with our files what we compute, and a model that is exported and imported
again is unchanged."""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from tests.trainer.synthetic import EOS, VOCAB, make_run
from trainer.__main__ import main
from trainer.base.config import ConfigError
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint import hf, hf_config
from trainer.loop import train as loop
from trainer.loop.run import open_run
from trainer.model.attention import document_mask
from trainer.model.config import ModelConfig, RopeScaling
from trainer.model.init import initialise
from trainer.model.transformer import Transformer
from trainer.observe.metrics import read
from trainer.parallel.world import world

safetensors = pytest.importorskip("safetensors.torch")

LLAMA3 = RopeScaling("llama3", 8.0, 16, 1.0, 4.0)
YARN = RopeScaling("yarn", 4.0, 16)
BASE = ModelConfig(layers=3, width=48, heads=6, kv_heads=2, ffn=80)
#: name → (configuration, the architecture it must be)
CASES = {
    "gqa": (BASE, "LlamaForCausalLM"),
    "mha, untied": (replace(BASE, kv_heads=6, tie=False, norm_eps=1e-6), "LlamaForCausalLM"),
    "mqa, llama3": (replace(BASE, kv_heads=1, rope_theta=500.0, rope_scaling=LLAMA3), "LlamaForCausalLM"),
    "linear": (replace(BASE, rope_scaling=RopeScaling("linear", 4.0)), "LlamaForCausalLM"),
    "yarn": (replace(BASE, head_dim=16, rope_scaling=YARN), "LlamaForCausalLM"),
    "yarn, own factor": (replace(BASE, head_dim=32, rope_scaling=replace(YARN, attention_factor=1.5, beta_fast=8.0)),
                         "LlamaForCausalLM"),
    "yarn, qk-norm": (replace(BASE, head_dim=16, qk_norm=True, rope_theta=5e6, rope_scaling=YARN), "Qwen3ForCausalLM"),
    "qk-norm, head width": (replace(BASE, qk_norm=True, head_dim=16, tie=False), "Qwen3ForCausalLM"),
    "biases": (replace(BASE, qkv_bias=True), "Qwen2ForCausalLM"),
    "nope": (replace(BASE, nope_every=2, layers=4), "SmolLM3ForCausalLM"),
    "relu2": (replace(BASE, activation="relu2", ffn=100), "ArceeForCausalLM"),
    "partial": (replace(BASE, rotary=0.5), "Phi3ForCausalLM"),
    "mup": (replace(BASE, mup=16, tie=False), "LlamaForCausalLM"),
    "mup, tied, qk-norm": (replace(BASE, mup=24, qk_norm=True), "Qwen3ForCausalLM"),
}


def made(config: ModelConfig, vocab: int = VOCAB) -> Transformer:
    """Return a model with random values everywhere, also in gains and biases."""
    model = Transformer(config, vocab)
    initialise(model, replace(config, init_std=0.2), 3)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:
                p.add_(torch.randn(p.shape, generator=g) * 0.3)
    return model


def saved(model: Transformer, folder: Path) -> ckpt.Checkpoint:
    """Write a checkpoint with the model alone and those parts of meta.json that an export reads."""
    run = open_run(str(make_run(folder, total=960, documents=60)), None, None, [])
    from torch.distributed.checkpoint import FileSystemWriter, save

    save({f"model.{n}": p.detach() for n, p in model.named_parameters()},
         storage_writer=FileSystemWriter(folder / "attempt"), no_dist=True)
    meta = {"step": 7, "samples": 5, "config": {"model": model.config.identity()},
            "curriculum": run.curriculum.to_json()}
    return ckpt.Checkpoint(folder / "attempt", meta)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """{name of a case: (our model, the folder to which it was exported in fp32, in several files)}"""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    found = {}
    for name, (config, _) in CASES.items():
        folder = tmp_path_factory.mktemp("hf")
        model = made(config)
        hf.export(saved(model, folder), folder / "out", "fp32", None, shard=60_000)
        found[name] = model, folder / "out"
    return found


def logits(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        return model(tokens, document_mask(positions, torch.float32))


TOKENS = torch.randint(0, VOCAB, (2, 48), generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same_logits(exported, name):
    transformers = pytest.importorskip("transformers")
    model, folder = exported[name]
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                                       output_loading_info=True)
    assert type(theirs).__name__ == CASES[name][1]
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        want = theirs.eval()(TOKENS).logits
    ours = logits(model, TOKENS)
    assert ours.abs().max() > 0.5
    assert torch.allclose(ours, want, atol=2e-5, rtol=1e-4), (ours - want).abs().max()


@pytest.mark.parametrize("name", CASES)
def test_what_comes_back_is_what_went(exported, name):
    model, folder = exported[name]
    config, vocab = hf_config.read_config(folder)
    assert vocab == VOCAB
    assert not hf.differing(replace(model.config, mup=0), folder)
    assert (config.rope_theta, config.rope_scaling) == (model.config.rope_theta, model.config.rope_scaling)
    back = Transformer(config, vocab)
    hf.load(back, config, vocab, folder)
    assert torch.allclose(logits(back, TOKENS), logits(model, TOKENS), atol=1e-5)
    if not model.config.mup:
        for (name, ours), theirs in zip(model.named_parameters(), back.parameters()):
            assert torch.equal(ours, theirs), name


def test_files_are_split_by_size_and_indexed(exported):
    _, folder = exported["gqa"]
    index = json.loads((folder / hf.INDEX).read_text())
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 4 * BASE.parameters(VOCAB)
    assert all((folder / f).stat().st_size < 60_000 + 10_000 for f in files)


def plain_reference(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """Compute the logits [T, V] of one document from the formulas of the papers: loops over heads and positions, and
    rotation by complex numbers."""
    c, p = model.config, {n: x.detach().double() for n, x in model.named_parameters()}

    def norm(x, gain):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * gain

    def turn(x, t):
        half = x.shape[0] // 2
        angle = torch.tensor([t / c.rope_theta ** (i / half) for i in range(half)], dtype=torch.float64)
        z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag))

    x = p["embed.weight"][tokens]
    for i in range(c.layers):
        at = f"blocks.{i}."
        h = norm(x, p[at + "attention_norm.weight"])
        heads = []
        for head in range(c.heads):
            def row(name, index, h=h, at=at):
                w = p[f"{at}attention.{name}.weight"]
                return h @ w[index * c.dim:(index + 1) * c.dim].T

            q, k, v = row("q", head), *(row(n, head // (c.heads // c.kv_heads)) for n in "kv")
            if c.qk_norm:
                q, k = norm(q, p[at + "attention.q_norm.weight"]), norm(k, p[at + "attention.k_norm.weight"])
            if not c.nope_every or (i + 1) % c.nope_every:
                q, k = (torch.stack([turn(y, t) for t, y in enumerate(x)]) for x in (q, k))
            out = []
            for t in range(len(tokens)):
                weight = (k[:t + 1] @ q[t] / c.dim ** 0.5).exp()
                out.append((weight / weight.sum()) @ v[:t + 1])
            heads.append(torch.stack(out))
        x = x + torch.cat(heads, -1) @ p[at + "attention.o.weight"].T
        h = norm(x, p[at + "mlp_norm.weight"])
        gate = h @ p[at + "mlp.gate.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ p[at + "mlp.up.weight"].T)) @ p[at + "mlp.down.weight"].T
    out = norm(x, p["norm.weight"]) @ (p["embed.weight"] if c.tie else p["head.weight"]).T
    return c.softcap * torch.tanh(out / c.softcap) if c.softcap else out


@pytest.mark.parametrize("config", [BASE, replace(BASE, qk_norm=True, nope_every=2, tie=False, head_dim=10),
                                    replace(BASE, softcap=2.0)])
def test_logits_of_a_plain_reference_implementation(config):
    model, tokens = made(config), TOKENS[0, :24]
    ours = logits(model, tokens[None])[0]
    assert torch.allclose(ours.double(), plain_reference(model, tokens.tolist()), atol=1e-4)


@pytest.mark.parametrize(("change", "said"), [
    ({"softcap": 15.0}, "softcap"), ({"qk_norm": True, "nope_every": 4}, "nope_every and qk_norm"),
    ({"rotary": 0.5, "rope_scaling": YARN}, "partial rotation with rope_scaling yarn"),
    ({"width": 45, "head_dim": 8}, "multiple of the heads")])
def test_what_no_architecture_has_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        hf_config.to_json(replace(BASE, **change), VOCAB, 64, EOS, "fp32")


@pytest.mark.parametrize(("change", "said"), [
    ({"model_type": "gemma2"}, "gemma2"), ({"hidden_act": "gelu"}, "hidden_act"), ({"attention_bias": True}, "bias"),
    ({"rope_theta": None}, "rope_theta is missing"), ({"quantization_config": {"bits": 4}}, "quantization"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 2}}, "mscale"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor")])
def test_configurations_this_trainer_has_not_are_refused(exported, tmp_path, change, said):
    text = json.loads((exported["gqa"][1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, **change}))
    with pytest.raises(ConfigError, match=said):
        hf_config.read_config(tmp_path)


@pytest.mark.parametrize("contents", [b"{", b"[]", b"\xff{", b'{"model_type": "llama"}', b"[" * 100_000,
                                      b'{"model_type": "llama", "num_attention_heads": "x", "rope_theta": 1}'])
def test_a_damaged_config_is_an_error_that_names_the_file(tmp_path, contents):
    (tmp_path / "config.json").write_bytes(contents)
    with pytest.raises(ConfigError, match=r"config\.json: damaged"):
        hf_config.read_config(tmp_path)


def test_configurations_of_transformers_5_are_read(exported, tmp_path):
    text = json.loads((exported["mqa, llama3"][1] / "config.json").read_text())
    new = {k: v for k, v in text.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**text["rope_scaling"], "rope_theta": text["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(new))
    assert hf_config.read_config(tmp_path) == hf_config.read_config(exported["mqa, llama3"][1])


def test_tensors_that_do_not_fit_are_named(exported, tmp_path):
    model, folder = exported["gqa"]
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.load_file(path)

    def broken(**changes: torch.Tensor | None) -> Path:
        made = {**tensors, **{k.replace("__", "."): v for k, v in changes.items()}}
        safetensors.save_file({k: v for k, v in made.items() if v is not None}, tmp_path / "model.safetensors")
        return tmp_path

    with pytest.raises(ConfigError, match=r"1 tensors are missing \(model.norm.weight\) and 1 unknown \(spare\)"):
        hf.check(broken(model__norm__weight=None, spare=torch.ones(2)), model.config, VOCAB)
    with pytest.raises(ConfigError, match=r"model.norm.weight is \[47\], wanted \[48\]"):
        hf.check(broken(model__norm__weight=torch.ones(47)), model.config, VOCAB)
    with pytest.raises(ConfigError, match=r"tokenizer of these shards has 98 tokens"):
        hf.check(broken(), model.config, VOCAB + 1)
    small = Transformer(model.config, VOCAB - 7)                      # rows of padding are left out
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    hf.load(small, model.config, VOCAB - 7, tmp_path)
    assert torch.equal(small.embed.weight, model.embed.weight[:VOCAB - 7])
    with pytest.raises(ConfigError, match="layers: 4, there 3"):
        hf.load(small, replace(model.config, layers=4), VOCAB, tmp_path)
    with pytest.raises(ConfigError, match="pickles"):
        hf.files_of(tmp_path / "nothing")


@pytest.mark.parametrize("contents", [b"{", b"[]", b"\xff{", b'{"model": []}', b'{"added_tokens": [{"id": 1}]}'])
def test_a_damaged_tokenizer_is_an_error_that_names_the_file(tmp_path, contents):
    (tmp_path / "tokenizer.json").write_bytes(contents)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: damaged"):
        hf.words(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(("file", "contents"), [
    ("model.safetensors", b"abc"), (hf.INDEX, b"{"), (hf.INDEX, b"[]"), (hf.INDEX, b'{"weight_map": {"a": 1}}'),
    (hf.INDEX, None)])
def test_damaged_weights_are_an_error_that_names_the_file(tmp_path, file, contents):
    config = ModelConfig(layers=1, width=8, heads=2, ffn=16)
    index = {"weight_map": dict.fromkeys(hf.layout(config), "missing.safetensors")}
    (tmp_path / file).write_bytes(json.dumps(index).encode() if contents is None else contents)
    with pytest.raises(ConfigError, match=re.escape("missing.safetensors" if contents is None else file)):
        hf.check(tmp_path, config, 32)


def test_without_safetensors_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match="pip install"):
        hf.safetensors()


def test_the_tokenizer_goes_along_and_must_be_the_shards(exported, tmp_path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")

    def save(path: Path, *words: str) -> Path:
        made = tokenizers.Tokenizer(tokenizers.models.BPE({w: i + 1 for i, w in enumerate(words)}, []))
        made.add_special_tokens(["<end>"])
        made.save(str(path))
        return path

    ours = save(tmp_path / "ours.json", "a", "b")
    eos = 2
    (tmp_path / "out").mkdir()
    assert "beside" in hf.copy_tokenizer(ours, tmp_path / "out", eos)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (loaded.eos_token_id, loaded("ab")["input_ids"]) == (eos, [1, 2])
    assert hf.copy_tokenizer(tmp_path / "none.json", tmp_path / "out", eos).startswith("no tokenizer")
    model, folder = exported["gqa"]
    for path in folder.iterdir():
        (tmp_path / "out" / path.name).write_bytes(path.read_bytes())
    fresh = Transformer(model.config, VOCAB)
    hf.load(fresh, model.config, VOCAB, tmp_path / "out", ours)
    assert torch.equal(fresh.embed.weight, model.embed.weight)
    with pytest.raises(ConfigError, match="another vocabulary"):
        hf.load(fresh, model.config, VOCAB, tmp_path / "out", save(tmp_path / "other.json", "b", "a"))


def test_a_user_trains_exports_and_goes_on(tmp_path, capsys):
    """Train, export, import, and train on from the weights: the held-out loss goes on where it was."""
    run = make_run(tmp_path / "a", total=3840, documents=150)
    with world("cpu") as here:
        loop.train(open_run(str(run), None, None, []), here, say=lambda _text: None)
    out = tmp_path / "hf"
    assert main(["export", str(run), "--out", str(out), "--dtype", "fp32"]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == EOS
    assert main(["export", str(run), "--out", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["export", str(run), "--out", str(tmp_path / "b"), "--step", "3"]) == 2
    assert "has steps" in capsys.readouterr().err
    assert main(["import", str(out)]) == 0
    section = yaml.safe_load(capsys.readouterr().out)["train"]
    assert section["init"] == {"from": str(out)}
    second = make_run(tmp_path / "c", total=3840, documents=150, model=section["model"],
                      train={"init": section["init"]})
    with world("cpu") as here:
        loop.train(open_run(str(second), None, None, []), here, say=lambda _text: None)
    before, after = (json.loads((r / "train" / "summary.json").read_text()) for r in (run, second))
    assert after["heldout_loss_before"] == pytest.approx(before["heldout_loss"], abs=1e-5)
    assert before["heldout_loss"] < before["heldout_loss_before"] - 0.5
    assert ckpt.latest(second / "train" / "checkpoints").meta["config"]["init.from"] == str(out)
    other = {**section, "model": {**section["model"], "layers": 2}}
    third = make_run(tmp_path / "d", total=960, documents=60, model=other["model"], train={"init": section["init"]})
    with world("cpu") as here, pytest.raises(ConfigError, match="layers: 2, there 1"):
        loop.train(open_run(str(third), None, None, []), here, say=lambda _text: None)


def test_positions_of_a_phase_hold_in_training_resume_and_export(tmp_path):
    """The long phase has its own θ and YaRN; a run without them differs there and only there."""
    yarn = {"kind": "yarn", "factor": 2, "original": 32}

    def phases(**own):
        return [{"name": "stable", "until": "60%", "sequence": 32, "batch": 160, "mix": {"web": 70, "code": 30}},
                {"name": "long", "until": "100%", "sequence": 64, "batch": 192, **own}]

    def losses(out: Path) -> list[float]:
        return [line["loss"] for line in read(out / "metrics.jsonl") if line["event"] == "step"]

    own = make_run(tmp_path / "own", total=3840, documents=150, phases=phases(rope_theta=300.0, rope_scaling=yarn))
    plain = make_run(tmp_path / "plain", total=3840, documents=150, phases=phases())
    with world("cpu") as here:
        for run, out, stops in ((own, "a", (None,)), (own, "b", (18, None)), (plain, "a", (None,))):
            for stop in stops:
                loop.train(open_run(str(run), None, str(run / out), []), here, stop, lambda _text: None)
    whole, resumed, without = losses(own / "a"), losses(own / "b"), losses(plain / "a")
    begin = round(0.6 * 3840 / 160)
    assert len(whole) > 18 > begin
    assert resumed == pytest.approx(whole, abs=1e-5)
    assert whole[:begin] == pytest.approx(without[:begin], abs=1e-6)
    assert max(abs(a - b) for a, b in zip(whole[begin:], without[begin:])) > 1e-3
    found = {c.step: c for c in ckpt.complete(own / "a" / "checkpoints")}
    hf.export(found[begin], tmp_path / "early", "fp32", None)
    hf.export(found[max(found)], tmp_path / "late", "fp32", None)
    early, late = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("early", "late"))
    assert (early["rope_theta"], early["rope_scaling"], early["max_position_embeddings"]) == (10_000.0, None, 32)
    assert (late["rope_theta"], late["max_position_embeddings"]) == (300.0, 64)
    assert late["rope_scaling"]["rope_type"] == "yarn"
    bad = make_run(tmp_path / "bad", total=3840, documents=150, phases=phases(rope_scaling={"kind": "ntk"}))
    with pytest.raises(ConfigError, match="phase 'long': rope_scaling"):
        open_run(str(bad), None, None, [])
