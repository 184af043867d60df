"""Counts blocks of a real engine: after each step, what vLLM's pool has lost, and what `trimtab.kv_shape` says that those who run hold.

    python -m tests.vllm.counted MODEL BLOCKS

First with one request after another, then with several at once and so few blocks that they wait for each other. The last line has the result.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.worker.engines import board
from services.worker.engines.vllm import IN_PROCESS
from services.worker.engines.vllm_arguments import OURS
from services.worker.engines.vllm_plugin import BOARD_KEY
from trimtab.policy import Policy, flatten, with_fields

LENGTHS = (1, 60, 257, 1023, 1500)
STEP_TOKENS, WINDOW, SEQS = 256, 2048, 6
POLICY = {
    "batch.active": SEQS, "prefill.step_tokens": STEP_TOKENS, "prefill.itl_budget_ms": 0, "prefill.max_step_ms": 0, "prefill.concurrent": 4,
    "paths.realtime_max_running": SEQS, "memory.reserve_high_priority": 0.0,
}  # fmt: skip
"""Prompts are read in steps as large as there are, several at a time."""


def count(model: str, blocks: int, env: dict[str, str]) -> tuple[int, int, int, int]:
    """In a process of its own: steps, those that differ, and whom vLLM refused and preempted by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.counted", model, str(blocks)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **env}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    last = re.findall(r"(?m)^(\d+) steps counted, (\d+) differ; vLLM refused (\d+) and preempted (\d+)", done.stdout)
    assert done.returncode == 0 and last, done.stdout[-2000:] + done.stderr[-2000:]
    steps, differ, refused, preempted = map(int, last[-1])
    return steps, differ, refused, preempted


class Watch:
    """Around the scheduler of an engine in this process."""

    def __init__(self, scheduler: Any) -> None:
        self.s, self.steps, self.differ = scheduler, 0, 0
        self.refused = self.preempted = self.waited = 0
        self.pool = scheduler.kv_cache_manager.block_pool
        self.empty = self.pool.get_num_free_blocks()
        self._schedule, scheduler.schedule = scheduler.schedule, self.schedule
        self._preempt, scheduler._preempt_request = scheduler._preempt_request, self.preempt
        self._allocate, scheduler.kv_cache_manager.allocate_slots = (
            scheduler.kv_cache_manager.allocate_slots, self.allocate,
        )  # fmt: skip

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        before = {r.request_id: r.num_computed_tokens for r in self.s.running}
        step = self._schedule(*args, **kwargs)
        kv, counted = self.s._kv, 0
        for request in self.s.running:
            tokens = step.num_scheduled_tokens.get(request.request_id, 0)
            computed = request.num_computed_tokens - tokens
            assert computed in (0, before.get(request.request_id, 0))
            counted += kv.held(computed) + kv.taken(computed, tokens)
        lost = self.empty - self.pool.get_num_free_blocks()
        self.steps += 1
        if lost != counted:
            self.differ += 1
            print(f"{lost} blocks are gone, {counted} were counted, of {before} and {step.num_scheduled_tokens}")
        self.waited += bool(len(self.s.waiting))
        return step

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        found = self._allocate(*args, **kwargs)
        self.refused += found is None
        return found

    def preempt(self, *args: Any, **kwargs: Any) -> Any:
        self.preempted += not self.s._evicting
        return self._preempt(*args, **kwargs)


def main(model: str, blocks: int) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from vllm import LLM, SamplingParams
    from vllm.inputs.engine import tokens_input

    path = board.create()
    llm = LLM(
        model, max_num_seqs=SEQS, max_num_batched_tokens=STEP_TOKENS, max_model_len=WINDOW, enforce_eager=True,
        enable_prefix_caching=False, num_gpu_blocks_override=blocks, additional_config={BOARD_KEY: str(path)},
        scheduler_cls=OURS["scheduler_cls"], scheduling_policy="priority", distributed_executor_backend=IN_PROCESS,
    )  # fmt: skip
    watch = Watch(llm.llm_engine.engine_core.engine_core.scheduler)
    watch.s.trimtab_apply(flatten(with_fields(Policy(), POLICY)))
    chance = random.Random(1)

    def ask(lengths: list[int], tokens: int) -> None:
        prompts = [tokens_input([chance.randrange(100, 40_000) for _ in range(n)]) for n in lengths]
        answers = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False
        )
        assert [len(a.outputs[0].token_ids) for a in answers] == [tokens] * len(lengths)

    for length in LENGTHS:
        ask([length], 20)
    assert not watch.waited
    # V4's indexer on a CPU fails where others share a step with a prompt too short for one compressed token.
    ask([chance.choice(LENGTHS[1:]) for _ in range(12)], 16)
    Path(path).unlink(missing_ok=True)
    assert watch.waited, "nobody waited for blocks"
    assert watch.pool.get_num_free_blocks() == watch.empty
    print(f"shape {watch.s._kv}, {blocks} blocks")
    print(
        f"{watch.steps} steps counted, {watch.differ} differ; vLLM refused {watch.refused} and preempted {watch.preempted} by itself"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
