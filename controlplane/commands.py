"""Commands on their way to nodes, and the answers that come back.

A command is sent once, over the stream that is open, and waited for with a deadline. One that has not left by then is taken back: nobody is
to be surprised by it later. One that has left may still be obeyed, and the answer says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

from trimtab.v1 import control_pb2

Command = control_pb2.Command
Result = control_pb2.CommandResult


class Calls:
    """What one stream's node is to do and has not answered yet, oldest first. Belongs to one event loop; `wake` calls for the writer."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._unsent: dict[str, Command] = {}
        self._open: dict[str, asyncio.Future[Result]] = {}

    def begin(self, command: Command) -> asyncio.Future[Result]:
        """Its answer, in time; `give_up` or `close` ends the wait."""
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._unsent[command.command_id] = command
        self._open[command.command_id] = answer
        self._wake()
        return answer

    def unsent(self) -> Iterator[Command]:
        """Each once, for the writer; one that is taken back meanwhile does not come."""
        while self._unsent:
            yield self._unsent.pop(next(iter(self._unsent)))

    def answered(self, result: Result) -> bool:
        """False when nobody waits for it."""
        answer = self._open.pop(result.command_id, None)
        if answer is None:
            return False
        answer.set_result(result)
        return True

    def give_up(self, command_id: str, within_s: float) -> Result:
        """Its time is over: what to say instead of an answer."""
        self._open.pop(command_id, None)
        if self._unsent.pop(command_id, None) is not None:
            return _not_done("NOT_SENT", f"its stream took nothing for {within_s:g} s; it will not do it")
        return _not_done("NO_ANSWER", f"no answer within {within_s:g} s; it may still do it")

    def close(self) -> None:
        """The stream ended."""
        for command_id, answer in self._open.items():
            sent = command_id not in self._unsent
            words = "its stream ended before it answered; it may have done it"
            answer.set_result(
                _not_done("LOST", words) if sent else _not_done("NOT_SENT", "its stream ended; it will not do it")
            )
        self._open.clear()
        self._unsent.clear()


async def ask_all(calls: Mapping[str, Calls], command: Command, *, within_s: float) -> dict[str, Result]:
    """Every node's answer to one command, or why there is none, by the keys of `calls`."""
    asked = {name: each.begin(command) for name, each in calls.items()}
    late: dict[str, Result] = {}
    try:
        if asked:
            await asyncio.wait(asked.values(), timeout=within_s)
    finally:
        # Also when whoever asked has left: what is unsent must not go out.
        late = {n: calls[n].give_up(command.command_id, within_s) for n, answer in asked.items() if not answer.done()}
    return {name: late[name] if name in late else answer.result() for name, answer in asked.items()}


def _not_done(reason: str, message: str) -> Result:
    return Result(ok=False, reason=reason, message=message)
