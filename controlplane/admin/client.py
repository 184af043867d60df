"""The AdminService's client: calls that end in answers or in the error tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trimtab.client import Unreachable
from trimtab.codec import encode_match, encode_scope
from trimtab.kit import rpc
from trimtab.kit.tls import Tls
from trimtab.messages import RequestMatch
from trimtab.snapshot import Scope
from trimtab.v1 import admin_pb2, admin_pb2_grpc, control_pb2, policy_pb2

T = TypeVar("T")

TIMEOUT_S = 10.0
"""Longer than the control plane waits for a store that hangs, so that its own words arrive."""
REBLOCK_S = 35.0
"""What the control plane gives each worker to change its KV block size, and what one of another replica takes on top."""
HEALTH_S = 1.0
"""What one of several replicas gets to say whether it serves; then the next is asked."""
REACH_S = 1.0
"""While none of them answers, all are asked again for so long."""
AGAIN_S = 0.1


class AdminClient:
    """Talks to a control plane at `address`: host:port, or several with commas between them, which are replicas of one; a call goes to the
    first that serves. What was sent is never sent again elsewhere: it may have been done.

    Every call raises the error tree; Unreachable when nobody answers. `token` says who calls where no certificate does. CertificateError
    where certificates can't be read.
    """

    def __init__(self, address: str, *, timeout_s: float = TIMEOUT_S, tls: Tls | None = None, token: str = "") -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._tls = tls
        self._places = [place.strip() for place in address.split(",") if place.strip()] or [address]
        self._generation = rpc.generation(tls)
        self._channels = [rpc.channel(place, "control", tls=tls) for place in self._places]
        self._before: list[grpc.aio.Channel] = []
        """Of the certificate before this one: calls may still be on them."""
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._use(self._channels[0])

    async def get_policy(self, node_id: str = "") -> admin_pb2.GetPolicyResponse:
        """`effective` and `sources` are those of the node, or of a node without overlays."""
        return await self._ask(
            (await self._reach()).GetPolicy(
                admin_pb2.GetPolicyRequest(node_id=node_id), timeout=self._timeout_s, metadata=self._metadata
            )
        )

    async def set_policy(
        self,
        fields: Mapping[str, str],
        *,
        author: str,
        reason: str = "",
        expect_version: int | None = None,
        dry_run: bool = False,
        wait_ms: int = 0,
        scope: Scope | None = None,
    ) -> admin_pb2.SetPolicyResponse:
        """Fields as a person types them, for `scope` (everyone when None); waits up to `wait_ms` for the connected nodes' answers."""
        request = admin_pb2.SetPolicyRequest(
            fields=fields,
            author=author,
            reason=reason,
            expect_version=expect_version,
            dry_run=dry_run,
            wait_ms=wait_ms,
            scope=encode_scope(scope) if scope is not None and scope.kind else None,
        )
        return await self._ask(
            (await self._reach()).SetPolicy(request, timeout=self._timeout_s + wait_ms / 1000, metadata=self._metadata)
        )

    async def apply_policy(
        self,
        spec: admin_pb2.PolicySpec,
        *,
        author: str,
        reason: str = "",
        expect_version: int | None = None,
        dry_run: bool = False,
        wait_ms: int = 0,
    ) -> admin_pb2.ApplyPolicyResponse:
        """The whole spec: what it does not say goes back to the default."""
        request = admin_pb2.ApplyPolicyRequest(
            spec=spec, author=author, reason=reason, expect_version=expect_version, dry_run=dry_run, wait_ms=wait_ms
        )
        return await self._ask(
            (await self._reach()).ApplyPolicy(
                request, timeout=self._timeout_s + wait_ms / 1000, metadata=self._metadata
            )
        )

    async def pin_policy(
        self,
        fields: Sequence[str],
        pinned: bool,
        *,
        author: str,
        reason: str = "",
        dry_run: bool = False,
        wait_ms: int = 0,
    ) -> admin_pb2.PinPolicyResponse:
        request = admin_pb2.PinPolicyRequest(
            fields=fields, pinned=pinned, author=author, reason=reason, dry_run=dry_run, wait_ms=wait_ms
        )
        return await self._ask(
            (await self._reach()).PinPolicy(request, timeout=self._timeout_s + wait_ms / 1000, metadata=self._metadata)
        )

    async def revision(self, epoch: int, revision: int) -> admin_pb2.GetPolicyRevisionResponse:
        """The spec as it was then; 0 is the present epoch. InvalidRequest where the history does not tell."""
        request = admin_pb2.GetPolicyRevisionRequest(epoch=epoch, revision=revision)
        return await self._ask(
            (await self._reach()).GetPolicyRevision(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def history(self, limit: int = 0, *, controllers: bool = False) -> admin_pb2.ListPolicyHistoryResponse:
        """Newest first; 0 means the server's default. Controllers' writes only when asked for."""
        request = admin_pb2.ListPolicyHistoryRequest(limit=limit, controllers=controllers)
        return await self._ask(
            (await self._reach()).ListPolicyHistory(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def answers(
        self, limit: int = 0, *, node_id: str = "", identity: policy_pb2.SnapshotIdentity | None = None
    ) -> admin_pb2.ListPolicyAnswersResponse:
        """What nodes made of pushes, newest first."""
        request = admin_pb2.ListPolicyAnswersRequest(limit=limit, node_id=node_id, identity=identity)
        return await self._ask(
            (await self._reach()).ListPolicyAnswers(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def fleet(self) -> admin_pb2.GetFleetResponse:
        return await self._ask(
            (await self._reach()).GetFleet(
                admin_pb2.GetFleetRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        )

    async def scale(self) -> admin_pb2.GetScaleResponse:
        """How many workers each pool wants."""
        return await self._ask(
            (await self._reach()).GetScale(
                admin_pb2.GetScaleRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        )

    async def reprioritise(
        self, match: RequestMatch, delta: int, *, author: str, reason: str
    ) -> admin_pb2.SteerRequestsResponse:
        """By `delta` levels, up when positive."""
        action = admin_pb2.ReprioritiseAction(delta=delta)
        return await self._steer(
            admin_pb2.SteerRequestsRequest(match=encode_match(match), author=author, reason=reason, reprioritise=action)
        )

    async def isolate(
        self, match: RequestMatch, isolated: bool, *, author: str, reason: str
    ) -> admin_pb2.SteerRequestsResponse:
        action = admin_pb2.IsolateAction(isolated=isolated)
        return await self._steer(
            admin_pb2.SteerRequestsRequest(match=encode_match(match), author=author, reason=reason, isolate=action)
        )

    async def release(self, match: RequestMatch, *, author: str, reason: str) -> admin_pb2.SteerRequestsResponse:
        action = admin_pb2.ReleaseAction()
        return await self._steer(
            admin_pb2.SteerRequestsRequest(match=encode_match(match), author=author, reason=reason, release=action)
        )

    async def breakers(self) -> admin_pb2.ListBreakersResponse:
        return await self._ask(
            (await self._reach()).ListBreakers(
                admin_pb2.ListBreakersRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        )

    async def force_breaker(
        self,
        node_id: str,
        forced: control_pb2.BreakerForce.ValueType,
        *,
        author: str,
        reason: str = "",
        for_ms: int = 0,
    ) -> admin_pb2.ForceBreakerResponse:
        """`forced` unspecified takes back what was; `for_ms` 0 is the server's default."""
        request = admin_pb2.ForceBreakerRequest(
            node_id=node_id, forced=forced, for_ms=for_ms, author=author, reason=reason
        )
        return await self._ask(
            (await self._reach()).ForceBreaker(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def drain(
        self, node_id: str, deadline_ms: int, *, author: str, reason: str = "", restart: bool = False
    ) -> admin_pb2.DrainNodeResponse:
        """Answers once the worker has said that it drains, not once it has ended."""
        request = admin_pb2.DrainNodeRequest(
            node_id=node_id, deadline_ms=deadline_ms, author=author, reason=reason, restart=restart
        )
        return await self._ask(
            (await self._reach()).DrainNode(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def reload(self, node_id: str, *, author: str, reason: str = "") -> admin_pb2.ReloadNodeResponse:
        """Answers once the worker's engine has its policy anew."""
        request = admin_pb2.ReloadNodeRequest(node_id=node_id, author=author, reason=reason)
        return await self._ask(
            (await self._reach()).ReloadNode(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def reblock(
        self,
        node_ids: Sequence[str],
        block_size: int,
        *,
        author: str,
        pool: str = "",
        when: int = 0,
        max_recompute_tokens: int = 0,
        recompute: bool = False,
        dry_run: bool = False,
        reason: str = "",
        workers: int = 1,
    ) -> admin_pb2.ReblockNodesResponse:
        """One worker after another: these, or all of `pool`, which has about so many `workers`; each may take an engine step."""
        request = admin_pb2.ReblockNodesRequest(
            node_ids=node_ids, pool=pool, block_size=block_size, when=control_pb2.ReblockWhen.ValueType(when),
            max_recompute_tokens=max_recompute_tokens, recompute=recompute, dry_run=dry_run, author=author,
            reason=reason,
        )  # fmt: skip
        timeout_s = self._timeout_s + REBLOCK_S * max(1, workers, len(node_ids))
        return await self._ask((await self._reach()).ReblockNodes(request, timeout=timeout_s, metadata=self._metadata))

    async def blocks(self) -> admin_pb2.GetBlocksResponse:
        """KV blocks of workers, and pools' plans."""
        return await self._ask(
            (await self._reach()).GetBlocks(
                admin_pb2.GetBlocksRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        )

    async def start_rollout(
        self, fields: Mapping[str, str], *, author: str, scope: Scope | None = None, **asked: Any
    ) -> admin_pb2.StartRolloutResponse:
        """`asked` as StartRolloutRequest has it. Answers once canaries have been chosen and, unless it is a dry run, told."""
        whom = encode_scope(scope) if scope is not None and scope.kind else None
        request = admin_pb2.StartRolloutRequest(fields=fields, scope=whom, author=author, **asked)
        return await self._ask(
            (await self._reach()).StartRollout(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def rollouts(self, limit: int = 0, *, rollout_id: str = "") -> admin_pb2.ListRolloutsResponse:
        """Of policies, and rolling restarts, newest first; 0 is the server's default."""
        request = admin_pb2.ListRolloutsRequest(limit=limit, rollout_id=rollout_id)
        return await self._ask(
            (await self._reach()).ListRollouts(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def end_rollout(
        self, rollout_id: str, *, author: str, reason: str = "", promote: bool = False
    ) -> admin_pb2.EndRolloutResponse:
        """A policy goes back, or with `promote` holds for all; a restart stops where it is."""
        request = admin_pb2.EndRolloutRequest(rollout_id=rollout_id, promote=promote, author=author, reason=reason)
        return await self._ask(
            (await self._reach()).EndRollout(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def start_restart(
        self,
        settings: Mapping[str, str],
        *,
        author: str,
        reason: str = "",
        node_ids: Sequence[str] = (),
        pool: str = "",
        max_unavailable: int = 0,
        drain_ms: int = 0,
        ready_ms: int = 0,
        bake_ms: int = 0,
        force: bool = False,
        revert: bool = False,
        dry_run: bool = False,
    ) -> admin_pb2.StartRestartResponse:
        """Workers are started anew one after another: these, or all of `pool`, or all. 0 is the server's default, but of `bake_ms`."""
        request = admin_pb2.StartRestartRequest(
            node_ids=node_ids, pool=pool, settings=settings, max_unavailable=max_unavailable, drain_ms=drain_ms, ready_ms=ready_ms,
            bake_ms=bake_ms, author=author, reason=reason, dry_run=dry_run, force=force, revert=revert,
        )  # fmt: skip
        return await self._ask(
            (await self._reach()).StartRestart(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def actions(self, limit: int = 0, *, node_id: str = "") -> admin_pb2.ListActionsResponse:
        """What people did to nodes, newest first."""
        request = admin_pb2.ListActionsRequest(limit=limit, node_id=node_id)
        return await self._ask(
            (await self._reach()).ListActions(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def get_telemetry(self, *, windows: int = 0, decisions: int = 0) -> admin_pb2.GetTelemetryResponse:
        """What nodes measured, over so many of their newest windows, and the newest decisions; 0 is the server's default."""
        request = admin_pb2.GetTelemetryRequest(windows=windows, decisions=decisions)
        return await self._ask(
            (await self._reach()).GetTelemetry(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def _steer(self, request: admin_pb2.SteerRequestsRequest) -> admin_pb2.SteerRequestsResponse:
        """Workers' answers, or InvalidRequest before any of them was asked."""
        return await self._ask(
            (await self._reach()).SteerRequests(request, timeout=self._timeout_s, metadata=self._metadata)
        )

    async def _reach(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        """Where none of several replicas answers, the call itself says so. A certificate that was renewed is shown from this call on."""
        if self._generation != (newest := rpc.generation(self._tls)):
            over, self._before, self._generation = self._before, self._channels, newest
            self._channels = [rpc.channel(place, "control", tls=self._tls) for place in self._places]
            self._use(self._channels[0])
            for channel in over:
                await channel.close()
        if len(self._channels) > 1:
            give_up = time.monotonic() + REACH_S
            while not await self._found() and time.monotonic() < give_up:
                await asyncio.sleep(AGAIN_S)
        return self._stub

    async def _found(self) -> bool:
        """A replica that serves, the one in use as long as it does; where none does, one that answers, and can say why."""
        answering: grpc.aio.Channel | None = None
        for channel in (self._channel, *self._channels):
            serves = await _serves(channel)
            if serves:
                self._use(channel)
                return True
            if serves is False and answering is None:
                answering = channel
        if answering is not None:
            self._use(answering)
        return answering is not None

    def _use(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = admin_pb2_grpc.AdminServiceStub(channel)

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as e:
            error = rpc.from_call(e)
            # Only a server's own status carries a reason of ours; these two codes without one come from the way there.
            if error.reason in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                silent = error.reason == "DEADLINE_EXCEEDED"
                why = "it does not answer in time" if silent else "nothing answers there"
                if fault := rpc.tls_fault(error.message, "control", tls=self._tls):
                    raise Unreachable(f"can't talk to the control plane at {self.address}: {fault}") from e
                raise Unreachable(
                    f"can't reach the control plane at {' or '.join(self._places)}: {why}; start one "
                    "(trimtab up), or say where it is (--control HOST:PORT, or TRIMTAB_CONTROL)"
                ) from e
            raise error from e

    async def close(self) -> None:
        for channel in (*self._before, *self._channels):
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _serves(channel: grpc.aio.Channel) -> bool | None:
    """Whether the replica there has a policy; None when it does not answer."""
    try:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_S)
    except grpc.aio.AioRpcError:
        return None
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
