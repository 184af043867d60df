"""A KV cache whose size is given in bytes: vLLM on a CPU heeds a variable of its environment first, and says nothing of the argument."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest

from services.worker.engines import vllm as engines
from services.worker.engines.vllm import KV_SPACE, VllmEngine
from services.worker.engines.vllm_arguments import Arguments
from trimtab.errors import EngineDead


def fake(name: str, **what: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(what)
    return module


@pytest.mark.parametrize(
    ("more", "gib"), [({}, "3"), ({"kv_cache_memory_bytes": 1 << 27}, None), ({"kv_cache_memory_bytes": None}, "3")]
)
async def test_vllm_finds_the_whole_gib_only_where_nobody_gave_bytes(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], gib: str | None
) -> None:
    found: list[str | None] = []

    class Args:
        __dataclass_fields__ = dict.fromkeys(more)

        def __init__(self, **given: Any) -> None:
            assert {name: given[name] for name in more} == more

    class AsyncLLM:
        @staticmethod
        def from_engine_args(args: Args, **how: Any) -> None:
            found.append(os.environ.get(KV_SPACE))
            raise RuntimeError("far enough")

    for module in (
        fake("vllm", __version__="0.32.0"),
        fake("vllm.engine.arg_utils", AsyncEngineArgs=Args),
        fake("vllm.v1.engine.async_llm", AsyncLLM=AsyncLLM),
        fake("services.worker.engines.vllm_stats", Quiet=object),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(os, "environ", {**os.environ, KV_SPACE: "9", "OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(engines, "_has_gpu", lambda: False)
    engine = VllmEngine(
        model_path="m", model="m", max_num_seqs=1, max_step_tokens=8, max_model_len=None, dtype="auto", kv_cache_gib=3,
        arguments=Arguments(more=more),
    )  # fmt: skip
    try:
        with pytest.raises(EngineDead, match="far enough"):
            await engine.start()
    finally:
        await engine.stop()
    assert found == [gib]
