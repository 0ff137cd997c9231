"""report.json against its schema: real reports are valid, and every unknown, missing or mistyped field is an error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from pipeline.report.collect import VERSION
from pipeline.report.reference import BETWEEN, models, rewrite
from pipeline.report.schema import Report
from tests.e2e.report_site import Site

PAGE = Path(__file__).resolve().parents[2] / "docs" / "report.md"
#: (part, field) of what may be left out, because not every document or step has it
LEFT_OUT = {("DatasetFigures", "contamination"), ("DatasetFigures", "dropped_licences"),
            ("DatasetFigures", "dropped_pii"), ("SourceFigures", "lost"), ("GraphNode", "dropped"),
            ("ClusterFigures", "components"), ("LossPoint", "lr"),
            *((part, field) for part in ("Excerpt", "RemovedDocument")
              for field in ("kept", "similarity", "match", "url_match")), ("Reason", "unmarked"),
            ("StreamFigures", "packing"), ("StreamFigures", "streams"), ("MixtureRow", "padding"),
            ("TrainingFigures", "tasks"), ("TrainingFigures", "task_curves"), ("Edge", "against"), ("Edge", "docs"),
            ("Edge", "tokens"), ("ReadExtent", "uncovered"),
            *((part, field) for part in ("FunnelRow", "TotalStep") for field in ("bytes", "tokens")),
            *(("DuplicateFigures", field) for field in ("candidates", "clusters", "max_cluster", "cut"))}


@pytest.fixture
def report(report_site: Site) -> dict:
    return report_site.report


def test_a_real_report_is_valid(report):
    Report.model_validate(report)
    assert report["version"] == VERSION == 6


def shortened(value: Any) -> Any:
    """Return a copy of a value with only the first two items of each list."""
    if isinstance(value, list):
        return [shortened(item) for item in value[:2]]
    return {key: shortened(item) for key, item in value.items()} if isinstance(value, dict) else value


def objects(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each mapping in a value."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from objects(item, (*path, i))
    elif isinstance(value, dict):
        yield path
        for key, item in value.items():
            yield from objects(item, (*path, key))


def at(document: Any, path: tuple) -> Any:
    for key in path:
        document = document[key]
    return document


def model_at(path: tuple) -> type[BaseModel] | None:
    """Return the model (pydantic class) of the object at a path of the report, or None if the keys of the object are
    names."""
    kind: Any = Report
    for key in path:
        if isinstance(kind, type):
            kind = next(f.annotation for name, f in kind.model_fields.items() if (f.alias or name) == key)
            if get_origin(kind) is UnionType:
                [kind] = [inner for inner in get_args(kind) if inner is not type(None)]
        else:
            kind = get_args(kind)[-1]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def changes(path: tuple, model: type[BaseModel], report: dict) -> Iterator[tuple[str, dict]]:
    """Yield (what was changed, changed report) for each field of the object at `path`: with a field added, removed, or
    given a value of another type."""
    for field, value in at(report, path).items():
        for name in ("more", "less", "other type"):
            changed = copy.deepcopy(report)
            target = at(changed, path)
            if name == "more":
                target[f"{field}_"] = value
            elif name == "other type":
                target[field] = "a word" if isinstance(value, dict) else {"an": ["object"]}
            elif (model.__name__, field) in LEFT_OUT:
                continue
            else:
                del target[field]
            yield f"{model.__name__}.{field}: {name}", changed


def valid(report: dict) -> bool:
    try:
        Report.model_validate(report)
    except ValidationError:
        return False
    return True


def test_a_changed_report_is_not(report):
    tried: set[type[BaseModel]] = set()
    report = shortened(report)
    assert valid(report)
    for path in objects(report):
        model = model_at(path)
        if model is None or model in tried:
            continue
        tried.add(model)
        for change, changed in changes(path, model, report):
            assert not valid(changed), f"accepted: {change}"
    assert {m.__name__ for m in tried} >= {"Report", "Made", "Totals", "DatasetFigures", "Reason", "Excerpt",
                                           "DuplicateFigures", "StreamFigures",
                                           "MixtureRow", "StageCost", "Lineage", "PlanOrder", "Pair"}


def test_every_field_says_what_it_means():
    for model in models(Report):
        assert (model.__doc__ or "").strip().endswith("."), model
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            assert field.is_required() == ((model.__name__, field.alias or name) not in LEFT_OUT), name
            assert field.is_required() or "left out" in field.description, f"{model.__name__}.{name}"


def test_the_page_has_the_schema_as_it_is():
    page = PAGE.read_text(encoding="utf-8")
    assert rewrite(page) == page, "make docs"
    printed = BETWEEN.search(page)[0]
    assert all(f"### {model.__name__}\n" in printed for model in models(Report))
    assert "| `pass` | string |" in printed and "| `in` | integer | documents |" in printed
    with pytest.raises(ValueError, match="0 places"):
        rewrite("no marks")


def test_the_report_of_another_recipe_is_valid(tmp_path, tokenmill):
    """Languages, scores, licences and repeated runs, without tokens."""
    (tmp_path / "in").mkdir()
    rows = [{"text": f"Some words about number {i}, and a few more of them.", "licence": licence}
            for i, licence in enumerate(["MIT", "mit", "Apache-2.0", "Mine", None])]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "r.yaml").write_text("version: 1\nsources: {rows: {read: jsonl, path: in/*.jsonl}}\n"
                                     "datasets: {all: {from: rows, steps: [exact]}}\n")
    done = tokenmill("run", tmp_path / "r.yaml", "--store", tmp_path / "s", "--backend", "inline", "--quiet", "--name",
                     "r")
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "s/report.json").read_text())
    Report.model_validate(report)
    assert report["licences"] == {"all": {"rows": {"mit": 2, "apache-2.0": 1, "other": 1}}}
