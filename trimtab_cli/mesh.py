"""A mesh on this machine, around its processes: settings, the claim that no other `up` runs it, model, run file."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from controlplane.settings import ControlSettings
from services.gateway.settings import GatewaySettings
from services.worker.settings import WorkerSettings
from trimtab.kit import run_file
from trimtab.kit.config import ConfigError, find_file, load, options
from trimtab.kit.process import state_dir
from trimtab.kit.tls import check_own, tls_of
from trimtab_cli.plan import Plan, Sections
from trimtab_cli.settings import UpSettings

OURS = ("node_id", "mesh", "listen", "metrics", "control", "parent_pid")
"""Worker settings that differ from worker to worker, or that hold the mesh together."""


GATEWAY = "g0"
"""What `up` calls its gateway."""
HANDED_ON = ("engine", "model", "max_num_seqs")
"""Settings of `up` that are every worker's."""


class AlreadyUp(Exception):
    """Another `trimtab up` runs this mesh; the message says where."""


class NoStateDirectory(Exception):
    """The mesh's state directory cannot be made; the message says what to do."""


class ModelMissing(Exception):
    """The model cannot be had; the message says what to do."""


def load_sections(path: str | None, flags: Mapping[str, Any], extra: tuple[str, ...]) -> Sections:
    """Every section that the mesh's processes will read. ConfigError lists the faults of all of them at once."""
    file = find_file(path)
    found: dict[str, None] = {}
    worker_flags = _worker_flags(extra)

    def section(cls: type[Any], name: str, given: Mapping[str, Any]) -> Any:
        try:
            return load(cls, name, flags=given, file=file)
        except ConfigError as e:
            found.update(dict.fromkeys(e.faults))
            return None

    up = section(UpSettings, "up", flags)
    # Where `up` itself is at fault, the flags as typed still show what a worker would say to them.
    own = {name: getattr(up, name) if up is not None else flags.get(name) for name in HANDED_ON}
    worker_flags = {name: value for name, value in own.items() if value not in (None, "")} | worker_flags
    worker = section(WorkerSettings, "worker", worker_flags)
    gateway = section(GatewaySettings, "gateway", {})
    control = section(ControlSettings, "control", {})
    if not found:
        found.update(dict.fromkeys(_tls_faults(up, worker, gateway, control)))
    if found:
        raise ConfigError(list(found))
    return Sections(up, worker, gateway, control, worker_flags, path)


def _tls_faults(
    up: UpSettings, worker: WorkerSettings, gateway: GatewaySettings, control: ControlSettings
) -> Iterator[str]:
    """What would keep these processes from talking to each other."""
    parts = {"worker": worker, "gateway": gateway, "control": control}
    plain = [name for name, settings in parts.items() if not settings.tls_cert]
    if 0 < len(plain) < len(parts):
        yield f"[{'] and ['.join(plain)}] without tls_ca, tls_cert and tls_key: either all parts of a mesh speak TLS, or none"
        return
    names = [("control", ""), ("gateway", GATEWAY), *(("worker", f"w{i}") for i in range(up.workers))]
    for kind, name in names:
        try:
            check_own(kind, name, tls_of(parts[kind], up.mesh))
        except ConfigError as e:
            yield from e.faults


def _worker_flags(extra: tuple[str, ...]) -> dict[str, Any]:
    """What stands after `--`, read as a worker reads it; a fault is click's own usage error."""

    @click.command("worker", add_help_option=False)
    @options(WorkerSettings)
    def reader(**_: Any) -> None:
        """Never called."""

    with reader.make_context("trimtab up --", list(extra)) as context:
        given = {name: value for name, value in context.params.items() if value is not None}
        if taken := [name for name in OURS if name in given]:
            context.fail(f"--{taken[0].replace('_', '-')} is what `up` decides for each worker; leave it out")
        return given


def state_directory(mesh: str) -> Path:
    """The mesh's state directory, made."""
    try:
        return state_dir(mesh)
    except OSError as e:
        raise NoStateDirectory(f"cannot make the state directory: {e}; set TRIMTAB_STATE_DIR to another place") from e


@contextlib.contextmanager
def claimed(mesh: str) -> Iterator[None]:
    """Hold the mesh for the life of this process, however it ends; AlreadyUp when another one does."""
    with (state_dir(mesh) / "up.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyUp(_where(mesh)) from None
        yield


def _where(mesh: str) -> str:
    run = run_file.read(mesh)
    if run is None:
        return f"another `trimtab up` is starting or stopping mesh {mesh}; wait for it, or choose another --mesh"
    return (
        f"mesh {mesh} is up already (pid {run.pids.get(run_file.SUPERVISOR)}): gRPC {run.gateway}, "
        f"OpenAI http://{run.http}/v1, control {run.control}; stop it first, or choose another --mesh"
    )


class Record:
    """The mesh's run.json, from when it has answered to its end."""

    def __init__(self, mesh: str, plan: Plan) -> None:
        self._run = run_file.RunFile(
            mesh=mesh,
            gateway=plan.gateway,
            http=plan.http,
            control=plan.control,
            started_unix_ms=int(time.time() * 1000),
            directory=str(state_dir(mesh)),
        )

    def write(self, pids: Mapping[str, int]) -> None:
        self._run = dataclasses.replace(self._run, pids={run_file.SUPERVISOR: os.getpid(), **pids})
        self._run.write()

    def remove(self) -> None:
        self._run.remove()


async def fetch_model(worker: WorkerSettings) -> None:
    """Have the model in the cache before workers start, once for all of them; its own progress goes to stderr."""
    if worker.engine != "vllm":
        return
    from services.worker import model

    source = model.KNOWN.get(worker.model.lower())
    if source is None:
        try:
            model.resolve(worker.model)
        except model.ModelError as e:
            raise ModelMissing(str(e)) from e
        return
    if model.fault(source.directory) is None:
        return
    command = [sys.executable, "-m", "services.worker.model", "fetch", worker.model]
    tether = [sys.executable, "-m", "trimtab_cli.tether", str(os.getpid()), "--"]
    fetch = await asyncio.create_subprocess_exec(
        *tether, *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = await fetch.wait()
    except asyncio.CancelledError:
        fetch.terminate()
        await fetch.wait()
        raise
    if code != 0:
        raise ModelMissing("the default model could not be prepared; what stands above says why")
