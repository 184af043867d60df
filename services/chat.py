"""A conversation in a terminal: each answer streams, Ctrl-C cancels the one that runs, and at the prompt it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import click

from services.answers import Answer, ask, model_or_only
from trimtab.client import Client
from trimtab.errors import TrimtabError
from trimtab.messages import ChatMessage, Request


class Conversation:
    """The turns so far. Only turns that both sides finished, or that the user cut, are kept."""

    def __init__(self, client: Client, template: Request, system: str = "") -> None:
        self._client = client
        self._template = template
        self._opening = (ChatMessage("system", system),) if system else ()
        self.turns: tuple[ChatMessage, ...] = ()

    def reset(self) -> None:
        self.turns = ()

    async def say(
        self, text: str, answer: Answer, on_text: Callable[[str], None], *, timeout_s: float | None = None
    ) -> None:
        """One turn.

        The partial answer of a cancelled turn stays in the conversation; a failed turn leaves no trace in it.
        """
        asked = (*self.turns, ChatMessage("user", text))
        try:
            model = await model_or_only(self._client, self._template.model)
            request = replace(self._template, model=model, prompt=(*self._opening, *asked))
            await ask(self._client, request, answer, on_text, timeout_s=timeout_s)
        except asyncio.CancelledError:
            if answer.text:
                self.turns = (*asked, ChatMessage("assistant", answer.text))
            raise
        self.turns = (*asked, ChatMessage("assistant", answer.text))


def converse(runner: asyncio.Runner, conversation: Conversation, *, timeout_s: float | None) -> None:
    """Read, answer, repeat, until Ctrl-D, /exit, or Ctrl-C at the prompt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()

    click.secho("Ctrl-C cancels an answer and, at the prompt, leaves; /new starts over.", dim=True, err=True)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/new":
            conversation.reset()
        elif text:
            _turn(runner, conversation, text, timeout_s)


def _turn(runner: asyncio.Runner, conversation: Conversation, text: str, timeout_s: float | None) -> None:
    answer = Answer()
    try:
        runner.run(_until_ctrl_c(conversation.say(text, answer, write, timeout_s=timeout_s)))
    except asyncio.CancelledError:
        click.secho("\n(cancelled)", dim=True, err=True)
    except TrimtabError as e:
        click.secho(f"{'' if not answer.text else chr(10)}{e.message}", fg="red", err=True)
    else:
        click.echo()
        click.secho(answer.summary(), dim=True, err=True)


async def _until_ctrl_c(turn: Coroutine[Any, Any, None]) -> None:
    """Ctrl-C cancels the turn, and with it the call.

    The loop's own signal handler wakes the loop; Python's plain one can set its flag just before the loop falls
    asleep, and then waits for the next token.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(turn)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def write(text: str) -> None:
    """A piece of an answer, at once."""
    click.echo(text, nl=False)
