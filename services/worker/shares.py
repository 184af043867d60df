"""What each gateway's link may take of the places that are free for BATCH, so that all links together are promised no more than there are.

A gateway says how many of its requests wait for this worker. Free places go to those who want them, evenly, and first to those who were served
longest ago. What nobody wants is promised too, so that a first request need not ask. A promise is taken back by saying so: until the gateway
has heard it, a round trip, it may still use it, and what is too much then waits in the queue here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from trimtab.credits import divide


class Share:
    """One link's. `wants` is None for a gateway that does not say: it is promised all that is free, and stands beside the others."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        """Has the link say what it may take now."""
        self.wants: int | None = None
        self.promised = 0
        """As it was told, less what it has sent since."""
        self.served = 0
        """Grows with each request of any link."""


class Shares:
    """Belongs to one event loop. `free` says how many places there are; whoever changes that calls `moved`."""

    def __init__(self, free: Callable[[], int]) -> None:
        self._free = free
        self._links: list[Share] = []
        self._turns = itertools.count(1)
        self._known: tuple[int, dict[Share, int]] | None = None

    def join(self, wake: Callable[[], None]) -> Share:
        share = Share(wake)
        self._links.append(share)
        return share

    def leave(self, share: Share) -> None:
        self._links.remove(share)
        self._changed()

    def want(self, share: Share, n: int) -> None:
        """So many wait there."""
        if n != share.wants:
            share.wants = n
            self._changed()

    def started(self, share: Share) -> None:
        """One of its requests is here, and counts no longer as free."""
        share.promised = max(0, share.promised - 1)
        share.served = next(self._turns)
        if share.wants:
            share.wants -= 1
        self._known = None

    def promise(self, share: Share) -> int:
        """How many it may send, as it is told now."""
        free = self._free()
        if share.wants is None:
            return free
        others = sum(other.promised for other in self._links if other is not share and other.wants is not None)
        share.promised = max(0, min(self._parts(free)[share], free - others))
        self.moved()
        return share.promised

    def moved(self) -> None:
        """Places may have become free, or taken: wake those who want one and may have it, and else those who were promised what is theirs."""
        if not any(share.wants for share in self._links):
            return
        free = self._free()
        parts = self._parts(free)
        short = [share for share, part in parts.items() if share.wants and share.promised < part]
        if not short:
            return
        unpromised = free - sum(share.promised for share in parts)
        for share in short:
            if unpromised <= 0:
                break
            unpromised -= parts[share] - share.promised
            share.wake()
        else:
            if unpromised >= 0:
                return
        for share, part in parts.items():
            if share.promised > part:
                share.wake()

    def _changed(self) -> None:
        self._known = None
        self.moved()

    def _parts(self, free: int) -> dict[Share, int]:
        """Of those who say what they want."""
        if self._known is None or self._known[0] != free:
            links = sorted((s for s in self._links if s.wants is not None), key=lambda s: s.served)
            parts = divide(free, [s.wants or 0 for s in links])
            self._known = (free, dict(zip(links, parts, strict=True)))
        return self._known[1]
