"""Whether what a node says that it holds can have come from a store of this mesh. Pure.

An epoch rises by one each time that a store is mended, so who holds what a store gave is at most as far ahead of it as there were mends that the
store lost: an emptied store, an old copy put back. Whoever is further ahead by far is believed only where a second node says the like; one node,
or one stolen key, moves the epoch by little at a time, and would need 2^42 claims, each with a write, to leave nothing above it. A mesh with a
single node that is so far ahead, which no mend brings about, gets on once
its stored policy (`policy-NODE.json` in its state directory) is deleted and it is started anew.
"""

from __future__ import annotations

LEAP = 1 << 20
"""Mends, more than any mesh lives to see."""
HIGHEST = 1 << 62
"""Who claims more is believed by nobody: little is left above it to write under."""
KEPT = 1000
"""Nodes whose claims are remembered, the newest."""


class Claims:
    """Of the nodes that one replica hears; by node id, those that were not believed."""

    def __init__(self) -> None:
        self._doubted: dict[str, int] = {}

    def believed(self, epoch: int, holder: str, known: int) -> bool:
        """`known` is the epoch that this replica has from the store, 0 for none."""
        self._doubted.pop(holder, None)
        seconded = any(abs(claimed - epoch) <= LEAP for claimed in self._doubted.values())
        if epoch <= HIGHEST and (epoch <= known + LEAP or seconded):
            return True
        self._doubted[holder] = epoch
        while len(self._doubted) > KEPT:
            del self._doubted[next(iter(self._doubted))]
        return False

    def doubts(self, holder: str) -> int:
        """The epoch that this node claimed last and that nobody believed; 0 for none."""
        return self._doubted.get(holder, 0)
