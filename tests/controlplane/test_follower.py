"""`trimtab scale follow`: real commands against a control plane that says what it is told to, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane import follower as following
from controlplane.admin.client import AdminClient
from controlplane.follower import BadBook, Book, Commands, Follower, only_one, path_of
from tests.controlplane.scales import FakeControl, a_control
from trimtab.errors import StoreUnavailable

INTERVAL_S = 5.0
PATIENCE_S = 60.0


class Machine:
    """Where instances are started: START and STOP write into a file what they were called for."""

    def __init__(self, directory: Path, control: FakeControl) -> None:
        self.directory = directory
        self.control = control
        self.now = 1000.0
        self.calls = directory / "calls"
        self.calls.touch()
        self.start = self._command("start")
        self.stop = self._command("stop")
        self.path = path_of(directory, "default")

    def _command(self, what: str) -> str:
        """Fails while a file of that name is there, with what stands in it."""
        fails = self.directory / f"{what}-fails"
        script = f'test -e {fails} && exit "$(cat {fails})"; echo {what} {{n}} $TRIMTAB_SCALE_N >> {self.calls}'
        return f"/bin/sh -c '{script}'"

    def fail(self, what: str, code: int | None) -> None:
        path = self.directory / f"{what}-fails"
        path.unlink() if code is None else path.write_text(str(code))

    def follower(self, most: int | None = None, joins_s: float = following.JOINS_S) -> Follower:
        commands, book = Commands(self.start, self.stop, "box-w{n}"), Book(self.path)
        clock = lambda: self.now  # noqa: E731
        return Follower("default", commands, book, min_interval_s=INTERVAL_S, joins_s=joins_s, most=most, clock=clock)

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()

    @property
    def written(self) -> list[int]:
        numbers: list[int] = json.loads(self.path.read_text())["instances"]
        return numbers

    async def looks(self, it: Follower, admin: AdminClient, times: int = 1) -> None:
        """So many, each after the interval."""
        for _ in range(times):
            self.now += INTERVAL_S
            await it.look(admin)

    def joined(self, *names: str) -> None:
        self.control.workers = dict.fromkeys(names, "default")


async def test_it_starts_what_is_missing_and_stops_what_is_too_many(tmp_path: Path) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        it = machine.follower()
        control.wanted = 2
        machine.joined("box-w1")
        await machine.looks(it, admin)
        assert (machine.called, machine.written) == (["start 0 0"], [0]), (
            "somebody else's box-w1 counts, and keeps its name"
        )
        await machine.looks(it, admin, 3)
        assert machine.called == ["start 0 0"], "one that starts counts"
        machine.joined("box-w0", "box-w1")
        control.wanted = 3
        await machine.looks(it, admin, 2)
        assert (machine.called, machine.written) == (["start 0 0", "start 2 2"], [0, 2])
        machine.joined("box-w0", "box-w1", "box-w2")
        control.wanted, control.surplus = 2, ("box-w1",)
        await machine.looks(it, admin, 2)
        assert len(machine.called) == 2, "what others started is theirs"
        control.surplus = ("box-w2",)
        await machine.looks(it, admin)
        assert (machine.called[2:], machine.written) == (["stop 2 2"], [0])


async def test_of_so_many_instances_it_starts_no_others_and_ends_those_that_somebody_else_started(
    tmp_path: Path,
) -> None:
    """As for the workers of a machine's GPUs, which systemd starts at boot."""
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        it = machine.follower(most=2)
        machine.joined("box-w0", "box-w1", "other-w0")
        control.wanted, control.surplus = 2, ("box-w1",)
        await machine.looks(it, admin)
        assert (machine.called, machine.written) == (["stop 1 1"], [0])
        machine.joined("box-w0", "other-w0")
        control.wanted, control.surplus = 5, ()
        await machine.looks(it, admin, 3)
        assert (machine.called[1:], machine.written) == (["start 1 1"], [0, 1]), "there is no third one"


async def test_without_a_bound_the_same_workers_are_somebody_else_s(tmp_path: Path) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        machine.joined("box-w0", "box-w1")
        control.wanted, control.surplus = 1, ("box-w1",)
        await machine.looks(machine.follower(), admin, 2)
        assert (machine.called, machine.path.exists()) == ([], False)


async def test_commands_keep_their_distance(tmp_path: Path) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        it = machine.follower()
        control.wanted = 3
        for expected in (1, 1, 2):
            await it.look(admin)
            assert len(machine.called) == expected
            machine.now += INTERVAL_S / 2
        assert machine.called == ["start 0 0", "start 1 1"]


@pytest.mark.parametrize("case", ["no leader", "no pool", "no answer", "nobody wanted"])
async def test_without_an_answer_it_does_nothing(tmp_path: Path, case: str) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        Book(machine.path).add(0)
        it = machine.follower()
        control.wanted, control.surplus = 3, ("box-w0",)
        match case:
            case "no leader":
                control.leader = ""
            case "no pool":
                control.wanted = None
            case "no answer":
                control.error = StoreUnavailable("it is away")
            case "nobody wanted":
                control.wanted = 0
        await machine.looks(it, admin, 2)
        assert (machine.called, machine.written) == ([], [0])


async def test_it_knows_its_instances_after_a_restart(tmp_path: Path) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        control.wanted = 1
        await machine.looks(machine.follower(), admin)
        again = machine.follower()
        await machine.looks(again, admin, 2)
        assert machine.called == ["start 0 0"]
        machine.joined("box-w0", "other")
        control.surplus = ("box-w0",)
        await machine.looks(again, admin)
        assert machine.called[1:] == ["stop 0 0"]


async def test_a_start_that_fails_is_tried_again_later_each_time(tmp_path: Path) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        it = machine.follower()
        control.wanted = 1
        machine.fail("start", 3)
        await machine.looks(it, admin)
        assert (machine.called, machine.written) == ([], [])
        machine.fail("start", None)
        machine.now += INTERVAL_S
        await it.look(admin)
        assert machine.called == ["start 0 0"], "after the first failure it waits the interval"
        machine.fail("start", 3)
        control.wanted = 2
        waits = []
        for _ in range(4):
            machine.now = it._not_before
            begun = machine.now
            await it.look(admin)
            waits.append(it._not_before - begun)
        assert waits == [5.0, 10.0, 20.0, 40.0]
        machine.now = it._not_before
        await it.look(admin)
        assert it._not_before - machine.now == following.MOST_WAIT_S


async def test_a_stop_that_fails_is_tried_again(tmp_path: Path) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        Book(machine.path).add(4)
        it = machine.follower()
        machine.joined("box-w4", "other")
        control.wanted, control.surplus = 1, ("box-w4",)
        machine.fail("stop", 1)
        await machine.looks(it, admin)
        assert (machine.called, machine.written) == ([], [4])
        machine.fail("stop", None)
        await machine.looks(it, admin)
        assert (machine.called, machine.written) == (["stop 4 4"], [])


async def test_a_command_that_is_not_there_fails_like_any_other(tmp_path: Path) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        machine.start = str(tmp_path / "nothing")
        control.wanted = 1
        await machine.looks(machine.follower(), admin)
        assert machine.written == []


async def test_a_command_that_never_ends_is_killed_and_its_instance_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "COMMAND_S", 0.2)
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        machine.start = f"/bin/sh -c 'echo $$ > {tmp_path}/pid; sleep 600'"
        control.wanted = 1
        await machine.looks(machine.follower(), admin)
        assert machine.written == [0]
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text() or 0), 0)


async def test_an_instance_that_does_not_join_is_started_again_in_time(tmp_path: Path) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        it = machine.follower()
        control.wanted = 1
        await machine.looks(it, admin)
        machine.now += following.JOINS_S - 2 * INTERVAL_S
        await machine.looks(it, admin)
        assert machine.called == ["start 0 0"]
        machine.now += 2 * INTERVAL_S
        await machine.looks(it, admin)
        assert machine.called == ["start 0 0", "start 0 0"]
        machine.joined("box-w0")
        machine.now += following.JOINS_S + 1
        await machine.looks(it, admin)
        machine.joined()
        await machine.looks(it, admin)
        assert len(machine.called) == 2, "it was there a moment ago"


async def test_a_model_that_takes_long_to_load_is_waited_for_as_long_as_is_said(tmp_path: Path) -> None:
    async with a_control() as (control, admin):
        machine = Machine(tmp_path, control)
        it = machine.follower(joins_s=1800.0)
        control.wanted = 1
        await machine.looks(it, admin)
        machine.now += 1790.0
        await machine.looks(it, admin)
        assert machine.called == ["start 0 0"]
        machine.now += 20.0
        await machine.looks(it, admin)
        assert machine.called == ["start 0 0", "start 0 0"]


async def test_a_list_that_can_not_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    path = path_of(tmp_path, "a/b")
    assert path.parent == tmp_path
    path.write_text('{"instances": "all"}')
    with pytest.raises(BadBook, match="mend it, or stop them all and remove it"):
        Book(path)


def test_a_list_has_one_follower(tmp_path: Path) -> None:
    path = path_of(tmp_path, "default")
    with only_one(path):
        with pytest.raises(BadBook, match="another `trimtab scale follow` keeps"), only_one(path):
            pass
        with only_one(path_of(tmp_path, "other")):
            pass
    with only_one(path):
        pass


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_the_verb_follows_until_it_is_ended_and_another_goes_on_from_there(tmp_path: Path) -> None:
    async with a_control() as (control, _):
        machine = Machine(tmp_path, control)
        control.wanted = 2

        async def verb() -> asyncio.subprocess.Process:
            words = ("scale", "follow", "--start", machine.start, "--stop", machine.stop, "--node-id", "box-w{n}")
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "trimtab_cli", *words, "--min-interval", "10ms", "--control", control.address,
                env={**os.environ, "TRIMTAB_STATE_DIR": str(tmp_path)}, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip

        first = await verb()
        await until(lambda: machine.called == ["start 0 0", "start 1 1"])
        second = await verb()
        assert await asyncio.wait_for(second.wait(), PATIENCE_S) == 1, "the list is held"
        first.send_signal(signal.SIGTERM)
        said = (await asyncio.wait_for(first.communicate(), PATIENCE_S))[0].decode()
        assert first.returncode == -signal.SIGTERM
        lines = [json.loads(line) for line in said.splitlines()]
        assert [(e["n"], e["node"], e["wanted"]) for e in lines if e["event"] == "start"] == [
            (0, "box-w0", 2),
            (1, "box-w1", 2),
        ]
        machine.joined("box-w0", "box-w1")
        control.wanted, control.surplus = 1, ("box-w1",)
        third = await verb()
        await until(lambda: machine.called[2:] == ["stop 1 1"])
        third.send_signal(signal.SIGTERM)
        await asyncio.wait_for(third.communicate(), PATIENCE_S)
