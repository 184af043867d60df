"""The gateway obeys the policy that its keeper holds, at the next request."""

from __future__ import annotations

from services.control import PolicyKeeper
from services.gateway.control import obey
from trimtab.codec import seal
from trimtab.policy import Policy
from trimtab.snapshot import Document, Identity, Node


def a_keeper(tmp_path) -> PolicyKeeper:
    return PolicyKeeper(Node("g0"), obey, tmp_path / "policy.json")


async def test_a_pushed_bound_is_the_admissions_bound_and_survives_a_restart(tmp_path):
    keeper = a_keeper(tmp_path)
    await keeper.start()
    assert keeper.resolved.policy == Policy()
    snapshot = seal(Document(base={"admission.realtime_queue": 7}), epoch=1, revision=1)
    assert (await keeper.on_push(snapshot, 1000, "")).HasField("applied")
    assert keeper.resolved.policy.admission.realtime_queue == 7
    again = a_keeper(tmp_path)
    await again.start()
    assert (again.held, again.resolved.policy.admission.realtime_queue) == (Identity(1, 1), 7)
