"""Every internal of vLLM that a change of the KV block size touches: an upgrade that changes one fails here first, and says which.

What a name is for can be read where we use it: `services/worker/engines/vllm_reblock.py`, `vllm_reblock_worker.py` and `vllm_seeds.py`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.bench.bare_scheduler import request
from tests.vllm.test_internals import assigned_attributes, parameters, text
from tests.vllm.test_internals_scheduler import stock
from trimtab.messages import Workload

# Names.


@pytest.mark.parametrize(
    "name",
    [
        "kv_cache_config", "kv_cache_manager", "block_size", "hash_block_size", "max_model_len", "cache_config", "vllm_config",
        "use_eagle_block_drop", "num_prefill_lookahead", "log_stats", "enable_kv_cache_events", "dcp_world_size",
        "kv_metrics_collector", "scheduler_config", "connector", "ec_connector", "is_encoder_decoder", "running", "requests",
        "kv_holding_waiting", "deferred_frees", "prev_step_scheduled_req_ids",
    ],
)  # fmt: skip
def test_the_scheduler_has_the_attribute(name: str) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert name in assigned_attributes(Scheduler)


@pytest.mark.parametrize(
    "name",
    [
        "pooling_params", "prompt_embeds", "resumable", "num_in_flight_tokens", "num_output_placeholders", "status", "mm_features",
        "lora_request", "cache_salt", "skip_reading_prefix_cache", "block_hashes", "_block_hasher",
        "_prompt_embeds_per_block_hashes", "num_computed_tokens", "all_token_ids",
    ],
)  # fmt: skip
def test_a_request_has_the_attribute(name: str) -> None:
    from vllm.v1.request import Request

    assert name in assigned_attributes(Request)
    assert parameters(Request.update_block_hashes) == ["self"]


def test_the_settings_that_forbid_a_change_are_where_we_look() -> None:
    from vllm.config import CacheConfig, CompilationConfig, ModelConfig, ParallelConfig, VllmConfig

    assert {"num_gpu_blocks_override", "prefix_match_unit", "enable_prefix_caching", "prefix_caching_hash_algo"} <= set(
        CacheConfig.__dataclass_fields__
    )
    assert {"enable_mamba_shared_prefix_checkpoint", "hash_block_size", "cache_hit_alignment_tokens"} <= set(
        CacheConfig.__dataclass_fields__
    )
    assert {"mode", "cudagraph_mode"} <= set(CompilationConfig.__dataclass_fields__)
    assert {"speculative_config", "attention_config"} <= set(VllmConfig.__dataclass_fields__)
    assert isinstance(VllmConfig.use_v2_model_runner, property) and isinstance(
        VllmConfig.max_in_flight_tokens, property
    )
    assert isinstance(ParallelConfig.world_size_across_dp, property)
    assert "worker_extension_cls" in ParallelConfig.__dataclass_fields__
    assert "self.original_max_model_len" in inspect.getsource(ModelConfig)
    assert "runner_type" in inspect.getsource(ModelConfig)


def test_the_engine_core_has_what_we_read_and_change() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    assert {"batch_queue", "request_block_hasher", "step_fn", "model_executor", "vllm_config"} <= assigned_attributes(
        EngineCore
    )
    assert parameters(EngineCore._initialize_effective_attention_block_size) == ["self"]
    # Requests are hashed in another thread, by the hasher that is set at that moment.
    assert "Request.from_engine_core_request(request, self.request_block_hasher)" in text(
        EngineCore.preprocess_add_request
    )
    # Once torn, the engine ends in its very next step, and its loop steps after each batch of calls.
    assert "self.step_fn()" in text(EngineCoreProc._process_engine_step)


def test_a_worker_takes_our_calls_and_none_of_them_is_its_own() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    from services.worker.engines.vllm_reblock_worker import ReblockWorker

    ours = {name for name in dir(ReblockWorker) if not name.startswith("__")}
    assert {"trimtab_ready", "trimtab_takes", "trimtab_kv_bytes", "trimtab_lay"} <= ours
    assert not [name for kind in (Worker, CPUWorker) for name in ours if hasattr(kind, name)]


# How caches are planned and made.


def test_the_manager_of_blocks_is_made_as_vllms_scheduler_makes_it() -> None:
    """By the same arguments, of the same attributes, save the configuration and the sizes."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    from services.worker.engines import vllm_reblock

    def made(function: Any) -> dict[str, str]:
        source = text(function)
        call = source[source.index("KVCacheManager(") + len("KVCacheManager(") :]
        depth, end = 1, 0
        while depth:
            depth += {"(": 1, ")": -1}.get(call[end], 0)
            end += 1
        pairs = [x.strip().split("=", 1) for x in call[: end - 1].split(",") if x.strip()]
        return {name: value.strip("() ").removeprefix("self.").removeprefix("scheduler.") for name, value in pairs}

    theirs, ours = made(Scheduler.__init__), made(vllm_reblock._manager)
    assert theirs.keys() == ours.keys() <= set(parameters(KVCacheManager.__init__))
    differ = {n for n in theirs if theirs[n].removeprefix("vllm_config.") != ours[n].removeprefix("vllm_config.")}
    assert differ == {"kv_cache_config", "scheduler_block_size", "hash_block_size"}


def test_one_group_has_one_size_for_the_scheduler_the_hashes_and_the_hits() -> None:
    from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens, resolve_kv_cache_block_sizes

    cache = SimpleNamespace(block_size=96, prefix_match_unit=None, enable_prefix_caching=True)
    config = SimpleNamespace(
        cache_config=cache, parallel_config=SimpleNamespace(decode_context_parallel_size=1), kv_transfer_config=None
    )
    one = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(dcp_sharded=True))])
    assert resolve_kv_cache_block_sizes(one, config) == (96, 96)
    assert resolve_cache_hit_alignment_tokens(one, config, 96, 96) == 96


def test_a_plan_of_other_blocks_is_the_plan_that_vllm_makes_for_them(tmp_path: Path) -> None:
    from dataclasses import replace

    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_request_block_hasher

    s: Any = stock(tmp_path)
    (group,) = s.kv_cache_config.kv_cache_groups
    assert {"kv_cache_spec", "layer_names"} <= set(type(group).__dataclass_fields__)
    assert parameters(get_kv_cache_config_from_groups) == ["vllm_config", "kv_cache_groups", "available_memory"]
    assert parameters(get_request_block_hasher) == ["hash_block_size", "caching_hash_fn"]
    twice = replace(group.kv_cache_spec, block_size=2 * group.kv_cache_spec.block_size)
    assert twice.page_size_bytes == 2 * group.kv_cache_spec.page_size_bytes
    assert {"kv_cache_layout", "kv_tp_replicas", "hash_block_size", "cache_hit_alignment_tokens", "num_blocks"} <= set(
        type(s.kv_cache_config).__dataclass_fields__
    )


def test_the_kinds_of_caches_say_what_they_are() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVQuantMode, SlidingWindowSpec

    fields = set(FullAttentionSpec.__dataclass_fields__)
    assert {
        "sliding_window", "attention_chunk_size", "non_causal", "kv_quant_mode", "page_size_padded", "state_content_bytes",
        "tokens_per_state",
    } <= fields  # fmt: skip
    assert not issubclass(SlidingWindowSpec, FullAttentionSpec) and KVQuantMode.NONE is not None
    assert isinstance(KVCacheConfig.needs_kv_cache_zeroing, property)


def test_who_holds_blocks_and_which_are_cached_is_read_from_the_manager(tmp_path: Path) -> None:
    s: Any = stock(tmp_path)
    r = request("a", list(range(100)), 4, Workload.REALTIME, 0.0)
    s.add_request(r)
    s.schedule()
    (manager,) = s.kv_cache_manager.coordinator.single_type_managers
    blocks = manager.req_to_blocks[r.request_id]
    assert blocks and all(block.ref_cnt == 1 for block in blocks)
    assert [b.block_id for b in blocks] == s.kv_cache_manager.get_block_ids(r.request_id)[0]
    assert len(s.kv_cache_manager.block_pool.blocks) == s.kv_cache_config.num_blocks
    assert hasattr(blocks[0], "block_hash") and hasattr(s.kv_cache_manager, "prefix_cache_stats")


# How the model's side is cut anew.


def test_the_runner_lets_us_say_where_its_cache_lies() -> None:
    from vllm.v1.kv_cache_interface import create_kv_cache_views
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.utils import allocate_kv_cache, select_common_block_size

    runner = gpu_model_runner.GPUModelRunner
    assert parameters(runner.initialize_kv_cache) == [
        "self",
        "kv_cache_config",
        "is_profiling",
        "kv_cache_allocation_context",
    ]
    assert parameters(allocate_kv_cache) == ["kv_cache_config", "device", "layout", "kernel_block_sizes"]
    assert gpu_model_runner.allocate_kv_cache is allocate_kv_cache, "looked up in the runner's module"
    source = text(runner.initialize_kv_cache_tensors)
    assert source.index("with allocation_context") < source.index("kv_caches = allocate_kv_cache(")
    assert (
        "create_kv_cache_views( buf, spec, num_blocks, layout, tensor, kernel_block_size=kernel_block_size, )"
        in text(allocate_kv_cache)
    )
    assert parameters(create_kv_cache_views)[:5] == ["raw", "spec", "num_blocks", "layout", "kv_cache_tensor"]
    assert parameters(select_common_block_size) == ["kv_manager_block_size", "backends", "kv_cache_specs"]
    # What is bound and remembered of the old blocks is dropped by vLLM's own call for that, and made again.
    source = text(runner._cleanup_profiling_kv_cache)
    for what in (
        "self.kv_caches.clear()",
        "self.attn_groups.clear()",
        "self._init_block_sizes = []",
        "layer.kv_cache =",
    ):
        assert what in source
    assert parameters(CPUModelRunner._postprocess_tensors) == ["self"]
    assert "gc.collect()" in source and inspect.ismodule(gpu_model_runner.gc), "what a change spares itself"


def test_nothing_else_of_the_runner_keeps_the_block_size() -> None:
    """Names that hold one and are set outside of what `initialize_kv_cache` sets again."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    kept = set(re.findall(r"self\.(\w*block_size\w*) = ", inspect.getsource(GPUModelRunner)))
    assert kept == {"_init_block_sizes", "_kernel_block_sizes"}


def test_a_batch_tells_who_changes_logits_that_its_rows_are_gone() -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    assert parameters(InputBatch.remove_request) == ["self", "req_id"]
    assert parameters(InputBatch.condense) == parameters(InputBatch.refresh_metadata) == ["self"]
    assert "logit_proc.update_state(batch_update)" in text(InputBatch.refresh_metadata)
    assert "req_id_to_index" in assigned_attributes(InputBatch)


# What is carried over.


def test_blocks_are_given_out_to_who_is_carried_as_to_a_prompt(tmp_path: Path) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    allocate = parameters(KVCacheManager.allocate_slots)
    assert allocate[:5] == ["self", "request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks"]
    assert parameters(KVCacheManager.truncate_computed_blocks) == ["self", "blocks", "num_computed_tokens"]
    assert parameters(KVCacheManager.get_block_ids) == ["self", "request_id"]
    s: Any = stock(tmp_path)
    r = request("a", list(range(100)), 4, Workload.REALTIME, 0.0)
    blocks, hit, *_ = s.kv_cache_manager.get_computed_blocks(r)
    assert hit == 0 and s.kv_cache_manager.truncate_computed_blocks(blocks, 0) is not None


def test_a_request_that_is_not_in_the_batch_is_added_by_what_the_runner_knows_of_it() -> None:
    """So that new block ids there, and an empty batch, are all that it takes."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "block_ids" in CachedRequestState.__dataclass_fields__
    source = text(GPUModelRunner._update_states)
    assert "req_state = self.requests[req_id]" in source
    assert "for block_ids, new_ids in zip(req_state.block_ids, new_block_ids): block_ids.extend(new_ids)" in source
    assert source.index("if req_index is None: # The request is not in the persistent batch.") < source.index(
        "reqs_to_add.append(req_state) # Track resumed"
    )
    assert "self.input_batch.add_request(request)" in source


def test_where_a_layers_cache_lies_and_how_it_is_written_is_asked_of_vllm() -> None:
    from vllm.config import CacheConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    from vllm.v1.kv_cache_interface import KVCacheTensor
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import clear_layer_kv_caches

    wanted = ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]
    for impl in (CPUAttentionBackendImpl, FlashAttentionImpl):
        assert parameters(impl.do_kv_cache_update) == wanted
    assert {"size", "layers", "layer_stride", "block_stride"} <= set(KVCacheTensor.__dataclass_fields__)
    assert isinstance(KVCacheLayout.is_layer_compact, property)
    assert parameters(CacheConfig.get_resolved_kv_cache_layout) == ["self"]
    assert "layer.kv_cache" in text(clear_layer_kv_caches)


# Generators.


def test_vllm_turns_generators_back_by_an_offset_which_a_cpu_has_not() -> None:
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "gen.set_offset(gen.get_offset() - 4)" in text(GPUModelRunner._bookkeeping_sync)
    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator(device="cpu").get_offset()
    source = text(GPUModelRunner.sample_tokens)
    assert source.index("self._sample(") < source.index("self._bookkeeping_sync(")
    assert "discard_request_mask" in assigned_attributes(GPUModelRunner)


def test_a_draw_that_is_thrown_away_is_drawn_again() -> None:
    import torch

    from services.worker.engines.vllm_seeds import keep_generators

    generators = {row: torch.Generator(device="cpu").manual_seed(7) for row in (0, 1)}

    def sample() -> list[float]:
        return [float(torch.rand(1, generator=runner.input_batch.generators[row])) for row in (0, 1)]

    def book() -> list[int]:
        return sorted(runner.input_batch.generators)

    runner = SimpleNamespace(
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(generators=dict(generators), num_reqs=2),
        discard_request_mask=SimpleNamespace(np=[True, False]),
        _sample=sample,
        _bookkeeping_sync=book,
    )
    keep_generators(runner)
    keep_generators(runner)
    first = runner._sample()
    assert runner._bookkeeping_sync() == [1] and runner.input_batch.generators == generators
    second = runner._sample()
    assert first[0] == second[0] and first[1] != second[1]
