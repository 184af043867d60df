"""A policy as the scheduler uses it: plain numbers, checked against the engine once, so that no step checks anything again."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import PolicyRefused
from trimtab.policy import Isolation, Mode, Policy, Preemption, Protect
from trimtab.scheduling.lengths import Edges, edges_of
from trimtab.snapshot import Limits


@dataclass(frozen=True, slots=True)
class Rules:
    """Lengths in tokens, times in milliseconds. `itl_budget_ms` and `max_step_ms` are infinite where steps are unbounded."""

    mode: Mode
    active: int
    hard_cap: int
    step_tokens: int
    concurrent: int
    itl_budget_ms: float
    max_step_ms: float
    max_suspend_ms: float
    hot_below: int
    protect_length: bool
    realtime_max_running: int
    realtime_reserve: int
    cold_window_ms: float
    serial_above: int
    serial_prefills: int
    isolate_from: int
    isolate_alone: bool
    isolate_tenants: frozenset[str]
    preemption: Preemption
    slice_ms: float
    max_preemptions: int
    max_overtake_ms: float
    max_priority_diff: int
    realtime_delta: int
    batch_delta: int
    pressure_threshold: float
    reserve: float
    spread_limit: float
    length_edges: Edges

    @staticmethod
    def of(policy: Policy, limits: Limits) -> Rules:
        """PolicyRefused when the engine can't do what the policy asks, so that nothing is half-applied."""
        for path, value, limit, name in (
            ("batch.active", policy.batch.active, limits.max_num_seqs, "max_num_seqs"),
            ("prefill.step_tokens", policy.prefill.step_tokens, limits.max_step_tokens, "max_step_tokens"),
        ):
            if limit and value > limit:
                raise PolicyRefused(
                    f"{path} = {value} is above the engine's {name} = {limit}", reason="ABOVE_ENGINE_LIMIT", field=path
                )
            if value < 1:
                raise PolicyRefused(f"{path} = {value} would stop the engine", reason="OUT_OF_RANGE", field=path)
        p = policy
        itl = float(p.prefill.itl_budget_ms) or float("inf")
        return Rules(
            mode=Mode(p.scheduler.mode),
            active=p.batch.active,
            hard_cap=p.batch.hard_cap,
            step_tokens=p.prefill.step_tokens,
            concurrent=p.prefill.concurrent,
            itl_budget_ms=itl,
            max_step_ms=float(p.prefill.max_step_ms) or 2 * itl,
            max_suspend_ms=p.prefill.max_suspend_ms,
            hot_below=p.paths.hot_below,
            protect_length=p.paths.protect == Protect.LENGTH,
            realtime_max_running=p.paths.realtime_max_running,
            # One slot stays for the others, or a small running set would starve them.
            realtime_reserve=min(p.paths.realtime_reserve, p.batch.active - 1),
            cold_window_ms=p.paths.cold_window_ms,
            serial_above=p.serial.above,
            serial_prefills=p.serial.prefills,
            isolate_from=p.isolate.from_tokens,
            isolate_alone=p.isolate.action == Isolation.ALONE,
            isolate_tenants=frozenset(p.isolate.tenants),
            preemption=Preemption(p.preemption.mode),
            slice_ms=p.preemption.guaranteed_time_slice_ms,
            max_preemptions=p.preemption.max_preemptions,
            max_overtake_ms=p.priority.max_overtake_ms,
            max_priority_diff=p.priority.max_priority_diff,
            realtime_delta=p.priority.realtime_delta,
            batch_delta=p.priority.batch_delta,
            pressure_threshold=p.memory.pressure_threshold,
            reserve=p.memory.reserve_high_priority,
            spread_limit=p.clusters.spread_limit,
            length_edges=edges_of(p),
        )

    def isolates(self, prompt_tokens: int, tenant: str) -> bool:
        """Whether an isolation rule names such a request."""
        return prompt_tokens >= self.isolate_from or tenant in self.isolate_tenants
