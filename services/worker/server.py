"""The worker's gRPC door: Generate for one request, Attach for a gateway's many, ListModels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio
from grpc_reflection.v1alpha import reflection

from services.worker.attach import Link
from services.worker.callers import GENERATE, Callers
from services.worker.gate import Gate
from services.worker.reading import Reading
from services.worker.serving import Serving
from services.worker.shares import Shares
from trimtab import codec
from trimtab.errors import DeadlineExceeded
from trimtab.kit import rpc
from trimtab.messages import Workload
from trimtab.v1 import inference_pb2, inference_pb2_grpc


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
        callers: Callers | None = None,
        *,
        hung: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hung = hung
        self._callers = callers or Callers()
        self._serving = serving
        self._gate = gate
        self._shares = Shares(lambda: gate.supply(Workload.BATCH))
        gate.on_moved = self._shares.moved
        self._step_no = step_no
        self._max_model_len = max_model_len

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async with rpc.guarded(context):
            self._callers.check(context, "Generate", GENERATE)
            metadata = dict(context.invocation_metadata() or ())
            events = self._serving.stream(
                codec.decode_request(request), str(metadata.get("traceparent", "")), left_s=context.time_remaining()
            )
            try:
                async with asyncio.timeout(context.time_remaining()), Reading(events) as reading:
                    async for event in reading:
                        await context.write(codec.encode_event(event))
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed before the output was complete") from None

    async def Attach(
        self,
        request_iterator: AsyncIterator[inference_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[inference_pb2.AttachResponse]:
        async with rpc.guarded(context):
            self._callers.check(context, "Attach")
        made = Link(self._serving, self._gate, self._shares, self._step_no, self._hung)
        async with rpc.guarded(context), aclosing(made) as link:
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
