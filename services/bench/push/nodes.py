"""Many light nodes in one process: real control streams, and all that a worker does with a policy but obey it.

    python -m services.bench.push.nodes --control HOST:PORT[,HOST:PORT] --count 100 --prefix n

Each has a connection of its own and decodes, checks and resolves what comes. Commands are JSON lines on stdin, answers JSON lines on stdout:
`{"until": "connected"}` and `{"until": [epoch, revision], "within_s": 10}`. Times are of CLOCK_MONOTONIC, which all processes of a machine
share, in nanoseconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from typing import Any

import click

from services.control import ControlLink
from trimtab import codec
from trimtab.errors import PolicyRefused
from trimtab.kit.process import die_with_parent
from trimtab.kit.watch import Watch
from trimtab.messages import Hello, NodeState, Report, Role
from trimtab.snapshot import Identity, Limits, Node, Snapshot, Verdict, judge, resolve
from trimtab.v1 import control_pb2

LIMITS = Limits(max_num_seqs=4096, max_step_tokens=1 << 20, max_model_len=131_072)
"""Roomy: no change that the bench makes is refused."""


class LightNode:
    """What one node has seen. `backwards` counts pushes that were older than what it held and yet applied: there must be none."""

    def __init__(self, node_id: str, addresses: list[str], report_s: float, changed: Watch[None]) -> None:
        self.held = Identity()
        self.here_ns = self.applied_ns = 0
        self.backwards = self.refused = self.taken = 0
        self._highest = Identity()
        self._node = Node(node_id, limits=LIMITS)
        self._incarnation = uuid.uuid4().hex
        self._changed = changed
        self.link = ControlLink(addresses, self._hello, self._report, on_push=self._on_push, report_interval_s=report_s)

    def _hello(self) -> control_pb2.Hello:
        return codec.encode_hello(
            Hello(self._node, self._incarnation, Role.WORKER, "light", held=self.held, address="127.0.0.1:1")
        )

    def _report(self) -> control_pb2.Report:
        return codec.encode_report(Report(0, NodeState.SERVING))

    async def _on_push(self, snapshot: Snapshot, sent_unix_ms: int, traceparent: str) -> control_pb2.PolicyResult:
        here_ns = time.monotonic_ns()  # its bytes are here, and their digest is checked
        match judge(self.held, snapshot.identity):
            case Verdict.OLDER:
                return control_pb2.PolicyResult(ignored_holding=codec.encode_identity(self.held))
            case Verdict.CLASH:
                self.refused += 1
                raise PolicyRefused("here already with other content", reason="DIGEST_CLASH")
        resolve(codec.decode_document(snapshot.document), self._node, now_unix_ms=sent_unix_ms)
        self.backwards += snapshot.identity < self._highest
        self._highest = max(self._highest, snapshot.identity)
        self.held = snapshot.identity
        self.taken += 1
        self.here_ns, self.applied_ns = here_ns, time.monotonic_ns()
        self._changed.set(None)
        return control_pb2.PolicyResult(applied=control_pb2.PolicyApplied(step_no=1, apply_ms=0.0))


class Herd:
    """All of them."""

    def __init__(self, addresses: list[str], count: int, prefix: str, report_s: float) -> None:
        self._changed: Watch[None] = Watch(None)
        # Each begins with another replica, as chance would have it.
        self.nodes = [
            LightNode(
                f"{prefix}{i}",
                addresses[i % len(addresses) :] + addresses[: i % len(addresses)],
                report_s,
                self._changed,
            )
            for i in range(count)
        ]

    async def until(self, wanted: Identity | None, within_s: float) -> dict[str, Any]:
        """Once every node holds `wanted` or a newer one, or is connected where None; what they saw then, or when the time is over."""
        try:
            async with asyncio.timeout(within_s):
                pending = list(self.nodes)
                while pending:
                    version = self._changed.version
                    while pending and _done(pending[-1], wanted):
                        pending.pop()
                    if pending:
                        await _either(self._changed, version)
        except TimeoutError:
            pass
        done = [n for n in self.nodes if _done(n, wanted)]
        return {
            "missing": len(self.nodes) - len(done),
            "here_ns": [n.here_ns for n in done],
            "applied_ns": [n.applied_ns for n in done],
            "backwards": sum(n.backwards for n in self.nodes),
            "refused": sum(n.refused for n in self.nodes),
            "taken": sum(n.taken for n in self.nodes),
        }


def _done(n: LightNode, wanted: Identity | None) -> bool:
    return n.link.connected if wanted is None else n.held >= wanted


async def _either(changed: Watch[None], version: int) -> None:
    """A push, or a moment: nobody tells when a link connects."""
    try:
        async with asyncio.timeout(0.1):
            await changed.until(version)
    except TimeoutError:
        pass


async def serve(herd: Herd) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    links = [asyncio.create_task(n.link.run()) for n in herd.nodes]
    try:
        while line := await reader.readline():
            asked = json.loads(line)
            until = asked["until"]
            wanted = None if until == "connected" else Identity(*until)
            sys.stdout.write(json.dumps(await herd.until(wanted, asked["within_s"])) + "\n")
            sys.stdout.flush()
    finally:
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)


@click.command()
@click.option("--control", required=True)
@click.option("--count", type=int, required=True)
@click.option("--prefix", default="n")
@click.option("--report-s", type=float, default=0.8)
@click.option("--parent-pid", type=int, required=True)
def main(control: str, count: int, prefix: str, report_s: float, parent_pid: int) -> None:
    import structlog
    import uvloop

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    die_with_parent(parent_pid, signal.SIGKILL)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    async def run() -> None:
        await serve(Herd(control.split(","), count, prefix, report_s))

    uvloop.run(run())


if __name__ == "__main__":
    main()
