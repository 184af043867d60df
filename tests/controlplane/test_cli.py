"""The verbs as a user types them: output, exit codes, and JSON that a program can read."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from controlplane import render
from controlplane.admin.client import AdminClient
from controlplane.cli import fleet
from services.cli import chat
from tests.cli.mesh import FakeGateway, serving
from tests.controlplane.mesh import PATIENCE_S, FakeNode
from tests.controlplane.shell import ROOT, Shell
from trimtab.kit.process import free_port
from trimtab.messages import NodeState
from trimtab.policy import FIELDS
from trimtab.snapshot import Limits

SET_ALL_KINDS = (
    *("batch.active=8", "preemption.mode=none", "memory.pressure_threshold=0.9", "isolate.tenants=acme, globex"),
    "priority.batch_delta=-1",
)


async def test_get_shows_value_unit_source_and_doc_in_80_columns(shell: Shell) -> None:
    await shell("policy", "set", *SET_ALL_KINDS)
    result = await shell("policy", "get")
    assert result.exit_code == 0
    assert "policy 1.2, version 1, by " in result.stdout
    lines = result.stdout.splitlines()
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line[:2] == "  " and line[2] != " "}
    assert set(shown) == set(FIELDS)
    assert shown["batch.active"] == "8 requests spec"
    assert shown["batch.hard_cap"] == "16 requests default"
    assert shown["preemption.mode"] == "none spec"
    assert shown["scheduler.mode"] == "trimtab default"
    assert shown["memory.pressure_threshold"] == "0.9 of the KV cache spec"
    assert shown["isolate.tenants"] == "acme,globex spec"
    assert shown["priority.batch_delta"] == "-1 levels spec"
    doc = lines[next(i for i, line in enumerate(lines) if line.startswith("  batch.active")) + 1]
    assert doc == "      running requests at most, all workloads"
    assert max(map(len, lines)) <= 80


async def test_fields_stand_together_by_part(shell: Shell) -> None:
    lines = (await shell("policy", "get")).stdout.splitlines()
    heads = [line.partition(":")[0] for line in lines[1:] if line and line[0] != " "]
    assert heads == list(dict.fromkeys(path.split(".")[0] for path in FIELDS))
    part = ""
    for line in lines[1:]:
        part = line.partition(":")[0] if line[:1].strip() else part
        if line[:2] == "  " and line[2] != " ":
            assert line.split()[0].startswith(f"{part}.")


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
async def test_get_uses_the_terminal_between_80_and_120_columns(
    shell: Shell, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    await shell("policy", "set", f"isolate.tenants={','.join(f'customer-{i}' for i in range(40))}")
    widest = max(map(len, (await shell("policy", "get")).stdout.splitlines()))
    allowed = max(80, min(120, columns))
    assert allowed - 20 < widest <= allowed


async def test_an_empty_list_is_a_dash_and_nothing_clears_one(shell: Shell) -> None:
    result = await shell("policy", "set", "isolate.tenants=acme")
    assert "isolate.tenants: - (default) → acme" in result.stdout
    result = await shell("policy", "set", "isolate.tenants=")
    assert (result.exit_code, "isolate.tenants: acme → -\n" in result.stdout) == (0, True)
    shown = await shell("policy", "get", "isolate.tenants")
    assert [line.split()[1:] for line in shown.stdout.splitlines() if "isolate.tenants" in line] == [["-", "spec"]]


async def test_json_has_values_of_their_kind_with_bounds_and_choices(shell: Shell) -> None:
    await shell("policy", "set", *SET_ALL_KINDS)
    answer = await shell.json("policy", "get")
    assert list(answer["fields"]) == list(FIELDS)
    said = answer["fields"]
    names = ("kind", "value", "default", "minimum", "maximum", "choices")
    assert [tuple(said[path][name] for name in names) for path in (s.partition("=")[0] for s in SET_ALL_KINDS)] == [
        ("whole", 8, 48, 1, 4096, None),
        ("choice", "none", "conservative", None, None, ["none", "conservative", "aggressive"]),
        ("fraction", 0.9, 0.85, 0.0, 1.0, None),
        ("names", ["acme", "globex"], [], None, None, None),
        ("whole", -1, 0, -2, 2, None),
    ]
    one = await shell.json("policy", "get", "batch.active")
    assert (list(one["fields"]), one["identity"]["revision"]) == (["batch.active"], 2)
    facts = {"unit", "source", "inactive", "hot", "doc"}
    assert set(one["fields"]["batch.active"]) == {*names, *facts}


async def test_thresholds_beyond_a_workers_window_are_inactive(shell: Shell) -> None:
    await shell.mesh.nodes[0].stop()
    await shell.mesh.until(lambda fleet: not fleet["w0"].connected)
    for name, window in (("w1", 4096), ("w2", 8192)):
        node = FakeNode(shell.mesh.address, name, limits=Limits(64, 8192, window))
        await shell.mesh.start_node(node).holds(1, 1)

    async def inactive(*words: str) -> list[str]:
        fields = (await shell.json("policy", "get", *words))["fields"]
        return [path for path, f in fields.items() if f["inactive"]]

    assert await inactive("--node", "w1") == [
        "paths.hot_below", "serial.above", "isolate.from_tokens", "block_plan.mixed_from",
    ]  # fmt: skip
    assert await inactive("--node", "w2") == ["serial.above", "isolate.from_tokens", "block_plan.mixed_from"]
    assert await inactive() == ["serial.above", "isolate.from_tokens", "block_plan.mixed_from"], (
        "what no connected worker acts on"
    )
    result = await shell("policy", "get", "--node", "w1")
    assert "paths.hot_below 4096 tokens default; inactive: beyond the window" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


async def test_what_a_control_plane_of_another_build_does_not_say_is_unknown(shell: Shell) -> None:
    answer = await shell.mesh.admin.get_policy()
    answer.effective.ClearField("memory")
    del answer.sources["memory.pressure_threshold"]
    fields = [FIELDS["memory.pressure_threshold"]]
    assert "  memory.pressure_threshold  ?  this control plane does not know it" in render.policy_text(answer, fields)
    assert render.policy_json(answer, fields)["fields"]["memory.pressure_threshold"]["value"] is None


async def test_a_word_of_a_newer_control_plane_is_an_error_that_says_so(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await shell.mesh.admin.get_policy()
    answer.effective.preemption.mode = 77  # type: ignore[assignment]

    async def newer(self: AdminClient, node_id: str = "") -> object:
        return answer

    monkeypatch.setattr(AdminClient, "get_policy", newer)
    result = await shell("policy", "get")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "preemption.mode holds a word that this build does not know" in result.stderr


async def test_set_says_what_changed_and_who_applied_it(shell: Shell) -> None:
    result = await shell("policy", "set", "batch.active=8", "--reason", "less", "--author", "ada")
    assert result.exit_code == 0
    assert "batch.active: 48 (default) → 8" in result.stdout
    assert "w0: applied in 0.5 ms" in result.stdout
    again = await shell("policy", "set", "batch.active=8")
    assert (again.exit_code, "nothing to change" in again.stdout) == (0, True)
    answer = await shell.json("policy", "set", "batch.active=default")
    assert answer["changes"] == [{"field": "batch.active", "scope": "", "before": 8, "after": None}]
    assert answer["durability"] == {"committed": True, "replicas": 0, "wanted": 0}
    assert "committed" in result.stdout
    assert again.stdout.count("committed") == 0
    assert [(n["node_id"], n["answer"]) for n in answer["nodes"]] == [("w0", "applied")]


async def test_a_scope_that_is_nobodys_is_taken_and_told(shell: Shell) -> None:
    for words in (("--dry-run",), ()):
        result = await shell("policy", "set", "batch.active=8", "--for", "pool/nowhere", *words)
        assert result.exit_code == 0
        assert "nobody is pool/nowhere now (see `trimtab fleet`): it holds for who comes" in result.stdout
    for scope in ("node/w0", "pool/default", "mesh"):
        answer = await shell.json("policy", "set", "batch.active=9", "--for", scope)
        assert answer["changes"] and answer["unmatched_scopes"] == []
    assert (await shell.json("policy", "set", "batch.active=7", "--for", "node/w9"))["unmatched_scopes"] == ["node/w9"]
    gone = await shell.json("policy", "set", "batch.active=default", "--for", "node/w9")
    assert gone["changes"] and gone["unmatched_scopes"] == [], "what is taken away holds for nobody"


async def test_every_kind_of_field_is_set_and_shown_in_the_history(shell: Shell) -> None:
    result = await shell("policy", "set", *SET_ALL_KINDS)
    expected = [
        "batch.active: 48 (default) → 8",
        "isolate.tenants: - (default) → acme,globex",
        "preemption.mode: conservative (default) → none",
        "priority.batch_delta: 0 (default) → -1",
        "memory.pressure_threshold: 0.85 (default) → 0.9",
    ]
    assert (result.exit_code, [x.strip() for x in result.stdout.splitlines() if "→" in x]) == (0, expected)
    history = await shell("policy", "history")
    assert [x.strip() for x in history.stdout.splitlines() if "→" in x] == expected
    newest = (await shell.json("policy", "history"))[0]
    assert [(c["before"], c["after"]) for c in newest["changes"]] == [
        (None, 8),
        (None, ["acme", "globex"]),
        (None, "none"),
        (None, -1),
        (None, 0.9),
    ]


async def test_a_tenant_called_default_can_be_named_and_is_not_taken_for_the_word(shell: Shell) -> None:
    result = await shell("policy", "set", "isolate.tenants=default,")
    assert "isolate.tenants: - (default) → default," in result.stdout
    assert (await shell.json("policy", "get", "isolate.tenants"))["fields"]["isolate.tenants"]["value"] == ["default"]
    assert (await shell.json("policy", "history"))[0]["changes"][0]["after"] == ["default"]
    await shell("policy", "set", "isolate.tenants=default")
    assert (await shell.json("policy", "get", "isolate.tenants"))["fields"]["isolate.tenants"]["source"] == "default"


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("preemption.mode=agressive", "did you mean aggressive?"),
        ("preemption.mode=xyz", "must be one of none, conservative, aggressive, not 'xyz'"),
        ("memory.pressure_threshold=85", "must be between 0 and 1 of the KV cache, not 85"),
        ("memory.pressure_threshold=85%", "must be a number from 0 to 1 of the KV cache, not '85%'"),
        ("priority.batch_delta=3", "must be between -2 and 2 levels, not 3"),
        ("isolate.tenant=acme", "did you mean isolate.tenants?"),
        ("batch.active=32.5", "must be a whole number of requests, not '32.5'"),
    ],
)
async def test_a_refusal_names_field_bound_and_unit(shell: Shell, assignment: str, says: str) -> None:
    result = await shell("policy", "set", assignment)
    # A name that is mistyped is usage; a value that the field does not take is refused.
    code = 4 if assignment.partition("=")[0] in FIELDS else 2
    assert (result.exit_code, assignment.partition("=")[0] in result.stderr, says in result.stderr) == (
        code,
        True,
        True,
    )


async def test_a_long_refusal_wraps_in_the_history(shell: Shell) -> None:
    await shell("policy", "set", "preemption.mode=agressive", "--author", "ada")
    lines = (await shell("policy", "history")).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "did you mean aggressive?" in " ".join(line.strip() for line in lines)


@pytest.mark.parametrize("value", ["0", "-1", "text", "65"])
async def test_a_refused_value_exits_4_says_why_and_is_in_the_history(shell: Shell, value: str) -> None:
    result = await shell("policy", "set", f"batch.active={value}")
    assert result.exit_code == 4
    assert "batch.active" in result.stderr
    assert result.stdout == ""
    history = await shell.json("policy", "history")
    assert history[0]["refused_because"].startswith(f"batch.active={value}")
    assert "REFUSED, nothing changed" in (await shell("policy", "history")).stdout
    assert (await shell.json("policy", "get"))["identity"]["revision"] == 1
    fleet = (await shell("fleet")).stdout
    assert "was refused, nothing changed" in fleet
    assert max(map(len, fleet.splitlines())) <= 80
    assert (await shell.json("fleet"))["last_refused"]["refused_because"].startswith(f"batch.active={value}")
    await shell("policy", "set", "batch.active=7")
    assert (await shell.json("fleet"))["last_refused"] is None


async def test_a_conflict_exits_4_with_its_reason_in_json(shell: Shell) -> None:
    await shell("policy", "set", "batch.active=8")
    result = await shell("policy", "set", "batch.active=9", "--expect-version", "0", "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["reason"], error["found"]) == (4, "CONFLICT", "1")


async def test_a_dry_run_writes_nothing(shell: Shell) -> None:
    result = await shell("policy", "set", "batch.active=8", "--dry-run")
    assert (result.exit_code, "nothing was written" in result.stdout) == (0, True)
    assert (await shell.json("policy", "set", "batch.active=8", "--dry-run"))["written"] is False


async def test_a_worker_that_does_not_answer_in_time_makes_it_partial(shell: Shell) -> None:
    shell.mesh.nodes[0].ready.clear()
    result = await shell("policy", "set", "batch.active=8", "--wait", "50")
    assert (result.exit_code, "w0: no answer yet" in result.stdout) == (5, True)
    assert (await shell("policy", "set", "batch.active=9", "--wait", "0")).exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("policy", "set", "batch.active"),
        ("policy", "set", "batch.active="),
        ("policy", "set", "preemption.mode="),
        ("policy", "set", "isolate.tenants"),
        ("policy", "set", "isolate.tenant="),
        ("policy", "set", "batch.active=1", "batch.active=2"),
        ("policy", "set"),
        ("policy", "get", "batch.activ"),
        ("policy", "get", "--node", "w9"),
        ("policy", "history", "-n", "0"),
    ],
)
async def test_a_mistyped_verb_is_a_usage_error(shell: Shell, words: tuple[str, ...]) -> None:
    assert (await shell(*words)).exit_code == 2


async def test_fleet_shows_nodes_refusals_and_who_is_lost(shell: Shell) -> None:
    await shell("policy", "set", "batch.active=32")
    small = shell.mesh.start_node(FakeNode(shell.mesh.address, "w1", limits=Limits(max_num_seqs=16)))
    await shell.mesh.until(lambda fleet: "w1" in fleet and fleet["w1"].refusal is not None)
    await shell.mesh.nodes[0].stop()
    await shell.mesh.until(lambda fleet: not fleet["w0"].connected)
    result = await shell("fleet")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith("w")}
    assert "LOST" in lines["w0"]
    assert lines["w1"].split()[1:6] == ["worker", "default", "serving", "0/0", "-"]
    assert "! w1 refused policy 1.2 (ABOVE_ENGINE_LIMIT)" in result.stdout
    assert "newest policy: 1.2; store: memory" in result.stdout
    assert (await shell("policy", "get", "--node", "w1")).exit_code == 4
    nodes = {n["node_id"]: n for n in (await shell.json("fleet"))["nodes"]}
    assert (nodes["w0"]["connected"], nodes["w0"]["state"], nodes["w0"]["policy"]["applied"]["revision"]) == (
        False,
        "lost",
        2,
    )
    assert nodes["w1"]["policy"]["refusal"]["field"] == "batch.active"
    await small.stop()


async def test_a_check_of_the_fleet_exits_5_while_a_node_is_behind_refuses_or_is_lost(shell: Shell) -> None:
    first = shell.mesh.nodes[0]
    assert (await shell("fleet", "--check")).exit_code == 0
    first.ready.clear()
    await shell("policy", "set", "batch.active=32", "--wait", "0")
    behind = await shell("fleet", "--check")
    assert (behind.exit_code, behind.stderr) == (5, "check: w0 has not applied policy 1.2 yet\n")
    assert (await shell("fleet")).exit_code == 0
    first.ready.set()
    await shell.mesh.until(lambda fleet: fleet["w0"].applied.revision == 2)
    assert (await shell("fleet", "--check")).exit_code == 0
    small = shell.mesh.start_node(FakeNode(shell.mesh.address, "w1", limits=Limits(max_num_seqs=16)))
    await shell.mesh.until(lambda fleet: "w1" in fleet and fleet["w1"].refusal is not None)
    refused = await shell("fleet", "--check", "--json")
    assert (refused.exit_code, refused.stderr) == (5, "check: w1 refused policy 1.2\n")
    assert len(json.loads(refused.stdout)["nodes"]) == 2
    await small.stop()
    await shell.mesh.until(lambda fleet: not fleet["w1"].connected)
    lost = await shell("fleet", "--check")
    assert (lost.exit_code, lost.stderr) == (5, "check: w1 is lost\n")


async def test_a_check_of_the_fleet_does_not_miss_who_was_drained_but_wants_somebody(shell: Shell) -> None:
    leaver = FakeNode(shell.mesh.address, "w1")
    leaver.state = NodeState.DRAINING
    shell.mesh.start_node(leaver)
    async with asyncio.timeout(PATIENCE_S):
        while "draining" not in [node["state"] for node in (await shell.json("fleet"))["nodes"]]:
            # Each look is a call of its own; a report wakes nobody who waits for answers.
            continue
    await leaver.stop()
    await shell.mesh.until(lambda fleet: not fleet["w1"].connected)
    assert (await shell("fleet", "--check")).exit_code == 0
    await shell.mesh.nodes[0].stop()
    await shell.mesh.until(lambda fleet: not fleet["w0"].connected)
    nobody = await shell("fleet", "--check")
    assert (nobody.exit_code, nobody.stderr) == (5, "check: no node is connected\ncheck: w0 is lost\n")


def test_an_unreachable_control_plane_exits_3_and_says_what_to_do() -> None:
    words = ["fleet", "--control", f"127.0.0.1:{free_port()}"]
    result = CliRunner().invoke(ROOT, words)
    assert (result.exit_code, "trimtab up" in result.stderr) == (3, True)
    error = json.loads(CliRunner().invoke(ROOT, [*words, "--json"]).stdout)["error"]
    assert error["reason"] == "UNREACHABLE"


async def test_another_port_of_the_mesh_is_no_control_plane_and_says_so(shell: Shell) -> None:
    async with serving(FakeGateway()) as gateway:
        result = await asyncio.to_thread(CliRunner().invoke, fleet, ["--json", "--control", gateway.address])
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["reason"] == "WRONG_ADDRESS"
    assert f"{gateway.address} is no control plane" in result.stderr
    chatting = await asyncio.to_thread(CliRunner().invoke, chat, ["hi", "--gateway", shell.mesh.address])
    assert (chatting.exit_code, f"{shell.mesh.address} is no gateway" in chatting.stderr) == (3, True)


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found"])
async def test_a_door_that_speaks_http_is_named(quiet: None, status: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        for verb, words, kind in ((fleet, ["--control"], "control plane"), (chat, ["hi", "--gateway"], "gateway")):
            result = await asyncio.to_thread(CliRunner().invoke, verb, [*words, address])
            assert (result.exit_code, f"{address} is no {kind}: it speaks HTTP" in result.stderr) == (3, True), (
                result.stderr
            )


async def test_a_fleet_without_a_worker_that_takes_requests_fails_its_check(shell: Shell) -> None:
    assert (await shell("fleet", "--check")).exit_code == 0
    shell.mesh.nodes[0].state = NodeState.STARTING
    async with asyncio.timeout(PATIENCE_S):
        while (result := await shell("fleet", "--check")).exit_code == 0:
            await asyncio.sleep(0.05)
    assert (result.exit_code, result.stderr) == (5, "check: no worker takes requests\n")
