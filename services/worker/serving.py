"""One request through a worker: decoded, judged, accepted, queued, generated, turned to text.

`Serving.stream` is an async generator of events; closing it, at any moment, frees the queue place and the engine's request. The doors
(`server.py`, `attach.py`) own deadlines and the wire.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import structlog
from opentelemetry import trace

from services.control import PolicyKeeper
from services.worker.engines import ChatRefused, Engine, Job, Stamps
from services.worker.engines.death import described, wants_memory
from services.worker.gate import Gate
from services.worker.measuring import End, Measuring, Ongoing
from services.worker.metrics import WorkerMetrics
from services.worker.steering import Held, Steering
from services.worker.text import TextAssembler
from trimtab import messages as m
from trimtab import validation
from trimtab.errors import Draining, EngineDead, EngineFault, InvalidRequest, ModelNotFound, ResumeRefused, TrimtabError
from trimtab.kit import telemetry

log = structlog.get_logger(__name__)

LONG_TEXT = 20_000
"""Characters above which tokenising leaves the event loop, so that other streams' tokens don't wait for it."""


def prompt_digest(token_ids: tuple[int, ...]) -> bytes:
    """SHA-256 over the ids, each as four little-endian bytes."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def resumable(sampling: m.Sampling) -> bool:
    """Whether a cut stream can be continued exactly elsewhere: not where a sampler's state spans the cut (DESIGN §3)."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    return sampling.structure is None and not any(penalties) and sampling.repetition_penalty in (None, 1.0)


def resumed_seed(seed: int, index: int) -> int:
    """The seed from token `index` on: the right distribution, though not the tokens that the first worker would have drawn."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "little") >> 1


@dataclass(slots=True)
class Progress:
    """What is known of a request so far; the doors read it for the log line of one that ended early."""

    age_s: float = 0.0
    """How long the mesh had it as it came."""
    cap: int = 0
    """Of output tokens, whatever it asks for; 0 is none."""
    prompt_tokens: int = 0
    delivered: int = 0
    cached: int = 0
    stamps: Stamps = field(default_factory=Stamps)
    measured: Ongoing | None = None
    """From its acceptance on."""
    short_of_memory: bool = False
    """The engine ended it for that."""


class Serving:
    """The worker's core. Belongs to one event loop."""

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        gate: Gate,
        keeper: PolicyKeeper,
        metrics: WorkerMetrics,
        measuring: Measuring,
        steering: Steering,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._gate = gate
        self._keeper = keeper
        self._metrics = metrics
        self._measuring = measuring
        self._steering = steering
        self._jobs = 0
        self.draining = False
        self.unfinished = 0

    @property
    def model(self) -> str:
        return self._engine.model

    @property
    def load(self) -> m.Load:
        """The engine's load with our queue's added."""
        load = self._engine.load()
        return replace(
            load,
            waiting=load.waiting + self._gate.waiting,
            queued_prefill_tokens=load.queued_prefill_tokens + self._gate.waiting_tokens,
        )

    async def stream(
        self,
        request: m.Request,
        traceparent: str = "",
        *,
        age_s: float = 0.0,
        left_s: float | None = None,
        cap: int = 0,
    ) -> AsyncGenerator[m.Event, None]:
        """Accepted, then deltas, then Finish; or a TrimtabError. It gets `cap` output tokens at most, whatever it asks for;
        0 is no cap.

        `age_s` is how long the mesh has had it: its place in every queue counts from then. `left_s` is what its deadline leaves, which the
        caller keeps: here it is refused where even one step of the engine takes longer.
        """
        request = replace(request, request_id=request.request_id or uuid.uuid4().hex)
        if cap and (request.sampling.min_tokens or 0) > cap:
            request = replace(request, sampling=replace(request.sampling, min_tokens=cap))
        span = telemetry.tracer().start_span(
            "worker.generate",
            context=telemetry.parse_traceparent(traceparent),
            kind=trace.SpanKind.SERVER,
            attributes={"trimtab.request_id": request.request_id, "trimtab.worker": self._worker_id},
        )
        span.set_attribute("trimtab.policy", str(self._keeper.held))
        arrival = time.monotonic()
        progress = Progress(age_s, cap)
        self.unfinished += 1
        outcome, reason = "cancelled", "CANCELLED"
        try:
            async with aclosing(self._events(request, arrival, age_s, left_s, progress)) as events:
                async for event in events:
                    if isinstance(event, m.Finish):
                        outcome, reason = "ok", event.reason.value
                    yield event
        except TrimtabError as e:
            outcome, reason = e.outcome.value, e.reason
            progress.short_of_memory = isinstance(e, EngineFault) and self._short_of_memory(e)
            telemetry.fail(span, e, e.reason)
            raise
        except Exception as e:
            outcome, reason = "engine_fault", "INTERNAL"
            progress.short_of_memory = self._short_of_memory(e)
            telemetry.fail(span, e, "INTERNAL")
            raise
        finally:
            self.unfinished -= 1
            self._account(request, span, progress, arrival, outcome, reason)

    async def _events(
        self, request: m.Request, arrival: float, age_s: float, left_s: float | None, progress: Progress
    ) -> AsyncGenerator[m.Event, None]:
        if self.draining:
            raise Draining("this worker is draining; the mesh has others, or will have")
        if self._engine.dead:
            raise EngineDead("this worker's engine is gone")
        if request.model and request.model != self._engine.model:
            raise ModelNotFound(
                f"model {request.model!r} is not served here; this worker serves {self._engine.model!r}",
                metadata={"model": request.model},
            )
        validation.check(request)
        validation.check_time(left_s, self._engine.stats().get("step_constant_ms", 0.0))
        prompt = await self._tokenise(request.prompt)
        job, text = self._job(request, prompt, arrival - age_s, progress.cap)
        self._engine.check(job)
        validation.check_isolation(self._keeper.resolved.policy, len(prompt), job.tenant)
        progress.prompt_tokens = len(prompt)
        with self._steering.hold(request.request_id, job) as held:
            # Each is closed with the one outside it: gate and engine are free at once, not when an iterator is dropped.
            async with aclosing(self._admitted(request, held, text, arrival, progress)) as events:
                async for event in events:
                    yield event

    async def _admitted(
        self, request: m.Request, held: Held, text: TextAssembler, arrival: float, progress: Progress
    ) -> AsyncGenerator[m.Event, None]:
        """From the place in the queue on."""
        job = held.job
        ticket, position = self._gate.enter(job.request_id, job.workload, len(job.token_ids), job.arrival_ms)
        held.ticket = ticket
        progress.measured = self._measuring.accepted(request, progress.prompt_tokens, arrival, progress.age_s)
        try:
            yield m.Accepted(
                request_id=request.request_id,
                worker_id=self._worker_id,
                policy=self._keeper.held,
                queue_position=position,
                prompt_tokens=progress.prompt_tokens,
                prompt_digest=prompt_digest(job.token_ids[: progress.prompt_tokens]),
                resumable=resumable(request.sampling),
                model=self._engine.model,
                started=ticket.admitted.done(),
            )
            if not ticket.admitted.done():
                await ticket.admitted
                # Of a worker that dies, a gateway wants to know which requests were in its engine.
                yield m.Notice(m.NoticeKind.STARTED)
            if held.ended is not None:
                # Between the gate and the engine, where nobody else can tell it.
                raise held.ended
            job = replace(job, delta=held.delta, isolated=held.isolated)
            async with aclosing(self._generate(request, job, text, arrival, progress)) as events:
                async for event in events:
                    yield event
        except EngineFault:
            if held.ended is not None:
                raise held.ended from None
            raise
        finally:
            self._gate.leave(ticket)

    async def _tokenise(self, prompt: m.Prompt) -> tuple[int, ...]:
        tokenizer = self._engine.tokenizer
        if isinstance(prompt, str):
            if len(prompt) <= LONG_TEXT:
                return tokenizer.encode(prompt)
            return await asyncio.to_thread(tokenizer.encode, prompt)
        chat = [x for x in prompt if isinstance(x, m.ChatMessage)]
        if not chat:
            return tuple(x for x in prompt if isinstance(x, int))
        try:
            if sum(len(x.content) for x in chat) <= LONG_TEXT:
                return tokenizer.encode_chat(chat)
            return await asyncio.to_thread(tokenizer.encode_chat, chat)
        except ChatRefused as e:
            raise InvalidRequest(f"the model's chat template refused the messages: {e}") from e

    def _job(self, request: m.Request, prompt: tuple[int, ...], arrival: float, cap: int) -> tuple[Job, TextAssembler]:
        s, engine, resume = request.sampling, self._engine, request.resume
        budget = validation.check_tokens(
            prompt, s, max_model_len=engine.limits.max_model_len, vocab_size=engine.tokenizer.vocab_size
        )
        if cap:
            # What a worker that knows no caps has delivered stays delivered.
            budget = min(budget, max(cap, len(resume.token_ids) if resume is not None else 0))
        text = TextAssembler(
            engine.tokenizer.text_stream(prompt, skip_special=s.skip_special_tokens is not False),
            s.stop,
            include_stop=bool(s.include_stop),
            min_tokens=s.min_tokens or 0,
        )
        delivered: tuple[int, ...] = ()
        if resume is not None:
            if resume.prompt_digest != prompt_digest(prompt):
                raise ResumeRefused("the prompt's tokens differ from those of the first attempt")
            if not resumable(s):
                raise ResumeRefused("this request can't be continued exactly elsewhere")
            delivered = resume.token_ids
            if delivered and max(delivered) >= engine.tokenizer.vocab_size:
                # A client may have made it up; an engine must never see it.
                raise ResumeRefused(f"token id {max(delivered)} is delivered, and the vocabulary ends before it")
            if len(delivered) > budget:
                raise ResumeRefused(f"{len(delivered)} tokens are delivered, of {budget} at most")
            if s.seed is not None:
                s = replace(s, seed=resumed_seed(s.seed, len(delivered)))
        # Two attempts of one request may overlap for a moment; the engine must never confuse them.
        self._jobs += 1
        job = Job(
            f"{request.request_id}/{self._jobs}",
            prompt + delivered,
            budget - len(delivered),
            s,
            request.workload or m.Workload.REALTIME,
            delivered=len(delivered),
            arrival_ms=arrival * 1000.0,
            tenant=request.tenant,
        )
        return job, text

    async def _generate(
        self, request: m.Request, job: Job, text: TextAssembler, arrival: float, progress: Progress
    ) -> AsyncGenerator[m.Event, None]:
        index, skip = job.delivered, 0
        if request.resume is not None:
            # What the first worker sent is produced again, silently; text goes on at the byte where it stopped.
            delivered = request.resume.token_ids
            ends = delivered and delivered[-1] in self._stop_tokens(request.sampling)
            replayed = text.push(delivered, silent_last=bool(ends) and not request.sampling.include_stop)
            already = self._ended_already(request, job, replayed.stop)
            # At an end, what was held back for a stop string that did not come has gone out too.
            produced = replayed.text + (text.flush() if already is not None and replayed.stop is None else "")
            raw = produced.encode()
            if len(raw) < request.resume.text_bytes:
                raise ResumeRefused("the delivered text is longer than the delivered tokens give here")
            rest = raw[request.resume.text_bytes :].decode("utf-8", "replace")
            if rest:
                yield m.Delta(index, (), rest)
            skip = job.delivered
            if already is not None:
                # The cut came between the last token and the Finish: there is nothing left to generate.
                usage = m.Usage(progress.prompt_tokens, index, 0)
                yield m.Finish(already, usage, m.Timings(), replayed.stop or "")
                return
        prompt_tokens, measured = progress.prompt_tokens, progress.measured
        async with aclosing(self._engine.generate(job)) as outputs:
            async for out in outputs:
                progress.stamps = out.stamps
                if measured is not None and out.token_ids:
                    self._measuring.output(measured, out.stamps, time.monotonic())
                progress.cached = out.cached_prompt_tokens
                piece = text.push(out.token_ids, silent_last=out.finish == "stop" and not request.sampling.include_stop)
                ended = out.finish is not None or piece.stop is not None
                new_text = piece.text + (text.flush() if ended and piece.stop is None else "")
                tokens = out.token_ids[: piece.kept]
                if tokens or new_text:
                    yield m.Delta(index, tokens, new_text, out.logprobs[: piece.kept])
                index += len(tokens)
                progress.delivered = index - skip
                if ended:
                    reason = m.FinishReason.LENGTH if out.finish == "length" and not piece.stop else m.FinishReason.STOP
                    usage = m.Usage(prompt_tokens, index, out.cached_prompt_tokens)
                    yield m.Finish(reason, usage, timings(arrival, out.stamps), piece.stop or "")
                    return

    def _stop_tokens(self, s: m.Sampling) -> frozenset[int]:
        """Tokens that end this output by themselves."""
        return frozenset(s.stop_token_ids) | (frozenset() if s.ignore_eos else self._engine.eos_token_ids)

    def _ended_already(self, request: m.Request, job: Job, stop: str | None) -> m.FinishReason | None:
        """Whether what was delivered was the whole output, and how it ended."""
        delivered = job.token_ids[len(job.token_ids) - job.delivered :]
        past_min = job.delivered > (request.sampling.min_tokens or 0)
        if stop is not None or (past_min and delivered and delivered[-1] in self._stop_tokens(request.sampling)):
            return m.FinishReason.STOP
        return m.FinishReason.LENGTH if job.max_tokens < 1 else None

    def _short_of_memory(self, error: Exception) -> bool:
        """Whether the engine ended the request for want of memory: by itself, or because it is gone for that."""
        return (self._engine.dead and self._engine.death().out_of_memory) or wants_memory(described(error))

    def _account(
        self, request: m.Request, span: trace.Span, progress: Progress, arrival: float, outcome: str, reason: str
    ) -> None:
        """One log line, the spans of the engine's own stamps, and the counters."""
        now, s = time.monotonic(), progress.stamps
        if s.scheduled:
            telemetry.span_at("queue", span, arrival, s.scheduled)
            if s.first_token:
                attributes = {
                    "gen_ai.usage.input_tokens": progress.prompt_tokens,
                    "trimtab.cached_tokens": progress.cached,
                }
                telemetry.span_at("prefill", span, s.scheduled, s.first_token, attributes)
                telemetry.span_at(
                    "decode", span, s.first_token, s.last_token,
                    {"gen_ai.usage.output_tokens": progress.delivered, "trimtab.preemptions": s.preemptions},
                )  # fmt: skip
        span.set_attribute("trimtab.outcome", outcome)
        span.end()
        t = timings(arrival, s)
        workload = request.workload or m.Workload.REALTIME
        p = progress
        end = End(workload, outcome, p.prompt_tokens, p.delivered, p.cached, t, now, p.short_of_memory)
        self._measuring.ended(end, progress.measured)
        self._metrics.finished(end, progress.measured)
        log.info(
            "request",
            request_id=request.request_id,
            trace_id=f"{span.get_span_context().trace_id:032x}",
            workload=workload.value,
            outcome=outcome,
            reason=reason,
            prompt_tokens=progress.prompt_tokens,
            completion_tokens=progress.delivered,
            queued_ms=round(t.queued_ms, 1),
            ttft_ms=round(t.first_token_ms, 1),
            total_ms=round((now - arrival) * 1000.0, 1),
        )


def timings(arrival: float, s: Stamps) -> m.Timings:
    """From moments to milliseconds; a moment that was not reached gives 0."""

    def between(start: float, end: float) -> float:
        return max(0.0, (end - start) * 1000.0) if start and end else 0.0

    return m.Timings(
        queued_ms=between(arrival, s.scheduled),
        prefill_ms=between(s.scheduled, s.first_token),
        first_token_ms=between(arrival, s.first_token),
        total_ms=between(arrival, s.last_token),
        preemptions=s.preemptions,
    )
