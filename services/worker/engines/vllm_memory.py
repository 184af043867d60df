"""What the KV of a token costs, by vLLM's own plan of its cache.

Layers of one kind are a group. Blocks of all groups come from one pool and are of one size in bytes, not in tokens: a block of DeepSeek-V4's
holds 256 tokens compressed, or the newest 64, or the state of 4.
"""

from __future__ import annotations

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


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
