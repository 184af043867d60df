"""TLS between the parts of the mesh: one private authority, and a certificate for each process and person.

A certificate says what it is for by a URI, `trimtab://MESH/KIND/NAME`, and, where it serves, by the DNS name `KIND.MESH.trimtab`. Whoever
calls a control plane checks that name and not the address: a pod's address changes, and a worker's certificate must not pass for a control
plane's. Files are read anew at each handshake when they have changed, so a certificate is renewed by writing the files. A connection that
is there shows what it was opened with for as long as it lives: who keeps one for long opens another when `renewal` says so.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import ipaddress
import os
import random
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from trimtab.kit.config import ConfigError, setting

if TYPE_CHECKING:
    import grpc

log = structlog.get_logger(__name__)

SCHEME = "trimtab"
NODES = ("worker", "gateway")
SERVERS = ("control", *NODES)
PEOPLE = ("viewer", "operator", "admin")
KINDS = (*SERVERS, *PEOPLE)
RENEW_S = 2.0
"""How often an HTTPS server, and who keeps a connection for long, look at their files; a gRPC server looks at each handshake."""
RUNS_OUT_SOON = datetime.timedelta(days=7)
"""Less than this is worth a warning at the start."""
OTHERS = 0o007
"""The bits of a private key's mode that let anybody on the machine at it."""
ANY_NAME = "*"
"""In a certificate for a whole pool of pods: any node id of that kind."""


class CertificateError(Exception):
    """Certificates that can't be used; the message names the file."""


@dataclass(frozen=True)
class TlsSettings:
    """What each process's settings have in common. All three files, or none."""

    tls_ca: str = setting("", "the mesh's authority, PEM; with tls_cert and tls_key every connection is TLS")
    tls_cert: str = setting("", "this process's certificate, PEM (trimtab certs issue)")
    tls_key: str = setting("", "its private key, PEM")
    insecure: bool = setting(False, "speak plain text beyond this machine, where there is no TLS")


@dataclass(frozen=True, slots=True)
class Tls:
    """The three files of a process, and the mesh whose names it trusts."""

    ca: Path
    cert: Path
    key: Path
    mesh: str

    def name_of(self, kind: str) -> str:
        """The DNS name that a server of this kind must have."""
        return f"{kind}.{self.mesh}.{SCHEME}"

    def stamp(self) -> tuple[int, ...]:
        """Differs once a file was written; OSError where one is missing."""
        found = [path.stat() for path in (self.ca, self.cert, self.key)]
        return tuple(x for each in found for x in (each.st_mtime_ns, each.st_ino))

    def has_run_out(self) -> bool:
        """The certificate, by this machine's clock; False where it can't be read."""
        from trimtab.kit.certificates import about

        try:
            return about(self.cert.read_bytes()).not_after <= datetime.datetime.now(datetime.UTC)
        except (CertificateError, OSError):
            return False

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Authority, certificate and key, which belong together. CertificateError names what is wrong."""
        try:
            ca, cert, key = (path.read_bytes() for path in (self.ca, self.cert, self.key))
        except OSError as e:
            raise CertificateError(f"can't read {e.filename}: {e.strerror}") from e
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            certificate = x509.load_pem_x509_certificate(cert)
            x509.load_pem_x509_certificates(ca)
            private = load_pem_private_key(key, None)
        except (ValueError, TypeError) as e:
            raise CertificateError(
                f"{self.ca}, {self.cert} or {self.key} is not PEM, or the key has a password: {e}"
            ) from e
        if private.public_key() != certificate.public_key():
            raise CertificateError(f"{self.key} is not the key of {self.cert}")
        return ca, cert, key


def faults(section: str, settings: TlsSettings, addresses: Sequence[str]) -> list[str]:
    """What is wrong with a process's TLS settings; `addresses` are those that it listens on."""
    files = {name: getattr(settings, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    missing = [name for name, value in files.items() if not value]
    if 0 < len(missing) < len(files):
        return [f"{section} {', '.join(missing)}: TLS needs all of {', '.join(files)}"]
    if not missing:
        try:
            ca, cert, key = map(Path, files.values())
            Tls(ca, cert, key, "any").read()
        except CertificateError as e:
            return [f"{section} tls: {e}"]
        return []
    if settings.insecure:
        return []
    return [
        f"{section}: {address} would speak plain text beyond this machine; set tls_ca, tls_cert and tls_key (trimtab certs "
        "makes them), or insecure = true where the network itself is safe"
        for address in addresses
        if not is_loopback(address)
    ]


def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this machine alone."""
    host = address.rsplit(":", 1)[0].strip("[]")
    if host == "localhost" or address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tls_of(settings: TlsSettings, mesh: str) -> Tls | None:
    if not settings.tls_cert:
        return None
    return Tls(Path(settings.tls_ca), Path(settings.tls_cert), Path(settings.tls_key), mesh)


def check_own(kind: str, name: str, tls: Tls | None) -> None:
    """ConfigError where a process was given somebody else's certificate: nobody would talk to it, and its log alone would say so. `name`
    is empty for one whose name nobody checks."""
    if tls is None:
        return
    from trimtab.kit.certificates import about

    said = about(tls.read()[1])
    whose = f"{said.kind} {said.name} of mesh {said.mesh}" if said.kind else said.subject
    if (said.mesh, said.kind) != (tls.mesh, kind) or (name and said.name not in (name, ANY_NAME)):
        wanted = f"{kind} {name} of mesh {tls.mesh}" if name else f"a {kind} of mesh {tls.mesh}"
        issue = f"trimtab certs issue {kind} {name or 'NAME'} --mesh {tls.mesh}"
        raise ConfigError([f"{kind} tls_cert: {tls.cert} is for {whose}, and this is {wanted} ({issue})"])


def warn(addresses: Sequence[str], tls: Tls | None, *, metrics: str = "") -> None:
    """What whoever starts a process should know: plain text that it was told to speak, and what is wrong with its files. `metrics` is an
    address that is plain text always."""
    for address in addresses:
        if tls is None and not is_loopback(address):
            log.warning("plain text beyond this machine", listen=address, because="insecure is set")
    if metrics and not is_loopback(metrics):
        log.warning("metrics are plain text beyond this machine", listen=metrics, because="metrics is set to it")
    if tls is None:
        return
    from trimtab.kit.certificates import about

    if tls.key.stat().st_mode & OTHERS:
        log.warning("everybody on this machine can read the private key", key=str(tls.key), next=f"chmod 600 {tls.key}")
    until = about(tls.read()[1]).not_after
    if until - datetime.datetime.now(datetime.UTC) < RUNS_OUT_SOON:
        log.warning("certificate runs out", cert=str(tls.cert), until=until.isoformat(), next="trimtab certs issue")


def from_environment() -> Tls | None:
    """What a person's commands use: TRIMTAB_TLS_CA, _CERT, _KEY, and TRIMTAB_TLS_MESH (default). CertificateError where some are missing."""
    names = [f"TRIMTAB_TLS_{word}" for word in ("CA", "CERT", "KEY")]
    files = [os.environ.get(name, "") for name in names]
    if not any(files):
        return None
    missing = [name for name, value in zip(names, files, strict=True) if not value]
    if missing:
        raise CertificateError(f"TLS needs {', '.join(names)}; {', '.join(missing)} is missing")
    ca, cert, key = map(Path, files)
    return Tls(ca, cert, key, os.environ.get("TRIMTAB_TLS_MESH") or "default")


class _Files:
    """The files as they are now, or the last good ones while somebody is writing them. One for all connections of a process, in and out."""

    def __init__(self, tls: Tls) -> None:
        self.generation = 1
        """Grows with each good set of files that is read."""
        self._tls = tls
        self._seen = self._stamp()
        self._good = tls.read()

    def now(self) -> tuple[bytes, bytes, bytes]:
        """Authority, certificate and key. A fault is said once for each state of the files."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            try:
                good = self._tls.read()
                if good != self._good:
                    self._good = good
                    self.generation += 1
                    log.info("certificate renewed", cert=str(self._tls.cert))
            except CertificateError as e:
                log.warning("certificate not renewed; the last good one holds", because=str(e))
        return self._good

    def _stamp(self) -> tuple[int, ...]:
        try:
            return self._tls.stamp()
        except OSError:
            return ()


_files = functools.lru_cache(maxsize=256)(_Files)


def server_credentials(tls: Tls, *, clients_need_one: bool = True) -> grpc.ServerCredentials:
    """`clients_need_one`: a caller without a certificate of the mesh is turned away in the handshake."""
    import grpc

    def newest() -> grpc.ServerCertificateConfiguration:
        ca, cert, key = _files(tls).now()
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    return grpc.dynamic_ssl_server_credentials(newest(), newest, clients_need_one)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """As the files are now. CertificateError where they were never good."""
    import grpc

    ca, cert, key = _files(tls).now()
    return grpc.ssl_channel_credentials(ca, key, cert)


def generation(tls: Tls) -> int:
    """A number that grows when the files hold another good set. CertificateError where they were never good."""
    files = _files(tls)
    files.now()
    return files.generation


async def renewal(tls: Tls, since: int) -> None:
    """Until the files hold a later generation than this one. Who waits for the same files looks at moments of his own, so that a whole mesh
    does not move at once.
    """
    while generation(tls) == since:
        await asyncio.sleep(RENEW_S * random.uniform(0.5, 1.5))


class HttpCertificate:
    """For an HTTPS server: a context whose files are read anew when they change, authorities that are taken away included. With
    `asks_clients` a certificate that a client shows must be of the authority; who shows none gets through the handshake, and is the handler's
    to judge.
    """

    def __init__(self, tls: Tls, *, asks_clients: bool = False) -> None:
        self._tls = tls
        self._stamp = tls.stamp()
        self._asks_clients = asks_clients
        self._newest = self._made()
        self.context = self._made()
        # Asked at each handshake, whether or not the client names a host: a context can be given authorities, and none taken away.
        self.context.sni_callback = self._hand_on

    def _made(self) -> ssl.SSLContext:
        self._tls.read()
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(self._tls.cert, self._tls.key)
        if self._asks_clients:
            made.verify_mode = ssl.CERT_OPTIONAL
            made.load_verify_locations(self._tls.ca)
        return made

    def _hand_on(self, connection: ssl.SSLObject, _: str, __: ssl.SSLContext) -> None:
        connection.context = self._newest

    async def renew(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                stamp = self._tls.stamp()
                if stamp != self._stamp:
                    self._stamp = stamp
                    self._newest = self._made()
            except (CertificateError, OSError, ssl.SSLError) as e:
                log.warning("HTTPS certificate not renewed; the last good one holds", because=str(e))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as its certificate says: one of KINDS and a name. `kind` is "" for a certificate without our URI, and for none."""

    kind: str
    name: str
    by: str

    @property
    def known(self) -> bool:
        """Whether the connection itself says who it is."""
        return self.by == "certificate"


PLAIN = Caller("", "anonymous", "plain text")


def caller_of(auth: Mapping[str, Iterable[bytes]], mesh: str) -> Caller:
    """From a call's `auth_context()`. A certificate of another mesh of the same authority counts for nothing here."""
    if b"ssl" not in auth.get("transport_security_type", ()):
        return PLAIN
    for uri in auth.get("peer_uri", ()):
        scheme, _, rest = uri.decode(errors="replace").partition("://")
        of, _, path = rest.partition("/")
        kind, _, name = path.partition("/")
        if scheme == SCHEME and of == mesh and kind in KINDS and name:
            return Caller(kind, name, "certificate")
    names = list(auth.get("x509_common_name", ()))
    if not names:
        return Caller("", "anonymous", "TLS without a certificate")
    return Caller("", names[0].decode(errors="replace"), "certificate")


def process_of(node_id: str) -> str:
    """The gateway whose process `NAME.1` is, a name that no node has by itself; "" where this is no such name."""
    name, dot, number = node_id.rpartition(".")
    return name if dot and number.isascii() and number.isdigit() else ""


def speaks_for(caller: Caller, kind: str, node_id: str) -> bool:
    """Whether a node with this caller's certificate may call itself so. Plain text has no say."""
    names = (node_id, ANY_NAME, process_of(node_id)) if kind == "gateway" else (node_id, ANY_NAME)
    return caller == PLAIN or (caller.kind == kind and bool(caller.name) and caller.name in names)
