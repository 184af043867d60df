"""One worker's breaker as this gateway keeps it: `trimtab.breaking` with a place to keep its state, and a log line for each turn."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from trimtab import breaking
from trimtab.errors import Outcome
from trimtab.policy_tree import BreakerPart

log = structlog.get_logger(__name__)


class Guard:
    """`on_tripped` hears of each opening; `rules` are the policy's, read at each turn. Times are milliseconds of the monotonic clock."""

    def __init__(
        self, worker: str, rules: Callable[[], BreakerPart], on_tripped: Callable[[breaking.Trip], None]
    ) -> None:
        self.state = breaking.Breaker()
        self._worker = worker
        self._rules = rules
        self._on_tripped = on_tripped
        self._heard = 0

    def gate(self, now_ms: float) -> breaking.Gate:
        return breaking.gate(self.state, now_ms)

    def doubtful(self, now_ms: float) -> bool:
        return breaking.doubtful(self.state, now_ms)

    def retry_after_ms(self, now_ms: float) -> float:
        return breaking.retry_after_ms(self.state, now_ms)

    def probing(self, now_ms: float) -> None:
        """The next request is a probe."""
        self.state = breaking.probing(self.state, self._rules(), now_ms)

    def observe(
        self,
        outcome: Outcome,
        *,
        now_ms: float,
        probe: bool,
        ttft_ms: float | None = None,
        peers_median_ms: float | None = None,
    ) -> None:
        """An attempt ended; see `breaking.observe`."""
        was = self.state.phase
        self.state, trip = breaking.observe(
            self.state, outcome, self._rules(), now_ms, probe=probe, ttft_ms=ttft_ms, peers_median_ms=peers_median_ms
        )
        if was is breaking.Phase.HALF_OPEN and self.state.phase is breaking.Phase.CLOSED:
            log.info("breaker closed", worker=self._worker)
        self._tell(trip)

    def hung(self, now_ms: float) -> None:
        self.state, trip = breaking.hung(self.state, self._rules(), now_ms)
        self._tell(trip)

    def foreign(self, trip: int, because: str) -> None:
        """Another gateway's `trip`-th opening; each is heard once."""
        if trip <= self._heard:
            return
        self._heard = trip
        was = self.state.phase
        self.state = breaking.foreign(self.state, because)
        if self.state.phase is not was:
            log.warning("breaker half open", worker=self._worker, because=because)

    def force(self, forced: breaking.Forced | None) -> None:
        if (forced is None) != (self.state.forced is None) or (
            forced and self.state.forced and forced.closed != self.state.forced.closed
        ):
            word = "none" if forced is None else "closed" if forced.closed else "open"
            log.warning("breaker forced", worker=self._worker, to=word)
        self.state = breaking.force(self.state, forced)

    def _tell(self, trip: breaking.Trip | None) -> None:
        if trip is None:
            return
        log.warning(
            "breaker open", worker=self._worker, on=trip.dimension.value, because=trip.because, open_ms=trip.open_ms
        )
        self._on_tripped(trip)
