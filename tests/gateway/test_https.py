"""The HTTP door with TLS: open to every client of the authority's servers, or to those alone who show a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from services.gateway.http_server import HttpServer
from tests.certificates import Authority
from trimtab.kit.tls import Tls

PATIENCE_S = 30.0


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text=request.path)


@contextlib.asynccontextmanager
async def a_door(tls: Tls, *, clients_need_one: bool) -> AsyncIterator[str]:
    server = HttpServer(answer, "127.0.0.1:0", max_body_bytes=1000, tls=tls, clients_need_one=clients_need_one)
    await server.start()
    try:
        yield f"https://127.0.0.1:{server.port}"
    finally:
        await server.stop()


async def status(url: str, ca: Path, mine: Tls | None = None) -> int:
    context = ssl.create_default_context(cafile=str(ca))
    if mine is not None:
        context.load_cert_chain(mine.cert, mine.key)
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as got:
        return got.status


@pytest.mark.parametrize(("needed", "without"), [(False, 200), (True, 401)])
async def test_clients_show_a_certificate_where_they_need_one(tmp_path: Path, needed: bool, without: int) -> None:
    (tmp_path / "other").mkdir()
    ca, other = Authority(tmp_path), Authority(tmp_path / "other")
    async with a_door(ca.issue("gateway", "g0", hosts=("127.0.0.1",)), clients_need_one=needed) as url:
        assert await status(f"{url}/v1/models", ca.ca) == without
        assert await status(f"{url}/v1/models", ca.ca, ca.issue("viewer", "bob")) == 200
        assert await status(f"{url}/health", ca.ca) == await status(f"{url}/metrics", ca.ca) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(f"{url}/health", other.ca)
        if needed:
            with pytest.raises((aiohttp.ClientError, ssl.SSLError, OSError)):
                await status(f"{url}/v1/models", ca.ca, other.issue("viewer", "bob"))


async def test_a_certificate_is_renewed_and_one_that_is_half_written_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.kit.tls.RENEW_S", 0.01)
    ca = Authority(tmp_path)
    tls = ca.issue("gateway", "g0", hosts=("127.0.0.1",), into="door")
    with capture_logs() as said:
        async with a_door(tls, clients_need_one=False) as url:
            tls.key.write_bytes(b"half")
            async with asyncio.timeout(PATIENCE_S):
                while not said:
                    await asyncio.sleep(0.01)
                assert await status(f"{url}/health", ca.ca) == 200
                ca.issue("gateway", "g0", hosts=("localhost",), into="door")
                while True:
                    try:
                        assert await status(url.replace("127.0.0.1", "localhost"), ca.ca) == 200
                        break
                    except aiohttp.ClientConnectorCertificateError:
                        await asyncio.sleep(0.01)
    assert "the last good one holds" in said[0]["event"]
