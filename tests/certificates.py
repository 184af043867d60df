"""Certificates for tests: one authority for a test run, and whatever it is asked to sign."""

from __future__ import annotations

import datetime
from pathlib import Path

from trimtab.kit.certificates import Pair, authority, issue
from trimtab.kit.tls import Tls

MESH = "default"


class Authority:
    """Writes into `where`."""

    def __init__(self, where: Path, *, mesh: str = MESH) -> None:
        self.where = where
        self.mesh = mesh
        self._pair: Pair = authority(mesh, days=2, now=self._now())
        self.ca = where / "ca.pem"
        self.authority = self._pair.cert
        self.ca.write_bytes(self.authority)

    @staticmethod
    def _now() -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC)

    def issue(self, kind: str, name: str, *, mesh: str = "", hosts: tuple[str, ...] = (), into: str = "") -> Tls:
        """A certificate, in files of its own or in those of `into`."""
        pair = issue(self._pair, mesh or self.mesh, kind, name, hosts=hosts, days=1, now=self._now())
        stem = into or f"{kind}-{name}".replace("*", "any")
        cert, key = self.where / f"{stem}.pem", self.where / f"{stem}-key.pem"
        cert.write_bytes(pair.cert)
        key.write_bytes(pair.key)
        return Tls(self.ca, cert, key, self.mesh)
