"""What the control plane commands of a worker: requests that are here are moved, kept apart or let go.

Every command that this build knows is answered, also one that can't be done; what it does not know is left to the link to say so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import structlog

from services.worker.steering import Steering
from trimtab.codec import decode_match
from trimtab.errors import TrimtabError
from trimtab.messages import RequestMatch
from trimtab.v1 import control_pb2

log = structlog.get_logger(__name__)

EMPTY_MATCH = "EMPTY_MATCH"
LEAVING = "LEAVING"


class Commands:
    """Belongs to one event loop."""

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self.drain_by: Callable[[float, bool], bool] | None = None
        """Stops this worker, with so many seconds for what runs, so that it is started anew or for good; False where it is stopped for good
        already and is not to come back. Set once there is something to stop."""
        self.reload: Callable[[], Awaitable[int]] | None = None
        """Tells the engine anew what the policy here says; set once there is one."""

    async def obey(self, command: control_pb2.Command) -> control_pb2.CommandResult | None:
        """What became of it; None for a command that this build does not know."""
        match command.WhichOneof("command"):
            case "release_requests":
                release = command.release_requests
                return await _act(command, release.match, release.request_ids, self._steering.release)
            case "reprioritise":
                move = command.reprioritise
                return await _act(
                    command,
                    move.match,
                    (move.request_id,),
                    lambda meant: self._steering.reprioritise(meant, move.delta),
                )
            case "isolate_requests":
                isolate = command.isolate_requests
                return await _act(
                    command, isolate.match, (), lambda meant: self._steering.isolate(meant, isolate.isolated)
                )
            case "reload_policy" if self.reload is not None:
                try:
                    await self.reload()
                except TrimtabError as e:
                    return control_pb2.CommandResult(ok=False, reason=e.reason, message=e.message)
                return control_pb2.CommandResult(ok=True)
            case "drain" if self.drain_by is not None:
                deadline_s, restart = command.drain.deadline_ms / 1000.0, command.drain.restart
                log.info("drain commanded", command_id=command.command_id, deadline_s=deadline_s, restart=restart)
                if self.drain_by(deadline_s, restart):
                    return control_pb2.CommandResult(ok=True)
                words = "it is drained for good already, and does not come back"
                return control_pb2.CommandResult(ok=False, reason=LEAVING, message=words)
            case _:
                return None


async def _act(
    command: control_pb2.Command,
    match: control_pb2.RequestMatch,
    ids: Iterable[str],
    act: Callable[[RequestMatch], Awaitable[int]],
) -> control_pb2.CommandResult:
    """`ids` stand in the command itself, as before there were matches."""
    merged = control_pb2.RequestMatch()
    merged.CopyFrom(match)
    merged.request_ids.extend(request_id for request_id in ids if request_id)
    try:
        meant = decode_match(merged)
        if meant.empty:
            words = "the match says nothing: give request ids, a workload, a tenant, min_prompt_tokens or min_age_ms"
            return control_pb2.CommandResult(ok=False, reason=EMPTY_MATCH, message=words)
        affected = await act(meant)
    except TrimtabError as e:
        return control_pb2.CommandResult(ok=False, reason=e.reason, message=e.message)
    log.info(
        "requests steered", command=command.WhichOneof("command"), command_id=command.command_id, affected=affected
    )
    return control_pb2.CommandResult(ok=True, affected=affected)
