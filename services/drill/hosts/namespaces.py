"""Hosts on one machine: network namespaces of Linux, each with a link to one switch that can be cut and healed.

The drill's own process is the first host. No namespace has a name: each lives as long as the processes in it, so that the kernel takes
everything away with the drill, however it ends, and the machine's own network is never touched. Who is not root gets a user namespace around
all of it, where the machine allows those.

A link that is cut carries nothing and tells nobody: no FIN, no RST, no word from the network. That is what a dead machine, a pulled cable and
a lost route look like from the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.bench.processes import BenchError, Processes
from trimtab.kit.cli import ExitCode

INSIDE = "TRIMTAB_DRILL_OUTSIDE"
"""Set for the process that runs in a namespace of its own: the inode of the one that it came from."""
TOOLS = ("unshare", "nsenter", "ip")
CLONE_NEWNET = 0x4000_0000
READY_S, POLL_S, TOOL_S, ANSWER_S = 30.0, 0.02, 30.0, 10.0
MAX_ANSWER_BYTES = 8 << 20
OWN = "/proc/self/ns/net"


def unshared() -> list[str]:
    """The words before a command that is to run in a network namespace of its own. BenchError where this machine does not let us."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise _refused(f"{', '.join(missing)} is not here: install util-linux and iproute2")
    said = ""
    for user in (), ("--user", "--map-root-user"):
        words = [str(shutil.which("unshare")), *user, "--net"]
        # Whoever may make a namespace and a pair of links in it may do all that follows.
        probe = [*words, "ip", "link", "add", "type", "veth"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=TOOL_S)
        if done.returncode == 0:
            return words
        said = done.stderr.strip() or f"unshare ended with code {done.returncode}"
    raise _refused(said)


def _refused(because: str) -> BenchError:
    return BenchError(
        f"this drill needs network namespaces, of root or of a user namespace (unshare --user --net): {because}",
        ExitCode.USAGE,
    )


def enter(argv: Sequence[str]) -> None:
    """Go on as the first host: the same process runs `argv` after the interpreter, in a namespace of its own. Returns when it already does.

    To be called before there are threads: each keeps the namespace that it began in. BenchError where this machine does not let us.
    """
    here = str(_inode(OWN))
    if os.environ.get(INSIDE, here) != here:
        return
    words = unshared()
    os.environ[INSIDE] = here
    os.execv(words[0], [*words, sys.executable, *argv])


def apart() -> bool:
    """Whether this process runs in a namespace that `enter` made."""
    return os.environ.get(INSIDE, "") not in ("", str(_inode(OWN)))


def join(namespace: str) -> None:
    """Put this thread into the network namespace that this file names. OSError where it may not."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), namespace)
    finally:
        os.close(fd)


@contextlib.contextmanager
def within(namespace: str) -> Iterator[None]:
    """For this thread alone, and for what it makes in the block: sockets stay where they were made. Nothing may be awaited in it."""
    own = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        join(namespace)
        yield
    finally:
        try:
            join(f"/proc/self/fd/{own}")
        finally:
            os.close(own)


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the drill. `port` is the switch's end of its link."""

    name: str
    ip: str
    namespace: str
    port: str

    def inside(self, argv: Sequence[str]) -> list[str]:
        """What follows the interpreter so that `argv` after it runs on this host, as the same process."""
        return ["-m", "services.drill.hosts.inside", self.namespace, *argv]

    async def get(self, port: int, path: str) -> str:
        """A page of a server on this host's loopback, whatever becomes of its link. OSError or TimeoutError where there is none."""
        with within(self.namespace):
            connection = socket.socket()
        connection.setblocking(False)
        async with asyncio.timeout(ANSWER_S):
            try:
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
                reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_ANSWER_BYTES)
            except BaseException:
                connection.close()
                raise
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                answer = await reader.read(-1)
            finally:
                writer.close()
        return answer.decode(errors="replace").partition("\r\n\r\n")[2]


class Network:
    """The hosts by their names; the first is this process's own. Belongs to one event loop, and to a process that has entered."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self._switch = ""

    async def start(self, processes: Processes, names: Sequence[str]) -> None:
        """All links up, and each host reaches every other one. BenchError where a tool fails."""
        if not apart():
            raise BenchError("hosts are made by a process that has entered a network namespace of its own")
        own, *others = names
        self._switch = await _namespace(processes, "switch")
        await _ip(self._switch, "link add hub type bridge", "link set hub up")
        await self._host(own, f"/proc/{os.getpid()}/ns/net", 1)
        for number, name in enumerate(others, 2):
            await self._host(name, await _namespace(processes, f"host-{name}"), number)

    async def _host(self, name: str, namespace: str, number: int) -> None:
        host = Host(name, f"10.77.0.{number}", namespace, f"port-{name}")
        pid = namespace.split("/")[2]
        switch = self._switch.split("/")[2]
        # Made in the switch, where no name is taken, and one end of it handed over.
        await _ip(self._switch, f"link add {host.port} type veth peer name uplink netns {pid}")
        await _ip(namespace, "link set lo up", f"addr add {host.ip}/24 dev uplink", "link set uplink up")
        await _ip(f"/proc/{switch}/ns/net", f"link set {host.port} master hub", f"link set {host.port} up")
        self.hosts[name] = host

    async def cut(self, name: str) -> None:
        """From now on nothing gets from this host to any other one, nor back."""
        await _ip(self._switch, f"link set {self.hosts[name].port} down")

    async def heal(self, name: str) -> None:
        await _ip(self._switch, f"link set {self.hosts[name].port} up")


async def _namespace(processes: Processes, name: str) -> str:
    """A new one, with a process in it that keeps it for as long as the drill lives."""
    keeper = [str(shutil.which("unshare")), "--net", str(shutil.which("sleep")), "infinity"]
    child = await processes.start(name, ["-m", "trimtab_cli.tether", str(os.getpid()), "--", *keeper])
    namespace = f"/proc/{child.process.pid}/ns/net"
    own = _inode(OWN)

    async def made() -> bool:
        with contextlib.suppress(OSError):
            return _inode(namespace) != own
        return False

    await child.ready(made, READY_S)
    return namespace


def _inode(namespace: str) -> int:
    return os.stat(namespace).st_ino  # noqa: PTH116 - a link of /proc, whose target is no path


async def _ip(namespace: str, *lines: str) -> None:
    """Run these lines of `ip` there. BenchError with its words where one fails."""
    process = await asyncio.create_subprocess_exec(
        str(shutil.which("nsenter")), f"--net={namespace}", str(shutil.which("ip")), "-batch", "-",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate("".join(f"{line}\n" for line in lines).encode())
    if process.returncode != 0:
        raise BenchError(f"ip {'; '.join(lines)}: {out.decode(errors='replace').strip()}")
