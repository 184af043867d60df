"""`trimtab requests` as a user types it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner, Result

from controlplane import cli_requests
from controlplane.admin import steering
from controlplane.cli_requests import requests
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh
from trimtab import measures
from trimtab.codec import decode_match
from trimtab.kit.process import free_port
from trimtab.messages import Report, RequestMatch, Role, Workload
from trimtab.v1 import control_pb2

WHY = ("--reason", "evening")


@dataclass
class Shell:
    """Types verbs at a mesh of one worker that says it has `has` requests of every kind."""

    mesh: Mesh
    worker: FakeNode
    has: int = 2

    async def __call__(self, *words: str, keys: str = "") -> Result:
        command = [*words, "--control", self.mesh.address]
        return await asyncio.to_thread(CliRunner().invoke, requests, command, keys)

    async def json(self, *words: str) -> Any:
        return json.loads((await self(*words, "--json")).stdout)

    @property
    def commands(self) -> tuple[control_pb2.Command, ...]:
        return self.worker.commands.value


@pytest.fixture
async def shell(quiet: None) -> AsyncIterator[Shell]:
    async with a_mesh() as mesh:
        worker = mesh.start_node(FakeNode(mesh.address))
        shell = Shell(mesh, worker)
        worker.obeys = lambda _: control_pb2.CommandResult(ok=True, affected=shell.has)
        await worker.holds(1, 1)
        yield shell


async def test_reprioritise_says_how_many_moved_and_where(shell: Shell) -> None:
    result = await shell("reprioritise", "--id", "a", "--id", "b", "--delta", "2", *WHY)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "2 requests moved 2 levels earlier, as far as priority.max_priority_diff allows\n  w0: 2\n"
    )
    [command] = shell.commands
    assert command.reprioritise.delta == 2
    assert decode_match(command.reprioritise.match) == RequestMatch(frozenset({"a", "b"}))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("reprioritise", "--delta", "-1"), "1 request moved 1 level later"),
        (("reprioritise", "--delta", "0"), "1 request put back to its own place"),
        (("isolate",), "1 request isolated: one runs at a time"),
        (("isolate", "--off"), "1 request no longer isolated"),
        (("release",), "1 request released"),
    ],
)
async def test_every_action_says_what_it_did(shell: Shell, words: tuple[str, ...], says: str) -> None:
    shell.has = 1
    result = await shell(*words, "--id", "a", *WHY)
    assert (result.exit_code, result.stdout.startswith(says)) == (0, True), result.output


async def test_all_conditions_travel_together(shell: Shell) -> None:
    await shell("isolate", "--workload", "batch", "--tenant", "acme", "--min-prompt-tokens", "4096", *WHY)
    [command] = shell.commands
    assert command.isolate_requests.isolated
    assert decode_match(command.isolate_requests.match) == RequestMatch(frozenset(), Workload.BATCH, "acme", 4096)


@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-"])
async def test_the_id_of_an_openai_answer_is_understood(shell: Shell, prefix: str) -> None:
    await shell("release", "--id", f"{prefix}a1", *WHY)
    assert decode_match(shell.commands[0].release_requests.match).request_ids == {"a1", f"{prefix}a1"}


async def test_json_has_the_total_and_every_workers_answer(shell: Shell) -> None:
    node = {"node_id": "w0", "done": True, "affected": 2, "reason": None, "message": None}
    assert await shell.json("reprioritise", "--id", "a", "--delta", "1", *WHY) == {
        "action": "reprioritise",
        "delta": 1,
        "affected": 2,
        "nodes": [node],
        "waiting_in_gateways": None,
    }
    assert (await shell.json("isolate", "--off", "--id", "a", *WHY))["isolated"] is False


@pytest.mark.parametrize("as_json", [(), ("--json",)])
async def test_nobody_has_it_exits_4_and_says_so(shell: Shell, as_json: tuple[str, ...]) -> None:
    shell.has = 0
    result = await shell("release", "--id", "a", *WHY, *as_json)
    assert result.exit_code == 4
    assert "nobody has such a request: the one connected worker has none that waits or runs now" in result.stderr
    assert (json.loads(result.stdout)["affected"] if as_json else result.stdout) == (0 if as_json else "")


async def test_an_old_worker_alone_cannot_do_it_and_beside_another_makes_it_partial(shell: Shell) -> None:
    shell.worker.obeys = lambda _: None
    result = await shell("release", "--id", "a", *WHY)
    assert (result.exit_code, "no connected worker has done it" in result.stderr) == (4, True)
    assert "w0: UNSUPPORTED: release_requests is not handled by this node" in result.stderr
    newer = FakeNode(shell.mesh.address, "w1")
    newer.obeys = lambda _: control_pb2.CommandResult(ok=True, affected=1)
    await shell.mesh.start_node(newer).holds(1, 1)
    result = await shell("release", "--id", "a", *WHY)
    assert (result.exit_code, result.stdout.splitlines()[:2]) == (5, ["1 request released", "  w1: 1"])
    assert "  w0: UNSUPPORTED" in result.stdout
    newer.obeys = lambda _: control_pb2.CommandResult(ok=True)
    result = await shell("release", "--id", "a", *WHY)
    assert (result.exit_code, "nobody who answered has such a request (1 of 2" in result.stderr) == (5, True)


async def test_no_answer_in_time_is_partial_and_in_doubt(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "ANSWER_S", 0.5)
    shell.worker.ready.clear()
    result = await shell("release", "--id", "a", *WHY)
    assert (result.exit_code, "w0: NO_ANSWER: no answer within 0.5 s; it may still do it" in result.stderr) == (
        5,
        True,
    )
    assert max(map(len, result.stderr.splitlines())) <= 80


async def test_a_lost_worker_is_named_and_makes_nothing_partial(shell: Shell) -> None:
    other = FakeNode(shell.mesh.address, "w1")
    await shell.mesh.start_node(other).holds(1, 1)
    await other.stop()
    await shell.mesh.until(lambda fleet: not fleet["w1"].connected)
    result = await shell("release", "--id", "a", *WHY)
    assert (result.exit_code, "w1: NOT_CONNECTED: not asked" in result.stdout) == (0, True)
    await shell.worker.stop()
    await shell.mesh.until(lambda fleet: not fleet["w0"].connected)
    result = await shell("release", "--id", "a", *WHY)
    assert (result.exit_code, "no worker is connected; see `trimtab fleet`" in result.stderr) == (4, True)


@pytest.mark.parametrize("verb", [("reprioritise", "--delta", "1"), ("isolate",), ("release", "--yes")])
async def test_nothing_given_is_a_usage_error_that_says_what_to_give(shell: Shell, verb: tuple[str, ...]) -> None:
    result = await shell(*verb)
    assert (result.exit_code, shell.commands) == (2, ())
    for option in ("--id", "--workload", "--tenant", "--min-prompt-tokens", "--reason"):
        assert option in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("release", "--id", "a"),
        ("release", "--id", "a", "--reason", "  "),
        ("release", "--id", "", *WHY),
        ("release", "--id", "a\nb", *WHY),
        ("release", "--tenant", "\udcff", *WHY),
        ("release", "--workload", "bulk", *WHY),
        ("release", "--min-prompt-tokens", "0", *WHY),
        ("release", "--id", "a" * 129, *WHY),
        ("reprioritise", "--id", "a", *WHY),
        ("reprioritise", "--id", "a", "--delta", "3", *WHY),
        ("isolate", "--id", "a", "--delta", "1", *WHY),
    ],
)
async def test_a_mistake_is_a_usage_error_and_nobody_is_asked(shell: Shell, words: tuple[str, ...]) -> None:
    result = await shell(*words)
    assert (result.exit_code, shell.commands) == (2, ()), result.output


@pytest.mark.parametrize(
    ("words", "keys", "asked", "released"),
    [
        (("--workload", "batch"), "y\n", True, True),
        (("--workload", "batch"), "n\n", True, False),
        (("--workload", "batch"), "\n", True, False),
        (("--workload", "batch", "--yes"), "", False, True),
        (("--id", "a", "--workload", "batch"), "", False, True),
    ],
)
async def test_at_a_terminal_release_asks_unless_the_match_is_by_id(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], keys: str, asked: bool, released: bool
) -> None:
    monkeypatch.setattr(cli_requests, "_at_a_terminal", lambda: True)
    result = await shell("release", *words, *WHY, keys=keys)
    assert ("This ends every batch request, on every worker" in result.stderr) is asked
    assert (result.exit_code, len(shell.commands)) == ((0, 1) if released else (1, 0))


async def test_without_a_terminal_release_does_not_ask(shell: Shell) -> None:
    result = await shell("release", "--workload", "batch", *WHY)
    assert (result.exit_code, result.stderr) == (0, "")


async def test_who_waits_in_gateways_is_said_not_to_be_touched(shell: Shell) -> None:
    gateway = FakeNode(shell.mesh.address, "g0", role=Role.GATEWAY)
    gateway.says = lambda: Report(
        0, gateway.state, gauges={measures.BATCH_WAITING: 62.0, measures.REALTIME_WAITING: 3.0}
    )
    shell.mesh.start_node(gateway)
    await shell.mesh.until(lambda f: "g0" in f and f["g0"].report is not None)
    released = await shell("release", "--workload", "batch", *WHY)
    assert "62 BATCH requests wait in gateways: what is there is not touched" in released.stdout
    assert (await shell.json("isolate", "--tenant", "acme", *WHY))["waiting_in_gateways"] == 65
    assert (await shell.json("release", "--id", "a", *WHY))["waiting_in_gateways"] is None


def test_what_is_to_be_released_is_said_in_words() -> None:
    assert (
        cli_requests._described(RequestMatch(min_prompt_tokens=9)) == "every request with a prompt of 9 tokens or more"
    )
    match = RequestMatch(workload=Workload.BATCH, tenant="acme")
    assert cli_requests._described(match) == "every batch request of tenant 'acme'"


def test_an_unreachable_control_plane_exits_3() -> None:
    words = ["release", "--id", "a", *WHY, "--control", f"127.0.0.1:{free_port()}"]
    assert CliRunner().invoke(requests, words).exit_code == 3


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("reprioritise", "priority.max_priority_diff"),
        ("isolate", "one at a time"),
        ("release", "ABORTED / RELEASED"),
    ],
)
def test_the_help_says_what_happens(verb: str, says: str) -> None:
    assert says in " ".join(CliRunner().invoke(requests, [verb, "--help"]).stdout.split())
