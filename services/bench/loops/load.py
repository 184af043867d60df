"""A block's requests, sent when they are due whatever became of those before, and what came of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.bench.arms import MODEL
from services.bench.loops.block import Request
from services.bench.loops.plan import Arrival
from services.bench.mixed.workload import TOKENS, prompt
from trimtab.client import Client
from trimtab.errors import TrimtabError
from trimtab.messages import Delta, Finish, Sampling, Workload
from trimtab.messages import Request as Asked

DEADLINE_S = 600.0


@dataclass(slots=True)
class Load:
    """What has come so far. `flying` are requests under way."""

    realtime: list[Request] = field(default_factory=list)
    batch_tokens: list[tuple[float, int]] = field(default_factory=list)
    batch_failed: int = 0
    flying: int = 0


async def send(
    client: Client, arrivals: Sequence[Arrival], seed: str, show: Callable[[float], None], vocabulary: int = TOKENS
) -> Load:
    """All of them, to their ends. `show` is told the seconds that have gone by, about twice a second."""
    load, begun = Load(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for i, a in enumerate(arrivals):
            while (left := begun + a.at_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left, 0.5))
                show(time.monotonic() - begun)
            group.create_task(_one(client, a, prompt(f"{seed}/{i}", a.prompt, vocabulary), load, begun))
        while load.flying:
            await asyncio.sleep(0.2)
            show(time.monotonic() - begun)
    return load


async def _one(client: Client, a: Arrival, ids: tuple[int, ...], load: Load, begun: float) -> None:
    due = begun + a.at_s
    sampling = Sampling(max_tokens=a.output, temperature=0.0, ignore_eos=True)
    request = Asked("", MODEL, ids, sampling, a.workload)
    first, last, worst, tokens, reason = 0.0, 0.0, 0.0, 0, ""
    load.flying += 1
    try:
        async for event in client.generate(request, timeout_s=DEADLINE_S):
            now = time.monotonic()
            if isinstance(event, Delta) and event.token_ids:
                worst = max(worst, now - last) if last else 0.0
                first, last, tokens = first or now, now, tokens + len(event.token_ids)
            elif isinstance(event, Finish):
                last = now
    except TrimtabError as e:
        reason = e.reason
    finally:
        load.flying -= 1
    if a.workload is Workload.REALTIME:
        ttft_ms = (first - due) * 1000.0 if first else None
        e2e_ms = (last - due) * 1000.0 if last and not reason else None
        load.realtime.append(Request(a.at_s, ttft_ms, worst * 1000.0, e2e_ms, reason))
    elif reason:
        load.batch_failed += 1
    else:
        load.batch_tokens.append((time.monotonic() - begun, a.prompt + tokens))
