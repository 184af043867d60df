"""What vLLM is started with: the worker's settings by vLLM's names, and whatever else somebody names in `engine_args`.

A name that vLLM does not have, or that is this worker's own affair, is refused before anything is loaded: a model takes minutes, and
vLLM's own error would come after them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.kit.config import ConfigError

EXECUTORS = ("", "ray", "mp")
OWNED: Mapping[str, str] = {
    "model": "set model",
    "served_model_name": "set served_model_name",
    "max_num_seqs": "set max_num_seqs",
    "max_num_batched_tokens": "set max_step_tokens",
    "max_model_len": "set max_model_len",
    "dtype": "set dtype",
    "block_size": "set block_size",
    "tensor_parallel_size": "set tensor_parallel_size",
    "pipeline_parallel_size": "set pipeline_parallel_size",
    "distributed_executor_backend": "set distributed_executor",
    "quantization": "set quantization",
    "kv_cache_dtype": "set kv_cache_dtype",
    "gpu_memory_utilization": "set gpu_memory_utilization",
    "cpu_offload_gb": "set cpu_offload_gib",
    "max_num_active_seqs": "it is policy: batch.active",
    "max_num_queued_reqs": "it is policy: admission",
    "max_num_queued_tokens": "it is policy: admission",
    "max_num_scheduled_tokens": "it is policy: prefill.step_tokens",
    "scheduler_cls": "the worker brings its own scheduler",
    "scheduling_policy": "the worker brings its own scheduler",
    "worker_extension_cls": "the worker brings its own extension, which changes KV block sizes",
    "additional_config": "the worker talks to its engine by it",
    "disable_log_stats": "the worker measures by itself",
    "enable_log_requests": "the worker logs requests by itself",
    "skip_tokenizer_init": "the worker needs the tokenizer",
    "runner": "a worker generates text",
    "data_parallel_size": "start one worker for each engine: the gateway spreads requests over them",
}
"""By vLLM's name: why it can't be named in `engine_args`."""
OURS: Mapping[str, Any] = {
    "scheduler_cls": "services.worker.engines.vllm_scheduler.scheduler",
    "scheduling_policy": "priority",
    "worker_extension_cls": "services.worker.engines.vllm_reblock_worker.ReblockWorker",
    "disable_log_stats": True,
    "enable_log_requests": False,
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """How the model is spread and stored. `more` are further arguments by vLLM's names."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor: str = ""
    quantization: str = ""
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    cpu_offload_gib: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether one process holds the whole model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size == 1 and not self.distributed_executor

    @property
    def sizes_cache(self) -> bool:
        """Whether `more` says how many bytes the KV cache has, which then counts, and not `kv_cache_gib`."""
        return self.more.get("kv_cache_memory_bytes") is not None

    def check(self, known: Collection[str]) -> None:
        """ConfigError with one fault for each of `more` that the installed vLLM, which has `known`, does not have."""
        if faults := unknown(self.more, known):
            raise ConfigError(faults)

    def named(self, *, gpu: bool) -> dict[str, Any]:
        """By vLLM's names, those that say something, and `more` last."""
        said: dict[str, Any] = {}
        if self.tensor_parallel_size > 1:
            said["tensor_parallel_size"] = self.tensor_parallel_size
        if self.pipeline_parallel_size > 1:
            said["pipeline_parallel_size"] = self.pipeline_parallel_size
        if self.distributed_executor:
            said["distributed_executor_backend"] = self.distributed_executor
        if self.quantization:
            said["quantization"] = self.quantization
        if self.kv_cache_dtype != "auto":
            said["kv_cache_dtype"] = self.kv_cache_dtype
        if self.cpu_offload_gib:
            said["cpu_offload_gb"] = self.cpu_offload_gib
        if gpu:
            # vLLM's own default is another one; on a CPU kv_cache_gib says how much.
            said["gpu_memory_utilization"] = self.gpu_memory_utilization
        return said | dict(self.more)


def parsed(text: str) -> dict[str, Any]:
    """`engine_args` as a setting has it. ValueError for what is no JSON object, and for names that are this worker's own."""
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError as e:
        raise ValueError(f"worker engine_args is not JSON: {e}") from None
    if not isinstance(found, dict):
        raise ValueError('worker engine_args must be a JSON object, such as {"enable_prefix_caching": false}')
    for name in found:
        if name in OWNED:
            raise ValueError(f"worker engine_args: {name} can't be set there: {OWNED[name]}")
    return found


def unknown(names: Collection[str], known: Collection[str]) -> list[str]:
    """One fault for each name that the installed vLLM does not have, with the nearest one that it has."""
    faults = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(set(known) - OWNED.keys()), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            faults.append(f"worker engine_args: this vLLM has no argument {name}{hint}")
    return faults
