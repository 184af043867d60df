"""Makes changes of the KV block size fail in a real engine process, and their way back too: for tests alone, and no part of the product.

While the file that TRIMTAB_TORN names is there, the step of a change that stands in it raises each time that it is called.

vLLM loads this as a plug-in: this directory on PYTHONPATH, and `torn` in VLLM_PLUGINS.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE_ENV = "TRIMTAB_TORN"
STAGES = (
    ("services.worker.engines.vllm_reblock_worker", "create_kv_cache_views"),
    ("services.worker.engines.vllm_reblock", "_manager"),
)
"""Where the model runs, with its cache half cut; and in the scheduler, once the model's side has been cut already."""


def register() -> None:
    """vLLM's hook, called in each of its processes; safe to repeat."""
    from vllm.v1.engine.core import EngineCoreProc

    if hasattr(EngineCoreProc, "trimtab_torn"):
        return
    EngineCoreProc.trimtab_torn = True
    real = EngineCoreProc.run_busy_loop

    def begin(self: Any) -> None:
        # Plug-ins are loaded by an engine's constructor, when there is little to break yet.
        for module, name in STAGES:
            _break(module, name)
        real(self)

    EngineCoreProc.run_busy_loop = begin


def _break(module: str, name: str) -> None:
    holder: Any = importlib.import_module(module)
    real: Callable[..., Any] = getattr(holder, name)

    def now_and_then(*args: Any, **kwargs: Any) -> Any:
        file = Path(os.environ[FILE_ENV])
        if file.exists() and file.read_text() == name:
            raise RuntimeError(f"{name} was made to fail")
        return real(*args, **kwargs)

    setattr(holder, name, now_and_then)
