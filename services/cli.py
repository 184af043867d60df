"""The data plane's verbs: `chat` and `generate` talk to a gateway, `trace` reads what the processes wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trimtab.errors import TrimtabError
from trimtab.kit.cli import KEY, ExitCode, astray, echo_json, fail, gateway_option, json_option, own_key, run, table
from trimtab.kit.process import state_dir
from trimtab.kit.run_file import DEFAULT_MESH, gateway_address, running
from trimtab.kit.tls import CertificateError
from trimtab.messages import ChatMessage, Request, Sampling, Workload

if TYPE_CHECKING:
    from services.answers import Answer
    from trimtab.client import Client

F = TypeVar("F", bound=Callable[..., Any])
NEWEST = 10
"""Traces that are listed."""
FLUSHED_AFTER_S = 0.7
"""Processes write their spans every half second; the trace of an answer that has just come may not be there yet."""


def _request_options(function: F) -> F:
    for option in reversed(
        (
            click.option("--model", help="Model to ask. [default: the only one that is served]"),
            click.option("--max-tokens", type=click.IntRange(1), help="Tokens of the answer at most."),
            click.option("--temperature", type=click.FloatRange(0.0), help="0 is greedy. [default: the model's]"),
            click.option("--workload", type=click.Choice([w.value for w in Workload]), help="[default: the gateway's]"),
            click.option("--timeout", "timeout_s", type=click.FloatRange(0.001), help="Seconds for each answer."),
            gateway_option,
            json_option,
        )
    ):
        function = option(function)
    return function


@click.command()
@click.argument("prompt", required=False)
@click.option("--system", default="", help="System message.")
@_request_options
def chat(
    prompt: str | None,
    system: str,
    model: str | None,
    max_tokens: int | None,
    temperature: float | None,
    workload: str | None,
    timeout_s: float | None,
    gateway: str | None,
    as_json: bool,
) -> None:
    """Talk to a model. With PROMPT, or with text on stdin, one answer; else a conversation."""
    from services.chat import Conversation, converse

    if prompt is None and sys.stdin is not None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    if prompt == "":
        raise click.UsageError("the prompt is empty; give PROMPT, or text on stdin")
    if prompt is None and as_json:
        raise click.UsageError("--json needs PROMPT, or text on stdin")
    template = Request(
        "", model or "", (), Sampling(max_tokens=max_tokens, temperature=temperature), _workload(workload)
    )
    if prompt is not None:
        opening = (ChatMessage("system", system),) if system else ()
        _answer(template, (*opening, ChatMessage("user", prompt)), gateway, timeout_s, as_json)
        return
    with asyncio.Runner() as runner:
        with _certificates_read():
            client = runner.run(_made(_client, gateway_address(gateway)))
        try:
            converse(runner, Conversation(client, template, system), timeout_s=timeout_s)
        finally:
            runner.run(client.close())


@click.command()
@click.argument("prompt", required=False)
@click.option("--token-ids", help="The prompt as token ids: 1,2,3.")
@click.option("--stop", multiple=True, help="String that ends the answer; may be given again.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the sampling.")
@_request_options
def generate(
    prompt: str | None,
    token_ids: str | None,
    stop: tuple[str, ...],
    seed: int | None,
    model: str | None,
    max_tokens: int | None,
    temperature: float | None,
    workload: str | None,
    timeout_s: float | None,
    gateway: str | None,
    as_json: bool,
) -> None:
    """Complete PROMPT as it stands, without a chat template; - reads it from stdin, less its last line end."""
    if (prompt is None) == (token_ids is None):
        raise click.UsageError("give either PROMPT or --token-ids")
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n") if sys.stdin is not None else ""
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop)
    template = Request("", model or "", "", sampling, _workload(workload))
    _answer(template, prompt if token_ids is None else _ids(token_ids), gateway, timeout_s, as_json)


def trace_directory(mesh: str | None) -> Path:
    """Where the processes of a mesh write their traces; of the one that runs here when None."""
    if mesh is None:
        run_file = running()
        mesh = run_file.mesh if run_file else DEFAULT_MESH
    return state_dir(mesh)


@click.command()
@click.argument("trace_id", metavar="[ID]", required=False)
@click.option("--mesh", help="Mesh whose traces to read. [default: the running `trimtab up`, else default]")
@json_option
def trace(trace_id: str | None, mesh: str | None, as_json: bool) -> None:
    """Show a trace as a tree: where a request's or a policy change's time went.

    ID may be shortened to its first characters. Without ID, the newest traces are listed.
    """
    from services import traces

    directory = trace_directory(mesh)
    if trace_id is None:
        _list(traces.newest(directory, NEWEST), as_json)
        return
    found = traces.find(directory, trace_id.lower())
    if not found:
        time.sleep(FLUSHED_AFTER_S)
        found = traces.find(directory, trace_id.lower())
    if len(found) != 1:
        newest = [s.trace_id for s in traces.newest(directory, NEWEST)]
        what = f"{len(found)} traces begin with {trace_id}" if found else f"no trace {trace_id} in {directory}"
        if as_json:
            echo_json({"error": {"reason": "TRACE_NOT_FOUND", "message": what, "newest": list(found) or newest}})
        shown = "\n".join(f"  {known}" for known in list(found)[:NEWEST] or newest) or "  (none yet)"
        click.echo(f"{what}; {'they are' if found else 'the newest are'}:\n{shown}", err=True)
        sys.exit(ExitCode.USAGE)
    ((full_id, spans),) = found.items()
    if as_json:
        echo_json({"trace_id": full_id, "spans": [traces.as_json(depth, span) for depth, span in traces.tree(spans)]})
        return
    click.echo(f"trace {full_id}")
    click.echo("\n".join(traces.render(spans)))


def _list(summaries: list[Any], as_json: bool) -> None:
    if as_json:
        keys = ("trace_id", "name", "start_ns", "duration_ms", "spans", "failed")
        echo_json([{key: getattr(s, key) for key in keys} for s in summaries])
        return
    if not summaries:
        click.echo("no traces yet; ask something: trimtab chat 'Hello'")
        return
    rows = [
        (
            s.trace_id,
            datetime.fromtimestamp(s.start_ns / 1e9).strftime("%H:%M:%S"),
            f"{s.duration_ms:.0f} ms",
            str(s.spans),
            s.name + (" FAILED" if s.failed else ""),
        )
        for s in summaries
    ]
    click.echo(table(("TRACE", "AT", "TOOK", "SPANS", "WHAT"), rows, right=(2, 3)))


def _answer(template: Request, prompt: Any, gateway: str | None, timeout_s: float | None, as_json: bool) -> None:
    """Ask once and show the answer; an error ends the command."""
    from services.answers import Answer

    answer = Answer()
    try:
        with _certificates_read():
            run(_ask(template, prompt, gateway_address(gateway), answer, timeout_s, as_json))
    except TrimtabError as failure:
        e = astray(failure, gateway_address(gateway), "gateway")
        if answer.text and not as_json:
            click.echo()
        if e.reason == "UNREACHABLE" and not as_json:
            click.echo("is the mesh running? `trimtab up` starts one here; --gateway names another", err=True)
        fail(e, as_json)
    if as_json:
        click.echo(json.dumps(answer.as_json(), indent=2, ensure_ascii=False))
        return
    if sys.stdout.isatty():
        click.echo()
        click.secho(answer.summary(), dim=True, err=True)
    elif not answer.text.endswith("\n"):
        click.echo()


async def _ask(
    template: Request, prompt: Any, address: str, answer: Answer, timeout_s: float | None, as_json: bool
) -> None:
    from dataclasses import replace

    from services.answers import ask, model_or_only
    from services.chat import write

    async with _client(address) as client:
        request = replace(template, model=await model_or_only(client, template.model), prompt=prompt)
        await ask(client, request, answer, (lambda _: None) if as_json else write, timeout_s=timeout_s)


@contextlib.contextmanager
def _certificates_read() -> Iterator[None]:
    """What is wrong with TRIMTAB_TLS_* is a usage error, in its own words."""
    try:
        yield
    except CertificateError as e:
        raise click.UsageError(str(e)) from e


def _client(address: str) -> Client:
    """One that says who calls, where TRIMTAB_KEY does."""
    from trimtab.client import Client

    try:
        return Client(address, key=own_key())
    except ValueError as e:
        raise click.UsageError(f"{KEY}: {e}") from e


async def _made(kind: Any, *args: Any) -> Any:
    """Made inside the loop that it belongs to."""
    return kind(*args)


def _workload(name: str | None) -> Workload | None:
    return Workload(name) if name else None


def _ids(text: str) -> tuple[int, ...]:
    try:
        ids = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        ids = ()
    if not ids or min(ids) < 0:
        raise click.UsageError("--token-ids must be whole numbers from 0 on, separated by commas: 1,2,3")
    return ids
