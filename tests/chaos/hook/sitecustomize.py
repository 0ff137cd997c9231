"""Imported by every Python process of a scenario before anything else. What it does to them stands in the environment.

CHAOS_LIMITS: JSON, other defaults for `pipeline.engine.limits.Limits` (drivers hand them to their supervisors).
"""

import json
import os
import sys

_ROLE = " ".join(sys.orig_argv)

if "pipeline.cli" in _ROLE and "CHAOS_LIMITS" in os.environ:
    import dataclasses

    from pipeline.engine import limits

    for _field in dataclasses.fields(limits.Limits):
        _default = json.loads(os.environ["CHAOS_LIMITS"]).get(_field.name)
        if _default is not None:
            limits.Limits.__init__.__defaults__ = tuple(
                _default if f.name == _field.name else d
                for f, d in zip(dataclasses.fields(limits.Limits), limits.Limits.__init__.__defaults__))
