"""KEDA's external scaler: a cluster's autoscaler asks how many workers a pool wants, as `trimtab scale` does.

The value is the number of workers wanted and one worker is worth 1 of it, so that the autoscaler's AverageValue comes to just that number.
What nobody knows is an error and never a number: an autoscaler that gets none leaves the pool as it is, and one that got 0 would end it. So a
pool that wants nobody is said to want one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from controlplane.pools import NOT_YET
from trimtab.errors import InvalidRequest, PoolNotFound, WantUnknown
from trimtab.kit.rpc import guarded
from trimtab.v1 import admin_pb2
from trimtab.v1.keda import externalscaler_pb2 as keda
from trimtab.v1.keda import externalscaler_pb2_grpc as keda_grpc

METRIC = "trimtab_wanted_workers"
WORTH = 1
"""Of the metric, of one worker."""

Scale = Callable[[admin_pb2.GetScaleRequest], Awaitable[admin_pb2.GetScaleResponse]]


class KedaScaler(keda_grpc.ExternalScalerServicer):
    """`scale` answers as AdminService.GetScale does, wherever the leader is."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale

    async def IsActive(self, request: Any, context: Any) -> keda.IsActiveResponse:
        async with guarded(context):
            await self._wanted(pool_of(request))
            return keda.IsActiveResponse(result=True)
        raise AssertionError("guarded ends the call")

    async def StreamIsActive(self, request: Any, context: Any) -> AsyncIterator[keda.IsActiveResponse]:
        """Once, and it stays so: no pool is ended. Where nobody knows it is an error."""
        async with guarded(context):
            await self._wanted(pool_of(request))
            yield keda.IsActiveResponse(result=True)
            await asyncio.Event().wait()

    async def GetMetricSpec(self, request: Any, context: Any) -> keda.GetMetricSpecResponse:
        """The same for every pool, also before anybody knows what it wants: KEDA makes its autoscaler of it."""
        async with guarded(context):
            pool_of(request)
            spec = keda.MetricSpec(metricName=METRIC, targetSize=WORTH, targetSizeFloat=WORTH)
            return keda.GetMetricSpecResponse(metricSpecs=[spec])
        raise AssertionError("guarded ends the call")

    async def GetMetrics(self, request: Any, context: Any) -> keda.GetMetricsResponse:
        async with guarded(context):
            wanted = await self._wanted(pool_of(request.scaledObjectRef))
            value = keda.MetricValue(metricName=METRIC, metricValue=wanted, metricValueFloat=wanted)
            return keda.GetMetricsResponse(metricValues=[value])
        raise AssertionError("guarded ends the call")

    async def _wanted(self, pool: str) -> int:
        return wanted(await self._scale(admin_pb2.GetScaleRequest()), pool)


def register(scaler: KedaScaler, server: grpc.aio.Server) -> str:
    """Puts it on the server; its name, for reflection."""
    keda_grpc.add_ExternalScalerServicer_to_server(scaler, server)
    return keda.DESCRIPTOR.services_by_name["ExternalScaler"].full_name


def pool_of(ref: Any) -> str:
    """InvalidRequest where the ScaledObject does not say."""
    pool = str(ref.scalerMetadata.get("pool", ""))
    if not pool:
        raise InvalidRequest("the ScaledObject's trigger needs pool among its metadata: the pool that it scales")
    return pool


def wanted(answer: Any, pool: str) -> int:
    """Of GetScale's answer: workers that the pool wants. PoolNotFound, or WantUnknown where nobody has said it."""
    if not answer.leader_id:
        raise WantUnknown("no replica leads: nobody decides how many workers a pool wants")
    said = next((p for p in answer.pools if p.pool == pool), None)
    if said is None:
        known = ", ".join(p.pool for p in answer.pools) or "none"
        raise PoolNotFound(f"there is no pool {pool!r}; there are: {known}")
    if not said.max_workers or said.reason == NOT_YET:
        raise WantUnknown(f"pool {pool!r}: {said.reason}")
    # Never to none: nothing would bring the first one back, since a pool without a worker has nobody who says that requests wait for one.
    return max(1, min(int(said.wanted), int(said.max_workers)))
