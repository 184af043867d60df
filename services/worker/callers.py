"""Who may call a worker, by the kind of his certificate.

A gateway may all. People and tools that may change the mesh may Generate, to look at one worker by itself; tenants, rates and keys are a
gateway's, so nobody else gets past them: no worker, no viewer. Without TLS the connection says nothing, and a worker listens on loopback
alone, or where the network itself is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import structlog

from trimtab.errors import PermissionDenied
from trimtab.kit.tls import PLAIN, caller_of

log = structlog.get_logger(__name__)

GATEWAYS = ("gateway",)
GENERATE = (*GATEWAYS, "operator", "admin")


class Callers:
    """`on_denied` hears the method of each call that is turned away."""

    def __init__(self, mesh: str = "default", on_denied: Callable[[str], None] = lambda method: None) -> None:
        self._mesh = mesh
        self._on_denied = on_denied

    def check(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        method: str,
        kinds: tuple[str, ...] = GATEWAYS,
        *,
        what: str = "",
    ) -> None:
        """PermissionDenied where the caller is none of these. `what` is what he wanted, in words, where that is not the method."""
        caller = caller_of(context.auth_context(), self._mesh)
        if caller == PLAIN or (caller.known and caller.kind in kinds):
            return
        self._on_denied(method)
        log.warning("denied", method=method, identity=caller.name, kind=caller.kind, peer=context.peer())
        whom = " and ".join(f"{kind}s" for kind in kinds)
        raise PermissionDenied(f"{what or method} is for {whom} of the mesh; you are {caller.name!r}")
