"""What a leader's controllers held lives on as adjustments; a new leader's take it up from there."""

from __future__ import annotations

from controlplane.controllers.decision import Move
from trimtab.snapshot import Adjustment


def move_of(a: Adjustment) -> Move:
    """The move that was written as this adjustment."""
    return Move(a.field, a.scope, a.reason, a.evidence, a.factor, a.delta, a.state)
