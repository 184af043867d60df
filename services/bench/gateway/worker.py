"""A worker whose simulated engine writes down when each token was made: `python -m services.bench.gateway.worker`, with a worker's options.

The clock is the machine's monotonic one, so the load generator can say how long each token took to it. Per step it costs one write of eight
bytes, per request one line; both are the same whoever is in front of the worker.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from services.worker import __main__ as worker
from services.worker.engines import Output, simulated

STAMPS_ENV = "BENCH_GATEWAY_STAMPS"
"""Directory for the two files below."""
STEPS, FIRSTS = "steps.bin", "firsts.txt"
STAMP = struct.Struct("<d")


class Stamped(simulated.SimulatedEngine):
    """`steps.bin` has the seconds at which each step that gave tokens ended; `firsts.txt` the step of each request's first token.

    A request gets a token in every step from then on; one that does not has its line again, with `!`.
    """

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        directory = Path(os.environ[STAMPS_ENV])
        self._steps = (directory / STEPS).open("wb", buffering=0)
        self._firsts = (directory / FIRSTS).open("w", buffering=1)
        self._step, self._ended = -1, 0.0
        self._base: dict[str, int] = {}

    def _output(self, live: Any, index: int, last: bool, now: float) -> Output:
        if now != self._ended:
            self._step, self._ended = self._step + 1, now
            self._steps.write(STAMP.pack(now))
        request_id = live.job.request_id.rpartition("/")[0]  # the worker's serving adds a number to it
        if index == 0:
            self._base[request_id] = self._step
            self._firsts.write(f"{request_id} {self._step}\n")
        elif self._base.get(request_id) != self._step - index:
            self._firsts.write(f"{request_id} !\n")
        return super()._output(live, index, last, now)


if __name__ == "__main__":
    setattr(simulated, "SimulatedEngine", Stamped)  # noqa: B010 - a name of that module, not this one's class
    worker.main()
