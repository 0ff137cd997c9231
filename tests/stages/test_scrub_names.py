"""Names and postal addresses, found by a model: they are replaced, dropped and counted like every other kind. The tests
use tiny models that they make themselves: a spaCy pipeline of rules, and a transformer trained on four sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from pipeline.recipe import RecipeError, load_recipe
from pipeline.run import make_backend, run_recipe
from stages.document import Document
from stages.scrub import names as names_module
from stages.scrub.names import LABELS, Tagger, normalised_label, problems
from stages.scrub.pii import Pii

TEXT = "Ada Lovelace wrote to ada@home.org from 12 St James's Square. Ada Lovelace, Ada Lovelace of London, Paris."


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> str:
    """A spaCy pipeline without weights, which finds names by rules."""
    import spacy

    nlp = spacy.blank("en")
    nlp.add_pipe("entity_ruler").add_patterns([
        {"label": "PERSON", "pattern": "Ada Lovelace"}, {"label": "GPE", "pattern": "London"},
        {"label": "PERSON", "pattern": "Charles"}, {"label": "PERSON", "pattern": [{"TEXT": {"REGEX": "^ada@"}}]},
        {"label": "PERSON", "pattern": [{"TEXT": {"REGEX": "^Person-"}}]},
        {"label": "STREET_ADDRESS", "pattern": "12 St James's Square"}, {"label": "ZIP", "pattern": "SW1Y 4JH"}])
    folder = tmp_path_factory.mktemp("ruler")
    nlp.to_disk(folder)
    return str(folder)


def done(text: str, **config) -> Document:
    doc = Document("1", text, meta={"title": text})
    stage = Pii(**config)
    stage.setup()
    doc.meta["verdict"] = stage.process(doc)
    return doc


def test_names_and_addresses_are_replaced_and_counted(pipeline):
    doc = done(TEXT, names=True, addresses=True, model=pipeline, audit=True)
    said = ("<PERSON> wrote to email@example.com from <ADDRESS>. <PERSON>, <PERSON> of London, Paris.")
    assert doc.text == doc.meta["title"] == said
    assert doc.signals == {"pii_emails": 1, "pii_ips": 0, "pii_names": 3, "pii_addresses": 1}
    assert [(p["kind"], p["rule"], said[p["start"]:p["end"]]) for p in doc.meta["pii"]] == [
        ("names", "PERSON", "<PERSON>"), ("emails", "email", "email@example.com"),
        ("addresses", "STREETADDRESS", "<ADDRESS>"), ("names", "PERSON", "<PERSON>"), ("names", "PERSON", "<PERSON>")]
    only = done(TEXT, names=True, model=pipeline)
    assert "12 St James's Square" in only.text
    assert only.signals["pii_names"] == 3 and "pii_addresses" not in only.signals


def test_pieces_of_an_address_are_one(pipeline):
    doc = done("At 12 St James's Square, SW1Y 4JH. Ada Lovelace Charles", addresses=True, names=True, model=pipeline)
    assert doc.text == "At <ADDRESS>. <PERSON> <PERSON>"


def test_documents_with_names_are_dropped(pipeline):
    assert done(TEXT, names=True, model=pipeline, drop=["names"]).meta["verdict"] == "pii_names"
    assert done("Nobody of London.", names=True, model=pipeline, drop=["names"]).meta["verdict"] is None


def test_pseudonyms_are_the_same_for_the_same_name_and_stay(pipeline, tmp_path):
    (tmp_path / "key").write_text("0123456789" * 4)
    config = {"names": True, "model": pipeline, "mode": "pseudonym", "key_file": str(tmp_path / "key")}
    once = done("Ada Lovelace and Charles. Ada\u00a0Lovelace.", **config).text
    first, other = once.split(" and ")[0], once.split(" and ")[1].split(".")[0]
    assert first.startswith("Person-") and other.startswith("Person-") and first != other
    again = done(f"{first} and Ada Lovelace", **config)
    assert again.text == f"{first} and {first}" and again.signals["pii_names"] == 1


def test_spans_of_loss_move_with_names(pipeline):
    doc = Document("1", "Ada Lovelace: yes", loss_spans=[{"start": 14, "end": 17}])
    Pii(names=True, model=pipeline).process(doc)
    assert doc.text == "<PERSON>: yes" and doc.loss_spans == [{"start": 10, "end": 13}]


def test_long_texts_go_to_the_model_in_pieces(pipeline):
    text = "\n".join(["Ada Lovelace was here, and so were a few others."] * 900)
    assert len(text) > 2 * names_module._PIECE
    doc = done(text, names=True, model=pipeline)
    assert doc.signals["pii_names"] == 900 and "Lovelace" not in doc.text
    pieces = list(names_module._pieces("x" * 1000, 64))
    assert "".join(piece for _, piece in pieces) == "x" * 1000 and all(at == 64 * i for i, (at, _) in enumerate(pieces))


def test_the_step_is_numeric_with_a_model_and_keyed_by_it(pipeline, tmp_path):
    stage = Pii(names=True, model=pipeline)
    assert not stage.exact and "spacy" in stage.libraries and stage.memory_mb > Pii.memory_mb
    assert Pii().exact and Pii().libraries == () and Pii().memory_mb == Pii.memory_mb
    other = tmp_path / "other"
    other.mkdir()
    for path in Path(pipeline).rglob("*"):
        if path.is_file():
            (other / path.relative_to(pipeline)).parent.mkdir(parents=True, exist_ok=True)
            (other / path.relative_to(pipeline)).write_bytes(path.read_bytes())
    assert stage.key() == Pii(names=True, model=str(other)).key(), "content counts, not the name"
    (other / "meta.json").write_text((other / "meta.json").read_text().replace('"lang":"en"', '"lang":"en" '))
    assert stage.key() != Pii(names=True, model=str(other)).key()


@pytest.mark.parametrize("config", [{"names": True}, {"addresses": True}, {"model": "x"}])
def test_names_and_model_belong_together(config):
    with pytest.raises(ValidationError, match="need a model"):
        Pii(**config)


def test_what_is_no_model_is_said_before_anything_runs(pipeline, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "neither the meta.json" in problems(tmp_path / "empty", ["names"])[0]
    with pytest.raises(ValueError, match=r"neither the meta\.json"):
        Tagger(tmp_path / "empty", ["names"])
    (tmp_path / "places").mkdir()
    (tmp_path / "places" / "meta.json").write_text(json.dumps({"labels": {"ner": ["GPE", "ORG"]}}))
    assert problems(tmp_path / "places", ["names"])[0].startswith(
        f"{tmp_path / 'places'} has no label for names; it has GPE, ORG")
    recipe = {"version": 1, "sources": {"docs": {"read": "jsonl", "path": "in.jsonl"}}, "datasets": {
        "clean": {"from": "docs", "steps": [{"pii": {"names": True, "model": "places"}}]}}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "in.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(RecipeError, match="has no label for names"):
        load_recipe(str(tmp_path / "r.yaml"), [])


@pytest.mark.parametrize(("label", "known"), [
    ("PERSON", "PERSON"), ("B-PER", "PER"), ("I-GIVENNAME", "GIVENNAME"), ("first_name", "FIRSTNAME"), ("O", "O"),
    ("S-LOC", "LOC"), ("E_NAME", "NAME"), ("B-", "B"), ("street-address", "STREETADDRESS")])
def test_labels(label, known):
    assert normalised_label(label) == known
    assert all(normalised_label(label) == label for labels in LABELS.values() for label in labels)


def test_from_a_recipe(pipeline, tmp_path):
    """Nothing of a name in what is kept, dropped or reported."""
    (tmp_path / "in.jsonl").write_text("".join(
        json.dumps({"text": text}) + "\n" for text in (TEXT, "Nobody of London.", "Charles, Charles.")))
    recipe = {"version": 1, "sources": {"docs": {"read": "jsonl", "path": "in.jsonl"}}, "datasets": {
        "clean": {"from": "docs", "steps": [{"pii": {"names": True, "model": pipeline}}]},
        "drop": {"from": "docs", "steps": [{"pii": {"names": True, "model": pipeline, "drop": ["names"]}}]}}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    run_recipe(load_recipe(str(tmp_path / "r.yaml"), []), str(tmp_path / "store"),
               make_backend=make_backend("inline", 1, None))
    store = tmp_path / "store"
    report = json.loads((store / "report.json").read_text())
    assert report["datasets"]["clean"]["pii"]["pii_names"] == 5
    assert [(r["reason"], r["docs"]) for r in report["datasets"]["drop"]["reasons"]] == [("pii_names", 2)]
    for path in store.rglob("*"):
        if path.is_file():
            assert b"Lovelace" not in path.read_bytes() and b"Charles" not in path.read_bytes(), path


# -- a transformer ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def transformer(tmp_path_factory) -> str:
    """A BERT of one layer that has learned which of 14 words are names."""
    pytest.importorskip("transformers", reason="transformers are an extra: pip install 'tokenmill[encoder]'")
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "ada", "lovelace", "charles", "babbage", "met", "and", "in", "london",
             ".", ","]
    labels = ["O", "B-GIVENNAME", "I-SURNAME", "B-CITY"]
    of = {"ada": 1, "charles": 1, "lovelace": 2, "babbage": 2, "london": 3}
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    folder = tmp_path_factory.mktemp("bert")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
                            sep_token="[SEP]").save_pretrained(folder)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = BertForTokenClassification(BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=72, id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)}, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0))
    draw = torch.Generator().manual_seed(0)
    learn = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        ids = torch.randint(0, len(words), (8, 64), generator=draw)
        target = torch.tensor([[of.get(words[i], 0) for i in row] for row in ids.tolist()])
        learn.zero_grad()
        model(input_ids=ids, labels=target).loss.backward()
        learn.step()
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_transformer_finds_names_across_its_windows(transformer):
    stage = Pii(names=True, model=transformer)
    assert "transformers" in stage.libraries and problems(transformer, ["names"]) == []
    text = "ada lovelace met charles babbage in london . "
    assert done(text, names=True, model=transformer).text == "<PERSON> met <PERSON> in london . "
    doc = done(text * 40, names=True, model=transformer)
    assert doc.signals["pii_names"] == 80 and doc.text == "<PERSON> met <PERSON> in london . " * 40
    assert done("ada charles", names=True, model=transformer).text == "<PERSON> <PERSON>"
    assert done("", names=True, model=transformer).text == ""
    assert "has no label for addresses" in problems(transformer, ["addresses"])[0]


@pytest.mark.slow
def test_a_transformer_without_its_head_is_refused(transformer, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in Path(transformer).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if not k.startswith("classifier")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks weights, which would be random: classifier"):
        Tagger(tmp_path, ["names"])
