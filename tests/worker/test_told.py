"""Settings that the control plane tells a worker: what is taken, what is kept, and what a start makes of it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from services.worker.commands import LEAVING, Commands
from services.worker.settings import WorkerSettings
from services.worker.told import BAD_SETTING, GIVEN_UP_S, BadSetting, Kept, Told, decoded
from trimtab.kit import config
from trimtab.kit.tls import TlsSettings
from trimtab.v1 import control_pb2
from trimtab.worker_settings import FIXED, TOLD, fault_of

FLAGS = {"engine": "simulated", "max_num_seqs": 8}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "told-w0.json"


def load(told: Mapping[str, str]) -> WorkerSettings:
    return config.load(WorkerSettings, "worker", flags=FLAGS, env={}, told=told)


def a_start(path: Path, *, serves: bool = True) -> tuple[WorkerSettings, Told]:
    told = Told(path, load)
    settings = told.begin()
    if serves:
        told.served()
    return settings, told


def test_what_both_planes_know_of_a_workers_settings_are_their_names() -> None:
    assert {f.name for f in fields(WorkerSettings)} == FIXED | TOLD
    assert not FIXED & TOLD
    assert {f.name for f in fields(TlsSettings)} <= FIXED


def test_a_name_that_is_none_can_only_be_taken_back() -> None:
    assert "did you mean worker.block_size?" in fault_of("worker.blok_size", "64")
    assert fault_of("worker.blok_size", "") == fault_of("worker.block_size", "64") == ""
    assert "who and where" in fault_of("worker.tls_key", "") and "begin with worker." in fault_of("control.redis", "x")


def test_what_was_told_holds_from_the_next_start_on_over_flags(path: Path) -> None:
    settings, told = a_start(path)
    assert (settings.max_num_seqs, told.in_force) == (8, {})
    told.tell({"worker.max_num_seqs": "32", "worker.block_size": "64"})
    assert told.in_force == {}, "this process runs on as it was"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    settings, told = a_start(path)
    assert (settings.max_num_seqs, settings.block_size) == (32, 64)
    assert told.in_force == {"worker.max_num_seqs": "32", "worker.block_size": "64"}
    told.tell({"worker.max_num_seqs": "", "worker.step_ms": "5"})
    settings, told = a_start(path)
    assert (settings.max_num_seqs, settings.block_size, settings.step_ms) == (8, 64, 5.0)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("worker.max_num_seq", "32", "did you mean max_num_seqs"),
        ("worker.max_num_seqs", "many", "must be a whole number"),
        ("worker.max_num_seqs", "0", "must be at least 1"),
        ("worker.node_id", "w9", "who and where"),
        ("worker.control", "evil:7071", "who and where"),
        ("worker.tls_key", "/tmp/key", "who and where"),
        ("worker.insecure", "true", "who and where"),
        ("gateway.http", "0.0.0.0:80", "only settings of the worker"),
        ("worker.model", "x" * 600, "at most 512"),
        ("worker.model", "a\nb", "printable"),
    ],
)
def test_what_is_no_setting_is_refused_and_nothing_is_kept(path: Path, name: str, value: str, words: str) -> None:
    _, told = a_start(path)
    with pytest.raises(BadSetting, match=words):
        told.tell({"worker.step_ms": "5", name: value})
    assert not path.exists()


def test_a_model_that_is_not_there_is_refused(path: Path, tmp_path: Path) -> None:
    _, told = a_start(path)
    with pytest.raises(BadSetting, match="there is no directory"):
        told.tell({"worker.engine": "vllm", "worker.model": str(tmp_path / "none")})
    told.tell({"worker.engine": "vllm", "worker.model": str(tmp_path)})


def test_the_third_start_after_two_that_did_not_serve_goes_without(path: Path) -> None:
    _, told = a_start(path)
    told.tell({"worker.max_num_seqs": "32"})
    for _ in range(2):
        settings, _ = a_start(path, serves=False)
        assert settings.max_num_seqs == 32
    for _ in range(2):
        settings, told = a_start(path)
        assert (settings.max_num_seqs, told.in_force) == (8, {}), "and so do those after it"
    told.tell({"worker.step_ms": "5"})
    settings, _ = a_start(path)
    assert (settings.max_num_seqs, settings.step_ms) == (8, 5.0), "what was left out is not built upon"


def test_the_third_start_goes_by_what_served_before_where_there_was_something(path: Path) -> None:
    _, told = a_start(path)
    told.tell({"worker.max_num_seqs": "32"})
    _, told = a_start(path)
    told.tell({"worker.step_ms": "5"})
    for _ in range(2):
        settings, _ = a_start(path, serves=False)
        assert (settings.max_num_seqs, settings.step_ms) == (32, 5.0)
    settings, told = a_start(path)
    assert (settings.max_num_seqs, settings.step_ms) == (32, 10.0)
    assert told.in_force == {"worker.max_num_seqs": "32"}
    assert a_start(path)[1].in_force == told.in_force, "what failed is forgotten"


def test_where_that_fails_too_the_fifth_start_goes_without(path: Path) -> None:
    _, told = a_start(path)
    told.tell({"worker.max_num_seqs": "32"})
    _, told = a_start(path)
    told.tell({"worker.step_ms": "5"})
    starts = [a_start(path, serves=False)[0] for _ in range(5)]
    assert [(s.max_num_seqs, s.step_ms) for s in starts] == [(32, 5.0)] * 2 + [(32, 10.0)] * 2 + [(8, 10.0)]


def test_what_has_served_gets_four_starts_and_is_not_left_out_after_two(path: Path) -> None:
    _, told = a_start(path)
    told.tell({"worker.max_num_seqs": "32"})
    a_start(path)
    starts = [a_start(path, serves=False)[0].max_num_seqs for _ in range(5)]
    assert starts == [32, 32, 32, 32, 8]


def test_a_start_that_ends_for_another_reason_does_not_count(path: Path) -> None:
    _, told = a_start(path)
    told.tell({"worker.max_num_seqs": "32"})
    a_start(path, serves=False)
    for _ in range(6):
        settings, told = a_start(path, serves=False)
        assert settings.max_num_seqs == 32
        told.spare()
        told.spare()
        assert decoded(path.read_bytes()).failed == 1
    _, told = a_start(path)
    told.spare()
    assert decoded(path.read_bytes()) == Kept({"max_num_seqs": "32"}, 0, {"max_num_seqs": "32"}), "it has served"


SLOW = """
import asyncio, pathlib, sys, uvloop
from services.worker.settings import WorkerSettings
from services.worker.told import Told
from trimtab.kit import config
from trimtab.kit.tls import TlsSettings
load = lambda told: config.load(WorkerSettings, "worker", flags={"engine": "simulated"}, env={}, told=told)
ages = iter((0.0, float(sys.argv[2])))
told = Told(pathlib.Path(sys.argv[1]), load, clock=lambda: next(ages))
told.mind_signals()
told.begin()

async def start():
    print("it starts", flush=True)
    await asyncio.sleep(3600)

uvloop.run(start())
"""
"""A worker whose engine takes its time; its second look at the clock is at the signal."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("age_s", "failed"), [(5.0, 0), (GIVEN_UP_S, 1)])
def test_a_signal_soon_after_the_begin_is_no_failure_and_ends_the_process(
    path: Path, number: signal.Signals, age_s: float, failed: int
) -> None:
    a_start(path)[1].tell({"worker.max_num_seqs": "32"})
    command = [sys.executable, "-c", SLOW, str(path), str(age_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "it starts\n"
        assert decoded(path.read_bytes()).failed == 1
        process.send_signal(number)
        assert process.wait(60) == -number
    assert decoded(path.read_bytes()) == Kept({"max_num_seqs": "32"}, failed)


def worker_ends(tmp_path: Path, *flags: str) -> int:
    """The exit code of a whole worker that can't come to serve."""
    env = {**os.environ, "TRIMTAB_STATE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "services.worker", "--engine", "simulated", "--node-id", "w0", *flags]
    return subprocess.run(command, env=env, capture_output=True, timeout=120).returncode


@pytest.mark.slow
def test_a_port_that_is_taken_and_a_bad_certificate_are_no_failure_of_what_was_told(tmp_path: Path) -> None:
    path = tmp_path / "default" / "told-w0.json"
    path.parent.mkdir()
    path.write_bytes(Kept({"max_num_seqs": "32"}).encoded())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert worker_ends(tmp_path, "--listen", address) == 2
        assert worker_ends(tmp_path, "--listen", "127.0.0.1:0", "--metrics", address) == 2
    missing = str(tmp_path / "none.pem")
    tls = ("--tls-cert", missing, "--tls-key", missing, "--tls-ca", missing)
    assert worker_ends(tmp_path, "--listen", "127.0.0.1:0", *tls) == 2
    assert decoded(path.read_bytes()).failed == 0


def test_a_setting_that_the_engine_does_not_start_with_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "default" / "told-w0.json"
    path.parent.mkdir()
    path.write_bytes(Kept({"block_size": "20"}).encoded())
    assert worker_ends(tmp_path, "--listen", "127.0.0.1:0") == 3
    assert decoded(path.read_bytes()).failed == 1


def test_a_start_that_served_counts_anew(path: Path) -> None:
    _, told = a_start(path)
    told.tell({"worker.max_num_seqs": "32"})
    for serves in (False, True, False, True, False):
        settings, _ = a_start(path, serves=serves)
        assert settings.max_num_seqs == 32
    assert decoded(path.read_bytes()).failed == 1


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"settings": {"a": 1}, "failed": 0, "good": {}}', b'{"settings": {}}', b"\xff"]
)
def test_a_file_that_can_not_be_read_is_no_reason_not_to_start(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    settings, told = a_start(path)
    assert (settings.max_num_seqs, told.in_force) == (8, {})
    told.tell({"worker.max_num_seqs": "32"})
    assert a_start(path)[0].max_num_seqs == 32


def test_what_a_newer_build_was_told_is_left_out_where_it_is_no_setting_here(path: Path) -> None:
    path.write_bytes(b'{"settings": {"of_tomorrow": "1"}, "failed": 0, "good": {}}')
    settings, told = a_start(path)
    assert (settings.max_num_seqs, told.in_force) == (8, {})


class Drained:
    """What a worker was told."""

    def __init__(self, path: Path, *, obeys: bool = True) -> None:
        self.calls: list[tuple[float, bool]] = []
        self.obeys = obeys
        self.commands = Commands(steering=None)  # type: ignore[arg-type]
        self.commands.drain_by = self._drain
        self.commands.told = a_start(path)[1]

    def _drain(self, deadline_s: float, restart: bool) -> bool:
        self.calls.append((deadline_s, restart))
        return self.obeys

    async def told(self, *, restart: bool, **settings: str) -> control_pb2.CommandResult:
        command = control_pb2.Command(command_id="c1")
        command.drain.deadline_ms, command.drain.restart = 1500, restart
        command.drain.settings.update({f"worker.{name}": value for name, value in settings.items()})
        result = await self.commands.obey(command)
        assert result is not None
        return result


async def test_a_drain_keeps_what_it_says_before_it_begins(path: Path) -> None:
    worker = Drained(path)
    assert (await worker.told(restart=True, max_num_seqs="32")).ok
    assert worker.calls == [(1.5, True)]
    assert a_start(path)[0].max_num_seqs == 32


async def test_a_drain_with_a_bad_setting_does_nothing_at_all(path: Path) -> None:
    worker = Drained(path)
    result = await worker.told(restart=True, max_num_seqs="-1")
    assert (result.ok, result.reason, worker.calls) == (False, BAD_SETTING, [])
    result = await worker.told(restart=False, max_num_seqs="32")
    assert (result.ok, result.reason, worker.calls) == (False, BAD_SETTING, [])
    assert a_start(path)[0].max_num_seqs == 8


async def test_one_that_leaves_for_good_keeps_nothing(path: Path) -> None:
    worker = Drained(path, obeys=False)
    result = await worker.told(restart=True, max_num_seqs="32")
    assert (result.ok, result.reason) == (False, LEAVING)
    assert a_start(path)[0].max_num_seqs == 8
