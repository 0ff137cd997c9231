"""Each alert is raised when it should be, once, and cleared once."""

from __future__ import annotations

import pytest

from trainer.base.config import ConfigError, build
from trainer.observe.alerts import ENOUGH, RULES, SCORED, Alerts, AlertsConfig


def changes(found) -> list[tuple[str, bool]]:
    return [(alert.rule, alert.on) for alert in found]


def intervals(alerts: Alerts, speeds, phase="stable", data=0.0, since=0.0) -> list[tuple[str, bool]]:
    return changes(a for speed in speeds for a in alerts.interval(phase, speed, data, since))


def test_throughput_below_the_usual_is_told_once_and_when_it_is_over():
    alerts = Alerts(AlertsConfig())
    assert intervals(alerts, [100, 104, 96] * 4) == []
    assert intervals(alerts, [81]) == []                             # −19 %
    found = alerts.interval("stable", 79, 0.0, 0.0)
    assert changes(found) == [("throughput", True)]
    assert found[0].text.startswith(
        "79 tokens/s, 21% below the usual 100: the training takes longer, but its result is not affected")
    assert "data_wait_ms and straggler in metrics.jsonl" in found[0].text
    assert intervals(alerts, [70, 79]) == []
    assert alerts.standing.keys() == {"throughput"}
    assert [alert.text for alert in alerts.interval("stable", 100, 0.0, 0.0)] == ["100 tokens/s, usual are 98"]
    assert intervals(alerts, [100]) == [] and not alerts.standing


def test_throughput_needs_a_usual_and_is_compared_within_a_phase():
    alerts = Alerts(AlertsConfig())
    assert intervals(alerts, [100] * (ENOUGH - 1) + [50]) == []      # not enough to know
    alerts = Alerts(AlertsConfig())
    assert intervals(alerts, [100] * 20) == []
    assert intervals(alerts, [40] * 20, phase="long") == []          # longer sequences are slower
    assert intervals(alerts, [30], phase="long") == [("throughput", True)]


def test_evaluation_of_one_stream_against_its_own_best():
    alerts = Alerts(AlertsConfig(evaluation=0.1))

    def see(web, code):
        return changes(alerts.evaluation({"web": {"loss": web}, "code": {"loss": code}}))

    assert see(5.0, 3.0) == []
    assert see(4.0, 3.09) == []
    assert see(3.5, 3.11) == [("evaluation", True)]                  # the mean has fallen; code has risen
    assert "code 3.110, its best was 3.000" in alerts.standing["evaluation"]
    assert see(3.65, 3.2) == []                                      # stands already
    assert see(3.4, 3.15) == []                                      # one of two is over
    assert see(3.4, 3.05) == [("evaluation", False)]


def test_a_restart_remembers_the_best_and_what_stands():
    lines = [{"event": "eval", "streams": {"web": {"loss": loss}}} for loss in (3.0, 2.0, 2.5)]
    alerts = Alerts(AlertsConfig(), [{"event": "step"}, *lines])
    assert alerts.best == {"web": 2.0} and "evaluation" in alerts.standing
    assert changes(alerts.evaluation({"web": {"loss": 2.3}})) == []
    assert changes(alerts.evaluation({"web": {"loss": 2.05}})) == [("evaluation", False)]


def test_spike_score():
    alerts = Alerts(AlertsConfig(spikes=0.01))
    seen = [changes(alerts.step(i % 50 == 0)) for i in range(1, SCORED + 1)]
    raised = [i for i, found in enumerate(seen, 1) if found]
    assert raised == [550] and seen[549] == [("spikes", True)]       # the eleventh of a thousand: more than 1 %
    assert alerts.spike_score == pytest.approx(0.02)
    seen = [changes(alerts.step(False)) for _ in range(SCORED)]
    assert [found for found in seen if found] == [[("spikes", False)]]
    assert alerts.spike_score == 0


def test_data_wait_and_missing_checkpoints():
    alerts = Alerts(AlertsConfig(data_wait=0.1, checkpoint=30))
    assert intervals(alerts, [100], data=0.9) == []                  # the first interval fills the pipe
    assert intervals(alerts, [100] * 3, data=0.09, since=1799) == []
    assert intervals(alerts, [100], data=0.11) == [("data_wait", True)]
    assert intervals(alerts, [100], data=0.11, since=1801) == [("checkpoint", True)]
    assert "30 minutes" in alerts.standing["checkpoint"]
    assert intervals(alerts, [100], data=0.02) == [("data_wait", False), ("checkpoint", False)]


def test_null_turns_a_rule_off_and_nonsense_is_refused():
    off = build(AlertsConfig, dict.fromkeys(RULES), "train.alerts")
    alerts = Alerts(off)
    assert intervals(alerts, [100] * 20 + [1], data=1.0, since=1e9) == []
    assert changes(alerts.evaluation({"a": {"loss": 1.0}}) + alerts.evaluation({"a": {"loss": 9.0}})) == []
    assert changes(a for _ in range(SCORED) for a in alerts.step(True)) == []
    for bad in ({"throughput": 1.5}, {"evaluation": 0.0}, {"tasks": 0.0}, {"spikes": -1.0}, {"checkpoint": 0}):
        with pytest.raises(ConfigError, match=f"train.alerts: {next(iter(bad))} must be above 0"):
            build(AlertsConfig, bad, "train.alerts")
    large = {"evaluation": 2.5, "checkpoint": 600.0}
    assert build(AlertsConfig, large, "x") == AlertsConfig(**large)


def test_a_task_that_falls_beyond_its_noise_is_told():
    alerts = Alerts(AlertsConfig(tasks=3.0))

    def see(step, **scores):
        return changes(alerts.tasks(step, {name: {"measure": measure, "value": value, "stderr": 0.01}
                                           for name, (measure, value) in scores.items()}))

    assert see(100, piqa=("bpb", 2.0), blimp=("pairs", 0.5)) == []
    assert see(200, piqa=("bpb", 1.5), blimp=("pairs", 0.7)) == []
    assert see(300, piqa=("bpb", 1.54), blimp=("pairs", 0.66)) == []   # 2.8 standard errors of a difference
    assert see(400, piqa=("bpb", 1.2), blimp=("pairs", 0.65)) == [("tasks", True)]
    assert "blimp pairs 0.6500 ± 0.0141 at step 400, its best was 0.7000 at step 200" in alerts.standing["tasks"]
    assert see(500, blimp=("pairs", 0.71), piqa=("bpb", 1.25)) == []   # stands: now piqa has risen, and less is better
    assert see(600, piqa=("bpb", 1.21)) == [("tasks", False)]
    assert see(700, piqa=("fg", 0.1)) == []                            # another measure has another scale
    lines = [{"event": "tasks", "step": step, "main": {"a": {"measure": "word", "value": value, "stderr": 0.01}}}
             for step, value in ((1, 0.5), (2, 0.3))]
    assert "tasks" in Alerts(AlertsConfig(), lines).standing           # after a restart


def test_a_task_without_noise_or_limit_gives_no_alert():
    for config, stderr in ((AlertsConfig(tasks=None), 0.01), (AlertsConfig(), None), (AlertsConfig(), 0.0)):
        alerts = Alerts(config)
        for step, value in ((1, 0.9), (2, 0.1)):
            assert alerts.tasks(step, {"a": {"measure": "word", "value": value, "stderr": stderr}}) == []
