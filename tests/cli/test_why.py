"""`trimtab why`, typed at a control plane in this process; of a request, at traces that a test wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner, Result

from controlplane.loop import COMMAND, MOVE, Record
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from trimtab.errors import StoreUnavailable
from trimtab.kit.process import free_port
from trimtab_cli.why import why


@pytest.fixture
def quiet() -> Iterator[None]:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture
async def mesh(quiet: None) -> AsyncIterator[Mesh]:
    async with a_mesh() as made:
        await made.start_node(FakeNode(made.address)).holds(1, 1)
        await made.admin.set_policy({"batch.active": "8"}, author="ada", reason="evening", wait_ms=10_000)
        with pytest.raises(Exception, match="between"):
            await made.admin.set_policy({"batch.active": "0"}, author="bob")
        async with asyncio.timeout(PATIENCE_S):
            while len((await made.admin.answers()).answers) < 2:
                await asyncio.sleep(0.02)
        yield made


async def typed(mesh: Mesh, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, why, [*words, "--control", mesh.address])


async def told(mesh: Mesh, *words: str) -> Any:
    return json.loads((await typed(mesh, *words, "--json")).stdout)


async def test_of_everything(mesh: Mesh) -> None:
    found = (await told(mesh))["changes"]
    assert [(c["author"], c["kind"], [a["node_id"] for a in c["answers"]]) for c in found] == [
        ("bob", "refused", []),
        ("ada", "person", ["w0"]),
        ("trimtab", "reseed", ["w0"]),
    ]
    text = (await typed(mesh)).stdout
    assert 'ada "evening"' in text
    assert "batch.active: 48 (default) → 8" in text
    assert "applied by w0" in text
    assert len((await told(mesh, "-n", "1"))["changes"]) == 1


async def test_what_controllers_did_besides_is_told_with_its_evidence(mesh: Mesh) -> None:
    mesh.plane.loop.decisions.append(
        Record("heal", 1_700_000_000_000, "restart w0", "it leaks KV blocks", "50 of 100 blocks", kind=COMMAND)
    )
    mesh.plane.loop.decisions.append(Record("batch", 1_700_000_001_000, "batch.active ×0.5", "late", kind=MOVE))
    mesh.plane.loop.decisions.append(Record("batch", 1_700_000_002_000, "batch.active ×0.4", "late", advised=True))
    found = (await told(mesh))["decisions"]
    assert [(d["controller"], d["what"], d["advised"]) for d in found] == [
        ("batch", "batch.active ×0.4", True),
        ("heal", "restart w0", False),
    ]
    text = (await typed(mesh)).stdout
    assert 'controller/heal  restart w0 "it leaks KV blocks"' in text
    assert "50 of 100 blocks" in text
    assert "would: batch.active ×0.4" in text


async def test_of_a_field(mesh: Mesh) -> None:
    found = await told(mesh, "batch.active")
    assert (found["value"], found["nodes"]) == (8, {"w0": {"value": 8, "source": "spec"}})
    assert [c["author"] for c in found["changes"]] == ["bob", "ada"]
    assert "no change is on record" in (await typed(mesh, "paths.hot_below")).stdout


async def test_of_a_node(mesh: Mesh) -> None:
    found = await told(mesh, "w0")
    assert found["node"]["policy"]["applied"]["revision"] == 2
    assert [c["author"] for c in found["changes"]] == ["ada", "trimtab"]
    assert "holds policy 1.2" in (await typed(mesh, "w0")).stdout


async def test_of_a_node_whose_process_ended_without_a_word(mesh: Mesh) -> None:
    assert (await told(mesh, "w0"))["deaths"] == 0
    await mesh.nodes[0].stop()
    mesh.start_node(FakeNode(mesh.address, incarnation="i2"))
    await mesh.until(lambda f: f["w0"].connected and f["w0"].hello.incarnation == "i2")
    found = await told(mesh, "w0")
    assert found["deaths"] == 1 and found["died_ago_s"] >= 0
    assert "its process before this one ended without a drain: last heard of" in (await typed(mesh, "w0")).stdout


async def test_all_that_is_kept_is_exported(mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "changes.jsonl"
    assert (await typed(mesh, "--export", str(file))).exit_code == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["row"] for r in rows] == ["change", "answer", "change", "answer", "change"]
    file.write_text("mine")
    again = await typed(mesh, "--export", str(file))
    assert (again.exit_code, "add --force" in again.output, file.read_text()) == (2, True, "mine")
    assert (await typed(mesh, "--export", str(file), "--force")).exit_code == 0
    assert len(file.read_text().splitlines()) == 5
    assert len((await typed(mesh, "--export", "-")).stdout.splitlines()) == 5


@pytest.mark.slow
async def test_a_field_that_is_mistyped_names_the_nearest(mesh: Mesh) -> None:
    result = await typed(mesh, "batch.activ")
    assert (result.exit_code, "did you mean batch.active?" in result.stderr) == (2, True)


def write_trace(state: Path, start_ns: int) -> None:
    def span(name: str, parent: str | None, start_ms: float, end_ms: float, **attributes: Any) -> dict[str, Any]:
        at = {"start_ns": start_ns + int(start_ms * 1e6), "end_ns": start_ns + int(end_ms * 1e6)}
        ids = {"trace_id": "ab" * 16, "span_id": name, "parent_id": parent}
        return {**ids, "name": name, "service": "worker", **at, "status": "OK", "attributes": attributes}

    spans = [
        span(
            "worker.generate",
            None,
            0,
            100,
            **{"trimtab.request_id": "r-1", "trimtab.policy": "1.2", "trimtab.worker": "w0"},
        ),
        span("queue", "worker.generate", 0, 70),
        span("prefill", "worker.generate", 70, 80),
        span("decode", "worker.generate", 80, 100, **{"trimtab.preemptions": 2}),
    ]
    directory = state / "default" / "traces"
    directory.mkdir(parents=True)
    (directory / "worker.jsonl").write_text("".join(json.dumps(s) + "\n" for s in spans))


async def test_of_a_request(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    written = (await told(mesh, "batch.active"))["changes"][1]["written_unix_ms"]
    write_trace(tmp_path, (written - 50) * 1_000_000)
    found = await told(mesh, "r-1", "--mesh", "default")
    assert found["policy"] == "1.2"
    assert found["policy_written"]["author"] == "ada"
    assert "ada" in [c["author"] for c in found["changes"]]
    text = (await typed(mesh, "abab", "--mesh", "default")).stdout
    assert "70 of 100 ms, went by waiting for its turn; it was preempted 2 times" in text
    assert "most of its time on w0, " in text
    assert "w0 held policy 1.2, written so:" in text
    assert "changed while it ran:" in text


async def test_what_is_nothing_of_these_is_said(mesh: Mesh) -> None:
    result = await typed(mesh, "batch.activ")
    assert result.exit_code == 2
    assert "no policy field, no node, and no request" in result.output


@pytest.mark.slow
async def test_without_its_store_a_request_and_a_node_are_told_all_the_same(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the policy store is away")

    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(mesh.plane.replica.store, "history", away)
    write_trace(tmp_path, 1_000_000_000)
    text = (await typed(mesh, "r-1", "--mesh", "default")).stdout
    assert "70 of 100 ms" in text
    assert "what was changed meanwhile is not known now: the policy store is away" in text
    assert (await told(mesh, "r-1", "--mesh", "default"))["changes_missing"] == "the policy store is away"
    assert "holds policy 1.2" in (await typed(mesh, "w0")).stdout
    for words in ((), ("batch.active",), ("nobody", "--mesh", "default")):
        result = await typed(mesh, *words)
        assert (result.exit_code, "the policy store is away" in result.output) == (3, True)


async def test_without_a_control_plane_a_request_is_told_from_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    write_trace(tmp_path, 1_000_000_000)
    words = ["r-1", "--mesh", "default", "--control", f"127.0.0.1:{free_port()}"]
    result = await asyncio.to_thread(CliRunner().invoke, why, words)
    assert result.exit_code == 0, result.output
    assert "w0 held policy 1.2\n" in result.stdout
    assert "can't reach the control plane" in result.stdout
