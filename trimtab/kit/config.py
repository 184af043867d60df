"""Settings: one frozen dataclass for each process, read once, with every error reported at once.

Precedence: told by the control plane > flag > TRIMTAB_<SECTION>_<KEY> > `[section]` of trimtab.toml > default. An unknown key is an error
that names the nearest known one. Settings never overlap with policy fields: a setting is fixed for the life of a process, a policy is pushed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

SECTIONS = ("worker", "gateway", "control", "up")
FILE_PLACES = (Path("trimtab.toml"), Path("/etc/trimtab/trimtab.toml"))


class ConfigError(Exception):
    """Every fault found, one line each. `settings` is what came of the rest, where something did: for who looks for more."""

    def __init__(self, faults: list[str], settings: Any = None) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults
        self.settings = settings


def setting(default: Any, help: str, *, for_people: bool = True) -> Any:
    """A dataclass field with its help text. One that is not `for_people` is set by the process that starts this one, and shown to nobody."""
    return dataclasses.field(default=default, metadata={"help": help, "for_people": for_people})


def host_port(address: str) -> tuple[str, int]:
    """`host:port` in parts; ValueError says what it should look like."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and int(port) <= 65_535):
        raise ValueError(f"must be host:port, such as 127.0.0.1:7070, not {address!r}")
    return host, int(port)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_WORDS = "must be letters, digits, dots, dashes or underscores"
LOG_LEVELS = ("debug", "info", "warning", "error")


def check(settings: Any, section: str, *, addresses: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> list[str]:
    """Each fault of what every process's settings share. `names` become file names; `addresses` may be tuples."""
    faults: list[str] = []
    for key in addresses:
        value = getattr(settings, key)
        for address in value if isinstance(value, tuple) else (value,):
            try:
                host_port(address)
            except ValueError as e:
                faults.append(f"{section} {key} {e}")
    faults += [
        f"{section} {key} {NAME_WORDS}, not {getattr(settings, key)!r}"
        for key in names
        if not is_name(getattr(settings, key))
    ]
    if settings.log_level not in LOG_LEVELS:
        faults.append(f"{section} log_level must be one of {', '.join(LOG_LEVELS)}, not {settings.log_level!r}")
    return faults


def is_name(said: str) -> bool:
    """Whether it can name a file, and a node or a mesh."""
    return _NAME.fullmatch(said) is not None


def well_formed(*addresses: str) -> tuple[str, ...]:
    """Those of them that are host:port; `check` tells of the others."""
    return tuple(address for address in addresses if not faults_of(functools.partial(host_port, address)))


def faults_of(checked: Callable[[], Any]) -> list[str]:
    """What it refuses, fault by fault; nothing where it takes it."""
    try:
        checked()
    except ConfigError as e:
        return e.faults
    except ValueError as e:
        return str(e).splitlines()
    return []


def refuse(faults: list[str]) -> None:
    """ValueError with each of them; nothing where there is none."""
    if faults:
        raise ValueError("\n".join(faults))


def find_file(explicit: str | None) -> Path | None:
    """The settings file to read: `explicit` must exist; else ./trimtab.toml, else /etc/trimtab/trimtab.toml, else none."""
    if explicit:
        path = Path(explicit)
        if not path.is_file():
            raise ConfigError([f"settings file {explicit} does not exist"])
        return path
    return next((p for p in FILE_PLACES if p.is_file()), None)


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _unwrap(kind: Any) -> tuple[Any, bool]:
    """(type, may be None)."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        inner = [a for a in typing.get_args(kind) if a is not type(None)]
        return inner[0], True
    return kind, False


def _convert(kind: Any, raw: Any) -> Any:
    kind, optional = _unwrap(kind)
    if optional and raw in (None, ""):
        return None
    if typing.get_origin(kind) is tuple:
        parts = raw if isinstance(raw, list | tuple) else str(raw).split(",")
        return tuple(str(part).strip() for part in parts if str(part).strip())
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        text = str(raw).strip().lower()
        if text in ("1", "true", "yes", "on"):
            return True
        if text in ("0", "false", "no", "off"):
            return False
        raise ValueError("must be true or false")
    if kind is int:
        if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
            raise ValueError("must be a whole number")
        try:
            return int(raw)
        except (TypeError, ValueError):
            raise ValueError("must be a whole number") from None
    if kind is float:
        try:
            return float(raw)
        except (TypeError, ValueError):
            raise ValueError("must be a number") from None
    if not isinstance(raw, str):
        raise ValueError("must be text")
    return raw


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    options = list(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(options))}"


def read_file(path: Path | None) -> dict[str, dict[str, Any]]:
    """The file's sections; a section that nobody reads is an error."""
    sections, faults = _sections(path)
    if faults:
        raise ConfigError(faults)
    return sections


def _sections(path: Path | None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Those that are read, and what is wrong with the file as a whole."""
    if path is None:
        return {}, []
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        return {}, [f"{path}: {e}"]
    faults = [f"{path}: unknown section [{name}]{_nearest(name, SECTIONS)}" for name in data if name not in SECTIONS]
    faults += [
        f"{path}: {name} must be a section" for name, v in data.items() if name in SECTIONS and not isinstance(v, dict)
    ]
    return {name: v for name, v in data.items() if name in SECTIONS and isinstance(v, dict)}, faults


def load(
    cls: type[T],
    section: str,
    *,
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
    told: Mapping[str, str] | None = None,
) -> T:
    """Settings of one process. ConfigError lists every fault; `flags` with value None count as not given.

    `told` is laid over all of them: who supervises a process gives it flags, and what it was told must hold all the same.
    """
    env = os.environ if env is None else env
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    faults: list[str] = []

    def take(name: str, raw: Any, where: str, shown: str) -> None:
        if name not in fields:
            faults.append(f"{where}: unknown key {shown}{_nearest(name, fields)}")
            return
        try:
            found[name] = _convert(hints[name], raw)
        except ValueError as e:
            faults.append(f"{where}: {shown} {e}, not {raw!r}")

    sections, wrong = _sections(file)
    faults += wrong
    for name, raw in sections.get(section, {}).items():
        take(name, raw, f"{file} [{section}]", name)
    prefix = f"TRIMTAB_{section.upper()}_"
    for key, raw in env.items():
        if key.startswith(prefix):
            take(key[len(prefix) :].lower(), raw, "environment", key)
    for name, raw in (flags or {}).items():
        if raw is not None and raw != ():
            take(name, raw, "command line", "--" + name.replace("_", "-"))
    for name, raw in (told or {}).items():
        take(name, raw, "told by the control plane", f"{section}.{name}")
    built: T
    try:
        built = cls(**found)
    except ConfigError as e:
        raise ConfigError([*faults, *e.faults]) from e
    except ValueError as e:
        raise ConfigError([*faults, *str(e).splitlines()]) from e
    if faults:
        raise ConfigError(faults, built)
    return built


def options(cls: type) -> Callable[[F], F]:
    """Click options for every setting of `cls`, so that a setting is spelled in one place. All default to None: "not given"."""
    import click

    hints = _hints(cls)

    def decorate(function: F) -> F:
        for f in reversed(dataclasses.fields(cls)):
            kind, _ = _unwrap(hints[f.name])
            flag = "--" + f.name.replace("_", "-")
            text = f.metadata.get("help", "")
            shown = f.default if f.default not in ("", None, ()) else "none"
            text, hidden = f"{text} [default: {shown}]", not f.metadata.get("for_people", True)
            if kind is bool:
                function = click.option(f"{flag}/--no-{flag[2:]}", f.name, default=None, help=text, hidden=hidden)(
                    function
                )
            else:
                metavar = _metavar(kind)
                function = click.option(flag, f.name, default=None, help=text, metavar=metavar, hidden=hidden)(function)
        return function

    return decorate


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "A,B,…")
