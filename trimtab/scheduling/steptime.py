"""What an engine step will take, learned from the steps before it; and how much prefill fits into a given time.

ms ≈ Σ weight × feature over: one, prefill tokens, prefill tokens × their context, decoding sequences, KV tokens that decodes read, and the
tokens above each of two knees (below the first a step waits for memory, above the last for arithmetic). Weights are never negative, so
more work never looks cheaper. Fitted by weighted least squares with forgetting; some tens of microseconds a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import mul

KNEES = (16, 256)
_FIRST, _LAST = KNEES
N = 5 + len(KNEES)
FORGET = 0.995
"""About 200 steps of memory, once there are so many: seconds on a GPU, tens of seconds on a CPU."""
SWEEPS = 4
SOLVE_EVERY = 4
ENOUGH = 4
"""Steps seen before a prediction is one."""
UNKNOWN_MS = 15_000.0
"""Predicted until then; it covers a first compile."""
FIRST_TOKENS = 64
GROWTH = 2
"""A step may hold so many times the tokens of the largest one seen: beyond what was seen a fit is a guess."""
OUTLIER = 4.0
"""A step that took so many times what was predicted is counted as that much: something else had the machine."""
RIDGE = 1e-4
GROWN = 1e12
"""Before the newest step counts more than so many times the first ones did, all is scaled down."""
FAINT = 1e-100
"""What was seen of a feature is dropped when so little of it is left; its weight stays as it is."""


@dataclass(slots=True)
class Shape:
    """What a step holds. `prefill_context` is the sum over prefill tokens of the tokens before each."""

    prefill_tokens: int = 0
    prefill_context: float = 0.0
    decodes: int = 0
    kv_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decodes

    def add_prefill(self, tokens: int, context: int) -> None:
        """`tokens` of one request whose first `context` are computed already."""
        self.prefill_tokens += tokens
        self.prefill_context += tokens * (context + tokens / 2.0)

    def features(self) -> list[float]:
        n = self.prefill_tokens + self.decodes
        return [
            1.0,
            float(self.prefill_tokens),
            self.prefill_context / 1000.0,
            float(self.decodes),
            self.kv_tokens / 1000.0,
            float(n - _FIRST) if n > _FIRST else 0.0,
            float(n - _LAST) if n > _LAST else 0.0,
        ]


@dataclass(slots=True)
class StepTimeModel:
    """`weights` in ms per feature, in the order of `Shape.features`."""

    weights: list[float] = field(default_factory=lambda: [0.0] * N)
    seen: int = 0
    largest_tokens: int = 0
    error_ms: float = 0.0
    """Mean absolute error of the predictions, with forgetting."""
    _gram: list[list[float]] = field(default_factory=lambda: [[0.0] * N for _ in range(N)])
    """Its upper half."""
    _target: list[float] = field(default_factory=lambda: [0.0] * N)
    _newest: float = 1.0
    """What the newest step counts in these sums. It grows instead of the old ones fading, so that a step touches only what it holds."""

    @property
    def known(self) -> bool:
        return self.seen >= ENOUGH

    def observe(self, shape: Shape, ms: float) -> None:
        """A step of this shape took `ms`."""
        if not shape.tokens:
            return
        x, predicted = shape.features(), 0.0
        if self.known:
            predicted = sum(map(mul, self.weights, x))
            ms = min(ms, OUTLIER * max(predicted, 1.0))
            self.error_ms += (abs(ms - predicted) - self.error_ms) * 0.02
        self.seen += 1
        self.largest_tokens = max(self.largest_tokens, shape.tokens)
        # The very first steps are slow and say little: their weight goes quickly.
        self._newest /= min(FORGET, 1.0 - 2.0 / (self.seen + 2.0))
        if self._newest > GROWN:
            self._fade()
        # A long step counts less: errors are a share of the time, and it is the short steps that a budget is held with.
        weight = self._newest / max(ms, predicted / OUTLIER, 1.0)
        held = [i for i, feature in enumerate(x) if feature]
        for place, i in enumerate(held):
            row, weighted = self._gram[i], weight * x[i]
            for j in held[place:]:
                row[j] += weighted * x[j]
            self._target[i] += weighted * ms
        if self.seen <= 32 or self.seen % SOLVE_EVERY == 0:
            self._solve()

    def _fade(self) -> None:
        """The newest step counts 1 again, and the old ones so much less."""
        self._target = [value / self._newest for value in self._target]
        self._gram = [[value / self._newest for value in row] for row in self._gram]
        self._newest = 1.0
        # Two numbers that both fade to nothing have no ratio that means anything.
        for i in range(N):
            if self._gram[i][i] < FAINT:
                self._target[i] = 0.0
                for j in range(N):
                    self._gram[min(i, j)][max(i, j)] = 0.0

    def _solve(self) -> None:
        """Non-negative least squares by coordinate descent, from where the last one ended."""
        w, gram = self.weights, self._gram
        rows = [
            (i, own, own * (1.0 + RIDGE), self._target[i], [gram[j][i] for j in range(i)] + gram[i][i:])
            for i in range(N)
            if (own := gram[i][i]) > 0.0
        ]
        for _ in range(SWEEPS):
            for i, own, divisor, target, row in rows:
                w[i] = max(0.0, (target - sum(map(mul, row, w)) + own * w[i]) / divisor)

    def predict(self, shape: Shape) -> float:
        """Milliseconds."""
        if not self.known:
            return UNKNOWN_MS
        ms: float = sum(map(mul, self.weights, shape.features()))
        return ms

    def prefill_room(self, shape: Shape, limit_ms: float, context: int) -> int:
        """Prefill tokens of a request with `context` that may join `shape` within `limit_ms`; may be 0."""
        w = self.weights
        return self._room(shape, limit_ms, w[1] + w[2] * context / 1000.0, w[2] / 2000.0)

    def decode_room(self, shape: Shape, limit_ms: float, mean_context: float) -> int:
        """Decodes that may join `shape` within `limit_ms`."""
        w = self.weights
        return self._room(shape, limit_ms, w[3] + w[4] * mean_context / 1000.0, 0.0)

    def _room(self, shape: Shape, limit_ms: float, slope: float, curve: float) -> int:
        if limit_ms == float("inf"):
            return 1 << 30
        ceiling = max(FIRST_TOKENS, GROWTH * self.largest_tokens) - shape.tokens
        if not self.known:
            return max(0, ceiling)
        left, n, room = limit_ms - self.predict(shape), shape.tokens, 0
        if left <= 0.0:
            return 0
        for knee, steeper in ((_FIRST, self.weights[5]), (_LAST, self.weights[6]), (1 << 40, 0.0)):
            if n >= knee:
                slope += steeper
                continue
            span = knee - n
            # A chunk's own tokens are context to each other: `more` of them cost first × more + curve × more².
            first = slope + 2.0 * curve * room
            divisor = first + math.sqrt(first * first + 4.0 * curve * left)
            more = int(2.0 * left / divisor) if 2.0 * left < divisor * span else span
            room, n, left = room + more, n + more, max(0.0, left - more * (first + curve * more))
            if more < span or room >= ceiling:
                break
            slope += steeper
        return max(0, min(room, ceiling))
