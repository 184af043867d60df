"""A node's closed windows of late."""

from __future__ import annotations

from controlplane.seen import NodeSeen, Window


def since(node: NodeSeen, moment: float) -> list[Window]:
    """Those that ended after `moment`, the newest first.

    Not a node's first: its counters may be of all the time since the process began, which another leader has seen.
    """
    found = []
    for window in reversed(node.windows):
        if window.ended <= moment or window.number <= 1:
            break
        found.append(window)
    return found
