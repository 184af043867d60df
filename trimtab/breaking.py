"""A breaker for one worker, as one gateway keeps it: Closed, Open, HalfOpen; pure.

It opens on engine faults, on first tokens much later than those of the worker's peers, and on a hung engine; nothing else counts against a
worker, and only a success heals (FIELD_FAULTS: breakers that opened on clients' errors, half-open ones that let all through or never closed).
What another gateway saw makes it careful, not blind: one probe decides. An operator's word stands above all, for as long as he gave it.

Sensor, rules and gate are apart: `observe` takes what happened, `BreakerPart` says what it means, `gate` says what may pass. Times are
milliseconds of one monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.errors import Outcome
from trimtab.policy_tree import BreakerPart

BUCKETS = 10
"""A window's outcomes are counted in so many parts of it, and forgotten part by part."""
LATENCIES = 64
"""First tokens that are kept at most."""
MEDIAN, TAIL = 0.5, 0.95
PROBED_MS = 1000.0
"""While probes are out it is worth asking again so soon."""


class Phase(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class Dimension(enum.StrEnum):
    """What it opened on."""

    ERRORS = "errors"
    LATENCY = "latency"
    HUNG = "hung"
    FOREIGN = "foreign"
    """Another gateway's, in whatever dimension."""


class Gate(enum.Enum):
    """What a request may do: pass, pass as a probe, or not."""

    PASS = "pass"
    PROBE = "probe"
    SHUT = "shut"


@dataclass(frozen=True, slots=True)
class Forced:
    """An operator's word, until `until_ms`."""

    closed: bool
    until_ms: float


@dataclass(frozen=True, slots=True)
class Breaker:
    """State. `counts` are (part of time, successes, engine faults), oldest first; `ttfts_ms` are (when, milliseconds).

    `until_ms` is when an open one may be tried, and while half open when probes that are out are waited for no longer. `quota` is how many
    probes may be out or have succeeded while half open, and how many successes close it; `openings` counts in a row.
    """

    phase: Phase = Phase.CLOSED
    dimension: Dimension | None = None
    because: str = ""
    until_ms: float = 0.0
    openings: int = 0
    quota: int = 0
    out: int = 0
    healed: int = 0
    counts: tuple[tuple[int, int, int], ...] = ()
    ttfts_ms: tuple[tuple[float, float], ...] = ()
    forced: Forced | None = None


@dataclass(frozen=True, slots=True)
class Trip:
    """It has just opened, for `open_ms`."""

    dimension: Dimension
    open_ms: float
    because: str


def gate(breaker: Breaker, now_ms: float) -> Gate:
    """What a new request may do now. Whoever passes as a probe says so by `probing`."""
    if breaker.forced is not None and now_ms < breaker.forced.until_ms:
        return Gate.PASS if breaker.forced.closed else Gate.SHUT
    match breaker.phase:
        case Phase.CLOSED:
            return Gate.PASS
        case Phase.OPEN if now_ms < breaker.until_ms:
            return Gate.SHUT
        case Phase.OPEN:
            return Gate.PROBE
        case Phase.HALF_OPEN:
            overdue = breaker.out and now_ms >= breaker.until_ms
            return Gate.PROBE if overdue or breaker.out + breaker.healed < breaker.quota else Gate.SHUT


def doubtful(breaker: Breaker, now_ms: float) -> bool:
    """It is shut, if it is, for being slow or by another gateway's word: where there is nobody else, that is no reason to refuse."""
    if breaker.forced is not None and now_ms < breaker.forced.until_ms:
        return False
    return breaker.phase is not Phase.CLOSED and breaker.dimension in (Dimension.LATENCY, Dimension.FOREIGN)


def retry_after_ms(breaker: Breaker, now_ms: float) -> float:
    """Until it may let something through."""
    if breaker.forced is not None and now_ms < breaker.forced.until_ms:
        return 0.0 if breaker.forced.closed else breaker.forced.until_ms - now_ms
    if gate(breaker, now_ms) is not Gate.SHUT:
        return 0.0
    left_ms = max(0.0, breaker.until_ms - now_ms)
    # Probes that are out may tell any moment.
    return left_ms if breaker.phase is Phase.OPEN else min(PROBED_MS, left_ms)


def probing(breaker: Breaker, rules: BreakerPart, now_ms: float) -> Breaker:
    """A request goes through as a probe; the first one after its time makes an open breaker half open.

    Probes that have shown nothing for `max_open_ms`, such as prompts that take minutes, are waited for no longer: another may go.
    """
    if breaker.phase is Phase.OPEN:
        breaker = replace(breaker, phase=Phase.HALF_OPEN, quota=rules.probes, out=0, healed=0)
    elif breaker.out + breaker.healed >= breaker.quota:
        breaker = replace(breaker, out=0)
    return replace(breaker, out=breaker.out + 1, until_ms=now_ms + rules.max_open_ms)


def observe(
    breaker: Breaker,
    outcome: Outcome,
    rules: BreakerPart,
    now_ms: float,
    *,
    probe: bool = False,
    ttft_ms: float | None = None,
    peers_median_ms: float | None = None,
) -> tuple[Breaker, Trip | None]:
    """An attempt ended. `ttft_ms` where it is comparable with others' (short prompts of REALTIME requests, where peers could have had them and
    had no less to do: else the worker that takes a shut one's load looks slow, and the two shut each other in turn); `peers_median_ms` is as
    `median_of_peers` has it: None opens nothing by latency.
    """
    was_probe = probe and breaker.phase is Phase.HALF_OPEN
    if was_probe:
        breaker = replace(breaker, out=max(0, breaker.out - 1))
    if outcome is Outcome.OK and ttft_ms is not None:
        breaker = replace(breaker, ttfts_ms=(*breaker.ttfts_ms[-(LATENCIES - 1) :], (now_ms, ttft_ms)))
    if outcome not in (Outcome.OK, Outcome.ENGINE_FAULT):
        return breaker, None
    fault = outcome is Outcome.ENGINE_FAULT
    if breaker.phase is Phase.HALF_OPEN:
        if fault and was_probe:
            known = breaker.dimension if breaker.dimension is not Dimension.FOREIGN else None
            return _open(breaker, known or Dimension.ERRORS, "a probe failed", rules, now_ms)
        if was_probe:
            breaker = replace(breaker, healed=breaker.healed + 1)
            if breaker.healed >= breaker.quota:
                return Breaker(forced=breaker.forced), None
        return breaker, None
    if breaker.phase is Phase.OPEN:
        # Of a request that had begun before; what it shows is known already.
        return breaker, None
    breaker = replace(breaker, counts=_counted(breaker.counts, fault, rules.window_ms, now_ms))
    faults, whole = sum(c[2] for c in breaker.counts), sum(c[1] + c[2] for c in breaker.counts)
    if fault and whole >= rules.min_outcomes and faults >= rules.error_rate * whole:
        return _open(breaker, Dimension.ERRORS, f"{faults} of {whole} attempts failed", rules, now_ms)
    return _by_latency(breaker, rules, now_ms, peers_median_ms)


def hung(breaker: Breaker, rules: BreakerPart, now_ms: float) -> tuple[Breaker, Trip | None]:
    """The worker says that its engine does not move."""
    if breaker.phase is Phase.OPEN:
        return breaker, None
    return _open(breaker, Dimension.HUNG, "its engine is hung", rules, now_ms)


def foreign(breaker: Breaker, because: str) -> Breaker:
    """Another gateway has opened its own: here one probe decides. What is known here already counts for more."""
    if breaker.phase is not Phase.CLOSED:
        return breaker
    return replace(
        breaker, phase=Phase.HALF_OPEN, dimension=Dimension.FOREIGN, because=because, quota=1, out=0, healed=0
    )


def force(breaker: Breaker, forced: Forced | None) -> Breaker:
    """An operator's word, or the end of it."""
    return replace(breaker, forced=forced)


def median_ttft_ms(breaker: Breaker, rules: BreakerPart, now_ms: float) -> float | None:
    """Of the window's; None where there are too few."""
    recent = _recent(breaker, rules, now_ms)
    return _quantile(recent, MEDIAN) if len(recent) >= rules.min_latencies else None


def median_of_peers(closed: int, peers: int, medians_ms: Sequence[float]) -> float | None:
    """The median of the peers' medians, in milliseconds (`medians_ms`, sorted). None where too little is known, or where so few of the peers
    are closed that the worker itself is needed.
    """
    if 2 * closed < peers + 1:
        return None
    return _quantile(medians_ms, MEDIAN) if medians_ms else None


def _by_latency(
    breaker: Breaker, rules: BreakerPart, now_ms: float, peers_median_ms: float | None
) -> tuple[Breaker, Trip | None]:
    if not rules.latency_factor or peers_median_ms is None or len(breaker.ttfts_ms) < rules.min_latencies:
        return breaker, None
    recent = _recent(breaker, rules, now_ms)
    if len(recent) < rules.min_latencies:
        return breaker, None
    tail, middle = _quantile(recent, TAIL), _quantile(recent, MEDIAN)
    # A burst's first wave gives every worker a tail of many medians: what is slow as a whole has a late median too.
    if tail <= rules.latency_factor * peers_median_ms or middle <= rules.latency_factor / 2.0 * peers_median_ms:
        return breaker, None
    because = f"P95 of TTFT is {tail:.0f} ms, half of it above {middle:.0f}, where its peers' median is {peers_median_ms:.0f} ms"
    return _open(breaker, Dimension.LATENCY, because, rules, now_ms)


def _open(
    breaker: Breaker, dimension: Dimension, because: str, rules: BreakerPart, now_ms: float
) -> tuple[Breaker, Trip]:
    openings = breaker.openings + 1
    open_ms = float(min(rules.max_open_ms, rules.open_ms * 2 ** min(openings - 1, 20)))
    # What opened it is forgotten: closed again, it judges by what comes then.
    opened = Breaker(Phase.OPEN, dimension, because, now_ms + open_ms, openings, forced=breaker.forced)
    return opened, Trip(dimension, open_ms, because)


def _counted(
    counts: tuple[tuple[int, int, int], ...], fault: bool, window_ms: float, now_ms: float
) -> tuple[tuple[int, int, int], ...]:
    part = int(now_ms / (window_ms / BUCKETS))
    kept = tuple(c for c in counts if part - BUCKETS < c[0] <= part)
    _, good, bad = kept[-1] if kept and kept[-1][0] == part else (part, 0, 0)
    earlier = tuple(c for c in kept if c[0] < part)
    return (*earlier, (part, good + (not fault), bad + fault))


def _recent(breaker: Breaker, rules: BreakerPart, now_ms: float) -> list[float]:
    return sorted(ms for when, ms in breaker.ttfts_ms if when > now_ms - rules.window_ms)


def _quantile(ranked: Sequence[float], q: float) -> float:
    """Nearest rank."""
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))]
