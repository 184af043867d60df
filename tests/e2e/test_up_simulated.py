"""`trimtab up` as a person runs it: real processes, real ports, the simulated engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.mesh import APPLIED, GONE_WITHIN_S, environment, gone, up
from trimtab.client import Client
from trimtab.errors import TrimtabError
from trimtab.messages import Delta, Finish, Request, Sampling

pytestmark = pytest.mark.slow

ONE_OF_EACH_KIND: dict[str, tuple[str, Any]] = {
    "batch.active": ("5", 5),
    "preemption.mode": ("none", "none"),
    "memory.pressure_threshold": ("0.9", 0.9),
    "isolate.tenants": ("acme,globex", ["acme", "globex"]),
    "priority.batch_delta": ("-1", -1),
}
"""As typed, and as a program reads it."""


def test_up_asks_for_a_model_of_this_start_whatever_the_mesh_served_before(tmp_path: Path) -> None:
    env = environment(tmp_path)
    for served, workers in (("a-former-model", "2"), ("its-successor", "1")):
        with up(env, "--workers", workers, "--", "--served-model-name", served) as mesh:
            assert mesh.until("ready")["greeting"]["model"] == served
            mesh.process.send_signal(signal.SIGTERM)
            assert mesh.process.wait(GONE_WITHIN_S) == 0


def test_up_answers_on_every_door_and_drains(tmp_path: Path) -> None:
    env = environment(tmp_path)
    taken = socket.create_server(("127.0.0.1", int(env["TRIMTAB_GATEWAY_HTTP"].split(":")[1])))
    with taken, up(env, "--workers", "2") as mesh:
        ready = mesh.until("ready")
        assert ready["greeting"]["answer"]
        assert ready["greeting"]["ttft_ms"] > 0
        assert set(ready["pids"]) == {"valkey", "control", "w0", "w1", "gateway"}
        moved = next(e for e in mesh.events if e["event"] == "port_moved")
        assert moved["message"].startswith(f"port {env['TRIMTAB_GATEWAY_HTTP'].split(':')[1]} is taken; ")

        async def by_grpc() -> int:
            async with Client(ready["gateway"]) as client:
                request = Request("", ready["greeting"]["model"], "hello", Sampling(max_tokens=3))
                return (await client.complete(request))[1].usage.completion_tokens

        assert asyncio.run(by_grpc()) == 3
        body = {"model": ready["greeting"]["model"], "prompt": "hello", "max_tokens": 3}
        answer = httpx.post(f"{ready['http']}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3

        mesh.joined("w0", "w1")
        assert mesh.verb("policy", "set", "batch.active=5", *APPLIED).returncode == 0
        assert mesh.verb("policy", "set", "batch.active=0").returncode == 4

        second = mesh.verb("up", "--engine", "simulated")
        assert second.returncode == 4
        assert f"is up already (pid {mesh.process.pid})" in second.stderr

        os.kill(ready["pids"]["w1"], signal.SIGKILL)
        died = mesh.until("died")
        assert (died["name"], died["how"]) == ("w1", "killed by SIGKILL")
        while mesh.until("process") != {"event": "process", "name": "w1", "state": "ready"} | {
            "seconds": mesh.events[-1]["seconds"]
        }:
            pass
        run_file = tmp_path / "default" / "run.json"
        assert run_file.stat().st_mode & 0o777 == 0o600
        assert json.loads(run_file.read_text())["pids"]["up"] == mesh.process.pid

        family = mesh.family()

        async def through_the_drain() -> int:
            """A stream that runs when the mesh is told to stop is finished."""
            async with Client(ready["gateway"]) as client:
                request = Request("", ready["greeting"]["model"], "hello", Sampling(max_tokens=60))
                async for event in client.generate(request):
                    if isinstance(event, Delta) and event.first_index == 0:
                        mesh.process.terminate()
                    if isinstance(event, Finish):
                        return event.usage.completion_tokens
            raise AssertionError("no finish")

        assert asyncio.run(through_the_drain()) == 60
        mesh.until("stopped")
        assert mesh.process.wait(timeout=GONE_WITHIN_S) == 0
        stopped = [e["name"] for e in mesh.events if e.get("state") == "stopped"]
        assert (stopped[0], stopped[-2:]) == ("gateway", ["control", "valkey"])
        assert gone(family)
        assert not run_file.exists()


def test_kill_9_of_the_supervisor_leaves_no_process_and_the_policy_survives(tmp_path: Path) -> None:
    env = environment(tmp_path)
    with up(env, "--no-prompt") as mesh:
        mesh.until("ready")
        mesh.joined("w0")
        changes = [f"{path}={typed}" for path, (typed, _) in ONE_OF_EACH_KIND.items()]
        done = mesh.verb("policy", "set", *changes, *APPLIED)
        assert done.returncode == 0, done.stderr
        family = mesh.family()
        mesh.process.kill()
        assert gone(family)
    # Nobody answers, or another mesh that happens to hold the default port.
    shown = mesh.verb("fleet")
    assert shown.returncode == 3 or str(tmp_path) not in shown.stdout, "a dead mesh's run.json counts for nothing"
    with up(env, "--no-prompt") as mesh:
        ready = mesh.until("ready")
        mesh.joined("w0")
        fields = json.loads(mesh.verb("policy", "get", "--json", "--node", "w0").stdout)["fields"]
        assert {path: fields[path]["value"] for path in ONE_OF_EACH_KIND} == {
            path: value for path, (_, value) in ONE_OF_EACH_KIND.items()
        }
        assert mesh.verb("policy", "set", "isolate.tenants=", *APPLIED).returncode == 0
        newest = json.loads(mesh.verb("policy", "history", "--json").stdout)[0]
        assert newest["changes"] == [
            {"field": "isolate.tenants", "scope": "", "before": ["acme", "globex"], "after": []}
        ]
        family = mesh.family()

        async def cut_by_the_second_signal() -> None:
            async with Client(ready["gateway"]) as client:
                request = Request("", "simulated", "hello", Sampling(max_tokens=10_000))
                async for event in client.generate(request):
                    if isinstance(event, Delta) and event.first_index == 0:
                        mesh.process.send_signal(signal.SIGINT)
                        mesh.until("stopping")
                        mesh.process.send_signal(signal.SIGINT)

        with pytest.raises(TrimtabError):
            asyncio.run(cut_by_the_second_signal())
        assert mesh.process.wait(timeout=GONE_WITHIN_S) == 1
        assert gone(family)


def test_a_process_that_cannot_start_ends_the_rest(tmp_path: Path) -> None:
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "traces").write_text("a file where a directory must be")
    with up(environment(tmp_path)) as mesh:
        assert mesh.process.stdout is not None
        lines = [json.loads(line) for line in mesh.process.stdout]
        assert mesh.process.wait(timeout=GONE_WITHIN_S) == 1
    error = next(line["error"] for line in lines if "error" in line)
    assert error["reason"] == "START_FAILED"
    assert error["name"] in ("control", "w0", "gateway")
    assert "FileExistsError" in "\n".join(error["tail"])
    assert lines[-1]["event"] == "stopped"
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(mesh.process.pid)
