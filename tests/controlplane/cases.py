"""Cases for the doctor, with sane defaults: a test says only what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from controlplane.doctor import Case, Finding, SetFields, examine
from controlplane.doctor_book import BOOK
from tests.controlplane.folded import BLOCKS, a_telemetry, a_window, an_idle_worker, windows
from trimtab import measures
from trimtab.codec import encode_partial
from trimtab.policy import Policy, Value, flatten, with_fields
from trimtab.v1 import admin_pb2, control_pb2, inference_pb2, policy_pb2

NOW = 1_800_000_000_000
RT, BATCH = inference_pb2.WORKLOAD_REALTIME, inference_pb2.WORKLOAD_BATCH
GIANT = 60_000


def a_member(node_id: str = "w0", revision: int = 1, **given: Any) -> admin_pb2.FleetNode:
    hello = control_pb2.Hello(
        node_id=node_id,
        role=control_pb2.ROLE_WORKER,
        build=given.pop("build", "0.1.0"),
        limits=control_pb2.EngineLimits(max_num_seqs=64, max_step_tokens=8192, max_model_len=131_072),
    )
    state = admin_pb2.NodePolicyState(
        node_id=node_id, applied=policy_pb2.SnapshotIdentity(epoch=1, revision=revision), **given
    )
    return admin_pb2.FleetNode(hello=hello, connected=True, policy=state)


def a_case(
    *nodes: Any,
    policy: Mapping[str, Value] | None = None,
    members: Iterable[Any] | None = None,
    desired: int = 1,
    store: Mapping[str, Any] | None = None,
    breakers: Any = None,
    history: Any = (),
    replicas: Iterable[Any] = (),
    **telemetry: Any,
) -> Case:
    fleet = admin_pb2.GetFleetResponse(
        desired=policy_pb2.SnapshotIdentity(epoch=1, revision=desired),
        nodes=[a_member()] if members is None else members,
        store=admin_pb2.StoreState(**{"connected": True, "writable": True, "description": "memory", **(store or {})}),
        replica_id="c0",
        replicas=replicas,
    )
    effective = encode_partial(flatten(with_fields(Policy(), policy or {})))
    return Case(
        a_telemetry(*nodes, **telemetry),
        fleet,
        admin_pb2.GetPolicyResponse(effective=effective),
        admin_pb2.ListBreakersResponse() if breakers is None else breakers,
        history,
        NOW,
    )


def found(case: Case, symptom: str) -> Finding:
    [finding] = [f for f in examine(case, BOOK) if f.symptom == symptom]
    return finding


def sets(finding: Finding) -> dict[str, str]:
    return {k: v for fix in finding.fixes if isinstance(fix.action, SetFields) for k, v in fix.action.fields.items()}


def recent(newest: dict[str, Any], older: dict[str, Any] | None = None) -> list[Any]:
    """The newest half minute as `newest`, and what was before as `older`."""
    return windows(lambda ago: a_window(100 - ago, 5.0 * ago + 1, **(newest if ago < 6 else older or {})))


def an_outlier(**given: Any) -> control_pb2.Outlier:
    whole = {"request_id": "r", "workload": RT, "prompt_tokens": 200, "ttft_ms": 900.0, **given}
    return control_pb2.Outlier(**whole)


SLOW = {"ttft_ms": 1912.0}


def leaking(idle_windows: int, node_id: str = "w0") -> Any:
    quiet = {"running": 0.0, "waiting": 0.0, measures.RSS_BYTES: 4e9}
    seen = windows(lambda ago: a_window(100 - ago, 5.0 * ago + 1, peaks=quiet if ago < idle_windows else None))
    return an_idle_worker(node_id, windows=seen, load={"running": 0, "waiting": 0, "free_blocks": BLOCKS - 40})


def a_breaker(**given: Any) -> Any:
    return admin_pb2.ListBreakersResponse(workers=[admin_pb2.WorkerBreaker(node_id="w0", connected=True, **given)])
