"""What controllers command, done by the doors that people use: each is one line in the log and an action that `trimtab why` tells.

What pools want is kept in the store as a mark, so that the next leader goes on from it, and whoever scales can ask any replica.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog

from controlplane.admin.blocks import Blocks
from controlplane.admin.workers import RESTARTED, Workers
from controlplane.controllers import heal
from controlplane.controllers.decision import Command, Propose, Reblock, Release, Reload, Restart, Want
from controlplane.plans import Plans, above, stamp_of, unmark_all
from controlplane.replica import unix_ms
from controlplane.store import Action, Mark, PolicyStore
from trimtab.codec import encode_match
from trimtab.errors import StoreUnavailable, TrimtabError
from trimtab.v1 import admin_pb2, control_pb2

log = structlog.get_logger(__name__)

Steer = Callable[[admin_pb2.SteerRequestsRequest], Awaitable[admin_pb2.SteerRequestsResponse]]
PREFIX = "want/"


class Actuators:
    """Belongs to one event loop. `steer` acts on requests, as AdminService.SteerRequests does."""

    def __init__(self, workers: Workers, steer: Steer, store: PolicyStore, blocks: Blocks) -> None:
        self.wants: dict[str, Want] = {}
        self.restarted: dict[str, tuple[int, ...]] = {}
        """When earlier leaders had workers started anew for want of health, in unix milliseconds by node: what the store still tells."""
        self.plans = Plans(store)
        self.propose: Callable[[str, Propose], Awaitable[str]] = _nobody_tries
        """Tries a policy on canaries; set by whoever drives rollouts."""
        self.keeps: Callable[[str], str] = lambda node_id: ""
        """Why this worker is not to be started anew now, or nothing: then it is taken to go. Set by whoever drives rolling restarts."""
        self._workers = workers
        self._steer = steer
        self._store = store
        self._blocks = blocks
        self._unsaved: set[str] = set()
        self._stamps: dict[str, int] = {}
        """Of marks that the store was last known to have, by pool."""

    async def recall(self) -> None:
        """What was wanted, planned and restarted under the leader before; StoreUnavailable when nobody can say."""
        marks = await self._store.marks()
        self.restarted = _restarted(await self._store.actions())
        self.plans.recall(marks)
        self.rest()
        for mark in marks:
            want = _decoded(mark)
            if want is not None:
                self.wants[want.pool], self._stamps[want.pool] = want, mark.stamp

    def rest(self) -> None:
        """Another leads, or nobody: what this replica held of wants is nobody's word any more."""
        self.wants, self._unsaved, self._stamps = {}, set(), {}

    async def forget(self) -> None:
        """Nobody says any more what pools want."""
        if not self.wants:
            return
        try:
            await unmark_all(self._store, PREFIX)
        except StoreUnavailable as e:
            log.warning("what pools wanted is still stored", because=e.message)
            return
        self.rest()

    async def want(self, want: Want) -> bool:
        """So many workers from now on. False when that was wanted already."""
        before = self.wants.get(want.pool)
        changed = before is None or (before.workers, before.surplus) != (want.workers, want.surplus)
        if changed:
            self.wants[want.pool] = want
            self._unsaved.add(want.pool)
            log.info("workers wanted", pool=want.pool, workers=want.workers, reason=want.reason, evidence=want.evidence)
        # One that the store did not take is offered again with the next tick; it holds all the same.
        try:
            for pool in list(self._unsaved):
                await self._save(self.wants[pool])
        except StoreUnavailable as e:
            log.warning("what a pool wants is not stored", because=e.message)
        return changed and (before is None or before.workers != want.workers)

    async def _save(self, want: Want) -> None:
        """Where the store has a mark with as high a stamp, the next tick goes above it: by then this replica may know that it leads no more."""
        mark = _encoded(want, above(self._stamps.get(want.pool, 0), unix_ms()))
        if await self._store.mark(mark):
            self._stamps[want.pool] = mark.stamp
            self._unsaved.discard(want.pool)
        else:
            self._stamps[want.pool] = await stamp_of(self._store, mark.key)

    async def do(self, author: str, command: Command) -> str:
        """Once; why it was not done, or nothing."""
        try:
            match command:
                case Restart():
                    return await self._restart(author, command)
                case Release():
                    return await self._release(author, command)
                case Reload():
                    done = await self._workers.reload(
                        admin_pb2.ReloadNodeRequest(node_id=command.node_id, author=author, reason=command.reason)
                    )
                    return _unless(done.done, done)
                case Propose():
                    return await self.propose(author, command)
                case Reblock():
                    return await self._reblock(author, command)
        except TrimtabError as e:
            return e.message

    async def _restart(self, author: str, command: Restart) -> str:
        if not self._workers.runs(command.node_id, command.incarnation):
            return "that process is gone already"
        # Asked anew: a rolling restart may have gone on since the controller looked.
        if keeps := self.keeps(command.node_id):
            return keeps
        request = admin_pb2.DrainNodeRequest(
            node_id=command.node_id,
            deadline_ms=int(command.drain_s * 1000),
            author=author,
            reason=command.reason,
            restart=True,
        )
        response = await self._workers.drain(request)
        return _unless(response.done, response)

    async def _reblock(self, author: str, command: Reblock) -> str:
        if not self._workers.runs(command.node_id, command.incarnation):
            return "that process is gone already"
        request = admin_pb2.ReblockNodesRequest(
            node_ids=[command.node_id],
            block_size=command.block_size,
            when=control_pb2.REBLOCK_WHEN_NOW if command.now else control_pb2.REBLOCK_WHEN_IDLE,
            author=author,
            reason=command.reason,
        )
        (node,) = (await self._blocks.reblock(request)).nodes
        return _unless(node.done, node)

    async def _release(self, author: str, command: Release) -> str:
        request = admin_pb2.SteerRequestsRequest(
            match=encode_match(command.match),
            release=admin_pb2.ReleaseAction(),
            author=author,
            reason=command.reason,
            node_ids=[command.node_id],
        )
        response = await self._steer(request)
        (found,) = response.nodes or (admin_pb2.NodeSteered(reason="NOT_CONNECTED", message="it is not there"),)
        if found.done:
            try:
                what = f"released {found.affected} requests"
                await self._store.record_action(Action(command.node_id, what, author, command.reason, unix_ms()))
            except StoreUnavailable as e:
                log.warning("action not recorded", node=command.node_id, because=e.message)
        return _unless(found.done, found)


async def _nobody_tries(author: str, proposed: Propose) -> str:
    return "nobody drives rollouts here"


def _unless(done: bool, answer: Any) -> str:
    return "" if done else f"{answer.reason}: {answer.message}"


def _restarted(actions: Iterable[Action]) -> dict[str, tuple[int, ...]]:
    """By the heal controller, by node: those too that were told in vain, as a leader counts its own."""
    found: dict[str, tuple[int, ...]] = {}
    for a in actions:
        if a.author == f"controller/{heal.name}" and a.what.startswith(RESTARTED):
            found[a.node_id] = (*found.get(a.node_id, ()), a.at_unix_ms)
    return found


def _encoded(want: Want, stamp: int) -> Mark:
    said = {
        "kind": "want", "pool": want.pool, "workers": want.workers, "reason": want.reason, "evidence": want.evidence,
        "surplus": list(want.surplus),
    }  # fmt: skip
    return Mark(PREFIX + want.pool, stamp, json.dumps(said, ensure_ascii=False).encode())


def _decoded(mark: Mark) -> Want | None:
    """None for what is something else, or of a build that says it otherwise."""
    if not mark.key.startswith(PREFIX):
        return None
    try:
        said = json.loads(mark.data)
        return Want(
            str(said["pool"]), int(said["workers"]), str(said["reason"]), str(said["evidence"]),
            tuple(map(str, said["surplus"])),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None
