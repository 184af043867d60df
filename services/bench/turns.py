"""One arm's turn: wait until the machine is ours, wake the engine, send the burst, and account for every CPU second spent meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

import aiohttp
import psutil

from services.bench.arms import Arm
from services.bench.figures import Cell
from services.bench.load import prompts
from services.bench.processes import BenchError
from trimtab.errors import TrimtabError

QUIET_POLL_S = 0.25
QUIET_LIMIT_S = 5.0
QUIET_SHARE = 0.25
"""Cores that our processes may use together and still count as idle. vLLM's workers spin for a second after their last step."""
PRIMER_TOKENS = 8
FIRST_TOKENS = 2


class Machinery(Protocol):
    """What a turn needs of the processes: their CPU seconds by name, and an error when one has died."""

    def cpu_s(self) -> Mapping[str, float]: ...
    def check(self) -> None: ...


async def cell(
    arm: Arm, machinery: Machinery, seed: str, requests: int, concurrency: int, max_tokens: int, *, firsts: int = 0
) -> Cell:
    """`firsts` more requests are short: they count for TTFT alone, of which long ones give few samples.

    BenchError when any request fails, or ends with another number of tokens.
    """
    await settle(machinery)
    try:
        # An engine that has slept wakes slowly, and its first steps pay for what later ones find ready: that is not what is asked.
        await arm.burst(prompts(f"{seed}/primer", concurrency), concurrency, PRIMER_TOKENS)
        before, busy_before = machinery.cpu_s(), busy_s()
        burst = await arm.burst(prompts(seed, requests), concurrency, max_tokens)
        after, busy_after = machinery.cpu_s(), busy_s()
        short = await arm.burst(prompts(f"{seed}/firsts", firsts), concurrency, FIRST_TOKENS) if firsts else None
    except (TrimtabError, aiohttp.ClientError, OSError, ValueError) as e:
        machinery.check()  # a dead process explains it better
        raise BenchError(f"a request of arm {arm.name} failed: {e}") from e
    wrong = [s.tokens for s in burst.samples if s.tokens != max_tokens]
    if wrong or len(burst.samples) != requests:
        raise BenchError(f"arm {arm.name} gave {wrong[:3]} tokens where each request asks for {max_tokens}")
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    mine = {role: spent[name] for role, name in arm.roles.items()} | {"client": spent["client"]}
    return Cell(
        wall_s=burst.wall_s,
        tokens=sum(s.tokens for s in burst.samples),
        ttft_ms=tuple(s.ttft_ms for s in (*burst.samples, *(short.samples if short else ()))),
        cpu_s=mine,
        idle_cpu_s=sum(spent.values()) - sum(mine.values()),
        foreign_cpu_s=max(0.0, busy_after - busy_before - sum(spent.values())),
    )


async def lone(arm: Arm, machinery: Machinery, seed: str, requests: int) -> tuple[float, ...]:
    """TTFT in milliseconds of short requests, one after another. BenchError when one fails."""
    await settle(machinery)
    try:
        await arm.burst(prompts(f"{seed}/primer", 1), 1, PRIMER_TOKENS)
        burst = await arm.burst(prompts(seed, requests), 1, FIRST_TOKENS)
    except (TrimtabError, aiohttp.ClientError, OSError, ValueError) as e:
        machinery.check()
        raise BenchError(f"a request of arm {arm.name} failed: {e}") from e
    return tuple(s.ttft_ms for s in burst.samples)


async def settle(machinery: Machinery) -> None:
    """Until our processes do nothing. One that never comes to rest is not waited for: the report shows it."""
    for _ in range(round(QUIET_LIMIT_S / QUIET_POLL_S)):
        before = _others_s(machinery)
        await asyncio.sleep(QUIET_POLL_S)
        if _others_s(machinery) - before <= QUIET_SHARE * QUIET_POLL_S:
            return


def _others_s(machinery: Machinery) -> float:
    return sum(seconds for name, seconds in machinery.cpu_s().items() if name != "client")


def busy_s() -> float:
    """CPU seconds that this machine has spent on anything."""
    t = psutil.cpu_times()
    return float(sum(t) - t.idle - getattr(t, "iowait", 0.0) - getattr(t, "guest", 0.0) - getattr(t, "guest_nice", 0.0))
