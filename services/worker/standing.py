"""How a worker stands now, as gauges by the names of `trimtab.measures`; what can't be told is absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.worker.engines import Engine
from services.worker.gate import Gate
from services.worker.health import Health
from services.worker.resident import Resident
from trimtab import measures
from trimtab.blocks import LADDER
from trimtab.messages import Load, Workload
from trimtab.policy import Policy
from trimtab.reuse import Reuse
from trimtab.scheduling.resident import NOBODY
from trimtab.scheduling.steptime import KNEES

_OF = {
    Workload.REALTIME: (measures.REALTIME_RUNNING, measures.REALTIME_WAITING),
    Workload.BATCH: (measures.BATCH_RUNNING, measures.BATCH_WAITING),
}


class Standing:
    """`reuse` is what requests have in common with those before; without it nothing is said of that."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        health: Health,
        policy: Callable[[], Policy],
        resident: Resident,
        reuse: Reuse | None = None,
    ) -> None:
        self._reuse = reuse or Reuse()
        self._engine = engine
        self._gate = gate
        self._health = health
        self._policy = policy
        self._resident = resident
        self._busy = Busy()

    def gauges(self, now: float) -> dict[str, float]:
        """All but `measures.BUSY`, which is of an interval."""
        stats, load, gate, policy = self._engine.stats(), self._engine.load(), self._gate, self._policy()
        own = self._engine.own_blocks
        found: dict[str, float | None] = {
            measures.KV_USED: self._held_blocks(load) / (load.total_blocks - own) if load.total_blocks > own else None,
            measures.KV_BYTES_PER_TOKEN: self._engine.kv_bytes_per_token or None,
            measures.STORED_TOKENS: stats.get("stored_tokens"),
            measures.RSS_BYTES: self._resident.bytes,
            measures.HUNG_S: self._health.hung_s(now),
            measures.FRAGMENTATION: self.fragmentation(),
            measures.DECODE_DEVIATION: stats.get("decode_deviation") or None,
            measures.PREFILL_TOKENS_PER_S: prefill_rate(stats, policy.prefill.step_tokens),
            measures.PREFILL_MS_PER_1000_CONTEXT: stats.get("step_ms_per_1000_context") or None,
            measures.SESSION_TURNS: self._reuse.sessions.turns(now),
            **self._by_block_size(stats, now),
        }
        for workload, (running, waiting) in _OF.items():
            found[running] = stats.get(f"{workload.value}_running")
            found[waiting] = _sum(stats.get(f"{workload.value}_waiting"), gate.waiting_of(workload))
        found[measures.COLD_WAITING] = _sum(stats.get("cold_waiting"), gate.cold_waiting(policy.paths.hot_below))
        return {name: float(value) for name, value in found.items() if value is not None}

    def report(self, now: float) -> dict[str, float]:
        """For a report: all of them. Each call begins a new interval for `measures.BUSY`."""
        gauges = self.gauges(now)
        busy_ms = self.busy_ms(now)
        if busy_ms is not None:
            gauges[measures.BUSY] = self._busy.share(busy_ms, now)
        return gauges

    def _by_block_size(self, stats: Mapping[str, float], now: float) -> dict[str, float | None]:
        """Of the sizes that the engine accepts, and the one that it has."""
        limits = self._engine.limits
        found: dict[str, float | None] = {}
        for size in LADDER:
            if size == limits.block_size or size in limits.block_sizes:
                wasted = stats.get(f"waste_{size}", NOBODY)
                found[measures.block_waste(size)] = None if wasted == NOBODY else wasted
                found[measures.prefix_kept(size)] = self._reuse.prefixes.kept(size, now)
        return found

    def busy_ms(self, now: float) -> float | None:
        """What the engine has spent in steps, the one in flight with it; None where it can't tell."""
        busy_ms = self._engine.stats().get("busy_ms")
        pulse = self._engine.pulse()
        if busy_ms is None or pulse.ended:
            return busy_ms
        return busy_ms + max(0.0, now - pulse.begun) * 1000.0

    def pressure(self) -> float:
        """Requests that wait here and in the engine, for each that may run."""
        return (self._gate.waiting + self._engine.load().waiting) / self._policy().batch.active

    def fragmentation(self) -> float | None:
        """Of the slots in blocks that requests hold, the share that holds no token; None where no block is held, or where blocks
        hold different numbers of tokens.
        """
        load, stored = self._engine.load(), self._engine.stats().get("stored_tokens")
        slots = self._held_blocks(load) * self._engine.limits.block_size
        if stored is None or slots <= 0 or not self._engine.even_blocks:
            return None
        # Blocks that several requests share hold more tokens than they have slots.
        return max(0.0, (slots - stored) / slots)

    def _held_blocks(self, load: Load) -> int:
        """By requests."""
        return max(0, load.total_blocks - load.free_blocks - self._engine.own_blocks)


def prefill_rate(stats: Mapping[str, float], step_tokens: int) -> float | None:
    """Prompt tokens a second in steps of `step_tokens`, by what the scheduler has learned of its steps; None until it has seen a prompt.

    What attention to a long context costs beside is `measures.PREFILL_MS_PER_1000_CONTEXT`.
    """
    ms_per_token, first, last = (
        stats.get(f"step_ms_{name}", 0.0) for name in ("per_prefill_token", "above_first_knee", "above_last_knee")
    )
    below_first, below_last = KNEES
    work_ms = (
        ms_per_token * step_tokens + first * max(0, step_tokens - below_first) + last * max(0, step_tokens - below_last)
    )
    return step_tokens / (stats.get("step_constant_ms", 0.0) + work_ms) * 1000.0 if work_ms > 0.0 else None


class Busy:
    """The share of the time since it was asked before. The first answer is of the time since it was made."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._ms = 0.0

    def share(self, busy_ms: float, now: float) -> float:
        """Between 0 and 1. A step in flight is counted by its beginning, which may be a little early: nothing is counted twice for that."""
        before, self._at = self._at, now
        spent_ms, self._ms = busy_ms - self._ms, max(self._ms, busy_ms)
        if before is None or now <= before:
            return 0.0
        return min(1.0, max(0.0, spent_ms / ((now - before) * 1000.0)))


def _sum(in_engine: float | None, in_queue: int) -> float | None:
    return None if in_engine is None else in_engine + in_queue
