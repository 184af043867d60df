"""A change of the KV block size in vLLM's engine process, between two steps, while requests are under way.

Everything that may forbid it is asked before anything is touched. The model's side then sees the same memory as blocks of the new size
(`vllm_reblock_worker`); the scheduler gets a new manager of blocks, and every request new hashes. Where the layout of the KV is known it is
carried over, and whoever runs runs on (`vllm_carry`). Else they are put back to the waiting first, as vLLM's own preemption does it, and
their KV is computed anew. What fails after the first of these is rolled back, and everybody's KV is computed anew; an engine whose way back
fails as well computes no token more, as it might be a wrong one.

Every internal of vLLM that is touched stands in `tests/vllm/test_internals_reblock.py`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_request_block_hasher,
    update_kv_cache_capacity,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVQuantMode
from vllm.v1.request import RequestStatus

from services.worker.engines import reblocks, vllm_carry
from trimtab.blocks import LADDER, Geometry, Reblock, When
from trimtab.errors import ReblockRefused

log = init_logger(__name__)


class Torn(Exception):
    """The engine's sides don't agree on the block size, and can't be made to."""


def facts(core: Any) -> dict[str, Any]:
    """The sizes of the ladder that this engine would take at start, and whether it takes them while it runs. Asked before it serves."""
    core.model_executor.collective_rpc("trimtab_ready")
    sizes, live = _accepted(core), not not_live(core)
    carries = live and vllm_carry.find_out(core, sizes)
    return {"block_sizes": list(sizes), "live_blocks": live, "carries_blocks": carries}


def reblock(core: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The utility call. An answer, whatever happens: vLLM makes mere text of what is raised."""
    try:
        return reblocks.answer(_reblock(core, asked))
    except ReblockRefused as refused:
        return reblocks.refusal(refused)
    except Torn as torn:
        return {"dead": str(torn)}


def _reblock(core: Any, asked: dict[str, Any]) -> Reblock:
    scheduler = core.scheduler
    accepted = _accepted(core)
    size = reblocks.sized(asked["block_size"], accepted)
    before = scheduler.kv_cache_config
    was = Geometry(scheduler.block_size, before.num_blocks)
    if size == was.block_size:
        return Reblock(was, was, dry_run=asked["dry_run"])
    if why := not_live(core):
        raise ReblockRefused(
            f"this engine can't change its block size while it runs: {why}", cause="NOT_LIVE", accepted=accepted
        )
    if why := _objections(core, [size])[size]:
        raise ReblockRefused(why, cause="SIZE", accepted=accepted)
    after = _cut(core, size, _memory(core))
    becomes = Geometry(size, after.num_blocks)
    # vLLM's pool keeps a block for itself.
    reblocks.refuse_long(scheduler.max_model_len, becomes, accepted, usable=after.num_blocks - 1)
    if why := _unrecomputable(scheduler):
        raise ReblockRefused(why, cause="NOT_RECOMPUTABLE", accepted=accepted)
    carries = asked["carry"] and bool(scheduler.running) and vllm_carry.can(core, was.block_size, size)
    carried, recompute, context = _moves(scheduler, size, after.num_blocks - 1 if carries else 0)
    found = Reblock(
        was, becomes, recompute, len(scheduler.running), _cached_tokens(scheduler), carried_tokens=carried,
        recompute_context=context, dry_run=asked["dry_run"],
    )  # fmt: skip
    reblocks.refuse_busy(found, When(asked["when"]), asked["max_recompute_tokens"], accepted)
    if asked["dry_run"]:
        return found
    begun = time.monotonic()
    _change(core, before, after, accepted, carries=carries)
    return replace(found, change_ms=(time.monotonic() - begun) * 1000.0)


# What may forbid it.


def not_live(core: Any) -> str:
    """Why this engine can't change while it runs, or nothing. What it says holds for the engine's life."""
    config, scheduler = core.vllm_config, core.scheduler
    parallel, compilation, cache = config.parallel_config, config.compilation_config, config.cache_config
    forbids: list[tuple[bool, str]] = [
        # A step is always under way then, and its output would be of the old blocks.
        (core.batch_queue is not None, "it schedules a step while another one runs"),
        (compilation.mode != CompilationMode.NONE, "its model is compiled"),
        (compilation.cudagraph_mode != CUDAGraphMode.NONE, "its graphs were captured over the blocks as they are"),
        (config.use_v2_model_runner, "its model runner is vLLM's second one"),
        (parallel.world_size_across_dp != 1, "its model is spread over several processes"),
        (config.speculative_config is not None, "it speculates, and the draft has a cache of its own"),
        (config.model_config.runner_type != "generate", "its model does not generate"),
        (scheduler.is_encoder_decoder, "its model has an encoder"),
        (scheduler.connector is not None or scheduler.ec_connector is not None, "others read its cache by address"),
        (scheduler.enable_kv_cache_events or scheduler.kv_metrics_collector is not None, "others follow its blocks"),
        (cache.num_gpu_blocks_override is not None, "the number of its blocks was given by hand"),
        (cache.prefix_match_unit is not None, "the unit of its prefix cache was given by hand"),
        (config.model_config.original_max_model_len == -1, "its longest request was fitted to its blocks"),
        (config.attention_config.hisparse_config is not None, "part of its cache lies in the host's memory"),
    ]
    return next((why for forbidden, why in forbids if forbidden), "") or _not_plain(scheduler.kv_cache_config)


def _not_plain(config: KVCacheConfig) -> str:
    if len(config.kv_cache_groups) != 1 or len(config.kv_cache_tensors) != 1:
        return "its layers have caches of several kinds"
    spec = config.kv_cache_groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return f"its cache is a {type(spec).__name__}, and no plain one of full attention"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal:
        return "its attention does not see all that was before"
    if spec.kv_quant_mode != KVQuantMode.NONE or config.needs_kv_cache_zeroing:
        return "its cache is quantised, or must be cleared before it is used"
    if spec.page_size_padded is not None or spec.state_content_bytes is not None or spec.tokens_per_state != 1:
        return "its blocks are packed"
    return ""


def _objections(core: Any, sizes: list[int]) -> dict[int, str]:
    """By size, what the attention back ends have against it; of several workers, the first that has anything."""
    answers = core.model_executor.collective_rpc("trimtab_takes", args=(sizes,))
    return {size: next((said[size] for said in answers if said[size]), "") for size in sizes}


def _accepted(core: Any) -> tuple[int, ...]:
    if _not_plain(core.scheduler.kv_cache_config) or core.vllm_config.use_v2_model_runner:
        # Caches of other kinds have rules of their own; nobody is asked but an engine that starts with them.
        return reblocks.on_the_ladder(lambda size: size == core.scheduler.block_size)
    objections = _objections(core, list(LADDER))
    longest, memory = core.scheduler.max_model_len, _memory(core)
    return reblocks.on_the_ladder(
        lambda size: not objections[size] and -(-longest // size) <= _cut(core, size, memory).num_blocks - 1
    )


def _unrecomputable(scheduler: Any) -> str:
    """Who can't be put back and computed anew, or nothing."""
    for request in scheduler.running:
        params = request.sampling_params
        if request.pooling_params is not None or params is None:
            return f"{request.request_id} pools, and what it has pooled would be lost"
        if request.prompt_embeds is not None:
            return f"{request.request_id} was given as embeddings"
        if request.resumable:
            return f"{request.request_id} gets its input bit by bit"
        if params.prompt_logprobs is not None:
            return f"{request.request_id} wants log probabilities of its prompt"
        if request.num_in_flight_tokens or request.num_output_placeholders:
            return f"{request.request_id} has tokens under way"
    for request in scheduler.requests.values():
        if request.status in (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING_FOR_STREAMING_REQ):
            return f"{request.request_id} waits for what comes from elsewhere"
    running = {request.request_id for request in scheduler.running}
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    holds = next((name for name, blocks in manager.req_to_blocks.items() if blocks and name not in running), None)
    if holds is not None or scheduler.kv_holding_waiting or scheduler.deferred_frees:
        return f"{holds or 'somebody'} does not run and holds blocks"
    return ""


# What it costs.


def _moves(scheduler: Any, size: int, usable: int) -> tuple[int, int, int]:
    """Tokens of the running that are carried into so many blocks, and those that have to be computed anew, as the prefix cache of the new
    size saves them, with their context."""
    shares = scheduler.cache_config.enable_prefix_caching

    def kind(request: Any) -> object:
        alone = not shares or request.mm_features or request.skip_reading_prefix_cache
        lora = request.lora_request.lora_name if request.lora_request else None
        return request.request_id if alone else (lora, request.cache_salt)

    requests = ((kind(r), r.all_token_ids, r.num_computed_tokens) for r in scheduler.running)
    return reblocks.moves(requests, size, usable)


def _cached_tokens(scheduler: Any) -> int:
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return int(scheduler.block_size) * sum(block.block_hash is not None and not block.ref_cnt for block in blocks)


# The change.


def _memory(core: Any) -> int:
    """Bytes that there are to cut, in the worker that has fewest."""
    return int(min(core.model_executor.collective_rpc("trimtab_kv_bytes")))


def _cut(core: Any, size: int, memory: int) -> KVCacheConfig:
    """The cache's plan with blocks of that size, in so many bytes. As vLLM plans it at start, for one group and one worker."""
    now = core.scheduler.kv_cache_config
    (group,) = now.kv_cache_groups
    cut = replace(group, kv_cache_spec=replace(group.kv_cache_spec, block_size=size))
    config = get_kv_cache_config_from_groups(core.vllm_config, [cut], memory)
    config.kv_cache_layout, config.kv_tp_replicas = now.kv_cache_layout, now.kv_tp_replicas
    config.hash_block_size = config.cache_hit_alignment_tokens = size
    return config


def _change(
    core: Any, before: KVCacheConfig, after: KVCacheConfig, accepted: tuple[int, ...], *, carries: bool
) -> None:
    held = vllm_carry.held(core.scheduler) if carries else {}
    if not held:
        _put_back(core)
    try:
        with vllm_carry.announced(core.scheduler) if held else nullcontext():
            _lay(core, after, carries=bool(held))
            if held:
                _carry(core, held)
    except Torn:
        raise
    except Exception as e:
        log.exception("A change of the KV block size failed, and is rolled back")
        # Whatever was moved lies where nobody looks for it: who runs still has all of it computed anew.
        _put_back(core)
        try:
            _lay(core, before)
        except Exception as worse:
            _tear(core, f"a change of the block size failed ({e!r}), and so did its way back ({worse!r})")
        words = f"it was tried, and rolled back: {e!r}"
        if held:
            words += "; it may work where KV is computed anew instead of carried over"
        raise ReblockRefused(words, cause="FAILED", accepted=accepted) from e


def _put_back(core: Any, left: list[str] | None = None) -> None:
    """Those that are named, or whoever runs."""
    try:
        core.scheduler.trimtab_put_back(left)
    except Exception as e:
        _tear(core, f"requests could not be put back for another block size: {e!r}")


def _lay(core: Any, config: KVCacheConfig, *, carries: bool = False) -> None:
    core.model_executor.collective_rpc("trimtab_lay", args=(config, carries))
    _agree(core, config)
    core.scheduler.trimtab_lay(config, _manager(core.scheduler, config), core.request_block_hasher)
    core._initialize_effective_attention_block_size()


def _carry(core: Any, held: dict[str, list[int]]) -> None:
    placed = vllm_carry.place(core.scheduler, held)
    core.model_executor.collective_rpc("trimtab_carry", args=(placed.moves,))
    # Also where there are none: what the model's side has in its batch is forgotten by this.
    _put_back(core, placed.left)


def _agree(core: Any, config: KVCacheConfig) -> None:
    """The engine's own settings, and the hashes of requests to come. The thread that reads requests uses the old ones until then."""
    cache, size = core.vllm_config.cache_config, config.hash_block_size
    cache.block_size = cache.hash_block_size = cache.cache_hit_alignment_tokens = size
    cache.num_gpu_blocks = config.num_blocks
    update_kv_cache_capacity(core.vllm_config, config)
    if core.request_block_hasher is not None:
        core.request_block_hasher = get_request_block_hasher(size, get_hash_fn_by_name(cache.prefix_caching_hash_algo))


def _manager(scheduler: Any, config: KVCacheConfig) -> KVCacheManager:
    """As vLLM's scheduler makes it."""
    manager = KVCacheManager(
        kv_cache_config=config,
        max_model_len=scheduler.max_model_len,
        max_in_flight_tokens=scheduler.vllm_config.max_in_flight_tokens,
        enable_caching=scheduler.cache_config.enable_prefix_caching,
        use_eagle=scheduler.use_eagle_block_drop,
        num_prefill_lookahead=scheduler.num_prefill_lookahead,
        log_stats=scheduler.log_stats,
        enable_kv_cache_events=scheduler.enable_kv_cache_events,
        dcp_world_size=scheduler.dcp_world_size,
        pcp_world_size=1,
        scheduler_block_size=config.hash_block_size,
        hash_block_size=config.hash_block_size,
        metrics_collector=scheduler.kv_metrics_collector,
        watermark=scheduler.scheduler_config.watermark,
        enable_mamba_shared_prefix_checkpoint=scheduler.cache_config.enable_mamba_shared_prefix_checkpoint,
    )
    manager.prefix_cache_stats = scheduler.kv_cache_manager.prefix_cache_stats
    return manager


def _tear(core: Any, why: str) -> NoReturn:
    """The engine ends before its next step, with these as its last words; the answer to the change has them at once."""
    log.critical(why)

    def end() -> NoReturn:
        raise Torn(why)

    core.step_fn = end
    raise Torn(why)
