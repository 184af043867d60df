"""A change of the KV block size where the model runs: the same memory, seen as blocks of another size.

vLLM mixes this class into its worker (`worker_extension_cls`), so each method is a `collective_rpc`. Nothing is allocated and nothing is
cleared: every layer's cache is a view of one buffer, and whoever reads a block has written it before. That holds for plain full
attention of one number format alone; who calls has made sure of it (`vllm_reblock.not_live`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, create_kv_cache_views
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.utils import select_common_block_size

from services.worker.engines.vllm_seeds import keep_generators


class ReblockWorker:
    """Mix-in over vLLM's worker class; the attributes named here are its own."""

    model_runner: Any
    cache_config: Any

    _trimtab_memory: torch.Tensor | None = None
    """Kept while a change is under way: one that fails half-way must find its memory again."""

    def trimtab_ready(self) -> None:
        """Called once, before the first request."""
        keep_generators(self.model_runner)

    def trimtab_takes(self, sizes: list[int]) -> dict[int, str]:
        """For each size nothing, or in vLLM's own words what does not take it. Touches nothing."""
        return {size: self._trimtab_objection(size) for size in sizes}

    def _trimtab_objection(self, size: int) -> str:
        for groups in self.model_runner.attn_groups:
            specs = [group.kv_cache_spec for group in groups]
            if not all(isinstance(spec, AttentionSpec) for spec in specs):
                return "a layer without attention has a block size of its own"
            try:
                select_common_block_size(size, [group.backend for group in groups], specs)
            except ValueError as e:
                return str(e)
        return ""

    def trimtab_kv_bytes(self) -> int:
        """Of the memory that there is to cut."""
        return int(self._trimtab_raw().numel())

    def trimtab_lay(self, config: KVCacheConfig) -> None:
        """Cut the memory as the configuration says. Safe to repeat after it failed, with this one or another one."""
        runner, cache = self.model_runner, self.cache_config
        memory = self._trimtab_memory = self._trimtab_raw()
        _forget_requests(runner)
        runner._cleanup_profiling_kv_cache()
        (group,) = config.kv_cache_groups
        cache.block_size = group.kv_cache_spec.block_size
        cache.num_gpu_blocks = config.num_blocks
        cache.hash_block_size = config.hash_block_size
        cache.cache_hit_alignment_tokens = config.cache_hit_alignment_tokens
        runner.initialize_kv_cache(config, kv_cache_allocation_context=laid_over(memory))
        if hasattr(runner, "_postprocess_tensors"):
            # A CPU's runner has replaced what its batch keeps twice, and the batch is a new one.
            runner._postprocess_tensors()
        self._trimtab_memory = None

    def _trimtab_raw(self) -> torch.Tensor:
        if self._trimtab_memory is not None:
            return self._trimtab_memory
        first = self.model_runner.kv_caches[0]
        return torch.empty(0, dtype=torch.int8, device=first.device).set_(first.untyped_storage())


def _forget_requests(runner: Any) -> None:
    """Empty the rows of the batch. What is applied to logits is kept by row, outlives the batch, and must hear of it."""
    batch = runner.input_batch
    for request_id in list(batch.req_id_to_index):
        batch.remove_request(request_id)
    batch.condense()
    batch.refresh_metadata()


@contextmanager
def laid_over(memory: torch.Tensor) -> Iterator[None]:
    """Where vLLM would allocate a cache it gets views of `memory`, laid out as it would have laid them out."""

    def allocate(
        config: KVCacheConfig, device: torch.device, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        (group,) = config.kv_cache_groups
        (tensor,) = config.kv_cache_tensors
        if tensor.size > memory.numel():
            raise MemoryError(f"{tensor.size} bytes of KV blocks do not fit into {memory.numel()}")
        kernel = kernel_block_sizes[0] if kernel_block_sizes else None
        views = create_kv_cache_views(
            memory[: tensor.size], group.kv_cache_spec, config.num_blocks, layout, tensor, kernel_block_size=kernel
        )
        return dict(zip(tensor.layers, views, strict=True))

    was = gpu_model_runner.allocate_kv_cache
    gpu_model_runner.allocate_kv_cache = allocate
    try:
        yield
    finally:
        gpu_model_runner.allocate_kv_cache = was
