"""Backup and restore of what people own in the store: as a value, as verbs, and after the store was lost with everything in it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import pytest
import redis.asyncio
from click.testing import CliRunner, Result

from controlplane.backup import Backup, Forced, policy_of, read, spec_of, write
from controlplane.gatekeeper import AccessFile
from controlplane.spec import Spec
from controlplane.store import Stored, Write
from controlplane.store.memory import MemoryStore
from controlplane.store.redis import RedisStore
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh
from tests.controlplane.shell import Shell
from tests.controlplane.test_access import a_plane
from trimtab.codec import decode_document
from trimtab.errors import InvalidRequest, PolicyRefused, StoreUnavailable
from trimtab.policy import POLICY_SCHEMA
from trimtab.snapshot import Document, Identity, Limits, Overlay, Pin, Scope, ScopeKind
from trimtab_cli.__main__ import cli

SLOW = Scope(ScopeKind.POOL, ("slow",))
SPEC = Spec(
    {"batch.active": 8, "isolate.tenants": ("acme", "ünï"), "memory.pressure_threshold": 0.00005},
    {SLOW: {"preemption.mode": "none"}},
    (Pin("batch.active", "ada", "the vendor looks at it"),),
)
DOCUMENT = Document(SPEC.base, (Overlay(str(SLOW), SLOW, SPEC.overlays[SLOW]),), pins=SPEC.pins)
MINUTE_MS = 60_000


def a_backup(**changed: object) -> Backup:
    made = Backup(
        made_unix_ms=1_000,
        identity={"epoch": 1, "revision": 7, "sha256": "00"},
        spec_version=6,
        author="ada",
        reason="evening",
        policy=policy_of(DOCUMENT),
        breakers=(Forced("w0", "open", 601_000, "ada", "bad card"),),
        history=[{"author": "ada", "changes": []}],
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def fault(text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(text)
    (violation,) = caught.value.violations
    return violation.description


def test_what_is_written_is_read_back_and_gives_the_spec_that_there_was() -> None:
    found = read(write(a_backup()))
    assert found == a_backup()
    assert (spec_of(found), found.place) == (SPEC, "1.7")
    assert read(write(a_backup(history=None))).history is None


def test_half_a_file_is_no_policy() -> None:
    text = write(a_backup())
    assert "cut short" in fault(text[: len(text) // 2])
    assert "cut short" in fault("")


def test_a_file_that_was_changed_by_hand_is_refused_with_the_way_to_use_it() -> None:
    changed = write(a_backup()).replace('"active": 8', '"active": 9')
    assert "jq .policy FILE | trimtab policy apply -f -" in fault(changed)
    without = json.loads(write(a_backup()))
    del without["policy"]["pins"]
    assert "its digest differs" in fault(json.dumps(without))


def test_a_file_of_another_kind_or_of_a_newer_build_says_so() -> None:
    assert fault('{"fields": {}}') == "is not what `trimtab backup` writes"
    assert fault("[]") == "is not what `trimtab backup` writes"
    newer = json.loads(write(a_backup())) | {"format": 2}
    assert fault(json.dumps(newer)).startswith("has format 2, this build reads 1")


def test_a_policy_with_fields_that_this_build_does_not_know_is_not_backed_up_by_halves() -> None:
    with pytest.raises(PolicyRefused) as caught:
        policy_of(replace(DOCUMENT, needs_schema=POLICY_SCHEMA + 1))
    assert caught.value.cause == "SCHEMA_TOO_OLD"


def test_a_breaker_is_forced_for_what_is_left_of_its_time_and_never_for_longer_than_one_can_be() -> None:
    forced = Forced("w0", "open", 601_000, "ada", "")
    assert [forced.left_ms(now) for now in (1_000, 600_999, 601_000, 9_000_000)] == [600_000, 1, 0, 0]
    assert replace(forced, until_unix_ms=10**12).left_ms(0) == 86_400_000


async def typed(mesh: Mesh, *words: str) -> Result:
    """A verb as a person types it, the control plane's address added."""
    return await asyncio.to_thread(CliRunner().invoke, cli, [*words, "--control", mesh.address])


def spec_now(mesh: Mesh) -> Spec:
    from controlplane.spec import spec_of as of_document

    stored: Stored | None = mesh.plane.replica.newest.value
    assert stored is not None
    return of_document(decode_document(stored.snapshot.document))


async def set_up(mesh: Mesh) -> None:
    """A policy of each kind, and a breaker that is forced."""
    for words in (
        ("policy", "set", "batch.active=8", "isolate.tenants=acme", "--reason", "evening"),
        ("policy", "set", "batch.hard_cap=4", "--for", "node/w0"),
        ("policy", "pin", "batch.active", "--author", "ada", "--reason", "hands off"),
        ("breaker", "open", "w0", "--for", "30m", "--reason", "bad card"),
    ):
        result = await typed(mesh, *words)
        assert result.exit_code == 0, result.output


async def test_a_store_that_lost_everything_gets_back_what_people_had_set_and_nodes_come_to_it(
    quiet: None, valkey_address: str, tmp_path: Path
) -> None:
    name, file = f"backup-{uuid4().hex[:8]}", str(tmp_path / "mesh.json")
    async with a_mesh(RedisStore(valkey_address, name)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        await node.holds(1, 1)
        await set_up(mesh)
        await node.holds(1, 4)
        wanted = spec_now(mesh)
        made = await typed(mesh, "backup", file)
        assert (made.exit_code, made.stdout) == (
            0,
            f"{file}: policy 1.4, version 3; fields: 2, overlays: 1, pins: 1, forced breakers: 1, lines of history: 4\n",
        )

        # The store and everybody who knew of the policy but the node, which has no more than its bytes' identity to tell.
        await mesh.plane.stop()
        async with redis.asyncio.from_url(valkey_address) as server:
            keys = await server.keys(f"tt:{{{name}}}:*")
            assert keys
            await server.delete(*keys)
        await mesh.restart(store=RedisStore(valkey_address, name))
        await node.holds(2, 1)
        assert (spec_now(mesh), node.active[-1]) == (Spec(), 48), "what was set is lost without a backup"

        tried = await typed(mesh, "restore", file, "--dry-run")
        assert tried.exit_code == 0, tried.output
        assert "batch.active: 48 (default) → 8" in tried.stdout
        assert "breaker of w0: would be forced open for " in tried.stdout
        assert node.held.value == Identity(2, 1)

        back = await typed(mesh, "restore", file)
        assert back.exit_code == 0, back.output
        assert "w0: applied in" in back.stdout
        await node.holds(2, 2)
        assert (spec_now(mesh), node.active[-1]) == (wanted, 8)
        (worker,) = (await mesh.admin.breakers()).workers
        assert (worker.forced.forced, "bad card" in worker.forced.reason) == (1, True)
        newest = (await mesh.admin.history(1)).entries[0]
        assert newest.reason.startswith("restored: policy 1.4 of a backup of 20")
        again = await typed(mesh, "restore", file)
        assert (again.exit_code, "nothing to change" in again.stdout) == (0, True)


async def test_a_restore_takes_back_what_was_set_since_and_is_a_line_of_the_history(
    shell: Shell, tmp_path: Path
) -> None:
    file = str(tmp_path / "mesh.json")
    await set_up(shell.mesh)
    wanted = spec_now(shell.mesh)
    assert (await typed(shell.mesh, "backup", file)).exit_code == 0
    await typed(shell.mesh, "policy", "set", "batch.active=2", "serial.above=9000", "--reason", "oops")
    held = shell.mesh.nodes[0].held.value
    stale = await typed(shell.mesh, "restore", file, "--expect-version", "1")
    assert (stale.exit_code, shell.mesh.nodes[0].held.value) == (4, held)
    back = await typed(shell.mesh, "restore", file, "--reason", "as it was", "--json")
    answer = json.loads(back.stdout)
    assert (back.exit_code, [c["field"] for c in answer["changes"]]) == (0, ["batch.active", "serial.above"])
    assert [(b["node_id"], b["outcome"]) for b in answer["breakers"]] == [("w0", "forced")]
    assert spec_now(shell.mesh) == wanted
    assert (await shell.mesh.admin.history(1)).entries[0].reason == "as it was"


async def test_what_a_connected_engine_can_not_do_is_refused_whole(shell: Shell, tmp_path: Path) -> None:
    file = str(tmp_path / "mesh.json")
    await typed(shell.mesh, "policy", "set", "batch.active=60")
    await typed(shell.mesh, "backup", file)
    await typed(shell.mesh, "policy", "set", "batch.active=default")
    node = FakeNode(shell.mesh.address, "w1", limits=Limits(32, 8192))
    await shell.mesh.start_node(node).holds(1, 3)
    back = await typed(shell.mesh, "restore", file)
    assert (back.exit_code, "w1" in back.stderr) == (4, True)
    assert spec_now(shell.mesh) == Spec()


async def test_a_breaker_of_a_worker_that_is_not_there_is_named_and_the_policy_holds_all_the_same(
    quiet: None, tmp_path: Path
) -> None:
    file = str(tmp_path / "mesh.json")
    async with a_mesh() as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        await set_up(mesh)
        await typed(mesh, "backup", file)
        wanted = spec_now(mesh)
    async with a_mesh() as other:
        back = await typed(other, "restore", file)
        assert (back.exit_code, "breaker of w0: NOT FORCED open: no worker is called 'w0'" in back.stdout) == (5, True)
        assert spec_now(other) == wanted


async def test_a_viewer_may_back_up_and_an_operator_restore(quiet: None, tmp_path: Path) -> None:
    access, file = tmp_path / "access.toml", str(tmp_path / "mesh.json")
    tokens = {role: f"{role}-of-this-mesh-0123456789" for role in ("viewer", "operator")}
    said = [
        f'[[token]]\nname = "{role}"\nrole = "{role}"\nsha256 = "{sha256(token.encode()).hexdigest()}"\n'
        for role, token in tokens.items()
    ]
    access.write_text("\n".join(said))
    async with a_plane(None, AccessFile(access)) as plane:

        async def by(role: str, *words: str) -> Result:
            env = {"TRIMTAB_TOKEN": tokens[role]}
            return await asyncio.to_thread(CliRunner(env=env).invoke, cli, [*words, "--control", plane.address])

        assert (await by("operator", "policy", "set", "batch.active=8")).exit_code == 0
        assert (await by("viewer", "backup", file)).exit_code == 0
        assert (await by("operator", "policy", "set", "batch.active=2")).exit_code == 0
        denied = await by("viewer", "restore", file)
        assert (denied.exit_code, (await plane.replica.store.history(1))[0].author) == (4, "viewer")
        assert (await by("operator", "restore", file)).exit_code == 0
        newest = (await plane.replica.store.history(1))[0]
        assert (newest.author, [(c.field, c.after) for c in newest.changes]) == ("operator", [("batch.active", 8)])


async def test_the_policy_that_is_cut_out_of_a_backup_is_a_file_that_apply_takes(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "mesh.json"
    await set_up(shell.mesh)
    made = await typed(shell.mesh, "backup", str(file), "--json")
    facts = json.loads(made.stdout)
    assert (facts["fields"], facts["overlays"], facts["pins"], facts["breakers"], facts["rollouts"]) == (2, 1, 1, 1, [])
    wanted = spec_now(shell.mesh)
    await typed(shell.mesh, "policy", "set", "batch.active=2")
    cut = json.dumps(json.loads(file.read_text())["policy"], indent=2, ensure_ascii=False)
    words = ["policy", "apply", "-f", "-", "--control", shell.mesh.address]
    result = await asyncio.to_thread(CliRunner().invoke, cli, words, cut)
    assert (result.exit_code, spec_now(shell.mesh)) == (0, wanted)


async def test_a_backup_writes_over_nothing_unless_it_is_told_to(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "mesh.json"
    assert (await typed(shell.mesh, "backup", str(file))).exit_code == 0
    first = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    await typed(shell.mesh, "policy", "set", "batch.active=8")
    refused = await typed(shell.mesh, "backup", str(file))
    assert (refused.exit_code, "--force" in refused.stderr, file.read_text() == first) == (2, True, True)
    assert (await typed(shell.mesh, "backup", str(file), "--force")).exit_code == 0
    assert read(file.read_text()).policy == {"fields": {"batch": {"active": 8}}}
    shown = await typed(shell.mesh, "backup", "-")
    assert read(shown.stdout).policy == {"fields": {"batch": {"active": 8}}}


async def a_copy_of(store: MemoryStore) -> MemoryStore:
    """As a copy of its data would be: what it holds now, and none of what comes later."""
    stored = await store.load()
    assert stored is not None
    copy = MemoryStore()
    await copy.put(Write(stored, Identity(), "copied"))
    return copy


async def test_an_older_copy_of_the_store_holds_where_all_replicas_were_stopped_for_it(quiet: None) -> None:
    store = MemoryStore()
    async with a_mesh(store) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        await node.holds(1, 1)
        await typed(mesh, "policy", "set", "batch.active=8")
        copy = await a_copy_of(store)
        await typed(mesh, "policy", "set", "batch.active=5")
        await node.holds(1, 3)
        await mesh.restart(store=copy)
        await node.holds(2, 1)
        assert (node.active[-1], spec_now(mesh).base) == (8, {"batch.active": 8})


@pytest.mark.slow
async def test_a_replica_that_was_not_stopped_takes_an_older_copy_for_a_loss(quiet: None, valkey_address: str) -> None:
    name = f"older-{uuid4().hex[:8]}"
    async with a_mesh(RedisStore(valkey_address, name)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        await node.holds(1, 1)
        await typed(mesh, "policy", "set", "batch.active=8")
        async with redis.asyncio.from_url(valkey_address) as server:
            keys = await server.keys(f"tt:{{{name}}}:*")
            dumped = {key: await server.dump(key) for key in keys}
            await typed(mesh, "policy", "set", "batch.active=5")
            await node.holds(1, 3)
            async with server.pipeline(transaction=True) as at_once:
                at_once.delete(*(await server.keys(f"tt:{{{name}}}:*")))
                for key, value in dumped.items():
                    at_once.restore(key, 0, value)
                await at_once.execute()
        await node.holds(2, 1)
        assert (node.active[-1], spec_now(mesh).base) == (5, {"batch.active": 5})


class Away(MemoryStore):
    """Takes writes, and tells nothing of the past."""

    async def history(self, limit: int, *, controllers: bool = False) -> list:  # type: ignore[type-arg]
        raise StoreUnavailable("away")


async def test_without_its_store_a_mesh_can_be_backed_up_all_but_for_the_history(quiet: None, tmp_path: Path) -> None:
    file = tmp_path / "mesh.json"
    async with a_mesh(Away()) as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        await set_up(mesh)
        made = await typed(mesh, "backup", str(file))
        assert (made.exit_code, "the store is away" in made.stderr) == (0, True)
        found = read(file.read_text())
        assert (spec_of(found), found.history) == (spec_now(mesh), None)
