"""What a token's KV costs where some layers forget, and whether blocks tell of slots; by vLLM's own kinds of caches, without an engine."""

from __future__ import annotations

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from services.worker.engines.vllm_memory import even, forgets, kv_bytes_per_token

BLOCKS, OF_A_BLOCK = 100, 96_000
FULL = FullAttentionSpec(block_size=256, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=128)
STATE = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=8)


def a_cache(*specs: KVCacheSpec) -> KVCacheConfig:
    """Groups of two layers each, which share one pool of blocks."""
    groups = [KVCacheGroupSpec([f"l{i}", f"m{i}"], spec) for i, spec in enumerate(specs)]
    layers = [name for group in groups for name in group.layer_names]
    tensor = KVCacheTensor(size=BLOCKS * OF_A_BLOCK, layers=layers, layer_stride=0, block_stride=OF_A_BLOCK)
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=groups)


def test_a_token_costs_its_share_of_a_block_of_the_layers_that_keep_it():
    assert kv_bytes_per_token(a_cache(WINDOW, FULL, STATE)) == OF_A_BLOCK / 256
    assert kv_bytes_per_token(a_cache(WINDOW, FULL, FULL)) == 2 * OF_A_BLOCK / 256


def test_where_no_layer_or_every_layer_forgets_it_is_what_all_of_them_take():
    page = FULL.page_size_bytes
    assert kv_bytes_per_token(a_cache(FULL)) == 2 * page / 256
    assert kv_bytes_per_token(a_cache(WINDOW)) == 2 * WINDOW.page_size_bytes / 64


def test_blocks_tell_of_slots_only_where_all_are_alike():
    assert even(a_cache(FULL)) is True
    assert [even(a_cache(*specs)) for specs in ((WINDOW,), (FULL, FULL), (FULL, STATE))] == [False] * 3


def test_a_mixed_group_forgets_where_all_of_its_layers_do():
    assert forgets(UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"a": WINDOW, "b": WINDOW})) is True
    assert forgets(UniformTypeKVCacheSpecs(block_size=256, kv_cache_specs={"a": FULL, "b": WINDOW})) is False
