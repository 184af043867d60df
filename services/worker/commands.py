"""What the control plane commands of a worker: requests that are here are moved, kept apart or let go; its KV blocks get another size.

Every command that this build knows is answered, also one that can't be done; what it does not know is left to the link to say so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import structlog

from services.worker.engines import Engine
from services.worker.steering import Steering
from services.worker.told import BAD_SETTING, BadSetting, Told
from trimtab.blocks import Reblock, When
from trimtab.codec import decode_match
from trimtab.errors import ReblockRefused, TrimtabError
from trimtab.messages import RequestMatch
from trimtab.v1 import control_pb2

log = structlog.get_logger(__name__)

EMPTY_MATCH = "EMPTY_MATCH"
LEAVING = "LEAVING"


class Commands:
    """Belongs to one event loop."""

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self.reblocking: Reblocking | None = None
        """Changes the engine's KV block size; set once there is an engine."""
        self.drain_by: Callable[[float, bool], bool] | None = None
        """Stops this worker, with so many seconds for what runs, so that it is started anew or for good; False where it is stopped for good
        already and is not to come back. Set once there is something to stop."""
        self.told: Told | None = None
        """What this worker was told to start with the next time; set where it can be told."""
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
            case "reblock" if self.reblocking is not None:
                return await self.reblocking.obey(command)
            case "drain" if self.drain_by is not None:
                return self._drain(command, self.drain_by)
            case _:
                return None

    def _drain(
        self, command: control_pb2.Command, drain_by: Callable[[float, bool], bool]
    ) -> control_pb2.CommandResult:
        """What it is told to start with is kept first: nothing happens where it is no good."""
        deadline_s, restart = command.drain.deadline_ms / 1000.0, command.drain.restart
        settings, take_back = dict(command.drain.settings), _nothing
        if settings:
            try:
                if not restart or self.told is None:
                    raise BadSetting("settings hold from a worker's next start on: only with a restart")
                take_back = self.told.tell(settings)
            except BadSetting as e:
                log.warning("settings refused", command_id=command.command_id, settings=settings, because=str(e))
                return control_pb2.CommandResult(ok=False, reason=BAD_SETTING, message=str(e))
        log.info(
            "drain commanded",
            command_id=command.command_id,
            deadline_s=deadline_s,
            restart=restart,
            settings=settings,
        )
        if drain_by(deadline_s, restart):
            return control_pb2.CommandResult(ok=True)
        take_back()
        words = "it is drained for good already, and does not come back"
        return control_pb2.CommandResult(ok=False, reason=LEAVING, message=words)


class Reblocking:
    """Changes of the engine's KV block size, one at a time. `most` is what may be computed anew by the policy in force, in tokens;
    `on_change` is called as soon as the engine has another size, before the command is answered."""

    def __init__(self, engine: Engine, most: Callable[[], int], on_change: Callable[[], None]) -> None:
        self._engine = engine
        self._most = most
        self._on_change = on_change
        self._busy = False

    async def obey(self, command: control_pb2.Command) -> control_pb2.CommandResult:
        """What it did or would do; reason and the sizes that would do where the engine refused, which serves on as before."""
        try:
            done = await self._reblock(command.reblock)
        except ReblockRefused as e:
            return control_pb2.CommandResult(
                ok=False, reason=e.cause, message=e.message, accepted_block_sizes=e.accepted
            )
        except TrimtabError as e:
            return control_pb2.CommandResult(ok=False, reason=e.reason, message=e.message)
        log.info(
            "KV block size", command_id=command.command_id, dry_run=done.dry_run, before=done.before.block_size,
            after=done.after.block_size, carried_tokens=done.carried_tokens,
            recompute_tokens=done.recompute_tokens, change_ms=round(done.change_ms, 2),
        )  # fmt: skip
        return control_pb2.CommandResult(ok=True, affected=done.requests, reblock=_encode(done))

    async def _reblock(self, wanted: control_pb2.ReblockCommand) -> Reblock:
        if self._busy:
            raise ReblockRefused("another change of the block size is under way here", cause="BUSY")
        self._busy = True
        try:
            return await self._engine.reblock(
                wanted.block_size,
                when=When.NOW if wanted.when == control_pb2.REBLOCK_WHEN_NOW else When.IDLE,
                max_recompute_tokens=wanted.max_recompute_tokens or self._most(),
                carry=not wanted.recompute,
                dry_run=wanted.dry_run,
            )
        finally:
            self._busy = False
            # Also after a failure: whatever the engine has now is what everybody is to know.
            self._on_change()


def _encode(r: Reblock) -> control_pb2.ReblockResult:
    return control_pb2.ReblockResult(
        before_block_size=r.before.block_size,
        before_total_blocks=r.before.total_blocks,
        after_block_size=r.after.block_size,
        after_total_blocks=r.after.total_blocks,
        recompute_tokens=r.recompute_tokens,
        requests=r.requests,
        cached_tokens=r.cached_tokens,
        change_ms=r.change_ms,
        carried=r.carried,
        carried_tokens=r.carried_tokens,
        recompute_context=r.recompute_context,
        dry_run=r.dry_run,
    )


def _nothing() -> None:
    """There is nothing to take back."""


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
