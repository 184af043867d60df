"""Tasks that a process can't live without: one that fails ends the process, loudly, instead of being missed in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")


def vital(work: Coroutine[Any, Any, T], name: str, on_failure: Callable[[], None]) -> asyncio.Task[T]:
    """A task for `work`. When it fails, the failure is logged and `on_failure` called; being cancelled is no failure."""
    task = asyncio.create_task(work, name=name)

    def ended(done: asyncio.Task[T]) -> None:
        if done.cancelled() or (error := done.exception()) is None:
            return
        try:
            log.error("vital task failed", task=name, exc_info=error)
        finally:
            on_failure()

    task.add_done_callback(ended)
    return task
