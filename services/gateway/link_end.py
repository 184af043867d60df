"""Why a link to a worker ended, in words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc

from trimtab.kit import rpc


def why_ended(tasks: Iterable[asyncio.Task[None]]) -> str:
    """As the link's own tasks have found."""
    for task in tasks:
        error = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(error, grpc.aio.AioRpcError):
            said = error.details() or ""
            return f"{error.code().name}: {rpc.tls_fault(said, 'worker') or said}"
        if error is not None:
            return str(error) or type(error).__name__
    return "the worker closed it"
