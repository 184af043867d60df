"""Who goes on here with what he began elsewhere: let in, and not for nothing."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from tests.gateway.test_admission import ACall, an_admission
from trimtab.errors import QueueFull
from trimtab.tenant import Tenant


def test_what_a_client_goes_on_with_is_not_capped_and_in_its_own_place_not_paid_for_again():
    admission = an_admission({"admission.degraded_max_tokens": 5}, realtime_use=lambda: 1.0)
    who = Tenant("acme", requests_per_s=1.0, tokens_per_s=1000.0)
    first = ACall(tenant=who, tokens=500, request_id="same")
    admission.enter(first)
    paid = dict(admission._requests), dict(admission._tokens)
    again = ACall(tenant=who, tokens=500, request_id="same")
    again.resumed = True
    admission.enter(again)
    assert again.capped is None
    assert (admission._requests, admission._tokens) == paid


def test_whoever_says_that_he_goes_on_pays_and_gets_no_more_than_his_rate_for_long():
    """Streams of a gateway that died come all at once, and must go on; but anybody can say that his is one."""
    admission = an_admission({"admission.realtime_queue": 100_000})
    who = Tenant("acme", requests_per_s=1.0)

    def resumes(n: int) -> int:
        passed = 0
        for _ in range(n):
            call = ACall(tenant=who, request_id=f"r{next(numbers)}")
            call.resumed = True
            with contextlib.suppress(QueueFull):
                admission.enter(call)
                passed += 1
        return passed

    numbers = itertools.count()
    assert resumes(50) == 50
    assert 55 <= 50 + resumes(1000) <= 70
    with pytest.raises(QueueFull, match="requests_per_s"):
        admission.enter(ACall(tenant=who))
