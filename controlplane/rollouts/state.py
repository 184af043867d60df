"""A rollout as a value, and as the mark that the store keeps of it. Pure.

Times are unix milliseconds: whoever leads next goes on from them. `version` rises with every change, and of two that change it at once only
one is taken.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.errors import PolicyRefused
from trimtab.sequential import Odds, Sign
from trimtab.snapshot import Scope, parse_scope

PREFIX = "rollout/"
UNWATCHED_MS = 15_000
"""Between two looks that are further apart nobody watched. That a leader looks is written down every 5 s, and a dead one's lease lasts for 3."""
UNKNOWN = -1
"""When it was last looked at, of a mark that does not say it."""
LINES = 100
"""That are kept of one rollout, the newest."""


class Stage(enum.StrEnum):
    """Where it is. The first two are alive."""

    BAKING = "baking"
    WIDENING = "widening"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled back"
    ABORTED = "aborted"


class Verdict(enum.StrEnum):
    """Of the canaries, beside the rest."""

    BETTER = "better"
    WORSE = "worse"
    ALIKE = "alike"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Line:
    """What happened, in words; `evidence` has the figures."""

    at_unix_ms: int
    text: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of both sides, None where nothing was measured, and the samples behind it."""

    name: str
    canary: float | None
    rest: float | None
    canary_n: int
    rest_n: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Wealth:
    """What the tests have against the canaries, since the rollout began. It goes on through its stages: so all its looks together are one
    test, and one leader's evidence is the next one's.
    """

    firsts: Odds = field(default_factory=Odds)
    ends: Odds = field(default_factory=Odds)
    errors: Odds = field(default_factory=Odds)
    throughput: Sign = field(default_factory=Sign)
    preemptions: Sign = field(default_factory=Sign)
    waits: Sign = field(default_factory=Sign)


@dataclass(frozen=True, slots=True)
class Rollout:
    """`fields` are as people typed them, `before` as the scope had them then; `canaries` have them now.

    `began_unix_ms` is when this stage did, `extended` how often its bake was lengthened, `looks` how many looks in a row found them worse.
    `looked_unix_ms` is when it was last looked at, 0 for never; `unwatched_ms` of this stage nobody watched, which is no bake: below 0 where
    the clock was set back.
    """

    rollout_id: str
    author: str
    reason: str
    fields: Mapping[str, str]
    before: Mapping[str, str]
    scope: Scope
    canaries: tuple[str, ...]
    pending: tuple[str, ...]
    weight: float
    bake_s: int
    started_unix_ms: int
    began_unix_ms: int
    stage: Stage = Stage.BAKING
    ended_unix_ms: int = 0
    widened: int = 0
    extended: int = 0
    looks: int = 0
    looked_unix_ms: int = 0
    unwatched_ms: int = 0
    samples: tuple[int, int] = (0, 0)
    """First tokens in this stage, of canaries and of the rest."""
    verdict: str = ""
    lines: tuple[Line, ...] = ()
    measures: tuple[Measure, ...] = ()
    wealth: Wealth = field(default_factory=Wealth)
    version: int = 1

    @property
    def live(self) -> bool:
        return self.stage in (Stage.BAKING, Stage.WIDENING)

    @property
    def baked_unix_ms(self) -> int:
        """When its bake is over, so far as it goes on being watched."""
        return self.began_unix_ms + 1000 * self.bake_s * (1 + self.extended) + self.unwatched_ms

    def looked(self, now_unix_ms: int) -> Rollout:
        """It is looked at now. What nobody watched before is told, and added to its bake, however long that was."""
        if self.looked_unix_ms == UNKNOWN:
            return replace(self, looked_unix_ms=now_unix_ms)
        away_ms = now_unix_ms - (self.looked_unix_ms or self.began_unix_ms)
        if 0 <= away_ms <= UNWATCHED_MS:
            return replace(self, looked_unix_ms=now_unix_ms)
        after = replace(self, looked_unix_ms=now_unix_ms, unwatched_ms=self.unwatched_ms + away_ms)
        if away_ms < 0:
            return after
        return after.told(now_unix_ms, f"nobody watched for {away_ms / 1000:.0f} s: it bakes for so much longer")

    def told(self, now_unix_ms: int, text: str, evidence: str = "") -> Rollout:
        lines = (*self.lines, Line(now_unix_ms, text, evidence))[-LINES:]
        return replace(self, lines=lines, verdict=text)

    def ended(self, stage: Stage, now_unix_ms: int, text: str, evidence: str = "") -> Rollout:
        return replace(self.told(now_unix_ms, text, evidence), stage=stage, ended_unix_ms=now_unix_ms)

    def share_of_work(self) -> float:
        """What a canary gets of new work; once they are half of the mesh, they get what the others do."""
        return self.weight if self.stage is Stage.BAKING else 1.0


def encode(r: Rollout) -> bytes:
    said = {
        "kind": "rollout", "id": r.rollout_id, "author": r.author, "reason": r.reason, "fields": dict(r.fields),
        "before": dict(r.before), "scope": str(r.scope), "canaries": r.canaries, "pending": r.pending,
        "weight": r.weight, "bake_s": r.bake_s, "started": r.started_unix_ms, "began": r.began_unix_ms,
        "stage": r.stage.value, "ended": r.ended_unix_ms, "widened": r.widened, "extended": r.extended,
        "looks": r.looks, "looked": r.looked_unix_ms, "unwatched": r.unwatched_ms, "samples": r.samples,
        "verdict": r.verdict, "version": r.version,
        "lines": [(x.at_unix_ms, x.text, x.evidence) for x in r.lines],
        "measures": [(m.name, m.canary, m.rest, m.canary_n, m.rest_n, m.verdict.value) for m in r.measures],
        "odds": [r.wealth.firsts.logs, r.wealth.ends.logs, r.wealth.errors.logs],
        "signs": [r.wealth.throughput.logs, r.wealth.preemptions.logs, r.wealth.waits.logs],
    }  # fmt: skip
    return json.dumps(said, ensure_ascii=False).encode()


def decode(key: str, data: bytes) -> Rollout | None:
    """None for what is something else, or of a build that says it otherwise."""
    if not key.startswith(PREFIX):
        return None
    try:
        said = json.loads(data)
        return _decoded(said) if said["kind"] == "rollout" else None
    except (ValueError, KeyError, IndexError, TypeError, PolicyRefused):
        return None


def _decoded(said: Mapping[str, Any]) -> Rollout:
    firsts, ends, errors = (Odds(_logs(x, Odds().logs)) for x in said["odds"])
    throughput, preemptions, waits = (Sign(_logs(x, Sign().logs)) for x in said["signs"])
    return Rollout(
        str(said["id"]), str(said["author"]), str(said["reason"]), _texts(said["fields"]), _texts(said["before"]),
        parse_scope(str(said["scope"])), tuple(map(str, said["canaries"])), tuple(map(str, said["pending"])),
        float(said["weight"]), int(said["bake_s"]), int(said["started"]), int(said["began"]), Stage(said["stage"]),
        int(said["ended"]), int(said["widened"]), int(said["extended"]), int(said["looks"]),
        # Older builds do not say these: who leads next is not to take their looks for none.
        int(said.get("looked", UNKNOWN)), int(said.get("unwatched", 0)),
        (int(said["samples"][0]), int(said["samples"][1])), str(said["verdict"]),
        tuple(Line(int(at), str(text), str(evidence)) for at, text, evidence in said["lines"]),
        tuple(Measure(str(n), c, r, int(cn), int(rn), Verdict(v)) for n, c, r, cn, rn, v in said["measures"]),
        Wealth(firsts, ends, errors, throughput, preemptions, waits), int(said["version"]),
    )  # fmt: skip


def _texts(said: Mapping[str, Any]) -> dict[str, str]:
    return {str(k): str(v) for k, v in said.items()}


def _logs(said: Any, new: tuple[float, ...]) -> tuple[float, ...]:
    """Those of a build that bets otherwise begin anew: less evidence, and none that is wrong."""
    found = tuple(float(x) for x in said)
    return found if len(found) == len(new) else new
