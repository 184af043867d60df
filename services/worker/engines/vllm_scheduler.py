"""Our scheduler inside vLLM: a thin subclass that obeys the pushed caps and announces each step on the board.

What it enforces is decided in `trimtab.scheduling`; here it meets vLLM. Of vLLM's internals it uses `max_num_active_reqs`,
`max_num_scheduled_tokens`, `max_num_running_reqs`, `running`, `waiting`, `kv_holding_waiting`, `requests` and
`kv_cache_manager.block_pool`; `tests/vllm/test_internals.py` lists them, so that an upgrade fails there, loudly.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from services.worker.engines import vllm_plugin
from services.worker.engines.board import Board, Row
from trimtab.progress import StepTime

BOARD_KEY = "trimtab_board"
"""Key of vLLM's `additional_config` that carries the board's path to the engine process."""


class TrimtabScheduler:
    """Mix-in over vLLM's scheduler classes; the attributes named here are theirs."""

    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any
    requests: dict[str, Any]
    block_size: int
    scheduler_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    max_num_running_reqs: int
    max_num_active_reqs: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: VllmConfig = kwargs["vllm_config"]
        assert isinstance(config.additional_config, dict)
        self._board = Board(Path(config.additional_config[BOARD_KEY]))
        self._row = Row()
        self._step_time = StepTime()
        # Under async scheduling a step is scheduled while the one before it runs: each begins when that one ends.
        self._in_flight: deque[float] = deque()
        self._last_end = 0.0
        self._announce()

    def trimtab_apply(self, caps: dict[str, int]) -> dict[str, int]:
        """Set the caps; they hold from the next step on. Lowering them evicts nobody. Answers with that step's number."""
        active, step_tokens = caps["active"], caps["step_tokens"]
        if not 1 <= active <= self.max_num_running_reqs:
            raise ValueError(f"active must be in [1, {self.max_num_running_reqs}], not {active}")
        ceiling = self.scheduler_config.max_num_batched_tokens
        if not 1 <= step_tokens <= ceiling:
            raise ValueError(f"step_tokens must be in [1, {ceiling}], not {step_tokens}")
        self.max_num_active_reqs = active
        self.max_num_scheduled_tokens = step_tokens
        return {"step_no": self._row.step_no + 1}

    def trimtab_facts(self) -> dict[str, Any]:
        """What the front process needs to know once: sizes that vLLM settled during start, and the caps in force."""
        return {
            "block_size": self.block_size,
            "total_blocks": self.kv_cache_config.num_blocks,
            "max_num_seqs": self.max_num_running_reqs,
            "max_step_tokens": self.scheduler_config.max_num_batched_tokens,
            "active": self.max_num_active_reqs,
            "step_tokens": self.max_num_scheduled_tokens,
        }

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        row = self._row
        row.step_no += 1
        row.begun = time.monotonic()
        self._in_flight.append(row.begun)
        row.ended = 0
        row.predicted_ms = self._step_time.predict(output.total_num_scheduled_tokens)
        self._announce()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        row = self._row
        tokens = scheduler_output.total_num_scheduled_tokens
        now = time.monotonic()
        begun = max(self._in_flight.popleft(), self._last_end)
        self._last_end = now
        if tokens:
            self._step_time.observe(tokens, (now - begun) * 1000.0)
        row.computed_tokens += tokens
        row.output_tokens += sum(len(o.new_token_ids) for each in outputs.values() for o in each.outputs)
        row.ended = 0 if self._in_flight else 1
        self._announce()
        return outputs

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        self._announce()

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        # Between steps no step announces that an aborted request is gone.
        self._announce()
        return finished

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        self._row.preemptions += 1
        return super()._preempt_request(*args, **kwargs)  # type: ignore[misc]

    def _announce(self) -> None:
        row = self._row
        row.running = len(self.running)
        row.waiting = len(self.waiting) + len(self.kv_holding_waiting)
        row.queued_prefill_tokens = sum(
            max(0, r.num_prompt_tokens - r.num_computed_tokens) for r in self.requests.values()
        )
        row.free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        row.total_blocks = self.kv_cache_config.num_blocks
        self._board.write(row)


class _Async(TrimtabScheduler, AsyncScheduler):
    pass


class _Sync(TrimtabScheduler, Scheduler):
    pass


def scheduler(*, vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """What `scheduler_cls` names: vLLM calls whatever it resolves to, so one name serves both of its modes."""
    vllm_plugin.install()
    kind = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
    return kind(vllm_config=vllm_config, **kwargs)
