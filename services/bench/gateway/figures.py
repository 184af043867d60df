"""From cells to the figures of `gateway`: what a token costs each way, how late it comes, and whether the goal is met. Pure.

A block is one round at one number of streams, with a cell for each arm. Arms are compared within blocks only, so whatever else the machine did
weighs on both sides of a ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound, Estimate, bootstrap, median, spread
from trimtab.kit.cli import table

GOAL = 2.0
STREAMS = (64, 256)
DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm's turn. `messages` are those with tokens in them; `late_ms` is from the engine's step to the client; `foreign_cpu_s` is what
    programs other than the bench's spent meanwhile."""

    wall_s: float
    messages: int
    tokens: int
    p50_late_ms: float
    p99_late_ms: float
    gateway_cpu_s: float
    worker_cpu_s: float
    client_cpu_s: float
    foreign_cpu_s: float

    @property
    def messages_per_cpu_s(self) -> float:
        return self.messages / self.gateway_cpu_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.gateway_cpu_s


@dataclass(frozen=True, slots=True)
class Block:
    """`cells` are in the order in which they were measured."""

    round: int
    streams: int
    cells: Mapping[str, Cell]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Block:
        return Block(raw["round"], raw["streams"], {arm: Cell(**cell) for arm, cell in raw["cells"].items()})


def ratio(blocks: Sequence[Block], arm: str, other: str, seed: int) -> Estimate | None:
    """The median over blocks of messages per gateway CPU-second, `arm` over `other`.

    Messages, not tokens: where a gateway falls behind and puts several tokens into one message, that must not look like speed.
    """
    both = [
        b.cells[arm].messages_per_cpu_s / b.cells[other].messages_per_cpu_s
        for b in blocks
        if {arm, other} <= {*b.cells}
    ]
    return bootstrap(both, median, seed=seed) if both else None


def goals(blocks: Sequence[Block], seed: int) -> list[Goal]:
    return [
        Goal.judged(
            f"messages_per_gateway_cpu_s_mux_to_{other}_at_{n}",
            GOAL,
            Bound.AT_LEAST,
            ratio([b for b in blocks if b.streams == n], "mux", other, seed),
        )
        # Our own path without the shared stream, and what no gateway that reads what it hands on can be: one that does not.
        for other in ("unmuxed", "plain")
        for n in STREAMS
    ]


def arms(blocks: Sequence[Block], seed: int) -> list[dict[str, Any]]:
    """An object for each arm at each number of streams."""
    found = []
    for streams in dict.fromkeys(b.streams for b in blocks):
        mine = [b for b in blocks if b.streams == streams]
        known = dict.fromkeys(arm for b in mine for arm in b.cells)
        found += [_arm([b for b in mine if arm in b.cells], streams, arm, seed) for arm in known]
    return found


def _arm(blocks: Sequence[Block], streams: int, arm: str, seed: int) -> dict[str, Any]:
    cells = [b.cells[arm] for b in blocks]
    known: dict[str, Any] = {
        "arm": arm,
        "streams": streams,
        "rounds": len(cells),
        "tokens_per_s": median([c.tokens / c.wall_s for c in cells]),
        "messages_per_token": median([c.messages / c.tokens for c in cells]),
        "p50_late_ms": median([c.p50_late_ms for c in cells]),
        "p99_late_ms": median([c.p99_late_ms for c in cells]),
        "worker_cores": median([c.worker_cpu_s / c.wall_s for c in cells]),
        "client_cores": median([c.client_cpu_s / c.wall_s for c in cells]),
        "foreign_cores": max(c.foreign_cpu_s / c.wall_s for c in cells),
    }
    if arm == DIRECT:
        return known
    beside = [(b.cells[arm], b.cells[DIRECT]) for b in blocks if DIRECT in b.cells]
    against = ratio(blocks, arm, "plain", seed) if arm != "plain" else None
    return known | {
        "gateway_cores": median([c.gateway_cpu_s / c.wall_s for c in cells]),
        "messages_per_gateway_cpu_s": asdict(spread([c.messages_per_cpu_s for c in cells])),
        "tokens_per_gateway_cpu_s": asdict(spread([c.tokens_per_cpu_s for c in cells])),
        "ratio_to_plain": asdict(against) if against else None,
        "added_p50_ms": median([c.p50_late_ms - d.p50_late_ms for c, d in beside]) if beside else None,
        "added_p99_ms": median([c.p99_late_ms - d.p99_late_ms for c, d in beside]) if beside else None,
    }


def sections(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(title, table) of each."""
    cost = [
        (
            str(a["streams"]),
            a["arm"],
            _spread(a["messages_per_gateway_cpu_s"]),
            _spread(a["tokens_per_gateway_cpu_s"]),
            "" if a["ratio_to_plain"] is None else "{value:.2f} [{low:.2f}, {high:.2f}]".format(**a["ratio_to_plain"]),
            f"{a['gateway_cores']:.2f}",
            f"{a['worker_cores']:.2f}",
            f"{a['client_cores']:.2f}",
            f"{a['foreign_cores']:.2f}",
        )
        for a in found
        if "gateway_cores" in a
    ]
    late = [
        (
            str(a["streams"]),
            a["arm"],
            f"{a['tokens_per_s']:.0f}",
            f"{a['messages_per_token']:.3f}",
            f"{a['p50_late_ms']:.2f}",
            f"{a['p99_late_ms']:.2f}",
            *("" if a.get(k) is None else f"{a[k]:.2f}" for k in ("added_p50_ms", "added_p99_ms")),
        )
        for a in found
    ]
    head = ("STREAMS", "ARM", "MESSAGES/CPU-S", "TOKENS/CPU-S", "TO PLAIN", "GATEWAY", "WORKER", "CLIENT", "OTHERS")
    head_late = ("STREAMS", "ARM", "TOKENS/S", "MESSAGES/TOKEN", "P50 MS", "P99 MS", "ADDED P50", "ADDED P99")
    return [
        (
            "Per CPU-second of the gateway's process: medians over rounds [quartiles], messages to plain's [95 %]; then cores in use",
            table(head, cost, right=(0, 5, 6, 7, 8)),
        ),
        (
            "From the end of the engine's step to the client, medians over rounds; added = less direct's in the same block",
            table(head_late, late, right=(0, 2, 3, 4, 5, 6, 7)),
        ),
    ]


def _spread(s: Mapping[str, float]) -> str:
    return "{median:.0f} [{low:.0f}, {high:.0f}]".format(**s)
