"""The file of answers: whole lines, whatever happens."""

from __future__ import annotations

import asyncio
import errno
import json
import os

import pytest

from services.batch.results import NotOurs, Results


def a_line(custom_id: str, text: str = "x") -> bytes:
    members = {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": {"body": text}, "error": None}
    return json.dumps(members).encode() + b"\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


async def test_what_is_added_is_there_at_once_and_known_to_the_next(path):
    with Results(path) as results:
        await results.add(a_line("a"))
        assert path.read_bytes() == a_line("a")
        await results.add(a_line("b"))
    with Results(path) as results:
        assert results.done == {"a", "b"}


async def test_lines_that_come_together_share_a_write(path, monkeypatch):
    synced = 0
    sync = os.fsync

    def counted(fd):
        nonlocal synced
        synced += 1
        sync(fd)

    with Results(path) as results:
        monkeypatch.setattr(os, "fsync", counted)
        await asyncio.gather(*(results.add(a_line(str(i))) for i in range(50)))
    assert sorted(path.read_bytes().splitlines(True)) == sorted(a_line(str(i)) for i in range(50))
    assert 1 <= synced <= 3


@pytest.mark.parametrize("cut", range(1, len(a_line("b"))))
def test_a_torn_last_line_is_cut_off(path, cut):
    path.write_bytes(a_line("a") + a_line("b")[:cut])
    with Results(path) as results:
        assert results.done == {"a"}
    assert path.read_bytes() == a_line("a")


@pytest.mark.parametrize("content", [b"notes of mine", b"{}\n", b'{"custom_id": "a"}\n', a_line("a") + b"\x00\n"])
def test_a_file_that_is_none_of_ours_is_left_alone(path, content):
    path.write_bytes(content)
    with pytest.raises(NotOurs):
        Results(path)
    assert path.read_bytes() == content


def test_two_do_not_write_one_file(path):
    with Results(path), pytest.raises(NotOurs, match="another process is writing"):
        Results(path)
    Results(path).__exit__(None, None, None)


def test_a_file_that_can_not_be_gone_on_with_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotOurs, match="no regular file"):
        Results(tmp_path / "pipe")


async def test_a_full_disk_leaves_whole_lines(path, monkeypatch):
    write = os.write

    def half(fd, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: len(data) // 2])

    with Results(path) as results:
        await results.add(a_line("a"))
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            await results.add(a_line("b"))
        monkeypatch.setattr(os, "write", write)
        await results.add(a_line("c"))
    assert path.read_bytes() == a_line("a") + a_line("c")


async def test_one_that_is_cancelled_does_not_let_the_next_into_its_line(path, monkeypatch):
    """The write in its thread is waited for."""
    write, entered, go = os.write, asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(fd, data):
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        return write(fd, data)

    with Results(path) as results:
        monkeypatch.setattr(os, "write", slow)
        first = asyncio.create_task(results.add(a_line("a", "long" * 1000)))
        await entered.wait()
        first.cancel()
        second = asyncio.create_task(results.add(a_line("b")))
        await asyncio.sleep(0)
        go.set()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
    assert path.read_bytes() == a_line("a", "long" * 1000) + a_line("b")
