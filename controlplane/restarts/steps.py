"""How a rolling restart goes on: pure. What is seen of the workers goes in, the restart as it is then and who is to be told come out.

A worker's way: told to drain → gone → another process serves, by the settings that it was told and by the newest policy → watched → the next
one. It stops by itself where one does not come back, or does worse than before. What this misses: a P99 is compared only where enough was
measured before and after; a worker that nobody sends requests to looks fine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from controlplane.restarts.state import TO_COME, UNDER_WAY, Restart, Stage, Step, Turn
from trimtab.kit.duration import brief
from trimtab.messages import NodeState

ENDS_MS = 60_000
"""What a process gets to end, beside its time to drain."""
NEXT = 32
"""Of those to come, how many are measured: it takes a while, and nobody goes before them."""
AGAIN_MS = 10_000
"""One that was told and still serves as if nothing had been said is told again."""
LOST_MS = 60_000
"""One that went counts as away for so long; then it is gone for good, and keeps nobody from going."""
BLINK_MS = 5_000
"""A control stream that is away for so short says nothing of the process: it looks for another replica."""
ERRORS_ABOVE, ERRORS_OF = 0.1, 10
"""So many of at least so many requests that ended may fail."""
NOTHING_HAPPENED = ("BAD_SETTING", "UNSUPPORTED", "UNAUTHORISED")
MAY_HAVE_HAPPENED = ("NO_ANSWER", "LOST")
NOT_TOLD = ("NOT_SENT", "NOT_CONNECTED")
LEAVES = "LEAVING"


@dataclass(frozen=True, slots=True)
class Sight:
    """A worker at a moment. `took` says that it runs by the newest policy, `refused` why it does not; `lost_ms` is how long it has been away.

    `p99_ms` is the REALTIME TTFT of this process over `samples`, None where there are too few; `requests` and `errors`
    are what the process itself has counted, so that every replica has the same of it.
    """

    node_id: str
    pool: str
    model: str
    incarnation: str
    connected: bool = True
    state: NodeState = NodeState.SERVING
    lost_ms: int = 0
    told: Mapping[str, str] = field(default_factory=dict)
    took: bool = True
    refused: str = ""
    p99_ms: float | None = None
    samples: int = 0
    objective_ms: float = 0.0
    requests: int = 0
    errors: int = 0
    shut: str = ""
    """Why gateways send it nothing, in words; empty while they may."""

    @property
    def serving(self) -> bool:
        """It could: whether anybody is sent to it is another question."""
        return self.connected and self.state is NodeState.SERVING

    @property
    def reached(self) -> bool:
        return self.serving and not self.shut


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker is told to drain and to come back by these settings."""

    node_id: str
    deadline_ms: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an Ask: `reason` is UPPER_SNAKE where it was not done."""

    done: bool
    reason: str = ""
    message: str = ""


Sights = Mapping[str, Sight]


def step(restart: Restart, sights: Sights, now_ms: int) -> tuple[Restart, tuple[Ask, ...]]:
    """As it is now, and who is to be told. To be kept before anybody is told."""
    r = restart
    for turn in restart.turns:
        if turn.step in UNDER_WAY and r.live:
            r = _moved(r, turn, sights.get(turn.node_id), now_ms)
    if not r.live:
        return r, ()
    again = [t for t in r.turns if _unheeded(t, sights.get(t.node_id), now_ms)]
    for turn in again:
        r = r.turned(replace(turn, asked_ms=now_ms)).said(now_ms, f"{turn.node_id} serves on, and is told again")
    r, told = _next(r, sights, now_ms)
    if r.live and not any(t.step in TO_COME and _meant(r, t) for t in r.turns):
        r = _over(r, now_ms)
    return r, tuple(Ask(t.node_id, r.order.drain_ms, settings_of(r, t)) for t in (*again, *told))


def answered(restart: Restart, node_id: str, answer: Answer, now_ms: int) -> Restart:
    """A worker has said what it makes of an Ask, or nobody knows."""
    turn = next((t for t in restart.turns if t.node_id == node_id and t.step is Step.LEAVING), None)
    if turn is None or not restart.live or answer.done or answer.reason in MAY_HAVE_HAPPENED:
        return restart
    words = f"{node_id}: {answer.reason}: {answer.message}"
    if answer.reason in NOT_TOLD:
        return restart.turned(replace(turn, step=Step.PENDING, incarnation="", since_ms=now_ms)).said(now_ms, words)
    if answer.reason == LEAVES:
        left = restart.turned(replace(turn, step=Step.LEFT_OUT, since_ms=now_ms))
        return left.said(now_ms, f"{node_id} leaves for good, and is left out")
    untouched = all(t.step in (Step.PENDING, Step.LEFT_OUT) for t in restart.turns if t.node_id != node_id)
    if answer.reason in NOTHING_HAPPENED and untouched:
        words += " (nothing has happened)"
    return _failed(restart, turn, words, now_ms, may_revert=False)


def within(drain_ms: int) -> str:
    """In words; 1 ms is the wire's word for none, where 0 is the policy's own."""
    return f"within {brief(drain_ms)}" if drain_ms > 1 else "at once"


def settings_of(restart: Restart, turn: Turn) -> dict[str, str]:
    """What a worker is told: what was ordered, or where that is taken back what it ran by before."""
    if turn.reverting:
        return {name: turn.told_before.get(name, "") for name in restart.order.settings}
    return dict(restart.order.settings)


def looked_at(restart: Restart) -> frozenset[str]:
    """Workers of which more is to be known than that they serve: those under way, and those who go next."""
    pending = [t.node_id for t in restart.turns if t.step is Step.PENDING]
    return restart.under_way | frozenset(pending[:NEXT])


def alone(node_id: str, sights: Sights) -> bool:
    """Nobody else serves its model, or nobody who gets requests."""
    mine = sights.get(node_id)
    return mine is not None and not any(
        s.reached and s.model == mine.model and s.node_id != node_id for s in sights.values()
    )


def why_shut(sights: Iterable[Sight]) -> list[str]:
    """Of those that could serve and get no requests, the first few."""
    return [f"{s.node_id} gets no requests: {s.shut}" for s in sights if s.serving and s.shut][:3]


def _meant(r: Restart, turn: Turn) -> bool:
    """Whether its turn is to come at all: once one is taken back, nobody else goes."""
    return r.stage is not Stage.REVERTING or turn.reverting or turn.step in UNDER_WAY


# ---- one worker


def _unheeded(turn: Turn, s: Sight | None, now_ms: int) -> bool:
    """It was told, and serves as if nothing had been said."""
    same = s is not None and s.serving and s.incarnation == turn.incarnation
    return turn.step is Step.LEAVING and same and now_ms - turn.asked_ms >= AGAIN_MS


def _moved(r: Restart, turn: Turn, s: Sight | None, now_ms: int) -> Restart:
    match turn.step:
        case Step.LEAVING:
            return _leaving(r, turn, s, now_ms)
        case Step.STARTING:
            return _starting(r, turn, s, now_ms)
        case _:
            return _baking(r, turn, s, now_ms)


def _leaving(r: Restart, turn: Turn, s: Sight | None, now_ms: int) -> Restart:
    if s is None or not s.connected or s.incarnation != turn.incarnation:
        return _starting(r, replace(turn, step=Step.STARTING, since_ms=now_ms), s, now_ms)
    if now_ms - turn.since_ms > r.order.drain_ms + ENDS_MS:
        words = f"{turn.node_id} was told to drain and is there still after {brief(now_ms - turn.since_ms)}: end its process"
        return _failed(r, turn, words, now_ms, may_revert=False)
    return r


def _starting(r: Restart, turn: Turn, s: Sight | None, now_ms: int) -> Restart:
    name, away_ms = turn.node_id, now_ms - turn.since_ms
    if s is not None and s.connected and s.incarnation == turn.incarnation:
        # Its control stream alone was away.
        return r.turned(replace(turn, step=Step.LEAVING, since_ms=now_ms))
    if s is not None and s.serving and s.incarnation != turn.incarnation:
        if lacking := _lacking(s, settings_of(r, turn)):
            words = f"{name} serves again, and not by the settings that it was told: its engine did not start with them; see its log"
            return _failed(r, turn, words, now_ms, lacking)
        if s.refused:
            return _failed(r, turn, f"{name} serves again and refuses the policy", now_ms, s.refused)
        if s.took:
            new = replace(
                turn,
                step=Step.BAKING,
                incarnation=s.incarnation,
                since_ms=now_ms,
                requests=s.requests,
                errors=s.errors,
            )
            return r.turned(new).said(
                now_ms, f"{name} serves again, {brief(now_ms - turn.asked_ms)} after it was told, and is watched"
            )
    if away_ms > r.order.ready_ms:
        words = (
            f"{name} does not serve again after {brief(away_ms)}: see its log and who is to start it "
            "(trimtab up, systemd, Kubernetes); its third start goes without what it was told"
        )
        return _failed(r, turn, words, now_ms, may_revert=False)
    return r.turned(turn)


def _lacking(s: Sight, settings: Mapping[str, str]) -> str:
    """What it was told and does not run by."""
    return ", ".join(f"{name}={value}" for name, value in settings.items() if s.told.get(name, "") != value)


def _baking(r: Restart, turn: Turn, s: Sight | None, now_ms: int) -> Restart:
    name = turn.node_id
    if s is None or (not s.connected and s.lost_ms < BLINK_MS):
        if now_ms - turn.since_ms > r.order.bake_ms + r.order.ready_ms:
            return _failed(r, turn, f"{name} is not heard any more", now_ms, may_revert=False)
        return r
    if not s.connected or s.incarnation != turn.incarnation:
        return _failed(r, turn, f"{name} ended while it was watched; see its log", now_ms)
    if s.state is not NodeState.SERVING:
        return _failed(r, turn, f"{name} does not serve while it is watched: it is {s.state.value}", now_ms)
    if s.refused:
        return _failed(r, turn, f"{name} refuses the policy", now_ms, s.refused)
    ended, errors = s.requests - turn.requests, s.errors - turn.errors
    if ended >= ERRORS_OF and errors > ERRORS_ABOVE * ended:
        return _failed(r, turn, f"requests fail at {name}", now_ms, f"{errors} of {ended}")
    if now_ms - turn.since_ms < r.order.bake_ms:
        return r
    if s.p99_ms is not None and turn.p99_ms is not None and turn.p99_ms <= s.objective_ms < s.p99_ms:
        figures = (
            f"P99 {s.p99_ms:.0f} ms over {s.samples} requests, before {turn.p99_ms:.0f}, objective {s.objective_ms:.0f}"
        )
        return _failed(r, turn, f"REALTIME first tokens come too late at {name}", now_ms, figures)
    done = r.turned(replace(turn, step=Step.DONE, since_ms=now_ms))
    return done.said(now_ms, f"{name} does well", _figures(turn, s))


def _figures(turn: Turn, s: Sight) -> str:
    said = [f"{s.errors - turn.errors} of {s.requests - turn.requests} requests failed"]
    said += [f"P99 {s.p99_ms:.0f} ms over {s.samples} requests"] if s.p99_ms is not None else []
    said += [f"before {turn.p99_ms:.0f}"] if turn.p99_ms is not None else []
    return ", ".join(said)


def _failed(r: Restart, turn: Turn, words: str, now_ms: int, evidence: str = "", *, may_revert: bool = True) -> Restart:
    """It goes no further: it stops, or this worker gets its settings of before first. Whoever else is on that way comes to its end."""
    if r.order.revert and r.order.settings and may_revert and not turn.reverting:
        back = Turn(turn.node_id, turn.pool, told_before=turn.told_before, reverting=True)
        reverting = replace(r.turned(back), stage=Stage.REVERTING, verdict=r.verdict or words)
        return reverting.said(now_ms, f"{words}; it gets its settings of before", evidence)
    said = words + (f" ({evidence})" if evidence else "")
    failed = r.turned(replace(turn, step=Step.FAILED, since_ms=now_ms))
    if r.stage is not Stage.REVERTING:
        return failed.ended(Stage.STOPPED, said, now_ms)
    # The first reason stands; of those after it, only what keeps a worker from its settings of before.
    verdict = f"{r.verdict}; then {said}" if turn.reverting else r.verdict
    return replace(failed, verdict=verdict).said(now_ms, words, evidence)


# ---- who goes next


def _next(r: Restart, sights: Sights, now_ms: int) -> tuple[Restart, list[Turn]]:
    """Those who go now, told once; where nobody can for too long, it stops."""
    gone: list[Turn] = []
    why = ""
    for turn in r.turns:
        if turn.step is not Step.PENDING or not _meant(r, turn):
            continue
        if keeps := _kept(r, turn, sights, now_ms):
            why = why or keeps
            continue
        s = sights[turn.node_id]
        leaving = replace(
            turn,
            step=Step.LEAVING,
            incarnation=s.incarnation,
            since_ms=now_ms,
            asked_ms=now_ms,
            told_before=turn.told_before if turn.reverting else s.told,
            p99_ms=s.p99_ms,
        )
        r = r.turned(leaving).said(now_ms, f"{turn.node_id} is told to drain, {within(r.order.drain_ms)}")
        gone.append(leaving)
    if not why or any(t.step in UNDER_WAY for t in r.turns):
        return replace(r, waiting_ms=0), gone
    if not r.waiting_ms:
        return replace(r.said(now_ms, f"waits: {why}"), waiting_ms=now_ms), gone
    if now_ms - r.waiting_ms > r.order.ready_ms:
        words = f"nobody could go for {brief(now_ms - r.waiting_ms)}: {why}"
        said = f"{r.verdict}; then {words}" if r.stage is Stage.REVERTING else words
        return r.ended(Stage.STOPPED, said, now_ms), gone
    return r, gone


def _kept(r: Restart, turn: Turn, sights: Sights, now_ms: int) -> str:
    """What keeps it from going now."""
    s = sights.get(turn.node_id)
    if s is None or not s.connected:
        return f"{turn.node_id} is not connected"
    if turn.since_ms and now_ms - turn.since_ms < AGAIN_MS:
        return f"{turn.node_id} could not be told a moment ago"
    own = {t.node_id for t in r.turns if t.step in UNDER_WAY}
    others = [x for x in sights.values() if x.node_id != turn.node_id]
    if not s.serving and not turn.reverting:
        return f"{turn.node_id} does not serve: it is {s.state.value}"
    away = {t.node_id for t in r.turns if t.step in UNDER_WAY and t.pool == s.pool} | _away(others, s.pool)
    if len(away) >= r.order.max_unavailable:
        words = f"{', '.join(sorted(away)[:3])} of pool {s.pool} are away or watched"
        return "; ".join([words, *why_shut(x for x in others if x.node_id in away)])
    serve = [x for x in others if x.reached and x.model == s.model and (x.node_id not in own or _baked(r, x.node_id))]
    if s.serving and not serve and not r.order.force:
        words = f"{turn.node_id} is the only worker that serves {s.model} now"
        return "; ".join([words, *why_shut(x for x in others if x.model == s.model)])
    return ""


def _away(others: Iterable[Sight], pool: str) -> set[str]:
    """Workers of the pool that serve nobody now, whoever sent them away."""
    return {s.node_id for s in others if s.pool == pool and not s.reached and (s.connected or s.lost_ms < LOST_MS)}


def _baked(r: Restart, node_id: str) -> bool:
    return any(t.node_id == node_id and t.step is Step.BAKING for t in r.turns)


def _over(r: Restart, now_ms: int) -> Restart:
    if r.stage is Stage.REVERTING:
        back = [f"; {t.node_id} runs by its settings of before" for t in r.turns if t.reverting and t.step is Step.DONE]
        return r.ended(Stage.STOPPED, "".join([r.verdict, *back]), now_ms)
    done = sum(t.step is Step.DONE for t in r.turns)
    left = [t.node_id for t in r.turns if t.step is Step.LEFT_OUT]
    words = f"{done} of {len(r.turns)} workers were started anew"
    return r.ended(Stage.DONE, words + (f"; left out: {', '.join(left)}" if left else ""), now_ms)
