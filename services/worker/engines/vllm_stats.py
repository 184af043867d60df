"""A stat logger that keeps nothing: its presence alone makes vLLM stamp each request's moments, which arrive with its outputs."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class Quiet(StatLoggerBase):
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        pass

    def record(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass
