"""`trimtab top` and `trimtab doctor` at a mesh of processes that really measure: idle, then at work, then with a worker gone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.mesh import Mesh, environment, up

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
DETAILS = ("verdict", "said")


def looks(mesh: Mesh, *words: str) -> Any:
    shown = mesh.verb(*words, "--json")
    assert shown.stdout, shown.stderr
    return json.loads(shown.stdout)


def until(mesh: Mesh, words: tuple[str, ...], holds: Callable[[Any], bool]) -> Any:
    """What a verb shows, once that holds."""
    give_up = time.monotonic() + PATIENCE_S
    while not holds(found := looks(mesh, *words)):
        assert time.monotonic() < give_up, found
        time.sleep(0.5)
    return found


def reported(top: Any) -> bool:
    """Both workers and the gateway have, and the loops have had time to look."""
    nodes = [*top["workers"], *top["gateways"]]
    return len(nodes) == 3 and all(n["age_s"] is not None for n in nodes) and top["leader_id"] is not None


def symptoms(found: Any) -> dict[str, str]:
    return {s["symptom"]: s["verdict"] for s in found["symptoms"]}


def told(found: Any) -> list[Any]:
    return [s for s in found["symptoms"] if s["verdict"] != "ok"]


def test_top_and_doctor_see_what_a_mesh_really_measures(tmp_path: Path) -> None:
    with up(environment(tmp_path), "--workers", "2", "--preset", "none") as mesh:
        mesh.until("ready")
        mesh.joined("w0", "w1")
        until(mesh, ("top", "--once"), reported)
        # A mesh that has just begun and does nothing: controllers may still wait for their minute of samples, and nothing is wrong.
        idle = looks(mesh, "doctor")
        assert [s for s in told(idle) if s["symptom"] != "loops"] == []
        assert symptoms(idle)["loops"] in ("ok", "unknown")
        for i in range(8):
            assert mesh.verb("generate", f"{i} what is a trim tab?", "--max-tokens", "40").returncode == 0
        # Gaps between tokens are measured once a window has closed.
        found = until(mesh, ("top", "--once"), lambda t: any(w["itl_ms"] and w["ttft_ms"] for w in t["workers"]))
        [busy, *_] = [w for w in found["workers"] if w["ttft_ms"] and w["itl_ms"]]
        assert busy["state"] == "serving" and busy["ttft_ms"]["count"] >= 1 and not busy["stale"]
        assert 0 < busy["itl_ms"]["p50"] <= busy["itl_ms"]["p99"] and busy["batch_active"] == busy["batch_active_spec"]
        text = mesh.verb("top", "--once")
        assert max(map(len, text.stdout.splitlines())) <= 80 and "w0" in text.stdout
        assert [s for s in told(looks(mesh, "doctor")) if s["symptom"] != "loops"] == []
        assert mesh.verb("drain", "w1", "--deadline", "0s", "--wait").returncode == 0
        gone = looks(mesh, "doctor", "--symptom", "workers")
        assert symptoms(gone) == {"workers": "ok"}, "who was drained is not lost"
        rows = {w["node_id"]: w["state"] for w in looks(mesh, "top", "--once")["workers"]}
        assert rows == {"w0": "serving", "w1": "drained"}
