"""The store's server: what it says of its memory. As `python -m services.bench.push.store BINARY FLAGS…` it runs in this process's place, for a
starter that only starts Python."""

from __future__ import annotations

import asyncio
import os
import sys

from services.bench.processes import BenchError

SAYS_S = 5.0
"""What it gets for its answer."""


async def used_kb(port: int) -> float:
    """What a server on this machine has allocated, by its own count. Resident memory has its allocator's gaps in it as well.

    BenchError when it does not say. Written out, since nothing but the control plane's store has a client for such servers.
    """
    try:
        async with asyncio.timeout(SAYS_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"INFO memory\r\n")
                head = await reader.readline()
                text = await reader.readexactly(int(head[1:])) if head[:1] == b"$" else head
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as e:
        raise BenchError(f"the store does not say how much memory it uses: {e!r}") from e
    return used_bytes(text) / 1024


def used_bytes(info: bytes) -> int:
    """Of what a server answers to INFO."""
    for line in info.splitlines():
        name, _, value = line.partition(b":")
        if name == b"used_memory":
            return int(value)
    raise BenchError(f"the store does not say how much memory it uses: {info[:200].decode(errors='replace')}")


if __name__ == "__main__":
    os.execv(sys.argv[1], sys.argv[1:])
