"""Steers a bench's worker the way that a person would, by `trimtab policy set` on the control plane beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from services.bench.processes import BenchError, Processes
from trimtab.kit.cli import ExitCode

APPLY_MS = 60_000
"""A step in flight has to end first; of stock size on a CPU it takes seconds."""
CONNECT_S = 30.0
CLI_S = 30.0


class Unreached(BenchError):
    """The control plane did not answer."""


class Steering:
    """`trimtab policy set` on a control plane that one worker connects to."""

    def __init__(self, processes: Processes, control: str) -> None:
        self._processes = processes
        self._control = control
        self._in_force: dict[str, str] = {}

    async def connected(self) -> None:
        """Until the control plane knows the worker: what is written before has nobody to answer for it."""
        try:
            async with asyncio.timeout(CONNECT_S):
                while not await self._has_node():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise BenchError(f"the worker did not reach the control plane at {self._control}") from None

    async def _has_node(self) -> bool:
        """False too while the control plane does not answer yet: it may have been started a moment ago."""
        try:
            nodes = (await self._ask("fleet"))["nodes"]
            return any(node["connected"] and node["role"] == "worker" for node in nodes)
        except Unreached:
            return False

    async def steer(self, fields: Mapping[str, str]) -> None:
        """In force when this returns. BenchError when the policy is refused, or not in force after APPLY_MS."""
        if {**self._in_force, **fields} == self._in_force:
            return
        assignments = [f"{path}={value}" for path, value in fields.items()]
        why = ["--author", "trimtab bench", "--reason", "the next arm", "--wait", str(APPLY_MS)]
        answer = await self._ask("policy", "set", *assignments, *why)
        if answer["changes"] and not answer["nodes"]:
            raise BenchError("no node is connected to the control plane any more, so none has taken the policy")
        self._in_force |= fields

    async def adjusted(self) -> list[str]:
        """Fields that a controller has moved, at any worker."""
        found: set[str] = set()
        for node in (await self._ask("fleet"))["nodes"]:
            if node["role"] == "worker" and node["connected"]:
                answer = await self._ask("policy", "get", "--node", node["node_id"])
                found |= {path for path, said in answer["fields"].items() if "→" in said["source"]}
        return sorted(found)

    async def history(self, newest: int) -> list[dict[str, Any]]:
        """Everybody's writes, controllers' too, newest first, as `trimtab policy history` tells them."""
        entries: list[dict[str, Any]] = await self._ask("policy", "history", "-n", str(newest), "--controllers")
        return entries

    async def _ask(self, *args: str) -> Any:
        argv = ["-m", "trimtab_cli", *args, "--control", self._control, "--json"]
        code, out, err = await self._processes.ask(argv, CLI_S + APPLY_MS / 1000)
        if code != 0:
            said = f"trimtab {' '.join(args[:2])} ended with code {code}: {err.strip() or out.strip()}"
            raise (Unreached if code == ExitCode.UNREACHABLE else BenchError)(said, ExitCode.REFUSED)
        return json.loads(out)
