"""Earlier policies, told from the log: pure first, then as a user types the verbs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import cli_history
from controlplane.history import Net, as_of, net, revision
from tests.controlplane.shell import Shell
from trimtab.errors import InvalidRequest


def entry(number: int, *changes: tuple[str, str, str], epoch: int = 1, refused: str = "") -> Any:
    identity = SimpleNamespace(epoch=epoch, revision=number)
    found = [SimpleNamespace(field=f, before=b, after=a) for f, b, a in changes]
    return SimpleNamespace(identity=identity, changes=found, refused_because=refused)


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["default", "1", "2", "3"]), min_size=1), max_size=12
    )
)
def test_what_was_set_at_a_revision_is_told_from_what_came_after(writes: list[dict[str, str]]) -> None:
    fields: dict[str, str] = {}
    past, entries = [dict(fields)], []
    for number, write in enumerate(writes, 2):
        changes = [(f, fields.get(f, "default"), said) for f, said in write.items()]
        entries.insert(0, entry(number, *changes))
        entries.insert(0, entry(number, ("a", "1", "9"), refused="too much"))
        fields = {f: said for f, said in {**fields, **write}.items() if said != "default"}
        past.append(dict(fields))
    newest = len(writes) + 1
    for number in range(1, newest + 1):
        assert as_of(fields, net(entries, 1, number, newest)) == past[number - 1]


def test_a_field_that_came_back_does_not_differ() -> None:
    entries = [entry(3, ("a", "2", "1"), ("b", "1", "2")), entry(2, ("a", "1", "2"))]
    assert net(entries, 1, 1, 3) == [Net("b", "1", "2")]


def test_a_log_that_was_cut_says_how_far_it_goes() -> None:
    entries = [entry(n, ("a", str(n - 1), str(n))) for n in (9, 8, 7)]
    assert net(entries, 1, 6, 9) == [Net("a", "6", "9")]
    with pytest.raises(
        InvalidRequest, match=r"no longer reaches back to revision 1\.3; the oldest that it can tell is 1\.6"
    ):
        net(entries, 1, 3, 9)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("x", "no revision"),
        ("-1", "no revision"),
        ("1.x", "no revision"),
        ("2.3", "epoch 2"),
        ("0", "no revision 1.0"),
        ("8", "newest is 1.7"),
    ],
)
def test_a_revision_that_there_is_not_is_refused(said: str, why: str) -> None:
    assert (revision("7", 1, 7), revision("1.2", 1, 7)) == (7, 2)
    with pytest.raises(InvalidRequest, match=why):
        revision(said, 1, 7)


async def test_show_diff_and_rollback(shell: Shell) -> None:
    assert cli_history.policy.commands.keys() >= {"show", "diff", "rollback", "set"}
    for words in (
        ("batch.active=8", "isolate.tenants=acme,globex"),
        ("batch.active=4", "paths.hot_below=100"),
        ("batch.active=default",),
    ):
        assert (await shell("policy", "set", *words)).exit_code == 0
    assert (await shell.json("policy", "show", "2"))["fields"] == {
        "batch.active": 8,
        "isolate.tenants": ["acme", "globex"],
    }
    assert "batch.active=4" in (await shell("policy", "show", "1.3")).stdout
    assert (await shell.json("policy", "diff", "2"))["changes"] == [
        {"field": "batch.active", "before": 8, "after": None},
        {"field": "paths.hot_below", "before": None, "after": 100},
    ]
    assert (await shell.json("policy", "diff", "3", "2"))["changes"][0] == {
        "field": "batch.active",
        "before": 4,
        "after": 8,
    }
    tried = await shell.json("policy", "rollback", "2", "--dry-run")
    assert not tried["written"]
    done = await shell.json("policy", "rollback", "2", "--reason", "it was better")
    assert done["identity"]["revision"] == 5
    assert (await shell.json("policy", "show", "5"))["fields"] == {
        "batch.active": 8,
        "isolate.tenants": ["acme", "globex"],
    }
    assert (await shell.json("policy", "history", "-n", "1"))[0]["reason"] == "rollback to 1.2: it was better"
    again = await shell("policy", "rollback", "2")
    assert (again.exit_code, "nothing to change" in again.stdout) == (0, True)


async def test_a_rollback_does_not_overwrite_what_somebody_changes_meanwhile(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await shell("policy", "set", "batch.active=8")).exit_code == 0
    real = cli_history._looked_back

    async def meanwhile(client: Any, said: str) -> Any:
        found = await real(client, said)
        await client.set_policy({"batch.active": "9"}, author="somebody else")
        return found

    monkeypatch.setattr(cli_history, "_looked_back", meanwhile)
    result = await shell("policy", "rollback", "1")
    assert result.exit_code == 4, "in conflict, and nothing is changed"
    assert (await shell.json("policy", "show", "3"))["fields"] == {"batch.active": 9}


async def test_a_revision_that_there_is_not_ends_the_verb(shell: Shell) -> None:
    result = await shell("policy", "show", "99")
    assert result.exit_code not in (0, 1)
    assert "the newest is 1.1" in result.output


async def test_explain_says_where_a_value_comes_from_and_who_changed_it(shell: Shell) -> None:
    await shell("policy", "set", "batch.active=8", "paths.hot_below=100", "--author", "ann", "--reason", "fewer")
    await shell("policy", "set", "batch.active=0", "--author", "bob")
    await shell("policy", "set", "paths.hot_below=200", "--author", "cid")
    found = await shell.json("policy", "explain", "batch.active")
    assert (found["value"], found["source"], found["default"]) == (8, "spec", 48)
    assert list(found["nodes"].values()) == [{"value": 8, "source": "spec"}]
    assert [(e["author"], bool(e["refused_because"])) for e in found["history"]] == [("bob", True), ("ann", False)]
    said = (await shell("policy", "explain", "batch.active")).stdout
    assert "48 (default) → 8" in said and "REFUSED" in said
    assert said.count("cid") == 1, "who wrote the policy last, but not its change of another field"
    assert (await shell("policy", "explain", "batch.activ")).exit_code == 2
    assert "nobody has changed it" in (await shell("policy", "explain", "serial.above")).stdout
