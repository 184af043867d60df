"""The safe batch: the field guide's formula to the last digit, and what it is of a live worker."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from controlplane.controllers.safe_batch import Fits, calculate_safe_batch, fitting
from controlplane.seen import Lengths, NodeSeen
from tests.controlplane.controllers.builders import NOW, a_node, some_lengths
from tests.trimtab.test_kv_shape import V4
from trimtab.measures import KV_BYTES_PER_TOKEN
from trimtab.messages import Load
from trimtab.policy import Policy
from trimtab.snapshot import Limits

RULES = Policy().batch


@pytest.mark.parametrize(
    ("per_req", "total", "safe"),
    [
        (2, 80, 16),  # 30 would fit; never above 16
        (4, 80, 15),  # 72 / 4.8
        (5, 80, 12),  # 72 / 6
        (10, 80, 6),
        (24, 80, 2),  # 72 / 28.8 is 2.5
        (60, 80, 1),  # exactly 1
        (1, 8, 6),
        (1.1, 13.2, 9),  # exactly 9; in floats 8.999…
        (0.1, 0.4, 3),
        (1.5e9, 80e9, 16),
        (6.4e9, 80e9, 9),
    ],
)
def test_the_guides_formula_comes_out_exactly(per_req: float, total: float, safe: int) -> None:
    assert calculate_safe_batch(per_req, total) == safe


@pytest.mark.parametrize(("per_req", "total"), [(100, 80), (1, 0)])
def test_one_request_always_runs(per_req: float, total: float) -> None:
    assert calculate_safe_batch(per_req, total) == 1


def test_factor_share_and_cap_are_arguments() -> None:
    assert calculate_safe_batch(1, 100, hard_cap=64, safety_factor=1.0, usable=1.0) == 64
    assert calculate_safe_batch(1, 50, hard_cap=64, safety_factor=1.25, usable=0.5) == 20
    assert calculate_safe_batch(1, 10, hard_cap=64, safety_factor=1.0, usable=0.7) == 7


@pytest.mark.parametrize(("per_req", "total"), [(0, 1), (-1, 1), (1, -1), (math.nan, 1), (1, math.inf)])
def test_what_is_no_amount_is_refused(per_req: float, total: float) -> None:
    with pytest.raises(ValueError):
        calculate_safe_batch(per_req, total)


def live(node: NodeSeen, lengths: Lengths | None) -> Fits | str:
    return fitting(node, lengths, RULES, NOW)


def test_live_it_is_the_kv_of_the_95th_of_100_requests_in_the_whole_cache() -> None:
    # 160,000 tokens of KV; 0.9 × 160,000 / (1.2 × 12,000) = 10.
    found = live(a_node(), some_lengths(totals=[12_000.0] * 50))
    assert isinstance(found, Fits)
    assert found.requests == pytest.approx(10.0, rel=1e-6)
    assert found.evidence == (
        "95 of 100 requests take 12000 tokens at most (12 MB of KV, n=50), × 1.2; 90% of 160 MB holds 10"
    )


def test_layers_that_forget_are_counted_in_blocks() -> None:
    """12,000 tokens: 47 blocks of 256 that last, and at most 2 × 19 + 259 + 145 of those that do not."""
    limits = replace(a_node().node.limits, block_size=256, total_blocks=5_000, kv_groups=V4.groups)
    found = live(a_node(limits=limits), some_lengths(totals=[12_000.0] * 50))
    assert isinstance(found, Fits) and found.requests == pytest.approx(0.9 * 5_000 / (1.2 * V4.most(12_000)), rel=1e-3)
    assert "blocks of KV, n=50), × 1.2; 90% of 5000 blocks holds 7" in found.evidence


def test_blocks_are_those_that_the_engine_has_now() -> None:
    fewer = replace(a_node().node.limits, total_blocks=5_000)
    after_reblock = a_node(limits=fewer, load=Load(total_blocks=10_000))
    found = live(after_reblock, some_lengths(totals=[12_000.0] * 50))
    assert isinstance(found, Fits) and found.requests == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize(
    ("node", "lengths", "why"),
    [
        (a_node(gauges={KV_BYTES_PER_TOKEN: None}), [100.0] * 50, "KV bytes per token"),
        (a_node(reported_at=NOW - 60), [100.0] * 50, "KV bytes per token"),
        (a_node(limits=Limits(), load=Load()), [100.0] * 50, "size of its KV cache"),
        (a_node(), [100.0] * 19, "fewer than 20 requests have ended"),
    ],
)
def test_a_missing_input_is_said(node: NodeSeen, lengths: list[float], why: str) -> None:
    found = live(node, some_lengths(totals=lengths))
    assert isinstance(found, str) and why in found


def test_a_model_without_history_is_a_missing_input() -> None:
    assert live(a_node(), None) == "fewer than 20 requests have ended"
