"""Generate, over a real socket: what a direct client of a worker sees."""

import asyncio

import grpc
import pytest

from services.worker import serving
from tests.worker.conftest import a_request, running_worker
from trimtab import codec, errors
from trimtab.kit import rpc
from trimtab.policy import Policy, with_fields
from trimtab.snapshot import Document
from trimtab.v1 import inference_pb2 as pb


async def collect(call):
    accepted, tokens, text, finish = None, [], "", None
    while (r := await call.read()) is not grpc.aio.EOF:
        match r.WhichOneof("event"):
            case "accepted":
                assert accepted is None and not tokens
                accepted = r.accepted
            case "delta":
                assert r.delta.first_index == len(tokens)
                tokens += r.delta.token_ids
                text += r.delta.text
            case "finish":
                finish = r.finish
    return accepted, tokens, text, finish


async def to_the_end(call):
    """Whatever comes: some of it may have been read already."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as e:
        await to_the_end(call)
    return e.value.code(), rpc.from_call(e.value)


async def test_a_stream_is_accepted_delivered_and_finished(rig):
    accepted, tokens, text, finish = await collect(rig.stub.Generate(a_request("hello", max_tokens=30)))
    assert (accepted.worker_id, accepted.model, accepted.prompt_tokens, accepted.resumable) == ("w0", "sim", 5, True)
    assert len(tokens) == 30
    assert text == bytes(tokens).decode("utf-8", "ignore")
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (5, 30)
    t = finish.timings
    assert 0 < t.first_token_ms <= t.total_ms
    assert t.queued_ms + t.prefill_ms == pytest.approx(t.first_token_ms, abs=0.01)
    await rig.idle()


async def test_accepted_comes_before_any_engine_work(rig):
    rig.gate.set_policy(with_fields(Policy(), {"batch.active": 1, "admission.engine_queue": 0}))
    first = rig.stub.Generate(a_request(max_tokens=3000))
    await first.read()
    second = rig.stub.Generate(a_request())
    response = await second.read()
    assert response.WhichOneof("event") == "accepted"
    assert rig.gate.waiting == 1, "the first one still runs, so the second one waits for the engine"
    first.cancel()
    assert len((await collect(second))[1]) == 8
    await rig.idle()


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (lambda r: r.ClearField("text"), "INVALID_ARGUMENT", None),
        (lambda r: setattr(r, "text", ""), "INVALID_ARGUMENT", "prompt"),
        (lambda r: setattr(r, "text", "x" * 5000), "INVALID_ARGUMENT", "prompt"),
        (lambda r: r.token_ids.ids.append(999), "INVALID_ARGUMENT", "prompt"),
        (lambda r: setattr(r.sampling, "max_tokens", 0), "INVALID_ARGUMENT", "sampling.max_tokens"),
        (lambda r: setattr(r.sampling, "max_tokens", 9999), "INVALID_ARGUMENT", "sampling.max_tokens"),
        (lambda r: setattr(r.sampling, "temperature", -1), "INVALID_ARGUMENT", "sampling.temperature"),
        (lambda r: setattr(r.sampling, "top_p", 0), "INVALID_ARGUMENT", "sampling.top_p"),
        (lambda r: r.sampling.stop.append(""), "INVALID_ARGUMENT", "sampling.stop"),
        (lambda r: setattr(r.sampling, "json_schema", "{"), "INVALID_ARGUMENT", "sampling.json_schema"),
        (lambda r: setattr(r, "model", "other"), "NOT_FOUND", None),
    ],
)
async def test_bad_input_is_refused_with_the_field_before_any_engine_work(rig, change, code, field):
    request = a_request()
    change(request)
    got, error = await refused(rig.stub.Generate(request))
    assert got.name == code
    if field:
        assert field in [v.field for v in error.violations]
    assert rig.engine.pulse().step_no == 0
    await rig.idle()


async def the_policy_is(rig, **fields):
    document = Document({k.replace("__", "."): v for k, v in fields.items()})
    result = await rig.keeper.on_push(codec.seal(document, epoch=1, revision=1), 0, "")
    assert result.HasField("applied")


@pytest.mark.parametrize("tokens", [99, 100])
async def test_an_isolated_prompt_is_refused_where_the_policy_says_so(rig, tokens):
    await the_policy_is(rig, isolate__from_tokens=100, isolate__action="refuse")
    call = rig.stub.Generate(a_request("x" * tokens))
    if tokens < 100:
        assert len((await collect(call))[1]) == 8
        return
    code, error = await refused(call)
    assert (code.name, [v.field for v in error.violations]) == ("INVALID_ARGUMENT", ["prompt"])
    assert "from 100 on it is refused (isolate.action = refuse)" in error.message
    assert rig.engine.pulse().step_no == 0
    await rig.idle()


async def test_an_isolated_tenants_requests_are_refused_and_nobody_elses(rig):
    await the_policy_is(rig, isolate__tenants=("acme",), isolate__action="refuse")
    _, error = await refused(rig.stub.Generate(a_request(tenant="acme")))
    assert [v.field for v in error.violations] == ["tenant"]
    assert len((await collect(rig.stub.Generate(a_request(tenant="other"))))[1]) == 8


async def test_an_isolated_request_that_another_pool_must_take_says_wrong_pool(rig):
    await the_policy_is(rig, isolate__from_tokens=100, isolate__action="pool")
    code, error = await refused(rig.stub.Generate(a_request("x" * 100)))
    assert (code.name, type(error)) == ("FAILED_PRECONDITION", errors.WrongPool)
    await rig.idle()


async def test_an_isolated_request_runs_where_it_may_run_alone(rig):
    await the_policy_is(rig, isolate__from_tokens=1, isolate__tenants=("acme",))
    calls = [rig.stub.Generate(a_request("x" * 100, tenant=tenant)) for tenant in ("acme", "acme", "other")]
    assert [len(tokens) for _, tokens, _, _ in await asyncio.gather(*map(collect, calls))] == [8, 8, 8]
    await rig.idle()


async def test_client_cancel_frees_the_engine_within_a_step(rig):
    call = rig.stub.Generate(a_request(max_tokens=4000 - 8))
    await call.read()
    await call.read()
    assert rig.engine.load().running == 1
    call.cancel()
    await rig.idle()


async def test_the_deadline_ends_the_stream_and_frees_the_engine(rig):
    code, _ = await refused(rig.stub.Generate(a_request(max_tokens=4000 - 8), timeout=0.15))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await rig.idle()


async def test_a_deadline_that_no_step_can_meet_is_refused_before_any_engine_work(rig, monkeypatch):
    monkeypatch.setattr(rig.engine, "stats", lambda: {"step_constant_ms": 60_000.0})
    before = rig.engine.pulse().step_no
    code, details = await refused(rig.stub.Generate(a_request(), timeout=20))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "a step of this engine takes 60000" in str(details)
    assert rig.engine.pulse().step_no == before
    await collect(rig.stub.Generate(a_request(), timeout=90))


async def test_stop_strings_end_the_stream_at_the_right_byte(rig):
    _, _, whole, _ = await collect(rig.stub.Generate(a_request("p", max_tokens=200)))
    request = a_request("p", max_tokens=200)
    request.sampling.stop.append("rudder, and")
    _, tokens, text, finish = await collect(rig.stub.Generate(request))
    assert text == whole[: whole.index("rudder, and")]
    assert (finish.reason, finish.stop) == (pb.FINISH_REASON_STOP, "rudder, and")
    assert finish.usage.completion_tokens == len(tokens) < 200
    await rig.idle()


async def test_a_natural_end_is_a_stop_and_its_token_gives_no_text(rig):
    _, tokens, text, finish = await collect(rig.stub.Generate(a_request("p", max_tokens=500, ignore_eos=False)))
    assert finish.reason == pb.FINISH_REASON_STOP
    assert tokens[-1] == 256
    assert text == bytes(tokens[:-1]).decode("utf-8", "ignore")


async def test_a_draining_worker_takes_nothing_and_says_unavailable(rig):
    rig.serving.draining = True
    code, error = await refused(rig.stub.Generate(a_request()))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error, errors.Draining) and error.retry_after_ms


async def test_a_full_queue_is_back_pressure_with_a_retry_hint(rig):
    bounds = {"batch.active": 1, "admission.engine_queue": 0, "admission.realtime_queue": 0}
    rig.gate.set_policy(with_fields(Policy(), bounds))
    first = rig.stub.Generate(a_request(max_tokens=1000))
    await first.read()
    code, error = await refused(rig.stub.Generate(a_request()))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error, errors.QueueFull) and error.retry_after_ms
    first.cancel()
    await rig.idle()


async def test_an_engine_that_dies_ends_its_streams_as_engine_fault(rig):
    call = rig.stub.Generate(a_request(max_tokens=4000 - 8))
    await call.read()
    await call.read()
    await rig.engine.stop()
    code, error = await refused(call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error, errors.EngineDead)


@pytest.mark.slow
@pytest.mark.parametrize("cut", range(1, 40, 3))
async def test_a_resumed_stream_goes_on_at_the_next_token_and_byte(rig, cut):
    accepted, tokens, text, _ = await collect(rig.stub.Generate(a_request("q", max_tokens=40)))
    request = a_request("q", max_tokens=40)
    delivered_text = bytes(tokens[:cut]).decode("utf-8", "ignore")
    request.resume.CopyFrom(
        pb.Resume(
            token_ids=tokens[:cut],
            text_bytes=len(delivered_text.encode()),
            attempt=2,
            prompt_digest=accepted.prompt_digest,
        )
    )
    rest_tokens, rest_text = [], ""
    async for r in rig.stub.Generate(request):
        if r.WhichOneof("event") == "delta":
            assert r.delta.first_index == cut + len(rest_tokens)
            rest_tokens += r.delta.token_ids
            rest_text += r.delta.text
        if r.WhichOneof("event") == "finish":
            assert r.finish.usage.completion_tokens == 40
    assert tokens[:cut] + rest_tokens == tokens
    assert delivered_text + rest_text == text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.stop.append("rudder"), pb.FINISH_REASON_STOP),
        (lambda s: setattr(s, "ignore_eos", False), pb.FINISH_REASON_STOP),
        (lambda s: setattr(s, "max_tokens", 5), pb.FINISH_REASON_LENGTH),
    ],
    ids=["stop string", "end of sequence", "length"],
)
async def test_a_stream_cut_between_its_last_token_and_its_finish_only_finishes(rig, change, reason):
    request = a_request("q", max_tokens=400)
    change(request.sampling)
    accepted, tokens, text, whole = await collect(rig.stub.Generate(request))
    assert whole.reason == reason
    steps = rig.engine.pulse().step_no
    request.resume.CopyFrom(
        pb.Resume(token_ids=tokens, text_bytes=len(text.encode()), attempt=2, prompt_digest=accepted.prompt_digest)
    )
    events = [r async for r in rig.stub.Generate(request)]
    assert [r.WhichOneof("event") for r in events] == ["accepted", "finish"]
    assert (events[1].finish.reason, events[1].finish.stop) == (reason, whole.stop)
    assert events[1].finish.usage.completion_tokens == len(tokens)
    assert rig.engine.pulse().step_no == steps


async def test_text_that_was_held_back_until_the_end_is_not_missed_by_a_resume_at_the_end(rig):
    plain = a_request("q", max_tokens=12)
    _, _, text, _ = await collect(rig.stub.Generate(plain))
    request = a_request("q", max_tokens=12)
    request.sampling.stop.append(text[-3:] + "ZZ")
    accepted, tokens, same, _ = await collect(rig.stub.Generate(request))
    assert same == text
    request.resume.CopyFrom(
        pb.Resume(token_ids=tokens, text_bytes=len(text.encode()), attempt=2, prompt_digest=accepted.prompt_digest)
    )
    events = [r async for r in rig.stub.Generate(request)]
    assert [r.WhichOneof("event") for r in events] == ["accepted", "finish"]


async def test_a_resume_of_another_prompt_is_refused(rig):
    request = a_request("q")
    request.resume.CopyFrom(pb.Resume(token_ids=[1], attempt=2, prompt_digest=b"x" * 32))
    code, error = await refused(rig.stub.Generate(request))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert isinstance(error, errors.ResumeRefused)


async def test_two_requests_with_one_place_run_one_after_the_other_and_with_eight_together(tmp_path):
    async with running_worker(tmp_path / "p.json", step_ms=5) as rig:
        for active, together in ((1, False), (8, True)):
            policy = with_fields(Policy(), {"batch.active": active, "prefill.step_tokens": 64})
            await rig.engine.apply(policy)
            before = rig.engine.pulse().step_no
            await asyncio.gather(*(collect(rig.stub.Generate(a_request(name, max_tokens=40))) for name in "ab"))
            # The engine's steps, since readers may lag behind it; of two that run together one may begin some steps later.
            assert (rig.engine.pulse().step_no - before < 2 * 40) is together


def test_a_resumed_seed_depends_on_seed_and_index_and_fits_the_engine():
    seeds = {serving.resumed_seed(s, i) for s in (0, 1, 2**63 - 1) for i in (1, 2, 50)}
    assert len(seeds) == 9
    assert all(0 <= x < 2**63 for x in seeds)
