"""A port that somebody else holds is told before the engine's long start, whichever it is."""

import asyncio
import socket

import pytest

from services.worker import __main__ as main
from services.worker.settings import WorkerSettings
from trimtab.kit import rpc


@pytest.mark.parametrize("which", ["listen", "metrics"])
def test_a_taken_port_is_known_before_the_engine_is_made(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: WorkerSettings) -> None:
        raise AssertionError("the engine was begun")

    monkeypatch.setattr(main, "build_engine", build)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ports = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0"} | {which: address}
        with pytest.raises(rpc.PortTaken, match=f"can't listen on {address}: .* holds the port"):
            asyncio.run(main.serve(WorkerSettings(engine="simulated", **ports)))
