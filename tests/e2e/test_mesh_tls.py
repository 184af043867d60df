"""A mesh of processes in which everybody has a certificate: who is let in, who is not, and what a renewal disturbs."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import aiohttp
import grpc
import pytest

from controlplane.admin.client import AdminClient
from tests.certificates import Authority
from tests.controlplane.replicas import valkey_binary
from tests.e2e.mesh import environment, up
from tests.e2e.tls_mesh import (
    MESH,
    PATIENCE_S,
    STORE_PASSWORD,
    TOKEN,
    Mesh,
    a_mesh,
    local,
    serial_of,
    serial_shown,
    trimtab,
    until,
)
from trimtab.client import Client, Unreachable
from trimtab.errors import PermissionDenied
from trimtab.kit import rpc
from trimtab.kit.tls import Tls
from trimtab.messages import Accepted, Delta, Finish, Request, Sampling
from trimtab.v1 import inference_pb2_grpc

pytestmark = pytest.mark.slow

THIEF = "from services.worker import __main__ as w; w.check_own = lambda *_: None; w.main()"
"""A worker that does not look whose certificate it was given."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    valkey_binary()
    with a_mesh(tmp_path_factory.mktemp("tls")) as made:
        yield made


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), mesh=MESH)


def a_request(tokens: int = 4) -> Request:
    return Request("", "simulated", "Hello", Sampling(max_tokens=tokens, temperature=0.0))


async def call(address: str, kind: str, tls: Tls | None) -> None:
    """Whatever the door at this address answers to first."""
    if kind == "control":
        async with AdminClient(address, tls=tls) as admin:
            await admin.fleet()
    else:
        async with Client(address, kind=kind, tls=tls) as client:
            await client.models()


def https(ca: Path, tls: Tls | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if tls is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


async def status(url: str, context: ssl.SSLContext | bool = True) -> int:
    body = {"model": "simulated", "prompt": "Hello", "max_tokens": 2}
    async with aiohttp.ClientSession() as session:
        call = session.post if url.endswith("completions") else session.get
        more = {"json": body} if url.endswith("completions") else {}
        async with call(url, ssl=context, **more) as answer:
            await answer.read()
            return answer.status


@pytest.mark.slow
def test_a_prompt_goes_from_door_to_engine_and_back(mesh: Mesh) -> None:
    asked = trimtab("generate", "Hello", "--max-tokens", "4", "--json", **mesh.as_person("viewer bob"))
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["worker"] in mesh.workers


async def test_the_http_door_is_https(mesh: Mesh) -> None:
    completions, health = f"https://{mesh.http}/v1/completions", f"https://{mesh.http}/health"
    assert await status(completions, https(mesh.ca, mesh.tls("viewer bob"))) == 200
    assert await status(completions, https(mesh.ca)) == 401, "it was told that clients need certificates"
    assert await status(health, https(mesh.ca)) == 200, "probes have none"


def test_an_operator_steers_every_worker_through_either_replica(mesh: Mesh) -> None:
    oncall = mesh.as_person("operator oncall")
    done = trimtab("policy", "set", "batch.active=9", "--wait", "20000", "--json", **oncall)
    assert done.returncode == 0, done.stderr + done.stdout
    answer = json.loads(done.stdout)
    assert {n["node_id"]: n["answer"] for n in answer["nodes"]} == dict.fromkeys(("g0", "w0", "w1"), "applied")
    other = {**oncall, "TRIMTAB_CONTROL": mesh.controls[1]}
    fleet = json.loads(trimtab("fleet", "--json", **other).stdout)
    assert {r["replica_id"] for r in fleet["replicas"]} == {"c0", "c1"}
    applied = {n["node_id"]: n["policy"]["applied"] for n in fleet["nodes"] if n["node_id"] in mesh.workers}
    assert applied == {"w0": answer["identity"], "w1": answer["identity"]}


@pytest.mark.slow
def test_a_viewer_may_not_and_a_token_may(mesh: Mesh) -> None:
    bob = mesh.as_person("viewer bob")
    refused = trimtab("policy", "set", "batch.active=1", **bob)
    assert (refused.returncode, "needs the role operator" in refused.stderr) == (4, True), refused.stderr
    by_token = trimtab("policy", "set", "batch.active=7", "--wait", "20000", **bob, TRIMTAB_TOKEN=TOKEN)
    assert by_token.returncode == 0, by_token.stderr
    entries = json.loads(trimtab("policy", "history", "--json", **bob).stdout)
    assert entries[0]["author"] == "pipeline"
    assert entries[1]["author"] == "bob"
    assert "denied" in entries[1]["refused_because"]
    assert '"denied"' in mesh.processes[0].said


async def test_who_is_not_of_the_mesh_gets_nowhere_at_any_door(mesh: Mesh, stranger: Authority) -> None:
    forged = stranger.issue("admin", "mallory")
    half = Tls(mesh.ca, forged.cert, forged.key, MESH)
    doors = [(address, "control") for address in mesh.controls]
    doors += [(address, "worker") for address in mesh.workers.values()] + [(mesh.gateway, "gateway")]
    for tls in (None, forged, half):
        for address, kind in doors:
            with pytest.raises(Unreachable):
                await call(address, kind, tls)
    completions = f"https://{mesh.http}/v1/completions"
    for context in (https(mesh.ca, half), https(stranger.ca, forged)):
        with pytest.raises(aiohttp.ClientError):
            await status(completions, context)
    with pytest.raises(aiohttp.ClientError):
        await status(completions.replace("https", "http"))


async def test_a_workers_stream_is_for_gateways(mesh: Mesh) -> None:
    async with rpc.channel(mesh.workers["w0"], "worker", tls=mesh.tls("viewer bob")) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Attach()
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await call.read()
        assert isinstance(rpc.from_call(e.value), PermissionDenied)
    w0 = next(p for p in mesh.processes if p.name == "w0")
    w0.says('"denied"')


@pytest.mark.slow
def test_what_a_person_sees_who_has_the_wrong_files(mesh: Mesh, stranger: Authority) -> None:
    bare = trimtab("fleet", TRIMTAB_CONTROL=mesh.controls[0])
    assert (bare.returncode, "TRIMTAB_TLS_CERT" in bare.stderr) == (3, True), bare.stderr
    forged = stranger.issue("operator", "mallory")
    files = {"TRIMTAB_TLS_CERT": str(forged.cert), "TRIMTAB_TLS_KEY": str(forged.key)}
    turned_away = trimtab("generate", "Hello", **{**mesh.as_person("viewer bob"), **files})
    assert (turned_away.returncode, "trimtab certs show" in turned_away.stderr) == (3, True), turned_away.stderr
    half = trimtab("generate", "Hello", TRIMTAB_TLS_CA=str(mesh.ca))
    assert (half.returncode, "TRIMTAB_TLS_KEY is missing" in half.stderr) == (2, True), half.stderr


@pytest.mark.slow
async def test_a_worker_with_anothers_certificate_does_not_join(mesh: Mesh) -> None:
    argv = mesh.worker("w2", local(), ",".join(mesh.controls), "worker w1")
    honest = mesh.start("w2-honest", *argv)
    assert honest.running.wait(PATIENCE_S) == 2
    assert "is for worker w1 of mesh prod, and this is worker w2" in honest.said
    thief = mesh.start("w2-thief", "-c", THIEF, *argv[2:])
    thief.says("names another node")
    for control in mesh.controls:
        assert await mesh.members(control) == {"w0", "w1", "g0"}
    async with Client(mesh.gateway, tls=mesh.tls("viewer bob")) as client:
        for _ in range(6):
            async with aclosing(client.generate(a_request())) as events:
                assert {e.worker_id async for e in events if isinstance(e, Accepted)} <= mesh.workers.keys()
    assert "w2" not in next(p for p in mesh.processes if p.name == "g0").said
    thief.running.kill()


@pytest.mark.slow
async def test_certificates_are_renewed_under_running_streams(mesh: Mesh) -> None:
    renewed = {"control c0": mesh.controls[0], "worker w0": mesh.workers["w0"], "worker w1": mesh.workers["w1"]}
    renewed["gateway g0"] = mesh.gateway
    before = {who: serial_shown(address, mesh.tls("gateway g0")) for who, address in renewed.items()}
    assert before == {who: serial_of(mesh.tls(who)) for who in renewed}
    async with Client(mesh.gateway, tls=mesh.tls("viewer bob")) as client:
        async with aclosing(client.generate(a_request(100_000))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
            await asyncio.to_thread(mesh.issue, *renewed)
            after = {who: serial_shown(address, mesh.tls("operator oncall")) for who, address in renewed.items()}
            assert after == {who: serial_of(mesh.tls(who)) for who in renewed}
            assert not set(after.values()) & set(before.values())
            until(lambda: serial_shown(mesh.http, mesh.tls("viewer bob"), http2=False) == after["gateway g0"], "HTTPS")
            more = 0
            async for event in events:
                assert not isinstance(event, Finish)
                more += isinstance(event, Delta)
                if more >= 5:
                    break
        assert (await client.complete(a_request()))[1].reason.value == "length"
    assert await mesh.members(mesh.controls[0]) == {"w0", "w1", "g0"}, "nobody had to leave"
    assert all(p.running.poll() is None for p in mesh.processes[:5])


@pytest.mark.slow
def test_up_runs_a_mesh_whose_settings_have_certificates(mesh: Mesh, tmp_path: Path) -> None:
    env = environment(tmp_path)
    for section, who in (("CONTROL", "control c0"), ("WORKER", "worker w0"), ("GATEWAY", "gateway g0")):
        tls = mesh.tls(who)
        env |= {f"TRIMTAB_{section}_TLS_{k}": str(v) for k, v in (("CA", tls.ca), ("CERT", tls.cert), ("KEY", tls.key))}
    with up(env, "--mesh", MESH) as started:
        ready = started.until("ready")
    assert (ready["greeting"]["worker"], ready["http"].partition("://")[0]) == ("w0", "https")


@pytest.mark.slow
def test_plain_text_beyond_this_machine_must_be_told_so(mesh: Mesh) -> None:
    bare = ["-m", "services.worker", "--engine", "simulated", "--node-id", "w9", "--metrics", local()]
    listen = local().replace("127.0.0.1", "0.0.0.0")
    refused = mesh.start("w9-refused", *bare, "--listen", listen)
    assert refused.running.wait(PATIENCE_S) == 2
    assert f"{listen} would speak plain text beyond this machine" in refused.said
    told = mesh.start("w9-told", *bare, "--listen", listen, "--insecure", "--control", local())
    told.says("worker ready")
    assert "plain text beyond this machine" in told.said
    told.running.kill()


def test_no_secret_is_in_any_log_nor_among_the_settings(mesh: Mesh) -> None:
    keys = [
        line for key in mesh.certs.glob("*-key.pem") for line in key.read_text().splitlines() if "-----" not in line
    ]
    secrets = [STORE_PASSWORD, TOKEN, "PRIVATE KEY", *keys]
    printed = trimtab(
        "config", "print", **mesh.as_person("viewer bob"), TRIMTAB_TOKEN=TOKEN, TRIMTAB_CONTROL_REDIS=mesh.store
    )
    assert printed.returncode == 0, printed.stderr
    written = {"config print": printed.stdout + printed.stderr} | {p.log.name: p.said for p in mesh.processes}
    state = mesh.where / "state"
    written |= {str(f): f.read_text(errors="replace") for f in state.rglob("*") if f.is_file()}
    assert all(written.values())
    assert not [(name, secret) for name, text in written.items() for secret in secrets if secret in text]
