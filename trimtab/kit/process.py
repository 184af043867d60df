"""Processes: dying with the parent, where state lives, and small facts of the host."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import itertools
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

PR_SET_PDEATHSIG = 1
EXIT_RESTART = 75
"""How a process ends that was told to end so that its supervisor starts it anew: EX_TEMPFAIL of sysexits.h. `trimtab up` does so at once;
for systemd's `Restart=on-failure` it is a failure like any other."""


OLD_RARELY = 500
"""Collections of the middle generation between two of the oldest; CPython has 10."""


def die_with_parent(parent_pid: int, sig: signal.Signals) -> None:
    """Have the kernel send `sig` to this process when its parent ends, however it ends. Linux only; elsewhere it does nothing.

    The parent may have ended before the call: then the signal is sent at once. It fires when the *thread* that started this process
    ends, so start children from a thread that lives as long as the process.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), sig)


def end_within(seconds: float, code: int) -> Callable[[], None]:
    """End this process with `code`, and its children's children with it, once the time is over: whatever hangs then, be it the event loop.

    The answer calls it off.
    """

    def end() -> None:
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer.cancel


def state_dir(mesh: str) -> Path:
    """Where a mesh keeps its run.json, traces, cached policy and logs, for this user. TRIMTAB_STATE_DIR overrides the root."""
    root = os.environ.get("TRIMTAB_STATE_DIR") or platformdirs.user_state_dir("trimtab")
    path = Path(root) / mesh
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def spare_collections() -> None:
    """For a process that holds much for long: what start-up made is never looked at again, and the oldest generation rarely.

    With a thousand nodes' windows a full collection takes 85 ms (`trimtab simulate tick`), and finds next to nothing: what goes, goes by
    its last reference.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, OLD_RARELY)


FIRST_PORT, END_PORT = 10_000, 32_000
"""Below what the kernel gives to those who ask for any port."""
PORTS_BLOCK = 1000
PORTS_STRIDE = 10
"""Who finds a port taken tries the next ones; those are not given to anybody soon."""
_ports: list[Iterator[int]] = []
"""This process's own, once it asked."""


def free_port() -> int:
    """A port for a process that is about to be started: nobody listens on it, no other process that asks here gets it while this one lives, and
    the kernel gives it to no outgoing connection. A worker takes half a minute to come to its ports.
    """
    if not _ports:
        _ports.append(_ports_of_its_own())
    return next(_ports[0])


def _ports_of_its_own() -> Iterator[int]:
    directory = Path(tempfile.gettempdir(), f"trimtab-ports-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    for first in range(FIRST_PORT, END_PORT, PORTS_BLOCK):
        with (directory / str(first)).open("a") as lock:  # the kernel lets go of it when this process ends
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            for offset in itertools.cycle(
                [n for start in range(PORTS_STRIDE) for n in range(start, PORTS_BLOCK, PORTS_STRIDE)]
            ):
                if port_is_free(first + offset):
                    yield first + offset
    while True:  # all blocks are taken
        with contextlib.closing(socket.socket()) as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        yield port


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with contextlib.closing(socket.socket()) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
        return True


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace the file's content; a crash leaves the old or the new, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
