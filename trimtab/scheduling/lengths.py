"""Length classes of prompts: cold prompts of one class prefill together, and waits are counted by class."""

from __future__ import annotations

import enum
from bisect import bisect_left

from trimtab.policy import Policy

Edges = tuple[int, ...]
"""Tokens of the longest prompt in each class but the last, ascending."""
LONGEST: Edges = (511, 1024, 4095, 8192)
"""By the default policy; that of LONG is the default of `serial.above`."""


class LengthClass(enum.StrEnum):
    """By prompt tokens, the shortest first."""

    SHORT = "short"
    STANDARD = "standard"
    MEDIUM = "medium"
    LONG = "long"
    GIANT = "giant"

    @staticmethod
    def of(prompt_tokens: int, edges: Edges = LONGEST) -> LengthClass:
        return _ALL[bisect_left(edges, prompt_tokens)]


def edges_of(policy: Policy) -> Edges:
    """Where the classes end by this policy. Edges that do not ascend are sorted; a class between two equal ones is empty."""
    c = policy.clusters
    return tuple(sorted((c.short_to, c.standard_to, c.medium_to, c.long_to)))


_ALL = tuple(LengthClass)
