"""What every verb shares: exit codes, errors for people and for programs, and the options that mean the same everywhere.

stdout carries the answer alone, so that `--json` can be piped; what went wrong goes to stderr in words, and with `--json` to stdout too.
"""

from __future__ import annotations

import asyncio
import enum
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import click

from trimtab.errors import TrimtabError, Violation

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 80
KEY = "TRIMTAB_KEY"


class ExitCode(enum.IntEnum):
    """How a verb ended (DESIGN §8)."""

    OK = 0
    GOAL_FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    PARTIAL = 5


INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE
"""As of a program that the signal ended: whoever read its output has gone."""

_BY_REASON = {
    "POLICY_REFUSED": ExitCode.REFUSED,
    "CONFLICT": ExitCode.REFUSED,
    "INVALID_REQUEST": ExitCode.USAGE,
    "MODEL_NOT_FOUND": ExitCode.USAGE,
}
_BY_GRPC_CODE = {
    "UNAVAILABLE": ExitCode.UNREACHABLE,
    "UNIMPLEMENTED": ExitCode.UNREACHABLE,
    "INVALID_ARGUMENT": ExitCode.USAGE,
    "FAILED_PRECONDITION": ExitCode.REFUSED,
    "RESOURCE_EXHAUSTED": ExitCode.REFUSED,
    "PERMISSION_DENIED": ExitCode.REFUSED,
    "UNAUTHENTICATED": ExitCode.REFUSED,
}


UNKNOWN_FIELD = "UNKNOWN_FIELD"
"""The cause of a refusal by which a name is mistyped, and no value refused."""


class WrongAddress(TrimtabError):
    """Somebody answers there, and is not who was asked for."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    reason = "WRONG_ADDRESS"


def exit_code(error: TrimtabError) -> ExitCode:
    """By the error's reason where it is known, else by its gRPC code."""
    if error.metadata.get("cause") == UNKNOWN_FIELD:
        return ExitCode.USAGE
    return _BY_REASON.get(error.reason) or _BY_GRPC_CODE.get(error.grpc_code, ExitCode.GOAL_FAILED)


def astray(error: TrimtabError, address: str, kind: str) -> TrimtabError:
    """The error itself, or that what answers at `address` is no `kind`: another port of the mesh, or another program."""
    said = f"{error.message} {error.__cause__}"
    if "http1.x server" in said:
        return WrongAddress(f"{address} is no {kind}: it speaks HTTP, not gRPC; is it the right port?")
    if error.grpc_code == "UNIMPLEMENTED":
        return WrongAddress(
            f"{address} is no {kind}, or one of an older build: it answers, but does not know what it was asked "
            f"({error.message})"
        )
    return error


def fail(error: TrimtabError, as_json: bool) -> NoReturn:
    """Say what went wrong, and end the process with its code."""
    if as_json:
        facts = {
            "reason": error.reason,
            "message": error.message,
            "violations": [{"field": v.field, "description": v.description} for v in error.violations],
            **error.metadata,
        }
        echo_json({"error": facts})
    click.secho(f"error: {_as_typed(error.message, error.violations)}", fg="red", err=True)
    for v in error.violations:
        # One fault alone is the message already.
        if v.description not in error.message:
            click.echo(f"  {_typed(v.field)}: {v.description}", err=True)
    sys.exit(exit_code(error))


def usage_json(error: click.UsageError) -> None:
    """What `fail` tells programs, of a command line that can't be read."""
    echo_json({"error": {"reason": "USAGE", "message": error.format_message(), "violations": []}})


def _as_typed(message: str, violations: Sequence[Violation]) -> str:
    """Fields of the request by the options that said them."""
    for v in violations:
        if v.field:
            message = re.sub(rf"(^|; ){re.escape(v.field)}: ", rf"\g<1>{_typed(v.field)}: ", message)
    return message


def _typed(field: str) -> str:
    """The option of the verb that runs, as it is typed, where one has the field's name."""
    context = click.get_current_context(silent=True)
    options = context.command.params if context is not None else []
    found = next((p for p in options if p.name == field and isinstance(p, click.Option)), None)
    return max(found.opts, key=len) if found is not None else field


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a verb's work. Ctrl-C cancels it and ends with 130, as a shell expects."""
    try:
        return asyncio.run(coroutine)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@contextmanager
def goes_on(how: Callable[[], str]) -> Iterator[None]:
    """What is waited for does not end with the waiting. Whoever interrupts it is told so, and in `how`'s words what to type instead."""
    try:
        yield
    except asyncio.CancelledError:
        click.echo(f"\nnot waited for any more; it goes on: {how()}", err=True)
        raise


def echo_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(function)


def control_option(function: F) -> F:
    text = (
        "Control plane; of several replicas, with commas between them, the first that answers. "
        "[default: TRIMTAB_CONTROL, else the running `trimtab up`, else 127.0.0.1:7071]"
    )
    return click.option("--control", metavar="HOST:PORT", help=text)(function)


def gateway_option(function: F) -> F:
    text = "Gateway. [default: TRIMTAB_GATEWAY, else the running `trimtab up`, else 127.0.0.1:7070]"
    return click.option("--gateway", metavar="HOST:PORT", help=text)(function)


def own_key() -> str:
    """With which the verbs call a gateway that wants one: TRIMTAB_KEY, or ""."""
    return os.environ.get(KEY, "").strip()


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Aligned columns; the last one wraps at WIDTH. `right` are the columns that align to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head) - 1)]
    indent = sum(widths) + 2 * len(widths)
    lines: list[str] = []
    for row in (head, *rows):
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
        start = "".join(f"{cell}  " for cell in cells)
        last = textwrap.wrap(row[-1], max(20, WIDTH - indent)) or [""]
        lines += [(start + last[0]).rstrip(), *(" " * indent + more for more in last[1:])]
    return "\n".join(lines)
