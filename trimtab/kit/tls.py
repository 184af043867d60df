"""TLS between the parts of the mesh: one private authority, and a certificate for each process and person.

A certificate says what it is for by a URI, `trimtab://MESH/KIND/NAME`, and, where it serves, by the DNS name `KIND.MESH.trimtab`. Whoever
calls a control plane checks that name and not the address: a pod's address changes, and a worker's certificate must not pass for a control
plane's. Files are read anew at each handshake when they have changed, so a certificate is renewed by writing the files.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from trimtab.kit.config import setting

if TYPE_CHECKING:
    import grpc

log = structlog.get_logger(__name__)

SCHEME = "trimtab"
NODES = ("worker", "gateway")
SERVERS = ("control", *NODES)
PEOPLE = ("viewer", "operator", "admin")
KINDS = (*SERVERS, *PEOPLE)
RENEW_S = 2.0
"""How often an HTTPS server looks at its files; a gRPC server looks at each handshake."""
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
        """Differs once a file was written."""
        return tuple(
            x for path in (self.ca, self.cert, self.key) for x in (path.stat().st_mtime_ns, path.stat().st_ino)
        )

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
            _tls(list(files.values()), "any").read()
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


def _tls(files: Sequence[str], mesh: str) -> Tls:
    ca, cert, key = (Path(file) for file in files)
    return Tls(ca, cert, key, mesh)


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


def warn_plain(addresses: Sequence[str], tls: Tls | None) -> None:
    """Says so at the start of a process that was told to speak plain text."""
    for address in addresses:
        if tls is None and not is_loopback(address):
            log.warning("plain text beyond this machine", listen=address, because="insecure is set")


def from_environment() -> Tls | None:
    """What a person's commands use: TRIMTAB_TLS_CA, _CERT, _KEY, and TRIMTAB_TLS_MESH (default). CertificateError where some are missing."""
    names = [f"TRIMTAB_TLS_{word}" for word in ("CA", "CERT", "KEY")]
    files = [os.environ.get(name, "") for name in names]
    if not any(files):
        return None
    missing = [name for name, value in zip(names, files, strict=True) if not value]
    if missing:
        raise CertificateError(f"TLS needs {', '.join(names)}; {', '.join(missing)} is missing")
    return _tls(files, os.environ.get("TRIMTAB_TLS_MESH", "default"))


class _Rotating:
    """The server's files as they are now; the last good ones while somebody is writing them."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._stamp = tls.stamp()
        self._good = tls.read()

    def __call__(self) -> grpc.ServerCertificateConfiguration:
        import grpc

        try:
            stamp = self._tls.stamp()
            if stamp != self._stamp:
                self._good, self._stamp = self._tls.read(), stamp
                log.info("certificate renewed", cert=str(self._tls.cert))
        except (CertificateError, OSError) as e:
            log.warning("certificate not renewed", because=str(e), cert=str(self._tls.cert))
        ca, cert, key = self._good
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


def server_credentials(tls: Tls, *, clients_need_one: bool = True) -> grpc.ServerCredentials:
    """`clients_need_one`: a caller without a certificate of the mesh is turned away in the handshake."""
    import grpc

    rotating = _Rotating(tls)
    return grpc.dynamic_ssl_server_credentials(rotating(), rotating, clients_need_one)


class HttpCertificate:
    """For an HTTPS server: a context, and its certificate read anew when the files change. Clients need none of their own."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._stamp = tls.stamp()
        tls.read()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(tls.cert, tls.key)

    async def renew(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                stamp = self._tls.stamp()
                if stamp != self._stamp:
                    self._tls.read()
                    self.context.load_cert_chain(self._tls.cert, self._tls.key)
                    self._stamp = stamp
                    log.info("certificate renewed", cert=str(self._tls.cert))
            except (CertificateError, OSError) as e:
                log.warning("certificate not renewed", because=str(e), cert=str(self._tls.cert))


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """As the files are now."""
    import grpc

    ca, cert, key = tls.read()
    return grpc.ssl_channel_credentials(ca, key, cert)


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


def speaks_for(caller: Caller, kind: str, node_id: str) -> bool:
    """Whether a node with this caller's certificate may call itself so. Plain text has no say."""
    return caller == PLAIN or (caller.kind == kind and caller.name in (node_id, ANY_NAME))
