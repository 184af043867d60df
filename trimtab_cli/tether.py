"""Runs a command that ends with its parent: `python -m trimtab_cli.tether PARENT_PID [--lock FILE] -- COMMAND…`.

For programs that cannot watch their parent themselves, such as Valkey. The kernel's parent-death signal survives the
exec, and so does the lock: it is held as long as the command lives, so that two servers never share a data directory,
however the first one's supervisor ended.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence

from trimtab.kit.process import die_with_parent

LOCK_WAIT_S = 10.0
"""An earlier holder whose supervisor was killed is ending right now; it is not waited for longer than this."""


def hold(path: str) -> None:
    """Take the lock for the life of this process and of what it execs. OSError when another one keeps it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
    os.set_inheritable(fd, True)


def main(argv: Sequence[str]) -> int:
    split = argv.index("--")
    head, command = argv[:split], argv[split + 1 :]
    die_with_parent(int(head[0]), signal.SIGTERM)
    if "--lock" in head:
        try:
            hold(head[head.index("--lock") + 1])
        except BlockingIOError:
            print(f"another process holds {head[head.index('--lock') + 1]}; stop it first", file=sys.stderr)
            return 4
    return os.execv(command[0], list(command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
