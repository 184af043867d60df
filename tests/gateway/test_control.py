"""The gateway obeys the policy that its keeper holds, at the next request."""

from __future__ import annotations

from trimtab.codec import seal
from trimtab.policy import Policy
from trimtab.snapshot import Document, Identity, Overlay, Scope, ScopeKind


async def test_a_pushed_bound_is_the_admissions_bound_and_survives_a_restart(start_gateway):
    gateway = await start_gateway()
    assert gateway.policy == Policy()
    snapshot = seal(Document(base={"admission.realtime_queue": 7}), epoch=1, revision=1)
    assert (await gateway.keeper.on_push(snapshot, 1000, "")).HasField("applied")
    assert gateway.policy.admission.realtime_queue == 7
    again = await start_gateway()
    assert (again.keeper.held, again.policy.admission.realtime_queue) == (Identity(1, 1), 7)


async def test_a_pool_that_takes_what_the_mesh_sends_away_is_known_for_it(start_gateway):
    gateway = await start_gateway()
    apart = Overlay("apart", Scope(ScopeKind.POOL, ("giants",)), {"isolate.action": "alone"})
    snapshot = seal(Document(base={"isolate.action": "pool"}, overlays=(apart,)), epoch=1, revision=1)
    assert not gateway._isolates("giants")
    assert (await gateway.keeper.on_push(snapshot, 1000, "")).HasField("applied")
    assert gateway._isolates("giants")
    assert not gateway._isolates("plain")
    assert not gateway._isolates("")
