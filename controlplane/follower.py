"""`trimtab scale follow`: what a pool wants, done by two commands of the operator's own, such as `systemctl start trimtab-worker@{n}`.

Instances have numbers. Those that this follower started stand in a file, so that it knows them after a restart; it stops no others. A number is
written down before its START runs: should the follower die then, it is counted, and started once more when it does not join. So START and STOP
must bear to be run twice, as systemctl's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import structlog

from controlplane import desired
from controlplane.admin.client import AdminClient
from trimtab.errors import TrimtabError
from trimtab.kit.process import write_atomically

log = structlog.get_logger(__name__)

NUMBER = "TRIMTAB_SCALE_N"
MARK = "{n}"
LOOK_S = 1.0
COMMAND_S = 300.0
"""For a command; one that takes longer is killed, and it is not known what it did."""
JOINS_S = 300.0
"""An instance that is not in the fleet for so long while workers are missing is started again, unless it is said otherwise."""
MOST_WAIT_S = 60.0


class BadBook(Exception):
    """The list of instances can't be used; the message says why, and what to do."""


class Book:
    """The numbers of the instances that were started here, oldest first, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            said = json.loads(path.read_bytes())
            self.numbers = [int(n) for n in said["instances"]]
        except FileNotFoundError:
            self.numbers = []
        except (OSError, ValueError, KeyError, TypeError) as e:
            text = f"can't read which instances there are from {path} ({e}); mend it, or stop them all and remove it"
            raise BadBook(text) from e

    def add(self, n: int) -> None:
        if n not in self.numbers:
            self._write([*self.numbers, n])

    def remove(self, n: int) -> None:
        self._write([each for each in self.numbers if each != n])

    def _write(self, numbers: list[int]) -> None:
        write_atomically(self._path, json.dumps({"instances": numbers}).encode())
        self.numbers = numbers


def path_of(directory: Path, pool: str) -> Path:
    return directory / f"scale-{quote(pool, safe='')}.json"


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the list for the life of this process; BadBook when another follower does."""
    with path.with_suffix(".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadBook(f"another `trimtab scale follow` keeps {path}; stop it first") from None
        yield


@dataclass(frozen=True, slots=True)
class Commands:
    """With {n} in them for the number of an instance; `node_id` is what it calls itself then. They are run without a shell."""

    start: str
    stop: str
    node_id: str

    def name(self, n: int) -> str:
        return self.node_id.replace(MARK, str(n))


class Follower:
    """Belongs to one event loop. `min_interval_s` lies between two commands. An instance joins within `joins_s`. With `most`, instances 0 to
    most - 1 are all that there may be, and are this follower's whoever started them. `clock` gives seconds.
    """

    def __init__(
        self,
        pool: str,
        commands: Commands,
        book: Book,
        *,
        min_interval_s: float,
        joins_s: float = JOINS_S,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._commands = commands
        self._book = book
        self._min_interval_s = min_interval_s
        self._joins_s = joins_s
        self._most = most
        self._clock = clock
        self._seen = dict.fromkeys(book.numbers, clock())
        """When each was last in the fleet, or was started."""
        self._not_before = 0.0
        self._wait_s = min_interval_s
        self._said: str | None = None

    async def run(self, admin: AdminClient) -> None:
        """For ever."""
        log.info("following", pool=self._pool, instances=self._book.numbers, control=admin.address)
        while True:
            await self.look(admin)
            await asyncio.sleep(LOOK_S)

    async def look(self, admin: AdminClient) -> None:
        """One look, and one command at most; without an answer none."""
        try:
            goal = desired.goal_of(await admin.scale(), self._pool)
            if goal is None:
                self._say("the control plane says nothing of this pool: it is left as it is")
                return
            if desired.settled(goal):
                self._say("")
                self._seen = dict.fromkeys(self._book.numbers, self._clock())
                return
            fleet = await admin.fleet()
        except TrimtabError as e:
            self._say(e.message)
            return
        await self._toward(goal, desired.named(fleet), desired.there(fleet, self._pool))

    async def _toward(self, goal: desired.Goal, named: set[str], there: set[str]) -> None:
        now, name = self._clock(), self._commands.name
        self._adopt(there)
        ours = {name(n): n for n in self._book.numbers}
        self._seen = {n: now if who in named else self._seen.get(n, now) for who, n in ours.items()}
        change = desired.change(goal, ours, there - ours.keys())
        number = desired.free_number(name, named | ours.keys())
        full = self._most is not None and number >= self._most
        self._say(
            f"{change.more} more are wanted, and all {self._most} instances are taken" if full and change.more else ""
        )
        if now < self._not_before:
            return
        facts = {"pool": self._pool, "wanted": goal.wanted, "running": goal.running, "why": goal.why}
        lost = [n for n in self._book.numbers if now - self._seen[n] > self._joins_s]
        if change.more and not full:
            await self._start(number, facts)
        elif change.fewer:
            await self._stop(ours[change.fewer[0]], facts)
        elif lost and goal.running < goal.wanted:
            log.warning("an instance is not in the fleet", n=lost[0], node=name(lost[0]), for_s=round(self._joins_s))
            await self._start(lost[0], facts)

    def _adopt(self, there: set[str]) -> None:
        """Those that somebody else started, such as systemd at boot."""
        for n in range(self._most or 0):
            if self._commands.name(n) in there and n not in self._book.numbers:
                log.info("one of ours that somebody else started", n=n, node=self._commands.name(n))
                self._book.add(n)

    async def _start(self, n: int, facts: Mapping[str, object]) -> None:
        log.info("start", n=n, node=self._commands.name(n), **facts)
        self._book.add(n)
        code = await self._command(self._commands.start, n)
        self._seen[n] = self._clock()
        if code:
            self._book.remove(n)
        self._done("start", n, code)

    async def _stop(self, n: int, facts: Mapping[str, object]) -> None:
        log.info("stop", n=n, node=self._commands.name(n), **facts)
        code = await self._command(self._commands.stop, n)
        if code == 0:
            self._book.remove(n)
        self._done("stop", n, code)

    def _done(self, what: str, n: int, code: int | None) -> None:
        if code == 0:
            self._wait_s = self._min_interval_s
        wait_s = self._wait_s
        self._not_before = self._clock() + wait_s
        if code != 0:
            self._wait_s = min(max(2 * self._wait_s, LOOK_S), max(MOST_WAIT_S, self._min_interval_s))
            how = "it took too long and was killed" if code is None else f"exit code {code}"
            log.error(f"{what} failed", n=n, how=how, again_in_s=wait_s)

    async def _command(self, command: str, n: int) -> int | None:
        """Its exit code; None where it took too long."""
        words = [word.replace(MARK, str(n)) for word in shlex.split(command)]
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, env={**os.environ, NUMBER: str(n)}, start_new_session=True
            )
        except OSError as e:
            log.error("command can't be run", command=command, error=str(e))
            return 127
        try:
            return await asyncio.wait_for(process.wait(), COMMAND_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            return None

    def _say(self, because: str) -> None:
        """Once, until it is something else."""
        if because != self._said and (because or self._said is not None):
            log.info("the control plane answers") if not because else log.warning("nothing is changed", because=because)
        self._said = because
