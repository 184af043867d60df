"""Faults for a control plane: links that are cut or stall, stores that die, are emptied or fail over, replicas that are killed or stopped.

A `Schedule` draws them from a seed; a `History` keeps what was asked, what was acknowledged and what nodes saw, and says afterwards what must
not have been. What happened is the same for a seed only as far as the machine lets it be: the checks hold for any order of events.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from controlplane.admin.client import AdminClient
from controlplane.leader import Leader
from controlplane.replica import Replica as Holder
from controlplane.spec import adjust
from controlplane.store import Fenced, Lease
from controlplane.store.redis import RedisStore
from tests.controlplane.mesh import FakeNode
from tests.controlplane.proxy import Proxy
from tests.controlplane.replicas import LEASE_S, Planes, Replica, Store, serving, stop, wake
from tests.controlplane.witness import Asked, History, Outcome, Seen, Written
from trimtab.errors import Conflict, StoreUnavailable, TrimtabError
from trimtab.kit.rpc import cancel_and_wait
from trimtab.snapshot import Adjustment, Limits, Scope

CONVERGE_S = 60.0
DEFAULT_ACTIVE = 48
LIMITS = Limits(max_num_seqs=4096, max_step_tokens=8192)
"""So that no value of a long run is refused."""


class Contender:
    """A controller in this process: it leads when it can, and writes adjustments while it believes that it leads, or believed so once."""

    def __init__(self, name: str, url: str, mesh: str, history: History) -> None:
        self.name = name
        self._history = history
        self.store = RedisStore(url, mesh)
        self.holder = Holder(self.store)
        self.leader = Leader(self.holder, name, lease_s=LEASE_S)
        self._old: list[Lease] = []
        self._count = 0
        self._run = asyncio.create_task(self.holder.run())

    async def stand(self) -> None:
        asked, before = time.monotonic(), self.leader.newest
        await self.leader.stand()
        lease = self.leader.lease.value
        # The same object where the store did not answer.
        if self.leader.newest is not None and self.leader.newest is not before:
            self._history.grants.append(Seen(self.leader.newest, asked, time.monotonic()))
        if lease is not None and lease not in self._old:
            self._old.append(lease)

    async def write(self, rng: random.Random) -> None:
        """Under some lease that it ever had, as one that slept would."""
        if not self._old:
            return
        lease = rng.choice(self._old[-2:])
        self._count += 1
        move = Adjustment(
            self.name,
            "batch.hard_cap",
            Scope(),
            "chaos",
            int(time.time() * 1000) + 3_600_000,
            delta=-(self._count % 7) - 1,
        )
        began = time.monotonic()
        try:
            outcome = await self.holder.write(
                adjust([move]), lambda: (), author=self.name, reason="chaos", lease=lease, evidence=f"{self._count}"
            )
        except Fenced:
            self._history.fenced += 1
        except (StoreUnavailable, Conflict):
            pass
        else:
            if outcome.written:
                self._history.written.append(Written(lease, began))

    async def close(self) -> None:
        await cancel_and_wait(self._run)
        await self.store.close()


@dataclass
class World:
    """Everything that can be broken. `primary` is where the store's proxies point; the other one follows it while it can."""

    planes: Planes
    stores: list[Store]
    store_links: list[Proxy]
    node_links: list[Proxy]
    contenders: list[Contender]
    history: History
    rng: random.Random
    primary: int = 0
    next_value: int = DEFAULT_ACTIVE + 1
    stopped: list[Replica] = field(default_factory=list)
    may_ask: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_ask.set()

    # ---- what people and controllers do

    async def put(self) -> None:
        """A change by one replica, whatever comes of it."""
        await self.may_ask.wait()
        # Each once: a value is known by who asked for it.
        asked = Asked(self.next_value, time.monotonic())
        self.next_value += 1
        self.history.asked.append(asked)
        at = self.rng.choice(self.planes.replicas)
        try:
            async with AdminClient(at.address, timeout_s=6.0) as admin:
                answer = await admin.set_policy(
                    {"batch.active": str(asked.value)}, author="ada", reason=f"{asked.value}"
                )
            asked.outcome = Outcome.COMMITTED if answer.durability.committed else Outcome.ACCEPTED
        except Conflict:
            asked.outcome = Outcome.REFUSED
        except TrimtabError:
            asked.outcome = Outcome.UNKNOWN
        asked.ended = time.monotonic()

    async def puts(self) -> None:
        """A few, some at once."""
        await asyncio.gather(*(self.put() for _ in range(self.rng.randint(1, 4))))

    async def control(self) -> None:
        for contender in self.contenders:
            with contextlib.suppress(StoreUnavailable):
                await contender.stand()
            await contender.write(self.rng)

    # ---- faults

    async def kill_replica(self) -> None:
        """One, perhaps the leader; it is back at once, under another name."""
        replica = self.rng.choice(self.planes.replicas)
        await replica.kill()
        await replica.start()

    async def stop_replica(self) -> None:
        """Past its lease; it is woken by a later step or at the end."""
        candidates = [r for r in self.planes.replicas if r not in self.stopped]
        if len(candidates) > 1:
            replica = self.rng.choice(candidates)
            stop(replica)
            self.stopped.append(replica)

    async def wake_replica(self) -> None:
        if self.stopped:
            wake(self.stopped.pop(0))

    async def cut_link(self) -> None:
        link = self.rng.choice([*self.store_links, *self.node_links])
        link.cut = True
        link.sever()
        await asyncio.sleep(self.rng.uniform(0.1, 1.0))
        link.cut = False

    async def stall_link(self) -> None:
        """Nothing gets through, and nobody is told."""
        link = self.rng.choice([*self.store_links, *self.node_links])
        link.stalled.clear()
        await asyncio.sleep(self.rng.uniform(0.5, 2.0))
        link.stalled.set()

    async def restart_store(self) -> None:
        """Killed; what it had acknowledged is on its disk."""
        store = self.stores[self.primary]
        store.kill()
        await asyncio.sleep(self.rng.uniform(0.05, 0.5))
        store.start()
        await self._follow()

    async def empty_store(self) -> None:
        """It comes back with nothing, once every replica knows the newest: losing both at once is losing it. People ask again as it begins."""
        self.may_ask.clear()
        try:
            while any(a.outcome is Outcome.OPEN for a in self.history.asked):
                await asyncio.sleep(0.02)
            await self.quiet()
            for store in self.stores:
                store.kill()
                store.empty()
        finally:
            self.may_ask.set()
        for store in self.stores:
            store.start()
        await self._follow()

    async def fail_over(self) -> None:
        """The replica takes the primary's place, whatever it has; the old one comes back empty, as a replica."""
        old, new = self.primary, 1 - self.primary
        self.stores[old].kill()
        await self._tell(new, "REPLICAOF", "NO", "ONE")
        self.primary = new
        for link in self.store_links:
            link.point_at(self.stores[new].port)
        self.stores[old].empty()
        self.stores[old].start()
        await self._follow()

    async def _follow(self) -> None:
        """The other store follows the primary, and has all of it."""
        other = 1 - self.primary
        await self._tell(other, "REPLICAOF", "127.0.0.1", str(self.stores[self.primary].port))

    async def _tell(self, which: int, *words: str) -> None:
        from redis.asyncio import Redis
        from redis.exceptions import RedisError

        async with asyncio.timeout(20):
            while True:
                try:
                    async with Redis.from_url(self.stores[which].url, protocol=2) as redis:
                        await redis.execute_command(*words)
                    return
                except (RedisError, OSError):
                    await asyncio.sleep(0.05)

    # ---- rest

    async def mend(self) -> None:
        """No fault is left."""
        while self.stopped:
            wake(self.stopped.pop())
        for link in (*self.store_links, *self.node_links):
            link.cut = False
            link.stalled.set()
        for replica in self.planes.replicas:
            if replica.process is None or replica.process.returncode is not None:
                await replica.start()
            await serving(replica)

    async def quiet(self) -> int | None:
        """Once nothing is broken and all hold the same: the value in force."""
        await self.mend()
        async with asyncio.timeout(CONVERGE_S):
            await self.planes.agree()
        value = self.planes.nodes[0].active[-1]
        assert all(n.active[-1] == value for n in self.planes.nodes)
        return None if value == DEFAULT_ACTIVE else value


FAULTS = (
    "kill_replica",
    "stop_replica",
    "wake_replica",
    "cut_link",
    "stall_link",
    "restart_store",
    "empty_store",
    "fail_over",
)


async def run(world: World, steps: int) -> None:
    """`steps` drawn from the seed; people and controllers go on through all of them."""
    for number in range(steps):
        fault = world.rng.choice(FAULTS)
        world.history.log.append(f"{number}: {fault}")
        busy = [asyncio.create_task(world.puts()), asyncio.create_task(world.control())]
        try:
            await getattr(world, fault)()
        finally:
            await asyncio.gather(*busy)
        await asyncio.sleep(world.rng.uniform(0.0, 0.3))


@asynccontextmanager
async def a_world(directory, seed: int, *, replicas: int = 2, nodes: int = 4) -> AsyncIterator[World]:  # type: ignore[no-untyped-def]
    """Two stores, one following the other; a write is committed once both have it. Each replica and each node has a link of its own."""
    rng, history = random.Random(seed), History()
    stores = [Store(directory / f"store{i}", ("--repl-diskless-sync-delay", "0")) for i in range(2)]
    for store in stores:
        store.start()
    store_links = [Proxy("127.0.0.1", stores[0].port) for _ in range(replicas + 1)]
    for link in store_links:
        await link.start()
    planes = Planes([])
    node_links: list[Proxy] = []
    contenders: list[Contender] = []
    world = World(planes, stores, store_links, node_links, contenders, history, rng)
    try:
        await world._follow()
        for i in range(replicas):
            url = f"redis://127.0.0.1:{store_links[i].port}/0"
            flags = ("--store-replicas", "1", "--store-wait-ms", "300")
            planes.replicas.append(Replica(f"c{i}", url, directory / "state", flags))
        for replica in planes.replicas:
            await replica.start()
        for replica in planes.replicas:
            await serving(replica)
            link = Proxy("127.0.0.1", int(replica.address.rsplit(":", 1)[1]))
            await link.start()
            node_links.append(link)
        for i in range(nodes):
            node = FakeNode([f"127.0.0.1:{link.port}" for link in node_links], f"w{i}", limits=LIMITS)
            planes.nodes.append(node)
            node.start()
        url = f"redis://127.0.0.1:{store_links[-1].port}/0"
        contenders += [Contender(f"k{i}", url, "default", history) for i in range(2)]
        yield world
    finally:
        for replica in world.stopped:
            with contextlib.suppress(ProcessLookupError):
                wake(replica)
        for contender in contenders:
            await contender.close()
        for node in planes.nodes:
            await node.stop()
        for replica in planes.replicas:
            await replica.kill()
        for link in (*store_links, *node_links):
            await link.close()
        for store in stores:
            store.kill()
