"""A gateway of several processes: they share its two ports (`SO_REUSEPORT`), and the one that was started looks after them.

It serves nothing itself. The kernel gives each new connection to one of them; a client's channel stays with the process that it got. Each is a
node of its own, `g0.1` for the first of `g0`: with its own link to each worker, its own report, and its own place in the fleet.
Processes are started anew, never forked: gRPC's threads don't survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from services.gateway import siblings
from services.gateway.settings import GatewaySettings
from trimtab.kit import notify, rpc
from trimtab.kit.config import ConfigError, host_port
from trimtab.kit.tasks import vital

log = structlog.get_logger(__name__)

EXIT_FAILED, EXIT_USAGE = 1, 2
PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
"""Between two starts of a process that ends by itself before it serves."""
LOOK_S = 0.1
"""How often it is looked whether one serves that has just been started."""
START_S = 120.0
"""What one gets to serve after its start."""
WATCH_S = 2.0
SILENT = 15
"""One that served, and has not answered so often in a row, is killed: its clients' connections end, and the others or its next start take
them. Answers are counted, not seconds: when this process is stopped for a while that is no silence of theirs."""
TOLD_TO_END = (-signal.SIGTERM, -signal.SIGINT)
"""Exit codes of one that was told before it could listen to that."""
END_S = 10.0
"""What a process gets beyond `drain_s` to end by itself."""


@contextlib.contextmanager
def held(address: str) -> Iterator[str]:
    """The address, its port chosen where it was 0: meanwhile nobody can listen there but who shares it with this process. PortTaken where
    somebody does.
    """
    host, port = host_port(address)
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        if port:
            # Who shares a port is not kept out by others who do: nobody may be there at all.
            with contextlib.closing(socket.socket(family, kind)) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind(where)
    except OSError as e:
        raise rpc.PortTaken(rpc.cannot_listen(address, e)) from e
    with contextlib.closing(socket.socket(family, kind)) as shared:
        # It never listens, so that no connection is given to it.
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            try:
                shared.bind(where)
            except OSError:
                # Connections of an earlier process linger. Only then: with this option others could take the port alone until somebody listens.
                shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                shared.bind(where)
        except OSError as e:
            raise rpc.PortTaken(rpc.cannot_listen(address, e)) from e
        yield f"{host}:{shared.getsockname()[1]}"


class Child:
    """One of the processes; started again whenever it ends by itself."""

    def __init__(self, name: str, argv: Sequence[str], socket_path: Path) -> None:
        self.name = name
        self.serves = asyncio.Event()
        """Since its last start."""
        self._argv = tuple(argv)
        self._socket = socket_path
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._has_served = False

    async def run(self) -> int:
        """Until `stop`, or until it ends for its settings (exit code 2) without ever having served; its last exit code."""
        pause_s = PAUSE_S
        while True:
            try:
                code = await self._once()
            except OSError as e:  # the machine has no process more to give
                code, because = EXIT_FAILED, str(e)
            else:
                because = f"exit code {code}"
            served = self.serves.is_set()
            self.serves.clear()
            if self._stopping.is_set():
                return 0 if code in TOLD_TO_END else code
            if code == EXIT_USAGE and not self._has_served:
                return code
            pause_s = PAUSE_S if served else min(MAX_PAUSE_S, pause_s * 2)
            log.warning("a process of this gateway ended", node=self.name, because=because, again_s=pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return 0  # nothing ran that could have ended badly

    async def _once(self) -> int:
        """From its start to its end."""
        self._process = await asyncio.create_subprocess_exec(*self._argv)
        if self._stopping.is_set():
            self._process.terminate()
        watched = asyncio.create_task(self._watch(self._process))
        try:
            return await self._process.wait()
        finally:
            await rpc.cancel_and_wait(watched)

    def stop(self) -> None:
        """Have it drain and end, and not begin again."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait until it serves; from then on kill it where it hangs."""
        until = time.monotonic() + START_S
        while await siblings.ask(self._socket, "/alive") is None:
            if time.monotonic() > until:
                self._give_up(process, f"it does not serve {START_S:g} s after its start")
                return
            await asyncio.sleep(LOOK_S)
        self.serves.set()
        self._has_served = True
        silent = 0
        while silent < SILENT:
            await asyncio.sleep(WATCH_S)
            # Without its socket it can't be asked, and is not to blame: somebody has cleared it away.
            asked = self._socket.exists()
            silent = silent + 1 if asked and await siblings.ask(self._socket, "/alive") is None else 0
        self._give_up(process, f"it has not answered {SILENT} times in a row")

    def _give_up(self, process: asyncio.subprocess.Process, why: str) -> None:
        if not self._stopping.is_set():
            log.error("a process of this gateway is killed", node=self.name, because=why)
            process.kill()

    def _signal(self, sig: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(sig)


async def supervise(s: GatewaySettings, arguments: Sequence[str]) -> int:
    """Until SIGTERM or SIGINT; the worst exit code of them all. `arguments` are this process's own, which theirs begin with. PortTaken where
    a port is.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stopping.set)
    notifier = notify.from_environment()
    with contextlib.ExitStack() as ports:
        listen, http = ports.enter_context(held(s.listen)), ports.enter_context(held(s.http))
        metrics = ("--metrics", ports.enter_context(held(s.metrics))) if s.metrics else ()
        directory = ports.enter_context(_directory(s.processes))
        # -P: what lies in the directory that it was started in is not taken for a module.
        own = (sys.executable, "-P", "-m", "services.gateway", *arguments, "--listen", listen, "--http", http, *metrics)
        own = (*own, "--siblings", str(directory), "--parent-pid", str(os.getpid()), "--process")
        numbers = range(1, s.processes + 1)
        children = [Child(f"{s.node_id}.{n}", (*own, str(n)), siblings.socket_of(directory, n)) for n in numbers]
        ends = [vital(child.run(), child.name, stopping.set) for child in children]
        for end in ends:
            end.add_done_callback(lambda _: stopping.set())
        begin = asyncio.create_task(_tell(children, notifier, s, listen, http))
        pings = vital(notifier.pings(lambda: any(c.serves.is_set() for c in children)), "watchdog", stopping.set)
        await stopping.wait()
        await rpc.cancel_and_wait(begin)
        notifier.stopping("draining")
        for child in children:
            child.stop()
        _, late = await asyncio.wait(ends, timeout=s.drain_s + END_S)
        for child, end in zip(children, ends, strict=True):
            if end in late:
                log.error("a process of this gateway did not end in time, and is killed", node=child.name)
                child.kill()
        codes = await asyncio.gather(*ends, return_exceptions=True)
        await rpc.cancel_and_wait(pings)
    log.info("gateway stopped", node=s.node_id, processes=s.processes)
    return max(EXIT_FAILED if isinstance(code, BaseException) or code < 0 else code for code in codes)


async def _tell(
    children: Sequence[Child], notifier: notify.Notifier, s: GatewaySettings, listen: str, http: str
) -> None:
    """Once all of them serve."""
    for child in children:
        await child.serves.wait()
    log.info("gateway processes ready", node=s.node_id, listen=listen, http=http, processes=s.processes)
    notifier.ready(f"gRPC {listen}, HTTP {http}, {s.processes} processes")


@contextlib.contextmanager
def _directory(processes: int) -> Iterator[Path]:
    """For their sockets; nobody else's to read."""
    with tempfile.TemporaryDirectory(prefix="trimtab-gateway-") as made:
        path = siblings.socket_of(Path(made), processes)
        if len(os.fsencode(path)) > siblings.MAX_PATH_BYTES:
            raise ConfigError(
                [f"gateway processes: {path} is too long for a socket's name; set TMPDIR to a shorter one"]
            )
        yield Path(made)
