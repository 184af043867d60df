"""What runs in the next engine step, and in which order requests wait; pure, and shared by every place that asks.

The worker's queue, the vLLM scheduler, the simulated engine and the simulator call these same functions, so what is simulated is what is
served. Time is an argument everywhere, in milliseconds of one monotonic clock. By noun: `rules` (a policy as plain numbers), `lengths`
(classes of prompts), `item` (a request), `order` (who goes first), `line` (the sorted queue), `waiting` (the lines that a step looks at),
`decodes` (those who decode, in turns), `steptime` (what a step will take), `victims` (who makes room), `plan` and `step` (what the next step
holds), `planner` (the state that lasts from step to step), `counters` (what it says of itself).
"""

from trimtab.scheduling.counters import BY_LENGTH, NOW, STATS
from trimtab.scheduling.item import Item
from trimtab.scheduling.lengths import LengthClass, edges_of
from trimtab.scheduling.order import handover_bound, order_ms, queue_bound
from trimtab.scheduling.plan import Memory, Plan
from trimtab.scheduling.planner import Planner
from trimtab.scheduling.rules import Rules
from trimtab.scheduling.steptime import Shape, StepTimeModel

__all__ = [
    "BY_LENGTH", "NOW", "STATS", "Item", "LengthClass", "Memory", "Plan", "Planner", "Rules", "Shape", "StepTimeModel", "edges_of",
    "handover_bound", "order_ms", "queue_bound",
]  # fmt: skip
