"""The fleet as a value: who is connected, what each node said last, and what gateways may know of it.

A node is (node id, incarnation), not an address. Each stream gets a session number when it joins; a newer session of the same node id
replaces the older one, whose late messages then change nothing. `now` is in seconds of one monotonic clock and comes with every call;
there is no I/O here. Other replicas tell who is connected to them; a node that is connected here is here, whatever they say. The view for
gateways holds connected workers that have reported, wherever they are, and how many gateways there are; its version rises only when its
content changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trimtab.messages import Hello, NodeState, Report, Role
from trimtab.snapshot import Identity, Limits, Node

NONE = Identity()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node did not take a snapshot: UPPER_SNAKE reason, the field to blame if there is one, and words."""

    identity: Identity
    reason: str
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Member:
    """One node. `applied` is `Identity()` while it runs by its built-in defaults; `refusal` is of the newest push, or None.

    `lost_at` is None while connected. `replica` is the one that it is connected to, empty for this one; of a node elsewhere only what gateways
    and writers need is known here: who it is, since when, and its state.
    """

    hello: Hello
    session: int
    joined_at: float
    heard_at: float
    lost_at: float | None = None
    report: Report | None = None
    applied: Identity = NONE
    apply_ms: float = 0.0
    refusal: Refusal | None = None
    replica: str = ""

    @property
    def node_id(self) -> str:
        return self.hello.node.node_id

    @property
    def connected(self) -> bool:
        return self.lost_at is None

    def answered(self, identity: Identity) -> bool:
        """Whether it has said what it does with this snapshot or a newer one."""
        return self.applied >= identity or (self.refusal is not None and self.refusal.identity >= identity)


@dataclass(frozen=True, slots=True)
class ViewWorker:
    """A worker as gateways see it."""

    node: Node
    incarnation: str
    address: str
    model: str
    state: NodeState


@dataclass(frozen=True, slots=True)
class View:
    """Versions rise for as long as the mesh lives, if each process starts above the last one's. `gateways` counts those that take requests."""

    version: int
    workers: tuple[ViewWorker, ...]
    gateways: int = 0


class Fleet:
    """Changed by its methods alone. `first_version` is where the view's version starts."""

    def __init__(self, first_version: int = 1) -> None:
        self._members: dict[str, Member] = {}
        self._nodes: dict[int, str] = {}
        self._sessions = 0
        self._elsewhere: dict[str, dict[str, Member]] = {}
        self._asked_at: float | None = None
        self._version = first_version
        self._view = View(first_version, ())

    def joined(self, hello: Hello, now: float) -> tuple[int, int | None]:
        """A stream begins: its session, and the live session that it replaces.

        What a process reported over an earlier stream still holds, also over one to another replica, and so does the snapshot that it says
        it holds.
        """
        self._sessions += 1
        old, known = self._members.get(hello.node.node_id), self.member(hello.node.node_id)
        same_process = known is not None and known.hello.incarnation == hello.incarnation
        if old is not None:
            self._nodes.pop(old.session, None)
        self._nodes[self._sessions] = hello.node.node_id
        self._put(
            Member(
                hello=hello,
                session=self._sessions,
                joined_at=now,
                heard_at=now,
                report=known.report if known is not None and same_process else None,
                applied=hello.held,
            )
        )
        return self._sessions, old.session if old is not None and old.connected else None

    def reported(self, session: int, report: Report, now: float) -> None:
        self._update(session, report=report, heard_at=now, lost_at=None)

    def heard(self, session: int, now: float) -> None:
        """Any other message: the node lives."""
        self._update(session, heard_at=now, lost_at=None)

    def applied(self, session: int, identity: Identity, apply_ms: float) -> None:
        member = self.current(session)
        if member is None or identity < member.applied:
            return
        overcome = member.refusal is not None and member.refusal.identity <= identity
        self._update(session, applied=identity, apply_ms=apply_ms, refusal=None if overcome else member.refusal)

    def refused(self, session: int, refusal: Refusal) -> None:
        member = self.current(session)
        if member is not None and (member.refusal is None or refusal.identity >= member.refusal.identity):
            self._update(session, refusal=refusal)

    def lost(self, session: int, now: float) -> None:
        """The stream ended."""
        member = self.current(session)
        if member is not None and member.connected:
            self._update(session, lost_at=now)

    def draining(self, session: int) -> None:
        """The node has said that it takes no new work; its next report would say so too."""
        member = self.current(session)
        if member is not None and member.report is not None:
            self._update(session, report=dataclasses.replace(member.report, state=NodeState.DRAINING))

    def limits_changed(self, session: int, limits: Limits) -> Hello | None:
        """The node's engine can do something else from now on; who it is now, as if it had said so in its Hello. None where it is none."""
        member = self.current(session)
        if member is None or member.hello.role is not Role.WORKER:
            return None
        # What its engine is called stays: only a Hello is looked through for words.
        limits = dataclasses.replace(limits, engine=member.hello.node.limits.engine)
        hello = dataclasses.replace(member.hello, node=dataclasses.replace(member.hello.node, limits=limits))
        self._put(dataclasses.replace(member, hello=hello))
        return hello

    def touched(self) -> None:
        """What gateways are told beside it is another than before."""
        self._version += 1

    def expire(self, now: float, *, silence_s: float) -> list[Member]:
        """Counts connected nodes that said nothing for `silence_s` as lost; they are back with their next message.

        Whoever asks again only after as long was asleep himself: what nodes said meanwhile is still to be read, so nobody is lost yet.
        """
        asleep = self._asked_at is not None and now - self._asked_at >= silence_s
        self._asked_at = now
        if asleep:
            return []
        silent = [m for m in self._members.values() if m.connected and now - m.heard_at >= silence_s]
        for member in silent:
            self._update(member.session, lost_at=now)
        return silent

    def forget(self, now: float, *, after_s: float) -> list[Member]:
        """Drops nodes that have been lost for `after_s`. A stream that one of them still holds open must be ended, so that it joins anew."""
        gone = [m for m in self._members.values() if m.lost_at is not None and now - m.lost_at >= after_s]
        for member in gone:
            del self._members[member.node_id]
            self._nodes.pop(member.session, None)
        return gone

    def current(self, session: int) -> Member | None:
        """The member of this session; None once another has replaced it."""
        node_id = self._nodes.get(session)
        return self._members.get(node_id) if node_id is not None else None

    def member(self, node_id: str) -> Member | None:
        """Wherever it is connected; a lost one of this replica when it is nowhere."""
        here = self._members.get(node_id)
        if here is not None and here.connected:
            return here
        there = [members[node_id] for members in self._elsewhere.values() if node_id in members]
        return max(there, key=lambda m: m.joined_at, default=here)

    def told(self, replica: str, members: Iterable[Member]) -> None:
        """Who is connected to another replica, all of them, as it says; none once it is gone."""
        now = {m.node_id: m for m in members}
        concerned = self._elsewhere.get(replica, {}).keys() | now.keys()
        before = {node_id: _shown(self.member(node_id)) for node_id in concerned}
        if now:
            self._elsewhere[replica] = now
        else:
            self._elsewhere.pop(replica, None)
        if before != {node_id: _shown(self.member(node_id)) for node_id in concerned}:
            self._version += 1

    def local(self) -> list[Member]:
        """Those of this replica, by node id."""
        return sorted(self._members.values(), key=lambda m: m.node_id)

    def __iter__(self) -> Iterator[Member]:
        """All of the mesh, by node id; each once, where it is connected now."""
        found: dict[str, Member] = {}
        for members in self._elsewhere.values():
            for m in members.values():
                if m.node_id not in found or found[m.node_id].joined_at < m.joined_at:
                    found[m.node_id] = m
        found.update({m.node_id: m for m in self._members.values() if m.connected or m.node_id not in found})
        return iter(sorted(found.values(), key=lambda m: m.node_id))

    def connected(self, role: Role | None = None) -> list[Member]:
        return [m for m in self if m.connected and role in (None, m.hello.role)]

    @property
    def version(self) -> int:
        """The view's."""
        return self._version

    @property
    def view(self) -> View:
        if self._view.version != self._version:
            # Built when it is read: a thousand nodes that join at once make one view, not a thousand.
            members = list(self)
            seen = (_seen(m) for m in members)
            gateways = sum(_takes_requests(m) for m in members)
            self._view = View(self._version, tuple(worker for worker in seen if worker is not None), gateways)
        return self._view

    def _update(self, session: int, **changes: object) -> None:
        member = self.current(session)
        if member is None:
            return
        after = dataclasses.replace(member, **changes)  # type: ignore[arg-type]
        state = member.report.state if member.report is not None else None
        if (after.report.state if after.report is not None else None) is state and after.connected == member.connected:
            # Most that a node says changes nothing for gateways.
            self._members[member.node_id] = after
        else:
            self._put(after)

    def _put(self, member: Member) -> None:
        # Of the node, wherever it is: one that is here hides the same one elsewhere.
        before = _shown(self.member(member.node_id))
        self._members[member.node_id] = member
        if before != _shown(self.member(member.node_id)):
            self._version += 1


def _shown(m: Member | None) -> tuple[ViewWorker | None, bool]:
    """What of a member is in the view."""
    return _seen(m), _takes_requests(m)


def _takes_requests(m: Member | None) -> bool:
    """Whether it is a gateway that lets requests into the mesh. One that drains lets in no more, and one has said so once it is here."""
    if m is None or not m.connected or m.hello.role is not Role.GATEWAY:
        return False
    return m.report is None or m.report.state is not NodeState.DRAINING


def _seen(m: Member | None) -> ViewWorker | None:
    """What gateways see of a member; None when they may not send work there."""
    if m is None or not m.connected or m.report is None or m.hello.role is not Role.WORKER:
        return None
    return ViewWorker(m.hello.node, m.hello.incarnation, m.hello.address, m.hello.model, m.report.state)
