"""The worker's gRPC door: Generate for one request, Attach for a gateway's many, ListModels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio
from grpc_reflection.v1alpha import reflection

from services.worker.attach import Link
from services.worker.gate import Gate
from services.worker.serving import Serving
from trimtab import codec
from trimtab.errors import DeadlineExceeded, PermissionDenied
from trimtab.kit import rpc
from trimtab.kit.tls import PLAIN, Caller, caller_of
from trimtab.v1 import inference_pb2, inference_pb2_grpc

log = structlog.get_logger(__name__)


def register(
    server: grpc.aio.Server, servicer: InferenceServicer, health: aio.HealthServicer, others: Sequence[str] = ()
) -> None:
    """Put every service of a worker on its server: inference, health, and reflection over both and over `others`, which are on it."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
        *others,
    )
    reflection.enable_server_reflection(names, server)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self,
        serving: Serving,
        gate: Gate,
        step_no: Callable[[], int],
        max_model_len: int,
        mesh: str = "default",
        *,
        hung: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hung = hung
        self._mesh = mesh
        self._serving = serving
        self._gate = gate
        self._step_no = step_no
        self._max_model_len = max_model_len

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async with rpc.guarded(context):
            metadata = dict(context.invocation_metadata() or ())
            events = self._serving.stream(
                codec.decode_request(request), str(metadata.get("traceparent", "")), left_s=context.time_remaining()
            )
            try:
                async with asyncio.timeout(context.time_remaining()), aclosing(events):
                    async for event in events:
                        await context.write(codec.encode_event(event))
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed before the output was complete") from None

    async def Attach(
        self,
        request_iterator: AsyncIterator[inference_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[inference_pb2.AttachResponse]:
        async with rpc.guarded(context):
            caller = caller_of(context.auth_context(), self._mesh)
            if caller not in (PLAIN, Caller("gateway", caller.name, caller.by)):
                log.warning("denied", method="Attach", identity=caller.name, kind=caller.kind, peer=context.peer())
                raise PermissionDenied(f"Attach is for gateways of the mesh; you are {caller.name!r}")
        async with rpc.guarded(context), aclosing(Link(self._serving, self._gate, self._step_no, self._hung)) as link:
            reader = asyncio.create_task(link.read(request_iterator))
            try:
                async for step in link.steps():
                    yield inference_pb2.AttachResponse(step=step)
                    if reader.done():
                        # The gateway closed its side, or sent what can't be read.
                        reader.result()
                        return
            finally:
                await rpc.cancel_and_wait(reader)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.Model(name=self._serving.model, max_model_len=self._max_model_len)
        return inference_pb2.ListModelsResponse(models=[model])
