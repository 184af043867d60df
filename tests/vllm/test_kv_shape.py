"""Blocks are counted as vLLM counts them, for layers that keep all tokens and for those that forget; vLLM never says no to a plan.

vLLM's own managers of blocks, over a model without weights; the first tests are of every internal of them that `vllm_memory` touches.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.bench.bare_scheduler import Size, request, scheduler
from services.worker.engines.vllm_limits import limits_of
from services.worker.engines.vllm_memory import shape, told
from tests.vllm.conftest import ROOT
from tests.vllm.counted import count
from tests.vllm.scheduler_run import Run, Setting
from tests.vllm.test_internals import assigned_attributes, parameters, text
from trimtab.kv_shape import WHOLE, KvGroup, KvShape
from trimtab.messages import Workload

Specs = Callable[[], list[Any]]


def full(block_size: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window(block_size: int, tokens: int, **more: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=tokens, **more
    )


def chunked(block_size: int, tokens: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32, attention_chunk_size=tokens
    )


def plain() -> list[Any]:
    return [full(16)]


def v4() -> list[Any]:
    """As vLLM lays out DeepSeek-V4, in the sizes of the real one."""
    return [full(256), window(64, 128), window(64, 128), window(4, 8), window(8, 128)]


def small_v4() -> list[Any]:
    """The same with a quarter of the tokens, so that short prompts show what long ones do there."""
    return [full(64), window(16, 32), window(16, 32), window(4, 8), window(8, 32)]


def mixed() -> list[Any]:
    """vLLM looks for prefixes only where chunked layers have blocks of the others' size."""
    return [full(16), window(16, 40, extra_retained_tokens=3), chunked(16, 48)]


SHAPES = (plain, v4, small_v4, mixed)
ROOMY = 4000


# Internals.


def test_managers_say_what_a_request_takes() -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import (
        ChunkedLocalAttentionManager,
        SingleTypeKVCacheManager,
        SlidingWindowManager,
    )

    assert {"coordinator", "block_pool"} <= assigned_attributes(KVCacheManager)
    assert "single_type_managers" in assigned_attributes(KVCacheCoordinator)
    of_all = assigned_attributes(SingleTypeKVCacheManager)
    assert {"block_size", "block_pool", "kv_cache_spec", "max_admission_blocks_per_request"} <= of_all
    assert {"sliding_window", "extra_retained_tokens"} <= assigned_attributes(SlidingWindowManager)
    assert "attention_chunk_size" in assigned_attributes(ChunkedLocalAttentionManager)
    assert parameters(KVCacheManager.remove_skipped_blocks) == [
        "self", "request_id", "processed_computed_tokens", "num_prompt_tokens"
    ]  # fmt: skip


def test_what_lies_behind_is_given_back_before_blocks_are_taken_and_by_what_is_processed() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    source = text(KVCacheManager.allocate_slots)
    back, count, take = (
        source.index(f"self.coordinator.{name}(")
        for name in ("remove_skipped_blocks", "get_num_blocks_to_allocate", "allocate_new_blocks")
    )
    # The first count is that of the gate before which a whole request must fit.
    gate = source[count:back]
    assert count < back < take and "apply_admission_cap=True" in gate
    assert "total_computed_tokens - request.num_in_flight_tokens" in source[back:take]
    assert "num_tokens = full_num_tokens" in gate.replace("num_tokens=", "num_tokens = ") and "watermark_blocks" in gate


def test_kinds_of_layers_are_those_that_we_know() -> None:
    """A new one would be counted as one that keeps all tokens: look at its manager first."""
    from vllm.v1.core import single_type_kv_cache_manager as managers

    base = managers.SingleTypeKVCacheManager
    found = {n for n, c in vars(managers).items() if inspect.isclass(c) and issubclass(c, base) and n[0] != "_"}
    assert found == {
        "SingleTypeKVCacheManager", "FullAttentionManager", "RSWAManager", "SlidingWindowManager", "CircularBufferManager",
        "ChunkedLocalAttentionManager", "MambaManager", "CrossAttentionManager", "SinkFullAttentionManager",
        "HiSparseSourceManager", "HiSparseHotManager", "HiSparseResidentManager",
    }  # fmt: skip


def test_the_gate_lets_in_who_fits_whole() -> None:
    from vllm.config.scheduler import SchedulerConfig

    assert SchedulerConfig.__dataclass_fields__["scheduler_reserve_full_isl"].default is True
    assert SchedulerConfig(max_model_len=8, is_encoder_decoder=False).watermark == 0.0


# What is counted.


def a_scheduler(directory: Path, specs: Sequence[Any], **size: Any) -> Any:
    return scheduler(Size(blocks=ROOMY, max_step_tokens=256, **size), directory, specs=specs)


def test_a_shape_has_vllms_own_sizes_windows_and_caps(tmp_path: Path) -> None:
    s = a_scheduler(tmp_path, v4())
    found = shape(s.kv_cache_manager, s.vllm_config)
    cap_64, cap_4, cap_8 = (-(-(seen - 1 + 256) // size) + 1 for seen, size in ((128, 64), (8, 4), (128, 8)))
    expected = (
        KvGroup(256), KvGroup(64, window=128, cap=cap_64, count=2), KvGroup(4, window=8, cap=cap_4), KvGroup(8, window=128, cap=cap_8)
    )  # fmt: skip
    assert found == KvShape(expected)
    facts = {
        "max_num_seqs": 8,
        "max_step_tokens": 256,
        "block_size": 256,
        "total_blocks": ROOMY,
        "kv_groups": told(found),
    }
    limits = limits_of({**facts, "block_sizes": [256], "live_blocks": False, "carries_blocks": False}, 8192, "vllm")
    assert limits.kv == found, "the front process is told the same"


def test_of_layers_that_all_keep_all_tokens_block_size_says_it_all(tmp_path: Path) -> None:
    s = a_scheduler(tmp_path, plain())
    assert shape(s.kv_cache_manager, s.vllm_config) == KvShape.of(16)
    assert told(KvShape.of(16)) == []


def test_a_state_is_counted_by_its_bound(tmp_path: Path) -> None:
    import torch
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=1, dtype=torch.float32)
    s = a_scheduler(tmp_path, [full(16), ring], prefix_caching=False)
    kv = shape(s.kv_cache_manager, s.vllm_config)
    assert kv == KvShape((KvGroup(16), KvGroup(WHOLE)))
    check_every_step(s, kv, 700)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("prompt_tokens", [1, 63, 64, 257, 1000, 3001])
@pytest.mark.parametrize("specs", SHAPES)
def test_vllms_pool_loses_exactly_what_is_counted(
    tmp_path: Path, specs: Specs, prompt_tokens: int, asynchronous: bool
) -> None:
    s = a_scheduler(tmp_path, specs(), prefix_caching=False, asynchronous=asynchronous)
    check_every_step(s, shape(s.kv_cache_manager, s.vllm_config), prompt_tokens)


def check_every_step(s: Any, kv: KvShape, prompt_tokens: int, decodes: int = 150) -> None:
    """One request alone, to its end; each step begins when the one before it is over."""
    from vllm.v1.outputs import ModelRunnerOutput

    pool = s.kv_cache_manager.block_pool
    empty = pool.get_num_free_blocks()
    most, peak = kv.blocks(prompt_tokens), 0
    r = request("r", range(10, 10 + prompt_tokens), decodes, Workload.BATCH, 0.0)
    s.add_request(r)
    while not r.is_finished():
        before = r.num_computed_tokens
        step = s.schedule()
        tokens = step.num_scheduled_tokens[r.request_id]
        lost = empty - pool.get_num_free_blocks()
        assert lost == kv.held(before) + kv.taken(before, tokens), f"{before} tokens and {tokens} more"
        if before + tokens <= prompt_tokens:
            peak = max(peak, lost)
        ids = list(step.num_scheduled_tokens)
        prompt_read = before + tokens >= prompt_tokens
        sampled = [[7] if prompt_read else [] for _ in ids]
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={i: n for n, i in enumerate(ids)}, sampled_token_ids=sampled
        )
        s.update_from_output(step, output)
    assert 0 < peak <= most
    assert pool.get_num_free_blocks() == empty


def test_a_real_engines_pool_loses_what_is_counted_and_refuses_nothing(model_path: str) -> None:
    steps, differ, refused, preempted = count(model_path, 24, {"PYTHONPATH": str(ROOT), "VLLM_PLUGINS": "trimtab"})
    assert steps > 100 and (differ, refused, preempted) == (0, 0, 0)


# Few blocks.

Runs = Callable[..., Run]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return lambda setting, seed=1: watched(Run(setting, seed, tmp_path, monkeypatch))


def watched(r: Run) -> Run:
    """Counts in `r.saw` what vLLM refuses, and whom it preempts by itself."""
    s = r.scheduler
    r.saw = saw = Counter[str]()  # type: ignore[attr-defined]
    allocate, preempt = s.kv_cache_manager.allocate_slots, s._preempt_request

    def allocating(asking: Any, *args: Any, **kwargs: Any) -> Any:
        found = allocate(asking, *args, **kwargs)
        saw["given"] += 1
        saw["refused"] += found is None
        return found

    def preempting(*args: Any, **kwargs: Any) -> Any:
        saw["by vLLM"] += not s._evicting
        return preempt(*args, **kwargs)

    s.kv_cache_manager.allocate_slots, s._preempt_request = allocating, preempting
    return r


WAYS = {
    "sync": {"asynchronous": False}, "async": {}, "no prefix cache": {"asynchronous": False, "prefix_caching": False},
}  # fmt: skip
FEW = {
    "few": Setting(shows=("recomputed_tokens",)),
    "shared prefixes": Setting(shared=0.6, shows=("recomputed_tokens",)),
    "governor": Setting(
        {"prefill.itl_budget_ms": 12, "prefill.max_suspend_ms": 100, "batch.active": 8, "batch.hard_cap": 8}, shows=("held_decodes",)
    ),
    "aborts": Setting(aborts=0.03, shared=0.3, shows=("aborted_tokens",)),
}  # fmt: skip
BLOCKS = {plain: (60, 60), small_v4: (180, 300), mixed: (100, 130)}
"""Little more than the longest request takes alone, at one batch in flight and at two."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("specs", BLOCKS)
def test_with_few_blocks_vllm_refuses_nothing_that_was_planned(run: Runs, specs: Specs, name: str, way: str) -> None:
    shown: Counter[str] = Counter()
    for seed in range(2):
        setting = replace(FEW[name], specs=specs, **WAYS[way])
        setting = replace(setting, blocks=BLOCKS[specs][setting.asynchronous])
        r = run(setting, seed)
        r.storm()
        r.check()
        saw = r.saw  # type: ignore[attr-defined]
        assert saw["given"] and not saw["refused"] and not saw["by vLLM"], saw
        shown.update({stat: int(r.stats()[stat]) for stat in setting.shows})
    assert all(shown[stat] for stat in FEW[name].shows), f"the runs were to show more than {shown}"
