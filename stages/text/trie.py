"""Regular expressions for one of many strings, built as a trie, since `re` tries the branches of an alternation one by
one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def trie_pattern(strings: Iterable[str]) -> str:
    """A pattern that matches what the alternation of the strings, longest first, would match.

    Raises:
        ValueError: there is no string, or an empty one.
    """
    tree: dict[str, Any] = {}
    for string in strings:
        if not string:
            raise ValueError("an empty string matches everywhere: take it out of the list")
        node = tree
        for c in string:
            node = node.setdefault(c, {})
        node[""] = {}
    if not tree:
        raise ValueError("no string to match")
    return _pattern(tree)


def _pattern(root: dict[str, Any]) -> str:
    """The regular expression of a trie. A loop builds it from the leaves up. Recursion would fail on a string with more
    characters than Python allows nested calls."""
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(child for c, child in node.items() if c)
    done: dict[int, str] = {}
    for node in reversed(order):
        branches = [re.escape(c) + done[id(node[c])] for c in sorted(node) if c]
        if not branches:
            done[id(node)] = ""
        elif len(branches) == 1 and "" not in node:
            done[id(node)] = branches[0]
        else:
            done[id(node)] = f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"
    return done[id(root)]
