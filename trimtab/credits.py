"""What is free at a worker, divided among those who send it requests; pure."""

from __future__ import annotations

from collections.abc import Sequence


def divide(free: int, wants: Sequence[int]) -> list[int]:
    """Each one's part of `free`, which they are together: first what they want, as evenly as it goes, then evenly what nobody wants, so that
    who wants nothing yet may begin at once. What can't be divided goes to those who stand first.
    """
    parts = [0] * len(wants)
    left = max(0, free)
    wanting = [i for i, want in enumerate(wants) if want > 0]
    while wanting and left:
        each = max(1, left // len(wanting))
        for i in wanting[:left]:
            part = min(wants[i] - parts[i], each)
            parts[i] += part
            left -= part
        wanting = [i for i in wanting if parts[i] < wants[i]]
    if parts:
        each, over = divmod(left, len(parts))
        parts = [part + each + (i < over) for i, part in enumerate(parts)]
    return parts
