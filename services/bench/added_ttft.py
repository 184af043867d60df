"""What a gateway adds to TTFT: the same request through it and straight to its worker, in alternating pairs.

The engine is simulated and takes the same time for every step; idle, it begins one at once. So its share of TTFT is a constant that cancels,
and what is left between the two medians is the gateway.
"""

from __future__ import annotations

from pathlib import Path

from services.bench.arms import grpc_ask
from services.bench.figures import Pair
from services.bench.load import pairs, prompts
from services.bench.start import simulated_mesh
from trimtab.client import Client

STEP_MS = 5.0
MAX_TOKENS = 4
WARM_UP = 10


async def measure_pairs(directory: Path, count: int, seed: int) -> list[Pair]:
    """`count` pairs of (through the gateway, straight) TTFT in milliseconds, one request at a time."""
    async with (
        simulated_mesh(directory, STEP_MS) as mesh,
        Client(mesh.gateway) as gateway,
        Client(mesh.worker) as worker,
    ):
        through, straight = grpc_ask(gateway, MAX_TOKENS), grpc_ask(worker, MAX_TOKENS)
        await pairs(through, straight, prompts(f"{seed}/warm", WARM_UP))
        return await pairs(through, straight, prompts(f"{seed}/pairs", count))
