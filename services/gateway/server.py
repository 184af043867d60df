"""The gateway's gRPC door: Generate and ListModels for clients that are known. Attach is for workers, and unimplemented here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.gateway.coalesce import Coalescer
from services.gateway.dispatch import Dispatch
from services.gateway.opening import Opening
from services.gateway.tenants import Tenants
from trimtab.errors import InvalidRequest, Violation
from trimtab.kit import rpc, telemetry
from trimtab.tenant import Tenant
from trimtab.v1 import inference_pb2, inference_pb2_grpc

WORKLOADS = {"realtime": inference_pb2.WORKLOAD_REALTIME, "batch": inference_pb2.WORKLOAD_BATCH}


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, dispatch: Dispatch, tenants: Tenants, coalescer: Coalescer) -> None:
        self._coalescer = coalescer
        self._dispatch = dispatch
        self._tenants = tenants

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Metadata: `authorization`; `x-workload` and `x-request-id` where the message leaves them unset; `traceparent` of the caller.

        A request id in the message has to be its own; one in metadata is made so where it is not.
        """
        async with rpc.guarded(context):
            tenant = self._tenant(context, "Generate")
            metadata = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
            if request.workload == inference_pb2.WORKLOAD_UNSPECIFIED and (name := metadata.get("x-workload")):
                if name not in WORKLOADS:
                    text = f"must be realtime or batch, not {name!r}"
                    raise InvalidRequest(f"metadata x-workload {text}", violations=(Violation("x-workload", text),))
                request.workload = WORKLOADS[name]
            request.request_id = request.request_id or self._dispatch.named(metadata.get("x-request-id", ""))
            call = self._dispatch.generate(
                request,
                tenant=tenant,
                timeout_s=context.time_remaining(),
                parent=telemetry.parse_traceparent(metadata.get("traceparent", "")),
            )
            opening = Opening(lambda: context.send_initial_metadata(()))
            async with call.responses() as responses, opening:
                async for response in responses:
                    if opening.pending:
                        await opening.over()
                    await context.write(response)
                    if self._coalescer.holds:
                        await self._coalescer.pause()

    async def Attach(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[inference_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a gateway is attached to workers; clients call Generate")

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        async with rpc.guarded(context):
            self._tenant(context, "ListModels")
        served = sorted(self._dispatch.endpoints.models().items())
        return inference_pb2.ListModelsResponse(
            models=[inference_pb2.Model(name=name, max_model_len=window) for name, window in served]
        )

    def _tenant(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> Tenant:
        """Unauthenticated where nobody knows who calls."""
        said = [v for k, v in context.invocation_metadata() or () if k == "authorization" and isinstance(v, str)]
        return self._tenants.of(said, context.auth_context(), door="grpc", method=method, peer=context.peer())


def register(dispatch: Dispatch, tenants: Tenants, coalescer: Coalescer, server: grpc.aio.Server) -> str:
    """Serve it; the service's full name."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(dispatch, tenants, coalescer), server)
    return str(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name)
