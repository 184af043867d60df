"""Whether canaries are worse than the workers beside them. Pure: looks come in, a judgement comes out.

Only workers of one pool and one model are compared, in blocks: a block is over once there is enough on both sides, whatever was in it.
Canaries get less of new work, so what is compared does not depend on how much they get: shares of requests, tokens a second while work waits
all the time, tokens computed again of those computed. (Tokens a busy second would: a batch that is half as full does less in each second.)
Where work waits at a canary for most of the time, and not at the rest, it does less than they do though less is asked of it.

Each test gets an equal part of `rollout.false_alarms`. Latency is worse where more of it is above the objective, by the test, and its P99 is
`rollout.worse_above` times the rest's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from controlplane.rollouts.choose import Group
from controlplane.rollouts.state import Measure, Verdict, Wealth
from controlplane.rollouts.tally import REALTIME_ITL, REALTIME_TTFT, Counts, Tally, added, sketch_of
from controlplane.seen import NodeSeen, Seen
from trimtab.policy_rollouts import RolloutPart
from trimtab.sequential import Block, Odds
from trimtab.sketch import Sketch

TESTS = 6
BLOCK_REST = 4
"""Requests of the rest, beside one of a canary, that make a block of shares."""
BLOCK_S = 3.0
"""Of rates."""
MIN_FULL_S = 1.5
"""Of a block of rates, so long work must have waited on each side."""
WAITS_FROM = 0.5
"""Of the time; work that waits for less is no sign of anything."""
AGAIN_FROM = 0.02
"""Below this share nobody minds what is computed again."""
COMPARED = 16
"""Workers on a side that are compared, of each group: more tell no more, and each look costs."""
TTFT = "realtime P99 TTFT, ms"
ITL = "realtime P99 ITL, ms"
LATE = "realtime requests late for their first token"
OVER = "realtime requests over an objective"
ERRORS = "requests failed"
THROUGHPUT = "tokens a second while work waits"
AGAIN = "tokens computed again"
WAITS = "time in which work waits"


@dataclass(frozen=True, slots=True)
class Judgement:
    """`worse` says of which measures canaries are, with the figures; `undecided` why they can't be told from the rest yet, or nothing."""

    measures: tuple[Measure, ...] = ()
    worse: tuple[str, ...] = ()
    undecided: str = ""
    samples: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Side:
    """Counts of one group's side, and of when its blocks began."""

    firsts: Counts = field(default_factory=Counts)
    ends: Counts = field(default_factory=Counts)
    errors: Counts = field(default_factory=Counts)
    rates: Counts = field(default_factory=Counts)


@dataclass(slots=True)
class _Pair:
    """A group: who is compared, and where its blocks began."""

    here: tuple[str, ...]
    there: tuple[str, ...]
    mine: _Side = field(default_factory=_Side)
    theirs: _Side = field(default_factory=_Side)
    rates_at: float | None = None


class Bench:
    """Of one stage of one rollout: who stands beside whom. `wealth` goes on from earlier stages, `carried` are samples of this one that an
    earlier leader saw. `objectives` are what REALTIME's first tokens and gaps are measured against, in milliseconds, by group.
    """

    def __init__(
        self,
        sides: Mapping[Group, tuple[Sequence[str], Sequence[str]]],
        objectives: Callable[[Group], tuple[float, float]],
        wealth: Wealth,
        carried: tuple[int, int] = (0, 0),
    ) -> None:
        self.wealth = wealth
        self._carried = carried
        self._pairs = [_Pair(tuple(a[:COMPARED]), tuple(b[:COMPARED])) for a, b in sides.values() if a and b]
        self._tallies: dict[str, Tally] = {}
        for (group, _), pair in zip(((g, s) for g, s in sides.items() if s[0] and s[1]), self._pairs, strict=True):
            for name in (*pair.here, *pair.there):
                self._tallies[name] = Tally(*objectives(group))

    @property
    def compared(self) -> tuple[list[str], list[str]]:
        """Canaries, and the rest."""
        return self._sides()

    def look(self, seen: Seen, rules: RolloutPart) -> Judgement:
        for name, tally in self._tallies.items():
            if (n := seen.nodes.get(name)) is not None:
                tally.look(n, seen.now)
        for pair in self._pairs:
            self._blocks(pair, seen.now, rules)
        return self._judged(seen, rules)

    def _blocks(self, p: _Pair, now: float, rules: RolloutPart) -> None:
        here, there = self._counts(p.here), self._counts(p.there)
        w, most = self.wealth, rules.worse_above
        a, b = here.plus(p.mine.firsts, -1), there.plus(p.theirs.firsts, -1)
        if a.firsts and b.firsts >= BLOCK_REST:
            w = replace(w, firsts=w.firsts.after(_block(a.late, a.firsts, b.late, b.firsts), most))
            p.mine.firsts, p.theirs.firsts = here, there
        a, b = here.plus(p.mine.ends, -1), there.plus(p.theirs.ends, -1)
        if a.ends and b.ends >= BLOCK_REST:
            w = replace(w, ends=w.ends.after(_block(a.over, a.ends, b.over, b.ends), most))
            p.mine.ends, p.theirs.ends = here, there
        a, b = here.plus(p.mine.errors, -1), there.plus(p.theirs.errors, -1)
        if a.requests and b.requests >= BLOCK_REST:
            w = replace(w, errors=w.errors.after(_block(a.errors, a.requests, b.errors, b.requests), most))
            p.mine.errors, p.theirs.errors = here, there
        if p.rates_at is None:
            p.rates_at = now
        if now - p.rates_at >= BLOCK_S:
            a, b = here.plus(p.mine.rates, -1), there.plus(p.theirs.rates, -1)
            if min(a.full_s, b.full_s) >= MIN_FULL_S:
                below = _rate(a) < rules.throughput_below * _rate(b)
                w = replace(w, throughput=w.throughput.after(below))
            if a.computed and b.computed and a.again + b.again:
                more = _again(a) > max(AGAIN_FROM, most * _again(b))
                w = replace(w, preemptions=w.preemptions.after(more))
            if a.seen_s and b.seen_s:
                w = replace(w, waits=w.waits.after(_waits(a) > max(WAITS_FROM, most * _waits(b))))
            p.mine.rates, p.theirs.rates, p.rates_at = here, there, now
        self.wealth = w

    def _judged(self, seen: Seen, rules: RolloutPart) -> Judgement:
        here, there = (self._counts(side) for side in self._sides())
        alarm = math.log(TESTS / rules.false_alarms)
        w = self.wealth
        latency = (
            self._latency(seen, TTFT, REALTIME_TTFT, w.firsts.log / alarm, rules, here.firsts, there.firsts),
            self._latency(seen, ITL, REALTIME_ITL, w.ends.log / alarm, rules, here.ends, there.ends),
        )
        shares = (
            _share(LATE, here.late, here.firsts, there.late, there.firsts, w.firsts, alarm),
            _share(OVER, here.over, here.ends, there.over, there.ends, w.ends, alarm),
            _share(ERRORS, here.errors, here.requests, there.errors, there.requests, w.errors, alarm),
        )
        rates = (
            _rated(
                THROUGHPUT, _rate(here) if here.full_s else None, _rate(there) if there.full_s else None,
                (round(here.full_s), round(there.full_s)), w.throughput.log / alarm,
            ),
            _rated(
                AGAIN, _again(here) if here.computed else None, _again(there) if there.computed else None,
                (here.computed, there.computed), w.preemptions.log / alarm,
            ),
            _rated(
                WAITS, _waits(here) if here.seen_s else None, _waits(there) if there.seen_s else None,
                (round(here.seen_s), round(there.seen_s)), w.waits.log / alarm,
            ),
        )  # fmt: skip
        worse, close = [], []
        # Of latency, the share above the objective and the P99 must say so together. What is promoted must be in no doubt: that asks for less.
        for pair in (*zip(latency, shares[:2], strict=True), *((m,) for m in (shares[2], *rates))):
            if all(m.verdict is Verdict.WORSE for m in pair):
                worse.append("; ".join(_words(m) for m in pair))
            else:
                close += [_words(m) for m in pair if _doubtful(m)]
        samples = (self._carried[0] + here.samples, self._carried[1] + there.samples)
        undecided = _too_few(samples, rules.min_samples) or "; ".join(close)
        return Judgement((*latency, *shares, *rates), tuple(worse), undecided, samples)

    def _latency(
        self,
        seen: Seen,
        name: str,
        sketches: Sequence[str],
        evidence: float,
        rules: RolloutPart,
        here_n: int,
        there_n: int,
    ) -> Measure:
        """Of the last two minutes of this stage at most: older windows are not kept."""
        mine, theirs = self._sides()
        p99s = [self._p99(seen, side, sketches) for side in (mine, theirs)]
        overdue = max((t.objective_ms for n in mine if (t := self._tallies[n]).overdue), default=0.0)
        objective = max(
            (t.objective_ms if name == TTFT else t.itl_ms for t in map(self._tallies.get, mine) if t), default=0.0
        )
        if name == TTFT and overdue:
            # Who waits for longer than that, and has no first token yet, is in no sketch.
            p99s[0] = max(p99s[0] or 0.0, overdue)
        a, b = p99s
        ratio = math.inf if a is not None and not b else 1.0 if a is None or b is None else a / b
        if a is None or b is None:
            verdict = Verdict.WORSE if a is not None and evidence >= 1.0 else Verdict.UNDECIDED
        elif ratio > rules.worse_above:
            # Too little to be sure of, and too much to be given to everybody.
            missed = a > objective
            verdict = Verdict.WORSE if evidence >= 1.0 else Verdict.UNDECIDED if missed else Verdict.ALIKE
        else:
            verdict = Verdict.BETTER if ratio * rules.worse_above < 1.0 else Verdict.ALIKE
        return Measure(name, a, b, here_n, there_n, verdict)

    def _p99(self, seen: Seen, side: Iterable[str], names: Sequence[str]) -> float | None:
        nodes: list[tuple[NodeSeen, int]] = [
            (n, self._tallies[name].since or 0) for name in side if (n := seen.nodes.get(name)) is not None
        ]
        whole = Sketch.merged(s for n, since in nodes for s in sketch_of(n, names, since))
        return whole.quantile(0.99) if whole.count else None

    def _counts(self, side: Iterable[str]) -> Counts:
        return added(self._tallies[name].counts for name in side)

    def _sides(self) -> tuple[list[str], list[str]]:
        return [n for p in self._pairs for n in p.here], [n for p in self._pairs for n in p.there]


def _block(bad: int, of: int, bad_there: int, of_there: int) -> Block:
    """Shares are estimated from sketches, which may round one up: never more than all."""
    return Block(min(bad, of), of, min(bad_there, of_there), of_there)


def _share(name: str, bad: int, of: int, bad_there: int, of_there: int, odds: Odds, alarm: float) -> Measure:
    a, b = bad / of if of else None, bad_there / of_there if of_there else None
    return Measure(name, a, b, of, of_there, _verdict(a, b, odds.log / alarm))


def _rated(name: str, a: float | None, b: float | None, n: tuple[int, int], evidence: float) -> Measure:
    return Measure(name, a, b, n[0], n[1], _verdict(a, b, evidence))


def _verdict(a: float | None, b: float | None, evidence: float) -> Verdict:
    """`evidence` in parts of what an alarm takes: from half of it on, in logarithms, it is too much to be passed over."""
    if a is None or b is None:
        return Verdict.UNDECIDED if evidence >= 0.5 else Verdict.ALIKE
    return Verdict.WORSE if evidence >= 1.0 else Verdict.UNDECIDED if evidence >= 0.5 else Verdict.ALIKE


def _rate(c: Counts) -> float:
    return c.full_tokens / c.full_s if c.full_s else 0.0


def _again(c: Counts) -> float:
    return c.again / c.computed if c.computed else 0.0


def _waits(c: Counts) -> float:
    return c.full_s / c.seen_s if c.seen_s else 0.0


def _doubtful(m: Measure) -> bool:
    """Measured on both sides, and neither well nor clearly worse. A share that is worse while the P99 is not is doubtful too."""
    return None not in (m.canary, m.rest) and m.verdict in (Verdict.WORSE, Verdict.UNDECIDED)


def _too_few(samples: tuple[int, int], least: int) -> str:
    if min(samples) >= least:
        return ""
    return f"too few requests: {samples[0]} first tokens at canaries, {samples[1]} at the rest, and {least} are needed"


def _words(m: Measure) -> str:
    return f"{m.name} {_figure(m.canary)} of {m.canary_n}, at the rest {_figure(m.rest)} of {m.rest_n}"


def _figure(x: float | None) -> str:
    return "none" if x is None else f"{x:.3g}" if x < 1000 else f"{x:.0f}"
