"""Which of nodes' claims to hold a high epoch are believed, and that every store that lost something is mended all the same."""

from __future__ import annotations

import pytest

from controlplane.claims import HIGHEST, KEPT, LEAP, Claims
from controlplane.spec import set_fields
from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import FakeNode, a_mesh, a_snapshot
from trimtab.snapshot import Identity


def test_one_node_is_believed_as_far_as_mends_can_have_gone_from_what_is_known() -> None:
    claims = Claims()
    assert claims.believed(7 + LEAP, "w0", 7)
    assert not claims.believed(8 + LEAP, "w0", 7)
    assert claims.believed(LEAP, "w0", 0), "nothing is known of an emptied store"


def test_what_a_second_node_says_too_is_believed_of_both() -> None:
    claims = Claims()
    assert not claims.believed(1 << 40, "w0", 1)
    assert not claims.believed(1 << 40, "w0", 1), "once more by the same is no second"
    assert not claims.believed(1 << 50, "w1", 1)
    assert claims.believed((1 << 40) - 3, "w2", 1)
    assert claims.believed(1 << 40, "w0", (1 << 40) - 2), "as soon as the first of them is known"


def test_nobody_is_believed_above_the_highest_however_many_say_so() -> None:
    claims = Claims()
    assert not any(claims.believed(HIGHEST + 1, name, 1) for name in ("w0", "w1", "w2"))
    assert not claims.believed(HIGHEST + 1, "w3", HIGHEST)


def test_no_more_than_so_many_doubts_are_kept() -> None:
    claims = Claims()
    for i in range(KEPT + 1):
        assert not claims.believed((i + 1) << 40, f"w{i}", 1)
    assert claims.doubts("w0") == 0 and claims.doubts("w1") == 2 << 40


async def test_a_node_alone_moves_the_epoch_by_little() -> None:
    async with a_mesh() as mesh:
        mesh.start_node(FakeNode(mesh.address, "liar", held=Identity(HIGHEST, 1, b"x" * 32)))
        node = mesh.start_node(FakeNode(mesh.address, "w1"))
        await node.holds(1, 1)
        await mesh.until(lambda fleet: "liar" in fleet)
        await mesh.admin.set_policy({"batch.active": "8"}, author="t", reason="as before")
        assert (await mesh.admin.get_policy()).snapshot.identity.epoch == 1
        await node.holds(1, 2)


@pytest.mark.parametrize("epoch", [5000, 1 << 40], ids=["of mends", "beyond any"])
async def test_an_emptied_store_is_mended_above_what_its_nodes_hold(epoch: int) -> None:
    store = MemoryStore()
    async with a_mesh(store) as mesh:
        nodes = [FakeNode(mesh.address, f"w{i}", held=a_snapshot(epoch, 3 + i).identity) for i in range(2)]
        for node in nodes:
            mesh.start_node(node)
        for node in nodes:
            await node.holds(epoch + 1, 1)
        stored = await store.load()
        assert stored is not None and stored.identity.epoch == epoch + 1
        await mesh.plane.replica.write(set_fields({"batch.active": "8"}), list, author="t", reason="")
        for node in nodes:
            await node.holds(epoch + 1, 2)
