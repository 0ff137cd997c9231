"""Builds a fast regular expression that matches any of many strings. The expression has the form of a trie (prefix
tree), because `re` would try the alternatives of `a|b|c` one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def trie_pattern(strings: Iterable[str]) -> str:
    """Return a pattern that matches any of the strings, and, where several match, the longest of them.

    Raises:
        ValueError: there is no string, or a string is empty.
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
    """Return the regular expression of a trie (prefix tree) of strings. A loop builds the expression from the leaves
    up. Recursion would fail on a long string, because Python limits the number of nested calls."""
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(child for c, child in node.items() if c)
    patterns: dict[int, str] = {}
    for node in reversed(order):
        branches = [re.escape(c) + patterns[id(node[c])] for c in sorted(node) if c]
        if not branches:
            patterns[id(node)] = ""
        elif len(branches) == 1 and "" not in node:
            patterns[id(node)] = branches[0]
        else:
            patterns[id(node)] = f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"
    return patterns[id(root)]
