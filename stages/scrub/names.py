"""Finds names of persons and postal addresses by a model, because no rule can find them. The model must have been
trained elsewhere.

The model is a folder on this machine. The folder is used only as data: nothing is fetched from the network, and no code
in the folder runs. It holds a spaCy pipeline (as `nlp.to_disk` writes it: an entity recogniser or ruler) or a Hugging
Face model of token classification (as `save_pretrained` writes it: config.json, model.safetensors, tokenizer.json).
`LABELS` says which label of a model stands for which kind of data. Places that are not addresses (GPE, LOC, CITY …) and
organisations are not personal data.
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
    """A loaded model that finds personal data in texts: names of persons, postal addresses, or both."""

    def __init__(self, folder: str | Path, kinds: Iterable[str]) -> None:
        """Load the model in `folder`. `kinds` are the kinds of data to find, keys of LABELS. Raises ValueError if the
        folder holds no supported model, if a library that the model needs is missing, or if the model has no label for
        one of the kinds."""
        for message in problems(folder, kinds):
            raise ValueError(message)
        self._kind = {label: kind for kind in kinds for label in LABELS[kind]}
        self._entities: Entities = (_spacy if _is_spacy(Path(folder)) else _transformer)(Path(folder))

    def find(self, text: str) -> Iterator[tuple[int, int, str, str]]:
        """Find personal data in a text. Yields (start, end, kind, label) of each value, in order, without overlaps.

        Neighbouring values of one kind become one value, with the label of its first part, in two cases: they are parts
        of an address, or their labels differ (first name and surname). At most three blanks, commas and similar signs
        may stand between them.
        """
        pending: tuple[int, int, str, str] | None = None
        for start, end, label in self._entities(text):
            kind = self._kind.get(normalised_label(label))
            while start < end and text[start].isspace():
                start += 1
            while start < end and text[end - 1].isspace():
                end -= 1
            if kind is None or start >= end or not any(map(str.isalnum, text[start:end])):
                continue
            if pending is not None and start < pending[1]:
                continue
            if pending is not None and pending[2] == kind and _BETWEEN.fullmatch(text, pending[1], start) \
                    and (normalised_label(label) != pending[3] or kind == "addresses"):
                pending = pending[0], end, kind, pending[3]
                continue
            if pending is not None:
                yield pending
            pending = start, end, kind, normalised_label(label)
        if pending is not None:
            yield pending


def normalised_label(label: str) -> str:
    """Return the label of a model in the form that LABELS uses: `B-GIVEN_NAME` becomes GIVENNAME."""
    return _PREFIX.sub("", label.upper(), count=1).replace("_", "").replace("-", "").replace(" ", "")


def libraries(folder: str | Path) -> tuple[str, ...]:
    """Return the Python distributions whose versions affect what the model in `folder` finds."""
    return ("spacy", "thinc") if _is_spacy(Path(folder)) else ("safetensors", "tokenizers", "torch", "transformers")


def memory_mb(folder: str | Path) -> int:
    """Return an estimate of the memory in MB that a worker needs to run the model in `folder`."""
    size = sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()) >> 20
    return (400 if _is_spacy(Path(folder)) else 1200) + 3 * size


def problems(folder: str | Path, kinds: Iterable[str]) -> list[str]:
    """Check whether a folder holds a model that finds the kinds of personal data in `kinds`. Returns messages that say
    what is wrong and what to do; [] if nothing is. The model is not loaded. Raises ValueError if the file that
    describes the model (meta.json or config.json) holds no JSON object."""
    path = Path(folder)
    if _is_spacy(path):
        missing, extra = [name for name in ("spacy",) if find_spec(name) is None], "pipeline"
        declared = _read_json(path / "meta.json").get("labels")
        lists = declared.values() if isinstance(declared, dict) else ()
        labels = [label for names in lists if isinstance(names, list) for label in names]
    elif (path / "config.json").is_file():
        missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
        extra, declared = "encoder", _read_json(path / "config.json").get("id2label")
        labels = list(declared.values()) if isinstance(declared, dict) else []
    else:
        return [f"{path} is no folder of a model: it holds neither the meta.json of a spaCy pipeline nor the "
                "config.json of a Hugging Face model"]
    if missing:
        return [f"{path} needs {', '.join(missing)}: pip install 'tokenmill[{extra}]'"]
    own_labels = {normalised_label(label) for label in labels if isinstance(label, str)}
    listed = ", ".join(sorted(own_labels)[:30]) or "none"
    return [f"{path} has no label for {kind}; it has {listed}, of which {kind} are "
            f"{', '.join(sorted(LABELS[kind])[:4])} …" for kind in kinds if not own_labels & LABELS[kind]]


def _is_spacy(folder: Path) -> bool:
    return (folder / "meta.json").is_file()


def _read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content


def _spacy(folder: Path) -> Entities:
    import spacy

    # parts that tag words and split sentences are not needed to find names (`tok2vec` is)
    nlp = spacy.load(folder, exclude=["tagger", "parser", "senter", "lemmatizer", "attribute_ruler", "morphologizer"])

    def entities(text: str) -> Iterator[tuple[int, int, str]]:
        for offset, piece in _pieces(text, _PIECE):
            for entity in nlp(piece).ents:
                yield offset + entity.start_char, offset + entity.end_char, entity.label_

    return entities


def _pieces(text: str, longest: int) -> Iterator[tuple[int, str]]:
    """Cut a text into pieces of at most `longest` characters, so that a model can read it piece by piece. A cut is made
    after the last line break in the second half of a piece, or else after the last space in that half, or else inside a
    word. Yields (offset of the piece in the text, piece)."""
    start = 0
    while start < len(text):
        end = min(start + longest, len(text))
        if end < len(text):
            middle = start + longest // 2
            cut = max(text.rfind("\n", middle, end), 0) or max(text.rfind(" ", middle, end), 0)
            end = cut + 1 if cut else end
        yield start, text[start:end]
        start = end


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
            kind, between = normalised_label(label), text[begun[1]:start] if begun is not None else ""
            if begun is not None and kind == begun[2] and not between.strip() and not (between and label[:1] in "BSU"):
                begun = begun[0], end, kind
                continue
            if begun is not None:
                yield begun
            begun = None if kind == "O" else (start, end, kind)
        if begun is not None:
            yield begun

    def tokens(text: str) -> Iterator[tuple[int, int, str]]:
        """Label each token of a text. Yields (start, end, label). The model reads a long text in windows that overlap.
        A token in two windows is yielded once, with the label from the window in which it is farther from a border."""
        windows = tokenizer(text, truncation=True, max_length=longest, stride=2 * _BORDER, verbose=False,
                            return_overflowing_tokens=True, return_offsets_mapping=True,
                            return_special_tokens_mask=True)
        count = len(windows["input_ids"])
        for number in range(count):
            with torch.inference_mode():
                window = {key: torch.tensor([windows[key][number]]) for key in ("input_ids", "attention_mask")}
                best = model(**window).logits[0].argmax(-1).tolist()
            offsets, specials = windows["offset_mapping"][number], windows["special_tokens_mask"][number]
            labelled = [(*place, names[label])
                        for place, label, special in zip(offsets, best, specials) if not special]
            yield from labelled[_BORDER if number else 0:len(labelled) - (_BORDER if number + 1 < count else 0)]

    return entities
