"""Controllers' moves that were refused: they are left alone for a while, and the same controller's others are written without them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.controllers.decision import Alert, Severity
from controlplane.spec import Key

REFUSED_S = 30.0
"""What was refused is not written again before."""


@dataclass(slots=True)
class Refusals:
    """Belongs to one leader. `now` is in seconds, of one clock."""

    _until: dict[Key, float] = field(default_factory=dict)

    def note(self, keys: Iterable[Key], now: float) -> None:
        self._until = {key: until for key, until in self._until.items() if until > now}
        self._until |= dict.fromkeys(keys, now + REFUSED_S)

    def of(self, name: str, now: float) -> frozenset[Key]:
        """Those of one controller."""
        return frozenset(key for key, until in self._until.items() if key[0] == name and until > now)

    def alerts(self, now: float) -> list[Alert]:
        """One for each controller that has some."""
        names = sorted({key[0] for key, until in self._until.items() if until > now})
        text = "what the {} controller wants is refused; see `trimtab why`"
        return [Alert(f"refused/{name}", Severity.WARNING, text.format(name)) for name in names]
