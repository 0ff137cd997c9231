"""Every line of every tests/conformance/*.jsonl is checked against its stage. The README there describes the format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages import vectors
from stages.catalog import STAGES, stage_class
from stages.document import Document
from stages.stage import Stage, StageConfig, decision, role_of
from stages.vectors import differences, read_vectors

FOLDER = Path(__file__).parents[1] / "conformance"
FILES = sorted(FOLDER.glob("*.jsonl"))


def check(stage: Stage, case: dict[str, Any]) -> None:
    assert differences(stage, case) == []


def stage_of(name: str, config: str) -> Stage:
    return vectors.stage_of(name, config, FOLDER)


def stages_of(path: Path) -> list[tuple[Stage, dict[str, Any]]]:
    head, cases = read_vectors(path)
    return [(stage_of(head["stage"], json.dumps(case.get("config", {}), sort_keys=True)), case) for case in cases]


def every_case() -> Iterator[Any]:
    for path in FILES:
        try:
            head, cases = read_vectors(path)
        except ValueError:
            continue                                    # test_every_file_is_readable says so
        for number, case in enumerate(cases):
            yield pytest.param(head["stage"], case, id=f"{path.stem}-{number}-{case.get('name', '')[:40]}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_readable(path):
    head, _ = read_vectors(path)
    assert head["stage"] in STAGES or ":" in head["stage"], f"{path.name}: no step '{head['stage']}'"


@pytest.mark.parametrize(("stage", "case"), list(every_case()))
def test_vector(stage, case):
    check(stage_of(stage, json.dumps(case.get("config", {}), sort_keys=True)), case)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_other_thresholds_replay(path):
    pairs = stages_of(path)
    others = vectors.by_thresholds(stage for stage, _ in pairs)
    for stage, case in pairs:
        assert vectors.replay_differences(stage, case, others[stage]) == [], case.get("name")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_stored_signals_give_the_verdict(path):
    """A reason that stored signals give for one case they give for all; for other reasons they give none."""
    try:
        verdicts = [(vectors.stored_verdict(stage, doc), reason, case.get("name")) for stage, case in stages_of(path)
                    for reason, doc in [vectors.outcome(stage, case)]]
    except NotImplementedError:
        return                                          # a replay runs the step itself
    stored = {verdict for verdict, *_ in verdicts}
    assert [v for v in verdicts if v[0] != (v[1] if v[1] in stored else None)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kept_documents_are_within_the_bounds(path):
    """Reports draw the bounds that a stage declares: a kept document outside one would give the lie to them."""
    for stage, case in stages_of(path):
        reason, doc = vectors.outcome(stage, case)
        outside = [b for b in stage.bounds() if b.signal in doc.signals and not b.holds(doc.signals[b.signal])]
        assert reason is not None or not outside, case.get("name")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_bounds_name_signals_and_decisions(path):
    for stage, _ in stages_of(path):
        for bound in stage.bounds():
            assert bound.signal in stage.signals or bound.signal in stage.reads()
            assert role_of(type(stage.config), bound.key.partition(".")[0]) == "decision"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_workers_get_the_same_settings_as_json(path):
    for stage, _ in stages_of(path):
        assert type(stage.config).model_validate(stage.config.model_dump(mode="json")) == stage.config


@pytest.mark.parametrize("content", ["", '{"stage": "c4"}\n', "not json\n", '["list"]\n', '{"text": "x"}\n',
                                     '{"text": "x", "reason": null, "reasn": "typo"}\n', '{"stage": "c4"}\n\n'])
def test_files_that_say_nothing_fail(tmp_path, content):
    path = tmp_path / "c4.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"c4\.jsonl"):
        read_vectors(path)


def test_every_filter_has_vectors():
    """Those whose numbers come from a model have none: they would differ with the model."""
    classes = {name: stage_class(name) for name in STAGES}
    filters = {name for name, cls in classes.items()
               if cls.__module__.startswith("stages.filter.") and cls.exact and cls.drops}
    missing = filters - {read_vectors(path)[0]["stage"] for path in FILES}
    assert not missing, f"no tests/conformance/NAME.jsonl for {', '.join(sorted(missing))}"


class Torn(Stage):
    """A wrong stage: it drops by its threshold, but its `verdict` always uses 0.95."""

    name, signals = "torn", ("capitals",)

    class Config(StageConfig):
        most: float = decision(0.5, "largest share of capitals")

    def process(self, doc: Document) -> str | None:
        doc.signals["capitals"] = sum(map(str.isupper, doc.text)) / len(doc.text)
        return "torn" if doc.signals["capitals"] > self.config.most else None

    def verdict(self, doc: Document) -> str | None:
        return "torn" if doc.signals["capitals"] > 0.95 else None


class Early(Torn):
    """A correct stage that measures its second signal only for documents that the first one keeps."""

    name, signals = "early", ("capitals", "spaces")

    def process(self, doc: Document) -> str | None:
        doc.signals["capitals"] = sum(map(str.isupper, doc.text)) / len(doc.text)
        if (reason := self.verdict(doc)) is None:
            doc.signals["spaces"] = float("nan")
        return reason

    def verdict(self, doc: Document) -> str | None:
        return "early" if doc.signals["capitals"] > self.config.most else None


class Noting(Early):
    """A wrong stage: it writes its threshold into the document, which a replay of verdicts from signals would not
    do."""

    name = "noting"

    def process(self, doc: Document) -> str | None:
        doc.meta["most"] = self.config.most
        return super().process(doc)


def replayed(cls: type[Stage], *texts: str) -> list[str]:
    stages = [cls(), cls(most=0.8), cls(most=0.8)]
    others = vectors.by_thresholds(stages)
    return [line for text in texts for stage in stages[:2]
            for line in vectors.replay_differences(stage, {"text": text}, others[stage][:1])]


def test_a_verdict_that_is_not_that_of_process_fails():
    assert replayed(Torn, "ABCd") == [
        "replay under most 0.8: verdict gives None as before, but reason is None instead of 'torn'",
        "replay under most 0.5: verdict gives None as before, but reason is 'torn' instead of None"]
    assert [line.partition(", but ")[2] for line in replayed(Noting, "abcd")] == [
        "meta is {'most': 0.8} instead of {'most': 0.5}", "meta is {'most': 0.5} instead of {'most': 0.8}"]


def test_a_signal_that_only_kept_documents_have_is_sound():
    assert replayed(Early, "abcd", "ABCd", "ABCD") == []


def test_a_wrong_vector_fails():
    right = {"text": ["Just a few words.\n", ["No more words. ", 2]], "reason": "too_few_sentences",
             "signals": {"c4_sentences": 3}}
    stage = stage_of("c4", "{}")
    check(stage, right)
    for wrong in ({"reason": None}, {"text_after": "other"}, {"signals": {"c4_sentences": 4}}, {"language_after": "en"},
                  {"meta_after": {"title": "x"}}, {"signals": {"c4_sentences": None}}):
        with pytest.raises(AssertionError):
            check(stage, {**right, **wrong})
