"""Requests, sampling parameters and what matches requests ⇄ values."""

from __future__ import annotations

from typing import Any, cast

from google.protobuf.unknown_fields import UnknownFieldSet

from trimtab import messages as m
from trimtab import validation
from trimtab.errors import InvalidRequest
from trimtab.v1 import control_pb2, inference_pb2

_WORKLOAD = {
    m.Workload.REALTIME: inference_pb2.WORKLOAD_REALTIME,
    m.Workload.BATCH: inference_pb2.WORKLOAD_BATCH,
}
_WORKLOAD_BACK = {v: k for k, v in _WORKLOAD.items()}
_SCALARS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "include_stop", "ignore_eos", "skip_special_tokens", "logprobs",
)  # fmt: skip


def encode_sampling(x: m.Sampling) -> inference_pb2.SamplingParams:
    pb = inference_pb2.SamplingParams(stop=x.stop, stop_token_ids=x.stop_token_ids, logit_bias=x.logit_bias)
    for name in _SCALARS:
        value = getattr(x, name)
        if value is not None:
            setattr(pb, name, value)
    if x.structure is not None:
        kind = x.structure.kind
        if kind is m.StructureKind.CHOICES:
            pb.choices.choices.extend(x.structure.choices)
            pb.choices.SetInParent()
        elif kind is m.StructureKind.JSON_OBJECT:
            pb.json_object = True
        else:
            setattr(pb, kind.value, x.structure.value)
    return pb


def decode_sampling(pb: inference_pb2.SamplingParams) -> m.Sampling:
    known: dict[str, Any] = {name: getattr(pb, name) for name in _SCALARS if pb.HasField(name)}  # type: ignore[arg-type]
    structure: m.Structure | None = None
    match pb.WhichOneof("structure"):
        case None:
            pass
        case "choices":
            structure = m.Structure(m.StructureKind.CHOICES, choices=tuple(pb.choices.choices))
        case "json_object":
            structure = m.Structure(m.StructureKind.JSON_OBJECT) if pb.json_object else None
        case other:
            structure = m.Structure(m.StructureKind(other), value=getattr(pb, other))
    return m.Sampling(
        **known,
        stop=tuple(pb.stop),
        stop_token_ids=tuple(pb.stop_token_ids),
        structure=structure,
        logit_bias=dict(pb.logit_bias),
    )


def encode_request(x: m.Request) -> inference_pb2.GenerateRequest:
    pb = inference_pb2.GenerateRequest(
        request_id=x.request_id,
        model=x.model,
        sampling=encode_sampling(x.sampling),
        workload=_WORKLOAD[x.workload] if x.workload else inference_pb2.WORKLOAD_UNSPECIFIED,
        tenant=x.tenant,
        session_id=x.session_id,
    )
    if x.slo != m.SloTargets():
        pb.slo.ttft_ms, pb.slo.itl_ms = x.slo.ttft_ms, x.slo.itl_ms
    if isinstance(x.prompt, str):
        pb.text = x.prompt
    elif x.prompt and isinstance(x.prompt[0], m.ChatMessage):
        pb.chat.messages.extend(
            inference_pb2.ChatMessage(role=c.role, content=c.content, name=c.name) for c in x.prompt
        )
    else:
        pb.token_ids.ids.extend(cast(tuple[int, ...], x.prompt))
        pb.token_ids.SetInParent()
    if x.resume is not None:
        pb.resume.CopyFrom(
            inference_pb2.Resume(
                token_ids=x.resume.token_ids,
                text_bytes=x.resume.text_bytes,
                attempt=x.resume.attempt,
                prompt_digest=x.resume.prompt_digest,
            )
        )
    return pb


def decode_request(pb: inference_pb2.GenerateRequest) -> m.Request:
    prompt: m.Prompt
    match pb.WhichOneof("prompt"):
        case "text":
            prompt = pb.text
        case "chat":
            prompt = tuple(m.ChatMessage(c.role, c.content, c.name) for c in pb.chat.messages)
        case "token_ids":
            validation.check_prompt_length(len(pb.token_ids.ids))
            prompt = tuple(pb.token_ids.ids)
        case _:
            raise InvalidRequest("the request has no prompt: set text, chat or token_ids")
    resume = None
    if pb.HasField("resume"):
        r = pb.resume
        resume = m.Resume(tuple(r.token_ids), r.text_bytes, r.attempt, r.prompt_digest)
    return m.Request(
        request_id=pb.request_id,
        model=pb.model,
        prompt=prompt,
        sampling=decode_sampling(pb.sampling),
        workload=_WORKLOAD_BACK.get(pb.workload),
        tenant=pb.tenant,
        session_id=pb.session_id,
        slo=m.SloTargets(pb.slo.ttft_ms, pb.slo.itl_ms),
        resume=resume,
    )


def encode_match(x: m.RequestMatch) -> control_pb2.RequestMatch:
    return control_pb2.RequestMatch(
        request_ids=sorted(x.request_ids),
        workload=_WORKLOAD[x.workload] if x.workload else inference_pb2.WORKLOAD_UNSPECIFIED,
        tenant=x.tenant,
        min_prompt_tokens=x.min_prompt_tokens,
        min_age_ms=x.min_age_ms,
    )


def decode_match(pb: control_pb2.RequestMatch) -> m.RequestMatch:
    """InvalidRequest for what only a newer build knows: a condition that is passed over would widen the match."""
    if len(UnknownFieldSet(pb)) or (pb.workload and pb.workload not in _WORKLOAD_BACK):
        raise InvalidRequest("the match has a condition that this build does not know; upgrade it")
    return m.RequestMatch(
        frozenset(pb.request_ids), _WORKLOAD_BACK.get(pb.workload), pb.tenant, pb.min_prompt_tokens, pb.min_age_ms
    )
