"""What nodes say of themselves ⇄ values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from trimtab import messages as m
from trimtab import snapshot as s
from trimtab.codec.policy import decode_identity, encode_identity
from trimtab.errors import InvalidRequest
from trimtab.kv_shape import KvGroup
from trimtab.v1 import control_pb2, inference_pb2

MAX_WORD = 512
"""Characters of anything that a node calls itself."""
MAX_LABELS = 64
MAX_BLOCK_SIZES = 64
MAX_KV_GROUPS = 64
MAX_COUNTERS = 512
MAX_SKETCHES = 24
MAX_SKETCH_BYTES = 4 << 10
MAX_GAUGES = 128
MAX_OUTLIERS = 16

_STATE = {k: getattr(control_pb2, f"NODE_STATE_{k.name}") for k in m.NodeState}
_STATE_BACK = {v: k for k, v in _STATE.items()}
_WORKLOAD = {m.Workload.REALTIME: inference_pb2.WORKLOAD_REALTIME, m.Workload.BATCH: inference_pb2.WORKLOAD_BATCH}


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
        block_sizes=x.block_sizes,
        live_blocks=x.live_blocks,
        carries_blocks=x.carries_blocks,
        kv_groups=[
            control_pb2.KvGroup(block_size=g.block_size, window=g.window, chunk=g.chunk, cap=g.cap, count=g.count)
            for g in x.kv_groups
        ],
    )


def decode_limits(pb: control_pb2.EngineLimits) -> s.Limits:
    return s.Limits(
        pb.max_num_seqs, pb.max_step_tokens, pb.max_model_len, pb.block_size, pb.total_blocks, pb.engine,
        tuple(pb.block_sizes[:MAX_BLOCK_SIZES]), pb.live_blocks,
        tuple(
            KvGroup(max(1, g.block_size), g.window, g.chunk, g.cap, max(1, g.count)) for g in pb.kv_groups[:MAX_KV_GROUPS]
        ),
        pb.carries_blocks,
    )  # fmt: skip


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
        told=x.told,
    )


def decode_hello(pb: control_pb2.Hello) -> m.Hello:
    """InvalidRequest unless it says who it is: node, incarnation and a role that this build knows."""
    missing = [name for name in ("node_id", "incarnation") if not getattr(pb, name)]
    if pb.role not in _ROLE_BACK:
        missing.append("role")
    if missing:
        raise InvalidRequest(f"Hello lacks {', '.join(missing)}")
    said = [
        getattr(pb, name) for name in ("node_id", "incarnation", "pool", "model", "build", "address", "metrics_address")
    ]
    _bounded(
        "Hello", [*said, pb.limits.engine, *(x for pair in pb.labels.items() for x in pair)], len(pb.labels), MAX_LABELS
    )
    _bounded("Hello's settings", (x for pair in pb.told.items() for x in pair), len(pb.told), MAX_LABELS)
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
        told=dict(pb.told),
    )


def _bounded(what: str, words: Iterable[str], count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{what} has {count} entries where {most} are the most")
    for word in words:
        if len(word) > MAX_WORD or not word.isprintable():
            raise InvalidRequest(f"{what} holds a word that is no line of {MAX_WORD} characters at most")


def encode_report(x: m.Report) -> control_pb2.Report:
    return control_pb2.Report(
        sequence=x.sequence,
        state=encode_state(x.state),
        load=encode_load(x.load),
        steps=x.steps,
        counters=x.counters,
        sketches=x.sketches,
        interval_ms=x.interval_ms,
        gauges=x.gauges,
        outliers=[encode_outlier(each) for each in x.outliers],
    )


def encode_outlier(x: m.Outlier) -> control_pb2.Outlier:
    return control_pb2.Outlier(
        request_id=x.request_id,
        workload=_WORKLOAD[x.workload],
        prompt_tokens=x.prompt_tokens,
        output_tokens=x.output_tokens,
        ttft_ms=x.ttft_ms,
        itl_ms=x.itl_ms,
        queued_ms=x.queued_ms,
        preemptions=x.preemptions,
        neighbours=x.neighbours,
        longest_neighbour_tokens=x.longest_neighbour_tokens,
    )


def decode_outlier(pb: control_pb2.Outlier) -> m.Outlier:
    return m.Outlier(
        pb.request_id,
        m.Workload.BATCH if pb.workload == inference_pb2.WORKLOAD_BATCH else m.Workload.REALTIME,
        pb.prompt_tokens,
        pb.output_tokens,
        pb.ttft_ms,
        pb.itl_ms,
        pb.queued_ms,
        pb.preemptions,
        pb.neighbours,
        pb.longest_neighbour_tokens,
    )


def decode_report(pb: control_pb2.Report) -> m.Report:
    """InvalidRequest for one that is larger than any node of ours sends: what a node says is kept for as long as it lives."""
    _bounded("Report", [*pb.counters, *pb.sketches, *pb.gauges], len(pb.counters), MAX_COUNTERS)
    if len(pb.gauges) > MAX_GAUGES or len(pb.outliers) > MAX_OUTLIERS:
        raise InvalidRequest(f"a Report has {MAX_GAUGES} gauges and {MAX_OUTLIERS} outliers at most")
    _bounded("Outlier", [x.request_id for x in pb.outliers], 0, 0)
    if len(pb.sketches) > MAX_SKETCHES or any(len(x) > MAX_SKETCH_BYTES for x in pb.sketches.values()):
        raise InvalidRequest(f"a Report has {MAX_SKETCHES} sketches at most, of {MAX_SKETCH_BYTES} bytes each")
    return m.Report(
        pb.sequence,
        decode_state(pb.state),
        decode_load(pb.load),
        pb.steps,
        dict(pb.counters),
        dict(pb.sketches),
        pb.interval_ms,
        {name: value for name, value in pb.gauges.items() if math.isfinite(value)},
        tuple(decode_outlier(x) for x in pb.outliers),
    )
