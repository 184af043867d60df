"""A change of the KV block size where the model runs: the same memory, seen as blocks of another size.

vLLM mixes this class into its worker (`worker_extension_cls`), so each method is a `collective_rpc`. Nothing is allocated and nothing is
cleared: every layer's cache is a view of one buffer, and whoever reads a block has written it before, or had it carried there. That holds
for plain full attention of one number format alone; who calls has made sure of it (`vllm_reblock.not_live`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheTensor, create_kv_cache_views
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.utils import select_common_block_size

from services.worker.engines.vllm_kv_layout import LAYOUTS, Cut, Span, layout_of, move
from services.worker.engines.vllm_seeds import keep_generators

log = init_logger(__name__)


class ReblockWorker:
    """Mix-in over vLLM's worker class; the attributes named here are its own."""

    model_runner: Any
    cache_config: Any

    _trimtab_memory: torch.Tensor | None = None
    """Kept while a change is under way: one that fails half-way must find its memory again."""
    _trimtab_before: Cut | None = None
    """The cache as it was cut before a change that carries it over, until it is."""
    _trimtab_layouts: dict[tuple[Any, ...], str]
    """What was found by trial: by sizes before and after and the kinds of layers, a name of LAYOUTS."""

    def trimtab_ready(self) -> None:
        """Called once, before the first request."""
        keep_generators(self.model_runner)
        self._trimtab_layouts = {}

    def trimtab_carries(self, sizes: list[int]) -> list[int]:
        """Of the sizes those between which KV can be carried, by what was found with the present one. Touches no block."""
        now = int(self.cache_config.block_size)
        # Blocks of one size would be moved whole, whatever is in them.
        others = [size for size in sizes if size != now]
        found = [s for s in others if self._trimtab_layout(now, s) == self._trimtab_layout(s, now) != ""]
        return [*found, now] if found else []

    def trimtab_carries_between(self, before: int, after: int) -> bool:
        return bool(self._trimtab_layout(before, after))

    def _trimtab_layout(self, before: int, after: int) -> str:
        """Of LAYOUTS the one by which KV is carried from blocks of the one size to blocks of the other, in every layer; "" for none."""
        layers = {_kind(layer): layer for layer in _layers(self.model_runner).values()}
        key = (before, after, *sorted(map(repr, layers)))
        if key not in self._trimtab_layouts:
            found = {self._trimtab_try(layer, before, after) for layer in layers.values()}
            self._trimtab_layouts[key] = found.pop() if len(found) == 1 else ""
        return self._trimtab_layouts[key]

    def _trimtab_try(self, layer: Any, before: int, after: int) -> str:
        layout = self.cache_config.get_resolved_kv_cache_layout()
        (group,) = self.model_runner.kv_cache_config.kv_cache_groups
        backends = [each.backend for groups in self.model_runner.attn_groups for each in groups]
        if not layout.is_layer_compact:
            # A layer is read whole before it is written, which helps only where no other layer lies between.
            return ""

        def scratch(size: int, blocks: int) -> torch.Tensor:
            spec = replace(group.kv_cache_spec, block_size=size)
            page, kernel = spec.page_size_bytes, select_common_block_size(size, backends, [spec] * len(backends))
            whole = KVCacheTensor(size=page * blocks, layers=["-"], layer_stride=page * blocks, block_stride=page)
            raw = torch.zeros(page * blocks, dtype=torch.int8, device=self.model_runner.device)
            (view,) = create_kv_cache_views(raw, spec, blocks, layout, whole, kernel_block_size=kernel)
            return view

        def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
            layer.impl.do_kv_cache_update(layer, key, value, cache, slots)

        try:
            with torch.inference_mode():
                return layout_of(write, scratch, before, after)
        except Exception as e:
            # A back end that can't be tried is one that is not known; changes have everything computed anew there.
            log.info("KV can't be carried from blocks of %d to blocks of %d: %r", before, after, e)
            return ""

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

    def trimtab_lay(self, config: KVCacheConfig, carries: bool) -> None:
        """Cut the memory as the configuration says. Safe to repeat after it failed, with this one or another one. `carries`: what lies there
        is to be moved by `trimtab_carry`."""
        runner, cache = self.model_runner, self.cache_config
        self._trimtab_before = self._trimtab_cut() if carries else None
        memory = self._trimtab_memory = self._trimtab_raw()
        _forget_requests(runner)
        with uncollected():
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

    def trimtab_carry(self, moves: Mapping[str, tuple[int, int, list[int], list[int]]]) -> None:
        """Move tokens into the blocks of now, and have each request's blocks known here: (first token, end, blocks of before, blocks of now)
        by request."""
        before, self._trimtab_before = self._trimtab_before, None
        assert before is not None
        after = self._trimtab_cut()
        name = self._trimtab_layout(before.block_size, after.block_size)
        if not name:
            raise RuntimeError("the attention back end does not lay KV out as it did when it was tried")
        with torch.inference_mode():
            move(before, after, (Span(*each) for each in moves.values()), LAYOUTS[name])
        for request_id, (_, _, _, blocks) in moves.items():
            self.model_runner.requests[request_id].block_ids = (list(blocks),)

    def _trimtab_cut(self) -> Cut:
        return Cut(int(self.cache_config.block_size), [layer.kv_cache for layer in _layers(self.model_runner).values()])

    def _trimtab_raw(self) -> torch.Tensor:
        if self._trimtab_memory is not None:
            return self._trimtab_memory
        first = self.model_runner.kv_caches[0]
        return torch.empty(0, dtype=torch.int8, device=first.device).set_(first.untyped_storage())


def _layers(runner: Any) -> dict[str, Any]:
    """Those that have a part of the cache of their own, as they lie in it."""
    (tensor,) = runner.kv_cache_config.kv_cache_tensors
    return {name: runner.compilation_config.static_forward_context[name] for name in tensor.layers}


def _kind(layer: Any) -> tuple[Any, ...]:
    """What decides how a layer writes its cache, sizes apart: those are the same in all of one group."""
    return type(layer), type(layer.impl), getattr(layer, "isa", "")


def _forget_requests(runner: Any) -> None:
    """Empty the rows of the batch. What is applied to logits is kept by row, outlives the batch, and must hear of it."""
    batch = runner.input_batch
    for request_id in list(batch.req_id_to_index):
        batch.remove_request(request_id)
    batch.condense()
    batch.refresh_metadata()


@contextmanager
def uncollected() -> Iterator[None]:
    """vLLM looks through all objects for rubbish when it drops a cache, which is two thirds of a change's time. Here there is none: what is
    dropped is views and tables, in no circles, and their memory stays."""

    class Spared:
        collect = staticmethod(lambda *_: 0)

    was = gpu_model_runner.gc
    gpu_model_runner.gc = Spared
    try:
        yield
    finally:
        gpu_model_runner.gc = was


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
