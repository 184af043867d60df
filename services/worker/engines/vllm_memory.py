"""What the KV of a token costs, by vLLM's own plan of its cache, and how many blocks a request takes, by vLLM's own managers of them.

Layers of one kind are a group. Blocks of all groups come from one pool and are of one size in bytes, not in tokens: a block of DeepSeek-V4's
holds 256 tokens compressed, or the newest 64, or the state of 4. Every internal of vLLM that is touched stands in
`tests/vllm/test_kv_shape.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    HiSparseHotSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from trimtab.kv_shape import WHOLE, KvGroup, KvShape

OF_ONE_SIZE = (CircularBufferSpec, CrossAttentionSpec, HiSparseHotSpec)
"""Kinds of which a request takes the same, or up to a bound, however long it is."""
STATE_WINDOW = 2
"""Of Mamba's states the newest computed one is kept, as of a window that holds one token beside the next."""


def shape(manager: Any, config: VllmConfig) -> KvShape:
    """What a request takes of the pool of vLLM's KVCacheManager. Where a group is of one size, its bound is counted from the first token on."""
    pool = manager.block_pool
    mine = (m for m in manager.coordinator.single_type_managers if m.block_pool is pool)
    found = Counter(group for m in mine for group in _groups(m, config))
    groups = tuple(replace(group, count=group.count * alike) for group, alike in found.items())
    # A model without a KV cache takes none; one block is near enough.
    return KvShape(groups or (KvGroup(WHOLE),), config.num_lookahead_tokens)


def told(kv: KvShape) -> list[tuple[int, ...]]:
    """The groups as plain numbers, on their way to the front process; none where `block_size` says it all."""
    return [] if kv.plain else [astuple(group) for group in kv.groups]


def _groups(manager: SingleTypeKVCacheManager, config: VllmConfig) -> list[KvGroup]:
    spec, size = manager.kv_cache_spec, manager.block_size
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
        spare = spec.num_speculative_blocks
        return [KvGroup(size, window=STATE_WINDOW), *([KvGroup(WHOLE, count=spare)] if spare else [])]
    if isinstance(spec, (*OF_ONE_SIZE, MambaSpec)):
        return [KvGroup(WHOLE, count=-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes))]
    cap = manager.max_admission_blocks_per_request or 0
    if isinstance(manager, SlidingWindowManager):
        return [KvGroup(size, window=manager.sliding_window + manager.extra_retained_tokens, cap=cap)]
    if isinstance(manager, ChunkedLocalAttentionManager):
        return [KvGroup(size, chunk=manager.attention_chunk_size, cap=cap)]
    return [KvGroup(size, cap=cap)]


def kv_bytes_per_token(config: KVCacheConfig) -> float:
    """Bytes in all layers together, in one engine process's memory; 0.0 for a model without such a cache.

    Where some layers keep only what is new, a request holds a few blocks for these however long it is; a token then costs its share of a
    block for the layers that keep all tokens. Where all layers are so, it is what a token costs while they still keep it.
    """
    lasting = [group for group in config.kv_cache_groups if not forgets(group.kv_cache_spec)]
    if lasting and len(lasting) < len(config.kv_cache_groups):
        of_a_block = max(tensor.size for tensor in config.kv_cache_tensors) / config.num_blocks
        return float(sum(of_a_block / group.kv_cache_spec.block_size for group in lasting))
    total = 0.0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        # A page of the mixed kind is already one of all its layers.
        layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
        total += spec.page_size_bytes * layers / spec.block_size
    return total


def even(config: KVCacheConfig) -> bool:
    """Whether each block holds as many tokens as any other: only then do blocks in use tell of slots in use."""
    groups = config.kv_cache_groups
    return len(groups) <= 1 and not any(forgets(group.kv_cache_spec) for group in groups)


def forgets(spec: KVCacheSpec) -> bool:
    """Whether its layers keep a window of the newest tokens, or a state, whatever the request's length."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(forgets(each) for each in spec.kv_cache_specs.values())
    return isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec)
