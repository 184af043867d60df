"""The simulated engine: `trimtab.engine` stepped in real time. It needs no model, starts at once and says the same words each time.

It shows how everything around an engine behaves; what it proves of vLLM is nothing. It ignores how tokens would be sampled
(temperature, penalties, seed, bias) and refuses what it can't imitate (structured output).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from services.worker.engines import Applied, Job, Output, Stamps, reblocks
from services.worker.engines.death import Death, death_of, described
from services.worker.engines.tokenizers import ByteTokenizer
from trimtab.blocks import Geometry, Reblock, When, context_of
from trimtab.engine import Costs, EngineValue
from trimtab.errors import EngineDead, EngineFault, InvalidRequest, ReblockRefused, Violation
from trimtab.messages import Load, TokenLogprobs, TopLogprob
from trimtab.policy import Policy
from trimtab.progress import Pulse
from trimtab.scheduling import STATS, Rules
from trimtab.snapshot import Document, Limits, Node, resolve

WORDS = "the trim tab turns the rudder, and the rudder turns the ship — 小さな舵 🚢 "
NATURAL_LENGTH = 48
"""Output tokens after which a request without `ignore_eos` ends by itself, at least; a share of the prompt's digest is added."""

KV_BYTES_PER_TOKEN = 70_272.0
"""Of DeepSeek-V3 in 16 bits: 61 layers, each with 576 numbers a token."""
BLOCK_SIZE = 16
BLOCK_SIZE_MULTIPLE = 8
"""It takes block sizes that are multiples of this, as attention back ends have one."""


@dataclass(slots=True)
class _Live:
    job: Job
    offset: int
    output_len: int
    ends_by_itself: bool
    inbox: asyncio.Queue[Output | None] = field(default_factory=asyncio.Queue)
    scheduled: float = 0.0
    first: float = 0.0
    preemptions: int = 0


class SimulatedEngine:
    def __init__(
        self,
        *,
        model: str,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int,
        step_ms: float,
        token_us: float,
        kv_blocks: int | None = None,
    ) -> None:
        """`kv_blocks` of 16 tokens; None gives four times what one request takes at most, and 4,096 at least."""
        self.model = model
        self.kv_bytes_per_token = KV_BYTES_PER_TOKEN
        self.even_blocks = True
        self.own_blocks = 0
        self.tokenizer = ByteTokenizer()
        self.eos_token_ids = frozenset({ByteTokenizer.EOS})
        blocks = kv_blocks or max(4096, 4 * max_model_len // BLOCK_SIZE)
        self.limits = Limits(max_num_seqs, max_step_tokens, max_model_len, BLOCK_SIZE, blocks, "simulated")
        resolved = resolve(Document(), Node(model, limits=self.limits), now_unix_ms=0)
        rules = Rules.of(resolved.policy, self.limits)
        self._value = EngineValue(Costs(step_ms, token_us), BLOCK_SIZE, blocks, rules)
        self.limits = replace(self.limits, block_sizes=reblocks.on_the_ladder(self._takes), live_blocks=True)
        self._live: dict[str, _Live] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pulse = Pulse()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="simulated engine")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for live in self._live.values():
            live.inbox.put_nowait(None)

    def check(self, job: Job) -> None:
        if job.sampling.structure is not None:
            why = "the simulated engine has no grammar; use --engine vllm"
            raise InvalidRequest(why, violations=(Violation(f"sampling.{job.sampling.structure.kind.value}", why),))

    async def generate(self, job: Job) -> AsyncGenerator[Output, None]:
        if self._task is None or self._task.done():
            raise EngineDead("the simulated engine is not running")
        prompt = job.token_ids[: len(job.token_ids) - job.delivered]
        digest = int.from_bytes(hashlib.sha256(repr(prompt).encode()).digest()[:4], "little")
        offset = len(WORDS[: digest % len(WORDS)].encode())
        natural = max(1, NATURAL_LENGTH + digest % NATURAL_LENGTH - job.delivered)
        by_itself = not job.sampling.ignore_eos and natural <= job.max_tokens
        live = _Live(job, offset + job.delivered, natural if by_itself else job.max_tokens, by_itself)
        self._live[job.request_id] = live
        arrival_ms = job.arrival_ms or time.monotonic() * 1000.0
        self._value.add(
            job.request_id, len(job.token_ids), live.output_len, job.workload, arrival_ms,
            tenant=job.tenant, delta=job.delta, isolated=job.isolated,
        )  # fmt: skip
        self._wake.set()
        try:
            while True:
                output = await live.inbox.get()
                if output is None:
                    if self.dead or self._task is None:
                        raise EngineDead("the simulated engine stopped")
                    raise EngineFault("the engine ended the request by itself: abort")
                yield output
                if output.finish is not None:
                    return
        finally:
            self._live.pop(job.request_id, None)
            self._value.remove(job.request_id)

    async def apply(self, policy: Policy) -> Applied:
        self._value.set_rules(Rules.of(policy, self.limits))
        return Applied(self._value.steps + 1)

    async def steer(
        self, request_ids: Sequence[str], *, delta: int | None = None, isolated: bool | None = None
    ) -> None:
        self._value.planner.steer(request_ids, delta=delta, isolated=isolated)

    async def reblock(
        self,
        block_size: int,
        *,
        when: When = When.IDLE,
        max_recompute_tokens: int = 2000,
        carry: bool = True,
        dry_run: bool = False,
    ) -> Reblock:
        """Whatever `carry` says: it has no KV to carry, and is as an engine whose layout is not known."""
        await self.ping()
        if self._task is None or self._task.done():
            raise EngineDead("the simulated engine is not running")
        value, accepted = self._value, self.limits.block_sizes
        before = Geometry(value.block_size, value.total_blocks)
        if reblocks.sized(block_size, accepted) == before.block_size:
            return Reblock(before, before, dry_run=dry_run)
        if block_size % BLOCK_SIZE_MULTIPLE:
            why = (
                f"the simulated engine's blocks are multiples of {BLOCK_SIZE_MULTIPLE} tokens, and {block_size} is none"
            )
            raise ReblockRefused(why, cause="SIZE", accepted=accepted)
        after = Geometry(block_size, value.kv_tokens // block_size)
        reblocks.refuse_long(self.limits.max_model_len, after, accepted, usable=after.total_blocks)
        context = sum(context_of(s.computed) for s in value.running)
        found = Reblock(
            before, after, value.resident_tokens, len(value.running), recompute_context=context, dry_run=dry_run
        )
        reblocks.refuse_busy(found, when, max_recompute_tokens, accepted)
        if dry_run:
            return found
        begun = time.monotonic()
        for request_id in value.reblock(block_size):
            if live := self._live.get(request_id):
                live.preemptions += 1
        self.limits = replace(self.limits, block_size=block_size, total_blocks=value.total_blocks)
        return replace(found, change_ms=(time.monotonic() - begun) * 1000.0)

    def _takes(self, block_size: int) -> bool:
        fits = self._value.kv_tokens // block_size * block_size >= self.limits.max_model_len
        return block_size % BLOCK_SIZE_MULTIPLE == 0 and fits

    async def ping(self) -> None:
        """It has no process of its own that could be stuck."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if live := self._live.get(request_id):
                live.inbox.put_nowait(None)

    def load(self) -> Load:
        return self._value.load()

    def stats(self) -> dict[str, float]:
        return dict(zip(STATS, self._value.planner.stats(), strict=True))

    def owes(self) -> int:
        load = self._value.load()
        return load.running + load.waiting

    def pulse(self) -> Pulse:
        return self._pulse

    @property
    def dead(self) -> bool:
        return self._task is not None and self._task.done()

    def death(self) -> Death:
        if self._task is None or self._task.cancelled() or (error := self._task.exception()) is None:
            return Death("the simulated engine stopped")
        return death_of(described(error), killed=False)

    async def _run(self) -> None:
        try:
            await self._run_steps()
        finally:
            # Whoever waits for a token is told that none will come.
            for live in self._live.values():
                live.inbox.put_nowait(None)

    async def _run_steps(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self._value.busy:
                self._wake.clear()
                await self._wake.wait()
                due = loop.time()
            begun = time.monotonic()
            result = self._value.step(begun * 1000.0)
            self._pulse = Pulse(self._value.steps, begun, result.cost_ms, ended=False)
            for request_id in result.started:
                if (live := self._live.get(request_id)) and not live.scheduled:
                    live.scheduled = begun
            for request_id in result.preempted:
                if live := self._live.get(request_id):
                    live.preemptions += 1
            due = max(due + result.cost_ms / 1000.0, loop.time())
            await self._pass(due - loop.time())
            self._pulse = Pulse(self._value.steps, begun, result.cost_ms)
            ended = time.monotonic()
            for emission in result.emissions:
                if live := self._live.get(emission.request_id):
                    live.inbox.put_nowait(self._output(live, emission.index, emission.last, ended))

    async def _pass(self, seconds: float) -> None:
        """The step's time."""
        await asyncio.sleep(seconds)

    def _output(self, live: _Live, index: int, last: bool, now: float) -> Output:
        data = WORDS.encode()
        token = data[(live.offset + index) % len(data)]
        if last and live.ends_by_itself:
            token = ByteTokenizer.EOS
        if index == 0:
            live.first = now
        finish = None if not last else ("stop" if live.ends_by_itself else "length")
        logprobs: tuple[TokenLogprobs, ...] = ()
        if live.job.sampling.logprobs is not None:
            raw = self.tokenizer.token_bytes(token)
            top = (TopLogprob(token, 0.0, raw),) if live.job.sampling.logprobs else ()
            logprobs = (TokenLogprobs(0.0, raw, top),)
        return Output((token,), finish, logprobs, Stamps(live.scheduled, live.first, now, live.preemptions))
