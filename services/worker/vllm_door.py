"""A worker's second door: vLLM's own gRPC service, `vllm.grpc.engine.VllmEngine`, for gateways that speak it (SMG).

The protos are those of the package smg-grpc-proto (extra `vllm-door`). Token ids go out, and text is the gateway's affair; queue, policy,
deadlines and metrics are those of every request here. The door is for gateways: with TLS, for their certificates only.
"""

from __future__ import annotations

import asyncio
import datetime
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc
import structlog
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from services.worker import vllm_facts
from services.worker.callers import Callers
from services.worker.engines import Engine
from services.worker.model_files import Archive, ModelFiles, tokenizer_archive
from services.worker.reading import Reading
from services.worker.serving import Serving
from services.worker.steering import Steering
from services.worker.vllm_reply import Reply
from services.worker.vllm_request import WORKLOAD_KEY, decode, in_their_words
from trimtab import messages as m
from trimtab.errors import Cancelled, DeadlineExceeded, InvalidRequest
from trimtab.kit import rpc
from trimtab.messages import NodeState
from trimtab.policy import Policy

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNK_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class _Open:
    """One request that came by this door and has not ended."""

    aborted: bool = False


class VllmDoor(pb_grpc.VllmEngineServicer):
    """Belongs to one event loop. `state` is the worker's own judgement of its health, `policy` what it runs by now."""

    def __init__(
        self,
        serving: Serving,
        engine: Engine,
        steering: Steering,
        *,
        state: Callable[[], NodeState],
        policy: Callable[[], Policy],
        files: ModelFiles,
        callers: Callers | None = None,
    ) -> None:
        self._serving = serving
        self._engine = engine
        self._steering = steering
        self._state = state
        self._policy = policy
        self._files = files
        self._callers = callers or Callers()
        self._open: dict[str, set[_Open]] = {}
        self._begun = time.monotonic()
        self._last_receive = 0.0
        self._archive: asyncio.Task[Archive] | None = None

    def register(self, server: grpc.aio.Server) -> str:
        """Put it on the worker's server; the service's name."""
        pb_grpc.add_VllmEngineServicer_to_server(self, server)
        return SERVICE

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with rpc.guarded(context):
            self._only_gateways(context, "Generate")
            self._last_receive = time.time()
            metadata = dict(context.invocation_metadata() or ())
            try:
                asked = decode(request, str(metadata.get(WORKLOAD_KEY, "")))
                asked = replace(asked, request_id=asked.request_id or uuid.uuid4().hex)
                async with asyncio.timeout(context.time_remaining()):
                    await self._deliver(asked, request.stream, str(metadata.get("traceparent", "")), context)
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed before the output was complete") from None
            except InvalidRequest as e:
                raise in_their_words(e, "text" if request.HasField("text") else "tokenized.input_ids") from None

    async def _deliver(self, asked: m.Request, stream: bool, traceparent: str, context: Context) -> None:
        """Nothing is sent before the first token: until then the gateway may still turn to another worker."""
        reply = Reply(asked.sampling)
        with self._listed(asked.request_id) as call:
            try:
                async with Reading(self._serving.stream(asked, traceparent)) as events:
                    async for event in events:
                        if isinstance(event, m.Finish):
                            await context.write(reply.complete(event))
                            return
                        if isinstance(event, m.Accepted):
                            reply.prompt_tokens = event.prompt_tokens
                        elif isinstance(event, m.Delta) and event.token_ids:
                            reply.take(event)
                            if stream:
                                await context.write(reply.chunk(event))
                        if call.aborted:
                            # It was not in the queue yet when the abort came, or a write kept it from hearing of it.
                            break
            except Cancelled:
                if not call.aborted:
                    raise
            await context.write(reply.aborted())

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Requests of this door end, in the queue or in the engine, with what they had; unknown ids are passed over."""
        async with rpc.guarded(context):
            self._only_gateways(context, "Abort")
            found = frozenset(request_id for request_id in request.request_ids if self._open.get(request_id))
            for request_id in found:
                for call in self._open[request_id]:
                    call.aborted = True
            if found:
                await self._steering.end(m.RequestMatch(found), lambda: Cancelled("its gateway aborted it"))
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        async with rpc.guarded(context):
            self._only_gateways(context, "HealthCheck")
        if self._engine.dead:
            return pb.HealthCheckResponse(healthy=False, message="the engine is gone")
        state = NodeState.DRAINING if self._serving.draining else self._state()
        return pb.HealthCheckResponse(healthy=state is NodeState.SERVING, message=state.value)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        async with rpc.guarded(context):
            self._only_gateways(context, "GetModelInfo")
        return vllm_facts.model_info(self._engine, self._files)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        async with rpc.guarded(context):
            self._only_gateways(context, "GetServerInfo")
        return vllm_facts.server_info(
            self._engine.limits,
            active=self._serving.unfinished,
            draining=self._serving.draining,
            last_receive=self._last_receive,
            uptime_s=time.monotonic() - self._begun,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        async with rpc.guarded(context):
            self._only_gateways(context, "GetLoads")
        rank = request.dp_rank if request.HasField("dp_rank") else None
        now = datetime.datetime.now(datetime.UTC)
        return vllm_facts.loads(self._serving.load, self._engine.limits, self._policy(), now=now, rank=rank)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The archive in pieces; its digest comes with the last."""
        async with rpc.guarded(context):
            self._only_gateways(context, "GetTokenizer")
            archive = await self._tokenizer(context)
            for start in range(0, len(archive.data), CHUNK_BYTES):
                last = start + CHUNK_BYTES >= len(archive.data)
                yield common_pb2.GetTokenizerChunk(
                    data=archive.data[start : start + CHUNK_BYTES], sha256=archive.sha256 if last else ""
                )

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> NoReturn:
        await _not_here(context, "this worker generates; it has no embeddings")

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: Context) -> NoReturn:
        await _not_here(context, "the prefix cache can't be emptied while the engine runs; restart the worker")

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: Context) -> NoReturn:
        await _not_here(context, "profiles are not taken by this door")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> NoReturn:
        await _not_here(context, "profiles are not taken by this door")

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> NoReturn:
        await _not_here(context, "this worker publishes no KV cache events; GetLoads tells its load")

    async def _tokenizer(self, context: Context) -> Archive:
        directory = self._files.directory
        if directory is None:
            await _not_here(
                context, f"there are no files of {self._engine.model!r} here; give the gateway its tokenizer"
            )
        if self._archive is None or (self._archive.done() and self._archive.exception() is not None):
            self._archive = asyncio.create_task(asyncio.to_thread(tokenizer_archive, directory))
        try:
            # Others may wait for the same one, so a caller that leaves must not end it.
            return await asyncio.shield(self._archive)
        except OSError as e:
            log.warning("no tokenizer to give", because=str(e))
            await _not_here(context, f"the tokenizer of {self._engine.model!r} can't be read here")

    @contextmanager
    def _listed(self, request_id: str) -> Iterator[_Open]:
        """Where Abort finds it, for as long as the block runs."""
        call = _Open()
        calls = self._open.setdefault(request_id, set())
        calls.add(call)
        try:
            yield call
        finally:
            calls.discard(call)
            if not calls and self._open.get(request_id) is calls:
                del self._open[request_id]

    def _only_gateways(self, context: Context, method: str) -> None:
        self._callers.check(context, method, what=SERVICE)


async def _not_here(context: Context, why: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)
    raise AssertionError("abort returns never")
