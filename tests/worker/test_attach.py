"""Attach: one link, many requests, one message for each engine step."""

import asyncio
from collections import defaultdict

import pytest
from prometheus_client import generate_latest

from services.worker import attach
from tests.worker.conftest import a_request
from trimtab import errors
from trimtab.kit import rpc
from trimtab.v1 import inference_pb2 as pb


class Gateway:
    """The other end of the link, by hand."""

    def __init__(self, stub):
        self.call = stub.Attach()
        self.pieces = defaultdict(list)
        self.steps = []

    async def send(self, **event):
        await self.call.write(pb.AttachRequest(**event))

    async def start(self, request_id, request=None, *, attempt=1, window=1000, **facts):
        request = request or a_request()
        await self.send(start=pb.Start(request_id=request_id, attempt=attempt, generate_request=request, **facts))
        if window:
            await self.send(window=pb.Window(request_id=request_id, attempt=attempt, n=window))

    async def read(self):
        step = (await self.call.read()).step
        self.steps.append(step)
        for piece in step.pieces:
            self.pieces[piece.request_id].append(piece)
        return step

    async def until_end(self, *request_ids):
        async with asyncio.timeout(10):
            while not all(self.ended(r) for r in request_ids):
                await self.read()

    def ended(self, request_id):
        last = self.pieces[request_id][-1:]
        return bool(last) and (last[0].HasField("status") or last[0].event.WhichOneof("event") == "finish")

    def tokens(self, request_id):
        return [t for p in self.pieces[request_id] for t in p.event.delta.token_ids]

    def error(self, request_id):
        from google.rpc import status_pb2

        status = self.pieces[request_id][-1].status
        return rpc.decode_status(status_pb2.Status.FromString(status.SerializeToString()))


@pytest.fixture
async def gateway(rig):
    g = Gateway(rig.stub)
    await g.send(hello=pb.AttachHello(gateway_id="g0"))
    yield g
    g.call.cancel()
    await rig.idle()


async def test_requests_share_the_link_and_each_gets_its_own_tokens(rig, gateway):
    for name in "abc":
        await gateway.start(name, a_request(name, max_tokens=20))
    await gateway.until_end(*"abc")
    for name in "abc":
        events = [p.event.WhichOneof("event") for p in gateway.pieces[name]]
        assert events[0] == "accepted" and events[-1] == "finish" and events.count("accepted") == 1
        assert len(gateway.tokens(name)) == 20
        assert {p.attempt for p in gateway.pieces[name]} == {1}


async def test_tokens_of_one_engine_step_come_in_one_message(rig, gateway):
    for i in range(8):
        await gateway.start(f"r{i}", a_request("same", max_tokens=50))
    await gateway.until_end(*(f"r{i}" for i in range(8)))
    carrying = [s for s in gateway.steps if any(p.event.HasField("delta") for p in s.pieces)]
    # A machine that is slower than the steps puts several into one message. What it never does is to bring one step's tokens in two, save
    # that a request's window may come after its first token, and that the engine begins no new step after the last token of all.
    spread = len(carrying) - len({s.step_no for s in carrying})
    assert spread <= 2 * 8, (
        f"{spread} of {len(carrying)} messages brought tokens of a step that had brought some already"
    )


async def test_an_idle_link_says_so_with_load_and_credits(rig, gateway):
    async with asyncio.timeout(20):
        step = await gateway.read()
    assert not step.pieces
    assert step.load.total_blocks > 0
    assert step.credits.realtime > 0 and step.credits.batch > 0


async def test_cancel_frees_the_request_and_says_nothing_more(rig, gateway):
    await gateway.start("a", a_request(max_tokens=4000), window=5000)
    while len(gateway.tokens("a")) < 3:
        await gateway.read()
    await gateway.send(cancel=pb.Cancel(request_id="a", attempt=1))
    await rig.idle()
    await gateway.start("b")
    await gateway.until_end("b")
    assert not gateway.ended("a")


async def test_a_cancel_of_another_attempt_is_ignored(rig, gateway):
    await gateway.start("a", a_request(max_tokens=30), attempt=2)
    await gateway.send(cancel=pb.Cancel(request_id="a", attempt=1))
    await gateway.until_end("a")
    assert len(gateway.tokens("a")) == 30


async def test_a_newer_attempt_replaces_the_older_one(rig, gateway):
    await gateway.start("a", a_request(max_tokens=4000), window=5000)
    await gateway.read()
    await gateway.start("a", a_request(max_tokens=5), attempt=2)
    await gateway.until_end("a")
    assert len([t for p in gateway.pieces["a"] if p.attempt == 2 for t in p.event.delta.token_ids]) == 5


async def test_an_id_that_is_open_already_is_refused(rig, gateway):
    await gateway.start("a", a_request(max_tokens=4000), window=5000)
    await gateway.start("a", window=0)
    while not gateway.ended("a"):
        await gateway.read()
    assert isinstance(gateway.error("a"), errors.InvalidRequest)


async def test_the_timeout_is_armed_by_the_worker(rig, gateway):
    await gateway.start("a", a_request(max_tokens=4000), window=5000, timeout_ms=100)
    await gateway.until_end("a")
    assert isinstance(gateway.error("a"), errors.DeadlineExceeded)


async def test_errors_arrive_as_statuses_with_their_details(rig, gateway):
    await gateway.start("a", a_request(""))
    await gateway.start("b", a_request(model="other"))
    await gateway.until_end("a", "b")
    assert gateway.error("a").violations[0].field == "prompt"
    assert isinstance(gateway.error("b"), errors.ModelNotFound)


async def test_a_reader_without_window_is_buffered_then_ended_and_blocks_nobody(rig, gateway):
    await gateway.start("slow", a_request(max_tokens=1000), window=0)
    await gateway.start("fast", a_request(max_tokens=100), window=1000)
    await gateway.until_end("fast", "slow")
    assert len(gateway.tokens("fast")) == 100
    assert gateway.tokens("slow") == []
    assert isinstance(gateway.error("slow"), errors.SlowReader)
    ended = generate_latest(rig.metrics.registry).decode()
    assert 'trimtab_worker_requests_total{outcome="back_pressure",workload="realtime"} 1.0' in ended
    assert 'outcome="cancelled"' not in ended


async def test_a_window_lets_buffered_tokens_go_in_order(rig, gateway):
    await gateway.start("a", a_request(max_tokens=40), window=10)
    await gateway.start("b", a_request(max_tokens=60), window=1000)
    await gateway.until_end("b")
    assert len(gateway.tokens("a")) == 10
    await gateway.send(window=pb.Window(request_id="a", attempt=1, n=100))
    await gateway.until_end("a")
    assert len(gateway.tokens("a")) == 40
    indexes = [p.event.delta.first_index for p in gateway.pieces["a"] if p.event.WhichOneof("event") == "delta"]
    assert indexes == list(range(40))
    assert attach.SLOW_READER_TOKENS > 30


async def test_a_lost_gateway_leaves_nothing_behind(rig, gateway):
    for i in range(20):
        await gateway.start(f"r{i}", a_request(max_tokens=4000), window=5000)
    await gateway.read()
    gateway.call.cancel()
    await rig.idle()


async def test_a_request_that_comes_from_another_worker_keeps_its_age_in_the_queue(rig, gateway):
    await rig.obey({"batch.active": 1, "preemption.mode": "none", "admission.engine_queue": 0})
    await gateway.start("runs", a_request(max_tokens=60))
    while not gateway.tokens("runs"):
        await gateway.read()
    await gateway.start("young")
    await gateway.start("old", age_ms=60_000)
    await gateway.until_end("runs", "young", "old")
    order = [p.request_id for step in gateway.steps for p in step.pieces if p.event.HasField("finish")]
    assert order == ["runs", "old", "young"]


async def test_a_gateway_hears_which_requests_the_engine_has(rig, gateway):
    await rig.obey({"batch.active": 1, "preemption.mode": "none", "admission.engine_queue": 0})
    await gateway.start("runs", a_request(max_tokens=30))
    await gateway.start("waits")
    await gateway.until_end("runs", "waits")
    first, second = (gateway.pieces[name][0].event.accepted for name in ("runs", "waits"))
    assert (first.started, second.started) == (True, False)
    kinds = [p.event.WhichOneof("event") for p in gateway.pieces["waits"]]
    assert kinds[:3] == ["accepted", "notice", "delta"]
    assert gateway.pieces["waits"][1].event.notice.kind == pb.NOTICE_KIND_STARTED
    assert "notice" not in [p.event.WhichOneof("event") for p in gateway.pieces["runs"]]


async def test_credit_for_batch_is_what_the_engine_still_takes_and_starts_are_counted(rig, gateway):
    await rig.obey({"batch.active": 4, "batch.hard_cap": 4, "admission.engine_queue": 1})
    await gateway.read()  # from before
    step = await gateway.read()
    assert (step.credits.batch, step.starts) == (5, 0)
    await gateway.start("b", a_request(max_tokens=3000, workload=pb.WORKLOAD_BATCH))
    while step.starts < 1:
        step = await gateway.read()
    assert step.credits.batch == 4
    assert step.credits.realtime > 4


async def test_what_a_drain_sends_elsewhere_is_told_so_whether_it_runs_or_waits(rig, gateway):
    await rig.obey({"batch.active": 1, "preemption.mode": "none", "admission.engine_queue": 0})
    await gateway.start("runs", a_request(max_tokens=3000))
    await gateway.start("waits")
    while not gateway.tokens("runs") or not gateway.pieces["waits"]:
        await gateway.read()
    rig.serving.draining = True
    assert await rig.steering.end_all(lambda: errors.Draining("this worker shuts down")) == 2
    await gateway.until_end("runs", "waits")
    assert [type(gateway.error(name)) for name in ("runs", "waits")] == [errors.Draining] * 2
    assert gateway.steps[-1].draining
    await rig.idle()


@pytest.mark.parametrize(
    ("asked", "gets"),
    [
        ({"max_tokens": 30}, 7),
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 30, "min_tokens": 20}, 7),
        ({"prompt": "x" * 4090}, 6),
        ({"prompt": "x" * 4090, "max_tokens": 4}, 4),
    ],
    ids=["more than it", "less than it", "no fewer than it", "as much as there is room for", "what there is room for"],
)
async def test_a_cap_takes_away_what_is_more_and_refuses_nothing(rig, gateway, asked, gets):
    """What a gateway takes from a request in need must not turn a good one into its client's fault."""
    request = a_request(asked.pop("prompt", "hi"), max_tokens=asked.get("max_tokens", 30))
    if "max_tokens" not in asked:
        request.sampling.ClearField("max_tokens")
    request.sampling.min_tokens = asked.get("min_tokens", 0)
    await gateway.start("a", request, output_cap=7)
    await gateway.until_end("a")
    assert len(gateway.tokens("a")) == gets
    assert gateway.pieces["a"][-1].event.WhichOneof("event") == "finish"


async def test_what_was_delivered_beyond_a_cap_stays_delivered(rig, gateway):
    """A worker of an older build knows no caps, and died in the middle of more."""
    await gateway.start("whole", a_request(max_tokens=20))
    await gateway.until_end("whole")
    accepted = gateway.pieces["whole"][0].event.accepted
    tokens = gateway.tokens("whole")[:10]
    text = "".join(
        p.event.delta.text
        for p in gateway.pieces["whole"]
        if p.event.HasField("delta") and p.event.delta.first_index < 10
    )
    request = a_request(max_tokens=20)
    request.resume.CopyFrom(
        pb.Resume(token_ids=tokens, text_bytes=len(text.encode()), attempt=2, prompt_digest=accepted.prompt_digest)
    )
    await gateway.start("goes on", request, output_cap=5)
    await gateway.until_end("goes on")
    last = gateway.pieces["goes on"][-1].event
    assert last.WhichOneof("event") == "finish"
    assert (last.finish.reason, last.finish.usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, 10)
    assert gateway.tokens("goes on") == []
