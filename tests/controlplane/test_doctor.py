"""The doctor: a mesh that is idle or healthy has no symptom, and what each symptom of the mesh itself shows by."""

from __future__ import annotations

import shlex
from typing import Any, get_args

import pytest
from click.testing import CliRunner

from controlplane import doctor, doctor_latency
from controlplane.cli_doctor import SYMPTOMS
from controlplane.doctor import Finding, SetFields, Verdict, examine
from controlplane.doctor_book import BOOK
from controlplane.render_doctor import finding_text
from tests.controlplane.cases import (
    GIANT,
    NOW,
    RT,
    SLOW,
    a_breaker,
    a_case,
    a_member,
    found,
    leaking,
    recent,
)
from tests.controlplane.folded import (
    a_gateway,
    a_worker,
    an_idle_worker,
    some_lengths,
)
from trimtab import measures
from trimtab.messages import Workload
from trimtab.policy import parse
from trimtab.v1 import admin_pb2, control_pb2, policy_pb2
from trimtab_cli.__main__ import cli

OK, UNKNOWN, SUSPECT, FOUND = Verdict.OK, Verdict.UNKNOWN, Verdict.SUSPECT, Verdict.FOUND


# ---- nothing is wrong


@pytest.mark.parametrize(
    "nodes",
    [
        (a_gateway(), a_worker()),
        (a_gateway(gauges=dict.fromkeys(measures.GAUGES, 0.0)), an_idle_worker()),
        (a_gateway(), a_worker("w0"), an_idle_worker("w1"), a_worker("w2", gauges={measures.BATCH_WAITING: 400.0})),
    ],
)
def test_a_mesh_that_is_healthy_or_idle_has_no_symptom_and_nothing_to_set_right(nodes: tuple[Any, ...]) -> None:
    findings = examine(a_case(*nodes), BOOK)
    assert {f.symptom: f.said for f in findings if f.verdict is not OK} == {}
    assert [f.fixes for f in findings] == [()] * len(BOOK)
    assert tuple(f.symptom for f in findings) == SYMPTOMS


def test_a_mesh_that_has_just_begun_has_nothing_to_tell_and_no_symptom() -> None:
    fresh = an_idle_worker(windows=[])
    findings = examine(a_case(fresh, lengths=[]), BOOK)
    assert {f.symptom: f.said for f in findings if f.verdict is not OK} == {}


# ---- the mesh


def test_no_worker_a_hung_one_a_lost_one_and_a_silent_one_are_found() -> None:
    assert "no worker is connected" in found(a_case(a_gateway()), "workers").said
    hung = found(a_case(a_worker(state=control_pb2.NODE_STATE_HUNG), a_worker("w1")), "workers")
    assert hung.verdict is FOUND and "trimtab drain w0 --deadline 0s --restart" in [f.command for f in hung.fixes]
    lost = found(a_case(a_worker(connected=False, age_s=61.0), a_worker("w1")), "workers")
    assert lost.verdict is FOUND and "w0 is lost, last heard of 1m 1s ago" in lost.said
    silent = found(a_case(a_worker(stale=True, age_s=12.0), a_worker("w1")), "workers")
    assert silent.verdict is FOUND and "w0 is connected and has said nothing for 12s" in silent.said


def test_one_that_drained_or_starts_beside_others_is_well_and_one_that_starts_again_and_again_is_suspect() -> None:
    gone = a_worker("w1", connected=False, state=control_pb2.NODE_STATE_DRAINING, age_s=30.0)
    starts = a_worker("w2", state=control_pb2.NODE_STATE_STARTING, age_s=None, windows=[])
    assert found(a_case(a_worker(), gone, starts), "workers").verdict is OK
    assert found(a_case(a_worker(restarts=4)), "workers").verdict is OK, "somebody had asked for it, each time"


def test_processes_that_ended_and_nobody_asked_for_it_are_suspect() -> None:
    lately = found(a_case(a_worker(restarts=2, deaths=1, died_ago_s=12.0)), "workers")
    assert lately.verdict is SUSPECT and "a process of w0 ended without a drain 12s ago" in lately.said
    assert [f.command for f in lately.fixes] == ["trimtab why w0"]
    assert found(a_case(a_worker(restarts=2, deaths=2, died_ago_s=601.0)), "workers").verdict is OK
    often = found(a_case(a_worker(restarts=4, deaths=3, died_ago_s=3600.0)), "workers")
    assert often.verdict is SUSPECT and "ended without a drain 3 times, last 1h ago" in often.said


def test_a_mesh_whose_workers_all_drained_is_told_how_to_have_others_started() -> None:
    gone = a_worker(connected=False, state=control_pb2.NODE_STATE_DRAINING, age_s=30.0)
    case = a_case(gone, members=[])
    finding = found(case, "workers")
    assert finding.verdict is FOUND and "no worker is connected: w0 drained" in finding.said
    assert [f.command for f in finding.fixes] == ["trimtab scale set default 1", "trimtab-worker --control HOST:PORT"]
    policy = found(case, "policy")
    assert policy.verdict is OK and policy.said == "no worker is here to have 1.1, the newest"


def test_a_refused_policy_is_found_and_a_field_beyond_an_engine_is_set_to_what_it_can() -> None:
    refusal = control_pb2.PolicyRefused(reason="ABOVE_ENGINE_LIMIT", field="batch.active", message="128 is above 64")
    member = a_member(refused=policy_pb2.SnapshotIdentity(epoch=1, revision=2), refusal=refusal)
    finding = found(a_case(members=[member], desired=2), "policy")
    assert finding.verdict is FOUND and "w0 refuses 1.2 (ABOVE_ENGINE_LIMIT): 128 is above 64" in finding.said
    assert [fix.command for fix in finding.fixes] == ["trimtab policy set batch.active=64 --for node/w0"]
    assert found(a_case(desired=2), "policy").verdict is SUSPECT


def test_a_gateway_without_the_newest_policy_is_found_too() -> None:
    behind = a_member("g0")
    behind.hello.role = control_pb2.ROLE_GATEWAY
    finding = found(a_case(members=[a_member(revision=2), behind], desired=2), "policy")
    assert finding.verdict is SUSPECT and "g0 has not applied 1.2 yet" in finding.said


def test_a_store_that_is_away_and_a_mesh_without_a_leader_are_found() -> None:
    finding = found(a_case(store={"connected": False, "description": "redis at h:1: refused"}), "store")
    assert finding.verdict is FOUND and "the store is away" in finding.said and "h:1" in finding.said
    assert [f.command for f in finding.fixes] == ["redis-cli -u URL ping"]
    assert found(a_case(store={"writable": False}), "store").verdict is FOUND
    assert found(a_case(leader_id=""), "leader").verdict is FOUND
    away = admin_pb2.ReplicaState(replica_id="c1", seconds_since_heard=20.0)
    assert found(a_case(replicas=[away]), "leader").verdict is SUSPECT


def test_open_breakers_are_found_and_forced_ones_suspect_with_the_way_back() -> None:
    trip = admin_pb2.BreakerTrip(gateway_id="g0", dimension="errors", because="10 of 20", open_ms=4000, trips=1)
    finding = found(a_case(breakers=a_breaker(trip=trip)), "breakers")
    assert finding.verdict is FOUND and "w0: open for 4s yet, on errors: 10 of 20 (at g0)" in finding.said
    forced = admin_pb2.ForcedBreaker(forced=control_pb2.BREAKER_FORCE_OPEN, author="ada")
    finding = found(a_case(breakers=a_breaker(forced=forced)), "breakers")
    assert finding.verdict is SUSPECT and [f.command for f in finding.fixes] == ["trimtab breaker reset w0"]
    trip.open_ms = 0
    assert found(a_case(breakers=a_breaker(trip=trip)), "breakers").verdict is OK
    trip.trips = 5
    assert found(a_case(breakers=a_breaker(trip=trip)), "breakers").verdict is SUSPECT


def test_controllers_that_hold_can_not_be_told_of_and_decisions_that_failed_are_suspect() -> None:
    holding = admin_pb2.ControllerTelemetry(name="memory", mode="on", holds=["w0 says nothing of kv_used"])
    finding = found(a_case(controllers=[holding]), "loops")
    assert finding.verdict is OK and "memory waits: w0 says nothing of kv_used" in finding.said
    failed = admin_pb2.ControllerDecision(controller="batch", text="×0.8", failed="pinned", at_unix_ms=NOW - 1000)
    assert found(a_case(decisions=[failed]), "loops").verdict is SUSPECT
    off = admin_pb2.ControllerTelemetry(name="heal", mode="off")
    finding = found(a_case(controllers=[off]), "loops")
    assert finding.verdict is OK and "not acting: heal (off)" in finding.said


def test_builds_more_than_a_minor_version_apart_are_found() -> None:
    def of(*builds: str) -> Finding:
        return found(a_case(members=[a_member(f"w{i}", build=b) for i, b in enumerate(builds)]), "versions")

    assert of("0.1.0", "0.1.0").verdict is OK
    assert of("0.9.0", "0.10.2").verdict is OK
    finding = of("0.1.0", "0.3.0")
    assert finding.verdict is FOUND and "w0 more than one minor version behind" in finding.said


def test_every_fix_is_a_command_that_the_command_line_takes() -> None:
    mix = some_lengths(recent_prompts=admin_pb2.Quantiles(count=1000, p50=900, p95=5000, p99=GIANT, max=2 * GIANT))
    counters = {measures.OUT_OF_MEMORY: 1, measures.RECOMPUTED_TOKENS: 9000, measures.REALTIME_WAIT_MS: 50_000}
    slow = {**SLOW, "output_tokens": 200, "counters": counters}
    policy = {f"loops.{name}": "off" for name in ("clusters", "isolation", "heal", "oom", "priority", "batch")}
    case = a_case(
        a_worker(
            windows=recent(slow),
            load={"running": 48, "waiting": 9},
            gauges={measures.FRAGMENTATION: 0.5},
            limits={"block_size": 256, "block_sizes": [32, 256], "live_blocks": True},
        ),
        leaking(20, "w2"),
        a_worker("w1", state=control_pb2.NODE_STATE_HUNG),
        lengths=[mix],
        policy={**policy, "scheduler.mode": "fcfs"},
        breakers=a_breaker(forced=admin_pb2.ForcedBreaker(forced=control_pb2.BREAKER_FORCE_OPEN, author="ada")),
    )
    fixes = [fix for f in examine(case, BOOK) for fix in f.fixes if fix.action is not None]
    assert {type(fix.action) for fix in fixes} == set(get_args(doctor.Action))
    for fix in fixes:
        words = shlex.split(fix.command)[1:]
        # With --help behind it a command is parsed as far as its options, and asks nobody.
        result = CliRunner().invoke(cli, [*words, "--help"])
        assert result.exit_code == 0, (fix.command, result.output)
        if isinstance(fix.action, SetFields):
            for path, value in fix.action.fields.items():
                assert value == "default" or parse(path, value) is not None


def test_realtime_is_what_the_wire_says_it_is() -> None:
    assert (doctor_latency.REALTIME, Workload.REALTIME.value) == (RT, "realtime")
    assert (doctor.WORKER, doctor.GATEWAY) == (control_pb2.ROLE_WORKER, control_pb2.ROLE_GATEWAY)
    assert doctor.SERVING == control_pb2.NODE_STATE_SERVING


def test_a_path_is_never_cut_in_two() -> None:
    path = "unix:///var/lib/trimtab/meshes/production/of-a-long-name/valkey/and-more/valkey.sock"
    finding = found(a_case(store={"connected": False, "description": f"redis at {path}"}), "store")
    assert path in "\n".join(line for line, _ in finding_text(finding, 1))
