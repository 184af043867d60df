"""What documents tell people to type, held against what there is: the `trimtab` command's verbs and options, the processes', make's targets.

A word in capitals stands for something (W, FILE, NAME), and so does one with an ellipsis; nothing is asked of its value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import click

from controlplane.__main__ import main as control
from services.gateway.__main__ import main as gateway
from services.worker.__main__ import main as worker
from tests.docs.expressions import ROOT
from trimtab.errors import PolicyRefused
from trimtab.policy import FIELDS, parse
from trimtab_cli.__main__ import cli
from trimtab_cli.config import SECTIONS

PROCESSES: Mapping[str, click.Command] = {
    "controlplane": control,
    "services.gateway": gateway,
    "services.worker": worker,
    "trimtab_cli": cli,
}
"""By the module that `python -m` starts."""
PROGRAMS: Mapping[str, click.Command] = {
    "trimtab": cli,
    "trimtab-control": control,
    "trimtab-gateway": gateway,
    "trimtab-worker": worker,
}
INSTALLER = ROOT / "deploy" / "bare-metal" / "install.sh"
BEFORE = {"sudo", "exec", "time", "env", "$", "if", "then", "!", "@"}
"""What a command may stand behind."""
ELSEWHERE = {"kubectl", "docker", "podman", "systemd-run", "ssh", "runuser", "xargs"}
"""Who run a command that stands after `--`."""
OPERATOR = re.compile(r"[|&;()]+")
STANDS = re.compile(r"[A-Z][A-Z0-9_]*|.*(…|\.\.\.|[<>{}$]).*|.*\b[A-Z]{2,}\b.*|[A-Z]")
ASSIGNED = re.compile(r"([a-z_]+\.[a-z_]+)=(.*)", re.DOTALL)
CHECKED = (click.Choice, click.types.IntParamType, click.types.FloatParamType, click.types.FuncParamType)


def faults(typed: str, *, whole: bool) -> list[str]:
    """What is wrong with the commands of one line. `whole`: it is meant to be typed as it is, so nothing may be missing either."""
    found = []
    for each in _alternatives(typed):
        if not _is_ours(each):
            continue
        try:
            simple = list(_simple(each))
        except ValueError as e:
            found.append(f"no shell takes it: {e}")
            continue
        for words in simple:
            found += _command(words, whole)
    return found


def count(typed: str) -> int:
    """Commands of ours in a line; none in one that no shell takes."""
    try:
        return sum(bool(_named(words)) for words in _simple(typed)) if _is_ours(typed) else 0
    except ValueError:
        return 0


def options() -> set[str]:
    """Every option that any command of ours has."""
    every = [each for command in (cli, *PROCESSES.values()) for each in _all(command)]
    return {*installers(), *(said for each in every for p in each.params for said in _said(p))}


@cache
def installers() -> frozenset[str]:
    """Options of the script that installs on machines with systemd, by its own help."""
    usage = INSTALLER.read_text().partition("<<'HELP'\n")[2].partition("\nHELP\n")[0]
    return frozenset({"--help", *re.findall(r"--[a-z][a-z-]*", usage)})


def _said(parameter: click.Parameter) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts] if isinstance(parameter, click.Option) else []


def _all(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _all(inner)


def _is_ours(typed: str) -> bool:
    return bool(re.search(r"(^|[\s/;&|('\"])(trimtab(-\w+)?|make|python3?|install\.sh)\s+\S", typed))


def _alternatives(typed: str) -> list[str]:
    """`policy pin|unpin FIELD` is two commands, and so on."""
    found = re.search(r"(?<![\w-])[a-z][\w-]*(?:\|[a-z][\w-]*)+", typed)
    if found is None or " | " in typed:
        return [typed]
    return [each for word in found[0].split("|") for each in _alternatives(typed.replace(found[0], word, 1))]


def _simple(typed: str) -> Iterator[list[str]]:
    """The simple commands of a line, without comment, redirections and square brackets."""
    lexer = shlex.shlex(re.sub(r"(^|\s)#.*$|\d>&\d", "", typed), posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    skip = False
    for word in lexer:
        if set(word) <= set("<>&") and set(word) & set("<>"):
            skip = True
        elif skip:
            skip = False
        elif OPERATOR.fullmatch(word):
            yield words
            words = []
        elif word.strip("[]"):
            words.append(word.strip("[]") if word.startswith("[-") or words else word)
    yield words


def _named(words: list[str]) -> list[str]:
    """From the program on; empty where it is none of ours."""
    while words and (words[0] in BEFORE or re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL)):
        words = words[1:]
    if words and words[0] in ELSEWHERE and "--" in words:
        return _named(words[words.index("--") + 1 :])
    name = words[0].rpartition("/")[2] if words else ""
    ours = name in PROGRAMS or name in ("make", INSTALLER.name) or (name in ("python", "python3") and "-m" in words[:2])
    return [name, *words[1:]] if ours else []


def _command(words: list[str], whole: bool) -> list[str]:
    named = _named(words)
    if not named:
        return []
    program, *rest = named
    if program == "make":
        return [f"make has no target {word}" for word in rest if _is_target(word) and word not in targets()]
    if program == INSTALLER.name:
        said = [word.partition("=")[0] for word in rest if word.startswith("--")]
        return [f"{program} has no option {word}" for word in said if word not in installers()]
    if program in PROGRAMS:
        return _taken(PROGRAMS[program], rest, program, whole)
    module, *given = rest[1:] or [""]
    if module in PROCESSES:
        return _taken(PROCESSES[module], given, f"python -m {module}", whole)
    ours = module.partition(".")[0] in {"trimtab", "services", "controlplane", "trimtab_cli", "tests", "tools"}
    return [f"there is no module {module}"] if ours and not _is_module(module) else []


def _is_target(word: str) -> bool:
    return not word.startswith("-") and "=" not in word and not STANDS.fullmatch(word)


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z0-9][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def _taken(command: click.Command, words: list[str], path: str, whole: bool) -> list[str]:
    """What `command` says of these words."""
    context = click.Context(command, info_name=path)
    if command is PROGRAMS["trimtab"] and words[:1] == ["up"] and "--" in words:
        cut = words.index("--")
        return _taken(command, words[:cut], path, whole) + _taken(worker, words[cut + 1 :], "trimtab up --", whole)
    if words[:1] == ["…"]:
        known = {said for each in _all(command) for p in each.params for said in _said(p)}
        return [f"{path} … has no option {word}" for word in words if word.startswith("--") and word not in known]
    if not isinstance(command, click.Group):
        words = [word for word in words if word not in ("…", "...")]
    if {"-h", "--help"} & set(words):
        words = [word for word in words if word not in ("-h", "--help")]
        whole = False
    try:
        given, rest, _ = command.make_parser(context).parse_args(list(words))
    except click.BadOptionUsage as e:
        if not whole and words[-1].startswith("-"):
            # It is the option that is spoken of, not a value of it.
            return _taken(command, [*words, "VALUE"], path, whole)
        return [f"{path}: {e.format_message()}"]
    except click.NoSuchOption as e:
        return [f"{path} has no option {e.option_name}"]
    except click.UsageError as e:
        return [f"{path}: {e.format_message()}"]
    found = [
        f"{path}: {fault}" for p in command.params for fault in _values(p, given.get(p.name or ""), context, whole)
    ]
    if not isinstance(command, click.Group):
        found += [f"{path} takes no {word!r}" for word in rest]
        return found + [f"{path}: {fault}" for word in words for fault in _assignment(word)]
    if not rest:
        return found + ([f"{path}: a verb is missing"] if whole and not command.invoke_without_command else [])
    name, *more = rest
    if STANDS.fullmatch(name):
        return found
    inner = command.get_command(context, name)
    return found + ([f"{path} has no verb {name}"] if inner is None else _taken(inner, more, f"{path} {name}", whole))


def _values(parameter: click.Parameter, given: object, context: click.Context, whole: bool) -> Iterator[str]:
    typed = [x for x in (given if isinstance(given, list | tuple) else [given]) if isinstance(x, str)]
    if not typed and whole and parameter.required:
        yield f"{parameter.human_readable_name} is missing"
    for value in typed:
        if isinstance(parameter.type, CHECKED) and not STANDS.fullmatch(value):
            try:
                parameter.type.convert(value, parameter, context)
            except click.UsageError as e:
                yield e.format_message()


def _assignment(word: str) -> Iterator[str]:
    """A field of the policy, or a setting of a process, and the value that it is given."""
    found = ASSIGNED.fullmatch(word)
    if found is None:
        return
    path, value = found[1], found[2]
    section, _, key = path.partition(".")
    if path in FIELDS:
        try:
            if value != "default" and not STANDS.fullmatch(value):
                parse(path, value)
        except PolicyRefused as e:
            yield e.message
    elif section not in SECTIONS or key not in SECTIONS[section].__dataclass_fields__:
        yield f"there is no field or setting {path}"
