"""One tick of the controllers: who acts, what of it is new, and how it is written down. Pure; `controlplane.loop` carries it out.

A controller says what it wants to hold; here that is compared with what lives. So a decision that is made again costs nothing, one whose
write was lost is made again, and one that nobody makes any more is taken back. What a person pinned is left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from controlplane.controllers.decision import (
    Alert,
    BlockPlan,
    Command,
    Controller,
    Decision,
    Move,
    PolicyOf,
    Propose,
    Reblock,
    Severity,
    Want,
)
from controlplane.seen import Seen
from controlplane.spec import FACTOR, TOO_MANY, Key, key_of
from trimtab.errors import PolicyRefused
from trimtab.policy import Loop, flatten
from trimtab.snapshot import Adjustment, Node, Scope, ScopeKind

MAX_WORDS = 500
"""Characters of a reason or of evidence."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one controller made of one tick. `failed` is a fault of ours in it: then it holds what it held."""

    name: str
    mode: Loop
    decision: Decision
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be written for one controller: adjustments to put, and to take away; `texts` say what differs from before, in words."""

    put: tuple[Adjustment, ...] = ()
    drop: tuple[Key, ...] = ()
    texts: tuple[str, ...] = ()
    reason: str = ""
    evidence: str = ""

    @property
    def empty(self) -> bool:
        return not (self.put or self.drop)


@dataclass(slots=True)
class Controllers:
    """The controllers with their states. Belongs to one leader; a new one `start`s from what lives."""

    controllers: Sequence[Controller]
    states: dict[str, Any] = field(default_factory=dict)
    held: dict[str, Decision] = field(default_factory=dict)

    def start(self, live: Iterable[Adjustment]) -> None:
        known = tuple(live)
        self.held = {}
        for c in self.controllers:
            self.states[c.name] = c.start([a for a in known if a.controller == c.name])

    def step(self, seen: Seen, policy: PolicyOf) -> list[Step]:
        """Every controller that is not off, in their order. One that fails does not keep the others from theirs."""
        modes = flatten(policy(None))
        found = []
        for c in self.controllers:
            mode = Loop(str(modes[f"loops.{c.name}"]))
            if mode is Loop.OFF:
                self.states[c.name] = c.start(())
                self.held.pop(c.name, None)
                found.append(Step(c.name, mode, Decision(None)))
                continue
            try:
                decision = c.step(self.states[c.name], seen, policy, seen.now)
            except Exception as e:
                found.append(Step(c.name, mode, self._broken(c, e), f"{type(e).__name__}: {e}"))
                continue
            self.states[c.name], self.held[c.name] = decision.state, decision
            found.append(Step(c.name, mode, decision))
        return found

    def _broken(self, c: Controller, e: Exception) -> Decision:
        """What it held last, and an alert."""
        text = f"the {c.name} controller failed and holds what it held"
        alert = Alert(f"controller/{c.name}", Severity.CRITICAL, text, f"{type(e).__name__}: {e}"[:MAX_WORDS])
        before = self.held.get(c.name, Decision(self.states[c.name]))
        return replace(before, commands=(), alerts=(*before.alerts, alert), holds=(f"it failed: {e}"[:MAX_WORDS],))


def changes(
    name: str,
    moves: Iterable[Move],
    live: Mapping[Key, Adjustment],
    pinned: set[str],
    now_unix_ms: int,
    refused: Collection[Key] = (),
) -> Changes:
    """What makes the live adjustments of this controller those that it wants. None is written anew before half its time is over, but all
    are once one has to be. What was `refused` is left alone: what holds in its place lives as long as it does."""
    asked = {(name, m.field, m.scope): m for m in moves if m.field not in pinned}
    drop = tuple(key for key in live if key[0] == name and key not in asked)
    wanted = {key: m for key, m in asked.items() if key not in refused}
    new = {key: m for key, m in wanted.items() if not (key in live and _same(live[key], m))}
    due = any(live[k].expires_unix_ms - now_unix_ms < 500 * m.ttl_s for k, m in wanted.items() if k not in new)
    if not (new or drop or due):
        return Changes()
    # Those that expire all in one write: each write is pushed to every node.
    put = tuple(_adjustment(name, m, now_unix_ms) for m in wanted.values())
    texts = [moved(m) for m in new.values()]
    texts += [f"{key[1]}{_at(key[2])} as people set it" for key in drop]
    first = next(iter(new.values()), None) or next(iter(wanted.values()), None)
    more = len(new) - 1 if new else 0
    reason = first.reason if first is not None else "what called for it is over"
    if not new and drop:
        reason = "what called for it is over"
    elif not new:
        reason = f"still: {reason}"
    if more > 0:
        reason = f"{reason} (and {more} more)"
    return Changes(put, drop, tuple(texts), reason[:MAX_WORDS], (first.evidence if first else "")[:MAX_WORDS])


def without(found: Changes, refused: PolicyRefused, node: Node | None, live: Collection[Key]) -> Changes:
    """What of it can be written all the same: all but what is at that node alone, or what else concerns it; where there are too many, all but
    what does not live yet. Nothing where none of it is to blame.
    """
    if refused.cause == TOO_MANY:
        blamed = [a for a in found.put if key_of(a) not in live]
    else:
        blamed = [a for a in found.put if a.scope.kind is ScopeKind.NODE and refused.node in a.scope.names]
        blamed = blamed or [a for a in found.put if node is not None and a.scope.covers(node)]
    if not blamed:
        return Changes()
    keys, said = {key_of(a) for a in blamed}, {moved(a) for a in blamed}
    put = tuple(a for a in found.put if key_of(a) not in keys)
    texts = tuple(text for text in found.texts if text not in said)
    left = set(texts)
    new = [a for a in put if moved(a) in left]
    reason, evidence = (new[0].reason, new[0].evidence) if new else (found.reason, found.evidence)
    if len(new) > 1:
        reason = f"{reason} (and {len(new) - 1} more)"[:MAX_WORDS]
    return Changes(put, found.drop, texts, reason, evidence)


def moved(m: Move | Adjustment) -> str:
    """In words, for the record of decisions."""
    return f"{m.field}{_at(m.scope)} {_said(m)}"


def _same(a: Adjustment, m: Move) -> bool:
    return (a.state, _factor(a.factor), a.delta) == (m.state, _factor(m.factor), m.delta)


def _factor(factor: float | None) -> float | None:
    return None if factor is None else round(min(FACTOR[1], max(FACTOR[0], factor)), 4)


def _adjustment(name: str, m: Move, now_unix_ms: int) -> Adjustment:
    return Adjustment(
        name, m.field, m.scope, _line(m.reason), now_unix_ms + int(m.ttl_s * 1000),
        factor=_factor(m.factor) if m.state is None else None,
        delta=m.delta if m.state is None and m.factor is None else 0,
        evidence=_line(m.evidence),
        state=m.state,
    )  # fmt: skip


def _line(words: str) -> str:
    return " ".join(words.split())[:MAX_WORDS]


def _said(m: Move | Adjustment) -> str:
    if m.state is not None:
        return f"→ {m.state}"
    return f"×{_factor(m.factor):g}" if m.factor is not None else f"{m.delta:+d}"


def _at(scope: Scope) -> str:
    return f" at {scope}" if scope.kind else ""


def live_of(adjustments: Iterable[Adjustment], now_unix_ms: int) -> dict[Key, Adjustment]:
    return {key_of(a): a for a in adjustments if a.expires_unix_ms > now_unix_ms}


def described(command: Command) -> str:
    """In words, for the record of decisions."""
    if isinstance(command, Reblock):
        return f"reblock {command.node_id} to {command.block_size} tokens"
    if isinstance(command, Propose):
        return f"propose {', '.join(f'{k}={v}' for k, v in command.fields.items())}"
    kind = type(command).__name__.lower()
    return f"{kind} {command.node_id}"


def blocked(plan: BlockPlan) -> str:
    """In words, for the record of decisions."""
    return f"KV blocks of {plan.planned} tokens in pool {plan.pool}, now {plan.present}"


def wanted(want: Want) -> str:
    return f"{want.workers} workers in pool {want.pool}"
