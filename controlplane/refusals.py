"""Controllers' moves that were refused: they are left alone for a while, and the same controller's others are written without them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.controllers.decision import Alert, Severity
from controlplane.spec import Key

REFUSED_S, MOST_S = 30.0, 3600.0
"""What was refused is not written again before; twice as long each time in a row, up to an hour: else many that are refused for good would take
all the attempts there are, and nothing would be left for the others."""


@dataclass(slots=True)
class Refusals:
    """Belongs to one leader. `now` is in seconds, of one clock."""

    _until: dict[Key, float] = field(default_factory=dict)
    _rests_s: dict[Key, float] = field(default_factory=dict)

    def note(self, keys: Iterable[Key], now: float) -> None:
        # Who was not refused for as long again may be another matter by now.
        self._until = {key: until for key, until in self._until.items() if until + self._rests_s[key] > now}
        self._rests_s = {key: self._rests_s[key] for key in self._until}
        for key in keys:
            self._rests_s[key] = min(MOST_S, 2.0 * self._rests_s.get(key, REFUSED_S / 2.0))
            self._until[key] = now + self._rests_s[key]

    def of(self, name: str, now: float) -> frozenset[Key]:
        """Those of one controller."""
        return frozenset(key for key, until in self._until.items() if key[0] == name and until > now)

    def alerts(self, now: float) -> list[Alert]:
        """One for each controller that has some."""
        names = sorted({key[0] for key, until in self._until.items() if until > now})
        text = "what the {} controller wants is refused; see `trimtab why`"
        return [Alert(f"refused-moves/{name}", Severity.WARNING, text.format(name)) for name in names]
