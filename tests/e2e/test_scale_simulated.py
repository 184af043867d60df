"""`trimtab up` grows and shrinks as its pool wants, and brings back a worker that was told to restart: real processes, the real leader."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.admin.client import AdminClient
from tests.e2e.mesh import APPLIED, GONE_WITHIN_S, Mesh, environment, gone, up
from trimtab.v1 import admin_pb2

pytestmark = pytest.mark.slow


def workers(mesh: Mesh) -> set[str]:
    fleet = json.loads(mesh.verb("fleet", "--json").stdout)["nodes"]
    return {n["node_id"] for n in fleet if n["connected"] and n["role"] == "worker"}


def pids(state: Path) -> dict[str, int]:
    run: dict[str, Any] = json.loads((state / "default" / "run.json").read_text())
    return run["pids"]  # type: ignore[no-any-return]


async def restart(control: str, name: str) -> admin_pb2.DrainNodeResponse:
    async with AdminClient(control) as admin:
        return await admin.drain(name, 0, author="a test", reason="to see it come back", restart=True)


def test_the_pool_grows_shrinks_and_heals(tmp_path: Path) -> None:
    with up(environment(tmp_path), "--no-prompt", "--preset", "none") as mesh:
        ready = mesh.until("ready")
        mesh.joined("w0")
        shown = json.loads(mesh.verb("scale", "--json").stdout)
        assert [(p["pool"], p["wanted"], p["running"]) for p in shown["pools"]] == [("default", 1, 1)]
        assert mesh.verb("scale", "set", "default", "2", "--reason", "a launch", *APPLIED).returncode == 0
        # The leader listens for half a minute before it says how many there are.
        told = mesh.until("scaling")
        assert (told["name"], told["to"], told["start"]) == ("w1", 2, True)
        mesh.joined("w0", "w1")
        before = pids(tmp_path)
        assert {"w0", "w1"} <= before.keys()

        assert asyncio.run(restart(ready["control"], "w1")).done
        again = mesh.until("restarting")
        assert (again["name"], again["commanded"]) == ("w1", True)
        while True:
            state = mesh.until("process")
            if (state["name"], state["state"]) == ("w1", "ready"):
                break
        mesh.joined("w0", "w1")
        assert pids(tmp_path)["w1"] != before["w1"]

        assert mesh.verb("scale", "set", "default", "1", *APPLIED).returncode == 0
        assert mesh.until("left")["name"] == "w1"
        assert workers(mesh) == {"w0"}
        assert "w1" not in pids(tmp_path)
        kinds = [e.get("event") for e in mesh.events]
        assert "died" not in kinds and "scale_failed" not in kinds
        family = mesh.family()
        mesh.process.terminate()
        mesh.until("stopped")
        assert mesh.process.wait(timeout=GONE_WITHIN_S) == 0
        assert gone(family)
