"""A stream outlives its worker: another one goes on at the next token and byte, and the client sees one stream."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.builders import a_request, read, until
from tests.gateway.fake_worker import FakeWorker, Running
from trimtab import messages as m
from trimtab.errors import Draining, EngineDead, Internal, Quarantined, QueueFull, ResumeRefused, StreamCut
from trimtab.snapshot import Identity

TEXT = ("Hel", "lo", " 🚢", "小", "!")


async def silent(r: Running) -> None:
    await asyncio.Event().wait()


def giving(count: int, then=silent):
    """That many tokens of TEXT in this attempt, from where the stream stands; then something else."""

    async def script(r: Running) -> None:
        r.index = len(r.request.resume.token_ids) if r.request.resume else 0
        r.accept()
        for text in TEXT[r.index : r.index + count]:
            r.token(text)
        await then(r)

    return script


def failing_with(error):
    async def fail(r: Running) -> None:
        r.fail(error)

    return fail


async def rest(r: Running) -> None:
    """All that is left, and the end."""
    r.index = len(r.request.resume.token_ids) if r.request.resume else 0
    r.accept()
    for text in TEXT[r.index :]:
        r.token(text)
    r.finish(m.FinishReason.STOP)


async def dies(r: Running) -> None:
    await asyncio.sleep(0.1)  # what it said is on its way
    # Not by this task: its end would be the death's.
    r.worker.death = asyncio.create_task(r.worker.die())
    await silent(r)


@pytest.fixture
def chain(start_worker, start_gateway):
    """Workers that are picked one after another: each has more to do than the one before."""

    async def start(*scripts, **settings):
        workers: list[FakeWorker] = []
        for i, script in enumerate(scripts):
            worker = await start_worker(f"w{i}", script=script)
            worker.load = m.Load(running=10 * i)
            workers.append(worker)
        gateway = await start_gateway(*workers, **settings)
        await until(lambda: all(gateway.endpoints.get(w.address).load == w.load for w in workers))
        return gateway, workers

    return start


def told(events):
    """(text, indexes, kinds of notices) as a client got them."""
    deltas = [e for e in events if isinstance(e, m.Delta)]
    indexes = [d.first_index + i for d in deltas for i in range(len(d.token_ids))]
    return "".join(d.text for d in deltas), indexes, [e.kind for e in events if isinstance(e, m.Notice)]


@pytest.mark.parametrize("cut", range(1, len(TEXT) + 1))
@pytest.mark.parametrize(
    "end", [dies, failing_with(EngineDead("gone")), failing_with(Draining("leaving")), failing_with(Internal("odd"))]
)
async def test_a_stream_goes_on_elsewhere_at_every_index(chain, client_of, cut, end):
    gateway, (_, second) = await chain(giving(cut, end), rest)
    events = [e async for e in client_of(gateway).generate(a_request(request_id="r"))]
    assert told(events) == ("".join(TEXT), list(range(len(TEXT))), [m.NoticeKind.RESUMED])
    assert [type(e) for e in events].count(m.Accepted) == 1
    start = await second.hears("start")
    resume = start.generate_request.resume
    assert list(resume.token_ids) == [100 + i for i in range(cut)]
    assert resume.text_bytes == len("".join(TEXT[:cut]).encode())
    assert resume.attempt == 2
    assert gateway.metrics.counters["resumes"] == 1


async def test_a_stream_survives_several_workers(chain, client_of):
    gateway, workers = await chain(giving(1, dies), giving(1, dies), giving(1, failing_with(Draining("leaving"))), rest)
    events = [e async for e in client_of(gateway).generate(a_request())]
    assert told(events)[:2] == ("".join(TEXT), list(range(len(TEXT))))
    assert [w.count("start") for w in workers] == [1, 1, 1, 1]


async def test_the_time_that_is_left_and_the_time_that_has_passed_go_along(chain, client_of):
    gateway, (_, second) = await chain(giving(2, dies), rest)
    [e async for e in client_of(gateway).generate(a_request(), timeout_s=50.0)]
    start = await second.hears("start")
    assert 100 <= start.age_ms < 20_000
    assert 30_000 < start.timeout_ms < 50_000
    assert start.timeout_ms + start.age_ms <= 51_000  # gRPC rounds a deadline up on its way


async def test_a_hung_engine_loses_its_streams_to_another_one(chain, client_of):
    gateway, (first, second) = await chain(giving(2), rest)
    events = []

    async def each(event):
        if isinstance(event, m.Delta):
            first.hung = True

    await read(client_of(gateway).generate(a_request()), events, each)
    assert told(events) == ("".join(TEXT), list(range(len(TEXT))), [m.NoticeKind.RESUMED])
    await first.hears("superseded")
    assert second.count("start") == 1


async def test_a_zombie_says_nothing_into_a_stream_that_has_moved_on(chain, client_of):
    zombie: list[Running] = []

    async def keeps_talking(r: Running) -> None:
        zombie.append(r)
        r.fail(Internal("odd"))

    async def hears_the_zombie(r: Running) -> None:
        for _ in range(3):
            zombie[0].event(m.Delta(2, (9,), "stale"))
        await asyncio.sleep(0.1)
        await rest(r)

    gateway, _ = await chain(giving(2, keeps_talking), hears_the_zombie)
    events = [e async for e in client_of(gateway).generate(a_request())]
    assert told(events)[0] == "".join(TEXT)


async def test_what_cannot_be_continued_exactly_is_cut_with_its_count(chain, client_of):
    async def not_resumable(r: Running) -> None:
        r.accept(resumable=False)
        r.token("Hel")
        r.fail(EngineDead("gone"))

    gateway, (_, second) = await chain(not_resumable, rest)
    events = []
    with pytest.raises(StreamCut, match="can't be continued exactly") as caught:
        await read(client_of(gateway).generate(a_request()), events)
    assert told(events)[0] == "Hel"
    assert caught.value.metadata["tokens_delivered"] == "1"
    assert second.count("start") == 0


async def test_with_resuming_off_the_same_stream_is_cut(chain, client_of, policy):
    """The negative control: without it, streams are lost."""
    gateway, _ = await chain(giving(2, dies), rest)
    policy(gateway, {"resume.attempts": 1})
    with pytest.raises(StreamCut):
        await read(client_of(gateway).generate(a_request()), [])


async def test_a_worker_that_can_not_take_it_on_is_passed_over(chain, client_of):
    refuses = failing_with(ResumeRefused("another tokeniser"))
    full = failing_with(QueueFull("full"))
    gateway, _ = await chain(giving(2, dies), refuses, full, rest)
    events = [e async for e in client_of(gateway).generate(a_request())]
    assert told(events)[:2] == ("".join(TEXT), list(range(len(TEXT))))


async def test_a_stream_waits_for_a_worker_to_come_back(chain, client_of):
    gateway, (only,) = await chain(giving(2, dies))
    address, events, returning = only.address, [], []

    async def each(event):
        # Once: a second return would begin when the test ends it, and nobody would end that one.
        if isinstance(event, m.Delta) and not returning:
            only.script = rest
            returning.append(asyncio.create_task(back()))

    async def back():
        await until(lambda: only._server is None)
        await only.start(address)

    await read(client_of(gateway).generate(a_request()), events, each)
    assert told(events)[0] == "".join(TEXT)
    await returning[0]


async def test_it_waits_only_as_long_as_the_policy_says(chain, client_of, policy):
    gateway, _ = await chain(giving(2, dies))
    policy(gateway, {"resume.wait_ms": 100})
    with pytest.raises(StreamCut, match="no worker can take the request"):
        await read(client_of(gateway).generate(a_request()), [])


async def test_a_client_that_leaves_while_its_stream_waits_leaves_nothing(chain, client_of):
    gateway, _ = await chain(giving(2, dies))
    reading = asyncio.create_task(client_of(gateway).complete(a_request()))
    await until(lambda: gateway.dispatch.waiting(m.Workload.REALTIME) == 1)
    reading.cancel()
    await until(lambda: not gateway.admission.live)
    assert gateway.dispatch.waiting(m.Workload.REALTIME) == 0


async def test_a_request_that_two_workers_died_of_is_kept_from_the_third(chain, client_of):
    gateway, workers = await chain(giving(0, dies), giving(0, dies), rest)
    client = client_of(gateway)
    with pytest.raises(Quarantined, match="2 workers died of it"):
        await client.complete(a_request(prompt="poison"))
    assert workers[2].count("start") == 0
    with pytest.raises(Quarantined, match="taken again in"):
        await client.complete(a_request(prompt="poison"))
    assert (await client.complete(a_request(prompt="harmless")))[0] == "".join(TEXT)


async def test_usage_counts_every_token_once(chain, client_of):
    gateway, _ = await chain(giving(3, dies), rest)
    _, finish = await client_of(gateway).complete(a_request())
    assert finish.usage.completion_tokens == len(TEXT)


async def test_deltas_of_both_workers_are_one_stream_on_http_too(chain):
    import aiohttp

    gateway, _ = await chain(giving(3, dies), rest)
    body = {"model": "m", "prompt": "Say hello", "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{gateway.http.port}/v1/completions", json=body) as answer,
    ):
        raw = (await answer.read()).decode()
    import json

    texts = [json.loads(line[6:])["choices"][0]["text"] for line in raw.splitlines() if line.startswith("data: {")]
    assert "".join(texts) == "".join(TEXT)
    assert raw.rstrip().endswith("[DONE]")


async def test_a_resume_says_the_prompt_of_whom_its_tokens_are_not_of_whom_was_asked_first(
    start_worker, start_gateway, client_of
):
    """Workers of two builds may cut a prompt into other tokens: who has the other prompt must not go on with this one's output."""
    old, new = b"o" * 32, b"n" * 32
    asked: list[bytes] = []

    def accept(r: Running, digest: bytes) -> None:
        r.event(m.Accepted(r.start.request_id, r.worker.node_id, Identity(1, 1), 0, 3, digest, True, "m", True))

    async def first(r: Running) -> None:
        accept(r, old)
        r.fail(Internal("it broke before a token"))

    async def second(r: Running) -> None:
        accept(r, new)
        r.token("A")
        r.token("B")
        r.fail(Internal("it broke after two"))

    async def third(r: Running) -> None:
        assert r.request.resume is not None
        asked.append(r.request.resume.prompt_digest)
        r.index = len(r.request.resume.token_ids)
        accept(r, new)
        r.token("C")
        r.finish()

    workers = [await start_worker(f"w{i}", script=script) for i, script in enumerate((first, second, third))]
    for i, worker in enumerate(workers):
        worker.load = m.Load(running=10 * i)
    gateway = await start_gateway(*workers)
    await until(lambda: all(gateway.endpoints.get(w.address).load == w.load for w in workers))
    seen: list[m.Event] = []
    await read(client_of(gateway).generate(a_request(request_id="r")), seen)
    assert asked == [new]
    assert "".join(e.text for e in seen if isinstance(e, m.Delta)) == "ABC"
