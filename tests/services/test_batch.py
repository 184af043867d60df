"""`trimtab batch run` through a whole gateway: every custom_id exactly once, whatever is killed on the way."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack

import pytest

from tests.cli import mesh as fakes
from tests.cli.mesh import FakeGateway, an_answer
from tests.gateway.builders import until
from tests.gateway.fake_worker import Running
from tests.services.batches import a_chat, a_line, answers, ids, run, said, start, written
from trimtab import client_stream, codec
from trimtab import messages as m
from trimtab.errors import EngineDead, InvalidRequest, QueueFull, StreamCut, TrimtabError, Unauthenticated
from trimtab.kit.process import free_port


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def quick(monkeypatch):
    """Short pauses between tries."""
    monkeypatch.setattr(client_stream, "FIRST_PAUSE_MS", 10)
    monkeypatch.setattr(client_stream, "MAX_PAUSE_MS", 50)


class Echo:
    """A worker's script that says the prompt back, word by word; `free` of its answers come, the others wait after a word for `go_on`."""

    def __init__(self, free: int = 1 << 30) -> None:
        self.free = free
        self.go_on = asyncio.Event()
        self.prompts: list[str] = []
        self.running = self.most = 0

    async def __call__(self, r: Running) -> None:
        resume = r.request.resume
        r.index = len(resume.token_ids) if resume else 0
        self.prompts.append(r.request.prompt)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            r.accept()
            words = r.request.prompt.split()
            if r.index == 0:
                r.token(words[0])
            self.free -= 1
            if self.free < 0:
                await self.go_on.wait()
            for word in words[max(1, r.index) :]:
                r.token(f" {word}")
            r.finish(m.FinishReason.STOP)
        finally:
            self.running -= 1


def address(gateway) -> str:
    return f"127.0.0.1:{gateway.grpc_port}"


def texts(out):
    return {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in answers(out)}


MANY = [f"id-{i}" for i in range(40)]
EXPECTED = {custom_id: f"Say {custom_id}" for custom_id in MANY}


@pytest.mark.slow
async def test_every_line_is_answered_as_batch(files, start_worker, start_gateway):
    source, out = files
    worker = await start_worker(script=Echo())
    gateway = await start_gateway(worker)
    written(source, [a_line(i) for i in MANY])
    result = await run(source, out, address(gateway), "--json")
    assert result.exit_code == 0, result.output
    assert texts(out) == EXPECTED
    assert ids(out) == sorted(MANY)
    summary = said(result)
    assert summary.pop("seconds") > 0
    assert summary == {
        "done": 40, "failed": 0, "skipped": 0, "left": 0, "tokens": 40 * 5, "prompt_tokens": 40 * 3, "completion_tokens": 40 * 2,
    }  # fmt: skip
    starts = [e.start.generate_request for e in worker.heard if e.WhichOneof("event") == "start"]
    assert {codec.decode_request(s).workload for s in starts} == {m.Workload.BATCH}
    (first, *_) = answers(out)
    assert first["error"] is None
    assert (first["response"]["status_code"], first["response"]["body"]["object"]) == (200, "text_completion")


async def test_a_chat_is_answered_as_a_chat(files, start_worker, start_gateway):
    source, out = files
    gateway = await start_gateway(await start_worker())
    written(source, [a_chat("c")])
    assert (await run(source, out, address(gateway))).exit_code == 0
    (answer,) = answers(out)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "Hello world!"


async def test_standard_input_is_taken_and_what_is_done_is_not_sent_again(files, start_worker, start_gateway):
    source, out = files
    worker = await start_worker(script=Echo())
    gateway = await start_gateway(worker)
    lines = written(source, [a_line(i) for i in MANY[:3]]).read_bytes()
    assert (await run("-", out, address(gateway), stdin=lines)).exit_code == 0
    written(source, [a_line(i) for i in MANY[:5]])
    result = await run(source, out, address(gateway), "--json")
    assert [said(result)[key] for key in ("done", "skipped")] == [2, 3]
    result = await run(source, out, address(gateway), "--json")
    assert [said(result)[key] for key in ("done", "skipped")] == [0, 5]
    assert sorted(worker.script.prompts) == sorted(f"Say {i}" for i in MANY[:5])
    assert ids(out) == sorted(MANY[:5])


async def test_no_more_are_in_flight_than_told(files, start_worker, start_gateway):
    source, out = files
    echo = Echo(free=0)
    gateway = await start_gateway(await start_worker(script=echo))
    written(source, [a_line(i) for i in MANY])
    task = asyncio.create_task(run(source, out, address(gateway), "--in-flight", "3"))
    await until(lambda: echo.running == 3)
    echo.go_on.set()
    assert (await task).exit_code == 0
    assert echo.most == 3


async def test_bad_lines_are_told_before_anything_is_sent(files, start_worker, start_gateway):
    source, out = files
    worker = await start_worker(script=Echo())
    gateway = await start_gateway(worker)
    written(source, [a_line("a"), "{", a_line("a"), a_line("b", n=2), a_line("c")])
    result = await run(source, out, address(gateway), "--json")
    assert result.exit_code == 2
    told = said(result)["error"]["lines"]
    assert [(b["line"], b["custom_id"], b["code"]) for b in told] == [
        (2, None, "invalid_line"), (3, "a", "duplicate_custom_id"), (4, "b", "invalid_line"),
    ]  # fmt: skip
    assert "line 3: custom_id 'a' is that of line 1" in result.stderr
    assert worker.script.prompts == []
    assert not out.exists()


async def test_bad_lines_may_be_written_as_errors(files, start_worker, start_gateway):
    source, out = files
    gateway = await start_gateway(await start_worker(script=Echo()))
    written(source, [a_line("a"), "{", a_line("a"), a_line("b", n=2), a_line("c")])
    result = await run(source, out, address(gateway), "--skip-bad", "--json")
    assert result.exit_code == 5
    assert [said(result)[key] for key in ("done", "failed")] == [2, 3]
    assert ids(out) == ["None", "None", "a", "b", "c"]
    again = await run(source, out, address(gateway), "--skip-bad", "--json")
    assert (again.exit_code, said(again)["skipped"]) == (0, 5)
    assert len(answers(out)) == 5


async def test_a_clients_fault_is_an_error_line_and_is_not_sent_again(files, start_worker, start_gateway):
    source, out = files
    echo, refused = Echo(), []

    async def script(r: Running) -> None:
        if "bad" in r.request.prompt:
            refused.append(r.request.prompt)
            r.fail(InvalidRequest("the prompt is too long for this model"))
        else:
            await echo(r)

    gateway = await start_gateway(await start_worker(script=script))
    written(source, [a_line("a"), a_line("bad"), a_line("c")])
    assert (await run(source, out, address(gateway))).exit_code == 5
    (error,) = [a for a in answers(out) if a["custom_id"] == "bad"]
    assert error["response"]["status_code"] == 400
    assert error["error"] == {"code": "invalid_request", "message": "the prompt is too long for this model"}
    assert ids(out) == ["a", "bad", "c"]
    assert refused == ["Say bad"]


class Failing(FakeGateway):
    """Answers the first calls with errors."""

    def __init__(self, *errors: TrimtabError) -> None:
        super().__init__(an_answer("Hel", "lo"), models=("m",))
        self.errors = list(errors)

    async def Generate(self, request, context):
        self.script = [self.errors.pop(0)] if self.errors else an_answer("Hel", "lo")
        async for event in super().Generate(request, context):
            yield event


@pytest.fixture
async def failing():
    async with AsyncExitStack() as stack:

        async def begin(*errors):
            return await stack.enter_async_context(fakes.serving(Failing(*errors)))

        yield begin


@pytest.mark.slow
@pytest.mark.parametrize(
    "errors",
    [
        [QueueFull("full", retry_after_ms=1)] * 9,
        [StreamCut("its gateway went", metadata={"cause": "UNAVAILABLE"})] * 9,
        [EngineDead("gone", retry_after_ms=1)] * 4,
    ],
    ids=["back-pressure", "lost", "fault"],
)
async def test_what_may_go_better_is_sent_again(files, failing, quick, errors):
    source, out = files
    gateway = await failing(*errors)
    written(source, [a_line("a")])
    assert (await run(source, out, gateway.address)).exit_code == 0
    assert texts(out) == {"a": "Hello"}
    assert len(gateway.requests) == len(errors) + 1


async def test_what_breaks_each_time_is_an_error_line(files, failing, quick):
    source, out = files
    gateway = await failing(*[EngineDead("gone", retry_after_ms=1)] * 5)
    written(source, [a_line("a")])
    assert (await run(source, out, gateway.address)).exit_code == 5
    (error,) = answers(out)
    assert (error["response"]["status_code"], error["error"]["code"]) == (503, "engine_dead")
    assert len(gateway.requests) == 5


async def test_who_may_not_is_told_and_no_line_is_spent_on_it(files, failing):
    source, out = files
    gateway = await failing(*[Unauthenticated("who are you?")] * 99)
    written(source, [a_line(i) for i in MANY])
    result = await run(source, out, gateway.address, "--json")
    assert result.exit_code == 4
    assert said(result)["error"]["reason"] == "UNAUTHENTICATED"
    assert answers(out) == []


async def test_no_gateway_is_exit_3(files):
    source, out = files
    written(source, [a_line("a")])
    result = await run(source, out, f"127.0.0.1:{free_port()}", "--json")
    assert (result.exit_code, said(result)["error"]["reason"]) == (3, "UNREACHABLE")
    assert answers(out) == []


@pytest.mark.slow
async def test_what_no_time_is_left_for_is_done_by_the_next_run(files, start_worker, start_gateway):
    source, out = files
    echo = Echo(free=10)
    gateway = await start_gateway(await start_worker(script=echo))
    written(source, [a_line(i) for i in MANY])
    result = await run(source, out, address(gateway), "--deadline", "3s", "--json")
    assert result.exit_code == 5
    assert said(result)["left"] >= 30
    echo.go_on.set()
    assert (await run(source, out, address(gateway))).exit_code == 0
    assert texts(out) == EXPECTED
    assert ids(out) == sorted(MANY)


@pytest.mark.parametrize("flags", [("--deadline", "soon"), ("--deadline", "0s"), ("--in-flight", "0")])
async def test_mistakes_are_usage(files, flags):
    source, out = files
    written(source, [a_line("a")])
    assert (await run(source, out, "127.0.0.1:1", *flags)).exit_code == 2
    assert (await run(source, source, "127.0.0.1:1")).exit_code == 2
    assert answers(source) == [a_line("a")]


@pytest.mark.slow
async def test_a_mesh_that_goes_away_is_said_once_and_so_is_its_coming_back(files, start_worker, start_gateway):
    source, out = files
    echo = Echo(free=10)
    worker = await start_worker(script=echo)
    listen = f"127.0.0.1:{free_port()}"
    gateway = await start_gateway(worker, listen=listen)
    written(source, [a_line(i) for i in MANY])
    process = await start(source, out, listen, "--in-flight", "8")
    await until(lambda: out.exists() and out.read_bytes().count(b"\n") == 10 and echo.running == 8, timeout_s=60.0)
    await gateway.stop()
    async with asyncio.timeout(60.0):
        first = await process.stderr.readline()
    assert first.startswith(b"no gateway answers (nothing answers at"), first
    assert b"; trying again until the deadline" in first
    echo.go_on.set()
    await start_gateway(worker, listen=listen, node_id="g1")
    _, rest = await process.communicate()
    assert process.returncode == 0
    assert [line.split(b",")[0] for line in rest.splitlines()] == [b"goes on again", b"40 done"]
    assert b"prompt and" in rest and b"completion tokens in" in rest
    assert texts(out) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_a_run_that_is_stopped_goes_on_where_it_was(files, start_worker, start_gateway, sig):
    source, out = files
    echo = Echo(free=15)
    gateway = await start_gateway(await start_worker(script=echo))
    written(source, [a_line(i) for i in MANY])
    process = await start(source, out, address(gateway), "--in-flight", "8")
    await until(lambda: out.exists() and out.read_bytes().count(b"\n") == 15, timeout_s=60.0)
    process.send_signal(sig)
    _, err = await process.communicate()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[sig]
    if sig is not signal.SIGKILL:
        assert b"stopped after 15 of 40 lines; start it again to go on" in err
        assert b"Traceback" not in err
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_0123", "custom_id": "id')
    echo.go_on.set()
    process = await start(source, out, address(gateway), "--json")
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(stdout)["skipped"] == 15
    assert texts(out) == EXPECTED
    assert ids(out) == sorted(MANY)


@pytest.mark.slow
async def test_a_gateway_that_is_restarted_costs_nothing_but_time(files, start_worker, start_gateway):
    source, out = files
    echo = Echo(free=10)
    worker = await start_worker(script=echo)
    listen = f"127.0.0.1:{free_port()}"
    gateway = await start_gateway(worker, listen=listen)
    written(source, [a_line(i) for i in MANY])
    task = asyncio.create_task(run(source, out, listen, "--in-flight", "8", "--json"))
    # Ten are done, and eight have one token.
    await until(lambda: out.exists() and out.read_bytes().count(b"\n") == 10 and echo.running == 8)
    await gateway.stop()
    await until(lambda: not worker._links)
    echo.go_on.set()
    await start_gateway(worker, listen=listen, node_id="g1")
    result = await task
    assert result.exit_code == 0, result.output
    assert said(result)["done"] == 40
    assert texts(out) == EXPECTED
    assert ids(out) == sorted(MANY)
    resumed = [
        e for e in worker.heard if e.WhichOneof("event") == "start" and e.start.generate_request.HasField("resume")
    ]
    assert len(resumed) == 8
