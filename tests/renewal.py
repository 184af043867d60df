"""What tests of renewed certificates share: which certificate a caller has shown."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography import x509

from trimtab.kit.tls import Tls


def serial_shown(auth: Any) -> int:
    """By the caller, as a call's `auth_context()` has it."""
    (pem,) = auth["x509_pem_cert"]
    return x509.load_pem_x509_certificate(pem).serial_number


def serial_of(tls: Tls) -> int:
    return x509.load_pem_x509_certificate(tls.cert.read_bytes()).serial_number


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the files."""
    for place in ("trimtab.kit.tls.RENEW_S", "services.control.link.RENEW_S"):
        monkeypatch.setattr(place, 0.05)
