"""Protobuf ⇄ values: the one translator at the door. Everything behind it handles parsed, plain values.

Decoding an unknown enum number gives the documented fallback, so that a newer peer never breaks an older one; a malformed message
raises InvalidRequest or PolicyRefused. `encode_x(decode_x(m)) == m` for every message that this build writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

from trimtab import messages as m
from trimtab import policy as p
from trimtab import snapshot as s
from trimtab.errors import InvalidRequest, PolicyRefused
from trimtab.v1 import control_pb2, inference_pb2, policy_pb2

# ---- policy


def encode_identity(identity: s.Identity) -> policy_pb2.SnapshotIdentity:
    return policy_pb2.SnapshotIdentity(epoch=identity.epoch, revision=identity.revision, sha256=identity.sha256)


def decode_identity(pb: policy_pb2.SnapshotIdentity) -> s.Identity:
    return s.Identity(pb.epoch, pb.revision, pb.sha256)


def encode_snapshot(snapshot: s.Snapshot) -> policy_pb2.PolicySnapshot:
    return policy_pb2.PolicySnapshot(identity=encode_identity(snapshot.identity), document=snapshot.document)


def decode_snapshot(pb: policy_pb2.PolicySnapshot) -> s.Snapshot:
    """Checks the digest: bytes that do not match it are refused."""
    if hashlib.sha256(pb.document).digest() != pb.identity.sha256:
        raise PolicyRefused("the snapshot's bytes do not match its digest", reason="DIGEST_MISMATCH")
    return s.Snapshot(decode_identity(pb.identity), pb.document)


def encode_partial(partial: p.Partial) -> policy_pb2.Policy:
    pb = policy_pb2.Policy()
    for path, value in partial.items():
        part, name = path.split(".")
        setattr(getattr(pb, part), name, value)
    return pb


def decode_partial(pb: policy_pb2.Policy) -> dict[str, p.Value]:
    """The fields that are set and known to this build; `min_policy_schema` guards the ones that it does not know."""
    found: dict[str, p.Value] = {}
    for path in p.FIELDS:
        part, name = path.split(".")
        if pb.HasField(part) and getattr(pb, part).HasField(name):  # type: ignore[arg-type]
            found[path] = getattr(getattr(pb, part), name)
    return found


def encode_scope(scope: s.Scope) -> policy_pb2.Scope:
    match scope.kind:
        case s.ScopeKind.MESH:
            return policy_pb2.Scope(mesh=True)
        case s.ScopeKind.POOL:
            return policy_pb2.Scope(pool=scope.names[0])
        case s.ScopeKind.LABEL:
            return policy_pb2.Scope(label=scope.names[0])
        case s.ScopeKind.NODE:
            return policy_pb2.Scope(node_id=scope.names[0])
        case s.ScopeKind.ROLLOUT:
            return policy_pb2.Scope(rollout=policy_pb2.NodeList(node_ids=scope.names))


def decode_scope(pb: policy_pb2.Scope) -> s.Scope:
    match pb.WhichOneof("scope"):
        case "mesh":
            return s.Scope()
        case "pool":
            return s.Scope(s.ScopeKind.POOL, (pb.pool,))
        case "label":
            return s.Scope(s.ScopeKind.LABEL, (pb.label,))
        case "node_id":
            return s.Scope(s.ScopeKind.NODE, (pb.node_id,))
        case "rollout":
            return s.Scope(s.ScopeKind.ROLLOUT, tuple(pb.rollout.node_ids))
        case _:
            raise PolicyRefused("an overlay or adjustment names no scope that this build knows", reason="UNKNOWN_SCOPE")


def _encode_adjustment(a: s.Adjustment) -> policy_pb2.Adjustment:
    pb = policy_pb2.Adjustment(
        controller=a.controller,
        field=a.field,
        scope=encode_scope(a.scope),
        reason=a.reason,
        evidence=a.evidence,
        expires_unix_ms=a.expires_unix_ms,
    )
    if a.factor is None:
        pb.delta = a.delta
    else:
        pb.factor = a.factor
    return pb


def _decode_adjustment(pb: policy_pb2.Adjustment) -> s.Adjustment:
    return s.Adjustment(
        controller=pb.controller,
        field=pb.field,
        scope=decode_scope(pb.scope),
        reason=pb.reason,
        evidence=pb.evidence,
        expires_unix_ms=pb.expires_unix_ms,
        factor=pb.factor if pb.WhichOneof("change") == "factor" else None,
        delta=pb.delta,
    )


_OWNER = {
    s.Owner.SPEC: policy_pb2.OVERLAY_OWNER_SPEC,
    s.Owner.CONTROLLER: policy_pb2.OVERLAY_OWNER_CONTROLLER,
    s.Owner.ROLLOUT: policy_pb2.OVERLAY_OWNER_ROLLOUT,
}
_OWNER_BACK = {v: k for k, v in _OWNER.items()}


def _encode_overlay(o: s.Overlay) -> policy_pb2.Overlay:
    return policy_pb2.Overlay(
        name=o.name, scope=encode_scope(o.scope), owner=_OWNER[o.owner], policy=encode_partial(o.policy)
    )


def encode_document(document: s.Document) -> bytes:
    """Deterministic bytes: equal documents give equal digests."""
    pb = policy_pb2.PolicyDocument(
        min_policy_schema=document.needs_schema,
        written_unix_ms=document.written_unix_ms,
        base=encode_partial(document.base),
        overlays=[_encode_overlay(o) for o in document.overlays],
        adjustments=[_encode_adjustment(a) for a in document.adjustments],
        pins=[policy_pb2.Pin(field=x.field, author=x.author, reason=x.reason) for x in document.pins],
    )
    return pb.SerializeToString(deterministic=True)


def decode_document(data: bytes) -> s.Document:
    pb = policy_pb2.PolicyDocument()
    try:
        pb.ParseFromString(data)
    except Exception as e:  # protobuf's DecodeError has no stable public home
        raise PolicyRefused(f"the snapshot is not a policy document: {e}", reason="MALFORMED") from e
    return s.Document(
        base=decode_partial(pb.base),
        overlays=tuple(
            s.Overlay(
                name=o.name,
                scope=decode_scope(o.scope),
                policy=decode_partial(o.policy),
                owner=_OWNER_BACK.get(o.owner, s.Owner.SPEC),
            )
            for o in pb.overlays
        ),
        adjustments=tuple(_decode_adjustment(a) for a in pb.adjustments),
        pins=tuple(s.Pin(x.field, x.author, x.reason) for x in pb.pins),
        written_unix_ms=pb.written_unix_ms,
        needs_schema=pb.min_policy_schema,
    )


def seal(document: s.Document, *, epoch: int, revision: int) -> s.Snapshot:
    """A document as a snapshot."""
    data = encode_document(document)
    return s.Snapshot(s.Identity(epoch, revision, hashlib.sha256(data).digest()), data)


# ---- requests

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


# ---- events


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


# ---- nodes

_STATE = {k: getattr(control_pb2, f"NODE_STATE_{k.name}") for k in m.NodeState}
_STATE_BACK = {v: k for k, v in _STATE.items()}


def encode_state(x: m.NodeState) -> control_pb2.NodeState.ValueType:
    return _STATE[x]  # type: ignore[no-any-return]


def decode_state(pb: int) -> m.NodeState:
    """An unknown state counts as starting: not to be sent work."""
    return _STATE_BACK.get(pb, m.NodeState.STARTING)


def encode_load(x: m.Load) -> inference_pb2.Load:
    return inference_pb2.Load(
        running=x.running,
        waiting=x.waiting,
        queued_prefill_tokens=x.queued_prefill_tokens,
        free_blocks=x.free_blocks,
        total_blocks=x.total_blocks,
    )


def decode_load(pb: inference_pb2.Load) -> m.Load:
    return m.Load(pb.running, pb.waiting, pb.queued_prefill_tokens, pb.free_blocks, pb.total_blocks)


def encode_limits(x: s.Limits) -> control_pb2.EngineLimits:
    return control_pb2.EngineLimits(
        max_num_seqs=x.max_num_seqs,
        max_step_tokens=x.max_step_tokens,
        max_model_len=x.max_model_len,
        block_size=x.block_size,
        total_blocks=x.total_blocks,
        engine=x.engine,
    )


def decode_limits(pb: control_pb2.EngineLimits) -> s.Limits:
    return s.Limits(pb.max_num_seqs, pb.max_step_tokens, pb.max_model_len, pb.block_size, pb.total_blocks, pb.engine)


def decode_node(pb: control_pb2.Hello) -> s.Node:
    labels: Mapping[str, str] = dict(pb.labels)
    return s.Node(pb.node_id, pb.pool or "default", labels, decode_limits(pb.limits), pb.policy_schema)


_ROLE = {m.Role.WORKER: control_pb2.ROLE_WORKER, m.Role.GATEWAY: control_pb2.ROLE_GATEWAY}
_ROLE_BACK = {v: k for k, v in _ROLE.items()}


def encode_hello(x: m.Hello) -> control_pb2.Hello:
    """A node that holds no snapshot sends no `held`."""
    return control_pb2.Hello(
        node_id=x.node.node_id,
        incarnation=x.incarnation,
        role=_ROLE[x.role],
        pool=x.node.pool,
        labels=x.node.labels,
        model=x.model,
        build=x.build,
        policy_schema=x.node.policy_schema,
        limits=encode_limits(x.node.limits),
        held=encode_identity(x.held) if x.held > s.Identity() else None,
        address=x.address,
        metrics_address=x.metrics_address,
        pid=x.pid,
    )


def decode_hello(pb: control_pb2.Hello) -> m.Hello:
    """InvalidRequest unless it says who it is: node, incarnation and a role that this build knows."""
    missing = [name for name in ("node_id", "incarnation") if not getattr(pb, name)]
    if pb.role not in _ROLE_BACK:
        missing.append("role")
    if missing:
        raise InvalidRequest(f"Hello lacks {', '.join(missing)}")
    return m.Hello(
        node=decode_node(pb),
        incarnation=pb.incarnation,
        role=_ROLE_BACK[pb.role],
        model=pb.model,
        build=pb.build,
        held=decode_identity(pb.held),
        address=pb.address,
        metrics_address=pb.metrics_address,
        pid=pb.pid,
    )


def encode_report(x: m.Report) -> control_pb2.Report:
    return control_pb2.Report(
        sequence=x.sequence,
        state=encode_state(x.state),
        load=encode_load(x.load),
        steps=x.steps,
        counters=x.counters,
        sketches=x.sketches,
    )


def decode_report(pb: control_pb2.Report) -> m.Report:
    return m.Report(
        pb.sequence, decode_state(pb.state), decode_load(pb.load), pb.steps, dict(pb.counters), dict(pb.sketches)
    )
