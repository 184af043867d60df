"""Who a client is to the mesh, and what he may: workloads, a share of the slots, rates, defaults; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.messages import Workload

BURST_S = 2.0
"""A rate may be used so many seconds ahead, after as long a rest."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """`share` of the mesh's slots that his requests may take. Rates are per second and gateway; None is unbounded. `deadline_s` and `workload`
    are for requests that name none; what is absent is the gateway's.
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


def spend(bucket: Bucket | None, rate: float, cost: float, now_s: float) -> tuple[Bucket, float]:
    """The bucket after `cost`, and 0; or the bucket as it is and the seconds until it holds as much.

    What costs more than a full bucket passes when it is full, and leaves a debt: else it would never pass.
    """
    full = max(1.0, rate * BURST_S)
    left = full if bucket is None else min(full, bucket.left + (now_s - bucket.at_s) * rate)
    wanted = min(cost, full)
    if left + 1e-9 < wanted:
        return Bucket(left, now_s), (wanted - left) / rate
    return Bucket(left - cost, now_s), 0.0
