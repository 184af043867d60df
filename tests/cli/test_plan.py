"""What `trimtab up` decides before anything starts: processes, ports, flags, and that the mesh is its own."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.engines import cores
from tests.cli.mesh import FakeGateway, an_answer, serving
from tests.controlplane.mesh import FakeNode, a_mesh
from trimtab.errors import ModelNotFound, NoWorker
from trimtab.kit import rpc
from trimtab.kit.config import ConfigError
from trimtab.kit.process import free_port
from trimtab_cli import greeting, mesh, ready
from trimtab_cli.plan import Plan, Spec, Tier, another_worker, make

SECTIONS = ("GATEWAY_LISTEN", "GATEWAY_HTTP", "CONTROL_LISTEN", "CONTROL_METRICS", "WORKER_LISTEN", "WORKER_METRICS")


@pytest.fixture(autouse=True)
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free ports for all, each far enough from the next for a few workers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    given = {name: free_port() for name in SECTIONS}
    for name, port in given.items():
        monkeypatch.setenv(f"TRIMTAB_{name}", f"127.0.0.1:{port}")
    return given


@pytest.fixture
def listener(ports: dict[str, int]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", ports["GATEWAY_LISTEN"])) as taken:
        yield taken.getsockname()[1]


def a_plan(tmp_path: Path, *extra: str, **flags: Any) -> Plan:
    return make(mesh.load_sections(None, {"engine": "simulated", **flags}, extra), tmp_path)


def by_name(plan: Plan) -> dict[str, Spec]:
    return {spec.name: spec for spec in plan.specs}


def flag(spec: Spec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_each_process_gets_what_it_needs(tmp_path: Path, ports: dict[str, int]) -> None:
    plan = a_plan(tmp_path, "--step-ms", "3", workers="2", mesh="blue", max_num_seqs="8")
    specs = by_name(plan)
    assert [(s.name, s.tier) for s in plan.specs] == [
        ("valkey", Tier.STORE),
        ("control", Tier.CONTROL),
        ("w0", Tier.WORKER),
        ("w1", Tier.WORKER),
        ("gateway", Tier.GATEWAY),
    ]
    assert plan.gateway == f"127.0.0.1:{ports['GATEWAY_LISTEN']}"
    assert flag(specs["w0"], "--listen") == f"127.0.0.1:{ports['WORKER_LISTEN']}"
    for name in ("w0", "w1", "gateway"):
        assert flag(specs[name], "--control") == plan.control
    for name in ("control", "w0", "w1", "gateway"):
        assert flag(specs[name], "--mesh") == "blue"
        assert flag(specs[name], "--parent-pid") == str(os.getpid())
    for name in ("w0", "w1"):
        assert (flag(specs[name], "--node-id"), flag(specs[name], "--engine")) == (name, "simulated")
        assert (flag(specs[name], "--step-ms"), flag(specs[name], "--max-num-seqs")) == ("3", "8")
    assert specs["control"].env["TRIMTAB_CONTROL_REDIS"] == plan.store == f"unix://{specs['valkey'].address}"


def test_a_gateways_metrics_get_a_port_of_their_own_where_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--metrics" not in by_name(a_plan(tmp_path))["gateway"].argv
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("TRIMTAB_GATEWAY_METRICS", address)
        plan = a_plan(tmp_path)
    assert flag(by_name(plan)["gateway"], "--metrics") == plan.metrics != address
    assert any("gateway's metrics listens on" in note for note in plan.notes)


def test_replicas_of_the_control_plane_share_the_store_and_every_node_knows_all(
    tmp_path: Path, ports: dict[str, int]
) -> None:
    plan = a_plan(tmp_path, controls="3")
    specs = by_name(plan)
    replicas = [s for s in plan.specs if s.tier is Tier.CONTROL]
    assert [s.name for s in replicas] == ["control", "control1", "control2"]
    assert plan.control == ",".join(s.address for s in replicas)
    assert replicas[0].address == f"127.0.0.1:{ports['CONTROL_LISTEN']}"
    assert len({a for s in replicas for a in (s.address, s.metrics)}) == 6
    for s in replicas:
        assert (flag(s, "--listen"), flag(s, "--metrics")) == (s.address, s.metrics)
        assert s.env["TRIMTAB_CONTROL_REDIS"] == plan.store
        assert "--replica-id" not in s.argv
    for name in ("w0", "gateway"):
        assert flag(specs[name], "--control") == plan.control


def test_replicas_ports_come_after_those_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab_cli.plan.port_is_free", lambda *_: True)
    for name, port in (("CONTROL_LISTEN", 7071), ("CONTROL_METRICS", 7072)):
        monkeypatch.setenv(f"TRIMTAB_{name}", f"127.0.0.1:{port}")
    plan = a_plan(tmp_path, controls="2")
    assert (plan.control, by_name(plan)["control1"].metrics) == ("127.0.0.1:7071,127.0.0.1:7073", "127.0.0.1:7074")
    assert not plan.notes


def test_each_replica_has_a_name_and_an_address_of_its_own(
    tmp_path: Path, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CONTROL_REPLICA_ID", "c")
    monkeypatch.setenv("TRIMTAB_CONTROL_ADVERTISE", f"localhost:{ports['CONTROL_LISTEN']}")
    specs = by_name(a_plan(tmp_path, controls="2"))
    assert "--replica-id" not in specs["control"].argv, "it reads its own"
    second = specs["control1"]
    assert flag(second, "--replica-id") == "c-1"
    assert flag(second, "--advertise") == second.address.replace("127.0.0.1", "localhost")


def test_replicas_need_a_store_that_they_share(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 replicas of the control plane need a store that they share"):
        a_plan(tmp_path, redis="memory://", controls="2")
    assert a_plan(tmp_path, redis="memory://").store == "memory://"


def a_machine(monkeypatch: pytest.MonkeyPatch, *, affinity: int, quota: float | None = None) -> None:
    """The cores that this process may run on, and how many its control groups let it use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    monkeypatch.setattr(cores, "quota", lambda *_: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_several_engines_divide_the_cores(
    tmp_path: Path, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_machine(monkeypatch, affinity=9)
    assert by_name(a_plan(tmp_path, workers="2"))["w1"].env == {"OMP_NUM_THREADS": "4"}
    assert by_name(a_plan(tmp_path, workers="1"))["w0"].env == {}, "the worker itself leaves one core"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert by_name(a_plan(tmp_path, workers="2"))["w0"].env == {}, "who set it decided"


@pytest.mark.parametrize(("quota", "threads"), [(5.0, "2"), (4.5, "2"), (1.0, "1"), (64.0, "31")])
def test_several_engines_divide_what_a_containers_quota_leaves_of_the_cores(
    tmp_path: Path, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch, quota: float, threads: str
) -> None:
    a_machine(monkeypatch, affinity=64, quota=quota)
    plan = a_plan(tmp_path, workers="2")
    assert [by_name(plan)[name].env for name in ("w0", "w1")] == [{"OMP_NUM_THREADS": threads}] * 2


def test_another_worker_is_like_the_others_at_the_next_ports(tmp_path: Path, ports: dict[str, int]) -> None:
    sections = mesh.load_sections(None, {"engine": "simulated", "workers": "2"}, ("--step-ms", "3"))
    plan = make(sections, tmp_path)
    spec, notes = another_worker(sections, plan, 2, plan.specs)
    first = by_name(plan)["w0"]
    assert (spec.name, spec.tier, spec.drain_s) == ("w2", Tier.WORKER, first.drain_s)
    differ = {"--node-id", "--listen", "--metrics"}
    for name in (word for word in first.argv if word.startswith("--")):
        assert (flag(spec, name) == flag(first, name)) is (name not in differ), name
    if not notes:
        assert spec.address == f"127.0.0.1:{ports['WORKER_LISTEN'] + 2}"
        assert spec.metrics == f"127.0.0.1:{ports['WORKER_METRICS'] + 2}"


def test_another_worker_gets_no_port_of_one_that_is_only_starting(tmp_path: Path) -> None:
    sections = mesh.load_sections(None, {"engine": "simulated"}, ())
    plan = make(sections, tmp_path)
    beside = list(plan.specs)
    for _ in range(3):
        beside.append(another_worker(sections, plan, 1, beside)[0])
    used = [a for s in beside if s.tier is not Tier.STORE for a in (s.address, s.metrics)]
    assert len(set(used)) == len(used) == 12


def test_another_engine_shares_the_cores_with_those_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_machine(monkeypatch, affinity=9)
    sections = mesh.load_sections(None, {"engine": "simulated"}, ())
    plan = make(sections, tmp_path)
    assert another_worker(sections, plan, 1, plan.specs)[0].env == {"OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize("most", ["0", "65"])
def test_the_limit_of_workers_has_bounds(most: str) -> None:
    with pytest.raises(ConfigError, match=f"up workers_limit must be 1 to 64, not {most}"):
        mesh.load_sections(None, {"workers_limit": most}, ())


def test_a_store_of_ones_own_starts_no_valkey(tmp_path: Path) -> None:
    plan = a_plan(tmp_path, redis="redis://me:secret@elsewhere:6379/0")
    assert "valkey" not in by_name(plan)
    assert by_name(plan)["control"].env["TRIMTAB_CONTROL_REDIS"] == "redis://me:secret@elsewhere:6379/0"
    assert not [word for spec in plan.specs for word in spec.argv if "secret" in word]


def test_a_taken_port_is_replaced_and_told(tmp_path: Path, listener: int) -> None:
    plan = a_plan(tmp_path)
    moved = int(plan.gateway.split(":")[1])
    assert moved > listener
    assert f"port {listener} is taken; the gateway listens on {moved}" in plan.notes


def test_no_port_is_given_twice(tmp_path: Path, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECTIONS:
        monkeypatch.setenv(f"TRIMTAB_{name}", f"127.0.0.1:{ports['GATEWAY_LISTEN']}")
    plan = a_plan(tmp_path, workers="3")
    used = [a for s in plan.specs if s.tier is not Tier.STORE for a in (s.address, s.metrics)]
    assert len(set(used)) == len(used) == 10


def test_a_malformed_address_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_GATEWAY_LISTEN", "7070")
    with pytest.raises(ConfigError, match="gateway listen must be host:port"):
        a_plan(tmp_path)


def test_faults_of_all_sections_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CONTROL_FORGET_S", "soon")
    with pytest.raises(ConfigError) as e:
        mesh.load_sections(None, {"workers": "x", "engine": "steam"}, ())
    assert len(e.value.faults) == 3


def test_a_mesh_is_claimed_once_at_a_time(tmp_path: Path) -> None:
    with mesh.claimed("blue"):
        with mesh.claimed("red"):
            pass
        with pytest.raises(mesh.AlreadyUp, match="mesh blue"), mesh.claimed("blue"):
            pass
        plan = a_plan(tmp_path, mesh="blue")
        record = mesh.Record("blue", plan)
        record.write({"w0": 1})
        with pytest.raises(mesh.AlreadyUp, match=f"mesh blue is up already .pid {os.getpid()}.: gRPC {plan.gateway}"):
            mesh.claimed("blue").__enter__()
        record.remove()
    with mesh.claimed("blue"):
        pass


def test_the_commands_to_try_name_another_mesh_than_the_default(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    assert f"--gateway {plan.gateway}" in ready.commands("blue", plan, "m")[0]
    assert ready.commands("default", plan, "m")[1].endswith(" policy set batch.active=4")
    assert '"model": "m"' in ready.commands("default", plan, "m")[2]
    assert (
        '/v1/chat/completions -H "authorization: Bearer $TRIMTAB_KEY" -H '
        in ready.commands("blue", plan, "m", keys=True)[2]
    )
    two = a_plan(tmp_path, controls="2")
    assert f" --control {two.control} " in ready.policy_set("blue", two, "batch.active=4")


class LateGateway(FakeGateway):
    """Meets its first worker at the third question."""

    asked = 0

    async def ListModels(self, request: Any, context: Any) -> Any:
        self.asked += 1
        self.models = ("tiny",) if self.asked > 2 else ()
        return await super().ListModels(request, context)


class StaleGateway(FakeGateway):
    """Takes the model of the mesh before for that of its worker, until somebody has asked for it."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if not self.requests:
            self.requests.append(request)
            await rpc.abort(context, ModelNotFound(f"model {request.model!r} is not served here"))
        async for event in super().Generate(request, context):
            yield event


NOBODY = "127.0.0.1:9"
"""No control plane."""


async def test_the_first_prompt_waits_for_the_gateway_to_meet_its_workers() -> None:
    async with serving(LateGateway(an_answer("Hel", "lo "))) as gateway:
        got = await greeting.greet(gateway.address, NOBODY)
    assert (got.answer, got.worker, got.policy, got.model) == ("Hello", "w0", "1.7", "tiny")
    assert got.ttft_ms > 0


async def test_the_first_prompt_asks_for_a_model_that_a_worker_of_this_start_has() -> None:
    async with a_mesh() as plane, serving(FakeGateway(models=("another", "tiny"))) as gateway:
        await plane.start_node(FakeNode(plane.address)).holds(1, 1)
        await greeting.greet(gateway.address, plane.address)
    assert [r.model for r in gateway.requests] == ["tiny"]


async def test_a_model_that_the_gateway_forgets_meanwhile_is_asked_for_anew() -> None:
    async with serving(StaleGateway()) as gateway:
        got = await greeting.greet(gateway.address, NOBODY)
    assert (got.answer, len(gateway.requests)) == ("Hello", 2)


async def test_the_first_prompt_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "RETRY_FOR_S", 0.0)
    async with serving(FakeGateway([NoWorker("none")])) as gateway:
        with pytest.raises(NoWorker, match="none"):
            await greeting.greet(gateway.address, NOBODY)
