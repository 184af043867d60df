"""Requests that workers died of: kept for a while by what they ask, so that the same one, sent again, kills no third worker."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from trimtab.errors import Quarantined
from trimtab.v1 import inference_pb2

KEPT_S = 600.0
KEPT = 1000
"""At most; the oldest go first."""


class Quarantine:
    """Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: inference_pb2.GenerateRequest, now: float) -> None:
        self._until[_digest(request)] = now + KEPT_S
        while len(self._until) > KEPT:
            self._until.popitem(last=False)

    def check(self, request: inference_pb2.GenerateRequest, now: float) -> None:
        """Raises Quarantined for a request like one that was added."""
        if not self._until:
            return
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        until = self._until.get(_digest(request)) if self._until else None
        if until is not None:
            raise Quarantined(f"workers died of a request like this one; it is taken again in {until - now:.0f} s")


def _digest(request: inference_pb2.GenerateRequest) -> bytes:
    """Of what is asked, not of who asks and when. Nor of how much output: a gateway whose queues are full asks for less."""
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(request)
    for name in ("request_id", "tenant", "session_id", "slo", "resume", "workload"):
        asked.ClearField(name)
    asked.sampling.ClearField("max_tokens")
    if not asked.sampling.ByteSize():
        asked.ClearField("sampling")
    return hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=16).digest()
