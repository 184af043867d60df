"""A worker that listens everywhere says where gateways reach it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.controlplane.mesh import a_mesh
from trimtab.kit.process import free_port

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("said", [True, False], ids=["told", "not told"])
async def test_gateways_are_told_the_address_that_is_advertised(
    said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    port = free_port()
    advertised = f"127.0.0.1:{port}"
    async with a_mesh() as mesh:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.worker", "--engine", "simulated", "--node-id", "w0", "--insecure",
            "--listen", f"0.0.0.0:{port}", "--metrics", f"127.0.0.1:{free_port()}", "--control", mesh.address,
            *(("--advertise", advertised) if said else ()),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            members = await mesh.until(lambda found: "w0" in found)
            assert members["w0"].hello.address == (advertised if said else f"0.0.0.0:{port}")
        finally:
            process.terminate()
            async with asyncio.timeout(60):
                out, _ = await process.communicate()
        assert ("set advertise" in out.decode()) is not said
