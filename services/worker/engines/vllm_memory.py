"""What the KV of a token costs, by vLLM's own plan of its cache."""

from __future__ import annotations

from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs


def kv_bytes_per_token(config: KVCacheConfig) -> float:
    """Bytes in all layers together, in one engine process's memory; 0.0 for a model without such a cache.

    Where layers keep only a window of tokens it is what a token costs while it is within all windows.
    """
    total = 0.0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        # A page of the mixed kind is already one of all its layers.
        layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
        total += spec.page_size_bytes * layers / spec.block_size
    return total
