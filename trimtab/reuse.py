"""How much requests share with earlier ones at one worker: turns of sessions, and prefixes that the cache gave. Pure; `now` in seconds.

Both are of the last minutes alone, and take a bounded amount of memory whatever clients send.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from trimtab.blocks import LADDER

RECENT_S = 600.0
MAX_SESSIONS = 10_000
"""The one that was silent longest goes first."""


@dataclass(slots=True)
class Sessions:
    """Sessions of the last ten minutes, by a hash of their ids: an id may be of any length."""

    _turns: OrderedDict[int, tuple[int, float]] = field(default_factory=OrderedDict)
    """Requests of each, and when the last one came; the longest silent first."""
    _several: int = 0
    """Those with two turns or more, and their turns in all."""
    _several_turns: int = 0

    def __len__(self) -> int:
        return len(self._turns)

    def request(self, session_id: str, now: float) -> None:
        """One came; without an id it belongs to no session."""
        if not session_id:
            return
        self._forget(now)
        key = hash(session_id)
        turns = self._turns.pop(key, (0, now))[0] + 1
        self._turns[key] = (turns, now)
        if turns == 2:
            self._several += 1
            self._several_turns += 2
        elif turns > 2:
            self._several_turns += 1
        if len(self._turns) > MAX_SESSIONS:
            self._drop_oldest()

    def turns(self, now: float) -> float | None:
        """Requests of a session, on average, of those that had two or more; None while there are none."""
        self._forget(now)
        return self._several_turns / self._several if self._several else None

    def _forget(self, now: float) -> None:
        while self._turns and now - next(iter(self._turns.values()))[1] > RECENT_S:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (turns, _) = self._turns.popitem(last=False)
        if turns >= 2:
            self._several -= 1
            self._several_turns -= turns


@dataclass(slots=True)
class Prefixes:
    """Prompt tokens that the prefix cache gave, and by size those of them in whole blocks, of the last ten to twenty minutes."""

    _begun: float = 0.0
    _given: list[int] = field(default_factory=lambda: [0, 0])
    """Since `_begun`, and in the ten minutes before."""
    _whole: list[list[int]] = field(default_factory=lambda: [[0] * len(LADDER), [0] * len(LADDER)])

    def hit(self, tokens: int, now: float) -> None:
        """A request that ended had so many prompt tokens from the cache."""
        if tokens <= 0:
            return
        self._turn(now)
        self._given[0] += tokens
        newest = self._whole[0]
        for i, size in enumerate(LADDER):
            newest[i] += tokens // size * size

    def kept(self, block_size: int, now: float) -> float | None:
        """The share in whole blocks of that size, one of LADDER; None while the cache gave nothing."""
        self._turn(now)
        given, i = sum(self._given), LADDER.index(block_size)
        return (self._whole[0][i] + self._whole[1][i]) / given if given else None

    def _turn(self, now: float) -> None:
        late = now - self._begun
        if late < RECENT_S:
            return
        # Of what is older than that, nothing stays.
        before = late < 2 * RECENT_S
        self._given = [0, self._given[0] if before else 0]
        self._whole = [[0] * len(LADDER), self._whole[0] if before else [0] * len(LADDER)]
        self._begun = now


@dataclass(slots=True)
class Reuse:
    sessions: Sessions = field(default_factory=Sessions)
    prefixes: Prefixes = field(default_factory=Prefixes)
