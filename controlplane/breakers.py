"""What is known of workers' breakers beyond one gateway: the newest trip of each worker, and what an operator has decided. Pure.

Each is a record with a stamp that rises; of two records of one kind and node the higher stamp stands, wherever they meet, so replicas that
tell each other in any order come to the same. A trip is of one process of a worker; an operator's word is of the node, and outlives its
process. Taking a word back is a record too: it holds for as long as the word would have, so that nobody brings the word back.
Times are Unix milliseconds; a trip's time is counted from when this replica heard of it, so that clocks of machines need not agree on it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

DIMENSIONS = ("errors", "latency", "hung")
DEFAULT_FORCE_MS = 600_000
MAX_FORCE_MS = 86_400_000
MAX_OPEN_MS = 600_000
"""A gateway that says more than this is broken."""
MAX_WORDS = 300
"""Characters of a gateway's own words that are kept."""
KEEP_MS = 3_600_000
"""A record that is over is told for so long."""
CLOCKS_MS = 60_000
"""Clocks of replicas may be so far apart."""
TRIP, WORD = "trip:", "word:"
KEYS = (TRIP, WORD)
"""What the keys of these records begin with."""


class Side(enum.StrEnum):
    """What an operator has decided."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Trip:
    """A gateway has opened its breaker on a worker's process, for `open_ms`; the `trips`-th time of all gateways."""

    stamp: int
    node_id: str
    incarnation: str
    gateway_id: str
    dimension: str
    because: str
    at_unix_ms: int
    open_ms: int
    trips: int

    @property
    def key(self) -> str:
        return TRIP + self.node_id


@dataclass(frozen=True, slots=True)
class Word:
    """An operator's, until `until_unix_ms`; without a side it takes back what he, or another, had decided until then."""

    stamp: int
    node_id: str
    side: Side | None
    at_unix_ms: int
    until_unix_ms: int
    author: str
    reason: str

    @property
    def key(self) -> str:
        return WORD + self.node_id


@dataclass(frozen=True, slots=True)
class Notice:
    """What gateways are to know of a worker now. `open_ms` is left of the newest trip and 0 without one, `forced_ms` of the side."""

    trip: Trip | None
    open_ms: int
    side: Side | None
    forced_ms: int


@dataclass(slots=True)
class Ledger:
    """Changed by its methods alone. `_ends` says when each trip is over, on this replica's clock."""

    _trips: dict[str, Trip] = field(default_factory=dict)
    _words: dict[str, Word] = field(default_factory=dict)
    _ends: dict[str, int] = field(default_factory=dict)

    def tripped(
        self, gateway_id: str, node_id: str, incarnation: str, dimension: str, open_ms: int, because: str, now: int
    ) -> Trip:
        """A gateway has just said so."""
        held = self._trips.get(node_id)
        before = held.trips if held is not None and held.incarnation == incarnation else 0
        trip = Trip(
            stamp=_above(held, now),
            node_id=node_id,
            incarnation=incarnation,
            gateway_id=gateway_id,
            dimension=dimension if dimension in DIMENSIONS else "unknown",
            because=" ".join(because.split())[:MAX_WORDS],
            at_unix_ms=now,
            open_ms=min(open_ms, MAX_OPEN_MS),
            trips=before + 1,
        )
        self.take(trip, now)
        return trip

    def decided(self, node_id: str, side: Side | None, for_ms: int, author: str, reason: str, now: int) -> Word:
        """An operator's word as it would be; it counts once it is taken."""
        held = self._words.get(node_id)
        until = now + for_ms if side is not None else max(now, held.until_unix_ms if held is not None else now)
        return Word(_above(held, now), node_id, side, now, until, author, reason)

    def take(self, record: Trip | Word, now: int, *, live: bool = True) -> bool:
        """Whether it is news. One that is `live` has just happened, wherever it did; any other is as old as it says."""
        held: Trip | Word | None
        if isinstance(record, Word):
            held = self._words.get(record.node_id)
            if held is None or held.stamp < record.stamp:
                self._words[record.node_id] = record
                return True
            return False
        held = self._trips.get(record.node_id)
        if held is not None and held.stamp >= record.stamp:
            return False
        begun = now if live and now - record.at_unix_ms < CLOCKS_MS else min(now, record.at_unix_ms)
        self._trips[record.node_id] = record
        self._ends[record.node_id] = begun + record.open_ms
        return True

    def trip(self, node_id: str, incarnation: str) -> Trip | None:
        """The newest of this process, over or not."""
        trip = self._trips.get(node_id)
        return trip if trip is not None and trip.incarnation == incarnation else None

    def word(self, node_id: str, now: int) -> Word | None:
        """The one in force."""
        word = self._words.get(node_id)
        return word if word is not None and word.side is not None and word.until_unix_ms > now else None

    def open_ms(self, trip: Trip, now: int) -> int:
        """Left of it."""
        return max(0, self._ends.get(trip.node_id, 0) - now)

    def notice(self, node_id: str, incarnation: str, now: int) -> Notice | None:
        """None when there is nothing to say."""
        trip, word = self.trip(node_id, incarnation), self.word(node_id, now)
        left = self.open_ms(trip, now) if trip is not None else 0
        if not left and word is None:
            return None
        return Notice(
            trip if left else None, left, word.side if word else None, word.until_unix_ms - now if word else 0
        )

    def forced(self, now: int) -> list[Word]:
        """All words in force, by node id."""
        return [w for name in sorted(self._words) if (w := self.word(name, now)) is not None]

    def next_end(self, after: int) -> int | None:
        """When the first of those ends that were not over at `after`."""
        ends = [*self._ends.values(), *(w.until_unix_ms for w in self._words.values() if w.side is not None)]
        return min((end for end in ends if end > after), default=None)

    def lasting(self, now: int) -> Iterator[Trip | Word]:
        """Those that are not over: what a store that lost them is to have again."""
        yield from (t for t in self._trips.values() if self._ends[t.node_id] > now)
        yield from (w for w in self._words.values() if w.until_unix_ms > now)

    def forget(self, now: int) -> list[Trip | Word]:
        """Drops those that have been over for long."""
        old: list[Trip | Word] = [t for t in self._trips.values() if self._ends[t.node_id] <= now - KEEP_MS]
        old += [w for w in self._words.values() if w.until_unix_ms <= now - KEEP_MS]
        for record in old:
            if isinstance(record, Trip):
                del self._trips[record.node_id], self._ends[record.node_id]
            else:
                del self._words[record.node_id]
        return old


def _above(held: Trip | Word | None, now: int) -> int:
    """The time, and above what is held where another clock is ahead."""
    return max(now, held.stamp + 1 if held is not None else 0)


def encode(record: Trip | Word) -> bytes:
    kind = "trip" if isinstance(record, Trip) else "word"
    return json.dumps({"kind": kind, **asdict(record)}, ensure_ascii=False).encode()


def decode(data: bytes) -> Trip | Word | None:
    """None for what this build does not understand: a newer one may have written it."""
    try:
        said: dict[str, Any] = json.loads(data)
        kind = said.pop("kind")
        if kind == "trip":
            return Trip(**_checked(said, Trip))
        if kind == "word":
            side = said.pop("side", None)
            return Word(**_checked(said, Word), side=Side(side) if side is not None else None)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _checked(said: dict[str, Any], kind: type[Trip] | type[Word]) -> dict[str, Any]:
    """What it knows of them; TypeError where a number is none."""
    known = {name: said[name] for name in kind.__slots__ if name in said}
    for name, value in known.items():
        wanted = int if name in ("stamp", "at_unix_ms", "open_ms", "trips", "until_unix_ms") else str
        if not isinstance(value, wanted):
            raise TypeError(name)
    return known
