"""A cache whose blocks hold different numbers of tokens, as DeepSeek-V4's do: what they are used for can't be told from their number."""

from __future__ import annotations

import os

from services.worker.resident import Resident
from services.worker.standing import Standing
from trimtab import measures
from trimtab.messages import Load
from trimtab.policy import Policy


def test_no_fragmentation_is_told_and_the_share_of_blocks_in_use_is(rig, monkeypatch):
    standing = Standing(rig.engine, rig.gate, rig.health, Policy, Resident(os.getpid()))
    monkeypatch.setattr(rig.engine, "load", lambda: Load(free_blocks=75, total_blocks=100))
    monkeypatch.setattr(rig.engine, "stats", lambda: {"stored_tokens": 40.0})
    assert measures.FRAGMENTATION in standing.gauges(0.0)
    monkeypatch.setattr(rig.engine, "even_blocks", False)
    gauges = standing.gauges(0.0)
    assert (measures.FRAGMENTATION in gauges, gauges[measures.KV_USED]) == (False, 0.25)
