"""A worker's settings: fixed for the life of the process. What may change while it runs is policy (`trimtab/policy.py`)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.worker.engines.vllm_arguments import EXECUTORS, Arguments, parsed
from trimtab.kit.config import check, faults_of, refuse, setting, well_formed
from trimtab.kit.tls import TlsSettings, faults

MAX_BLOCK_SIZE = 65_536
EVERYWHERE = ("0.0.0.0", "[::]", "::")
"""Hosts to listen on that nobody can dial from elsewhere."""
GIVEN = ("tokenize", "add_generation_prompt", "return_dict", "conversation")
"""Arguments of a chat template that are the worker's own affair."""


@dataclass(frozen=True)
class WorkerSettings(TlsSettings):
    node_id: str = setting("w0", "name of this worker, unique in the mesh")
    mesh: str = setting("default", "mesh that this worker belongs to; names its state directory")
    pool: str = setting("default", "pool that this worker belongs to")
    labels: tuple[str, ...] = setting((), "labels as key=value, for policy overlays")
    listen: str = setting("127.0.0.1:7100", "gRPC address")
    advertise: str = setting("", "host:port at which gateways reach this worker [default: that of --listen]")
    metrics: str = setting("127.0.0.1:7200", "address of the Prometheus endpoint")
    control: tuple[str, ...] = setting(("127.0.0.1:7071",), "control plane replicas, host:port")
    engine: str = setting("vllm", "vllm, or simulated (needs no model)")
    model: str = setting("default", "local path or hub id; 'default' is SmolLM2-135M-Instruct")
    served_model_name: str = setting("", "name that clients use; empty means the model's own")
    max_num_seqs: int = setting(64, "rows of the engine's batch: the ceiling of batch.active")
    max_step_tokens: int = setting(2048, "tokens of an engine step at most: the ceiling of prefill.step_tokens")
    max_model_len: int | None = setting(None, "window in tokens; none takes the model's own")
    dtype: str = setting("auto", "engine data type: auto, bfloat16, float16 or float32")
    block_size: int = setting(0, "tokens of a KV block; 0 leaves it to the engine")
    tensor_parallel_size: int = setting(1, "GPUs that each layer is split over")
    pipeline_parallel_size: int = setting(1, "stages, each on GPUs of its own, that the layers are dealt out to")
    distributed_executor: str = setting(
        "", "how a model on several GPUs runs: ray (several machines) or mp; empty: vLLM's choice"
    )
    quantization: str = setting(
        "", "how the model's weights are quantised, such as fp8 or awq; empty: as the model says"
    )
    kv_cache_dtype: str = setting("auto", "data type of the KV cache, such as fp8; auto takes the model's")
    gpu_memory_utilization: float = setting(0.9, "part of each GPU's memory that the engine takes, 0 to 1")
    cpu_offload_gib: float = setting(0.0, "GiB of each GPU's weights that are kept in the machine's memory")
    engine_args: str = setting("", "further arguments of vLLM's AsyncEngineArgs, as a JSON object")
    kv_cache_gib: int = setting(2, "memory for the KV cache on CPU, in whole GiB")
    compiled: bool = setting(
        False, "compile the model for this CPU at start: a minute, and g++, for steps a third shorter"
    )
    chat_args: tuple[str, ...] = setting(
        (), "arguments of the model's chat template as name=JSON, such as enable_thinking=false"
    )
    vllm_door: str = setting(
        "auto",
        "answer vLLM's own gRPC service too, for SMG gateways: auto (where the extra vllm-door is installed), on, off",
    )
    drain_s: float = setting(30.0, "seconds that running streams get to finish on shutdown")
    step_ms: float = setting(10.0, "simulated engine: constant part of a step, in milliseconds")
    token_us: float = setting(20.0, "simulated engine: microseconds for each token of a step")
    kv_blocks: int | None = setting(
        None, "simulated engine: KV blocks of 16 tokens; none takes what four of the longest requests need"
    )
    allow_untested_vllm: bool = setting(False, "start on a vLLM version that this build was not tested with")
    log_level: str = setting("info", "debug, info, warning or error")
    parent_pid: int | None = setting(None, "stop when this process ends; set by a supervisor", for_people=False)

    def __post_init__(self) -> None:
        optional = ("advertise",) if self.advertise else ()
        wrong = check(self, "worker", addresses=("listen", "metrics", "control", *optional), names=("node_id", "mesh"))
        if not self.control:
            wrong.append("worker control must name a control plane, such as 127.0.0.1:7071")
        if self.advertise.rsplit(":", 1)[0] in EVERYWHERE:
            wrong.append(f"worker advertise must be an address that gateways can dial, not {self.advertise!r}")
        wrong += faults("worker", self, well_formed(self.listen))
        if self.engine not in ("vllm", "simulated"):
            wrong.append(f"worker engine must be vllm or simulated, not {self.engine!r}")
        if self.max_num_seqs < 1 or self.max_step_tokens < self.max_num_seqs:
            wrong.append("worker max_num_seqs must be at least 1, and max_step_tokens at least max_num_seqs")
        if self.kv_cache_gib < 1:
            wrong.append(f"worker kv_cache_gib must be at least 1, not {self.kv_cache_gib}")
        if not 0 <= self.block_size <= MAX_BLOCK_SIZE:
            wrong.append(f"worker block_size must be between 0 and {MAX_BLOCK_SIZE}, not {self.block_size}")
        if self.tensor_parallel_size < 1 or self.pipeline_parallel_size < 1:
            wrong.append("worker tensor_parallel_size and pipeline_parallel_size must be at least 1")
        if self.distributed_executor not in EXECUTORS:
            wrong.append(f"worker distributed_executor must be ray, mp or empty, not {self.distributed_executor!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            wrong.append(
                f"worker gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization:g}"
            )
        if not 0 <= self.cpu_offload_gib < math.inf:
            wrong.append(f"worker cpu_offload_gib must be 0 or more, not {self.cpu_offload_gib:g}")
        wrong += faults_of(lambda: parsed(self.engine_args))
        if self.kv_blocks is not None and 16 * self.kv_blocks < (self.max_model_len or 131_072):
            wrong.append("worker kv_blocks must hold one request of max_model_len tokens, 16 in a block")
        if self.vllm_door not in ("auto", "on", "off"):
            wrong.append(f"worker vllm_door must be auto, on or off, not {self.vllm_door!r}")
        if not self.drain_s >= 0:
            wrong.append(f"worker drain_s must be 0 or more, not {self.drain_s:g}")
        wrong += faults_of(lambda: chat_arguments(self.chat_args))
        wrong += [f"worker labels must be key=value, not {label!r}" for label in self.labels if "=" not in label]
        refuse(wrong)


def chat_arguments(args: Sequence[str]) -> dict[str, Any]:
    """By name. ValueError for what is no name=JSON, and for those that the worker gives itself."""
    found: dict[str, Any] = {}
    for arg in args:
        name, _, value = arg.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            raise ValueError(
                f"worker chat_args must be name=JSON, such as enable_thinking=false, not {arg!r}"
            ) from None
        if not name.isidentifier() or name in GIVEN:
            raise ValueError(f"worker chat_args: {name!r} is no argument of a chat template that can be set")
    return found


def engine_arguments(s: WorkerSettings) -> Arguments:
    """How vLLM is told to spread and store the model."""
    same = [f.name for f in dataclasses.fields(Arguments) if f.name != "more"]
    return Arguments(**{name: getattr(s, name) for name in same}, more=parsed(s.engine_args))
