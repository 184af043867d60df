"""`trimtab breaker` as a user types it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from controlplane.cli import fleet
from controlplane.cli_workers import breaker
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh
from tests.controlplane.test_breakers import a_gateway, noticed, sees_workers, trip


class Shell:
    """Types `trimtab breaker` at a mesh of one worker and a gateway."""

    def __init__(self, mesh: Mesh, gateway: FakeNode) -> None:
        self.mesh, self.gateway = mesh, gateway

    async def __call__(self, *words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, breaker, [*words, "--control", self.mesh.address])

    async def json(self, *words: str) -> Any:
        return json.loads((await self(*words, "--json")).stdout)


@pytest.fixture
async def shell(quiet: None) -> AsyncIterator[Shell]:
    async with a_mesh() as mesh:
        mesh.start_node(FakeNode(mesh.address))
        gateway = a_gateway(mesh, "g0")
        await sees_workers(gateway)
        yield Shell(mesh, gateway)


async def test_the_table_shows_what_gateways_said_and_what_is_forced(shell: Shell) -> None:
    assert (await shell()).stdout.splitlines()[1].split() == ["w0", "-", "-", "nothing"]
    trip(shell.gateway)
    await shell.gateway.viewed(noticed)
    done = await shell("open", "w0", "--for", "2h", "--reason", "a bad card", "--author", "ada")
    assert (
        done.exit_code,
        done.stdout.startswith("w0 is forced open: no gateway sends it requests, for 2h, until "),
    ) == (
        0,
        True,
    )
    text = (await shell()).stdout
    assert "g0: open for 8m" in text and "on errors: 10 of 20" in text
    assert '! w0 is forced open for 2h yet, by ada "a bad card"' in text or "for 1h 59m yet" in text
    [row] = await shell.json()
    assert (row["node_id"], row["connected"], row["trip"]["gateway_id"]) == ("w0", True, "g0")
    assert (row["forced"]["to"], row["forced"]["author"]) == ("open", "ada")
    assert (await shell("reset", "w0")).stdout == "w0: every gateway decides by what it sees again\n"
    assert (await shell("reset", "w0")).stdout == "nothing is forced on w0\n"
    assert (await shell.json())[0]["forced"] is None


async def looked_at(shell: Shell, *words: str) -> Result:
    """The fleet."""
    return await asyncio.to_thread(CliRunner().invoke, fleet, [*words, "--control", shell.mesh.address])


async def test_the_fleet_does_not_call_serving_who_gets_no_requests(shell: Shell) -> None:
    assert "serving" in (await looked_at(shell)).stdout.splitlines()[2]
    await shell("open", "w0", "--reason", "a bad card", "--author", "ada")
    text = (await looked_at(shell)).stdout
    row = next(line for line in text.splitlines() if line.startswith("w0"))
    assert "forced open" in row and "serving" not in row
    assert max(map(len, text.splitlines())) <= 80
    assert "! w0 is forced open for" in text and 'by ada "a bad card"' in " ".join(text.split())
    checked = await looked_at(shell, "--check", "--json")
    assert (checked.exit_code, checked.stderr) == (5, "check: no worker takes requests\n")
    forced = {n["node_id"]: n["breaker"] and n["breaker"]["forced"]["to"] for n in json.loads(checked.stdout)["nodes"]}
    assert forced == {"g0": None, "w0": "open"}
    await shell("close", "w0")
    assert (await looked_at(shell, "--check")).exit_code == 0
    await shell("reset", "w0")
    assert "serving" in (await looked_at(shell)).stdout.splitlines()[2]


async def test_the_fleet_tells_of_a_trip_while_it_lasts(shell: Shell) -> None:
    trip(shell.gateway)
    await shell.gateway.viewed(noticed)
    text = (await looked_at(shell)).stdout
    assert "breaker open" in next(line for line in text.splitlines() if line.startswith("w0"))
    assert "! w0, its breaker: g0: open for" in text
    # It is that gateway's word, and others may send requests.
    assert (await looked_at(shell, "--check")).exit_code == 0


async def test_closing_is_forced_too_and_answers_in_json(shell: Shell) -> None:
    found = await shell.json("close", "w0", "--for", "30s")
    assert (found["changed"], found["forced"]["to"]) == (True, "closed")
    assert found["forced"]["until_unix_ms"] - found["forced"]["at_unix_ms"] == 30_000


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("open", "w1"), 2, "did you mean w0?"),
        (("open", "w0", "--for", "ages"), 2, "such as 500ms, 30s"),
        (("open", "w0", "--for", "25h"), 2, "at most 1d"),
        (("open", "w0", "--for", "0s"), 2, "a time above 0"),
        (("open",), 2, "Missing argument"),
        (("shut", "w0"), 2, "No such command"),
    ],
)
async def test_what_is_wrong_with_the_words_is_said(shell: Shell, words: tuple[str, ...], code: int, says: str) -> None:
    result = await shell(*words)
    assert (result.exit_code, says in result.stderr) == (code, True), result.stderr


def test_without_a_control_plane_the_verb_says_so() -> None:
    result = CliRunner().invoke(breaker, ["open", "w0", "--control", "127.0.0.1:9"])
    assert (result.exit_code, "can't reach the control plane" in result.stderr) == (3, True)
