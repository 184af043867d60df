"""A quantile sketch that can be merged: what nodes measure goes up as one, and is added to others'.

A t-digest by `fastdigest` (RESEARCH §4: 0.15 µs an addition, 1.7 KB and a rank error of 3e-4 at 100 centroids), wrapped because its
version is 0.x.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fastdigest import TDigest, merge_all

CENTROIDS = 100
BUFFER = 64
"""Values that are kept as they come before they go into the digest together."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of one sketch; all 0 where it is empty, which `count` tells."""

    count: int = 0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Sketch:
    """Of finite numbers; others are passed over. Not shared between threads."""

    __slots__ = ("_buffer", "_digest")

    def __init__(self, digest: TDigest | None = None) -> None:
        self._digest = digest if digest is not None else TDigest(max_centroids=CENTROIDS)
        self._buffer: list[float] = []

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._buffer.append(value)
            if len(self._buffer) >= BUFFER:
                self._flush()

    def _flush(self) -> None:
        if self._buffer:
            self._digest.batch_update(self._buffer)
            self._buffer = []

    @property
    def count(self) -> int:
        return int(self._digest.n_values) + len(self._buffer)

    def quantile(self, q: float) -> float:
        """NaN of an empty one."""
        self._flush()
        return float(self._digest.quantile(q)) if self._digest.n_values else math.nan

    def share_above(self, value: float) -> float:
        """Of the numbers, how many are above; 0.0 of an empty one."""
        self._flush()
        return 1.0 - float(self._digest.cdf(value)) if self._digest.n_values else 0.0

    @property
    def sum(self) -> float:
        self._flush()
        return float(self._digest.sum()) if self._digest.n_values else 0.0

    def quantiles(self) -> Quantiles:
        if not self.count:
            return Quantiles()
        self._flush()
        p50, p95, p99 = (float(self._digest.quantile(q)) for q in (0.5, 0.95, 0.99))
        return Quantiles(self.count, p50, p95, p99, float(self._digest.max()))

    def to_bytes(self) -> bytes:
        self._flush()
        return self._digest.to_bytes()

    @staticmethod
    def from_bytes(data: bytes) -> Sketch:
        """ValueError for what is no sketch."""
        try:
            found = TDigest.from_bytes(data)
        except Exception as e:
            raise ValueError(f"no sketch: {e}") from None
        return Sketch(found)

    @staticmethod
    def merged(sketches: Iterable[Sketch]) -> Sketch:
        """A new one with all that is in them."""
        found = [s for s in sketches if s.count]
        for s in found:
            s._flush()
        if not found:
            return Sketch()
        return Sketch(merge_all([s._digest for s in found], max_centroids=CENTROIDS))
