"""Length classes of prompts: cold prompts of one class prefill together, and waits are counted by class."""

from __future__ import annotations

import enum
from bisect import bisect_left


class LengthClass(enum.StrEnum):
    """By prompt tokens, the shortest first."""

    SHORT = "short"
    STANDARD = "standard"
    MEDIUM = "medium"
    LONG = "long"
    GIANT = "giant"

    @staticmethod
    def of(prompt_tokens: int) -> LengthClass:
        return _ALL[bisect_left(LONGEST, prompt_tokens)]


LONGEST = (511, 1024, 4095, 8192)
"""Tokens of the longest prompt in each class but the last; that of LONG is the default of `serial.above`."""
_ALL = tuple(LengthClass)
