"""A mesh of what the installer installs: into a scratch root, and started by the very ExecStart lines of its units."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.deploy.units import PATIENCE_S, Service, Unit, install, started, until
from trimtab.kit.process import free_port

pytestmark = pytest.mark.slow

PLAIN, TLS, CREDENTIALS = (), ("--tls",), ("--tls-credentials",)
CONTROL, GATEWAY, WORKERS = (
    "trimtab-control.service",
    "trimtab-gateway.service",
    ("trimtab-worker@0.service", "trimtab-worker@1.service"),
)


def local() -> str:
    return f"127.0.0.1:{free_port()}"


def edit(root: Path, gateway: str, control: str) -> None:
    """What an administrator writes: the simulated engine, a store in memory, and ports that nobody else has here."""
    (root / "etc/trimtab/trimtab.toml").write_text(
        f'[control]\nlisten = "{control}"\nmetrics = "{local()}"\n'
        f'[gateway]\nlisten = "{local()}"\nhttp = "{gateway}"\ncontrol = ["{control}"]\n'
        f'[worker]\nengine = "simulated"\ncontrol = ["{control}"]\n'
    )
    (root / "etc/trimtab/control.env").write_text("# a secret\nTRIMTAB_CONTROL_REDIS=memory://\n")
    for i in range(2):
        ports = f"TRIMTAB_WORKER_LISTEN={local()}\nTRIMTAB_WORKER_METRICS={local()}\n"
        (root / f"etc/trimtab/worker-{i}.env").write_text(ports)


@contextmanager
def a_mesh(root: Path, *words: str) -> Iterator[tuple[dict[str, Service], str]]:
    """(services by unit, the gateway's HTTP address), all of them ready."""
    done = install(root, "--gpus", "2", *words)
    assert done.returncode == 0, done.stderr
    http = local()
    edit(root, http, local())
    if words:
        authority = Authority(root / "etc/trimtab/tls")
        for kind, name in (("control", "c0"), ("worker", "w0"), ("worker", "w1")):
            authority.issue(kind, name)
        authority.issue("gateway", "g0", hosts=("127.0.0.1",))
    with ExitStack() as stack:
        units = [CONTROL, GATEWAY, *WORKERS]
        services = {u: stack.enter_context(started(Unit(root, u), abstract=u == GATEWAY)) for u in units}
        for service in services.values():
            service.until_ready()
        yield services, http


def complete(address: str, root: Path, *, tls: bool) -> str:
    """One request's text, from the gateway's HTTP door."""
    body = json.dumps({"model": "simulated", "prompt": "hello", "max_tokens": 4}).encode()
    scheme = "https" if tls else "http"
    request = urllib.request.Request(f"{scheme}://{address}/v1/completions", body, {"Content-Type": "application/json"})
    context = ssl.create_default_context(cafile=str(root / "etc/trimtab/tls/ca.pem")) if tls else None
    with urllib.request.urlopen(request, timeout=PATIENCE_S, context=context) as answer:
        text: str = json.loads(answer.read())["choices"][0]["text"]
        return text


def answers(address: str, root: Path, *, tls: bool = False) -> bool:
    try:
        return bool(complete(address, root, tls=tls))
    except urllib.error.HTTPError as e:
        if e.code != 503:  # no worker is known yet
            raise
        return False


@pytest.mark.parametrize("how", [PLAIN, TLS, CREDENTIALS], ids=["plain text", "mutual TLS", "TLS by credentials"])
def test_the_installed_units_serve_a_request_and_end_when_they_are_told(tmp_path: Path, how: tuple[str, ...]) -> None:
    tls = how != PLAIN
    with a_mesh(tmp_path, *how) as (services, http):
        until(lambda: answers(http, tmp_path, tls=tls), "an answer through the gateway")
        for unit in (*WORKERS, GATEWAY, CONTROL):
            service = services[unit]
            assert service.stop() == 0, service.said[-5:]
            service.manager.until("STOPPING=1")
        for service in services.values():
            assert service.said
            assert [line for line in service.said if not isinstance(json.loads(line), dict)] == []
    nodes = {service.unit.environment.get("TRIMTAB_WORKER_NODE_ID") for service in services.values()}
    assert nodes == {None, "w0", "w1"}


def test_the_control_plane_is_ready_before_its_store_and_says_what_it_waits_for(tmp_path: Path) -> None:
    assert install(tmp_path, "--role", "control").returncode == 0
    edit(tmp_path, local(), local())
    (tmp_path / "etc/trimtab/control.env").write_text(f"TRIMTAB_CONTROL_REDIS=redis://127.0.0.1:{free_port()}\n")
    with started(Unit(tmp_path, CONTROL)) as control:
        control.until_ready()
        assert "STATUS=waits for its store" in control.manager.heard
        assert control.stop() == 0


def test_a_worker_that_hangs_gets_no_ping_until_it_moves_again(tmp_path: Path) -> None:
    assert install(tmp_path, "--role", "worker", "--role", "gateway", "--gpus", "1").returncode == 0
    http = local()
    edit(tmp_path, http, local())
    faults, unit = tmp_path / "faults.json", Unit(tmp_path, WORKERS[0])
    alone = {"TRIMTAB_GATEWAY_WORKERS": unit.environment["TRIMTAB_WORKER_LISTEN"], "TRIMTAB_GATEWAY_CONTROL": ""}
    alone["TRIMTAB_GATEWAY_DRAIN_S"] = "0.1"  # nobody waits for the request that the hang has held up
    with (
        ThreadPoolExecutor(1) as pool,
        started(unit, watchdog_s=0.9, TRIMTAB_FAULTS=str(faults)) as worker,
        started(Unit(tmp_path, GATEWAY), **alone) as gateway,
    ):
        worker.until_ready()
        gateway.until_ready()
        assert worker.manager.read() == ["WATCHDOG=1"]
        until(lambda: answers(http, tmp_path), "the gateway to see its worker")
        switch(faults, '{"w0": {"stuck": true}}')
        until(lambda: any("faults switched" in line for line in worker.said), "the fault")
        asking = pool.submit(complete, http, tmp_path, tls=False)
        worker.manager.until("STATUS=no progress: the watchdog gets no ping")
        assert worker.manager.silence(1.5) == []
        switch(faults, "{}")
        assert worker.manager.read() == ["STATUS=moves again", "WATCHDOG=1"]
        asking.cancel()
        assert (worker.stop(), gateway.stop()) == (0, 0)


def switch(faults: Path, to: str) -> None:
    """Whole, as the engine wants it."""
    new = faults.with_suffix(".new")
    new.write_text(to)
    new.replace(faults)
