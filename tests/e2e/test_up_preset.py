"""`trimtab up` with a small window: the preset is in force on the engine soon after the mesh is ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controlplane.admin.client import AdminClient
from tests.e2e.mesh import environment, up
from trimtab.codec import decode_partial
from trimtab.policy import text
from trimtab.presets import itl_budget_ms

pytestmark = pytest.mark.slow


def test_a_small_window_gets_the_preset_after_it_is_ready(tmp_path: Path) -> None:
    with up(environment(tmp_path), "--", "--max-model-len", "8192", "--step-ms", "1") as mesh:
        ready = mesh.until("ready")
        assert ready["greeting"]["policy"] == "1.1"
        told = mesh.until("preset")
        assert (told["applied"], told["window"], told["not_yet_on"]) == (True, 8192, [])

        async def as_the_worker_has_it() -> dict[str, str]:
            async with AdminClient(ready["control"]) as admin:
                answer = await admin.get_policy("w0")
                assert (answer.author, answer.snapshot.identity.revision) == ("trimtab up", 2)
                return {path: text(value) for path, value in decode_partial(answer.effective).items()}

        effective = asyncio.run(as_the_worker_has_it())
        assert {path: effective[path] for path in told["fields"]} == told["fields"]
        budget = int(effective["prefill.itl_budget_ms"])
        assert abs(budget - itl_budget_ms(told["token_ms"])) <= 1, "the event rounds what the budget is made of"
        for process in mesh.family():
            process.kill()
