"""What a gateway itself tells a client in the middle of a stream."""

from __future__ import annotations

from trimtab.v1 import inference_pb2


def capped(max_tokens: int, because: str) -> inference_pb2.GenerateResponse:
    """It gets less than it asked for."""
    return _notice(inference_pb2.NOTICE_KIND_DEGRADED, f"the output is capped at {max_tokens} tokens: {because}")


def resumed(index: int, worker: str, because: str) -> inference_pb2.GenerateResponse:
    """Another worker goes on with it."""
    return _notice(inference_pb2.NOTICE_KIND_RESUMED, f"goes on at token {index} on {worker}: {because}")


def _notice(kind: inference_pb2.NoticeKind.ValueType, detail: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(notice=inference_pb2.Notice(kind=kind, detail=detail))
