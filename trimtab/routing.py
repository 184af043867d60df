"""Where a request goes; pure. Least loaded among the workers that serve its model and may take work."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from trimtab.errors import ModelNotFound, NoWorker
from trimtab.messages import Load


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a gateway sees it. `in_flight` counts this gateway's own requests there, which its load may not show yet."""

    node_id: str
    model: str
    serving: bool
    load: Load
    in_flight: int


@dataclass(frozen=True, slots=True)
class Pick:
    node_id: str
    why: str


def pick(candidates: Iterable[Candidate], model: str, *, avoid: Collection[str] = (), tie: float = 0.0) -> Pick:
    """The worker for a request of `model`; `tie` in [0, 1) chooses among equals. NoWorker or ModelNotFound when there is none.

    `avoid` holds workers that this request has already tried; they are not tried again.
    """
    known = list(candidates)
    served = [c for c in known if c.model == model]
    if known and not served:
        names = ", ".join(sorted({c.model for c in known}))
        raise ModelNotFound(f"model {model!r} is not served here; served: {names}", metadata={"model": model})
    able = [c for c in served if c.serving and c.node_id not in avoid]
    if not able:
        if not served:
            raise NoWorker("no worker has joined yet", metadata={"model": model})
        states = ", ".join(f"{c.node_id} {'already tried' if c.node_id in avoid else 'not serving'}" for c in served)
        raise NoWorker(f"no worker can take the request now: {states}", metadata={"model": model})
    burden = {c.node_id: max(c.load.running + c.load.waiting, c.in_flight) for c in able}
    least = min(burden.values())
    equals = [c for c in able if burden[c.node_id] == least]
    chosen = equals[int(tie * len(equals))]
    return Pick(chosen.node_id, f"least loaded: {least} requests, {len(equals)} of {len(able)} alike")
