"""What a worker makes of the control plane's commands, and how it answers."""

import asyncio

import grpc
import pytest

from services.worker.commands import Commands, Reblocking
from tests.worker.conftest import a_request
from tests.worker.test_policy_keeper import a_snapshot, push
from tests.worker.test_steering import ALONE, LONG, begin, leave
from trimtab import codec, errors
from trimtab.kit import rpc
from trimtab.messages import RequestMatch, Workload
from trimtab.v1 import control_pb2 as pb


def a_match(**facts):
    return codec.encode_match(RequestMatch(**facts))


def release(match=None, ids=()):
    return pb.Command(command_id="c", release_requests=pb.ReleaseRequestsCommand(request_ids=ids, match=match))


def reprioritise(delta, match=None, request_id=""):
    move = pb.ReprioritiseCommand(request_id=request_id, delta=delta, match=match)
    return pb.Command(command_id="c", reprioritise=move)


def isolate(isolated, match=None):
    return pb.Command(command_id="c", isolate_requests=pb.IsolateRequestsCommand(match=match, isolated=isolated))


@pytest.fixture
def commands(rig):
    return Commands(rig.steering)


def untouched(rig):
    return all((h.delta, h.isolated, h.ended) == (0, False, None) for h in rig.steering._held.values())


async def done(commands, command):
    """How many requests it acted on."""
    result = await commands.obey(command)
    assert result is not None and result.ok, result
    return result.affected


@pytest.mark.parametrize(
    "command",
    [reprioritise(2, request_id="c"), reprioritise(2, a_match(request_ids=frozenset({"c"})))],
    ids=["by the old field", "by a match"],
)
async def test_a_waiting_request_is_moved(rig, commands, command):
    await rig.obey({**ALONE, "admission.engine_queue": 0})
    order = []
    first = await begin(rig, "runs", [], tokens=LONG)
    tasks = [await begin(rig, name, order) for name in ("a", "b", "c")]
    assert await done(commands, command) == 1
    await leave(first)
    await asyncio.gather(*tasks)
    assert order == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("command", "released"),
    [
        (release(ids=["a", "elsewhere"]), {"a"}),
        (release(a_match(request_ids=frozenset({"b"})), ["a"]), {"a", "b"}),
        (release(a_match(tenant="t"), ["a", "b"]), {"a"}),
        (release(a_match(workload=Workload.BATCH)), {"a", "b", "c"}),
        (release(a_match(workload=Workload.REALTIME)), set()),
    ],
    ids=["old field", "both", "both must hold", "workload", "nobody"],
)
async def test_those_who_match_are_released_and_counted(rig, commands, command, released):
    await rig.obey({**ALONE, "admission.engine_queue": 0})
    tasks = {
        name: await begin(rig, name, [], tokens=LONG, tenant=tenant)
        for name, tenant in (("a", "t"), ("b", ""), ("c", "t"))
    }
    assert await done(commands, command) == len(released)
    for name in released:
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await tasks[name]
        assert isinstance(rpc.from_call(e.value), errors.Released)
    assert {held.request_id for held in rig.steering._held.values()} == tasks.keys() - released
    assert untouched(rig)
    await leave(*(tasks[name] for name in tasks.keys() - released))
    await rig.idle()


async def test_isolation_is_put_on_and_taken_off(rig, commands):
    await rig.obey({**ALONE, "admission.engine_queue": 8})
    tasks = [await begin(rig, name, [], tokens=LONG) for name in ("a", "b")]
    batch = a_match(workload=Workload.BATCH)
    held = list(rig.steering._held.values())
    for isolated in (True, False):
        assert await done(commands, isolate(isolated, batch)) == 2
        assert [h.isolated for h in held] == [isolated] * 2
    await leave(*tasks)


@pytest.mark.parametrize(
    "command", [release(), reprioritise(1), isolate(True), release(ids=[""]), release(pb.RequestMatch())]
)
async def test_a_match_that_says_nothing_is_refused_and_nobody_is_touched(rig, commands, command):
    task = await begin(rig, "a", [], tokens=LONG)
    result = await commands.obey(command)
    assert (result.ok, result.reason, result.affected) == (False, "EMPTY_MATCH", 0)
    assert untouched(rig)
    await leave(task)


@pytest.mark.parametrize("make", [release, lambda match: reprioritise(1, match), lambda match: isolate(True, match)])
async def test_what_only_a_newer_build_means_is_refused(rig, commands, make):
    task = await begin(rig, "a", [], tokens=LONG)
    result = await commands.obey(make(pb.RequestMatch(request_ids=["a"], workload=77)))
    assert (result.ok, result.reason) == (False, "INVALID_REQUEST")
    assert untouched(rig)
    await leave(task)


@pytest.mark.parametrize("delta", [-(2**31), 2**31 - 1])
async def test_a_delta_out_of_all_bounds_moves_no_further_than_the_policy_lets_it(rig, commands, delta):
    await rig.obey({**ALONE, "admission.engine_queue": 0})
    tasks = [await begin(rig, name, [], tokens=LONG) for name in ("a", "b")]
    assert await done(commands, reprioritise(delta, request_id="b")) == 1
    await leave(*tasks)
    await rig.idle()


async def test_an_engine_that_is_gone_is_an_answer(rig, commands, monkeypatch):
    async def gone(request_ids, **changes):
        raise errors.EngineDead("the engine process is gone")

    monkeypatch.setattr(rig.engine, "steer", gone)
    result = await commands.obey(reprioritise(1, request_id="a"))
    assert (result.ok, result.reason, result.message) == (False, "ENGINE_DEAD", "the engine process is gone")


@pytest.mark.parametrize("command", [pb.Command(command_id="c"), pb.Command(resume=pb.ResumeCommand())])
async def test_other_commands_are_not_known(commands, command):
    assert await commands.obey(command) is None


async def test_one_that_is_released_on_its_way_into_the_engine_never_gets_there(rig, commands):
    request = codec.decode_request(a_request(max_tokens=500, request_id="a"))
    events = rig.serving.stream(request)
    await anext(events)
    assert rig.gate.handed == 1, "admitted, and its reader has not come back yet"
    assert await done(commands, release(ids=["a"])) == 1
    with pytest.raises(errors.Released):
        await anext(events)
    await rig.idle()


async def test_a_stream_that_is_left_gives_its_place_back_at_once(rig):
    request = codec.decode_request(a_request(max_tokens=500))
    events = rig.serving.stream(request)
    for _ in range(2):
        await anext(events)
    assert (rig.gate.handed, len(rig.engine._live)) == (1, 1)
    await events.aclose()
    assert (rig.gate.handed, len(rig.engine._live), rig.serving.unfinished) == (0, 0, 0)


async def test_a_reload_tells_the_engine_its_policy_anew(rig, commands):
    await push(rig, a_snapshot(batch__active=3))
    commands.reload = rig.keeper.reload
    rules, rig.engine._value.rules = rig.engine._value.rules, None
    result = await commands.obey(pb.Command(command_id="c", reload_policy=pb.ReloadPolicyCommand()))
    assert result.ok
    assert rig.engine._value.rules == rules


async def test_a_reload_that_the_engine_refuses_says_why(commands):
    async def refuse():
        raise errors.PolicyRefused("not now", reason="ABOVE_ENGINE_LIMIT")

    commands.reload = refuse
    result = await commands.obey(pb.Command(command_id="c", reload_policy=pb.ReloadPolicyCommand()))
    assert (result.ok, result.message) == (False, "not now")


def reblock(block_size, **how):
    return pb.Command(command_id="c", reblock=pb.ReblockCommand(block_size=block_size, **how))


async def test_a_change_of_the_block_size_is_answered_with_what_it_did(rig, commands):
    told = []
    commands.reblocking = Reblocking(rig.engine, lambda: 2000, lambda: told.append(rig.engine.limits.block_size))
    result = await commands.obey(reblock(64))
    blocks = rig.engine.limits.total_blocks
    assert result.ok and told == [64]
    assert (result.reblock.before_block_size, result.reblock.after_block_size) == (16, 64)
    assert (result.reblock.before_total_blocks, result.reblock.after_total_blocks) == (4 * blocks, blocks)
    again = await commands.obey(reblock(64, dry_run=True))
    assert again.ok and again.reblock.dry_run and again.reblock.before_block_size == 64


async def test_an_engine_that_is_gone_changes_nothing_and_a_worker_without_one_knows_no_such_command(rig, commands):
    assert await commands.obey(reblock(64)) is None
    commands.reblocking = Reblocking(rig.engine, lambda: 2000, lambda: None)
    await rig.engine.stop()
    result = await commands.obey(reblock(64))
    assert (result.ok, result.reason, rig.engine.limits.block_size) == (False, "ENGINE_DEAD", 16)
