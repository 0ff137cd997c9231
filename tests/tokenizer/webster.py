"""The order in which samples are drawn from streams, computed by its definition one sample at a time: slow and
plain."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


class Node:
    """Divides its samples between its children by Webster's method. A child is a node or the index of a stream."""

    def __init__(self, children: Sequence[tuple[int, Node | int]]) -> None:
        self.children, self.drawn = children, [0] * len(children)
        self.weight = sum(weight for weight, _ in children)

    def draw(self) -> int:
        """Return the stream of the next sample. It is that of the child with the highest quotient w / (2c + 1), where w
        is its weight and c the number of its draws so far; of equal children, that of the first."""
        best = max(range(len(self.children)),
                   key=lambda i: (Fraction(self.children[i][0], 2 * self.drawn[i] + 1), -i))
        self.drawn[best] += 1
        child = self.children[best][1]
        return child.draw() if isinstance(child, Node) else child


def joined(children: Sequence[tuple[int, Node | int]]) -> tuple[int, Node | int]:
    """Build Huffman's tree: the two lightest nodes that have no node above them are joined, again and again. Of equally
    light ones, the older are taken. Returns (weight, node) of the root."""
    waiting = list(children)                                  # the oldest first
    while len(waiting) > 1:
        lightest = sorted(sorted(range(len(waiting)), key=lambda i: waiting[i][0])[:2])
        node = Node([waiting[i] for i in lightest])
        waiting = [*(child for i, child in enumerate(waiting) if i not in lightest), (node.weight, node)]
    return waiting[0]


def draw(n: int, weights: Sequence[int], groups: Sequence[Sequence[int]] = ()) -> list[int]:
    """Return the streams of the first n samples."""
    in_group = {s: group for group in groups for s in group}
    members = {min(in_group.get(s, [s])): in_group.get(s, [s]) for s in range(len(weights))}
    top: list[tuple[int, Node | int]] = []
    for _, streams in sorted(members.items()):
        leaves: list[tuple[int, Node | int]] = [(weights[s], s) for s in sorted(streams) if weights[s]]
        if leaves:
            top.append(joined(leaves))
    shares = [Fraction(weight, sum(weights)) for weight in weights if weight]
    few = not groups and len(shares) <= 8 and max(shares) * (len(shares) - 2) <= 3
    root = Node(top) if few else joined(top)[1]
    return [root.draw() if isinstance(root, Node) else root for _ in range(n)]
