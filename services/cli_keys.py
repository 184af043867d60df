"""`trimtab keys`: keys for the tenants of a gateway, and whether its key file is right. Connects to nothing."""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from trimtab.kit.cli import ExitCode, echo_json, json_option, table

KEY_PREFIX = "tt-"
"""By which scanners for secrets, and people, know a key when they see one."""
KEY_BYTES = 32
"""Drawn at random: 256 bits."""


@click.group()
def keys() -> None:
    """Make keys for the tenants of a gateway, and check its key file.

    A gateway reads the file that its setting `keys` names, and takes a new one while it runs. The file holds no keys, but their
    SHA-256. Callers send a key as `Authorization: Bearer KEY`; trimtab's own verbs take it from TRIMTAB_KEY.
    """


@keys.command()
@click.argument("tenant")
@json_option
def new(tenant: str, as_json: bool) -> None:
    """Make a key for TENANT, show it this once, and the lines for the key file. It is kept nowhere."""
    from services.gateway import key_file

    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    digest = key_file.PREFIX + key_file.digest(key)
    lines = f'tenants:\n  {tenant}:\n    keys: ["{digest}"]\n'
    try:
        key_file.parse(lines)
    except key_file.KeyFileFault as e:
        raise click.UsageError("; ".join(e.faults)) from e
    if as_json:
        echo_json({"tenant": tenant, "key": key, "sha256": digest, "lines": lines})
        return
    click.echo(f"{key}\n\nThis is the key of {tenant}, shown this once. In the key file:\n\n{lines}", nl=False)


@keys.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@json_option
def check(file: Path, as_json: bool) -> None:
    """Report every fault of a key file, or show the tenants in it. Exit code 2 where there is a fault."""
    from services.gateway import key_file

    try:
        found = key_file.read(file)
    except key_file.KeyFileFault as e:
        if as_json:
            echo_json({"ok": False, "file": str(file), "faults": e.faults, "tenants": []})
        click.echo("\n".join(f"{file}: {fault}" for fault in e.faults), err=True)
        sys.exit(ExitCode.USAGE)
    rows = _rows(found)
    if as_json:
        echo_json({"ok": True, "file": str(file), "faults": [], "tenants": rows})
        return
    head = ("TENANT", "KEYS", "IDENTITIES", "SHARE", "REQUESTS/S", "TOKENS/S", "WORKLOADS")
    click.echo(table(head, [_words(row) for row in rows], right=(1, 2, 3, 4, 5)))


def _rows(file: Any) -> list[dict[str, Any]]:
    """Each tenant with what it may; of its keys and identities the number."""
    keys = Counter(tenant.name for tenant in file.by_key.values())
    identities = Counter(tenant.name for tenant in file.by_identity.values())
    return [
        {
            "tenant": t.name,
            "keys": keys[t.name],
            "identities": identities[t.name],
            "realtime": t.realtime,
            "share": t.share,
            "requests_per_s": t.requests_per_s,
            "tokens_per_s": t.tokens_per_s,
            "workload": t.workload.value if t.workload else None,
            "deadline_s": {workload.value: seconds for workload, seconds in t.deadline_s.items()},
        }
        for t in file.tenants
    ]


def _words(row: dict[str, Any]) -> tuple[str, ...]:
    workloads = "realtime, batch" if row["realtime"] else "batch"
    rates = ("-" if row[name] is None else f"{row[name]:g}" for name in ("requests_per_s", "tokens_per_s"))
    return (row["tenant"], str(row["keys"]), str(row["identities"]), f"{row['share']:g}", *rates, workloads)
