"""A node's policy: takes pushed snapshots, has them obeyed, keeps the last good one on disk.

A snapshot is obeyed whole or not at all. The answer says when it took effect, or why it was refused; a refused one leaves the node on its
last good policy. Adjustments expire here by the monotonic clock, counted from receipt, so expiry needs nobody else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from trimtab import codec
from trimtab.errors import PolicyRefused
from trimtab.kit.process import write_atomically
from trimtab.policy import Policy
from trimtab.snapshot import Document, Identity, Node, Resolved, Snapshot, Verdict, judge, resolve
from trimtab.v1 import control_pb2

log = structlog.get_logger(__name__)

Obey = Callable[[Policy], Awaitable[int]]
"""Puts a whole policy in force, or raises PolicyRefused and changes nothing. Answers the engine step from which it holds; 0 where
there is no engine."""


class PolicyKeeper:
    """Belongs to one event loop. `path` is where the last good snapshot lives."""

    def __init__(self, node: Node, obey: Obey, path: Path) -> None:
        self.node = node
        """Whom policies are resolved for, and what it can do now; another one counts from the next push or expiry on."""
        self._obey = obey
        self._path = path
        self._expiry: asyncio.TimerHandle | None = None
        self._renewals: set[asyncio.Task[None]] = set()
        self._applying = asyncio.Lock()
        self._step_no = 0
        self.held = Identity()
        self.resolved = Resolved(Policy(), {})
        self._document = Document()

    async def start(self) -> None:
        """Run under the policy on disk, or under the defaults; a file that can't be trusted is passed over, and said so."""
        stored = self._load()
        if stored is not None:
            snapshot, sent_unix_ms = stored
            try:
                await self._apply(snapshot, sent_unix_ms)
                log.info("policy loaded from disk", policy=str(self.held))
                return
            except PolicyRefused as e:
                log.warning("policy on disk refused", reason=e.cause, message=e.message)
        resolved = resolve(Document(), self.node, now_unix_ms=0)
        self._step_no = await self._obey(resolved.policy)
        self.resolved = resolved

    async def on_push(self, snapshot: Snapshot, sent_unix_ms: int, traceparent: str) -> control_pb2.PolicyResult:
        """Take, ignore or refuse; the answer goes back on the stream that brought it."""
        begun = time.monotonic()
        answer = control_pb2.PolicyResult(identity=codec.encode_identity(snapshot.identity), traceparent=traceparent)
        try:
            match judge(self.held, snapshot.identity):
                case Verdict.OLDER:
                    answer.ignored_holding.CopyFrom(codec.encode_identity(self.held))
                    return answer
                case Verdict.CLASH:
                    raise PolicyRefused(
                        f"{snapshot.identity} is here already with other content", reason="DIGEST_CLASH"
                    )
                case Verdict.SAME:
                    answer.applied.step_no = self._step_no
                    return answer
                case Verdict.TAKE:
                    answer.applied.step_no = await self._apply(snapshot, sent_unix_ms)
        except PolicyRefused as e:
            log.warning(
                "policy refused",
                policy=str(snapshot.identity),
                holding=str(self.held),
                reason=e.cause,
                message=e.message,
            )
            answer.refused.reason, answer.refused.field, answer.refused.message = e.cause, e.field, e.message
            return answer
        answer.applied.apply_ms = (time.monotonic() - begun) * 1000.0
        self._store(snapshot, sent_unix_ms)
        log.info(
            "policy applied",
            policy=str(snapshot.identity),
            step_no=answer.applied.step_no,
            apply_ms=round(answer.applied.apply_ms, 2),
        )
        return answer

    async def reload(self) -> int:
        """Tell the engine anew what holds here; the step from which it does. PolicyRefused when it won't take it."""
        async with self._applying:
            self._step_no = await self._obey(self.resolved.policy)
        log.info("policy told anew", policy=str(self.held), step_no=self._step_no)
        return self._step_no

    def resolved_for(self, node: Node) -> Policy:
        """What the policy held here is for another node, adjustments left out."""
        spec = dataclasses.replace(self._document, adjustments=())
        return resolve(spec, node, now_unix_ms=0).policy

    async def _apply(self, snapshot: Snapshot, now_unix_ms: int) -> int:
        """The engine step from which it holds. `now_unix_ms` is the sender's clock at this moment."""
        async with self._applying:
            return await self._apply_alone(snapshot, now_unix_ms)

    async def _apply_alone(self, snapshot: Snapshot, now_unix_ms: int) -> int:
        document = codec.decode_document(snapshot.document)
        resolved = resolve(document, self.node, now_unix_ms=now_unix_ms)
        self._step_no = await self._obey(resolved.policy)
        self.resolved = resolved
        self._document = document
        self.held = snapshot.identity
        self._arm(document, snapshot, now_unix_ms)
        return self._step_no

    def _arm(self, document: Document, snapshot: Snapshot, now_unix_ms: int) -> None:
        """Resolve again when the next adjustment expires."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        ends = [a.expires_unix_ms for a in document.adjustments if a.expires_unix_ms > now_unix_ms]
        if not ends:
            return

        def renew() -> None:
            task = asyncio.get_running_loop().create_task(self._renew(snapshot, min(ends)))
            self._renewals.add(task)
            task.add_done_callback(self._renewals.discard)

        self._expiry = asyncio.get_running_loop().call_later((min(ends) - now_unix_ms) / 1000.0, renew)

    async def _renew(self, snapshot: Snapshot, now_unix_ms: int) -> None:
        async with self._applying:
            if self.held != snapshot.identity:
                # A newer one came while this waited for its turn.
                return
            try:
                await self._apply_alone(snapshot, now_unix_ms)
            except PolicyRefused as e:
                # What is left of it can't be obeyed; the last good policy holds until more has expired.
                log.warning(
                    "policy refused at an expiry", policy=str(snapshot.identity), reason=e.cause, message=e.message
                )
                self._arm(codec.decode_document(snapshot.document), snapshot, now_unix_ms)
                return
        log.info("policy adjustment expired", policy=str(snapshot.identity))

    def _store(self, snapshot: Snapshot, sent_unix_ms: int) -> None:
        pb = control_pb2.PolicyPush(snapshot=codec.encode_snapshot(snapshot), sent_unix_ms=sent_unix_ms)
        row = {"push": pb.SerializeToString().hex(), "received_unix_ms": int(time.time() * 1000)}
        try:
            write_atomically(self._path, json.dumps(row).encode())
        except OSError as e:
            # The policy holds all the same; only a restart without control plane would miss it.
            log.warning("policy not stored on disk", path=str(self._path), error=str(e))

    def _load(self) -> tuple[Snapshot, int] | None:
        """The snapshot on disk, and its sender's clock now. The digest is checked as for one from the wire."""
        try:
            row = json.loads(self._path.read_bytes())
            pb = control_pb2.PolicyPush.FromString(bytes.fromhex(row["push"]))
            away_ms = max(0, int(time.time() * 1000) - row["received_unix_ms"])
            return codec.decode_snapshot(pb.snapshot), pb.sent_unix_ms + away_ms
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, DecodeError, PolicyRefused) as e:
            log.warning("policy on disk is not usable", path=str(self._path), error=str(e))
            return None
