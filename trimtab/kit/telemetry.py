"""Logs, traces and metrics of one process, set up in one place.

Logs: structlog, JSON when stdout is no terminal, with the trace id inside. Traces: OTLP when an endpoint is set (OTEL_EXPORTER_OTLP_ENDPOINT),
else one JSONL file for each process under the mesh's state directory, which `trimtab trace ID` reads. Metrics: Prometheus, one registry.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer

TRACE_FILE_BYTES = 64 << 20
"""A process's trace file starts again past this size, keeping one older file."""


def setup_logging(process: str, *, json_logs: bool | None = None, level: str = "info") -> None:
    """`process` names every line's writer. JSON when stdout is no terminal, unless told."""
    as_json = (not sys.stdout.isatty()) if json_logs is None else json_logs
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_trace_id,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # One write a line: several processes may share a pipe.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Stdout())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


class _Stdout:
    """Standard output as the log's: a line that can't be written is lost, and whoever wrote it goes on. Serving never hangs on a log."""

    def __init__(self) -> None:
        self._said = False

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except (OSError, ValueError) as e:
            self._lost(e)
            return len(text)

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except (OSError, ValueError) as e:
            self._lost(e)

    def _lost(self, error: Exception) -> None:
        """Said once, to whom still listens. Whoever read is gone for good: then nothing is kept for him, and the exit code stays ours."""
        if isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
        if not self._said:
            self._said = True
            with contextlib.suppress(OSError, ValueError):
                print(f"the log can't be written, and lines are lost: {error}", file=sys.stderr, flush=True)


def _add_trace_id(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid and "trace_id" not in event:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event


class JsonlExporter(SpanExporter):
    """Spans as JSON lines: trace_id, span_id, parent_id, name, service, start_ns, end_ns, status, attributes, events."""

    def __init__(self, path: Path, service: str) -> None:
        self._path = path
        self._service = service
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(self._row(span)) + "\n" for span in spans)
        with self._lock:
            if self._path.exists() and self._path.stat().st_size > TRACE_FILE_BYTES:
                self._path.replace(self._path.with_suffix(".old.jsonl"))
            with self._path.open("a") as f:
                f.write(lines)
        return SpanExportResult.SUCCESS

    def _row(self, span: ReadableSpan) -> dict[str, Any]:
        context = span.get_span_context()
        assert context is not None
        return {
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
            "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
            "name": span.name,
            "service": self._service,
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            "status": span.status.status_code.name,
            "attributes": dict(span.attributes or {}),
            "events": [
                {"name": e.name, "at_ns": e.timestamp, "attributes": dict(e.attributes or {})} for e in span.events
            ],
        }

    def shutdown(self) -> None:
        """Nothing is held open between exports."""


def setup_tracing(process: str, directory: Path | None) -> TracerProvider:
    """`directory` is the mesh's state directory; None and no endpoint means spans are made and dropped."""
    provider = TracerProvider(resource=Resource.create({"service.name": f"trimtab-{process}"}))
    exporter: SpanExporter | None = None
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    elif directory is not None:
        exporter = JsonlExporter(directory / "traces" / f"{process}.jsonl", process)
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    return provider


_TRACER = trace.get_tracer("trimtab")
"""Made once (making one costs as much as a span): it follows the provider that is set later."""


def tracer() -> Tracer:
    return _TRACER


def traceparent(span: Span) -> str:
    """The span's context as a W3C traceparent."""
    c = span.get_span_context()
    return f"00-{c.trace_id:032x}-{c.span_id:016x}-{int(c.trace_flags):02x}"


def parse_traceparent(text: str) -> Any:
    """A W3C traceparent as an OpenTelemetry context; None when it is absent or malformed, so that a new trace begins."""
    parts = text.strip().split("-") if text else []
    if len(parts) != 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
        return None
    try:
        context = SpanContext(int(parts[1], 16), int(parts[2], 16), True, TraceFlags(int(parts[3], 16)))
    except ValueError:
        return None
    return trace.set_span_in_context(trace.NonRecordingSpan(context)) if context.is_valid else None


def span_at(
    name: str, parent: Span | None, start_s: float, end_s: float, attributes: Mapping[str, Any] | None = None
) -> None:
    """A finished span between two moments of time.monotonic(), such as an engine's own stamps on this host."""
    offset = time.time() - time.monotonic()
    context = trace.set_span_in_context(parent) if parent is not None else None
    span = tracer().start_span(
        name,
        context=context,
        kind=SpanKind.INTERNAL,
        start_time=int((start_s + offset) * 1e9),
        attributes=dict(attributes or {}),
    )
    span.end(int((max(start_s, end_s) + offset) * 1e9))


def fail(span: Span, error: BaseException, reason: str) -> None:
    """Mark a span as failed; `reason` is low-cardinality, for `error.type`."""
    span.set_status(Status(StatusCode.ERROR, str(error)))
    span.set_attribute("error.type", reason)
