"""What the control plane says of its nodes: who is there, and which policy each holds; and the policy that a person sets meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.bench.processes import BenchError, Processes
from trimtab.codec import decode_identity
from trimtab.kit import rpc
from trimtab.kit.cli import ExitCode
from trimtab.snapshot import Identity
from trimtab.v1 import admin_pb2, admin_pb2_grpc

ASK_S, SET_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """`holds` is the snapshot that each connected node has applied; `desired` the newest one that was pushed."""

    desired: Identity
    holds: Mapping[str, Identity]

    def behind(self, nodes: frozenset[str]) -> frozenset[str]:
        """Which of these are away, or hold another policy than the newest."""
        return frozenset(n for n in nodes if self.holds.get(n) != self.desired)


class Admin:
    """Belongs to one event loop; `close` it. grpc.aio.AioRpcError where the control plane does not answer."""

    def __init__(self, address: str, processes: Processes) -> None:
        self._address = address
        self._processes = processes
        self._channel = rpc.channel(address, "control")
        self._stub: Any = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def fleet(self) -> Fleet:
        pb: admin_pb2.GetFleetResponse = await self._stub.GetFleet(admin_pb2.GetFleetRequest(), timeout=ASK_S)
        holds = {n.hello.node_id: decode_identity(n.policy.applied) for n in pb.nodes if n.connected}
        return Fleet(decode_identity(pb.desired), holds)

    async def set(self, field: str, value: str) -> None:
        """By the verb that people type; it does not wait for those who can't answer. BenchError where it is refused."""
        argv = [
            "-m",
            "trimtab_cli",
            "policy",
            "set",
            f"{field}={value}",
            "--reason",
            "while a link is cut",
            "--wait",
            "0",
        ]
        code, out, err = await self._processes.ask([*argv, "--control", self._address, "--json"], SET_S)
        if code not in (ExitCode.OK, ExitCode.PARTIAL) or not json.loads(out)["changes"]:
            raise BenchError(f"trimtab policy set ended with code {code}: {err.strip() or out.strip()}")

    async def close(self) -> None:
        await self._channel.close()
