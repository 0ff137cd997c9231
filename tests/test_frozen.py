"""Commands, settings and metric names are those in `frozen.json`. The figures of whole runs are compared by the tests
in tests/e2e, which make these runs."""

from __future__ import annotations

from pipeline.cli.reference import commands
from pipeline.engine.driver import metrics
from stages.catalog import READERS, STAGES, reader_class, stage_class
from tests.frozen import hold
from trainer.__main__ import COMMANDS, parser
from trainer.observe import prometheus


def test_commands_and_their_options():
    hold("commands", {name: sorted(word for p in command.params for word in (p.opts + p.secondary_opts))
                      for name, command in commands().items()})


def test_commands_of_the_trainer():
    found = {}
    for name in COMMANDS:
        [commands] = [a for a in parser(name)._actions if hasattr(a, "choices") and isinstance(a.choices, dict)]
        found[name] = sorted(word for a in commands.choices[name]._actions for word in a.option_strings or [a.dest])
    hold("commands of the trainer", found)


def test_settings_and_their_defaults():
    """Of every step and reader; resource files that are found by themselves have no default here."""
    found = {}
    for kind, names, load in (("step", STAGES, stage_class), ("reader", READERS, reader_class)):
        for name in names:
            found[f"{kind} {name}"] = {field: repr(info.get_default(call_default_factory=True))
                                       for field, info in load(name).Config.model_fields.items()}
    hold("settings", found)


def test_metrics():
    hold("metrics", {"pipeline": [[m.exported, m.kind, list(m.labels)] for m in metrics.METRICS],
                     "trainer": [[prometheus.PREFIX + m.name, m.kind, m.label] for m in prometheus.METRICS]})
