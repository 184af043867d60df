"""Seeded arrivals and lengths: who comes when, with how many tokens. Pure; the same seed gives the same workload.

Lengths are lognormal, fitted to the medians and 90th percentiles that public traces have (RESEARCH §1.1). A fit keeps those two and the
longest; it has no drift, no sessions and no tie between prompt and output, which real traces have a little of.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab.messages import Workload

Z90 = 1.2815515594600038
"""The 90th percentile of a standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: half are below `p50`, nine of ten below `p90`, none above `longest`."""

    p50: float
    p90: float
    longest: int

    def draw(self, rng: random.Random) -> int:
        sigma = math.log(self.p90 / self.p50) / Z90
        return max(1, min(self.longest, round(self.p50 * math.exp(sigma * rng.gauss(0.0, 1.0)))))


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompts and outputs of one sort of request."""

    prompt: Lengths
    output: Lengths


CHAT = Kind(Lengths(1020, 2734, 14_050), Lengths(129, 424, 1000))
"""Azure 2023, conversation."""
CODE = Kind(Lengths(1469, 5187, 7437), Lengths(13, 55, 1899))
"""Azure 2023, code."""
DOCUMENTS = Kind(Lengths(6909, 27_367, 126_195), Lengths(350, 597, 2000))
"""Mooncake FAST'25, conversation: the one public trace that fills a window of 128K."""
SUMMARIES = Kind(Lengths(2730, 3702, 4054), Lengths(167, 372, 4056))
"""arXiv summarisation, as Vidur has it."""
GIANTS = Kind(Lengths(70_000, 100_000, 126_000), Lengths(350, 597, 2000))
"""The longest fiftieth of the same, by itself."""


@dataclass(frozen=True, slots=True)
class Phase:
    """From `at_s` on, `rate` requests a second come; 0 is nobody."""

    at_s: float
    rate: float


@dataclass(frozen=True, slots=True)
class Source:
    """Clients that are alike. Gaps between arrivals vary by `cv`: 1 is Poisson, above it requests come in bursts (a gamma process)."""

    name: str
    workload: Workload
    kind: Kind
    phases: tuple[Phase, ...]
    cv: float = 1.0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; `at_s` from the beginning, lengths in tokens. `source` is who sends it."""

    at_s: float
    workload: Workload
    prompt: int
    output: int
    source: str = ""
    tenant: str = ""


def arrivals(sources: Sequence[Source], until_s: float, seed: int) -> Iterator[Arrival]:
    """In the order of their arrival. What one source sends does not depend on the others."""
    return heapq.merge(*(_of(s, until_s, random.Random(f"{seed}/{s.name}")) for s in sources), key=lambda a: a.at_s)


def _of(source: Source, until_s: float, rng: random.Random) -> Iterator[Arrival]:
    """A renewal process of gaps with mean 1, run through by the rate as a clock: a change of rate holds at once."""
    shape = 1.0 / (source.cv * source.cv)
    ends = [*(p.at_s for p in source.phases[1:]), until_s]
    due = rng.gammavariate(shape, 1.0 / shape)
    for phase, end in zip(source.phases, ends, strict=True):
        at, end = phase.at_s, min(end, until_s)
        while phase.rate > 0.0 and at + due / phase.rate < end:
            at += due / phase.rate
            prompt, output = source.kind.prompt.draw(rng), source.kind.output.draw(rng)
            yield Arrival(at, source.workload, prompt, output, source.name, source.tenant)
            due = rng.gammavariate(shape, 1.0 / shape)
        # What is left of the gap goes on at the next phase's rate.
        due = max(0.0, due - max(0.0, end - at) * phase.rate)


def mixed(
    rate: float | Sequence[Phase],
    *,
    realtime_share: float = 0.3,
    realtime: Kind = CHAT,
    batch: Sequence[Kind] = (SUMMARIES, DOCUMENTS),
    cv: float = 1.0,
) -> list[Source]:
    """REALTIME and BATCH by their part of all requests: 30 % and 70 %, as the field guides have them; each kind of BATCH is as frequent as
    the others. `rate` is that of all together.
    """
    phases = (Phase(0.0, rate),) if isinstance(rate, int | float) else tuple(rate)

    def share(part: float) -> tuple[Phase, ...]:
        return tuple(Phase(p.at_s, p.rate * part) for p in phases)

    part = (1.0 - realtime_share) / len(batch)
    return [
        Source("realtime", Workload.REALTIME, realtime, share(realtime_share), cv),
        *(Source(f"batch-{i}", Workload.BATCH, kind, share(part), cv) for i, kind in enumerate(batch)),
    ]
