"""`trimtab chat` and `trimtab generate`, against a gateway that plays a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner, Result

from services.cli import chat, generate
from tests.cli.mesh import FakeGateway, accepted, an_answer, serving
from trimtab.errors import InvalidRequest, NoWorker, StreamCut, Violation
from trimtab.kit.process import free_port
from trimtab.messages import ChatMessage, Delta, Sampling, Workload


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with serving(FakeGateway()) as fake:
        yield fake


async def run(verb: object, gateway: FakeGateway | str, *args: str, stdin: str = "") -> Result:
    """The verb in a thread of its own, since it brings its own event loop."""
    address = gateway if isinstance(gateway, str) else gateway.address
    return await asyncio.to_thread(CliRunner().invoke, verb, [*args, "--gateway", address], input=stdin)


async def test_one_answer_streams_to_stdout(gateway: FakeGateway) -> None:
    result = await run(chat, gateway, "hello", "--system", "be brief", "--max-tokens", "9", "--workload", "batch")
    assert (result.exit_code, result.stdout) == (0, "Hello\n")
    (asked,) = gateway.requests
    assert asked.prompt == (ChatMessage("system", "be brief"), ChatMessage("user", "hello"))
    assert (asked.model, asked.sampling, asked.workload) == ("tiny", Sampling(max_tokens=9), Workload.BATCH)


async def test_a_piped_prompt_is_read(gateway: FakeGateway) -> None:
    result = await run(chat, gateway, stdin="what is this?\n")
    assert result.stdout == "Hello\n"
    assert gateway.requests[0].prompt == (ChatMessage("user", "what is this?"),)


async def test_an_empty_pipe_is_usage(gateway: FakeGateway) -> None:
    assert (await run(chat, gateway, stdin="\n")).exit_code == 2
    assert gateway.requests == []


async def test_json_is_one_object_with_all_that_is_known(gateway: FakeGateway) -> None:
    result = await run(generate, gateway, "once", "--json", "--seed", "3", "--stop", "a", "--stop", "b")
    answer = json.loads(result.stdout)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("Hello", [100, 101], "stop")
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_prompt_tokens": 1}
    assert answer["timings"]["first_token_ms"] == 3.0
    assert (answer["worker"], answer["policy"]["revision"], answer["model"]) == ("w0", 7, "tiny")
    assert gateway.metadata[0]["traceparent"].startswith(f"00-{answer['trace_id']}-")
    assert gateway.requests[0].prompt == "once"
    assert gateway.requests[0].sampling == Sampling(seed=3, stop=("a", "b"))


async def test_token_ids_are_a_prompt(gateway: FakeGateway) -> None:
    await run(generate, gateway, "--token-ids", "1, 2,3")
    assert gateway.requests[0].prompt == (1, 2, 3)


async def test_a_dash_reads_stdin_as_it_stands(gateway: FakeGateway) -> None:
    await run(generate, gateway, "-", stdin=" two\nlines\n")
    assert gateway.requests[0].prompt == " two\nlines"


async def test_no_gateway_is_exit_3_and_says_what_to_do() -> None:
    address = f"127.0.0.1:{free_port()}"
    result = await run(chat, address, "hi")
    assert result.exit_code == 3
    assert f"nothing answers at {address}" in result.stderr
    assert "trimtab up" in result.stderr
    assert json.loads((await run(chat, address, "hi", "--json")).stdout)["error"]["reason"] == "UNREACHABLE"


async def test_a_refusal_names_the_field(gateway: FakeGateway) -> None:
    gateway.script = [InvalidRequest("bad", violations=(Violation("sampling.temperature", "at most 2"),))]
    result = await run(generate, gateway, "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "bad" in result.stderr
    assert "sampling.temperature: at most 2" in result.stderr


async def test_no_worker_is_unreachable(gateway: FakeGateway) -> None:
    gateway.models = ()
    assert (await run(chat, gateway, "x")).exit_code == 3
    gateway.models, gateway.script = ("tiny",), [NoWorker("none serves tiny")]
    assert (await run(chat, gateway, "x")).exit_code == 3


async def test_a_cut_stream_keeps_what_came_and_fails(gateway: FakeGateway) -> None:
    gateway.script = [accepted(), Delta(0, (1,), "half"), StreamCut("the worker died")]
    result = await run(chat, gateway, "x")
    assert (result.exit_code, result.stdout) == (1, "half\n")


async def test_of_several_models_one_must_be_chosen(gateway: FakeGateway) -> None:
    gateway.models = ("tiny", "huge")
    result = await run(chat, gateway, "x")
    assert result.exit_code == 2
    assert "--model: tiny, huge" in result.stderr
    await run(chat, gateway, "x", "--model", "huge")
    assert [r.model for r in gateway.requests] == ["huge"]


class Terminal:
    """A process on a pseudo-terminal, as a person has it."""

    def __init__(self, fd: int, process: asyncio.subprocess.Process) -> None:
        self._fd = fd
        self._process = process
        self._news = asyncio.Event()
        self.shown = ""
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 4096)
        except OSError:  # the other side is closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
        self.shown += data.decode(errors="replace")
        self._news.set()

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    async def until(self, text: str) -> str:
        """What was shown up to `text`, which is then behind us."""
        async with asyncio.timeout(15.0):
            while text not in self.shown:
                self._news.clear()
                await self._news.wait()
        before, _, self.shown = self.shown.partition(text)
        return before

    async def left_by(self, keys: str) -> int:
        """Typed again if need be: a signal between a prompt and readline's select waits for the next key."""
        for _ in range(5):
            self.type(keys)
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self.ended()), 3.0)
        return await self.ended()

    async def ended(self) -> int:
        return await asyncio.wait_for(self._process.wait(), 15.0)


@asynccontextmanager
async def a_terminal(*args: str) -> AsyncIterator[Terminal]:
    ours, theirs = os.openpty()
    command = (sys.executable, "-c", ON_TTY, *args)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**os.environ, "TERM": "dumb"}
    )
    os.close(theirs)
    terminal = Terminal(ours, process)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)


# Takes the terminal as its controlling one, so that Ctrl-C typed there becomes SIGINT here.
ON_TTY = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from trimtab_cli.__main__ import cli
cli(sys.argv[1:], prog_name="trimtab")
"""


async def test_a_conversation_keeps_its_turns_and_ends_by_ctrl_d(gateway: FakeGateway) -> None:
    async with a_terminal("chat", "--gateway", gateway.address) as terminal:
        await terminal.until("> ")
        terminal.type("first\n")
        await terminal.until("Hello")
        assert "tokens" in await terminal.until("> ")
        terminal.type("second\n")
        await terminal.until("Hello")
        await terminal.until("> ")
        terminal.type("/new\n")
        await terminal.until("> ")
        terminal.type("third\n")
        await terminal.until("Hello")
        await terminal.until("> ")
        terminal.type("\x04")
        assert await terminal.ended() == 0
    user, assistant = (lambda text: ChatMessage("user", text)), ChatMessage("assistant", "Hello")
    assert [r.prompt for r in gateway.requests] == [
        (user("first"),),
        (user("first"), assistant, user("second")),
        (user("third"),),
    ]


@pytest.mark.slow
async def test_ctrl_c_cancels_the_answer_and_then_leaves(gateway: FakeGateway) -> None:
    gateway.script = [accepted(), Delta(0, (1,), "partial"), asyncio.Event()]
    async with a_terminal("chat", "--gateway", gateway.address) as terminal:
        await terminal.until("> ")
        terminal.type("long story\n")
        await terminal.until("partial")
        terminal.type("\x03")
        await asyncio.wait_for(gateway.cancelled.wait(), 10.0)
        await terminal.until("(cancelled)")
        await terminal.until("> ")
        gateway.script = an_answer("Hel", "lo")
        terminal.type("go on\n")
        await terminal.until("Hello")
        await terminal.until("> ")
        assert await terminal.left_by("\x03") == 0
    assert gateway.requests[1].prompt == (
        ChatMessage("user", "long story"),
        ChatMessage("assistant", "partial"),
        ChatMessage("user", "go on"),
    )


async def test_a_failed_turn_leaves_the_conversation_usable(gateway: FakeGateway) -> None:
    gateway.script = [NoWorker("all workers are gone")]
    async with a_terminal("chat", "--gateway", gateway.address) as terminal:
        await terminal.until("> ")
        terminal.type("one\n")
        await terminal.until("all workers are gone")
        await terminal.until("> ")
        gateway.script = an_answer("Hel", "lo")
        terminal.type("two\n")
        await terminal.until("Hello")
        await terminal.until("> ")
        terminal.type("/exit\n")
        assert await terminal.ended() == 0
    assert gateway.requests[1].prompt == (ChatMessage("user", "two"),)
