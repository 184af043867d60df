"""What a prefix cache of whole blocks finds again: computed from the requests, for any block size. Pure.

Sessions share a system prompt, and each turn repeats all before it. The cache never forgets: what is lost here is lost to the block size alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Token = int


@dataclass(frozen=True, slots=True)
class Talk:
    """Several sessions of several turns. Lengths in tokens; what a user says is uniform between two."""

    sessions: int
    turns: int
    system: int
    user: tuple[int, int]
    output: int


class Cached:
    """The whole blocks of everything that was computed, each known by what is before it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: dict[tuple[int, tuple[Token, ...]], int] = {}

    def hit(self, prompt: Sequence[Token]) -> int:
        """Tokens of the prompt that need not be computed; its last one always is, as its successor comes from it."""
        found, before = 0, 0
        for block in self._blocks(prompt[:-1]):
            known = self._known.get((before, block))
            if known is None:
                break
            found, before = found + self.block_size, known
        return found

    def add(self, tokens: Sequence[Token]) -> None:
        """Computed now."""
        before = 0
        for block in self._blocks(tokens):
            before = self._known.setdefault((before, block), len(self._known) + 1)

    def _blocks(self, tokens: Sequence[Token]) -> Iterator[tuple[Token, ...]]:
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            yield tuple(tokens[end - self.block_size : end])


@dataclass(slots=True)
class Hits:
    """Tokens over all requests."""

    prompt: int = 0
    cached: int = 0

    @property
    def rate(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0


class Script:
    """What is said: who speaks when, one request at a time, sessions by turns. The seed decides the tokens; lengths are the same for all."""

    def __init__(self, talk: Talk, seed: str, tokens: range) -> None:
        self.talk = talk
        self._rng, self._lengths = random.Random(seed), random.Random("lengths")
        self._tokens = tokens
        system = self._say(talk.system)
        self._so_far = [list(system) for _ in range(talk.sessions)]

    def _say(self, count: int) -> list[Token]:
        return self._rng.choices(self._tokens, k=count)

    def order(self) -> list[int]:
        """The session of each request."""
        return [i for _ in range(self.talk.turns) for i in range(self.talk.sessions)]

    def prompt(self, session: int) -> list[Token]:
        """All before, and what the user says now."""
        self._so_far[session] += self._say(self._lengths.randint(*self.talk.user))
        return list(self._so_far[session])

    def answered(self, session: int, output: Sequence[Token]) -> None:
        self._so_far[session] += output


def computed(talk: Talk, block_size: int, seed: str) -> Hits:
    """With answers that are drawn too: which tokens they are changes nothing."""
    script, cache, hits, answers = (
        Script(talk, seed, range(1 << 20)),
        Cached(block_size),
        Hits(),
        random.Random(f"{seed}/answers"),
    )
    for session in script.order():
        prompt = script.prompt(session)
        output = answers.choices(range(1 << 20), k=talk.output)
        note(cache, hits, prompt, output)
        script.answered(session, output)
    return hits


def note(cache: Cached, hits: Hits, prompt: Sequence[Token], output: Sequence[Token]) -> None:
    """One request, served: its last token has come out and was never put in."""
    hits.prompt += len(prompt)
    hits.cached += cache.hit(prompt)
    cache.add([*prompt, *output][:-1])
