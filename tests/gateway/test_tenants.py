"""Who is known at both doors, as whom, and what he may; the key file while the gateway runs."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from services.gateway import tenants
from services.gateway.__main__ import Gateway
from services.gateway.denials import Denials
from services.gateway.key_file import digest
from services.gateway.metrics import OTHERS, TENANTS, GatewayMetrics
from services.gateway.settings import GatewaySettings
from tests.certificates import Authority
from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import FakeWorker
from trimtab.client import Client
from trimtab.errors import PermissionDenied, QueueFull, TrimtabError, Unauthenticated
from trimtab.kit import rpc
from trimtab.kit.config import ConfigError, load
from trimtab.kit.tls import Tls
from trimtab.messages import Workload
from trimtab.v1 import inference_pb2, inference_pb2_grpc

ACME, GLOBEX, STRANGER = ("tt-" + letter * 43 for letter in "agx")
BODY = {"model": "m", "prompt": "x"}


def a_file(path: Path, **tenants: dict[str, Any]) -> Path:
    """JSON is YAML. Replaced as a whole, as a careful writer does."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"tenants": tenants}))
    return new.replace(path)


def known_by(*keys: str, **more: Any) -> dict[str, Any]:
    return {"keys": [f"sha256:{digest(key)}" for key in keys], **more}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return a_file(tmp_path / "keys.yaml", acme=known_by(ACME), globex=known_by(GLOBEX))


@dataclass
class Doors:
    """A client of both, in plain text or by certificate."""

    gateway: Gateway
    tls: Tls | None = None

    async def http(
        self, key: str = "", *, path: str = "/v1/completions", body: Any = BODY, headers: Any = ()
    ) -> tuple[int, Any, Any]:
        """(status, body, headers)."""
        sent = [*dict(headers).items(), *([("authorization", f"Bearer {key}")] if key else [])]
        url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.gateway.http.port}{path}"
        context = ssl.create_default_context(cafile=str(self.tls.ca)) if self.tls else True
        if isinstance(context, ssl.SSLContext) and self.tls is not None:
            context.load_cert_chain(self.tls.cert, self.tls.key)
        method = "GET" if body is None else "POST"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, json=body, headers=sent, ssl=context) as answer,
        ):
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text()), answer.headers

    async def grpc(self, key: str = "", **changes: Any) -> None:
        """A request that is answered, or the error."""
        async with Client(f"127.0.0.1:{self.gateway.grpc_port}", key=key, tls=self.tls, attempts=1) as client:
            await client.complete(a_request(**changes))


async def heard_from(worker: FakeWorker, request_number: int = 1) -> str:
    """The tenant that the worker was told."""
    start = await worker.hears("start", times=request_number)
    return str(start.generate_request.tenant)


async def test_a_key_names_its_tenant_at_both_doors_and_nothing_else_does(start_worker, start_gateway, keys):
    worker = await start_worker()
    doors = Doors(await start_gateway(worker, keys=str(keys)))
    status, _, _ = await doors.http(GLOBEX, headers={"x-tenant": "acme", "tenant": "acme"})
    assert (status, await heard_from(worker)) == (200, "globex")
    await doors.grpc(ACME, tenant="globex")
    assert await heard_from(worker, 2) == "acme"
    status, models, _ = await doors.http(ACME, path="/v1/models", body=None)
    assert (status, models["data"][0]["id"]) == (200, "m")


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "no key: send authorization: Bearer KEY"),
        ({"authorization": "  "}, "no key"),
        ({"authorization": f"Bearer {STRANGER}"}, "the key is not known"),
        ({"authorization": f"Bearer {ACME}x"}, "the key is not known"),
        ({"authorization": "Bearer h\u00e9"}, "the key is not known"),
        ({"authorization": ACME}, "as Bearer KEY"),
        ({"authorization": f"Basic {ACME}"}, "as Bearer KEY"),
        ({"authorization": "Bearer"}, "as Bearer KEY"),
    ],
)
async def test_whom_nobody_knows_gets_401_in_openais_shape(start_gateway, keys, headers, words):
    doors = Doors(await start_gateway(keys=str(keys)))
    for path, body in (("/v1/completions", BODY), ("/v1/models", None), ("/v1/models/m", None), ("/v1/nothing", None)):
        status, answer, answered = await doors.http(path=path, body=body, headers=headers)
        error = answer["error"]
        assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
        assert (set(error), words in error["message"]) == ({"message", "type", "param", "code"}, True)
        assert answered["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ((), "no key"),
        ((("authorization", f"Bearer {STRANGER}"),), "the key is not known"),
        ((("authorization", ACME),), "as Bearer KEY"),
        ((("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {GLOBEX}")), "said once"),
    ],
)
async def test_whom_nobody_knows_is_unauthenticated_by_grpc(start_gateway, keys, metadata, words):
    gateway = await start_gateway(keys=str(keys))
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        models = stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
        said = stub.Generate(inference_pb2.GenerateRequest(model="m", text="x"), metadata=metadata)
        for call in (models, said.read()):
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await call
            error = rpc.from_call(e.value)
            assert (type(error), words in error.message) == (Unauthenticated, True)


async def test_probes_and_scrapers_need_no_key(start_worker, start_gateway, keys):
    gateway = await start_gateway(await start_worker(), keys=str(keys))
    doors = Doors(gateway)
    for path in ("/health", "/metrics", "/health/"):
        status, _, _ = await doors.http(path=path, body=None)
        assert status == 200
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_denials_are_counted_each_and_logged_at_a_bounded_rate_without_any_key(start_gateway, keys):
    gateway = await start_gateway(keys=str(keys))
    doors = Doors(gateway)
    with capture_logs() as said:
        for _ in range(20):
            await doors.http(STRANGER)
        with pytest.raises(Unauthenticated):
            await doors.grpc(STRANGER)
    lines = [line for line in said if line["event"] == "denied"]
    assert (lines[0]["door"], lines[0]["method"], lines[0]["peer"]) == ("http", "/v1/completions", "127.0.0.1")
    text = gateway.metrics.text().decode()
    assert 'trimtab_gateway_denied_total{door="http"} 20.0' in text
    assert 'trimtab_gateway_denied_total{door="grpc"} 1.0' in text
    for secret in (STRANGER, digest(STRANGER), digest(ACME)):
        assert secret not in str(said) + text


def test_a_line_a_second_is_said_and_the_next_one_says_how_many_were_not():
    now = 100.0
    judged = Denials(GatewayMetrics(), lambda: now)
    with capture_logs() as said:
        for _ in range(50):
            judged.count("http", method="/" + "m" * 1000, peer="p", because="no key", identity="i" * 1000)
        now += 1.0
        judged.count("http", method="/", peer="p", because="no key")
    assert [line.get("unsaid") for line in said] == [None, None, 48]
    assert (len(said[0]["method"]), len(said[0]["identity"])) == (80, 80)


async def test_a_new_key_file_is_taken_while_the_gateway_runs(start_worker, start_gateway, keys, monkeypatch):
    monkeypatch.setattr(tenants, "LOOK_S", 0.01)
    doors = Doors(await start_gateway(await start_worker(), keys=str(keys)))
    a_file(keys, acme=known_by(STRANGER, share=0.5))
    await knows(doors, STRANGER)
    status, _, _ = await doors.http(ACME)
    assert status == 401, "its key is gone"
    await doors.grpc(STRANGER)


async def knows(doors: Doors, key: str) -> None:
    """Until it does."""
    async with asyncio.timeout(20):
        while True:
            status, _, _ = await doors.http(key)
            if status == 200:
                return
            await asyncio.sleep(0.01)


async def test_a_broken_key_file_is_refused_in_words_and_the_last_good_one_holds(
    start_worker, start_gateway, keys, monkeypatch
):
    monkeypatch.setattr(tenants, "LOOK_S", 0.01)
    doors = Doors(await start_gateway(await start_worker(), keys=str(keys)))

    async def refused(change: Callable[[], object], words: str) -> None:
        with capture_logs() as said:
            change()
            await until(lambda: any("the last good one holds" in line["event"] for line in said))
        assert words in said[-1]["because"]
        assert STRANGER not in str(said)
        status, _, _ = await doors.http(ACME)
        assert status == 200

    await refused(
        lambda: a_file(keys, acme={"keys": [STRANGER]}, globex={"shares": 1}), "globex.shares: is unknown; did"
    )
    await refused(lambda: keys.write_text(""), "names nobody")
    await refused(keys.unlink, "can't be read")
    a_file(keys, acme=known_by(STRANGER))
    await knows(doors, STRANGER)


async def test_a_key_file_is_not_read_while_it_is_being_written(tmp_path, keys, monkeypatch):
    """Half of a file may be a good file: of fewer tenants."""
    judged = tenants.Tenants(keys, None, mesh="default", by_certificate=False)
    a_file(keys, acme=known_by(ACME))
    assert judged._look(keys) is None
    a_file(keys, acme=known_by(ACME), globex=known_by(STRANGER), initech=known_by(GLOBEX))
    assert judged._look(keys) is None
    found = judged._look(keys)
    assert found is not None
    assert [t.name for t in found.tenants] == ["acme", "globex", "initech"]
    assert judged._look(keys) is None


async def test_a_broken_key_file_at_the_start_is_exit_2_with_every_fault(tmp_path):
    path = a_file(tmp_path / "keys.yaml", acme={"shares": 1}, globex=known_by(GLOBEX, share=2))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", "--control", "", "--keys", str(path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ},
    )  # fmt: skip
    _, err = await process.communicate()
    assert process.returncode == 2
    for fault in (
        "acme.shares: is unknown",
        "acme: has neither keys nor",
        "globex.share: must be above 0 and at most 1",
    ):
        assert f"gateway keys: {path}: tenants.{fault}" in err.decode()
    with pytest.raises(ConfigError):
        tenants.Tenants(path, None, mesh="default", by_certificate=False)


def test_without_a_way_to_tell_callers_apart_a_gateway_is_for_its_own_machine(tmp_path, keys):
    tls = Authority(tmp_path).issue("gateway", "g0")
    files = {"tls_ca": str(tls.ca), "tls_cert": str(tls.cert), "tls_key": str(tls.key)}
    for door in ("listen", "http"):
        far = {door: "0.0.0.0:7099"}
        for how in ({"insecure": True}, files):
            with pytest.raises(ConfigError, match=r"whoever reaches 0\.0\.0\.0:7099 could use the mesh; set keys to"):
                load(GatewaySettings, "gateway", flags={**far, **how}, env={})
            assert load(GatewaySettings, "gateway", flags={**far, **how, "keys": str(keys)}, env={}).keys
        assert load(GatewaySettings, "gateway", flags={**far, **files, "client_certs": True}, env={}).client_certs
        with pytest.raises(ConfigError, match="would speak plain text"):
            load(GatewaySettings, "gateway", flags={**far, "keys": str(keys)}, env={})
    with pytest.raises(ConfigError, match="client_certs: clients show certificates over TLS alone"):
        load(
            GatewaySettings, "gateway", flags={"client_certs": True, "listen": "0.0.0.0:7099", "insecure": True}, env={}
        )


async def test_without_a_key_file_all_are_default_and_a_key_that_is_sent_changes_nothing(start_worker, start_gateway):
    worker = await start_worker()
    doors = Doors(await start_gateway(worker))
    status, _, _ = await doors.http("none")
    await doors.grpc(tenant="acme")
    assert (status, await heard_from(worker), await heard_from(worker, 2)) == (200, "default", "default")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def with_certificates(authority: Authority) -> dict[str, Any]:
    tls = authority.issue("gateway", "g0", hosts=("127.0.0.1",))
    return {"tls_ca": str(tls.ca), "tls_cert": str(tls.cert), "tls_key": str(tls.key), "client_certs": True}


async def test_a_certificate_names_its_tenant_where_no_key_does(tmp_path, authority, start_worker, start_gateway):
    worker = await start_worker()
    path = a_file(tmp_path / "keys.yaml", acme={"identities": ["bob"]}, globex=known_by(GLOBEX))
    gateway = await start_gateway(worker, keys=str(path), **with_certificates(authority))
    bob = Doors(gateway, authority.issue("viewer", "bob"))
    assert [(await bob.http())[0], await heard_from(worker)] == [200, "acme"]
    await bob.grpc()
    assert await heard_from(worker, 2) == "acme"
    assert [(await bob.http(GLOBEX))[0], await heard_from(worker, 3)] == [200, "globex"], "a key counts more"
    assert (await bob.http(STRANGER))[0] == 401, "and an unknown one gives nothing at all"
    carol = Doors(gateway, authority.issue("viewer", "carol"))
    with capture_logs() as said:
        status, answer, _ = await carol.http()
    assert (status, "belongs to no tenant" in answer["error"]["message"]) == (401, True)
    assert said[0]["identity"] == "carol"
    with pytest.raises(Unauthenticated):
        await carol.grpc()
    await carol.grpc(GLOBEX)
    assert await heard_from(worker, 4) == "globex"


async def test_a_certificate_alone_names_a_tenant_of_its_own(authority, start_worker, start_gateway):
    worker = await start_worker()
    gateway = await start_gateway(worker, **with_certificates(authority))
    bob = Doors(gateway, authority.issue("viewer", "bob"))
    assert [(await bob.http("none"))[0], await heard_from(worker)] == [200, "bob"]
    await bob.grpc(tenant="acme")
    assert await heard_from(worker, 2) == "bob"


async def test_identities_that_nobody_is_asked_for_are_worth_a_warning(tmp_path, start_gateway):
    path = a_file(tmp_path / "keys.yaml", acme={"identities": ["bob"]})
    with capture_logs() as said:
        await start_gateway(keys=str(path))
    assert "not asked for a certificate" in said[0]["event"]


async def test_who_may_not_send_realtime_is_told_so_at_both_doors(tmp_path, start_worker, start_gateway):
    worker = await start_worker()
    path = a_file(tmp_path / "keys.yaml", acme=known_by(ACME, realtime=False, deadline_s={"batch": 77}))
    doors = Doors(await start_gateway(worker, keys=str(path)))
    status, answer, _ = await doors.http(ACME, headers={"x-workload": "realtime"})
    assert (status, answer["error"]["code"]) == (403, "permission_denied")
    assert "may not send REALTIME" in answer["error"]["message"]
    with pytest.raises(PermissionDenied):
        await doors.grpc(ACME, workload=Workload.REALTIME)
    assert (await doors.http(ACME))[0] == 200, "what names no workload is BATCH"
    start = await worker.hears("start")
    assert start.generate_request.workload == inference_pb2.WORKLOAD_BATCH
    assert 60_000 < start.timeout_ms <= 77_000


@pytest.mark.parametrize("rate", ["requests_per_s", "tokens_per_s"])
async def test_who_is_above_his_rate_is_told_when_to_come_again(tmp_path, start_worker, start_gateway, rate):
    path = a_file(tmp_path / "keys.yaml", acme=known_by(ACME, **{rate: 0.001}), globex=known_by(GLOBEX))
    doors = Doors(await start_gateway(await start_worker(), keys=str(path)))
    assert (await doors.http(ACME))[0] == 200
    status, answer, headers = await doors.http(ACME)
    assert (status, answer["error"]["type"], rate in answer["error"]["message"]) == (429, "rate_limit_error", True)
    assert 900 < int(headers["Retry-After"]) <= 20_000_000
    with pytest.raises(QueueFull) as e:
        await doors.grpc(ACME)
    assert e.value.retry_after_ms is not None
    assert e.value.retry_after_ms > 900_000
    assert (await doors.http(GLOBEX))[0] == 200, "others have rates of their own"


async def test_a_tenants_use_is_counted_and_its_name_stands_in_log_and_span(start_worker, start_gateway, keys, spans):
    gateway = await start_gateway(await start_worker(), keys=str(keys))
    doors = Doors(gateway)
    with capture_logs() as said:
        await doors.http(ACME)
        await doors.grpc(ACME)
        with pytest.raises(TrimtabError):
            await doors.grpc(GLOBEX, prompt="")
        await until(lambda: not gateway.admission.live)
    text = gateway.metrics.text().decode()
    assert 'trimtab_gateway_tenant_requests_total{outcome="ok",tenant="acme"} 2.0' in text
    assert 'trimtab_gateway_tenant_requests_total{outcome="client_fault",tenant="globex"} 1.0' in text
    assert 'trimtab_gateway_tenant_prompt_tokens_total{tenant="acme"} 6.0' in text
    assert 'trimtab_gateway_tenant_output_tokens_total{tenant="acme"} 10.0' in text
    assert [line["tenant"] for line in said if line["event"] == "request"] == ["acme", "acme", "globex"]
    roots = [s for s in spans.get_finished_spans() if s.name.startswith("text_completion")]
    assert [s.attributes["trimtab.tenant"] for s in roots] == ["acme", "acme", "globex"]


def test_tenants_have_a_bounded_number_of_labels():
    metrics = GatewayMetrics()
    for i in range(TENANTS + 50):
        metrics.used(f"t{i}", "ok", prompt_tokens=1, output_tokens=2)
    metrics.used("t0", "ok", prompt_tokens=1, output_tokens=2)
    lines = [
        x for x in metrics.text().decode().splitlines() if x.startswith("trimtab_gateway_tenant_output_tokens_total")
    ]
    assert len(lines) == TENANTS + 1
    assert f'trimtab_gateway_tenant_output_tokens_total{{tenant="{OTHERS}"}} 100.0' in lines
    assert 'trimtab_gateway_tenant_output_tokens_total{tenant="t0"} 4.0' in lines
