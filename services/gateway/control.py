"""The gateway's side of the control stream: who it is, what it reports, and the policy that it holds.

A gateway uses the policy's admission bounds. A pushed snapshot is taken whole or refused; the last good one is on disk, so a gateway that
starts without a control plane runs under it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from importlib.metadata import version
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from services.gateway.admission import Admission
from services.gateway.metrics import GatewayMetrics
from trimtab import codec
from trimtab.errors import PolicyRefused
from trimtab.kit.process import write_atomically
from trimtab.messages import Load, NodeState
from trimtab.policy import POLICY_SCHEMA, Policy
from trimtab.snapshot import Document, Identity, Node, Snapshot, Verdict, judge, resolve
from trimtab.v1 import control_pb2

log = structlog.get_logger(__name__)


class PolicyHolder:
    """The last good policy. Adjustments expire by this host's monotonic clock, counted from the snapshot's receipt."""

    def __init__(self, node: Node, path: Path) -> None:
        self._node = node
        self._path = path
        self._document = Document()
        self._policy = Policy()
        self._clock_offset_ms = 0.0
        """The sender's clock less our monotonic one."""
        self._renew_at_ms: float | None = None
        self.held = Identity()

    def load(self) -> None:
        """Take the one on disk; a file that can't be trusted is passed over, and said so."""
        if not self._path.is_file():
            return
        try:
            row = json.loads(self._path.read_bytes())
            pb = control_pb2.PolicyPush.FromString(bytes.fromhex(row["push"]))
            away_ms = max(0, int(time.time() * 1000) - row["received_unix_ms"])
            self._take(codec.decode_snapshot(pb.snapshot), pb.sent_unix_ms + away_ms)
            log.info("policy loaded from disk", policy=str(self.held))
        except (OSError, ValueError, KeyError, TypeError, DecodeError, PolicyRefused) as e:
            log.warning("policy on disk not used", path=str(self._path), error=str(e))

    def policy(self) -> Policy:
        """The policy at this moment."""
        now_ms = time.monotonic() * 1000.0
        if self._renew_at_ms is not None and now_ms >= self._renew_at_ms:
            self._resolve(int(now_ms + self._clock_offset_ms))
        return self._policy

    async def on_push(self, snapshot: Snapshot, sent_unix_ms: int, traceparent: str) -> control_pb2.PolicyResult:
        """Take, ignore or refuse."""
        begun = time.monotonic()
        answer = control_pb2.PolicyResult(identity=codec.encode_identity(snapshot.identity), traceparent=traceparent)
        verdict = judge(self.held, snapshot.identity)
        if verdict is Verdict.OLDER:
            answer.ignored_holding.CopyFrom(codec.encode_identity(self.held))
            return answer
        try:
            if verdict is Verdict.CLASH:
                raise PolicyRefused(f"{snapshot.identity} is here already with other content", reason="DIGEST_CLASH")
            if verdict is Verdict.TAKE:
                self._take(snapshot, sent_unix_ms)
                self._store(snapshot, sent_unix_ms)
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
        log.info("policy applied", policy=str(snapshot.identity), apply_ms=round(answer.applied.apply_ms, 2))
        return answer

    def _take(self, snapshot: Snapshot, now_unix_ms: int) -> None:
        document = codec.decode_document(snapshot.document)
        resolve(document, self._node, now_unix_ms=now_unix_ms)  # refuses before anything is changed
        self._document, self.held = document, snapshot.identity
        self._clock_offset_ms = now_unix_ms - time.monotonic() * 1000.0
        self._resolve(now_unix_ms)

    def _resolve(self, now_unix_ms: int) -> None:
        self._policy = resolve(self._document, self._node, now_unix_ms=now_unix_ms).policy
        ends = [a.expires_unix_ms for a in self._document.adjustments if a.expires_unix_ms > now_unix_ms]
        self._renew_at_ms = min(ends) - self._clock_offset_ms if ends else None

    def _store(self, snapshot: Snapshot, sent_unix_ms: int) -> None:
        pb = control_pb2.PolicyPush(snapshot=codec.encode_snapshot(snapshot), sent_unix_ms=sent_unix_ms)
        row = {"push": pb.SerializeToString().hex(), "received_unix_ms": int(time.time() * 1000)}
        try:
            write_atomically(self._path, json.dumps(row).encode())
        except OSError as e:
            # The policy holds all the same; only a restart without control plane would miss it.
            log.warning("policy not stored on disk", path=str(self._path), error=str(e))


class Identification:
    """What this process says of itself to the control plane."""

    def __init__(
        self,
        node_id: str,
        address: str,
        metrics_address: str,
        holder: PolicyHolder,
        admission: Admission,
        metrics: GatewayMetrics,
    ) -> None:
        self._node_id = node_id
        self._address = address
        self._metrics_address = metrics_address
        self._holder = holder
        self._admission = admission
        self._metrics = metrics
        self._incarnation = uuid.uuid4().hex

    def hello(self) -> control_pb2.Hello:
        held = self._holder.held
        return control_pb2.Hello(
            node_id=self._node_id,
            incarnation=self._incarnation,
            role=control_pb2.ROLE_GATEWAY,
            build=version("trimtab"),
            policy_schema=POLICY_SCHEMA,
            held=codec.encode_identity(held) if held.epoch else None,
            address=self._address,
            metrics_address=self._metrics_address,
            pid=os.getpid(),
        )

    def report(self) -> control_pb2.Report:
        """Load here means requests: running are those that a worker has accepted."""
        a = self._admission
        waiting = sum(a.unaccepted.values())
        state = NodeState.DRAINING if a.draining else NodeState.SERVING
        return control_pb2.Report(
            state=codec.encode_state(state),
            load=codec.encode_load(Load(running=len(a.live) - waiting, waiting=waiting)),
            counters=self._metrics.counters,
        )
