"""GetTelemetry's answers for tests, with sane defaults: a healthy mesh, in which a test changes what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from controlplane.admin.server import AdminServicer
from trimtab import measures
from trimtab.messages import Workload
from trimtab.policy_loops import LoopsPart
from trimtab.v1 import admin_pb2, control_pb2, inference_pb2, policy_pb2

HOT = measures.ttft(Workload.REALTIME, measures.HOT)
COLD = measures.ttft(Workload.REALTIME, measures.COLD)
ITL = measures.itl(Workload.REALTIME)
BLOCKS, BLOCK_TOKENS = 1000, 16
LOOPS = tuple(LoopsPart.__dataclass_fields__)


def q(p99: float, *, count: int = 50, p50: float | None = None, p95: float | None = None) -> admin_pb2.Quantiles:
    return admin_pb2.Quantiles(
        count=count,
        p50=p99 / 4 if p50 is None else p50,
        p95=p99 / 2 if p95 is None else p95,
        p99=p99,
        max=1.2 * p99,
    )


def a_window(
    number: int,
    ended_ago_s: float,
    *,
    ttft_ms: float = 100.0,
    itl_ms: float = 40.0,
    count: int = 50,
    output_tokens: int = 5000,
    counters: Mapping[str, int] | None = None,
    quantiles: Mapping[str, admin_pb2.Quantiles] | None = None,
    peaks: Mapping[str, float] | None = None,
    outliers: Iterable[control_pb2.Outlier] = (),
) -> admin_pb2.WindowTelemetry:
    said = {
        measures.REQUESTS: count,
        measures.OUTPUT_TOKENS: output_tokens,
        measures.requests_of(Workload.REALTIME): count,
        measures.REALTIME_WAITS: count,
        measures.REALTIME_WAIT_MS: count * 5,
        measures.BATCH_WAITS: count,
        measures.BATCH_WAIT_MS: count * 400,
        measures.COMPUTED_TOKENS: 20_000,
        **(counters or {}),
    }
    found = {HOT: q(ttft_ms, count=count), ITL: q(itl_ms, count=20 * count)} if quantiles is None else quantiles
    return admin_pb2.WindowTelemetry(
        number=number,
        ended_ago_s=ended_ago_s,
        span_s=5.0,
        counters={k: v for k, v in said.items() if v},
        quantiles=found,
        peaks=peaks if peaks is not None else {"running": 12.0, "waiting": 3.0, measures.RSS_BYTES: 4e9},
        outliers=outliers,
    )


def windows(make: Callable[[int], admin_pb2.WindowTelemetry] | None = None, count: int = 24) -> list[Any]:
    """Oldest first; `make` gets how many windows ago it ended, 0 for the newest."""
    build = make or (lambda ago: a_window(100 - ago, 5.0 * ago + 1))
    return [build(ago) for ago in reversed(range(count))]


def a_worker(
    node_id: str = "w0",
    *,
    gauges: Mapping[str, float | None] | None = None,
    load: Mapping[str, int] | None = None,
    limits: Mapping[str, int] | None = None,
    **given: Any,
) -> admin_pb2.NodeTelemetry:
    said: dict[str, float | None] = {
        measures.REALTIME_WAITING: 1.0,
        measures.BATCH_WAITING: 2.0,
        measures.REALTIME_RUNNING: 4.0,
        measures.BATCH_RUNNING: 8.0,
        measures.COLD_WAITING: 1.0,
        measures.KV_USED: 0.5,
        measures.STORED_TOKENS: 7600.0,
        measures.FRAGMENTATION: 0.05,
        measures.KV_BYTES_PER_TOKEN: 1e5,
        measures.RSS_BYTES: 4e9,
        measures.BUSY: 0.8,
        measures.HUNG_S: 0.0,
        **(gauges or {}),
    }
    here = {"running": 12, "waiting": 3, "free_blocks": BLOCKS // 2, "total_blocks": BLOCKS, **(load or {})}
    can = {
        "max_num_seqs": 64,
        "max_step_tokens": 8192,
        "max_model_len": 131_072,
        "block_size": BLOCK_TOKENS,
        "total_blocks": BLOCKS,
        **(limits or {}),
    }
    whole: dict[str, Any] = {
        "incarnation": "i1",
        "role": control_pb2.ROLE_WORKER,
        "pool": "default",
        "model": "tiny",
        "state": control_pb2.NODE_STATE_SERVING,
        "connected": True,
        "age_s": 0.4,
        "windows": windows(),
        "applied": policy_pb2.SnapshotIdentity(epoch=1, revision=1),
        "ttft_objective_ms": 500.0,
        "itl_objective_ms": 200.0,
        "batch_active": 48,
        "batch_active_spec": 48,
        "load": inference_pb2.Load(**here),
        "limits": control_pb2.EngineLimits(engine="simulated", **can),
        "gauges": {k: v for k, v in said.items() if v is not None},
        **given,
    }
    return admin_pb2.NodeTelemetry(node_id=node_id, **{k: v for k, v in whole.items() if v is not None})


def an_idle_worker(node_id: str = "w0", **given: Any) -> admin_pb2.NodeTelemetry:
    """It has served before, and has nothing now: counters stand still, nothing is measured, and every block is free."""
    quiet = {"running": 0.0, "waiting": 0.0, measures.RSS_BYTES: 4e9}
    nothing = admin_pb2.WindowTelemetry
    whole: dict[str, Any] = {
        "gauges": dict.fromkeys(measures.GAUGES, 0.0) | {measures.RSS_BYTES: 4e9},
        "load": {"running": 0, "waiting": 0, "free_blocks": BLOCKS},
        "windows": windows(lambda ago: nothing(number=100 - ago, ended_ago_s=5.0 * ago + 1, span_s=5.0, peaks=quiet)),
        **given,
    }
    return a_worker(node_id, **whole)


def a_gateway(node_id: str = "g0", **given: Any) -> admin_pb2.NodeTelemetry:
    whole: dict[str, Any] = {
        "role": control_pb2.ROLE_GATEWAY,
        "pool": None,
        "load": {"running": 0, "waiting": 0, "free_blocks": 0, "total_blocks": 0},
        "gauges": dict.fromkeys(measures.GAUGES, None) | {measures.REALTIME_WAITING: 0.0, measures.BATCH_WAITING: 12.0},
        "limits": {"total_blocks": 0},
        "batch_active": None,
        "batch_active_spec": None,
        "applied": None,
        "windows": windows(lambda ago: a_window(100 - ago, 5.0 * ago + 1, quantiles={HOT: q(130.0)})),
        **given,
    }
    return a_worker(node_id, **whole)


def some_lengths(model: str = "tiny", **given: Any) -> admin_pb2.LengthsTelemetry:
    whole: dict[str, Any] = {
        "recent_prompts": q(3000.0, count=1000, p50=400.0, p95=1800.0),
        "day_prompts": q(3200.0, count=50_000, p50=410.0, p95=1900.0),
        "recent_totals": q(3400.0, count=1000, p50=600.0, p95=2100.0),
        "day_span_s": 40_000.0,
        "safe_batch": 16,
        **given,
    }
    return admin_pb2.LengthsTelemetry(model=model, **whole)


def a_telemetry(*nodes: admin_pb2.NodeTelemetry, **given: Any) -> admin_pb2.GetTelemetryResponse:
    whole: dict[str, Any] = {
        "nodes": nodes or (a_gateway(), a_worker()),
        "controllers": [admin_pb2.ControllerTelemetry(name=name, mode="on") for name in LOOPS],
        "lengths": [some_lengths()],
        "pools": [admin_pb2.PoolScale(pool="default", wanted=1, running=1, min_workers=1, max_workers=1)],
        "replica_id": "c0",
        "leader_id": "c0",
        "tick_ms": 2.0,
        **given,
    }
    return admin_pb2.GetTelemetryResponse(**whole)


class Tells:
    """Stands for the control plane's own telemetry: `answer` is what GetTelemetry gives, `asked` what it was asked."""

    def __init__(self, answer: admin_pb2.GetTelemetryResponse) -> None:
        self.answer = answer
        self.asked: list[admin_pb2.GetTelemetryRequest] = []

    def instead(self, monkeypatch: Any) -> Tells:
        """Of every control plane that begins from now on."""

        async def telling(_: AdminServicer, request: Any, context: Any) -> admin_pb2.GetTelemetryResponse:
            self.asked.append(request)
            return self.answer

        monkeypatch.setattr(AdminServicer, "GetTelemetry", telling)
        return self
