"""Presets: policy fields that belong together, written as one ordinary change.

`small` is for windows of up to SMALL_WINDOW tokens. The tree's defaults are for 128K (DESIGN §4): in a window of 8K they make half of it
hot, and nothing a giant or isolated. It also fits the step budget and the objectives to the machine: BUDGET_TOKENS times what one stream
alone waits for a token, and for its first one. `prefill.max_step_ms` follows the budget by its own default.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from trimtab.policy import Value, text

SMALL_WINDOW = 16_384
"""Tokens; the preset is for windows up to this."""

THRESHOLDS: dict[str, Value] = {"paths.hot_below": 1024, "serial.above": 3072, "isolate.from_tokens": 6144}
BUDGET = "prefill.itl_budget_ms"
ITL, TTFT = "objectives.itl_p99_ms", "objectives.ttft_p99_ms"
SMALL = (*THRESHOLDS, BUDGET, ITL, TTFT)
"""Every field of `small`."""

BUDGET_TOKENS = 4
ITL_BUDGETS = 2
"""The objective of ITL is so many step budgets, as in the tree's defaults (100 and 200 ms): a step may take the budget, and the next token
waits for the step after it."""
LEAST_TTFT_MS = 500
"""The tree's default: no machine's objective of TTFT has to be stricter."""
STEADY = 0.05
"""Two streams that differ by no more than this share of the faster one say the same; so do two whose budgets differ by a millisecond at most."""


def small(itl_budget_ms: int | None, ttft_ms: float | None = None) -> dict[str, str]:
    """The fields of `small`, as a person would type them. Without a budget it and the objective of ITL are left alone; without the time that
    one stream alone waits for its first token, the objective of TTFT."""
    fields = dict(THRESHOLDS)
    if itl_budget_ms is not None:
        fields |= {BUDGET: itl_budget_ms, ITL: ITL_BUDGETS * itl_budget_ms}
    if ttft_ms is not None:
        fields[TTFT] = ttft_objective_ms(ttft_ms)
    return {path: text(value) for path, value in fields.items()}


def suits(window: int) -> bool:
    """Whether `small` is for a model of this window; 0 is one that is unknown."""
    return 0 < window <= SMALL_WINDOW


def itl_budget_ms(token_ms: float) -> int:
    """The step budget where one stream alone gets a token every `token_ms`, in whole milliseconds."""
    return max(1, math.ceil(BUDGET_TOKENS * token_ms))


def ttft_objective_ms(ttft_ms: float) -> int:
    """The objective of TTFT where one stream alone gets its first token after `ttft_ms`, in whole milliseconds."""
    return max(LEAST_TTFT_MS, math.ceil(BUDGET_TOKENS * ttft_ms))


def decided(sources: Mapping[str, str], changed: Collection[str] = ()) -> tuple[str, ...]:
    """Which fields of `small` are somebody's decision: set now, or among those that were `changed` before, be it back to the default."""
    return tuple(path for path in SMALL if sources.get(path, "default") != "default" or path in changed)


def in_place(values: Mapping[str, Value], sources: Mapping[str, str]) -> bool:
    """Whether a policy has `small` already: its thresholds, and some budget that is not the default."""
    return all(values.get(path) == value for path, value in THRESHOLDS.items()) and decided(sources) == SMALL


def steady(medians_ms: Iterable[float]) -> bool:
    """Whether two streams said the same: the fastest two, since whatever disturbs a stream makes it slower."""
    fastest = sorted(medians_ms)[:2]
    return len(fastest) == 2 and fastest[1] - fastest[0] <= max(STEADY * fastest[0], 1 / BUDGET_TOKENS)
