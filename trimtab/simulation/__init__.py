"""A fleet in virtual time: real schedulers, queues and routing on made-up step costs, with whoever controls it passed in.

By noun: `request` (one, and what became of it), `measuring` (what a node measures), `worker`, `gateway`, `faults`, `mesh` (the order of
events). It says how rules compare, and nothing of milliseconds on a GPU.
"""

from trimtab.simulation.faults import Die, Fail, Fault, Grow, Hang, Leak, Silence, Slow
from trimtab.simulation.mesh import Control, Drain, Fleet, Mesh, Orders, Outcome, Size, realtime, run
from trimtab.simulation.request import Fate, Request
from trimtab.simulation.worker import GpuCosts, SimulatedWorker

__all__ = [
    "Control", "Die", "Drain", "Fail", "Fate", "Fault", "Fleet", "GpuCosts", "Grow", "Hang", "Leak", "Mesh", "Orders", "Outcome", "Request",
    "Silence", "SimulatedWorker", "Size", "Slow", "realtime", "run",
]  # fmt: skip
