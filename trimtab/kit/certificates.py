"""Makes the mesh's certificates: an authority, and what it signs. For bare metal and for trials; a cluster has an issuer of its own.

Keys are ECDSA on P-256. What the names in a certificate mean is in `tls`.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trimtab.kit.tls import ANY_NAME, KINDS, SCHEME, SERVERS, CertificateError

_MESH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NODE = re.compile(r"[A-Za-z0-9._@-]{1,64}")
BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of machines differ."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """A certificate that a site needs: `hosts` are what clients from outside call it."""

    kind: str
    name: str
    hosts: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """Of its files' names."""
        return f"{self.kind}-{'any' if self.name == ANY_NAME else self.name}"


@dataclass(frozen=True, slots=True)
class About:
    """What a certificate says. `mesh`, `kind` and `name` are empty for one that is not of a mesh."""

    subject: str
    issuer: str
    mesh: str
    kind: str
    name: str
    hosts: tuple[str, ...]
    """`KIND.MESH.trimtab` among them, where it serves."""
    not_before: datetime.datetime
    not_after: datetime.datetime
    serial: int
    authority: bool


def authority(mesh: str, *, days: int, now: datetime.datetime) -> Pair:
    """CertificateError for a mesh that can't be called so."""
    _check_mesh(mesh)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{SCHEME} authority of mesh {mesh}"[:64])])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    cert = (
        _builder(name, name, key, now, now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{SCHEME}://{mesh}")]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pair(cert, key)


def issue(
    signer: Pair, mesh: str, kind: str, name: str, *, hosts: Sequence[str], days: int, now: datetime.datetime
) -> Pair:
    """CertificateError for a kind that there is not, a name that a certificate can't hold, or an authority that can't sign. `hosts` are what
    clients from outside call it. It does not outlive the authority."""
    _check_mesh(mesh)
    check_name(kind, name)
    try:
        ca = x509.load_pem_x509_certificate(signer.cert)
        ca_key = serialization.load_pem_private_key(signer.key, None)
    except (ValueError, TypeError) as e:
        raise CertificateError(f"the authority is not PEM, or its key has a password: {e}") from e
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) or ca_key.public_key() != ca.public_key():
        raise CertificateError("the authority's key is not that of its certificate, or neither ECDSA nor RSA")
    if ca.not_valid_after_utc <= now:
        raise CertificateError(f"the authority has run out on {ca.not_valid_after_utc:%Y-%m-%d}; make another one")
    until = min(now + datetime.timedelta(days=days), ca.not_valid_after_utc)
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(f"{SCHEME}://{mesh}/{kind}/{name}")]
    if kind in SERVERS:
        names.append(x509.DNSName(f"{kind}.{mesh}.{SCHEME}"))
    names += [_host(host) for host in hosts]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if kind in SERVERS:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{kind} {name}"[:64])])
    cert = (
        _builder(subject, ca.subject, key, now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return _pair(cert, key)


def renew(signer: Pair, pem: bytes, *, days: int | None, now: datetime.datetime) -> Pair:
    """Another one for the same, with a new key: for as long as this one was made for, unless `days` says otherwise. CertificateError for one
    that is not of the authority's mesh."""
    old, mesh = about(pem), mesh_of(signer.cert)
    if not old.kind:
        raise CertificateError(f"{old.subject} is not of a mesh")
    if mesh and old.mesh != mesh:
        raise CertificateError(f"it is of mesh {old.mesh}, and the authority of mesh {mesh}")
    lasts = days or max(1, round((old.not_after - old.not_before - BACKDATED) / datetime.timedelta(days=1)))
    hosts = [host for host in old.hosts if host != f"{old.kind}.{old.mesh}.{SCHEME}"]
    return issue(signer, old.mesh, old.kind, old.name, hosts=hosts, days=lasts, now=now)


def wanted(words: str) -> Wanted:
    """`KIND/NAME`, `KIND/NAME=HOST,HOST` or, as a line of a file has it, `KIND NAME HOST HOST`. CertificateError says what is wrong."""
    who, _, hosts = words.partition("=")
    kind, slash, name = who.partition("/")
    if slash:
        found = Wanted(kind.strip(), name.strip(), tuple(h.strip() for h in hosts.split(",") if h.strip()))
    else:
        kind, name, *more = words.split() if len(words.split()) > 1 else (words, "")
        found = Wanted(kind, name, tuple(more))
    check_name(found.kind, found.name)
    for host in found.hosts:
        _host(host)
    return found


def site(text: str) -> list[Wanted]:
    """A file of them, one a line; what follows a # is for people. CertificateError names the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if said := line.partition("#")[0].strip():
            try:
                found.append(wanted(said))
            except CertificateError as e:
                raise CertificateError(f"line {number}: {e}") from e
    return found


def check_name(kind: str, name: str) -> None:
    """CertificateError for a kind that there is not, and for a name that a certificate can't hold."""
    if kind not in KINDS:
        raise CertificateError(f"{kind!r} is none of {', '.join(KINDS)}")
    if name != ANY_NAME and not _NODE.fullmatch(name):
        raise CertificateError(f"a name is 1 to 64 letters, digits, dots, dashes, underscores or @, or *; not {name!r}")


def mesh_of(authority_pem: bytes) -> str:
    """The mesh that `authority` made it for; "" where it was made by something else."""
    try:
        cert = x509.load_pem_x509_certificate(authority_pem)
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return ""
    uris = found.get_values_for_type(x509.UniformResourceIdentifier)
    return next((uri.removeprefix(f"{SCHEME}://") for uri in uris if uri.startswith(f"{SCHEME}://")), "")


def about(pem: bytes) -> About:
    """CertificateError for what is no certificate."""
    try:
        cert = x509.load_pem_x509_certificate(pem)
    except ValueError as e:
        raise CertificateError(f"not a certificate in PEM: {e}") from e
    uris: list[str] = []
    hosts: list[str] = []
    try:
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = found.get_values_for_type(x509.UniformResourceIdentifier)
        hosts = [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]
    except x509.ExtensionNotFound:
        pass
    mesh = kind = name = ""
    for uri in uris:
        scheme, _, rest = uri.partition("://")
        parts = rest.split("/", 2)
        if scheme == SCHEME and len(parts) == 3:
            mesh, kind, name = parts
    try:
        is_authority = bool(cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        is_authority = False
    return About(
        cert.subject.rfc4514_string(),
        cert.issuer.rfc4514_string(),
        mesh,
        kind,
        name,
        tuple(hosts),
        cert.not_valid_before_utc,
        cert.not_valid_after_utc,
        cert.serial_number,
        is_authority,
    )


def _check_mesh(mesh: str) -> None:
    if not _MESH.fullmatch(mesh):
        raise CertificateError(f"a mesh's name is 1 to 63 letters, digits, dots, dashes or underscores, not {mesh!r}")


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    until: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as e:
        raise CertificateError(f"{host!r} can't be a host in a certificate: {e}") from e


def _pair(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(cert.public_bytes(serialization.Encoding.PEM), private)
