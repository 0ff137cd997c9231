"""The step `encoder`: its scores equal those of a plain forward of the transformer, one text at a time, for any size of
batch."""

from __future__ import annotations

import json
import random
import shutil
from functools import lru_cache

import pytest

from pipeline.base.files import file_sha256
from stages.document import Document
from stages.filter.encoder import Encoder
from tests.conftest import shared_data

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the extra [encoder] is not installed")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "valley", "people", "buy", "cheap", "now", "win",
         "##s", "##ing", "run", "live", "a", "of", ".", "!", ",", "and"]


def made(folder, labels=None, **config):
    """Write a BERT of two small layers with random weights and a head, as transformers does."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64).save_pretrained(folder)
    torch.manual_seed(5)
    names = {"id2label": dict(enumerate(labels)), "label2id": {v: i for i, v in enumerate(labels)}} if labels else {}
    settings = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.7, num_labels=len(labels or [1]), **names, **config)
    transformers.BertForSequenceClassification(settings).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    return made(tmp_path_factory.mktemp("edu"))


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    return made(tmp_path_factory.mktemp("topic"), ["low", "middle", "high"])


def texts(n=40):
    rng = random.Random(9)
    words = [*WORDS[5:], "unknown", "Rivers", "RUNNING"]
    return ["", " \n\t", "!", *(" ".join(rng.choices(words, k=rng.randrange(1, 150))) for _ in range(n - 3))]


@lru_cache(maxsize=8)
def parts_of(folder):
    return (transformers.AutoTokenizer.from_pretrained(folder),
            transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval())


def plain(folder, text, most=64):
    """Return the logits of a forward by transformers alone."""
    tokenizer, model = parts_of(folder)
    with torch.no_grad():
        return model(**tokenizer(text, truncation=True, max_length=most, return_tensors="pt")).logits[0]


def loaded(folder, **config) -> Encoder:
    stage = Encoder(model=str(folder), **config)
    stage.setup()
    return stage


def test_a_regression_scores_as_a_plain_forward_does(regression):
    stage = loaded(regression, min=0.0)
    docs = [Document(str(i), text) for i, text in enumerate(texts())]
    verdicts = stage.process_batch(docs)
    for doc, verdict in zip(docs, verdicts):
        score = plain(regression, doc.text)[0].item()
        assert doc.signals["encoder_score"] == pytest.approx(score, abs=0.000501)
        assert doc.signals["encoder_score"] == round(doc.signals["encoder_score"], 3)
        assert verdict == stage.verdict(Document("", signals=doc.signals))
        assert (verdict is None) == (doc.signals["encoder_score"] >= 0)
    assert {None, "encoder"} == set(verdicts)
    assert len({doc.signals["encoder_score"] for doc in docs}) > 20, "the texts are told apart"


def test_a_classification_gives_the_probability_of_its_label(classes, tmp_path):
    for label, column in (("low", 0), ("high", 2)):
        stage = loaded(classes, label=label, signal="topic_high")
        for text, score in zip(texts(12), stage.score_texts(texts(12))):
            assert score == pytest.approx(plain(classes, text).softmax(0)[column].item(), abs=1e-5)
    several = loaded(made(tmp_path / "multi", ["a", "b"], problem_type="multi_label_classification"), label="b")
    for text, score in zip(texts(12), several.score_texts(texts(12))):
        assert score == pytest.approx(plain(tmp_path / "multi", text).sigmoid()[1].item(), abs=1e-5)
    doc = Document("", "the river")
    stage.process_batch([doc])
    assert set(doc.signals) == {"topic_high"}


def test_neighbours_change_nothing(regression):
    stage, everything = loaded(regression), texts()
    alone = [stage.score_texts([text])[0] for text in everything]
    assert stage.score_texts(everything) == alone, "on a CPU not even a last digit"
    assert stage.score_texts(everything[::-1]) == alone[::-1]
    # what a GPU does: padded batches of whatever texts come together
    rng = random.Random(2)
    for size in (2, 7, 40):
        picked = rng.sample(range(len(everything)), size)
        rows = sorted((stage._tokens(everything[i]) for i in picked), key=len, reverse=True)
        together = stage._forward(rows)
        for row, score in zip(rows, together):
            assert score == pytest.approx(stage._forward([row])[0], abs=1e-4)


def test_only_the_first_tokens_are_read(regression):
    stage = loaded(regression, max_tokens=16)
    beginning = "the river run of a valley , people live and run . "
    longer, other = beginning * 3 + "buy cheap now !" * 9, beginning * 3 + "and a valley"
    assert stage.score_texts([longer]) == stage.score_texts([other])
    assert stage.score_texts([other])[0] == pytest.approx(plain(regression, other, 16)[0].item(), abs=1e-5)
    assert len(stage._tokens("the " * 10**6)) == 16
    assert len(stage._tokens(" " * 10**7 + "the")) == 2, "white space without end is not read to its end"


def test_a_model_that_is_not_fit_is_named(regression, classes, tmp_path):
    def changed(name, **change):
        folder = tmp_path / name
        shutil.copytree(regression, folder)
        config = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    code = changed("code", auto_map={"AutoModel": "evil.Model"})
    headless = changed("headless", architectures=["BertModel"])
    pickled = changed("pickled")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04")
    garbled = changed("garbled")
    (garbled / "config.json").write_text("{")
    odd, many, far, listed = (changed("odd", id2label={"a": "low", "b": "high"}),
                              changed("many", id2label=None, num_labels="two"),
                              changed("far", max_position_embeddings="512"), changed("listed"))
    (listed / "config.json").write_text("[1]")
    other = changed("other")
    tokenizer = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"auto_map": {"AutoTokenizer": ["x.Y", None]}}))
    for field, config, said in (
            ("model", {"model": code}, "code of its own"), ("model", {"model": other}, "code of its own"),
            ("model", {"model": headless}, "no head for sequences"),
            ("model", {"model": pickled}, "no model.safetensors"), ("model", {"model": garbled}, "cannot be read"),
            ("model", {"model": odd}, "id2label numbers its labels"), ("model", {"model": many}, "num_labels is no"),
            ("model", {"model": far}, "max_position_embeddings is no"), ("model", {"model": listed}, "holds no object"),
            ("label", {"model": classes}, "low, middle, high"),
            ("label", {"model": classes, "label": "best"}, "has no label 'best'; it has low, middle, high"),
            ("label", {"model": regression, "label": "high"}, "leave out `label`"),
            ("max_tokens", {"model": regression, "max_tokens": 65}, "reads 64 tokens at most")):
        stage = Encoder({**config, "model": str(config["model"])})
        assert said in stage.problems()[field]
        with pytest.raises(ValueError, match=said):
            stage.setup()
    assert Encoder(model=str(regression)).problems() == {}
    assert Encoder(model=str(tmp_path / "nowhere")).problems() == {}
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        loaded(tmp_path / "nowhere")


def test_a_model_without_its_head_is_not_filled_with_chance(regression, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "m"
    shutil.copytree(regression, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if not k.startswith("classifier")}, folder / "model.safetensors",
              metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights, which would be random: classifier"):
        loaded(folder)


def test_a_score_that_is_no_number_is_an_error(regression, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "m"
    shutil.copytree(regression, folder)
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][:] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="gives nan for a text of 9 characters"):
        loaded(folder).score_texts(["the river"])


def test_the_key_counts_the_whole_folder_and_nothing_of_the_machine(regression, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(regression, folder)
    one, moved = Encoder(model=str(regression)), Encoder(model=str(folder))
    assert one.key() == moved.key()
    (folder / ".cache").mkdir()
    (folder / ".cache" / "downloaded").write_text("today")
    assert one.key() == moved.key() and file_sha256(regression) == file_sha256(folder)
    assert one.key() != Encoder(model=str(regression), gpus=1).key() == Encoder(model=str(regression), gpus=0.25).key()
    assert Encoder(model=str(regression), gpus=0.25).gpus == 0.25
    keys = ("signal", "resource")
    assert one.key(keys) == Encoder(model=str(regression), min=1).key(keys)
    assert one.key(keys) != Encoder(model=str(regression), max_tokens=9).key(keys)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"x": 1}))
    assert one.key() != moved.key()
    (folder / "config.json").rename(folder / "config2.json")
    assert len({file_sha256(regression), file_sha256(folder)}) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(regression):
    with pytest.raises(ValueError, match="no GPU is visible"):
        loaded(regression, gpus=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_scores_as_a_cpu_does(regression, classes):
    for folder, config in ((regression, {}), (classes, {"label": "high"})):
        cpu, gpu = loaded(folder, **config), loaded(folder, gpus=1, batch=8, **config)
        for a, b in zip(cpu.score_texts(texts()), gpu.score_texts(texts())):
            assert a == pytest.approx(b, abs=1e-3)


def test_it_runs_in_a_recipe_whatever_the_partitions(regression, tmp_path):
    import pyarrow.parquet as pq

    from pipeline.recipe import load_recipe
    from pipeline.run import make_backend, run_recipe

    rows = [{"text": text} for text in texts() if text.strip()]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(f"""
version: 1
sources: {{web: {{read: jsonl, path: in.jsonl}}}}
datasets: {{scored: {{from: web, steps: [{{encoder: {{model: {regression}, min: 0.5}}}}]}}}}
""")
    found = []
    for size in ("1MB", "1KB"):
        store = tmp_path / size
        run_recipe(load_recipe(tmp_path / "recipe.yaml", overrides=[f"run.partition={size}"]), str(store),
                   make_backend=make_backend("inline", 1, None))
        tables = [pq.read_table(store / kind / "scored") for kind in ("datasets", "dropped")]
        found.append(sorted((row["id"], row["signals"]["encoder_score"], kind) for kind, table in enumerate(tables)
                            for row in table.to_pylist()))
    assert found[0] == found[1] and {kind for *_, kind in found[0]} == {0, 1}


def test_the_command_scores_with_it(regression, classes, tmp_path, capsys):
    from pipeline.cli.app import run_command

    data, given = tmp_path / "in.jsonl", [text for text in texts() if text.strip()]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    out = tmp_path / "scores.jsonl"
    assert run_command(["classifier", "score", str(regression), str(data), "--out", str(out)]) == 0
    scored = [json.loads(line)["score"] for line in out.read_text().splitlines()]
    assert scored == [pytest.approx(plain(regression, text)[0].item(), abs=0.000501) for text in given]
    assert run_command(["classifier", "score", str(classes), str(data)]) == 2
    assert "say which of them is the score" in capsys.readouterr().err


@pytest.mark.slow
def test_real_texts_score_as_a_plain_forward_does(regression):
    import gzip

    with gzip.open(shared_data("quality", "dclm_human_dev.jsonl.gz"), "rt") as f:
        real = [json.loads(line)["text"] for line in f][:100]
    for text, score in zip(real, loaded(regression).score_texts(real)):
        assert score == pytest.approx(plain(regression, text)[0].item(), abs=1e-5)
