"""Earlier policies: pure first, then as a user types the verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane import cli_history, render
from controlplane.history import between, revision
from controlplane.spec import Spec
from tests.controlplane.mesh import FakeNode
from tests.controlplane.shell import Shell
from trimtab.errors import InvalidRequest
from trimtab.policy import Change
from trimtab.snapshot import Limits, Pin, Scope, ScopeKind
from trimtab.v1 import admin_pb2


def test_what_differs_between_two_specs_is_told_as_a_change_is() -> None:
    slow = Scope(ScopeKind.POOL, ("slow",))
    first = Spec({"batch.active": 8}, {slow: {"batch.active": 4}})
    last = Spec({"paths.hot_below": 100}, {}, (Pin("batch.active", "ada", ""),))
    assert between(first, last) == (
        Change("batch.active", 8, None),
        Change("paths.hot_below", None, 100),
        Change("batch.active", 4, None, "pool/slow"),
        Change("batch.active", "free", "pinned", "pin"),
    )
    assert between(first, first) == ()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("x", "no revision"),
        ("-1", "no revision"),
        ("1.x", "no revision"),
        ("2.3", "no revision 2.3"),
        ("0", "no revision 1.0"),
        ("8", "newest is 1.7"),
    ],
)
def test_a_revision_that_there_is_not_is_refused(said: str, why: str) -> None:
    assert (revision("7", 1, 7), revision("1.2", 2, 7)) == ((1, 7), (1, 2))
    with pytest.raises(InvalidRequest, match=why):
        revision(said, 1, 7)


@pytest.mark.parametrize("said", ["0.1", "0.0", "1.0", "1.99999999999999999999999", "9" * 5000])
def test_a_place_that_never_was_is_taken_for_no_other(said: str) -> None:
    """On the wire epoch 0 is the present one."""
    with pytest.raises(InvalidRequest):
        revision(said, 2, 9)


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
        {"field": "batch.active", "scope": "", "before": 8, "after": None},
        {"field": "paths.hot_below", "scope": "", "before": None, "after": 100},
    ]
    assert (await shell.json("policy", "diff", "3", "2"))["changes"][0] == {
        "field": "batch.active",
        "scope": "",
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
    real = cli_history._at

    async def meanwhile(client: Any, said: str) -> Any:
        found = await real(client, said)
        await client.set_policy({"batch.active": "9"}, author="somebody else")
        return found

    monkeypatch.setattr(cli_history, "_at", meanwhile)
    result = await shell("policy", "rollback", "1")
    assert result.exit_code == 4, "in conflict, and nothing is changed"
    assert (await shell.json("policy", "show", "3"))["fields"] == {"batch.active": 9}


async def test_a_revision_that_there_is_not_ends_the_verb(shell: Shell) -> None:
    result = await shell("policy", "show", "99")
    assert result.exit_code not in (0, 1)
    assert "the newest is 1.1" in result.output


async def test_a_revision_that_is_not_told_any_more_names_those_that_are(shell: Shell) -> None:
    for active in ("8", "9"):
        await shell("policy", "set", f"batch.active={active}")
    store: Any = shell.mesh.plane.replica.store
    store._past.popleft()
    result = await shell("policy", "rollback", "1")
    assert result.exit_code == 2
    assert "does not tell the policy as of 1.1; the newest that it tells are 1.3, 1.2" in result.output


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


async def test_explain_tells_of_a_node_that_can_not_take_the_policy_too(shell: Shell) -> None:
    await shell("policy", "set", "batch.active=32")
    shell.mesh.start_node(FakeNode(shell.mesh.address, "w1", limits=Limits(max_num_seqs=16)))
    await shell.mesh.until(lambda fleet: "w1" in fleet and fleet["w1"].refusal is not None)
    found = await shell.json("policy", "explain", "batch.active")
    assert (found["nodes"]["w0"], found["nodes"]["w1"]["value"]) == ({"value": 32, "source": "spec"}, None)
    assert "16" in found["nodes"]["w1"]["error"]
    said = (await shell("policy", "explain", "batch.active")).stdout
    assert "  w0: 32 requests (spec)" in said and f"  w1: {found['nodes']['w1']['error']}" in said


def test_what_the_leader_writes_in_a_persons_name_is_that_persons() -> None:
    by_leader = {"author": "ada", "term": 4, "written_unix_ms": 1}
    of_person, of_controller, of_older = (
        admin_pb2.PolicyHistoryEntry(kind=kind, **by_leader)
        for kind in (admin_pb2.HISTORY_KIND_PERSON, admin_pb2.HISTORY_KIND_CONTROLLER, 0)
    )
    assert [render.by_controller(e) for e in (of_person, of_controller, of_older)] == [False, True, True]
    assert "  ada (by the leader, term 4)" in render.history_text([of_person])
    of_controller.author = "controller/batch"
    assert "  controller batch (term 4)" in render.history_text([of_controller])


POLICY_FILE = """
fields:
  batch: {active: 8}
overlays:
  - pool: slow
    fields: {batch: {active: 4}}
pins: [paths.hot_below]
"""


async def test_a_file_is_applied_shown_and_read_again(shell: Shell, tmp_path: Path) -> None:
    await shell("policy", "set", "batch.hard_cap=4")
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY_FILE)
    tried = await shell("policy", "apply", "-f", str(file), "--dry-run")
    assert (tried.exit_code, "nothing was written" in tried.stdout) == (0, True)
    done = await shell.json("policy", "apply", "-f", str(file), "--author", "ada")
    assert [(c["scope"], c["field"], c["before"], c["after"]) for c in done["changes"]] == [
        ("", "batch.active", None, 8),
        ("", "batch.hard_cap", 4, None),
        ("pool/slow", "batch.active", None, 4),
        ("pin", "paths.hot_below", "free", "pinned"),
    ]
    shown = await shell.json("policy", "show")
    assert shown["overlays"] == [{"scope": "pool/slow", "fields": {"batch.active": 4}}]
    assert [(p["field"], p["author"]) for p in shown["pins"]] == [("paths.hot_below", "ada")]
    file.write_text((await shell("policy", "show", "--yaml")).stdout)
    again = await shell("policy", "apply", "-f", str(file))
    assert (again.exit_code, "nothing to change" in again.stdout) == (0, True)
    await shell("policy", "set", "batch.active=9")
    late = await shell("policy", "apply", "-f", str(file))
    assert (late.exit_code, "somebody else" in late.output) == (4, True)


async def test_a_bad_file_writes_nothing_and_names_its_faults(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("fields: {batch: {activ: 8}}\nmore: 1\n")
    result = await shell("policy", "apply", "-f", str(file))
    assert result.exit_code == 2
    assert "did you mean batch.active?" in result.output
    assert "more: is unknown" in result.output
    assert (await shell.json("policy", "show"))["identity"]["revision"] == 1


async def test_a_pool_has_fields_of_its_own(shell: Shell) -> None:
    result = await shell("policy", "set", "batch.active=4", "--for", "pool/slow")
    assert "pool/slow: batch.active: none of its own → 4" in result.stdout
    assert (await shell.json("policy", "get", "batch.active", "--node", "w0"))["fields"]["batch.active"]["value"] == 48
    await shell("policy", "set", "batch.active=5", "--for", "node/w0")
    here = (await shell.json("policy", "get", "batch.active", "--node", "w0"))["fields"]["batch.active"]
    assert (here["value"], here["source"]) == (5, "overlay node/w0 (node)")
    wrong = await shell("policy", "set", "batch.active=4", "--for", "slow")
    assert (wrong.exit_code, "pool/NAME" in wrong.output) == (2, True)


async def test_a_pin_is_set_shown_and_taken_away(shell: Shell) -> None:
    pinned = await shell("policy", "pin", "batch.active", "--reason", "mine", "--author", "ada")
    assert "pin: batch.active: free → pinned" in pinned.stdout
    assert "pinned by ada: batch.active" in (await shell("policy", "show")).stdout
    assert "pin: batch.active" in (await shell("policy", "history")).stdout
    again = await shell("policy", "pin", "batch.active")
    assert (again.exit_code, "nothing to change" in again.stdout) == (0, True)
    assert (await shell("policy", "unpin", "batch.active")).exit_code == 0
    assert (await shell.json("policy", "show"))["pins"] == []


async def test_a_rollback_brings_overlays_and_pins_back(shell: Shell) -> None:
    await shell("policy", "set", "batch.active=4", "--for", "pool/slow")
    await shell("policy", "pin", "batch.active")
    await shell("policy", "rollback", "1")
    assert (await shell.json("policy", "show"))["overlays"] == []
    await shell("policy", "rollback", "3")
    shown = await shell.json("policy", "show")
    assert (len(shown["overlays"]), len(shown["pins"])) == (1, 1)


async def test_a_schema_is_printed(shell: Shell) -> None:
    from click.testing import CliRunner

    found = CliRunner().invoke(cli_history.policy, ["schema"])
    assert '"$schema"' in found.stdout
