"""The asyncio client: requests as values in, events as values out, failures as the error tree.

Belongs to one event loop. Invariant: leaving an iteration, by its end, by an exception or by closing it, cancels the
call, so that no abandoned generation keeps an engine busy (ECOSYSTEM §2: `break` alone cancels nothing in grpc.aio).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc.aio

from trimtab import codec
from trimtab.errors import StreamCut, TrimtabError
from trimtab.kit import rpc
from trimtab.kit.tls import Tls
from trimtab.messages import Delta, Event, Finish, Request
from trimtab.v1 import inference_pb2, inference_pb2_grpc

_CONNECT_FAILED = re.compile("failed to connect to all addresses|errors? resolving|resolution failed", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served. `max_model_len` is its window in tokens; 0 means unknown."""

    name: str
    max_model_len: int


class Unreachable(TrimtabError):
    """Nobody answers at the address: no call was made."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    reason = "UNREACHABLE"
    default_retry_after_ms = 1000


class Client:
    """Talks to a gateway, or straight to a worker, at `address` (host:port). With TLS its certificate must be of that `kind`."""

    def __init__(self, address: str, *, kind: str = "gateway", tls: Tls | None = None) -> None:
        self.address = address
        self._kind = kind
        self._tls = tls
        self._channel = rpc.channel(address, kind, tls=tls)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def generate(
        self, request: Request, *, timeout_s: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[Event, None]:
        """The request's events: Accepted first, Finish last.

        Raises the error tree; Unreachable when nobody listens; StreamCut when the connection is lost on the way, or the
        stream ends without its Finish. Wrap it in `contextlib.aclosing` where the call must be cancelled the moment
        that the loop is left; otherwise it is cancelled when the iterator is dropped. `traceparent` (W3C) makes the
        request's spans children of the caller's.
        """
        metadata = (("traceparent", traceparent),) if traceparent else None
        call = self._stub.Generate(codec.encode_request(request), timeout=timeout_s, metadata=metadata)
        begun, delivered = False, 0
        try:
            async for message in call:
                begun = True
                event = codec.decode_event(message)
                if isinstance(event, Delta):
                    delivered += len(event.token_ids)
                if event is not None:
                    yield event
                if isinstance(event, Finish):
                    return
            raise _cut(delivered, "it ended without a finish")
        except grpc.aio.AioRpcError as e:
            error = self._explain(e)
            raise (_cut(delivered, error.message) if begun and _is_transport(error) else error) from e
        finally:
            call.cancel()

    async def complete(
        self, request: Request, *, timeout_s: float | None = None, traceparent: str = ""
    ) -> tuple[str, Finish]:
        """The whole text and how it ended."""
        parts: list[str] = []
        async with aclosing(self.generate(request, timeout_s=timeout_s, traceparent=traceparent)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    parts.append(event.text)
                elif isinstance(event, Finish):
                    return "".join(parts), event
        raise AssertionError("generate ends with Finish or raises")

    async def models(self, *, timeout_s: float = 10.0) -> tuple[Model, ...]:
        """What is served at this address."""
        try:
            answer = await self._stub.ListModels(inference_pb2.ListModelsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as e:
            raise self._explain(e) from e
        return tuple(Model(m.name, m.max_model_len) for m in answer.models)

    def _explain(self, error: grpc.aio.AioRpcError) -> TrimtabError:
        """gRPC gives a refused connection and a server's own UNAVAILABLE one code; only a server's carries a reason."""
        kind = rpc.from_call(error)
        if _is_transport(kind) and _CONNECT_FAILED.search(kind.message):
            if fault := rpc.tls_fault(kind.message, self._kind, tls=self._tls):
                return Unreachable(f"can't talk to {self.address}: {fault}")
            return Unreachable(f"nothing answers at {self.address} ({kind.message.rsplit(': ', 1)[-1]})")
        return kind

    async def close(self) -> None:
        """Cancels what still runs."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _is_transport(error: TrimtabError) -> bool:
    return error.grpc_code == "UNAVAILABLE" and error.reason == "UNAVAILABLE"


def _cut(delivered: int, why: str) -> StreamCut:
    return StreamCut(
        f"the stream was cut after {delivered} tokens: {why}", metadata={"tokens_delivered": str(delivered)}
    )
