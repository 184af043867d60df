"""`trimtab requests reprioritise|isolate|release`: what an operator does to requests that wait or run now, wherever they are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from controlplane.cli import ask, user
from controlplane.cli_workers import duration
from trimtab.errors import TrimtabError
from trimtab.kit.cli import ExitCode, control_option, echo_json, json_option
from trimtab.kit.duration import brief
from trimtab.messages import RequestMatch, Workload
from trimtab.policy import FIELDS

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient

F = TypeVar("F", bound=Callable[..., Any])

MAX_DELTA = int(FIELDS["priority.max_priority_diff"].maximum)
OPENAI_PREFIXES = ("chatcmpl-", "cmpl-")
"""What the OpenAI door puts before a request's id where a body says it."""


def _options(function: F) -> F:
    """Which requests, why, who, and where to ask."""
    for option in (
        json_option,
        control_option,
        click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]"),
        click.option("--reason", default="", metavar="TEXT", help="Why; the control plane's log shows it. Required."),
        click.option(
            "--min-prompt-tokens",
            type=click.IntRange(1, 2**31 - 1),
            default=None,
            metavar="N",
            help="Those whose prompt has N tokens or more.",
        ),
        click.option(
            "--older-than",
            type=duration,
            default=None,
            metavar="SPAN",
            help="Those that came to the mesh so long ago: 60s, 10m.",
        ),
        click.option("--tenant", default="", metavar="T", help="Those of this tenant."),
        click.option("--workload", type=click.Choice([w.value for w in Workload]), help="Those of this workload."),
        click.option(
            "--id",
            "ids",
            multiple=True,
            metavar="ID",
            help="This request, by the id that its client sees: in Accepted, in x-request-id, or as an OpenAI answer's id. "
            "May be repeated.",
        ),
    ):
        function = option(function)
    return function


@click.group()
def requests() -> None:
    """Act on requests that wait or run now, on every worker at once.

    Say which by --id, --workload, --tenant, --min-prompt-tokens; given together, all of them must hold. Requests that come later
    are not meant: for those, change the policy.

    Exit codes: 0 done, 2 usage, 3 no control plane answers, 4 nobody has such a request or no worker could do it, 5 some worker
    could not do it or has not answered in time.
    """


@requests.command("reprioritise")
@click.option(
    "--delta",
    type=click.IntRange(-MAX_DELTA, MAX_DELTA),
    default=None,
    metavar="N",
    help=f"Levels, -{MAX_DELTA} to {MAX_DELTA}: positive goes earlier, 0 back to its own place. Required.",
)
@_options
def reprioritise(delta: int | None, **given: Any) -> None:
    """Move requests in the order, by --delta levels.

    A delta counts from a request's own place, not from where an earlier one put it; with its workload's delta it is bounded by the
    policy's priority.max_priority_diff, and a level is 1/14 of priority.max_overtake_ms. It says who of the waiting is next; among
    those that run, whose prompt is computed first and who gives way when memory is short. Under scheduler.mode priority and fcfs it
    does nothing.
    """
    match = _match(given, () if delta is not None else ("how far: --delta N",))
    assert delta is not None
    _steer("reprioritise", match, given, lambda client, **why: client.reprioritise(match, delta, **why), delta=delta)


@requests.command("isolate")
@click.option("--off", is_flag=True, help="No longer; those that the policy isolates stay so.")
@_options
def isolate(off: bool, **given: Any) -> None:
    """Keep requests apart: a worker runs one isolated one at a time.

    They wait for each other, and nobody else waits for them. Those that run already go on. Under scheduler.mode priority and fcfs it
    does nothing.
    """
    match = _match(given)
    _steer("isolate", match, given, lambda client, **why: client.isolate(match, not off, **why), isolated=not off)


@requests.command("release")
@click.option("--yes", is_flag=True, help="Don't ask, whatever the requests are named by.")
@_options
def release(yes: bool, **given: Any) -> None:
    """End requests now, whether they wait or run, to make room.

    Their clients get ABORTED / RELEASED (HTTP 503, code released), after whatever output they have had, and may send the request
    again. At a terminal it asks first, unless the requests are named by --id.
    """
    match = _match(given)
    if not yes and not match.request_ids and _at_a_terminal():
        click.echo(f"This ends {_described(match)}, on every worker. Clients may send them again.", err=True)
        if not click.confirm("Release them?", err=True):
            click.echo("nothing was released", err=True)
            sys.exit(ExitCode.GOAL_FAILED)
    _steer("release", match, given, lambda client, **why: client.release(match, **why))


def _steer(
    action: str,
    match: RequestMatch,
    given: dict[str, Any],
    call: Callable[..., Awaitable[Any]],
    **details: Any,
) -> None:
    """Asks, shows the answer, and ends the process with its code. `call` takes the client, author and reason."""
    from controlplane import render_requests as render

    author, reason, as_json = given["author"] or user(), given["reason"], given["as_json"]

    async def asking(client: AdminClient) -> tuple[Any, int | None]:
        answer = await call(client, author=author, reason=reason)
        telemetry = None
        if not match.request_ids:
            with contextlib.suppress(TrimtabError):
                telemetry = await client.get_telemetry(windows=1)
        return answer, render.in_gateways(telemetry, match.workload) if telemetry is not None else None

    answer, untouched = ask(given["control"], as_json, asking)
    code = render.exit_code(answer)
    if as_json:
        echo_json({**render.steered_json(action, answer, details), "waiting_in_gateways": untouched})
    elif render.affected(answer):
        click.echo(render.steered_text(action, answer, details))
    if not render.affected(answer):
        click.secho(f"error: {render.nobody_text(answer)}", fg="red", err=True)
    if untouched and not as_json:
        click.echo(render.untouched_text(untouched, match.workload), err=not render.affected(answer))
    sys.exit(code)


def _match(given: dict[str, Any], missing: tuple[str, ...] = ()) -> RequestMatch:
    """What the options say; a usage error for all that they don't."""
    for name, text in (
        *(("--id", text) for text in given["ids"]),
        ("--tenant", given["tenant"]),
        ("--reason", given["reason"]),
    ):
        if not text.isprintable() or (name == "--id" and not text):
            raise click.UsageError(f"{name} takes one line of printable characters, not {text!r}")
    match = RequestMatch(
        frozenset(_as_served(given["ids"])),
        Workload(given["workload"]) if given["workload"] else None,
        given["tenant"],
        given["min_prompt_tokens"] or 0,
        given["older_than"] or 0,
    )
    which = (
        ("which requests: --id ID, --workload W, --tenant T, --min-prompt-tokens N or --older-than 60s",)
        if match.empty
        else ()
    )
    why = () if given["reason"].strip() else ("why: --reason TEXT",)
    if faults := (*which, *missing, *why):
        raise click.UsageError(f"say {', and '.join(faults)}")
    return match


def _as_served(ids: tuple[str, ...]) -> set[str]:
    """Each as it was typed, and as a worker knows it if it is an OpenAI answer's."""
    bare = {text.removeprefix(prefix) for text in ids for prefix in OPENAI_PREFIXES}
    return (set(ids) | bare) - {""}


def _described(match: RequestMatch) -> str:
    words = ["every", match.workload.value if match.workload else "", "request"]
    if match.tenant:
        words.append(f"of tenant {match.tenant!r}")
    if match.min_prompt_tokens:
        words.append(f"with a prompt of {match.min_prompt_tokens} tokens or more")
    if match.min_age_ms:
        words.append(f"older than {brief(match.min_age_ms)}")
    return " ".join(word for word in words if word)


def _at_a_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
