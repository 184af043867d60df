"""`exhaustion`: what is asked for does not fit, the loop is the one that helps, and all of it on a real mesh with a small simulated cache."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from services.bench.progress import Progress
from services.drill import exhaustion
from services.drill.exhaustion import (
    BATCH_TOKENS,
    BETTER,
    BLOCK,
    BLOCKS,
    CALLERS,
    FULL,
    OFF,
    ON,
    POOL_BYTES,
    QUICK,
    REAL_BLOCK,
    SEQS,
    WINDOW,
    Plan,
    asked,
)
from services.drill.loop_figures import Trial, goals, notes
from services.drill.loops import STEP_MS, stand
from services.worker.engines.tokenizers import ByteTokenizer
from trimtab.engine import Costs, EngineValue
from trimtab.messages import Workload
from trimtab.policy import Policy, parse, with_fields
from trimtab.scheduling import Rules
from trimtab.snapshot import Limits

PATIENCE_S = 280.0
KV_BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4
"""SmolLM2's, in float32: layers, KV heads, head size, keys and values, bytes."""


def missed(trials: list[Trial]) -> list[str]:
    """Goals that are not met, but for those that a slow machine or a short look may miss; with what there is to say of them."""
    bad = [g.name for g in goals(trials) if not g.met and not g.name.endswith(("detected_s", "healed"))]
    figures = [f"{t.name}: {name} {value:g}" for t in trials for name, value in t.figures.items()]
    return [*bad, *notes(trials), *figures] if bad else []


def test_both_engines_hold_as_many_tokens() -> None:
    assert POOL_BYTES // (REAL_BLOCK * KV_BYTES_PER_TOKEN) * REAL_BLOCK == BLOCKS * BLOCK


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_what_is_asked_is_more_than_fits_and_batch_alone_is_cold(plan: Plan) -> None:
    cases, tokenizer = asked(plan, 1), ByteTokenizer()
    lengths = {w: [len(tokenizer.encode(case.prompt)) for case in cases[w]] for w in Workload}
    assert max(lengths[Workload.REALTIME]) < plan.hot_below <= min(lengths[Workload.BATCH])
    whole = [
        n + int(case.sampling.max_tokens or 0)
        for n, case in zip(lengths[Workload.BATCH], cases[Workload.BATCH], strict=True)
    ]
    assert min(whole) * min(CALLERS[Workload.BATCH], len(whole)) > BLOCKS * BLOCK
    assert asked(plan, 1) == cases != asked(plan, 2)


def computed_anew(line: float, kept: float) -> float:
    """The share of tokens, of the simulated engine under the drill's load in three minutes of virtual time."""
    said = {"memory.pressure_threshold": line, "memory.reserve_high_priority": kept, "batch.active": SEQS}
    typed = {name: parse(name, value) for name, value in FULL.policy.items()}
    rules = Rules.of(with_fields(Policy(), typed | said), Limits(SEQS, 2048, WINDOW, BLOCK, BLOCKS))
    engine, chance, numbers = (
        EngineValue(Costs(STEP_MS, 100.0), BLOCK, BLOCKS, rules),
        random.Random(1),
        itertools.count(),
    )
    now_ms = 0.0

    def ask(workload: Workload) -> None:
        prompt, output = (
            (chance.randint(180, 300), chance.randint(*BATCH_TOKENS)) if workload is Workload.BATCH else (80, 20)
        )
        engine.add(f"{workload.value}/{next(numbers)}", prompt, output, workload, now_ms)

    for workload, callers in CALLERS.items():
        for _ in range(callers):
            ask(workload)
    while now_ms < 180_000.0:
        step = engine.step(now_ms)
        now_ms += step.cost_ms
        for each in step.emissions:
            if each.last:
                ask(Workload(each.request_id.split("/")[0]))
    counters = engine.planner.counters
    return counters.recomputed_tokens / counters.computed_tokens


@pytest.mark.slow
def test_a_lower_pressure_line_saves_work_where_nothing_is_kept_free() -> None:
    line = Policy().memory.pressure_threshold
    bare, lowered = computed_anew(line, 0.0), computed_anew(0.9 * line, 0.0)
    assert lowered < BETTER * bare
    kept = Policy().memory.reserve_high_priority
    assert computed_anew(line, kept) < lowered, "what the policy keeps free by default saves more"


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_full_kv_cache_is_foreseen_and_all_is_answered(tmp_path: Path) -> None:
    trials: list[Trial] = []
    plan = replace(QUICK, settle_s=3.0, watch_s=6.0)
    async with asyncio.timeout(PATIENCE_S), stand(tmp_path, exhaustion.simulated_shape()) as s:
        s.patience_s = PATIENCE_S
        await exhaustion.drilled(s, plan, 1, trials, Progress(1.0))
        assert not s.supervisor.ends
    assert missed(trials) == []
    assert [(t.name, t.controller) for t in trials] == [(OFF, ""), (ON, "memory")]
    assert trials[1].figures["factor of the pool's pressure line"] == pytest.approx(0.9)
