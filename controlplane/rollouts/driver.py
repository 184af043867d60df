"""The leader carries a rollout on: it looks at canaries and at the rest once a tick, and writes what the look came to under its lease.

The policy is written first and the mark after it, so that whoever comes after a leader that died in between finds out from the policy what
had been done; the leader itself remembers what it decided until the mark says so. While the store is away nothing is decided: canaries keep
what they have, and so does everybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from controlplane.fleet import Fleet
from controlplane.policies import Policies
from controlplane.replica import Replica, unix_ms
from controlplane.rollouts import builds
from controlplane.rollouts.keeper import Keeper
from controlplane.rollouts.state import Rollout, Stage
from controlplane.rollouts.watching import Watching, build_of
from controlplane.seen import Seen
from controlplane.store import Lease
from trimtab.codec import decode_document
from trimtab.errors import PolicyRefused
from trimtab.messages import Role
from trimtab.snapshot import Document, Node

log = structlog.get_logger(__name__)

AUTHOR = "controller/rollout"
SAVE_MS = 5000
"""Measures are kept so often for whoever leads next."""


class RolloutDriver:
    """Belongs to one event loop. `tick` is called while this replica leads."""

    def __init__(
        self, keeper: Keeper, replica: Replica, fleet: Fleet, *, now_unix_ms: Callable[[], int] = unix_ms
    ) -> None:
        self._keeper = keeper
        self._replica = replica
        self._fleet = fleet
        self._now = now_unix_ms
        self._watching: Watching | None = None
        self._saved_ms = 0
        self._looked: str | None = None
        self._carried: Rollout | None = None
        """At the last look."""
        self._unsaid: Rollout | None = None
        """What the policy has by this leader's word, and its mark does not say yet."""

    async def tick(self, lease: Lease, seen: Seen, policies: Policies) -> None:
        """One look. StoreUnavailable where it could not be written: the next tick looks again."""
        now = self._now()
        r = self._keeper.live or await self._recovered(policies.document, now)
        self._carried = r
        unsaid, self._unsaid = self._unsaid, None
        if r is not None and unsaid is not None and (unsaid.rollout_id, unsaid.version) == (r.rollout_id, r.version):
            # Looked at anew it would only be seen that its part of the policy has gone, and no more why.
            await self._say(unsaid)
            return
        if r is None:
            self._watching = None
            await self._sweep(lease, policies.document)
            return
        if self._watching is None or not self._watching.of(r):
            self._watching = Watching(r, seen, policies, now, self._watching)
        after = self._watching.look(r, seen, policies, now)
        if after.live and after.extended > r.extended:
            self._watching = Watching(after, seen, policies, now, self._watching)
        if after.stage is r.stage and after.canaries == r.canaries:
            if (after.looks, after.lines) != (r.looks, r.lines) or not 0 <= now - self._saved_ms < SAVE_MS:
                await self._keeper.save(after)
                self._saved_ms = now
            return
        try:
            await self._write(r, after, lease)
        except PolicyRefused as e:
            words = f"aborted: the policy does not take it: {e.message}"
            await self._write(r, r.ended(Stage.ABORTED, now, words), lease)

    async def _recovered(self, document: Document, now: int) -> Rollout | None:
        """The one that was carried on until now, back in the store, where that has lost it: it was emptied, or fell back to an older copy. One
        that ended, or never was, has left nothing in the policy.
        """
        lost, left = self._carried, builds.overlay_of(document)
        if lost is None or left is None or left.name != lost.rollout_id or self._keeper.knows(lost.rollout_id):
            return None
        return await self._keeper.save(lost.told(now, "the store had lost it, and has it again"))

    async def _write(self, r: Rollout, after: Rollout, lease: Lease) -> None:
        log.info("rollout", rollout=r.rollout_id, stage=after.stage.value, because=after.verdict)
        await apply(self._replica, self._nodes, after, author=AUTHOR, reason=_reason(after), lease=lease)
        await self._say(after)

    async def _say(self, after: Rollout) -> None:
        self._unsaid = after
        await self._keeper.save(after)
        self._unsaid = None

    async def _sweep(self, lease: Lease, document: Document) -> None:
        """What a rollout has left in the policy that has ended, or that nobody knows, is taken out."""
        left = builds.overlay_of(document)
        if left is None:
            self._looked = None
            return
        if self._looked != left.name:
            # One that begins now may be in the policy before its mark is known here.
            await self._keeper.look()
            self._looked = left.name
            return
        await self._replica.write(
            builds.drop(left.name), self._nodes, author=AUTHOR,
            reason=f"rollout {left.name} has ended", lease=lease,
        )  # fmt: skip

    def _nodes(self) -> Iterable[Node]:
        return [m.hello.node for m in self._fleet.connected(Role.WORKER)]


async def apply(
    replica: Replica,
    nodes: Callable[[], Iterable[Node]],
    r: Rollout,
    *,
    author: str,
    reason: str,
    lease: Lease | None = None,
) -> None:
    """The policy as the rollout's stage has it: one write, or none where it is so already."""
    promoted = r.stage is Stage.PROMOTED
    evidence = r.lines[-1].evidence if r.lines else ""
    # What is promoted is the spec of whoever began it, though it is the leader who writes it.
    await replica.write(
        build_of(r), nodes, author=r.author if promoted and lease else author, reason=reason, lease=lease,
        evidence=evidence, of_spec=promoted,
    )  # fmt: skip


def _reason(r: Rollout) -> str:
    return f"rollout {r.rollout_id}: {r.verdict}"[:500]


def document_of(replica: Replica) -> Document:
    """The newest that is known here."""
    stored = replica.newest.value
    return decode_document(stored.snapshot.document) if stored is not None else Document()
