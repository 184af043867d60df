"""What vLLM's engine process says of itself (`trimtab_facts`), as limits. It loads nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.kv_shape import KvGroup
from trimtab.snapshot import Limits


def limits_of(facts: Mapping[str, Any], max_model_len: int, engine: str) -> Limits:
    return Limits(
        max_num_seqs=facts["max_num_seqs"],
        max_step_tokens=facts["max_step_tokens"],
        max_model_len=max_model_len,
        block_size=facts["block_size"],
        total_blocks=facts["total_blocks"],
        engine=engine,
        block_sizes=tuple(facts["block_sizes"]),
        live_blocks=facts["live_blocks"],
        carries_blocks=facts["carries_blocks"],
        kv_groups=tuple(KvGroup(*numbers) for numbers in facts["kv_groups"]),
    )
