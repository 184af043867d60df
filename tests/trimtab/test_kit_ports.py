"""Ports for processes that are still to start."""

import multiprocessing
import socket
import tempfile
from pathlib import Path

import pytest

from trimtab.kit import process

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def few() -> list[int]:
    return [process.free_port() for _ in range(5)]


def test_a_free_port_is_none_that_an_outgoing_connection_may_get() -> None:
    low, high = map(int, OUTGOING.read_text().split())
    if low < process.END_PORT:
        pytest.skip("this machine's kernel gives nearly every port to whoever asks")
    ports = [process.free_port() for _ in range(50)]
    assert len(set(ports)) == 50, "nobody gets again what nobody has taken yet"
    assert not [p for p in ports if low <= p <= high]


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    first = process.free_port()
    with socket.create_server(("127.0.0.1", first + process.PORTS_STRIDE)):
        assert process.free_port() != first + process.PORTS_STRIDE


def test_no_two_processes_get_a_port() -> None:
    mine = set(few())
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        others = pool.map(_few, range(2), chunksize=1)
    blocks = {p // process.PORTS_BLOCK for p in mine}
    assert not [p for p in others[0] + others[1] if p // process.PORTS_BLOCK in blocks]


def _few(_: int) -> list[int]:
    return few()


def test_where_all_blocks_are_taken_the_kernel_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "FIRST_PORT", process.END_PORT)
    monkeypatch.setattr(process, "_ports", [])
    one, other = process.free_port(), process.free_port()
    assert one != other and process.port_is_free(one)
