"""A simulated engine with faults that can be switched on while it runs: for `trimtab drill` and tests, never for serving.

TRIMTAB_FAULTS names a file with JSON, by node id: {"w0": {"leak_blocks": 50, "stuck": true, "ignores_policy": true}}. It is looked at ten
times a second, so that whoever drills writes it anew; write it whole (to another name, then rename). No other engine reads the variable.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import structlog

from services.worker.engines import Applied
from services.worker.engines.simulated import SimulatedEngine
from trimtab.policy import Mode, Policy
from trimtab.scheduling import Rules

log = structlog.get_logger(__name__)

FAULTS_ENV = "TRIMTAB_FAULTS"
LOOK_S = 0.1
LATE_MS = 2000.0
"""An engine without its policy takes a REALTIME request so much later than a BATCH request that came with it."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with one engine."""

    leak_blocks: int = 0
    """KV blocks that are lost in all. What is lost stays so until the process ends, whatever is switched off."""
    stuck: bool = False
    """The step in flight does not end, and nobody who asks the engine gets an answer."""
    ignores_policy: bool = False
    """From now on it runs by no policy: it acknowledges what it is told and does as before, REALTIME last. It comes to its senses when it is
    told the same anew, or when this is switched off."""


def parsed(data: bytes, node_id: str) -> Faults:
    """This node's. ValueError for what is no such file."""
    said = json.loads(data)
    mine = said.get(node_id, {}) if isinstance(said, dict) else None
    if not isinstance(mine, dict):
        raise ValueError("faults are an object of objects: {node id: {fault: value}}")
    kinds = {f.name: type(f.default) for f in fields(Faults)}
    for name, value in mine.items():
        if name not in kinds:
            raise ValueError(f"no fault is called {name!r}; there are {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            raise ValueError(f"{name} is {value!r}, and must be of type {kinds[name].__name__}")
    return Faults(**mine)


class Switches:
    """The file as it was looked at last. A file that is not there switches nothing on."""

    def __init__(self, path: Path, node_id: str) -> None:
        self.faults = Faults()
        self._path = path
        self._node_id = node_id
        self._seen: tuple[int, int] | None = None

    def look(self) -> Faults:
        """Read anew where it has changed. What can't be read is said once and changes nothing."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self.faults, self._seen = Faults(), None
            return self.faults
        seen = (found.st_mtime_ns, found.st_ino)
        if seen != self._seen:
            self._seen = seen
            try:
                self.faults = parsed(self._path.read_bytes(), self._node_id)
                log.warning("faults switched", node=self._node_id, faults=str(self.faults))
            except (OSError, ValueError) as e:
                log.error("faults can't be read", path=str(self._path), error=str(e))
        return self.faults


def without_policy(rules: Rules) -> Rules:
    """Nobody is protected, and the order is upside down: REALTIME behind BATCH by LATE_MS."""
    return replace(
        rules,
        mode=Mode.TRIMTAB,
        hot_below=0,
        protect_length=True,
        realtime_reserve=0,
        cold_window_ms=0.0,
        serial_above=1 << 30,
        max_overtake_ms=LATE_MS,
        max_priority_diff=1 << 10,
        realtime_delta=-(1 << 10),
        batch_delta=1 << 10,
    )


class FaultyEngine(SimulatedEngine):
    """The simulated engine, with `switches`. With all of them off it is no different."""

    def __init__(self, switches: Switches, **how: Any) -> None:
        super().__init__(**how)
        self._switches = switches
        self._leaked = 0
        self._ignores = self._lost = False
        """The switch, and whether it runs by no policy."""
        self._told: Policy | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._watch = asyncio.create_task(self._watching(), name="faults")

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await super().stop()

    async def apply(self, policy: Policy) -> Applied:
        again, self._told = policy == self._told, policy
        if self._lost and not again:
            return Applied(self._value.steps + 1)
        if self._lost:
            log.warning("policy heard at last")
        self._lost = False
        return await super().apply(policy)

    async def ping(self) -> None:
        while self._switches.faults.stuck:
            await asyncio.sleep(LOOK_S)

    async def _pass(self, seconds: float) -> None:
        await super()._pass(seconds)
        while self._switches.faults.stuck:
            await asyncio.sleep(LOOK_S)

    async def _watching(self) -> None:
        while True:
            self._obey(self._switches.look())
            await asyncio.sleep(LOOK_S)

    def _obey(self, faults: Faults) -> None:
        # What requests hold can't leak: a leak takes what is free, the rest of it as that comes back.
        lost = min(max(0, faults.leak_blocks - self._leaked), self._value.free_blocks)
        self._leaked += lost
        self._value.free_blocks -= lost
        if faults.ignores_policy and not self._ignores:
            self._lost = True
            self._value.set_rules(without_policy(self._value.rules))
        elif self._lost and not faults.ignores_policy and self._told is not None:
            self._lost = False
            self._value.set_rules(Rules.of(self._told, self.limits))
        self._ignores = faults.ignores_policy


def from_environment(environment: Mapping[str, str], node_id: str) -> Switches | None:
    """None where nobody drills."""
    path = environment.get(FAULTS_ENV)
    return Switches(Path(path), node_id) if path else None


def simulated(node_id: str, **how: Any) -> SimulatedEngine:
    """The simulated engine, with faults where a drill asks for them."""
    switches = from_environment(os.environ, node_id)
    return SimulatedEngine(**how) if switches is None else FaultyEngine(switches, **how)
