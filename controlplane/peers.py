"""The other replicas of this control plane: who they are, who is connected to them, and the way to ask them.

Each replica tells the store that it lives, and who is connected to it; each reads what the others tell. So any replica knows the whole
mesh, though a node talks to one alone. What changes with every push or report is not told: whoever wants it asks the replica itself.
While the store is away what was told last stands: gateways go on with the workers that they have.

Where certificates don't say who asks, whoever asked this replica does; what it asks by itself, such as a leader's commands, it asks by a word
that it has made up, whose digest the store has: who can write there is above every role.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from controlplane.fleet import Fleet, Member
from controlplane.gatekeeper import REPLICA, credentials
from controlplane.leader import Leader
from controlplane.store import Peer, PolicyStore
from trimtab.codec import decode_hello, decode_report, encode_hello, encode_report
from trimtab.errors import Draining, StoreUnavailable, TrimtabError
from trimtab.kit.renewing import Renewing
from trimtab.kit.rpc import from_call
from trimtab.kit.tls import CertificateError, Tls
from trimtab.messages import Report
from trimtab.snapshot import Identity
from trimtab.v1 import admin_pb2, admin_pb2_grpc

log = structlog.get_logger(__name__)

UNIX_S = time.time() - time.monotonic()
"""From this process's monotonic clock to the wall's, taken once: what is told must not change by itself."""

BEAT_S = 0.5
"""A replica tells and reads this often, when nothing changes."""
SETTLE_S = 0.05
"""What changes meanwhile is told at once."""
ALIVE_MS = 1500
"""What a replica tells holds so long."""
GRACE_S = 1.5
"""A replica that the store knows no more is gone after this; its nodes have found another by then, or are lost. A store that was away or
emptied knows nobody for a moment."""
ASK_S = 2.0
"""What a peer gets for its answer."""
UNREAD = -1
"""A `seq` that no replica has."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A peer, and when this replica last heard of it, in seconds of its monotonic clock."""

    peer: Peer
    heard_at: float


class Peers:
    """`on_change` is called when nodes of another replica came, went or changed. `newest` gives what this replica pushes."""

    def __init__(
        self,
        store: PolicyStore,
        fleet: Fleet,
        leader: Leader,
        *,
        replica_id: str,
        address: str,
        newest: Callable[[], Identity],
        on_change: Callable[[], None],
        tls: Tls | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.address = address
        self._store = store
        self._fleet = fleet
        self._leader = leader
        self._newest = newest
        self._on_change = on_change
        self._tls = tls
        self._word = secrets.token_urlsafe(32)
        self._seen: dict[str, Seen] = {}
        self._doors: dict[str, Renewing[Any]] = {}
        # None while nobody knows what the store has: at first (an earlier process of the same name may have left something), and after a
        # telling whose answer was lost.
        self._told: bytes | None = None
        self._encoded: tuple[list[Any], bytes] = ([], b"")
        # When the store did not answer, or this replica did not ask, last.
        self._away_at = 0.0
        self._looked_at = 0.0
        # Above the numbers of an earlier process of the same name, so that whoever knew it reads anew.
        self._seq = time.time_ns()
        self._due = asyncio.Event()
        self.looked = asyncio.Event()
        """Set once it has heard of the others for the first time."""

    def changed(self) -> None:
        """Somebody joined or left this replica: tell it soon."""
        self._due.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self.tell()
                await self.look()
            except StoreUnavailable:
                self._away_at = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._due.wait()
                    await asyncio.sleep(SETTLE_S)
            self._due.clear()

    async def tell(self) -> None:
        nodes = self._members()
        same = nodes == self._told
        if not same:
            self._seq += 1
        led = self._leader.leads
        newest = self._newest()
        state = admin_pb2.ReplicaState(
            replica_id=self.replica_id,
            address=self.address,
            leader=led is not None,
            term=led.term if led else 0,
            nodes=sum(m.connected for m in self._fleet.local()),
            word_sha256=_digest(self._word),
        )
        state.newest.epoch, state.newest.revision, state.newest.sha256 = newest.epoch, newest.revision, newest.sha256
        peer = Peer(self.replica_id, self.address, self._seq, state.SerializeToString())
        fresh = Peer(peer.replica_id, peer.address, peer.seq, peer.info, nodes)
        if same and await self._store.announce(peer, ttl_ms=ALIVE_MS):
            return
        self._told = None
        await self._store.announce(fresh, ttl_ms=ALIVE_MS)
        self._told = nodes

    def _members(self) -> bytes:
        """Who is connected here. A thousand nodes take a while to write down, and rarely change."""
        local = self._fleet.local()
        shape = [(m.session, m.report.state if m.report else None, m.hello.node.limits) for m in local if m.connected]
        if shape != self._encoded[0]:
            self._encoded = (shape, encode_members(local))
        return self._encoded[1]

    async def look(self) -> None:
        known = {name: seen.peer.seq for name, seen in self._seen.items()}
        now = time.monotonic()
        found = {p.replica_id: p for p in await self._store.peers(known) if p.replica_id != self.replica_id}
        if now - self._looked_at >= GRACE_S:
            self._away_at = now
        self._looked_at = now
        version = self._fleet.version
        missing = [name for name in self._seen if name not in found]
        for name in [name for name in missing if now - max(self._seen[name].heard_at, self._away_at) >= GRACE_S]:
            log.warning("replica gone", replica=name, address=self._seen[name].peer.address)
            self._fleet.told(name, ())
            del self._seen[name]
            await self._hang_up(name)
        for name, peer in found.items():
            if name not in self._seen:
                log.info("replica seen", replica=name, address=peer.address)
            elif self._seen[name].peer.address != peer.address:
                await self._hang_up(name)
            if peer.nodes is not None:
                self._fleet.told(name, decode_members(peer.nodes, name, now))
            elif known.get(name) != peer.seq:
                # It has said that it lives, and not yet who is connected to it.
                peer = dataclasses.replace(peer, seq=UNREAD)
            self._seen[name] = Seen(peer, now)
        if self._fleet.version != version or set(known) != set(found):
            self._on_change()
        self.looked.set()

    @property
    def names(self) -> list[str]:
        """The others', by replica id."""
        return list(self._seen)

    def leader(self) -> str | None:
        """Which of the others leads, as they told it last."""
        return next((s.replica_id for s in self.states() if s.leader), None)

    def states(self) -> list[admin_pb2.ReplicaState]:
        """The others, as they told it."""
        states = []
        for seen in self._seen.values():
            with contextlib.suppress(DecodeError):
                state = admin_pb2.ReplicaState.FromString(seen.peer.info)
                state.seconds_since_heard = time.monotonic() - seen.heard_at
                state.leader = state.leader and state.seconds_since_heard < ALIVE_MS / 1000
                state.ClearField("word_sha256")
                states.append(state)
        return states

    def speaks(self, said: str) -> str:
        """Which replica says that, of those that the store knows; empty where it is none of them."""
        name, _, word = said.partition(" ")
        seen = self._seen.get(name)
        if seen is not None:
            with contextlib.suppress(DecodeError):
                known = admin_pb2.ReplicaState.FromString(seen.peer.info).word_sha256
                if known and hmac.compare_digest(known, _digest(word)):
                    return name
        return ""

    def _credentials(self) -> tuple[tuple[str, str], ...]:
        """Of whoever asked this replica, else its own."""
        own = ((REPLICA, f"{self.replica_id} {self._word}"),) if self._tls is None else ()
        return credentials() or own

    async def ask(self, method: str, request: Any, *, within_s: float = ASK_S) -> dict[str, Any]:
        """Every other replica's answer to `method` of the admin service, or its error, by replica id."""
        return await self.ask_each(method, dict.fromkeys(self._seen, request), within_s=within_s)

    async def ask_each(self, method: str, requests: Mapping[str, Any], *, within_s: float = ASK_S) -> dict[str, Any]:
        """The same, of those that are named, each with a request of its own."""

        async def one(name: str) -> Any:
            try:
                door = self._door(name)
                if door is None:
                    return Draining(f"replica {name} is gone")
                with door.call() as stub:
                    asking_as = self._credentials() or None
                    return await getattr(stub, method)(requests[name], timeout=within_s, metadata=asking_as)
            except CertificateError as e:
                # Certificates that are just being renewed.
                return e
            except asyncio.CancelledError:
                asking = asyncio.current_task()
                if asking is not None and asking.cancelling():
                    raise
                # `_hang_up` ends calls under way, and not whoever made them.
                return Draining(f"replica {name} is gone")
            except grpc.aio.AioRpcError as e:
                error = from_call(e)
                if self._tls is not None and error.reason == "UNAVAILABLE":
                    # No connection: the certificate that this channel has may have run out. The next one takes what the files hold then.
                    await self._hang_up(name)
                return error

        names = list(requests)
        answers = await asyncio.gather(*(one(name) for name in names))
        return dict(zip(names, answers, strict=True))

    def _door(self, name: str) -> Renewing[Any] | None:
        """None once it is gone."""
        if name not in self._doors:
            if name not in self._seen:
                return None
            address = self._seen[name].peer.address
            self._doors[name] = Renewing(address, "control", admin_pb2_grpc.AdminServiceStub, tls=self._tls)
        return self._doors[name]

    async def _hang_up(self, name: str) -> None:
        if name in self._doors:
            await self._doors.pop(name).close()

    async def close(self) -> None:
        """Tell the others that this replica ends."""
        for name in list(self._doors):
            await self._hang_up(name)
        with contextlib.suppress(StoreUnavailable):
            await self._store.withdraw(self.replica_id)


def _digest(word: str) -> bytes:
    return hashlib.sha256(word.encode()).digest()


def encode_members(members: Iterable[Member]) -> bytes:
    """Who is connected, without what changes all the time."""
    nodes = []
    for m in members:
        if m.connected:
            report = encode_report(Report(0, m.report.state)) if m.report else None
            joined = int((m.joined_at + UNIX_S) * 1000)
            nodes.append(admin_pb2.FleetNode(hello=encode_hello(m.hello), report=report, joined_unix_ms=joined))
    return admin_pb2.GetFleetResponse(nodes=nodes).SerializeToString(deterministic=True)


def decode_members(data: bytes, replica: str, now: float) -> list[Member]:
    """Without the nodes that this build does not understand: the peer may be newer."""
    members = []
    try:
        told = admin_pb2.GetFleetResponse.FromString(data)
    except DecodeError as e:
        log.error("a replica told what this one does not understand", replica=replica, error=str(e))
        return []
    for n in told.nodes:
        try:
            hello, report = decode_hello(n.hello), decode_report(n.report) if n.HasField("report") else None
        except TrimtabError as e:
            log.error("a replica has a node that this one does not understand", replica=replica, error=e.message)
            continue
        members.append(
            Member(
                hello=hello,
                session=0,
                joined_at=n.joined_unix_ms / 1000 - UNIX_S,
                heard_at=now,
                report=report,
                replica=replica,
            )
        )
    return members
