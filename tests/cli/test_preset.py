"""Presets against a control plane: what `trimtab up` does once its mesh answers, and `trimtab policy preset`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import structlog
from click.testing import CliRunner, Result

from controlplane.cli import policy
from tests.cli.mesh import FakeGateway, accepted, an_answer, finish, serving
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh
from trimtab.client import Client
from trimtab.errors import StreamCut
from trimtab.kit.process import free_port
from trimtab.messages import Delta, Workload
from trimtab.presets import SMALL
from trimtab.v1 import inference_pb2
from trimtab_cli import calibration
from trimtab_cli.calibration import Measured, NotMeasured, measure
from trimtab_cli.plan import Plan
from trimtab_cli.preset import settle
from trimtab_cli.progress import Screen
from trimtab_cli.settings import UpSettings

TOKEN_MS, TTFT_MS = 10.01, 150.0
MEASURED = Measured(TOKEN_MS, TTFT_MS, steady=True)
WRITTEN = {
    "paths.hot_below": 1024,
    "serial.above": 3072,
    "isolate.from_tokens": 6144,
    "prefill.itl_budget_ms": 41,
    "objectives.itl_p99_ms": 82,
    "objectives.ttft_p99_ms": 600,
}


class Heard(Screen):
    """Keeps what is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def event(self, kind: str, text: str, **facts: Any) -> None:
        self.events.append((kind, text, facts))


@dataclasses.dataclass
class WideGateway(FakeGateway):
    async def ListModels(self, request: Any, context: Any) -> Any:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="tiny", max_model_len=131_072)])


@dataclasses.dataclass
class Started:
    """A mesh that `up` has just started."""

    mesh: Mesh
    gateway: str
    measured: list[str] = dataclasses.field(default_factory=list)

    async def measure(self, client: Client, model: str) -> Measured:
        self.measured.append(model)
        return MEASURED

    async def settle(self, up: UpSettings | None = None, **changes: Any) -> list[tuple[str, str, dict[str, Any]]]:
        heard = Heard()
        plan = Plan((), self.gateway, "", self.mesh.address, (), "", ())
        await settle(heard, up or UpSettings(), plan, **{"measure": self.measure, **changes})
        return heard.events

    async def policy(self) -> dict[str, int]:
        """The fields of the preset, as they are now."""
        effective = (await self.mesh.admin.get_policy()).effective
        parts = {path: path.split(".") for path in SMALL}
        return {path: getattr(getattr(effective, part), name) for path, (part, name) in parts.items()}

    async def set(self, **fields: str) -> None:
        await self.mesh.admin.set_policy({k.replace("__", "."): v for k, v in fields.items()}, author="ada")

    async def revision(self) -> int:
        return (await self.mesh.admin.get_policy()).snapshot.identity.revision


@pytest.fixture
def quiet() -> Iterator[None]:
    """The control plane of these tests shares stdout with the verbs; its log must not be taken for their answer."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture
async def started(quiet: None) -> AsyncIterator[Started]:
    async with a_mesh() as mesh, serving(FakeGateway()) as gateway:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        yield Started(mesh, gateway.address)


async def test_up_writes_small_once_says_so_and_how_to_undo_it(started: Started) -> None:
    ((kind, text, facts),) = await started.settle()
    assert (kind, facts["applied"], facts["window"], facts["token_ms"]) == ("preset", True, 4096, TOKEN_MS)
    assert facts["fields"] == {path: str(value) for path, value in WRITTEN.items()}
    first, undo = text.splitlines()
    assert first == (
        "preset small: window 4096, one stream gives a token every 10.01 ms, the first after 150 ms: "
        "paths.hot_below=1024 serial.above=3072 isolate.from_tokens=6144 prefill.itl_budget_ms=41 "
        "objectives.itl_p99_ms=82 objectives.ttft_p99_ms=600"
    )
    words = undo.split(" policy set ")[1]
    assert words == " ".join(f"{path}=default" for path in SMALL)
    assert await started.policy() == WRITTEN
    (newest,) = (await started.mesh.admin.history(1)).entries
    assert newest.author == "trimtab up"
    assert newest.reason == "preset small: window 4096, one stream gives a token every 10.01 ms, the first after 150 ms"
    assert started.mesh.nodes[0].held.value.revision == 2

    (again,) = await started.settle()
    assert again[1] == "preset small: the policy has it already"
    assert (started.measured, await started.revision()) == (["tiny"], 2)


async def test_the_undo_names_the_control_plane_of_a_mesh_that_is_not_the_default(started: Started) -> None:
    ((_, text, _),) = await started.settle(UpSettings(mesh="blue"))
    assert f" policy set --control {started.mesh.address} paths.hot_below=default " in text


async def test_what_somebody_has_set_bars_the_whole_preset(started: Started) -> None:
    await started.set(serial__above="5000", batch__active="8")
    for up in (UpSettings(), UpSettings(preset="small")):
        ((_, text, _),) = await started.settle(up)
        assert text == "preset small is not applied: ada has set serial.above"
    assert (started.measured, await started.revision()) == ([], 2)


async def test_what_was_undone_stays_undone_unless_asked_for_by_name(started: Started) -> None:
    await started.settle()
    await started.set(**dict.fromkeys((path.replace(".", "__") for path in SMALL), "default"))
    ((_, text, facts),) = await started.settle()
    assert (facts["applied"], facts["set_before"]) == (False, SMALL)
    assert text == f"preset small is not applied: ada has set {', '.join(SMALL)}"
    ((_, _, facts),) = await started.settle(UpSettings(preset="small"))
    assert (facts["applied"], await started.policy()) == (True, WRITTEN)


async def test_it_is_measured_through_the_gateways_door_with_the_key_of_the_environment(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_KEY", "tt-mine")
    async with serving(FakeGateway()) as gateway:
        started.gateway = gateway.address
        ((_, text, _),) = await started.settle(measure=measure)
    assert {m.get("authorization") for m in gateway.metadata} == {"Bearer tt-mine"}, text


async def test_it_is_written_with_the_token_of_the_environment(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_TOKEN", "nobody-knows-this-one")
    ((kind, text, _),) = await started.settle()
    assert kind == "preset_failed"
    assert text.endswith("you are unknown (no role, by token)")


async def test_what_an_earlier_up_has_set_is_called_so(started: Started) -> None:
    await started.settle()
    await started.set(serial__above="5000")
    ((_, text, _),) = await started.settle()
    ours = ", ".join(path for path in SMALL if path != "serial.above")
    assert text == (f"preset small is not applied: an earlier `trimtab up` has set {ours}; ada has set serial.above")


async def test_other_fields_do_not_bar_it(started: Started) -> None:
    await started.set(batch__active="8")
    ((_, _, facts),) = await started.settle()
    assert facts["applied"]


async def test_who_decides_while_the_stream_is_measured_wins(started: Started) -> None:
    async def meanwhile(client: Client, model: str) -> Measured:
        await started.set(paths__hot_below="2000")
        return MEASURED

    ((_, text, _),) = await started.settle(measure=meanwhile)
    assert text == "preset small is not applied: ada has set paths.hot_below"
    assert (await started.policy())["serial.above"] == 8192


@pytest.mark.parametrize("up", [UpSettings(preset="none"), UpSettings(prompt=False)])
async def test_nothing_is_sent_where_nothing_was_asked_for(started: Started, up: UpSettings) -> None:
    assert await started.settle(up) == []
    assert (started.measured, await started.revision()) == ([], 1)


async def test_a_large_window_gets_small_only_by_name(started: Started) -> None:
    async with serving(WideGateway()) as wide:
        started.gateway = wide.address
        assert await started.settle() == []
        ((_, _, facts),) = await started.settle(UpSettings(preset="small"))
    assert (facts["applied"], facts["window"]) == (True, 131_072)


async def test_an_unsteady_measurement_is_used_and_called_so(started: Started) -> None:
    async def unsteady(client: Client, model: str) -> Measured:
        return dataclasses.replace(MEASURED, steady=False)

    ((_, text, facts),) = await started.settle(measure=unsteady)
    assert "the first after 150 ms (unsteady: no two streams agreed): paths.hot_below=1024 " in text
    assert (facts["steady"], await started.policy()) == (False, WRITTEN)


async def test_a_stream_that_fails_is_a_warning_and_nothing_is_written(started: Started) -> None:
    async def fails(client: Client, model: str) -> Measured:
        raise StreamCut("the worker died")

    ((kind, text, _),) = await started.settle(measure=fails)
    assert (kind, text) == ("preset_failed", "warning: preset small is not applied: the worker died")
    assert await started.revision() == 1


async def test_a_fault_of_ours_is_a_warning_too(started: Started) -> None:
    async def fails(client: Client, model: str) -> Measured:
        raise RuntimeError

    ((kind, text, _),) = await started.settle(measure=fails)
    assert (kind, text) == ("preset_failed", "warning: preset small is not applied: RuntimeError()")


async def test_a_control_plane_that_is_gone_is_a_warning(started: Started) -> None:
    started.mesh.address = f"127.0.0.1:{free_port()}"
    ((kind, text, _),) = await started.settle()
    assert (kind, "can't reach the control plane" in text) == ("preset_failed", True)


# ---- the measurement


class Clock:
    """Each look at it takes as long as the next of `tokens_ms`, then as the last."""

    def __init__(self, *tokens_ms: float) -> None:
        self._tokens_ms = list(tokens_ms)
        self.now = 0.0

    def __call__(self) -> float:
        self.now += (self._tokens_ms.pop(0) if len(self._tokens_ms) > 1 else self._tokens_ms[0]) / 1000
        return self.now


def measured(token_ms: float, ttft_ms: float, *, steady: bool = True) -> Measured:
    return Measured(pytest.approx(token_ms), pytest.approx(ttft_ms), steady)  # type: ignore[arg-type]


TWENTY = [str(i) for i in range(20)]


async def test_two_streams_that_agree_are_enough() -> None:
    async with serving(FakeGateway(an_answer(*TWENTY))) as gateway, Client(gateway.address) as client:
        assert await measure(client, "tiny", clock=Clock(10.0)) == measured(10.0, 10.0)
    assert len(gateway.requests) == 2
    asked = gateway.requests[0]
    assert (asked.model, asked.workload, asked.sampling.ignore_eos) == ("tiny", Workload.REALTIME, True)


async def test_a_stream_that_others_slow_down_is_not_what_counts() -> None:
    async with serving(FakeGateway(an_answer(*TWENTY))) as gateway, Client(gateway.address) as client:
        clock = Clock(30.0, 90.0, *[30.0] * 19, 10.0, 50.0, *[10.0] * 19, 10.2)
        assert await measure(client, "tiny", clock=clock) == measured(10.0, 10.2)
    assert len(gateway.requests) == 3


async def test_tokens_that_come_together_share_their_time() -> None:
    pairs = [Delta(2 * i, (1, 2), "") for i in range(10)]
    answer = [accepted(), *pairs, finish()]
    async with serving(FakeGateway(answer)) as gateway, Client(gateway.address) as client:
        assert await measure(client, "tiny", clock=Clock(10.0)) == measured(5.0, 10.0)


async def test_a_machine_too_slow_for_two_streams_is_judged_by_what_it_gave() -> None:
    clock = Clock(900.0)

    def until_the_limit() -> float:
        if clock() > 16 * 0.9:
            raise TimeoutError  # as `asyncio.timeout` does, without the wait
        return clock.now

    async with serving(FakeGateway(an_answer(*TWENTY))) as gateway, Client(gateway.address) as client:
        assert await measure(client, "tiny", clock=until_the_limit) == measured(900.0, 900.0, steady=False)
    assert len(gateway.requests) == 1


async def test_too_few_tokens_tell_nothing() -> None:
    async with serving(FakeGateway(an_answer("a", "b"))) as gateway, Client(gateway.address) as client:
        with pytest.raises(NotMeasured, match=f"a stream of {calibration.TOKENS} tokens gave too few"):
            await measure(client, "tiny")


# ---- the verb


async def verb(started: Started, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, policy, [*words, "--control", started.mesh.address])


async def test_policy_preset_sets_the_thresholds_and_says_that_the_budget_is_left_alone(started: Started) -> None:
    result = await verb(started, "preset", "small")
    assert result.exit_code == 0, result.output
    assert "paths.hot_below: 4096 (default) → 1024" in result.stdout
    assert "w0: applied in 0.5 ms" in result.stdout
    assert "prefill.itl_budget_ms is left alone; set it by --itl-budget-ms N" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    objectives = {"objectives.itl_p99_ms": 200, "objectives.ttft_p99_ms": 500}
    assert await started.policy() == {**WRITTEN, "prefill.itl_budget_ms": 100, **objectives}
    (newest,) = (await started.mesh.admin.history(1)).entries
    assert newest.reason == "preset small"


async def test_policy_preset_with_a_budget_sets_all_over_what_was_there(started: Started) -> None:
    await started.set(serial__above="5000")
    answer = json.loads((await verb(started, "preset", "small", "--itl-budget-ms", "41", "--json")).stdout)
    assert (answer["preset"], answer["written"], answer["left_alone"]) == (
        "small",
        True,
        ["objectives.ttft_p99_ms"],
    )
    measured_by_up_alone = {"objectives.ttft_p99_ms": 600}
    assert {c["field"]: c["after"] for c in answer["changes"]}.items() == WRITTEN.items() - measured_by_up_alone.items()
    assert [n["answer"] for n in answer["nodes"]] == ["applied"]


async def test_a_dry_run_of_a_preset_writes_nothing(started: Started) -> None:
    result = await verb(started, "preset", "small", "--dry-run")
    assert (result.exit_code, "nothing was written" in result.stdout) == (0, True)
    answer = json.loads((await verb(started, "preset", "small", "--dry-run", "--json")).stdout)
    assert (answer["written"], answer["left_alone"]) == (False, [*SMALL[3:]])
    assert await started.revision() == 1


@pytest.mark.parametrize(
    ("words", "code"), [(("large",), 2), ((), 2), (("small", "--itl-budget-ms", "x"), 2), (("small", "--itl-budget-ms", "-1"), 4)]
)  # fmt: skip
async def test_a_preset_that_is_not_there_is_usage_and_a_bad_budget_is_refused(
    started: Started, words: tuple[str, ...], code: int
) -> None:
    assert (await verb(started, "preset", *words)).exit_code == code
    assert await started.revision() == 1


@pytest.mark.parametrize("name", ["auto", "none", "small"])
def test_up_takes_these_presets(name: str) -> None:
    assert UpSettings(preset=name).preset == name


def test_up_refuses_another_preset_and_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="up preset must be auto, none or small, not 'tiny'"):
        UpSettings(preset="tiny")
