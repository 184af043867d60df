"""A whole mesh of processes with TLS, as somebody would set it up by hand: two control planes on a store with a password, two workers, a
gateway, and certificates that the command has made."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509

from controlplane.admin.client import AdminClient
from tests.controlplane.replicas import Store
from trimtab.client import Client
from trimtab.errors import TrimtabError
from trimtab.kit.process import free_port
from trimtab.kit.tls import Tls

PATIENCE_S = 60.0
MESH = "prod"
STORE_PASSWORD = "pass-of-the-store"
TOKEN = "token-of-the-pipeline"
WHO = ("control c0", "control c1", "worker w0", "worker w1", "worker w2", "gateway g0", "operator oncall", "viewer bob")


def clean_environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("TRIMTAB_")} | more


def trimtab(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """As it is typed."""
    command = [sys.executable, "-m", "trimtab_cli", *words]
    return subprocess.run(
        command, env=clean_environment(**env), capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def local() -> str:
    return f"127.0.0.1:{free_port()}"


@dataclass
class Process:
    name: str
    log: Path
    running: subprocess.Popen[bytes]

    @property
    def said(self) -> str:
        return self.log.read_text()

    def says(self, words: str) -> None:
        until(lambda: words in self.said, f"{self.name} to say {words!r}; it said {self.said[-2000:]}")


def until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


@dataclass
class Mesh:
    """Whoever starts a process here ends it, by `close`."""

    where: Path
    certs: Path
    store: str
    controls: list[str] = field(default_factory=lambda: [local(), local()])
    workers: dict[str, str] = field(default_factory=lambda: {"w0": local(), "w1": local()})
    gateway: str = field(default_factory=local)
    http: str = field(default_factory=local)
    processes: list[Process] = field(default_factory=list)

    @property
    def ca(self) -> Path:
        return self.certs / "ca.pem"

    def tls(self, who: str) -> Tls:
        """Of a kind and a name, such as "worker w0"."""
        stem = who.replace(" ", "-")
        return Tls(self.ca, self.certs / f"{stem}.pem", self.certs / f"{stem}-key.pem", MESH)

    def files(self, who: str) -> list[str]:
        tls = self.tls(who)
        return ["--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--mesh", MESH]

    def as_person(self, who: str, **more: str) -> dict[str, str]:
        """What he has exported."""
        tls = self.tls(who)
        files = {"TRIMTAB_TLS_CA": tls.ca, "TRIMTAB_TLS_CERT": tls.cert, "TRIMTAB_TLS_KEY": tls.key}
        places = {"TRIMTAB_GATEWAY": self.gateway, "TRIMTAB_CONTROL": self.controls[0]}
        return {**{k: str(v) for k, v in files.items()}, "TRIMTAB_TLS_MESH": MESH, **places, **more}

    def issue(self, *who: str) -> None:
        """All of them at once: each is a process that mostly starts."""
        commands = [
            [sys.executable, "-m", "trimtab_cli", "certs", "issue", *each.split(), "--dir", str(self.certs)]
            + (["--host", "127.0.0.1"] if each.startswith("gateway") else [])
            for each in who
        ]
        started = [subprocess.Popen(c, env=clean_environment(), stdout=subprocess.DEVNULL) for c in commands]
        assert [each.wait(PATIENCE_S) for each in started] == [0] * len(who)

    def start(self, name: str, *argv: str, **env: str) -> Process:
        log = self.where / f"{name}.log"
        with log.open("ab") as out:
            command = [sys.executable, *argv, "--parent-pid", str(os.getpid())]
            own = clean_environment(TRIMTAB_STATE_DIR=str(self.where / "state"), PYTHONUNBUFFERED="1", **env)
            running = subprocess.Popen(command, env=own, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        self.processes.append(Process(name, log, running))
        return self.processes[-1]

    def start_all(self) -> None:
        access = self.where / "access.toml"
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        access.write_text(f'[[token]]\nname = "pipeline"\nrole = "operator"\nsha256 = "{digest}"\n')
        for i, address in enumerate(self.controls):
            flags = ["--listen", address, "--metrics", local(), "--replica-id", f"c{i}", "--access", str(access)]
            argv = ["-m", "controlplane", *flags, *self.files(f"control c{i}")]
            self.start(f"c{i}", *argv, TRIMTAB_CONTROL_REDIS=self.store)
        for i, name in enumerate(self.workers):
            # Each knows one replica alone, so that what is asked of the other one goes from replica to replica.
            self.start(name, *self.worker(name, self.workers[name], self.controls[i], f"worker {name}"))
        doors = ["--listen", self.gateway, "--http", self.http, "--client-certs", "--control", ",".join(self.controls)]
        self.start("g0", "-m", "services.gateway", *doors, "--node-id", "g0", *self.files("gateway g0"))

    def worker(self, name: str, listen: str, control: str, who: str) -> list[str]:
        place = ["--node-id", name, "--listen", listen, "--metrics", local(), "--control", control]
        return ["-m", "services.worker", "--engine", "simulated", *place, *self.files(who)]

    def check(self) -> None:
        """Nobody has ended: who waits for one that has would only see that time is up."""
        for name, log, running in ((p.name, p.log, p.running) for p in self.processes):
            assert running.poll() is None, f"{name} ended with {running.returncode}:\n{log.read_text()[-2000:]}"

    async def ready(self) -> None:
        """Both replicas know both workers, and the gateway serves."""
        async with asyncio.timeout(PATIENCE_S):
            for address in self.controls:
                while await self.members(address) != {"w0", "w1", "g0"}:
                    self.check()
                    await asyncio.sleep(0.1)
            async with Client(self.gateway, tls=self.tls("viewer bob")) as client:
                while True:
                    with contextlib.suppress(TrimtabError):
                        if await client.models():
                            return
                    await asyncio.sleep(0.1)

    async def members(self, control: str) -> set[str]:
        async with AdminClient(control, tls=self.tls("viewer bob")) as admin:
            with contextlib.suppress(TrimtabError):
                return {n.hello.node_id for n in (await admin.fleet()).nodes if n.connected}
        return set()

    def close(self) -> None:
        for process in reversed(self.processes):
            process.running.kill()
            process.running.wait()


@contextmanager
def a_mesh(where: Path) -> Iterator[Mesh]:
    """Up and joined; gone at the end."""
    certs = where / "certs"
    made = trimtab("certs", "init", "--dir", str(certs), "--mesh", MESH)
    assert made.returncode == 0, made.stderr
    store = Store(where / "store", ("--requirepass", STORE_PASSWORD))
    store.start()
    mesh = Mesh(where, certs, store.url.replace("//", f"//:{STORE_PASSWORD}@"))
    try:
        mesh.issue(*WHO)
        mesh.start_all()
        asyncio.run(mesh.ready())
        yield mesh
    finally:
        mesh.close()
        store.kill()


def serial_shown(address: str, tls: Tls, *, http2: bool = True) -> int:
    """Of the certificate that the server at this address shows to a new connection now."""
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.check_hostname = False
    context.load_cert_chain(tls.cert, tls.key)
    if http2:
        context.set_alpn_protocols(["h2"])
    host, port = address.rsplit(":", 1)
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def serial_of(tls: Tls) -> int:
    return x509.load_pem_x509_certificate(tls.cert.read_bytes()).serial_number
