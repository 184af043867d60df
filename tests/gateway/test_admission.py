"""What may enter, in which shape, and who waits for what."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.admission import Admission
from services.gateway.metrics import GatewayMetrics
from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import Running
from trimtab import messages as m
from trimtab import scheduling
from trimtab.errors import InvalidRequest, PermissionDenied, QueueFull, TrimtabError
from trimtab.policy import Policy, with_fields
from trimtab.tenant import Tenant
from trimtab.v1 import inference_pb2

BATCH, REALTIME = m.Workload.BATCH, m.Workload.REALTIME


class ACall:
    """Just enough of one."""

    handed_over_at = None
    resumed = False

    def __init__(self, request_id="r", workload=REALTIME, tenant=Tenant(), *, cold=False, tokens=10):  # noqa: B008
        self.request_id, self.workload, self.tenant = request_id, workload, tenant
        self.cold, self.tokens = cold, tokens
        self.capped: int | None = None
        self.because = ""

    def cap(self, max_tokens, because):
        self.capped, self.because = max_tokens, because

    def end(self, error): ...
    def give_up(self, after_s): ...
    def give_place(self, error): ...


def an_admission(fields=None, **facts) -> Admission:
    policy = with_fields(Policy(), fields or {})
    return Admission(lambda: policy, GatewayMetrics(), **facts)


def enter(admission, n, **facts) -> list[ACall]:
    calls = [ACall(f"{facts}{i}", **facts) for i in range(n)]
    for call in calls:
        admission.enter(call)
    return calls


def test_a_tenant_that_may_not_send_realtime_is_told_so():
    with pytest.raises(PermissionDenied, match="may not send REALTIME"):
        an_admission().enter(ACall(tenant=Tenant("acme", realtime=False)))
    an_admission().enter(ACall(workload=BATCH, tenant=Tenant("acme", realtime=False)))


def test_a_rate_is_refused_with_the_time_after_which_it_holds():
    admission, acme = an_admission(), Tenant("acme", requests_per_s=2.0)
    enter(admission, 4, tenant=acme)
    with pytest.raises(QueueFull, match="requests_per_s") as caught:
        admission.enter(ACall("more", tenant=acme))
    assert 1 <= caught.value.retry_after_ms <= 501
    admission.enter(ACall("other", tenant=Tenant("other", requests_per_s=2.0)))


def test_tokens_are_rated_too():
    admission, acme = an_admission(), Tenant("acme", tokens_per_s=100.0)
    admission.enter(ACall("a", tenant=acme, tokens=200))
    with pytest.raises(QueueFull, match="tokens_per_s"):
        admission.enter(ACall("b", tenant=acme, tokens=10))


def test_what_one_rate_refuses_costs_nothing_of_the_other():
    admission, acme = an_admission(), Tenant("acme", requests_per_s=1.0, tokens_per_s=100.0)
    admission.enter(ACall("a", tenant=acme, tokens=200))
    for i in range(5):
        with pytest.raises(QueueFull, match="tokens_per_s"):
            admission.enter(ACall(f"b{i}", tenant=acme, tokens=10))
    admission.enter(ACall("c", tenant=acme, tokens=0))


def test_of_several_gateways_each_lets_through_its_part_of_the_rates():
    admission, acme = an_admission(gateways=lambda: 4), Tenant("acme", requests_per_s=8.0, tokens_per_s=400.0)
    enter(admission, 4, tenant=acme)
    with pytest.raises(QueueFull, match=r"requests_per_s \(8 in the mesh, and here its part of 4 gateways\)"):
        admission.enter(ACall("more", tenant=acme))
    large = Tenant("large", tokens_per_s=400.0)
    admission.enter(ACall("a", tenant=large, tokens=700))
    with pytest.raises(QueueFull, match="tokens_per_s") as caught:
        admission.enter(ACall("b", tenant=large, tokens=700))
    assert 5_000 < caught.value.retry_after_ms <= 7_001


def test_a_tenant_has_a_slot_at_each_gateway_however_many_there_are():
    admission = an_admission({"batch.active": 4}, serving=lambda: 1, gateways=lambda: 100)
    acme = Tenant("acme", share=0.5)
    (call,) = enter(admission, 1, tenant=acme)
    admission.started(call)
    assert not admission.may_start("acme", 0.5)
    assert admission.may_start("globex", 0.5)


def test_of_several_gateways_each_holds_its_part_of_the_batch_that_waits():
    admission = an_admission({"admission.batch_queue": 10, "admission.cold_share": 1.0}, gateways=lambda: 4)
    bound = scheduling.handover_bound(Policy(), BATCH) + 2
    enter(admission, bound, workload=BATCH)
    with pytest.raises(QueueFull, match=f"{bound} batch requests wait here"):
        admission.enter(ACall("more", workload=BATCH))


def test_realtime_waits_at_workers_so_no_gateway_has_a_part_of_its_bound():
    fields = {"admission.realtime_queue": 8}
    bounds = [scheduling.handover_bound(Policy(), REALTIME) + 8] * 2
    for n, bound in zip((1, 4), bounds, strict=True):
        admission = an_admission(fields, gateways=lambda n=n: n)
        enter(admission, bound)
        with pytest.raises(QueueFull, match="wait here"):
            admission.enter(ACall("more"))


def test_a_share_counts_what_is_at_workers_until_it_has_left():
    admission = an_admission({"batch.active": 4}, serving=lambda: 2)
    acme = Tenant("acme", share=0.25)
    calls = enter(admission, 2, tenant=acme)
    for call in calls:
        admission.started(call)
    with pytest.raises(QueueFull, match="share"):
        admission.enter(ACall("more", tenant=acme))
    assert not admission.may_start("acme")
    admission.leave(calls[0])
    assert admission.may_start("acme")
    admission.enter(ACall("more", tenant=acme))


def test_cold_batch_goes_first():
    admission = an_admission({"admission.batch_queue": 0, "admission.cold_share": 0.5})
    bound = scheduling.handover_bound(Policy(), BATCH)
    enter(admission, bound // 2, workload=BATCH, cold=True)
    with pytest.raises(QueueFull, match="cold_share"):
        admission.enter(ACall("cold", workload=BATCH, cold=True))
    hot = enter(admission, bound - bound // 2, workload=BATCH)
    with pytest.raises(QueueFull, match="wait here"):
        admission.enter(ACall("hot", workload=BATCH))
    admission.accepted(hot[0])
    admission.enter(ACall("hot", workload=BATCH))


@pytest.mark.parametrize(
    ("shed", "cold", "refused"),
    [("none", True, False), ("cold", False, False), ("cold", True, True), ("batch", False, True)],
)
def test_what_is_shed_is_refused_at_the_door(shed, cold, refused):
    admission = an_admission({"admission.shed": shed})
    admission.enter(ACall("realtime", cold=cold))
    if refused:
        with pytest.raises(QueueFull, match="shed"):
            admission.enter(ACall("batch", workload=BATCH, cold=cold))
    else:
        admission.enter(ACall("batch", workload=BATCH, cold=cold))


def test_realtime_gets_less_before_it_is_refused():
    use = 0.4
    admission = an_admission({"admission.degraded_max_tokens": 64}, realtime_use=lambda: use)
    (call,) = enter(admission, 1)
    assert call.capped is None
    use = 0.6
    call = ACall("more")
    admission.enter(call)
    assert call.capped == 64
    batch = ACall("batch", workload=BATCH)
    admission.enter(batch)
    assert batch.capped is None


@pytest.mark.parametrize(
    ("workload", "cold", "refused"),
    [(BATCH, True, True), (BATCH, False, False), (REALTIME, True, False), (REALTIME, False, False)],
)
def test_a_degraded_mesh_takes_no_cold_batch_and_caps_everybody_else(workload, cold, refused):
    admission = an_admission({"degraded.state": "degraded", "degraded.max_tokens": 32})
    call = ACall(workload=workload, cold=cold)
    if refused:
        with pytest.raises(QueueFull, match=r"degraded\.state"):
            admission.enter(call)
        assert (admission.live, admission.unaccepted[BATCH]) == ({}, 0)
    else:
        admission.enter(call)
        assert (call.capped, "degraded.max_tokens" in call.because) == (32, True)


def test_a_mesh_that_is_not_degraded_caps_and_refuses_nobody():
    admission = an_admission({"degraded.max_tokens": 1})
    for workload in (REALTIME, BATCH):
        call = ACall(workload.value, workload=workload, cold=True)
        admission.enter(call)
        assert call.capped is None


@pytest.mark.parametrize(("of_queues", "of_degraded", "expected"), [(64, 32, 32), (16, 32, 16)])
def test_of_two_caps_the_smaller_holds(of_queues, of_degraded, expected):
    fields = {
        "degraded.state": "degraded",
        "degraded.max_tokens": of_degraded,
        "admission.degraded_max_tokens": of_queues,
    }
    call = ACall()
    an_admission(fields, realtime_use=lambda: 1.0).enter(call)
    assert call.capped == expected


def test_what_a_client_goes_on_with_is_not_cut_short_by_a_degraded_mesh():
    call = ACall()
    call.resumed = True
    an_admission({"degraded.state": "degraded", "degraded.max_tokens": 1}).enter(call)
    assert call.capped is None


async def test_a_degraded_mesh_says_so_and_sends_the_cap_to_the_worker(start_worker, start_gateway, client_of, policy):
    worker = await start_worker()
    gateway = await start_gateway(worker)
    policy(gateway, {"degraded.state": "degraded", "degraded.max_tokens": 9, "paths.hot_below": 50})
    client = client_of(gateway)
    for workload in (REALTIME, BATCH):
        request = a_request(workload=workload, sampling=m.Sampling(max_tokens=100))
        notices = [e async for e in client.generate(request) if isinstance(e, m.Notice)]
        assert [n.kind for n in notices] == [m.NoticeKind.DEGRADED]
        assert "capped at 9 tokens" in notices[0].detail and "degraded.max_tokens" in notices[0].detail
    starts = [s.start.generate_request for s in worker.heard if s.HasField("start")]
    assert [r.sampling.max_tokens for r in starts] == [100, 100], "what a client asked for stays as he asked"
    assert [s.start.output_cap for s in worker.heard if s.HasField("start")] == [9, 9]
    with pytest.raises(QueueFull, match="degraded"):
        await client.complete(a_request(prompt="word " * 100, workload=BATCH))
    await client.complete(a_request(prompt="word " * 100, workload=REALTIME))
    assert worker.count("start") == 3
    policy(gateway, {})
    modest = a_request(prompt="word " * 100, workload=BATCH, sampling=m.Sampling(max_tokens=100))
    assert [e async for e in client.generate(modest) if isinstance(e, m.Notice)] == []


def test_whatever_comes_and_goes_nothing_is_left():
    admission = an_admission({"batch.active": 4})
    for workload in (REALTIME, BATCH):
        calls = enter(admission, 5, workload=workload, tenant=Tenant("acme", share=0.9), cold=True)
        for i, call in enumerate(calls):
            if i % 2:
                admission.started(call)
            admission.accepted(call)
            admission.leave(call)
    assert (admission.live, admission.unaccepted) == ({}, {REALTIME: 0, BATCH: 0})
    assert (admission._taken, admission._cold, admission._counted_cold) == ({}, 0, set())


async def hold(r: Running) -> None:
    """Runs until it is let go."""
    r.accept()
    await r.worker.go.wait()
    r.token("done")
    r.finish()


@pytest.fixture
async def one_slot(start_worker, start_gateway):
    """A worker that has room for one BATCH request at a time, and a gateway before it."""
    worker = await start_worker(script=hold)
    worker.go = asyncio.Event()
    worker.credits = inference_pb2.Credits(realtime=4, batch=1)
    gateway = await start_gateway(worker)
    endpoint = gateway.endpoints.get(worker.address)
    await until(lambda: endpoint.room(BATCH) == 1)
    return worker, gateway


async def test_batch_waits_in_the_gateway_for_credit_in_order_of_arrival(one_slot, client_of):
    worker, gateway = one_slot
    client = client_of(gateway)
    tasks = []
    for i in range(4):
        tasks.append(asyncio.create_task(client.complete(a_request(request_id=f"b{i}", workload=BATCH))))
        # One is sent, and takes the credit with it; the others wait here, one after another.
        await until(
            lambda n=i: len(gateway.admission.live) == n + 1 and (n == 0 or gateway.dispatch.waiting(BATCH) == n)
        )
        if i == 0:
            await worker.hears("start")
            worker.credits = inference_pb2.Credits(realtime=4, batch=0)
            # As the worker said: of what was sent and not yet seen there, none is left either.
            await until(lambda: gateway.endpoints.get(worker.address).credits.batch == 0)
    assert worker.count("start") == 1
    # REALTIME passes.
    realtime = asyncio.create_task(client.complete(a_request(request_id="r")))
    assert (await worker.hears("start", times=2)).request_id == "r"
    worker.credits = inference_pb2.Credits(realtime=4, batch=1)
    worker.go.set()
    await asyncio.gather(*tasks, realtime)
    assert [s.start.request_id for s in worker.heard if s.HasField("start")] == ["b0", "r", "b1", "b2", "b3"]
    assert gateway.dispatch.waiting(BATCH) == 0


async def test_one_that_leaves_the_line_is_passed_over_and_forgotten(one_slot, client_of):
    worker, gateway = one_slot
    worker.credits = inference_pb2.Credits(realtime=4, batch=0)
    await until(lambda: gateway.endpoints.get(worker.address).room(BATCH) == 0)
    client = client_of(gateway)
    tasks = [asyncio.create_task(client.complete(a_request(request_id=f"b{i}", workload=BATCH))) for i in range(3)]
    await until(lambda: gateway.dispatch.waiting(BATCH) == 3)
    tasks[0].cancel()
    await until(lambda: gateway.dispatch.waiting(BATCH) == 2)
    worker.credits = inference_pb2.Credits(realtime=4, batch=1)
    worker.go.set()
    await asyncio.gather(*tasks[1:])
    assert worker.count("start") == 2
    assert not gateway.admission.live


async def test_realtime_that_no_worker_has_room_for_is_refused_before_any_engine_work(one_slot, client_of):
    worker, gateway = one_slot
    worker.credits = inference_pb2.Credits(realtime=0, batch=1)
    await until(lambda: gateway.endpoints.get(worker.address).room(REALTIME) == 0)
    with pytest.raises(QueueFull, match="full") as caught:
        await client_of(gateway).complete(a_request())
    assert caught.value.retry_after_ms
    assert worker.count("start") == 0


async def test_a_capped_request_says_so_and_gets_no_more(start_worker, start_gateway, client_of, policy):
    gateway = await start_gateway(await start_worker())
    policy(gateway, {"admission.degrade_above": 0.0, "admission.degraded_max_tokens": 7})
    gateway.admission._realtime_use = lambda: 0.1
    events = [e async for e in client_of(gateway).generate(a_request(sampling=m.Sampling(max_tokens=100)))]
    assert [e.kind for e in events if isinstance(e, m.Notice)] == [m.NoticeKind.DEGRADED]


async def test_a_draining_worker_gets_nothing_new_and_its_streams_go_on(start_worker, start_gateway, client_of):
    worker = await start_worker(script=hold)
    worker.go = asyncio.Event()
    gateway = await start_gateway(worker)
    running = asyncio.create_task(client_of(gateway).complete(a_request()))
    await worker.hears("start")
    worker.draining = True
    await until(lambda: not gateway.endpoints.can_serve)
    worker.go.set()
    assert (await running)[0] == "done"


async def test_a_client_that_goes_on_takes_the_place_of_its_lost_call(start_worker, start_gateway, client_of):
    """Its connection is gone, and this gateway has not noticed yet."""

    async def begins_or_goes_on(r: Running) -> None:
        resume = r.request.resume
        r.index = len(resume.token_ids) if resume else 0
        r.accept()
        if resume is None:
            r.token("Hel")
            await asyncio.Event().wait()
        r.token("lo")
        r.finish()

    worker = await start_worker(script=begins_or_goes_on)
    gateway = await start_gateway(worker)
    lost = asyncio.create_task(client_of(gateway).complete(a_request(request_id="same")))
    await until(lambda: len(gateway.admission.live) == 1 and gateway.metrics.counters["output_tokens"] == 0)
    await worker.hears("start")
    resume = m.Resume((100,), 3, 2, b"")
    text, finish = await client_of(gateway).complete(a_request(request_id="same", resume=resume))
    assert (text, finish.usage.completion_tokens) == ("lo", 2)
    await worker.hears("cancel")
    with pytest.raises(TrimtabError):
        await lost
    await until(lambda: not gateway.admission.live)
    assert gateway.admission.unaccepted == {REALTIME: 0, BATCH: 0}
    with pytest.raises(InvalidRequest, match="still runs here"):
        await asyncio.gather(
            client_of(gateway).complete(a_request(request_id="twice")),
            client_of(gateway).complete(a_request(request_id="twice")),
        )
