"""`run.json`: where a running `trimtab up` is, so that the other verbs find it without being told.

One file for each mesh, in its state directory, readable by its user only. It counts only while the process that wrote it lives: after a
crash nobody is sent to addresses that somebody else may have taken since.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.kit.process import state_dir, write_atomically

NAME = "run.json"
SUPERVISOR = "up"
"""The name in `pids` of the process that wrote the file."""
DEFAULT_MESH = "default"
DEFAULT_CONTROL = "127.0.0.1:7071"
DEFAULT_GATEWAY = "127.0.0.1:7070"


@dataclass(frozen=True, slots=True)
class RunFile:
    """A running mesh. Addresses are host:port; `http` is the gateway's OpenAI door; `control` has one for each replica, with commas between
    them; `directory` is where its logs and traces are."""

    mesh: str
    gateway: str
    http: str
    control: str
    started_unix_ms: int
    directory: str
    pids: Mapping[str, int] = field(default_factory=dict)

    def write(self) -> Path:
        """Replaces the mesh's file, whole."""
        path = state_dir(self.mesh) / NAME
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=2).encode())
        return path

    def remove(self) -> None:
        """Unless another `up` of the same mesh has written it since."""
        held = _parse(state_dir(self.mesh) / NAME)
        if held is not None and held.pids.get(SUPERVISOR) == self.pids.get(SUPERVISOR):
            (state_dir(self.mesh) / NAME).unlink(missing_ok=True)

    @property
    def alive(self) -> bool:
        """Whether the supervisor still runs; a process that began after the file was written has only inherited its number."""
        import psutil

        try:
            born_s: float = psutil.Process(self.pids.get(SUPERVISOR, -1)).create_time()
        except (psutil.Error, ValueError):
            return False
        # Both stamps are wall clock; a second of slack covers their rounding.
        return born_s * 1000 <= self.started_unix_ms + 1000


def read(mesh: str) -> RunFile | None:
    """The running mesh of this name; None when there is none."""
    run = _parse(state_dir(mesh) / NAME)
    return run if run is not None and run.alive else None


def running() -> RunFile | None:
    """The mesh `default` if it runs, else the only one that does; None where that leaves a choice."""
    run = read(DEFAULT_MESH)
    if run is not None:
        return run
    found = [r for path in sorted(state_dir(DEFAULT_MESH).parent.glob(f"*/{NAME}")) if (r := _parse(path)) and r.alive]
    return found[0] if len(found) == 1 else None


def _parse(path: Path) -> RunFile | None:
    """None for a file that is not there, or that another version wrote in another shape."""
    try:
        return RunFile(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def control_address(flag: str | None) -> str:
    """Where the control plane is: the flag, else TRIMTAB_CONTROL, else the running mesh's, else the default port here. Several addresses have
    commas between them; they are replicas of one control plane."""
    found = flag or os.environ.get("TRIMTAB_CONTROL")
    if found:
        return found
    run = running()
    return run.control if run else DEFAULT_CONTROL


def gateway_address(flag: str | None) -> str:
    """Where the gateway's gRPC is: the flag, else TRIMTAB_GATEWAY, else the running mesh's, else the default port here."""
    found = flag or os.environ.get("TRIMTAB_GATEWAY")
    if found:
        return found
    run = running()
    return run.gateway if run else DEFAULT_GATEWAY
