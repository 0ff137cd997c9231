"""Finds names of persons and postal addresses by a model trained elsewhere, since no rule can find them.

The model is a folder on this machine. It is only read: nothing is fetched from the network, and no code of the model
runs. It is a spaCy pipeline (as `nlp.to_disk` writes it: an entity recogniser or ruler) or a Hugging Face model of
token classification (as `save_pretrained` writes it: config.json, model.safetensors, tokenizer.json). `LABELS` says
what its labels mean. Places that are not addresses (GPE, LOC, CITY …) and organisations are not personal data.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: labels of common models (OntoNotes, CoNLL, Presidio, ai4privacy, Nemotron) in capitals, without B-, I-, _ and -
LABELS: dict[str, frozenset[str]] = {
    "names": frozenset(("PER", "PERSON", "PERSONNAME", "NAME", "FULLNAME", "GIVENNAME", "GIVENNAME1", "GIVENNAME2",
                        "SURNAME", "FIRSTNAME", "MIDDLENAME", "LASTNAME", "LASTNAME1", "LASTNAME2",
                        "LASTNAME3", "PRIVATEPERSON", "NAMESTUDENT", "PATIENT", "DOCTOR")),
    "addresses": frozenset(("ADDRESS", "POSTALADDRESS", "STREETADDRESS", "STREET", "STREETNAME", "BUILDINGNUM",
                            "BUILDINGNUMBER", "BUILDING", "SECONDARYADDRESS", "SECADDRESS", "ZIP", "ZIPCODE",
                            "POSTCODE", "POSTALCODE", "PRIVATEADDRESS")),
}
#: characters given to a spaCy pipeline at a time, since its memory grows with them
_PIECE = 20_000
#: Tokens at the border of a window that take their label from the neighbouring window, which sees more text around
#: them.
_BORDER = 16
#: text that may separate two pieces of one value: first name and surname, house number and street
_BETWEEN = re.compile(r"[ ,.\u00a0\n'’-]{0,3}")
_PREFIX = re.compile(r"[BIELSU][-_](?=.)")

#: a function: text → (start, end, label) in order
Entities = Callable[[str], Iterable[tuple[int, int, str]]]


class Tagger:
    """A loaded model that finds some kinds of LABELS."""

    def __init__(self, folder: str | Path, kinds: Iterable[str]) -> None:
        """Load the model. Raises ValueError if the folder holds no supported model, or if the model has no label for
        one of the kinds."""
        for message in problems(folder, kinds):
            raise ValueError(message)
        self._kind = {label: kind for kind in kinds for label in LABELS[kind]}
        self._entities: Entities = (_spacy if _is_spacy(Path(folder)) else _transformer)(Path(folder))

    def find(self, text: str) -> Iterator[tuple[int, int, str, str]]:
        """(start, end, kind, label) in order, without overlaps. Adjacent pieces of one value are merged."""
        last: tuple[int, int, str, str] | None = None
        for start, end, label in self._entities(text):
            kind = self._kind.get(plain(label))
            while start < end and text[start].isspace():
                start += 1
            while start < end and text[end - 1].isspace():
                end -= 1
            if kind is None or start >= end or not any(map(str.isalnum, text[start:end])):
                continue
            if last is not None and start < last[1]:
                continue
            if last is not None and last[2] == kind and _BETWEEN.fullmatch(text, last[1], start) \
                    and (plain(label) != last[3] or kind == "addresses"):
                last = last[0], end, kind, last[3]
                continue
            if last is not None:
                yield last
            last = start, end, kind, plain(label)
        if last is not None:
            yield last


def plain(label: str) -> str:
    """A label as LABELS writes it: `B-GIVEN_NAME` is GIVENNAME."""
    return _PREFIX.sub("", label.upper(), count=1).replace("_", "").replace("-", "").replace(" ", "")


def libraries(folder: str | Path) -> tuple[str, ...]:
    """Distributions whose versions affect the model's output."""
    return ("spacy", "thinc") if _is_spacy(Path(folder)) else ("safetensors", "tokenizers", "torch", "transformers")


def memory_mb(folder: str | Path) -> int:
    """Memory a worker needs for the model, MB."""
    size = sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()) >> 20
    return (400 if _is_spacy(Path(folder)) else 1200) + 3 * size


def problems(folder: str | Path, kinds: Iterable[str]) -> list[str]:
    """Messages that say why a folder is no model that finds `kinds`, and what to do; [] if it is one. The model is not
    loaded."""
    path = Path(folder)
    if _is_spacy(path):
        missing, extra = [name for name in ("spacy",) if find_spec(name) is None], "pipeline"
        said = _read(path / "meta.json").get("labels")
        lists = said.values() if isinstance(said, dict) else ()
        labels = [label for of in lists if isinstance(of, list) for label in of]
    elif (path / "config.json").is_file():
        missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
        extra, said = "encoder", _read(path / "config.json").get("id2label")
        labels = list(said.values()) if isinstance(said, dict) else []
    else:
        return [f"{path} is no folder of a model: it holds neither the meta.json of a spaCy pipeline nor the "
                "config.json of a Hugging Face model"]
    if missing:
        return [f"{path} needs {', '.join(missing)}: pip install 'tokenmill[{extra}]'"]
    known = {plain(label) for label in labels if isinstance(label, str)}
    return [f"{path} has no label for {kind}; it has {', '.join(sorted(known)[:30]) or 'none'}, of which {kind} are "
            f"{', '.join(sorted(LABELS[kind])[:4])} …" for kind in kinds if not known & LABELS[kind]]


def _is_spacy(folder: Path) -> bool:
    return (folder / "meta.json").is_file()


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found


def _spacy(folder: Path) -> Entities:
    import spacy

    # parts that tag words and split sentences are not needed to find names (`tok2vec` is)
    nlp = spacy.load(folder, exclude=["tagger", "parser", "senter", "lemmatizer", "attribute_ruler", "morphologizer"])

    def entities(text: str) -> Iterator[tuple[int, int, str]]:
        for at, piece in _pieces(text, _PIECE):
            for found in nlp(piece).ents:
                yield at + found.start_char, at + found.end_char, found.label_

    return entities


def _pieces(text: str, longest: int) -> Iterator[tuple[int, str]]:
    """(offset, piece) of pieces of at most `longest` characters, cut after a line break or else after a space."""
    at = 0
    while at < len(text):
        end = min(at + longest, len(text))
        if end < len(text):
            cut = max(text.rfind("\n", at + longest // 2, end), 0) or max(text.rfind(" ", at + longest // 2, end), 0)
            end = cut + 1 if cut else end
        yield at, text[at:end]
        at = end


def _transformer(folder: Path) -> Entities:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)                             # one worker per core, and a fixed order of summation
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, **local)
    model, info = AutoModelForTokenClassification.from_pretrained(folder, use_safetensors=True,
                                                                  output_loading_info=True, **local)
    if info["missing_keys"] or info["mismatched_keys"]:
        missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ValueError(f"{folder} lacks weights, which would be random: {', '.join(missing[:5])}; was it saved with "
                         "its head for token classification?")
    model.eval()
    names: dict[int, str] = model.config.id2label
    longest = min(512, getattr(model.config, "max_position_embeddings", 512) - 8)

    def entities(text: str) -> Iterator[tuple[int, int, str]]:
        begun: tuple[int, int, str] | None = None
        for start, end, label in tokens(text):
            said, between = plain(label), text[begun[1]:start] if begun is not None else ""
            if begun is not None and said == begun[2] and not between.strip() and not (between and label[:1] in "BSU"):
                begun = begun[0], end, said
                continue
            if begun is not None:
                yield begun
            begun = None if said == "O" else (start, end, said)
        if begun is not None:
            yield begun

    def tokens(text: str) -> Iterator[tuple[int, int, str]]:
        """(start, end, label) of each token, once although windows overlap. Of a token in two windows, the label comes
        from the window in which the token is farther from a border."""
        windows = tokenizer(text, truncation=True, max_length=longest, stride=2 * _BORDER, verbose=False,
                            return_overflowing_tokens=True, return_offsets_mapping=True,
                            return_special_tokens_mask=True)
        count = len(windows["input_ids"])
        for i in range(count):
            with torch.inference_mode():
                best = model(input_ids=torch.tensor([windows["input_ids"][i]]),
                             attention_mask=torch.tensor([windows["attention_mask"][i]])).logits[0].argmax(-1).tolist()
            told = [(*place, names[label]) for place, label, special in zip(
                windows["offset_mapping"][i], best, windows["special_tokens_mask"][i]) if not special]
            yield from told[_BORDER if i else 0:len(told) - (_BORDER if i + 1 < count else 0)]

    return entities
