"""`trimtab breaker` and `trimtab drain`: what an operator does to workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from controlplane.cli import ask, user
from trimtab.kit.cli import control_option, echo_json, goes_on, json_option
from trimtab.kit.duration import brief, parse_ms

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient

F = TypeVar("F", bound=Callable[..., Any])

OPEN, CLOSED, NEITHER = 1, 2, 0
"""BreakerForce's numbers."""
ENDS_S = 30.0
"""What a drained worker gets, after its deadline, to end."""
LOOK_S = 0.2


def duration(text: str) -> int:
    """Milliseconds, typed as 500ms, 30s, 10m or 24h."""
    try:
        return parse_ms(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


def _options(function: F) -> F:
    """Who, why, and where to ask."""
    for option in (
        json_option,
        control_option,
        click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]"),
        click.option("--reason", default="", metavar="TEXT", help="Why; `trimtab why W` tells it."),
    ):
        function = option(function)
    return function


@click.group(invoke_without_command=True)
@control_option
@json_option
@click.pass_context
def breaker(ctx: click.Context, /, control: str | None, as_json: bool) -> None:
    """Show workers' breakers, or force one: of each worker what gateways said of it last, and what an operator has decided.

    Every gateway keeps a breaker for each worker and opens it by what it sees itself; the others then try that worker with one request
    before they go on. What is forced holds at every gateway, and ends by itself.

    Exit codes: 0 done, 2 usage or an unknown worker, 3 no control plane answers or its store is away, 4 refused.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = (control, as_json)
        return
    from controlplane import render_workers as render

    answer = ask(control, as_json, lambda client: client.breakers())
    if as_json:
        echo_json([render.breaker_json(w) for w in answer.workers])
    else:
        click.echo(render.breakers_text(answer, _now()))


def _for_option(function: F) -> F:
    return click.option(
        "--for",
        "for_ms",
        type=duration,
        default="10m",
        show_default=True,
        metavar="TIME",
        help="So long, 24h at most; then every gateway decides by what it sees again.",
    )(function)


@breaker.command("open")
@click.argument("worker", metavar="W")
@_for_option
@_options
@click.pass_context
def open_(ctx: click.Context, /, worker: str, for_ms: int, **given: Any) -> None:
    """No gateway sends requests to worker W; what runs there goes on."""
    _force(ctx, worker, OPEN, for_ms, given)


@breaker.command("close")
@click.argument("worker", metavar="W")
@_for_option
@_options
@click.pass_context
def close(ctx: click.Context, /, worker: str, for_ms: int, **given: Any) -> None:
    """Gateways send requests to worker W whatever they see of it; one that hangs or drains gets none all the same."""
    _force(ctx, worker, CLOSED, for_ms, given)


@breaker.command("reset")
@click.argument("worker", metavar="W")
@_options
@click.pass_context
def reset(ctx: click.Context, /, worker: str, **given: Any) -> None:
    """Take back what was forced on worker W: every gateway decides by what it sees."""
    _force(ctx, worker, NEITHER, 0, given)


def _force(ctx: click.Context, worker: str, forced: Any, for_ms: int, given: dict[str, Any]) -> None:
    from controlplane import render_workers as render

    if forced and not for_ms:
        raise click.BadParameter("a time above 0", param_hint="--for")
    # `trimtab breaker --json open w0` says it before the verb.
    control, as_json = (
        mine or above for mine, above in zip((given["control"], given["as_json"]), ctx.obj, strict=True)
    )
    answer = ask(
        control,
        as_json,
        lambda client: client.force_breaker(
            worker, forced, author=given["author"] or user(), reason=given["reason"], for_ms=for_ms
        ),
    )
    if as_json:
        echo_json({"changed": answer.changed, **render.breaker_json(answer.worker)})
    else:
        click.echo(render.force_text(answer, _now()))


@click.command()
@click.argument("worker", metavar="W")
@click.option(
    "--deadline",
    "deadline_ms",
    type=duration,
    default="30s",
    show_default=True,
    metavar="TIME",
    help="What runs may end by itself so long; then it goes on at another worker. 0s: at once.",
)
@click.option("--wait", is_flag=True, help="Until it is gone.")
@click.option("--restart", is_flag=True, help="Have it started anew, by `trimtab up`, systemd or Kubernetes.")
@_options
def drain(worker: str, deadline_ms: int, wait: bool, restart: bool, **given: Any) -> None:
    """Take worker W out of the mesh: it takes no new work, what runs there ends or goes on at another worker, and its process ends.

    `trimtab up` does not start it again, unless --restart says so. Streams go on without a token missing or twice, where another worker
    serves the model.

    Exit codes: 0 it drains (with --wait: it is gone), 2 usage or an unknown worker, 3 no control plane answers, 4 it is not connected or
    can't do it, 5 it gave no answer, or was still there when the wait was over.
    """
    from controlplane import render_workers as render

    as_json = given["as_json"]
    within_s = deadline_ms / 1000 + ENDS_S

    async def draining(client: AdminClient) -> tuple[Any, bool | None]:
        answer = await client.drain(
            worker, deadline_ms, author=given["author"] or user(), reason=given["reason"], restart=restart
        )
        if not answer.done or not wait:
            return answer, None
        with goes_on(lambda: "see it: trimtab fleet"):
            return answer, await _gone(client, worker, answer.incarnation, within_s)

    answer, gone = ask(given["control"], as_json, draining)
    if as_json:
        echo_json(render.drain_json(worker, answer, deadline_ms, gone))
    elif answer.done:
        click.echo(render.drain_text(worker, answer, deadline_ms, gone))
    if not answer.done:
        click.secho(f"error: {worker} is not drained: {answer.reason}: {answer.message}", fg="red", err=True)
    elif not answer.others:
        click.secho(f"warning: {render.last_text(worker, answer)}", fg="yellow", err=True)
    if gone is False:
        click.secho(f"error: {worker} is still there after {brief(within_s * 1000)}", fg="red", err=True)
    sys.exit(render.drain_code(answer, gone))


@click.command()
@click.argument("worker", metavar="W")
@_options
def reload(worker: str, **given: Any) -> None:
    """Tell worker W's engine its policy anew: for one that schedules otherwise than its policy says (`trimtab doctor` finds such).

    Exit codes: 0 done, 2 usage or an unknown worker, 3 no control plane answers, 4 it is not connected or can't do it, 5 it gave no answer.
    """
    from controlplane import render_workers as render

    answer = ask(
        given["control"],
        given["as_json"],
        lambda client: client.reload(worker, author=given["author"] or user(), reason=given["reason"]),
    )
    if given["as_json"]:
        echo_json(
            {"node_id": worker, "done": answer.done, "reason": answer.reason or None, "message": answer.message or None}
        )
    elif answer.done:
        click.echo(f"{worker} has told its engine the policy anew")
    if not answer.done:
        click.secho(f"error: {worker} did not: {answer.reason}: {answer.message}", fg="red", err=True)
    sys.exit(render.drain_code(answer, None))


async def _gone(client: AdminClient, node_id: str, incarnation: str, within_s: float) -> bool:
    """Once that process has left the control plane; False when it has not in time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        node = next((n for n in (await client.fleet()).nodes if n.hello.node_id == node_id), None)
        if node is None or not node.connected or node.hello.incarnation != incarnation:
            return True
        await asyncio.sleep(LOOK_S)
    return False


def _now() -> int:
    return int(time.time() * 1000)
