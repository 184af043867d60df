"""Who a client is to the mesh, and what he may: workloads, a share of the slots, rates, defaults; pure.

Limits hold for the mesh. Each of its gateways lets through an equal part of them, without asking the others; so a tenant whose requests all come
to one of several has that part alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.messages import Workload

BURST_S = 2.0
"""A rate may be used so many seconds ahead, after as long a rest."""
RESUMED_S = 60.0
"""So many seconds ahead it may be used by those who go on here with what they began at another gateway, perhaps all at once."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """`share` of the mesh's slots that his requests may take. Rates are per second, for the whole mesh; None is unbounded. `deadline_s` and
    `workload` are for requests that name none; what is absent is the gateway's.
    """

    name: str = "default"
    realtime: bool = True
    share: float = 1.0
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    workload: Workload | None = None
    deadline_s: Mapping[Workload, float] = field(default_factory=dict)


DEFAULT = Tenant()
"""Everybody, where nobody is told apart."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A rate's state: what was left at `at_s`."""

    left: float
    at_s: float


def spend(
    bucket: Bucket | None, rate: float, cost: float, now_s: float, *, ahead_s: float = 0.0
) -> tuple[Bucket, float]:
    """The bucket after `cost`, and 0; or the bucket as it is and the seconds until it holds as much. `ahead_s` is how far the rate may be used
    ahead beyond what is left: as a debt.

    What costs more than a full bucket passes when it is full, and leaves a debt: else it would never pass. The rate may be another one than at
    the last call: what is left stays, as far as a bucket of this rate holds it.
    """
    full = max(1.0, rate * BURST_S)
    left = full if bucket is None else min(full, bucket.left + (now_s - bucket.at_s) * rate)
    wanted = min(cost, full) - rate * ahead_s
    if left + 1e-9 < wanted:
        return Bucket(left, now_s), (wanted - left) / rate
    return Bucket(left - cost, now_s), 0.0


def slots_part(share: float, slots: int, gateways: int) -> int:
    """Of the mesh's slots, what a tenant with this share may take by one of so many gateways; 1 at least."""
    return max(1, int(share * slots / gateways))


def queue_part(queue: int, gateways: int) -> int:
    """Of the places for those who wait in gateways, what one of so many has; 1 at least, where there is any."""
    return max(min(1, queue), queue // gateways)
