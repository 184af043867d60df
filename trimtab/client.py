"""The asyncio client: requests as values in, events as values out, failures as the error tree.

Belongs to one event loop. Invariants: leaving an iteration, by its end, by an exception or by closing it, cancels the call, so that no
abandoned generation keeps an engine busy (ECOSYSTEM §2: `break` alone cancels nothing in grpc.aio); a stream whose gateway is lost goes on at
another one, or at the same one when it is back, with the next token and byte (`trimtab.client_stream` decides).
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc.aio

from trimtab import client_stream, codec
from trimtab.client_stream import Received
from trimtab.errors import DeadlineExceeded, Draining, TrimtabError
from trimtab.kit import rpc
from trimtab.kit.renewing import Renewing
from trimtab.kit.tls import Tls, is_loopback
from trimtab.messages import Delta, Event, Finish, Request
from trimtab.v1 import inference_pb2, inference_pb2_grpc

ATTEMPTS = 4
SHUN_S = 5.0
"""So long an address that was lost, or that drains, is passed over where there are others."""
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
    reason = client_stream.UNREACHABLE
    default_retry_after_ms = 1000


class _Place:
    """A connection to one address."""

    def __init__(self, address: str, kind: str, tls: Tls | None) -> None:
        self.address = address
        self.door = Renewing(address, kind, _stub, tls=tls)
        self.shunned_until = 0.0


class _Places:
    """The addresses of one client, which take turns."""

    def __init__(self, places: list[_Place]) -> None:
        self.all = places
        self.met = False
        """Somebody has answered. Until then that nobody does is no outage, but an address that is wrong or a mesh that does not run."""
        self.heard_at = 0.0
        self.away = ""
        """Why the last try of all of them reached nobody; empty once somebody has answered since."""
        self._turn = random.randrange(len(places))

    def choose(self, tried: set[_Place]) -> _Place:
        """The next in turn, of those that were not tried and of late not lost, as far as there are any."""
        self._turn = (self._turn + 1) % len(self.all)
        in_turn = self.all[self._turn :] + self.all[: self._turn]
        now = time.monotonic()
        return min(in_turn, key=lambda p: (p in tried, max(0.0, p.shunned_until - now)))

    def heard(self, place: _Place) -> None:
        """It answers."""
        self.met = True
        self.away, self.heard_at = "", time.monotonic()
        place.shunned_until = 0.0

    def shun(self, place: _Place) -> None:
        """It is gone, or will be."""
        place.shunned_until = time.monotonic() + SHUN_S


class Client:
    """Talks to a gateway, or straight to a worker, at `address`: host:port, or several as a sequence or with commas between them, which are
    gateways of one mesh and take turns.

    With TLS their certificates must be of that `kind`; its own, once renewed on disk, is shown from the next call on. `key` is an API key; it
    is sent in plain text to loopback addresses only, unless `insecure_key`: ValueError otherwise, and for a key that no header can hold.
    `attempts` bounds the calls that one request makes. `connections` are opened to each address, and take turns too: a gateway of several
    processes has each of them with one of those.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        kind: str = "gateway",
        tls: Tls | None = None,
        key: str = "",
        insecure_key: bool = False,
        attempts: int = ATTEMPTS,
        connections: int = 1,
    ) -> None:
        addresses = _addresses(address)
        if key and not insecure_key and tls is None and not rpc.uses_tls():
            _check_private(addresses)
        if not (key.isascii() and key.isprintable()):
            raise ValueError(
                "the key holds characters that can't be sent; it must be printable ASCII, without line ends"
            )
        self.address = ",".join(addresses)
        self._kind = kind
        self._tls = tls
        self._attempts = attempts
        self._metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {key}"),) if key else ()
        if connections < 1:
            raise ValueError(f"there must be at least one connection, not {connections}")
        self._places = _Places([_Place(each, kind, tls) for _ in range(connections) for each in addresses])

    @property
    def away(self) -> str:
        """Why nobody answers at any address now, as the last try found it; empty while somebody does. Requests that may go on are trying."""
        return self._places.away

    async def generate(
        self, request: Request, *, timeout_s: float | None = None, traceparent: str = "", attempts: int | None = None
    ) -> AsyncGenerator[Event, None]:
        """The request's events: Accepted first, Finish last.

        A stream whose connection is lost, or whose gateway drains, goes on elsewhere; a notice (RESUMED) tells. `timeout_s` is for all calls
        together, `attempts` is how many there may be. Raises the error tree; Unreachable when nobody listens; StreamCut with the count when a
        stream that had begun can't go on, or ends without its Finish. Wrap it in `contextlib.aclosing` where the call must be cancelled the
        moment that the loop is left; otherwise it is cancelled when the iterator is dropped. `traceparent` (W3C) makes the request's spans
        children of the caller's.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        metadata = (*self._metadata, ("traceparent", traceparent)) if traceparent else self._metadata
        received = Received(request.resume)
        path = _Path(self._places, received, until, self._attempts if attempts is None else attempts)
        path.timeout_s = timeout_s
        while True:
            place = path.next_place()
            call = self._call(place, received.request(request, path.attempt), path.left_s, metadata)
            try:
                async with aclosing(call) as events:
                    async for event in events:
                        shown = received.take(event, path.why)
                        path.heard(place)
                        if shown is not None:
                            yield shown
                        if isinstance(event, Finish):
                            return
                raise received.cut("it ended without a finish")
            except TrimtabError as e:
                await path.after(e, place)

    async def complete(
        self, request: Request, *, timeout_s: float | None = None, traceparent: str = "", attempts: int | None = None
    ) -> tuple[str, Finish]:
        """The whole text and how it ended."""
        parts: list[str] = []
        stream = self.generate(request, timeout_s=timeout_s, traceparent=traceparent, attempts=attempts)
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Delta):
                    parts.append(event.text)
                elif isinstance(event, Finish):
                    return "".join(parts), event
        raise AssertionError("generate ends with Finish or raises")

    async def models(self, *, timeout_s: float = 10.0) -> tuple[Model, ...]:
        """What is served, by the first address that answers."""
        tried: set[_Place] = set()
        while True:
            place = self._places.choose(tried)
            tried.add(place)
            try:
                request = inference_pb2.ListModelsRequest()
                with place.door.call() as stub:
                    answer = await stub.ListModels(request, timeout=timeout_s, metadata=self._metadata or None)
            except grpc.aio.AioRpcError as e:
                error = self._explain(place, e)
                if not client_stream.is_lost(error):
                    self._places.heard(place)
                    raise error from e
                self._places.shun(place)
                if len(tried) == len(self._places.all):
                    raise error from e
            else:
                self._places.heard(place)
                return tuple(Model(m.name, m.max_model_len) for m in answer.models)

    async def _call(
        self, place: _Place, request: Request, timeout_s: float | None, metadata: tuple[tuple[str, str], ...]
    ) -> AsyncGenerator[Event, None]:
        """One call's events, to its end or its error."""
        with place.door.call() as stub:
            call = stub.Generate(codec.encode_request(request), timeout=timeout_s, metadata=metadata or None)
            try:
                async for message in call:
                    event = codec.decode_event(message)
                    if event is not None:
                        yield event
            except grpc.aio.AioRpcError as e:
                raise self._explain(place, e) from e
            finally:
                call.cancel()

    def _explain(self, place: _Place, error: grpc.aio.AioRpcError) -> TrimtabError:
        """gRPC gives a refused connection and a server's own UNAVAILABLE one code; only a server's carries a reason."""
        kind = rpc.from_call(error)
        if client_stream.is_lost(kind) and _CONNECT_FAILED.search(kind.message):
            if fault := rpc.tls_fault(kind.message, self._kind, tls=self._tls):
                return Unreachable(f"can't talk to {place.address}: {fault}")
            return Unreachable(f"nothing answers at {place.address} ({kind.message.rsplit(': ', 1)[-1]})")
        return kind

    async def close(self) -> None:
        """Cancels what still runs."""
        for place in self._places.all:
            await place.door.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Path:
    """One request's way over the addresses. `until` is on the monotonic clock."""

    def __init__(self, places: _Places, received: Received, until: float | None, attempts: int) -> None:
        self.attempt = 0
        self.timeout_s: float | None = None
        """What the caller gave, to say it by."""
        self._places = places
        self._received = received
        self._until = until
        self._attempts = attempts
        self._tokens = 0
        self._heard = False
        """In this call."""
        self._tried: set[_Place] = set()
        """Since the last token, or the last pause."""
        self._rounds = 0
        self._called_at = 0.0
        self._lost_by: TrimtabError | None = None

    @property
    def left_s(self) -> float | None:
        return None if self._until is None else self._until - time.monotonic()

    @property
    def why(self) -> str:
        """What ended the call before this one."""
        return self._lost_by.message if self._lost_by is not None else ""

    def next_place(self) -> _Place:
        self.attempt += 1
        self._heard = False
        self._called_at = time.monotonic()
        return self._places.choose(self._tried)

    def heard(self, place: _Place) -> None:
        """It has said something."""
        if not self._heard:
            self._heard = True
            self._places.heard(place)
        if self._received.tokens > self._tokens:
            self._tokens = self._received.tokens
            self._tried.clear()
            self._rounds = 0

    async def after(self, error: TrimtabError, place: _Place) -> None:
        """The call to `place` ended so: returns when the next one is due, else raises what the caller is to hear."""
        if isinstance(error, DeadlineExceeded) and self.timeout_s is not None:
            raise DeadlineExceeded(
                f"the deadline of {self.timeout_s:g} s passed, after {self._received.tokens} tokens"
            ) from error
        lost = client_stream.is_lost(error)
        if error.reason != Unreachable.reason:
            self._places.met = True
        if lost or isinstance(error, Draining):
            self._places.shun(place)
        if self._lost_by is None or self._heard:
            self._lost_by = error
        self._tried.add(place)
        everywhere = len(self._tried) == len(self._places.all)
        # What began before somebody else was heard says nothing of now.
        if lost and everywhere and self._places.heard_at < self._called_at:
            self._places.away = error.message
        again = client_stream.may_go_on(error, self._received, attempt=self.attempt, attempts=self._attempts)
        if again and not everywhere:
            return
        if again and self._places.met:
            self._tried.clear()
            self._rounds += 1
            pause_s = client_stream.pause_ms(self._rounds, error.retry_after_ms, random.random) / 1000.0
            if self.left_s is None or pause_s < self.left_s:
                await asyncio.sleep(pause_s)
                return
        last = client_stream.last_word(error, self._received, self._lost_by)
        if last is error:
            raise error
        raise last from error


def _stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceServiceAsyncStub:
    # The generated constructor answers with the class of the channel that it is given.
    return inference_pb2_grpc.InferenceServiceStub(channel)


def _addresses(address: str | Sequence[str]) -> list[str]:
    parts = address.split(",") if isinstance(address, str) else address
    found = list(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not found:
        raise ValueError("no address to talk to; give host:port")
    return found


def _check_private(addresses: list[str]) -> None:
    far = [each for each in addresses if not is_loopback(each)]
    if far:
        raise ValueError(
            f"the key would go to {', '.join(far)} in plain text; use TLS (TRIMTAB_TLS_CA, TRIMTAB_TLS_CERT and TRIMTAB_TLS_KEY), "
            "or insecure_key=True where the network itself is safe"
        )
