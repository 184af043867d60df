"""What `trimtab doctor` finds, as values: a case, checks on it, and what is concluded. Pure; takes the wire messages as they come.

A check says what it looked at, with the figures, and offers what sets it right. A metric that is missing makes it unknown, never well; an
idle mesh is well. `doctor_book` has all symptoms: those of engines are in `doctor_latency`, `doctor_throughput` and `doctor_memory`, those of
the mesh itself in `doctor_mesh`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from controlplane import quantiles
from trimtab.codec import decode_partial, decode_state
from trimtab.errors import PolicyRefused
from trimtab.messages import RequestMatch
from trimtab.policy import FIELDS, Value
from trimtab.sketch import Quantiles

WINDOWS = 24
"""Of five seconds: all that the control plane keeps."""
WORKER, GATEWAY = 1, 2
"""Role's numbers."""
SERVING = 2
"""NodeState's number."""
NEW_S = 30.0
"""Windows that ended within this are the newest; the others of the two minutes are those before."""


class Verdict(enum.StrEnum):
    """The worst last."""

    OK = "ok"
    UNKNOWN = "unknown"
    SUSPECT = "suspect"
    FOUND = "found"


_ORDER = list(Verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=_ORDER.index, default=Verdict.OK)


# ---- what can be done


@dataclass(frozen=True, slots=True)
class SetFields:
    """`scope` as people write it; empty is the whole mesh."""

    fields: Mapping[str, str]
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Drained, and started anew by whoever supervises it."""

    node_id: str
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Reload:
    """The engine is told its policy anew."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Reblock:
    """Its engine changes its KV block size, once few enough tokens are resident; `before` takes it back."""

    node_id: str
    block_size: int
    before: int


@dataclass(frozen=True, slots=True)
class Release:
    match: RequestMatch


@dataclass(frozen=True, slots=True)
class ResetBreaker:
    node_id: str


Action = SetFields | Restart | Reload | Reblock | Release | ResetBreaker


@dataclass(frozen=True, slots=True)
class Fix:
    """What would be done, in words and as the command; `action` is None where only a person can do it."""

    does: str
    command: str
    action: Action | None = None


def set_fields(does: str, fields: Mapping[str, str], scope: str = "") -> Fix:
    whom = f" --for {scope}" if scope else ""
    said = " ".join(f"{path}={value}" for path, value in fields.items())
    return Fix(does, f"trimtab policy set {said}{whom}", SetFields(fields, scope))


def restart(node_id: str, deadline_s: int, does: str) -> Fix:
    return Fix(does, f"trimtab drain {node_id} --deadline {deadline_s}s --restart", Restart(node_id, deadline_s * 1000))


def reload(node_id: str) -> Fix:
    return Fix(f"tell the engine of {node_id} its policy anew", f"trimtab reload {node_id}", Reload(node_id))


def reblock(node_id: str, block_size: int, before: int) -> Fix:
    does = f"change the KV blocks of {node_id} from {before} to {block_size} tokens, once it is nearly idle"
    return Fix(does, f"trimtab reblock {node_id} {block_size}", Reblock(node_id, block_size, before))


# ---- what is found


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, and what was seen of it."""

    name: str
    verdict: Verdict
    said: str
    fixes: tuple[Fix, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    symptom: str
    verdict: Verdict
    said: str
    checks: tuple[Check, ...] = ()

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """Each once; of what is well, none."""
        bad = (c for c in self.checks if c.verdict in (Verdict.FOUND, Verdict.SUSPECT))
        return tuple({fix.command: fix for c in bad for fix in c.fixes}.values())


@dataclass(frozen=True, slots=True)
class Symptom:
    """`title` completes "whether …"."""

    name: str
    title: str
    examine: Callable[[Case], Finding]


def because(symptom: str, seen: Check, causes: Sequence[Check]) -> Finding:
    """Where the symptom shows, causes explain it. Where it does not, they are only told: a mix of lengths alone is no fault."""
    if seen.verdict is Verdict.FOUND or seen.verdict is Verdict.SUSPECT:
        found = [c for c in causes if c.verdict is Verdict.FOUND] or [c for c in causes if c.verdict is Verdict.SUSPECT]
        why = "; likely: " + "; ".join(c.said for c in found) if found else "; none of the causes looked at shows"
        return Finding(symptom, seen.verdict, seen.said + why, (seen, *causes))
    quiet = tuple(Check(c.name, _told(c.verdict), c.said) for c in causes)
    return Finding(symptom, seen.verdict, seen.said, (seen, *quiet))


def _told(verdict: Verdict) -> Verdict:
    return Verdict.UNKNOWN if verdict is Verdict.UNKNOWN else Verdict.OK


def all_of(symptom: str, checks: Sequence[Check], well: str) -> Finding:
    """Each check is a fault of its own; `well` is said where there is none."""
    verdict = worst(c.verdict for c in checks)
    said = "; ".join(c.said for c in checks if c.verdict is verdict) if verdict is not Verdict.OK else well
    return Finding(symptom, verdict, said, tuple(checks))


# ---- the case


@dataclass(frozen=True)
class Case:
    """What the control plane told: the answers of GetTelemetry, GetFleet, GetPolicy, ListBreakers and ListPolicyHistory.

    `breakers` and `history` are None where they could not be had.
    """

    telemetry: Any
    fleet: Any
    policy: Any
    breakers: Any = None
    history: Sequence[Any] | None = None
    now_unix_ms: int = 0

    @cached_property
    def workers(self) -> tuple[Any, ...]:
        """Connected ones."""
        return tuple(n for n in self.telemetry.nodes if n.role == WORKER and n.connected)

    @cached_property
    def fresh(self) -> tuple[Any, ...]:
        """Those of them whose last report says something of now."""
        return tuple(n for n in self.workers if n.HasField("age_s") and not n.stale)

    @cached_property
    def _policy(self) -> Mapping[str, Value]:
        try:
            return decode_partial(self.policy.effective)
        except PolicyRefused:
            # Words of a newer control plane.
            return {}

    def number(self, path: str) -> float:
        """What the whole mesh has of a field, its default where that is not known."""
        return float(self._policy.get(path, FIELDS[path].default))  # type: ignore[arg-type]

    def word(self, path: str) -> str:
        return str(self._policy.get(path, FIELDS[path].default))

    def loop(self, name: str) -> Iterator[Fix]:
        """What turns a controller on that is not."""
        if self.word(f"loops.{name}") != "on":
            yield set_fields(f"let the {name} controller act", {f"loops.{name}": "on"})


@dataclass(frozen=True, slots=True)
class Rates:
    """Counters of one node over some of its windows."""

    span_s: float
    counters: Mapping[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        return self.counters.get(name, 0)

    def per_s(self, name: str) -> float:
        return self.of(name) / self.span_s if self.span_s else 0.0


def newest(n: Any) -> list[Any]:
    return [w for w in n.windows if w.ended_ago_s <= NEW_S]


def before(n: Any) -> list[Any]:
    return [w for w in n.windows if w.ended_ago_s > NEW_S]


def rates(windows: Iterable[Any]) -> Rates:
    span_s, counters = 0.0, dict[str, int]()
    for w in windows:
        span_s += w.span_s
        for name, value in w.counters.items():
            counters[name] = counters.get(name, 0) + value
    return Rates(span_s, counters)


def measured(windows: Iterable[Any], names: Iterable[str]) -> Quantiles:
    """Empty where nothing was."""
    wanted = tuple(names)
    return quantiles.mixed(quantiles.of(w.quantiles[name]) for w in windows for name in wanted if name in w.quantiles)


def gauge(n: Any, name: str) -> float | None:
    """None where it did not say."""
    found: float | None = n.gauges.get(name)
    return found


def state(n: Any) -> str:
    return decode_state(n.state).value


def names(nodes: Iterable[Any], most: int = 4) -> str:
    """Of nodes, the first few of them."""
    found = [n if isinstance(n, str) else n.node_id for n in nodes]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def examine(case: Case, book: Iterable[Symptom]) -> list[Finding]:
    return [symptom.examine(case) for symptom in book]
