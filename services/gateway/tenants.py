"""Which tenant makes a call: by its key, else by its client certificate, at both doors alike; and the key file, watched.

What a request says of itself, in its body or a header of its own, never names its tenant. A key that is sent counts more than a certificate, and
one that nobody knows gives nothing at all. Without a key file a certificate names its tenant, who may all that `default` may; where nobody is
asked for one, everybody is `default`, and the settings see to it that the gateway is reached from its own machine alone.

A new file is taken while the gateway runs, once it has lain still for a moment; a faulty one is refused, and the last good one holds. A stream
that runs goes on as it began, also when its key is gone from the file.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import structlog

from services.gateway import key_file
from services.gateway.denials import Denials
from services.gateway.key_file import KeyFile, KeyFileFault
from trimtab.errors import Unauthenticated
from trimtab.kit.config import ConfigError
from trimtab.kit.tls import Caller, caller_of
from trimtab.tenant import DEFAULT, Tenant

LOOK_S = 1.0
"""How often the file is looked at. It is read when two looks in a row saw the same: not while somebody writes it."""
FAULTS_SHOWN = 20

Stamp = tuple[int, ...]
Certificate = Mapping[str, Iterable[bytes]]
"""What a connection says of its caller, as gRPC's `auth_context()` has it."""

log = structlog.get_logger(__name__)


class Tenants:
    """Belongs to one event loop. `by_certificate`: clients are asked for a certificate. ConfigError where the file is faulty."""

    def __init__(self, path: Path | None, denials: Denials, *, mesh: str, by_certificate: bool) -> None:
        self._path = path
        self._denials = denials
        self._mesh = mesh
        self._by_certificate = by_certificate
        self._file: KeyFile | None = None
        self._judged: Stamp = ()
        self._seen: Stamp = ()
        if path is None:
            return
        self._judged = self._seen = _stamp(path)
        try:
            self._file = key_file.read(path)
        except KeyFileFault as e:
            raise ConfigError([f"{path}: {fault}" for fault in e.faults]) from e
        self._tell_of_certificates(self._file)

    def of(self, said: Sequence[str], certificate: Certificate, *, door: str, method: str, peer: str) -> Tenant:
        """Unauthenticated where nobody knows the caller. `said` are the call's values of `authorization`; the rest is for the log."""
        caller = caller_of(certificate, self._mesh)
        try:
            return self._find(said, caller)
        except Unauthenticated as e:
            identity = caller.name if caller.known else ""
            self._denials.count(door, method=method, peer=peer, because=e.message, identity=identity)
            raise

    def _find(self, said: Sequence[str], caller: Caller) -> Tenant:
        if self._file is None:
            if not self._by_certificate:
                return DEFAULT
            if not caller.known:
                raise Unauthenticated(
                    "the client certificate names nobody; ask the gateway's operator for one that does"
                )
            return dataclasses.replace(DEFAULT, name=caller.name)
        if keys := [each.strip() for each in said if each.strip()]:
            return self._by_key(self._file, keys)
        if not caller.known:
            raise Unauthenticated(
                "no key: send authorization: Bearer KEY (trimtab's own verbs take it from TRIMTAB_KEY)"
            )
        if tenant := self._file.by_identity.get(caller.name):
            return tenant
        raise Unauthenticated(
            "the client certificate belongs to no tenant of this gateway; send a key, or ask its operator"
        )

    @staticmethod
    def _by_key(file: KeyFile, said: Sequence[str]) -> Tenant:
        scheme, _, key = said[0].partition(" ")
        if len(said) > 1 or scheme.lower() != "bearer" or not key.strip():
            # Not a word of it: what has no scheme may be the key itself.
            raise Unauthenticated("authorization must be said once, as Bearer KEY")
        if tenant := file.by_key.get(key_file.digest(key.strip())):
            return tenant
        raise Unauthenticated("the key is not known here; ask the gateway's operator for a new one")

    async def watch(self) -> None:
        """For the life of the process."""
        while self._path is not None:
            await asyncio.sleep(LOOK_S)
            # Off the loop: a large file takes a while to read, and a network's file system may take any time.
            try:
                found = await asyncio.to_thread(self._look, self._path)
            except KeyFileFault as e:
                because = "; ".join(e.faults[:FAULTS_SHOWN])
                log.error("key file refused; the last good one holds", path=str(self._path), because=because)
                continue
            if found is not None:
                self._file = found
                log.info("key file read", path=str(self._path), tenants=len(found.tenants))
                self._tell_of_certificates(found)

    def _look(self, path: Path) -> KeyFile | None:
        """A new file that lies still; None while there is none. KeyFileFault is raised once for each state of the file."""
        stamp = _stamp(path)
        still, self._seen = stamp == self._seen, stamp
        if not still or stamp == self._judged:
            return None
        self._judged = stamp
        return key_file.read(path)

    def _tell_of_certificates(self, file: KeyFile) -> None:
        if file.by_identity and not self._by_certificate:
            next_ = "set client_certs = true with TLS"
            log.warning("the key file names identities, and clients are not asked for a certificate", next=next_)


def _stamp(path: Path) -> Stamp:
    """Differs once the file was written or replaced; empty while there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
