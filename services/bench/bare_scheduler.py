"""vLLM's scheduler classes without an engine around them: ours and the stock ones, over a made-up model whose weights nobody asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.engines import board
from services.worker.engines.vllm_plugin import BOARD_KEY, EXTRA_KEY
from trimtab.messages import Workload

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 65536,
    "max_position_embeddings": 1 << 20, "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Of the engine that the scheduler believes in. vLLM keeps one of `blocks` for itself."""

    max_num_seqs: int = 8
    max_step_tokens: int = 256
    blocks: int = 400
    block_size: int = 16
    max_model_len: int = 8192
    prefix_caching: bool = True
    asynchronous: bool = False


def scheduler(size: Size, directory: Path, *, ours: bool = True, specs: Sequence[Any] = ()) -> Any:
    """A scheduler of this size; its board is `directory`/board. `specs` are the KV caches of its groups of layers, in vLLM's words; by
    default there is one group, and it keeps all tokens."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from services.worker.engines.vllm_scheduler import scheduler as factory

    (directory / "config.json").write_text(json.dumps(MODEL))
    path = directory / "board"
    path.write_bytes(bytes(board.SIZE))
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(directory), skip_tokenizer_init=True, max_model_len=size.max_model_len, dtype="float32"
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.max_step_tokens,
            max_model_len=size.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy="priority",
        ),
        cache_config=CacheConfig(block_size=size.block_size, enable_prefix_caching=size.prefix_caching),
        additional_config={BOARD_KEY: str(path)},
    )
    # On a CPU vLLM switches this off while it checks the configuration.
    config.scheduler_config.async_scheduling = size.asynchronous
    config.cache_config.block_size = size.block_size
    config.cache_config.num_gpu_blocks = size.blocks
    specs = specs or [FullAttentionSpec(block_size=size.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)]
    kind = factory if ours else AsyncScheduler if size.asynchronous else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=size.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
        ),
        block_size=math.lcm(*(spec.block_size for spec in specs)),
        hash_block_size=math.gcd(*(spec.block_size for spec in specs)),
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )


def hasher(block_size: int) -> Callable[[Any], list[Any]]:
    """What vLLM recognises equal prefixes by."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    found: Callable[[Any], list[Any]] = get_request_block_hasher(block_size, sha256)
    return found


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    workload: Workload,
    arrival_ms: float,
    *,
    tenant: str = "",
    block_hasher: Callable[[Any], list[Any]] | None = None,
    structured: Any = None,
    outside: str | None = None,
) -> Any:
    """As our front process hands it over: inside the engine it goes by another id, `internal(name)`, than `outside`."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    told = {"request_id": outside or name, "workload": workload.value, "arrival_ms": arrival_ms, "tenant": tenant}
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args={EXTRA_KEY: told},
        structured_outputs=structured,
    )
    return Request(
        request_id=internal(name),
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_ms / 1000.0,
        block_hasher=block_hasher,
    )


def internal(name: str) -> str:
    """As vLLM does by a random suffix."""
    return f"{name}-x"
