"""Explains to users why a supervisor (the actor that runs tasks on a node) died, from the error that Ray raises. The
module `ray_backend` notices the death. This module knows the error texts of Ray 2.60, but does not import Ray."""

from __future__ import annotations

import re


def cause(error: Exception) -> str:
    """Returns one line for the user: the cause of a supervisor's death and, if there is one, the remedy. A supervisor
    is the actor that runs tasks on a node. `error` is the error that Ray raised."""
    text = str(error)
    if match := re.search(r"running low on memory.*? was (\S+) used / (\S+) limit", text, re.S):
        return (f"Ray killed it because its node ran low on memory ({match[1]} of {match[2]} used); stop what else "
                f"runs there, or let the stages declare more memory_mb so that fewer children run together")
    if getattr(error, "preempted", False):
        return "its node was preempted"
    if match := re.search(r"node was terminated(?: unexpectedly| expectedly)?: ?(.+)", text):
        return f"its node died: {match[1].strip()}"
    if "its node has died" in text:
        return "its node died"
    if "killed by `ray.kill`" in text:
        return "it was killed by ray.kill"
    if "raised in its creation task" in text:
        return f"it could not start: {text.strip().splitlines()[-1].strip()}"
    if match := re.search(r"Worker exit type: (\w+) Worker exit detail: (.+)", text):
        if "End of file" in match[2]:
            return "its process was killed from outside (SIGKILL, the kernel's OOM killer) or crashed"
        return f"its process ended ({match[1]}): {match[2].split('. ')[0].strip()}"
    if "unavailable" in text:
        detail = re.search(r"RPC error: ([^:]+?) rpc_code", text)
        return f"its process or its node is gone ({detail[1] if detail else 'it cannot be reached'})"
    return (text.strip().splitlines() or [type(error).__name__])[0]
