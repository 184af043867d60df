"""The one process that answers all arms: a worker with vLLM inside, and a control plane that switches its policy.

Policy goes the way that a person's change goes, by `trimtab policy set`, and is in force when the worker has said so. Counts come from the
board that the engine process writes in shared memory: reading it costs the engine nothing, and tells the end of each step.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.bench.arms import MODEL
from services.bench.mixed.sources import Send, grpc_send
from services.bench.processes import BenchError, Child, Processes, grpc_serving
from services.bench.start import START_S, Shape
from services.bench.steering import Steering
from services.worker.engines.board import Board
from trimtab.client import Client
from trimtab.kit.process import free_port


class RealEngine:
    """See `block.Engine`."""

    def __init__(self, processes: Processes, steering: Steering, client: Client, board: Board) -> None:
        self.send: Send = grpc_send(client, MODEL)
        self.steer = steering.steer
        self.check = processes.check
        self.cpu_s = processes.cpu_s
        self._board = board

    def counts(self) -> Mapping[str, float]:
        row = self._board.read()
        newest = {"steps": row.step_no, "computed_tokens": row.computed_tokens, "hook_us": row.hook_us}
        return {**self._board.read_stats(), **newest, "running": row.running, "waiting": row.waiting}


async def start_worker(processes: Processes, shape: Shape) -> tuple[str, Steering, Child]:
    """A control plane and one worker with vLLM: the worker's address, its steering and its process. Nothing is stored beyond the run."""
    return await start(processes, shape.worker_flags(), shape.environment())


async def start(
    processes: Processes, flags: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, Steering, Child]:
    """The same, with these flags for the worker."""
    here = {name: f"127.0.0.1:{free_port()}" for name in ("control", "metrics", "worker", "worker-metrics")}
    common = ["--mesh", "bench", "--parent-pid", str(os.getpid())]
    control = ["--listen", here["control"], "--metrics", here["metrics"], "--redis", "memory://"]
    worker = ["--listen", here["worker"], "--metrics", here["worker-metrics"], "--served-model-name", MODEL]
    await processes.start("control", ["-m", "controlplane", *common, *control])
    argv = ["-m", "services.worker", *common, *worker, "--control", here["control"], *flags]
    child = await processes.start("worker", argv, environment)
    await child.ready(lambda: grpc_serving(here["worker"]), START_S)
    steering = Steering(processes, here["control"])
    await steering.connected()
    return here["worker"], steering, child


@asynccontextmanager
async def real_engine(directory: Path, shape: Shape) -> AsyncIterator[RealEngine]:
    """Up, with its processes; all ended on leaving."""
    async with Processes(directory) as processes:
        address, steering, child = await start_worker(processes, shape)
        board = Board(board_of(child.process.pid))
        async with Client(address) as client:
            yield RealEngine(processes, steering, client, board)


def board_of(pid: int) -> Path:
    """The board that the worker of this pid made."""
    for directory in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        found = next(directory.glob(f"trimtab-{pid}-*"), None)
        if found is not None:
            return found
    raise BenchError(f"the worker (pid {pid}) has no board in shared memory to read its engine's counts from")
