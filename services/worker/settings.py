"""A worker's settings: fixed for the life of the process. What may change while it runs is policy (`trimtab/policy.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.kit.config import check, setting
from trimtab.kit.tls import TlsSettings, faults


@dataclass(frozen=True)
class WorkerSettings(TlsSettings):
    node_id: str = setting("w0", "name of this worker, unique in the mesh")
    mesh: str = setting("default", "mesh that this worker belongs to; names its state directory")
    pool: str = setting("default", "pool that this worker belongs to")
    labels: tuple[str, ...] = setting((), "labels as key=value, for policy overlays")
    listen: str = setting("127.0.0.1:7100", "gRPC address")
    metrics: str = setting("127.0.0.1:7200", "address of the Prometheus endpoint")
    control: tuple[str, ...] = setting(("127.0.0.1:7071",), "control plane replicas, host:port")
    engine: str = setting("vllm", "vllm, or simulated (needs no model)")
    model: str = setting("default", "local path or hub id; 'default' is SmolLM2-135M-Instruct")
    served_model_name: str = setting("", "name that clients use; empty means the model's own")
    max_num_seqs: int = setting(64, "rows of the engine's batch: the ceiling of batch.active")
    max_step_tokens: int = setting(2048, "tokens of an engine step at most: the ceiling of prefill.step_tokens")
    max_model_len: int | None = setting(None, "window in tokens; none takes the model's own")
    dtype: str = setting("auto", "engine data type: auto, bfloat16, float16 or float32")
    kv_cache_gib: int = setting(2, "memory for the KV cache on CPU, in whole GiB")
    compiled: bool = setting(
        False, "compile the model for this CPU at start: a minute, and g++, for steps a third shorter"
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
    parent_pid: int | None = setting(None, "stop when this process ends; set by a supervisor")

    def __post_init__(self) -> None:
        check(self, "worker", addresses=("listen", "metrics", "control"), names=("node_id", "mesh"))
        if wrong := faults("worker", self, (self.listen,)):
            raise ValueError("\n".join(wrong))
        if self.engine not in ("vllm", "simulated"):
            raise ValueError(f"worker engine must be vllm or simulated, not {self.engine!r}")
        if self.max_num_seqs < 1 or self.max_step_tokens < self.max_num_seqs:
            raise ValueError("worker max_num_seqs must be at least 1, and max_step_tokens at least max_num_seqs")
        if self.kv_cache_gib < 1:
            raise ValueError(f"worker kv_cache_gib must be at least 1, not {self.kv_cache_gib}")
        if self.kv_blocks is not None and 16 * self.kv_blocks < (self.max_model_len or 131_072):
            raise ValueError("worker kv_blocks must hold one request of max_model_len tokens, 16 in a block")
        if self.vllm_door not in ("auto", "on", "off"):
            raise ValueError(f"worker vllm_door must be auto, on or off, not {self.vllm_door!r}")
        if bad := [label for label in self.labels if "=" not in label]:
            raise ValueError(f"worker labels must be key=value, not {bad[0]!r}")
