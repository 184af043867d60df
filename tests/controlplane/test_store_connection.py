"""What becomes of a store's answer that is none, on the event loop that the control plane runs on."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from controlplane.store.connection import Connection
from trimtab.errors import StoreUnavailable


async def write_to_what_was_reset() -> None:
    """As redis-py writes when the store goes away between connecting and the first command."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.transport.abort()
    server.close()
    await writer.wait_closed()
    writer.writelines([b"PING\r\n"])


async def ask(answer) -> tuple[Connection, BaseException | None]:  # type: ignore[no-untyped-def]
    at = Connection("redis://127.0.0.1:1/0", block_s=1.0)
    try:
        await at.ask(answer)
    except Exception as e:
        return at, e
    finally:
        await at.close()
    return at, None


def test_a_store_that_resets_a_connection_that_was_just_made_is_away_and_ends_nothing() -> None:
    with pytest.raises(RuntimeError, match="the handler is closed"):
        uvloop.run(write_to_what_was_reset())
    at, error = uvloop.run(ask(write_to_what_was_reset()))
    assert isinstance(error, StoreUnavailable)
    assert "the connection was reset" in error.message
    assert not at.state.connected


def test_any_other_error_of_a_program_is_not_taken_for_a_store_that_is_away() -> None:
    async def broken() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    _, error = uvloop.run(ask(broken()))
    assert type(error) is RuntimeError
