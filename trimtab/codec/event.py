"""What comes back for a request ⇄ values."""

from __future__ import annotations

from trimtab import messages as m
from trimtab.codec.policy import decode_identity, encode_identity
from trimtab.v1 import inference_pb2


def encode_accepted(x: m.Accepted) -> inference_pb2.Accepted:
    return inference_pb2.Accepted(
        request_id=x.request_id,
        worker_id=x.worker_id,
        policy=encode_identity(x.policy),
        queue_position=x.queue_position,
        prompt_tokens=x.prompt_tokens,
        prompt_digest=x.prompt_digest,
        resumable=x.resumable,
        model=x.model,
        started=x.started,
    )


def decode_accepted(pb: inference_pb2.Accepted) -> m.Accepted:
    return m.Accepted(
        pb.request_id,
        pb.worker_id,
        decode_identity(pb.policy),
        pb.queue_position,
        pb.prompt_tokens,
        pb.prompt_digest,
        pb.resumable,
        pb.model,
        pb.started,
    )


_FINISH = {
    m.FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    m.FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_FINISH_BACK = {v: k for k, v in _FINISH.items()}
_NOTICE = {k: getattr(inference_pb2, f"NOTICE_KIND_{k.name}") for k in m.NoticeKind}
_NOTICE_BACK = {v: k for k, v in _NOTICE.items()}


def encode_delta(x: m.Delta) -> inference_pb2.Delta:
    pb = inference_pb2.Delta(first_index=x.first_index, token_ids=x.token_ids, text=x.text)
    for lp in x.logprobs:
        top = [inference_pb2.TopLogprob(token_id=t.token_id, logprob=t.logprob, token=t.token) for t in lp.top]
        pb.logprobs.add(logprob=lp.logprob, token=lp.token, top=top)
    return pb


def decode_delta(pb: inference_pb2.Delta) -> m.Delta:
    return m.Delta(
        pb.first_index,
        tuple(pb.token_ids),
        pb.text,
        tuple(
            m.TokenLogprobs(lp.logprob, lp.token, tuple(m.TopLogprob(t.token_id, t.logprob, t.token) for t in lp.top))
            for lp in pb.logprobs
        ),
    )


def encode_notice(x: m.Notice) -> inference_pb2.Notice:
    return inference_pb2.Notice(kind=_NOTICE[x.kind], detail=x.detail)


def decode_notice(pb: inference_pb2.Notice) -> m.Notice | None:
    """None for a kind that this build does not know."""
    kind = _NOTICE_BACK.get(pb.kind)
    return m.Notice(kind, pb.detail) if kind else None


def encode_finish(x: m.Finish) -> inference_pb2.Finish:
    t = x.timings
    return inference_pb2.Finish(
        reason=_FINISH[x.reason],
        stop=x.stop,
        usage=inference_pb2.Usage(
            prompt_tokens=x.usage.prompt_tokens,
            completion_tokens=x.usage.completion_tokens,
            cached_prompt_tokens=x.usage.cached_prompt_tokens,
        ),
        timings=inference_pb2.Timings(
            queued_ms=t.queued_ms,
            prefill_ms=t.prefill_ms,
            first_token_ms=t.first_token_ms,
            total_ms=t.total_ms,
            preemptions=t.preemptions,
        ),
    )


def decode_finish(pb: inference_pb2.Finish) -> m.Finish:
    u, t = pb.usage, pb.timings
    return m.Finish(
        _FINISH_BACK.get(pb.reason, m.FinishReason.STOP),
        m.Usage(u.prompt_tokens, u.completion_tokens, u.cached_prompt_tokens),
        m.Timings(t.queued_ms, t.prefill_ms, t.first_token_ms, t.total_ms, t.preemptions),
        pb.stop,
    )


def encode_event(x: m.Event) -> inference_pb2.GenerateResponse:
    match x:
        case m.Delta():
            return inference_pb2.GenerateResponse(delta=encode_delta(x))
        case m.Accepted():
            return inference_pb2.GenerateResponse(accepted=encode_accepted(x))
        case m.Finish():
            return inference_pb2.GenerateResponse(finish=encode_finish(x))
        case m.Notice():
            return inference_pb2.GenerateResponse(notice=encode_notice(x))


def decode_event(pb: inference_pb2.GenerateResponse) -> m.Event | None:
    """None for an event or notice that this build does not know; a reader passes over it."""
    match pb.WhichOneof("event"):
        case "delta":
            return decode_delta(pb.delta)
        case "accepted":
            return decode_accepted(pb.accepted)
        case "finish":
            return decode_finish(pb.finish)
        case "notice":
            return decode_notice(pb.notice)
        case _:
            return None
