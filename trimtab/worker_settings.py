"""Which settings of a worker can be told to it from afar, by name: known on both planes, so that a wrong one is refused at once.

What they may be, a worker alone knows (`services/worker/settings.py`, of which these are the names).
"""

from __future__ import annotations

import difflib

SECTION = "worker."
FIXED = frozenset({
    *("node_id", "mesh", "pool", "labels", "listen", "advertise", "metrics", "control", "parent_pid"),
    *("tls_ca", "tls_cert", "tls_key", "insecure"),
})  # fmt: skip
"""Who a worker is and where: nobody tells it another."""
TOLD = frozenset({
    *("engine", "model", "served_model_name", "max_num_seqs", "max_step_tokens", "max_model_len", "dtype", "block_size"),
    *("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor", "quantization", "kv_cache_dtype"),
    *("gpu_memory_utilization", "cpu_offload_gib", "engine_args", "kv_cache_gib", "compiled", "chat_args", "vllm_door"),
    *("drain_s", "step_ms", "token_us", "kv_blocks", "allow_untested_vllm", "log_level"),
})  # fmt: skip


def fault_of(name: str, value: str) -> str:
    """What is wrong with this name, with its section before it; "" where it can be told. A setting that this build does not know can be taken
    back (its value is empty): an older one may have been told it.
    """
    key = name.removeprefix(SECTION)
    if key == name:
        return f"only settings of the worker can be told, such as {SECTION}max_num_seqs; this one does not begin with {SECTION}"
    if key in FIXED:
        return f"{name} says who and where a worker is: it is not changed this way"
    if key in TOLD or not value:
        return ""
    near = difflib.get_close_matches(key, TOLD, n=1, cutoff=0.6)
    hint = f"did you mean {SECTION}{near[0]}?" if near else "`trimtab config print` shows what there is"
    return f"a worker has no setting {name}; {hint}"
