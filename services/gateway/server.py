"""The gateway's gRPC door: Generate and ListModels for clients. Attach is for workers, and unimplemented here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.gateway.dispatch import Dispatch
from trimtab.errors import InvalidRequest, Violation
from trimtab.kit import rpc, telemetry
from trimtab.v1 import inference_pb2, inference_pb2_grpc

WORKLOADS = {"realtime": inference_pb2.WORKLOAD_REALTIME, "batch": inference_pb2.WORKLOAD_BATCH}


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Metadata: `x-workload` and `x-request-id` where the message leaves them unset, `traceparent` for the caller's trace."""
        async with rpc.guarded(context):
            metadata = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
            if request.workload == inference_pb2.WORKLOAD_UNSPECIFIED and (name := metadata.get("x-workload")):
                if name not in WORKLOADS:
                    text = f"must be realtime or batch, not {name!r}"
                    raise InvalidRequest(f"metadata x-workload {text}", violations=(Violation("x-workload", text),))
                request.workload = WORKLOADS[name]
            request.request_id = request.request_id or metadata.get("x-request-id", "")
            call = self._dispatch.generate(
                request,
                timeout_s=context.time_remaining(),
                parent=telemetry.parse_traceparent(metadata.get("traceparent", "")),
            )
            async with call.responses() as responses:
                async for response in responses:
                    await context.write(response)

    async def Attach(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[inference_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a gateway is attached to workers; clients call Generate")

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        served = sorted(self._dispatch.endpoints.models().items())
        return inference_pb2.ListModelsResponse(
            models=[inference_pb2.Model(name=name, max_model_len=window) for name, window in served]
        )


def register(dispatch: Dispatch, server: grpc.aio.Server) -> str:
    """Serve it; the service's full name."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(dispatch), server)
    return str(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name)
