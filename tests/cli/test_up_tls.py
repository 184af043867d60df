"""`trimtab up` of processes whose settings have certificates: all or none of them, and each its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from trimtab.kit.config import ConfigError
from trimtab.kit.tls import Tls
from trimtab_cli import mesh, ready


def faults(monkeypatch: pytest.MonkeyPatch, parts: dict[str, Tls], **flags: Any) -> list[str]:
    for section, tls in parts.items():
        for key in ("ca", "cert", "key"):
            monkeypatch.setenv(f"TRIMTAB_{section.upper()}_TLS_{key.upper()}", str(getattr(tls, key)))
    try:
        sections = mesh.load_sections(None, {"engine": "simulated", **flags}, ())
    except ConfigError as e:
        return e.faults
    assert ready.scheme(sections) == ("https" if parts else "http")
    return []


def test_each_part_has_its_own_or_none_has_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ca = Authority(tmp_path)
    parts = {"control": ca.issue("control", "c0"), "gateway": ca.issue("gateway", "g0")}
    assert faults(monkeypatch, {}) == []
    assert ["[worker] without tls_ca" in fault for fault in faults(monkeypatch, parts)] == [True]
    parts["worker"] = ca.issue("worker", "w0")
    assert faults(monkeypatch, parts) == []
    assert ["this is worker w1" in fault for fault in faults(monkeypatch, parts, workers="2")] == [True]
    parts["worker"] = ca.issue("worker", "*")
    assert faults(monkeypatch, parts, workers="2") == []
    assert ["of mesh blue" in fault for fault in faults(monkeypatch, parts, mesh="blue")] == [True] * 3
