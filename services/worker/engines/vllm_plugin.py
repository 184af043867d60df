"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`): our calls on the engine, and its tie to the worker.

`EngineCore` serves a utility call by looking its name up on itself, so a method set on the class is callable from the front process by
`engine_core.call_utility_async(name, …)`: acknowledged, and run between two steps (VLLM_FACTS §1).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

BOARD_KEY = "trimtab_board"
"""Key of vLLM's `additional_config` that carries the board's path to the engine process."""
EXTRA_KEY = "trimtab"
"""Key of a request's `extra_args` under which the front process says what the scheduler must know of it."""
OWNER_ENV = "TRIMTAB_ENGINE_OWNER"
"""Set by a worker for its engine's processes, so that a vLLM of somebody else in this environment is left alone."""


def register() -> None:
    """vLLM's hook."""
    if OWNER_ENV not in os.environ:
        return
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        from trimtab.kit.process import die_with_parent

        # A killed worker must not leave its engine behind, holding memory and threads: vLLM's own watch takes tens of seconds.
        die_with_parent(parent.pid, signal.SIGKILL)
    install()


def install() -> None:
    """Graft the calls, and last words; safe to repeat."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    def trimtab_apply(self: Any, fields: dict[str, Any]) -> dict[str, int]:
        answer: dict[str, int] = self.scheduler.trimtab_apply(fields)
        return answer

    def trimtab_steer(self: Any, command: dict[str, Any]) -> int:
        return int(self.scheduler.trimtab_steer(command))

    def trimtab_facts(self: Any) -> dict[str, Any]:
        from services.worker.engines import vllm_reblock

        return {**self.scheduler.trimtab_facts(), **vllm_reblock.facts(self)}

    def trimtab_reblock(self: Any, asked: dict[str, Any]) -> dict[str, Any]:
        from services.worker.engines import vllm_reblock

        return vllm_reblock.reblock(self, asked)

    for call in (trimtab_apply, trimtab_steer, trimtab_facts, trimtab_reblock):
        setattr(EngineCore, call.__name__, call)
    _leave_last_words(EngineCoreProc)


def _leave_last_words(core: Any) -> None:
    """vLLM tells its front process that the engine is dead, and not of what. It says so where it handles the error that ended it."""
    tell = core._send_engine_dead
    if hasattr(tell, "trimtab"):
        return

    # Now, as at death there may be no memory left to import or to map anything.
    from services.worker.engines.board import Board
    from services.worker.engines.death import described

    def send_engine_dead(self: Any) -> None:
        error = sys.exc_info()[1]
        # Whatever is broken here, the front process must hear of the death.
        with contextlib.suppress(Exception):
            if error is not None:
                board = getattr(getattr(self, "scheduler", None), "_board", None)
                path = Path(self.vllm_config.additional_config[BOARD_KEY])
                (board or Board(path)).write_words(described(error))
        tell(self)

    send_engine_dead.trimtab = True  # type: ignore[attr-defined]
    core._send_engine_dead = send_engine_dead
