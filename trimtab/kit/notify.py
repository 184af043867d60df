"""What a process tells the systemd that started it (sd_notify(3), units with Type=notify): that it is ready, that it stops, that it moves.

Without NOTIFY_SOCKET all of it does nothing. A ping says that there was progress, so whoever pings gives a function that knows; a process
that merely answers proves nothing. While it stops, each ping also asks for more time, so that a drain may take as long as the settings or an
operator gave it, and one that is stuck is killed after TimeoutStopSec, or PATIENCE_S after its last ping, whichever is later.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, MutableMapping

import structlog

log = structlog.get_logger(__name__)

PINGS = 3
"""In the time that the watchdog gives: two may be lost, or late."""
PACE_S = 5.0
"""Between two pings at most; also where there is no watchdog, since whoever stops needs them for its time."""
PATIENCE_S = 30.0
"""What a ping of one that stops asks for. Longer than PACE_S and all that a process does once its drain is over."""
SEND_S = 1.0
"""What the service manager gets to take a word that is said once."""


class Notifier:
    """Belongs to one event loop. `address` is a path, or "@" and an abstract name; "" tells nobody anything. `watchdog_s` 0.0 is none."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._stopping = False
        self._held_back = False
        self._deaf = False

    @property
    def pace_s(self) -> float:
        """Between two pings."""
        return min(PACE_S, self._watchdog_s / PINGS) if self._watchdog_s else PACE_S

    def ready(self, status: str) -> None:
        """It serves. From here on the watchdog waits for pings."""
        self._say(SEND_S, "READY=1", f"STATUS={status}", *self._ping())

    def stopping(self, status: str) -> None:
        self._stopping = True
        self._say(SEND_S, "STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(PATIENCE_S * 1e6)}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._say(0.0, f"STATUS={status}")

    async def pings(self, moves: Callable[[], bool] = lambda: True) -> None:
        """For the life of the process: a ping at each turn at which `moves` says so. From the event loop: one that is blocked pings nobody."""
        while self._address:
            await asyncio.sleep(self.pace_s)
            self.ping(moves())

    def ping(self, moves: bool) -> None:
        """Once; nothing where there was no progress."""
        if moves:
            more = ("STATUS=moves again",) if self._held_back else ()
            self._say(0.0, *more, *self._ping())
        elif not self._held_back:
            log.warning("watchdog gets no ping", because="no progress", watchdog_s=self._watchdog_s)
            self._say(0.0, "STATUS=no progress: the watchdog gets no ping")
        self._held_back = not moves

    def _ping(self) -> tuple[str, ...]:
        ping = ("WATCHDOG=1",) if self._watchdog_s else ()
        return (*ping, f"EXTEND_TIMEOUT_USEC={int(PATIENCE_S * 1e6)}") if self._stopping else ping

    def _say(self, timeout_s: float, *lines: str) -> None:
        """A manager that can't be reached is told to the log once, and is no reason to end."""
        if not self._address or not lines:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
                s.settimeout(timeout_s)
                s.sendto("\n".join(lines).encode(), self._address)
            self._deaf = False
        except OSError as e:
            if not self._deaf:
                log.warning("the service manager can't be told", said=lines[0], because=str(e))
            self._deaf = True


def from_environment(env: MutableMapping[str, str] = os.environ, pid: int | None = None) -> Notifier:
    """Takes NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID out of `env`, so that no child speaks for this process."""
    address = env.pop("NOTIFY_SOCKET", "")
    usec, whose = env.pop("WATCHDOG_USEC", ""), env.pop("WATCHDOG_PID", "")
    if not address:
        return Notifier()
    if address[0] not in "/@" or len(address) < 2:
        log.warning(
            "the service manager can't be told", because=f"NOTIFY_SOCKET is {address!r}, no socket of this machine"
        )
        return Notifier()
    mine = whose in ("", str(os.getpid() if pid is None else pid))
    return Notifier(address, int(usec) / 1e6 if mine and usec.isascii() and usec.isdigit() else 0.0)
