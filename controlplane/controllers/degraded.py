"""Degraded or not: field guide B's breaker. A full KV cache together with engine faults is trouble that more of the same work makes worse.

Both have to be there: a full cache alone is what batch work is for, and faults alone are a gateway's breaker's to find. It leaves by use
alone, well below where it entered, so it does not flap. What the signals miss: a worker whose engine died says nothing more, so its faults
are seen by gateways only, and use is the mean of those that are left; a pool in trouble beside larger healthy ones is averaged away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.controllers.decision import Alert, Decision, Move, PolicyOf, Severity
from controlplane.controllers.held import move_of
from controlplane.controllers.recent import since
from controlplane.seen import Seen, counted
from trimtab.measures import ERRORS, KV_USED, REQUESTS
from trimtab.messages import Role
from trimtab.policy import Degraded
from trimtab.snapshot import Adjustment, Scope

name = "degraded"
FIELD = "degraded.state"
ERRORS_S = 30.0
MIN_REQUESTS = 10
"""Of fewer, no rate is known."""


@dataclass(frozen=True, slots=True)
class State:
    """The move while degraded."""

    move: Move | None = None


def start(live: Iterable[Adjustment]) -> State:
    return State(next((move_of(a) for a in live if a.field == FIELD), None))


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    rule = policy(None).degraded
    uses = [use for n in seen.workers() if (use := n.gauge(KV_USED, now)) is not None]
    if not uses:
        return _decided(state.move, "no worker says how full its KV cache is")
    use = sum(uses) / len(uses)
    if state.move is not None:
        return _decided(None if use < min(rule.leave_use, rule.enter_use) else state.move)
    if use <= rule.enter_use:
        return _decided(None)
    errors, requests = max((_faults(seen, role, now) for role in (Role.WORKER, Role.GATEWAY)), key=_rate)
    if requests < MIN_REQUESTS:
        return _decided(None, f"only {requests} requests ended within {ERRORS_S:g} s: no rate of faults is known")
    if errors / requests <= rule.enter_errors:
        return _decided(None)
    figures = (
        f"KV use {use:.0%} of {len(uses)} workers (limit {rule.enter_use:.0%}); "
        f"{errors} of {requests} requests within {ERRORS_S:g} s were engine faults (limit {rule.enter_errors:.0%})"
    )
    reason = "the KV cache is full and engines fail"
    return _decided(Move(FIELD, Scope(), reason, figures, state=Degraded.DEGRADED.value))


def _faults(seen: Seen, role: Role, now: float) -> tuple[int, int]:
    """(engine faults, requests) that nodes of this role saw end."""
    windows = [w for n in seen.of(role) for w in since(n, now - ERRORS_S)]
    return counted(windows, ERRORS), counted(windows, REQUESTS)


def _rate(faults: tuple[int, int]) -> tuple[bool, float]:
    """What is known comes before what is not."""
    errors, requests = faults
    return requests >= MIN_REQUESTS, errors / max(1, requests)


def _decided(move: Move | None, *holds: str) -> Decision:
    moves = (move,) if move is not None else ()
    alerts = (Alert(name, Severity.CRITICAL, f"the mesh is degraded: {m.reason}", m.evidence) for m in moves)
    return Decision(State(move), moves, alerts=tuple(alerts), holds=holds)
