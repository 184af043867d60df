"""How many KV blocks a request takes, by the kinds of layers that its model has. Pure.

Layers of one kind are a group; all groups take their blocks from one pool. A group keeps the KV of all tokens, or of the newest ones alone, and
then gives back what lies behind. How many tokens a block holds is the group's own: of DeepSeek-V4's 256, 64, 8 or 4. Counted as vLLM counts
(`single_type_kv_cache_manager.py`): a step takes its blocks after those behind the window were given back, and nobody is admitted before
there are free blocks for the most that the whole request will hold at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WHOLE = 1 << 30
"""`block_size` of a group that takes the same for any request, as a state is: no request is longer."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """`count` groups that are alike. Tokens a block; `cap` blocks are the most that a request holds in one of them, 0 for no bound.

    `window`: a token looks back on so many, itself among them. `chunk`: on those of its own part of so many. Both 0: on all.
    """

    block_size: int
    window: int = 0
    chunk: int = 0
    cap: int = 0
    count: int = 1

    @property
    def forgets(self) -> bool:
        return bool(self.window or self.chunk)

    def behind(self, computed: int) -> int:
        """Blocks of the first `computed` tokens that no later one looks back on."""
        if self.window:
            return max(0, computed - self.window + 1) // self.block_size
        return computed // self.chunk * self.chunk // self.block_size if self.chunk else 0

    def most(self, tokens: int, ahead: int = 0) -> int:
        """Held at once by a request of so many tokens, at most; `ahead` of them are slots beyond its tokens."""
        needs = -(-tokens // self.block_size)
        return self.count * (min(needs, self.bound(ahead)) if self.cap else needs)

    def bound(self, ahead: int) -> int:
        """Of a request of any length, where there is a cap, which leaves no room for slots ahead."""
        return self.cap + -(-ahead // self.block_size)


@dataclass(frozen=True, slots=True)
class KvShape:
    """A model's groups. `ahead`: slots that the engine keeps beyond a request's tokens, for guesses of the next ones."""

    groups: tuple[KvGroup, ...]
    ahead: int = 0
    plain: int = field(init=False, compare=False, repr=False)
    """Tokens a block where there is one group that keeps all: the usual case, and the quick one. Else 0."""
    kinds: int = field(init=False, compare=False, repr=False)
    """Groups in all: how many blocks a token takes at most."""
    forgets: bool = field(init=False, compare=False, repr=False)
    """Some group gives blocks back while the request runs."""

    def __post_init__(self) -> None:
        first = self.groups[0]
        plain = first.block_size if self.groups == (KvGroup(first.block_size),) and not self.ahead else 0
        object.__setattr__(self, "plain", plain)
        object.__setattr__(self, "kinds", sum(g.count for g in self.groups))
        object.__setattr__(self, "forgets", any(g.forgets for g in self.groups))

    @staticmethod
    def of(block_size: int) -> KvShape:
        """One kind of layers that keep all tokens."""
        return KvShape((KvGroup(block_size),))

    def most(self, tokens: int) -> int:
        """Blocks that a request of so many tokens holds at once, at most: what vLLM wants to be free before it admits it."""
        if self.plain:
            return -(-tokens // self.plain)
        return sum(g.most(tokens, self.ahead) for g in self.groups)

    def blocks(self, goal: int) -> int:
        """The same of a prompt and the token after it."""
        return goal // self.plain + 1 if self.plain else self.most(goal + 1 + self.ahead)

    def held(self, computed: int) -> int:
        """Blocks of a request of which so many tokens are computed, when what lies behind was given back."""
        if self.plain or not computed:
            return -(-computed // self.plain) if computed else 0
        end = computed + self.ahead
        return sum(g.count * (-(-end // g.block_size) - g.behind(computed)) for g in self.groups)

    def taken(self, computed: int, tokens: int) -> int:
        """Blocks that so many more tokens take from the pool. What they leave behind comes back in the request's next step."""
        if self.plain:
            return -(-(computed + tokens) // self.plain) - -(-computed // self.plain)
        end = computed + tokens + self.ahead if tokens else computed
        had = computed + self.ahead if computed else 0
        return sum(g.count * (-(-end // g.block_size) - -(-had // g.block_size)) for g in self.groups if end > had)

    def room(self, computed: int, tokens: int, free: int) -> int:
        """How many of so many more tokens there are `free` blocks for."""
        free = max(0, free)
        if self.plain:
            return min(tokens, -computed % self.plain + free * self.plain)
        if self.taken(computed, tokens) <= free:
            return tokens
        fits = 0
        while tokens - fits > 1:
            middle = (fits + tokens) // 2
            if self.taken(computed, middle) <= free:
                fits = middle
            else:
                tokens = middle
        return fits

    def together(self, tokens: int, requests: int) -> int:
        """No fewer blocks than so many requests hold that have so many tokens together, and each the one after them."""
        if self.plain:
            return tokens // self.plain + requests
        each = self.ahead * requests
        return sum(
            g.count
            * min((tokens + each) // g.block_size + requests, requests * g.bound(self.ahead) if g.cap else WHOLE)
            for g in self.groups
        )

    def of_step(self, tokens: int, runs: int, prompts: int) -> int:
        """No fewer blocks than a step of so many tokens takes, in which so many run, `prompts` of them in prefill."""
        return sum(g.count * (tokens // g.block_size + runs + prompts) for g in self.groups)

    def begins(self, lengths: Iterable[int]) -> int:
        """Blocks that decodes with so many computed tokens take for the next token of each."""
        if plain := self.plain:
            return sum(n % plain == 0 for n in lengths)
        ends = [n + self.ahead for n in lengths]
        return sum(g.count * sum(n % g.block_size == 0 for n in ends) for g in self.groups)

    def per_token(self, *, lasting: bool = False) -> float:
        """Blocks that a token fills on average, all groups together or those that keep all tokens; states and the like fill none."""
        groups = (g for g in self.groups if g.block_size < WHOLE and not (lasting and g.forgets))
        return sum(g.count / g.block_size for g in groups)

    def longest(self, blocks: int) -> int:
        """Tokens of the longest request that so many blocks hold, alone; where every group forgets, as if the largest blocks kept all."""
        if self.plain:
            return self.plain * blocks
        fits, beyond = 0, max((g.block_size for g in self.groups if g.block_size < WHOLE), default=1) * blocks + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if self.most(middle) <= blocks else (fits, middle)
        return fits
