"""What is kept of one request for its log line, its span and its metrics; all written once, at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, set_span_in_context

from services.gateway.metrics import GatewayMetrics, Kind
from trimtab.errors import Outcome, TrimtabError
from trimtab.kit import telemetry
from trimtab.messages import ChatMessage, Finish, Request, Workload
from trimtab.policy import Policy
from trimtab.scheduling import LengthClass, edges_of

log = structlog.get_logger(__name__)


class Account:
    """Starts with the request. Names follow the GenAI semantic conventions; no content is ever recorded."""

    def __init__(
        self,
        request: Request,
        workload: Workload,
        parent: Context | None,
        metrics: GatewayMetrics,
        policy: Callable[[], Policy],
    ) -> None:
        self.started = time.monotonic()
        self.first_token_at: float | None = None
        self.tokens = 0
        self.attempts = 0
        self.resumes = 0
        self.worker = ""
        self.finish: Finish | None = None
        self.prompt_tokens = 0
        self._last_token_at: float | None = None
        self._cut_at: float | None = None
        """When the last token came before a move whose first one has not."""
        self._request = request
        self._workload = workload
        self._metrics = metrics
        self._policy = policy
        chat = bool(request.prompt) and isinstance(request.prompt[0], ChatMessage)
        self._operation = "chat" if chat else "text_completion"
        # Attributes are set at the end: nothing that can wait stands before the first token.
        self.span = telemetry.tracer().start_span(
            f"{self._operation} {request.model}", context=parent, kind=SpanKind.SERVER
        )

    @property
    def trace_id(self) -> str:
        return f"{self.span.get_span_context().trace_id:032x}"

    def attempt(self, worker: str, why: str) -> Span:
        """A span for one worker's try."""
        self.attempts += 1
        self.worker = worker
        if self.attempts > 1:
            self._metrics.retried()
        return telemetry.tracer().start_span(
            "dispatch",
            context=set_span_in_context(self.span),
            kind=SpanKind.CLIENT,
            attributes={"trimtab.worker": worker, "trimtab.attempt": self.attempts, "trimtab.pick": why},
        )

    def moved(self, cause: str, *, begun: bool) -> None:
        """It goes to another worker; `begun`: it goes on there in the middle of its output."""
        if begun:
            self.resumes += 1
            self._cut_at = self._last_token_at
            self._metrics.resumed(cause)

    def delivered(self, tokens: int) -> None:
        now = time.monotonic()
        if tokens:
            if self.first_token_at is None:
                self.first_token_at = now
                self._metrics.first_token(self._kind(), now - self.started)
            if self._cut_at is not None:
                self._metrics.resume_gap(now - self._cut_at)
                self._cut_at = None
            self._last_token_at = now
        self.tokens += tokens

    def close(self, error: BaseException | None) -> None:
        """`error` is what ended the request, None when it finished; anything outside the error tree is the caller leaving or a fault of ours."""
        total_s = time.monotonic() - self.started
        ttft_s = None if self.first_token_at is None else self.first_token_at - self.started
        outcome, reason = _verdict(error, self.finish)
        facts: dict[str, Any] = {}
        if self.finish is not None:
            self.prompt_tokens = self.finish.usage.prompt_tokens
            self.span.set_attribute("gen_ai.response.finish_reasons", [self.finish.reason.value])
            self.span.set_attribute("gen_ai.usage.cache_read.input_tokens", self.finish.usage.cached_prompt_tokens)
        if error is not None:
            telemetry.fail(self.span, error, reason)
            facts |= {"error": str(error)} if str(error) else {}
        self.span.set_attribute("gen_ai.usage.input_tokens", self.prompt_tokens)
        self.span.set_attribute("gen_ai.usage.output_tokens", self.tokens)
        if ttft_s is not None:
            self.span.set_attribute("gen_ai.response.time_to_first_chunk", ttft_s)
            facts["ttft_ms"] = round(ttft_s * 1000.0, 1)
        self.span.set_attributes(self._request_attributes() | {"trimtab.outcome": outcome})
        self.span.end()
        self._metrics.finished(self._kind(), outcome, reason, tokens=self.tokens, ttft_s=ttft_s, total_s=total_s)
        self._metrics.used(self._request.tenant, outcome, prompt_tokens=self.prompt_tokens, output_tokens=self.tokens)
        log.info(
            "request",
            request_id=self._request.request_id,
            trace_id=self.trace_id,
            model=self._request.model,
            tenant=self._request.tenant,
            workload=self._workload.value,
            worker=self.worker,
            outcome=outcome,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            total_ms=round(total_s * 1000.0, 1),
            attempts=self.attempts,
            resumes=self.resumes,
            **facts,
        )

    def _kind(self) -> Kind:
        """By what a worker said of its prompt's length."""
        policy = self._policy()
        return Kind(
            self._workload,
            cold=self.prompt_tokens >= policy.paths.hot_below,
            length=LengthClass.of(self.prompt_tokens, edges_of(policy)),
            whole=self._request.resume is None,
        )

    def _request_attributes(self) -> dict[str, Any]:
        r, s = self._request, self._request.sampling
        known = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "trimtab",
            "gen_ai.request.model": r.model,
            "gen_ai.request.max_tokens": s.max_tokens,
            "gen_ai.request.temperature": s.temperature,
            "gen_ai.request.top_p": s.top_p,
            "gen_ai.request.top_k": s.top_k,
            "gen_ai.request.seed": s.seed,
            "gen_ai.request.stop_sequences": s.stop or None,
            "gen_ai.response.id": r.request_id,
            "gen_ai.conversation.id": r.session_id or None,
            "trimtab.request_id": r.request_id,
            "trimtab.tenant": r.tenant,
            "trimtab.workload": self._workload.value,
        }
        return {k: v for k, v in known.items() if v is not None}


def _verdict(error: BaseException | None, finish: Finish | None) -> tuple[str, str]:
    if isinstance(error, TrimtabError):
        return error.outcome.value, error.reason
    if isinstance(error, Exception):
        return Outcome.ENGINE_FAULT.value, "INTERNAL"
    if finish is not None:
        return Outcome.OK.value, finish.reason.value
    return Outcome.CLIENT_FAULT.value, "CANCELLED"
