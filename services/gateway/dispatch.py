"""What every call of a gateway shares: workers, bounds, lines, and how much a prompt weighs."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import time
from collections.abc import Callable, Mapping

from opentelemetry.context import Context

from services.gateway.admission import Admission
from services.gateway.call import Call
from services.gateway.endpoint import Endpoint
from services.gateway.endpoints import Endpoints
from services.gateway.line import EVERYBODY, Line
from services.gateway.metrics import GatewayMetrics
from services.gateway.quarantine import Quarantine
from services.gateway.search import Kind
from trimtab import breaking, routing
from trimtab.errors import Outcome
from trimtab.messages import Prompt, Request, Workload
from trimtab.policy import Isolation, Policy
from trimtab.tenant import DEFAULT, Tenant
from trimtab.v1 import inference_pb2
from trimtab.validation import MAX_REQUEST_ID

BYTES_PER_TOKEN = 4.0
"""To begin with; learned from what workers say of real prompts."""
LEARNING = 0.05
SWEEP_S = 0.25
MAX_START = (1 << 32) - 1
PREFIX_BYTES = 1024
"""Prompts that begin alike for so long are sent to the same worker, where its load allows: it may have their KV."""


class Dispatch:
    """Belongs to one event loop."""

    def __init__(
        self,
        endpoints: Endpoints,
        metrics: GatewayMetrics,
        admission: Admission,
        *,
        policy: Callable[[], Policy] = Policy,
        default_workload: Workload,
        deadline_s: Mapping[Workload, float],
    ) -> None:
        self.endpoints = endpoints
        self.metrics = metrics
        self.admission = admission
        self.policy = policy
        self.default_workload = default_workload
        self.deadline_s = deadline_s
        self.starts = itertools.count(1)
        self.places = itertools.count(1)
        self.quarantine = Quarantine()
        self._lines: dict[tuple[Workload, str], Line] = {}
        self._bytes_per_token: dict[str, float] = {}

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        tenant: Tenant = DEFAULT,
        timeout_s: float | None = None,
        parent: Context | None = None,
    ) -> Call:
        """A request's call, to be read once. `timeout_s` None takes the workload's default; the message becomes the call's own."""
        return Call(self, request, tenant, timeout_s, parent)

    def named(self, header: str) -> str:
        """The request id of a call that a header names: that, or one made of it while another request here has it. Services hand the id that
        they were called by on to all the calls that they make, several at a time.
        """
        if header not in self.admission.live:
            return header
        return f"{header[: MAX_REQUEST_ID - 9]}~{random.getrandbits(32):08x}"

    def next_start(self) -> int:
        """A number for a Start, of all of this gateway's; the wire has 32 bits for it."""
        return (next(self.starts) - 1) % MAX_START + 1

    def pick(self, model: str, want: routing.Want) -> tuple[Endpoint, routing.Pick]:
        """A worker for it; see `routing.pick`."""
        workers = self.endpoints.workers(model)
        draw = [random.random() for _ in range(routing.draws(len(workers.endpoints)))]
        view = workers.seen(want.workload, time.monotonic() * 1000.0)
        pick = routing.pick(view, want, draw, workers.ring)
        return workers.by_id[pick.node_id], pick

    def anybody_before(self, workload: Workload, model: str, place: int) -> bool:
        """Whether somebody waits for a worker of this model who was here before."""
        line = self._lines.get((workload, model))
        return line is not None and line.before(place)

    async def wait(
        self,
        workload: Workload,
        model: str,
        place: int,
        kind: Kind,
        woken: asyncio.Future[bool],
        within_s: float | None,
    ) -> bool:
        """In the line for a worker of this model; see `Line.wait`."""
        line = self._lines.setdefault((workload, model), Line())
        if workload is Workload.BATCH and not line:
            asyncio.get_running_loop().call_soon(self._tell_all, model)
        try:
            return await line.wait(place, kind, woken, within_s)
        finally:
            if not line:
                # Clients choose names: a line that nobody stands in is not kept.
                self._lines.pop((workload, model), None)

    def moved(self, endpoint: Endpoint) -> None:
        """A worker has said something: whoever waited for it may be served."""
        if not endpoint.serving or endpoint.guard.gate(time.monotonic() * 1000.0) is breaking.Gate.SHUT:
            return
        for workload in Workload:
            line = self._lines.get((workload, endpoint.model))
            if line and (room := endpoint.room(workload)) > 0:
                line.serve(room, functools.partial(self._quota, endpoint, workload, room))
        if not endpoint.told_wants:
            endpoint.tell_wants(self._wanted(endpoint))

    def _quota(self, endpoint: Endpoint, workload: Workload, room: int, kind: Kind) -> int:
        """How many of this kind it may be given now, of `room`."""
        if not kind.suits(endpoint):
            return 0
        return room if workload is Workload.REALTIME or kind.tenant is None else self.admission.left(kind.tenant, room)

    def _wanted(self, endpoint: Endpoint) -> int:
        """BATCH requests that wait here and that this worker could take, were there room."""
        line = self._lines.get((Workload.BATCH, endpoint.model))
        if not line or endpoint.guard.gate(time.monotonic() * 1000.0) is breaking.Gate.SHUT:
            return 0
        return line.able(functools.partial(self._quota, endpoint, Workload.BATCH, EVERYBODY))

    def _tell_all(self, model: str) -> None:
        """Somebody begins to wait where nobody did."""
        for endpoint in self.endpoints.serving():
            if endpoint.model == model:
                endpoint.tell_wants(self._wanted(endpoint))

    async def sweep(self) -> None:
        """For the life of the process: some things change without a word, such as a breaker's time or a tenant's share."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for endpoint in self.endpoints.serving():
                self.moved(endpoint)
                endpoint.tell_wants(self._wanted(endpoint))

    def observe(self, endpoint: Endpoint, outcome: Outcome, probe: bool, ttft_ms: float | None) -> None:
        """An attempt ended there: see `Attempt`."""
        now_ms = time.monotonic() * 1000.0
        median_ms = self.endpoints.peers_median_ms(endpoint, now_ms) if ttft_ms is not None else None
        endpoint.guard.observe(outcome, now_ms=now_ms, probe=probe, ttft_ms=ttft_ms, peers_median_ms=median_ms)

    def waiting(self, workload: Workload) -> int:
        return sum(len(line) for (w, _), line in self._lines.items() if w is workload)

    def tokens_of(self, request: Request) -> int:
        """Of its prompt: exact for ids, else as text of this model has weighed so far."""
        ids, size = _size(request.prompt)
        return ids or max(1, int(size / self._bytes_per_token.get(request.model, BYTES_PER_TOKEN)))

    def learn(self, request: Request, prompt_tokens: int) -> None:
        """A worker has counted them."""
        ids, size = _size(request.prompt)
        if ids or prompt_tokens < 8:
            return
        known = self._bytes_per_token.get(request.model, BYTES_PER_TOKEN)
        self._bytes_per_token[request.model] = known + LEARNING * (size / prompt_tokens - known)

    def want(self, request: Request, workload: Workload, *, apart: bool = False) -> routing.Want:
        """What it needs of a worker; `apart` where one has said that it belongs elsewhere."""
        isolate = self.policy().isolate
        apart = apart or (
            isolate.action == Isolation.POOL
            and (request.tenant in isolate.tenants or self.tokens_of(request) >= isolate.from_tokens)
        )
        # Without a pool for such requests there is nobody to ask but the others, who then say what is missing.
        need = (
            routing.Need.ISOLATION if apart and self.endpoints.has_isolation_pool(request.model) else routing.Need.ANY
        )
        return routing.Want(workload, need, routing.key_of(request.session_id, _head(request.prompt)))


def _size(prompt: Prompt) -> tuple[int, int]:
    """(token ids, bytes of text)."""
    if isinstance(prompt, str):
        return 0, len(prompt.encode("utf-8", "surrogatepass"))
    if prompt and isinstance(prompt[0], int):
        return len(prompt), 0
    return 0, sum(len(m.content.encode("utf-8", "surrogatepass")) + 8 for m in prompt if not isinstance(m, int))


def _head(prompt: Prompt) -> bytes:
    """Its beginning, where it is long enough to be worth being near to."""
    if isinstance(prompt, str):
        head = prompt[:PREFIX_BYTES]
    elif prompt and isinstance(prompt[0], int):
        head = repr(prompt[: PREFIX_BYTES // 4])
    else:
        head = "\0".join(m.content for m in prompt[:2] if not isinstance(m, int))[:PREFIX_BYTES]
    return head.encode("utf-8", "surrogatepass") if len(head) >= PREFIX_BYTES // 4 else b""
