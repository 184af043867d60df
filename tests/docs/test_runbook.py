"""What docs/operations.md tells an operator to type, in its pages for a stranger and for each alert, is a command that the CLI takes."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from tests.docs.expressions import ROOT
from trimtab.policy import parse
from trimtab_cli.__main__ import VERBS, cli

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
CHAPTERS = ("Run, observe, change, roll back", "What each alert means")
STANDS_FOR = {"W": "w0", "node/W": "node/w0", "REVISION": "41", "ID": "5f0c"}


def commands() -> list[str]:
    """In code spans and in blocks, once each; a comment after a command is for people."""
    found = []
    for chapter in CHAPTERS:
        text = OPERATIONS.partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
        spans = re.findall(r"(?<!`)`(trimtab [^`]+)`(?!`)", text)
        found += [" ".join(typed.split()) for typed in [*spans, *re.findall(r"^trimtab .*$", text, re.MULTILINE)]]
    return sorted({re.sub(r"\s+# .*$", "", typed) for typed in found})


def words(typed: str) -> list[str]:
    return [STANDS_FOR.get(word, word.replace("NAME", "batch")) for word in shlex.split(typed)[1:]]


def test_there_are_commands_to_try():
    assert len(commands()) > 30


@pytest.mark.parametrize("typed", commands())
def test_a_command_is_one_that_the_cli_takes(typed):
    context = cli.make_context("trimtab", words(typed))
    while isinstance(group := context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        if not rest and group.invoke_without_command:
            return
        name, command, rest = group.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("typed", [c for c in commands() if c.startswith("trimtab policy set ")])
def test_a_change_is_one_that_the_policy_takes(typed):
    changes = [word.split("=", 1) for word in words(typed)[2:] if "=" in word]
    assert changes
    for path, value in changes:
        if value != "default":
            parse(path, value)


def test_every_verb_that_is_named_is_there():
    assert {words(typed)[0] for typed in commands()} <= set(VERBS)
