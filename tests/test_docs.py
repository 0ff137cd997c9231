"""What README, CONTRIBUTING and docs/ say about the code is true: the files that they name, the layout of folders, the
worked example."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stages.catalog import READERS, STAGES
from stages.document import Document
from trainer.base.config import keys_of
from trainer.loop.config import TrainConfig
from trainer.optim.config import kinds
from trainer.tools.reference import BETWEEN, rewrite

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))))
PACKAGES = ("pipeline", "stages", "tokenizer", "trainer")


def code(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language, without their indentation."""
    blocks = re.findall(r"^( *)```(\w*)\n(.*?)^ *```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    return [re.sub(f"^{indent}", "", text, flags=re.M) for indent, kind, text in blocks if kind == language]


@pytest.mark.parametrize("page", PAGES)
def test_files_named_in_a_page_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = "|".join((*PACKAGES, "tests", "deploy", "docs", "demo", "benchmarks"))
    names = re.findall(rf"`((?:{folders})/[\w./*-]+)", text)
    missing = [n for n in names if not re.search("NAME|shouting", n) and not list(ROOT.glob(n.rstrip("./")))]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{target}#{anchor}"


def test_readme_names_the_folders_that_are_there():
    [layout] = [block for block in code("README.md", "") if block.startswith("pipeline/")]
    lines = re.findall(r"^(\w+)/ +\{(.*)\}", layout, re.M)
    drawn = {package: set(re.findall(r"\w+", names)) for package, names in lines}
    folders = {package: {p.name for p in (ROOT / package).iterdir() if (p / "__init__.py").exists()}
               for package in PACKAGES}
    assert drawn == folders


def test_every_step_reader_and_optimiser_stands_in_the_docs():
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES if page.startswith("docs/")}
    everything = "".join(pages.values())
    assert [name for name in STAGES if f"`{name}`" not in everything] == []
    assert [name for name in READERS if f"`{name}`" not in everything and f"read: {name}" not in everything] == []
    assert [name for name in kinds() if f"`{name}`" not in pages["docs/training.md"]] == []


def test_the_settings_of_a_training_are_listed_with_their_defaults():
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert rewrite(page) == page, "make docs"
    listed = dict(re.findall(r"^([a-z_.0-9]+) +(\S.*)$", BETWEEN.search(page)[0], re.M))
    assert listed["model.layers"] == "(required)" and listed["checkpoint.async"] == "false"
    taken = {f"{section}.{key}".removeprefix("train.") for section, keys in keys_of(TrainConfig, "train").items()
             for key in keys}
    assert taken - {"model.preset"} <= {key.rsplit(".", n)[0] for key in listed for n in range(3)}


def test_the_filter_of_contributing_passes_its_vectors():
    [source], [vectors] = code("CONTRIBUTING.md", "python"), code("CONTRIBUTING.md", "json")
    namespace: dict[str, type] = {"__name__": "shouting"}
    exec(source, namespace)
    for case in map(json.loads, vectors.splitlines()[1:]):
        stage, doc = namespace["Shouting"](case.get("config")), Document("0" * 32, case["text"])
        stage.setup()
        assert stage.process(doc) == case["reason"]
        assert {**doc.signals, **case.get("signals", {})} == doc.signals
