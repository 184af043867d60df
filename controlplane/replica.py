"""What this replica of the control plane holds: the newest policy, kept in step with the store, and the one door for changes to it.

People and controllers come by the same door, `write`. Invariant: `newest` only ever rises in (epoch, revision), and so does what nodes get.
When the store is found empty, damaged or behind what this replica or any node holds, its present policy goes back in under a higher epoch;
a write waits until that is done. While the store is away, `newest` stays as it was and writes fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from controlplane import spec
from controlplane.claims import Claims
from controlplane.store import Damaged, Lease, Moved, PolicyStore, Receipt, Stored, Write, WriteKind, reseed, stale
from trimtab.codec import decode_document, seal
from trimtab.errors import Conflict, PolicyRefused, StoreUnavailable
from trimtab.kit.watch import Watch
from trimtab.policy import POLICY_SCHEMA, Change
from trimtab.snapshot import Document, Identity, Node, Verdict, judge

log = structlog.get_logger(__name__)

ATTEMPTS = 16
"""Times that a change is built anew because another write came between."""
MEND_BACKOFF_S = (0.1, 2.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change came to: the policy after it, and what differs. `receipt` is None for a dry run and where nothing differs."""

    stored: Stored
    changes: tuple[Change, ...]
    receipt: Receipt | None = None

    @property
    def written(self) -> bool:
        return self.receipt is not None


@dataclass(frozen=True, slots=True)
class Floor:
    """The highest snapshot that anybody was seen to hold; the store must not be below it."""

    identity: Identity
    holder: str

    def above(self, stored: Stored | None) -> bool:
        verdict = judge(stored.identity if stored else Identity(), self.identity)
        return verdict in (Verdict.TAKE, Verdict.CLASH)


def unix_ms() -> int:
    return int(time.time() * 1000)


class Replica:
    """`run` must be running for anything but `newest` to move."""

    def __init__(self, store: PolicyStore, *, now_unix_ms: Callable[[], int] = unix_ms) -> None:
        self.store = store
        self.newest: Watch[Stored | None] = Watch(None)
        self._now_unix_ms = now_unix_ms
        self._claims = Claims()
        self._floor = Floor(Identity(), "")
        self._term = 0
        self._unheard: Stored | None = None
        """What was held here when a store was mended by somebody who had not heard of all of it: it goes back in."""
        self._behind = asyncio.Event()
        self._mending = asyncio.Lock()

    async def run(self) -> None:
        """Follow the store for ever, and mend it where it is behind."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._mend_when_behind())

    async def _follow(self) -> None:
        async with contextlib.aclosing(self.store.watch()) as states:
            async for stored in states:
                self._take(stored)

    def seen(self, held: Identity, holder: str) -> None:
        """A node holds this snapshot, as it says. The store is mended when it turns out to be behind it, where that can be so."""
        known = self.newest.value.identity.epoch if self.newest.value else 0
        before = self._claims.doubts(holder)
        if not self._claims.believed(held.epoch, holder, known):
            if held.epoch != before:
                log.error(
                    "a node claims an epoch that nobody can have written", node=holder, held=str(held), known=known
                )
            return
        floor = Floor(held, holder)
        if floor.above(self.newest.value) and held >= self._floor.identity:
            self._floor = floor
            self._behind.set()

    def granted(self, lease: Lease) -> None:
        """A lease that was seen in the store, whoever holds it: no later one may have its term again."""
        self._term = max(self._term, lease.term)

    @property
    def term(self) -> int:
        """The highest that this replica has seen."""
        return self._term

    def _take(self, stored: Stored | None) -> None:
        held = self.newest.value
        if stored is not None and (held is None or stored.identity > held.identity):
            log.info(
                "policy changed",
                identity=str(stored.identity),
                spec_version=stored.spec_version,
                kind=stored.kind.value,
                author=stored.author,
                reason=stored.reason,
                changes={
                    f"{c.scope}: {c.field}" if c.scope else c.field: f"{spec.shown(c.before)} → {spec.shown(c.after)}"
                    for c in stored.changes
                },
                trace_id=stored.traceparent[3:35],
            )
            if (
                held is not None
                and stored.identity.epoch > held.identity.epoch
                and stored.spec_version < held.spec_version
            ):
                self._unheard = max((held, self._unheard or held), key=lambda s: s.spec_version)
            self.newest.set(stored)
        if stored is not None:
            self._term = max(self._term, stored.term)
        if stored is None or self._above(stored) is not None or self._knows_more_than(stored):
            self._behind.set()

    def _floors(self) -> tuple[Floor, Floor]:
        """What the store must neither be below nor differ from: the nodes' highest, and what this replica itself has handed out."""
        held = self.newest.value
        return self._floor, Floor(held.identity if held else Identity(), "this control plane")

    def _above(self, stored: Stored | None) -> Floor | None:
        """The highest of them that the store is behind of, or in whose place it holds something else."""
        return max((f for f in self._floors() if f.above(stored)), key=lambda f: f.identity, default=None)

    def _knows_more_than(self, stored: Stored) -> bool:
        """Whether people wrote more than this holds, as was seen here before the store was mended."""
        if self._unheard is not None and stored.spec_version >= self._unheard.spec_version:
            self._unheard = None
        return self._unheard is not None

    async def _mend_when_behind(self) -> None:
        while True:
            await self._behind.wait()
            self._behind.clear()
            wait_s = MEND_BACKOFF_S[0]
            while True:
                try:
                    await self._current()
                    break
                except StoreUnavailable as e:
                    log.warning("policy not loaded yet", because=e.message)
                    await asyncio.sleep(random.uniform(wait_s / 2, wait_s))
                    wait_s = min(2 * wait_s, MEND_BACKOFF_S[1])

    async def _current(self) -> Stored:
        """What the store holds, seeded or mended first where it must be."""
        async with self._mending:
            for _ in range(ATTEMPTS):
                with contextlib.suppress(Moved):
                    stored = await self._loaded()
                    self._take(stored)
                    return stored
        raise StoreUnavailable("other replicas kept mending the policy store; try again")

    async def _loaded(self) -> Stored:
        try:
            found = await self.store.load()
        except Damaged as e:
            if self.newest.value is None:
                raise
            return await self._mend(None, e.upon)
        if found is not None and self._above(found) is None and not self._knows_more_than(found):
            return found
        return await self._mend(found, found.identity if found else Identity())

    async def _mend(self, found: Stored | None, upon: Identity) -> Stored:
        """The newest policy that is known, as it was written, under an epoch above everything that was seen. Moved when another replica was
        faster."""
        held_here = [s for s in (found, self.newest.value) if s]
        known = self._unheard or max(held_here, key=lambda s: s.identity, default=None)
        now = self._now_unix_ms()
        floor = self._above(found) or max(self._floors(), key=lambda f: f.identity)
        first = floor.identity == Identity()
        held = str(upon) if upon > Identity() else "nothing"
        stored = await reseed(
            self.store,
            known.snapshot.document if known else Document(written_unix_ms=now),
            upon=upon,
            above=floor.identity.epoch,
            spec_version=max((s.spec_version for s in (*held_here, self._unheard) if s), default=0),
            reason="first start" if first else self._why(held, floor),
            now_unix_ms=now,
            term_floor=self._term,
        )
        if not first:
            log.warning(
                "store was behind", found=held, held=str(floor.identity), by=floor.holder, now=str(stored.identity)
            )
        return stored

    def _why(self, held: str, floor: Floor) -> str:
        if self._unheard is not None:
            return f"the store was mended as {held} by somebody who had not heard of {self._unheard.identity}"
        return f"the store held {held}, {floor.holder} holds {floor.identity}"

    async def write(
        self,
        build: spec.Build,
        nodes: Callable[[], Iterable[Node]],
        *,
        author: str,
        reason: str,
        expect_version: int | None = None,
        dry_run: bool = False,
        traceparent: str = "",
        lease: Lease | None = None,
        evidence: str = "",
        of_spec: bool = False,
    ) -> Outcome:
        """A change, checked against `nodes`, written unless `dry_run` or nothing differs. With `lease` it is a controller's, unless `of_spec`:
        then it is a person's, whom the leader writes for.

        A policy that a newer build wrote is left alone: what this one does not know would be lost by it.
        PolicyRefused and Conflict (Fenced for a leader that was deposed) write nothing; StoreUnavailable means that the store did not say
        that it wrote.
        """
        for attempt in range(ATTEMPTS):
            # What this replica holds is most likely the newest, and the store finds out when it is not. Nothing is concluded from it alone.
            likely = self._likely() if attempt == 0 and not dry_run else None
            stored = likely or await self._current()
            try:
                if expect_version not in (None, stored.spec_version):
                    raise stale(expect_version or 0, stored.spec_version)
                draft = self._draft(stored, build, nodes)
            except (PolicyRefused, Conflict):
                if likely is not None:
                    continue
                raise
            if likely is not None and not draft.changes:
                continue
            if dry_run or not draft.changes:
                return Outcome(stored, draft.changes)
            now = draft.document.written_unix_ms
            held = stored.identity
            snapshot = seal(draft.document, epoch=held.epoch, revision=held.revision + 1)
            after = Stored(
                snapshot,
                stored.spec_version + (lease is None or of_spec),
                author,
                reason,
                now,
                draft.changes,
                traceparent,
                WriteKind.CONTROLLER if lease and not of_spec else WriteKind.PERSON,
                lease.term if lease else 0,
                evidence,
            )
            with contextlib.suppress(Moved):
                put = Write(after, held, uuid.uuid4().hex, expect_version, lease)
                receipt = await self.store.put(put)
                self._take(after)
                return Outcome(after, draft.changes, receipt)
        raise Conflict("others kept changing the policy in between; try again")

    def _likely(self) -> Stored | None:
        """What is held here, where the store was there a moment ago and nobody was seen to hold more."""
        stored = self.newest.value
        return stored if stored is not None and self.store.state.writable and self._above(stored) is None else None

    def _draft(self, stored: Stored, build: spec.Build, nodes: Callable[[], Iterable[Node]]) -> spec.Draft:
        document = decode_document(stored.snapshot.document)
        if document.needs_schema > POLICY_SCHEMA:
            raise PolicyRefused(
                f"the policy needs schema {document.needs_schema}, this control plane understands {POLICY_SCHEMA} and would drop what it "
                "does not know: make the change by a newer replica, or upgrade this one",
                reason="SCHEMA_TOO_OLD",
            )
        return build(document, nodes(), self._now_unix_ms())
