"""A batch under way: so many requests at once, each until it has an answer, or an error that no retry would change, or no time is left.

A stream whose gateway is lost goes on (`trimtab.client`); here a request is sent anew where a gateway had no room or no worker, or something
broke. A request that waits for its next try keeps its place among those in flight: that is the back-pressure.
"""

from __future__ import annotations

import asyncio
import enum
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from services.batch import lines
from services.batch.lines import BadLine, Task
from services.batch.results import Results
from services.gateway.openai_stream import Answer
from trimtab.client import Client
from trimtab.client_stream import is_lost, pause_ms
from trimtab.errors import BackPressure, ClientFault, NoWorker, PermissionDenied, TrimtabError, Unauthenticated
from trimtab.messages import Accepted, Delta, Finish, TokenLogprobs, Usage

MAX_FAULTS = 5
"""Tries in which something broke, that a request gets before its error is its answer."""
LOST_BY = ("UNAVAILABLE", "UNREACHABLE", "DRAINING")
"""Causes of a cut stream that say nothing of the request."""


class Next(enum.Enum):
    AGAIN = "again"
    COUNTED = "again, so often"
    FAILED = "failed"
    STOP = "stop"
    """No other request would fare better."""


def judge(error: TrimtabError) -> Next:
    """What becomes of a request whose try ended so."""
    match error:
        case Unauthenticated() | PermissionDenied():
            return Next.STOP
        case ClientFault():
            return Next.FAILED
        case BackPressure():
            return Next.AGAIN
        case _ if is_lost(error) or error.metadata.get("cause") in LOST_BY:
            return Next.AGAIN
        case _:
            return Next.COUNTED


@dataclass(slots=True)
class Tally:
    """Of this run's `total` lines; `skipped` are those that an earlier one has done."""

    total: int = 0
    skipped: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def left(self) -> int:
        """Those without a line yet."""
        return self.total - self.done - self.failed

    def count(self, usage: Usage) -> None:
        self.done += 1
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens


class Runner:
    """`until` is on the monotonic clock; `on_line` hears of every line that is safe on disk."""

    def __init__(
        self,
        client: Client,
        results: Results,
        tally: Tally,
        *,
        until: float,
        on_line: Callable[[], None],
    ) -> None:
        self._client = client
        self._results = results
        self._tally = tally
        self._until = until
        self._on_line = on_line
        self._unserved = ""

    @property
    def held_up(self) -> str:
        """Why nothing goes on now, in words, as far as the last answers tell; empty while something does. It is tried again and again."""
        if self._client.away:
            return f"no gateway answers ({self._client.away})"
        return f"no worker serves ({self._unserved})" if self._unserved else ""

    async def run(self, tasks: Iterator[Task], in_flight: int) -> None:
        """Raises what stops the whole: that the caller may not, that the disk is full, that the input has changed."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(in_flight):
                    group.create_task(self._work(tasks))
        except BaseExceptionGroup as e:
            raise e.exceptions[0] from None

    async def refuse(self, bad: BadLine) -> None:
        """A line that is not sent."""
        await self._results.add(lines.never_sent(bad))
        self._tally.failed += 1
        self._on_line()

    async def _work(self, tasks: Iterator[Task]) -> None:
        while time.monotonic() < self._until and (task := next(tasks, None)) is not None:
            await self._one(task)

    async def _one(self, task: Task) -> None:
        tries = faults = 0
        while (left_s := self._until - time.monotonic()) > 0:
            request_id = secrets.token_hex(16)
            try:
                body, usage = await self._answer(task, request_id, left_s)
            except TrimtabError as e:
                tries += 1
                verdict = judge(e)
                faults += verdict is Next.COUNTED
                if verdict is Next.STOP:
                    raise
                if isinstance(e, NoWorker):
                    self._unserved = e.message
                late = time.monotonic() >= self._until
                if verdict is Next.FAILED or (faults >= MAX_FAULTS and not late):
                    await self._results.add(lines.failed(task, request_id, e))
                    self._tally.failed += 1
                    self._on_line()
                    return
                pause_s = pause_ms(tries, e.retry_after_ms, random.random) / 1000.0
                await asyncio.sleep(min(pause_s, max(0.0, self._until - time.monotonic())))
            else:
                await self._results.add(lines.answered(task, request_id, body))
                self._tally.count(usage)
                self._on_line()
                return

    async def _answer(self, task: Task, request_id: str, timeout_s: float) -> tuple[dict[str, Any], Usage]:
        texts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        request = replace(task.ask.request, request_id=request_id)
        model = request.model
        # As often as it takes: what bounds a batch is its deadline.
        stream = self._client.generate(request, timeout_s=timeout_s, attempts=sys.maxsize)
        async with aclosing(stream) as events:
            async for event in events:
                match event:
                    case Accepted(model=served):
                        model = served
                        self._unserved = ""
                    case Delta(text=text, logprobs=more):
                        texts.append(text)
                        logprobs.extend(more)
                    case Finish() as finish:
                        answer = Answer(task.ask, request_id, model)
                        return answer.whole("".join(texts), logprobs, finish), finish.usage
        raise AssertionError("generate ends with Finish or raises")
