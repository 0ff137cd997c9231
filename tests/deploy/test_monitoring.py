"""deploy/monitoring: the alerts and the dashboard use metrics and labels that exist, in PromQL (the query language of
Prometheus) that can be parsed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.engine.driver.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
OURS = {m.exported: m for m in METRICS}
RULES = [rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
         for rule in group["rules"]]
BOARD = json.loads((MONITORING / "grafana.json").read_text())


def rays_own() -> set[str]:
    """Return the names of the metrics that Ray's node agents export. They are read from Ray's source text, because
    importing it would start half a dashboard."""
    ray = pytest.importorskip("ray")
    agent = Path(ray.__file__).parent / "dashboard" / "modules" / "reporter" / "reporter_agent.py"
    return {f"ray_{name}" for name in re.findall(r'^    "(\w+)": Gauge\(', agent.read_text(), re.M)}


def selectors(node: Any) -> Iterator[Any]:
    """Yield all vector selectors below a node of a PromQL syntax tree."""
    if type(node).__name__ == "VectorSelector":
        yield node
    for name in ("lhs", "rhs", "expr", "vs", "param", "vector_selector"):
        below = getattr(node, name, None)
        if below is not None and type(below).__module__ == "promql_parser":
            yield from selectors(below)
    for below in getattr(node, "args", None) or ():
        yield from selectors(below)


def used(expression: str) -> set[str]:
    """Return the metrics that a PromQL expression reads. Fails if the expression cannot be parsed, or names a label
    that one of our metrics does not have."""
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    found = list(selectors(promql.parse(expression)))
    assert len(found) == len(re.findall(r"\bray_\w+", expression))      # the walk saw every one
    for selector in found:
        for matcher in selector.matchers.matchers:
            if selector.name in OURS:
                assert matcher.name in OURS[selector.name].labels, f"{selector.name} has no label {matcher.name}"
    return {s.name for s in found}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r["alert"])
def test_alerts_read_metrics_that_exist(rule):
    names = used(rule["expr"])
    assert names and names <= OURS.keys() | rays_own()
    assert rule["labels"]["severity"] in ("warning", "critical")
    by = set(re.findall(r"\bby \(([^)]*)\)", rule["expr"])[0].replace(" ", "").split(","))
    mentioned = re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))
    assert mentioned and set(mentioned) <= by           # an alert says whose it is


def queries() -> Iterator[str]:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$run", ".+")
    for annotation in BOARD["annotations"]["list"]:
        yield annotation["expr"]


def test_the_dashboard_reads_metrics_that_exist_and_shows_all_of_ours():
    names = {name for query in queries() for name in used(query)}
    assert names - OURS.keys() <= rays_own()
    assert names >= OURS.keys()
    for variable in BOARD["templating"]["list"]:
        for name in re.findall(r"\bray_\w+", json.dumps(variable)):
            assert name in OURS


def test_a_wrong_query_is_noticed():
    assert used("rate(ray_tokenmill_bytes_total[5m])") == {"ray_tokenmill_bytes_total"}
    with pytest.raises(AssertionError, match="no label state"):
        used('ray_tokenmill_bytes_total{state="done"}')
    with pytest.raises(ValueError):
        used("sum by (run (ray_tokenmill_slots)")
    assert not used("ray_tokenmill_bytes") <= OURS.keys()


def test_grafana_reads_the_dashboard():
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is missing")
    board = models.Dashboard.from_json(BOARD)
    assert board.uid == "tokenmill" and len(board.panels) == len(BOARD["panels"]) > 10
    assert {p.type_val for p in board.panels} == {"stat", "timeseries"}
    assert [v.name for v in board.templating.list_val] == ["datasource", "run"]


def test_panels_have_ids_titles_and_places_of_their_own():
    panels = BOARD["panels"]
    for key in ("id", "title"):
        assert len({p[key] for p in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["description"] and panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_prometheus_scrapes_the_ports_ray_is_started_with():
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["alerts.yaml"]
    pods = next(c for c in config["scrape_configs"] if c["job_name"] == "ray-pods")
    kept = [r["regex"] for r in pods["relabel_configs"] if r.get("action") == "keep"]
    for name in ("rayjob", "raycluster"):
        text = (ROOT / "deploy" / "kuberay" / f"{name}.yaml").read_text()
        assert "name: metrics, containerPort: 8080" in text and "app.kubernetes.io/part-of: tokenmill" in text
    assert kept == ["tokenmill", "metrics"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (it comes with Prometheus)")
@pytest.mark.parametrize("what", ["check", "test"])
def test_promtool_fires_the_alerts_when_it_should(what, tmp_path):
    """The unit tests of the rules in alerts_test.yaml."""
    rules = MONITORING / "alerts.yaml"
    tests = tmp_path / "tests.yaml"
    tests.write_text((Path(__file__).parent / "alerts_test.yaml").read_text().replace("ALERTS", str(rules)))
    done = subprocess.run(["promtool", what, "rules", str(rules if what == "check" else tests)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
