"""`trimtab up` with the simulated engine, as processes of its own: started by a test, and gone with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trimtab.kit.process import free_port

GONE_WITHIN_S = 30.0
JOINED_WITHIN_S = 30.0
APPLIED = ("--wait", "20000")
"""For `policy set`: a worker's answer may take its time on a machine that is busy."""


@dataclass
class Mesh:
    """One running `trimtab up --json`."""

    process: subprocess.Popen[str]
    env: dict[str, str]
    events: list[dict[str, Any]]

    def until(self, event: str) -> dict[str, Any]:
        """The next event of this kind; pytest's timeout bounds the wait."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1].get("event") == event:
                return self.events[-1]
        raise AssertionError(f"`up` ended without {event}: {self.events[-3:]}")

    def verb(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trimtab_cli", *args],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def joined(self, *workers: str) -> None:
        """Wait until the control plane has them: a worker may answer a little before it has joined."""
        deadline = time.monotonic() + JOINED_WITHIN_S
        while True:
            fleet = self.verb("fleet", "--json")
            assert fleet.returncode == 0, fleet.stderr
            known = {n["node_id"] for n in json.loads(fleet.stdout)["nodes"] if n["connected"]}
            if set(workers) <= known:
                return
            assert time.monotonic() < deadline, f"of {workers} only {known} have joined"
            time.sleep(0.2)

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]


def environment(state: Path) -> dict[str, str]:
    """Its own state and ports, so that it meets no other mesh on this machine."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRIMTAB_")}
    ports = {
        name: f"127.0.0.1:{free_port()}"
        for name in ("GATEWAY_LISTEN", "GATEWAY_HTTP", "CONTROL_LISTEN", "CONTROL_METRICS", "WORKER_LISTEN")
    }
    ports["WORKER_METRICS"] = f"127.0.0.1:{free_port()}"
    return {**env, "TRIMTAB_STATE_DIR": str(state), **{f"TRIMTAB_{k}": v for k, v in ports.items()}}


@contextmanager
def up(env: dict[str, str], *args: str) -> Iterator[Mesh]:
    """Started without a terminal and with stdin closed."""
    command = [sys.executable, "-m", "trimtab_cli", "up", "--engine", "simulated", "--json", *args]
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    mesh = Mesh(process, env, [])
    try:
        yield mesh
    finally:
        if process.poll() is None:
            family = mesh.family()
            process.kill()
            psutil.wait_procs(family, timeout=GONE_WITHIN_S)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def gone(family: list[psutil.Process]) -> bool:
    return psutil.wait_procs(family, timeout=GONE_WITHIN_S)[1] == []
