"""`trimtab config`: are the settings right, and where does each value come from? Connects to nothing."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from controlplane.settings import ControlSettings
from services.gateway.settings import GatewaySettings
from services.worker.settings import WorkerSettings
from trimtab.kit.cli import ExitCode, json_option
from trimtab.kit.config import ConfigError, find_file, load, read_file
from trimtab_cli import starting
from trimtab_cli.settings import UpSettings

SECTIONS: dict[str, type] = {
    "worker": WorkerSettings,
    "gateway": GatewaySettings,
    "control": ControlSettings,
    "up": UpSettings,
}
OTHER_VARIABLES = (
    "TRIMTAB_STATE_DIR",
    "TRIMTAB_CACHE_DIR",
    "TRIMTAB_CONTROL",
    "TRIMTAB_GATEWAY",
    "TRIMTAB_KEY",
    "TRIMTAB_ACCELERATOR",
    "TRIMTAB_TLS_CA",
    "TRIMTAB_TLS_CERT",
    "TRIMTAB_TLS_KEY",
    "TRIMTAB_TLS_MESH",
    "TRIMTAB_TOKEN",
    "TRIMTAB_SCALE_N",
)
"""Environment variables that are read outside the sections, and the one that `trimtab scale follow` gives its commands."""

WEBHOOKS = {"alert_webhook"}
SECRETS = {"redis_password"}
"""Settings that are addresses whose path is the secret, as chats' are."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One setting, its value, and who set it: "default", the environment variable, or the file."""

    section: str
    key: str
    value: Any
    source: str
    help: str


def faults(sections: Mapping[str, type], file: Path | None, env: Mapping[str, str]) -> list[str]:
    """Every fault in the file and the environment, each once; of what can be read, what would keep its process from starting here."""
    found: dict[str, None] = {}
    for section, cls in sections.items():
        try:
            settings: Any = load(cls, section, env=env, file=file)
        except ConfigError as e:
            found |= dict.fromkeys(e.faults)
            settings = e.settings
        if settings is not None:
            found |= dict.fromkeys(starting.CHECKS[cls](settings))
    known = [f"TRIMTAB_{s.upper()}_{f.name.upper()}" for s, cls in SECTIONS.items() for f in dataclasses.fields(cls)]
    prefixes = tuple(f"TRIMTAB_{s.upper()}_" for s in SECTIONS)
    for name in env:
        if name.startswith("TRIMTAB_") and not name.startswith(prefixes) and name not in OTHER_VARIABLES:
            near = difflib.get_close_matches(name, [*known, *OTHER_VARIABLES], n=1, cutoff=0.5)
            found[f"environment: nobody reads {name}" + (f"; did you mean {near[0]}?" if near else "")] = None
    return list(found)


def origins(sections: Mapping[str, type], file: Path | None, env: Mapping[str, str]) -> list[Origin]:
    """Each setting with its source. The settings must be without faults."""
    written = read_file(file)
    out = []
    for section, cls in sections.items():
        loaded: Any = load(cls, section, env=env, file=file)
        for f in dataclasses.fields(cls):
            if not f.metadata["for_people"]:
                continue
            variable = f"TRIMTAB_{section.upper()}_{f.name.upper()}"
            if variable in env:
                source = variable
            elif f.name in written.get(section, {}):
                source = str(file)
            else:
                source = "default"
            out.append(Origin(section, f.name, _public(f.name, getattr(loaded, f.name)), source, f.metadata["help"]))
    return out


@click.group()
def config() -> None:
    """Check and show settings.

    A setting is fixed for the life of a process: flag, then TRIMTAB_<SECTION>_<KEY>, then trimtab.toml, then default.
    What may change while the mesh runs is policy: see `trimtab policy`.
    """


_file = click.option(
    "--config", "path", metavar="FILE", help="settings file [default: ./trimtab.toml, then /etc/trimtab]"
)
_section = click.option("--section", type=click.Choice(list(SECTIONS)), multiple=True, help="only this section")


@config.command()
@_file
@_section
@json_option
def check(path: str | None, section: tuple[str, ...], as_json: bool) -> None:
    """Report every fault in the settings file and the environment."""
    file = _checked(path, section, as_json)
    if as_json:
        click.echo(json.dumps({"ok": True, "file": str(file) if file else None, "faults": []}))
    else:
        click.echo(f"the settings are right ({file or 'no settings file'})")


@config.command(name="print")
@_file
@_section
@json_option
def print_(path: str | None, section: tuple[str, ...], as_json: bool) -> None:
    """Show each setting, its value, and where it comes from."""
    file = _checked(path, section, as_json)
    rows = origins(_chosen(section), file, os.environ)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    shown = [(row, _toml(row.value)) for row in rows]
    width, value_width = max(len(r.key) for r in rows), max(len(text) for _, text in shown)
    heading = ""
    for row, text in shown:
        if row.section != heading:
            click.echo(f"[{row.section}]" if not heading else f"\n[{row.section}]")
            heading = row.section
        click.echo(f"{row.key:<{width}} = {text:<{value_width}}  # {row.source}")


def _chosen(section: tuple[str, ...]) -> dict[str, type]:
    return {name: cls for name, cls in SECTIONS.items() if not section or name in section}


def _checked(path: str | None, section: tuple[str, ...], as_json: bool) -> Path | None:
    """The settings file, or the end of the command with every fault told."""
    try:
        file = find_file(path)
        found = faults(_chosen(section), file, os.environ)
    except ConfigError as e:
        file, found = None, e.faults
    if found:
        if as_json:
            click.echo(json.dumps({"ok": False, "file": str(file) if file else path, "faults": found}))
        else:
            click.echo("\n".join(found), err=True)
            click.echo("mend these; `trimtab config print` then shows every setting and where it comes from", err=True)
        sys.exit(ExitCode.USAGE)
    return file


def _public(key: str, value: Any) -> Any:
    """The value without what opens a door: the password of a URL, before its host or among its options; of a webhook all but its host."""
    if key in SECRETS:
        return "***" if value else ""
    if not isinstance(value, str) or "://" not in value:
        return value
    if key in WEBHOOKS:
        parts = urlsplit(value)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/***"
    return re.sub(r"([?&]\w*password=)[^&]*", r"\1***", re.sub(r"(://[^:/@]*:).*@", r"\1***@", value))


def _toml(value: Any) -> str:
    if value is None:
        return '""'
    return json.dumps(list(value) if isinstance(value, tuple) else value)
